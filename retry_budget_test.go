package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A server that is down must not be buried under retries, however many callers
// a client has: two thousand calls of up to four attempts are eight thousand
// requests without a budget.
func TestOutageIsNotAmplified(t *testing.T) {
	for _, workers := range []int{1, 8, 64} {
		for name, test := range map[string]struct {
			step testsrv.Step
			want int // retries
		}{
			"UNAVAILABLE":           {testsrv.Step{Code: codes.Unavailable}, 10},
			"slow UNAVAILABLE":      {testsrv.Step{Code: codes.Unavailable, Delay: ms}, 10},
			"broken connections":    {testsrv.Step{Cut: true}, 10},
			"timeouts":              {testsrv.Step{Block: true}, 5}, // a timeout costs 14
			"overload":              {testsrv.Step{Code: codes.ResourceExhausted, Details: retryAfter(ms)}, 10},
			"pushback that invites": {testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("5")}, 17},
		} {
			t.Run(fmt.Sprintf("%s/workers=%d", name, workers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					calls := 200
					if name == "UNAVAILABLE" {
						calls = 2000
					}
					budget := mustBudget(t, BudgetConfig{FreeInterval: -1})
					srv, client := serve(t, newRetrier(t, WithBudget(budget), exactly(func(p *Policy) {
						p.MaxAttempts, p.AttemptTimeout = 4, 100*ms
					})), testsrv.Script{get: testsrv.Sequence{test.step}})
					var next, refused atomic.Int64
					var all sync.WaitGroup
					for range workers {
						all.Go(func() {
							for next.Add(1) <= int64(calls) {
								_, err := client.Get(t.Context(), &testpb.Request{})
								if err == nil {
									t.Error("a call succeeded")
								}
								if errors.Is(err, ErrBudgetExhausted) {
									refused.Add(1)
								}
							}
						})
					}
					all.Wait()
					if s := budget.state(); s.InFlight != 0 || !test.step.Cut && s.Granted != uint64(test.want) {
						t.Errorf("budget %+v, want %d retries granted, none in flight", s, test.want)
					}
					// A cut takes other calls with it, some before they were sent: these cost nothing, and no server sees them.
					if n := srv.Count(get); n > calls+test.want || !test.step.Cut && n != calls+test.want {
						t.Errorf("the server saw %d requests, want %d", n, calls+test.want)
					}
					if n := refused.Load(); n < int64(calls)-10 {
						t.Errorf("only %d calls were told that the budget is exhausted", n)
					}
				})
			})
		}
	}
}

// One request in ten fails, at random callers: these are what retries are for,
// and the budget must not be the reason that they stay failed.
func TestSporadicFailuresAreHidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls, workers = 2000, 8
		budget := mustBudget(t, BudgetConfig{})
		srv, client := serve(t, newRetrier(t, WithBudget(budget), exactly(attemptsOf(4))), testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			if nth%10 == 0 {
				return testsrv.Step{Code: codes.Unavailable}
			}
			return testsrv.Step{}
		})})
		var next, ok atomic.Int64
		var all sync.WaitGroup
		for range workers {
			all.Go(func() {
				for next.Add(1) <= calls {
					if _, err := client.Get(t.Context(), &testpb.Request{}); err == nil {
						ok.Add(1)
					}
				}
			})
		}
		all.Wait()
		if n := ok.Load(); n < 1990 {
			t.Errorf("%d of %d calls succeeded, want at least 1990", n, calls)
		}
		if s := budget.state(); s.InFlight != 0 || s.Tokens != 70 {
			t.Errorf("budget %+v, want it full: who won gave back what it took", s)
		}
		if n := srv.Count(get); n > calls+calls/9+1 {
			t.Errorf("the server saw %d requests", n)
		}
	})
}

// A call that may not retry must not wait first, and one that waits must hold
// its place: asked after the wait, a budget lets a whole herd wait in vain.
func TestBudgetIsAskedBeforeTheWait(t *testing.T) {
	for name, test := range map[string]struct {
		step              testsrv.Step
		policy            func(*Policy)
		wait              time.Duration
		inWait, won, lost float64 // tokens
	}{
		"transient":               {testsrv.Step{Code: codes.Unavailable}, nil, 10 * ms, 63, 70, 63},
		"timeout":                 {testsrv.Step{Block: true}, func(p *Policy) { p.AttemptTimeout = 100 * ms }, 10 * ms, 56, 70, 56},
		"overload":                {testsrv.Step{Code: codes.ResourceExhausted, Details: retryAfter(0)}, nil, 1010 * ms, 63, 70, 63},
		"invited":                 {testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("30")}, nil, 30 * ms, 66, 70, 66},
		"invited to come at once": {testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("0")}, nil, 0, 66, 70, 66},
	} {
		for end, ends := range map[string]struct {
			then   testsrv.Step
			cancel bool
		}{
			"won":       {},
			"lost":      {then: testsrv.Step{Code: codes.NotFound}},
			"cancelled": {cancel: true},
		} {
			t.Run(name+"/"+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					budget := mustBudget(t, BudgetConfig{})
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					var seen BudgetState
					hooks := Hooks{RetryScheduled: func(_ context.Context, a Attempt) {
						seen = budget.state()
						if a.Delay != test.wait {
							t.Errorf("a wait of %v, want %v", a.Delay, test.wait)
						}
						switch {
						case ends.cancel && a.Delay == 0:
							cancel()
						case ends.cancel:
							time.AfterFunc(a.Delay/2, func() {
								if s := budget.state(); s != seen {
									t.Errorf("in the wait %+v, at its start %+v", s, seen)
								}
								cancel()
							})
						}
					}}
					_, client := serve(t, newRetrier(t, WithBudget(budget), exactly(func(p *Policy) {
						p.MaxAttempts = 2
						if test.policy != nil {
							test.policy(p)
						}
					}), WithHooks(hooks)), testsrv.Script{get: testsrv.Sequence{test.step, ends.then}})
					_, err := client.Get(ctx, &testpb.Request{})
					if seen.Tokens != test.inWait || seen.InFlight != 1 || seen.Granted != 1 {
						t.Errorf("in the wait %+v, want %v tokens", seen, test.inWait)
					}
					want := map[string]float64{"won": test.won, "lost": test.lost, "cancelled": 70}[end]
					if s := budget.state(); s.Tokens != want || s.InFlight != 0 {
						t.Errorf("after it %+v, want %v tokens (%v)", s, want, err)
					}
				})
			})
		}
	}
}

// Refused by the budget, a call has to bring what the server said, and at once.
func TestBudgetExhaustedBringsTheServersError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := mustBudget(t, BudgetConfig{FreeInterval: -1})
		step := testsrv.Step{Code: codes.Unavailable, Message: "no room", Details: retryAfter(ms)}
		srv, client := serve(t, newRetrier(t, WithBudget(budget), exactly(attemptsOf(100))), testsrv.Script{get: testsrv.Sequence{step}})
		_, err := client.Get(t.Context(), &testpb.Request{})
		checkCode(t, err, codes.Unavailable)
		if n := srv.Count(get); n != 11 {
			t.Fatalf("%d attempts, want 11", n)
		}
		for range 3 {
			var report Report
			start := time.Now()
			_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
			checkElapsed(t, start, 0)
			checkCall(t, &report, 1, ReasonBudgetExhausted)
			if !errors.Is(err, ErrBudgetExhausted) {
				t.Errorf("error %v, want ErrBudgetExhausted", err)
			}
			got := status.Convert(err)
			if got.Code() != codes.Unavailable || got.Message() != "no room" || len(got.Details()) != 1 || !proto.Equal(got.Details()[0].(proto.Message), step.Details[0]) {
				t.Errorf("status %v with %v", got, got.Details())
			}
			if report.Attempts[0].Delay != 0 {
				t.Errorf("a wait of %v is told that never was", report.Attempts[0].Delay)
			}
		}
	})
}

// The capacity follows the calls in flight. One that is counted for ever, after
// an unusual end, lets the client hold more tokens for good.
func TestInFlightReturnsToZero(t *testing.T) {
	for name, test := range map[string]struct {
		method  string
		step    testsrv.Step
		policy  func(*Policy)
		options []grpc.CallOption
		cancel  time.Duration
		down    bool
		closed  bool
	}{
		"success":            {},
		"failure":            {step: testsrv.Step{Code: codes.NotFound}},
		"not idempotent":     {method: write, step: testsrv.Step{Code: codes.Unavailable}},
		"attempts exhausted": {step: testsrv.Step{Code: codes.Unavailable}},
		"attempt timeouts":   {step: testsrv.Step{Block: true}, policy: func(p *Policy) { p.AttemptTimeout = ms }},
		"call timeout":       {step: testsrv.Step{Block: true}, policy: func(p *Policy) { p.Timeout = ms }},
		"does not fit":       {step: testsrv.Step{Code: codes.Unavailable}, policy: func(p *Policy) { p.Timeout = ms }},
		"pushback":           {step: testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("-1")}},
		"cancelled in wait":  {step: testsrv.Step{Code: codes.Unavailable}, cancel: 5 * ms},
		"cancelled":          {step: testsrv.Step{Block: true}, cancel: 5 * ms},
		"cancelled before":   {cancel: -1},
		"never sent":         {down: true},
		"closed":             {closed: true},
		"connection broken":  {step: testsrv.Step{Cut: true}},
		"too large":          {step: testsrv.Step{ReplySize: 100}, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)}},
		"WithoutRetry":       {step: testsrv.Step{Code: codes.Unavailable}, options: []grpc.CallOption{WithoutRetry()}},
		"refused edit":       {options: []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.MaxAttempts = -1 })}},
		"nil edit":           {options: []grpc.CallOption{WithCallPolicy(nil)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = get
				}
				own, shared := mustBudget(t, BudgetConfig{}), mustBudget(t, BudgetConfig{})
				srv := testsrv.New(testsrv.Script{test.method: testsrv.Sequence{test.step}})
				t.Cleanup(srv.Close)
				cc, err := srv.Dial(newRetrier(t, WithBudget(shared), WithMethodBudget(test.method, own), exactly(test.policy)).DialOptions()...)
				if err != nil {
					t.Fatal(err)
				}
				if test.down {
					srv.Kill()
				}
				if test.closed {
					_ = cc.Close()
				}
				var all sync.WaitGroup
				for range 5 {
					all.Go(func() {
						ctx, cancel := context.WithCancel(t.Context())
						defer cancel()
						switch {
						case test.cancel < 0:
							cancel()
						case test.cancel > 0:
							time.AfterFunc(test.cancel, cancel)
						}
						_, _ = unaryOf(testpb.NewTestServiceClient(cc), test.method)(ctx, &testpb.Request{}, test.options...)
					})
				}
				all.Wait()
				if a, b := own.state(), shared.state(); a.InFlight != 0 || b.InFlight != 0 {
					t.Errorf("in flight: %d of the method, %d of the target", a.InFlight, b.InFlight)
				}
			})
		})
	}
}
