package grpcretry

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

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

// No deadline at all is the zero Time, which as a time lies before every other:
// one comparison too few and a call without a deadline ends at once.
func TestDeadlineArithmetic(t *testing.T) {
	none := time.Time{}
	now := time.Now()
	soon, late := now.Add(1), now.Add(2)
	for _, tt := range []struct{ a, b, want time.Time }{
		{none, none, none}, {soon, none, soon}, {none, soon, soon}, {soon, late, soon}, {late, soon, soon}, {soon, soon, soon},
	} {
		if got := earlier(tt.a, tt.b); !got.Equal(tt.want) {
			t.Errorf("earlier(%v, %v) = %v, want %v", tt.a, tt.b, got, tt.want)
		}
	}
	for _, tt := range []struct {
		deadline time.Time
		passed   bool
		left     time.Duration
	}{
		{none, false, -1}, {now, true, 0}, {soon, false, 1}, {now.Add(-1), true, 0}, {now.Add(time.Hour), false, time.Hour},
	} {
		if got := passed(tt.deadline, now); got != tt.passed {
			t.Errorf("passed(%v) = %v", tt.deadline.Sub(now), got)
		}
		if got := left(tt.deadline, now); got != tt.left {
			t.Errorf("left(%v) = %v, want %v", tt.deadline.Sub(now), got, tt.left)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) time.Time {
			n := rapid.IntRange(0, 4).Draw(t, name)
			if n == 0 {
				return none
			}
			return now.Add(time.Duration(n))
		}
		a, b := draw("a"), draw("b")
		got := earlier(a, b)
		for _, d := range []time.Time{a, b} {
			if !d.IsZero() && (got.IsZero() || d.Before(got)) {
				t.Fatalf("earlier(%v, %v) = %v", a, b, got)
			}
		}
		if !got.Equal(earlier(b, a)) || !got.Equal(a) && !got.Equal(b) {
			t.Fatalf("earlier(%v, %v) = %v", a, b, got)
		}
	})
}

// A moment is a time without the wall clock; both must tell the same story.
func TestMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, start := now(), time.Now()
		time.Sleep(90 * time.Minute)
		if got := m.time(time.Now()); !got.Equal(start) {
			t.Errorf("the moment lies at %v, want %v", got, start)
		}
		if d := time.Duration(now() - m); d != 90*time.Minute {
			t.Errorf("%v passed, want 1h30m", d)
		}
	})
}

// A wait must last exactly as long as decided, end when the caller goes, and
// never let an attempt through for a caller who is gone already.
func TestSleep(t *testing.T) {
	for _, tt := range []struct {
		name    string
		wait    time.Duration
		ended   time.Duration // when the context ends; negative: never
		want    bool
		elapsed time.Duration
	}{
		{"whole", time.Minute, -1, true, time.Minute},
		{"nothing", 0, -1, true, 0},
		{"negative", -time.Minute, -1, true, 0},
		{"cut", time.Minute, time.Second, false, time.Second},
		{"over before it begins", time.Minute, 0, false, 0},
		{"nothing, but over", 0, 0, false, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				switch {
				case tt.ended == 0:
					cancel()
				case tt.ended > 0:
					time.AfterFunc(tt.ended, cancel)
				}
				start := time.Now()
				if got := sleep(ctx, tt.wait); got != tt.want || time.Since(start) != tt.elapsed {
					t.Errorf("%v after %v, want %v after %v", got, time.Since(start), tt.want, tt.elapsed)
				}
			})
		})
	}
	// Where both are over at the end of the wait, the select throws a coin, and
	// the context must win.
	synctest.Test(t, func(t *testing.T) {
		for range 50 {
			ctx := overAt{t.Context(), time.Now().Add(time.Second)}
			if sleep(ctx, time.Second) {
				t.Fatal("the wait went on to an attempt for a caller who had left")
			}
		}
	})
}

// overAt is a context that has ended once it is asked at or after a time.
type overAt struct {
	context.Context
	at time.Time
}

func (c overAt) Err() error {
	if passed(c.at, time.Now()) {
		return context.Canceled
	}
	return nil
}

// Each limit that a call can have, alone and together: the sooner one rules, the
// attempts shrink to what is left, and the reason names who ended the call.
func TestDeadlinesOfACall(t *testing.T) {
	const ms = time.Millisecond
	block := testsrv.Sequence{{Block: true}}
	noWait := Backoff{Base: 1, Max: 1, Jitter: NoJitter, Multiplier: 1}
	for _, tt := range []struct {
		name     string
		policy   Policy
		parent   time.Duration
		script   testsrv.Reaction
		elapsed  time.Duration
		left     []time.Duration // the deadline that each attempt brought to the server
		reason   Reason
		code     codes.Code
		sentinel error
		wrapped  bool
	}{
		{name: "none", script: testsrv.Fail(1, codes.Unavailable).ThenOK(), policy: Policy{Backoff: noWait},
			elapsed: 1, left: []time.Duration{-1, -1}, reason: ReasonSuccess},
		{name: "parent alone", parent: 50 * ms, script: block,
			elapsed: 50 * ms, left: []time.Duration{50 * ms}, reason: ReasonParentDone, code: codes.DeadlineExceeded},
		{name: "attempts", policy: Policy{AttemptTimeout: 100 * ms, Backoff: noWait}, script: block,
			elapsed: 300*ms + 2, left: []time.Duration{100 * ms, 100 * ms, 100 * ms}, reason: ReasonAttemptsExhausted, code: codes.DeadlineExceeded, sentinel: ErrAttemptsExhausted, wrapped: true},
		{name: "attempts that shrink to the parent", policy: Policy{AttemptTimeout: 100 * ms, MaxAttempts: 5, Backoff: Backoff{Base: 5 * ms, Max: 5 * ms, Jitter: NoJitter}}, parent: 250 * ms, script: block,
			elapsed: 250 * ms, left: []time.Duration{100 * ms, 100 * ms, 40 * ms}, reason: ReasonParentDone, code: codes.DeadlineExceeded, wrapped: true},
		{name: "attempts that shrink to the call", policy: Policy{AttemptTimeout: 100 * ms, Timeout: 250 * ms, MaxAttempts: 5, Backoff: Backoff{Base: 5 * ms, Max: 5 * ms, Jitter: NoJitter}}, script: block,
			elapsed: 250 * ms, left: []time.Duration{100 * ms, 100 * ms, 40 * ms}, reason: ReasonDeadline, code: codes.DeadlineExceeded, sentinel: ErrDeadlineTooClose, wrapped: true},
		{name: "call alone", policy: Policy{Timeout: 50 * ms}, script: block,
			elapsed: 50 * ms, left: []time.Duration{50 * ms}, reason: ReasonDeadline, code: codes.DeadlineExceeded, sentinel: ErrDeadlineTooClose, wrapped: true},
		{name: "call that is never retried", policy: Policy{Timeout: 50 * ms, MaxAttempts: 1}, script: block,
			elapsed: 50 * ms, left: []time.Duration{50 * ms}, reason: ReasonDisabled, code: codes.DeadlineExceeded},
		{name: "attempt as long as the call", policy: Policy{Timeout: 50 * ms, AttemptTimeout: 50 * ms}, script: block,
			elapsed: 50 * ms, left: []time.Duration{50 * ms}, reason: ReasonDeadline, code: codes.DeadlineExceeded, sentinel: ErrDeadlineTooClose, wrapped: true},
		{name: "call longer than the parent", policy: Policy{Timeout: time.Hour}, parent: 50 * ms, script: block,
			elapsed: 50 * ms, left: []time.Duration{50 * ms}, reason: ReasonParentDone, code: codes.DeadlineExceeded},
		{name: "a timeout too long for the clock", policy: Policy{Timeout: 1<<63 - 1, AttemptTimeout: 1<<63 - 1}, script: testsrv.Sequence{{}}, reason: ReasonSuccess, left: []time.Duration{-2}},
		{name: "call as long as the parent", policy: Policy{Timeout: 50 * ms}, parent: 50 * ms, script: block,
			elapsed: 50 * ms, left: []time.Duration{50 * ms}, reason: ReasonParentDone, code: codes.DeadlineExceeded},
		{name: "the handler's own DEADLINE_EXCEEDED", policy: Policy{AttemptTimeout: time.Second, Timeout: time.Minute}, parent: time.Hour, script: testsrv.Sequence{{Code: codes.DeadlineExceeded}},
			left: []time.Duration{time.Second}, reason: ReasonNotRetryable, code: codes.DeadlineExceeded},
		{name: "the wait does not fit", policy: Policy{Timeout: 100 * ms, Backoff: Backoff{Base: 100 * ms, Jitter: NoJitter}}, script: testsrv.Fail(1, codes.Unavailable),
			left: []time.Duration{100 * ms}, reason: ReasonDeadline, code: codes.Unavailable, sentinel: ErrDeadlineTooClose, wrapped: true},
		{name: "the wait fits by a millisecond", policy: Policy{Timeout: 101 * ms, Backoff: Backoff{Base: 100 * ms, Jitter: NoJitter}}, script: testsrv.Fail(1, codes.Unavailable).ThenOK(),
			elapsed: 100 * ms, left: []time.Duration{101 * ms, ms}, reason: ReasonSuccess},
		{name: "a pushback that does not fit", parent: time.Second, script: testsrv.Sequence{{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "1000")}},
			left: []time.Duration{time.Second}, reason: ReasonDeadline, code: codes.Unavailable, sentinel: ErrDeadlineTooClose, wrapped: true},
		{name: "an answer at the last moment", policy: Policy{Timeout: 100 * ms}, script: testsrv.Sequence{{Delay: 99 * ms}},
			elapsed: 99 * ms, left: []time.Duration{100 * ms}, reason: ReasonSuccess},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithDefaultPolicy(tt.policy))
				srv, client := serve(t, r, testsrv.Script{"*": tt.script})
				// The connection is there already, so that the times below are the calls'.
				warm(t, srv, client)
				ctx := t.Context()
				if tt.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.parent)
					defer cancel()
				}
				start := time.Now()
				var report Report
				_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
				if d := time.Since(start); d != tt.elapsed {
					t.Errorf("took %v, want %v", d, tt.elapsed)
				}
				if report.Reason != tt.reason || status.Code(err) != tt.code {
					t.Errorf("%v, %v; want %v, %v", report.Reason, err, tt.reason, tt.code)
				}
				var e *Error
				if errors.As(err, &e) != tt.wrapped || tt.sentinel != nil && !errors.Is(err, tt.sentinel) {
					t.Errorf("%T %v; wrapped: %v, want %v as %v", err, err, e != nil, tt.wrapped, tt.sentinel)
				}
				synctest.Wait()
				if err := srv.WaitIdle(ctx); err != nil && srv.Running() > 0 {
					t.Errorf("%d handlers run on", srv.Running())
				}
				attempts := srv.Attempts(get)
				if len(attempts) != len(tt.left) {
					t.Fatalf("%d attempts arrived, want %d", len(attempts), len(tt.left))
				}
				for i, a := range attempts {
					switch {
					case tt.left[i] == -1 && a.HasDeadline, tt.left[i] != -1 && !a.HasDeadline:
						t.Errorf("attempt %d has a deadline: %v", i+1, a.HasDeadline)
					case tt.left[i] > 0 && a.Left != tt.left[i]:
						t.Errorf("attempt %d had %v left, want %v", i+1, a.Left, tt.left[i])
					}
				}
			})
		})
	}
}

// warm makes the client connect, by a call that no test here counts.
func warm(t testing.TB, srv *testsrv.Server, client testpb.TestServiceClient) {
	t.Helper()
	if err := srv.Set(put, testsrv.Sequence{{}}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Put(t.Context(), &testpb.Request{}); err != nil {
		t.Fatal(err)
	}
}

// Remaining tells hooks and reports what was left: 0 once it has passed, and -1
// where nothing limits the call, which must not be taken for "no time left".
func TestRemaining(t *testing.T) {
	for name, tt := range map[string]struct {
		policy Policy
		parent time.Duration
		want   []time.Duration
	}{
		"none":   {Policy{MaxAttempts: 2}, 0, []time.Duration{-1, -1}},
		"parent": {Policy{MaxAttempts: 2}, time.Minute, []time.Duration{time.Minute, time.Minute - 50*time.Millisecond}},
		"call":   {Policy{MaxAttempts: 2, Timeout: time.Second}, time.Minute, []time.Duration{time.Second, 950 * time.Millisecond}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tt.policy.Backoff.Jitter = NoJitter
				r := newRetrier(t, WithDefaultPolicy(tt.policy))
				_, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				ctx := t.Context()
				if tt.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.parent)
					defer cancel()
				}
				var report Report
				if _, err := client.Get(ctx, &testpb.Request{}, WithReport(&report)); err == nil {
					t.Fatal("no error")
				}
				for i, a := range report.Attempts {
					if a.Remaining != tt.want[i] {
						t.Errorf("attempt %d: %v left, want %v", i+1, a.Remaining, tt.want[i])
					}
				}
			})
		})
	}
	// A deadline that passes while nothing answers leaves 0, not less.
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t)
		_, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{{Block: true}}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		var report Report
		_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report), grpc.WaitForReady(true))
		if status.Code(err) != codes.DeadlineExceeded || report.Attempts[0].Remaining != 0 {
			t.Errorf("%v with %v left, want 0", err, report.Attempts[0].Remaining)
		}
	})
}
