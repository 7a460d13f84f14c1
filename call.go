package grpcretry

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

const (
	attemptsHeader = "grpc-previous-rpc-attempts" // gRFC A6, "Exposed Retry Metadata"
	keyHeader      = "idempotency-key"
)

// call is the state of one call, from the moment it is made until its result
// goes out. It belongs to the caller's goroutine; only what is in its
// destinations is written by grpc.
//
// Life of an attempt: start -> the attempt runs -> end, which decides -> wait,
// or finish.
type call struct {
	callState
	aftermath

	// What follows serves one call after the other, or has a meaning only where
	// something above says so.
	r      *Retrier
	set    *policySet // in which method was found
	asked  string     // the name by which it was found
	method *method
	own    *destinations // of the latest attempt, if nobody can be writing to it any more
	inline [3]Attempt    // MaxAttempts is 3 by default
	ended  time.Time     // of a hedged call: when the attempt at hand ended; zero: now
}

// callState is what a call must not leave to the next one.
type callState struct {
	ctx         context.Context // the caller's
	base        context.Context // ctx, with the idempotency key if one is sent
	cc          *grpc.ClientConn
	target      *target
	budget      scope
	policy      *Policy
	source      Source
	idempotency Idempotency
	idemSource  Source
	work        bool  // Do's, not an RPC
	inside      *nest // of work: what its attempt's calls are noted in, if anybody wants to know
	outside     *nest // the attempt of some work in which this call was made, once sought
	sought      bool
	disabled    bool
	inbound     bool // below an inbound retry
	consulted   bool // the ClientConn's service config was asked
	observed    bool // somebody wants to know about every attempt
	copies      bool // the caller passed destinations or OnFinish
	reports     bool // the caller passed a Report
	header      bool // the caller wants the header
	waitReady   bool
	request     any
	opts        []grpc.CallOption // the caller's, never written to
	trace       callTrace

	started moment
	due     time.Time // the end of the call's own Timeout
	parent  time.Time // the deadline of the caller's context

	current     // the attempt at hand
	made    int // attempts begun
	counted int // of these, such as count against MaxAttempts

	stream    *clientStream // nil for a unary call; what follows is for streams only
	resume    *resumption
	committed commitCause
	resumable bool // though committed, it may go on with another attempt

	code codes.Code // of the result
	done bool

	hedging  bool   // attempts may overlap; what follows is for hedged calls only
	others   bool   // run beside that at hand
	hedges   int    // made
	timed    bool   // they had their time,
	wanted   bool   // and that of one came
	unhedged Reason // why there is no hedge, or no further one
}

// aftermath is what a call knows once it has looked into the result of an
// attempt. One that succeeds at once, and that nobody watches, leaves it alone.
type aftermath struct {
	attempts []Attempt // in the order of their ends, at most maxAttemptsKept
	dropped  int
	place    int // of the attempt at hand
	verdict  decision

	retries  int           // since the last pushback, for the backoff
	previous time.Duration // the last backoff
	waited   time.Duration // between attempts, in all
	reauthed int           // attempts begun by the time credentials were to run again for UNAUTHENTICATED
	balance  float64       // the budget's, at the last decision
	cut      error         // the context's error that ended a wait
}

// current is what belongs to one attempt. The attempts of a hedged call, which
// overlap, take turns in being the one at hand.
type current struct {
	number int
	hedge  bool // it overlaps an earlier one
	begun  moment
	cutoff time.Time // the end of the attempt's own timeout, if that comes before the call's deadline
	cancel context.CancelFunc
	dest   *destinations

	grant   permit // by which it is made, or, once it has ended, the next one
	granted grantState

	opened   bool // it has a stream, so that it was sent; this and what follows is for streams only
	answered bool // the caller was given something of it
	timedOut bool // a timer of ours ended it
	aborted  bool // a fault on this side ended it; another would meet it too

	succeeded bool
	judged    bool // it is decided what follows: see verdict
	pending   bool // its event is not yet emitted
}

// grantState says what still has to be done with a call's grant.
type grantState uint8

const (
	grantNone     grantState = iota
	grantReserved            // waiting: Release if nothing comes of it
	grantStarted             // its attempt runs: Settle
)

// run is the loop: attempt after attempt, until the ladder says that this one's
// result is the call's.
func (c *call) run(attempt func(context.Context, []grpc.CallOption) error) error {
	defer c.close()
	for {
		err := attempt(c.start())
		if !c.again(err) {
			return c.finish(err)
		}
	}
}

// again ends the attempt with err, and reports whether another is to start now,
// its wait being over.
func (c *call) again(err error) bool { return c.end(err) && c.wait() }

// start begins the next attempt and gives what to call it with. Its context
// descends from the caller's, never from that of an earlier attempt.
func (c *call) start() (context.Context, []grpc.CallOption) {
	c.made++
	c.counted++
	ctx := c.base
	if c.made == 1 {
		c.begun = c.started
	} else {
		c.current = current{begun: now(), dest: c.dest, grant: c.grant, granted: c.granted}
		if !c.work {
			ctx = withPreviousAttempts(ctx, c.made-1)
		}
	}
	c.number = c.made
	c.arrange()
	if c.granted == grantReserved {
		c.granted = grantStarted
	}
	if c.policy.AttemptTimeout > 0 || !c.due.IsZero() || c.stream != nil || c.hedging {
		ctx = c.limit(ctx)
	}
	if !c.work {
		return ctx, c.options()
	}
	if c.observed {
		c.inside = &nest{name: c.method.rpc, attempt: c.number}
		ctx = context.WithValue(ctx, nestKey{}, c.inside)
	}
	return ctx, nil
}

// limit puts the sooner of the attempt's and the call's own timeout on the
// attempt's context, unless the caller's deadline comes before both. A stream
// outlives its attempt's timeout, and its context ends with it; so does that of
// an attempt that another may overtake.
func (c *call) limit(ctx context.Context) context.Context {
	c.parent, _ = c.ctx.Deadline()
	end := c.due
	c.cutoff = time.Time{}
	if t := c.policy.AttemptTimeout; t > 0 && c.stream == nil {
		if own := c.begun.time(time.Now()).Add(t); own.Equal(earlier(own, earlier(c.due, c.parent))) {
			c.cutoff, end = own, own
		}
	}
	if !end.IsZero() && end.Equal(earlier(end, c.parent)) {
		ctx, c.cancel = context.WithDeadline(ctx, end)
	} else if c.stream != nil || c.hedging {
		ctx, c.cancel = context.WithCancel(ctx)
	}
	return ctx
}

// end takes the result of the attempt, decides what follows, and reports
// whether another attempt may, for which it is to wait.
func (c *call) end(err error) bool {
	if !c.judged && !c.judge(err) {
		return false
	}
	c.tell(c.verdict)
	return c.verdict.retry
}

// judge decides what follows the attempt. It reports false if that is nothing
// and nobody wants to hear of it.
func (c *call) judge(err error) bool {
	c.stopTimer()
	c.settle(err == nil)
	c.succeeded, c.judged = err == nil, true
	if err == nil {
		c.checkOptions()
		if c.number == 1 {
			c.record(OutcomeOK)
		} else {
			c.record(OutcomeExtraOK)
		}
		if c.timed && !c.wanted {
			c.record(OutcomeHedgeUnneeded)
		}
		if !c.observed && (c.made == 1 || c.within() == nil) {
			c.r.metrics.attempt(c.ctx, c.method, codes.OK, ReasonSuccess)
			return false
		}
	}
	if err != nil {
		c.turnAway()
	}
	f := c.facts(err)
	d := decide(&f, c.retryIf, c.backoff)
	if d.failure {
		c.record(OutcomeFailure)
	}
	if d.retry {
		if grant, ok := c.budget.Reserve(d.cost); ok {
			c.grant, c.granted = grant, grantReserved
			c.advance(&f, d)
		} else {
			d = decision{reason: ReasonBudgetExhausted}
			c.r.metrics.rejected(c.ctx, c.method)
		}
	}
	if c.trace.recording {
		c.balance = c.budget.Balance()
	}
	c.verdict = d
	return true
}

// record tells the budget of an outcome. What happens below an inbound retry
// says nothing about how much load the servers can bear.
func (c *call) record(o Outcome) {
	if !c.inbound {
		c.budget.Record(o)
	}
}

// stopTimer releases the attempt's context.
func (c *call) stopTimer() {
	if c.cancel != nil {
		c.cancel()
		c.cancel = nil
	}
}

// settle ends the grant by which the attempt was made.
func (c *call) settle(won bool) {
	if c.granted == grantStarted {
		c.budget.Settle(c.grant, won)
	}
	c.granted = grantNone
}

// facts collects what the ladder looks at, and fills in the record of the attempt.
func (c *call) facts(err error) facts {
	wall := c.ended
	if !c.hedging || wall.IsZero() {
		wall = time.Now()
	}
	d := c.dest
	c.parent, _ = c.ctx.Deadline()
	f := facts{
		parentDone: c.ctx.Err() != nil || passed(c.parent, wall),
		dryRun:     c.method.dryRun,
		reauthed:   c.reauthed > 0 && c.number > c.reauthed,
	}
	if late := passed(c.cutoff, wall) || c.timedOut; c.work {
		f.outcome = classifyWork(err, late, c.policy.Codes)
	} else {
		peer := d.sawPeer() || c.opened
		seen := sighting{peer: peer, options: !peer && d.probe.proves(err), header: len(d.header) > 0 || c.answered, trailer: d.trailer}
		f.outcome = classify(err, seen, late)
		f.permanent = c.aborted
	}
	f.committed = c.committed != ""
	if f.committed && c.resumable {
		f.resume = c.resume.ask
	}
	if err != nil {
		c.consultResolver()
		if c.cc != nil {
			state := c.cc.GetState()
			f.closed, f.ready = state == connectivity.Shutdown, state == connectivity.Ready
		}
	}
	if c.waitReady && f.evidence == Unsent {
		c.counted--
	}
	deadline := earlier(c.parent, c.due)
	f.policy, f.idempotency, f.attempts = c.policy, c.idempotency, c.counted
	f.disabled, f.inbound = c.disabled || c.policy.MaxAttempts == 1, c.inbound
	f.hedging, f.others, f.stopped = c.hedging && c.policy.hedges() && !f.committed, c.others, c.unhedged == ReasonPushbackStop
	f.timeUp = passed(c.due, wall)
	f.hasDeadline, f.remaining = !deadline.IsZero(), left(deadline, wall)
	start := c.begun.time(wall)
	a := c.keep()
	*a = Attempt{
		Method: c.method.name, Target: c.target.name, Number: c.number, Hedge: c.hedge,
		Start: start, Duration: wall.Sub(start),
		Err: f.err, Code: f.code, Evidence: f.evidence, Peer: d.seenPeer().Addr,
		Remaining: f.remaining,
	}
	if err != nil {
		a.Trailer = d.trailer
	}
	if c.inside != nil {
		a.Inner = c.inside.end()
	}
	return f
}

// repeatable reports whether an attempt that was sent could be followed by
// another. If not, the ladder will say why.
func (c *call) repeatable() bool {
	return c.idempotency.repeatable() && !c.disabled && c.policy.MaxAttempts != 1 && !c.inbound && !c.method.dryRun
}

// progress begins the count of attempts anew, because the one at hand, of a
// resumable stream, delivered something.
func (c *call) progress() {
	c.counted, c.retries, c.previous, c.reauthed = 1, 0, 0, 0
}

// keep makes room for the attempt in the list, whose last entry gives way once
// the list is full.
func (c *call) keep() *Attempt {
	if len(c.attempts) == maxAttemptsKept {
		c.dropped++
	} else {
		if c.attempts == nil {
			c.attempts = c.inline[:0]
		}
		c.attempts = append(c.attempts, Attempt{})
	}
	c.place = len(c.attempts) - 1
	return c.last()
}

// last is what is known of the attempt at hand, which has ended.
func (c *call) last() *Attempt { return &c.attempts[c.place] }

func (c *call) retryIf() Verdict {
	if c.policy.RetryIf == nil {
		return VerdictDefault
	}
	return c.policy.RetryIf(*c.last())
}

func (c *call) backoff() time.Duration {
	c.previous = c.policy.Backoff.next(c.retries+1, c.previous, c.last(), rand.Float64)
	return c.previous
}

// advance notes what the next decision has to know about this retry.
func (c *call) advance(f *facts, d decision) {
	c.retries++
	if d.source == DelayPushback {
		c.retries, c.previous = 0, 0 // gRFC A6: the backoff begins anew
	}
	c.reauthenticate()
}

// reauthenticate notes that credentials run again because of the attempt at hand.
// It reports false if that is so already because of another one, beside which it
// ran.
func (c *call) reauthenticate() bool {
	if c.last().Code != codes.Unauthenticated {
		return true
	}
	if c.reauthed > 0 && c.number <= c.reauthed {
		return false
	}
	c.reauthed = c.made
	return true
}

// tell lets everybody who wants to know hear of the decision. The span event of
// an attempt that another is to follow waits until it does, because only then
// is it true.
func (c *call) tell(d decision) {
	a := c.last()
	a.Reason, a.Delay, a.DelaySource = d.reason, d.delay, d.source
	if d.reason == ReasonHedgeFailed && !d.last { // the next hedge's, which may never be made
		a.Delay, a.DelaySource = 0, DelayBackoff
	}
	c.pending = true
	if !d.retry {
		c.emit(!d.reason.goesOn())
	}
	if d.reason == ReasonNotIdempotent {
		c.method.memory.refused.Add(1)
		c.r.logDeclined(c, a)
	}
	for _, h := range c.r.hooks {
		if h.AttemptEnd != nil {
			h.AttemptEnd(c.ctx, *a)
		}
	}
	if !d.retry {
		return
	}
	c.r.logRetry(c, a)
	for _, h := range c.r.hooks {
		if h.RetryScheduled != nil {
			h.RetryScheduled(c.ctx, *a)
		}
	}
}

// emit counts the last attempt and leaves its span event, once.
func (c *call) emit(last bool) {
	if !c.pending {
		return
	}
	c.pending = false
	a := c.last()
	c.r.metrics.attempt(c.ctx, c.method, a.Code, a.Reason)
	if c.trace.recording {
		c.trace.attempt(c, a, last)
	}
}

// wait lets the decided delay pass, and reports false if the caller's context
// ended it: then the grant goes back and the call is over.
func (c *call) wait() bool {
	a := c.last()
	if sleep(c.ctx, a.Delay) {
		c.waited += a.Delay
		c.emit(false)
		return true
	}
	c.release()
	c.cut = c.ctx.Err()
	a.Reason, a.Delay, a.DelaySource = ReasonParentDone, 0, DelayBackoff
	c.emit(true)
	return false
}

func (c *call) release() {
	if c.granted == grantReserved {
		c.budget.Release(c.grant)
		c.granted = grantNone
	}
}

// finish gives the call's result, err being that of the last attempt, and
// tells it to the caller's destinations and to everybody else who asked.
func (c *call) finish(err error) error {
	if err != nil {
		if c.work {
			err = unmarked(err)
		}
		reason := c.last().Reason
		if c.made > 1 || c.cut != nil || reason.givesUp() {
			e := newError(c.result(), err, c.cut)
			if c.cut != nil {
				e.cause = context.Cause(c.ctx)
			}
			err = e
		}
		if reason.givesUp() || reason == ReasonParentDone && (c.made > 1 || c.cut != nil) {
			c.r.logGivenUp(c, err)
			c.r.metrics.gaveUp(c.ctx, c.method, reason)
		}
		c.tellInbound(err)
	}
	if c.made > 1 {
		c.r.metrics.call(c.ctx, c.method, c.made-1-c.hedges, c.hedges, c.waited)
	}
	if (err != nil || c.made > 1) && c.within() != nil {
		c.outside.note(c.result())
	}
	if err != nil {
		c.code = statusOf(err).Code()
	}
	c.done = true
	c.handOver(err)
	for _, h := range c.r.hooks {
		if h.CallEnd != nil {
			h.CallEnd(c.ctx, c.result(), c.request, err)
		}
	}
	return err
}

// result is the call as its Report tells it.
func (c *call) result() Report {
	r := Report{Method: c.method.name, Target: c.target.name}
	if len(c.attempts) > 0 {
		r.Attempts, r.Dropped, r.Reason = slices.Clone(c.attempts), c.dropped, c.last().Reason
	}
	if c.hedges > 0 {
		slices.SortFunc(r.Attempts, func(a, b Attempt) int { return a.Number - b.Number })
	}
	return r
}

// close runs at every end of a call, also by a panic, and leaves nothing behind.
func (c *call) close() {
	c.stopTimer()
	c.release()
	c.settle(false)
	c.budget.Leave()
	if !c.done { // a callback of the user's panicked
		c.emit(true)
		if c.dest != nil {
			c.turnAway()
			c.handOver(status.Error(codes.Internal, "grpcretry: the call panicked"))
		}
		c.endTrace(codes.Internal, true)
		return
	}
	c.endTrace(c.code, false)
	c.recycle()
}

// recycle puts the call back for another one, without anything of this one.
// The destinations go with it only after a success that grpc itself ended, once:
// an attempt that failed, or whose caller went away, may still be writing to them.
func (c *call) recycle() {
	if c.stream != nil {
		return // its caller and grpc may ask for it at any time
	}
	if d := c.dest; d != nil && c.succeeded && !c.hedging && (c.cc == nil || d.probe.endedOnce()) && c.ctx.Err() == nil {
		d.peer, d.header, d.trailer = peer.Peer{Addr: unwritten}, nil, nil
		if d.probe != nil {
			d.probe.renew()
		}
		if d.form == optionsVary {
			clear(d.inline[:])
			d.opts = nil
		}
		c.own = d
	}
	if c.attempts != nil {
		clear(c.inline[:min(len(c.attempts), len(c.inline))])
		c.aftermath = aftermath{}
	}
	c.callState = callState{}
	c.r.calls.Put(c)
}
