package grpcretry

import (
	"context"
	"math/rand/v2"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// ledger counts what is asked of a budget, and how each grant ends.
type ledger struct {
	*TokenBudget
	entered, left, reserved, released, lost, won atomic.Int64
}

func (l *ledger) Enter() { l.entered.Add(1); l.TokenBudget.Enter() }
func (l *ledger) Leave() { l.left.Add(1); l.TokenBudget.Leave() }

func (l *ledger) Reserve(c Cost) (Grant, bool) {
	g, ok := l.TokenBudget.Reserve(c)
	if ok {
		l.reserved.Add(1)
	}
	return g, ok
}

func (l *ledger) Release(g Grant) { l.released.Add(1); l.TokenBudget.Release(g) }

func (l *ledger) Settle(g Grant, won bool) {
	if won {
		l.won.Add(1)
	} else {
		l.lost.Add(1)
	}
	l.TokenBudget.Settle(g, won)
}

// check is for when no call is under way.
func (l *ledger) check(t testing.TB) {
	t.Helper()
	if l.entered.Load() == 0 || l.entered.Load() != l.left.Load() {
		t.Errorf("%d calls entered, %d left", l.entered.Load(), l.left.Load())
	}
	if ends := l.released.Load() + l.lost.Load() + l.won.Load(); ends != l.reserved.Load() {
		t.Errorf("%d grants, of which %d were released, %d lost and %d won", l.reserved.Load(), l.released.Load(), l.lost.Load(), l.won.Load())
	}
}

// keepsLedger is a Retrier whose calls are charged to a ledger with room for
// thousands of hedges.
func keepsLedger(t testing.TB, opts ...Option) (*Retrier, *ledger) {
	t.Helper()
	l := &ledger{TokenBudget: mustBudget(t, BudgetConfig{Capacity: 1 << 19, HedgeCapacity: 1 << 19})}
	r := newRetrier(t, append(opts, WithBudget(Unlimited()))...)
	r.set.Load().children["/testsrv.v1.TestService/"] = &child{"/testsrv.v1.TestService/*", l}
	return r, l
}

// numberOf is the number of the attempt with that context.
func numberOf(ctx context.Context) int {
	md, _ := metadata.FromOutgoingContext(ctx)
	n := 0
	if previous := md.Get("grpc-previous-rpc-attempts"); previous != nil {
		n, _ = strconv.Atoi(previous[0])
	}
	return n + 1
}

// An interceptor further in may return as soon as its context ends, with the
// attempt still on its way. What grpc writes then must not be what the call reads.
func TestHedgesThatReturnBeforeTheyEnd(t *testing.T) {
	hasty := func(ctx context.Context, invoke func() error) error {
		done := make(chan error, 1)
		go func() { done <- invoke() }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	unary := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		return hasty(ctx, func() error { return invoker(ctx, method, req, reply, cc, opts...) })
	}
	for name, panics := range map[string]bool{"loses": false, "beside a panic": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				hooks := Hooks{AttemptEnd: func(_ context.Context, a Attempt) {
					if panics && a.Reason == ReasonHedgeFailed {
						panic("on purpose")
					}
				}}
				r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 3, Delay: ms}), WithHooks(hooks))
				_, client := serve(t, r, testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
					md := metadata.Pairs("n", "1")
					if nth%3 == 2 {
						return testsrv.Step{Delay: ms, Code: codes.Unavailable, Header: md, Trailer: md}
					}
					return testsrv.Step{Delay: 2 * ms, Header: md, Trailer: md}
				})}, grpc.WithChainUnaryInterceptor(unary))
				for range 300 {
					func() {
						defer func() { _ = recover() }()
						var header metadata.MD
						_, _ = client.Get(t.Context(), &testpb.Request{}, grpc.Header(&header))
					}()
				}
				synctest.Wait()
				l.check(t)
			})
		})
	}
}

// The same of streams that are opened.
func TestHedgedStreamsThatReturnBeforeTheyAreOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hasty := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if numberOf(ctx) == 1 {
				return streamer(ctx, desc, cc, method, opts...)
			}
			type result struct {
				stream grpc.ClientStream
				err    error
			}
			done := make(chan result, 1)
			go func() {
				stream, err := streamer(ctx, desc, cc, method, opts...)
				done <- result{stream, err}
			}()
			select {
			case r := <-done:
				return r.stream, r.err
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 3, Delay: ms}))
		_, cc := serveStreams(t, r, testsrv.Script{list: testsrv.Sequence{{Delay: 5 * ms, Messages: 1}}}, grpc.WithChainStreamInterceptor(hasty))
		for range 100 {
			stream := open(t, t.Context(), cc, list)
			send(t, stream, 1)
			closeSend(t, stream)
			recv(t, stream)
			if err := end(t, stream); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		l.check(t)
	})
}

// A panic must leave every grant of a hedged call ended, once, also where what
// is told of the others panics in its turn.
func TestHedgedPanicsEndEveryGrantOnce(t *testing.T) {
	for name, test := range map[string]struct {
		opts  []Option
		inner func(ctx context.Context, number int)
	}{
		"an event sink, always":     {opts: []Option{WithEventSink(brokenSink{func(string) bool { return true }})}},
		"an event sink, at a loser": {opts: []Option{WithEventSink(brokenSink{func(decision string) bool { return decision == "hedge_lost" }})}},
		"a loser, as it is cancelled": {inner: func(ctx context.Context, number int) {
			if number == 2 {
				<-ctx.Done()
				panic("on purpose")
			}
		}},
		"a loser that ends its goroutine": {inner: func(ctx context.Context, number int) {
			if number == 1 {
				<-ctx.Done()
				runtime.Goexit()
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				inner := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
					if test.inner != nil {
						test.inner(ctx, numberOf(ctx))
					}
					return invoker(ctx, method, req, reply, cc, opts...)
				}
				r, l := keepsLedger(t, append(test.opts, hedged(Hedge{MaxAttempts: 3, Delay: 10 * ms}))...)
				srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Delay: 100 * ms}, {Delay: 100 * ms}, {Delay: 10 * ms}}}, grpc.WithChainUnaryInterceptor(inner))
				for range 3 {
					done := make(chan struct{})
					go func() {
						defer close(done)
						defer func() { _ = recover() }()
						_, _ = client.Get(t.Context(), &testpb.Request{})
					}()
					<-done
				}
				synctest.Wait()
				l.check(t)
				if n := srv.Running(); n != 0 {
					t.Errorf("%d attempts still run on the server", n)
				}
			})
		})
	}
}

type brokenSink struct{ breaks func(decision string) bool }

func (brokenSink) Enabled(context.Context) bool { return true }
func (s brokenSink) Emit(_ context.Context, _ string, _ time.Time, attrs []attribute.KeyValue) {
	for _, a := range attrs {
		if a.Key == "grpcretry.attempt.decision" && s.breaks(a.Value.AsString()) {
			panic("on purpose")
		}
	}
}

// A log handler that panics, when told that a call is not hedged, must not leave
// the call in flight for good.
func TestPanicOverAReplyThatCannotBeDoubled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 3, Delay: 10 * ms}))
		r.logger = panickyLogger(func() { panic("on purpose") })
		srv := testsrv.New(nil)
		defer srv.Close()
		cc, err := srv.Dial(append(r.DialOptions(), grpc.WithDefaultCallOptions(grpc.ForceCodec(merging{})))...)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 0, 100)
		func() {
			defer func() { _ = recover() }()
			_ = cc.Invoke(t.Context(), get, &testpb.Request{}, &b)
		}()
		l.check(t)
	})
}

// Of more attempts than a report and a span keep, all must be accounted for.
func TestHedgesBeyondWhatIsKept(t *testing.T) {
	after := func(d time.Duration, code codes.Code) testsrv.Step { return testsrv.Step{Delay: d, Code: code} }
	for name, test := range map[string]struct {
		react testsrv.Func
		code  codes.Code
	}{
		"the first wins":  {react: func(nth int, _ testsrv.Attempt) testsrv.Step { return after(time.Duration(nth+9)*ms, 0) }},
		"the last wins":   {react: func(nth int, _ testsrv.Attempt) testsrv.Step { return after(time.Duration(70-nth)*ms, 0) }},
		"all fail":        {react: func(nth int, _ testsrv.Attempt) testsrv.Step { return after(10*ms, codes.Unavailable) }, code: codes.Unavailable},
		"a fatal failure": {react: func(nth int, _ testsrv.Attempt) testsrv.Step { return after(time.Duration(nth+9)*ms, codes.NotFound) }, code: codes.NotFound},
		"half fail, a win": {react: func(nth int, _ testsrv.Attempt) testsrv.Step {
			if nth <= 40 {
				return after(10*ms, codes.Unavailable)
			}
			return after(20*ms, 0)
		}},
		"half fail, a fatal failure": {code: codes.NotFound, react: func(nth int, _ testsrv.Attempt) testsrv.Step {
			if nth <= 40 {
				return after(10*ms, codes.Unavailable)
			}
			return after(20*ms, codes.NotFound)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := 0
				hooks := Hooks{AttemptEnd: func(context.Context, Attempt) { ended++ }}
				_, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 50, AtOnce: true}), WithBudget(Unlimited()), WithHooks(hooks)), testsrv.Script{get: test.react})
				if _, err := client.Put(t.Context(), &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
				ended = 0
				ctx, events := traced(t, t.Context())
				var report Report
				_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))
				checkCode(t, err, test.code)
				if n := len(report.Attempts) + report.Dropped; n != 50 || report.Made() != 50 || ended != 50 || len(report.Attempts) != 32 {
					t.Errorf("%d attempts in the report and %d dropped, %d made, %d told to the hook; want 32, 18, 50 and 50", len(report.Attempts), report.Dropped, report.Made(), ended)
				}
				deciders := 0
				for i, a := range report.Attempts {
					if !a.Reason.goesOn() {
						deciders++
						if a.Reason != report.Reason || a.Code != test.code {
							t.Errorf("attempt %d: %v, %v; the report says %v", a.Number, a.Code, a.Reason, report.Reason)
						}
					}
					if i > 0 && a.Number <= report.Attempts[i-1].Number {
						t.Errorf("attempt %d stands after %d", a.Number, report.Attempts[i-1].Number)
					}
				}
				all := events()
				dropped, _ := all[len(all)-1]["grpcretry.attempt.dropped"].(int64)
				if deciders != 1 || len(all) != 32 || dropped != 18 {
					t.Errorf("%d attempts decide, %d events, %d dropped; want 1, 32 and 18", deciders, len(all), dropped)
				}
				for _, e := range all[:len(all)-1] {
					if d := e["grpcretry.attempt.decision"]; d != "hedge_lost" && d != "hedge_failed" {
						t.Errorf("an event says %v before the last", d)
					}
				}
			})
		})
	}
}

// A resolver's retryPolicy replaces the hedging policy of a .proto also where
// it arrives with the first call: what it says makes one attempt at a time.
func TestResolverEndsDeclaredHedging(t *testing.T) {
	const method = testpb.DeclaredService_Hedged_FullMethodName // declares 3 attempts, 20 ms apart
	for name, test := range map[string]struct {
		script testsrv.Sequence
		starts []time.Duration
	}{
		"with nothing in flight": {testsrv.Sequence{{Code: codes.Unavailable}, {Delay: 50 * ms}}, []time.Duration{0, 80 * ms}},
		"with a hedge in flight": {testsrv.Sequence{{Delay: 25 * ms, Code: codes.Unavailable}, {Delay: 100 * ms, Code: codes.Unavailable}, {Delay: 50 * ms}}, []time.Duration{0, 20 * ms, 200 * ms}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{method: test.script})
				defer srv.Close()
				config := `{"methodConfig": [{"name": [` + declaredService + `], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.1s", "maxBackoff": "0.1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`
				cc, err := srv.Dial(append(newRetrier(t, WithBudget(Unlimited())).DialOptions(), grpc.WithDefaultServiceConfig(config))...)
				if err != nil {
					t.Fatal(err)
				}
				var report Report
				begun := time.Now()
				if err := cc.Invoke(t.Context(), method, &testpb.Request{}, new(testpb.Response), WithReport(&report)); err != nil {
					t.Fatal(err)
				}
				var starts []time.Duration
				for _, a := range report.Attempts {
					starts = append(starts, a.Start.Sub(begun))
				}
				ok := len(starts) == len(test.starts)
				for i, at := range starts {
					// the resolver's backoff is jittered by 20%
					ok = ok && at >= test.starts[i] && (at == test.starts[i] || at <= test.starts[i]+60*ms)
				}
				if !ok {
					t.Errorf("attempts at %v, want them at about %v", starts, test.starts)
				}
			})
		})
	}
}

// An edit that has nothing to do with hedging must not fail a call that is
// merely not hedged.
func TestEditOfAWriteUnderAHedgingPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(nil)
		defer srv.Close()
		cc, err := srv.Dial(newRetrier(t, WithDefaultPolicy(Policy{Hedge: Hedge{MaxAttempts: 2, Delay: 20 * ms}})).DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		for _, opts := range [][]grpc.CallOption{nil, {WithCallPolicy(func(p *Policy) { p.Timeout = time.Second })}} {
			if err := cc.Invoke(t.Context(), withdrawn, &testpb.Request{}, new(testpb.Response), opts...); err != nil {
				t.Errorf("with %d options: %v", len(opts), err)
			}
		}
	})
}

// An answer that arrives as the time is up must not be thrown away for the sake
// of an attempt beside it.
func TestAnswerAtTheLastMoment(t *testing.T) {
	for name, edit := range map[string]func(*Policy){
		"of the call's timeout": func(p *Policy) { p.Timeout = 30 * ms },
		"of the caller":         nil,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if edit == nil {
					edit = func(*Policy) {}
				}
				// The answer is there when its context ends, as after a poll.
				inner := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
					if numberOf(ctx) == 1 {
						return invoker(ctx, method, req, reply, cc, opts...)
					}
					<-ctx.Done()
					time.Sleep(ms)
					return nil
				}
				_, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 2, Delay: 20 * ms}, edit)), testsrv.Script{get: testsrv.Sequence{{Block: true}}}, grpc.WithChainUnaryInterceptor(inner))
				ctx, cancel := context.WithTimeout(t.Context(), 30*ms)
				defer cancel()
				if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
					t.Errorf("%v, want the answer", err)
				}
			})
		})
	}
}

// Whatever of the user's panics or ends its goroutine, at whatever moment, and
// whatever becomes of the caller and the server meanwhile: each call must leave the
// budget, each grant must end once, and nothing may go on.
func TestHedgesAmongBrokenCallbacks(t *testing.T) {
	const workers, calls = 20, 250
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		rnd := rand.New(rand.NewPCG(3, 4))
		draw := func(n int) int {
			mu.Lock()
			defer mu.Unlock()
			return rnd.IntN(n)
		}
		var broke atomic.Int64
		perhaps := func(of int) {
			switch draw(2 * of) {
			case 0:
				broke.Add(1)
				panic("on purpose")
			case 1:
				broke.Add(1)
				runtime.Goexit()
			}
		}
		policy := func(p *Policy) {
			p.RetryIf = func(Attempt) Verdict { perhaps(50); return VerdictDefault }
			p.Backoff = Backoff{Func: func(int, time.Duration, Attempt) time.Duration { perhaps(50); return ms }}
			p.AttemptTimeout = 3 * ms
		}
		hooks := Hooks{
			AttemptEnd:     func(context.Context, Attempt) { perhaps(100) },
			RetryScheduled: func(context.Context, Attempt) { perhaps(100) },
			CallEnd:        func(context.Context, Report, any, error) { perhaps(100) },
		}
		inner := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			perhaps(100)
			err := invoker(ctx, method, req, reply, cc, opts...)
			perhaps(100)
			return err
		}
		r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 4, Delay: ms}, policy), WithHooks(hooks), WithEventSink(brokenSink{func(string) bool { perhaps(100); return false }}))
		srv := testsrv.New(testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			switch nth % 7 {
			case 0:
				return testsrv.Step{Delay: ms, Code: codes.Unavailable}
			case 1:
				return testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "1")}
			case 2:
				return testsrv.Step{Block: true}
			case 3:
				return testsrv.Step{Code: codes.NotFound, Delay: 2 * ms}
			}
			return testsrv.Step{Delay: time.Duration(nth%3) * ms}
		})})
		defer srv.Close()
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				var client testpb.TestServiceClient
				for i := range calls {
					if i%50 == 0 {
						cc, err := srv.Dial(append(r.DialOptions(), grpc.WithChainUnaryInterceptor(inner))...)
						if err != nil {
							t.Error(err)
							return
						}
						defer cc.Close()
						client = testpb.NewTestServiceClient(cc)
						if i > 0 { // under way
							timer := time.AfterFunc(time.Duration(40+draw(20))*ms, func() { _ = cc.Close() })
							defer timer.Stop()
						}
					}
					done := make(chan struct{})
					go func() {
						defer close(done)
						defer func() { _ = recover() }()
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration(1+draw(20))*ms)
						defer cancel()
						_, _ = client.Get(ctx, &testpb.Request{}, grpc.OnFinish(func(error) { perhaps(200) }))
					}()
					<-done
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		l.check(t)
		if n := srv.Running(); n != 0 {
			t.Errorf("%d attempts still run on the server", n)
		}
		if broke.Load() < 100 || l.reserved.Load() < 1000 {
			t.Errorf("%d callbacks broke and %d more attempts were granted, so nothing was shown", broke.Load(), l.reserved.Load())
		}
	})
}
