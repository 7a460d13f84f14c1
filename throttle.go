package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
)

// A Throttle is a [Budget] with the rules of gRPC's own retry throttling, for
// a service config's retryThrottling block that is to go on working as it did:
// it starts with maxTokens, every counted failure takes 1, every call that
// succeeds adds tokenRatio, and an extra attempt is granted only while more
// than half of maxTokens is left. Extra attempts themselves cost nothing.
//
// Unlike the one inside a ClientConn, which every update of the resolver
// refills, it keeps its balance for as long as it lives.
//
// It turns retries off at a rate of failures of about tokenRatio/(1 +
// tokenRatio), which one bad server among eight can reach at the usual ratio of
// 0.1; [TokenBudget] does not have that fault.
//
// The zero value refuses every extra attempt; [NewThrottle] makes one that
// grants. See gRFC A6, section "Throttling Retry Attempts and Hedged RPCs".
type Throttle struct {
	_    pad
	word atomic.Uint64 // packed throttleState
	_    pad
	tally
	_ pad
}

// throttleState is what a Throttle holds. It is one word, so that new limits
// and the balance scaled to them take effect together.
type throttleState struct {
	tokens uint64 // thousandths, 0 to 1000*max
	ratio  uint64 // thousandths, up to 1000*max: more would fill it just the same
	max    uint64 // whole tokens, 1 to maxThrottleTokens
}

// maxThrottleTokens is the largest maxTokens that gRFC A6 allows.
const maxThrottleTokens = 1000

// NewThrottle returns a full throttle. maxTokens is from 1 to 1000 and
// tokenRatio at least 0.001; its decimals after the third are cut off. The
// error names each value that is out of range.
func NewThrottle(maxTokens int, tokenRatio float64) (*Throttle, error) {
	s, err := newThrottleState(maxTokens, tokenRatio)
	if err != nil {
		return nil, err
	}
	t := new(Throttle)
	t.word.Store(s.pack())
	return t, nil
}

// Enter implements [Budget]. A Throttle does not count calls in flight.
func (t *Throttle) Enter() {}

// Leave implements [Budget].
func (t *Throttle) Leave() {}

// Record implements [Budget]. Either success adds tokenRatio, and
// OutcomeFailure takes 1 token, within 0 and maxTokens.
func (t *Throttle) Record(o Outcome) {
	if o != OutcomeOK && o != OutcomeExtraOK && o != OutcomeFailure {
		return
	}
	for {
		w := t.word.Load()
		s := unpackThrottle(w)
		if o == OutcomeFailure {
			s.tokens -= min(s.tokens, 1000)
		} else {
			s.tokens = min(s.tokens+s.ratio, 1000*s.max)
		}
		if next := s.pack(); next == w || t.word.CompareAndSwap(w, next) {
			return
		}
	}
}

// Reserve implements [Budget]. It takes nothing. The failure that leads to
// the extra attempt was recorded before, so it has been counted.
func (t *Throttle) Reserve(c Cost) (Grant, bool) {
	_, ok := t.take(c)
	return Grant{}, ok
}

// Release implements [Budget]. There is nothing to give back.
func (t *Throttle) Release(Grant) {}

// Settle implements [Budget]. There is nothing to give back.
func (t *Throttle) Settle(Grant, bool) {}

// Balance implements [Budget]. Extra attempts are granted above 0.5.
func (t *Throttle) Balance() float64 {
	s := unpackThrottle(t.word.Load())
	return share(s.tokens, 1000*s.max)
}

func (t *Throttle) sealed() {}

func (t *Throttle) retract(Grant) { t.undo(0) }

func (t *Throttle) state() BudgetState {
	s := unpackThrottle(t.word.Load())
	return BudgetState{
		Balance:  share(s.tokens, 1000*s.max),
		Tokens:   float64(s.tokens) / 1000,
		Capacity: float64(s.max),
		Granted:  t.granted.Load(),
		Refused:  t.refused.Load(),
	}
}

// Rescale puts new limits in force while calls run; their ranges are those of
// [NewThrottle]. The share of the tokens that is left stays the same, so a
// reload neither turns retries on nor off. On an error nothing changes; the
// zero Throttle has no limits to change.
func (t *Throttle) Rescale(maxTokens int, tokenRatio float64) error {
	s, err := newThrottleState(maxTokens, tokenRatio)
	if err != nil {
		return err
	}
	for {
		w := t.word.Load()
		old := unpackThrottle(w)
		if old.max == 0 {
			return errors.New("grpcretry: a Throttle that NewThrottle did not make has no limits to change")
		}
		s.tokens = old.tokens * s.max / old.max
		if t.word.CompareAndSwap(w, s.pack()) {
			return nil
		}
	}
}

func (t *Throttle) take(c Cost) (paid uint32, ok bool) {
	s := unpackThrottle(t.word.Load())
	return 0, t.count(c.valid() && s.tokens > 500*s.max)
}

func (t *Throttle) give(uint32) {}

func (t *Throttle) undo(uint32) { t.granted.Add(^uint64(0)) }

// newThrottleState checks the limits and returns the state of a full throttle.
func newThrottleState(maxTokens int, tokenRatio float64) (throttleState, error) {
	var errs []error
	if maxTokens < 1 || maxTokens > maxThrottleTokens {
		errs = append(errs, fmt.Errorf("grpcretry: maxTokens = %d, want 1 to %d", maxTokens, maxThrottleTokens))
	}
	if !(tokenRatio >= 0.001) || math.IsInf(tokenRatio, 1) { // also NaN
		errs = append(errs, fmt.Errorf("grpcretry: tokenRatio = %v, want a number of at least 0.001", tokenRatio))
	}
	if err := errors.Join(errs...); err != nil {
		return throttleState{}, err
	}
	m := uint64(maxTokens)
	return throttleState{tokens: 1000 * m, ratio: min(thousandths(tokenRatio), 1000*m), max: m}, nil
}

// thousandths is 1000*f, cut to a whole number and to the largest number of
// tokens. It goes by the decimal digits of f: 1000*1.001 is less than 1001 in
// floating point.
func thousandths(f float64) uint64 {
	if f >= maxThrottleTokens {
		return 1000 * maxThrottleTokens
	}
	whole, fraction, _ := strings.Cut(strconv.FormatFloat(f, 'f', -1, 64), ".")
	n, _ := strconv.ParseUint(whole+(fraction + "000")[:3], 10, 64) // digits only
	return n
}

// A packed throttleState has the tokens in bits 0 to 19, the ratio in 20 to 39
// and the maximum in 40 to 49: all three fit, being at most 1000000, 1000000
// and 1000.
func (s throttleState) pack() uint64 { return s.max<<40 | s.ratio<<20 | s.tokens }

func unpackThrottle(w uint64) throttleState {
	return throttleState{tokens: w & (1<<20 - 1), ratio: w >> 20 & (1<<20 - 1), max: w >> 40}
}
