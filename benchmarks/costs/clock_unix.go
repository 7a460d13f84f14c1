//go:build unix

package costs

import (
	"syscall"
	"time"
)

// ProcessorTime is what this process has used of the processors, collecting
// garbage included. Unlike the time on the wall it leaves out what other
// processes take.
func ProcessorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail for the process itself
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
