package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

const ms = time.Millisecond

// exactly is a default policy with waits that can be foretold: 10 ms, 20 ms, 40 ms ...
func exactly(edit func(*Policy)) Option {
	p := Policy{Backoff: Backoff{Base: 10 * ms, Jitter: NoJitter}}
	if edit != nil {
		edit(&p)
	}
	return WithDefaultPolicy(p)
}

// attemptsOf lets a policy make n attempts.
func attemptsOf(n int) func(*Policy) { return func(p *Policy) { p.MaxAttempts = n } }

// unaryOf gives the client's method for a full method.
func unaryOf(c testpb.TestServiceClient, method string) func(context.Context, *testpb.Request, ...grpc.CallOption) (*testpb.Response, error) {
	switch method {
	case put:
		return c.Put
	case write:
		return c.Write
	}
	return c.Get
}

// checkCall compares how a call ended with what was to be expected.
func checkCall(t *testing.T, r *Report, attempts int, reason Reason) {
	t.Helper()
	if r.Made() != attempts || r.Reason != reason {
		t.Errorf("%d attempts, ended by %v; want %d, %v", r.Made(), r.Reason, attempts, reason)
	}
}

func checkElapsed(t *testing.T, since time.Time, want time.Duration) {
	t.Helper()
	if got := time.Since(since); got != want {
		t.Errorf("elapsed %v, want exactly %v", got, want)
	}
}

func checkCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Errorf("code %v (%v), want %v", got, err, want)
	}
}

// wrapped reports whether the caller got an *Error, as for calls that were retried or given up.
func wrapped(err error) bool {
	var e *Error
	return errors.As(err, &e)
}

// DEADLINE_EXCEEDED has three authors. Who takes one for another repeats calls
// whose time is up, or gives up calls that had time left.
func TestDeadlineExceededByWhom(t *testing.T) {
	block := testsrv.Sequence{{Block: true}}
	says := testsrv.Fail(1, codes.DeadlineExceeded)
	attempt50 := func(p *Policy) { p.AttemptTimeout = 50 * ms }
	listed := func(p *Policy) { p.Codes = Codes(codes.DeadlineExceeded) }
	both := func(p *Policy) { attempt50(p); listed(p) }
	for name, test := range map[string]struct {
		method   string // "": get
		script   testsrv.Sequence
		policy   func(*Policy)
		parent   time.Duration
		dial     []grpc.DialOption
		attempts int
		code     codes.Code
		reason   Reason
		elapsed  time.Duration
	}{
		"server says it, not listed":    {script: says, attempts: 1, code: codes.DeadlineExceeded, reason: ReasonNotRetryable},
		"server says it, listed":        {script: says, policy: listed, attempts: 3, code: codes.DeadlineExceeded, reason: ReasonAttemptsExhausted, elapsed: 30 * ms},
		"server says it, then answers":  {script: says.ThenOK(), policy: listed, attempts: 2, reason: ReasonSuccess, elapsed: 10 * ms},
		"server says it with time left": {script: says, policy: attempt50, parent: time.Second, attempts: 1, code: codes.DeadlineExceeded, reason: ReasonNotRetryable},
		"server says it just before our timer": {
			script: testsrv.Sequence{{Delay: 50*ms - 1, Code: codes.DeadlineExceeded}}, policy: attempt50,
			attempts: 1, code: codes.DeadlineExceeded, reason: ReasonNotRetryable, elapsed: 50*ms - 1,
		},
		"our timer, then an answer": {script: block.ThenOK(), policy: attempt50, parent: time.Second, attempts: 2, reason: ReasonSuccess, elapsed: 60 * ms},
		"our timer, no parent":      {script: block.ThenOK(), policy: attempt50, attempts: 2, reason: ReasonSuccess, elapsed: 60 * ms},
		"our timer, every time":     {script: block, policy: attempt50, parent: time.Second, attempts: 3, code: codes.DeadlineExceeded, reason: ReasonAttemptsExhausted, elapsed: 180 * ms},
		"our timer, nothing listed": {
			script: block.ThenOK(), policy: func(p *Policy) { attempt50(p); p.Codes = Codes() },
			attempts: 2, reason: ReasonSuccess, elapsed: 60 * ms,
		},
		"our timer, a write": {method: write, script: block, policy: attempt50, parent: time.Second, attempts: 1, code: codes.DeadlineExceeded, reason: ReasonNotIdempotent, elapsed: 50 * ms},
		"parent only":        {script: block, parent: 50 * ms, attempts: 1, code: codes.DeadlineExceeded, reason: ReasonParentDone, elapsed: 50 * ms},
		"parent only, listed": {
			script: block, policy: listed, parent: 50 * ms,
			attempts: 1, code: codes.DeadlineExceeded, reason: ReasonParentDone, elapsed: 50 * ms,
		},
		"parent before our timer": {
			script: block, policy: func(p *Policy) { listed(p); p.AttemptTimeout = 100 * ms }, parent: 50 * ms,
			attempts: 1, code: codes.DeadlineExceeded, reason: ReasonParentDone, elapsed: 50 * ms,
		},
		"parent together with our timer": {script: block, policy: both, parent: 50 * ms, attempts: 1, code: codes.DeadlineExceeded, reason: ReasonParentDone, elapsed: 50 * ms},
		"parent in the second attempt":   {script: block, policy: both, parent: 100 * ms, attempts: 2, code: codes.DeadlineExceeded, reason: ReasonParentDone, elapsed: 100 * ms},
		"the call's own timeout": {
			script: block, policy: func(p *Policy) { listed(p); p.Timeout = 50 * ms },
			attempts: 1, code: codes.DeadlineExceeded, reason: ReasonDeadline, elapsed: 50 * ms,
		},
		"the call's own timeout in the second attempt": {
			script: block, policy: func(p *Policy) { attempt50(p); p.Timeout = 100 * ms }, parent: time.Second,
			attempts: 2, code: codes.DeadlineExceeded, reason: ReasonDeadline, elapsed: 100 * ms,
		},
		"the call's own timeout before the third": {
			script: block, policy: func(p *Policy) { attempt50(p); p.Timeout = 120 * ms },
			attempts: 2, code: codes.DeadlineExceeded, reason: ReasonDeadline, elapsed: 110 * ms,
		},
		"timeout of the service config": {
			script: block, policy: listed,
			dial:     []grpc.DialOption{grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "timeout": "0.050s"}]}`)},
			attempts: 1, code: codes.DeadlineExceeded, reason: ReasonDeadline, elapsed: 50 * ms,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				method := test.method
				if method == "" {
					method = get
				}
				srv, client := serve(t, newRetrier(t, exactly(test.policy)), testsrv.Script{method: test.script}, test.dial...)
				ctx := t.Context()
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				var report Report
				start := time.Now()
				_, err := unaryOf(client, method)(ctx, &testpb.Request{}, WithReport(&report))
				checkElapsed(t, start, test.elapsed)
				checkCode(t, err, test.code)
				checkCall(t, &report, test.attempts, test.reason)
				if n := srv.Count(method); n != test.attempts {
					t.Errorf("the server saw %d attempts, want %d", n, test.attempts)
				}
			})
		})
	}
}

// A server's own clock ends an attempt a little before or after the client's.
// Were the parent's deadline read off the code or off ctx.Err alone, some calls
// in a hundred would be repeated after their time is up.
func TestParentDeadlineIsNeverRetried(t *testing.T) {
	const loops = 200
	policy := exactly(func(p *Policy) { p.Codes = Codes(codes.DeadlineExceeded, codes.Canceled, codes.Unavailable) })
	run := func(t *testing.T, client testpb.TestServiceClient, parent time.Duration) {
		ctx, cancel := context.WithTimeout(t.Context(), parent)
		defer cancel()
		var report Report
		_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
		checkCode(t, err, codes.DeadlineExceeded)
		checkCall(t, &report, 1, ReasonParentDone)
	}
	t.Run("memory", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			srv, client := serve(t, newRetrier(t, policy), testsrv.Script{get: testsrv.Sequence{{Block: true}}})
			for range loops {
				run(t, client, 50*ms)
			}
			if n := srv.Count(get); n != loops {
				t.Errorf("the server saw %d attempts in %d calls", n, loops)
			}
		})
	})
	t.Run("loopback", func(t *testing.T) {
		srv, err := testsrv.Listen(testsrv.Script{get: testsrv.Sequence{{Block: true}}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(srv.Close)
		client := dial(t, srv, newRetrier(t, policy))
		var workers sync.WaitGroup
		for range 10 {
			workers.Go(func() {
				for range loops / 10 {
					run(t, client, 20*ms)
				}
			})
		}
		workers.Wait()
	})
}

// CANCELLED by the caller must stop everything; by anybody else it is a code
// like others.
func TestCanceledByWhom(t *testing.T) {
	says := testsrv.Fail(1, codes.Canceled)
	listed := func(p *Policy) { p.Codes = Codes(codes.Canceled, codes.Unavailable) }
	ownContext := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return invoker(ctx, method, req, reply, cc, opts...)
	}
	for name, test := range map[string]struct {
		script   testsrv.Sequence
		policy   func(*Policy)
		cancel   time.Duration // when the caller cancels; negative: before the call
		inner    grpc.UnaryClientInterceptor
		closes   time.Duration // when the ClientConn is closed
		attempts int
		arrivals int
		reason   Reason
		elapsed  time.Duration
	}{
		"server, not listed":        {script: says, attempts: 1, arrivals: 1, reason: ReasonNotRetryable},
		"server, listed":            {script: says, policy: listed, attempts: 3, arrivals: 3, reason: ReasonAttemptsExhausted, elapsed: 30 * ms},
		"server with header":        {script: testsrv.Sequence{{SendHeaderFirst: true, Code: codes.Canceled}}, policy: listed, attempts: 3, arrivals: 3, reason: ReasonAttemptsExhausted, elapsed: 30 * ms},
		"caller in an attempt":      {script: testsrv.Sequence{{Block: true}}, policy: listed, cancel: 30 * ms, attempts: 1, arrivals: 1, reason: ReasonParentDone, elapsed: 30 * ms},
		"caller in a retry":         {script: testsrv.Fail(1, codes.Unavailable).Then(testsrv.Step{Block: true}), policy: listed, cancel: 30 * ms, attempts: 2, arrivals: 2, reason: ReasonParentDone, elapsed: 30 * ms},
		"caller in a wait":          {script: testsrv.Fail(1, codes.Unavailable), policy: listed, cancel: 5 * ms, attempts: 1, arrivals: 1, reason: ReasonParentDone, elapsed: 5 * ms},
		"caller before the call":    {policy: listed, cancel: -1, attempts: 1, arrivals: 0, reason: ReasonParentDone},
		"interceptor, not listed":   {inner: ownContext, attempts: 1, arrivals: 0, reason: ReasonNotRetryable},
		"interceptor, listed":       {inner: ownContext, policy: listed, attempts: 3, arrivals: 0, reason: ReasonAttemptsExhausted, elapsed: 30 * ms},
		"ClientConn closed":         {script: testsrv.Sequence{{Block: true}}, policy: listed, closes: 30 * ms, attempts: 1, arrivals: 1, reason: ReasonClosed, elapsed: 30 * ms},
		"ClientConn closed earlier": {policy: listed, closes: -1, attempts: 1, arrivals: 0, reason: ReasonClosed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{get: test.script})
				t.Cleanup(srv.Close)
				options := newRetrier(t, exactly(test.policy)).DialOptions()
				if test.inner != nil {
					options = append(options, grpc.WithChainUnaryInterceptor(test.inner))
				}
				cc, err := srv.Dial(options...)
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				at := func(d time.Duration, f func()) {
					switch {
					case d < 0:
						f()
					case d > 0:
						time.AfterFunc(d, f)
					}
				}
				at(test.cancel, cancel)
				at(test.closes, func() { _ = cc.Close() })
				var report Report
				start := time.Now()
				_, err = testpb.NewTestServiceClient(cc).Get(ctx, &testpb.Request{}, WithReport(&report))
				checkElapsed(t, start, test.elapsed)
				checkCode(t, err, codes.Canceled)
				checkCall(t, &report, test.attempts, test.reason)
				if n := srv.Count(get); n != test.arrivals {
					t.Errorf("the server saw %d attempts, want %d", n, test.arrivals)
				}
			})
		})
	}
}

// A payment that is taken twice: a method that nobody declared idempotent must
// run once at most, wherever the connection or the server gives up, unless no
// server can have seen it.
func TestWriteIsAppliedOnce(t *testing.T) {
	const refused = "stream terminated by RST_STREAM with error code: REFUSED_STREAM"
	type answer struct {
		step          testsrv.Step
		before, after bool // the connection is cut before or after the handler
		code          codes.Code
		sent          string
	}
	for name, test := range map[string]answer{
		"cut before the handler":   {before: true, code: codes.Unavailable, sent: "ambiguous"},
		"cut in the handler":       {step: testsrv.Step{Cut: true}, code: codes.Unavailable, sent: "ambiguous"},
		"cut after the header":     {step: testsrv.Step{SendHeaderFirst: true, Hold: ms, Cut: true}, code: codes.Unavailable, sent: "ambiguous"},
		"cut after the handler":    {after: true, code: codes.Unavailable, sent: "ambiguous"},
		"the server says so":       {step: testsrv.Step{Code: codes.Unavailable}, code: codes.Unavailable, sent: "answered"},
		"and invites by pushback":  {step: testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("0")}, code: codes.Unavailable, sent: "answered"},
		"and by RetryInfo":         {step: testsrv.Step{Code: codes.ResourceExhausted, Details: retryAfter(ms)}, code: codes.ResourceExhausted, sent: "answered"},
		"text of a refused stream": {step: testsrv.Step{SendHeaderFirst: true, Code: codes.Unavailable, Message: refused}, code: codes.Unavailable, sent: "refused"},
		"text of a drain":          {step: testsrv.Step{SendHeaderFirst: true, Code: codes.Unavailable, Message: "the connection is draining"}, code: codes.Unavailable, sent: "refused"},
		"attempt timeout":          {step: testsrv.Step{Block: true}, code: codes.DeadlineExceeded, sent: "ambiguous"},
	} {
		for who, policy := range map[string]struct {
			method  string
			options []Option
			want    string
		}{
			"undeclared": {write, []Option{exactly(func(p *Policy) { p.AttemptTimeout = time.Second })}, "unknown"},
			"undeclared, RetryIf insists": {write, []Option{exactly(func(p *Policy) {
				p.AttemptTimeout = time.Second
				p.RetryIf = func(Attempt) Verdict { return VerdictRetry }
			})}, "unknown"},
			"declared idempotent, the policy withdraws it": {put, []Option{exactly(func(p *Policy) {
				p.AttemptTimeout, p.Idempotency = time.Second, NotIdempotent
			})}, "not_idempotent"},
		} {
			t.Run(name+"/"+who, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					runs := 0
					var srv *testsrv.Server
					srv = testsrv.New(testsrv.Script{policy.method: testsrv.Sequence{test.step}}, testsrv.WithServerOptions(
						grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
							runs++
							if test.before {
								srv.CutConnections()
								return nil, status.Error(codes.Unavailable, "nobody hears this")
							}
							reply, err := handler(ctx, req)
							if test.after {
								srv.CutConnections()
								<-ctx.Done()
							}
							return reply, err
						})))
					t.Cleanup(srv.Close)
					client := dial(t, srv, newRetrier(t, policy.options...))
					ctx, events := traced(t, t.Context())
					_, err := unaryOf(client, policy.method)(ctx, &testpb.Request{})
					synctest.Wait()
					if runs != 1 {
						t.Errorf("applied %d times", runs)
					}
					checkCode(t, err, test.code)
					if wrapped(err) {
						t.Errorf("error %v is wrapped, want the server's own", err)
					}
					got := events()
					if len(got) != 1 || got[0][keyDecision] != "not_idempotent" || got[0][keyIdempotency] != policy.want || got[0][keySent] != test.sent {
						t.Errorf("events %v, want one with not_idempotent, %s, %s", got, policy.want, test.sent)
					}
				})
			})
		}
	}
}

func pushbackOf(values ...string) metadata.MD {
	return metadata.MD{"grpc-retry-pushback-ms": values}
}

// retryAfter is a RetryInfo for each of the delays.
func retryAfter(delays ...time.Duration) []proto.Message {
	var details []proto.Message
	for _, d := range delays {
		details = append(details, &errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
	}
	return details
}

// Servers tell retries by the attempt header. A value left over from the
// inbound call, or two values, hides them; a change in the caller's metadata
// leaks into its other calls.
func TestAttemptHeader(t *testing.T) {
	const header = "grpc-previous-rpc-attempts"
	for name, test := range map[string]struct {
		metadata metadata.MD
		appended []string
		options  []grpc.CallOption
		first    []string
	}{
		"no metadata":               {},
		"metadata":                  {metadata: metadata.MD{"k": {"1", "2"}}},
		"appended metadata":         {metadata: metadata.MD{"k": {"1"}}, appended: []string{"k", "2"}},
		"idempotency key":           {options: []grpc.CallOption{WithIdempotencyKey("abc")}},
		"header given":              {metadata: metadata.MD{header: {"7"}}, first: []string{"7"}},
		"header given twice":        {metadata: metadata.MD{header: {"7", "8"}}, first: []string{"7", "8"}},
		"header appended":           {appended: []string{header, "7"}, first: []string{"7"}},
		"header appended and given": {metadata: metadata.MD{header: {"7"}}, appended: []string{header, "8"}, first: []string{"7", "8"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()})
				ctx := t.Context()
				before := maps.Clone(test.metadata)
				for k, v := range before {
					before[k] = slices.Clone(v)
				}
				if test.metadata != nil {
					ctx = metadata.NewOutgoingContext(ctx, test.metadata)
				}
				if test.appended != nil {
					ctx = metadata.AppendToOutgoingContext(ctx, test.appended...)
				}
				outgoing, _ := metadata.FromOutgoingContext(ctx)
				if _, err := client.Get(ctx, &testpb.Request{}, test.options...); err != nil {
					t.Fatal(err)
				}
				var got [][]string
				for _, a := range srv.Attempts(get) {
					got = append(got, a.Metadata[header])
					if !slices.Equal(a.Metadata["k"], outgoing["k"]) {
						t.Errorf("attempt %d: metadata k = %q, want %q", a.Number, a.Metadata["k"], outgoing["k"])
					}
					if n := len(a.Metadata["idempotency-key"]); n != len(test.options) {
						t.Errorf("attempt %d: %d idempotency keys, want %d", a.Number, n, len(test.options))
					}
				}
				if want := [][]string{test.first, {"1"}, {"2"}}; !slices.EqualFunc(got, want, slices.Equal) {
					t.Errorf("attempt headers %q, want %q", got, want)
				}
				if !maps.EqualFunc(test.metadata, before, slices.Equal) {
					t.Errorf("the caller's metadata is now %v, was %v", test.metadata, before)
				}
				if now, _ := metadata.FromOutgoingContext(ctx); !maps.EqualFunc(now, outgoing, slices.Equal) {
					t.Errorf("the caller's context now has %v, had %v", now, outgoing)
				}
			})
		})
	}
}

// hidden is a context that will end at a deadline which it does not tell.
type hidden struct{ context.Context }

func (hidden) Deadline() (time.Time, bool) { return time.Time{}, false }

// When the caller's time ends while we wait, "context deadline exceeded" alone
// hides what was wrong with the server all the time.
func TestParentEndsInAWait(t *testing.T) {
	detail := &errdetails.ErrorInfo{Reason: "DISK_FULL", Domain: "test"}
	cause := errors.New("user pressed stop")
	for name, test := range map[string]struct {
		parent func(context.Context) (context.Context, context.CancelFunc)
		code   codes.Code
		is     error
	}{
		"cancel": {
			parent: func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancel(ctx)
				time.AfterFunc(150*ms, cancel)
				return ctx, cancel
			},
			code: codes.Canceled, is: context.Canceled,
		},
		"cancel with a cause": {
			parent: func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithCancelCause(ctx)
				time.AfterFunc(150*ms, func() { cancel(cause) })
				return ctx, func() { cancel(nil) }
			},
			code: codes.Canceled, is: context.Canceled,
		},
		"a deadline that was not told": {
			parent: func(ctx context.Context) (context.Context, context.CancelFunc) {
				ctx, cancel := context.WithTimeout(ctx, 150*ms)
				return hidden{ctx}, cancel
			},
			code: codes.DeadlineExceeded, is: context.DeadlineExceeded,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, client := serve(t, newRetrier(t, exactly(func(p *Policy) { p.MaxAttempts, p.Backoff.Base = 9, 100*ms })),
					testsrv.Script{get: testsrv.Sequence{{Code: codes.Unavailable, Message: "no room", Details: []proto.Message{detail}}}})
				ctx, cancel := test.parent(t.Context())
				defer cancel()
				start := time.Now()
				var report Report
				_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
				checkElapsed(t, start, 150*ms)
				checkCode(t, err, test.code)
				checkCall(t, &report, 2, ReasonParentDone)
				if n := srv.Count(get); n != 2 {
					t.Errorf("the server saw %d attempts, want 2", n)
				}
				if !errors.Is(err, test.is) {
					t.Errorf("errors.Is(%v, %v) = false", err, test.is)
				}
				for _, other := range []error{context.Canceled, context.DeadlineExceeded, ErrAttemptsExhausted, ErrBudgetExhausted, ErrDeadlineTooClose, ErrPushbackStop} {
					if other != test.is && errors.Is(err, other) {
						t.Errorf("errors.Is(%v, %v) = true", err, other)
					}
				}
				var e *Error
				if !errors.As(err, &e) || len(e.Attempts) != 2 || e.Attempts[0].Code != codes.Unavailable || e.Attempts[1].Code != codes.Unavailable {
					t.Fatalf("the attempts cannot be read off %#v", err)
				}
				last := status.Convert(errors.Unwrap(err))
				if last.Code() != codes.Unavailable || last.Message() != "no room" || len(last.Details()) != 1 || !proto.Equal(last.Details()[0].(proto.Message), detail) {
					t.Errorf("beneath is %v with %v, want the server's last error", last, last.Details())
				}
			})
		})
	}
}

// A message that is too large for a limit is too large each time, so repeating
// it runs the handler in vain; and it is not the server that is overloaded.
func TestTooLargeIsNotRetried(t *testing.T) {
	kilobyte := testsrv.Step{ReplySize: 1000}
	withTrailer := testsrv.Step{ReplySize: 1000, Trailer: metadata.Join(pushbackOf("0"), metadata.Pairs("k", "1"))}
	withHeader := withTrailer
	withHeader.SendHeaderFirst = true
	for name, test := range map[string]struct {
		step    testsrv.Step
		request int
		options []grpc.CallOption
		server  []grpc.ServerOption
		byPeer  bool // told by the server, so like a quota
		runs    int
	}{
		"receive limit":                     {step: kilobyte, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)}, runs: 1},
		"receive limit, trailers":           {step: withTrailer, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)}, runs: 1},
		"receive limit, header and trailer": {step: withHeader, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)}, runs: 1},
		"limit once decompressed":           {step: kilobyte, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(500), grpc.UseCompressor(gzip.Name)}, runs: 1},
		"decompressed, trailers":            {step: withTrailer, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(500), grpc.UseCompressor(gzip.Name)}, runs: 1},
		"send limit":                        {request: 1000, options: []grpc.CallOption{grpc.MaxCallSendMsgSize(10)}, runs: 0},
		"limit of the server":               {request: 1000, server: []grpc.ServerOption{grpc.MaxRecvMsgSize(10)}, byPeer: true, runs: 0},
	} {
		for _, method := range []string{get, write} {
			for _, quota := range []bool{false, true} {
				if quota && test.byPeer {
					continue // who lifts the need for a hint asks for this
				}
				t.Run(fmt.Sprintf("%s%s/quota=%v", name, method, quota), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						budget := mustBudget(t, BudgetConfig{})
						r := newRetrier(t, WithBudget(budget), exactly(func(p *Policy) {
							p.Codes, p.RetryQuota = Codes(codes.ResourceExhausted), quota
						}))
						srv := testsrv.New(testsrv.Script{method: testsrv.Sequence{test.step}}, testsrv.WithServerOptions(test.server...))
						t.Cleanup(srv.Close)
						var report Report
						start := time.Now()
						_, err := unaryOf(dial(t, srv, r), method)(t.Context(), &testpb.Request{Payload: make([]byte, test.request)},
							append(test.options, WithReport(&report))...)
						checkElapsed(t, start, 0)
						checkCode(t, err, codes.ResourceExhausted)
						checkCall(t, &report, 1, ReasonNotRetryable)
						if wrapped(err) {
							t.Errorf("error %v is wrapped, want grpc's own", err)
						}
						if n := srv.Count(method); n != test.runs {
							t.Errorf("the handler ran %d times, want %d", n, test.runs)
						}
						if s := budget.state(); s.Tokens != 70 || s.Granted != 0 || s.Refused != 0 {
							t.Errorf("budget %+v, want it untouched", s)
						}
					})
				})
			}
		}
	}
}

// Calls of one request share its context; an attempt that wrote to the metadata
// in it would race with all others.
func TestSharedParentMetadata(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t, WithBudget(Unlimited()), exactly(nil)), testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		shared := metadata.MD{"k": {"1"}, "grpc-previous-rpc-attempts": {"9"}}
		ctx := metadata.AppendToOutgoingContext(metadata.NewOutgoingContext(t.Context(), shared), "k", "2")
		var calls sync.WaitGroup
		for i := range 100 {
			calls.Go(func() {
				options := []grpc.CallOption{WithIdempotencyKey(fmt.Sprint(i))}
				_, err := unaryOf(client, []string{get, put}[i%2])(ctx, &testpb.Request{}, options...)
				checkCode(t, err, codes.Unavailable)
			})
		}
		calls.Wait()
		if n := srv.Count(""); n != 300 {
			t.Errorf("%d attempts, want 300", n)
		}
		for _, a := range srv.Attempts("") {
			if !slices.Equal(a.Metadata["k"], []string{"1", "2"}) || len(a.Metadata["idempotency-key"]) != 1 {
				t.Fatalf("attempt with metadata %v", a.Metadata)
			}
		}
		if len(shared) != 2 || !slices.Equal(shared["grpc-previous-rpc-attempts"], []string{"9"}) {
			t.Errorf("the shared metadata is now %v", shared)
		}
	})
}

// Layers that retry multiply: what should be 4 attempts becomes 12, in an outage.
func TestRetriesDoNotMultiply(t *testing.T) {
	const threeAttempts = `{"methodConfig": [{"name": [{"service": "testsrv.v1.TestService"}], "retryPolicy": {
		"maxAttempts": 3, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`
	four := func(t *testing.T) *Retrier { return newRetrier(t, exactly(attemptsOf(4))) }
	two := func(t *testing.T) *Retrier { return newRetrier(t, exactly(attemptsOf(2))) }
	config := grpc.WithDefaultServiceConfig(threeAttempts)
	for name, test := range map[string]struct {
		dial    func(t *testing.T) []grpc.DialOption
		perCall func(t *testing.T) *Retrier
		options []grpc.CallOption
		want    int
	}{
		"one Retrier":               {dial: func(t *testing.T) []grpc.DialOption { return four(t).DialOptions() }, want: 4},
		"service config and policy": {dial: func(t *testing.T) []grpc.DialOption { return append(four(t).DialOptions(), config) }, want: 4},
		"service config, no policy": {dial: func(t *testing.T) []grpc.DialOption { return append(newRetrier(t).DialOptions(), config) }, want: 3},
		"service config, retry off": {dial: func(t *testing.T) []grpc.DialOption { return append(four(t).DialOptions(), config) }, options: []grpc.CallOption{WithoutRetry()}, want: 1},
		"service config, one attempt": {dial: func(t *testing.T) []grpc.DialOption {
			return append(newRetrier(t, exactly(attemptsOf(1))).DialOptions(), config)
		}, want: 1},
		"service config, not followed": {dial: func(t *testing.T) []grpc.DialOption {
			return append(newRetrier(t, WithoutResolverConfig()).DialOptions(), config)
		}, want: 3},
		"WithDisableRetry given too": {dial: func(t *testing.T) []grpc.DialOption {
			return append(four(t).DialOptions(), config, grpc.WithDisableRetry())
		}, want: 4},
		"two Retriers, the outer rules": {dial: func(t *testing.T) []grpc.DialOption { return append(four(t).DialOptions(), two(t).DialOptions()...) }, want: 4},
		"two Retriers the other way":    {dial: func(t *testing.T) []grpc.DialOption { return append(two(t).DialOptions(), four(t).DialOptions()...) }, want: 2},
		"two Retriers, retry off": {
			dial:    func(t *testing.T) []grpc.DialOption { return append(four(t).DialOptions(), two(t).DialOptions()...) },
			options: []grpc.CallOption{WithoutRetry()}, want: 1,
		},
		"two Retriers, the outer never retries": {dial: func(t *testing.T) []grpc.DialOption {
			return append(newRetrier(t, exactly(attemptsOf(1))).DialOptions(), four(t).DialOptions()...)
		}, want: 1},
		"one Retrier twice": {dial: func(t *testing.T) []grpc.DialOption {
			r := four(t)
			return append(r.DialOptions(), r.DialOptions()...)
		}, want: 4},
		"per call around the chain":         {dial: func(t *testing.T) []grpc.DialOption { return four(t).DialOptions() }, perCall: two, want: 2},
		"per call, nothing in the chain":    {dial: func(*testing.T) []grpc.DialOption { return nil }, perCall: four, want: 4},
		"per call, service config, retries": {dial: func(*testing.T) []grpc.DialOption { return []grpc.DialOption{config, grpc.WithDisableRetry()} }, perCall: four, want: 4},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
				t.Cleanup(srv.Close)
				cc, err := srv.Dial(test.dial(t)...)
				if err != nil {
					t.Fatal(err)
				}
				invoke := cc.Invoke
				if test.perCall != nil {
					interceptor := test.perCall(t).UnaryClientInterceptor()
					invoke = func(ctx context.Context, method string, req, reply any, opts ...grpc.CallOption) error {
						return interceptor(ctx, method, req, reply, cc, func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
							return cc.Invoke(ctx, method, req, reply, opts...)
						}, opts...)
					}
				}
				err = invoke(t.Context(), get, &testpb.Request{}, &testpb.Response{}, test.options...)
				checkCode(t, err, codes.Unavailable)
				if n := srv.Count(get); n != test.want {
					t.Errorf("the handler ran %d times, want %d", n, test.want)
				}
				for i, a := range srv.Attempts(get) {
					if n := len(a.Metadata["grpc-previous-rpc-attempts"]); n != min(i, 1) {
						t.Errorf("attempt %d has %d attempt headers, want %d", i+1, n, min(i, 1))
					}
				}
			})
		})
	}
}

// The first call of a fresh ClientConn is made before its service config has
// come. If that call edits its policy, the config still has to count, or the
// first calls after every start are not retried.
func TestFirstCallFollowsServiceConfig(t *testing.T) {
	const config = `{"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [{"name": [{"service": "testsrv.v1.TestService", "method": "Write"}], "retryPolicy": {
		"maxAttempts": 4, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["ABORTED"]}}]}`
	for name, test := range map[string]struct {
		options  []Option
		edit     func(*Policy)
		attempts int
		reason   Reason
	}{
		"no edit":           {attempts: 4, reason: ReasonAttemptsExhausted},
		"an edit":           {edit: func(p *Policy) { p.AttemptTimeout = time.Second }, attempts: 4, reason: ReasonAttemptsExhausted},
		"an edit of theirs": {edit: func(p *Policy) { p.MaxAttempts = 2 }, attempts: 2, reason: ReasonAttemptsExhausted},
		"idempotency withdrawn by the edit": {
			edit: func(p *Policy) { p.Idempotency = NotIdempotent }, attempts: 1, reason: ReasonNotIdempotent,
		},
		"idempotency withdrawn in code": {
			options: []Option{WithMethodPolicy(write, Policy{Idempotency: NotIdempotent, Codes: Codes(codes.Aborted)})},
			edit:    func(p *Policy) { p.AttemptTimeout = time.Second }, attempts: 1, reason: ReasonNotIdempotent,
		},
		"policy in code, idempotency from the config": {
			options: []Option{WithMethodPolicy(write, Policy{MaxAttempts: 2, Codes: Codes(codes.Aborted)})},
			edit:    func(p *Policy) { p.MaxAttempts++ }, attempts: 3, reason: ReasonAttemptsExhausted,
		},
		"not followed": {options: []Option{WithoutResolverConfig()}, edit: func(p *Policy) { p.AttemptTimeout = time.Second }, attempts: 1, reason: ReasonNotRetryable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster := testsrv.NewCluster(1, func(int) testsrv.Script { return testsrv.Script{write: testsrv.Fail(1, codes.Aborted)} })
				t.Cleanup(cluster.Close)
				if err := cluster.SetServiceConfig(config); err != nil {
					t.Fatal(err)
				}
				cc, err := cluster.Dial(newRetrier(t, test.options...).DialOptions()...)
				if err != nil {
					t.Fatal(err)
				}
				client := testpb.NewTestServiceClient(cc)
				for call := range 2 {
					var report Report
					options := []grpc.CallOption{WithReport(&report)}
					if test.edit != nil {
						options = append(options, WithCallPolicy(test.edit))
					}
					_, err = client.Write(t.Context(), &testpb.Request{}, options...)
					checkCode(t, err, codes.Aborted)
					if checkCall(t, &report, test.attempts, test.reason); t.Failed() {
						t.Fatalf("in call %d", call+1)
					}
				}
			})
		})
	}
}
