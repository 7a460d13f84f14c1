package grpcretry

import (
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func mustThrottle(t testing.TB, maxTokens int, tokenRatio float64) *Throttle {
	t.Helper()
	th, err := NewThrottle(maxTokens, tokenRatio)
	if err != nil {
		t.Fatalf("NewThrottle(%d, %v): %v", maxTokens, tokenRatio, err)
	}
	return th
}

// throttledCall runs a call with up to maxAttempts attempts whose first
// failures fail, as the call loop does, and returns how many were made.
func throttledCall(b Budget, failures, maxAttempts int) (attempts int, ok bool) {
	b.Enter()
	defer b.Leave()
	for attempts = 1; ; attempts++ {
		if attempts > failures {
			b.Record(map[bool]Outcome{true: OutcomeOK, false: OutcomeExtraOK}[attempts == 1])
			return attempts, true
		}
		b.Record(OutcomeFailure)
		if attempts == maxAttempts {
			return attempts, false
		}
		g, ok := b.Reserve(CostTransient)
		if !ok {
			return attempts, false
		}
		b.Settle(g, attempts == failures)
	}
}

// A team that moves its retryThrottling block to us must see the very same
// retries. These are the calls of grpc-go's own test of it, with maxTokens 10
// and tokenRatio 0.5.
func TestThrottleAsInGRPC(t *testing.T) {
	th := mustThrottle(t, 10, 0.5)
	for i, tt := range []struct {
		failures int // of the servers, before they answer
		attempts int
		ok       bool
		tokens   float64
	}{
		{0, 1, true, 10},  // 10, is full
		{2, 3, true, 8.5}, // 9, 8, 8.5
		{2, 3, true, 7},   // 7.5, 6.5, 7
		{9, 2, false, 5},  // 6 is retried; 5 is not: it is not more than half
		{9, 1, false, 4},  // 4
		{0, 1, true, 4.5}, // the first attempt is always sent
		{0, 1, true, 5},
		{0, 1, true, 5.5},
		{0, 1, true, 6},
		{0, 1, true, 6.5},
		{1, 2, true, 6},  // 5.5 is retried; 6
		{9, 1, false, 5}, // 5 is not
	} {
		attempts, ok := throttledCall(th, tt.failures, 4)
		if got := th.state().Tokens; attempts != tt.attempts || ok != tt.ok || got != tt.tokens {
			t.Errorf("call %d: %d attempts, ok %v, %v tokens; want %d, %v, %v", i, attempts, ok, got, tt.attempts, tt.ok, tt.tokens)
		}
	}
	if s := th.state(); s.Granted != 6 || s.Refused != 3 || s.Capacity != 10 || s.Balance != 0.5 {
		t.Errorf("state %+v, want 6 granted, 3 refused, capacity 10, balance 0.5", s)
	}
}

// A long time of success must not save up retries for the outage after it.
func TestThrottleClamps(t *testing.T) {
	th := mustThrottle(t, 10, 0.1)
	record(th, OutcomeOK, 1_000_000)
	if got := th.state().Tokens; got != 10 {
		t.Fatalf("%v tokens after a million successes, want 10", got)
	}
	granted := 0
	for range 1000 {
		th.Record(OutcomeFailure)
		if _, ok := th.Reserve(CostTransient); ok {
			granted++
		}
		if got := th.state(); got.Tokens < 0 || got.Tokens > 10 || got.Balance < 0 || got.Balance > 1 {
			t.Fatalf("state %+v, want 0 to 10 tokens", got)
		}
	}
	if granted != 4 { // 9, 8, 7, 6; the fifth failure leaves 5
		t.Errorf("%d retries, want 4", granted)
	}
	if got := th.state().Tokens; got != 0 {
		t.Errorf("%v tokens after a thousand failures, want 0", got)
	}
	record(th, OutcomeExtraOK, 50)
	if _, ok := th.Reserve(CostTransient); ok {
		t.Error("granted at exactly half")
	}
	th.Record(OutcomeOK)
	if _, ok := th.Reserve(CostTransient); !ok {
		t.Error("refused at more than half")
	}
}

// An odd maximum has its half between two tokens; whole-number division would
// grant one retry too many.
func TestThrottleHalf(t *testing.T) {
	for _, tt := range []struct {
		max     int
		ratio   float64
		granted int // retries after a start with all tokens
	}{
		{1, 0.1, 0}, // 0
		{2, 0.1, 0}, // 1 is half
		{3, 0.1, 1}, // 2; 1 is less than 1.5
		{4, 0.1, 1}, // 3; 2 is half
		{5, 0.1, 2}, // 4, 3; 2 is less than 2.5
		{1000, 0.1, 499},
	} {
		th := mustThrottle(t, tt.max, tt.ratio)
		granted := 0
		for range 2000 {
			th.Record(OutcomeFailure)
			if _, ok := th.Reserve(CostTransient); ok {
				granted++
			}
		}
		if granted != tt.granted {
			t.Errorf("maxTokens %d: %d retries, want %d", tt.max, granted, tt.granted)
		}
	}
}

// The ratio counts in thousandths, by its decimal digits.
func TestThrottleRatio(t *testing.T) {
	for _, tt := range []struct {
		ratio  float64
		tokens float64 // after one success from empty, of 1000
	}{
		{0.5466, 0.546}, // the example of the specification
		{0.5999999, 0.599},
		{0.001, 0.001},
		{0.0019, 0.001},
		{0.1, 0.1},
		{0.57, 0.57},
		{1.001, 1.001}, // 1000*1.001 is 1000.9999999999999
		{2.3, 2.3},
		{64, 64},
		{999.9999, 999.999},
		{1000, 1000},
		{1001, 1000}, // fills it, no more
		{1e300, 1000},
	} {
		th := mustThrottle(t, 1000, tt.ratio)
		record(th, OutcomeFailure, 1000)
		th.Record(OutcomeOK)
		if got := th.state().Tokens; got != tt.tokens {
			t.Errorf("tokenRatio %v: a success adds %v, want %v", tt.ratio, got, tt.tokens)
		}
	}
}

// What counts: failures and either kind of success. Reserve, Release, Settle,
// hedges that were not needed, and time, change nothing.
func TestThrottleCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		th := mustThrottle(t, 10, 0.5)
		record(th, OutcomeFailure, 2)
		for _, c := range allCosts {
			g, ok := th.Reserve(c)
			if !ok || g != (Grant{}) {
				t.Errorf("Reserve(%d) = %v, %v at 8 of 10", c, g, ok)
			}
			th.Settle(g, true)
			th.Settle(g, false)
			th.Release(g)
		}
		th.Record(OutcomeHedgeUnneeded)
		th.Record(0)
		th.Record(99)
		th.Enter()
		time.Sleep(time.Hour)
		th.Leave()
		if got := th.state().Tokens; got != 8 {
			t.Errorf("%v tokens, want 8", got)
		}
		record(th, OutcomeFailure, 3)
		for _, c := range allCosts {
			if _, ok := th.Reserve(c); ok {
				t.Errorf("Reserve(%d) granted at 5 of 10", c)
			}
		}
		time.Sleep(24 * time.Hour) // time alone refills nothing
		if _, ok := th.Reserve(CostTransient); ok {
			t.Error("granted a day later")
		}
	})
}

func TestThrottleErrors(t *testing.T) {
	for _, tt := range []struct {
		max   int
		ratio float64
		want  []string
	}{
		{0, 0.1, []string{"grpcretry: maxTokens = 0, want 1 to 1000"}},
		{-5, 0.1, []string{"maxTokens = -5"}},
		{1001, 0.1, []string{"maxTokens = 1001, want 1 to 1000"}},
		{10, 0, []string{"grpcretry: tokenRatio = 0, want a number of at least 0.001"}},
		{10, -0.1, []string{"tokenRatio = -0.1"}},
		{10, 0.0009, []string{"tokenRatio = 0.0009"}},
		{10, math.NaN(), []string{"tokenRatio = NaN"}},
		{10, math.Inf(1), []string{"tokenRatio = +Inf"}},
		{0, 0, []string{"maxTokens = 0", "tokenRatio = 0"}},
	} {
		th, err := NewThrottle(tt.max, tt.ratio)
		if err == nil || th != nil {
			t.Errorf("NewThrottle(%d, %v) = %v, %v; want an error", tt.max, tt.ratio, th, err)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		if len(lines) != len(tt.want) {
			t.Errorf("NewThrottle(%d, %v): error %q, want %d lines", tt.max, tt.ratio, err, len(tt.want))
			continue
		}
		for i := range lines {
			if !strings.Contains(lines[i], tt.want[i]) {
				t.Errorf("NewThrottle(%d, %v): line %d = %q, want it to tell %q", tt.max, tt.ratio, i, lines[i], tt.want[i])
			}
		}
	}
}

// A reload in the middle of an outage takes the new limits and must not refill
// what the outage has used up: that is the fault of the built-in one.
func TestThrottleRescale(t *testing.T) {
	th := mustThrottle(t, 10, 0.1)
	record(th, OutcomeFailure, 4) // 6 of 10
	for _, tt := range []struct {
		max            int
		ratio          float64
		tokens, second float64 // after rescaling, and after one success
	}{
		{100, 1, 60, 61},
		{1000, 0.5, 610, 610.5},
		{10, 0.1, 6.105, 6.205},
		{1, 1, 0.620, 1}, // rounded down
		{1000, 0.001, 1000, 1000},
	} {
		if err := th.Rescale(tt.max, tt.ratio); err != nil {
			t.Fatal(err)
		}
		if s := th.state(); s.Tokens != tt.tokens || s.Capacity != float64(tt.max) {
			t.Errorf("Rescale(%d, %v): state %+v, want %v tokens", tt.max, tt.ratio, s, tt.tokens)
		}
		th.Record(OutcomeOK)
		if got := th.state().Tokens; got != tt.second {
			t.Errorf("Rescale(%d, %v): %v tokens after a success, want %v", tt.max, tt.ratio, got, tt.second)
		}
	}
	if err := th.Rescale(0, 1); err == nil {
		t.Error("Rescale with maxTokens 0: no error")
	}

	// In mid-traffic.
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					throttledCall(th, 1, 3)
				}
			}
		})
	}
	for i := range 5000 {
		if err := th.Rescale(1+i%1000, 0.1); err != nil {
			t.Fatal(err)
		}
		if s := th.state(); s.Tokens < 0 || s.Tokens > s.Capacity || s.Capacity != float64(1+i%1000) {
			t.Fatalf("state %+v", s)
		}
	}
	close(stop)
	wg.Wait()
}

// A thousand calls that fail at once are all counted, and those that are
// granted a retry found more than half.
func TestThrottleHerd(t *testing.T) {
	th := mustThrottle(t, 100, 0.1)
	var granted atomic.Int64
	var wg sync.WaitGroup
	start := make(chan struct{})
	for range 1000 {
		wg.Go(func() {
			<-start
			th.Record(OutcomeFailure)
			if _, ok := th.Reserve(CostTransient); ok {
				granted.Add(1)
			}
		})
	}
	close(start)
	wg.Wait()
	if got := granted.Load(); got > 49 {
		t.Errorf("%d retries, want at most 49", got)
	}
	if s := th.state(); s.Tokens != 0 || s.Granted != uint64(granted.Load()) || s.Granted+s.Refused != 1000 {
		t.Errorf("state %+v, want 0 tokens and 1000 answers", s)
	}
}

// Under full contention every failure and every success is counted once.
func TestThrottleCountsUnderContention(t *testing.T) {
	th := mustThrottle(t, 1000, 1)
	record(th, OutcomeFailure, 300)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200_000 { // never near 0 or 1000
				th.Record(OutcomeFailure)
				th.Record(OutcomeOK)
			}
		})
	}
	wg.Wait()
	if got := th.state().Tokens; got != 700 {
		t.Errorf("%v tokens after as many failures as successes, want 700 as before", got)
	}
}

// Step by step the throttle must do what the plain rules say. Ratios of whole
// eighths are exact both in thousandths and in the model's floating point.
func TestThrottleAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := float64(rapid.IntRange(1, 1000).Draw(t, "maxTokens"))
		ratio := float64(rapid.IntRange(1, 80).Draw(t, "eighths")) / 8
		th, err := NewThrottle(int(m), ratio)
		if err != nil {
			t.Fatal(err)
		}
		tokens := m
		t.Repeat(map[string]func(*rapid.T){
			"successes": func(t *rapid.T) {
				for range rapid.IntRange(1, 100).Draw(t, "n") {
					th.Record(rapid.SampledFrom([]Outcome{OutcomeOK, OutcomeExtraOK}).Draw(t, "outcome"))
					tokens = min(m, tokens+ratio)
				}
			},
			"failures": func(t *rapid.T) {
				for range rapid.IntRange(1, 300).Draw(t, "n") {
					th.Record(OutcomeFailure)
					tokens = max(0, tokens-1)
				}
			},
			"": func(t *rapid.T) {
				_, got := th.Reserve(rapid.SampledFrom(allCosts).Draw(t, "cost"))
				if want := tokens > m/2; got != want || th.state().Tokens != tokens || th.Balance() != tokens/m {
					t.Fatalf("granted %v, state %+v; want %v at %v of %v", got, th.state(), want, tokens, m)
				}
			},
		})
	})
}
