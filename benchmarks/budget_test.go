package benchmarks

import (
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"example.com/grpcretry"
)

// lockedBucket is the plainest budget of the same kind: tokens under a mutex,
// filled by successes, refunded for winners. It has no room that follows the
// calls in flight, no free retry and no counts.
type lockedBucket struct {
	mu               sync.Mutex
	tokens, capacity float64
}

func (b *lockedBucket) success(earned float64) {
	b.mu.Lock()
	b.tokens = min(b.capacity, b.tokens+earned)
	b.mu.Unlock()
}

func (b *lockedBucket) take(cost float64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.tokens < cost {
		return false
	}
	b.tokens -= cost
	return true
}

const (
	earned   = 1.0 / 64 // so small that a bucket does not fill up during a run
	drained  = 1 << 16  // what emptying takes, as often as that takes to earn
	everyNth = 1 << 22
)

// newBudget is ours with room for much, and for a drain of it.
func newBudget(b *testing.B) *grpcretry.TokenBudget {
	b.Helper()
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{
		Capacity: 1 << 19, PerCall: -1, Deposit: earned,
		Costs: grpcretry.BudgetCosts{Timeout: drained, Overload: 1 << 19},
	})
	if err != nil {
		b.Fatal(err)
	}
	return budget
}

// verbs are what a call does to a budget. setup makes what one peer needs and
// returns what to do n times; n counts from 1, on each goroutine by itself.
var verbs = []struct {
	verb  string
	peers []peer
}{
	// A success of a client whose budget is full, as in good times.
	{"success/writes=no", []peer{
		{"ours", func(b *testing.B) func(int) {
			budget := newBudget(b)
			return func(int) { budget.Record(grpcretry.OutcomeOK) }
		}},
		{"mutex", func(*testing.B) func(int) {
			bucket := &lockedBucket{tokens: 1 << 19, capacity: 1 << 19}
			return func(int) { bucket.success(earned) }
		}},
	}},
	// A success that fills the budget.
	{"success/writes=yes", []peer{
		{"ours", func(b *testing.B) func(int) {
			budget := newBudget(b)
			budget.Reserve(grpcretry.CostOverload) // all of it
			return func(n int) {
				budget.Record(grpcretry.OutcomeOK)
				if n%everyNth == 0 {
					budget.Reserve(grpcretry.CostTimeout)
				}
			}
		}},
		{"mutex", func(*testing.B) func(int) {
			bucket := &lockedBucket{capacity: 1 << 19}
			return func(n int) {
				bucket.success(earned)
				if n%everyNth == 0 {
					bucket.take(drained)
				}
			}
		}},
	}},
	// A retry that is granted, and wins: the balance stays. A limiter of rates
	// knows no refund, so its tokens are so many that they do not run out.
	{"grant", []peer{
		{"ours", func(b *testing.B) func(int) {
			budget := newBudget(b)
			return func(int) {
				if g, ok := budget.Reserve(grpcretry.CostTransient); ok {
					budget.Settle(g, true)
				}
			}
		}},
		{"rate", func(*testing.B) func(int) {
			limiter := rate.NewLimiter(1e12, 1<<40)
			return func(int) { limiter.AllowN(time.Now(), 7) }
		}},
		{"mutex", func(*testing.B) func(int) {
			bucket := &lockedBucket{tokens: 1 << 19, capacity: 1 << 19}
			return func(int) {
				if bucket.take(7) {
					bucket.success(7)
				}
			}
		}},
	}},
	// A retry that is refused, as nearly all are in an outage.
	{"refusal", []peer{
		{"ours", func(b *testing.B) func(int) {
			budget := newBudget(b)
			budget.Reserve(grpcretry.CostOverload) // all of it
			return func(int) { budget.Reserve(grpcretry.CostTransient) }
		}},
		{"ours-without-free-retry", func(b *testing.B) func(int) {
			budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{FreeInterval: -1})
			if err != nil {
				b.Fatal(err)
			}
			for range 10 {
				budget.Reserve(grpcretry.CostTransient)
			}
			return func(int) { budget.Reserve(grpcretry.CostTransient) }
		}},
		{"rate", func(*testing.B) func(int) {
			limiter := rate.NewLimiter(1.0/60, 7)
			limiter.AllowN(time.Now(), 7)
			return func(int) { limiter.AllowN(time.Now(), 7) }
		}},
		{"mutex", func(*testing.B) func(int) {
			bucket := &lockedBucket{capacity: 70}
			return func(int) { bucket.take(7) }
		}},
	}},
	// What every call does besides: a limiter of rates has no such thing.
	{"enter+leave", []peer{
		{"ours", func(b *testing.B) func(int) {
			budget := newBudget(b)
			return func(int) { budget.Enter(); budget.Leave() }
		}},
	}},
}

type peer struct {
	name  string
	setup func(*testing.B) func(n int)
}

// BenchmarkBudget compares what one call costs. The peer none is the loop.
func BenchmarkBudget(b *testing.B) {
	for _, v := range verbs {
		none := peer{"none", func(*testing.B) func(int) { return func(int) {} }}
		for _, p := range append([]peer{none}, v.peers...) {
			b.Run("verb="+v.verb+"/mode=serial/peer="+p.name, func(b *testing.B) {
				do := p.setup(b)
				b.ReportAllocs()
				for n := 1; b.Loop(); n++ {
					do(n)
				}
			})
			b.Run("verb="+v.verb+"/mode=parallel/peer="+p.name, func(b *testing.B) {
				do := p.setup(b)
				b.ReportAllocs()
				b.RunParallel(func(pb *testing.PB) {
					for n := 1; pb.Next(); n++ {
						do(n)
					}
				})
			})
		}
	}
}

// A benchmark of a verb that does not do what its name says measures nothing.
func TestVerbsDoWhatTheySay(t *testing.T) {
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{
		Capacity: 1 << 19, PerCall: -1, Deposit: earned,
		Costs: grpcretry.BudgetCosts{Timeout: drained, Overload: 1 << 19},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := budget.Reserve(grpcretry.CostOverload); !ok || budget.Balance() != 0 {
		t.Errorf("a full budget gives %v and keeps %v, want all of it", ok, budget.Balance())
	}
	if _, ok := budget.Reserve(grpcretry.CostTransient); ok {
		t.Error("an empty budget grants")
	}
	for range 64 {
		budget.Record(grpcretry.OutcomeOK)
	}
	if got, want := budget.Balance(), 1.0/(1<<19); got != want {
		t.Errorf("balance %v after 64 deposits, want %v", got, want)
	}
	limiter := rate.NewLimiter(1.0/60, 7)
	if now := time.Now(); !limiter.AllowN(now, 7) || limiter.AllowN(now, 7) {
		t.Error("the limiter gives not exactly 7")
	}
	bucket := &lockedBucket{capacity: 70}
	if bucket.take(7) {
		t.Error("an empty bucket grants")
	}
	bucket.success(7)
	if !bucket.take(7) || bucket.take(7) {
		t.Error("a bucket with 7 gives not exactly 7")
	}
}
