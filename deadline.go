package grpcretry

import (
	"context"
	"time"
)

// moment is a point in time by the monotonic clock alone, which costs half of
// time.Now. A happy call reads it once, and nothing else.
type moment time.Duration

var epoch = time.Now()

func now() moment { return moment(time.Since(epoch)) }

// time is m on the clock that showed t, which comes from time.Now.
func (m moment) time(t time.Time) time.Time { return t.Add(time.Duration(m) - t.Sub(epoch)) }

// earlier is the sooner of two deadlines, of which the zero Time means none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// passed reports whether the deadline, if there is one, has been reached. The
// clock is asked and not a context, because its timer may fire late.
func passed(deadline, now time.Time) bool {
	return !deadline.IsZero() && !now.Before(deadline)
}

// left is what remains until the deadline: 0 when it has passed, -1 if there is none.
func left(deadline, now time.Time) time.Duration {
	if deadline.IsZero() {
		return -1
	}
	return max(0, deadline.Sub(now))
}

// sleep waits for d and reports true, or returns false as soon as ctx is done.
// A context that is done by the end of the wait wins, also over a wait of 0.
func sleep(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil // both at once: no attempt for a caller who has left
	case <-ctx.Done():
		return false
	}
}
