package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// A Cost says why an extra attempt (a retry, a resumption or a hedge) is
// asked for, and thereby what a [Budget] takes for it. The zero value is no
// cost at all: every budget that limits refuses it.
type Cost uint8

const (
	// CostTransient is a retry after a failure that says nothing about load,
	// such as UNAVAILABLE, also when the server refused the attempt before
	// it processed anything.
	CostTransient Cost = iota + 1
	// CostTimeout is a retry after our own attempt timeout. It is dearer than
	// CostTransient because the server may still be at work on the attempt
	// that was abandoned.
	CostTimeout
	// CostOverload is a retry after RESOURCE_EXHAUSTED.
	CostOverload
	// CostInvited is a retry that the server asked for: grpc-retry-pushback-ms
	// with a value of 0 or more.
	CostInvited
	// CostUnsent is a retry after an attempt that provably never reached a
	// server.
	CostUnsent
	// CostHedge is a hedge. Hedges are paid for from funds of their own, so
	// that they never use up what retries need.
	CostHedge
	// CostResume is the resumption of a committed server stream.
	CostResume

	costEnd // one past the last valid Cost
)

// valid reports whether c is one of the constants.
func (c Cost) valid() bool { return c >= CostTransient && c < costEnd }

// An Outcome is what [Budget.Record] is told about a finished attempt. The
// zero value, and any value that is not one of the constants, changes nothing.
type Outcome uint8

const (
	// OutcomeOK is a call whose first attempt succeeded.
	OutcomeOK Outcome = iota + 1
	// OutcomeExtraOK is a call that succeeded by a retry, a resumption or a
	// hedge.
	OutcomeExtraOK
	// OutcomeFailure is an attempt that failed with a code which the policy
	// retries, or whose server said "do not retry" by pushback. It is
	// recorded also when no attempt is left.
	OutcomeFailure
	// OutcomeHedgeUnneeded is a call under a hedging policy that was answered
	// before its first hedge was due. It pays for later hedges, and is
	// recorded besides the call's OutcomeOK.
	OutcomeHedgeUnneeded
)

// A Grant is the permission for one extra attempt, as [Budget.Reserve]
// returned it: a value that remembers what was taken from each of up to four
// budgets. It belongs to the Budget that made it. The zero value paid nothing.
type Grant struct{ paid [maxLeaves]uint32 }

// maxLeaves is how many budgets one [Grant] can remember, and so how many
// [AllOf] can join.
const maxLeaves = 4

// A Budget bounds the extra load that retries and hedges put on the servers.
// The budgets of this package are [TokenBudget], [Throttle], [AllOf] of these,
// and [Unlimited]; the interface is sealed and may grow.
//
// Every logical call is bracketed by Enter and Leave. After each finished
// attempt the outcome is recorded, before an extra attempt is reserved. Every
// Grant is followed by exactly one Release or one Settle, of the budget that
// made it.
//
// All methods are safe for concurrent use, never block and never allocate.
type Budget interface {
	// Enter notes that a logical call begins, and Leave that it has ended.
	// Leave comes last, after the call's Record, Release or Settle.
	Enter()
	Leave()
	// Record reports a finished attempt, or a call that needed no hedge. A
	// success is recorded once per logical call.
	Record(Outcome)
	// Reserve asks for one extra attempt, and takes its cost. It comes before
	// the wait, so that a call which may not retry does not wait in vain.
	Reserve(Cost) (Grant, bool)
	// Release gives back a grant that was not used: the wait was cancelled,
	// the attempt never started.
	Release(Grant)
	// Settle ends a grant that was used. If the extra attempt won, i.e.
	// completed its call, what was paid is refunded.
	Settle(g Grant, won bool)
	// Balance is the share of the capacity that is left, from 0 to 1.
	Balance() float64

	sealed()
	// state leaves Target and Method empty.
	state() BudgetState
	// retract is Release for a grant that is not to count as one, because
	// another budget refused.
	retract(Grant)
}

// A leaf is a budget that is not made of others.
type leaf interface {
	Budget
	take(Cost) (paid uint32, ok bool) // Reserve, for one slot of a Grant
	give(paid uint32)                 // Release, or Settle of a winner
	undo(paid uint32)                 // retract
}

// BudgetState is a snapshot of one budget. Its numbers are read one after the
// other, so calls that run meanwhile can show in some of them and not yet in
// others.
type BudgetState struct {
	// Target and Method say what the budget is for: the canonical name of a
	// target, or, of a [WithMethodBudget], the pattern of its full methods.
	Target, Method string
	// Balance is Tokens/Capacity, from 0 to 1.
	Balance float64
	// Tokens and Capacity count what the budget holds, and can hold at the
	// present number of calls in flight. Both are 0 for [Unlimited]. Of
	// several budgets joined by [AllOf], those of the one with the lowest
	// balance are shown.
	Tokens, Capacity float64
	// Granted and Refused count the extra attempts that were asked for, hedges
	// included, since the budget was made. Unlimited counts none.
	Granted, Refused uint64
	// InFlight is the number of calls between Enter and Leave. Only a
	// [TokenBudget] counts them.
	InFlight int64
}

// BudgetConfig configures a [TokenBudget]. The zero value of every field means
// its default. Amounts are in tokens and kept in steps of 1/64: costs are
// rounded up, everything else down, so that rounding never adds load.
type BudgetConfig struct {
	// Capacity is what the budget starts with, and the least that it can
	// hold: 70 by default, which is ten retries. It is at least 1 and as large
	// as the largest of Costs, and at most 1048575.
	Capacity float64
	// PerCall is the capacity for each call in flight, where that is more
	// than Capacity: 10 by default, at most 1048575. The additional room is
	// empty; only successes fill it. Negative: the capacity is fixed.
	PerCall float64
	// Deposit is what a call earns whose first attempt succeeds: 1 by
	// default, from 1/64 to Capacity.
	Deposit float64
	// Costs are the prices of extra attempts.
	Costs BudgetCosts
	// FreeInterval is how often one extra attempt other than a hedge is
	// granted for nothing when the tokens do not suffice, so that a client
	// which only ever sees failures finds out that they have ended: 1 minute
	// by default, from 1 second to 24 hours. Negative: never.
	FreeInterval time.Duration
	// HedgeCapacity is what the separate funds for hedges start with and can
	// hold: 50 by default, at least 1 and HedgeCost, at most 1048575.
	HedgeCapacity float64
	// HedgeDeposit is what they earn from a call that was answered before its
	// hedge was due: 0.5 by default, from 1/64 to HedgeCapacity.
	HedgeDeposit float64
	// HedgeCost is what they pay for one hedge, and get back if that wins: 5 by
	// default, above 0.
	HedgeCost float64
}

// BudgetCosts are the prices of extra attempts in tokens, each from 0 to
// BudgetConfig.Capacity. The zero value of every field means its default.
type BudgetCosts struct {
	Transient float64 // CostTransient: 7 by default
	Timeout   float64 // CostTimeout: 14 by default
	Overload  float64 // CostOverload: 7 by default
	Invited   float64 // CostInvited: 4 by default
	Unsent    float64 // CostUnsent: 0 by default
	Resume    float64 // CostResume: 7 by default
}

// A TokenBudget is a [Budget] that is funded by success. A call whose first
// attempt succeeds deposits a token, an extra attempt costs several, and what
// it cost is refunded if it wins. When nothing succeeds, the budget runs dry
// and only the free retry remains. Its capacity follows the number of calls in
// flight, so that a client with many calls in flight can retry all of those
// that one failing server takes with it.
//
// However calls and attempts interleave, with the defaults and S1 first
// attempts that succeeded
//
//	paid extra attempts that failed <= (70 + S1) / 7
//
// per budget, plus one free retry a minute. (Divide by 4 where the server
// invites the retries by pushback; attempts that cost 0 and hedges are counted
// apart: hedges that do not win are at most 10 plus a tenth of the calls that
// needed none.)
//
// The zero value refuses every extra attempt; [NewBudget] makes one that
// grants.
type TokenBudget struct {
	limits atomic.Pointer[limits]
	base   time.Time  // the zero of the milliseconds in word
	mu     sync.Mutex // held by Rescale

	// What calls write lies on cache lines of its own, each written by as few
	// of them as possible.
	_        pad
	word     atomic.Uint64 // milliseconds<<tokenBits | tokens, see pack
	_        pad
	hedge    atomic.Uint64 // tokens of the hedges' funds
	_        pad
	inflight atomic.Int64
	_        pad
	tally
	_ pad
}

// pad keeps two fields from sharing a cache line, or a pair of lines that the
// processor fetches together, whatever the alignment of the struct.
type pad [128]byte

// A tally counts what Reserve answered.
type tally struct{ granted, refused atomic.Uint64 }

// count returns ok.
func (t *tally) count(ok bool) bool {
	if ok {
		t.granted.Add(1)
	} else {
		t.refused.Add(1)
	}
	return ok
}

// limits is a BudgetConfig that was checked and converted to units. It is
// immutable.
type limits struct {
	capacity, perCall, deposit  uint64
	costs                       [costEnd]uint32
	freeMillis                  uint64 // 0: never
	hedgeCapacity, hedgeDeposit uint64
}

// NewBudget returns a budget that holds c.Capacity tokens, and hedge funds
// that are full. The error names every field of c whose value is out of range.
func NewBudget(c BudgetConfig) (*TokenBudget, error) {
	l, err := c.limits()
	if err != nil {
		return nil, err
	}
	b := &TokenBudget{base: time.Now()}
	b.limits.Store(l)
	b.word.Store(l.capacity)
	b.hedge.Store(l.hedgeCapacity)
	return b, nil
}

// Enter implements [Budget].
func (b *TokenBudget) Enter() { b.inflight.Add(1) }

// Leave implements [Budget].
func (b *TokenBudget) Leave() { b.inflight.Add(-1) }

// Record implements [Budget]. OutcomeOK deposits into the budget and
// OutcomeHedgeUnneeded into the hedges' funds. The other outcomes change
// nothing: what a retry cost is refunded by Settle if it won.
func (b *TokenBudget) Record(o Outcome) {
	l := b.limits.Load()
	if l == nil {
		return
	}
	switch o {
	case OutcomeOK:
		b.deposit(l)
	case OutcomeHedgeUnneeded:
		add(&b.hedge, l.hedgeDeposit, l.hedgeCapacity)
	}
}

// Reserve implements [Budget]. A grant takes the configured cost, or nothing
// if it is the free retry.
func (b *TokenBudget) Reserve(c Cost) (g Grant, ok bool) {
	g.paid[0], ok = b.take(c)
	return g, ok
}

// Release implements [Budget]. It gives back what was paid, as far as the
// capacity allows. A free retry is not given back: the next is due a minute
// after it was granted.
func (b *TokenBudget) Release(g Grant) { b.give(g.paid[0]) }

// Settle implements [Budget]. A winner's cost is given back, as far as the
// capacity allows.
func (b *TokenBudget) Settle(g Grant, won bool) {
	if won {
		b.give(g.paid[0])
	}
}

// Balance implements [Budget]. It leaves out the hedges' funds.
func (b *TokenBudget) Balance() float64 {
	tokens, capacity := b.level()
	return share(tokens, capacity)
}

func (b *TokenBudget) sealed() {}

func (b *TokenBudget) retract(g Grant) { b.undo(g.paid[0]) }

func (b *TokenBudget) state() BudgetState {
	tokens, capacity := b.level()
	return BudgetState{
		Balance:  share(tokens, capacity),
		Tokens:   float64(tokens) / unit,
		Capacity: float64(capacity) / unit,
		Granted:  b.granted.Load(),
		Refused:  b.refused.Load(),
		InFlight: b.inflight.Load(),
	}
}

// Rescale puts c in force while calls run. A changed capacity scales the
// balance, so that the share which is left stays the same: a reload neither
// refills the budget nor empties it. Grants, counts and the time of the next
// free retry are kept. On an error, which names every field of c whose value is
// out of range, nothing changes; the zero TokenBudget has no limits to change.
func (b *TokenBudget) Rescale(c BudgetConfig) error {
	l, err := c.limits()
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.limits.Load()
	if old == nil {
		return errors.New("grpcretry: a TokenBudget that NewBudget did not make has no limits to change")
	}
	// A balance shrinks before its capacity and grows after it. Otherwise a
	// concurrent call could cut it to a capacity that it was not made for.
	if l.capacity < old.capacity {
		scale(&b.word, l.capacity, old.capacity)
	}
	if l.hedgeCapacity < old.hedgeCapacity {
		scale(&b.hedge, l.hedgeCapacity, old.hedgeCapacity)
	}
	b.limits.Store(l)
	if l.capacity > old.capacity {
		scale(&b.word, l.capacity, old.capacity)
	}
	if l.hedgeCapacity > old.hedgeCapacity {
		scale(&b.hedge, l.hedgeCapacity, old.hedgeCapacity)
	}
	return nil
}

// deposit adds what a success earns. A busy client is usually full and then
// neither writes nor looks at the clock. Tokens above the capacity are a bank
// that a client keeps between bursts: they are cut off by the next Reserve
// and not here, and only above twice the capacity do they slowly wear away.
func (b *TokenBudget) deposit(l *limits) {
	for {
		w := b.word.Load()
		tokens, capacity := w&tokenMask, b.capacity(l)
		var next uint64
		switch {
		case tokens < capacity:
			next = min(capacity, tokens+l.deposit)
		case tokens > 2*capacity:
			next = tokens - l.deposit
		default:
			return
		}
		if b.word.CompareAndSwap(w, w-tokens+next) {
			return
		}
	}
}

func (b *TokenBudget) take(c Cost) (paid uint32, ok bool) {
	l := b.limits.Load()
	switch {
	case l == nil || !c.valid():
		return 0, b.count(false)
	case c == CostHedge:
		paid, ok = l.costs[c], subtract(&b.hedge, uint64(l.costs[c]))
		if !ok {
			return 0, b.count(false)
		}
		return paid | fromHedge, b.count(true)
	case l.costs[c] == 0:
		return 0, b.count(true)
	}
	paid, ok = b.reserve(l, l.costs[c])
	return paid, b.count(ok)
}

// reserve takes cost from what is left within the capacity, which it reads
// anew in each round: a stale count of calls in flight decides only what is
// cut off, and never adds a token. The clock is read only when the tokens do
// not suffice, and nothing is written when nothing changes.
func (b *TokenBudget) reserve(l *limits, cost uint32) (paid uint32, ok bool) {
	for {
		w := b.word.Load()
		tokens, last := w&tokenMask, w>>tokenBits
		left := min(tokens, b.capacity(l))
		next, paid, ok := pack(last, left), uint32(0), false
		if left >= uint64(cost) {
			next, paid, ok = pack(last, left-uint64(cost)), cost, true
		} else if l.freeMillis > 0 {
			now := max(time.Since(b.base), 0)
			if elapsed(floorMillis(now), last) >= l.freeMillis {
				next, ok = pack(ceilMillis(now), left), true
			}
		}
		if next == w || b.word.CompareAndSwap(w, next) {
			return paid, ok
		}
	}
}

func (b *TokenBudget) give(paid uint32) {
	l := b.limits.Load()
	if l == nil || paid == 0 {
		return
	}
	if paid&fromHedge != 0 {
		add(&b.hedge, uint64(paid&^fromHedge), l.hedgeCapacity)
		return
	}
	for {
		w := b.word.Load()
		tokens, capacity := w&tokenMask, b.capacity(l)
		if tokens >= capacity || b.word.CompareAndSwap(w, w-tokens+min(capacity, tokens+uint64(paid))) {
			return
		}
	}
}

func (b *TokenBudget) undo(paid uint32) {
	b.give(paid)
	b.granted.Add(^uint64(0))
}

// capacity is max(Capacity, PerCall * calls in flight).
func (b *TokenBudget) capacity(l *limits) uint64 {
	if l.perCall == 0 {
		return l.capacity
	}
	n := uint64(min(max(b.inflight.Load(), 0), maxUnits))
	return max(l.capacity, min(n*l.perCall, maxUnits))
}

// level returns the units that Reserve would find, and their limit.
func (b *TokenBudget) level() (tokens, capacity uint64) {
	l := b.limits.Load()
	if l == nil {
		return 0, 0
	}
	capacity = b.capacity(l)
	return min(b.word.Load()&tokenMask, capacity), capacity
}

// limits checks c and converts it to units.
func (c BudgetConfig) limits() (*limits, error) {
	var errs []error
	// amount returns the value of a field or its default, if it is in range.
	amount := func(field string, v, deflt, least, most float64) float64 {
		if v == 0 {
			return deflt
		}
		if v >= least && v <= most { // false for NaN
			return v
		}
		errs = append(errs, fmt.Errorf("grpcretry: BudgetConfig.%s = %.12g, want %.12g to %.12g, or 0 for the default of %.12g",
			field, v, least, most, deflt))
		return deflt
	}
	// price is amount for a cost. A default that is above an explicit
	// capacity is the capacity's fault.
	var dearest struct {
		field string
		v     float64
	}
	price := func(field string, v, deflt, capacity float64) uint32 {
		if v == 0 && deflt > capacity {
			if deflt > dearest.v {
				dearest.field, dearest.v = field, deflt
			}
			return 0
		}
		if v == 0 {
			return uint32(deflt * unit)
		}
		if v > 0 && v <= capacity {
			return uint32(math.Ceil(v * unit))
		}
		errs = append(errs, fmt.Errorf("grpcretry: BudgetConfig.%s = %.12g, want above 0 and at most the capacity of %.12g, or 0 for the default of %.12g",
			field, v, capacity, deflt))
		return 0
	}
	affordable := func(field string, capacity float64) {
		if dearest.v > 0 {
			errs = append(errs, fmt.Errorf("grpcretry: BudgetConfig.%s = %.12g, want %.12g (the default of %s) to %d",
				field, capacity, dearest.v, dearest.field, maxTokens))
			dearest.v = 0
		}
	}

	var l limits
	capacity := amount("Capacity", c.Capacity, 70, 1, maxTokens)
	l.capacity = uint64(capacity * unit)
	if !(c.PerCall < 0) {
		l.perCall = uint64(amount("PerCall", c.PerCall, 10, 1/unit, maxTokens) * unit)
	}
	l.deposit = uint64(amount("Deposit", c.Deposit, 1, 1/unit, capacity) * unit)
	l.costs[CostTransient] = price("Costs.Transient", c.Costs.Transient, 7, capacity)
	l.costs[CostTimeout] = price("Costs.Timeout", c.Costs.Timeout, 14, capacity)
	l.costs[CostOverload] = price("Costs.Overload", c.Costs.Overload, 7, capacity)
	l.costs[CostInvited] = price("Costs.Invited", c.Costs.Invited, 4, capacity)
	l.costs[CostUnsent] = price("Costs.Unsent", c.Costs.Unsent, 0, capacity)
	l.costs[CostResume] = price("Costs.Resume", c.Costs.Resume, 7, capacity)
	affordable("Capacity", capacity)

	switch d := c.FreeInterval; {
	case d == 0:
		l.freeMillis = 60_000
	case d >= time.Second && d <= maxFreeInterval:
		l.freeMillis = ceilMillis(d)
	case d > 0:
		errs = append(errs, fmt.Errorf("grpcretry: BudgetConfig.FreeInterval = %v, want %v to %v, 0 for the default of 1m0s, or negative for never",
			d, time.Second, maxFreeInterval))
	}

	capacity = amount("HedgeCapacity", c.HedgeCapacity, 50, 1, maxTokens)
	l.hedgeCapacity = uint64(capacity * unit)
	l.hedgeDeposit = uint64(amount("HedgeDeposit", c.HedgeDeposit, 0.5, 1/unit, capacity) * unit)
	l.costs[CostHedge] = price("HedgeCost", c.HedgeCost, 5, capacity)
	affordable("HedgeCapacity", capacity)

	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &l, nil
}

// The word of a TokenBudget: units of 1/64 token in the low bits, and above
// them the milliseconds from its making to the last free retry. The
// milliseconds wrap after 8.7 years.
const (
	tokenBits  = 26
	tokenMask  = 1<<tokenBits - 1
	millisMask = 1<<(64-tokenBits) - 1
	unit       = 64.0
	maxTokens  = 1<<20 - 1
	maxUnits   = maxTokens * 64

	maxFreeInterval = 24 * time.Hour

	// fromHedge marks, in a Grant, what the hedges' funds paid.
	fromHedge = 1 << 31
)

// pack builds a word. Neither argument may exceed its bits, save that
// milliseconds wrap.
func pack(millis, tokens uint64) uint64 { return millis<<tokenBits | tokens }

// elapsed is the time from last to now, both modulo millisMask+1. A now that
// is before last by up to a day counts as the same moment.
func elapsed(now, last uint64) uint64 {
	d := (now - last) & millisMask
	if d > millisMask-uint64(maxFreeInterval/time.Millisecond) {
		return 0
	}
	return d
}

// add adds n units to w, which holds tokens alone, up to capacity.
func add(w *atomic.Uint64, n, capacity uint64) {
	for {
		t := w.Load()
		if t >= capacity || w.CompareAndSwap(t, min(capacity, t+n)) {
			return
		}
	}
}

// subtract takes n units from w, which holds tokens alone, if it has them.
func subtract(w *atomic.Uint64, n uint64) bool {
	for {
		t := w.Load()
		if t < n {
			return false
		}
		if w.CompareAndSwap(t, t-n) {
			return true
		}
	}
}

// scale multiplies the tokens in w by to/from, rounding down.
func scale(w *atomic.Uint64, to, from uint64) {
	for {
		old := w.Load()
		t := old & tokenMask
		if w.CompareAndSwap(old, old-t+min(t*to/from, maxUnits)) {
			return
		}
	}
}

// share is tokens/capacity within 0 and 1.
func share(tokens, capacity uint64) float64 {
	if capacity == 0 {
		return 0
	}
	return min(1, float64(tokens)/float64(capacity))
}

// floorMillis and ceilMillis round d to milliseconds. The time of a free retry
// is rounded up and the present down, so that none is granted too soon.
func floorMillis(d time.Duration) uint64 { return uint64(d / time.Millisecond) }

func ceilMillis(d time.Duration) uint64 {
	return uint64((d + time.Millisecond - 1) / time.Millisecond)
}
