package costs

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// credits keeps the compiler from leaving the calls out.
var credits atomic.Int64

// Least is what each call costs, in nanoseconds, for what a retry cannot do
// without that has a budget which follows the calls in flight and knows how long
// each attempt took: it reads the clock, counts the call in and out, looks at what
// the budget holds, and takes the call's state from a pool. It is the median of
// the rounds.
func Least(rounds int, batch time.Duration) float64 {
	var inflight, tokens atomic.Int64
	pool := sync.Pool{New: func() any { return new([64]uint64) }}
	begun := time.Now()
	tokens.Store(70)
	call := func() (credit int64) {
		state, _ := pool.Get().(*[64]uint64)
		state[0] = uint64(time.Since(begun))
		inflight.Add(1)
		if t := tokens.Load(); t < max(70, 10*inflight.Load()) {
			credit = 1
		}
		inflight.Add(-1)
		*state = [64]uint64{}
		pool.Put(state)
		return credit
	}
	var nanos []float64
	for range rounds {
		calls, credit := 0, int64(0)
		before := ProcessorTime()
		for end := time.Now().Add(batch); time.Now().Before(end); calls += 1000 {
			for range 1000 {
				credit += call()
			}
		}
		nanos = append(nanos, float64(ProcessorTime()-before)/float64(calls))
		credits.Add(credit)
	}
	slices.Sort(nanos)
	return nanos[len(nanos)/2]
}
