package grpcretry

import (
	"math"
	"slices"
	"testing"
	"time"
	"unsafe"

	"pgregory.net/rapid"
)

// A quantile that came out too short would hedge more calls than its owner
// agreed to; one that came out much too long, too few to be of use.
func TestQuantileOfLatencies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := rapid.SampledFrom([]float64{0.5, 0.9, 0.95, 0.99, 1e-9}).Draw(t, "quantile")
		all := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) time.Duration {
			return time.Duration(rapid.Int64Range(0, 1<<rapid.IntRange(1, 40).Draw(t, "size")).Draw(t, "ns"))
		}), 1, 1000).Draw(t, "latencies")
		var l latencies
		for _, d := range all {
			l.add(d, q)
		}
		got, ok := l.quantile(q)
		if enough := len(all) >= max(100, int(math.Round(10/(1-q)))); ok != enough {
			t.Fatalf("known: %v, want %v with %d calls", ok, enough, len(all))
		}
		if !ok {
			return
		}
		slices.Sort(all)
		exact := all[max(int(math.Ceil(q*float64(len(all)))), 1)-1]
		if got < exact || got > exact+exact/8+time.Microsecond {
			t.Fatalf("%v, want %v or at most an eighth and 1µs more", got, exact)
		}
	})
}

// What was long ago must count ever less, or hedges would follow last week's latency.
func TestLatenciesForget(t *testing.T) {
	var l latencies
	for range 5000 {
		l.add(10*time.Millisecond, 0.9)
	}
	for n := range 1000 {
		l.add(100*time.Millisecond, 0.9)
		if d, _ := l.quantile(0.9); d >= 100*time.Millisecond {
			if n < 50 {
				t.Errorf("after %d calls, want at least 50: a few slow ones are what hedges are for", n)
			}
			return
		}
	}
	t.Error("a method that became ten times slower is not noticed within 1000 calls")
}

// Every latency must fall in a bucket, also those that no call has.
func TestLatencyBuckets(t *testing.T) {
	for i := range latencyBuckets - 1 {
		end := bucketEnd(i)
		if bucketOf(end-1) != i || bucketOf(end) != i+1 {
			t.Errorf("bucket %d ends at %v, but %v is in %d and %v in %d", i, end, end-1, bucketOf(end-1), end, bucketOf(end))
		}
	}
	for _, d := range []time.Duration{math.MinInt64, -1, 0, 1, latencyLongest, math.MaxInt64} {
		if i := bucketOf(d); i < 0 || i >= latencyBuckets {
			t.Errorf("%v is in bucket %d of %d", d, i, latencyBuckets)
		}
	}
	if size := unsafe.Sizeof(latencies{}); size > 1126 {
		t.Errorf("%d bytes for each method, promised are 1.1 KiB", size)
	}
}
