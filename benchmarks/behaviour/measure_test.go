package behaviour

import (
	"encoding/json"
	"flag"
	"io"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/grpclog"

	"example.com/grpcretry/benchmarks/peers"
)

var out = flag.String("measure", "", "run the full plan, and write its results to this `file` as JSON")

func TestMain(m *testing.M) {
	// Servers that are killed make grpc complain, hundreds of times.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	os.Exit(m.Run())
}

// Every experiment runs, small unless the report asks for it, and what
// grpcretry promises is seen in the results. An experiment that nobody runs would rot,
// and a report whose figures nobody checks could show a broken promise.
func TestMeasure(t *testing.T) {
	plan := SmallPlan
	if *out != "" {
		plan = FullPlan
	}
	var results Results
	for _, e := range plan.Experiments(&results) {
		start := time.Now()
		synctest.Test(t, func(t *testing.T) {
			if err := e.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
		if testing.Verbose() {
			t.Logf("%s: %v", e.Name, time.Since(start).Round(time.Millisecond))
		}
	}
	if t.Failed() {
		return
	}
	if *out != "" {
		text, err := json.Marshal(results)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(*out, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("outages", func(t *testing.T) { checkOutages(t, results.Outages) })
	t.Run("chains", func(t *testing.T) { checkChains(t, results.Chains) })
	t.Run("replicas", func(t *testing.T) { checkReplicas(t, results.Replicas) })
	t.Run("kills", func(t *testing.T) { checkKills(t, results.Kills) })
	t.Run("updates", func(t *testing.T) { checkUpdates(t, results.Updates) })
	t.Run("pulses", func(t *testing.T) { checkPulses(t, plan.Scene, results.Pulses) })
	t.Run("one client", func(t *testing.T) {
		lone := results.Pulses
		if plan.Scene.Clients > 1 {
			lone = results.Lone
		}
		checkLone(t, lone)
	})
	t.Run("long pulses", func(t *testing.T) { checkLong(t, results.Long) })
	t.Run("contention", func(t *testing.T) { checkContentions(t, results.Contentions) })
	t.Run("hedging", func(t *testing.T) { checkHedgings(t, results.Hedgings) })
}

// What is lost by retries stays within the bound of DESIGN.md, and retries do
// what they are for while few attempts fail. That the others retry as often as
// they may shows that the experiment can tell.
func checkOutages(t *testing.T, all []Outage) {
	for _, o := range all {
		switch {
		case o.Peer == peers.Ours:
			bound := (70+o.FirstOK)/7 + int(o.Took/time.Minute) + 1
			if lost := o.LostExtras(); lost > bound {
				t.Errorf("%+v: %d extra attempts failed, want %d at most", o, lost, bound)
			}
			if o.Failing == 0.1 && o.Success() < 0.995 {
				t.Errorf("%+v: %.2f%% of the calls succeeded, want 99.5%%", o, 100*o.Success())
			}
		case o.Peer == peers.None:
			if o.Requests != o.Calls {
				t.Errorf("%+v: repeated without a peer", o)
			}
		case o.Peer == "native-throttle" || o.Peer == "failsafe-budget":
		case o.Failing == 1 && o.Requests != Config.MaxAttempts*o.Calls:
			t.Errorf("%+v: want %d attempts for each call", o, Config.MaxAttempts)
		}
	}
}

// With its interceptor on the servers only the lowest tier repeats a call, and
// within its budget. Without budgets attempts multiply.
func checkChains(t *testing.T, all []Chain) {
	for _, c := range all {
		leaf, power := c.Requests[c.Tiers-1], 1
		for range c.Tiers {
			power *= Config.MaxAttempts
		}
		switch {
		case c.Server:
			for tier, n := range c.Requests[:c.Tiers-1] {
				if n != c.Calls {
					t.Errorf("%+v: %d requests at tier %d, want one for each call", c, n, tier+1)
				}
			}
			if leaf > c.Calls+12 { // ten at first, max(70, 10 * 8 workers) / 7 at most, and one after a minute
				t.Errorf("%+v: more than the lowest tier's budget allows", c)
			}
		case c.Peer == peers.Ours:
			if leaf > c.Calls+c.Tiers*12 {
				t.Errorf("%+v: more than the tiers' budgets allow together", c)
			}
		case c.Peer == peers.None:
			if leaf != c.Calls {
				t.Errorf("%+v: repeated without a peer", c)
			}
		case c.Peer == "native-throttle" || c.Peer == "failsafe-budget":
		case leaf != power*c.Calls:
			t.Errorf("%+v: want %d attempts at the leaf for each call", c, power)
		}
	}
}

// One bad replica of eight must not show.
func checkReplicas(t *testing.T, all []Replica) {
	for _, r := range all {
		if r.Peer == peers.Ours && r.Success() < 0.995 {
			t.Errorf("%+v: %.2f%% of the calls succeeded, want 99.5%%", r, 100*r.Success())
		}
		if r.AtTheBad < r.Calls/10 {
			t.Errorf("%+v: hardly an attempt came to the bad replica, so nothing was shown", r)
		}
	}
}

// A client that has had successes loses no call to a killed server; one that has
// just started loses all but the ten that it may retry.
func checkKills(t *testing.T, all []Kill) {
	for _, k := range all {
		lost := 0
		switch {
		case k.Peer == peers.None:
			lost = k.Victims
		case k.Peer == peers.Ours && k.Warm == 0:
			lost = k.Victims - 10
		case k.Peer == "failsafe-budget" || k.Peer == "native-throttle":
			continue // theirs to say
		}
		if k.Victims != InFlight/3 || k.Lost != lost {
			t.Errorf("%+v: want %d victims and %d calls lost", k, InFlight/3, lost)
		}
	}
}

// Updates of the resolver grant nothing.
func checkUpdates(t *testing.T, all []Update) {
	for _, u := range all {
		if n := u.Granted(); u.Peer == peers.Ours && n != 0 {
			t.Errorf("%+v: %d extra attempts were granted by updates", u, n)
		}
	}
}

// Through any number of clients, what ours adds to the time that a server needs
// without any retry is no more than it takes to serve the extra requests: these
// are bounded, and nothing goes on by itself.
func checkPulses(t *testing.T, s Scene, all []Pulse) {
	alone := withoutRetry(all)
	for _, p := range all {
		if p.Peer != peers.Ours {
			continue
		}
		took, ok := p.Recovered()
		none, recovered := alone[situation{p.Kind, p.Load}].Recovered()
		if !ok || !recovered {
			t.Errorf("%s, load %v: ours recovers after %v (%v), and without retries it is %v (%v); want both to recover", p.Kind, p.Load, took, ok, none, recovered)
			continue
		}
		extra := p.Requests - p.made()
		t.Logf("%s, load %v: ours recovers after %v, without retries it is %v; %d extra requests", p.Kind, p.Load, took, none, extra)
		// Served by the capacity that is to spare, and at either end an interval that is not whole.
		if limit := none + time.Duration(float64(extra)*float64(s.Service)/(1-p.Load)) + 2*p.Bin; s.Even && took > limit {
			t.Errorf("%s, load %v: ours recovers after %v, want %v at most, by its %d extra requests", p.Kind, p.Load, took, limit, extra)
		}
	}
}

// Through a single client, ours recovers from stalls and failures within a fifth
// more than the time that it takes without any retry.
func checkLone(t *testing.T, all []Pulse) {
	alone := withoutRetry(all)
	for _, p := range all {
		if p.Peer != peers.Ours || p.Kind == Overload {
			continue
		}
		took, ok := p.Recovered()
		none, _ := alone[situation{p.Kind, p.Load}].Recovered()
		if !ok || took > none*12/10 {
			t.Errorf("%s, load %v: ours recovers after %v (%v), without retries it is %v; want a fifth more at most", p.Kind, p.Load, took, ok, none)
		}
	}
}

// After a pulse that lasts, ours recovers within a fifth more than the time that it
// takes without any retry, whatever the pulse was: what the clients may spend does
// not grow with it.
func checkLong(t *testing.T, all []Pulse) {
	alone := withoutRetry(all)
	for _, p := range all {
		if p.Peer != peers.Ours {
			continue
		}
		took, ok := p.Recovered()
		none, recovered := alone[situation{p.Kind, p.Load}].Recovered()
		t.Logf("%s, load %v: ours recovers after %v, without retries it is %v", p.Kind, p.Load, took, none)
		if !ok || !recovered || took > none*12/10 {
			t.Errorf("%s, load %v: ours recovers after %v (%v), without retries it is %v (%v); want a fifth more at most", p.Kind, p.Load, took, ok, none, recovered)
		}
	}
}

type situation struct {
	kind Kind
	load float64
}

func withoutRetry(all []Pulse) map[situation]Pulse {
	alone := map[situation]Pulse{}
	for _, p := range all {
		if p.Peer == peers.None {
			alone[situation{p.Kind, p.Load}] = p
		}
	}
	return alone
}

// Clients that spread their waits need fewer writes than those that do not.
func checkContentions(t *testing.T, all []Contentions) {
	for _, c := range all[1:] {
		if none := all[0]; c.Writes.Value >= none.Writes.Value || c.Took.Value >= none.Took.Value {
			t.Errorf("%+v, and without jitter %+v", c, none)
		}
	}
}

// Hedges cut the tail for a tenth of the load at most, and stop where everything is slow:
// what the funds hold is spent, which is ten hedges and a tenth of the calls at
// most, and then there are none but for chance.
func checkHedgings(t *testing.T, all []Hedging) {
	for _, h := range all {
		if h.Hedger != peers.Ours {
			continue
		}
		if none := all[0].At(0.99); h.At(0.99) > none*3/10 {
			t.Errorf("%+v: p99 is %v, want 30%% of %v at most", h, h.At(0.99), none)
		}
		if h.Added() > 0.1 {
			t.Errorf("%+v: %.2f%% added load, want 10%% at most", h, 100*h.Added())
		}
		if first, later := h.SlowExtras[0], h.SlowExtras[1]; first+later > 10+2*h.SlowCalls/10 || later > 8+h.SlowCalls/100 {
			t.Errorf("%+v: %d and %d hedges while all replies are slow", h, first, later)
		}
	}
}

// Two runs must draw the same picture, or nobody could tell a change from chance.
func TestPulsesAreDeterministic(t *testing.T) {
	scene := SmallPlan.Scene
	scene.Even, scene.Clients, scene.After = false, 3, time.Second
	for _, p := range peers.All[:5] {
		var runs [2][]byte
		for i := range runs {
			synctest.Test(t, func(t *testing.T) {
				result, err := scene.RunPulse(t.Context(), p, Stall, 0.85)
				if err != nil {
					t.Fatal(err)
				}
				if runs[i], err = json.Marshal(result); err != nil {
					t.Fatal(err)
				}
			})
		}
		if string(runs[0]) != string(runs[1]) {
			t.Errorf("%s: two runs differ:\n%s\n%s", p.Name, runs[0], runs[1])
		}
	}
}
