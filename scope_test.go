package grpcretry

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// anyMethod makes every method retryable at once.
var anyMethod = WithDefaultPolicy(Policy{Idempotency: Idempotent, Backoff: atOnce})

// invoke makes a call of r without a ClientConn and says how many attempts it made.
func invoke(t testing.TB, r *Retrier, method string, invoker grpc.UnaryInvoker) (attempts int, err error) {
	t.Helper()
	counting := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
		attempts++
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	err = r.unary(t.Context(), method, nil, nil, nil, counting)
	return attempts, err
}

// A method that fails all the time must neither use up what the other methods
// need nor, refused for want of the target's tokens, lose its own.
func TestMethodBudgetBothMustGrant(t *testing.T) {
	method := mustBudget(t, BudgetConfig{Capacity: 28, PerCall: -1})
	target := mustBudget(t, BudgetConfig{Capacity: 49, PerCall: -1})
	r := newRetrier(t, anyMethod, WithBudget(target), WithMethodBudget("pkg.S/Search", method))
	for i, tt := range []struct {
		method         string
		attempts       int
		onMethod, onIt float64 // tokens left
	}{
		{"/pkg.S/Search", 3, 14, 35}, // two retries, each paid twice
		{"/pkg.S/Other", 3, 14, 21},  // paid by the target alone
		{"/pkg.S/Search", 3, 0, 7},
		{"/pkg.S/Search", 1, 0, 7}, // the method's budget refuses: the target pays nothing
		{"/pkg.S/Other", 2, 0, 0},  // while others still may
	} {
		if got, _ := invoke(t, r, tt.method, failing); got != tt.attempts || bank(method) != tt.onMethod || bank(target) != tt.onIt {
			t.Errorf("call %d of %s: %d attempts, %v and %v tokens left; want %d, %v, %v",
				i, tt.method, got, bank(method), bank(target), tt.attempts, tt.onMethod, tt.onIt)
		}
	}

	record(method, OutcomeOK, 14)
	if got, _ := invoke(t, r, "/pkg.S/Search", failing); got != 1 || bank(method) != 14 || bank(target) != 0 {
		t.Errorf("with nothing left to the target: %d attempts, %v tokens left to the method; want 1 and 14", got, bank(method))
	}
	if got, want := method.state(), (BudgetState{Balance: 0.5, Tokens: 14, Capacity: 28, Granted: 4, Refused: 1}); got != want {
		t.Errorf("method's state %+v, want %+v: what the target refused is not counted", got, want)
	}
	if got, want := target.state(), (BudgetState{Capacity: 49, Granted: 7, Refused: 2}); got != want {
		t.Errorf("target's state %+v, want %+v", got, want)
	}
}

// A success earns for both, once; a retry that wins is refunded by both.
func TestMethodBudgetIsRecorded(t *testing.T) {
	method := mustBudget(t, BudgetConfig{})
	throttle := mustThrottle(t, 10, 0.5)
	both, err := AllOf(method, throttle)
	if err != nil {
		t.Fatal(err)
	}
	target := mustBudget(t, BudgetConfig{})
	r := newRetrier(t, anyMethod, WithBudget(target), WithMethodBudget("pkg.S/*", both))
	check := func(when string, tokens, throttled float64) {
		t.Helper()
		if bank(method) != tokens || bank(target) != tokens || throttle.state().Tokens != throttled {
			t.Errorf("%s: %v and %v tokens, %v in the throttle; want %v, %[5]v, %v", when, bank(method), bank(target), throttle.state().Tokens, tokens, throttled)
		}
		if method.inflight.Load() != 0 || target.inflight.Load() != 0 {
			t.Errorf("%s: %d and %d calls in flight", when, method.inflight.Load(), target.inflight.Load())
		}
	}
	for _, b := range []Budget{method, target} {
		b.Reserve(CostTransient)
		b.Reserve(CostTransient)
	}
	check("at first", 56, 10)
	invoke(t, r, "/pkg.S/A", answering)
	check("a success", 57, 10)
	invoke(t, r, "/pkg.S/B", failing)
	check("three failures", 43, 7)
	invoke(t, r, "/pkg.S/A", fakeInvoker(status.Error(codes.Unavailable, "once"), nil))
	check("a success by a retry", 43, 6.5)
	invoke(t, r, "/pkg.S/A", fakeInvoker(status.Error(codes.NotFound, "no failure of the server")))
	check("an answer that is an error", 43, 6.5)
}

// The more specific pattern speaks for a method, alone: with both, a method
// would be charged for its whole service too, against what it was given.
func TestMethodBudgetPatterns(t *testing.T) {
	exact, service := mustBudget(t, BudgetConfig{}), mustBudget(t, BudgetConfig{})
	r := newRetrier(t, anyMethod, WithMethodBudget("/pkg.S/Get", exact), WithMethodBudget("pkg.S/*", service), WithMethodBudget("pkg.T/*", service))
	for _, tt := range []struct {
		method         string
		exact, service float64
	}{
		{"/pkg.S/Get", 56, 70},
		{"/pkg.S/Put", 56, 56},
		{"/pkg.T/Get", 56, 42},
		{"/pkg.U/Get", 56, 42},
		{"/pkg.Service/Get", 56, 42},
	} {
		if invoke(t, r, tt.method, failing); bank(exact) != tt.exact || bank(service) != tt.service {
			t.Errorf("%s: %v and %v tokens, want %v and %v", tt.method, bank(exact), bank(service), tt.exact, tt.service)
		}
	}
}

// A mistake in an option must be told when the program starts, all of them at
// once, and not show as a call without a bound or a panic in the first outage.
func TestBudgetOptionErrors(t *testing.T) {
	b := mustBudget(t, BudgetConfig{})
	pair, err := AllOf(mustThrottle(t, 10, 0.1), b)
	if err != nil {
		t.Fatal(err)
	}
	disguise := struct{ Budget }{b}
	for _, tt := range []struct {
		name string
		opts []Option
		want []string
	}{
		{"nil", []Option{WithBudget(nil)}, []string{"WithBudget: budget is nil, want a budget of this package (Unlimited() for no limit)"}},
		{"nil pointers", []Option{WithBudget((*TokenBudget)(nil)), WithMethodBudget("a.S/M", (*Throttle)(nil))},
			[]string{"WithBudget: budget is a nil *TokenBudget, want", `WithMethodBudget("a.S/M"): budget is a nil *Throttle, want`}},
		{"not made", []Option{WithBudget(new(Throttle)), WithMethodBudget("a.S/M", &TokenBudget{})},
			[]string{"WithBudget: budget is a Throttle that NewThrottle did not make, want", `WithMethodBudget("a.S/M"): budget is a TokenBudget that NewBudget did not make, want`}},
		{"of another make", []Option{WithBudget(disguise), WithMethodBudget("a.S/M", disguise)},
			[]string{"WithBudget: budget is a struct { grpcretry.Budget }, want", `WithMethodBudget("a.S/M"): budget is a struct { grpcretry.Budget }, want`}},
		{"nil for a method", []Option{WithMethodBudget("a.S/M", nil)}, []string{`WithMethodBudget("a.S/M"): budget is nil, want a budget of this package`}},
		{"patterns", []Option{WithMethodBudget("", b), WithMethodBudget("*", b), WithMethodBudget("a.S", b), WithMethodBudget("a.S/M*", b), WithMethodBudget("testsrv.v1.TestService/Gte", b)},
			[]string{`WithMethodBudget(""): empty pattern`, `WithMethodBudget("*"): pattern for every method`, `WithMethodBudget("a.S"): pattern without a service or a method`,
				`WithMethodBudget("a.S/M*"): malformed pattern`, `service testsrv.v1.TestService has no method "Gte"`}},
		{"duplicates", []Option{WithMethodBudget("a.S/M", b), WithMethodBudget("/a.S/M", b), WithMethodBudget("a.S/*", b), WithMethodBudget("a.S/*", b)},
			[]string{`WithMethodBudget("/a.S/M"): duplicate pattern, want each method or service once`, `WithMethodBudget("a.S/*"): duplicate pattern`}},
		{"both at once", []Option{WithMethodBudget("a.S/", nil)}, []string{`WithMethodBudget("a.S/"): pattern without`, `WithMethodBudget("a.S/"): budget is nil`}},
		{"that of the targets", []Option{WithBudget(pair), WithMethodBudget("a.S/M", b)}, []string{`WithMethodBudget("a.S/M"): budget is also that of WithBudget, want one of its own`}},
		{"two for the targets", []Option{WithBudget(b), WithBudgetPerTarget(func(string) Budget { return nil })}, []string{"WithBudget and WithBudgetPerTarget are given more than once"}},
		{"no function", []Option{WithBudgetPerTarget(nil)}, []string{"WithBudgetPerTarget: callback is nil"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := New(tt.opts...)
			if err == nil || r != nil {
				t.Fatalf("New = %v, %v; want an error", r, err)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tt.want) {
				t.Fatalf("error has %d lines, want %d:\n%v", len(lines), len(tt.want), err)
			}
			for i, want := range tt.want {
				if !strings.HasPrefix(lines[i], "grpcretry: ") || !strings.Contains(lines[i], want) {
					t.Errorf("line %d = %q, want it to tell %q", i, lines[i], want)
				}
			}
		})
	}
	if _, err := New(WithBudget(Unlimited()), WithMethodBudget("a.S/M", Unlimited())); err != nil {
		t.Errorf("Unlimited for both: %v", err)
	}
}

// A reload of the policies must not touch budgets: neither refill the one of a
// method nor lose it, and one that is given there would do one or the other.
func TestMethodBudgetOutlivesUpdate(t *testing.T) {
	method := mustBudget(t, BudgetConfig{})
	r := newRetrier(t, anyMethod, WithMethodBudget("pkg.S/M", method))
	invoke(t, r, "/pkg.S/M", failing)
	want := []BudgetState{
		{Balance: 0.8, Tokens: 56, Capacity: 70, Granted: 2},
		{Method: "/pkg.S/M", Balance: 0.8, Tokens: 56, Capacity: 70, Granted: 2},
	}
	if got := r.Budgets(); !slices.Equal(got, want) {
		t.Fatalf("budgets %+v, want %+v", got, want)
	}
	err := r.Update(WithMethodBudget("pkg.S/M", mustBudget(t, BudgetConfig{})))
	if err == nil || !strings.Contains(err.Error(), "Update: WithMethodBudget cannot change after New") {
		t.Errorf("Update with another budget: %v, want an error that names the option", err)
	}
	for range 3 {
		if err := r.Update(WithDefaultPolicy(Policy{Idempotency: Idempotent, MaxAttempts: 2, Backoff: atOnce})); err != nil {
			t.Fatal(err)
		}
	}
	if got := r.Budgets(); !slices.Equal(got, want) {
		t.Errorf("after Update: budgets %+v, want %+v", got, want)
	}
	invoke(t, r, "/pkg.S/M", failing)
	if got := bank(method); got != 49 {
		t.Errorf("%v tokens after one retry more, want 49", got)
	}
	// Its limits can change; what is left stays the same share.
	if err := method.Rescale(BudgetConfig{Capacity: 700}); err != nil {
		t.Fatal(err)
	}
	if got := r.Budgets()[1]; got.Tokens != 490 || got.Capacity != 700 || got.Balance != 0.7 || got.Granted != 3 {
		t.Errorf("after Rescale: %+v, want 490 of 700 and 3 granted", got)
	}
}

// Metrics and debugging pages print the list as it comes.
func TestBudgetsAreSorted(t *testing.T) {
	r := newRetrier(t, WithMethodBudget("z.S/*", Unlimited()), WithMethodBudget("/a.S/M", mustThrottle(t, 10, 0.1)), WithMethodBudget("a.S/*", Unlimited()))
	if got := r.Budgets(); len(got) != 3 {
		t.Errorf("%d budgets before the first call, want the 3 of methods", len(got))
	}
	for _, name := range []string{"passthrough:///c", "dns:///b:1", "passthrough:///a", "b:1"} {
		r.targets.visit(idleConn(t, name))
	}
	r.targets.visit(nil)
	var got []string
	for _, s := range r.Budgets() {
		got = append(got, s.Target+" "+s.Method)
	}
	want := []string{" ", " /a.S/*", " /a.S/M", " /z.S/*", "dns:///b:1 ", "passthrough:///a ", "passthrough:///c "}
	if !slices.Equal(got, want) {
		t.Errorf("budgets for %q, want %q", got, want)
	}
}

// While a call runs the snapshot counts it, and its event tells the balance of
// whichever budget is lower.
func TestBudgetsSeeCallsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		method := mustBudget(t, BudgetConfig{Capacity: 14, PerCall: -1})
		r := newRetrier(t, WithMethodBudget("testsrv.v1.TestService/Get", method))
		srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Code: codes.Unavailable}, {Block: true}}})
		ctx, cancel := context.WithCancel(t.Context())
		ctx, events := traced(t, ctx)
		done := make(chan error)
		go func() {
			_, err := client.Get(ctx, &testpb.Request{})
			done <- err
		}()
		if err := srv.WaitCount(ctx, get, 2); err != nil {
			t.Fatal(err)
		}
		want := []BudgetState{
			{Method: "/testsrv.v1.TestService/Get", Balance: 0.5, Tokens: 7, Capacity: 14, Granted: 1, InFlight: 1},
			{Target: "passthrough:///testsrv", Balance: 0.9, Tokens: 63, Capacity: 70, Granted: 1, InFlight: 1},
		}
		if got := r.Budgets(); !slices.Equal(got, want) {
			t.Errorf("in the second attempt: budgets %+v, want %+v", got, want)
		}
		cancel()
		if err := <-done; status.Code(err) != codes.Canceled {
			t.Errorf("error %v, want CANCELLED", err)
		}
		for _, s := range r.Budgets() {
			if s.InFlight != 0 {
				t.Errorf("after the call: %+v, want nothing in flight", s)
			}
		}
		if got := events()[0]["grpcretry.budget.balance"]; got != 0.5 {
			t.Errorf("event's balance %v, want that of the method, 0.5", got)
		}
	})
}

// A budget empty for one target must not keep another from its retries.
func TestTargetsAreIsolated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce}))
		down, a := serve(t, r, testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
		flaky := testsrv.New(testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			if nth%10 == 0 {
				return testsrv.Step{Code: codes.Unavailable}
			}
			return testsrv.Step{}
		})}, testsrv.WithName("flaky"))
		t.Cleanup(flaky.Close)
		b := dial(t, flaky, r)
		for i := range 500 {
			_, err := a.Get(t.Context(), &testpb.Request{})
			if status.Code(err) != codes.Unavailable {
				t.Fatalf("call %d of the server that is down: %v", i, err)
			}
			if i >= 5 && !errors.Is(err, ErrBudgetExhausted) {
				t.Fatalf("call %d: %v, want the budget exhausted after ten retries", i, err)
			}
			if _, err := b.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatalf("call %d of the flaky server: %v", i, err)
			}
		}
		if got := down.Count(get); got != 510 {
			t.Errorf("%d attempts at the server that is down, want 510", got)
		}
		if got, want := flaky.Count(get), 500+55; got != want {
			t.Errorf("%d attempts at the flaky server, want %d", got, want)
		}
	})
}
