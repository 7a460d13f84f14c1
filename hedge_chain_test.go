package grpcretry

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// callOf makes a call of Get or List, whichever method is, and reads its answer.
func callOf(ctx context.Context, client testpb.TestServiceClient, method string, opts ...grpc.CallOption) error {
	if method == get {
		_, err := client.Get(ctx, &testpb.Request{}, opts...)
		return err
	}
	stream, err := client.List(ctx, &testpb.Request{}, opts...)
	for err == nil {
		_, err = stream.Recv()
	}
	if isEOF(err) {
		return nil
	}
	return err
}

// Of two Retriers on one connection the inner one must leave the outer one's
// attempts alone, those that overlap too, or the handlers run for the product.
func TestHedgesThroughAnotherRetrier(t *testing.T) {
	every20 := Hedge{MaxAttempts: 3, Delay: 20 * ms}
	for name, test := range map[string]struct {
		outer, inner Hedge
		script       testsrv.Sequence
		words        []string
		code         codes.Code
	}{
		"both hedge": {every20, Hedge{MaxAttempts: 5, AtOnce: true}, testsrv.Sequence{{Delay: time.Second, Messages: 1}},
			[]string{"success", "hedge_lost", "hedge_lost"}, codes.OK},
		"all fail": {every20, Hedge{MaxAttempts: 5, AtOnce: true}, testsrv.Sequence{{Delay: 50 * ms, Messages: -1, Code: codes.Unavailable}},
			[]string{"hedge_failed", "hedge_failed", "attempts_exhausted"}, codes.Unavailable},
		"the outer one retries": {Hedge{}, Hedge{MaxAttempts: 5, AtOnce: true}, testsrv.Sequence{{Messages: -1, Code: codes.Unavailable}},
			[]string{"retry", "retry", "attempts_exhausted"}, codes.Unavailable},
		"the inner one retries": {every20, Hedge{}, testsrv.Sequence{{Delay: 50 * ms, Messages: -1, Code: codes.Unavailable}},
			[]string{"hedge_failed", "hedge_failed", "attempts_exhausted"}, codes.Unavailable},
	} {
		for _, method := range []string{get, list} {
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					inner, told := newRetrier(t, hedged(test.inner), WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) { t.Error("the inner one made an attempt of its own") }})), Report{}
					outer, ledger := keepsLedger(t, hedged(test.outer))
					srv, client := serve(t, outer, testsrv.Script{method: test.script}, inner.DialOptions()...)
					err := callOf(t.Context(), client, method, WithReport(&told))
					checkCode(t, err, test.code)
					if n := srv.Count(method); n != 3 || !same(words(&told), test.words) {
						t.Errorf("%d runs of the handler: %v; want 3: %v", n, words(&told), test.words)
					}
					if got := inner.Budgets(); len(got) != 0 {
						t.Errorf("budgets of the inner one: %+v, want none", got)
					}
					synctest.Wait()
					ledger.check(t)
				})
			})
		}
	}
}

// Hedges below a request that is itself a retry would multiply; without
// WithRetrySubtree nobody asked that they be left out.
func TestHedgesBelowAnInboundRetry(t *testing.T) {
	for name, test := range map[string]struct {
		opts    []ServerOption
		header  string
		made    int
		refused any
	}{
		"a retry":            {[]ServerOption{WithRetrySubtree()}, "1", 1, "inbound_retry"},
		"a first attempt":    {[]ServerOption{WithRetrySubtree()}, "0", 2, nil},
		"without the option": {nil, "1", 2, nil},
	} {
		for _, method := range []string{get, list} {
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					leaf, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 2, Delay: 20 * ms})),
						testsrv.Script{method: testsrv.Sequence{{Delay: 50 * ms, Messages: 1}}})
					var all []event
					srv := middle(t, func(ctx context.Context, _ *testpb.Request) (*testpb.Response, error) {
						ctx, events := traced(t, ctx)
						err := callOf(ctx, client, method)
						all = events()
						return &testpb.Response{}, err
					}, interceptors(test.opts...)...)
					if _, err := dial(t, srv, newRetrier(t)).Get(retrying(t.Context(), test.header), &testpb.Request{}, WithoutRetry()); err != nil {
						t.Fatal(err)
					}
					if n := leaf.Count(method); n != test.made || len(all) != test.made {
						t.Fatalf("%d attempts, events %v; want %d of each", n, all, test.made)
					}
					if got := all[len(all)-1]["grpcretry.hedge.refused"]; got != test.refused {
						t.Errorf("the event says that hedges were refused for %v, want %v", got, test.refused)
					}
				})
			})
		}
	}
}

// The span of a hedged call is red only if the call failed, whatever became of
// the losers, and every attempt's own span has its number.
func TestSpansOfHedges(t *testing.T) {
	for name, test := range map[string]struct {
		script    testsrv.Sequence
		code      string
		errorType string
		attempts  int
	}{
		"the hedge wins":  {testsrv.Sequence{{Delay: time.Second}, {Delay: 5 * ms, Messages: 1}}, "OK", "", 2},
		"the first wins":  {testsrv.Sequence{{Delay: 50 * ms, Messages: 1}, {Delay: time.Second}}, "OK", "", 3},
		"one fails first": {testsrv.Sequence{{Delay: time.Second}, {Delay: 5 * ms, Messages: -1, Code: codes.Unavailable}, {Messages: 1}}, "OK", "", 3},
		"all fail":        {testsrv.Sequence{{Delay: 50 * ms, Messages: -1, Code: codes.Unavailable}}, "UNAVAILABLE", "UNAVAILABLE", 3},
		"one is fatal":    {testsrv.Sequence{{Delay: time.Second}, {Delay: 5 * ms, Messages: -1, Code: codes.NotFound}}, "NOT_FOUND", "NOT_FOUND", 2},
	} {
		for _, method := range []string{get, list} {
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					calls, attempts := newEndings(), newEndings()
					r := newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms}), WithCallSpan(calls))
					_, client := serve(t, r, testsrv.Script{method: test.script},
						grpc.WithStatsHandler(attemptSpans{attempts.Tracer("test")}), grpc.WithStatsHandler(AttemptStatsHandler()))
					_ = callOf(t.Context(), client, method)
					synctest.Wait()
					span := calls.one(t)
					checkCallSpan(t, span, method[1:], test.code, test.errorType, test.attempts)
					if n := len(eventsOf(t, span)); n != test.attempts {
						t.Errorf("%d events on the call's span, want %d", n, test.attempts)
					}
					var numbers, want []int64
					for _, s := range attempts.recorder.Ended() {
						if s.Parent().SpanID() != span.SpanContext().SpanID() {
							t.Errorf("the span of an attempt is not below that of the call")
						}
						number, _ := attributesOf(s)["grpcretry.attempt.number"].(int64)
						numbers = append(numbers, number)
					}
					for n := range test.attempts {
						want = append(want, int64(n+1))
					}
					if slices.Sort(numbers); !slices.Equal(numbers, want) {
						t.Errorf("spans of the attempts %v, want %v", numbers, want)
					}
				})
			})
		}
	}
}

// A reload must not change what a call under way does, nor make the next ones
// wait for a hundred calls until they are hedged again.
func TestUpdateBetweenHedges(t *testing.T) {
	t.Run("a call under way", func(t *testing.T) {
		for _, method := range []string{get, list} {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms}))
				srv, client := serve(t, r, testsrv.Script{method: testsrv.Sequence{{Delay: 100 * ms, Messages: 1}}})
				time.AfterFunc(30*ms, func() { // after the first hedge, before the second
					if err := r.Update(WithDefaultPolicy(Policy{Idempotency: NotIdempotent, MaxAttempts: 1})); err != nil {
						t.Error(err)
					}
				})
				for _, want := range []string{"[success hedge_lost hedge_lost]", "[success]"} {
					var report Report
					if err := callOf(t.Context(), client, method, WithReport(&report)); err != nil {
						t.Fatal(err)
					}
					if got := fmt.Sprint(words(&report)); got != want {
						t.Errorf("%s: %s, want %s", method, got, want)
					}
				}
				if n := srv.Count(method); n != 4 {
					t.Errorf("%d attempts, want 4", n)
				}
			})
		}
	})
	t.Run("what a quantile remembers", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			r := newRetrier(t, hedged(Hedge{MaxAttempts: 2, Quantile: 0.9}))
			srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Delay: 10 * ms}}})
			for range 100 {
				if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
			}
			if err := srv.Set(get, testsrv.Sequence{{Delay: time.Second}}); err != nil {
				t.Fatal(err)
			}
			if err := r.Update(hedged(Hedge{MaxAttempts: 3, Quantile: 0.8})); err != nil {
				t.Fatal(err)
			}
			var report Report
			begun := time.Now()
			if _, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report)); err != nil {
				t.Fatal(err)
			}
			if len(report.Attempts) != 3 || report.Attempts[1].Start.Sub(begun) != 10240*time.Microsecond {
				t.Errorf("attempts %v, want three, the second at 10.24ms", report.Attempts)
			}
		})
	})
}

// All calls of a method share what it remembers.
func TestQuantileOfManyCallsAtOnce(t *testing.T) {
	const workers, calls = 40, 50
	synctest.Test(t, func(t *testing.T) {
		r, ledger := keepsLedger(t, hedged(Hedge{MaxAttempts: 2, Quantile: 0.9}))
		_, client := serve(t, r, testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			if nth%20 == 0 {
				return testsrv.Step{Delay: 100 * ms}
			}
			return testsrv.Step{Delay: 10 * ms}
		})})
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for range calls {
					if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		m := r.set.Load().lookup(get)
		if d, ok := m.latencies().quantile(0.9); d != 10240*time.Microsecond || !ok {
			t.Errorf("the quantile is %v, known: %t; want 10.24ms", d, ok)
		}
		synctest.Wait()
		ledger.check(t)
	})
}

// Beyond the methods that a Retrier keeps there is no memory for quantiles.
// Their calls are not hedged by them, and their failures replaced as ever.
func TestQuantileBeyondTheMethodsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, hedged(Hedge{MaxAttempts: 3, Quantile: 0.9}))
		for n := range maxMethodsKept {
			r.set.Load().lookup(fmt.Sprintf("/a.B/Method%d", n))
		}
		srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Delay: 10 * ms}}})
		for range 150 {
			if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
		}
		for _, test := range []struct {
			script testsrv.Sequence
			want   string
		}{
			{testsrv.Sequence{{Delay: time.Second}}, "[success]"},
			{testsrv.Sequence{{Delay: 10 * ms, Code: codes.Unavailable}, {Delay: time.Second}}, "[retry success]"},
		} {
			if err := srv.Set(get, test.script); err != nil {
				t.Fatal(err)
			}
			var report Report
			if _, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report)); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(words(&report)); got != test.want {
				t.Errorf("%s, want %s", got, test.want)
			}
		}
	})
}

// Credentials run again once in a call. Attempts that were on their way before
// that do not make them run once more, and their refusal does not end the call.
func TestCredentialsOfHedges(t *testing.T) {
	refused := func(d time.Duration) testsrv.Step {
		return testsrv.Step{Delay: d, Messages: -1, Code: codes.Unauthenticated}
	}
	at20 := Hedge{MaxAttempts: 6, Delay: 20 * ms}
	for name, test := range map[string]struct {
		hedge  Hedge
		script testsrv.Sequence
		words  []string
		code   codes.Code
	}{
		"new ones help":                   {at20, testsrv.Sequence{refused(25 * ms), {Delay: time.Second}, {Delay: 5 * ms, Messages: 1}}, []string{"hedge_failed", "hedge_lost", "success"}, codes.OK},
		"new ones do not":                 {at20, testsrv.Sequence{refused(25 * ms), {Delay: time.Second}, refused(5 * ms)}, []string{"hedge_failed", "hedge_lost", "not_retryable"}, codes.Unauthenticated},
		"nor with nothing else in flight": {at20, testsrv.Sequence{refused(5 * ms), refused(5 * ms)}, []string{"retry", "not_retryable"}, codes.Unauthenticated},
		"old ones are refused beside new ones": {at20, testsrv.Sequence{refused(25 * ms), refused(10 * ms), {Delay: 15 * ms, Messages: 1}},
			[]string{"hedge_failed", "hedge_failed", "success"}, codes.OK},
		"old and new ones are refused": {at20, testsrv.Sequence{refused(25 * ms), refused(10 * ms), refused(15 * ms)},
			[]string{"hedge_failed", "hedge_failed", "not_retryable"}, codes.Unauthenticated},
		"all at once": {Hedge{MaxAttempts: 2, AtOnce: true}, testsrv.Sequence{refused(5 * ms)}, []string{"hedge_failed", "attempts_exhausted"}, codes.Unauthenticated},
	} {
		for _, method := range []string{get, list} {
			t.Run(name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					listed := func(p *Policy) { p.Codes = Codes(codes.Unavailable, codes.Unauthenticated) }
					r, ledger := keepsLedger(t, hedged(test.hedge, listed))
					srv, client := serve(t, r, testsrv.Script{method: test.script})
					var report Report
					err := callOf(t.Context(), client, method, WithReport(&report))
					if status.Code(err) != test.code || srv.Count(method) != len(test.words) {
						t.Errorf("%v after %d attempts, want %v after %d", err, srv.Count(method), test.code, len(test.words))
					}
					if got := words(&report); test.hedge.AtOnce {
						slices.Sort(got)
						slices.Sort(test.words)
						if !same(got, test.words) {
							t.Errorf("%v, want %v in any order", got, test.words)
						}
					} else if !same(got, test.words) {
						t.Errorf("%v, want %v", got, test.words)
					}
					synctest.Wait()
					ledger.check(t)
				})
			})
		}
	}
}
