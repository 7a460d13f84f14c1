package grpcretry

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"pgregory.net/rapid"
)

func mustBudget(t testing.TB, c BudgetConfig) *TokenBudget {
	t.Helper()
	b, err := NewBudget(c)
	if err != nil {
		t.Fatalf("NewBudget(%+v): %v", c, err)
	}
	return b
}

// bank is what b holds, also above its present capacity.
func bank(b *TokenBudget) float64 { return float64(b.word.Load()&tokenMask) / unit }

// hedgeFunds is what b holds for hedges.
func hedgeFunds(b *TokenBudget) float64 { return float64(b.hedge.Load()) / unit }

// cost is what g took from the first budget, without the hedges' mark.
func (g Grant) cost() float64 { return float64(g.paid[0]&^fromHedge) / unit }

func enter(b Budget, n int) {
	for range n {
		b.Enter()
	}
}

func leave(b Budget, n int) {
	for range n {
		b.Leave()
	}
}

func record(b Budget, o Outcome, n int) {
	for range n {
		b.Record(o)
	}
}

// A step is one thing done to a budget, and what it must hold afterwards.
type step struct {
	do   string // see runSteps
	n    int
	want float64 // tokens held, also those above the capacity
}

// runSteps does n times what a step says. The words "ok", "extra", "failure"
// and "unneeded" record; "enter" and "leave" are calls; "transient", "timeout",
// ... reserve and must be granted, "no transient" ... must not; "lost", "won"
// and "release" end the oldest open grant; "sleep" passes n seconds.
func runSteps(t *testing.T, b *TokenBudget, held func(*TokenBudget) float64, steps []step) {
	t.Helper()
	outcomes := map[string]Outcome{"ok": OutcomeOK, "extra": OutcomeExtraOK, "failure": OutcomeFailure, "unneeded": OutcomeHedgeUnneeded}
	costs := map[string]Cost{"transient": CostTransient, "timeout": CostTimeout, "overload": CostOverload,
		"invited": CostInvited, "unsent": CostUnsent, "hedge": CostHedge, "resume": CostResume}
	var open []Grant
	for i, s := range steps {
		for range s.n {
			word, refused := strings.CutPrefix(s.do, "no ")
			if o, ok := outcomes[word]; ok {
				b.Record(o)
				continue
			}
			if c, ok := costs[word]; ok {
				g, granted := b.Reserve(c)
				if granted == refused {
					t.Fatalf("step %d, %s: granted = %v at %v tokens", i, s.do, granted, held(b))
				}
				if granted {
					open = append(open, g)
				}
				continue
			}
			switch word {
			case "enter":
				b.Enter()
			case "leave":
				b.Leave()
			case "sleep":
				time.Sleep(time.Second)
			case "release":
				b.Release(open[0])
				open = open[1:]
			case "won", "lost":
				b.Settle(open[0], word == "won")
				open = open[1:]
			default:
				t.Fatalf("step %d: what is %q?", i, s.do)
			}
		}
		if got := held(b); got != s.want {
			t.Fatalf("step %d, %s x %d: holds %v, want %v", i, s.do, s.n, got, s.want)
		}
	}
}

// Each table is a small history of one client; if its balance is off by one
// token anywhere, the published bound on extra load is not what users get.
func TestTokenBudgetSteps(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config BudgetConfig
		held   func(*TokenBudget) float64
		steps  []step
	}{{
		name: "ten retries to begin with, then none",
		steps: []step{
			{"transient", 1, 63},
			{"transient", 9, 0}, // the tenth takes the last 7
			{"no transient", 5, 0},
			{"lost", 10, 0},
			{"ok", 6, 6},
			{"no transient", 1, 6},
			{"ok", 1, 7}, // seven successes pay for one retry
			{"transient", 1, 0},
		},
	}, {
		name: "every cost has its price",
		steps: []step{
			{"transient", 1, 63}, // -7
			{"timeout", 1, 49},   // -14
			{"overload", 1, 42},  // -7
			{"invited", 1, 38},   // -4
			{"unsent", 100, 38},  // -0
			{"resume", 1, 31},    // -7
			{"hedge", 1, 31},     // from funds of their own
		},
	}, {
		name: "full at 70: deposits change nothing",
		steps: []step{
			{"ok", 1000, 70},
			{"transient", 1, 63},
			{"ok", 1000, 70},
		},
	}, {
		name: "only first attempts earn",
		steps: []step{
			{"timeout", 1, 56},
			{"extra", 9, 56},
			{"failure", 9, 56},
			{"unneeded", 9, 56},
			{"ok", 1, 57},
		},
	}, {
		name: "a winner is refunded, a loser is not, an unused grant is",
		steps: []step{
			{"transient", 3, 49},
			{"won", 1, 56},
			{"lost", 1, 56},
			{"release", 1, 63},
		},
	}, {
		name: "refunds stop at the capacity",
		steps: []step{
			{"transient", 2, 56},
			{"ok", 10, 66},
			{"won", 1, 70}, // 66 + 7, capacity 70
			{"release", 1, 70},
		},
	}, {
		name: "room for calls in flight is empty until it is earned",
		steps: []step{
			{"enter", 20, 70}, // capacity 200
			{"ok", 100, 170},
			{"ok", 100, 200},
			{"transient", 28, 4},
			{"no transient", 1, 4},
		},
	}, {
		name: "deposits keep what was banked by calls that have ended",
		steps: []step{
			{"enter", 13, 70}, // capacity 130
			{"ok", 60, 130},
			{"leave", 13, 130}, // capacity 70
			{"ok", 1000, 130},  // not above twice 70: neither more nor less
			{"enter", 13, 130}, // the next burst has it all
			{"transient", 18, 4},
		},
	}, {
		name: "far above the capacity the bank wears away, one token a success",
		steps: []step{
			{"enter", 30, 70}, // capacity 300
			{"ok", 230, 300},
			{"leave", 30, 300}, // capacity 70
			{"ok", 1, 299},
			{"ok", 100, 199},
			{"ok", 59, 140},
			{"ok", 100, 140}, // twice 70
		},
	}, {
		name: "Reserve cuts the bank to the capacity",
		steps: []step{
			{"enter", 30, 70}, // capacity 300
			{"ok", 230, 300},
			{"leave", 20, 300},   // capacity 100
			{"transient", 1, 93}, // 100 - 7
			{"leave", 10, 93},    // capacity 70
			{"unsent", 1, 93},    // costs nothing and cuts nothing
			{"transient", 1, 63}, // 70 - 7
		},
	}, {
		name: "a refund above the capacity is dropped, the bank is not",
		steps: []step{
			{"enter", 12, 70}, // capacity 120
			{"ok", 50, 120},
			{"transient", 2, 106},
			{"leave", 12, 106}, // capacity 70
			{"won", 1, 106},
			{"enter", 11, 106}, // capacity 110
			{"release", 1, 110},
		},
	}, {
		name:   "a refused Reserve cuts too",
		config: BudgetConfig{Capacity: 14, PerCall: 10, FreeInterval: -1},
		steps: []step{
			{"enter", 2, 14}, // capacity 20
			{"ok", 6, 20},
			{"leave", 2, 20}, // capacity 14
			{"timeout", 1, 0},
			{"ok", 13, 13},
			{"no timeout", 1, 13},
		},
	}, {
		name: "one free retry a minute, and it does not save up",
		steps: []step{
			{"transient", 10, 0},
			{"no transient", 3, 0}, // nothing in the first minute
			{"sleep", 60, 0},
			{"transient", 1, 0}, // exactly one
			{"no transient", 3, 0},
			{"sleep", 59, 0},
			{"no transient", 1, 0},
			{"sleep", 1, 0},
			{"transient", 1, 0},
			{"sleep", 3600, 0},
			{"transient", 1, 0}, // after an hour still exactly one
			{"no transient", 1, 0},
		},
	}, {
		name: "the free retry leaves what is too little",
		steps: []step{
			{"transient", 9, 7},
			{"no timeout", 1, 7},
			{"sleep", 60, 7},
			{"timeout", 1, 7}, // 14 for nothing
			{"no timeout", 1, 7},
			{"transient", 1, 0},
		},
	}, {
		name: "a free retry refunds nothing",
		steps: []step{
			{"transient", 10, 0},
			{"lost", 10, 0},
			{"sleep", 60, 0},
			{"transient", 1, 0},
			{"won", 1, 0},
			{"sleep", 60, 0},
			{"transient", 1, 0},
			{"release", 1, 0},
			{"no transient", 1, 0},
		},
	}, {
		name: "the minute is used only when tokens do not suffice",
		steps: []step{
			{"sleep", 600, 70},
			{"transient", 10, 0},
			{"transient", 1, 0}, // free
			{"no transient", 1, 0},
		},
	}, {
		name:   "no free retries if they are off",
		config: BudgetConfig{FreeInterval: -1},
		steps: []step{
			{"transient", 10, 0},
			{"sleep", 100_000, 0},
			{"no transient", 1, 0},
		},
	}, {
		name:   "a fixed capacity",
		config: BudgetConfig{Capacity: 20, PerCall: -1},
		steps: []step{
			{"enter", 1000, 20},
			{"ok", 100, 20},
			{"transient", 2, 6},
			{"no transient", 1, 6},
		},
	}, {
		name:   "configured prices",
		config: BudgetConfig{Capacity: 10, PerCall: -1, Deposit: 0.25, Costs: BudgetCosts{Transient: 2, Timeout: 3, Overload: 4, Invited: 1, Unsent: 0.5, Resume: 2.5}},
		steps: []step{
			{"transient", 1, 8},
			{"timeout", 1, 5},
			{"overload", 1, 1},
			{"unsent", 1, 0.5},
			{"no invited", 1, 0.5},
			{"ok", 2, 1},
			{"invited", 1, 0},
			{"ok", 9, 2.25},
			{"no resume", 1, 2.25},
			{"ok", 1, 2.5},
			{"resume", 1, 0},
		},
	}, {
		name:   "rounding never adds load",
		config: BudgetConfig{Capacity: 10, PerCall: -1, Deposit: 0.1, Costs: BudgetCosts{Transient: 0.01, Timeout: 1, Overload: 1, Invited: 1, Resume: 1}},
		steps: []step{
			{"transient", 64, 9}, // 0.01 is rounded up to 1/64
			{"ok", 10, 9.9375},   // 0.1 is rounded down to 6/64
		},
	}, {
		name: "ten hedges, then a tenth of the calls that need none",
		held: hedgeFunds,
		steps: []step{
			{"unneeded", 10, 50}, // full
			{"hedge", 10, 0},
			{"no hedge", 5, 0},
			{"sleep", 600, 0},
			{"no hedge", 1, 0}, // none is free
			{"ok", 1000, 0},    // slow answers pay for none
			{"unneeded", 9, 4.5},
			{"no hedge", 1, 4.5},
			{"unneeded", 1, 5},
			{"hedge", 1, 0},
		},
	}, {
		name: "a winning hedge is refunded",
		held: hedgeFunds,
		steps: []step{
			{"hedge", 4, 30},
			{"won", 1, 35},
			{"lost", 1, 35},
			{"release", 1, 40},
			{"unneeded", 19, 49.5},
			{"won", 1, 50}, // full
		},
	}, {
		name:   "configured hedges",
		config: BudgetConfig{HedgeCapacity: 6, HedgeDeposit: 1, HedgeCost: 3},
		held:   hedgeFunds,
		steps: []step{
			{"hedge", 2, 0},
			{"no hedge", 1, 0},
			{"unneeded", 3, 3},
			{"hedge", 1, 0},
		},
	}, {
		name: "hedges do not touch what retries need",
		steps: []step{
			{"hedge", 10, 70},
			{"no hedge", 1, 70},
			{"transient", 10, 0},
			{"unneeded", 10, 0},
			{"hedge", 1, 0},
			{"won", 10, 0}, // refunds the hedges
			{"won", 10, 70},
		},
	}} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				held := tt.held
				if held == nil {
					held = bank
				}
				runSteps(t, mustBudget(t, tt.config), held, tt.steps)
			})
		})
	}
}

// Operators size the budget by its documented defaults; a changed default
// changes the load on their servers.
func TestBudgetConfigDefaults(t *testing.T) {
	zero := mustBudget(t, BudgetConfig{})
	spelled := mustBudget(t, BudgetConfig{
		Capacity: 70, PerCall: 10, Deposit: 1,
		Costs:         BudgetCosts{Transient: 7, Timeout: 14, Overload: 7, Invited: 4, Resume: 7},
		FreeInterval:  time.Minute,
		HedgeCapacity: 50, HedgeDeposit: 0.5, HedgeCost: 5,
	})
	if got, want := *zero.limits.Load(), *spelled.limits.Load(); got != want {
		t.Errorf("limits of the zero config = %+v, want %+v", got, want)
	}
}

// A misconfigured budget must be refused with every mistake named at once, or
// its operator mends them one failed start at a time.
func TestBudgetConfigErrors(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, tt := range []struct {
		name   string
		config BudgetConfig
		want   []string // one for each line of the error
	}{
		{"negative capacity", BudgetConfig{Capacity: -1}, []string{"BudgetConfig.Capacity = -1, want 1 to 1048575"}},
		{"small capacity", BudgetConfig{Capacity: 0.5}, []string{"BudgetConfig.Capacity = 0.5, want 1 to"}},
		{"huge capacity", BudgetConfig{Capacity: 1 << 20}, []string{"BudgetConfig.Capacity = 1048576"}},
		{"NaN", BudgetConfig{Capacity: nan, PerCall: nan, Deposit: nan, HedgeCapacity: nan, HedgeDeposit: nan, HedgeCost: nan},
			[]string{"Capacity = NaN", "PerCall = NaN", "Deposit = NaN", "HedgeCapacity = NaN", "HedgeDeposit = NaN", "HedgeCost = NaN"}},
		{"infinite", BudgetConfig{Capacity: inf, PerCall: inf, Deposit: inf, HedgeCost: inf},
			[]string{"Capacity = +Inf", "PerCall = +Inf", "Deposit = +Inf", "HedgeCost = +Inf"}},
		{"deposit above the capacity", BudgetConfig{Capacity: 20, Deposit: 21}, []string{"Deposit = 21, want 0.015625 to 20, or 0 for the default of 1"}},
		{"deposit that rounds to nothing", BudgetConfig{Deposit: 0.01}, []string{"Deposit = 0.01, want 0.015625 to 70"}},
		{"negative deposit", BudgetConfig{Deposit: -1}, []string{"Deposit = -1"}},
		{"costs", BudgetConfig{Costs: BudgetCosts{Transient: -1, Timeout: 71, Overload: nan, Invited: inf, Unsent: -2, Resume: 70.5}},
			[]string{"Costs.Transient = -1, want above 0 and at most the capacity of 70, or 0 for the default of 7",
				"Costs.Timeout = 71", "Costs.Overload = NaN", "Costs.Invited = +Inf", "Costs.Unsent = -2", "Costs.Resume = 70.5"}},
		{"capacity below the defaults of costs", BudgetConfig{Capacity: 5}, []string{"BudgetConfig.Capacity = 5, want 14 (the default of Costs.Timeout) to 1048575"}},
		{"capacity below one cost that is given", BudgetConfig{Capacity: 15, Costs: BudgetCosts{Timeout: 16}}, []string{"Costs.Timeout = 16, want above 0 and at most the capacity of 15"}},
		{"free interval", BudgetConfig{FreeInterval: time.Millisecond}, []string{"FreeInterval = 1ms, want 1s to 24h0m0s"}},
		{"long free interval", BudgetConfig{FreeInterval: 25 * time.Hour}, []string{"FreeInterval = 25h0m0s"}},
		{"hedge capacity", BudgetConfig{HedgeCapacity: 4}, []string{"HedgeCapacity = 4, want 5 (the default of HedgeCost) to"}},
		{"hedge cost", BudgetConfig{HedgeCost: 51}, []string{"HedgeCost = 51, want above 0 and at most the capacity of 50"}},
		{"hedge deposit", BudgetConfig{HedgeDeposit: -0.5}, []string{"HedgeDeposit = -0.5, want 0.015625 to 50"}},
		{"all at once", BudgetConfig{Capacity: -1, PerCall: 1 << 21, FreeInterval: 1, HedgeCapacity: -3},
			[]string{"Capacity = -1", "PerCall = 2097152", "FreeInterval = 1ns", "HedgeCapacity = -3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b, err := NewBudget(tt.config)
			if err == nil || b != nil {
				t.Fatalf("NewBudget = %v, %v; want an error", b, err)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tt.want) {
				t.Fatalf("error has %d lines, want %d:\n%v", len(lines), len(tt.want), err)
			}
			for i, want := range tt.want {
				if !strings.HasPrefix(lines[i], "grpcretry: BudgetConfig.") || !strings.Contains(lines[i], want) {
					t.Errorf("line %d = %q, want it to tell %q", i, lines[i], want)
				}
			}
		})
	}
}

// A budget that was declared and not made must fail safe: refuse, not panic
// and not grant without end.
func TestZeroBudgetsRefuse(t *testing.T) {
	for _, b := range []Budget{new(TokenBudget), new(Throttle)} {
		b.Enter()
		for o := range Outcome(6) {
			b.Record(o)
		}
		for c := range costEnd + 1 {
			if _, ok := b.Reserve(c); ok {
				t.Errorf("zero %T grants cost %d", b, c)
			}
		}
		b.Release(Grant{paid: [4]uint32{7 * unit}})
		b.Settle(Grant{paid: [4]uint32{fromHedge | 7*64}}, true)
		if got := b.Balance(); got != 0 {
			t.Errorf("zero %T has balance %v, want 0", b, got)
		}
		b.Leave()
	}
	if err := new(TokenBudget).Rescale(BudgetConfig{}); err == nil {
		t.Error("Rescale of a zero TokenBudget: no error")
	}
	if err := new(Throttle).Rescale(10, 0.1); err == nil {
		t.Error("Rescale of a zero Throttle: no error")
	}
}

// A cost that is no cost comes from a bug of ours; it must not be a way round
// the budget.
func TestInvalidCostIsRefused(t *testing.T) {
	th, err := NewThrottle(10, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []Budget{mustBudget(t, BudgetConfig{}), th} {
		for _, c := range []Cost{0, costEnd, 255} {
			if _, ok := b.Reserve(c); ok {
				t.Errorf("%T grants cost %d", b, c)
			}
		}
		if s := b.state(); s.Granted != 0 || s.Refused != 3 || s.Balance != 1 {
			t.Errorf("%T: state %+v, want 0 granted, 3 refused, balance 1", b, s)
		}
	}
}

// The share that a live page shows must stay a share, whatever is banked.
func TestTokenBudgetBalanceAndState(t *testing.T) {
	b := mustBudget(t, BudgetConfig{})
	check := func(when string, want BudgetState) {
		t.Helper()
		if got := b.state(); got != want {
			t.Errorf("%s: state %+v, want %+v", when, got, want)
		}
		if got := b.Balance(); got != want.Balance {
			t.Errorf("%s: Balance = %v, want %v", when, got, want.Balance)
		}
	}
	check("new", BudgetState{Balance: 1, Tokens: 70, Capacity: 70})
	enter(b, 14)
	check("14 calls", BudgetState{Balance: 0.5, Tokens: 70, Capacity: 140, InFlight: 14})
	record(b, OutcomeOK, 70)
	check("70 successes", BudgetState{Balance: 1, Tokens: 140, Capacity: 140, InFlight: 14})
	leave(b, 14)
	check("idle with a bank", BudgetState{Balance: 1, Tokens: 70, Capacity: 70})
	for range 5 {
		b.Reserve(CostTransient)
	}
	check("5 retries", BudgetState{Balance: 0.5, Tokens: 35, Capacity: 70, Granted: 5})
	for range 6 {
		b.Reserve(CostTransient)
	}
	check("11 retries", BudgetState{Balance: 0, Tokens: 0, Capacity: 70, Granted: 10, Refused: 1})
	b.Leave() // one too many must not wrap round to an endless capacity
	check("one Leave too many", BudgetState{Balance: 0, Tokens: 0, Capacity: 70, Granted: 10, Refused: 1, InFlight: -1})
}

// With a hundred thousand calls in flight a sum that wraps would empty the
// budget, or spill into the clock beside it.
func TestTokenBudgetSaturates(t *testing.T) {
	b := mustBudget(t, BudgetConfig{Capacity: maxTokens, PerCall: maxTokens, Deposit: maxTokens})
	b.inflight.Store(math.MaxInt64)
	if got := b.state(); got.Capacity != maxTokens || got.Tokens != maxTokens {
		t.Fatalf("state %+v, want %d tokens of %[2]d", got, maxTokens)
	}
	g, ok := b.Reserve(CostTransient)
	if !ok {
		t.Fatal("refused with a full budget")
	}
	record(b, OutcomeOK, 3)
	b.Settle(g, true)
	b.Release(Grant{paid: [4]uint32{math.MaxUint32 &^ fromHedge}})
	b.Release(Grant{paid: [4]uint32{math.MaxUint32}})
	if w := b.word.Load(); w != maxUnits {
		t.Errorf("word = %#x, want %#x: full, and the time still 0", w, uint64(maxUnits))
	}
	if h := b.hedge.Load(); h != 50*unit {
		t.Errorf("hedge funds = %d units, want %d", h, uint64(50*unit))
	}
	b.inflight.Store(math.MinInt64)
	if got := b.capacity(b.limits.Load()); got != maxUnits {
		t.Errorf("capacity with a negative count = %d, want %d", got, uint64(maxUnits))
	}
}

// A free retry a little too soon is one more than "one a minute" allows; the
// clock is kept in milliseconds.
func TestFreeRetryNeverTooSoon(t *testing.T) {
	for _, offset := range []time.Duration{0, 1, 999_999, time.Millisecond, 1_000_001, 1_999_999} {
		synctest.Test(t, func(t *testing.T) {
			b := mustBudget(t, BudgetConfig{})
			for range 10 {
				b.Reserve(CostTransient)
			}
			time.Sleep(time.Hour + offset)
			if _, ok := b.Reserve(CostTransient); !ok {
				t.Fatal("no free retry after an hour")
			}
			time.Sleep(time.Minute - 1)
			if _, ok := b.Reserve(CostTransient); ok {
				t.Errorf("offset %v: a second free retry after less than a minute", offset)
			}
			time.Sleep(1 + 2*time.Millisecond)
			if _, ok := b.Reserve(CostTransient); !ok {
				t.Errorf("offset %v: no free retry a minute and 2 ms later", offset)
			}
		})
	}
}

// A process that runs for years must not lose its free retry when the
// milliseconds wrap, nor be given them without end.
func TestFreeRetryAfterTheClockWraps(t *testing.T) {
	const wrap = (millisMask + 1) * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		b := mustBudget(t, BudgetConfig{})
		for range 10 {
			b.Reserve(CostTransient)
		}
		for _, wait := range []time.Duration{wrap - 48*time.Hour, 48*time.Hour - time.Minute, time.Minute, time.Minute, wrap - 48*time.Hour, wrap - 48*time.Hour} {
			time.Sleep(wait)
			if _, ok := b.Reserve(CostTransient); !ok {
				t.Errorf("%v after the last: no free retry", wait)
			}
			if _, ok := b.Reserve(CostTransient); ok {
				t.Errorf("%v after the last: two free retries", wait)
			}
		}
	})
}

// Time that stands before the last free retry, e.g. because another goroutine
// read the clock later and wrote first, must not look like an age.
func TestElapsedMovesForwardOnly(t *testing.T) {
	const day = 24 * 60 * 60 * 1000
	for _, tt := range []struct{ now, last, want uint64 }{
		{0, 0, 0},
		{60_000, 0, 60_000},
		{4, 5, 0},
		{0, day, 0},
		{0, millisMask, 1}, // wrapped
		{59_999, millisMask, 60_000},
		{day, 2*day + 2, millisMask - day - 1}, // longer ago than a day: wrapped
	} {
		if got := elapsed(tt.now, tt.last); got != tt.want {
			t.Errorf("elapsed(%d, %d) = %d, want %d", tt.now, tt.last, got, tt.want)
		}
	}
}

// Low traffic: a client that makes a call a minute must find out that an
// outage has ended, and earn its way back; nothing may stay frozen at zero.
func TestLowTrafficRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mustBudget(t, BudgetConfig{})
		for range 10 {
			b.Reserve(CostTransient)
		}
		granted := 0
		for range 120 { // two hours of one failing call every minute
			b.Enter()
			b.Record(OutcomeFailure)
			if g, ok := b.Reserve(CostTransient); ok {
				granted++
				b.Settle(g, false)
			}
			b.Leave()
			time.Sleep(time.Minute)
		}
		if granted != 119 { // the first came in the first minute
			t.Errorf("%d free retries in two hours, want 119", granted)
		}
		for range 7 {
			b.Enter()
			b.Record(OutcomeOK)
			b.Leave()
		}
		if got := bank(b); got != 7 {
			t.Errorf("after 7 successes %v tokens, want 7", got)
		}
	})
}

// A thousand calls that fail at once must not slip through between a check and
// its payment: exactly what is paid for goes out.
func TestHerd(t *testing.T) {
	for _, tt := range []struct {
		name   string
		earned int
		want   int64 // grants
	}{
		{"fresh", 0, 10},
		{"earned", 350, 60}, // (70 + 350) / 7
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := mustBudget(t, BudgetConfig{})
			const calls = 1000
			enter(b, calls)
			record(b, OutcomeOK, tt.earned)
			var granted atomic.Int64
			var wg sync.WaitGroup
			start := make(chan struct{})
			for range calls {
				wg.Go(func() {
					<-start
					b.Record(OutcomeFailure)
					if g, ok := b.Reserve(CostTransient); ok {
						granted.Add(1)
						b.Settle(g, false)
					}
				})
			}
			close(start)
			wg.Wait()
			leave(b, calls)
			s := b.state()
			if s.InFlight != 0 || int64(s.Granted) != granted.Load() || s.Granted+s.Refused != calls {
				t.Errorf("state %+v after %d calls with %d grants", s, calls, granted.Load())
			}
			if got := granted.Load(); got != tt.want {
				t.Errorf("%d grants, want %d", got, tt.want)
			}
		})
	}
}

// The calls of a herd that all find themselves without tokens share one free
// retry.
func TestHerdSharesTheFreeRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mustBudget(t, BudgetConfig{})
		for range 10 {
			b.Reserve(CostTransient)
		}
		time.Sleep(time.Minute)
		var granted atomic.Int64
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				if _, ok := b.Reserve(CostTransient); ok {
					granted.Add(1)
				}
			})
		}
		wg.Wait()
		if got := granted.Load(); got != 1 {
			t.Errorf("%d free retries, want 1", got)
		}
	})
}

// Under full contention every token is counted once: not one more retry than
// is paid for, not one deposit or refund lost.
func TestTokenBudgetCountsUnderContention(t *testing.T) {
	const workers, rounds = 8, 20_000
	b := mustBudget(t, BudgetConfig{Capacity: maxTokens, FreeInterval: -1, HedgeCapacity: maxTokens})
	together := func(do func()) {
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for range rounds {
					do()
				}
			})
		}
		wg.Wait()
	}
	check := func(when string, tokens, hedge float64) {
		t.Helper()
		if bank(b) != tokens || hedgeFunds(b) != hedge {
			t.Errorf("%s: %v tokens and %v for hedges, want %v and %v", when, bank(b), hedgeFunds(b), tokens, hedge)
		}
	}
	var granted atomic.Int64
	together(func() {
		if g, ok := b.Reserve(CostTransient); ok {
			granted.Add(1)
			b.Settle(g, false)
		}
	})
	if got := granted.Load(); got != maxTokens/7 {
		t.Errorf("%d retries, want %d", got, maxTokens/7)
	}
	check("retries", maxTokens%7, maxTokens)
	together(func() { b.Record(OutcomeOK) })
	check("deposits", maxTokens%7+workers*rounds, maxTokens)
	together(func() { b.Reserve(CostHedge) })
	check("hedges", maxTokens%7+workers*rounds, maxTokens-5*workers*rounds)
	together(func() { b.Settle(Grant{paid: [4]uint32{2 * unit}}, true) })
	check("refunds", maxTokens%7+3*workers*rounds, maxTokens-5*workers*rounds)
	together(func() { b.Settle(Grant{paid: [4]uint32{fromHedge + 2*unit}}, true) })
	check("hedges' refunds", maxTokens%7+3*workers*rounds, maxTokens-3*workers*rounds)
	// Long enough that the workers meet even on a busy machine; the sum of
	// each round is nothing.
	for range 10 {
		together(func() {
			b.Enter()
			for _, c := range []Cost{CostTransient, CostHedge} {
				if g, ok := b.Reserve(c); ok {
					b.Settle(g, true)
				} else {
					t.Errorf("Reserve(%d) refused", c)
				}
			}
			b.Leave()
		})
	}
	check("reserved and refunded", maxTokens%7+3*workers*rounds, maxTokens-3*workers*rounds)
	if s := b.state(); s.InFlight != 0 || s.Granted != maxTokens/7+21*workers*rounds || s.Granted+s.Refused != 22*workers*rounds {
		t.Errorf("state %+v", s)
	}
}

// New limits take effect without a refill and without a loss: the share that
// is left stays the same, and so do calls, grants and the free retry's minute.
func TestTokenBudgetRescale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mustBudget(t, BudgetConfig{})
		b.Enter()
		g, _ := b.Reserve(CostTransient)
		for range 4 {
			b.Reserve(CostTransient)
		}
		h, _ := b.Reserve(CostHedge) // 45 of 50
		for _, tt := range []struct {
			config        BudgetConfig
			tokens, hedge float64
		}{
			{BudgetConfig{Capacity: 700, HedgeCapacity: 100}, 350, 90},
			{BudgetConfig{Capacity: 700, HedgeCapacity: 10}, 350, 9},
			{BudgetConfig{Capacity: 14, HedgeCapacity: 50}, 7, 45},
			{BudgetConfig{}, 35, 45},
		} {
			if err := b.Rescale(tt.config); err != nil {
				t.Fatal(err)
			}
			if got := bank(b); got != tt.tokens {
				t.Errorf("%+v: %v tokens, want %v", tt.config, got, tt.tokens)
			}
			if got := hedgeFunds(b); got != tt.hedge {
				t.Errorf("%+v: %v for hedges, want %v", tt.config, got, tt.hedge)
			}
		}
		if err := b.Rescale(BudgetConfig{Capacity: -1}); err == nil {
			t.Error("Rescale with a negative capacity: no error")
		}
		b.Settle(g, true)
		b.Settle(h, true)
		if s := b.state(); s.Tokens != 42 || s.InFlight != 1 || s.Granted != 6 || hedgeFunds(b) != 50 {
			t.Errorf("state %+v and %v for hedges, want 42 tokens, 1 in flight, 6 granted, 50", s, hedgeFunds(b))
		}
		time.Sleep(time.Minute)
		for range 6 {
			b.Reserve(CostTransient)
		}
		if _, ok := b.Reserve(CostTransient); !ok {
			t.Error("no free retry after rescaling")
		}
		if err := b.Rescale(BudgetConfig{Capacity: 100}); err != nil {
			t.Fatal(err)
		}
		if _, ok := b.Reserve(CostTransient); ok {
			t.Error("rescaling gave another free retry")
		}
	})
}

// A reload in mid-traffic must not push the balance out of its range.
func TestTokenBudgetRescaleInTraffic(t *testing.T) {
	b := mustBudget(t, BudgetConfig{FreeInterval: -1})
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				b.Enter()
				b.Record(OutcomeOK)
				if g, ok := b.Reserve(CostTransient); ok {
					b.Settle(g, true)
				}
				b.Leave()
			}
		})
	}
	for i := range 2000 {
		if err := b.Rescale(BudgetConfig{Capacity: []float64{70, 700, 14}[i%3], FreeInterval: -1}); err != nil {
			t.Fatal(err)
		}
		if got := b.Balance(); got < 0 || got > 1 {
			t.Fatalf("Balance = %v", got)
		}
		if got := bank(b); got > 7000 {
			t.Fatalf("%v tokens, want no more than a tenfold balance", got)
		}
	}
	close(stop)
	wg.Wait()
	if err := b.Rescale(BudgetConfig{FreeInterval: -1}); err != nil {
		t.Fatal(err)
	}
	record(b, OutcomeOK, 7000)
	for range 20 {
		b.Reserve(CostTransient)
	}
	if s := b.state(); s.Capacity != 70 || s.Tokens != 0 {
		t.Errorf("state %+v, want 0 of 70", s)
	}
}

// A budget sits on the path of every call: garbage there is garbage for all.
func TestBudgetsDoNotAllocate(t *testing.T) {
	throttle, err := NewThrottle(10, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	tokens := mustBudget(t, BudgetConfig{})
	small := mustBudget(t, BudgetConfig{Capacity: 14, PerCall: -1})
	both, err := AllOf(tokens, small, throttle)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []Budget{tokens, throttle, both, Unlimited()} {
		for _, v := range []struct {
			verb string
			do   func()
		}{
			{"Enter and Leave", func() { b.Enter(); b.Leave() }},
			{"Record", func() {
				b.Record(OutcomeOK)
				b.Record(OutcomeExtraOK)
				b.Record(OutcomeHedgeUnneeded)
			}},
			{"Reserve and Release", func() {
				if g, ok := b.Reserve(CostTransient); ok {
					b.Release(g)
				}
			}},
			{"hedge", func() {
				if g, ok := b.Reserve(CostHedge); ok {
					b.Settle(g, true)
				}
			}},
			{"Balance", func() { b.Balance() }},
			{"state", func() { b.state() }},
			{"until refused", func() {
				b.Record(OutcomeFailure)
				if g, ok := b.Reserve(CostTransient); ok {
					b.Settle(g, false)
				}
			}},
		} {
			if n := testing.AllocsPerRun(100, v.do); n != 0 {
				t.Errorf("%T: %s: %v allocations, want 0", b, v.verb, n)
			}
		}
	}
}

// Tokens and the count of calls in flight are written by different calls; on
// one cache line they would slow each other down.
func TestTokenBudgetLayout(t *testing.T) {
	var b TokenBudget
	offsets := []uintptr{unsafe.Offsetof(b.limits), unsafe.Offsetof(b.word), unsafe.Offsetof(b.hedge),
		unsafe.Offsetof(b.inflight), unsafe.Offsetof(b.tally), unsafe.Sizeof(b)}
	for i := range len(offsets) - 1 {
		if d := offsets[i+1] - offsets[i]; d < 128 {
			t.Errorf("fields %d and %d are %d bytes apart, want 128 or more", i, i+1, d)
		}
	}
}

// A modelBudget is the specification written down as plainly as it can be.
type modelBudget struct {
	mu                   sync.Mutex
	least, tokens, hedge float64 // least is the capacity without calls in flight
	inflight             int
	lastFree             time.Time
}

func newModelBudget() *modelBudget {
	return &modelBudget{least: 70, tokens: 70, hedge: 50, lastFree: time.Now()}
}

func (m *modelBudget) cap() float64 { return max(m.least, 10*float64(m.inflight)) }

func (m *modelBudget) ok() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.tokens < m.cap() {
		m.tokens = min(m.cap(), m.tokens+1)
	} else if m.tokens > 2*m.cap() {
		m.tokens--
	}
}

func (m *modelBudget) reserve(c Cost) (paid float64, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	price := map[Cost]float64{CostTransient: 7, CostTimeout: 14, CostOverload: 7, CostInvited: 4, CostHedge: 5, CostResume: 7}[c]
	if c == CostHedge {
		if m.hedge < price {
			return 0, false
		}
		m.hedge -= price
		return price, true
	}
	if price == 0 {
		return 0, true
	}
	m.tokens = min(m.tokens, m.cap())
	if m.tokens >= price {
		m.tokens -= price
		return price, true
	}
	if time.Since(m.lastFree) >= time.Minute {
		m.lastFree = time.Now()
		return 0, true
	}
	return 0, false
}

func (m *modelBudget) refund(c Cost, paid float64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c == CostHedge {
		m.hedge = min(50, m.hedge+paid)
	} else if m.tokens < m.cap() {
		m.tokens = min(m.cap(), m.tokens+paid)
	}
}

var allCosts = []Cost{CostTransient, CostTimeout, CostOverload, CostInvited, CostUnsent, CostHedge, CostResume}

// An openGrant is a grant that was neither released nor settled yet.
type openGrant struct {
	Grant
	cost Cost
	paid float64 // by the model
}

// Step by step the budget must do what the plain model does, whatever the
// history: one that differs anywhere breaks a promise of the specification.
func TestTokenBudgetAgainstModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inBubble(t, rt, func(t *rapid.T) {
			b, m := mustRapidBudget(t), newModelBudget()
			var open []openGrant
			var earned, lost float64 // tokens
			pick := func() openGrant {
				i := rapid.IntRange(0, len(open)-1).Draw(t, "grant")
				g := open[i]
				open = slices.Delete(open, i, i+1)
				return g
			}
			t.Repeat(map[string]func(*rapid.T){
				"enter": func(t *rapid.T) {
					n := rapid.IntRange(1, 30).Draw(t, "calls")
					enter(b, n)
					m.inflight += n
				},
				"leave": func(t *rapid.T) {
					n := rapid.IntRange(0, m.inflight).Draw(t, "calls")
					leave(b, n)
					m.inflight -= n
				},
				"success": func(t *rapid.T) {
					for range rapid.IntRange(1, 200).Draw(t, "successes") {
						b.Record(OutcomeOK)
						m.ok()
						earned++
					}
				},
				"other outcome": func(t *rapid.T) {
					b.Record(rapid.SampledFrom([]Outcome{0, OutcomeExtraOK, OutcomeFailure, 99}).Draw(t, "outcome"))
				},
				"no hedge needed": func(t *rapid.T) {
					b.Record(OutcomeHedgeUnneeded)
					m.hedge = min(50, m.hedge+0.5)
				},
				"reserve": func(t *rapid.T) {
					c := rapid.SampledFrom(allCosts).Draw(t, "cost")
					for range rapid.IntRange(1, 12).Draw(t, "times") {
						paid, want := m.reserve(c)
						g, got := b.Reserve(c)
						if got != want || g.cost() != paid {
							t.Fatalf("Reserve(%d) = %v at %v, want %v at %v", c, got, g.cost(), want, paid)
						}
						if got {
							open = append(open, openGrant{g, c, paid})
						}
					}
				},
				"release": func(t *rapid.T) {
					if len(open) > 0 {
						g := pick()
						b.Release(g.Grant)
						m.refund(g.cost, g.paid)
					}
				},
				"settle": func(t *rapid.T) {
					if len(open) == 0 {
						return
					}
					g, won := pick(), rapid.Bool().Draw(t, "won")
					b.Settle(g.Grant, won)
					if won {
						m.refund(g.cost, g.paid)
					} else if g.cost != CostHedge {
						lost += g.paid
					}
				},
				"wait": func(t *rapid.T) {
					time.Sleep(time.Duration(rapid.IntRange(1, 90_000).Draw(t, "milliseconds")) * time.Millisecond)
				},
				"": func(t *rapid.T) {
					s := b.state()
					if bank(b) != m.tokens || hedgeFunds(b) != m.hedge || s.Capacity != m.cap() || s.InFlight != int64(m.inflight) {
						t.Fatalf("holds %v and %v for hedges, state %+v; want %v, %v, capacity %v, %d in flight",
							bank(b), hedgeFunds(b), s, m.tokens, m.hedge, m.cap(), m.inflight)
					}
					if want := min(1, m.tokens/m.cap()); b.Balance() != want || s.Balance != want {
						t.Fatalf("Balance = %v and %v, want %v", b.Balance(), s.Balance, want)
					}
					// No history creates tokens.
					out := lost
					for _, g := range open {
						if g.cost != CostHedge {
							out += g.paid
						}
					}
					if out+bank(b) > 70+earned {
						t.Fatalf("%v spent and %v left of 70 and %v earned", out, bank(b), earned)
					}
				},
			})
		})
	})
}

// mustRapidBudget returns a budget with the defaults.
func mustRapidBudget(t *rapid.T) *TokenBudget {
	b, err := NewBudget(BudgetConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// inBubble runs one check of rapid in a bubble of virtual time. Rapid itself
// keeps real time, and is handed the panics by which it learns of failures.
func inBubble(t *testing.T, rt *rapid.T, check func(*rapid.T)) {
	var failure any
	synctest.Test(t, func(*testing.T) {
		defer func() { failure = recover() }()
		check(rt)
	})
	if failure != nil {
		panic(failure)
	}
}

// The published bound holds for every history of calls in flight: failed paid
// retries are at most (70 + S1)/7, and once nothing succeeds any more
// at most max(70, 10*I0)/7 and one a minute.
func TestBoundForAnyHistory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inBubble(t, rt, func(t *rapid.T) {
			b := mustRapidBudget(t)
			start := time.Now()
			var inflight, successes, paid, free int
			fail := func() {
				if g, ok := b.Reserve(CostTransient); ok {
					if g.cost() > 0 {
						paid++
					} else {
						free++
					}
					b.Settle(g, false)
				}
			}
			check := func(t *rapid.T) {
				if paid*7 > 70+successes {
					t.Fatalf("%d failed paid retries after %d successes", paid, successes)
				}
				if limit := int(time.Since(start) / time.Minute); free > limit {
					t.Fatalf("%d free retries in %v", free, time.Since(start))
				}
			}
			calls := func(t *rapid.T) {
				n := rapid.OneOf(rapid.IntRange(0, 20), rapid.IntRange(0, 500)).Draw(t, "in flight")
				enter(b, max(0, n-inflight))
				leave(b, max(0, inflight-n))
				inflight = n
			}
			t.Repeat(map[string]func(*rapid.T){
				"calls": calls,
				"successes": func(t *rapid.T) {
					n := rapid.IntRange(1, 3000).Draw(t, "successes")
					record(b, OutcomeOK, n)
					successes += n
				},
				"failures": func(t *rapid.T) {
					for range rapid.IntRange(1, 300).Draw(t, "failures") {
						fail()
					}
				},
				"wait": func(t *rapid.T) {
					time.Sleep(time.Duration(rapid.IntRange(0, 200_000).Draw(t, "milliseconds")) * time.Millisecond)
				},
				"": check,
			})

			// The outage.
			start, paid, free = time.Now(), 0, 0
			limit := max(70, 10*inflight) / 7
			for range 30 {
				for range rapid.IntRange(1, 100).Draw(t, "failures") {
					fail()
				}
				calls(t)
				time.Sleep(time.Duration(rapid.IntRange(0, 30_000).Draw(t, "milliseconds")) * time.Millisecond)
			}
			if minutes := int(time.Since(start) / time.Minute); paid > limit || free > minutes+1 {
				t.Fatalf("outage of %v: %d paid and %d free retries, want at most %d and %d", time.Since(start), paid, free, limit, minutes+1)
			}
		})
	})
}

// With many goroutines at once nothing is created, nothing leaves its range,
// and the counts agree.
func TestTokenBudgetConcurrent(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		b := mustRapidBudget(rt)
		const workers, rounds = 8, 300
		failing := rapid.IntRange(0, 100).Draw(rt, "percent failing")
		seed := rapid.Uint64().Draw(rt, "seed")
		var earned, lost, lostHedges, unneeded, granted, refused atomic.Int64
		var workersDone, watchers sync.WaitGroup
		done := make(chan struct{})
		var outOfRange atomic.Pointer[string]
		watchers.Go(func() {
			for {
				s := b.state()
				if s.Balance < 0 || s.Balance > 1 || s.Tokens < 0 || s.Tokens > s.Capacity ||
					bank(b) > 10*workers || hedgeFunds(b) > 50 || s.InFlight < 0 || s.InFlight > workers {
					text := fmt.Sprintf("%+v, bank %v, hedges %v", s, bank(b), hedgeFunds(b))
					outOfRange.Store(&text)
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
		for w := range workers {
			rng := rand.New(rand.NewPCG(seed, uint64(w)))
			workersDone.Go(func() {
				for range rounds {
					b.Enter()
					if rng.IntN(100) >= failing {
						b.Record(OutcomeOK)
						earned.Add(1)
						b.Leave()
						continue
					}
					if rng.IntN(4) == 0 {
						b.Record(OutcomeHedgeUnneeded)
						unneeded.Add(1)
					}
					c := allCosts[rng.IntN(len(allCosts))]
					g, ok := b.Reserve(c)
					switch {
					case !ok:
						refused.Add(1)
					case rng.IntN(3) == 0:
						granted.Add(1)
						b.Release(g)
					case rng.IntN(3) == 0:
						granted.Add(1)
						b.Settle(g, true)
					default:
						granted.Add(1)
						b.Settle(g, false)
						if c == CostHedge {
							lostHedges.Add(1)
						} else {
							lost.Add(int64(g.cost()))
						}
					}
					b.Leave()
				}
			})
		}
		workersDone.Wait()
		close(done)
		watchers.Wait()
		if text := outOfRange.Load(); text != nil {
			rt.Fatalf("out of range: %s", *text)
		}
		if out := float64(lost.Load()); out+bank(b) > float64(70+earned.Load()) {
			rt.Fatalf("%v lost and %v left of 70 and %d earned", out, bank(b), earned.Load())
		}
		if out := 5 * float64(lostHedges.Load()); out+hedgeFunds(b) > 50+0.5*float64(unneeded.Load()) {
			rt.Fatalf("%v lost and %v left for hedges of 50 and %d deposits", out, hedgeFunds(b), unneeded.Load())
		}
		if s := b.state(); s.InFlight != 0 || s.Granted != uint64(granted.Load()) || s.Refused != uint64(refused.Load()) {
			rt.Fatalf("state %+v, want 0 in flight, %d granted, %d refused", s, granted.Load(), refused.Load())
		}
	})
}
