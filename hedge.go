package grpcretry

import (
	"context"
	"reflect"
	"runtime"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// leastQuantileDelay is the least delay that Hedge.Quantile comes to, unless
// Hedge.Delay says otherwise.
const leastQuantileDelay = time.Millisecond

// race is one round of attempts that overlap. To the loop of the call it is a
// single attempt: the one that decides it, by a success, by a failure after which
// nothing else is to be tried, or by being the last that fails. It runs on the
// goroutine of the call, which alone deals with the call, and each attempt on one
// of its own, which touches nothing but its entrant.
type race struct {
	call    *call
	begin   func(*entrant) (context.Context, []grpc.CallOption)      // sets another attempt up,
	enter   func(context.Context, []grpc.CallOption, *entrant) error // and makes it
	examine func(*entrant)                                           // learns what else there is to know of one that has ended
	begun   time.Time
	delay   time.Duration
	timed   bool // hedges come after the delay

	results chan *entrant
	running []*entrant
	lost    []*entrant // that have ended and are not told of yet
	decider *entrant   // while those are

	timer *time.Timer // until the next hedge, once there was one to wait for
	next  hedgeTime
}

type hedgeTime uint8

const (
	hedgeNever hedgeTime = iota
	hedgeNow
	hedgeLater // when the timer says so
)

// entrant is one attempt of a race.
type entrant struct {
	current
	verdict  decision // once judged
	place    int
	ended    time.Time
	reply    any      // the attempt's own
	stream   *attempt // nil for a unary call
	empty    bool     // it ended well without a message
	err      error
	returned bool // it neither panicked nor ended its goroutine
	panicked any
}

// mayHedge reports whether attempts of the call may overlap. Where the policy
// says so, and something else forbids it, unhedged tells what.
func (c *call) mayHedge() bool {
	if c.disabled {
		return false
	}
	if !c.idempotency.repeatable() {
		c.consultResolver() // it may know better
	}
	switch {
	case !c.policy.hedges():
	case !c.idempotency.repeatable():
		c.unhedged = ReasonNotIdempotent
		c.r.logUnhedged(c, "a method that is not known to be idempotent must not run twice at once")
	case c.inbound:
		c.unhedged = ReasonInboundRetry
	case c.method.dryRun:
		c.unhedged = ReasonDryRun
	default:
		return true
	}
	return false
}

// run makes attempts, the first of which is set up and has begun, until one of
// them decides the race. That one is at hand then, and what follows it is for
// the loop to find out. All of them have returned.
func (r *race) run(ctx context.Context, opts []grpc.CallOption, first *entrant) *entrant {
	c := r.call
	r.results, r.begun = make(chan *entrant), time.Now()
	r.delay, r.timed = c.hedgeDelay()
	c.timed = c.timed || r.timed
	defer r.close()
	r.start(ctx, opts, first)
	for {
		e := r.wait()
		if e == nil {
			r.hedge()
			continue
		}
		r.take(e)
		r.check(e)
		if e.err == nil || len(r.running) == 0 || r.over(e) {
			return r.decided(e)
		}
		r.examine(e)
		c.others = true
		c.judge(e.err)
		c.others = false
		if c.verdict.reason != ReasonHedgeFailed {
			e.current, e.verdict, e.place = c.current, c.verdict, c.place
			return r.decided(e)
		}
		c.tell(c.verdict)
		if c.verdict.last {
			c.unhedged = ReasonPushbackStop
		}
		if c.reauthenticate() {
			r.arm(c.verdict.delay)
		}
	}
}

// start lets the attempt at hand run as e, and sees to the next one.
func (r *race) start(ctx context.Context, opts []grpc.CallOption, e *entrant) {
	e.current = r.call.current
	r.running = append(r.running, e)
	go func() {
		defer func() {
			if !e.returned {
				e.panicked = recover()
			}
			e.ended = time.Now()
			r.results <- e
		}()
		e.err = r.enter(ctx, opts, e)
		e.returned = true
	}()
	r.next = hedgeNever
	if r.timed {
		r.arm(r.delay)
	}
}

// arm puts the next hedge off for d.
func (r *race) arm(d time.Duration) {
	switch {
	case d <= 0:
		r.next = hedgeNow
		return
	case r.timer == nil:
		r.timer = time.NewTimer(d)
	default:
		r.timer.Reset(d)
	}
	r.next = hedgeLater
}

// over reports whether the call's time was up when e ended, so that the others
// end too, or have an answer already.
func (r *race) over(e *entrant) bool {
	return r.call.ctx.Err() != nil || passed(r.deadline(), e.ended)
}

func (r *race) deadline() time.Time { return earlier(r.call.parent, r.call.due) }

// wait gives the next attempt that ended, or nil when a hedge is due.
func (r *race) wait() *entrant {
	var due <-chan time.Time
	switch r.next {
	case hedgeNow:
		return nil
	case hedgeLater:
		due = r.timer.C
	}
	select {
	case e := <-r.results:
		return r.left(e)
	case <-due:
		select {
		case e := <-r.results: // in the nick of time
			return r.left(e)
		default:
			return nil
		}
	}
}

// left takes e from those that run.
func (r *race) left(e *entrant) *entrant {
	i := slices.Index(r.running, e)
	r.running = slices.Delete(r.running, i, i+1)
	return e
}

// hedge makes another attempt, which is due, unless something forbids it: those
// that run go on all the same.
func (r *race) hedge() {
	c := r.call
	r.next = hedgeNever
	switch {
	case !c.policy.hedges(): // not any more: the ClientConn's service config says so
		return
	case c.counted >= c.policy.most() || c.ctx.Err() != nil || passed(r.deadline(), time.Now()):
		return
	case c.unhedged != ReasonNone:
		return
	}
	c.wanted = true
	grant, ok := c.budget.Reserve(CostHedge)
	if !ok {
		c.unhedged = ReasonBudgetExhausted
		c.r.metrics.rejected(c.ctx, c.method)
		return
	}
	c.hedges++
	c.current = current{grant: grant, granted: grantReserved}
	e := new(entrant)
	ctx, opts := r.begin(e)
	c.hedge = true
	r.start(ctx, opts, e)
}

// take makes e the attempt at hand.
func (r *race) take(e *entrant) {
	c := r.call
	c.current, c.verdict, c.place, c.ended = e.current, e.verdict, e.place, e.ended
}

// check lets a panic of something further in go on where the call was made.
func (r *race) check(e *entrant) {
	switch {
	case e.returned:
	case e.panicked != nil:
		panic(e.panicked)
	default: // as a test does that fails in an interceptor
		runtime.Goexit()
	}
}

// decided ends the race, in which e takes the place of all.
func (r *race) decided(e *entrant) *entrant {
	c := r.call
	r.decider = e
	r.lost = append(r.lost, r.cancel()...)
	if e.err != nil && !e.judged { // the time is up, but perhaps there is an answer
		if i := slices.IndexFunc(r.lost, func(o *entrant) bool { return o.returned && o.err == nil }); i >= 0 {
			e, r.lost[i] = r.lost[i], e
			r.decider = e
		}
	}
	var told Attempt
	if e.judged {
		told = *c.last()
	}
	r.measure(e)
	for len(r.lost) > 0 {
		other := r.lost[0]
		r.check(other)
		r.lost = r.lost[1:]
		r.measure(other)
		r.lose(other)
	}
	r.decider = nil
	r.take(e)
	if e.judged {
		*c.last() = told // it gave way if the list is full
	}
	return e
}

// cancel ends all attempts that run, and gives them when they have.
func (r *race) cancel() []*entrant {
	for _, e := range r.running {
		e.cancel()
	}
	var ended []*entrant
	for len(r.running) > 0 {
		ended = append(ended, r.left(<-r.results))
	}
	return ended
}

// lose tells of an attempt that did not decide.
func (r *race) lose(e *entrant) {
	c := r.call
	r.take(e)
	r.examine(e)
	c.stopTimer()
	c.settle(false)
	c.turnAway()
	c.facts(e.err)
	c.tell(decision{reason: ReasonHedgeLost})
}

// close leaves nothing behind where something panicked: what did goes on to
// the caller, and those that ran beside it have been cancelled by then.
func (r *race) close() {
	if r.timer != nil {
		r.timer.Stop()
	}
	r.lost = append(r.lost, r.cancel()...)
	if r.decider != nil {
		r.lost = append(r.lost, r.decider)
	}
	if len(r.lost) == 0 {
		return
	}
	c := r.call
	at, place := c.current, c.place
	defer func() { c.current, c.place = at, place }()
	for _, e := range r.lost {
		r.take(e)
		c.stopTimer()
		c.settle(false)
		if e.current = c.current; e.number == at.number {
			at = e.current
		}
	}
	c.consulted = true
	for _, e := range r.lost { // whatever is called here might panic once more
		r.take(e)
		c.turnAway()
		if !c.judged {
			c.facts(e.err)
		}
		c.last().Reason = ReasonHedgeLost
		c.pending = true
		c.emit(false)
	}
}

// hedgeDelay is how long after an attempt the next one starts; false: never for
// the time alone.
func (c *call) hedgeDelay() (time.Duration, bool) {
	h := &c.policy.Hedge
	switch {
	case !c.policy.hedges():
		return 0, false
	case h.Quantile == 0:
		return h.Delay, true
	}
	known := c.method.latencies()
	if known == nil {
		return 0, false
	}
	d, ok := known.quantile(h.Quantile)
	least := h.Delay
	if least == 0 {
		least = leastQuantileDelay
	}
	return max(d, least), ok
}

// latencies are what the method remembers of its calls; nil if there is no room
// for it.
func (m *method) latencies() *latencies {
	if !m.kept {
		return nil
	}
	if known := m.memory.latency.Load(); known != nil {
		return known
	}
	m.memory.latency.CompareAndSwap(nil, new(latencies))
	return m.memory.latency.Load()
}

// measure takes in how long the first attempt took, if e is it. One that lost, or
// that its own timeout ended, took longer than is known, which is near enough for
// a quantile that was exceeded. How long the hedges took is left out, because it
// is the shorter half only.
func (r *race) measure(e *entrant) {
	c := r.call
	q := c.policy.Hedge.Quantile
	if q == 0 || e.number != 1 {
		return
	}
	timedOut := e.err != nil && statusOf(e.err).Code() == codes.DeadlineExceeded && passed(e.cutoff, e.ended)
	if known := c.method.latencies(); known != nil && (r.decider.err == nil || timedOut) {
		known.add(e.ended.Sub(r.begun), q)
	}
}

// hedged makes the attempts of a unary call overlap, if each can have a reply of
// its own.
func (c *call) hedged(reply any, invoke func(ctx context.Context, reply any, opts []grpc.CallOption) error) func(context.Context, []grpc.CallOption) error {
	blank := blankOf(reply)
	return func(ctx context.Context, opts []grpc.CallOption) error {
		switch {
		case !c.hedging:
			reset(reply, blank)
			return invoke(ctx, reply, opts)
		case c.made == 1 && !c.canOwn(reply):
			return invoke(ctx, reply, opts)
		}
		r := race{
			call:  c,
			begin: func(*entrant) (context.Context, []grpc.CallOption) { return c.start() },
			enter: func(ctx context.Context, opts []grpc.CallOption, e *entrant) error {
				e.reply, _ = ownReply(reply)
				return invoke(ctx, e.reply, opts)
			},
			examine: func(*entrant) {}, // grpc has told all
		}
		e := r.run(ctx, opts, new(entrant))
		if e.err == nil {
			handReply(reply, e.reply)
		}
		return e.err
	}
}

// canOwn reports whether each attempt can have a reply of its own. If not, they
// do not overlap.
func (c *call) canOwn(reply any) bool {
	_, ok := ownReply(reply)
	if c.hedging = c.hedging && ok; !ok {
		c.r.logUnhedged(c, "no other reply like the caller's can be made, because it is none of protobuf's and holds pointers")
	}
	return ok
}

// ownReply makes a reply for one attempt, like the caller's; false: that cannot be.
func ownReply(reply any) (own any, ok bool) {
	v := reflect.ValueOf(reply)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return nil, false
	}
	if m, isProto := reply.(proto.Message); isProto && whole(m) {
		return proto.Clone(m), true
	}
	if shares(v.Elem()) {
		return nil, false
	}
	made := reflect.New(v.Type().Elem())
	made.Elem().Set(v.Elem())
	return made.Interface(), true
}

// shares reports whether a copy of v would share something with it.
func shares(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Array:
		for i := range v.Len() {
			if shares(v.Index(i)) {
				return true
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if shares(v.Field(i)) {
				return true
			}
		}
	case reflect.Chan, reflect.Func, reflect.Interface, reflect.Map, reflect.Pointer, reflect.Slice, reflect.UnsafePointer:
		return !v.IsNil()
	}
	return false
}

// handReply gives the caller the winner's reply.
func handReply(reply, own any) {
	if m, isProto := reply.(proto.Message); isProto && whole(m) {
		proto.Reset(m)
		winner, _ := own.(proto.Message) // of the same type
		proto.Merge(m, winner)
		return
	}
	reflect.ValueOf(reply).Elem().Set(reflect.ValueOf(own).Elem())
}
