package grpcretry

import (
	"math"
	"math/bits"
	"sync"
	"time"
)

// latencies is the distribution of a method's recent latencies: a histogram
// whose buckets are an eighth of a power of two wide, so that a quantile is
// at most 12.5% too long and never too short. The zero value is ready, and takes
// 1.1 KiB. It is safe for concurrent use.
type latencies struct {
	mu     sync.Mutex
	total  uint32
	counts [latencyBuckets]uint32 // of microseconds
}

const (
	latencyBits    = 3                                 // of precision
	latencyBuckets = (37 - latencyBits) << latencyBits // up to 19 hours
	latencyLongest = 1<<36*time.Microsecond - time.Nanosecond

	// minSamples is how many calls have to be known before a quantile means
	// anything, and minBeyond how many of them beyond it.
	minSamples, minBeyond = 100, 10
)

// add takes in one latency. Once there are enough to tell the quantile q twice
// over all counts are halved, so that what was long ago counts ever less.
func (l *latencies) add(d time.Duration, q float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts[bucketOf(d)]++
	l.total++
	if l.total < max(1024, 2*samplesFor(q)) {
		return
	}
	l.total = 0
	for i := range l.counts {
		l.counts[i] /= 2
		l.total += l.counts[i]
	}
}

// quantile is the least latency that at least the share q of the calls did not
// exceed, rounded up; false while too few calls are known.
func (l *latencies) quantile(q float64) (time.Duration, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total < samplesFor(q) {
		return 0, false
	}
	rank := uint32(math.Ceil(q * float64(l.total)))
	for i := range l.counts {
		if l.counts[i] >= rank {
			return bucketEnd(i), true
		}
		rank -= l.counts[i]
	}
	return latencyLongest, true
}

// samplesFor is how many calls have to be known to tell the quantile q.
func samplesFor(q float64) uint32 {
	return max(minSamples, uint32(min(math.Round(minBeyond/(1-q)), math.MaxInt32)))
}

// bucketOf is the bucket of a latency: up to 16 µs there is one for each
// microsecond, and from there on eight for each power of two.
func bucketOf(d time.Duration) int {
	us := uint64(min(max(d, 0), latencyLongest) / time.Microsecond)
	shift := max(bits.Len64(us)-latencyBits-1, 0)
	return shift<<latencyBits + int(us>>shift)
}

// bucketEnd is the shortest latency beyond the bucket.
func bucketEnd(i int) time.Duration {
	shift := max(i>>latencyBits-1, 0)
	return time.Duration(i-shift<<latencyBits+1) << shift * time.Microsecond
}
