package grpcretry

import (
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
)

// target is what a Retrier keeps for one canonical target, over reconnects,
// resolver updates and changes of policy.
type target struct {
	name       string // canonical
	dialed     string // the first name it was dialled by
	budget     Budget
	distrusted atomic.Bool // calls to it lose our call options, so a missing peer proves nothing
}

// targets finds the target of a ClientConn. It holds no ClientConn, so closed
// ones are not kept alive.
type targets struct {
	newBudget func(string) Budget // nil: the default budget
	onNew     func(*target)

	latest atomic.Pointer[target] // most clients have one target
	mu     sync.RWMutex
	byName map[string]*target // by every name dialled, and by canonical name
}

// of returns the target of cc. A nil cc, which fakes and in-process channels
// pass, is a target of its own, named "".
func (t *targets) of(cc *grpc.ClientConn) *target {
	dialed := ""
	if cc != nil {
		dialed = cc.Target()
	}
	if x := t.latest.Load(); x != nil && x.dialed == dialed {
		return x
	}
	t.mu.RLock()
	x := t.byName[dialed]
	t.mu.RUnlock()
	if x == nil {
		x = t.add(dialed, cc)
	}
	if x.dialed == dialed {
		t.latest.Store(x)
	}
	return x
}

func (t *targets) add(dialed string, cc *grpc.ClientConn) *target {
	name := ""
	if cc != nil {
		name = cc.CanonicalTarget()
	}
	var budget Budget
	if t.newBudget != nil {
		budget = t.newBudget(name) // user code, so outside the lock
	}
	if unusable(budget) != "" {
		budget = defaultBudget()
	}
	x, isNew := t.keep(dialed, name, budget)
	if isNew && t.onNew != nil {
		t.onNew(x) // it logs, and a log handler may make calls of its own
	}
	return x
}

// keep stores the target, unless another call was faster.
func (t *targets) keep(dialed, name string, budget Budget) (x *target, isNew bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byName == nil {
		t.byName = map[string]*target{}
	}
	x = t.byName[dialed]
	if x == nil {
		x = t.byName[name]
	}
	if x == nil {
		x, isNew = &target{name: name, dialed: dialed, budget: budget}, true
		t.byName[name] = x
	}
	t.byName[dialed] = x
	return x, isNew
}

// defaultBudget is the budget of a target for which nothing else was asked.
func defaultBudget() Budget {
	b, _ := NewBudget(BudgetConfig{}) // the zero config is valid
	return b
}
