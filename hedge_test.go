package grpcretry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// hedged is a policy for an idempotent method that hedges.
func hedged(h Hedge, edits ...func(*Policy)) Option {
	p := Policy{Idempotency: Idempotent, Hedge: h, Backoff: Backoff{Base: 10 * ms, Jitter: NoJitter}}
	for _, edit := range edits {
		edit(&p)
	}
	return WithDefaultPolicy(p)
}

// words are the decisions of a report's attempts, in the order of their start.
func words(r *Report) []string {
	var w []string
	for _, a := range r.Attempts {
		w = append(w, a.Reason.String())
	}
	return w
}

func same(a, b []string) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// What a hedged call does must be what gRFC A6 says, to the millisecond.
func TestHedging(t *testing.T) {
	after := func(d time.Duration, code codes.Code) testsrv.Step { return testsrv.Step{Delay: d, Code: code} }
	stop := func(d time.Duration, code codes.Code, pushback string) testsrv.Step {
		return testsrv.Step{Delay: d, Code: code, Trailer: metadata.Pairs("grpc-retry-pushback-ms", pushback)}
	}
	every20 := Hedge{MaxAttempts: 3, Delay: 20 * ms}
	for name, test := range map[string]struct {
		script  testsrv.Sequence
		hedge   Hedge
		policy  func(*Policy)
		parent  time.Duration
		starts  []time.Duration // of the attempts, since the call was made
		words   []string
		code    codes.Code
		elapsed time.Duration
		wins    int64 // the attempt whose answer the caller gets
	}{
		"answered before a hedge is due": {
			script: testsrv.Sequence{after(19*ms, 0)}, hedge: every20,
			starts: []time.Duration{0}, words: []string{"success"}, elapsed: 19 * ms, wins: 1,
		},
		"the hedge wins": {
			script: testsrv.Sequence{after(100*ms, 0), after(5*ms, 0)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "success"}, elapsed: 25 * ms, wins: 2,
		},
		"the first wins": {
			script: testsrv.Sequence{after(25*ms, 0), after(100*ms, 0)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"success", "hedge_lost"}, elapsed: 25 * ms, wins: 1,
		},
		"every attempt comes a delay after the one before": {
			script: testsrv.Sequence{after(100*ms, 0)}, hedge: Hedge{MaxAttempts: 4, Delay: 20 * ms},
			starts: []time.Duration{0, 20 * ms, 40 * ms, 60 * ms}, words: []string{"success", "hedge_lost", "hedge_lost", "hedge_lost"}, elapsed: 100 * ms, wins: 1,
		},
		"at once": {
			script: testsrv.Sequence{after(10*ms, 0), after(5*ms, 0), after(15*ms, 0)}, hedge: Hedge{MaxAttempts: 3, AtOnce: true},
			starts: []time.Duration{0, 0, 0}, words: nil, elapsed: 5 * ms,
		},
		"a failure that is not fatal sends the next at once": {
			script: testsrv.Sequence{after(50*ms, 0), after(5*ms, codes.Unavailable), after(5*ms, 0)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms, 25 * ms}, words: []string{"hedge_lost", "hedge_failed", "success"}, elapsed: 30 * ms, wins: 3,
		},
		"with nothing else in flight too": {
			script: testsrv.Sequence{after(5*ms, codes.Unavailable), after(5*ms, 0)}, hedge: every20,
			starts: []time.Duration{0, 5 * ms}, words: []string{"retry", "success"}, elapsed: 10 * ms, wins: 2,
		},
		"and that is hedged again": {
			script: testsrv.Sequence{after(5*ms, codes.Unavailable), after(50*ms, 0), after(5*ms, 0)}, hedge: every20,
			starts: []time.Duration{0, 5 * ms, 25 * ms}, words: []string{"retry", "hedge_lost", "success"}, elapsed: 30 * ms, wins: 3,
		},
		"a fatal failure ends all": {
			script: testsrv.Sequence{after(50*ms, 0), after(5*ms, codes.InvalidArgument)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "not_retryable"}, code: codes.InvalidArgument, elapsed: 25 * ms,
		},
		"what is fatal the policy says": {
			script: testsrv.Sequence{after(50*ms, 0), after(5*ms, codes.Internal), after(50*ms, 0)}, hedge: Hedge{MaxAttempts: 3, Delay: 20 * ms, NonFatal: Codes(codes.Internal)},
			starts: []time.Duration{0, 20 * ms, 25 * ms}, words: []string{"success", "hedge_failed", "hedge_lost"}, elapsed: 50 * ms, wins: 1,
		},
		"all fail": {
			script: testsrv.Sequence{after(45*ms, codes.Unavailable), after(5*ms, codes.Unavailable), after(5*ms, codes.Unavailable)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms, 25 * ms}, words: []string{"attempts_exhausted", "hedge_failed", "hedge_failed"}, code: codes.Unavailable, elapsed: 45 * ms,
		},
		"pushback puts the next hedge off": {
			script: testsrv.Sequence{after(200*ms, 0), stop(5*ms, codes.Unavailable, "40"), after(5*ms, 0)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms, 65 * ms}, words: []string{"hedge_lost", "hedge_failed", "success"}, elapsed: 70 * ms, wins: 3,
		},
		"and those after it by the delay": {
			script: testsrv.Sequence{after(200*ms, 0), stop(5*ms, codes.Unavailable, "40"), after(100*ms, 0), after(5*ms, 0)}, hedge: Hedge{MaxAttempts: 4, Delay: 20 * ms},
			starts: []time.Duration{0, 20 * ms, 65 * ms, 85 * ms}, words: []string{"hedge_lost", "hedge_failed", "hedge_lost", "success"}, elapsed: 90 * ms, wins: 4,
		},
		"pushback stops hedges and nothing else": {
			script: testsrv.Sequence{after(200*ms, 0), stop(5*ms, codes.Unavailable, "-1")}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"success", "hedge_failed"}, elapsed: 200 * ms, wins: 1,
		},
		"also where the others fail": {
			script: testsrv.Sequence{after(200*ms, codes.Unavailable), stop(5*ms, codes.Unavailable, "-1")}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"pushback_stop", "hedge_failed"}, code: codes.Unavailable, elapsed: 200 * ms,
		},
		"a fatal failure with pushback is fatal": {
			script: testsrv.Sequence{after(200*ms, 0), stop(5*ms, codes.InvalidArgument, "-1")}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "not_retryable"}, code: codes.InvalidArgument, elapsed: 25 * ms,
		},
		"the deadline ends all": {
			script: testsrv.Sequence{{Block: true}}, hedge: every20, parent: 30 * ms,
			starts: []time.Duration{0, 20 * ms}, words: nil, code: codes.DeadlineExceeded, elapsed: 30 * ms,
		},
		"no hedge after the deadline": {
			script: testsrv.Sequence{{Block: true}}, hedge: every20, parent: 20 * ms,
			starts: []time.Duration{0}, words: []string{"parent_done"}, code: codes.DeadlineExceeded, elapsed: 20 * ms,
		},
		"each attempt has its own timeout": {
			script: testsrv.Sequence{{Block: true}, {Block: true}, after(5*ms, 0)}, hedge: every20, policy: func(p *Policy) { p.AttemptTimeout = 30 * ms },
			starts: []time.Duration{0, 20 * ms, 30 * ms}, words: []string{"hedge_failed", "hedge_lost", "success"}, elapsed: 35 * ms, wins: 3,
		},
		"the call's timeout ends all": {
			script: testsrv.Sequence{{Block: true}}, hedge: every20, policy: func(p *Policy) { p.Timeout = 30 * ms },
			starts: []time.Duration{0, 20 * ms}, words: nil, code: codes.DeadlineExceeded, elapsed: 30 * ms,
		},
		"a single attempt is one": {
			script: testsrv.Sequence{after(100*ms, 0)}, hedge: every20, policy: attemptsOf(1),
			starts: []time.Duration{0}, words: []string{"success"}, elapsed: 100 * ms, wins: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				policy := test.policy
				if policy == nil {
					policy = func(*Policy) {}
				}
				srv, client := serve(t, newRetrier(t, hedged(test.hedge, policy), WithBudget(Unlimited())), testsrv.Script{get: test.script})
				if _, err := client.Put(t.Context(), &testpb.Request{}); err != nil { // connects
					t.Fatal(err)
				}
				ctx, events := traced(t, t.Context())
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				begun := time.Now()
				var report Report
				var header, trailer metadata.MD
				var from peer.Peer
				resp, err := client.Get(ctx, &testpb.Request{}, WithReport(&report), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from))
				checkElapsed(t, begun, test.elapsed)
				checkCode(t, err, test.code)
				if test.wins > 0 && resp.GetArrival() != test.wins {
					t.Errorf("the answer is that of attempt %d, want %d", resp.GetArrival(), test.wins)
				}
				if err == nil && from.Addr == nil {
					t.Error("no peer")
				}
				if test.words != nil && !same(words(&report), test.words) {
					t.Errorf("attempts: %v, want %v", words(&report), test.words)
				}
				var starts []time.Duration
				for i, a := range report.Attempts {
					starts = append(starts, a.Start.Sub(begun))
					if a.Number != i+1 {
						t.Errorf("attempt %d is listed as number %d", a.Number, i+1)
					}
				}
				if len(starts) != len(test.starts) {
					t.Fatalf("attempts at %v, want %v", starts, test.starts)
				}
				for i := range starts {
					if starts[i] != test.starts[i] {
						t.Errorf("attempts at %v, want %v", starts, test.starts)
						break
					}
				}
				synctest.Wait()
				if n := srv.Running(); n != 0 {
					t.Errorf("%d attempts still run on the server", n)
				}
				ended := 0
				for _, e := range events() {
					switch e["grpcretry.attempt.decision"] {
					case "retry", "hedge_lost", "hedge_failed":
					default:
						ended++
					}
				}
				if ended != 1 {
					t.Errorf("%d events end the call, want 1", ended)
				}
				if status.Code(err) == codes.OK && report.Reason != ReasonSuccess {
					t.Errorf("the report says %v", report.Reason)
				}
			})
		})
	}
}

// A hedge that is refused must not harm the attempt that is on its way, nor
// make the call wait for anything.
func TestRefusedHedge(t *testing.T) {
	slow := testsrv.Step{Delay: 200 * ms}
	after50 := Hedge{MaxAttempts: 3, Delay: 50 * ms}
	for name, test := range map[string]struct {
		method  string // "": get
		script  testsrv.Sequence
		hedge   Hedge
		opts    []Option
		spent   bool // nothing is left for retries either
		made    int
		words   []string
		code    codes.Code
		elapsed time.Duration
		refused string // the event's word
	}{
		"no tokens": {
			script: testsrv.Sequence{slow}, hedge: after50,
			made: 1, words: []string{"success"}, elapsed: 200 * ms, refused: "budget_exhausted",
		},
		"no tokens, and it fails": {
			script: testsrv.Sequence{{Delay: 200 * ms, Code: codes.InvalidArgument}}, hedge: after50,
			made: 1, words: []string{"not_retryable"}, code: codes.InvalidArgument, elapsed: 200 * ms, refused: "budget_exhausted",
		},
		"no tokens, at once": {
			script: testsrv.Sequence{slow}, hedge: Hedge{MaxAttempts: 3, AtOnce: true},
			made: 1, words: []string{"success"}, elapsed: 200 * ms, refused: "budget_exhausted",
		},
		"no tokens, after a failure": { // nothing else is in flight, so that is a retry
			script: testsrv.Sequence{{Code: codes.Unavailable}, slow}, hedge: after50,
			made: 2, words: []string{"retry", "success"}, elapsed: 200 * ms, refused: "budget_exhausted",
		},
		"no tokens for that": {
			script: testsrv.Sequence{{Delay: 10 * ms, Code: codes.Unavailable}}, hedge: after50, spent: true,
			made: 1, words: []string{"budget_exhausted"}, code: codes.Unavailable, elapsed: 10 * ms,
		},
		"unknown idempotency": {
			method: write, script: testsrv.Sequence{slow}, hedge: after50, opts: []Option{WithMethodPolicy(write, Policy{Hedge: after50})},
			made: 1, words: []string{"success"}, elapsed: 200 * ms, refused: "not_idempotent",
		},
		"unknown idempotency, and it fails": {
			method: write, hedge: after50, opts: []Option{WithMethodPolicy(write, Policy{Hedge: after50, Backoff: Backoff{Base: 10 * ms, Jitter: NoJitter}})}, script: testsrv.Sequence{{Code: codes.Unavailable}},
			made: 1, words: []string{"not_idempotent"}, code: codes.Unavailable, refused: "not_idempotent",
		},
		"dry run": {
			script: testsrv.Sequence{slow}, hedge: after50, opts: []Option{WithDryRun()},
			made: 1, words: []string{"success"}, elapsed: 200 * ms, refused: "dry_run",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{HedgeCapacity: 5, FreeInterval: -1})
				for costs := []Cost{CostHedge, CostTransient}; ; {
					if _, ok := budget.Reserve(costs[0]); ok {
						continue
					}
					if costs = costs[1:]; len(costs) == 0 || !test.spent {
						break
					}
				}
				method := test.method
				if method == "" {
					method = get
				}
				opts := append(test.opts, WithBudget(budget))
				if test.method == "" {
					opts = append(opts, hedged(test.hedge))
				}
				srv, client := serve(t, newRetrier(t, opts...), testsrv.Script{method: test.script})
				ctx, events := traced(t, t.Context())
				var report Report
				begun := time.Now()
				_, err := unaryOf(client, method)(ctx, &testpb.Request{}, WithReport(&report))
				checkCode(t, err, test.code)
				checkElapsed(t, begun, test.elapsed)
				if n := srv.Count(method); n != test.made || !same(words(&report), test.words) {
					t.Errorf("%d attempts: %v, want %d: %v", n, words(&report), test.made, test.words)
				}
				all := events()
				if got, _ := all[len(all)-1]["grpcretry.hedge.refused"].(string); got != test.refused {
					t.Errorf("the event says that hedges were refused for %q, want %q", got, test.refused)
				}
			})
		})
	}
}

// What hedges cost must come from calls that were answered before theirs was
// due, and from nobody else, or hedging feeds on itself when servers are slow.
func TestWhoPaysForHedges(t *testing.T) {
	for name, test := range map[string]struct {
		script testsrv.Reaction
		hedge  Hedge
		main   float64 // tokens after the call, of 70 and 50, less 20 of each at first
		funds  float64
	}{
		"answered in time":          {testsrv.Sequence{{Delay: 49 * ms}}, Hedge{MaxAttempts: 2, Delay: 50 * ms}, 51, 30.5},
		"the hedge wins":            {testsrv.Sequence{{Delay: 99 * ms}, {}}, Hedge{MaxAttempts: 2, Delay: 50 * ms}, 50, 30},
		"the hedge loses":           {testsrv.Sequence{{Delay: 99 * ms}, {Delay: 99 * ms}}, Hedge{MaxAttempts: 2, Delay: 50 * ms}, 51, 25},
		"two hedges, one wins":      {testsrv.Sequence{{Delay: 299 * ms}, {Delay: 299 * ms}, {}}, Hedge{MaxAttempts: 3, Delay: 50 * ms}, 50, 25},
		"a fatal failure":           {testsrv.Sequence{{Code: codes.Internal}}, Hedge{MaxAttempts: 2, Delay: 50 * ms}, 50, 30},
		"a failure, then answered":  {testsrv.Sequence{{Code: codes.Unavailable}, {}}, Hedge{MaxAttempts: 2, Delay: 50 * ms}, 50, 30.5},
		"a failure, then a failure": {testsrv.Sequence{{Code: codes.Unavailable}}, Hedge{MaxAttempts: 2, Delay: 50 * ms}, 43, 30},
		"at once": {testsrv.Func(func(_ int, a testsrv.Attempt) testsrv.Step {
			return testsrv.Step{Delay: time.Duration(1+len(a.Metadata.Get("grpc-previous-rpc-attempts"))) * ms}
		}), Hedge{MaxAttempts: 2, AtOnce: true}, 51, 25},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				budget.word.Store(50 * unit)
				budget.hedge.Store(30 * unit)
				_, client := serve(t, newRetrier(t, hedged(test.hedge), WithBudget(budget)), testsrv.Script{get: test.script})
				_, _ = client.Get(t.Context(), &testpb.Request{})
				if tokens, funds := budget.state().Tokens, hedgeFunds(budget); tokens != test.main || funds != test.funds {
					t.Errorf("%v tokens and %v for hedges, want %v and %v", tokens, funds, test.main, test.funds)
				}
				if n := budget.state().InFlight; n != 0 {
					t.Errorf("%d calls in flight", n)
				}
			})
		})
	}
}

// All that a caller is given must be of one and the same attempt, the winner,
// whatever the codec does with what is in the reply; and what the caller put
// there must not be lost.
func TestHedgesShareNothing(t *testing.T) {
	into := ""
	desc := (&testpb.Response{}).ProtoReflect().Descriptor()
	for name, test := range map[string]struct {
		reply any
		got   func(reply any) any
		want  any
		one   bool // it cannot be doubled, so there are no hedges
	}{
		"generated message": {reply: &testpb.Response{Text: "before"}, got: func(r any) any { return r.(*testpb.Response).GetItems()[0] }, want: "testsrv/3"},
		"dynamic message": {
			reply: dynamicpb.NewMessage(desc),
			got: func(r any) any {
				return r.(proto.Message).ProtoReflect().Get(desc.Fields().ByName("items")).List().Get(0).String()
			},
			want: "testsrv/3",
		},
		"struct":                       {reply: &plainReply{Kept: "by the caller"}, got: func(r any) any { return fmt.Sprint(*r.(*plainReply)) }, want: "{[testsrv/3] by the caller <nil> 3}"},
		"type with a Reset":            {reply: &resettable{}, got: func(r any) any { return fmt.Sprint(r.(*resettable).items) }, want: "[testsrv/3]"},
		"bytes":                        {reply: new([]byte), got: func(r any) any { return string(*r.(*[]byte)) }, want: "testsrv/3"},
		"map":                          {reply: new(map[string]string), got: func(r any) any { return fmt.Sprint(*r.(*map[string]string)) }, want: "map[testsrv/3:testsrv/3]"},
		"struct that points elsewhere": {reply: &plainReply{Into: &into}, got: func(any) any { return into }, want: "testsrv/1", one: true},
		"bytes in a buffer":            {reply: func() any { b := make([]byte, 0, 100); return &b }(), got: func(r any) any { return string(*r.(*[]byte)) }, want: "testsrv/1", one: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				step := func(n string, d time.Duration) testsrv.Step {
					return testsrv.Step{Delay: d, Header: metadata.Pairs("n", n), Trailer: metadata.Pairs("n", n)}
				}
				srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{step("1", 30*ms), step("2", 20*ms), step("3", 5*ms)}})
				defer srv.Close()
				cc, err := srv.Dial(append(newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: ms})).DialOptions(), grpc.WithDefaultCallOptions(grpc.ForceCodec(merging{})))...)
				if err != nil {
					t.Fatal(err)
				}
				if err := cc.Invoke(t.Context(), put, &testpb.Request{}, new(testpb.Response)); err != nil { // connects
					t.Fatal(err)
				}
				want := "3"
				if test.one {
					want = "1"
				}
				var header, trailer metadata.MD
				var from peer.Peer
				finished := 0
				err = cc.Invoke(t.Context(), get, &testpb.Request{}, test.reply, grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from), grpc.OnFinish(func(error) { finished++ }))
				if err != nil {
					t.Fatal(err)
				}
				if got := test.got(test.reply); got != test.want {
					t.Errorf("reply %v, want %v", got, test.want)
				}
				if h, tr := header.Get("n"), trailer.Get("n"); len(h) != 1 || len(tr) != 1 || h[0] != want || tr[0] != want || from.Addr == nil || finished != 1 {
					t.Errorf("header of %v, trailer of %v, peer %v, OnFinish ran %d times; want all of %s, and 1", h, tr, from.Addr, finished, want)
				}
			})
		})
	}
}

// Hedges that start as the answer arrives, callers who leave at any moment and
// callbacks that panic must not lose a call, leave anything behind, or let two
// attempts write to the same thing.
func TestHedgesInThousands(t *testing.T) {
	const workers, calls = 50, 1000
	synctest.Test(t, func(t *testing.T) {
		budget, err := AllOf(Unlimited(), mustBudget(t, BudgetConfig{HedgeCapacity: 1 << 19, HedgeDeposit: 100}))
		if err != nil {
			t.Fatal(err)
		}
		hooks := Hooks{AttemptEnd: func(ctx context.Context, a Attempt) {
			if ctx.Value(panicsKey{}) == a.Number {
				panic("on purpose")
			}
		}}
		srv, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: ms}), WithBudget(budget), WithHooks(hooks)), testsrv.Script{
			get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
				switch nth % 17 {
				case 3:
					return testsrv.Step{Delay: ms, Code: codes.Unavailable}
				case 5:
					return testsrv.Step{Code: codes.InvalidArgument}
				}
				n := metadata.Pairs("n", strconv.Itoa(nth))
				return testsrv.Step{Delay: ms, Header: n, Trailer: n, Reply: &testpb.Response{Arrival: int64(nth)}}
			}),
		})
		var counts [17]atomic.Int64
		var panics, hedges atomic.Int64
		var wg sync.WaitGroup
		for w := range workers {
			wg.Add(1)
			go func() {
				defer wg.Done()
				rnd := rand.New(rand.NewPCG(1, uint64(w)))
				for range calls {
					oneOfThousands(t, client, rnd, &counts, &panics, &hedges)
				}
			}()
		}
		wg.Wait()
		synctest.Wait()
		if n := srv.Running(); n != 0 {
			t.Errorf("%d attempts still run on the server", n)
		}
		if n := budget.state().InFlight; n != 0 {
			t.Errorf("%d calls in flight", n)
		}
		for _, code := range []codes.Code{codes.OK, codes.Canceled, codes.DeadlineExceeded, codes.InvalidArgument} {
			if counts[code].Load() == 0 {
				t.Errorf("no call ended with %v, so nothing was shown", code)
			}
		}
		if panics.Load() == 0 || hedges.Load() == 0 {
			t.Errorf("%d panics, %d hedges, so nothing was shown", panics.Load(), hedges.Load())
		}
	})
}

// A panic, of an interceptor further in or of a callback, must come out where the
// call was made, as it would without hedges, and the attempts beside it must end.
func TestHedgesAndPanics(t *testing.T) {
	for name, test := range map[string]struct {
		panics func(a Attempt) bool // a hook does
		inner  int                  // the attempt whose interceptor does
		exit   bool                 // it ends its goroutine instead, as t.FailNow does
		events int
	}{
		"a hook, as the first fails":      {panics: func(a Attempt) bool { return a.Number == 1 }, events: 3},
		"a hook, as another loses":        {panics: func(a Attempt) bool { return a.Reason == ReasonHedgeLost }, events: 3},
		"a hook, as the winner wins":      {panics: func(a Attempt) bool { return a.Reason == ReasonSuccess }, events: 3},
		"the first, further in":           {inner: 1, events: 2},
		"a hedge, further in":             {inner: 3, events: 2},
		"a hedge that ends its goroutine": {inner: 2, exit: true, events: 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				hooks := Hooks{AttemptEnd: func(_ context.Context, a Attempt) {
					if test.panics != nil && test.panics(a) {
						panic("on purpose")
					}
				}}
				inner := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
					md, _ := metadata.FromOutgoingContext(ctx)
					number := 1
					if previous := md.Get("grpc-previous-rpc-attempts"); previous != nil {
						number, _ = strconv.Atoi(previous[0])
						number++
					}
					if number != test.inner {
						return invoker(ctx, method, req, reply, cc, opts...)
					}
					time.Sleep(time.Duration(31-10*number) * ms) // ends at 21, 21 or 21 ms
					if test.exit {
						runtime.Goexit()
					}
					panic("on purpose")
				}
				srv, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: 10 * ms}), WithBudget(budget), WithHooks(hooks)),
					testsrv.Script{get: testsrv.Sequence{{Delay: 22 * ms, Code: codes.Unavailable}, {Delay: 100 * ms}, {Delay: 30 * ms}}}, grpc.WithChainUnaryInterceptor(inner))
				ctx, end := tracedSpan(t.Context())
				finished := 0
				var got any
				done := make(chan struct{})
				go func() {
					defer close(done)
					defer func() { got = recover() }()
					_, _ = client.Get(ctx, &testpb.Request{}, grpc.OnFinish(func(error) { finished++ }))
					t.Error("the call returned")
				}()
				<-done
				if want := any("on purpose"); !test.exit && got != want || test.exit && got != nil {
					t.Errorf("recovered %v", got)
				}
				synctest.Wait()
				all := attemptevents.Of(t, end())
				if len(all) != test.events {
					t.Errorf("%d events, want %d", len(all), test.events)
				}
				attemptevents.CheckCut(t, all)
				if finished != 1 {
					t.Errorf("OnFinish ran %d times", finished)
				}
				if srv.Running() != 0 || budget.state().InFlight != 0 {
					t.Errorf("%d attempts run, %d calls in flight", srv.Running(), budget.state().InFlight)
				}
			})
		})
	}
}

type panicsKey struct{}

// oneOfThousands makes one call, which may be cut, or panic, and checks what
// comes of it.
func oneOfThousands(t *testing.T, client testpb.TestServiceClient, rnd *rand.Rand, counts *[17]atomic.Int64, panics, hedges *atomic.Int64) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	panicking := false
	switch rnd.IntN(8) {
	case 0:
		timer := time.AfterFunc(time.Duration(rnd.IntN(4000))*time.Microsecond, cancel)
		defer timer.Stop()
	case 1:
		ctx, cancel = context.WithTimeout(ctx, time.Duration(1+rnd.IntN(3000))*time.Microsecond)
		defer cancel()
	case 2:
		panicking = true
		ctx = context.WithValue(ctx, panicsKey{}, 1+rnd.IntN(3))
	}
	delay := time.Duration(rnd.IntN(2000)) * time.Microsecond
	policy := WithCallPolicy(func(p *Policy) { p.Hedge.Delay, p.Hedge.AtOnce = delay, delay == 0 })
	var header, trailer metadata.MD
	var from peer.Peer
	var report Report
	defer func() {
		if p := recover(); p != nil {
			if p != "on purpose" || !panicking {
				panic(p)
			}
			panics.Add(1)
		}
	}()
	resp, err := client.Get(ctx, &testpb.Request{}, policy, grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from), WithReport(&report))
	counts[status.Code(err)].Add(1)
	for _, a := range report.Attempts {
		if a.Hedge {
			hedges.Add(1)
		}
	}
	if err != nil {
		return
	}
	n := []string{strconv.FormatInt(resp.GetArrival(), 10)}
	if !slices.Equal(header.Get("n"), n) || !slices.Equal(trailer.Get("n"), n) || from.Addr == nil {
		t.Errorf("reply of %v, header of %v, trailer of %v, peer %v", n, header.Get("n"), trailer.Get("n"), from.Addr)
	}
}

// Whoever pays for hedges must be able to see how many there are.
func TestMetricsOfHedges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		budget := mustBudget(t, BudgetConfig{HedgeCapacity: 15})
		_, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: 10 * ms}), WithMeterProvider(m), WithBudget(budget)), testsrv.Script{get: testsrv.Sequence{
			{Delay: 9 * ms},               // needs none
			{Delay: 25 * ms}, {Delay: ms}, // one, which wins
			{Code: codes.Unavailable}, {Delay: 30 * ms}, {Delay: 30 * ms}, // a retry, and a hedge that loses
			{Delay: 30 * ms}, {Delay: 30 * ms}, {Delay: 30 * ms}, // two
			{Delay: 30 * ms}, // none is left
		}})
		for range 5 {
			if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
		}
		const method = "{rpc.method=testsrv.v1.TestService/Get,rpc.system.name=grpc}"
		want := []string{
			"attempts{grpcretry.attempt.decision=hedge_lost,rpc.method=testsrv.v1.TestService/Get,rpc.response.status_code=CANCELLED,rpc.system.name=grpc} 4",
			"attempts{grpcretry.attempt.decision=retry,rpc.method=testsrv.v1.TestService/Get,rpc.response.status_code=UNAVAILABLE,rpc.system.name=grpc} 1",
			"attempts{grpcretry.attempt.decision=success,rpc.method=testsrv.v1.TestService/Get,rpc.response.status_code=OK,rpc.system.name=grpc} 5",
			"budget.rejections" + method + " 1",
			"call.hedges" + method + " 3/4",
			"call.retries" + method + " 1/1",
		}
		var got []string
		for _, s := range m.series(t) {
			if !strings.HasPrefix(s, "budget.balance") && !strings.HasPrefix(s, "call.retry_delay") {
				got = append(got, s)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("series\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}
