package grpcretry

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"runtime"
	"strconv"
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

// What is told of the attempt that won, and went on, must be how it ended and not
// when it won.
func TestHedgedStreamThatGoesOn(t *testing.T) {
	msgs := func(d time.Duration, step testsrv.Step) testsrv.Step {
		step.Delay, step.Messages, step.Every = d, 3, 50*ms
		return step
	}
	resume := WithResume(func(req *testpb.Request, last *testpb.Response) (*testpb.Request, bool) {
		req.After = last.GetNumber()
		return req, true
	})
	for name, test := range map[string]struct {
		winner   testsrv.Step
		next     testsrv.Step
		policy   func(*Policy)
		opts     []grpc.CallOption
		words    []string
		duration time.Duration // of the second attempt
		code     codes.Code
	}{
		"to its end":      {winner: msgs(5*ms, testsrv.Step{}), words: []string{"hedge_lost", "success"}, duration: 105 * ms},
		"until it failed": {winner: msgs(5*ms, testsrv.Step{Code: codes.Unavailable}), words: []string{"hedge_lost", "committed"}, duration: 105 * ms, code: codes.Unavailable},
		"and is resumed": {
			winner: msgs(5*ms, testsrv.Step{Code: codes.Unavailable}), next: testsrv.Step{Messages: 1}, opts: []grpc.CallOption{resume},
			words: []string{"hedge_lost", "resume", "success"}, duration: 105 * ms,
		},
		"until the call's timeout": {
			winner: testsrv.Step{Delay: 5 * ms, Messages: 1, Hold: time.Minute}, next: testsrv.Step{Messages: 1}, opts: []grpc.CallOption{resume},
			policy: func(p *Policy) { p.Timeout = 300 * ms },
			words:  []string{"hedge_lost", "deadline"}, duration: 280 * ms, code: codes.DeadlineExceeded,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				policy := test.policy
				if policy == nil {
					policy = func(*Policy) {}
				}
				r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 2, Delay: 20 * ms}, policy))
				_, client := serve(t, r, testsrv.Script{list: testsrv.Sequence{{Block: true}, test.winner, test.next}})
				ctx, end := tracedSpan(t.Context())
				begun := time.Now()
				var report Report
				stream, err := client.List(ctx, &testpb.Request{}, append(test.opts, WithReport(&report))...)
				if err != nil {
					t.Fatal(err)
				}
				for err == nil {
					_, err = stream.Recv()
				}
				if errors.Is(err, io.EOF) {
					err = nil
				}
				checkCode(t, err, test.code)
				if !same(words(&report), test.words) {
					t.Errorf("attempts: %v, want %v", words(&report), test.words)
				}
				if len(report.Attempts) > 1 && report.Attempts[1].Duration != test.duration {
					t.Errorf("the winner took %v, want %v", report.Attempts[1].Duration, test.duration)
				}
				span := end()
				eventsOf(t, span)
				if events := span.Events(); events[1].Time.Sub(begun) != 20*ms+test.duration {
					t.Errorf("its event is at %v, want %v", events[1].Time.Sub(begun), 20*ms+test.duration)
				}
				synctest.Wait()
				l.check(t)
			})
		})
	}
}

// A caller who waits for the header on one goroutine and for messages on another
// must get both from the same attempt, also where Header came first.
func TestHeaderBesideAHedgedRecvMsg(t *testing.T) {
	n := func(n string, step testsrv.Step) testsrv.Step {
		step.Header, step.SendHeaderFirst = metadata.Pairs("n", n), true
		return step
	}
	for name, script := range map[string]testsrv.Sequence{
		"the header of the first, the message of the second": {n("1", testsrv.Step{Delay: time.Second}), n("2", testsrv.Step{Delay: 5 * ms, Messages: 2})},
		"a header during the race":                           {{Delay: 24 * ms, Header: metadata.Pairs("n", "1"), Messages: 2}, n("2", testsrv.Step{Delay: time.Second})},
		"the first fails":                                    {{Delay: 22 * ms, Messages: -1, Code: codes.Unavailable}, n("2", testsrv.Step{Delay: 5 * ms, Messages: 2})},
		"both fail":                                          {{Delay: 22 * ms, Messages: -1, Code: codes.Unavailable}, {Delay: 5 * ms, Messages: -1, Code: codes.NotFound}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 2, Delay: 20 * ms}))
				_, cc := serveStreams(t, r, testsrv.Script{list: script})
				stream := open(t, t.Context(), cc, list)
				var header metadata.MD
				var wg sync.WaitGroup
				wg.Go(func() { header, _ = stream.Header() }) // comes before the request, so that it does not race by itself
				synctest.Wait()
				send(t, stream, 1)
				closeSend(t, stream)
				m := new(testpb.Response)
				err := stream.RecvMsg(m)
				for err == nil {
					err = stream.RecvMsg(new(testpb.Response))
				}
				wg.Wait()
				if want := m.GetArrival(); want > 0 && (len(header.Get("n")) != 1 || header.Get("n")[0] != strconv.FormatInt(want, 10)) {
					t.Errorf("header %v, messages of %d", header, want)
				}
				synctest.Wait()
				l.check(t)
			})
		})
	}
}

// typed is a stream of an interceptor that knows what it receives.
type typed struct{ grpc.ClientStream }

func (s typed) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil {
		_ = m.(*testpb.Response).GetNumber()
	}
	return err
}

// A loser that had messages to deliver must end without any of ours reaching what
// an interceptor further in expects to be messages of the caller's type.
func TestHedgedStreamBesideInterceptorsThatKnowTheirMessages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		knows := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			stream, err := streamer(ctx, desc, cc, method, opts...)
			return typed{stream}, err
		}
		r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 3, AtOnce: true}))
		srv, cc := serveStreams(t, r, testsrv.Script{list: testsrv.Sequence{{Messages: 50, ReplySize: 4000}}}, grpc.WithChainStreamInterceptor(knows))
		for range 50 {
			stream := open(t, t.Context(), cc, list)
			send(t, stream, 1)
			closeSend(t, stream)
			for n := range 50 {
				if m := recv(t, stream); m.GetNumber() != int64(n+1) {
					t.Fatalf("message %d has number %d", n+1, m.GetNumber())
				}
			}
			if err := end(t, stream); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		l.check(t)
		if n := srv.Running(); n != 0 {
			t.Errorf("%d attempts still run on the server", n)
		}
	})
}

// Whatever panics in a hedged stream, all of its attempts must end, and nobody who
// waits for something else of it may wait for ever.
func TestHedgedStreamsAndPanics(t *testing.T) {
	for name, test := range map[string]struct {
		recv   func(ctx context.Context, number int) // of the attempt's stream
		open   func(ctx context.Context, number int)
		hook   func(Attempt) bool
		logger bool
	}{
		"the first, as it receives": {recv: func(_ context.Context, number int) {
			if number == 1 {
				time.Sleep(25 * ms)
				panic("on purpose")
			}
		}},
		"a hedge, as it opens": {open: func(_ context.Context, number int) {
			if number == 2 {
				panic("on purpose")
			}
		}},
		"a loser": {recv: func(ctx context.Context, number int) {
			if number == 1 {
				<-ctx.Done()
				panic("on purpose")
			}
		}},
		"a hedge that ends its goroutine": {recv: func(_ context.Context, number int) {
			if number == 2 {
				runtime.Goexit()
			}
		}},
		"a hook, at a loser":   {hook: func(a Attempt) bool { return a.Reason == ReasonHedgeLost }},
		"a hook, at the end":   {hook: func(a Attempt) bool { return a.Reason == ReasonSuccess }},
		"a hook, at a failure": {hook: func(a Attempt) bool { return a.Reason == ReasonHedgeFailed }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wrap := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					if test.open != nil {
						test.open(ctx, numberOf(ctx))
					}
					stream, err := streamer(ctx, desc, cc, method, opts...)
					if err == nil && test.recv != nil {
						stream = beforeRecv{stream, func() { test.recv(ctx, numberOf(ctx)) }}
					}
					return stream, err
				}
				hooks := Hooks{AttemptEnd: func(_ context.Context, a Attempt) {
					if test.hook != nil && test.hook(a) {
						panic("on purpose")
					}
				}}
				r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 3, Delay: 10 * ms}), WithHooks(hooks))
				srv, cc := serveStreams(t, r, testsrv.Script{list: testsrv.Sequence{
					{Delay: 100 * ms, Messages: 3}, {Delay: 15 * ms, Messages: -1, Code: codes.Unavailable}, {Delay: 20 * ms, Messages: 3},
				}}, grpc.WithChainStreamInterceptor(wrap))
				stream := open(t, t.Context(), cc, list)
				send(t, stream, 1)
				closeSend(t, stream)
				var wg sync.WaitGroup
				wg.Go(func() {
					defer func() { _ = recover() }()
					for stream.RecvMsg(new(testpb.Response)) == nil {
					}
				})
				time.Sleep(15 * ms)
				wg.Go(func() { _, _ = stream.Header() })
				wg.Wait()
				_ = stream.RecvMsg(new(testpb.Response))
				_ = stream.Trailer()
				synctest.Wait()
				l.check(t)
				if n := srv.Running(); n != 0 {
					t.Errorf("%d attempts still run on the server", n)
				}
			})
		})
	}
}

type beforeRecv struct {
	grpc.ClientStream
	do func()
}

func (s beforeRecv) RecvMsg(m any) error { s.do(); return s.ClientStream.RecvMsg(m) }

// Streams whose caller asks for the header, the context and the trailer while they
// are hedged, fail, are cancelled or lose their connection must give every message
// of one attempt, and leave nothing behind.
func TestHedgedStreamsInThousands(t *testing.T) {
	const workers, calls = 20, 250
	synctest.Test(t, func(t *testing.T) {
		r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 3, Delay: ms}))
		srv := testsrv.New(testsrv.Script{list: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			step := testsrv.Step{Messages: 3, Header: metadata.Pairs("n", strconv.Itoa(nth)), Trailer: metadata.Pairs("n", strconv.Itoa(nth)),
				Reply: &testpb.Response{Arrival: int64(nth)}}
			switch nth % 13 {
			case 1, 2:
				step.SendHeaderFirst, step.Delay = true, ms
			case 3:
				return testsrv.Step{Delay: ms, Messages: -1, Code: codes.Unavailable}
			case 4:
				return testsrv.Step{Messages: -1, Code: codes.NotFound}
			case 5:
				step.Messages = -1
			case 6:
				step.Code = codes.Unavailable // after messages
			case 7:
				step.Block = true
			default:
				step.Delay = ms
			}
			return step
		})})
		defer srv.Close()
		var counts [17]atomic.Int64
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(7, uint64(w)))
				var cc *grpc.ClientConn
				for i := range calls {
					if i%50 == 0 {
						var err error
						if cc, err = srv.Dial(r.DialOptions()...); err != nil {
							t.Error(err)
							return
						}
						defer cc.Close()
					}
					oneStreamOfThousands(t, cc, rnd, &counts, i%50 == 49)
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		l.check(t)
		if n := srv.Running(); n != 0 {
			t.Errorf("%d attempts still run on the server", n)
		}
		for _, code := range []codes.Code{codes.OK, codes.Canceled, codes.DeadlineExceeded, codes.NotFound, codes.Unavailable} {
			if counts[code].Load() == 0 {
				t.Errorf("no stream ended with %v, so nothing was shown", code)
			}
		}
	})
}

// oneStreamOfThousands makes one stream, which may be cut, or lose its ClientConn,
// and checks what comes of it.
func oneStreamOfThousands(t *testing.T, cc *grpc.ClientConn, rnd *rand.Rand, counts *[17]atomic.Int64, closes bool) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(5+rnd.IntN(5))*ms)
	defer cancel()
	if rnd.IntN(4) == 0 {
		timer := time.AfterFunc(time.Duration(rnd.IntN(4000))*time.Microsecond, cancel)
		defer timer.Stop()
	}
	if closes {
		timer := time.AfterFunc(time.Duration(rnd.IntN(3000))*time.Microsecond, func() { _ = cc.Close() })
		defer timer.Stop()
	}
	delay := time.Duration(rnd.IntN(2000)) * time.Microsecond
	policy := WithCallPolicy(func(p *Policy) { p.Hedge.Delay, p.Hedge.AtOnce = delay, delay == 0 })
	var report Report
	stream, err := cc.NewStream(ctx, streamDesc(list), list, policy, WithReport(&report))
	if err != nil {
		counts[status.Code(err)].Add(1)
		return
	}
	var header metadata.MD
	var wg sync.WaitGroup
	wait := time.Duration(rnd.IntN(2500)) * time.Microsecond
	early := rnd.IntN(2) == 0
	asks := func() {
		if !early {
			time.Sleep(wait)
		}
		header, _ = stream.Header()
		_ = stream.Context().Err()
	}
	wg.Go(asks)
	defer wg.Wait()
	if err := errors.Join(stream.SendMsg(&testpb.Request{Count: 3}), stream.CloseSend()); err != nil {
		return
	}
	if rnd.IntN(8) == 0 {
		return // the caller has left
	}
	var from []string
	for {
		m := new(testpb.Response)
		if err = stream.RecvMsg(m); err != nil {
			break
		}
		from = append(from, strconv.FormatInt(m.GetArrival(), 10))
		_ = stream.Context().Err()
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	counts[status.Code(err)].Add(1)
	trailer := stream.Trailer().Get("n")
	wg.Wait()
	deciders := 0
	for _, a := range report.Attempts {
		if !a.Reason.goesOn() {
			deciders++
		}
	}
	if deciders != 1 || report.Reason.goesOn() {
		t.Errorf("%d attempts decide, for %v: %v", deciders, report.Reason, words(&report))
	}
	for _, n := range from {
		if n != from[0] || len(header.Get("n")) != 1 || header.Get("n")[0] != n || err == nil && (len(trailer) != 1 || trailer[0] != n) {
			t.Errorf("messages of %v, header %v, trailer %v, after %v: %v", from, header, trailer, words(&report), err)
		}
	}
}

// The same as of unary calls must hold for streams whose interceptors and hooks
// break at any moment: nothing goes on, and nobody waits for ever.
func TestHedgedStreamsAmongBrokenCallbacks(t *testing.T) {
	const workers, calls = 20, 150
	synctest.Test(t, func(t *testing.T) {
		var broke atomic.Int64
		perhaps := func(of int) {
			switch rand.IntN(2 * of) {
			case 0:
				broke.Add(1)
				panic("on purpose")
			case 1:
				broke.Add(1)
				runtime.Goexit()
			}
		}
		wrap := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			perhaps(100)
			stream, err := streamer(ctx, desc, cc, method, opts...)
			perhaps(100)
			if err != nil {
				return nil, err
			}
			return beforeRecv{stream, func() { perhaps(100) }}, nil
		}
		policy := func(p *Policy) {
			p.RetryIf = func(Attempt) Verdict { perhaps(50); return VerdictDefault }
			p.FirstResponseTimeout = 3 * ms
		}
		callers := func(ctx context.Context) { // and not a goroutine of grpc's
			if ctx.Err() == nil {
				perhaps(100)
			}
		}
		hooks := Hooks{
			AttemptEnd: func(ctx context.Context, _ Attempt) { callers(ctx) },
			CallEnd:    func(ctx context.Context, _ Report, _ any, _ error) { callers(ctx) },
		}
		r, l := keepsLedger(t, hedged(Hedge{MaxAttempts: 4, Delay: ms}, policy), WithHooks(hooks))
		srv, cc := serveStreams(t, r, testsrv.Script{list: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			switch nth % 7 {
			case 0:
				return testsrv.Step{Delay: ms, Messages: -1, Code: codes.Unavailable}
			case 1:
				return testsrv.Step{Block: true}
			case 2:
				return testsrv.Step{Messages: -1, Code: codes.NotFound, Delay: 2 * ms}
			case 3:
				return testsrv.Step{SendHeaderFirst: true, Delay: 5 * ms, Messages: 2}
			}
			return testsrv.Step{Delay: time.Duration(nth%3) * ms, Messages: 3}
		})}, grpc.WithChainStreamInterceptor(wrap))
		apart := func(do func()) {
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				do()
			}()
			<-done
		}
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for range calls {
					ctx, cancel := context.WithTimeout(t.Context(), 20*ms)
					var stream grpc.ClientStream
					apart(func() { stream, _ = cc.NewStream(ctx, streamDesc(list), list) })
					if stream != nil {
						var header sync.WaitGroup
						header.Go(func() { apart(func() { _, _ = stream.Header(); _ = stream.Trailer() }) })
						apart(func() { _ = errors.Join(stream.SendMsg(&testpb.Request{Count: 3}), stream.CloseSend()) })
						for range 6 { // also after a panic
							apart(func() { _ = stream.RecvMsg(new(testpb.Response)) })
						}
						header.Wait()
					}
					cancel()
				}
			})
		}
		wg.Wait()
		synctest.Wait()
		l.check(t)
		if n := srv.Running(); n != 0 {
			t.Errorf("%d attempts still run on the server", n)
		}
		if broke.Load() < 100 || l.reserved.Load() < 500 {
			t.Errorf("%d callbacks broke and %d more attempts were granted, so nothing was shown", broke.Load(), l.reserved.Load())
		}
	})
}
