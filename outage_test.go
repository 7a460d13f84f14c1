package grpcretry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// load makes n calls of Get by so many workers, each with no pause between its
// calls, and counts those that succeed.
func load(t testing.TB, client testpb.TestServiceClient, workers, n int) (succeeded int) {
	t.Helper()
	var left, ok atomic.Int64
	left.Store(int64(n))
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				_, err := client.Get(t.Context(), &testpb.Request{})
				if err == nil {
					ok.Add(1)
				} else if status.Code(err) != codes.Unavailable {
					t.Errorf("error %v, want the server's UNAVAILABLE", err)
				}
			}
		})
	}
	wg.Wait()
	return int(ok.Load())
}

// clusterOf starts n servers behind round_robin on memory and a client through r.
func clusterOf(t testing.TB, r *Retrier, n int, script func(int) testsrv.Script) (*testsrv.Cluster, testpb.TestServiceClient) {
	t.Helper()
	cluster := testsrv.NewCluster(n, script)
	t.Cleanup(cluster.Close)
	// grpc draws its waits before it connects anew; here they are all alike, so
	// that a server which is back is used at the same instant in every run.
	steady := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1, MaxDelay: 100 * time.Millisecond}
	cc, err := cluster.Dial(append(r.DialOptions(), grpc.WithConnectParams(grpc.ConnectParams{Backoff: steady}))...)
	if err != nil {
		t.Fatal(err)
	}
	return cluster, testpb.NewTestServiceClient(cc)
}

func count(c *testsrv.Cluster) (attempts int) {
	for _, s := range c.Servers {
		attempts += s.Count("")
	}
	return attempts
}

func setAll(t testing.TB, c *testsrv.Cluster, reaction testsrv.Reaction) {
	t.Helper()
	for _, s := range c.Servers {
		if err := s.Set(get, reaction); err != nil {
			t.Fatal(err)
		}
	}
}

// In a total outage the servers must see hardly more than the calls that are
// made: N, what the budget held when it began, and one attempt a minute. A
// limit that only holds for one caller at a time is none.
func TestTotalOutageStaysWithinTheBound(t *testing.T) {
	const calls = 2000
	for _, workers := range []int{1, 8, 64} {
		for _, tt := range []struct {
			name  string
			warm  int // calls that succeed before
			limit int // retries that are paid for
		}{
			{"after a start", 0, 10},
			{"after good times", 1500, max(70, 10*workers) / 7},
		} {
			t.Run(fmt.Sprintf("%d workers, %s", workers, tt.name), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRetrier(t)
					cluster, client := clusterOf(t, r, 3, nil)
					setAll(t, cluster, testsrv.Sequence{{Delay: 10 * time.Millisecond}})
					if got := load(t, client, workers, tt.warm); got != tt.warm {
						t.Fatalf("%d calls of %d succeeded before the outage", got, tt.warm)
					}
					setAll(t, cluster, testsrv.Sequence{{Delay: 100 * time.Millisecond, Code: codes.Unavailable}})
					before, start := count(cluster), time.Now()
					if got := load(t, client, workers, calls); got != 0 {
						t.Fatalf("%d calls succeeded", got)
					}
					minutes := int(time.Since(start) / time.Minute)
					retries := count(cluster) - before - calls
					if limit := tt.limit + minutes + 1; retries < 10 || retries > limit {
						t.Errorf("%d retries in %v, want the ten of an idle client at least and %d at most", retries, time.Since(start), limit)
					}
					t.Logf("%d calls, %d retries in %v", calls, retries, time.Since(start))
				})
			})
		}
	}
}

// One bad replica among eight is the everyday fault that retries are for. A
// budget that takes it for an outage makes users see every eighth call fail.
func TestOneBadReplicaOfEight(t *testing.T) {
	const calls = 8000
	for _, workers := range []int{1, 64} {
		t.Run(fmt.Sprintf("%d workers", workers), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t)
				cluster, client := clusterOf(t, r, 8, func(i int) testsrv.Script {
					if i == 3 {
						return testsrv.Script{get: testsrv.Sequence{{Code: codes.Unavailable}}}
					}
					return testsrv.Script{get: testsrv.Sequence{{Delay: 10 * time.Millisecond}}}
				})
				// The first calls come one by one, so that all eight are connected
				// before the others: where the bad one alone is, as chance has it
				// at the very start, every call of a burst would meet it.
				const first = 100
				ok := load(t, client, 1, first) + load(t, client, workers, calls-first)
				if want := calls * 995 / 1000; ok < want {
					t.Errorf("%d of %d calls succeeded, want %d", ok, calls, want)
				}
				if got := cluster.Servers[3].Count(get); got < calls/10 {
					t.Errorf("only %d attempts came to the bad replica, so nothing was shown", got)
				}
				t.Logf("%.2f%% succeeded with %.3f attempts each", 100*float64(ok)/calls, float64(count(cluster))/calls)
			})
		})
	}
}

// DNS is resolved anew again and again while servers are down. A throttle that
// lives in the channel starts afresh each time; what is kept here must not,
// whatever the update brings: nothing new, other servers, another config.
func TestResolverUpdateGrantsNothing(t *testing.T) {
	const config = `{"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [{"name": [{}], "retryPolicy": {
		"maxAttempts": %d, "initialBackoff": "0.01s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}],
		"retryThrottling": {"maxTokens": %d, "tokenRatio": 0.1}}`
	for _, tt := range []struct {
		name   string
		update func(c *testsrv.Cluster, i int) error
	}{
		{"the same addresses", func(c *testsrv.Cluster, _ int) error { return c.SetServers(c.Servers...) }},
		{"fewer addresses", func(c *testsrv.Cluster, i int) error { return c.SetServers(c.Servers[:1+i%3]...) }},
		{"another config", func(c *testsrv.Cluster, i int) error {
			return c.SetServiceConfig(fmt.Sprintf(config, 2+i%4, 10+i))
		}},
		{"connections cut", func(c *testsrv.Cluster, _ int) error {
			for _, s := range c.Servers {
				s.CutConnections()
			}
			time.Sleep(time.Second) // until all are connected again
			return nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				// No free retry, so that not one may come.
				b := mustBudget(t, BudgetConfig{FreeInterval: -1})
				cluster, client := clusterOf(t, newRetrier(t, WithBudget(b)), 3, func(int) testsrv.Script {
					return testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)}
				})
				load(t, client, 8, 100)
				if got := count(cluster); got != 110 {
					t.Fatalf("%d attempts for 100 calls, want ten retries", got)
				}
				for i := range 20 {
					if err := tt.update(cluster, i); err != nil {
						t.Fatal(err)
					}
					before := count(cluster)
					load(t, client, 8, 100)
					if got := count(cluster) - before; got != 100 {
						t.Errorf("after update %d: %d attempts for 100 calls, want no retry", i, got)
					}
				}
				if got := bank(b); got != 0 {
					t.Errorf("%v tokens, want none", got)
				}
			})
		})
	}
}

// The question that users ask of a budget: if one of three servers dies, what
// becomes of the calls that it had? With the default none is lost once the
// client has had as many successes as make room for them; before that, all but
// the ten that it may retry from the start.
func TestKilledServerLosesNoCall(t *testing.T) {
	const workers = 64
	for _, tt := range []struct {
		name string
		warm int // successful calls before, by as many workers
		opts []Option
		lost func(victims int) int
	}{
		{"in the steady state", 1000, nil, func(int) int { return 0 }},
		{"two calls of each caller later", 2 * workers, nil, func(int) int { return 0 }},
		{"just started", 0, nil, func(victims int) int { return victims - 10 }},
		{"just started, sized for it", 0, []Option{WithBudget(mustBudget(t, BudgetConfig{Capacity: 22 * 7}))}, func(int) int { return 0 }},
		{"a capacity that stays", 1000, []Option{WithBudget(mustBudget(t, BudgetConfig{PerCall: -1}))}, func(victims int) int { return victims - 10 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cluster, client := clusterOf(t, newRetrier(t, tt.opts...), 3, nil)
				setAll(t, cluster, testsrv.Sequence{{Delay: 100 * time.Millisecond}})
				load(t, client, 1, 1)
				time.Sleep(time.Second) // until all three are connected
				if got := load(t, client, workers, tt.warm); got != tt.warm {
					t.Fatalf("%d calls of %d succeeded before", got, tt.warm)
				}
				before := count(cluster)
				ok := make(chan int)
				go func() { ok <- load(t, client, workers, workers) }()
				time.Sleep(50 * time.Millisecond)
				victims := cluster.Servers[1].Running()
				if got := count(cluster) - before; got != workers || victims < 21 || victims > 22 {
					t.Fatalf("%d calls in flight, %d of them at the server to be killed", got, victims)
				}
				cluster.Servers[1].Kill()
				if got, want := workers-<-ok, tt.lost(victims); got != want {
					t.Errorf("%d of %d victims were lost, want %d", got, victims, want)
				}
			})
		})
	}
}

// With traffic that goes on: one of three servers is killed under 64 callers
// and comes back. None of them may see an error.
func TestKilledServerUnderTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster, client := clusterOf(t, newRetrier(t), 3, nil)
		setAll(t, cluster, testsrv.Sequence{{Delay: 100 * time.Millisecond}})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		var calls, lost atomic.Int64
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for ctx.Err() == nil {
					calls.Add(1)
					if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
						lost.Add(1)
					}
				}
			})
		}
		for range 3 {
			time.Sleep(time.Second + 50*time.Millisecond)
			cluster.Servers[2].Kill()
			time.Sleep(time.Second)
			if err := cluster.Servers[2].Restart(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		stop()
		wg.Wait()
		if lost.Load() != 0 || cluster.Servers[2].Count(get) < 500 {
			t.Errorf("%d of %d calls were lost, %d attempts at the server that was killed", lost.Load(), calls.Load(), cluster.Servers[2].Count(get))
		}
	})
}

// The figure that the documentation gives for a partial outage: below about 28%
// of independent failures every retry is paid for by the successes, above it
// retries are refused.
func TestIndependentFailures(t *testing.T) {
	for _, tt := range []struct {
		failing   float64
		sustained bool
	}{{0.05, true}, {0.125, true}, {0.25, true}, {0.32, false}, {0.5, false}} {
		b := mustBudget(t, BudgetConfig{FreeInterval: -1})
		rng := rand.New(rand.NewPCG(1, 2))
		fails := func() bool { return rng.Float64() < tt.failing }
		enter(b, 100)
		record(b, OutcomeOK, 1000) // so that chance does not empty it
		for range 100_000 {
			if !fails() {
				b.Record(OutcomeOK)
				continue
			}
			for range 2 {
				g, ok := b.Reserve(CostTransient)
				if !ok {
					break
				}
				won := !fails()
				b.Settle(g, won)
				if won {
					break
				}
			}
		}
		if s := b.state(); s.Refused == 0 != tt.sustained {
			t.Errorf("%v of the attempts fail: %d retries granted, %d refused; want none refused: %v", tt.failing, s.Granted, s.Refused, tt.sustained)
		}
	}
}

// What the documentation says of the throttle: one bad replica of eight turns
// all retries off. Should that change, its advice is out of date.
func TestOneBadReplicaTurnsTheThrottleOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls = 4000
		r := newRetrier(t, WithBudget(mustThrottle(t, 10, 0.1)))
		_, client := clusterOf(t, r, 8, func(i int) testsrv.Script {
			if i == 3 {
				return testsrv.Script{get: testsrv.Sequence{{Code: codes.Unavailable}}}
			}
			return testsrv.Script{get: testsrv.Sequence{{Delay: 10 * time.Millisecond}}}
		})
		// One worker: with more, who fails at once comes back to the bad replica
		// sooner than the others, by as much as chance has it.
		if ok := load(t, client, 1, calls); ok < calls*87/100 || ok > calls*89/100 {
			t.Errorf("%d of %d calls succeeded, want about seven of eight", ok, calls)
		}
	})
}
