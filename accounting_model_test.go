package grpcretry

import (
	"context"
	"fmt"
	"math"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"pgregory.net/rapid"
)

// In the model everything happens at a time of its own, so that there is one
// right answer: caller n acts at n ms past a multiple of a tick, the cancel of
// its calls half a millisecond later, reloads and checks in the tick's last
// millisecond.
const tick = 64 * time.Millisecond

// plan is what will happen to one call.
type plan struct {
	pause    time.Duration // before it
	method   string
	max      int      // attempts
	outcomes []string // of each attempt, see history.invoke
	lasts    []time.Duration
	waits    []time.Duration // after each attempt
	cancel   time.Duration   // after its start; 0: never
	panicIn  string          // a callback
	panicAt  int             // the attempt

	// what the model knows of it while it runs
	attempt int
	open    bool // a grant
	started bool // whose attempt runs
	cost    Cost
	paid    [2]float64 // by the target's bucket and the method's
}

func drawPlan(t *rapid.T) *plan {
	ticks := func(least, most int, label string) time.Duration {
		return time.Duration(rapid.IntRange(least, most).Draw(t, label)) * tick
	}
	p := &plan{
		pause:  rapid.SampledFrom([]time.Duration{0, tick, 20 * time.Second / tick * tick}).Draw(t, "pause"),
		method: rapid.SampledFrom([]string{"/pkg.S/Search", "/pkg.S/Other"}).Draw(t, "method"),
		max:    rapid.IntRange(1, 4).Draw(t, "attempts"),
	}
	for range p.max {
		p.outcomes = append(p.outcomes, rapid.SampledFrom([]string{
			"ok", "ok", "transient", "transient", "transient", "hang", "invited", "stop", "fatal", "panic",
		}).Draw(t, "outcome"))
		p.lasts = append(p.lasts, ticks(1, 20, "lasts"))
		p.waits = append(p.waits, ticks(0, 40, "waits"))
	}
	if rapid.IntRange(0, 3).Draw(t, "cancelled") == 0 {
		p.cancel = ticks(1, 60, "cancel") + time.Millisecond/2
	}
	if rapid.IntRange(0, 4).Draw(t, "panics") == 0 {
		p.panicIn = rapid.SampledFrom([]string{"RetryIf", "Func", "AttemptEnd", "RetryScheduled", "CallEnd"}).Draw(t, "panics in")
		p.panicAt = rapid.IntRange(1, p.max).Draw(t, "panics at")
	}
	return p
}

// fail panics if the plan says so.
func (p *plan) fail(in string) {
	if in == p.panicIn && p.attempt == p.panicAt {
		panic(planned{})
	}
}

// planned is the panic of a plan.
type planned struct{}

type planKey struct{}

// history runs plans against real budgets and, beside them, the model.
type history struct {
	r        *Retrier
	tokens   [2]*TokenBudget // the target's and the method's; either may be nil
	throttle *Throttle       // or nil

	mu     sync.Mutex
	model  [2]*modelBudget
	budget modelThrottle
	earned [2]float64 // and by how much reloads changed what was there
	lost   [2]float64
	start  time.Time
}

// modelThrottle is A6 with whole numbers.
type modelThrottle struct{ tokens, max, ratio int } // thousandths

func (m *modelThrottle) add(n int) { m.tokens = min(max(m.tokens+n, 0), m.max) }

// of calls do with the model of each bucket that p is charged to, the method's first.
func (h *history) of(p *plan, do func(i int, m *modelBudget)) {
	if h.tokens[1] != nil && p.method == "/pkg.S/Search" {
		do(1, h.model[1])
	}
	if h.tokens[0] != nil {
		do(0, h.model[0])
	}
}

func (h *history) refund(p *plan) {
	h.of(p, func(i int, m *modelBudget) { m.refund(p.cost, p.paid[i]) })
}

// invoke is the attempt, and at its end what the model makes of it.
func (h *history) invoke(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
	p := ctx.Value(planKey{}).(*plan)
	p.attempt++
	p.started = p.open
	outcome := p.outcomes[p.attempt-1]
	if !sleep(ctx, p.lasts[p.attempt-1]) {
		outcome = "cancelled"
	} else if outcome == "hang" {
		<-ctx.Done()
		if context.Cause(ctx) == context.Canceled {
			outcome = "cancelled"
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if p.started && outcome != "panic" {
		if outcome == "ok" {
			h.refund(p)
		} else {
			h.of(p, func(i int, _ *modelBudget) { h.lost[i] += p.paid[i] })
		}
		p.open, p.started = false, false
	}
	var trailer metadata.MD
	code, cost := codes.Unavailable, CostTransient
	switch outcome {
	case "ok":
		h.budget.add(h.budget.ratio)
		if p.attempt == 1 {
			h.of(p, func(i int, m *modelBudget) { m.ok(); h.earned[i]++ })
		}
		return nil
	case "cancelled":
		return status.FromContextError(context.Canceled).Err()
	case "panic":
		panic(planned{})
	case "fatal":
		return status.Error(codes.NotFound, "no")
	case "stop":
		if p.max > 1 {
			h.budget.add(-1000)
		}
		h.answer(opts, metadata.Pairs("grpc-retry-pushback-ms", "-1"))
		return status.Error(code, "do not come back")
	case "hang":
		code, cost = codes.DeadlineExceeded, CostTimeout
	case "invited":
		cost, trailer = CostInvited, metadata.Pairs("grpc-retry-pushback-ms", fmt.Sprint(p.waits[p.attempt-1].Milliseconds()))
	}
	h.answer(opts, trailer)
	h.ask(p, cost)
	return status.Error(code, "no luck")
}

// answer shows a peer and a trailer, as grpc does.
func (h *history) answer(opts []grpc.CallOption, trailer metadata.MD) {
	for _, o := range opts {
		switch o := o.(type) {
		case grpc.PeerCallOption:
			o.PeerAddr.Addr = fakeAddr{}
		case grpc.TrailerCallOption:
			*o.TrailerAddr = trailer
		}
	}
}

// ask is what follows a failure that may be retried.
func (h *history) ask(p *plan, cost Cost) {
	last := p.attempt == p.max
	if p.max == 1 {
		return // such calls are not for retries at all
	}
	panics := func(in string) bool { return in == p.panicIn && p.attempt == p.panicAt }
	if panics("RetryIf") || !last && cost != CostInvited && panics("Func") {
		return // before anything was counted
	}
	h.budget.add(-1000)
	if last {
		return
	}
	ok, asked := true, [2]bool{}
	p.paid, p.cost = [2]float64{}, cost
	h.of(p, func(i int, m *modelBudget) {
		if ok {
			p.paid[i], ok = m.reserve(cost)
			asked[i] = ok
		}
	})
	if ok && h.throttle != nil {
		ok = 2*h.budget.tokens > h.budget.max
	}
	if !ok {
		h.of(p, func(i int, m *modelBudget) {
			if asked[i] {
				m.refund(cost, p.paid[i])
			}
		})
	}
	p.open = ok
}

// call makes the planned call.
func (h *history) call(p *plan) {
	time.Sleep(p.pause)
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), planKey{}, p))
	defer cancel()
	if p.cancel > 0 {
		defer time.AfterFunc(p.cancel, cancel).Stop()
	}
	h.mu.Lock()
	h.of(p, func(_ int, m *modelBudget) { m.inflight++ })
	h.mu.Unlock()
	defer func() {
		if e := recover(); e != nil && e != any(planned{}) {
			panic(e)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		switch {
		case p.started: // a panic in the attempt
			h.of(p, func(i int, _ *modelBudget) { h.lost[i] += p.paid[i] })
		case p.open: // cancelled in the wait, or a panic before it
			h.refund(p)
		}
		h.of(p, func(_ int, m *modelBudget) { m.inflight-- })
	}()
	_ = h.r.unary(ctx, p.method, nil, nil, nil, h.invoke, WithCallPolicy(func(policy *Policy) {
		policy.MaxAttempts = p.max
		policy.AttemptTimeout = 21 * tick // longer than any attempt that does not hang
		policy.RetryIf = func(Attempt) Verdict { p.fail("RetryIf"); return VerdictDefault }
		policy.Backoff.Func = func(int, time.Duration, Attempt) time.Duration {
			p.fail("Func")
			return p.waits[p.attempt-1]
		}
	}))
}

// reload changes limits, and the policies, between two checks.
func (h *history) reload(t *rapid.T) {
	for i, b := range h.tokens {
		if b == nil || rapid.Bool().Draw(t, "keep") {
			continue
		}
		to, m := float64(rapid.SampledFrom([]int{14, 70, 140}).Draw(t, "capacity")), h.model[i]
		if err := b.Rescale(BudgetConfig{Capacity: to}); err != nil {
			t.Fatal(err)
		}
		before := m.tokens
		m.tokens = math.Floor(m.tokens*unit*to/m.least) / unit
		m.least = to
		h.earned[i] += m.tokens - before
	}
	if h.throttle != nil && rapid.Bool().Draw(t, "throttle") {
		to := rapid.SampledFrom([]int{5, 10, 20}).Draw(t, "maxTokens")
		if err := h.throttle.Rescale(to, 0.1); err != nil {
			t.Fatal(err)
		}
		h.budget.tokens, h.budget.max = h.budget.tokens*1000*to/h.budget.max, 1000*to
	}
	if err := h.r.Update(modelPolicy); err != nil {
		t.Fatal(err)
	}
}

// check compares the budgets with the model, and the model with the promise.
func (h *history) check(t *rapid.T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, b := range h.tokens {
		if b == nil {
			continue
		}
		m, s := h.model[i], b.state()
		if bank(b) != m.tokens || s.Capacity != m.cap() || s.InFlight != int64(m.inflight) {
			t.Fatalf("after %v bucket %d holds %v, state %+v; want %v, capacity %v, %d in flight",
				time.Since(h.start), i, bank(b), s, m.tokens, m.cap(), m.inflight)
		}
		if s.Balance < 0 || s.Balance > 1 {
			t.Fatalf("balance %v", s.Balance)
		}
		if h.lost[i]+bank(b) > 70+h.earned[i] {
			t.Fatalf("bucket %d: retries for %v tokens failed and %v are left, of 70 and %v earned", i, h.lost[i], bank(b), h.earned[i])
		}
	}
	if h.throttle != nil {
		if got, want := h.throttle.state(), float64(h.budget.tokens)/1000; got.Tokens != want || got.Capacity != float64(h.budget.max)/1000 {
			t.Fatalf("after %v the throttle's state is %+v, want %v tokens of %v", time.Since(h.start), got, want, h.budget.max/1000)
		}
	}
}

var modelPolicy = WithDefaultPolicy(Policy{Idempotency: Idempotent})

// Whatever becomes of the calls of several callers, which succeed, fail, are
// invited back or sent away, are cancelled in an attempt or in a wait, or meet
// a panic, while limits and policies are reloaded: at every moment each budget
// holds what the plain rules say, to the token. One path that forgets a refund
// starves a client in the end; one that refunds twice breaks the bound.
func TestAccountingAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inBubble(t, rt, func(rt *rapid.T) {
			h := &history{start: time.Now(), model: [2]*modelBudget{newModelBudget(), newModelBudget()},
				budget: modelThrottle{10_000, 10_000, 100}}
			token := func() *TokenBudget { return mustRapidBudget(rt) }
			var leaves []Budget
			kind := rapid.SampledFrom([]string{"tokens", "throttle", "both"}).Draw(rt, "target's budget")
			if kind != "throttle" {
				h.tokens[0] = token()
				leaves = append(leaves, h.tokens[0])
			}
			if kind != "tokens" {
				th, err := NewThrottle(10, 0.1)
				if err != nil {
					rt.Fatal(err)
				}
				h.throttle = th
				leaves = append(leaves, th)
			}
			target, err := AllOf(leaves...)
			if err != nil {
				rt.Fatal(err)
			}
			opts := []Option{modelPolicy, WithBudget(target), WithHooks(Hooks{
				AttemptEnd:     func(ctx context.Context, _ Attempt) { ctx.Value(planKey{}).(*plan).fail("AttemptEnd") },
				RetryScheduled: func(ctx context.Context, _ Attempt) { ctx.Value(planKey{}).(*plan).fail("RetryScheduled") },
				CallEnd:        func(ctx context.Context, _ Report, _ any, _ error) { ctx.Value(planKey{}).(*plan).fail("CallEnd") },
			})}
			if rapid.Bool().Draw(rt, "method budget") {
				h.tokens[1] = token()
				opts = append(opts, WithMethodBudget("pkg.S/Search", h.tokens[1]))
			}
			h.r = newRetrier(t, opts...)

			var callers sync.WaitGroup
			for n := range rapid.IntRange(1, 10).Draw(rt, "callers") {
				var plans []*plan
				for range rapid.IntRange(1, 8).Draw(rt, "calls") {
					plans = append(plans, drawPlan(rt))
				}
				callers.Go(func() {
					time.Sleep(time.Duration(n) * time.Millisecond)
					for _, p := range plans {
						start := time.Now()
						h.call(p)
						// A cancelled call ends between two ticks.
						if odd := time.Since(start) % tick; odd != 0 {
							time.Sleep(tick - odd)
						}
					}
				})
			}
			done := make(chan struct{})
			go func() {
				callers.Wait()
				close(done)
			}()
			// Until all is over the time between two checks grows, so that long
			// histories do not take long.
			defer func() { <-done }()
			time.Sleep(tick - time.Millisecond)
			for i := 0; ; i++ {
				h.check(rt)
				if rapid.IntRange(0, 9).Draw(rt, "reload") == 0 {
					h.reload(rt)
					h.check(rt)
				}
				select {
				case <-done:
					return
				case <-time.After(time.Duration(1+i/8) * tick):
				}
				if odd := time.Since(h.start) % tick; odd != tick-time.Millisecond {
					time.Sleep((2*tick - time.Millisecond - odd) % tick)
				}
			}
		})
	})
}
