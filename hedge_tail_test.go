package grpcretry

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// tail makes calls, one after the other by each of eight callers, to a server
// whose replies take as long as the rule says, and gives their durations, sorted,
// and the number of attempts that the server got.
func tail(t *testing.T, client testpb.TestServiceClient, srv *testsrv.Server, calls int) (durations []time.Duration, attempts int) {
	t.Helper()
	before := srv.Count(get)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for range calls / 8 {
				begun := time.Now()
				if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
					t.Error(err)
				}
				mu.Lock()
				durations = append(durations, time.Since(begun))
				mu.Unlock()
			}
		}()
	}
	wg.Wait()
	slices.Sort(durations)
	return durations, srv.Count(get) - before
}

// slowReplies take 10 ms, and one in twenty ten times as long.
func slowReplies() testsrv.Func {
	var mu sync.Mutex
	rnd := rand.New(rand.NewPCG(1, 2))
	return func(int, testsrv.Attempt) testsrv.Step {
		mu.Lock()
		defer mu.Unlock()
		if rnd.IntN(20) == 0 {
			return testsrv.Step{Delay: 100 * ms}
		}
		return testsrv.Step{Delay: 10 * ms}
	}
}

// The reason to hedge: the slowest replies must become much faster for little
// load, and for none where the service as a whole is slow, or hedging makes
// outages.
func TestHedgingCutsTheTail(t *testing.T) {
	const calls = 4000
	p99 := func(sorted []time.Duration) time.Duration { return sorted[len(sorted)*99/100] }
	var bare time.Duration
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t), testsrv.Script{get: slowReplies()})
		durations, _ := tail(t, client, srv, calls)
		bare = p99(durations)
	})
	if bare != 100*ms {
		t.Fatalf("p99 without hedges is %v, want 100ms", bare)
	}
	for name, test := range map[string]struct {
		hedge Hedge
		load  float64 // added, at most
		cut   bool    // p99 by 70% or more
		slow  time.Duration
	}{
		"a delay":           {hedge: Hedge{MaxAttempts: 3, Delay: 15 * ms}, load: 0.1, cut: true, slow: 100 * ms},
		"a short delay":     {hedge: Hedge{MaxAttempts: 2, Delay: 11 * ms}, load: 0.1, cut: true, slow: 40 * ms},
		"the 90th quantile": {hedge: Hedge{MaxAttempts: 3, Quantile: 0.9}, load: 0.11, cut: true, slow: 100 * ms},
		"the 95th":          {hedge: Hedge{MaxAttempts: 3, Quantile: 0.95}, load: 0.06, slow: 100 * ms},
		"the 99th":          {hedge: Hedge{MaxAttempts: 3, Quantile: 0.99}, load: 0.02, slow: 100 * ms},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				srv, client := serve(t, newRetrier(t, hedged(test.hedge), WithBudget(budget)), testsrv.Script{get: slowReplies()})
				durations, attempts := tail(t, client, srv, calls)
				load := float64(attempts-calls) / calls
				t.Logf("p99 %v, added load %.2f%%", p99(durations), 100*load)
				if test.cut && p99(durations) > bare*3/10 {
					t.Errorf("p99 %v, want at most 30%% of %v", p99(durations), bare)
				}
				if load > test.load {
					t.Errorf("added load %.4f, want at most %v", load, test.load)
				}
				if test.cut && attempts == calls {
					t.Error("no hedges, so nothing was shown")
				}

				// All replies are slow: what is left in the hedges' funds is spent, and that is all.
				if err := srv.Set(get, testsrv.Sequence{{Delay: test.slow}}); err != nil {
					t.Fatal(err)
				}
				_, spending := tail(t, client, srv, 1200)
				_, after := tail(t, client, srv, 1200)
				t.Logf("all slow: %d hedges in 1200 calls, then %d", spending-1200, after-1200)
				if spending-1200 > 12 || after-1200 > 12 {
					t.Errorf("%d hedges in 1200 calls and %d in the next, want at most 10 that the funds hold, and 1%%", spending-1200, after-1200)
				}
			})
		})
	}
}

// A quantile must be that of the method itself, keep off until it is known, and
// never come down to nothing.
func TestQuantileDelay(t *testing.T) {
	for name, test := range map[string]struct {
		hedge   Hedge
		replies time.Duration
		calls   int
		want    time.Duration // until the hedge of a call that hangs; 0: there is none
	}{
		"follows the method": {Hedge{MaxAttempts: 2, Quantile: 0.9}, 10 * ms, 100, 10240 * time.Microsecond},
		"not yet known":      {Hedge{MaxAttempts: 2, Quantile: 0.9}, 10 * ms, 99, 0},
		"not yet, for 0.99":  {Hedge{MaxAttempts: 2, Quantile: 0.99}, 10 * ms, 999, 0},
		"known for 0.99":     {Hedge{MaxAttempts: 2, Quantile: 0.99}, 10 * ms, 1000, 10240 * time.Microsecond},
		"no less than 1 ms":  {Hedge{MaxAttempts: 2, Quantile: 0.9}, 100 * time.Microsecond, 100, ms},
		"nor than Delay":     {Hedge{MaxAttempts: 2, Quantile: 0.9, Delay: 30 * ms}, 10 * ms, 100, 30 * ms},
		"unless that is less": {Hedge{MaxAttempts: 2, Quantile: 0.9, Delay: 100 * time.Microsecond}, 500 * time.Microsecond, 100,
			512 * time.Microsecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, client := serve(t, newRetrier(t, hedged(test.hedge)), testsrv.Script{put: testsrv.Sequence{{Delay: 70 * ms}}, get: testsrv.Sequence{{Delay: test.replies}}})
				if _, err := client.Put(t.Context(), &testpb.Request{}); err != nil { // connects, and is another method
					t.Fatal(err)
				}
				for range test.calls {
					if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
						t.Fatal(err)
					}
				}
				if err := srv.Set(get, testsrv.Sequence{{Delay: time.Second}}); err != nil {
					t.Fatal(err)
				}
				var report Report
				begun := time.Now()
				if _, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report)); err != nil {
					t.Fatal(err)
				}
				switch {
				case test.want == 0 && len(report.Attempts) != 1:
					t.Errorf("%d attempts, want 1", len(report.Attempts))
				case test.want == 0:
				case len(report.Attempts) != 2 || report.Attempts[1].Start.Sub(begun) != test.want:
					t.Errorf("attempts %v, want the second at %v", report.Attempts, test.want)
				}
			})
		})
	}
}
