package grpcretry

import (
	"cmp"
	"slices"
	"strings"
)

// child is the budget of a method, or of the methods of a service, beside that
// of the target.
type child struct {
	pattern string // "/pkg.Service/Method" or "/pkg.Service/*"
	budget  Budget
}

// Budgets tells the state of every budget that calls are charged to, for
// debugging, metrics and tests: one entry for each target that is kept (see
// [WithBudgetPerTarget]), under its canonical name, and one for each
// [WithMethodBudget], whose Target is empty and whose Method is the pattern,
// "/pkg.Service/Method" or "/pkg.Service/*". They are sorted by Target, then
// Method. Calls without a ClientConn count as calls to the target "".
//
// A target appears with its first call. A budget that several targets share is
// listed under each of them.
func (r *Retrier) Budgets() []BudgetState {
	var states []BudgetState
	for _, x := range r.targets.all() {
		s := x.budget.state()
		s.Target = x.name
		states = append(states, s)
	}
	for _, c := range r.set.Load().children {
		s := c.budget.state()
		s.Method = c.pattern
		states = append(states, s)
	}
	slices.SortFunc(states, func(a, b BudgetState) int {
		return cmp.Or(strings.Compare(a.Target, b.Target), strings.Compare(a.Method, b.Method))
	})
	return states
}

// scope is what one call is charged to: the budget of its target and, if its
// method has one, a child; both must grant. Its verbs are those of [Budget].
type scope struct {
	target *target
	child  Budget // nil: none
}

// permit is a scope's Grant.
type permit struct{ target, child Grant }

// enter is where the scope of a call begins; x has been entered already.
func (c *child) enter(x *target) scope {
	if c == nil {
		return scope{target: x}
	}
	c.budget.Enter()
	return scope{x, c.budget}
}

func (s scope) Leave() {
	if s.child != nil {
		s.child.Leave()
	}
	s.target.leave()
}

func (s scope) Record(o Outcome) {
	if s.child != nil {
		s.child.Record(o)
	}
	s.target.budget.Record(o)
}

// Reserve asks the child first, which serves fewer calls and so is the likelier
// to refuse. What it gave goes back if the target refuses.
func (s scope) Reserve(c Cost) (p permit, ok bool) {
	if s.child != nil {
		if p.child, ok = s.child.Reserve(c); !ok {
			return permit{}, false
		}
	}
	if p.target, ok = s.target.budget.Reserve(c); !ok && s.child != nil {
		s.child.retract(p.child)
		return permit{}, false
	}
	return p, ok
}

func (s scope) Release(p permit) {
	if s.child != nil {
		s.child.Release(p.child)
	}
	s.target.budget.Release(p.target)
}

func (s scope) Settle(p permit, won bool) {
	if s.child != nil {
		s.child.Settle(p.child, won)
	}
	s.target.budget.Settle(p.target, won)
}

// Balance is the lower of the two.
func (s scope) Balance() float64 {
	b := s.target.budget.Balance()
	if s.child != nil {
		b = min(b, s.child.Balance())
	}
	return b
}
