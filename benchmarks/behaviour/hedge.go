package behaviour

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Hedging is what came of calls to a server whose replies take 9 to 11 ms, but one
// in twenty ten times as long; and of more calls once all replies take ten times as long.
type Hedging struct {
	Hedger string
	When   string // is a hedge due; "" for the hedger none

	Calls, Requests int
	Tail            []time.Duration // at each of the Quantiles

	SlowCalls  int
	SlowExtras [2]int // extra requests in the first so many slow calls, and in as many after them
}

// Quantiles are those at which tails are told.
var Quantiles = []float64{0.5, 0.75, 0.9, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999}

// At is the latency at one of the Quantiles.
func (h Hedging) At(quantile float64) time.Duration {
	i := slices.Index(Quantiles, quantile)
	if i < 0 {
		return 0
	}
	return h.Tail[i]
}

// Added is the share of extra requests.
func (h Hedging) Added() float64 { return float64(h.Requests-h.Calls) / float64(h.Calls) }

// HedgeConfigs are when hedges are due: half as long again as a usual reply, and
// when nine of ten calls have been answered.
var HedgeConfigs = []peers.HedgeConfig{
	{MaxAttempts: 3, Delay: 15 * time.Millisecond},
	{MaxAttempts: 3, Quantile: 0.9},
}

// RunHedging makes n calls by eight workers, and two times slow ones after that.
// Those of a warm-up of 200 calls are not counted.
func RunHedging(ctx context.Context, h peers.Hedger, config peers.HedgeConfig, n, slow int) (Hedging, error) {
	const warm = 200
	result := Hedging{Hedger: h.Name, Calls: n, SlowCalls: slow}
	switch {
	case h.Name == peers.None:
	case config.Delay > 0:
		result.When = fmt.Sprintf("after %v", config.Delay)
	default:
		result.When = fmt.Sprintf("at the quantile %v", config.Quantile)
	}
	opts, err := h.DialOptions(config)
	if err != nil {
		return result, fmt.Errorf("hedging, %s: %w", h.Name, err)
	}
	replies := &tail{}
	server := testsrv.New(testsrv.Script{get: replies})
	defer server.Close()
	cc, err := server.Dial(opts...)
	if err != nil {
		return result, fmt.Errorf("hedging, %s: %w", h.Name, err)
	}
	client := testpb.NewTestServiceClient(cc)
	made := 0
	phase := func(n int) (latencies []time.Duration, extras int, err error) {
		before := server.Count("")
		latencies, err = calls{first: made, n: n, workers: 8}.timed(ctx, client)
		made += n
		return latencies, server.Count("") - before - n, err
	}
	if _, _, err := phase(warm); err != nil {
		return result, fmt.Errorf("hedging, %s: %w", h.Name, err)
	}
	latencies, extras, err := phase(n)
	if err != nil {
		return result, fmt.Errorf("hedging, %s: %w", h.Name, err)
	}
	result.Requests = n + extras
	slices.Sort(latencies)
	for _, q := range Quantiles {
		result.Tail = append(result.Tail, latencies[min(len(latencies)-1, int(math.Ceil(q*float64(len(latencies))))-1)])
	}
	replies.slowDown()
	for i := range result.SlowExtras {
		if _, result.SlowExtras[i], err = phase(slow); err != nil {
			return result, fmt.Errorf("hedging, %s: %w", h.Name, err)
		}
	}
	return result, nil
}

// timed makes the calls, all of which must succeed, and tells how long each took.
func (c calls) timed(ctx context.Context, client testpb.TestServiceClient) ([]time.Duration, error) {
	latencies, errs := make([]time.Duration, c.n), make([]error, c.workers)
	var wg sync.WaitGroup
	for w := range c.workers {
		wg.Go(func() {
			time.Sleep(time.Duration(w+1) * 101 * time.Microsecond)
			for i := w; i < c.n; i += c.workers {
				start := time.Now()
				if _, err := client.Get(ctx, &testpb.Request{Number: int64(c.first + i)}); err != nil {
					errs[w] = err
					return
				}
				latencies[i] = time.Since(start)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return latencies, nil
}

// tail lets replies take as long as described at [Hedging].
type tail struct {
	mu   sync.Mutex
	seen map[int64]int
	slow bool
}

func (t *tail) slowDown() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.slow = true
}

// React makes tail a reaction of servers.
func (t *tail) React(_ int, a testsrv.Attempt) testsrv.Step {
	number := a.Requests[0].GetNumber()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.seen == nil {
		t.seen = map[int64]int{}
	}
	t.seen[number]++
	nth := t.seen[number]
	delay := (9 + 2*draw(seed+1, number, nth)) * float64(time.Millisecond)
	if t.slow || draw(seed, number, nth) < 0.05 {
		delay *= 10
	}
	return testsrv.Step{Delay: time.Duration(delay)}
}
