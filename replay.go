package grpcretry

import (
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// replayLog is what the caller of a stream sent, as it was when it was sent.
type replayLog struct {
	limit    int // in bytes of encoded messages
	size     int
	messages []proto.Message // clones, never changed
	closed   bool            // the half-close
}

// entry is a message on its way: to the log, if it can be kept.
type entry struct {
	clone  proto.Message
	size   int
	cause  commitCause // why there is no clone
	logged bool
}

// copyOf makes the entry of m, of which room bytes can be kept.
func copyOf(m any, room int) entry {
	switch m := m.(type) {
	case *grpc.PreparedMsg:
		return entry{cause: causePrepared}
	case proto.Message:
		size := proto.Size(m)
		if size > room {
			return entry{cause: causeOverflow}
		}
		return entry{clone: proto.Clone(m), size: size}
	}
	return entry{cause: causeNotProto}
}

func (l *replayLog) add(e *entry) {
	l.messages = append(l.messages, e.clone)
	l.size += e.size
	e.logged = true
}

// free drops what is not needed any more.
func (l *replayLog) free() { l.messages, l.size = nil, 0 }

// restart makes m all that is to be sent.
func (l *replayLog) restart(m proto.Message) {
	l.messages, l.size, l.closed = []proto.Message{m}, proto.Size(m), true
}

// SendMsg implements grpc.ClientStream. It returns nil also where the attempt
// failed and was replaced: the message is in the log and goes out all the same.
func (s *clientStream) SendMsg(m any) error {
	var err error
	if a := s.sends.Load(); a != nil {
		if err = a.inner.SendMsg(m); err != nil && !isEOF(err) {
			s.abort(a, err)
		}
	} else {
		err = s.sendLogged(m)
	}
	if isEOF(err) && !s.desc.ClientStreams {
		return nil // to generated code it would be a failure, but the status is for RecvMsg to tell
	}
	return err
}

// sendLogged is SendMsg as long as the stream can change to another attempt.
func (s *clientStream) sendLogged(m any) error {
	if c := &s.call; c.resume != nil {
		if err := c.resume.acceptsRequest(m); err != nil {
			s.abort(s.current(), err)
			return err
		}
	}
	e := s.entry(m)
	for {
		a, err := s.turn(&e)
		if a == nil {
			return err
		}
		err = a.inner.SendMsg(m)
		if err != nil && !isEOF(err) {
			s.abort(a, err)
			return err
		}
		done, ended := s.sent(a, &e, err == nil)
		if !done && isEOF(err) {
			s.settleUnasked(a)
			done, ended = s.sent(a, &e, false)
		}
		switch {
		case ended:
			return io.EOF
		case done:
			return nil
		}
	}
}

// turn waits until it is clear what becomes of a message. It returns the
// attempt to which the caller is to send it, or none if the message was left to
// the replay or cannot be sent any more.
func (s *clientStream) turn(e *entry) (*attempt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		a := s.cur
		keep := e.clone != nil && !s.log.closed
		switch {
		case s.over:
			return nil, io.EOF
		case !s.settling && a.caughtUp:
			if keep && s.committed == "" {
				s.log.add(e)
			}
			return a, nil
		case !s.settling && a.broken && s.committed != "":
			return nil, io.EOF
		case !s.settling && a.broken:
			s.mu.Unlock()
			s.settleUnasked(a)
			s.mu.Lock()
		case keep:
			s.log.add(e)
			return nil, nil
		default:
			s.cond.Wait()
		}
	}
}

// sent takes note that the caller sent a message to a, or in vain. It reports
// whether the message needs no more care, and whether the stream has ended, so
// that no more can be sent. If neither, it is to be sent to the next attempt.
func (s *clientStream) sent(a *attempt, e *entry, ok bool) (done, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	current := s.cur == a && !s.settling
	switch {
	case s.over, current && !ok && s.committed != "":
		return ok, !ok
	case current && ok:
		if !e.logged {
			s.commit(a, e.cause)
		}
		return true, false
	}
	return e.logged && !current, false
}

// entry makes the log entry of m.
func (s *clientStream) entry(m any) entry {
	s.mu.Lock()
	room := s.log.limit - s.log.size
	s.mu.Unlock()
	return copyOf(m, room)
}

// abort ends the call where a message could not be sent for a reason that lies
// on this side: too large, say, or sent after the half-close.
func (s *clientStream) abort(a *attempt, err error) {
	if a == nil {
		return
	}
	s.mu.Lock()
	mine := s.cur == a && !s.receiving && !s.over
	s.receiving = s.receiving || mine
	s.mu.Unlock()
	if !mine {
		a.cancel() // as grpc itself does; who receives sees to the rest
		return
	}
	defer s.leave()
	s.call.aborted = true
	s.settle(a, err)
}

// current is the present attempt, nil if there is none.
func (s *clientStream) current() *attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur
}

// CloseSend implements grpc.ClientStream.
func (s *clientStream) CloseSend() error {
	a := s.sends.Load()
	if a == nil {
		a = s.closeLog()
	}
	if a == nil {
		return nil
	}
	err := a.inner.CloseSend()
	s.halfClosed(a)
	return err
}

// closeLog notes the half-close, and gives the attempt to which the caller is to
// pass it on; nil if there is none or it has it.
func (s *clientStream) closeLog() *attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.cur
	if s.log.closed {
		return nil
	}
	s.log.closed = true
	if a == nil || s.settling || s.over || !a.caughtUp {
		return nil
	}
	a.closed = true
	return a
}

// replay sends to a, which is new, what was sent before. One goroutine does so
// and owns a's sending side until it has caught up, while the receiver already
// reads from a: a server that answers as it reads would otherwise stop reading
// before everything is sent. It requires mu.
func (s *clientStream) replay(a *attempt) {
	if len(s.log.messages) == 0 && !s.log.closed {
		s.catchUp(a)
		return
	}
	a.replayed = make(chan struct{})
	go func() {
		defer close(a.replayed)
		for m, more := s.nextFor(a); more; m, more = s.nextFor(a) {
			if m == nil {
				_ = a.inner.CloseSend() // RecvMsg tells of a failure
				s.halfClosed(a)
			} else if a.inner.SendMsg(m) != nil {
				s.breakOff(a)
				return
			}
		}
	}()
}

// nextFor is what a is to be sent next, nil for the half-close, until more is
// false and the replay over.
func (s *clientStream) nextFor(a *attempt) (m proto.Message, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.cur != a || s.settling || s.over:
		return nil, false
	case a.next < len(s.log.messages):
		a.next++
		return s.log.messages[a.next-1], true
	case s.log.closed && !a.closed:
		a.closed = true
		return nil, true
	}
	s.catchUp(a)
	return nil, false
}

// catchUp lets the caller send to a by itself. It requires mu.
func (s *clientStream) catchUp(a *attempt) {
	a.caughtUp = true
	if s.committed != "" {
		s.sends.Store(a)
		s.log.free()
	}
	s.cond.Broadcast()
}

// breakOff ends the replay to a, which takes no more. Why, its receiver will see.
func (s *clientStream) breakOff(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.broken = true
	s.cond.Broadcast()
}
