package behaviour

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A Kind is what happens to the server during a pulse.
type Kind string

const (
	// Stall lets the server do nothing; what comes in waits.
	Stall Kind = "stall"
	// Failures lets the server take its time for each request, and then fail it with UNAVAILABLE.
	Failures Kind = "failures"
	// Overload doubles the calls that are made.
	Overload Kind = "overload"
)

// Kinds are all of them.
var Kinds = []Kind{Stall, Failures, Overload}

// Scene is a server under a load that does not depend on its answers, and a
// pulse. The server works on one request at a time, in the order in which they
// came, and does not notice when nobody waits for the answer any more: what
// its clients gave up costs it as much as the rest.
type Scene struct {
	Service time.Duration // of one request; the capacity is its inverse
	Timeout time.Duration // of an attempt
	Pulse   time.Duration
	Before  time.Duration // from the start to the pulse
	After   time.Duration // and from its end to the last call; 0: Settle for each part of the capacity that is to spare
	Settle  time.Duration
	Bin     time.Duration // of the counts
	Clients int           // each with its own connection, and its own budget if it has any
	Even    bool          // calls are made at equal distances, not as a Poisson process
}

// Full is the scene of the report: 200 requests a second, and timeouts that are
// as long as 100 of them.
var Full = Scene{
	Service: 5 * time.Millisecond, Timeout: 500 * time.Millisecond, Pulse: 2500 * time.Millisecond,
	Before: 10 * time.Second, After: 60 * time.Second, Bin: 250 * time.Millisecond, Clients: 10,
}

// Lasting is the same with a pulse of ten seconds, which is watched for as long
// as the server needs to work off what has gathered by then.
var Lasting = func() Scene {
	s := Full
	s.Pulse, s.After, s.Settle = 10*time.Second, 0, 12*time.Second
	return s
}()

// Pulse is what came of one scene.
type Pulse struct {
	Peer    string
	Kind    Kind
	Load    float64 // share of the capacity that is called for outside of the pulse
	Clients int

	Bin      time.Duration
	From, To time.Duration // the pulse, from the start
	Bins     []Bin
	Requests int // that the server received, over all
}

// Bin counts the calls that were made in one interval, and how many of them
// were answered in time, which is before their client gave up.
type Bin struct{ Made, Answered int }

// Goodput is the share of the bin's calls that were answered; 1 if there are none.
func (b Bin) Goodput() float64 {
	if b.Made == 0 {
		return 1
	}
	return float64(b.Answered) / float64(b.Made)
}

// Recovered is how long after the pulse's end the last call was made that was
// in an interval of which more than 5% failed, rounded up to intervals. It
// reports false if that is so until the end.
func (p Pulse) Recovered() (time.Duration, bool) {
	last := 0
	for i, b := range p.Bins {
		if b.Goodput() < 0.95 {
			last = i + 1
		}
	}
	return max(0, time.Duration(last)*p.Bin-p.To), last < len(p.Bins)
}

// Amplification is the requests that each call became, over all.
func (p Pulse) Amplification() float64 { return float64(p.Requests) / float64(p.made()) }

func (p Pulse) made() (n int) {
	for _, b := range p.Bins {
		n += b.Made
	}
	return n
}

// Lost is how many calls were not answered, over all.
func (p Pulse) Lost() (n int) {
	for _, b := range p.Bins {
		n += b.Made - b.Answered
	}
	return n
}

// LostShare is Lost as a share of all calls.
func (p Pulse) LostShare() float64 { return float64(p.Lost()) / float64(p.made()) }

// Extra is how many requests there were beyond one for each call.
func (p Pulse) Extra() int { return p.Requests - p.made() }

// RunPulse plays the scene. A peer that can bound its attempts does, and its
// calls have the time for all of them; the calls of the others have as much time as one
// attempt.
func (s Scene) RunPulse(ctx context.Context, p peers.Peer, kind Kind, load float64) (Pulse, error) {
	s = s.under(load)
	result := Pulse{Peer: p.Name, Kind: kind, Load: load, Clients: s.Clients, Bin: s.Bin, From: s.Before, To: s.Before + s.Pulse}
	result.Bins = make([]Bin, int((s.Before+s.Pulse+s.After)/s.Bin))
	config, patience := Config, s.Timeout
	if p.TimesAttempts() {
		config.AttemptTimeout = s.Timeout
		patience = 2 * time.Duration(config.MaxAttempts) * s.Timeout
	}

	queue := &fifo{service: s.Service}
	server := testsrv.New(testsrv.Script{get: testsrv.Sequence{{Unary: func(context.Context, *testpb.Request) (*testpb.Response, error) {
		end := queue.join(time.Now())
		time.Sleep(time.Until(end)) // whatever becomes of the context
		if queue.fails(end) {
			return nil, status.Error(codes.Unavailable, "as the pulse has it")
		}
		return &testpb.Response{}, nil
	}}}})
	defer server.Close()
	clients := make([]testpb.TestServiceClient, s.Clients)
	for i := range clients {
		opts, err := dialOptions(p, config)
		if err != nil {
			return result, wrap("pulse", p, err)
		}
		cc, err := server.Dial(opts...)
		if err != nil {
			return result, wrap("pulse", p, err)
		}
		cc.Connect()
		clients[i] = testpb.NewTestServiceClient(cc)
	}
	time.Sleep(time.Second)

	start := time.Now()
	from, to := start.Add(result.From), start.Add(result.To)
	switch kind {
	case Stall:
		queue.stallFrom, queue.stallTo = from, to
	case Failures:
		queue.failFrom, queue.failTo = from, to
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, at := range s.arrivals(kind, load) {
		time.Sleep(time.Until(start.Add(at)))
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, patience)
			defer cancel()
			_, err := clients[i%s.Clients].Get(ctx, &testpb.Request{Number: int64(i)})
			mu.Lock()
			defer mu.Unlock()
			bin := &result.Bins[int(at/s.Bin)]
			bin.Made++
			if err == nil {
				bin.Answered++
			}
		})
	}
	wg.Wait()
	result.Requests = server.Count("")
	return result, nil
}

// under settles how long the scene is.
func (s Scene) under(load float64) Scene {
	if s.After == 0 {
		s.After = time.Duration(float64(s.Settle) / (1 - load)).Round(s.Bin)
	}
	return s
}

// arrivals are when calls are made.
func (s Scene) arrivals(kind Kind, load float64) (all []time.Duration) {
	random := rand.New(rand.NewPCG(seed, seed))
	end := s.Before + s.Pulse + s.After
	for at := time.Duration(0); ; {
		rate := load / float64(s.Service)
		if kind == Overload && at >= s.Before && at < s.Before+s.Pulse {
			rate *= 2
		}
		distance := 1.0
		if !s.Even {
			distance = -math.Log(1 - random.Float64())
		}
		if at += time.Duration(distance / rate); at >= end {
			return all
		}
		all = append(all, at)
	}
}

// fifo is a server's queue.
type fifo struct {
	service            time.Duration
	stallFrom, stallTo time.Time
	failFrom, failTo   time.Time

	mu   sync.Mutex
	free time.Time // when what has joined so far is done
}

// join puts a request at the end of the queue and returns when it will be done.
func (q *fifo) join(now time.Time) time.Time {
	q.mu.Lock()
	defer q.mu.Unlock()
	begin := now
	if q.free.After(begin) {
		begin = q.free
	}
	end := begin.Add(q.service)
	if begin.Before(q.stallTo) && end.After(q.stallFrom) { // what is begun goes on after the stall
		worked := max(0, q.stallFrom.Sub(begin))
		end = q.stallTo.Add(q.service - worked)
	}
	q.free = end
	return end
}

// fails reports whether what is done at that time fails.
func (q *fifo) fails(end time.Time) bool { return !end.Before(q.failFrom) && end.Before(q.failTo) }
