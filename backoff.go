package grpcretry

import (
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"time"
)

// What the zero fields of a [Backoff] stand for.
const (
	defaultBackoffBase       = 50 * time.Millisecond
	defaultBackoffMax        = 2 * time.Second
	defaultBackoffMultiplier = 2
	defaultBackoffOverload   = time.Second
	defaultBackoffMaxHint    = time.Minute
)

// Backoff says how long to wait before a retry. The zero value waits up to
// 50 ms before the first retry, doubles that for each further one up to 2 s, and
// draws every wait evenly from zero to that bound ([FullJitter]).
//
// Retries are counted from 1, and from 1 again after the server's pushback; the
// exponential delay before one of them is
//
//	exp = min(Base * pow(Multiplier, retry-1), Max)
//
// of which Jitter makes the delay. With [ProportionalJitter] of 0.2 that is the
// delay of gRFC A6, [Exponential Backoff]: the cap first, then 20% either way.
//
// A Backoff holds no state: one value may serve any number of calls at once.
//
// [Exponential Backoff]: https://github.com/grpc/proposal/blob/master/A6-client-retries.md#exponential-backoff
type Backoff struct {
	// Base is the exponential delay before the first retry. 0 means 50 ms, or
	// Max if that is set and shorter. A negative Base, and one above a Max that
	// is set, is refused.
	Base time.Duration

	// Max is the largest exponential delay. 0 means 2 s, or Base if that is
	// longer: delays then do not grow until Max is set too. A negative Max is
	// refused.
	Max time.Duration

	// Multiplier is the factor from one exponential delay to the next, finite
	// and above 0. 0 means 2; 1 gives constant delays. [DecorrelatedJitter]
	// does not use it.
	Multiplier float64

	// Jitter spreads the delays, so that clients that failed together do not
	// come back together. The zero value is [FullJitter].
	Jitter Jitter

	// Overload is the least wait after RESOURCE_EXHAUSTED that came without a
	// positive hint from the server; the delay is added to it. 0 means 1 s, and
	// 1 ns is as good as none; a negative value is refused.
	Overload time.Duration

	// MaxHint is the longest wait that the server may ask for: a longer hint
	// ends the call instead of blocking it. 0 means 1 minute; a negative value
	// is refused.
	MaxHint time.Duration

	// Func, if not nil, takes the place of the formula, the jitter and the cap.
	// It is given the number of the retry, the result for the retry before it (0
	// for the first), and the attempt that failed; a result below 0 counts as 0.
	// Overload and MaxHint stay in force. It runs on the caller's goroutine,
	// possibly for many calls at once.
	Func func(retry int, previous time.Duration, a Attempt) time.Duration
}

// Delay returns one delay: the wait before the given retry, counted from 1 (less
// counts as 1), after a wait of previous before the retry that came before it.
// Only [DecorrelatedJitter] and Func look at previous. The result is never
// negative and does not overflow, whatever the retry.
//
// Delay serves loops of one's own; calls through a [Retrier] need no call of it.
// It cannot report an error: a Backoff that [New] refuses waits like Backoff{}, so
// that a mistake does not become a loop without waits. Func is given an Attempt
// that is zero. Delay may be called from many goroutines at once.
func (b Backoff) Delay(retry int, previous time.Duration) time.Duration {
	var f faults
	if b.validate(&f); f.err() != nil {
		b = Backoff{Func: b.Func}
	}
	b = b.withDefaults()
	var a Attempt
	return b.next(max(retry, 1), previous, &a, rand.Float64)
}

// Delays returns the delays of one call in order, without end: each is [Backoff.Delay]
// of the next retry after the delay before it. Every range over the sequence
// starts again with the first retry, and may run beside others.
func (b Backoff) Delays() iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		var previous time.Duration
		for retry := 1; ; retry++ {
			previous = b.Delay(retry, previous)
			if !yield(previous) {
				return
			}
		}
	}
}

// String describes b with its defaults filled in, for logs and people; the text
// may change.
func (b Backoff) String() string {
	b = b.withDefaults()
	delay := "given by Func"
	if b.Func == nil {
		delay = fmt.Sprintf("%v times %v up to %v, %v", b.Base, b.Multiplier, b.Max, b.Jitter)
	}
	overload := b.Overload.String()
	if b.Overload <= time.Nanosecond {
		overload = "like any failure" // the least that can be asked for
	}
	return fmt.Sprintf("%s; overload %s; hints up to %v", delay, overload, b.MaxHint)
}

// withDefaults returns b with every zero field replaced by what it stands for.
func (b Backoff) withDefaults() Backoff {
	switch {
	case b.Base == 0 && b.Max == 0:
		b.Base, b.Max = defaultBackoffBase, defaultBackoffMax
	case b.Base == 0:
		b.Base = min(defaultBackoffBase, b.Max)
	case b.Max == 0:
		b.Max = max(defaultBackoffMax, b.Base)
	}
	if b.Multiplier == 0 {
		b.Multiplier = defaultBackoffMultiplier
	}
	if b.Overload == 0 {
		b.Overload = defaultBackoffOverload
	}
	if b.MaxHint == 0 {
		b.MaxHint = defaultBackoffMaxHint
	}
	return b
}

// validate adds every fault of b, each naming its field, the value and what is accepted.
func (b Backoff) validate(f *faults) {
	if b.Base < 0 {
		f.add("Policy.Backoff.Base = %v, want 0 (default %v) or more", b.Base, defaultBackoffBase)
	}
	if b.Max < 0 {
		f.add("Policy.Backoff.Max = %v, want 0 (default %v) or more", b.Max, defaultBackoffMax)
	}
	if b.Max > 0 && b.Base > b.Max {
		f.add("Policy.Backoff.Base = %v, want at most Max = %v", b.Base, b.Max)
	}
	if m := b.Multiplier; m != 0 && !(m > 0 && m <= math.MaxFloat64) {
		f.add("Policy.Backoff.Multiplier = %v, want 0 (default %v) or a finite number above 0", m, defaultBackoffMultiplier)
	}
	if want := b.Jitter.want(); want != "" {
		f.add("Policy.Backoff.Jitter = %v, want %s", b.Jitter, want)
	}
	if b.Overload < 0 {
		f.add("Policy.Backoff.Overload = %v, want 0 (default %v) or more", b.Overload, defaultBackoffOverload)
	}
	if b.MaxHint < 0 {
		f.add("Policy.Backoff.MaxHint = %v, want 0 (default %v) or more", b.MaxHint, defaultBackoffMaxHint)
	}
}

// next returns the wait before the given retry, which follows attempt a: what
// Func says, and without one the delay. It runs before anything is reserved for
// the retry, so that a panic of Func costs nothing.
func (b *Backoff) next(retry int, previous time.Duration, a *Attempt, random func() float64) time.Duration {
	if b.Func != nil {
		return max(b.Func(retry, previous, *a), 0)
	}
	return b.delay(retry, previous, random)
}

// delay returns the wait before the given retry, counted from 1, with random
// drawing from [0, 1). It is pure, and expects a b that went through withDefaults.
// Production draws from the global source of math/rand/v2, which has no lock
// and no seed to choose.
func (b *Backoff) delay(retry int, previous time.Duration, random func() float64) time.Duration {
	lo, hi, limit := b.spread(retry, previous)
	return toDuration(lo+random()*(hi-lo), limit) // rounding cannot pass hi: the draw is at most 1 - 1/2^53
}

// spread returns the bounds in nanoseconds between which the delay is drawn
// evenly, and what it is cut to afterwards.
func (b *Backoff) spread(retry int, previous time.Duration) (lo, hi float64, limit time.Duration) {
	base := float64(b.Base)
	exp := min(base*math.Pow(b.Multiplier, float64(max(retry, 1)-1)), float64(b.Max))
	switch j := b.Jitter; j.kind() {
	case EqualJitter:
		return exp / 2, exp, b.Max
	case DecorrelatedJitter:
		if retry <= 1 {
			previous = b.Base
		}
		return base, 3 * max(float64(previous), base), b.Max
	case proportionalJitter:
		return exp * (1 - j.fraction()), exp * (1 + j.fraction()), math.MaxInt64
	case additiveJitter:
		return exp, exp + float64(j.extra()), math.MaxInt64
	case NoJitter:
		return exp, exp, b.Max
	default: // FullJitter
		return 0, exp, b.Max
	}
}

// Jitter is how a [Backoff] makes the delay out of the exponential delay. The
// zero value is [FullJitter]. It is comparable with ==.
//
// Below, exp is the exponential delay (see [Backoff]), U(a, b) an even draw
// between a and b, and the tables give the shortest and the longest delay before
// each retry with a Base of 50 ms, a Multiplier of 2 and a Max of 2 s. How the kinds
// compare for clients that contend for one thing is told in [Exponential Backoff
// And Jitter]: full jitter needs the fewest calls.
//
// [Exponential Backoff And Jitter]: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
type Jitter int64 // the kind in the low 8 bits, its argument in the others

const (
	// FullJitter draws from zero up to the exponential delay. It is the default and
	// spreads clients best; a single delay may be close to zero.
	//
	//	delay = U(0, exp)
	//
	//	retry  1     2      3      4      5      6     7
	//	least  0s    0s     0s     0s     0s     0s    0s
	//	most   50ms  100ms  200ms  400ms  800ms  1.6s  2s
	FullJitter Jitter = iota

	// EqualJitter draws from the upper half of the exponential delay: it never waits
	// less than half of it, and so spreads half as far as [FullJitter].
	//
	//	delay = exp/2 + U(0, exp/2)
	//
	//	retry  1     2      3      4      5      6      7
	//	least  25ms  50ms   100ms  200ms  400ms  800ms  1s
	//	most   50ms  100ms  200ms  400ms  800ms  1.6s   2s
	EqualJitter

	// DecorrelatedJitter draws from Base up to three times the delay before it,
	// whatever the number of the retry; for the first retry, and after a delay shorter
	// than Base, previous is Base. Multiplier is not used.
	//
	//	delay = min(Max, U(Base, 3*previous))
	//
	//	retry  1      2      3      4     5     6     7
	//	least  50ms   50ms   50ms   50ms  50ms  50ms  50ms
	//	most   150ms  450ms  1.35s  2s    2s    2s    2s
	DecorrelatedJitter

	// NoJitter waits for the exponential delay exactly. Clients that failed together
	// come back together, so it suits tests and calls that nobody else makes.
	//
	//	delay = exp
	//
	//	retry  1     2      3      4      5      6     7
	//	least  50ms  100ms  200ms  400ms  800ms  1.6s  2s
	//	most   50ms  100ms  200ms  400ms  800ms  1.6s  2s
	NoJitter

	proportionalJitter
	additiveJitter
)

// ProportionalJitter draws from the exponential delay less and plus the given
// fraction f of it, in (0, 1] and kept in billionths; [New] refuses any other. It comes after the cap: a
// delay may be as long as Max * (1+f). A fraction of 0.2 is the jitter of gRFC A6
// and of grpc's own retries. With ProportionalJitter(0.2):
//
//	delay = exp * U(1-f, 1+f)
//
//	retry  1     2      3      4      5      6      7
//	least  40ms  80ms   160ms  320ms  640ms  1.28s  1.6s
//	most   60ms  120ms  240ms  480ms  960ms  1.92s  2.4s
func ProportionalJitter(f float64) Jitter {
	billionths := math.Round(f * jitterSteps)
	switch {
	case math.IsNaN(f):
		billionths = jitterNaN
	case f > 0:
		billionths = max(1, billionths)
	}
	return proportionalJitter | Jitter(max(-jitterLimit, min(billionths, jitterLimit)))<<jitterBits
}

// AdditiveJitter waits for the whole exponential delay, and up to d longer; d is
// more than 0, and [New] refuses any other. It comes after the cap: a delay may
// be as long as Max + d. It spreads clients over d and no further, however often
// they failed: a d that is short beside what they contend for helps little, and a
// long one makes each of them wait. With AdditiveJitter(100 * time.Millisecond):
//
//	delay = exp + U(0, d)
//
//	retry  1      2      3      4      5      6     7
//	least  50ms   100ms  200ms  400ms  800ms  1.6s  2s
//	most   150ms  200ms  300ms  500ms  900ms  1.7s  2.1s
func AdditiveJitter(d time.Duration) Jitter {
	return additiveJitter | Jitter(max(-jitterLimit, min(d, jitterLimit)))<<jitterBits
}

const (
	jitterBits  = 8
	jitterSteps = 1e9                    // a fraction is kept in billionths
	jitterLimit = 1 << (62 - jitterBits) // the largest argument, over 200 days
	jitterNaN   = -jitterLimit
)

func (j Jitter) kind() Jitter { return j & (1<<jitterBits - 1) }

func (j Jitter) fraction() float64 {
	if j>>jitterBits == jitterNaN {
		return math.NaN()
	}
	return float64(j>>jitterBits) / jitterSteps
}

func (j Jitter) extra() time.Duration { return time.Duration(j >> jitterBits) }

// String returns the expression that makes j, such as "ProportionalJitter(0.2)".
func (j Jitter) String() string {
	switch j.kind() {
	case FullJitter:
		return "FullJitter"
	case EqualJitter:
		return "EqualJitter"
	case DecorrelatedJitter:
		return "DecorrelatedJitter"
	case NoJitter:
		return "NoJitter"
	case proportionalJitter:
		return fmt.Sprintf("ProportionalJitter(%v)", j.fraction())
	case additiveJitter:
		return fmt.Sprintf("AdditiveJitter(%v)", j.extra())
	}
	return fmt.Sprintf("Jitter(%d)", int64(j))
}

// want says what j should have been, and is empty if it is good.
func (j Jitter) want() string {
	switch {
	case j >= FullJitter && j <= NoJitter:
		return ""
	case j.kind() == proportionalJitter:
		if f := j.fraction(); !(f > 0 && f <= 1) {
			return "a fraction above 0 and at most 1 (NoJitter is none at all)"
		}
		return ""
	case j.kind() == additiveJitter:
		if j.extra() <= 0 {
			return "a duration above 0 (NoJitter is none at all)"
		}
		return ""
	}
	return "one of the constants, ProportionalJitter or AdditiveJitter"
}

// toDuration rounds ns to the nearest nanosecond, cut to [0, limit]; what is not
// a number counts as 0. The comparison comes before the conversion, because
// converting a float64 that an int64 cannot hold has no defined result.
func toDuration(ns float64, limit time.Duration) time.Duration {
	if !(ns > 0) {
		return 0
	}
	if ns >= float64(limit) {
		return limit
	}
	return time.Duration(math.Round(ns))
}
