package grpcretry

import (
	"errors"
	"fmt"
	"slices"
)

// AllOf returns a budget that grants an extra attempt only if every one of b
// does, e.g. one for a target and one for a method of it. They are asked from
// left to right; when one refuses, those before it get back what they gave.
// Its Balance is the lowest of theirs.
//
// Budgets that are themselves made by AllOf are taken apart, and one that
// occurs twice is asked once; at most four may be left. The error names every
// entry that is nil or was not made by this package. An empty list is an error too, since it would limit
// nothing: [Unlimited] says that openly.
func AllOf(b ...Budget) (Budget, error) {
	var leaves []leaf
	var errs []error
	for i, one := range b {
		if fault := budgetFault(one); fault != "" {
			errs = append(errs, fmt.Errorf("grpcretry: AllOf: budget %d of %d is %s", i+1, len(b), fault))
			continue
		}
		leaves = append(leaves, leavesOf(one)...)
	}
	if len(b) == 0 {
		errs = append(errs, fmt.Errorf("grpcretry: AllOf: 0 budgets, want 1 to %d", maxLeaves))
	}
	var a allOf
	for _, l := range leaves {
		if !slices.Contains(a.leaves, l) {
			a.leaves = append(a.leaves, l)
		}
	}
	if n := len(a.leaves); n > maxLeaves {
		errs = append(errs, fmt.Errorf("grpcretry: AllOf: %d different budgets, want 1 to %d", n, maxLeaves))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	switch len(a.leaves) {
	case 0: // every entry was Unlimited
		return Unlimited(), nil
	case 1:
		return a.leaves[0], nil
	}
	return &a, nil
}

// budgetFault says why b cannot be used, and is empty if it can.
func budgetFault(b Budget) string {
	const want = "want a budget of this package"
	switch b := b.(type) {
	case nil:
		return "nil, " + want
	case *TokenBudget:
		if b == nil {
			return "a nil *TokenBudget, " + want
		}
		if b.limits.Load() == nil {
			return "a TokenBudget that NewBudget did not make, want one that it made"
		}
	case *Throttle:
		if b == nil {
			return "a nil *Throttle, " + want
		}
		if b.word.Load() == 0 {
			return "a Throttle that NewThrottle did not make, want one that it made"
		}
	case *allOf, unlimited:
	default: // something that embeds a Budget
		return fmt.Sprintf("a %T, %s", b, want)
	}
	return ""
}

// leavesOf takes a budget without a fault apart. Unlimited has none: it grants
// whatever the others grant.
func leavesOf(b Budget) []leaf {
	switch b := b.(type) {
	case *allOf:
		return b.leaves
	case leaf:
		return []leaf{b}
	}
	return nil
}

// shareLeaf reports whether the same budget is part of both; b may be nil.
func shareLeaf(a, b Budget) bool {
	return slices.ContainsFunc(leavesOf(a), func(l leaf) bool { return slices.Contains(leavesOf(b), l) })
}

// allOf joins two to maxLeaves different leaves.
type allOf struct {
	leaves []leaf
	_      pad
	tally
	_ pad
}

func (a *allOf) Enter() {
	for _, l := range a.leaves {
		l.Enter()
	}
}

func (a *allOf) Leave() {
	for _, l := range a.leaves {
		l.Leave()
	}
}

func (a *allOf) Record(o Outcome) {
	for _, l := range a.leaves {
		l.Record(o)
	}
}

func (a *allOf) Reserve(c Cost) (g Grant, ok bool) {
	for i, l := range a.leaves {
		if g.paid[i], ok = l.take(c); !ok {
			for j := range i {
				a.leaves[j].undo(g.paid[j])
			}
			return Grant{}, a.count(false)
		}
	}
	return g, a.count(true)
}

func (a *allOf) Release(g Grant) {
	for i, l := range a.leaves {
		l.give(g.paid[i])
	}
}

func (a *allOf) Settle(g Grant, won bool) {
	if won {
		a.Release(g)
	}
}

func (a *allOf) Balance() float64 {
	low := 1.0
	for _, l := range a.leaves {
		low = min(low, l.Balance())
	}
	return low
}

func (a *allOf) sealed() {}

func (a *allOf) retract(g Grant) {
	for i, l := range a.leaves {
		l.undo(g.paid[i])
	}
	a.granted.Add(^uint64(0))
}

func (a *allOf) state() (s BudgetState) {
	for i, l := range a.leaves {
		one := l.state()
		if i == 0 || one.Balance < s.Balance {
			s.Balance, s.Tokens, s.Capacity = one.Balance, one.Tokens, one.Capacity
		}
		s.InFlight = max(s.InFlight, one.InFlight)
	}
	s.Granted, s.Refused = a.granted.Load(), a.refused.Load()
	return s
}

// Unlimited returns a budget that grants everything. Extra load is then
// bounded by nothing but each call's own attempts, and an outage of the
// servers meets the full multiple of it.
func Unlimited() Budget { return unlimited{} }

type unlimited struct{}

func (unlimited) Enter()                     {}
func (unlimited) Leave()                     {}
func (unlimited) Record(Outcome)             {}
func (unlimited) Reserve(Cost) (Grant, bool) { return Grant{}, true }
func (unlimited) Release(Grant)              {}
func (unlimited) Settle(Grant, bool)         {}
func (unlimited) Balance() float64           { return 1 }
func (unlimited) sealed()                    {}
func (unlimited) retract(Grant)              {}
func (unlimited) state() BudgetState         { return BudgetState{Balance: 1} }
