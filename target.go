package grpcretry

import (
	"cmp"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
)

const (
	// maxTargets is how many targets a Retrier keeps. One more, and the 256
	// used least recently are forgotten together, so that looking for them
	// costs little for each target that comes.
	maxTargets = 4096
	// maxSpellings is how many names, by which one target was dialled, lead to
	// it directly.
	maxSpellings = 8
)

// target is what a Retrier keeps for one canonical target, over reconnects,
// resolver updates and changes of policy.
type target struct {
	name      string // canonical
	number    uint64 // counts the targets made before it
	budget    Budget
	swallowed atomic.Bool // the log has told that calls to it lose our call options

	// inflight counts the calls between enter and leave. The default budget,
	// which is nobody else's, does so already; for others it is counted here.
	inflight interface{ Load() int64 }
	counter  *counter    // nil with the default budget,
	own      *swapBudget // which this is

	used      atomic.Uint64 // how many targets had been made when it was last entered
	forgotten atomic.Bool   // nobody may enter: another takes its place
	spellings []string      // the names dialled that lead to it; guarded by targets.mu
}

// counter is an atomic.Int64 on a cache line of its own.
type counter struct {
	_ pad
	atomic.Int64
	_ pad
}

func newTarget(name string, number uint64, budget Budget) *target {
	x := &target{name: name, number: number, budget: budget}
	if budget == nil {
		x.own = &swapBudget{TokenBudget: defaultBudget()}
		x.budget, x.inflight = x.own, &x.own.inflight
		return x
	}
	x.counter = new(counter)
	x.inflight = x.counter
	return x
}

func (x *target) enter() {
	if x.counter != nil {
		x.counter.Add(1)
	}
	x.budget.Enter()
}

func (x *target) leave() {
	x.budget.Leave()
	if x.counter != nil {
		x.counter.Add(-1)
	}
}

// dialed is a target under one of the names that it was dialled by.
type dialed struct {
	name   string
	target *target
}

// targets finds the target of a ClientConn. It holds no ClientConn, so closed
// ones are not kept alive.
//
// A name is looked for in three places, of which the first two are read
// without a lock and written only when a target comes or two names share a
// slot: most clients have one target, most of the others a few dozen.
type targets struct {
	newBudget func(string) Budget // nil: the default budget
	onNew     func(*target)
	limit     int // maxTargets but in tests
	seed      maphash.Seed

	newest atomic.Pointer[dialed]
	slots  [64]atomic.Pointer[dialed] // by hash of the name
	made   atomic.Uint64              // targets so far

	_       pad // readers of mu write to it
	adding  sync.Mutex
	limits  *throttleLimits // of the budgets that are nobody else's; guarded by adding
	mu      sync.RWMutex
	byName  map[string]*dialed // as dialled
	byCanon map[string]*target
	sweepAt int // more targets than these are too many
}

// init prepares the zero value.
func (t *targets) init(newBudget func(string) Budget, onNew func(*target)) {
	t.newBudget, t.onNew = newBudget, onNew
	t.limit, t.sweepAt = maxTargets, maxTargets
	t.seed = maphash.MakeSeed()
	t.byName, t.byCanon = map[string]*dialed{}, map[string]*target{}
}

// enter finds the target and notes that a call to it begins, until whose leave
// it is not forgotten. The name is that by which cc was dialled. Without a cc
// it is canonical: "" for fakes and in-process channels, or that of some work.
func (t *targets) enter(name string, cc *grpc.ClientConn) *target {
	for {
		x := t.find(name, cc)
		x.enter()
		// forget looks at the count after it has set the mark, and this looks
		// at the mark after it has counted, so at least one sees the other.
		if x.forgotten.Load() {
			x.leave()
			continue
		}
		if made := t.made.Load(); x.used.Load() != made {
			x.used.Store(made)
		}
		return x
	}
}

func (t *targets) find(name string, cc *grpc.ClientConn) *target {
	if d := t.newest.Load(); d.leadsFrom(name) {
		return d.target
	}
	slot := &t.slots[maphash.String(t.seed, name)%uint64(len(t.slots))]
	if d := slot.Load(); d.leadsFrom(name) {
		return d.target
	}
	t.mu.RLock()
	d := t.byName[name]
	t.mu.RUnlock()
	if d == nil {
		d = t.add(name, cc)
	}
	slot.Store(d)
	return d.target
}

// leadsFrom reports whether d is the target that was dialled as name, and
// still may be entered.
func (d *dialed) leadsFrom(name string) bool {
	return d != nil && d.name == name && !d.target.forgotten.Load()
}

// add finds the target by its canonical name, or makes it.
func (t *targets) add(name string, cc *grpc.ClientConn) *dialed {
	d, isNew := t.addOnce(name, cc)
	if isNew && t.onNew != nil {
		t.onNew(d.target)
	}
	return d
}

// addOnce calls newBudget, which is the user's, outside the lock that calls
// wait for, and once for each target.
func (t *targets) addOnce(name string, cc *grpc.ClientConn) (d *dialed, isNew bool) {
	t.adding.Lock()
	defer t.adding.Unlock()
	canonical := name
	if cc != nil {
		canonical = cc.CanonicalTarget()
	}
	t.mu.RLock()
	d, x := t.byName[name], t.byCanon[canonical]
	t.mu.RUnlock()
	if d != nil {
		return d, false
	}
	isNew = x == nil
	if isNew {
		var b Budget
		if t.newBudget != nil {
			if b = t.newBudget(canonical); budgetFault(b) != "" {
				b = nil
			}
		}
		x = newTarget(canonical, t.made.Load(), b)
		if x.own != nil {
			x.own.swap(t.limits)
		}
	}
	d = &dialed{name: name, target: x}

	t.mu.Lock()
	defer t.mu.Unlock()
	if len(x.spellings) == maxSpellings {
		delete(t.byName, x.spellings[0])
		x.spellings = x.spellings[1:]
	}
	x.spellings = append(x.spellings, name)
	t.byName[name] = d
	if isNew {
		t.byCanon[canonical] = x
		x.used.Store(t.made.Add(1))
		t.newest.Store(d)
		t.sweep(x)
	}
	return d, isNew
}

// sweep forgets the targets used least recently if there are too many, but
// none with calls in flight and not the newest, which is about to be entered.
// While so many have calls in flight that too few can go, it waits until a
// sixteenth has been added to them before it looks again. It requires mu.
func (t *targets) sweep(newest *target) {
	if len(t.byCanon) <= t.sweepAt {
		return
	}
	type entry struct {
		*target
		used uint64 // read once: calls go on while the list is sorted
	}
	oldest := make([]entry, 0, len(t.byCanon))
	for _, x := range t.byCanon {
		oldest = append(oldest, entry{x, x.used.Load()})
	}
	slices.SortFunc(oldest, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.number, b.number))
	})
	keep := t.limit - t.limit/16
	for _, x := range oldest {
		if len(t.byCanon) <= keep {
			break
		}
		if x.target != newest {
			t.forget(x.target)
		}
	}
	t.sweepAt = max(t.limit, len(t.byCanon)+t.limit/16)
}

// forget drops x unless calls to it are in flight.
func (t *targets) forget(x *target) {
	x.forgotten.Store(true)
	if x.inflight.Load() > 0 {
		x.forgotten.Store(false)
		return
	}
	delete(t.byCanon, x.name)
	for _, name := range x.spellings {
		delete(t.byName, name)
	}
}

// throttle makes the budgets that nobody else gave throttles with these limits,
// or default budgets if they are nil.
func (t *targets) throttle(limits *throttleLimits) {
	t.adding.Lock()
	defer t.adding.Unlock()
	t.limits = limits
	for _, x := range t.all() {
		if x.own != nil {
			x.own.swap(limits)
		}
	}
}

// all are the targets kept, in the order of their names.
func (t *targets) all() []*target {
	t.mu.RLock()
	all := make([]*target, 0, len(t.byCanon))
	for _, x := range t.byCanon {
		all = append(all, x)
	}
	t.mu.RUnlock()
	slices.SortFunc(all, func(a, b *target) int { return cmp.Compare(a.name, b.name) })
	return all
}

// defaultBudget is the budget of a target for which nothing else was asked.
func defaultBudget() *TokenBudget {
	b, _ := NewBudget(BudgetConfig{}) // the zero config is valid
	return b
}
