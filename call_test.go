package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
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

// invokeFake makes one call through r with an invoker in place of grpc; i
// counts its runs from 0.
func invokeFake(ctx context.Context, r *Retrier, method string, invoke func(i int) error, opts ...grpc.CallOption) error {
	i := -1
	return r.UnaryClientInterceptor()(ctx, method, &testpb.Request{}, &testpb.Response{}, nil,
		func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			i++
			return invoke(i)
		}, opts...)
}

// innermost is an interceptor right above grpc; attempt counts its runs from 0.
func innermost(f func(attempt int, invoke func() error) error) grpc.DialOption {
	attempt := -1
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		attempt++
		return f(attempt, func() error { return invoker(ctx, method, req, reply, cc, opts...) })
	})
}

// A server under load says when to come back, or never. Misread, its "never"
// becomes "at once", which is how retries bring down what was only slow.
func TestPushbackIsHeeded(t *testing.T) {
	const stop = -1
	for name, test := range map[string]struct {
		values []string
		policy func(*Policy)
		code   codes.Code // 0: UNAVAILABLE
		wait   time.Duration
		reason Reason
	}{
		"-1":                               {values: []string{"-1"}, wait: stop, reason: ReasonPushbackStop},
		"-2147483648":                      {values: []string{"-2147483648"}, wait: stop, reason: ReasonPushbackStop},
		"abc":                              {values: []string{"abc"}, wait: stop, reason: ReasonPushbackStop},
		"1 and 2":                          {values: []string{"1", "2"}, wait: stop, reason: ReasonPushbackStop},
		"1 twice":                          {values: []string{"1", "1"}, wait: stop, reason: ReasonPushbackStop},
		"-1 and 5":                         {values: []string{"-1", "5"}, wait: stop, reason: ReasonPushbackStop},
		"0":                                {values: []string{"0"}, wait: 0, reason: ReasonAttemptsExhausted},
		"-0":                               {values: []string{"-0"}, wait: 0, reason: ReasonAttemptsExhausted},
		"007":                              {values: []string{"007"}, wait: 7 * ms, reason: ReasonAttemptsExhausted},
		"+5, as grpc reads it":             {values: []string{"+5"}, wait: 5 * ms, reason: ReasonAttemptsExhausted},
		"99999999999":                      {values: []string{"99999999999"}, wait: stop, reason: ReasonPushbackStop},
		"2147483647":                       {values: []string{"2147483647"}, wait: stop, reason: ReasonPushbackStop},
		"2147483648":                       {values: []string{"2147483648"}, policy: func(p *Policy) { p.Backoff.MaxHint = 1 << 62 }, wait: stop, reason: ReasonPushbackStop},
		"18446744073709551617":             {values: []string{"18446744073709551617"}, wait: stop, reason: ReasonPushbackStop},
		"space 1":                          {values: []string{" 1"}, wait: stop, reason: ReasonPushbackStop},
		"1 space":                          {values: []string{"1 "}, wait: stop, reason: ReasonPushbackStop},
		"empty":                            {values: []string{""}, wait: stop, reason: ReasonPushbackStop},
		"1.5":                              {values: []string{"1.5"}, wait: stop, reason: ReasonPushbackStop},
		"1e3":                              {values: []string{"1e3"}, wait: stop, reason: ReasonPushbackStop},
		"0x10":                             {values: []string{"0x10"}, wait: stop, reason: ReasonPushbackStop},
		"1_000":                            {values: []string{"1_000"}, wait: stop, reason: ReasonPushbackStop},
		"10ms":                             {values: []string{"10ms"}, wait: stop, reason: ReasonPushbackStop},
		"1, 2":                             {values: []string{"1, 2"}, wait: stop, reason: ReasonPushbackStop},
		"MaxHint":                          {values: []string{"60000"}, wait: time.Minute, reason: ReasonAttemptsExhausted},
		"beyond MaxHint":                   {values: []string{"60001"}, wait: stop, reason: ReasonPushbackStop},
		"a larger MaxHint":                 {values: []string{"60001"}, policy: func(p *Policy) { p.Backoff.MaxHint = 2 * time.Minute }, wait: 60001 * ms, reason: ReasonAttemptsExhausted},
		"a smaller MaxHint":                {values: []string{"101"}, policy: func(p *Policy) { p.Backoff.MaxHint = 100 * ms }, wait: stop, reason: ReasonPushbackStop},
		"no jitter":                        {values: []string{"100"}, policy: func(p *Policy) { p.Backoff.Jitter = FullJitter }, wait: 100 * ms, reason: ReasonAttemptsExhausted},
		"a quota":                          {values: []string{"0"}, code: codes.ResourceExhausted, wait: 0, reason: ReasonAttemptsExhausted},
		"of a code that is not retried":    {values: []string{"0"}, code: codes.InvalidArgument, wait: stop, reason: ReasonNotRetryable},
		"-1 of a code that is not retried": {values: []string{"-1"}, code: codes.InvalidArgument, wait: stop, reason: ReasonPushbackStop},
		"does not lift MaxAttempts":        {values: []string{"0"}, policy: attemptsOf(1), wait: stop, reason: ReasonDisabled},
		"-1 is stronger than RetryIf":      {values: []string{"-1"}, policy: func(p *Policy) { p.RetryIf = func(Attempt) Verdict { return VerdictRetry } }, wait: stop, reason: ReasonPushbackStop},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.code == codes.OK {
					test.code = codes.Unavailable
				}
				srv, client := serve(t, newRetrier(t, exactly(func(p *Policy) {
					p.MaxAttempts = 2
					if test.policy != nil {
						test.policy(p)
					}
				})), testsrv.Script{get: testsrv.Sequence{{Code: test.code, Message: "why", Trailer: pushbackOf(test.values...)}}})
				var report Report
				start := time.Now()
				_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
				attempts := 2
				if test.wait == stop {
					attempts, test.wait = 1, 0
				}
				checkElapsed(t, start, test.wait)
				checkCall(t, &report, attempts, test.reason)
				if n := srv.Count(get); n != attempts {
					t.Errorf("the server saw %d attempts, want %d", n, attempts)
				}
				checkCode(t, err, test.code)
				if got := errors.Is(err, ErrPushbackStop); got != (test.reason == ReasonPushbackStop) {
					t.Errorf("errors.Is(%v, ErrPushbackStop) = %v", err, got)
				}
				if msg := status.Convert(err).Message(); msg != "why" {
					t.Errorf("message %q, want the server's", msg)
				}
				if a := report.Attempts[0]; attempts == 2 && (a.Delay != test.wait || a.DelaySource != DelayPushback) {
					t.Errorf("waited %v by %v, want %v by the pushback", a.Delay, a.DelaySource, test.wait)
				}
			})
		})
	}
}

// What the server says and what the policy says make one schedule together.
func TestDelays(t *testing.T) {
	quota := func(p *Policy) { p.RetryQuota = true }
	unavailable := testsrv.Step{Code: codes.Unavailable}
	exhausted := testsrv.Step{Code: codes.ResourceExhausted}
	pushed := testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("7")}
	told := func(code codes.Code, delays ...time.Duration) testsrv.Step {
		return testsrv.Step{Code: code, Details: retryAfter(delays...)}
	}
	both := told(codes.Unavailable, time.Second)
	both.Trailer = pushbackOf("7")
	bad := told(codes.Unavailable, time.Second)
	bad.Trailer = pushbackOf("abc")
	for name, test := range map[string]struct {
		steps  testsrv.Sequence
		policy func(*Policy)
		want   []time.Duration // waits, the base of the backoff being 10 ms
		source DelaySource     // of the first
		asked  time.Duration   // by the server, in vain
		reason Reason
	}{
		"backoff grows":                       {steps: testsrv.Sequence{unavailable}, want: []time.Duration{10 * ms, 20 * ms, 40 * ms}, reason: ReasonAttemptsExhausted},
		"pushback starts it anew":             {steps: testsrv.Sequence{unavailable, unavailable, pushed, unavailable}, policy: attemptsOf(6), want: []time.Duration{10 * ms, 20 * ms, 7 * ms, 10 * ms, 20 * ms}, reason: ReasonAttemptsExhausted},
		"pushback each time":                  {steps: testsrv.Sequence{pushed}, want: []time.Duration{7 * ms, 7 * ms, 7 * ms}, source: DelayPushback, reason: ReasonAttemptsExhausted},
		"RetryInfo and backoff":               {steps: testsrv.Sequence{told(codes.Unavailable, 200*ms)}, want: []time.Duration{210 * ms, 220 * ms, 240 * ms}, source: DelayRetryInfo, reason: ReasonAttemptsExhausted},
		"RetryInfo of a quota":                {steps: testsrv.Sequence{told(codes.ResourceExhausted, 200*ms)}, want: []time.Duration{210 * ms, 220 * ms, 240 * ms}, source: DelayRetryInfo, reason: ReasonAttemptsExhausted},
		"RetryInfo, the longest of several":   {steps: testsrv.Sequence{told(codes.Unavailable, 20*ms, 200*ms, 100*ms)}, policy: attemptsOf(2), want: []time.Duration{210 * ms}, source: DelayRetryInfo, reason: ReasonAttemptsExhausted},
		"RetryInfo of 0":                      {steps: testsrv.Sequence{told(codes.Unavailable, 0)}, policy: attemptsOf(2), want: []time.Duration{10 * ms}, reason: ReasonAttemptsExhausted},
		"RetryInfo below 0":                   {steps: testsrv.Sequence{told(codes.Unavailable, -time.Hour)}, policy: attemptsOf(2), want: []time.Duration{10 * ms}, reason: ReasonAttemptsExhausted},
		"RetryInfo up to MaxHint":             {steps: testsrv.Sequence{told(codes.Unavailable, time.Minute)}, policy: attemptsOf(2), want: []time.Duration{time.Minute + 10*ms}, source: DelayRetryInfo, reason: ReasonAttemptsExhausted},
		"RetryInfo beyond MaxHint":            {steps: testsrv.Sequence{told(codes.Unavailable, time.Minute+1)}, source: DelayRetryInfo, asked: time.Minute + 1, reason: ReasonPushbackStop},
		"RetryInfo of a day":                  {steps: testsrv.Sequence{told(codes.ResourceExhausted, 24*time.Hour)}, source: DelayRetryInfo, asked: 24 * time.Hour, reason: ReasonPushbackStop},
		"pushback is stronger than RetryInfo": {steps: testsrv.Sequence{both}, policy: attemptsOf(2), want: []time.Duration{7 * ms}, source: DelayPushback, reason: ReasonAttemptsExhausted},
		"bad pushback is stronger too":        {steps: testsrv.Sequence{bad}, source: DelayPushback, reason: ReasonPushbackStop},
		"quota without a hint":                {steps: testsrv.Sequence{exhausted}, reason: ReasonNotRetryable},
		"quota without a hint, RetryQuota":    {steps: testsrv.Sequence{exhausted}, policy: quota, want: []time.Duration{1010 * ms, 1020 * ms}, reason: ReasonAttemptsExhausted},
		"quota with RetryInfo of 0":           {steps: testsrv.Sequence{told(codes.ResourceExhausted, 0)}, policy: attemptsOf(3), want: []time.Duration{1010 * ms, 1020 * ms}, reason: ReasonAttemptsExhausted},
		"quota with RetryInfo below 0":        {steps: testsrv.Sequence{told(codes.ResourceExhausted, -1)}, policy: attemptsOf(2), want: []time.Duration{1010 * ms}, reason: ReasonAttemptsExhausted},
		"quota with pushback of 0":            {steps: testsrv.Sequence{{Code: codes.ResourceExhausted, Trailer: pushbackOf("0")}}, policy: attemptsOf(2), want: []time.Duration{0}, source: DelayPushback, reason: ReasonAttemptsExhausted},
		"another overload floor":              {steps: testsrv.Sequence{told(codes.ResourceExhausted, 0)}, policy: func(p *Policy) { p.MaxAttempts, p.Backoff.Overload = 2, 300*ms }, want: []time.Duration{310 * ms}, reason: ReasonAttemptsExhausted},
		"an overload floor beneath Func": {steps: testsrv.Sequence{told(codes.ResourceExhausted, 0)}, policy: func(p *Policy) {
			p.MaxAttempts = 2
			p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 0 }
		}, want: []time.Duration{time.Second}, reason: ReasonAttemptsExhausted},
		"the floor is not for other codes": {steps: testsrv.Sequence{exhausted, unavailable}, policy: quota, want: []time.Duration{1010 * ms, 20 * ms}, reason: ReasonAttemptsExhausted},
		"Func": {steps: testsrv.Sequence{unavailable}, policy: func(p *Policy) {
			p.Backoff.Func = func(retry int, previous time.Duration, a Attempt) time.Duration {
				return previous + time.Duration(retry*a.Number)*ms
			}
		}, want: []time.Duration{ms, 5 * ms, 14 * ms}, reason: ReasonAttemptsExhausted},
		"Func below 0": {steps: testsrv.Sequence{unavailable}, policy: func(p *Policy) {
			p.MaxAttempts = 2
			p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return -time.Hour }
		}, want: []time.Duration{0}, reason: ReasonAttemptsExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, client := serve(t, newRetrier(t, WithBudget(Unlimited()), exactly(func(p *Policy) {
					p.MaxAttempts = len(test.want) + 1
					if len(test.want) == 0 {
						p.MaxAttempts = 3
					}
					if test.policy != nil {
						test.policy(p)
					}
				})), testsrv.Script{get: test.steps})
				var report Report
				_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
				if err == nil {
					t.Fatal("no error")
				}
				checkCall(t, &report, len(test.want)+1, test.reason)
				arrivals := srv.Attempts(get)
				var got, told []time.Duration
				for i := range len(arrivals) - 1 {
					got = append(got, arrivals[i+1].Arrived.Sub(arrivals[i].Ended))
					told = append(told, report.Attempts[i].Delay)
				}
				if !slices.Equal(got, test.want) || !slices.Equal(told, test.want) {
					t.Errorf("the server saw waits of %v, the report %v, want %v", got, told, test.want)
				}
				if s := report.Attempts[0].DelaySource; s != test.source {
					t.Errorf("the first wait is by %v, want %v", s, test.source)
				}
				if d := report.Attempts[len(test.want)].Delay; d != test.asked {
					t.Errorf("the last attempt tells of a wait of %v, want %v", d, test.asked)
				}
			})
		})
	}
}

// Waits outside the documented range, or all alike, show only in the fleet:
// clients that failed together come back together.
func TestDelaysAreInRange(t *testing.T) {
	const samples = 10_000
	base, most := 100*ms, 400*ms
	for name, test := range map[string]struct {
		backoff  Backoff
		retry    int
		from, to time.Duration
	}{
		"full":                  {Backoff{Base: base, Max: most}, 1, 0, base},
		"full at the cap":       {Backoff{Base: base, Max: most}, 5, 0, most},
		"equal":                 {Backoff{Base: base, Max: most, Jitter: EqualJitter}, 1, base / 2, base},
		"equal at the cap":      {Backoff{Base: base, Max: most, Jitter: EqualJitter}, 5, most / 2, most},
		"decorrelated":          {Backoff{Base: base, Max: most, Jitter: DecorrelatedJitter}, 1, base, 3 * base},
		"proportional":          {Backoff{Base: base, Max: most, Jitter: ProportionalJitter(0.2)}, 1, base * 8 / 10, base * 12 / 10},
		"proportional, the cap": {Backoff{Base: base, Max: most, Jitter: ProportionalJitter(0.2)}, 5, most * 8 / 10, most * 12 / 10},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithBudget(Unlimited()), WithDefaultPolicy(Policy{MaxAttempts: test.retry + 1, Backoff: test.backoff, Idempotency: Idempotent}))
				failure := status.Error(codes.Unavailable, "")
				got := make([]time.Duration, samples)
				for i := range got {
					var before time.Time
					_ = invokeFake(t.Context(), r, get, func(n int) error {
						if n == test.retry {
							got[i] = time.Since(before)
						}
						before = time.Now()
						return failure
					})
				}
				slices.Sort(got)
				if got[0] < test.from || got[samples-1] > test.to {
					t.Errorf("waits from %v to %v, want %v to %v", got[0], got[samples-1], test.from, test.to)
				}
				// A hundredth of the range at either end stays empty once in e^100 runs.
				edge := (test.to - test.from) / 100
				if got[0] > test.from+edge || got[samples-1] < test.to-edge {
					t.Errorf("waits from %v to %v do not fill %v to %v", got[0], got[samples-1], test.from, test.to)
				}
			})
		})
	}
}

// A call that is retried for hours must not grow: what is kept of each attempt
// is bounded, and no context or timer piles up on a long-lived parent.
func TestThousandFailures(t *testing.T) {
	long := exactly(func(p *Policy) {
		p.MaxAttempts, p.AttemptTimeout, p.Idempotency = 2000, time.Second, Idempotent
		p.Backoff = Backoff{Base: ms, Multiplier: 1, Jitter: NoJitter}
	})
	checkReport := func(t *testing.T, r *Report) {
		t.Helper()
		checkCall(t, r, 1001, ReasonSuccess)
		if len(r.Attempts) != 32 || r.Dropped != 969 {
			t.Fatalf("%d attempts are listed and %d left out, want 32 and 969", len(r.Attempts), r.Dropped)
		}
		for i, a := range r.Attempts {
			want := i + 1
			if i == 31 {
				want = 1001
			}
			if a.Number != want || (a.Err == nil) != (i == 31) {
				t.Errorf("entry %d is attempt %d with error %v, want attempt %d", i, a.Number, a.Err, want)
			}
		}
	}
	t.Run("goroutines", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			counts := map[int]int{}
			r := newRetrier(t, WithBudget(Unlimited()), long, WithHooks(Hooks{RetryScheduled: func(_ context.Context, a Attempt) {
				if a.Number%10 != 0 {
					return
				}
				synctest.Wait()
				stacks := make([]byte, 1<<20)
				counts[a.Number] = strings.Count(string(stacks[:runtime.Stack(stacks, true)]), ", synctest bubble")
			}}))
			srv, client := serve(t, r, testsrv.Script{get: testsrv.Fail(1000, codes.Unavailable).ThenOK()})
			parent, cancel := context.WithCancel(t.Context())
			defer cancel()
			var report Report
			reply, err := client.Get(parent, &testpb.Request{}, WithReport(&report))
			if err != nil || reply.GetArrival() != 1001 || srv.Count(get) != 1001 {
				t.Fatalf("reply %v, error %v, %d arrivals", reply, err, srv.Count(get))
			}
			checkReport(t, &report)
			for n, count := range counts {
				if count != counts[10] || count == 0 {
					t.Errorf("%d goroutines after attempt %d, %d after attempt 10", count, n, counts[10])
				}
			}
		})
	})
	t.Run("heap", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			live := func() int64 {
				var m runtime.MemStats
				runtime.GC()
				runtime.GC() // what the first left in pools
				runtime.ReadMemStats(&m)
				return int64(m.HeapObjects)
			}
			var before, after int64
			failure := status.Error(codes.Unavailable, "")
			parent, cancel := context.WithCancel(t.Context())
			defer cancel()
			var report Report
			err := invokeFake(parent, newRetrier(t, WithBudget(Unlimited()), long), get, func(i int) error {
				switch i {
				case 50:
					before = live()
				case 999:
					after = live()
				case 1000:
					return nil
				}
				return failure
			}, WithReport(&report))
			if err != nil {
				t.Fatal(err)
			}
			checkReport(t, &report)
			// One object kept for each attempt would make 949 more.
			if after-before > 100 {
				t.Errorf("%d objects on the heap after 50 attempts, %d after 999", before, after)
			}
		})
	})
}

// Dashboards count by the hooks: one told too often or too seldom, or before
// the decision, makes them wrong.
func TestHooksAreTold(t *testing.T) {
	for name, test := range map[string]struct {
		method string
		steps  testsrv.Sequence
		policy func(*Policy)
		cancel time.Duration
		want   string
	}{
		"success":              {steps: nil, want: "end 1 success, call 1 success OK"},
		"not retryable":        {steps: testsrv.Fail(1, codes.InvalidArgument), want: "end 1 not_retryable, call 1 not_retryable InvalidArgument"},
		"not idempotent":       {method: write, steps: testsrv.Fail(1, codes.Unavailable), want: "end 1 not_idempotent, call 1 not_idempotent Unavailable"},
		"retried":              {steps: testsrv.Fail(1, codes.Unavailable).ThenOK(), want: "end 1 retry 10ms, retry 1 10ms, end 2 success, call 2 success OK"},
		"retried, then final":  {steps: testsrv.Fail(1, codes.Unavailable).Then(testsrv.Step{Code: codes.NotFound}), want: "end 1 retry 10ms, retry 1 10ms, end 2 not_retryable, call 2 not_retryable NotFound"},
		"attempts exhausted":   {steps: testsrv.Fail(1, codes.Unavailable), policy: attemptsOf(2), want: "end 1 retry 10ms, retry 1 10ms, end 2 attempts_exhausted, call 2 attempts_exhausted Unavailable"},
		"no retries":           {steps: testsrv.Fail(1, codes.Unavailable), policy: attemptsOf(1), want: "end 1 disabled, call 1 disabled Unavailable"},
		"does not fit":         {steps: testsrv.Fail(1, codes.Unavailable), policy: func(p *Policy) { p.Timeout = 5 * ms }, want: "end 1 deadline, call 1 deadline Unavailable"},
		"pushback":             {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("-1")}}, want: "end 1 pushback_stop, call 1 pushback_stop Unavailable"},
		"cancelled in a wait":  {steps: testsrv.Fail(1, codes.Unavailable), cancel: 5 * ms, want: "end 1 retry 10ms, retry 1 10ms, call 1 parent_done Canceled"},
		"cancelled in attempt": {steps: testsrv.Sequence{{Block: true}}, cancel: 5 * ms, want: "end 1 parent_done, call 1 parent_done Canceled"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				type key struct{}
				if test.method == "" {
					test.method = get
				}
				request := &testpb.Request{Text: "x"}
				var got []string
				saw := func(ctx context.Context, method, format string, args ...any) {
					if ctx.Value(key{}) != "caller" || method != test.method {
						t.Errorf("a hook ran with a context of %v, for %q", ctx.Value(key{}), method)
					}
					got = append(got, fmt.Sprintf(format, args...))
				}
				var told error
				hooks := Hooks{
					AttemptEnd: func(ctx context.Context, a Attempt) {
						wait := ""
						if a.Reason == ReasonRetry {
							wait = " " + a.Delay.String()
						}
						saw(ctx, a.Method, "end %d %v%s", a.Number, a.Reason, wait)
					},
					RetryScheduled: func(ctx context.Context, a Attempt) { saw(ctx, a.Method, "retry %d %v", a.Number, a.Delay) },
					CallEnd: func(ctx context.Context, r Report, req any, err error) {
						if req != any(request) {
							t.Errorf("CallEnd has the request %v, want the caller's own", req)
						}
						told = err
						saw(ctx, r.Method, "call %d %v %v", r.Made(), r.Reason, status.Code(err))
					},
				}
				order := 0
				inOrder := func(n int) func(context.Context, Attempt) {
					return func(context.Context, Attempt) {
						if order++; order%2 != n {
							t.Errorf("hooks run out of order")
						}
					}
				}
				_, client := serve(t, newRetrier(t, exactly(test.policy), WithHooks(hooks),
					WithHooks(Hooks{AttemptEnd: inOrder(1)}), WithHooks(Hooks{AttemptEnd: inOrder(0)})), testsrv.Script{test.method: test.steps})
				ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "caller"))
				defer cancel()
				if test.cancel > 0 {
					time.AfterFunc(test.cancel, cancel)
				}
				_, err := unaryOf(client, test.method)(ctx, request)
				if s := strings.Join(got, ", "); s != test.want {
					t.Errorf("hooks: %s\nwant:  %s", s, test.want)
				}
				if told != err {
					t.Errorf("CallEnd was told %v, the caller %v", told, err)
				}
			})
		})
	}
}

// A callback of the user's that panics must not cost the budget tokens or a
// place in flight for good, nor be swallowed.
func TestPanicsPassThrough(t *testing.T) {
	boom := errors.New("boom")
	die := func() { panic(boom) }
	fail := func(int) error { return status.Error(codes.Unavailable, "") }
	recovers := func(i int) error {
		if i == 0 {
			return status.Error(codes.Unavailable, "")
		}
		return nil
	}
	succeed := func(int) error { return nil }
	for name, test := range map[string]struct {
		options []Option
		policy  func(*Policy)
		call    []grpc.CallOption
		invoke  func(int) error
		granted uint64 // reserved and given back
	}{
		"AttemptEnd, retry":    {options: []Option{WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) { die() }})}, invoke: fail, granted: 1},
		"AttemptEnd, success":  {options: []Option{WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) { die() }})}, invoke: succeed},
		"AttemptEnd, no retry": {options: []Option{WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) { die() }})}, policy: attemptsOf(1), invoke: fail},
		"RetryScheduled":       {options: []Option{WithHooks(Hooks{RetryScheduled: func(context.Context, Attempt) { die() }})}, invoke: fail, granted: 1},
		"CallEnd":              {options: []Option{WithHooks(Hooks{CallEnd: func(context.Context, Report, any, error) { die() }})}, invoke: succeed},
		"CallEnd after retry":  {options: []Option{WithHooks(Hooks{CallEnd: func(context.Context, Report, any, error) { die() }})}, invoke: recovers, granted: 1},
		"RetryIf":              {policy: func(p *Policy) { p.RetryIf = func(Attempt) Verdict { die(); return 0 } }, invoke: fail},
		"Backoff.Func":         {policy: func(p *Policy) { p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { die(); return 0 } }, invoke: fail},
		"OnFinish":             {call: []grpc.CallOption{grpc.OnFinish(func(error) { die() })}, invoke: succeed},
		"OnFinish after retry": {call: []grpc.CallOption{grpc.OnFinish(func(error) { die() })}, invoke: recovers, granted: 1},
		"WithCallPolicy":       {call: []grpc.CallOption{WithCallPolicy(func(*Policy) { die() })}, invoke: succeed},
		"the first attempt":    {invoke: func(int) error { die(); return nil }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				r := newRetrier(t, append(test.options, WithBudget(budget), exactly(test.policy))...)
				finished := 0
				options := append(slices.Clone(test.call), grpc.OnFinish(func(error) { finished++ }))
				func() {
					defer func() {
						if v := recover(); v != any(boom) {
							t.Errorf("recovered %v, want what was thrown", v)
						}
					}()
					_ = invokeFake(t.Context(), r, get, test.invoke, options...)
					t.Error("no panic")
				}()
				if s := budget.state(); s.Tokens != 70 || s.InFlight != 0 || s.Granted != test.granted {
					t.Errorf("budget %+v, want 70 tokens, none in flight, %d granted", s, test.granted)
				}
				if test.call == nil && finished != 1 {
					t.Errorf("OnFinish ran %d times, want once", finished)
				}
				// The Retrier goes on as before.
				if err := invokeFake(t.Context(), newRetrier(t, WithBudget(budget)), get, succeed); err != nil || budget.state().InFlight != 0 {
					t.Errorf("the next call: %v, budget %+v", err, budget.state())
				}
			})
		})
	}
}
