package grpcretry

import (
	"io"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// replayLog is what the caller of a stream sent, as it was when it was sent. It
// holds messages encoded, because that takes a fraction of the time of a copy,
// and as much memory as its limit says. Nothing of it is used without the
// stream's mu, so that it can be freed at any time.
type replayLog struct {
	limit   int // in bytes of encoded messages
	size    int
	entries []logEntry
	closed  bool // the half-close

	room   []byte // the rest of the latest chunk
	pooled []*logChunk
}

// logEntry is one message.
type logEntry struct {
	kind  protoreflect.MessageType
	data  []byte
	clone proto.Message // in place of both where a message cannot be encoded
}

// Logs grow by chunks, from small ones of their own to those of the pool.
type logChunk [32 << 10]byte

const firstLogChunk = 512

var logChunks = sync.Pool{New: func() any { return new(logChunk) }}

// Neither missing required fields nor the order of map entries matter here.
var logEncoding = proto.MarshalOptions{AllowPartial: true, UseCachedSize: true}

// add keeps m, of which the size is known.
func (l *replayLog) add(m proto.Message, size int) {
	if cap(l.room)-len(l.room) < size {
		l.grow(size)
	}
	entry := logEntry{kind: m.ProtoReflect().Type()}
	if all, err := logEncoding.MarshalAppend(l.room, m); err == nil {
		entry.data, l.room = all[len(l.room):], all
	} else { // perhaps the codec of the call can do what protobuf's cannot
		entry.clone = proto.Clone(m)
	}
	l.entries = append(l.entries, entry)
	l.size += size
}

// grow makes room for size bytes.
func (l *replayLog) grow(size int) {
	next := max(size, firstLogChunk, 2*l.size)
	if size <= len(logChunk{}) && next >= len(logChunk{}) {
		c, _ := logChunks.Get().(*logChunk)
		l.pooled = append(l.pooled, c)
		l.room = c[:0]
		return
	}
	l.room = make([]byte, 0, next)
}

// message is the nth message, which belongs to who asked for it.
func (l *replayLog) message(n int) proto.Message {
	e := l.entries[n]
	if e.clone != nil {
		return proto.Clone(e.clone)
	}
	m := e.kind.New().Interface()
	// It was encoded here a while ago, so it can be decoded.
	_ = proto.UnmarshalOptions{AllowPartial: true}.Unmarshal(e.data, m)
	return m
}

// free drops what is not needed any more.
func (l *replayLog) free() {
	for _, c := range l.pooled {
		logChunks.Put(c)
	}
	l.entries, l.size, l.room, l.pooled = nil, 0, nil, nil
}

// restart makes m all that is to be sent.
func (l *replayLog) restart(m proto.Message) {
	l.free()
	l.add(m, proto.Size(m))
	l.closed = true
}

// parcel is a message on its way.
type parcel struct {
	message proto.Message // nil if it cannot be kept,
	cause   commitCause   // for this reason
	size    int
	logged  bool
}

// wrapUp finds out whether m can be kept.
func wrapUp(m any) parcel {
	switch m := m.(type) {
	case *grpc.PreparedMsg:
		return parcel{cause: causePrepared}
	case proto.Message:
		if whole(m) {
			return parcel{message: m, cause: causeOverflow, size: proto.Size(m)}
		}
	}
	return parcel{cause: causeNotProto}
}

// whole reports whether m is all that its reflection knows. A struct that embeds
// a message passes for one, but a copy would be of the message alone.
func whole(m proto.Message) bool { return m.ProtoReflect().Interface() == m }

// most is how many messages the log holds, because empty ones take memory too: as
// many as fill it with 32 bytes each, but no less than 1024.
func (l *replayLog) most() int { return max(1024, l.limit/32) }

// keep adds p to the log if it can be, unless it is not needed any more.
func (l *replayLog) keep(p *parcel) bool {
	if p.message == nil || l.closed || p.size > l.limit-l.size || len(l.entries) >= l.most() {
		return false
	}
	l.add(p.message, p.size)
	p.logged = true
	return true
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
	p := wrapUp(m)
	for {
		a, err := s.turn(&p)
		if a == nil {
			return err
		}
		err = s.send(a, m)
		if err != nil && !isEOF(err) {
			s.abort(a, err)
			return err
		}
		done, ended := s.sent(a, &p, err == nil)
		if !done && isEOF(err) {
			s.settleUnasked(a)
			done, ended = s.sent(a, &p, false)
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
func (s *clientStream) turn(p *parcel) (*attempt, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		a := s.cur
		switch {
		case s.over:
			return nil, io.EOF
		case !s.settling && a.caughtUp:
			if s.committed == "" {
				s.log.keep(p)
			}
			a.sending = true
			return a, nil
		case !s.settling && a.broken && s.committed != "":
			return nil, io.EOF
		case !s.settling && a.broken:
			s.mu.Unlock()
			s.settleUnasked(a)
			s.mu.Lock()
		case s.log.keep(p):
			return nil, nil
		default:
			s.cond.Wait()
		}
	}
}

// send sends m to a. Who settles a waits for it, to know whether a ended by a
// fault on this side.
func (s *clientStream) send(a *attempt, m any) (err error) {
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		a.sending, a.aborted = false, err != nil && !isEOF(err)
		s.cond.Broadcast()
	}()
	return a.inner.SendMsg(m)
}

// sent takes note that the caller sent a message to a, or in vain. It reports
// whether the message needs no more care, and whether the stream has ended, so
// that no more can be sent. If neither, it is to be sent to the next attempt.
func (s *clientStream) sent(a *attempt, p *parcel, ok bool) (done, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	current := s.cur == a && !s.settling
	switch {
	case s.over, current && !ok && s.committed != "":
		return ok, !ok
	case current && ok:
		if !p.logged {
			s.commit(a, p.cause)
		}
		return true, false
	}
	return p.logged && !current, false
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
	if len(s.log.entries) == 0 && !s.log.closed {
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
	case a.next < len(s.log.entries):
		a.next++
		return s.log.message(a.next - 1), true
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
