package grpcretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A wait that cannot end in time only keeps the caller from an error that is
// known already, and replaces it by a bare "deadline exceeded".
func TestWaitThatDoesNotFit(t *testing.T) {
	long := func(p *Policy) { p.Backoff.Base, p.Backoff.Max = 2*time.Second, 2*time.Second }
	hour := func(p *Policy) { p.Backoff.MaxHint = time.Hour }
	quota := func(p *Policy) { p.RetryQuota = true }
	unavailable := testsrv.Step{Code: codes.Unavailable}
	told := func(code codes.Code, delays ...time.Duration) testsrv.Step {
		return testsrv.Step{Code: code, Details: retryAfter(delays...)}
	}
	pushed := func(ms string) testsrv.Step {
		return testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf(ms)}
	}
	for name, test := range map[string]struct {
		step            testsrv.Step
		policy          func(*Policy)
		parent, timeout time.Duration
		fits            time.Duration // the wait, where it fits after all
	}{
		"pushback":                         {step: pushed("60000"), parent: time.Second},
		"pushback, the call's timeout":     {step: pushed("60000"), timeout: time.Second},
		"pushback, the nearer of both":     {step: pushed("1500"), parent: 2 * time.Second, timeout: time.Second},
		"pushback of an hour":              {step: pushed("3600000"), policy: hour, parent: time.Second},
		"pushback up to the deadline":      {step: pushed("1000"), parent: time.Second},
		"pushback just before it":          {step: pushed("999"), parent: time.Second, fits: 999 * ms},
		"RetryInfo":                        {step: told(codes.Unavailable, time.Minute), parent: time.Second},
		"RetryInfo fits, with backoff not": {step: told(codes.Unavailable, 995*ms), parent: time.Second},
		"RetryInfo and backoff fit":        {step: told(codes.Unavailable, 989*ms), parent: time.Second, fits: 999 * ms},
		"backoff":                          {step: unavailable, policy: long, parent: time.Second},
		"backoff, the call's timeout":      {step: unavailable, policy: long, timeout: time.Second},
		"backoff up to the deadline":       {step: unavailable, parent: 10 * ms},
		"backoff just before it":           {step: unavailable, parent: 10*ms + 1, fits: 10 * ms},
		"overload floor":                   {step: testsrv.Step{Code: codes.ResourceExhausted}, policy: quota, parent: time.Second},
		"overload floor, RetryInfo of 0":   {step: told(codes.ResourceExhausted, 0), parent: time.Second},
		"a Func that waits for ever":       {step: unavailable, policy: func(p *Policy) { p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 1<<63 - 1 } }, parent: time.Second},
		"a hint that overflows": {step: told(codes.Unavailable, time.Hour), policy: func(p *Policy) {
			hour(p)
			p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 1<<63 - 1 }
		}, parent: 2 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				test.step.Message = "why"
				srv, client := serve(t, newRetrier(t, WithBudget(budget), exactly(func(p *Policy) {
					p.MaxAttempts, p.Timeout = 2, test.timeout
					if test.policy != nil {
						test.policy(p)
					}
				})), testsrv.Script{get: testsrv.Sequence{test.step}})
				ctx := t.Context()
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				var report Report
				start := time.Now()
				_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
				checkElapsed(t, start, test.fits)
				if test.fits > 0 {
					checkCall(t, &report, 2, ReasonAttemptsExhausted)
					return
				}
				checkCall(t, &report, 1, ReasonDeadline)
				if !errors.Is(err, ErrDeadlineTooClose) || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v, want ErrDeadlineTooClose and no ended context", err)
				}
				got := status.Convert(err)
				if got.Code() != test.step.Code || got.Message() != "why" || len(got.Details()) != len(test.step.Details) {
					t.Errorf("status %v with %v, want the server's own", got, got.Details())
				}
				for i, d := range got.Details() {
					if !proto.Equal(d.(proto.Message), test.step.Details[i]) {
						t.Errorf("detail %v, want %v", d, test.step.Details[i])
					}
				}
				if s := budget.state(); s.Tokens != 70 || s.Granted != 0 {
					t.Errorf("budget %+v, want it unasked", s)
				}
				if n := srv.Count(get); n != 1 {
					t.Errorf("the server saw %d attempts, want 1", n)
				}
			})
		})
	}
}

// Servers use the deadline they are sent to give up early. An attempt that is
// sent more than what is left of the call keeps them at work for nobody.
func TestAttemptDeadlines(t *testing.T) {
	at := func(d time.Duration) func(*Policy) { return func(p *Policy) { p.AttemptTimeout = d } }
	for name, test := range map[string]struct {
		policy          func(*Policy)
		wait            time.Duration
		parent, timeout time.Duration
		want            []time.Duration
		reason          Reason
		elapsed         time.Duration
	}{
		"cut to the parent":           {policy: at(100 * ms), parent: 250 * ms, want: []time.Duration{100 * ms, 100 * ms, 50 * ms}, reason: ReasonParentDone, elapsed: 250 * ms},
		"cut to the call's timeout":   {policy: at(100 * ms), timeout: 250 * ms, want: []time.Duration{100 * ms, 100 * ms, 50 * ms}, reason: ReasonDeadline, elapsed: 250 * ms},
		"less the waits":              {policy: at(100 * ms), wait: 20 * ms, parent: 250 * ms, want: []time.Duration{100 * ms, 100 * ms, 10 * ms}, reason: ReasonParentDone, elapsed: 250 * ms},
		"less a wait of 1 ns":         {policy: at(100 * ms), wait: 1, parent: 250 * ms, want: []time.Duration{100 * ms, 100 * ms, 50*ms - 2}, reason: ReasonParentDone, elapsed: 250 * ms},
		"the nearer of both":          {policy: at(100 * ms), parent: 150 * ms, timeout: 250 * ms, want: []time.Duration{100 * ms, 50 * ms}, reason: ReasonParentDone, elapsed: 150 * ms},
		"the nearer of both, swapped": {policy: at(100 * ms), parent: 250 * ms, timeout: 150 * ms, want: []time.Duration{100 * ms, 50 * ms}, reason: ReasonDeadline, elapsed: 150 * ms},
		"plenty of time":              {policy: at(100 * ms), parent: time.Hour, want: []time.Duration{100 * ms, 100 * ms, 100 * ms}, reason: ReasonAttemptsExhausted, elapsed: 300 * ms},
		"no attempt timeout":          {parent: 250 * ms, want: []time.Duration{250 * ms}, reason: ReasonParentDone, elapsed: 250 * ms},
		"the call's timeout alone":    {timeout: 250 * ms, want: []time.Duration{250 * ms}, reason: ReasonDeadline, elapsed: 250 * ms},
		"longer than the parent":      {policy: at(time.Second), parent: 250 * ms, want: []time.Duration{250 * ms}, reason: ReasonParentDone, elapsed: 250 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, client := serve(t, newRetrier(t, exactly(func(p *Policy) {
					p.Timeout = test.timeout
					p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return test.wait }
					if test.policy != nil {
						test.policy(p)
					}
				})), testsrv.Script{get: testsrv.Sequence{{Block: true}}})
				ctx := t.Context()
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				var report Report
				start := time.Now()
				_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
				checkElapsed(t, start, test.elapsed)
				checkCode(t, err, codes.DeadlineExceeded)
				checkCall(t, &report, len(test.want), test.reason)
				var got []time.Duration
				for _, a := range srv.Attempts(get) {
					got = append(got, a.Left)
				}
				if !slices.Equal(got, test.want) {
					t.Errorf("the server was sent %v, want %v", got, test.want)
				}
			})
		})
	}
}

// An answer that arrived is the answer, even if the caller's time ran out while
// it was on its way up: whoever replaces it makes work that was done look undone.
func TestAnswerIsNotReplacedByACancel(t *testing.T) {
	for name, step := range map[string]testsrv.Step{
		"success": {},
		"failure": {Code: codes.NotFound, Message: "why"},
	} {
		for origin, end := range map[string]func(context.Context) (context.Context, context.CancelFunc){
			"cancel":   context.WithCancel,
			"deadline": func(ctx context.Context) (context.Context, context.CancelFunc) { return context.WithTimeout(ctx, ms) },
		} {
			for _, failures := range []int{0, 1} {
				t.Run(name+"/"+origin, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						srv := testsrv.New(testsrv.Script{get: testsrv.Fail(failures, codes.Unavailable).Then(step)})
						t.Cleanup(srv.Close)
						ctx, cancel := end(t.Context())
						defer cancel()
						client := dial(t, srv, newRetrier(t, exactly(func(p *Policy) {
							p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 0 }
						})), innermost(func(attempt int, invoke func() error) error {
							err := invoke()
							if attempt == failures {
								if origin == "cancel" {
									cancel()
								}
								<-ctx.Done()
							}
							return err
						}))
						var report Report
						reply, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
						if ctx.Err() == nil {
							t.Fatal("the context is still alive")
						}
						checkCode(t, err, step.Code)
						if step.Code == codes.OK {
							if reply.GetArrival() != int64(failures)+1 {
								t.Errorf("reply %v", reply)
							}
							checkCall(t, &report, failures+1, ReasonSuccess)
							return
						}
						if status.Convert(err).Message() != "why" || errors.Is(err, context.Canceled) {
							t.Errorf("error %v, want the server's", err)
						}
						checkCall(t, &report, failures+1, ReasonParentDone)
					})
				})
			}
		}
	}
}
