package grpcretry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// tiers are servers of which each calls the next one, and a client of the first.
// So there are as many places that retry as servers.
type tiers struct {
	servers []*testsrv.Server
	client  testpb.TestServiceClient
}

// tiersOf describes a chain.
type tiersOf struct {
	n       int
	leaf    testsrv.Reaction // of the last server
	sockets bool             // on loopback TCP instead of memory
	alone   bool             // without server interceptors
	server  []ServerOption
	client  []Option          // of every Retrier
	topmost []grpc.DialOption // of the client in place of its Retrier's
}

func (o tiersOf) start(t testing.TB) tiers {
	t.Helper()
	chain := tiers{servers: make([]*testsrv.Server, o.n)}
	opts := append([]Option{WithDefaultPolicy(Policy{
		MaxAttempts: 4,
		Backoff:     Backoff{Base: time.Millisecond, Max: time.Millisecond, Jitter: NoJitter},
	})}, o.client...)
	reaction := o.leaf
	for i := o.n - 1; i >= 0; i-- {
		var wiring []testsrv.Option
		if !o.alone {
			wiring = append(wiring, testsrv.WithServerOptions(interceptors(o.server...)...))
		}
		wiring = append(wiring, testsrv.WithName(fmt.Sprintf("tier-%d", i+1)))
		script := testsrv.Script{get: reaction}
		srv := testsrv.New(script, wiring...)
		if o.sockets {
			srv.Close()
			var err error
			if srv, err = testsrv.Listen(script, wiring...); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(srv.Close)
		dialOptions := newRetrier(t, opts...).DialOptions()
		if i == 0 && o.topmost != nil {
			dialOptions = o.topmost
		}
		cc, err := srv.Dial(dialOptions...)
		if err != nil {
			t.Fatal(err)
		}
		next := testpb.NewTestServiceClient(cc)
		chain.servers[i], chain.client = srv, next
		reaction = testsrv.Sequence{{Unary: func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			return next.Get(ctx, req)
		}}}
	}
	return chain
}

// counts are the requests that came to each tier.
func (c tiers) counts() []int {
	var n []int
	for _, s := range c.servers {
		n = append(n, s.Count(get))
	}
	return n
}

// call makes n calls, by as many workers at once, and counts the successes.
func (c tiers) call(t testing.TB, workers, n int) (succeeded int) {
	t.Helper()
	return load(t, c.client, workers, n)
}

var total = testsrv.Sequence{{Code: codes.Unavailable, Message: "total outage"}}

// grpcItself lets gRPC retry in place of this package.
var grpcItself = []grpc.DialOption{grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
	"maxAttempts": 4, "initialBackoff": "0.001s", "maxBackoff": "0.001s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`)}

// What there is to prevent: attempts multiply over tiers. Should this no longer
// be so, the tests below show nothing.
func TestTiersMultiplyByThemselves(t *testing.T) {
	for n, times := range map[int]int{3: 64, 5: 1024} {
		synctest.Test(t, func(t *testing.T) {
			const calls = 3
			chain := tiersOf{n: n, leaf: total, alone: true, client: []Option{WithBudget(Unlimited())}}.start(t)
			if ok := chain.call(t, 1, calls); ok != 0 {
				t.Errorf("%d calls succeeded", ok)
			}
			if got := chain.servers[n-1].Count(get); got != times*calls {
				t.Errorf("%d tiers: %d attempts at the leaf for %d calls, want %d times as many", n, got, calls, times)
			}
		})
	}
}

// In a total outage at the leaf only the tier next to it retries, within its own
// budget, over any number of tiers: everybody else sees each call once. And
// gRPC's own retries at the top obey the trailer too.
func TestTiersInATotalOutage(t *testing.T) {
	const workers = 8
	for _, tt := range []struct {
		name  string
		tiers tiersOf
		calls int
		leaf  int // attempts for each call at most, besides those that the budget pays for
	}{
		{"three", tiersOf{n: 3}, 2000, 1},
		{"five", tiersOf{n: 5}, 2000, 1},
		{"three, gRPC itself at the top", tiersOf{n: 3, topmost: grpcItself}, 2000, 1},
		{"five, gRPC itself at the top", tiersOf{n: 5, topmost: grpcItself}, 2000, 1},
		{"five without budgets", tiersOf{n: 5, client: []Option{WithBudget(Unlimited())}}, 200, 4},
		{"five without budgets, gRPC itself at the top", tiersOf{n: 5, client: []Option{WithBudget(Unlimited())}, topmost: grpcItself}, 200, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if raceEnabled {
				tt.calls /= 4 // the same load for a shorter time
			}
			tt.tiers.leaf, tt.tiers.sockets = total, true
			start := time.Now()
			chain := tt.tiers.start(t)
			if ok := chain.call(t, workers, tt.calls); ok != 0 {
				t.Errorf("%d calls succeeded", ok)
			}
			got := chain.counts()
			last := len(got) - 1
			for i, n := range got[:last] {
				if n != tt.calls {
					t.Errorf("%d requests came to tier %d for %d calls, want one each", n, i+1, tt.calls)
				}
			}
			least, most := tt.leaf*tt.calls, tt.leaf*tt.calls
			if tt.leaf == 1 { // ten retries at the start, and one a minute
				least, most = tt.calls+10, tt.calls+max(70, 10*workers)/7+int(time.Since(start)/time.Minute)+1
			}
			if got[last] < least || got[last] > most {
				t.Errorf("%d attempts at the leaf for %d calls, want %d to %d", got[last], tt.calls, least, most)
			}
			t.Logf("%d calls in %v: requests per tier %v", tt.calls, time.Since(start).Round(time.Millisecond), got)
		})
	}
}

// With the subtree alone the attempts of the tiers add up: the retries of each
// tier come to the leaf once.
func TestTiersBelowARetry(t *testing.T) {
	for n, attempts := range map[int]int{3: 10, 5: 16} { // 1 + 3n
		synctest.Test(t, func(t *testing.T) {
			const calls = 20
			chain := tiersOf{n: n, leaf: total, client: []Option{WithBudget(Unlimited())},
				server: []ServerOption{WithRetrySubtree(), WithoutGivenUpPushback()}}.start(t)
			chain.call(t, 1, calls)
			if got := chain.servers[n-1].Count(get); got != attempts*calls {
				t.Errorf("%d tiers: %d attempts at the leaf for %d calls, want %d for each", n, got, calls, attempts)
			}
		})
	}
}

// After good times the lowest tier has a retry and a half for each call in
// flight. That is its own bound; the tiers above must add nothing to it, though
// their budgets are full too.
func TestTiersAfterGoodTimes(t *testing.T) {
	const calls, workers = 2000, 64
	synctest.Test(t, func(t *testing.T) {
		chain := tiersOf{n: 3}.start(t)
		leaf := chain.servers[2]
		set := func(step testsrv.Step) {
			if err := leaf.Set(get, testsrv.Sequence{step}); err != nil {
				t.Fatal(err)
			}
		}
		set(testsrv.Step{Delay: 10 * time.Millisecond})
		if ok := chain.call(t, workers, 1500); ok != 1500 {
			t.Fatalf("%d of 1500 calls succeeded before the outage", ok)
		}
		set(testsrv.Step{Delay: 10 * time.Millisecond, Code: codes.Unavailable})
		before, start := chain.counts(), time.Now()
		chain.call(t, workers, calls)
		got := chain.counts()
		for i := range got {
			got[i] -= before[i]
		}
		limit := calls + 10*workers/7 + int(time.Since(start)/time.Minute) + 1
		if got[0] != calls || got[1] != calls || got[2] <= calls+10 || got[2] > limit {
			t.Errorf("requests per tier %v for %d calls, want no retry but at the leaf, and more than %d and at most %d there", got, calls, calls+10, limit)
		}
	})
}

// failingAt makes a leaf of which a share of the attempts fails, each
// independently of the others, the same ones in every run.
func failingAt(share float64) testsrv.Reaction {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(1, 2))
	return testsrv.Func(func(int, testsrv.Attempt) testsrv.Step {
		mu.Lock()
		defer mu.Unlock()
		if rng.Float64() < share {
			return testsrv.Step{Delay: time.Millisecond, Code: codes.Unavailable}
		}
		return testsrv.Step{Delay: time.Millisecond}
	})
}

// The trailer must not cost what retries are for: one attempt in ten fails at
// the leaf, and the callers at the top hardly notice.
func TestTiersWithOneFailureInTen(t *testing.T) {
	calls := 2000
	if raceEnabled {
		calls = 500
	}
	for _, n := range []int{3, 5} {
		for _, workers := range []int{1, 16} {
			if workers == 1 && raceEnabled {
				continue // slow, and nothing to find
			}
			t.Run(fmt.Sprintf("%d tiers, %d workers", n, workers), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					chain := tiersOf{n: n, leaf: failingAt(0.1)}.start(t)
					ok := chain.call(t, workers, calls)
					if want := calls * 995 / 1000; ok < want {
						t.Errorf("%d of %d calls succeeded, want %d", ok, calls, want)
					}
					got := chain.counts()
					if got[n-1] < calls*105/100 {
						t.Errorf("%d attempts at the leaf for %d calls, so too few failed to show anything", got[n-1], calls)
					}
					t.Logf("%.2f%% succeeded, requests per tier %v", 100*float64(ok)/float64(calls), got)
				})
			})
		}
	}
}

// What the trailer costs where most of what fails would succeed in an attempt of
// the tiers above: the figures of docs/tiers.md, by which somebody decides
// whether to switch it off. One caller, waits that are the same in every run, and
// a fixed seed make them exact.
func TestWhatTheTrailerCosts(t *testing.T) {
	if raceEnabled {
		t.Skip("one caller at a time, so nothing to find, and slow")
	}
	const calls, n = 1000, 3
	b, err := os.ReadFile("docs/tiers.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	for _, share := range []float64{0.1, 0.3, 0.5} {
		for _, budget := range []string{"the default", "`Unlimited()`"} {
			row := fmt.Sprintf("| %.0f%% | %s |", 100*share, budget)
			for _, opts := range [][]ServerOption{nil, {WithoutGivenUpPushback()}} {
				synctest.Test(t, func(t *testing.T) {
					o := tiersOf{n: n, leaf: failingAt(share), server: opts}
					if budget != "the default" {
						o.client = []Option{WithBudget(Unlimited())}
					}
					chain := o.start(t)
					ok := chain.call(t, 1, calls)
					row += fmt.Sprintf(" %.1f%% | %.2f |", 100*float64(ok)/calls, float64(chain.servers[n-1].Count(get))/calls)
				})
			}
			if !strings.Contains(page, row+"\n") {
				t.Errorf("docs/tiers.md lacks the row\n%s", row)
			}
		}
	}
}
