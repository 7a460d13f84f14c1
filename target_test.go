package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
)

// idleConn makes a ClientConn that is never connected.
func idleConn(t testing.TB, target string) *grpc.ClientConn {
	t.Helper()
	cc, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatalf("NewClient(%q): %v", target, err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
}

// idleConns makes n of them, to targets named passthrough:///0 and so on.
func idleConns(t testing.TB, n int) []*grpc.ClientConn {
	t.Helper()
	var ccs []*grpc.ClientConn
	for i := range n {
		ccs = append(ccs, idleConn(t, fmt.Sprintf("passthrough:///%d", i)))
	}
	return ccs
}

func newTargets(limit int) *targets {
	t := new(targets)
	t.init(nil, nil)
	t.limit, t.sweepAt = limit, limit
	return t
}

// visit is a call that begins and ends.
func (t *targets) visit(cc *grpc.ClientConn) *target {
	x := enterConn(t, cc)
	x.leave()
	return x
}

// kept are the numbers of the targets that idleConns named.
func (t *targets) kept() string {
	var names []string
	for _, x := range t.all() {
		names = append(names, strings.TrimPrefix(x.name, "passthrough:///"))
	}
	return strings.Join(names, " ")
}

// A proxy that dials whatever it is asked for must not grow without end, and
// must keep the balances of the targets that it uses, not of those it met last.
func TestTargetsForgetsTheLeastRecentlyUsed(t *testing.T) {
	ccs := idleConns(t, 10)
	for _, tt := range []struct {
		name   string
		visits []int
		kept   string
	}{
		{"all fit", []int{0, 1, 2, 3}, "0 1 2 3"},
		{"in the order of their making", []int{0, 1, 2, 3, 4, 5}, "2 3 4 5"},
		{"the oldest was used again", []int{0, 1, 2, 3, 0, 4}, "0 2 3 4"},
		{"used again and again, without a lock", []int{0, 1, 2, 3, 0, 4, 0, 5, 0, 6, 0, 7}, "0 5 6 7"},
		{"two of them in turn", []int{0, 1, 2, 3, 0, 1, 4, 0, 1, 5, 0, 1, 6}, "0 1 5 6"},
		{"came back", []int{0, 1, 2, 3, 4, 0}, "0 2 3 4"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ts := newTargets(4)
			for _, i := range tt.visits {
				ts.visit(ccs[i])
			}
			if got := ts.kept(); got != tt.kept {
				t.Errorf("kept %s, want %s", got, tt.kept)
			}
			if names := len(ts.byName); names != len(ts.byCanon) {
				t.Errorf("%d names for %d targets", names, len(ts.byCanon))
			}
		})
	}
}

// The documented figures: 4096 are kept, and one more costs the 256 oldest.
func TestTargetsLimit(t *testing.T) {
	ts := new(targets)
	ts.init(nil, nil)
	ccs := idleConns(t, 4097)
	for i, cc := range ccs {
		ts.visit(cc)
		want := i + 1
		if want > 4096 {
			want = 4096 - 256
		}
		if got := len(ts.byCanon); got != want {
			t.Fatalf("%d targets after %d were dialled, want %d", got, i+1, want)
		}
	}
	for i, cc := range ccs {
		if _, kept := ts.byCanon[cc.CanonicalTarget()]; kept != (i >= 257) {
			t.Fatalf("target %d is kept: %v", i, kept)
		}
	}
}

// While a call runs its bucket must stay the one for its target: with a second
// one beside it the target would get twice the retries that its bound allows.
func TestTargetsInFlightAreKept(t *testing.T) {
	ccs := idleConns(t, 40)
	t.Run("one", func(t *testing.T) {
		ts := newTargets(4)
		x := enterConn(ts, ccs[0])
		for _, cc := range ccs[1:] {
			ts.visit(cc)
		}
		if got := enterConn(ts, ccs[0]); got != x {
			t.Error("the target of a call in flight was made anew")
		}
		x.leave()
		x.leave()
		for _, cc := range ccs[1:] {
			ts.visit(cc)
		}
		if got := ts.visit(ccs[0]); got == x {
			t.Error("the target is kept after its calls have ended")
		}
	})
	t.Run("more than the limit", func(t *testing.T) {
		ts := newTargets(4)
		var all []*target
		for _, cc := range ccs[:20] {
			all = append(all, enterConn(ts, cc))
		}
		for i, cc := range ccs[:20] {
			if got := ts.visit(cc); got != all[i] {
				t.Errorf("target %d was made anew", i)
			}
		}
		for _, x := range all {
			x.leave()
		}
		for _, cc := range ccs[20:] {
			ts.visit(cc)
		}
		if got := len(ts.byCanon); got > 4 {
			t.Errorf("%d targets are kept after the calls have ended, want 4 at most", got)
		}
	})
	t.Run("with any kind of budget", func(t *testing.T) {
		shared := mustThrottle(t, 10, 0.1)
		ts := newTargets(4)
		ts.newBudget = func(string) Budget { return shared }
		x := enterConn(ts, ccs[0])
		for _, cc := range ccs[1:] {
			ts.visit(cc)
		}
		if got := ts.visit(ccs[0]); got != x {
			t.Error("the target of a call in flight was made anew")
		}
		if got := len(ts.byCanon); got > 5 {
			t.Errorf("%d targets are kept because one that shares their budget is in use, want 5 at most", got)
		}
	})
}

// What a target forgot: it comes back with a budget as new.
func TestTargetsForgottenStartsAnew(t *testing.T) {
	ts := newTargets(2)
	ccs := idleConns(t, 4)
	x := ts.visit(ccs[0])
	for range 4 {
		x.budget.Reserve(CostTransient)
	}
	if got := ts.visit(ccs[0]).budget.state().Tokens; got != 42 {
		t.Fatalf("%v tokens, want 42", got)
	}
	for _, cc := range ccs[1:] {
		ts.visit(cc)
	}
	if got := ts.visit(ccs[0]).budget.state(); got.Tokens != 70 || got.Granted != 0 {
		t.Errorf("state %+v, want that of a new budget", got)
	}
}

// Many goroutines that come and go, with more targets than are kept: at no
// time may two buckets serve calls to the same target.
func TestTargetsConcurrent(t *testing.T) {
	const names, workers, rounds = 24, 8, 4000
	for _, tt := range []struct {
		name      string
		newBudget func(string) Budget
	}{
		{"default budget", nil},
		{"another", func(string) Budget { return Unlimited() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ts := newTargets(16)
			ts.newBudget = tt.newBudget
			ccs := idleConns(t, names)
			var inUse [names]struct {
				sync.Mutex
				target *target
				calls  int
			}
			var wg sync.WaitGroup
			for w := range workers {
				rng := rand.New(rand.NewPCG(1, uint64(w)))
				wg.Go(func() {
					for range rounds {
						i := rng.IntN(names)
						x, use := enterConn(ts, ccs[i]), &inUse[i]
						use.Lock()
						if use.calls > 0 && use.target != x {
							t.Errorf("two targets for %s at once", x.name)
						}
						use.target = x
						use.calls++
						use.Unlock()
						if rng.IntN(8) == 0 {
							runtime.Gosched()
						}
						use.Lock()
						use.calls--
						use.Unlock()
						x.leave()
					}
				})
			}
			wg.Wait()
			for _, x := range ts.all() {
				if n := x.inflight.Load(); n != 0 {
					t.Errorf("%s: %d calls in flight after all have ended", x.name, n)
				}
			}
			if got := len(ts.byCanon); got > 16+workers {
				t.Errorf("%d targets are kept, want 16 and at most one for each call in flight", got)
			}
		})
	}
}

// A copy of everything for each new target would make ten thousand of them
// cost gigabytes of garbage.
func TestTargetsAreCheap(t *testing.T) {
	const n = 4096
	ts := newTargets(n)
	ccs := idleConns(t, n)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for _, cc := range ccs {
		ts.visit(cc)
	}
	runtime.ReadMemStats(&after)
	if each := (after.TotalAlloc - before.TotalAlloc) / n; each > 4096 {
		t.Errorf("%d bytes for each target, want at most 4096", each)
	}
	for i := range 3 {
		if allocs := testing.AllocsPerRun(100, func() { ts.visit(ccs[i*1000]) }); allocs != 0 {
			t.Errorf("%v allocations to find target %d, want 0", allocs, i*1000)
		}
	}
}

// Two ways to write the same target are one server side, so one budget; and
// whoever writes it in ever new ways must not fill the memory.
func TestTargetsSpellings(t *testing.T) {
	ts := newTargets(4)
	x := ts.visit(idleConn(t, "example.com:443"))
	for i := range 1 << 3 {
		scheme := []byte("dns")
		for bit := range scheme {
			if i>>bit&1 == 1 {
				scheme[bit] -= 'a' - 'A'
			}
		}
		for _, name := range []string{string(scheme) + ":///example.com:443", string(scheme) + ":example.com:443"} {
			if got := ts.visit(idleConn(t, name)); got != x {
				t.Errorf("%s has a target %q of its own, want that of example.com:443", name, got.name)
			}
		}
	}
	if got := len(ts.byName); got != maxSpellings {
		t.Errorf("%d names are kept, want %d", got, maxSpellings)
	}
	if got := ts.visit(idleConn(t, "example.com:443")); got != x || x.name != "dns:///example.com:443" {
		t.Errorf("example.com:443 leads to %q", got.name)
	}
	if ts.visit(idleConn(t, "example.com:444")) == x {
		t.Error("another port has the same target")
	}
}

// Users register the budgets they make, so newBudget must run once per target.
func TestBudgetPerTargetIsMadeOnce(t *testing.T) {
	var made sync.Map
	var r *Retrier
	r = newRetrier(t, WithBudgetPerTarget(func(target string) Budget {
		n, _ := made.LoadOrStore(target, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
		r.Budgets() // no lock is held
		return mustBudget(t, BudgetConfig{})
	}))
	ccs := idleConns(t, 10)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, cc := range ccs {
				r.targets.visit(cc)
			}
		})
	}
	wg.Wait()
	made.Range(func(target, n any) bool {
		if n := n.(*atomic.Int64).Load(); n != 1 {
			t.Errorf("newBudget(%q) ran %d times, want once", target, n)
		}
		return true
	})
	if got := len(r.Budgets()); got != 10 {
		t.Errorf("%d budgets, want 10", got)
	}
}

// A newBudget that gives nothing usable must not turn the bound off, nor every
// call into a panic.
func TestBudgetPerTargetFallsBack(t *testing.T) {
	for _, b := range []Budget{nil, (*TokenBudget)(nil), (*Throttle)(nil), new(TokenBudget), new(Throttle), struct{ Budget }{}} {
		r := newRetrier(t, WithBudgetPerTarget(func(string) Budget { return b }))
		if err := r.unary(t.Context(), get, nil, nil, nil, fakeInvoker()); err != nil {
			t.Fatal(err)
		}
		if got, want := r.Budgets(), (BudgetState{Balance: 1, Tokens: 70, Capacity: 70}); len(got) != 1 || got[0] != want {
			t.Errorf("newBudget returns %T: budgets %+v, want the default", b, got)
		}
	}
}

// A panic in newBudget is its author's, but the next call must find everything
// in order: no lock held, no call counted.
func TestBudgetPerTargetPanics(t *testing.T) {
	first := true
	r := newRetrier(t, WithBudgetPerTarget(func(string) Budget {
		if first {
			first = false
			panic("newBudget")
		}
		return nil
	}))
	call := func() (recovered any) {
		defer func() { recovered = recover() }()
		if err := r.unary(t.Context(), get, nil, nil, nil, fakeInvoker()); err != nil {
			t.Error(err)
		}
		return nil
	}
	if got := call(); got != "newBudget" {
		t.Fatalf("recovered %v, want the panic of newBudget", got)
	}
	if got := call(); got != nil {
		t.Fatalf("panic %v in the second call", got)
	}
	if got := r.Budgets(); len(got) != 1 || got[0].InFlight != 0 {
		t.Errorf("budgets %+v, want one with nothing in flight", got)
	}
}

// The cost of finding a call's target, for one target, a few dozen in turn and
// thousands in turn.
func BenchmarkTargets(b *testing.B) {
	for _, n := range []int{1, 32, 4096} {
		ts := newTargets(maxTargets)
		ccs := idleConns(b, n)
		for _, cc := range ccs {
			ts.visit(cc)
		}
		b.Run(fmt.Sprintf("targets=%d/mode=serial", n), func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				ts.visit(ccs[i%n])
			}
		})
		b.Run(fmt.Sprintf("targets=%d/mode=parallel", n), func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for i := 0; pb.Next(); i++ {
					ts.visit(ccs[i%n])
				}
			})
		})
	}
	b.Run("targets=8192/mode=serial", func(b *testing.B) { // each comes as a new one
		ts := newTargets(maxTargets)
		ccs := idleConns(b, 2*maxTargets)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			ts.visit(ccs[i%len(ccs)])
		}
	})
}

// failing is an invoker that shows a peer and fails with UNAVAILABLE.
func failing(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
	for _, o := range opts {
		if o, ok := o.(grpc.PeerCallOption); ok {
			o.PeerAddr.Addr = fakeAddr{}
		}
	}
	return status.Error(codes.Unavailable, "down")
}

// answering is one that succeeds.
func answering(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
	for _, o := range opts {
		if o, ok := o.(grpc.PeerCallOption); ok {
			o.PeerAddr.Addr = fakeAddr{}
		}
	}
	return nil
}

// A budget belongs to its target: not to the connection, of which a client may
// make many, and not to the policies, which a reload replaces.
func TestBudgetIsTheTargets(t *testing.T) {
	r := newRetrier(t, WithDefaultPolicy(Policy{Idempotency: Idempotent, Backoff: atOnce}))
	fail := func(target string) { // a connection of its own for each call
		cc := idleConn(t, target)
		if err := r.unary(t.Context(), "/s/M", nil, nil, cc, failing); status.Code(err) != codes.Unavailable {
			t.Fatalf("error %v, want UNAVAILABLE", err)
		}
		cc.Close()
	}
	for range 4 { // two retries each
		fail("passthrough:///a")
	}
	fail("passthrough:///b")
	want := []BudgetState{
		{Target: "passthrough:///a", Balance: 0.2, Tokens: 14, Capacity: 70, Granted: 8},
		{Target: "passthrough:///b", Balance: 0.8, Tokens: 56, Capacity: 70, Granted: 2},
	}
	if got := r.Budgets(); !slices.Equal(got, want) {
		t.Errorf("budgets %+v, want %+v", got, want)
	}
	if err := r.Update(WithDefaultPolicy(Policy{Idempotency: Idempotent, MaxAttempts: 10, Backoff: atOnce})); err != nil {
		t.Fatal(err)
	}
	if got := r.Budgets(); !slices.Equal(got, want) {
		t.Errorf("after Update: budgets %+v, want %+v", got, want)
	}
	var e *Error
	err := r.unary(t.Context(), "/s/M", nil, nil, idleConn(t, "passthrough:///a"), failing)
	if !errors.As(err, &e) || e.Reason != ReasonBudgetExhausted || e.Made() != 3 {
		t.Errorf("error %v, want one that says that the budget is exhausted after 3 attempts", err)
	}
}

// atOnce is a backoff of nothing.
var atOnce = Backoff{Func: func(int, time.Duration, Attempt) time.Duration { return 0 }}

// enterConn enters the target of cc, as a call does.
func enterConn(ts *targets, cc *grpc.ClientConn) *target {
	name := ""
	if cc != nil {
		name = cc.Target()
	}
	return ts.enter(name, cc)
}
