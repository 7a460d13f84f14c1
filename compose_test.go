package grpcretry

import (
	"slices"
	"strings"
	"sync"
	"testing"
)

// What one budget gave before another refused must come back, or every refusal
// of a method's budget drains its target's.
func TestAllOfReleasesOnRefusal(t *testing.T) {
	target := mustBudget(t, BudgetConfig{})
	method := mustBudget(t, BudgetConfig{Capacity: 14, PerCall: -1})
	b, err := AllOf(target, method)
	if err != nil {
		t.Fatal(err)
	}
	check := func(when string, wantTarget, wantMethod, balance float64) {
		t.Helper()
		if bank(target) != wantTarget || bank(method) != wantMethod || b.Balance() != balance {
			t.Errorf("%s: target %v, method %v, balance %v; want %v, %v, %v",
				when, bank(target), bank(method), b.Balance(), wantTarget, wantMethod, balance)
		}
	}
	first, ok := b.Reserve(CostTransient)
	if !ok {
		t.Fatal("first retry refused")
	}
	check("one", 63, 7, 0.5)
	second, ok := b.Reserve(CostTransient)
	if !ok {
		t.Fatal("second retry refused")
	}
	check("two", 56, 0, 0)
	for range 100 {
		if g, ok := b.Reserve(CostTransient); ok || g != (Grant{}) {
			t.Fatalf("third retry: %v, %v", g, ok)
		}
	}
	check("refused", 56, 0, 0)
	b.Settle(first, false)
	check("lost", 56, 0, 0)
	b.Release(second)
	check("released", 63, 7, 0.5)
	hedge, ok := b.Reserve(CostHedge)
	if !ok || hedgeFunds(target) != 45 || hedgeFunds(method) != 45 {
		t.Fatalf("hedge: %v, funds %v and %v, want true, 45 and 45", ok, hedgeFunds(target), hedgeFunds(method))
	}
	b.Settle(hedge, true)
	if hedgeFunds(target) != 50 || hedgeFunds(method) != 50 {
		t.Fatalf("hedge won: funds %v and %v, want 50 and 50", hedgeFunds(target), hedgeFunds(method))
	}
	b.Enter()
	b.Record(OutcomeOK)
	check("success", 64, 8, 8.0/14)
	if got, want := b.state(), (BudgetState{Balance: 8.0 / 14, Tokens: 8, Capacity: 14, Granted: 3, Refused: 100, InFlight: 1}); got != want {
		t.Errorf("state %+v, want %+v", got, want)
	}
	if got := target.state(); got.Granted != 3 || got.Refused != 0 || got.InFlight != 1 {
		t.Errorf("target's state %+v, want 3 granted, 0 refused, 1 in flight", got)
	}
	b.Leave()
	if b.state().InFlight != 0 {
		t.Errorf("state %+v, want 0 in flight", b.state())
	}
}

func TestAllOf(t *testing.T) {
	var leaves [5]Budget
	for i := range leaves {
		leaves[i] = mustBudget(t, BudgetConfig{})
	}
	throttle, err := NewThrottle(10, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := AllOf(leaves[0], leaves[1])
	if err != nil {
		t.Fatal(err)
	}
	same := func(b Budget, want ...Budget) bool {
		a, ok := b.(*allOf)
		return ok && slices.EqualFunc(a.leaves, want, func(l leaf, w Budget) bool { return l == w })
	}

	if b, err := AllOf(leaves[0]); err != nil || b != leaves[0] {
		t.Errorf("AllOf of one = %v, %v; want itself", b, err)
	}
	if b, err := AllOf(leaves[0], leaves[0]); err != nil || b != leaves[0] {
		t.Errorf("AllOf of one twice = %v, %v; want itself", b, err)
	}
	if b, err := AllOf(pair, throttle, leaves[1], pair); err != nil || !same(b, leaves[0], leaves[1], throttle) {
		t.Errorf("nested AllOf = %+v, %v; want its three leaves in order", b, err)
	}
	if b, err := AllOf(leaves[:4]...); err != nil || !same(b, leaves[:4]...) {
		t.Errorf("AllOf of four = %+v, %v", b, err)
	}
	if b, err := AllOf(Unlimited(), leaves[0]); err != nil || b != leaves[0] {
		t.Errorf("AllOf of Unlimited and another = %v, %v; want the other", b, err)
	}
	if b, err := AllOf(Unlimited(), Unlimited()); err != nil || b != Unlimited() {
		t.Errorf("AllOf of Unlimited = %v, %v; want Unlimited", b, err)
	}

	for _, tt := range []struct {
		name string
		list []Budget
		want []string
	}{
		{"empty", nil, []string{"AllOf: 0 budgets, want 1 to 4"}},
		{"nil entries", []Budget{nil, leaves[0], nil}, []string{"budget 1 of 3 is nil", "budget 3 of 3 is nil"}},
		{"nil pointers", []Budget{(*TokenBudget)(nil), (*Throttle)(nil)}, []string{"budget 1 of 2 is a nil *TokenBudget, want a budget of this package", "budget 2 of 2 is a nil *Throttle"}},
		{"declared, not made", []Budget{new(TokenBudget), leaves[0], new(Throttle)}, []string{"budget 1 of 3 is a TokenBudget that NewBudget did not make", "budget 3 of 3 is a Throttle that NewThrottle did not make"}},
		{"five", leaves[:], []string{"AllOf: 5 different budgets, want 1 to 4"}},
		{"a disguise", []Budget{struct{ Budget }{leaves[0]}}, []string{"budget 1 of 1 is a struct { grpcretry.Budget }, want a budget of this package"}},
	} {
		b, err := AllOf(tt.list...)
		if err == nil || b != nil {
			t.Errorf("%s: AllOf = %v, %v; want an error", tt.name, b, err)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		if len(lines) != len(tt.want) {
			t.Errorf("%s: error %q, want %d lines", tt.name, err, len(tt.want))
			continue
		}
		for i := range lines {
			if !strings.Contains(lines[i], tt.want[i]) {
				t.Errorf("%s: line %d = %q, want it to tell %q", tt.name, i, lines[i], tt.want[i])
			}
		}
	}
}

// Two callers with the opposite order of the same two budgets must neither
// deadlock nor lose tokens.
func TestAllOfConcurrent(t *testing.T) {
	a, b := mustBudget(t, BudgetConfig{FreeInterval: -1}), mustBudget(t, BudgetConfig{FreeInterval: -1})
	ab, err := AllOf(a, b)
	if err != nil {
		t.Fatal(err)
	}
	ba, err := AllOf(b, a)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 8 {
		both := []Budget{ab, ba}[i%2]
		wg.Go(func() {
			for range 2000 {
				if g, ok := both.Reserve(CostTransient); ok {
					both.Settle(g, true)
				}
			}
		})
	}
	wg.Wait()
	if bank(a) != 70 || bank(b) != 70 {
		t.Errorf("%v and %v tokens left, want 70 and 70", bank(a), bank(b))
	}
	if n := ab.state().Granted + ba.state().Granted; a.state().Granted != n || b.state().Granted != n {
		t.Errorf("granted %d by the pairs, %d and %d by their parts", n, a.state().Granted, b.state().Granted)
	}
}

func TestUnlimited(t *testing.T) {
	b := Unlimited()
	b.Enter()
	for range 10_000 {
		b.Record(OutcomeFailure)
		g, ok := b.Reserve(CostTimeout)
		if !ok {
			t.Fatal("Unlimited refused")
		}
		b.Settle(g, false)
		b.Release(Grant{})
	}
	b.Leave()
	if got := b.state(); b.Balance() != 1 || got != (BudgetState{Balance: 1}) {
		t.Errorf("Balance = %v, state %+v; want 1", b.Balance(), got)
	}
}
