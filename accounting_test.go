package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// accounts are the three kinds of budget that a call can be charged to at once.
type accounts struct {
	target, method *TokenBudget
	throttle       *Throttle
}

// newAccounts also gives the options by which calls of Get are charged to all
// three, and those of other methods to the target and the throttle.
func newAccounts(t testing.TB) (accounts, []Option) {
	t.Helper()
	a := accounts{mustBudget(t, BudgetConfig{}), mustBudget(t, BudgetConfig{}), mustThrottle(t, 10, 0.1)}
	both, err := AllOf(a.target, a.throttle)
	if err != nil {
		t.Fatal(err)
	}
	return a, []Option{WithBudget(both), WithMethodBudget("testsrv.v1.TestService/Get", a.method)}
}

// check compares what is left. No call may be in flight.
func (a accounts) check(t testing.TB, when string, target, method, throttle float64) {
	t.Helper()
	if bank(a.target) != target || bank(a.method) != method || a.throttle.state().Tokens != throttle {
		t.Errorf("%s: %v tokens of the target, %v of the method, %v in the throttle; want %v, %v, %v",
			when, bank(a.target), bank(a.method), a.throttle.state().Tokens, target, method, throttle)
	}
	if x, y := a.target.inflight.Load(), a.method.inflight.Load(); x != 0 || y != 0 {
		t.Errorf("%s: %d and %d calls in flight, want none: the capacity is inflated for good", when, x, y)
	}
}

// A retry that cannot be sent must cost nothing, or calls that were never to be
// retried use up what others need.
func TestNoChargeForWhatCannotBeSent(t *testing.T) {
	down := testsrv.Step{Code: codes.Unavailable}
	for _, tt := range []struct {
		name     string
		policy   Policy
		step     testsrv.Step
		timeout  time.Duration
		opts     []grpc.CallOption
		reason   Reason // ReasonNone: the attempt's own error
		failures int    // that the throttle counts
	}{
		{"attempts used up", Policy{MaxAttempts: 1}, down, 0, nil, ReasonNone, 0},
		{"switched off for the call", Policy{}, down, 0, []grpc.CallOption{WithoutRetry()}, ReasonNone, 0},
		{"code not in the set", Policy{}, testsrv.Step{Code: codes.NotFound}, 0, nil, ReasonNone, 0},
		{"not idempotent", Policy{Idempotency: NotIdempotent}, down, 0, nil, ReasonNone, 1},
		{"RetryIf stops", Policy{RetryIf: func(Attempt) Verdict { return VerdictStop }}, down, 0, nil, ReasonNone, 0},
		{"server asks for no retry", Policy{}, testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "-1")}, 0, nil, ReasonPushbackStop, 1},
		{"hint too long", Policy{}, testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "99999999")}, 0, nil, ReasonPushbackStop, 1},
		{"wait does not fit the deadline", Policy{Backoff: Backoff{Base: time.Minute, Max: time.Minute, Jitter: NoJitter}}, down, time.Second, nil, ReasonDeadline, 1},
		{"caller's deadline has passed", Policy{}, testsrv.Step{Block: true}, time.Second, nil, ReasonNone, 0},
		{"reply too large", Policy{Codes: Codes(codes.ResourceExhausted), RetryQuota: true}, testsrv.Step{ReplySize: 1000}, 0, []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)}, ReasonNone, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, opts := newAccounts(t)
				r := newRetrier(t, append(opts, WithDefaultPolicy(tt.policy))...)
				srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{tt.step}})
				ctx := t.Context()
				if tt.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.timeout)
					defer cancel()
				}
				_, err := client.Get(ctx, &testpb.Request{}, tt.opts...)
				var e *Error
				if err == nil || errors.As(err, &e) != (tt.reason != ReasonNone) || e != nil && e.Reason != tt.reason {
					t.Errorf("error %#v, want the reason %v", err, tt.reason)
				}
				if got := srv.Count(get); got != 1 {
					t.Errorf("%d attempts, want 1", got)
				}
				a.check(t, "after the call", 70, 70, 10-float64(tt.failures))
				if a.target.state().Granted+a.target.state().Refused+a.method.state().Granted+a.method.state().Refused != 0 {
					t.Errorf("a budget was asked: target %+v, method %+v", a.target.state(), a.method.state())
				}
			})
		})
	}
}

// Two Retriers in one chain, e.g. one of a library and one of its user, must
// not count a call twice: ten successes are ten deposits, and an outage costs
// one retry where one was made.
func TestTwoRetriersAccountOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outerBudget := mustBudget(t, BudgetConfig{})
		shared := mustBudget(t, BudgetConfig{})
		both, err := AllOf(outerBudget, shared)
		if err != nil {
			t.Fatal(err)
		}
		policy := WithDefaultPolicy(Policy{Idempotency: Idempotent, Backoff: atOnce})
		outer, inner := newRetrier(t, policy, WithBudget(both)), newRetrier(t, policy, WithBudget(shared))
		srv := testsrv.New(nil)
		t.Cleanup(srv.Close)
		client := dial(t, srv, outer, inner.DialOptions()...)
		for range 5 {
			shared.Reserve(CostTransient)
			outerBudget.Reserve(CostTransient)
		}
		for i := range 10 {
			if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
			if got, want := bank(shared), float64(35+i+1); got != want {
				t.Fatalf("%v tokens after %d successes, want %v", got, i+1, want)
			}
		}
		if err := srv.Set(get, testsrv.Fail(1, codes.Unavailable)); err != nil {
			t.Fatal(err)
		}
		before := srv.Count(get)
		if _, err := client.Get(t.Context(), &testpb.Request{}); status.Code(err) != codes.Unavailable {
			t.Fatalf("error %v, want UNAVAILABLE", err)
		}
		if got := srv.Count(get) - before; got != 3 {
			t.Errorf("%d attempts, want 3 and not 9", got)
		}
		if s := shared.state(); s.Tokens != 31 || s.InFlight != 0 || bank(outerBudget) != 31 {
			t.Errorf("%+v and %v tokens of the outer, want 45 - 14 and nothing in flight", s, bank(outerBudget))
		}
	})
}

// A client that only makes a call now and then must find out that an outage has
// ended, and may then retry again for what its successes earn.
func TestOneRetryAMinuteTricklesIn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 2, Backoff: atOnce}))
		srv, client := serve(t, r, testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
		calls := func(n int) (attempts int) {
			before := srv.Count(get)
			for range n {
				_, _ = client.Get(t.Context(), &testpb.Request{})
			}
			return srv.Count(get) - before
		}
		for _, tt := range []struct {
			idle        time.Duration
			calls, want int
		}{
			{0, 50, 60},
			{59 * time.Second, 50, 50},
			{time.Second, 50, 51},
			{59 * time.Second, 50, 50},
			{time.Second, 1, 2},
			{time.Hour, 50, 51}, // it does not save up
		} {
			time.Sleep(tt.idle)
			if got := calls(tt.calls); got != tt.want {
				t.Errorf("%d calls after another %v: %d attempts, want %d", tt.calls, tt.idle, got, tt.want)
			}
		}
		if err := srv.Set(get, testsrv.Sequence{}); err != nil {
			t.Fatal(err)
		}
		calls(21)
		if err := srv.Set(get, testsrv.Fail(1, codes.Unavailable)); err != nil {
			t.Fatal(err)
		}
		if got := calls(50); got != 53 {
			t.Errorf("after 21 successes 50 calls made %d attempts, want 53: three retries were earned", got)
		}
	})
}

// Under the throttle a long good time must not be saved up: after about half
// of maxTokens failures the retries stop.
func TestThrottleForgetsGoodTimes(t *testing.T) {
	throttle := mustThrottle(t, 10, 0.1)
	r := newRetrier(t, anyMethod, WithBudget(throttle))
	record(throttle, OutcomeOK, 1_000_000)
	for range 1000 {
		if _, err := invoke(t, r, "/s/M", answering); err != nil {
			t.Fatal(err)
		}
		if got := throttle.state().Tokens; got != 10 {
			t.Fatalf("%v tokens of 10", got)
		}
	}
	total := 0
	for i, want := range []int{3, 2, 1, 1, 1, 1, 1, 1, 1} { // 9 8 7, 6 5, 4, 3, 2, 1, 0, 0, 0
		attempts, _ := invoke(t, r, "/s/M", failing)
		total += attempts
		if got := throttle.state().Tokens; attempts != want || got != max(0, 10-float64(total)) {
			t.Errorf("call %d: %d attempts, %v tokens left; want %d, %v", i, attempts, got, want, max(0, 10-float64(total)))
		}
	}
}

// A thousand calls fail at the same moment: what goes out again is what the
// balance pays for, whatever the interleaving.
func TestHerdOfCalls(t *testing.T) {
	for _, tt := range []struct {
		name   string
		earned int
		want   int // attempts beyond the first of each call
	}{
		{"fresh", 0, 10},
		{"earned", 630, 100}, // (70 + 630)/7
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const calls = 1000
				b := mustBudget(t, BudgetConfig{})
				r := newRetrier(t, WithBudget(b))
				srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Code: codes.Unavailable, Delay: time.Second}}})
				var exhausted atomic.Int64
				var wg sync.WaitGroup
				for range calls {
					wg.Go(func() {
						_, err := client.Get(t.Context(), &testpb.Request{})
						if errors.Is(err, ErrBudgetExhausted) {
							exhausted.Add(1)
						}
						if status.Code(err) != codes.Unavailable {
							t.Errorf("error %v, want the server's UNAVAILABLE", err)
						}
					})
				}
				if err := srv.WaitCount(t.Context(), get, calls); err != nil {
					t.Fatal(err)
				}
				record(b, OutcomeOK, tt.earned) // the capacity is 10,000 now
				wg.Wait()
				if got := srv.Count(get) - calls; got != tt.want {
					t.Errorf("%d retries, want %d", got, tt.want)
				}
				if s := b.state(); s.InFlight != 0 || s.Granted != uint64(tt.want) || int64(s.Refused) != exhausted.Load() {
					t.Errorf("state %+v, %d calls say that the budget is exhausted", s, exhausted.Load())
				}
			})
		})
	}
}

// New limits in the middle of an outage must neither refill the budget, which
// would send a new wave at the server, nor empty it.
func TestRescaleBetweenCalls(t *testing.T) {
	t.Run("throttle", func(t *testing.T) {
		throttle := mustThrottle(t, 10, 0.1)
		r := newRetrier(t, WithDefaultPolicy(Policy{Idempotency: Idempotent, MaxAttempts: 2, Backoff: atOnce}), WithBudget(throttle))
		for _, tt := range []struct {
			attempts int
			tokens   float64
		}{{2, 8}, {2, 6}, {1, 5}} { // of 10
			if got, _ := invoke(t, r, "/s/M", failing); got != tt.attempts || throttle.state().Tokens != tt.tokens {
				t.Errorf("of 10: %d attempts, %v tokens; want %d, %v", got, throttle.state().Tokens, tt.attempts, tt.tokens)
			}
		}
		if err := throttle.Rescale(100, 0.1); err != nil {
			t.Fatal(err)
		}
		if got, _ := invoke(t, r, "/s/M", failing); got != 1 || throttle.state().Tokens != 49 {
			t.Errorf("of 100: %d attempts, %v tokens; want 1 and 50 - 1", got, throttle.state().Tokens)
		}
		for range 11 {
			invoke(t, r, "/s/M", answering)
		}
		if got, _ := invoke(t, r, "/s/M", failing); got != 1 {
			t.Errorf("at 49.1 of 100: %d attempts, want 1", got)
		}
		for range 30 {
			invoke(t, r, "/s/M", answering)
		}
		if got, _ := invoke(t, r, "/s/M", failing); got != 2 || throttle.state().Tokens != 50.1 {
			t.Errorf("of 100: %d attempts, %v tokens; want 2 and 52.1 - 2", got, throttle.state().Tokens)
		}
	})
	t.Run("tokens, with calls in their waits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := mustBudget(t, BudgetConfig{FreeInterval: -1})
			r := newRetrier(t, WithBudget(b), WithDefaultPolicy(Policy{Idempotency: Idempotent, MaxAttempts: 2,
				Backoff: Backoff{Base: time.Second, Jitter: NoJitter}}))
			var wg sync.WaitGroup
			for range 5 {
				wg.Go(func() { _ = r.unary(t.Context(), "/s/M", nil, nil, nil, failing) })
			}
			synctest.Wait()
			if got := bank(b); got != 35 {
				t.Fatalf("%v tokens during the waits, want 35", got)
			}
			if err := b.Rescale(BudgetConfig{Capacity: 700, FreeInterval: -1}); err != nil {
				t.Fatal(err)
			}
			if s := b.state(); s.Tokens != 350 || s.Capacity != 700 || s.InFlight != 5 {
				t.Errorf("state %+v, want half of 700 and 5 in flight", s)
			}
			wg.Wait()
			if s := b.state(); s.Tokens != 350 || s.InFlight != 0 || s.Granted != 5 {
				t.Errorf("state %+v, want 350: the five retries were paid", s)
			}
		})
	})
}

// Whoever gives up while a call waits for its retry gets the server's error and
// leaves every budget as it was: nothing was sent.
func TestCancelInTheWaitGivesBack(t *testing.T) {
	for _, tt := range []struct {
		name    string
		context func(context.Context) (context.Context, context.CancelFunc)
		code    codes.Code
	}{
		{"cancel", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(500*time.Millisecond, cancel)
			return ctx, cancel
		}, codes.Canceled},
		// The clock of this context is the caller's own, so the wait could not know that it does not fit.
		{"deadline without a date", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
			return undated{ctx}, cancel
		}, codes.DeadlineExceeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, opts := newAccounts(t)
				r := newRetrier(t, append(opts, WithDefaultPolicy(Policy{Backoff: Backoff{Base: time.Second, Jitter: NoJitter}}))...)
				srv, client := serve(t, r, testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
				ctx, cancel := tt.context(t.Context())
				defer cancel()
				var wg sync.WaitGroup
				for range 4 {
					wg.Go(func() {
						_, err := client.Get(ctx, &testpb.Request{})
						if status.Code(err) != tt.code || status.Code(errors.Unwrap(err)) != codes.Unavailable {
							t.Errorf("error %v, want %v that wraps the server's UNAVAILABLE", err, tt.code)
						}
					})
				}
				time.Sleep(499 * time.Millisecond)
				if bank(a.target) != 42 || bank(a.method) != 42 {
					t.Errorf("in the waits: %v and %v tokens, want 70 - 4*7", bank(a.target), bank(a.method))
				}
				start := time.Now()
				wg.Wait()
				if got := time.Since(start); got != time.Millisecond {
					t.Errorf("the calls returned after another %v, want 1ms", got)
				}
				if got := srv.Count(get); got != 4 {
					t.Errorf("%d attempts, want 4", got)
				}
				a.check(t, "after the cancel", 70, 70, 6)
				if s := a.method.state(); s.Granted != 4 || s.Refused != 0 {
					t.Errorf("method's state %+v, want 4 granted", s)
				}
			})
		})
	}
}

// undated hides the deadline of a context, as some hand-made ones do.
type undated struct{ context.Context }

func (undated) Deadline() (time.Time, bool) { return time.Time{}, false }

// A panic in a user's callback is caught by many servers further up; each one
// must leave the balance as it was, and no call in flight behind.
func TestPanicsLeaveTheBalance(t *testing.T) {
	for _, tt := range []struct {
		in                       string // which callback
		at                       int    // in which attempt
		target, method, throttle float64
	}{
		{"edit", 1, 70, 70, 10},
		{"RetryIf", 1, 70, 70, 10},
		{"Func", 1, 70, 70, 10},
		{"AttemptEnd", 1, 70, 70, 9}, // the failure was counted, the grant goes back
		{"RetryScheduled", 1, 70, 70, 9},
		{"log", 1, 70, 70, 9},
		{"RetryIf", 2, 63, 63, 9}, // the retry went out and lost, and no other was granted
		{"Func", 2, 63, 63, 9},
		{"AttemptEnd", 2, 63, 63, 8},
		{"RetryScheduled", 2, 63, 63, 8},
		{"invoker", 1, 70, 70, 10},
		{"invoker", 2, 63, 63, 9}, // it was on its way
		{"AttemptEnd", 3, 56, 56, 7},
		{"CallEnd", 3, 56, 56, 7},
		{"OnFinish", 3, 56, 56, 7},
	} {
		for _, how := range []string{"panic", "Goexit"} {
			t.Run(fmt.Sprintf("%s in %s, attempt %d", how, tt.in, tt.at), func(t *testing.T) {
				a, opts := newAccounts(t)
				attempt := 0
				fail := func(in string) {
					if in != tt.in || attempt != tt.at {
						return
					}
					if how == "Goexit" {
						runtime.Goexit()
					}
					panic(in)
				}
				hooks := Hooks{
					AttemptEnd:     func(context.Context, Attempt) { fail("AttemptEnd") },
					RetryScheduled: func(context.Context, Attempt) { fail("RetryScheduled") },
					CallEnd:        func(context.Context, Report, any, error) { fail("CallEnd") },
				}
				policy := Policy{
					RetryIf: func(Attempt) Verdict { fail("RetryIf"); return VerdictDefault },
					Backoff: Backoff{Func: func(int, time.Duration, Attempt) time.Duration { fail("Func"); return 0 }},
				}
				r, err := New(append(opts, WithHooks(hooks), WithDefaultPolicy(policy), WithLogger(panickyLogger(func() { fail("log") })))...)
				if err != nil {
					t.Fatal(err)
				}
				invoker := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
					attempt++
					fail("invoker")
					return failing(ctx, method, req, reply, cc, opts...)
				}
				edit := WithCallPolicy(func(*Policy) {
					if tt.in == "edit" {
						attempt = 1
						fail("edit")
					}
				})
				var recovered any
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					defer func() { recovered = recover() }()
					_ = r.unary(t.Context(), get, nil, nil, nil, invoker, edit, grpc.OnFinish(func(error) { fail("OnFinish") }))
					recovered = "returned"
				}()
				<-ended
				if want := any(tt.in); how == "panic" && recovered != want || how == "Goexit" && recovered != nil {
					t.Fatalf("recovered %v", recovered)
				}
				a.check(t, "afterwards", tt.target, tt.method, tt.throttle)
				for _, s := range r.Budgets() {
					if s.InFlight != 0 {
						t.Errorf("%+v: a call is in flight for ever", s)
					}
				}
			})
		}
	}
}

// A budget without a grant must show in the error and in nothing else: the
// server's status stays, and the wait is not begun.
func TestRefusalReturnsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, opts := newAccounts(t)
		r := newRetrier(t, append(opts, WithDefaultPolicy(Policy{Backoff: Backoff{Base: time.Second, Jitter: NoJitter}}))...)
		_, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Code: codes.Unavailable, Message: "maintenance"}}})
		for range 10 {
			a.method.Reserve(CostTransient)
		}
		start := time.Now()
		_, err := client.Get(t.Context(), &testpb.Request{})
		if got := time.Since(start); got != 0 {
			t.Errorf("the call took %v, want no wait", got)
		}
		if st, _ := status.FromError(err); !errors.Is(err, ErrBudgetExhausted) || st.Code() != codes.Unavailable || st.Message() != "maintenance" {
			t.Errorf("error %v, want the server's own, and that the budget is exhausted", err)
		}
		if !strings.Contains(err.Error(), "budget_exhausted") {
			t.Errorf("error %q does not say why there was no retry", err)
		}
		a.check(t, "after the refusal", 70, 0, 9)
	})
}

// panickyLogger runs fail at each line.
func panickyLogger(fail func()) *slog.Logger { return slog.New(panickyHandler{fail}) }

type panickyHandler struct{ fail func() }

func (panickyHandler) Enabled(context.Context, slog.Level) bool    { return true }
func (h panickyHandler) Handle(context.Context, slog.Record) error { h.fail(); return nil }
func (h panickyHandler) WithAttrs([]slog.Attr) slog.Handler        { return h }
func (h panickyHandler) WithGroup(string) slog.Handler             { return h }
