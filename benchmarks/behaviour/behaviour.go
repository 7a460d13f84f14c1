// Package behaviour lets each of the peers meet the same faults, and counts what
// comes to the servers and what becomes of the calls: outages, trees of
// services, bad and dying replicas, overload that feeds on itself, updates of the
// resolver, contention, and slow replies.
//
// Clients and servers are real ones of grpc, connected in memory. Every
// experiment is a function that runs in a testing/synctest bubble, where waits
// take no time and come out the same on every machine: nothing is timed, all is
// counted. What chance decides (whether an attempt fails, how long it takes, when a
// call is made) is drawn from the seed for each attempt by its own number, so that
// every peer meets the same luck. The waits of grpc's own retry and of gax are
// drawn from a source that nobody can seed; the last digits of their figures can
// differ from run to run where the order of attempts matters.
//
// The tests run a small form of each experiment and assert what grpcretry
// promises. TestMeasure runs the full form and writes what cmd/report makes a page of:
//
//	make -C benchmarks report
package behaviour

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"

	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Config is what every peer is asked for in every experiment: UNAVAILABLE is
// retried up to three times, after 10, 20 and 40 ms without jitter. (Native
// varies its waits by a fifth either way, and gax draws them from 0 up; neither can
// be asked not to.)
var Config = peers.Config{MaxAttempts: 4, Base: 10 * time.Millisecond, Max: 40 * time.Millisecond, RoundRobin: true}

const (
	get = testpb.TestService_Get_FullMethodName

	seed = 1
)

// dialOptions are the peer's, and waits before reconnecting that are all alike.
func dialOptions(p peers.Peer, c peers.Config) ([]grpc.DialOption, error) {
	opts, err := p.DialOptions(c)
	if err != nil {
		return nil, err
	}
	steady := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1, MaxDelay: 100 * time.Millisecond}
	return append(opts, grpc.WithConnectParams(grpc.ConnectParams{Backoff: steady})), nil
}

// cluster starts n servers and a client of all of them through the peer.
func cluster(p peers.Peer, n int, script func(i int) testsrv.Script) (*testsrv.Cluster, testpb.TestServiceClient, error) {
	opts, err := dialOptions(p, Config)
	if err != nil {
		return nil, nil, err
	}
	c := testsrv.NewCluster(n, script)
	// The peers' own service config holds the balancer, as grpc's retry has its policy there.
	if err := c.SetServiceConfig(""); err != nil {
		c.Close()
		return nil, nil, err
	}
	cc, err := c.Dial(opts...)
	if err != nil {
		c.Close()
		return nil, nil, err
	}
	cc.Connect()
	time.Sleep(time.Second) // until all are connected
	return c, testpb.NewTestServiceClient(cc), nil
}

func received(servers ...*testsrv.Server) (requests int) {
	for _, s := range servers {
		requests += s.Count("")
	}
	return requests
}

// calls are made by workers, each of which makes its next when the one before
// has ended.
type calls struct {
	first, n int // numbers of the calls
	workers  int
}

// make makes the calls, and counts those that succeed.
func (c calls) make(ctx context.Context, client testpb.TestServiceClient) (succeeded int) {
	var ok atomic.Int64
	var wg sync.WaitGroup
	for w := range c.workers {
		wg.Go(func() {
			// A moment of its own for each, so that what happens has one order.
			time.Sleep(time.Duration(w+1) * 101 * time.Microsecond)
			for i := w; i < c.n; i += c.workers {
				if _, err := client.Get(ctx, &testpb.Request{Number: int64(c.first + i)}); err == nil {
					ok.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return int(ok.Load())
}

// fate decides about attempts: a share of them fails, and each takes about Mean.
type fate struct {
	failing float64
	mean    time.Duration // 0: none at all

	mu    sync.Mutex
	seen  map[int64]int // attempts of each call
	first int           // calls whose first attempt succeeded
}

// React makes fate a reaction of servers. It counts the attempts of each call
// over all of them.
func (f *fate) React(_ int, a testsrv.Attempt) testsrv.Step {
	number := a.Requests[0].GetNumber()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.seen == nil {
		f.seen = map[int64]int{}
	}
	f.seen[number]++
	nth := f.seen[number]
	step := testsrv.Step{Delay: time.Duration(float64(f.mean) * (0.8 + 0.4*draw(seed+1, number, nth)))}
	if draw(seed, number, nth) < f.failing {
		step.Code, step.Message = codes.Unavailable, "as fate has it"
	} else if nth == 1 {
		f.first++
	}
	return step
}

func (f *fate) firstOK() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.first
}

// draw is a number in [0, 1) that depends on nothing but its arguments.
func draw(seed uint64, call int64, attempt int) float64 {
	x := seed
	for _, n := range []uint64{uint64(call), uint64(attempt), 0} {
		x = mix(x + n*0x9e3779b97f4a7c15 + 0x632be59bd9b4e019)
	}
	return float64(x>>11) / (1 << 53)
}

// mix is the finalizer of SplitMix64.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

func wrap(experiment string, p peers.Peer, err error) error {
	return fmt.Errorf("%s, peer %s: %w", experiment, p.Name, err)
}
