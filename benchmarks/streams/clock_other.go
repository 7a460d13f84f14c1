//go:build !unix

package streams

import "time"

// processorTime is the time on the wall, where there is no better clock.
func processorTime() time.Duration { return time.Since(started) }

var started = time.Now()
