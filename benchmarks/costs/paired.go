package costs

import (
	"errors"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"example.com/grpcretry/benchmarks/peers"
)

// Effort says how long a measurement takes.
type Effort struct {
	Rounds int           // each has one batch of every peer, in shuffled order
	Batch  time.Duration // about as long is one batch
}

// Figure is what a case costs through one peer.
type Figure struct {
	Peer   string
	Nanos  Interval // per call
	Added  Interval // nanoseconds per call, beside no interceptor in the same round
	Ratio  Interval // to no interceptor in the same round
	Allocs float64  // per call, beside no interceptor
	nanos  []float64
}

// Interval is a median and the bounds between which it lies with 95% certainty.
type Interval struct{ Mid, Low, High float64 }

// Measure runs the case through every peer of the list that can take part. A
// peer that cannot is left out. The list must begin with the peer None.
//
// Other work on the machine slows all batches of a round alike, so only
// figures of the same round are compared with each other.
func (c Case) Measure(list []peers.Peer, e Effort, random *rand.Rand) ([]Figure, error) {
	var entries []*entry
	defer func() {
		for _, x := range entries {
			x.runner.Close()
		}
	}()
	for _, p := range list {
		r, err := c.Start(p)
		if errors.Is(err, peers.ErrUnable) {
			continue
		} else if err != nil {
			return nil, err
		}
		x := &entry{peer: p, runner: r}
		entries = append(entries, x)
		if x.allocs, err = allocations(r, c.EndToEnd); err != nil {
			return nil, err
		}
		if c.EndToEnd && len(entries) > 1 {
			x.batch = entries[0].batch // a new connection is slower at first, so all make as many calls
		} else if x.batch, err = calibrate(r, e.Batch); err != nil {
			return nil, err
		}
	}
	order := slices.Clone(entries)
	for range e.Rounds {
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, x := range order {
			if err := c.round(x); err != nil {
				return nil, err
			}
		}
	}
	var figures []Figure
	for _, x := range entries {
		f := Figure{Peer: x.peer.Name, Allocs: x.allocs - entries[0].allocs, nanos: x.nanos}
		f.Nanos = Median(f.nanos, random)
		f.Added = Median(pair(f.nanos, entries[0].nanos, func(a, b float64) float64 { return a - b }), random)
		f.Ratio = Median(pair(f.nanos, entries[0].nanos, func(a, b float64) float64 { return a / b }), random)
		figures = append(figures, f)
	}
	return figures, nil
}

// entry is one peer while it is measured.
type entry struct {
	peer   peers.Peer
	runner *Runner
	batch  int // calls
	allocs float64
	nanos  []float64 // per call, of each round
}

// round runs one batch.
func (c Case) round(x *entry) error {
	if c.EndToEnd {
		x.runner.Close()
		r, err := c.Start(x.peer)
		if err != nil {
			return err
		}
		x.runner = r
	}
	if err := x.runner.Run(x.batch/10 + 1); err != nil { // to warm up
		return err
	}
	start := ProcessorTime()
	if err := x.runner.Run(x.batch); err != nil {
		return err
	}
	x.nanos = append(x.nanos, float64(ProcessorTime()-start)/float64(x.runner.calls(x.batch)))
	return nil
}

// Beside is the ratio of f to g, taken round by round.
func (f Figure) Beside(g Figure, random *rand.Rand) Interval {
	return Median(pair(f.nanos, g.nanos, func(a, b float64) float64 { return a / b }), random)
}

// calls is how many Run(n) makes.
func (r *Runner) calls(n int) int { return (n + r.parallel - 1) / r.parallel * r.parallel }

// calibrate finds how many calls fill a batch.
func calibrate(r *Runner, batch time.Duration) (int, error) {
	for n := r.parallel; ; n *= 2 {
		start := time.Now()
		if err := r.Run(n); err != nil {
			return 0, err
		}
		if d := time.Since(start); d >= batch/4 || d >= time.Second {
			return max(1, int(float64(n)*float64(batch)/float64(d))), nil
		}
	}
}

// allocations counts what one call allocates in the whole process. What real
// calls allocate depends a little on how their frames fall together, so more of
// them are counted.
func allocations(r *Runner, endToEnd bool) (float64, error) {
	n := 200
	if endToEnd {
		n = 2000
	}
	if r.parallel == 1 {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	}
	if err := r.Run(n); err != nil {
		return 0, err
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := r.Run(n)
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(r.calls(n)), err
}

func pair(a, b []float64, f func(a, b float64) float64) []float64 {
	out := make([]float64, len(a))
	for i := range a {
		out[i] = f(a[i], b[i])
	}
	return out
}

// Median is the median of the sample with a bootstrap interval (percentiles,
// 2000 resamples).
func Median(sample []float64, random *rand.Rand) Interval {
	const resamples = 2000
	medians := make([]float64, resamples)
	resample := make([]float64, len(sample))
	for i := range medians {
		for j := range resample {
			resample[j] = sample[random.IntN(len(sample))]
		}
		medians[i] = middle(resample)
	}
	slices.Sort(medians)
	at := func(share float64) float64 { return medians[int(math.Round(share*(resamples-1)))] }
	return Interval{Mid: middle(slices.Clone(sample)), Low: at(0.025), High: at(0.975)}
}

// middle is the median; it sorts its argument.
func middle(s []float64) float64 {
	slices.Sort(s)
	n := len(s)
	return (s[(n-1)/2] + s[n/2]) / 2
}
