//go:build !unix

package costs

import "time"

// ProcessorTime is the time on the wall, where there is no better clock.
func ProcessorTime() time.Duration { return time.Since(started) }

var started = time.Now()
