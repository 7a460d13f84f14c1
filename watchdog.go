package grpcretry

import (
	"fmt"
	"time"

	"google.golang.org/grpc/metadata"
)

// The timeouts of a stream's attempt are no deadline of its context, which
// would end a stream that delivers. They count while the caller waits, and what
// had arrived when one of them ends the attempt is delivered all the same.

// receive reads a message from a, within the timeouts, over which dog watches.
func (s *clientStream) receive(a *attempt, m any, dog *watchdog) error {
	if c := &s.call; c.resume != nil {
		if err := c.resume.acceptsMessage(m); err != nil {
			c.aborted = true
			return err
		}
	}
	if s.half > 0 {
		s.await(a)
		defer s.awaited(a)
	}
	if s.first > 0 && !a.answered {
		dog.guard(a, s.first, "FirstResponseTimeout")
		_, _ = a.inner.Header() // RecvMsg tells of a failure
		dog.rest()
		a.answered = true
	}
	if s.idle > 0 {
		dog.guard(a, s.idle, "IdleTimeout")
		defer dog.rest()
	}
	return s.receiveOn(a, m)
}

// awaitHeader waits for a's header, within the timeouts.
func (s *clientStream) awaitHeader(a *attempt) (metadata.MD, error) {
	if s.half > 0 {
		s.await(a)
		defer s.awaited(a)
	}
	dog := &watchdog{stream: s}
	switch {
	case s.first > 0:
		dog.guard(a, s.first, "FirstResponseTimeout")
		defer dog.rest()
	case s.idle > 0:
		dog.guard(a, s.idle, "IdleTimeout")
		defer dog.rest()
	}
	return a.inner.Header()
}

// halfClosed starts the timeout of a's response, which begins with the half-close.
func (s *clientStream) halfClosed(a *attempt) {
	if s.half == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.limit == nil && s.cur == a && !s.settling && !s.over {
		a.limit = time.AfterFunc(s.half, func() { s.expire(a) })
	}
}

// stopLimit ends what halfClosed began. It requires mu.
func (a *attempt) stopLimit() {
	if a.limit != nil {
		a.limit.Stop()
	}
}

// expire ends a, whose response took too long, but only before the eyes of its
// caller, who will then see to what follows.
func (s *clientStream) expire(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.expired = true
	if a.waiting > 0 {
		a.timeOut("no response within %v of the half-close (AttemptTimeout)", s.half)
	}
}

// await and awaited bracket the time in which the caller waits for a.
func (s *clientStream) await(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.waiting++
	if a.expired {
		a.timeOut("no response within %v of the half-close (AttemptTimeout)", s.half)
	}
}

func (s *clientStream) awaited(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.waiting--
}

// timeOut ends the attempt. What had arrived by then is delivered all the same.
// It requires mu.
func (a *attempt) timeOut(format string, after time.Duration) {
	if a.timedOut == "" {
		a.timedOut = fmt.Sprintf(format, after)
		a.cancel()
	}
}

// watchdog ends an attempt whose caller waits too long. The zero value, with
// its stream set, is at rest. One goroutine at a time uses it.
type watchdog struct {
	stream *clientStream
	timer  *time.Timer

	// The stream's mu guards these.
	over  *attempt // nil: at rest
	until moment
	after time.Duration
	what  string
}

// guard watches over a from now on, and rest ends that.
func (w *watchdog) guard(a *attempt, after time.Duration, what string) {
	w.stream.mu.Lock()
	w.over, w.until, w.after, w.what = a, now()+moment(after), after, what
	w.stream.mu.Unlock()
	if w.timer == nil {
		w.timer = time.AfterFunc(after, w.bark)
	} else {
		w.timer.Reset(after)
	}
}

func (w *watchdog) rest() {
	w.timer.Stop()
	w.stream.mu.Lock()
	w.over = nil
	w.stream.mu.Unlock()
}

func (w *watchdog) bark() {
	w.stream.mu.Lock()
	defer w.stream.mu.Unlock()
	if w.over != nil && now() >= w.until { // else it is late, and the timer runs for another wait
		w.over.timeOut("nothing received within %v ("+w.what+")", w.after)
	}
}
