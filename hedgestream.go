package grpcretry

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

// A server stream is hedged while its caller waits for the first message, or for
// the header, if all that it sent is in the log. The attempt that is open by then
// is the first of the race; the others are opened and sent the same.

// hedgeable reports whether other attempts may run beside the present one. It
// requires mu.
func (s *clientStream) hedgeable() bool {
	return s.hedged && s.cur != nil && !s.settling && !s.over && s.committed == "" && s.log.closed && len(s.log.entries) > 0
}

// mayRace reports whether they may while the caller waits for the message m. The
// caller holds the role.
func (s *clientStream) mayRace(m any) bool {
	s.mu.Lock()
	may := s.hedgeable()
	s.mu.Unlock()
	c := &s.call
	if !may || c.resume != nil && c.resume.acceptsMessage(m) != nil {
		return false
	}
	if c.canOwn(m) {
		return true
	}
	s.mu.Lock()
	s.hedged = false
	s.mu.Unlock()
	return false
}

// race is receive with other attempts beside the present one. The one that
// decides takes its place, and m is the message that it was sent; where m is nil,
// its header decides. The caller holds the role.
func (s *clientStream) race(m any) (*attempt, error) {
	s.mu.Lock()
	s.racing = true
	s.mu.Unlock()
	s.deciding = true
	r := race{
		call: &s.call,
		begin: func(e *entrant) (context.Context, []grpc.CallOption) {
			e.stream = new(attempt)
			return s.start(e.stream)
		},
		enter: func(ctx context.Context, opts []grpc.CallOption, e *entrant) error {
			if err := s.openBeside(ctx, opts, e); err != nil {
				return err
			}
			err := s.receiveBeside(e, m)
			if e.empty = isEOF(err); e.empty {
				return nil
			}
			return err
		},
		examine: s.examineBeside,
	}
	e := r.run(s.cur.ctx, nil, &entrant{stream: s.cur})
	s.call.ended = time.Time{} // if it delivers, it has not ended
	goesOn := e.err == nil && !e.empty
	if goesOn && m != nil {
		handReply(m, e.reply)
	}
	s.deciding = false
	s.mu.Lock()
	defer s.mu.Unlock()
	s.racing, s.settling = false, !goesOn
	s.cur = nil
	if e.stream.inner != nil {
		s.cur, s.latest = e.stream, e.stream
	}
	s.cond.Broadcast()
	if e.empty {
		return e.stream, io.EOF
	}
	return e.stream, e.err
}

// openBeside gives an attempt that has none yet a stream, and sends on it what
// was sent. It runs on the attempt's own goroutine.
func (s *clientStream) openBeside(ctx context.Context, opts []grpc.CallOption, e *entrant) error {
	a := e.stream
	if a.inner != nil {
		return nil
	}
	inner, err := s.newStream(ctx, opts)
	if err != nil {
		return err
	}
	a.inner, e.opened = inner, true
	for {
		s.mu.Lock()
		if a.next >= len(s.log.entries) {
			a.closed, a.caughtUp = true, true
			s.mu.Unlock()
			_ = inner.CloseSend() // RecvMsg tells of a failure
			return nil
		}
		m := s.log.message(a.next)
		a.next++
		s.mu.Unlock()
		if err := inner.SendMsg(m); err != nil && !isEOF(err) {
			return err
		}
	}
}

// receiveBeside waits for what decides the race: a message of the attempt's own,
// like m, or its header. It runs on the attempt's own goroutine.
func (s *clientStream) receiveBeside(e *entrant, m any) error {
	a, dog := e.stream, watchdog{stream: s}
	if m != nil {
		e.reply, _ = ownReply(m)
		return s.receive(a, e.reply, &dog)
	}
	if md, _ := s.awaitHeader(a); md != nil || s.call.cc == nil {
		return nil
	}
	return a.inner.RecvMsg(new(emptypb.Empty)) // tells of the failure
}

// examineBeside learns what there is to know of an attempt that ended, or that
// is to end because another one won.
func (s *clientStream) examineBeside(e *entrant) {
	a := e.stream
	a.end()
	if e.err == nil && !e.empty {
		if e.reply == nil {
			e.reply = new(emptypb.Empty)
		}
		for a.inner.RecvMsg(e.reply) == nil { // until grpc has ended it
		}
	}
	s.look(a, e.err)
	e.err = s.examine(a, e.err)
}

// raceHeader is race for a caller who waits for the header.
func (s *clientStream) raceHeader() {
	s.enter()
	defer s.leave()
	s.mu.Lock()
	may := s.hedgeable()
	s.mu.Unlock()
	if !may {
		return
	}
	a, err := s.race(nil)
	if err != nil {
		s.settle(a, err)
		return
	}
	s.mu.Lock()
	s.commit(a, causeHeader)
	s.mu.Unlock()
}
