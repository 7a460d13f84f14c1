package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// unaryAttempt is an attempt as an interceptor beneath ours sees it, with the
// options that came and without.
type unaryAttempt struct {
	ctx   context.Context
	n     int // attempts before it
	reply any
	with  func() error
	bare  func() error
	into  func(reply any) error
}

// inner makes an interceptor beneath ours.
func inner(f func(a unaryAttempt) error) grpc.DialOption {
	n := -1
	return grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		n++
		return f(unaryAttempt{
			ctx: ctx, n: n, reply: reply,
			with: func() error { return invoker(ctx, method, req, reply, cc, opts...) },
			bare: func() error { return invoker(ctx, method, req, reply, cc) },
			into: func(reply any) error { return invoker(ctx, method, req, reply, cc, opts...) },
		})
	})
}

// oddStatus is an error that claims a status which is none.
type oddStatus struct{ st *status.Status }

func (oddStatus) Error() string                { return "odd" }
func (e oddStatus) GRPCStatus() *status.Status { return e.st }

// Whatever interceptors beneath ours do with attempts, a write is not applied
// once more because of us, and reads are retried as far as their errors allow.
// Each row is a server that processes the call and then says UNAVAILABLE.
func TestInnerInterceptors(t *testing.T) {
	unavailable := func(text string) error { return status.Error(codes.Unavailable, text) }
	unknownToo := func(p *Policy) { p.Codes = Codes(codes.Unavailable, codes.Unknown) }
	type want struct {
		attempts int
		applied  int
		reason   Reason
		code     codes.Code
	}
	for name, test := range map[string]struct {
		inner       func(a unaryAttempt) error
		policy      func(*Policy)
		read, write want
	}{
		"passes on": {
			inner: func(a unaryAttempt) error { return a.with() },
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 1, ReasonNotIdempotent, codes.Unavailable},
		},
		"retries once by itself": {
			inner: func(a unaryAttempt) error {
				if err := a.with(); err == nil {
					return nil
				}
				return a.with()
			},
			read:  want{3, 6, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 2, ReasonNotIdempotent, codes.Unavailable}, // the second is its own
		},
		"wraps": {
			inner: func(a unaryAttempt) error { return fmt.Errorf("inner: %w", a.with()) },
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 1, ReasonNotIdempotent, codes.Unavailable},
		},
		"wraps as text": {
			inner: func(a unaryAttempt) error { return fmt.Errorf("inner: %v", a.with()) },
			read:  want{1, 1, ReasonNotRetryable, codes.Unknown},
			write: want{1, 1, ReasonNotRetryable, codes.Unknown},
		},
		"wraps as the text of another status": {
			inner: func(a unaryAttempt) error { return unavailable(a.with().Error()) },
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 1, ReasonNotIdempotent, codes.Unavailable},
		},
		"drops call options": {
			inner: func(a unaryAttempt) error { return a.bare() },
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 1, ReasonNotIdempotent, codes.Unavailable},
		},
		"says it was a timeout": {
			inner:  func(a unaryAttempt) error { _ = a.bare(); <-a.ctx.Done(); return a.ctx.Err() },
			policy: func(p *Policy) { p.AttemptTimeout = 50 * ms },
			read:   want{3, 3, ReasonAttemptsExhausted, codes.DeadlineExceeded},
			write:  want{1, 1, ReasonNotIdempotent, codes.DeadlineExceeded},
		},
		"drops them and hides the status": {
			inner: func(a unaryAttempt) error { _ = a.bare(); return unavailable("not so") },
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 1, ReasonNotIdempotent, codes.Unavailable},
		},
		"answers without a call": {
			inner: func(unaryAttempt) error { return nil },
			read:  want{1, 0, ReasonSuccess, codes.OK},
			write: want{1, 0, ReasonSuccess, codes.OK},
		},
		"refuses without a call": {
			inner: func(unaryAttempt) error { return unavailable("circuit open") },
			read:  want{3, 0, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 0, ReasonNotIdempotent, codes.Unavailable}, // it could have called
		},
		"limits the rate": {
			inner: func(unaryAttempt) error { return status.Error(codes.ResourceExhausted, "rate") },
			read:  want{1, 0, ReasonNotRetryable, codes.ResourceExhausted},
			write: want{1, 0, ReasonNotRetryable, codes.ResourceExhausted},
		},
		"refuses once": {
			inner: func(a unaryAttempt) error {
				if a.n == 0 {
					return unavailable("circuit open")
				}
				return a.with()
			},
			read:  want{3, 2, ReasonAttemptsExhausted, codes.Unavailable},
			write: want{1, 0, ReasonNotIdempotent, codes.Unavailable},
		},
		"an error without a status": {
			inner: func(a unaryAttempt) error { _ = a.with(); return errors.New("plain") },
			read:  want{1, 1, ReasonNotRetryable, codes.Unknown},
			write: want{1, 1, ReasonNotRetryable, codes.Unknown},
		},
		"a status that is nil": {
			inner: func(a unaryAttempt) error { _ = a.with(); return oddStatus{} },
			read:  want{1, 1, ReasonNotRetryable, codes.Unknown},
			write: want{1, 1, ReasonNotRetryable, codes.Unknown},
		},
		"a status that is nil, listed": {
			inner: func(a unaryAttempt) error { _ = a.with(); return oddStatus{} }, policy: unknownToo,
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unknown},
			write: want{1, 1, ReasonNotIdempotent, codes.Unknown},
		},
		"a status that is OK": {
			inner: func(a unaryAttempt) error { _ = a.with(); return oddStatus{status.New(codes.OK, "")} },
			read:  want{1, 1, ReasonNotRetryable, codes.Unknown},
			write: want{1, 1, ReasonNotRetryable, codes.Unknown},
		},
		"a status that is OK, listed": {
			inner: func(a unaryAttempt) error { _ = a.with(); return oddStatus{status.New(codes.OK, "")} }, policy: unknownToo,
			read:  want{3, 3, ReasonAttemptsExhausted, codes.Unknown},
			write: want{1, 1, ReasonNotIdempotent, codes.Unknown},
		},
		"an answer that it does not accept": {
			inner: func(a unaryAttempt) error { _ = a.with(); return status.Error(codes.DataLoss, "checksum") },
			read:  want{1, 1, ReasonNotRetryable, codes.DataLoss},
			write: want{1, 1, ReasonNotRetryable, codes.DataLoss},
		},
	} {
		for _, method := range []string{get, write} {
			for _, warm := range []bool{false, true} { // has an earlier call succeeded?
				t.Run(fmt.Sprintf("%s%s/warm=%v", name, method, warm), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						want := test.read
						if method == write {
							want = test.write
						}
						active, before := !warm, 0
						srv, client := serve(t, newRetrier(t, exactly(test.policy)), nil, inner(func(a unaryAttempt) error {
							if !active {
								before++
								return a.with()
							}
							a.n -= before
							return test.inner(a)
						}))
						call := unaryOf(client, method)
						if warm {
							if _, err := call(t.Context(), &testpb.Request{}); err != nil {
								t.Fatal(err)
							}
							active = true
						}
						if err := srv.Set(method, testsrv.Fail(1, codes.Unavailable)); err != nil {
							t.Fatal(err)
						}
						var report Report
						_, err := call(t.Context(), &testpb.Request{}, WithReport(&report))
						checkCall(t, &report, want.attempts, want.reason)
						if n := srv.Count(method) - before; n != want.applied {
							t.Errorf("applied %d times, want %d", n, want.applied)
						}
						if want.code == codes.OK {
							if err != nil {
								t.Error(err)
							}
							return
						}
						if err == nil || statusOf(err).Code() != want.code || report.Attempts[0].Code != want.code {
							t.Errorf("error %v, %v in the report; want %v", err, report.Attempts[0].Code, want.code)
						}
						if want.attempts == 1 && wrapped(err) {
							t.Errorf("error %v is wrapped though nothing was retried", err)
						}
					})
				})
			}
		}
	}
}

// Two routes for one attempt: the first never left, by the second the write was
// processed. That the first left no peer says nothing of the second.
func TestFallbackIsNotTakenForUnsent(t *testing.T) {
	for name, same := range map[string]bool{"its own error": false, "the first error": true} {
		for _, options := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/options=%v", name, options), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					second := testsrv.New(testsrv.Script{write: testsrv.Sequence{{Cut: true}}}, testsrv.WithName("second"))
					t.Cleanup(second.Close)
					other, err := second.Dial()
					if err != nil {
						t.Fatal(err)
					}
					first := testsrv.New(nil)
					t.Cleanup(first.Close)
					fallback := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						err := invoker(ctx, method, req, reply, cc, opts...)
						if err == nil {
							return nil
						}
						if !options {
							opts = nil
						}
						if again := other.Invoke(ctx, method, req, reply, opts...); again != nil && !same {
							return again
						}
						return fmt.Errorf("both: %w", errors.Join(err, errors.New("and the other")))
					}
					client := dial(t, first, newRetrier(t, exactly(nil)), grpc.WithChainUnaryInterceptor(fallback))
					first.Kill()
					_, err = client.Write(t.Context(), &testpb.Request{})
					checkCode(t, err, codes.Unavailable)
					if n := second.Count(write); n != 1 {
						t.Errorf("applied %d times", n)
					}
				})
			})
		}
	}
}

// logged is a slog handler that keeps the messages.
type logged struct {
	mu    sync.Mutex
	lines []string
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logged) WithGroup(string) slog.Handler            { return l }
func (l *logged) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, r.Message)
	return nil
}

func (l *logged) count(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for _, line := range l.lines {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// An interceptor that drops call options costs its users the retries of writes
// that never left. They are told, but not for every call; and a client whose
// interceptors are in order, or only answer some calls themselves, keeps them.
func TestDroppedOptionsAreTold(t *testing.T) {
	for name, test := range map[string]struct {
		inner    func(a unaryAttempt) error
		warnings int
		attempts int // of a write, once the server is down
	}{
		"in order": {inner: func(a unaryAttempt) error { return a.with() }, warnings: 0, attempts: 3},
		"drops":    {inner: func(a unaryAttempt) error { return a.bare() }, warnings: 1, attempts: 1},
		"drops now and then": {inner: func(a unaryAttempt) error {
			if a.n%2 == 0 {
				return a.bare()
			}
			return a.with()
		}, warnings: 1, attempts: 1},
		"answers some by itself": {inner: func(a unaryAttempt) error {
			if a.n < 5 {
				return nil
			}
			return a.with()
		}, warnings: 1, attempts: 3},
		"wraps what fails": {inner: func(a unaryAttempt) error {
			if err := a.with(); err != nil {
				return fmt.Errorf("inner: %w", fmt.Errorf("more: %w", err))
			}
			return nil
		}, warnings: 0, attempts: 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				log := &logged{}
				r, err := New(exactly(nil), WithLogger(slog.New(log)))
				if err != nil {
					t.Fatal(err)
				}
				srv, client := serve(t, r, nil, inner(test.inner))
				for i := range 10 {
					if _, err := unaryOf(client, []string{get, put, write}[i%3])(t.Context(), &testpb.Request{}); err != nil {
						t.Fatal(err)
					}
				}
				if n := log.count("call options never reached grpc"); n != test.warnings {
					t.Errorf("warned %d times, want %d: %q", n, test.warnings, log.lines)
				}
				srv.Kill()
				synctest.Wait()
				var report Report
				if _, err := client.Write(t.Context(), &testpb.Request{}, WithReport(&report)); err == nil {
					t.Fatal("no error")
				}
				if report.Made() != test.attempts {
					t.Errorf("%d attempts to write, want %d", report.Made(), test.attempts)
				}
			})
		})
	}
}

// An interceptor with a timeout of its own returns while grpc is still at work
// for the attempt it gave up. What that one brings later must not get into the
// next attempt, nor into another call.
func TestInnerReturnsEarly(t *testing.T) {
	slow := testsrv.Step{Delay: 100 * ms, Header: metadata.MD{"n": {"late"}}, Trailer: metadata.MD{"n": {"late"}}}
	for name, test := range map[string]struct {
		method   string
		steps    testsrv.Sequence
		policy   func(*Policy)
		attempts int
		code     codes.Code
	}{
		"read":               {method: get, steps: testsrv.Sequence{slow}, attempts: 3, code: codes.Unavailable},
		"read, then in time": {method: get, steps: testsrv.Sequence{slow, {Header: metadata.MD{"n": {"2"}}, Trailer: metadata.MD{"n": {"2"}}}}, attempts: 2},
		"write":              {method: write, steps: testsrv.Sequence{slow}, attempts: 1, code: codes.Unavailable},
		"with a timeout":     {method: get, steps: testsrv.Sequence{slow}, policy: func(p *Policy) { p.AttemptTimeout = 70 * ms }, attempts: 3, code: codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				impatient := inner(func(a unaryAttempt) error {
					own := &testpb.Response{} // it minds its reply, but the options are ours
					done := make(chan error, 1)
					go func() { done <- a.into(own) }()
					select {
					case err := <-done:
						if err == nil {
							proto.Merge(a.reply.(proto.Message), own)
						}
						return err
					case <-time.After(50 * ms):
						return status.Error(codes.Unavailable, "too slow for me")
					}
				})
				srv, client := serve(t, newRetrier(t, exactly(test.policy)), testsrv.Script{test.method: test.steps, put: nil}, impatient)
				w := newWanted()
				var report Report
				_, err := unaryOf(client, test.method)(t.Context(), &testpb.Request{}, append(w.options(), WithReport(&report))...)
				checkCode(t, err, test.code)
				if report.Made() != test.attempts || srv.Count(test.method) != test.attempts {
					t.Errorf("%d attempts, %d of them arrived, want %d", report.Made(), srv.Count(test.method), test.attempts)
				}
				if test.code == codes.OK {
					w.check(t, err, []string{"2"}, []string{"2"}, "testsrv")
				} else {
					w.check(t, err, nil, nil, "")
				}
				for range 20 { // while the late ones come in
					var header metadata.MD
					var report Report
					if _, err := client.Put(t.Context(), &testpb.Request{}, grpc.Header(&header), WithReport(&report)); err != nil || len(header["n"]) > 0 || report.Made() != 1 {
						t.Errorf("another call: %v, header %v, %d attempts", err, header, report.Made())
					}
					time.Sleep(10 * ms) // virtual
				}
			})
		})
	}
}

// A panic beneath ours, as of the codec, is the caller's to see.
func TestInnerPanics(t *testing.T) {
	for _, attempt := range []int{0, 1} {
		t.Run(fmt.Sprint("attempt ", attempt+1), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				_, client := serve(t, newRetrier(t, exactly(nil), WithBudget(budget)), testsrv.Script{get: testsrv.Fail(attempt, codes.Unavailable)},
					inner(func(a unaryAttempt) error {
						if a.n == attempt {
							panic("boom")
						}
						return a.with()
					}))
				w := newWanted()
				func() {
					defer func() {
						if v := recover(); v != "boom" {
							t.Errorf("recovered %v", v)
						}
					}()
					_, _ = client.Get(t.Context(), &testpb.Request{}, w.options()...)
				}()
				if len(w.finished) != 2 || status.Code(w.finished[0]) != codes.Internal {
					t.Errorf("OnFinish ran with %v, want twice INTERNAL", w.finished)
				}
				// The retry that panicked was sent, as far as anybody knows.
				if s := budget.state(); s.InFlight != 0 || s.Tokens != 70-7*float64(attempt) {
					t.Errorf("budget %+v", s)
				}
			})
		})
	}
}

// Fakes and in-process channels have no ClientConn and no grpc beneath. They
// must work, and nothing may be proven by what they leave out.
func TestWithoutClientConn(t *testing.T) {
	unavailable := status.Error(codes.Unavailable, "down")
	fills := func(opts []grpc.CallOption) {
		for _, o := range opts {
			switch o := o.(type) {
			case grpc.HeaderCallOption:
				*o.HeaderAddr = metadata.MD{"n": {"h"}}
			case grpc.TrailerCallOption:
				*o.TrailerAddr = metadata.MD{"n": {"t"}}
			case grpc.PeerCallOption:
				*o.PeerAddr = peer.Peer{Addr: fakeAddr{}}
			}
		}
	}
	finishes := func(opts []grpc.CallOption, err error) {
		for _, o := range opts {
			if o, ok := o.(grpc.OnFinishCallOption); ok {
				o.OnFinish(err)
			}
		}
	}
	for name, test := range map[string]struct {
		method   string
		invoke   func(i int, opts []grpc.CallOption) error
		attempts int
		reason   Reason
		filled   bool
	}{
		"answers":           {method: write, invoke: func(int, []grpc.CallOption) error { return nil }, attempts: 1, reason: ReasonSuccess},
		"answers, in full":  {method: write, invoke: func(_ int, opts []grpc.CallOption) error { fills(opts); return nil }, attempts: 1, reason: ReasonSuccess, filled: true},
		"fails":             {method: get, invoke: func(int, []grpc.CallOption) error { return unavailable }, attempts: 3, reason: ReasonAttemptsExhausted},
		"fails, in full":    {method: get, invoke: func(_ int, opts []grpc.CallOption) error { fills(opts); return unavailable }, attempts: 3, reason: ReasonAttemptsExhausted, filled: true},
		"fails, a write":    {method: write, invoke: func(int, []grpc.CallOption) error { return unavailable }, attempts: 1, reason: ReasonNotIdempotent},
		"runs OnFinish":     {method: write, invoke: func(_ int, opts []grpc.CallOption) error { finishes(opts, nil); return nil }, attempts: 1, reason: ReasonSuccess},
		"fails like grpc":   {method: write, invoke: func(_ int, opts []grpc.CallOption) error { finishes(opts, unavailable); return unavailable }, attempts: 3, reason: ReasonAttemptsExhausted},
		"fails differently": {method: write, invoke: func(_ int, opts []grpc.CallOption) error { finishes(opts, errors.New("other")); return unavailable }, attempts: 1, reason: ReasonNotIdempotent},
		"recovers": {method: get, invoke: func(i int, _ []grpc.CallOption) error {
			if i == 0 {
				return unavailable
			}
			return nil
		}, attempts: 2, reason: ReasonSuccess},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				log := &logged{}
				r, err := New(exactly(nil), WithLogger(slog.New(log)))
				if err != nil {
					t.Fatal(err)
				}
				for range 2 {
					i := -1
					w := newWanted()
					var report Report
					err = r.UnaryClientInterceptor()(t.Context(), test.method, &testpb.Request{}, &testpb.Response{}, nil,
						func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
							i++
							return test.invoke(i, opts)
						}, append(w.options(), WithReport(&report))...)
					checkCall(t, &report, test.attempts, test.reason)
					if (err == nil) != (test.reason == ReasonSuccess) || report.Target != "" {
						t.Errorf("error %v, target %q", err, report.Target)
					}
					if test.filled {
						w.check(t, err, []string{"h"}, []string{"t"}, "fake")
					} else {
						w.check(t, err, nil, nil, "")
					}
				}
				if n := log.count("call options"); n != 0 {
					t.Errorf("warned of a fake's manners: %q", log.lines)
				}
			})
		})
	}
}
