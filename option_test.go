package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A mistake in a configuration must show when the program starts, with the name
// of the field, its value and what would be good, and not in the middle of an outage.
func TestBadConfiguration(t *testing.T) {
	const pattern = `want "pkg.Service/Method" or "pkg.Service/*"`
	withPolicy := func(p Policy) []Option { return []Option{WithMethodPolicy("a.B/C", p)} }
	nilBudget, nilThrottle := (*TokenBudget)(nil), (*Throttle)(nil)
	for _, tt := range []struct {
		name   string
		opts   []Option
		faults []string // without their common "grpcretry: "
	}{
		{"nil option", []Option{WithIdempotent("a.B/C"), nil}, []string{"option 2 of 2 is nil, want an Option"}},

		{"MaxAttempts", withPolicy(Policy{MaxAttempts: -1}), []string{`WithMethodPolicy("a.B/C"): Policy.MaxAttempts = -1, want 0 (default 3) or more`}},
		{"Timeout", withPolicy(Policy{Timeout: -1}), []string{`WithMethodPolicy("a.B/C"): Policy.Timeout = -1ns, want 0 (none) or more`}},
		{"AttemptTimeout", withPolicy(Policy{AttemptTimeout: -time.Second}), []string{`WithMethodPolicy("a.B/C"): Policy.AttemptTimeout = -1s, want 0 (none) or more`}},
		{"FirstResponseTimeout", withPolicy(Policy{FirstResponseTimeout: -1}), []string{`WithMethodPolicy("a.B/C"): Policy.FirstResponseTimeout = -1ns, want 0 (none) or more`}},
		{"IdleTimeout", withPolicy(Policy{IdleTimeout: -1}), []string{`WithMethodPolicy("a.B/C"): Policy.IdleTimeout = -1ns, want 0 (none) or more`}},
		{"ReplayBytes", withPolicy(Policy{ReplayBytes: -1}), []string{`WithMethodPolicy("a.B/C"): Policy.ReplayBytes = -1, want 0 (default 262144) or more`}},
		{"Idempotency", withPolicy(Policy{Idempotency: 4}), []string{`WithMethodPolicy("a.B/C"): Policy.Idempotency = 4, want Inherit, Idempotent, NotIdempotent or Keyed`}},
		{"Codes", withPolicy(Policy{Codes: Codes(codes.OK)}), []string{`WithMethodPolicy("a.B/C"): Policy.Codes holds the code 0, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)`}},
		{"Codes of the future", withPolicy(Policy{Codes: Codes(17)}), []string{`WithMethodPolicy("a.B/C"): Policy.Codes holds the code 17, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)`}},
		{"Backoff.Base", withPolicy(Policy{Backoff: Backoff{Base: -1}}), []string{`WithMethodPolicy("a.B/C"): Policy.Backoff.Base = -1ns, want 0 (default 50ms) or more`}},
		{"Backoff.MaxHint", []Option{WithDefaultPolicy(Policy{Backoff: Backoff{MaxHint: -1}})}, []string{`WithDefaultPolicy: Policy.Backoff.MaxHint = -1ns, want 0 (default 1m0s) or more`}},

		{"Hedge.MaxAttempts", withPolicy(Policy{Hedge: Hedge{MaxAttempts: -1}}), []string{`WithMethodPolicy("a.B/C"): Policy.Hedge.MaxAttempts = -1, want 0 (no hedging) or more`}},
		{"Hedge.Delay", withPolicy(Policy{Hedge: Hedge{Delay: -1}}), []string{`WithMethodPolicy("a.B/C"): Policy.Hedge.Delay = -1ns, want 0 or more`}},
		{"Hedge.Quantile of 1", withPolicy(Policy{Hedge: Hedge{Quantile: 1}}), []string{`WithMethodPolicy("a.B/C"): Policy.Hedge.Quantile = 1, want 0 (off) or a share in (0, 1)`}},
		{"Hedge.Quantile below 0", withPolicy(Policy{Hedge: Hedge{Quantile: -0.5}}), []string{`WithMethodPolicy("a.B/C"): Policy.Hedge.Quantile = -0.5, want 0 (off) or a share in (0, 1)`}},
		{"Hedge.Quantile that is no number", withPolicy(Policy{Hedge: Hedge{Quantile: math.NaN()}}), []string{`WithMethodPolicy("a.B/C"): Policy.Hedge.Quantile = NaN, want 0 (off) or a share in (0, 1)`}},
		{"hedges without a delay", withPolicy(Policy{Hedge: Hedge{MaxAttempts: 2}}),
			[]string{`WithMethodPolicy("a.B/C"): Policy.Hedge.Delay = 0 without AtOnce or Quantile, want a delay > 0, or AtOnce: true to send all attempts together`}},
		{"hedges at once and later", withPolicy(Policy{Hedge: Hedge{MaxAttempts: 2, AtOnce: true, Delay: 1}}),
			[]string{`WithMethodPolicy("a.B/C"): Policy.Hedge.AtOnce = true together with Delay or Quantile, want one of them`}},
		{"hedges of a write", withPolicy(Policy{Idempotency: NotIdempotent, Hedge: Hedge{MaxAttempts: 2, Delay: 1}}),
			[]string{`WithMethodPolicy("a.B/C"): Policy.Hedge.MaxAttempts = 2 with Idempotency NotIdempotent, want a method that may run twice at once`}},
		{"hedges of a service of writes", []Option{WithMethodPolicy("a.B/*", Policy{Idempotency: NotIdempotent}), WithMethodPolicy("a.B/C", Policy{Hedge: Hedge{MaxAttempts: 2, Delay: 1}})},
			[]string{`WithMethodPolicy("a.B/C"): Policy.Hedge.MaxAttempts = 2, but the Idempotency of the service policy is NotIdempotent; want a method that may run twice at once`}},
		{"hedges where all are writes", []Option{WithDefaultPolicy(Policy{Idempotency: NotIdempotent}), WithMethodPolicy("a.B/*", Policy{Hedge: Hedge{MaxAttempts: 2, Delay: 1}})},
			[]string{`WithMethodPolicy("a.B/*"): Policy.Hedge.MaxAttempts = 2, but the Idempotency of the default policy is NotIdempotent; want a method that may run twice at once`}},
		{"Hedge.NonFatal", withPolicy(Policy{Hedge: Hedge{NonFatal: Codes(math.MaxUint32)}}),
			[]string{`WithMethodPolicy("a.B/C"): Policy.Hedge.NonFatal holds the code 4294967295, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)`}},

		{"empty pattern", []Option{WithMethodPolicy("", Policy{})}, []string{`WithMethodPolicy(""): empty pattern, ` + pattern}},
		{"empty pattern of WithIdempotent", []Option{WithIdempotent("a.B/C", "")}, []string{`WithIdempotent(""): empty pattern, ` + pattern}},
		{"unknown method of a registered service", []Option{WithMethodPolicy("testsrv.v1.DeclaredService/Wacth", Policy{})},
			[]string{`WithMethodPolicy("testsrv.v1.DeclaredService/Wacth"): service testsrv.v1.DeclaredService has no method "Wacth", want one of Full, Hedged, Invalid, Keyed, Watch, Withdrawn`}},
		{"unknown method of WithIdempotent", []Option{WithIdempotent("/testsrv.v1.DeclaredService/Wacth")},
			[]string{`WithIdempotent("/testsrv.v1.DeclaredService/Wacth"): service testsrv.v1.DeclaredService has no method "Wacth", want one of Full, Hedged, Invalid, Keyed, Watch, Withdrawn`}},
		{"duplicate method", []Option{WithMethodPolicy("a.B/C", Policy{}), WithMethodPolicy("/a.B/C", Policy{})},
			[]string{`WithMethodPolicy("/a.B/C"): duplicate pattern, want each method or service once`}},
		{"duplicate service", []Option{WithMethodPolicy("a.B/*", Policy{}), WithMethodPolicy("a.B/*", Policy{})},
			[]string{`WithMethodPolicy("a.B/*"): duplicate pattern, want each method or service once`}},
		{"duplicate in one WithIdempotent", []Option{WithIdempotent("a.B/C", "a.B/C")},
			[]string{`WithIdempotent("a.B/C"): duplicate pattern, want each method or service once`}},
		{"contradiction", []Option{WithIdempotent("a.B/C"), WithMethodPolicy("/a.B/C", Policy{Idempotency: NotIdempotent})},
			[]string{`WithIdempotent("a.B/C"): contradicts the WithMethodPolicy for the same pattern, whose Idempotency is not_idempotent; want one of the two`}},
		{"contradiction about a service", []Option{WithMethodPolicy("a.B/*", Policy{Idempotency: Keyed}), WithIdempotent("a.B/*")},
			[]string{`WithIdempotent("a.B/*"): contradicts the WithMethodPolicy for the same pattern, whose Idempotency is keyed; want one of the two`}},
		{"two defaults", []Option{WithDefaultPolicy(Policy{}), WithDefaultPolicy(Policy{})}, []string{"WithDefaultPolicy: given twice, want it once"}},

		{"nil budget", []Option{WithBudget(nil)}, []string{"WithBudget: budget is nil, want a budget of this package (Unlimited() for no limit)"}},
		{"nil *TokenBudget", []Option{WithBudget(nilBudget)}, []string{"WithBudget: budget is a nil *TokenBudget, want a budget of this package (Unlimited() for no limit)"}},
		{"nil *Throttle", []Option{WithBudget(nilThrottle)}, []string{"WithBudget: budget is a nil *Throttle, want a budget of this package (Unlimited() for no limit)"}},
		{"a zero TokenBudget", []Option{WithBudget(new(TokenBudget))}, []string{"WithBudget: budget is a TokenBudget that NewBudget did not make, want one that it made (Unlimited() for no limit)"}},
		{"a zero Throttle", []Option{WithBudget(new(Throttle))}, []string{"WithBudget: budget is a Throttle that NewThrottle did not make, want one that it made (Unlimited() for no limit)"}},
		{"what embeds a budget", []Option{WithBudget(struct{ Budget }{})}, []string{"WithBudget: budget is a struct { grpcretry.Budget }, want a budget of this package (Unlimited() for no limit)"}},
		{"nil callback of WithBudgetPerTarget", []Option{WithBudgetPerTarget(nil)}, []string{"WithBudgetPerTarget: callback is nil, want a function"}},
		{"nil budget of a method", []Option{WithMethodBudget("a.B/C", nil)}, []string{`WithMethodBudget("a.B/C"): budget is nil, want a budget of this package`}},
		{"budget of a method that does not exist", []Option{WithMethodBudget("testsrv.v1.DeclaredService/Wacth", Unlimited())},
			[]string{`WithMethodBudget("testsrv.v1.DeclaredService/Wacth"): service testsrv.v1.DeclaredService has no method "Wacth", want one of Full, Hedged, Invalid, Keyed, Watch, Withdrawn`}},
		{"two budgets of a method", []Option{WithMethodBudget("a.B/C", Unlimited()), WithMethodBudget("/a.B/C", Unlimited())},
			[]string{`WithMethodBudget("/a.B/C"): duplicate pattern, want each method or service once`}},
		{"two budgets", []Option{WithBudget(Unlimited()), WithBudgetPerTarget(func(string) Budget { return nil })},
			[]string{"WithBudget and WithBudgetPerTarget are given more than once in all, want one of them once"}},
		{"nil logger", []Option{WithLogger(nil)}, []string{"WithLogger: logger is nil, want a *slog.Logger"}},
		{"two loggers", []Option{WithLogger(slog.Default()), WithLogger(slog.Default())}, []string{"WithLogger is given twice, want it once"}},
		{"empty hooks", []Option{WithHooks(Hooks{})}, []string{"WithHooks: every callback is nil, want at least one function"}},

		{"all faults at once, in the order of what was given", []Option{
			nil,
			WithBudget(nil),
			WithHooks(Hooks{}),
			WithMethodPolicy("a.B/C", Policy{MaxAttempts: -1, Timeout: -1, Backoff: Backoff{Base: -1}, Codes: Codes(17)}),
			WithMethodPolicy("a.B", Policy{IdleTimeout: -1}),
			WithIdempotent("", "a.B/D"),
			WithDefaultPolicy(Policy{MaxAttempts: -2}),
		}, []string{
			"option 1 of 7 is nil, want an Option",
			"WithBudget: budget is nil, want a budget of this package (Unlimited() for no limit)",
			"WithHooks: every callback is nil, want at least one function",
			`WithMethodPolicy("a.B/C"): Policy.MaxAttempts = -1, want 0 (default 3) or more`,
			`WithMethodPolicy("a.B/C"): Policy.Timeout = -1ns, want 0 (none) or more`,
			`WithMethodPolicy("a.B/C"): Policy.Codes holds the code 17, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)`,
			`WithMethodPolicy("a.B/C"): Policy.Backoff.Base = -1ns, want 0 (default 50ms) or more`,
			`WithMethodPolicy("a.B"): Policy.IdleTimeout = -1ns, want 0 (none) or more`,
			`WithMethodPolicy("a.B"): pattern without a service or a method, ` + pattern,
			`WithIdempotent(""): empty pattern, ` + pattern,
			"WithDefaultPolicy: Policy.MaxAttempts = -2, want 0 (default 3) or more",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := "grpcretry: " + strings.Join(tt.faults, "\ngrpcretry: ")
			r, err := New(tt.opts...)
			if got := errText(err); got != want {
				t.Errorf("New: %s\nwant %s", got, want)
			}
			if r != nil {
				t.Error("New gave a Retrier besides the error")
			}
			if joined, ok := err.(interface{ Unwrap() []error }); !ok || len(joined.Unwrap()) != len(tt.faults) {
				t.Errorf("the faults cannot be told apart: %#v", err)
			}
		})
	}
	// Each multiplier that the backoff refuses, named as a field of the policy.
	for _, m := range []float64{-1, math.NaN(), math.Inf(1)} {
		_, err := New(withPolicy(Policy{Backoff: Backoff{Multiplier: m}})...)
		if !strings.HasPrefix(errText(err), `grpcretry: WithMethodPolicy("a.B/C"): Policy.Backoff.Multiplier = `) {
			t.Errorf("Multiplier %v: %v", m, err)
		}
	}
}

// What is good must be accepted, also at the ends of each range.
func TestGoodConfiguration(t *testing.T) {
	budget, err := NewBudget(BudgetConfig{})
	if err != nil {
		t.Fatal(err)
	}
	both, err := AllOf(budget, mustThrottle(t, 10, 0.1))
	if err != nil {
		t.Fatal(err)
	}
	for name, opts := range map[string][]Option{
		"nothing":            nil,
		"the zero policy":    {WithDefaultPolicy(Policy{})},
		"no patterns":        {WithIdempotent()},
		"largest values":     {WithDefaultPolicy(Policy{MaxAttempts: math.MaxInt, Timeout: math.MaxInt64, AttemptTimeout: math.MaxInt64, ReplayBytes: math.MaxInt, Backoff: Backoff{Base: math.MaxInt64, Max: math.MaxInt64, Overload: math.MaxInt64, MaxHint: math.MaxInt64}})},
		"smallest values":    {WithDefaultPolicy(Policy{MaxAttempts: 1, Timeout: 1, AttemptTimeout: 1, FirstResponseTimeout: 1, IdleTimeout: 1, ReplayBytes: 1})},
		"no code at all":     {WithDefaultPolicy(Policy{Codes: Codes()})},
		"every kind":         {WithDefaultPolicy(Policy{Idempotency: NotIdempotent}), WithMethodPolicy("a.B/*", Policy{Idempotency: Keyed}), WithMethodPolicy("a.B/C", Policy{Idempotency: Idempotent})},
		"says it twice":      {WithIdempotent("a.B/C"), WithMethodPolicy("a.B/C", Policy{Idempotency: Idempotent})},
		"hedges":             {WithMethodPolicy("a.B/C", Policy{Hedge: Hedge{MaxAttempts: 3, Delay: time.Millisecond}}), WithMethodPolicy("a.B/D", Policy{Hedge: Hedge{MaxAttempts: 3, AtOnce: true}}), WithMethodPolicy("a.B/E", Policy{Hedge: Hedge{MaxAttempts: 3, Quantile: 0.95}})},
		"hedges of a read":   {WithDefaultPolicy(Policy{Idempotency: NotIdempotent}), WithIdempotent("a.B/C"), WithMethodPolicy("a.B/C", Policy{Hedge: Hedge{MaxAttempts: 2, Delay: 1}})},
		"one hedge":          {WithMethodPolicy("a.B/C", Policy{Idempotency: NotIdempotent, Hedge: Hedge{MaxAttempts: 1}})},
		"unlimited":          {WithBudget(Unlimited())},
		"budget":             {WithBudget(budget)},
		"throttle":           {WithBudget(mustThrottle(t, 10, 0.1))},
		"joined budgets":     {WithBudget(both)},
		"budget of a method": {WithMethodBudget("a.B/*", Unlimited()), WithMethodBudget("a.B/C", mustThrottle(t, 10, 0.1))},
		"budget by target":   {WithBudgetPerTarget(func(string) Budget { return Unlimited() })},
		"several hooks":      {WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) {}}), WithHooks(Hooks{CallEnd: func(context.Context, Report, any, error) {}})},
		"everything else":    {WithoutResolverConfig(), WithEventsOnlyOnRetry(), WithLogger(slog.New(slog.DiscardHandler))},
	} {
		if r, err := New(opts...); err != nil || r == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A Policy is the caller's own struct: changing it afterwards must not change
// what is installed, or a call would see half of a change.
func TestPoliciesAreCopied(t *testing.T) {
	p := Policy{MaxAttempts: 5}
	patterns := []string{write}
	opts := []Option{WithDefaultPolicy(p), WithIdempotent(patterns...)}
	p.MaxAttempts = 9
	r := newRetrier(t, opts...)
	patterns[0] = get
	got := r.Explain(write)
	got.Policy.MaxAttempts = 7
	if e := r.Explain(write); e.Policy.MaxAttempts != 5 || e.Policy.Idempotency != Idempotent {
		t.Errorf("%d attempts, %v; want 5, idempotent", e.Policy.MaxAttempts, e.Policy.Idempotency)
	}
}

// Update swaps everything or nothing: a bad file must leave the good policies in
// force, and wiring that only looks as if it had changed must be refused.
func TestUpdate(t *testing.T) {
	throughout := func(string) Budget { return Unlimited() }
	hook := WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) {}})
	for _, tt := range []struct {
		name string
		opts []Option
		want string // "": accepted
	}{
		{"policies", []Option{WithDefaultPolicy(Policy{MaxAttempts: 8}), WithMethodPolicy(get, Policy{MaxAttempts: 9}), WithIdempotent(write), WithoutResolverConfig()}, ""},
		{"nothing", nil, ""},
		{"budget", []Option{WithBudget(Unlimited())}, "grpcretry: Update: WithBudget cannot change after New, want policy options only"},
		{"budget per target", []Option{WithBudgetPerTarget(throughout)}, "grpcretry: Update: WithBudgetPerTarget cannot change after New, want policy options only"},
		{"budget of a method", []Option{WithMethodBudget(get, Unlimited())}, "grpcretry: Update: WithMethodBudget cannot change after New, want policy options only"},
		{"logger", []Option{WithLogger(slog.Default())}, "grpcretry: Update: WithLogger cannot change after New, want policy options only"},
		{"hooks", []Option{hook}, "grpcretry: Update: WithHooks cannot change after New, want policy options only"},
		{"events", []Option{WithEventsOnlyOnRetry()}, "grpcretry: Update: WithEventsOnlyOnRetry cannot change after New, want policy options only"},
		{"good policies beside wiring", []Option{WithDefaultPolicy(Policy{MaxAttempts: 8}), hook, WithLogger(slog.Default())},
			"grpcretry: Update: WithHooks, WithLogger cannot change after New, want policy options only"},
		{"bad and wiring", []Option{WithDefaultPolicy(Policy{MaxAttempts: -8}), hook},
			"grpcretry: WithDefaultPolicy: Policy.MaxAttempts = -8, want 0 (default 3) or more\n" +
				"grpcretry: Update: WithHooks cannot change after New, want policy options only"},
		{"good and bad", []Option{WithMethodPolicy(get, Policy{MaxAttempts: 9}), WithMethodPolicy("x", Policy{})},
			`grpcretry: WithMethodPolicy("x"): pattern without a service or a method, want "pkg.Service/Method" or "pkg.Service/*"`},
		{"nil", []Option{nil}, "grpcretry: option 1 of 1 is nil, want an Option"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRetrier(t, WithMethodPolicy(get, Policy{MaxAttempts: 5}), WithMethodPolicy(write, Policy{Idempotency: Keyed}))
			before := r.set.Load()
			if got := errText(r.Update(tt.opts...)); got != tt.want {
				t.Errorf("Update: %s\nwant %s", got, tt.want)
			}
			if changed := r.set.Load() != before; changed != (tt.want == "") {
				t.Errorf("the policies changed: %v", changed)
			}
			wantGet, wantWrite := 5, Keyed
			switch tt.name {
			case "policies":
				wantGet, wantWrite = 9, Idempotent
			case "nothing":
				wantGet, wantWrite = 3, Inherit
			}
			if n, i := r.Explain(get).Policy.MaxAttempts, r.Explain(write).Policy.Idempotency; n != wantGet || i != wantWrite {
				t.Errorf("Get has %d attempts and Write is %v, want %d and %v", n, i, wantGet, wantWrite)
			}
		})
	}
}

// A call keeps the policy that it began with, and the next one has the new.
func TestUpdateDuringACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 2, Backoff: Backoff{Base: time.Second, Jitter: NoJitter}}))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		time.AfterFunc(500*time.Millisecond, func() {
			if err := r.Update(WithDefaultPolicy(Policy{MaxAttempts: 5})); err != nil {
				t.Error(err)
			}
		})
		for _, want := range []int{2, 7} { // 2, and 5 more
			if _, err := client.Get(t.Context(), &testpb.Request{}); !errors.Is(err, ErrAttemptsExhausted) {
				t.Errorf("%v, want attempts exhausted", err)
			}
			if n := srv.Count(get); n != want {
				t.Errorf("%d attempts so far, want %d", n, want)
			}
		}
	})
}

// A bad edit fails its own call, before anything is sent, and no other.
func TestCallPolicy(t *testing.T) {
	edit := func(f func(*Policy)) grpc.CallOption { return WithCallPolicy(f) }
	for _, tt := range []struct {
		name string
		opts []grpc.CallOption
		runs int
		want string // of INTERNAL; "": UNAVAILABLE
	}{
		{"none", nil, 3, ""},
		{"more attempts", []grpc.CallOption{edit(func(p *Policy) { p.MaxAttempts = 5 })}, 5, ""},
		{"never", []grpc.CallOption{edit(func(p *Policy) { p.MaxAttempts = 1 })}, 1, ""},
		{"back to the default", []grpc.CallOption{edit(func(p *Policy) { p.MaxAttempts = 0 })}, 3, ""},
		{"in order", []grpc.CallOption{edit(func(p *Policy) { p.MaxAttempts = 5 }), edit(func(p *Policy) { p.MaxAttempts-- })}, 4, ""},
		{"sees the defaults", []grpc.CallOption{edit(func(p *Policy) { p.MaxAttempts *= 2 })}, 6, ""},
		{"sees the idempotency", []grpc.CallOption{edit(func(p *Policy) {
			if p.Idempotency == Idempotent {
				p.MaxAttempts = 4
			}
		})}, 4, ""},
		{"withdraws it", []grpc.CallOption{edit(func(p *Policy) { p.Idempotency = NotIdempotent })}, 1, ""},
		{"nil", []grpc.CallOption{WithCallPolicy(nil)}, 0, "grpcretry: WithCallPolicy: callback is nil, want a function"},
		{"bad", []grpc.CallOption{edit(func(p *Policy) { p.MaxAttempts = -1; p.Timeout = -1 })}, 0,
			"grpcretry: WithCallPolicy: Policy.MaxAttempts = -1, want 0 (default 3) or more\ngrpcretry: WithCallPolicy: Policy.Timeout = -1ns, want 0 (none) or more"},
		{"nil and bad", []grpc.CallOption{WithCallPolicy(nil), edit(func(p *Policy) { p.ReplayBytes = -1 })}, 0,
			"grpcretry: WithCallPolicy: callback is nil, want a function\ngrpcretry: WithCallPolicy: Policy.ReplayBytes = -1, want 0 (default 262144) or more"},
		{"WithoutRetry", []grpc.CallOption{WithoutRetry()}, 1, ""},
		{"WithoutRetry beside an edit", []grpc.CallOption{WithoutRetry(), edit(func(p *Policy) { p.MaxAttempts = 5 })}, 1, ""},
		{"no report", []grpc.CallOption{WithReport(nil)}, 3, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				r := newRetrier(t, WithBudget(budget))
				srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				var report Report
				_, err := client.Get(t.Context(), &testpb.Request{}, append([]grpc.CallOption{WithReport(&report)}, tt.opts...)...)
				st := status.Convert(err)
				if tt.want == "" && st.Code() != codes.Unavailable || tt.want != "" && (st.Code() != codes.Internal || st.Message() != tt.want) {
					t.Errorf("%v\nwant INTERNAL %q, or UNAVAILABLE if that is empty", err, tt.want)
				}
				if n := srv.Count(get); n != tt.runs {
					t.Errorf("%d attempts, want %d", n, tt.runs)
				}
				if report.Method != get || report.Target == "" || report.Made() != tt.runs {
					t.Errorf("report %+v, want %d attempts at %s", report, tt.runs, get)
				}
				if n := budget.state().InFlight; n != 0 {
					t.Errorf("the budget believes that %d calls are in flight", n)
				}
				// The edit was the call's own: the next one has the policy as it was.
				before := srv.Count(get)
				if _, err := client.Get(t.Context(), &testpb.Request{}); status.Code(err) != codes.Unavailable || srv.Count(get) != before+3 {
					t.Errorf("the next call made %d attempts, want 3 (%v)", srv.Count(get)-before, err)
				}
			})
		})
	}
}

// Code that serves both kinds of client passes our call options to plain ones too.
func TestCallOptionsWithoutTheInterceptor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(nil)
		defer srv.Close()
		cc, err := srv.Dial()
		if err != nil {
			t.Fatal(err)
		}
		var report Report
		_, err = testpb.NewTestServiceClient(cc).Get(t.Context(), &testpb.Request{},
			WithCallPolicy(nil), WithoutRetry(), WithReport(&report), WithIdempotencyKey("k"))
		if err != nil || report.Made() != 0 {
			t.Errorf("%v, %+v", err, report)
		}
		if md := srv.Attempts(get)[0].Metadata; len(md.Get("idempotency-key")) != 0 {
			t.Errorf("metadata %v", md)
		}
	})
}

// A callback that gives no budget for a target gets it the default one; a nil
// pointer in an interface must not make the first call panic.
func TestBudgetPerTarget(t *testing.T) {
	for name, give := range map[string]Budget{"nil": nil, "nil pointer": (*TokenBudget)(nil), "nil throttle": (*Throttle)(nil), "embedded nil": struct{ Budget }{}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var targets []string
				r := newRetrier(t, WithBudgetPerTarget(func(target string) Budget { targets = append(targets, target); return give }))
				srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				for range 5 { // 10 retries in all, which is what the default budget holds
					if _, err := client.Get(t.Context(), &testpb.Request{}); !errors.Is(err, ErrAttemptsExhausted) {
						t.Errorf("%v, want attempts exhausted", err)
					}
				}
				if _, err := client.Get(t.Context(), &testpb.Request{}); !errors.Is(err, ErrBudgetExhausted) {
					t.Errorf("%v, want the default budget to be exhausted", err)
				}
				if len(targets) != 1 || !strings.HasSuffix(targets[0], srv.Address()) {
					t.Errorf("asked for %q, want the canonical target once", targets)
				}
			})
		})
	}
}
