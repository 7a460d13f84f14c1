package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// every10ms makes grpc dial anew every 10 ms, so that it can be foretold when a
// connection is there again.
func every10ms() grpc.DialOption {
	return grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * ms, Multiplier: 1, MaxDelay: 10 * ms}})
}

// attemptsAre compares what is known of each attempt.
func attemptsAre(t *testing.T, r *Report, evidence ...Evidence) {
	t.Helper()
	var got []Evidence
	for _, a := range r.Attempts {
		if a.Err != nil {
			got = append(got, a.Evidence)
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(evidence) {
		t.Errorf("attempts %v, want %v", got, evidence)
	}
}

// While nothing listens, nobody can have processed anything: also writes are
// repeated, at no cost, and are applied once when the server is back.
func TestUnsentIsRepeated(t *testing.T) {
	for _, method := range []string{get, write} {
		t.Run("memory"+method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				r := newRetrier(t, WithBudget(budget), exactly(func(p *Policy) { p.MaxAttempts, p.Backoff.Base = 4, 100*ms }))
				srv, client := serve(t, r, nil, every10ms())
				call := unaryOf(client, method)
				srv.Kill()
				var report Report
				_, err := call(t.Context(), &testpb.Request{}, WithReport(&report))
				checkCode(t, err, codes.Unavailable)
				checkCall(t, &report, 4, ReasonAttemptsExhausted)
				attemptsAre(t, &report, Unsent, Unsent, Unsent, Unsent)
				if s := budget.state(); s.Tokens != 70 || s.Granted != 3 {
					t.Errorf("budget %+v, want three for nothing", s)
				}

				time.AfterFunc(150*ms, func() {
					if err := srv.Restart(); err != nil {
						t.Error(err)
					}
				})
				start := time.Now()
				reply, err := call(t.Context(), &testpb.Request{}, WithReport(&report))
				if err != nil || reply.GetArrival() != 1 {
					t.Fatalf("reply %v, error %v", reply, err)
				}
				checkElapsed(t, start, 300*ms)
				checkCall(t, &report, 3, ReasonSuccess)
				attemptsAre(t, &report, Unsent, Unsent)
				if n := srv.Count(method); n != 1 {
					t.Errorf("applied %d times", n)
				}
			})
		})
		t.Run("loopback"+method, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			closed := l.Addr().String()
			_ = l.Close()
			r := newRetrier(t, exactly(func(p *Policy) { p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 0 } }))
			cc, err := grpc.NewClient("passthrough:///"+closed, append(r.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
			if err != nil {
				t.Fatal(err)
			}
			defer cc.Close()
			var report Report
			_, err = unaryOf(testpb.NewTestServiceClient(cc), method)(t.Context(), &testpb.Request{}, WithReport(&report))
			checkCode(t, err, codes.Unavailable)
			checkCall(t, &report, 3, ReasonAttemptsExhausted)
			attemptsAre(t, &report, Unsent, Unsent, Unsent)
		})
	}
}

// A server that dies in a call may have done the work: that attempt is
// ambiguous, though all that follow are not.
func TestServerDiesInACall(t *testing.T) {
	for method, want := range map[string]struct {
		evidence []Evidence
		reason   Reason
	}{
		get:   {[]Evidence{Ambiguous, Unsent, Unsent}, ReasonAttemptsExhausted},
		write: {[]Evidence{Ambiguous}, ReasonNotIdempotent},
	} {
		t.Run(method, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{method: testsrv.Sequence{{Block: true}}})
				time.AfterFunc(50*ms, srv.Kill)
				var report Report
				_, err := unaryOf(client, method)(t.Context(), &testpb.Request{}, WithReport(&report))
				checkCode(t, err, codes.Unavailable)
				checkCall(t, &report, len(want.evidence), want.reason)
				attemptsAre(t, &report, want.evidence...)
				if n := srv.Count(method); n != 1 {
					t.Errorf("the handler ran %d times, want once", n)
				}
			})
		})
	}
}

// A closed ClientConn will not come back: nothing is worth waiting for.
func TestClosedClientConn(t *testing.T) {
	for name, test := range map[string]struct {
		closes   time.Duration // 0: before the call
		step     testsrv.Step
		attempts int
	}{
		"before":       {attempts: 1},
		"in the call":  {closes: 30 * ms, step: testsrv.Step{Block: true}, attempts: 1},
		"in the wait":  {closes: 5 * ms, step: testsrv.Step{Code: codes.Unavailable}, attempts: 2},
		"in the retry": {closes: 30 * ms, step: testsrv.Step{Code: codes.Unavailable, Delay: 20 * ms}, attempts: 2},
	} {
		for _, method := range []string{get, write} {
			if method == write && test.attempts > 1 {
				continue
			}
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					srv := testsrv.New(testsrv.Script{method: testsrv.Sequence{test.step}})
					t.Cleanup(srv.Close)
					cc, err := srv.Dial(newRetrier(t, exactly(func(p *Policy) {
						p.MaxAttempts, p.Codes = 9, Codes(codes.Canceled, codes.Unavailable)
					})).DialOptions()...)
					if err != nil {
						t.Fatal(err)
					}
					if test.closes == 0 {
						_ = cc.Close()
					} else {
						time.AfterFunc(test.closes, func() { _ = cc.Close() })
					}
					var report Report
					start := time.Now()
					_, err = unaryOf(testpb.NewTestServiceClient(cc), method)(t.Context(), &testpb.Request{}, WithReport(&report))
					checkCode(t, err, codes.Canceled)
					checkCall(t, &report, test.attempts, ReasonClosed)
					if got := time.Since(start); got > 30*ms {
						t.Errorf("returned after %v", got)
					}
				})
			})
		}
	}
}

// A name that cannot be resolved is a call that never left.
func TestNameResolutionFails(t *testing.T) {
	for _, method := range []string{get, write} {
		for name, recovers := range map[string]bool{"for good": false, "for a while": true} {
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					srv := testsrv.New(nil)
					t.Cleanup(srv.Close)
					names := manual.NewBuilderWithScheme("names")
					names.BuildCallback = func(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) {
						cc.ReportError(errors.New("no such host"))
						if recovers {
							time.AfterFunc(15*ms, func() { _ = cc.UpdateState(resolver.State{Addresses: []resolver.Address{{Addr: srv.Address()}}}) })
						}
					}
					cc, err := srv.DialTarget("names:///x", append(newRetrier(t, exactly(nil)).DialOptions(), grpc.WithResolvers(names))...)
					if err != nil {
						t.Fatal(err)
					}
					var report Report
					_, err = unaryOf(testpb.NewTestServiceClient(cc), method)(t.Context(), &testpb.Request{}, WithReport(&report))
					if recovers {
						if err != nil {
							t.Error(err)
						}
						attemptsAre(t, &report, Unsent, Unsent)
						checkCall(t, &report, 3, ReasonSuccess)
						return
					}
					checkCode(t, err, codes.Unavailable)
					attemptsAre(t, &report, Unsent, Unsent, Unsent)
					checkCall(t, &report, 3, ReasonAttemptsExhausted)
				})
			})
		}
	}
}

// With wait-for-ready a call asks to sit out an outage. Attempts that time out
// while no connection is there use up none of its attempts; those that were
// sent do.
func TestWaitForReady(t *testing.T) {
	const config = `{"methodConfig": [{"name": [{}], "waitForReady": true}]}`
	for name, test := range map[string]struct {
		method   string
		dial     []grpc.DialOption
		options  []grpc.CallOption
		back     time.Duration // when the server is back; 0: never
		steps    testsrv.Sequence
		parent   time.Duration
		attempts int
		applied  int
		reason   Reason
		elapsed  time.Duration
	}{
		"write":                    {method: write, options: []grpc.CallOption{grpc.WaitForReady(true)}, back: 550 * ms, attempts: 6, applied: 1, reason: ReasonSuccess, elapsed: 550 * ms},
		"read":                     {method: get, options: []grpc.CallOption{grpc.WaitForReady(true)}, back: 550 * ms, attempts: 6, applied: 1, reason: ReasonSuccess, elapsed: 550 * ms},
		"by the service config":    {method: write, dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(config)}, back: 550 * ms, attempts: 6, applied: 1, reason: ReasonSuccess, elapsed: 550 * ms},
		"the caller is stronger":   {method: write, dial: []grpc.DialOption{grpc.WithDefaultServiceConfig(config)}, options: []grpc.CallOption{grpc.WaitForReady(false)}, back: 550 * ms, attempts: 2, applied: 0, reason: ReasonAttemptsExhausted},
		"until the parent ends":    {method: write, options: []grpc.CallOption{grpc.WaitForReady(true)}, parent: 450 * ms, attempts: 5, applied: 0, reason: ReasonParentDone, elapsed: 450 * ms},
		"then it fails":            {method: get, options: []grpc.CallOption{grpc.WaitForReady(true)}, back: 550 * ms, steps: testsrv.Fail(1, codes.Unavailable), attempts: 7, applied: 2, reason: ReasonAttemptsExhausted, elapsed: 550 * ms},
		"then it is too slow":      {method: get, options: []grpc.CallOption{grpc.WaitForReady(true)}, back: 550 * ms, steps: testsrv.Sequence{{Block: true}}, attempts: 7, applied: 2, reason: ReasonAttemptsExhausted, elapsed: 700 * ms},
		"a write that is too slow": {method: write, options: []grpc.CallOption{grpc.WaitForReady(true)}, back: 550 * ms, steps: testsrv.Sequence{{Block: true}}, attempts: 6, applied: 1, reason: ReasonNotIdempotent, elapsed: 600 * ms},
		"not asked for":            {method: write, back: 550 * ms, attempts: 2, applied: 0, reason: ReasonAttemptsExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				srv, client := serve(t, newRetrier(t, WithBudget(budget), exactly(func(p *Policy) {
					p.MaxAttempts, p.AttemptTimeout = 2, 100*ms
					p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 0 }
				})), testsrv.Script{test.method: test.steps}, append(test.dial, every10ms())...)
				srv.Kill()
				if test.back > 0 {
					time.AfterFunc(test.back-5*ms, func() { // grpc dials at the next multiple of 10 ms
						if err := srv.Restart(); err != nil {
							t.Error(err)
						}
					})
				}
				ctx := t.Context()
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				var report Report
				start := time.Now()
				_, err := unaryOf(client, test.method)(ctx, &testpb.Request{}, append(test.options, WithReport(&report))...)
				checkElapsed(t, start, test.elapsed)
				checkCall(t, &report, test.attempts, test.reason)
				if (err == nil) != (test.reason == ReasonSuccess) {
					t.Errorf("error %v", err)
				}
				if n := srv.Count(test.method); n != test.applied {
					t.Errorf("%d attempts arrived, want %d", n, test.applied)
				}
			})
		})
	}
}

// failing credentials give errors, then tokens.
type failingCreds struct {
	errs []error
	runs int
}

func (c *failingCreds) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	c.runs++
	if c.runs <= len(c.errs) {
		return nil, c.errs[c.runs-1]
	}
	return map[string]string{"token": "ok"}, nil
}
func (*failingCreds) RequireTransportSecurity() bool { return false }

// Credentials that fail keep the call here, so that a write may be repeated;
// but the token service was asked, so it is not for nothing; and a token that
// is refused once more is not asked for a third time.
func TestCredentialsFail(t *testing.T) {
	plain := errors.New("token service is down")
	unavailable := status.Error(codes.Unavailable, "token service is down")
	listed := func(p *Policy) { p.MaxAttempts, p.Codes = 9, Codes(codes.Unauthenticated, codes.Unavailable) }
	internal := func(p *Policy) { p.Codes = Codes(codes.Internal) }
	for name, test := range map[string]struct {
		ofCall   bool // the credentials are the call's, not the ClientConn's
		method   string
		errs     []error
		policy   func(*Policy)
		server   testsrv.Sequence
		attempts int
		runs     int
		applied  int
		reason   Reason
		code     codes.Code
		tokens   float64
	}{
		"once, not listed":         {method: write, errs: []error{plain}, attempts: 1, runs: 1, reason: ReasonNotRetryable, code: codes.Unauthenticated, tokens: 70},
		"once":                     {method: write, errs: []error{plain}, policy: listed, attempts: 2, runs: 2, applied: 1, reason: ReasonSuccess, tokens: 70},
		"twice":                    {method: write, errs: []error{plain, plain}, policy: listed, attempts: 2, runs: 2, reason: ReasonNotRetryable, code: codes.Unauthenticated, tokens: 63},
		"twice, another between":   {method: write, errs: []error{plain, unavailable, plain}, policy: listed, attempts: 3, runs: 3, reason: ReasonNotRetryable, code: codes.Unauthenticated, tokens: 56},
		"unavailable":              {method: write, errs: []error{unavailable, unavailable}, attempts: 3, runs: 3, applied: 1, reason: ReasonSuccess, tokens: 63},
		"unavailable for long":     {method: write, errs: []error{unavailable, unavailable, unavailable}, attempts: 3, runs: 3, reason: ReasonAttemptsExhausted, code: codes.Unavailable, tokens: 56},
		"unavailable, of the call": {ofCall: true, method: write, errs: []error{unavailable, unavailable}, attempts: 3, runs: 3, applied: 1, reason: ReasonSuccess, tokens: 63},
		// grpc calls this INTERNAL, as it does an answer that it cannot read.
		"once, of the call":            {ofCall: true, method: write, errs: []error{plain}, policy: listed, attempts: 1, runs: 1, reason: ReasonNotRetryable, code: codes.Internal, tokens: 70},
		"once, of the call, listed":    {ofCall: true, method: write, errs: []error{plain}, policy: internal, attempts: 1, runs: 1, reason: ReasonNotIdempotent, code: codes.Internal, tokens: 70},
		"once, of the call, of a read": {ofCall: true, method: get, errs: []error{plain}, policy: internal, attempts: 2, runs: 2, applied: 1, reason: ReasonSuccess, tokens: 70},
		"the server refuses":           {method: get, server: testsrv.Fail(9, codes.Unauthenticated), policy: listed, attempts: 2, runs: 2, applied: 2, reason: ReasonNotRetryable, code: codes.Unauthenticated, tokens: 63},
		"the server refuses once":      {method: get, server: testsrv.Fail(1, codes.Unauthenticated).ThenOK(), policy: listed, attempts: 2, runs: 2, applied: 2, reason: ReasonSuccess, tokens: 70},
		"the server refuses a write":   {method: write, server: testsrv.Fail(1, codes.Unauthenticated), policy: listed, attempts: 1, runs: 1, applied: 1, reason: ReasonNotIdempotent, code: codes.Unauthenticated, tokens: 70},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				creds := &failingCreds{errs: test.errs}
				var report Report
				options := []grpc.CallOption{WithReport(&report)}
				var dialOptions []grpc.DialOption
				if test.ofCall {
					options = append(options, grpc.PerRPCCredentials(creds))
				} else {
					dialOptions = append(dialOptions, grpc.WithPerRPCCredentials(creds))
				}
				srv, client := serve(t, newRetrier(t, WithBudget(budget), exactly(test.policy)), testsrv.Script{test.method: test.server}, dialOptions...)
				_, err := unaryOf(client, test.method)(t.Context(), &testpb.Request{}, options...)
				checkCode(t, err, test.code)
				checkCall(t, &report, test.attempts, test.reason)
				if n := srv.Count(test.method); n != test.applied || creds.runs != test.runs {
					t.Errorf("applied %d times, credentials ran %d times, want %d and %d", n, creds.runs, test.applied, test.runs)
				}
				for i, a := range report.Attempts[:min(len(test.errs), report.Made())] {
					if (a.Evidence == Unsent) != (a.Code != codes.Internal) {
						t.Errorf("attempt %d, %v, is %v", i+1, a.Code, a.Evidence)
					}
				}
				if s := budget.state(); s.Tokens != test.tokens {
					t.Errorf("%v tokens, want %v", s.Tokens, test.tokens)
				}
			})
		})
	}
}

// A ClientConn that was idle or broken for a while is dialled again by grpc
// itself; that needs no retry of ours.
func TestBrokenConnectionIsDialledAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(nil)
		t.Cleanup(srv.Close)
		cc, err := srv.Dial(newRetrier(t, exactly(nil)).DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		client := testpb.NewTestServiceClient(cc)
		for range 3 {
			var report Report
			if _, err := client.Write(t.Context(), &testpb.Request{}, WithReport(&report)); err != nil {
				t.Fatal(err)
			}
			checkCall(t, &report, 1, ReasonSuccess)
			srv.CutConnections()
			synctest.Wait()
			if state := cc.GetState(); state != connectivity.Idle {
				t.Fatalf("the ClientConn is %v, want idle", state)
			}
		}
	})
}
