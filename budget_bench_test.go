package grpcretry

import "testing"

// BenchmarkBudget measures what a budget adds to a call: by verb, with one
// goroutine and with one for each processor.
func BenchmarkBudget(b *testing.B) {
	full := func(b *testing.B) Budget { return mustBudget(b, BudgetConfig{}) }
	roomy := func(b *testing.B) Budget { return mustBudget(b, BudgetConfig{Capacity: maxTokens}) }
	empty := func(b *testing.B) Budget {
		t := mustBudget(b, BudgetConfig{})
		for range 10 {
			t.Reserve(CostTransient)
		}
		return t
	}
	throttle := func(b *testing.B) Budget { return mustThrottle(b, 10, 0.1) }
	for _, bm := range []struct {
		name   string
		budget func(*testing.B) Budget
		do     func(Budget)
	}{
		{"verb=none", full, func(Budget) {}},
		{"verb=ok/writes=no", full, func(t Budget) { t.Record(OutcomeOK) }},
		{"verb=ok/writes=yes", roomy, func(t Budget) {
			if w := &t.(*TokenBudget).word; w.Load() == maxUnits {
				w.Store(0) // once in a million deposits
			}
			t.Record(OutcomeOK)
		}},
		{"verb=enter+leave", full, func(t Budget) { t.Enter(); t.Leave() }},
		{"verb=enter+ok+leave", full, func(t Budget) { t.Enter(); t.Record(OutcomeOK); t.Leave() }},
		{"verb=grant+win", roomy, func(t Budget) {
			if g, ok := t.Reserve(CostTransient); ok {
				t.Settle(g, true)
			}
		}},
		{"verb=grant/cost=0", full, func(t Budget) { t.Reserve(CostUnsent) }},
		{"verb=refuse", empty, func(t Budget) { t.Reserve(CostTransient) }},
		{"verb=ok/writes=no/budget=throttle", throttle, func(t Budget) { t.Record(OutcomeOK) }},
		{"verb=failure+ok/budget=throttle", throttle, func(t Budget) { t.Record(OutcomeFailure); t.Record(OutcomeExtraOK) }},
		{"verb=grant/budget=throttle", throttle, func(t Budget) { t.Reserve(CostTransient) }},
	} {
		b.Run(bm.name+"/mode=serial", func(b *testing.B) {
			t := bm.budget(b)
			b.ReportAllocs()
			for b.Loop() {
				bm.do(t)
			}
		})
		b.Run(bm.name+"/mode=parallel", func(b *testing.B) {
			t := bm.budget(b)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					bm.do(t)
				}
			})
		})
	}
}
