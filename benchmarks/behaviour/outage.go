package behaviour

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Outage is what came of calls to a server of which a share of the attempts fails.
type Outage struct {
	Peer    string
	Failing float64 // share of the attempts
	Workers int

	Calls, OK int
	FirstOK   int // calls whose first attempt succeeded
	Requests  int // that the server received
	Took      time.Duration
}

// Amplification is the requests that each call became.
func (o Outage) Amplification() float64 { return float64(o.Requests) / float64(o.Calls) }

// Success is the share of the calls that succeeded.
func (o Outage) Success() float64 { return float64(o.OK) / float64(o.Calls) }

// LostExtras are the attempts beyond the first of their call that failed.
func (o Outage) LostExtras() int { return o.Requests - o.Calls - (o.OK - o.FirstOK) }

// RunOutage makes n calls by so many workers. An attempt takes about 10 ms.
func RunOutage(ctx context.Context, p peers.Peer, failing float64, workers, n int) (Outage, error) {
	o := Outage{Peer: p.Name, Failing: failing, Workers: workers, Calls: n}
	f := &fate{failing: failing, mean: 10 * time.Millisecond}
	c, client, err := cluster(p, 1, func(int) testsrv.Script { return testsrv.Script{get: f} })
	if err != nil {
		return o, wrap("outage", p, err)
	}
	defer c.Close()
	start := time.Now()
	o.OK = calls{n: n, workers: workers}.make(ctx, client)
	o.Took = time.Since(start)
	o.Requests, o.FirstOK = received(c.Servers...), f.firstOK()
	return o, nil
}

// Chain is what came of calls to the first of several servers, each of which
// calls the next, while the last one is down.
type Chain struct {
	Peer   string
	Server bool // the servers have the peer's interceptor too
	Tiers  int

	Calls    int
	Requests []int // that each tier received, the first one first
}

// AtTheLeaf is the requests that each call became at the last server.
func (c Chain) AtTheLeaf() float64 { return float64(c.Requests[c.Tiers-1]) / float64(c.Calls) }

// RunChain makes n calls by eight workers.
func RunChain(ctx context.Context, p peers.Peer, server bool, tiers, n int) (Chain, error) {
	result := Chain{Peer: p.Name, Server: server, Tiers: tiers, Calls: n, Requests: make([]int, tiers)}
	servers := make([]*testsrv.Server, tiers)
	defer func() {
		for _, s := range servers {
			if s != nil {
				s.Close()
			}
		}
	}()
	var client testpb.TestServiceClient
	var reaction testsrv.Reaction = &fate{failing: 1, mean: time.Millisecond}
	for i := tiers - 1; i >= 0; i-- {
		opts := []testsrv.Option{testsrv.WithName(fmt.Sprintf("tier-%d", i+1))}
		if server {
			opts = append(opts, testsrv.WithServerOptions(p.ServerOptions()...))
		}
		s := testsrv.New(testsrv.Script{get: reaction}, opts...)
		servers[i] = s
		dial, err := dialOptions(p, Config)
		if err != nil {
			return result, wrap("chain", p, err)
		}
		cc, err := s.Dial(dial...)
		if err != nil {
			return result, wrap("chain", p, err)
		}
		next := testpb.NewTestServiceClient(cc)
		client = next
		reaction = testsrv.Sequence{{Unary: func(ctx context.Context, request *testpb.Request) (*testpb.Response, error) {
			return next.Get(ctx, request)
		}}}
	}
	calls{n: n, workers: 8}.make(ctx, client)
	for i, s := range servers {
		result.Requests[i] = s.Count("")
	}
	return result, nil
}

// Replica is what came of calls to eight servers of which one fails each attempt.
type Replica struct {
	Peer string

	Calls, OK int
	Requests  int // over all servers
	AtTheBad  int
}

// Amplification is the requests that each call became.
func (r Replica) Amplification() float64 { return float64(r.Requests) / float64(r.Calls) }

// Success is the share of the calls that succeeded.
func (r Replica) Success() float64 { return float64(r.OK) / float64(r.Calls) }

// RunReplica makes n calls by 64 workers, in turn to each of the servers.
func RunReplica(ctx context.Context, p peers.Peer, n int) (Replica, error) {
	r := Replica{Peer: p.Name, Calls: n}
	good := &fate{mean: 10 * time.Millisecond}
	c, client, err := cluster(p, 8, func(i int) testsrv.Script {
		if i == 3 {
			return testsrv.Script{get: testsrv.Sequence{{Delay: time.Millisecond, Code: codes.Unavailable, Message: "bad replica"}}}
		}
		return testsrv.Script{get: good}
	})
	if err != nil {
		return r, wrap("replica", p, err)
	}
	defer c.Close()
	r.OK = calls{n: n, workers: 64}.make(ctx, client)
	r.Requests, r.AtTheBad = received(c.Servers...), c.Servers[3].Count("")
	return r, nil
}

// InFlight is how many calls are in flight when a server is killed: 22 at each
// of the three.
const InFlight = 66

// Kill is what came of the calls in flight when one of three servers was killed.
type Kill struct {
	Peer string
	Warm int // calls that had succeeded before

	Victims, Lost int // calls at the server that was killed, and those of all that failed
}

// RunKill kills a server under [InFlight] calls, after so many successful ones.
func RunKill(ctx context.Context, p peers.Peer, warm int) (Kill, error) {
	k := Kill{Peer: p.Name, Warm: warm}
	f := &fate{mean: 100 * time.Millisecond}
	c, client, err := cluster(p, 3, func(int) testsrv.Script { return testsrv.Script{get: f} })
	if err != nil {
		return k, wrap("kill", p, err)
	}
	defer c.Close()
	if ok := (calls{n: warm, workers: InFlight}).make(ctx, client); ok != warm {
		return k, wrap("kill", p, fmt.Errorf("%d of %d calls succeeded before the kill", ok, warm))
	}
	before := received(c.Servers...)
	ok := make(chan int)
	go func() { ok <- calls{first: warm, n: InFlight, workers: InFlight}.make(ctx, client) }()
	time.Sleep(50 * time.Millisecond)
	k.Victims = c.Servers[1].Running()
	c.Servers[1].Kill()
	if at := received(c.Servers...) - before; at != InFlight {
		err = wrap("kill", p, fmt.Errorf("%d calls in flight, want %d", at, InFlight))
	}
	k.Lost = InFlight - <-ok
	return k, err
}

// Update is what came of calls in an outage while the resolver goes on to
// deliver the same addresses, and while it does not.
type Update struct {
	Peer string

	Rounds, Calls int   // each round has so many calls
	Quiet         []int // extra requests in each round without an update before it
	Updated       []int // and with one
}

// Granted is how many more extra requests there were with updates.
func (u Update) Granted() int {
	n := 0
	for i := range u.Quiet {
		n += u.Updated[i] - u.Quiet[i]
	}
	return n
}

// RunUpdate makes rounds of n calls by eight workers to three servers that are
// down, once with an update of the resolver before each round but the first.
func RunUpdate(ctx context.Context, p peers.Peer, rounds, n int) (Update, error) {
	u := Update{Peer: p.Name, Rounds: rounds, Calls: n}
	for _, update := range []bool{false, true} {
		f := &fate{failing: 1, mean: 10 * time.Millisecond}
		c, client, err := cluster(p, 3, func(int) testsrv.Script { return testsrv.Script{get: f} })
		if err != nil {
			return u, wrap("update", p, err)
		}
		var extras []int
		for round := range rounds {
			if update && round > 0 {
				if err := c.SetServers(c.Servers...); err != nil {
					c.Close()
					return u, wrap("update", p, err)
				}
			}
			before := received(c.Servers...)
			calls{first: round * n, n: n, workers: 8}.make(ctx, client)
			extras = append(extras, received(c.Servers...)-before-n)
		}
		c.Close()
		if update {
			u.Updated = extras
		} else {
			u.Quiet = extras
		}
	}
	return u, nil
}
