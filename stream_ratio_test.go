//go:build unix

package grpcretry

import (
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
)

// BenchmarkStreamRatio is the ratio of the two in processor time, of client and
// server together, with a 95% interval. It runs them in turn, and each round has
// connections of its own, because each has luck of its own. Give it the number
// of rounds: -benchtime 60x.
func BenchmarkStreamRatio(b *testing.B) {
	const batch = 100 * time.Millisecond
	for _, load := range streamLoads {
		b.Run(load.name, func(b *testing.B) {
			measure := func(opts []grpc.DialOption) float64 {
				cc := streamConn(b, opts...)
				defer cc.Close()
				start := processorTime()
				for n := 0; ; n++ {
					if n == 1 {
						start = processorTime() // the first one connects
					}
					if d := processorTime() - start; n > 1 && d > batch {
						return float64(d) / float64(n-1)
					}
					if err := load.run(b.Context(), cc); err != nil {
						b.Fatal(err)
					}
				}
			}
			plain, ours := []grpc.DialOption{grpc.WithDisableRetry()}, newRetrier(b).DialOptions()
			var ratios []float64
			for i := 0; b.Loop(); i++ {
				var t [2]float64
				for k := range t {
					if which := (i + k) % 2; which == 0 {
						t[0] = measure(plain)
					} else {
						t[1] = measure(ours)
					}
				}
				ratios = append(ratios, t[1]/t[0])
			}
			low, mid, high := medianOf(ratios)
			b.ReportMetric(0, "ns/op") // it means nothing here
			b.ReportMetric(low, "ratio-low")
			b.ReportMetric(mid, "ratio")
			b.ReportMetric(high, "ratio-high")
		})
	}
}

// medianOf is the median of the sample with a bootstrap interval of 95%.
func medianOf(sample []float64) (low, mid, high float64) {
	middle := func(s []float64) float64 {
		slices.Sort(s)
		return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
	}
	random := rand.New(rand.NewPCG(1, 2))
	medians, resample := make([]float64, 2000), make([]float64, len(sample))
	for i := range medians {
		for j := range resample {
			resample[j] = sample[random.IntN(len(sample))]
		}
		medians[i] = middle(resample)
	}
	slices.Sort(medians)
	return medians[50], middle(slices.Clone(sample)), medians[1949]
}

// processorTime is what this process has used of the processors. Unlike the
// time on the wall it leaves out what other processes take.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // never seen: the arguments are valid
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
