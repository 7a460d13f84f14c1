package grpcretry

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// commitCause says what tied a stream to its attempt; empty while nothing did.
// It is what traces print.
type commitCause string

const (
	causeHeader   commitCause = "header"           // the caller was given the header
	causeMessage  commitCause = "message"          // the caller was given a message
	causeEarly    commitCause = "early_answer"     // the server answered and ended while the caller was sending
	causeOverflow commitCause = "replay_bytes"     // the caller sent more than Policy.ReplayBytes
	causePrepared commitCause = "prepared_message" // the caller sent a grpc.PreparedMsg, which belongs to its attempt
	causeNotProto commitCause = "not_proto"        // a message is none of protobuf's, so that it cannot be copied
)

// unreplayable tells the causes that lie in the messages.
func (c commitCause) unreplayable() bool {
	return c == causeOverflow || c == causePrepared || c == causeNotProto
}

// clientStream is a stream that can change to another attempt as long as its
// caller was given nothing of the answer. Then it is committed, and SendMsg and
// RecvMsg go straight to the stream of its attempt.
//
// There is one role: whoever holds it receives, owns call, and decides what
// follows a failed attempt. RecvMsg takes it; so do SendMsg and Header where
// they find the attempt ended and nobody receives. mu is held for a few
// instructions only, never while something of grpc or the caller's runs.
type clientStream struct {
	// The attempt to which the stream sends and from which it receives, once
	// that can be no other; nil before.
	sends, receives atomic.Pointer[attempt]

	desc       *grpc.StreamDesc
	streamer   grpc.Streamer
	fullMethod string

	// These belong to the role.
	call     call
	deciding bool     // at work on call; a panic leaves it so
	dog      watchdog // over RecvMsg

	first, idle, half time.Duration // the policy's timeouts, those that apply; fixed once there is a stream

	mu        sync.Mutex
	cond      sync.Cond // broadcast at every change that somebody may wait for
	cur       *attempt  // nil while there is none with a stream
	latest    *attempt  // that had one
	settling  bool      // cur has ended or is nil, and it is being decided what follows
	hedged    bool      // other attempts may run beside cur until it is committed,
	racing    bool      // and do; any of them may take its place
	receiving bool      // somebody holds the role
	headers   int       // callers in Header, who wait without the role
	committed commitCause
	resumable bool        // though committed, it may go on with another attempt
	header    metadata.MD // that of the attempt which committed a resumable stream
	log       replayLog
	unwatch   func() bool     // ends the watch over a caller who may leave without a word of grpc's
	ctx       context.Context // the caller's view of it while the attempt may change, once asked for,
	endCtx    context.CancelFunc
	deserted  bool  // the call ended though nobody had asked for its status
	over      bool  // the call has ended,
	final     error // with this; io.EOF is success
}

// attempt is one attempt of a stream.
type attempt struct {
	inner    grpc.ClientStream
	ctx      context.Context
	cancel   context.CancelFunc
	answered bool          // its header came, or it ended; belongs to the role
	received bool          // a message of it; belongs to who receives
	replayed chan struct{} // closed when the replay is over; nil if there is none

	// The stream's mu guards these.
	next     int         // messages of the log that were handed to inner,
	closed   bool        // and whether the half-close was
	caughtUp bool        // all of it was, so that the caller sends by itself
	broken   bool        // the replay came to its end before that
	given    bool        // the caller was given something of it,
	progress bool        // a message
	gone     bool        // grpc ended it though nobody was waiting for that,
	err      error       // with this
	timedOut string      // the timeout by which we ended it
	sending  bool        // the caller is in its SendMsg,
	aborted  bool        // which failed for a reason that lies on this side
	waiting  int         // callers in RecvMsg and Header, counted if half applies
	limit    *time.Timer // half, from the half-close
	expired  bool        // limit ran out while nobody waited
}

// StreamClientInterceptor returns the interceptor for streams of every kind. A
// stream is retried, with all that was sent on it, until its caller is given
// something of the answer: the header or a message, or the response of a
// client-streaming call. Whoever installs it without [Retrier.DialOptions]
// should give grpc.WithDisableRetry too.
func (r *Retrier) StreamClientInterceptor() grpc.StreamClientInterceptor { return r.stream }

func (r *Retrier) stream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, fullMethod string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	s := &clientStream{desc: desc, streamer: streamer, fullMethod: fullMethod, receiving: true, settling: true}
	s.cond.L = &s.mu
	s.dog.stream = s
	s.call.r, s.call.stream = r, s
	c, err := s.call.begin(ctx, fullMethod, cc, opts)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return streamer(ctx, desc, cc, fullMethod, opts...)
	}
	defer s.leave()
	if !s.open() {
		return nil, s.final
	}
	if cc == nil && ctx.Done() != nil { // no grpc, no OnFinish: only the context tells that the caller has left
		s.mu.Lock()
		s.unwatch = context.AfterFunc(c.ctx, s.desert)
		s.mu.Unlock()
	}
	return s, nil
}

// open makes attempts until one has a stream. It reports false if none came of
// it and the call is over. The caller holds the role.
func (s *clientStream) open() bool {
	c := &s.call
	s.deciding = true
	for {
		a := new(attempt)
		ctx, opts := s.start(a)
		inner, err := s.newStream(ctx, opts)
		if err == nil {
			a.inner = inner
			s.install(a)
			return true
		}
		if !c.again(err) {
			s.conclude(err)
			return false
		}
	}
}

// newStream makes a stream.
func (s *clientStream) newStream(ctx context.Context, opts []grpc.CallOption) (grpc.ClientStream, error) {
	inner, err := s.streamer(ctx, s.desc, s.call.cc, s.fullMethod, opts...)
	if err == nil && inner == nil {
		err = status.Error(codes.Internal, "grpcretry: an interceptor further in gave neither a stream nor an error")
	}
	return inner, err
}

// start is the call's, with an OnFinish that belongs to a.
func (s *clientStream) start(a *attempt) (context.Context, []grpc.CallOption) {
	c := &s.call
	p := newProbe()
	p.option.OnFinish = func(err error) {
		p.finish(err)
		s.finished(a, err)
	}
	c.own = newDestinations(p)
	ctx, opts := c.start()
	a.ctx, a.cancel = ctx, c.cancel
	return ctx, opts
}

// install makes a, which has just been opened, the stream's attempt.
func (s *clientStream) install(a *attempt) {
	c := &s.call
	c.opened = true
	c.consultResolver() // by now the ClientConn has its service config
	s.deciding = false
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.log.limit == 0 {
		s.configure()
	}
	s.cur, s.latest, s.settling = a, a, false
	s.cond.Broadcast()
	if !c.repeatable() {
		a.caughtUp = true // it was sent, so nothing will replace it, and nothing need be kept
		s.sends.Store(a)
		return
	}
	s.replay(a)
}

// configure takes from the policy what applies to a stream of this kind.
func (s *clientStream) configure() {
	p := s.call.policy
	s.first, s.idle, s.log.limit = p.FirstResponseTimeout, p.IdleTimeout, p.ReplayBytes
	if s.desc.ClientStreams && !s.desc.ServerStreams {
		s.half = p.AttemptTimeout
	}
	s.resumable, s.hedged = s.call.resume != nil, s.call.hedging
}

// commit ties the stream to a, its present attempt. It requires mu.
func (s *clientStream) commit(a *attempt, cause commitCause) {
	a.given = a.given || !cause.unreplayable()
	if s.committed == "" {
		s.committed = cause
		s.resumable = s.resumable && !cause.unreplayable() && s.call.resume.keep(&s.log)
	}
	if !s.resumable && s.idle == 0 && s.half == 0 && (s.first == 0 || a.given) { // else every RecvMsg takes the role
		s.receives.Store(a)
	}
	if a.caughtUp {
		s.sends.Store(a)
		s.log.free()
	}
	s.cond.Broadcast()
}

// RecvMsg implements grpc.ClientStream.
func (s *clientStream) RecvMsg(m any) error {
	if a := s.receives.Load(); a != nil {
		err := s.receiveOn(a, m)
		if err == nil && s.desc.ServerStreams {
			return nil
		}
		return s.ended(a, err)
	}
	s.enter()
	defer s.leave()
	if s.over {
		return s.afterwards(m)
	}
	blank := blankOf(m)
	for {
		a := s.cur // which only the holder of the role changes
		var err error
		if s.mayRace(m) {
			a, err = s.race(m)
		} else {
			err = s.receive(a, m, &s.dog)
		}
		if err == nil && s.desc.ServerStreams {
			s.deliver(a, m)
			return nil
		}
		if !s.settle(a, err) {
			return s.result(err)
		}
		reset(m, blank)
	}
}

// receiveOn is RecvMsg of a's stream. Where a server refuses a stream, and the
// one with which grpc repeats it while grpc still sends, grpc takes the io.EOF of
// that SendMsg for the end of the messages. Asked once more it gives the status.
func (s *clientStream) receiveOn(a *attempt, m any) error {
	err := a.inner.RecvMsg(m)
	if isEOF(err) && s.desc.ClientStreams && !a.received && s.call.cc != nil {
		err = a.inner.RecvMsg(m)
	}
	a.received = a.received || err == nil
	return err
}

// deliver notes that the caller is given m.
func (s *clientStream) deliver(a *attempt, m any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a.progress = true
	s.commit(a, causeMessage)
	if s.resumable && !s.call.resume.delivered(m) {
		s.committed, s.resumable = causeNotProto, false
	}
}

// ended sees to the end of a stream that could have no other attempt any more.
func (s *clientStream) ended(a *attempt, err error) error {
	s.enter()
	defer s.leave()
	if !s.over {
		s.settle(a, err)
	}
	return s.result(err)
}

// afterwards is RecvMsg where the call has ended. Where nobody had asked for
// its status, there may be messages before that.
func (s *clientStream) afterwards(m any) error {
	if !s.deserted {
		return s.final
	}
	return s.result(s.receiveOn(s.cur, m))
}

// result is what the caller is told when its attempt said err and the call is
// over: an answer that arrived is not replaced by a later cancel.
func (s *clientStream) result(err error) error {
	switch {
	case err == nil, isEOF(err):
		return err
	case s.deserted && statusOf(err).Code() != statusOf(s.final).Code():
		return err
	}
	return s.final
}

// Header implements grpc.ClientStream. It waits without the role, so that it
// may be called beside RecvMsg.
func (s *clientStream) Header() (metadata.MD, error) {
	for {
		s.mu.Lock()
		for (s.settling || s.racing) && s.header == nil {
			s.cond.Wait()
		}
		a, known, over := s.cur, s.header, s.over
		if known != nil || over {
			s.mu.Unlock()
			if known != nil || a == nil {
				return known, nil
			}
			return a.inner.Header()
		}
		if s.hedgeable() && !s.receiving {
			s.mu.Unlock()
			s.raceHeader()
			continue
		}
		s.headers++
		s.mu.Unlock()

		md, err := s.awaitHeader(a)

		s.mu.Lock()
		s.headers--
		for s.racing { // which may have begun in the meantime, and end with another attempt
			s.cond.Wait()
		}
		mine := s.cur == a && !s.settling
		if mine && !s.over && md != nil {
			s.commit(a, causeHeader)
		}
		tied := s.committed != ""
		s.mu.Unlock()
		s.desert()
		switch {
		case md != nil && mine:
			return md, err
		case md == nil && !tied:
			s.settleUnasked(a)
		case md == nil && !s.endHeaderless(a):
			return nil, err
		}
	}
}

// endHeaderless sees to the end of a committed stream that Header found without
// a header: grpc has ended it then, and its caller may never ask for more. It
// reports whether another attempt took its place, which may have ended too.
func (s *clientStream) endHeaderless(a *attempt) bool {
	s.enter()
	defer s.leave()
	p := s.call.dest.probe
	if s.over || s.cur != a || !p.ended() {
		return s.cur != a
	}
	err := io.EOF
	if failure := p.failure.Load(); failure != nil {
		err = *failure
	}
	return s.settle(a, err)
}

// Trailer implements grpc.ClientStream.
func (s *clientStream) Trailer() metadata.MD {
	if a := s.tied(); a != nil {
		return a.inner.Trailer()
	}
	return nil
}

// tied is the attempt from which the caller has something, or on which the call
// ended; nil if there is none.
func (s *clientStream) tied() *attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.committed == "" && !s.over {
		return nil
	}
	return s.cur
}

// Context implements grpc.ClientStream. While another attempt may replace the
// present one it is the call's, with what the attempt's knows beyond that.
func (s *clientStream) Context() context.Context {
	s.mu.Lock()
	a := s.cur
	if a != nil && (s.over || !s.resumable && (s.committed != "" || s.sends.Load() == a)) {
		s.mu.Unlock()
		return a.inner.Context()
	}
	defer s.mu.Unlock()
	if s.ctx == nil {
		s.ctx, s.endCtx = context.WithCancel(s.call.ctx)
		if s.over {
			s.endCtx()
		}
	}
	return callContext{s.ctx, s}
}

// callContext is the context of a stream whose attempt may change. It ends with
// the stream, as grpc's own does, and not with an attempt. grpc finds in it what
// it needs for [grpc.PreparedMsg.Encode].
type callContext struct {
	context.Context // descends from the call's
	stream          *clientStream
}

func (c callContext) Value(key any) any {
	if v := c.Context.Value(key); v != nil {
		return v
	}
	c.stream.mu.Lock()
	a := c.stream.latest
	c.stream.mu.Unlock()
	return a.inner.Context().Value(key)
}

// enter takes the role, leave gives it back.
func (s *clientStream) enter() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.receiving {
		s.cond.Wait()
	}
	s.receiving = true
}

func (s *clientStream) leave() {
	defer s.release()
	if s.deciding { // a callback of the caller's panicked
		defer s.close(status.Error(codes.Internal, "grpcretry: the call panicked"))
		s.call.close()
	}
}

func (s *clientStream) release() {
	s.mu.Lock()
	s.receiving = false
	s.cond.Broadcast()
	s.mu.Unlock()
	s.desert()
}

// settleUnasked sees to the end of a where it showed in SendMsg or Header: it
// waits for who holds the role to do so, or takes the role. It returns when a
// was replaced, the stream is committed or the call is over.
func (s *clientStream) settleUnasked(a *attempt) {
	s.mu.Lock()
	for s.receiving && s.cur == a && s.committed == "" && !s.over {
		s.cond.Wait()
	}
	mine := s.cur == a && s.committed == "" && !s.over
	s.receiving = s.receiving || mine
	s.mu.Unlock()
	if !mine {
		return
	}
	defer s.leave()
	var err error
	// Without grpc a missing header says nothing, and what is received here is lost.
	if md, _ := a.inner.Header(); md == nil && s.call.cc != nil {
		err = s.receiveOn(a, new(emptypb.Empty))
	}
	if err == nil { // there is an answer, whose messages only the caller can read
		s.mu.Lock()
		s.commit(a, causeEarly)
		s.mu.Unlock()
		return
	}
	s.settle(a, err)
}

// settle sees to the end of a with err, decides what follows, and reports
// whether another attempt took its place; if not, the call is over. The caller
// holds the role.
func (s *clientStream) settle(a *attempt, err error) bool {
	s.mu.Lock()
	s.settling = true
	s.mu.Unlock()
	s.deciding = true
	a.end()
	s.mu.Lock()
	for a.sending { // grpc ends the attempt, and with it RecvMsg, before SendMsg tells of its fault
		s.cond.Wait()
	}
	s.call.aborted = s.call.aborted || a.aborted
	s.mu.Unlock()
	s.look(a, err)
	return s.decide(a, err)
}

// end ends the attempt, and returns when nobody sends to it any more.
func (a *attempt) end() {
	a.cancel()
	if a.replayed != nil {
		<-a.replayed
	}
}

// look learns from a's stream, which has ended with err, what grpc did not write
// to the attempt's destinations, or not yet.
func (s *clientStream) look(a *attempt, err error) {
	c := &s.call
	if c.aborted || a.inner == nil {
		return // it may not have ended; it has no stream
	}
	if !c.dest.probe.ended() {
		c.dest = newDestinations(newProbe())
		c.dest.probe.finish(nil) // nobody else has it
		c.dest.trailer = a.inner.Trailer()
		if p, ok := peer.FromContext(a.inner.Context()); ok {
			c.dest.peer = *p
		}
	}
	if c.dest.header == nil && (c.header || err != nil && !isEOF(err)) {
		c.dest.header, _ = a.inner.Header()
	}
}

// decide is settle, once there is nothing more to learn from a.
func (s *clientStream) decide(a *attempt, err error) bool {
	c := &s.call
	err = s.examine(a, err)
	if !c.again(err) {
		s.conclude(err)
		return false
	}
	s.mu.Lock()
	s.cur = nil
	if c.resumable && c.committed != "" {
		if s.header == nil {
			s.header = c.dest.header
		}
		s.log.restart(c.resume.following)
	}
	s.mu.Unlock()
	return s.open()
}

// examine tells the call what it cannot know of a, and gives the error with
// which a is to be taken to have ended.
func (s *clientStream) examine(a *attempt, err error) error {
	c := &s.call
	if isEOF(err) {
		err = nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.timedOut != "" && c.ctx.Err() == nil && err != nil && statusOf(err).Code() == codes.Canceled {
		err, c.timedOut = status.Error(codes.DeadlineExceeded, "grpcretry: attempt timed out: "+a.timedOut), true
	}
	a.stopLimit()
	c.committed, c.answered = s.committed, a.given
	c.resumable = s.resumable || c.resume != nil && !c.repeatable() // the ladder has a better word than committed
	if a.progress {
		c.progress()
	}
	return err
}

// conclude ends the call with err, the last attempt's; nil is success.
func (s *clientStream) conclude(err error) {
	final := s.call.finish(err)
	if final == nil {
		final = io.EOF
	}
	s.call.close()
	s.close(final)
}

// close lets everybody know that the call is over.
func (s *clientStream) close(final error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deciding = false
	s.over, s.settling, s.racing, s.final = true, false, false, final
	s.log.free()
	if s.cur != nil {
		s.cur.stopLimit()
	}
	if s.unwatch != nil {
		s.unwatch()
	}
	if s.endCtx != nil {
		s.endCtx()
	}
	s.cond.Broadcast()
}

// finished is the OnFinish of a. Where grpc ended the attempt within a call of
// ours, that sees to it when it returns; here it is the caller's context or
// ClientConn that ended, perhaps with nobody left to notice.
func (s *clientStream) finished(a *attempt, err error) {
	if cc := s.call.cc; a.ctx.Err() == nil && (cc == nil || cc.GetState() != connectivity.Shutdown) {
		return
	}
	s.mu.Lock()
	a.gone, a.err = true, err
	s.mu.Unlock()
	s.desert()
}

// desert ends the call where its attempt is gone and nobody is there to notice.
// It runs on whatever goroutine left last, so it waits for nothing.
func (s *clientStream) desert() {
	s.mu.Lock()
	a := s.cur
	if end := s.call.ctx.Err(); s.call.cc == nil && end != nil && a != nil && !a.gone {
		a.gone, a.err = true, status.FromContextError(end).Err()
	}
	if a == nil || !a.gone || s.over || s.receiving || s.headers > 0 {
		s.mu.Unlock()
		return
	}
	if a.timedOut != "" && s.call.ctx.Err() == nil {
		// The timeout met the message that it was waiting for. The caller may come
		// for the next one, or leave.
		if s.unwatch == nil {
			s.unwatch = context.AfterFunc(s.call.ctx, s.desert)
		}
		s.mu.Unlock()
		return
	}
	s.receiving, s.settling, s.deserted = true, true, true
	s.mu.Unlock()
	s.deciding = true
	defer s.leave()
	a.cancel()
	if c := &s.call; !c.dest.probe.ended() {
		c.dest = newDestinations(newProbe())
	}
	s.decide(a, a.err)
}

// fromServer reports whether the call is a server stream.
func (s *clientStream) fromServer() bool {
	return s != nil && s.desc.ServerStreams && !s.desc.ClientStreams
}

// isEOF reports whether a stream ended well, or takes no more. gRPC gives the
// bare io.EOF, and code everywhere compares with that: one that is wrapped is
// some other error.
func isEOF(err error) bool {
	return err == io.EOF //nolint:errorlint // see above
}
