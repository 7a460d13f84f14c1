package grpcretry

import "sync/atomic"

// swapBudget is the budget of a target for which nobody gave one: the default
// TokenBudget or, while a service config given in code has a retryThrottling, a
// Throttle in its place. What is left of one passes to the other, so that a
// new config never refills a budget.
//
// A Throttle takes nothing for a grant, and so what a call was granted by one of
// the two can be settled with the TokenBudget also after a swap. Calls in flight
// are always counted there.
type swapBudget struct {
	*TokenBudget
	throttle atomic.Pointer[Throttle] // nil: the TokenBudget counts
}

// swap puts a throttle with the limits in force, or the TokenBudget if they are
// nil. It must not run twice at once; calls may run meanwhile.
func (b *swapBudget) swap(limits *throttleLimits) {
	t := b.throttle.Load()
	switch {
	case limits == nil && t != nil:
		b.fill(t.usable())
		b.throttle.Store(nil)
	case limits != nil && t == nil:
		t, err := NewThrottle(limits.maxTokens, limits.tokenRatio)
		if err != nil { // cannot be: the config was checked
			return
		}
		t.fill(b.TokenBudget.Balance())
		b.throttle.Store(t)
	case limits != nil:
		_ = t.Rescale(limits.maxTokens, limits.tokenRatio) // checked as well
	}
}

// Record implements [Budget].
func (b *swapBudget) Record(o Outcome) {
	if t := b.throttle.Load(); t != nil {
		t.Record(o)
		return
	}
	b.TokenBudget.Record(o)
}

// Reserve implements [Budget].
func (b *swapBudget) Reserve(c Cost) (Grant, bool) {
	if t := b.throttle.Load(); t != nil {
		return t.Reserve(c)
	}
	return b.TokenBudget.Reserve(c)
}

// Balance implements [Budget].
func (b *swapBudget) Balance() float64 {
	if t := b.throttle.Load(); t != nil {
		return t.Balance()
	}
	return b.TokenBudget.Balance()
}

func (b *swapBudget) state() BudgetState {
	s := b.TokenBudget.state()
	if t := b.throttle.Load(); t != nil {
		calls := s.InFlight
		s = t.state()
		s.InFlight = calls
	}
	return s
}

// fill makes share the part of the capacity that is left, apart from the room
// that calls in flight make.
func (b *TokenBudget) fill(share float64) {
	tokens := uint64(share * float64(b.limits.Load().capacity))
	for {
		w := b.word.Load()
		if b.word.CompareAndSwap(w, w&^tokenMask|tokens) {
			return
		}
	}
}

// usable is the part of its tokens that a throttle can lose before it refuses,
// of what a full one could: it refuses with half of them.
func (t *Throttle) usable() float64 { return max(0, 2*t.Balance()-1) }

// fill makes share the usable part.
func (t *Throttle) fill(share float64) {
	for {
		w := t.word.Load()
		s := unpackThrottle(w)
		s.tokens = 500*s.max + uint64(share*float64(500*s.max))
		if t.word.CompareAndSwap(w, s.pack()) {
			return
		}
	}
}
