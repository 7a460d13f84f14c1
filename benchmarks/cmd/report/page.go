package main

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"example.com/grpcretry/benchmarks/behaviour"
	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/benchmarks/streams"
)

// markdown is the page. What it says of who is better is computed from the results.
func (p *page) markdown() string {
	var b strings.Builder
	for _, section := range []func() string{p.heading, p.pulses, p.outages, p.chains, p.replicas, p.kills, p.updates, p.hedgings, p.contentions, p.streamCosts, p.colophon} {
		b.WriteString(section())
		b.WriteString("\n")
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func (p *page) heading() string {
	return fmt.Sprintf(`# How retries behave

%[1]smake -C benchmarks report%[1]s writes this page and its pictures, in some seven minutes on two cores. Clients and servers are real ones of grpc, connected in memory. All but
the last table comes from virtual time (%[1]stesting/synctest%[1]s): waits take no time, nothing is timed, and what chance decides is drawn from a fixed seed for each attempt, so every peer
meets the same luck and the figures are the same on every machine. Nobody can seed the waits of grpc's own retry, of gax and of the
section on jitter, nor where round_robin begins; there, and with the quantile of failsafe, last digits differ from run to run.

Everybody makes at most %[2]d attempts, waits %[3]v before the first retry and twice as long before each further one up to %[4]v (grpc's own varies that by a fifth, gax draws from 0 up),
and retries UNAVAILABLE. What is better than ours is said below each table, with the reason. [What a call costs](COSTS.md) and [what a budget costs](BUDGET.md) have pages of their own.
`, "`", behaviour.Config.MaxAttempts, behaviour.Config.Base, behaviour.Config.Max)
}

// better says who does better than ours, and why; or that nobody does.
func better(at string, names []string, why string) string {
	if len(names) == 0 {
		return fmt.Sprintf("\nBetter than ours at %s: nobody.\n", at)
	}
	return fmt.Sprintf("\n**Better than ours at %s: %s.** %s\n", at, strings.Join(names, ", "), why)
}

// table writes rows below a heading; all columns but the first are figures.
func table(columns []string, rows [][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n| %s |\n|---|%s\n", strings.Join(columns, " | "), strings.Repeat("--:|", len(columns)-1))
	for _, row := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	return b.String()
}

func percent(share float64) string { return fmt.Sprintf("%.1f%%", 100*share) }

// retrying are the peers but none.
func retrying() (names []string) {
	for _, p := range peers.All[1:] {
		names = append(names, p.Name)
	}
	return names
}

// others are the peers for which the condition holds, but none and ours.
func others(condition func(name string) bool) (names []string) {
	for _, name := range retrying() {
		if name != peers.Ours && condition(name) {
			names = append(names, name)
		}
	}
	return names
}

func (p *page) pulse(from []behaviour.Pulse, peer string, kind behaviour.Kind, load float64) (behaviour.Pulse, bool) {
	for _, x := range from {
		if x.Peer == peer && x.Kind == kind && x.Load == load {
			return x, true
		}
	}
	return behaviour.Pulse{}, false
}

func recovery(x behaviour.Pulse, ok bool) string {
	if !ok {
		return "-"
	}
	after, recovered := x.Recovered()
	if !recovered {
		return fmt.Sprintf("never, %.0f%% lost", 100*x.LostShare())
	}
	return fmt.Sprintf("%.2f s, %.1f%% lost", after.Seconds(), 100*x.LostShare())
}

// longPulses is the table of pulses that last.
func (p *page) longPulses(columns []string) string {
	var rows [][]string
	var worst float64
	for _, peer := range peers.All[:2] {
		row := []string{peer.Name}
		for _, kind := range behaviour.FullPlan.Kinds {
			for _, load := range behaviour.FullPlan.Loads {
				x, ok := p.pulse(p.Long, peer.Name, kind, load)
				row = append(row, recovery(x, ok))
				none, _ := p.pulse(p.Long, peers.None, kind, load)
				if without, _ := none.Recovered(); ok && without > 0 {
					took, _ := x.Recovered()
					worst = max(worst, took.Seconds()/without.Seconds()-1)
				}
			}
		}
		rows = append(rows, row)
	}
	return fmt.Sprintf("\nThe price does not grow with the pulse, because with nothing answered nothing is earned. The same with one of %v: ours takes at most %.0f%% longer than no retry at all.\n\n",
		behaviour.Lasting.Pulse, 100*worst) + table(columns, rows)
}

func (p *page) pulses() string {
	s := behaviour.Full
	var b strings.Builder
	fmt.Fprintf(&b, `## Overload that feeds on itself

A server works on one request at a time, in the order in which they came, %v each (%.0f a second), and does not notice when a client has given up: dead work costs it as much as live. %d
clients make calls as a Poisson process whatever becomes of them, each attempt with a timeout of %v. Then comes a pulse of %v: a *stall* (nothing is served), *failures* (each
request is served, and then fails with UNAVAILABLE), or *overload* (twice the calls). How long does it take until calls are answered again?

![a stall at 93%% load](report/stall-93.svg)

![a stall at 70%% load](report/stall-70.svg)

![failures at 93%% load](report/failures-93.svg)

![overload at 93%% load](report/overload-93.svg)

The table has the time from the end of the pulse until no interval of %v has more than 5%% failed calls any more (*never*: not in the %.0f s that were watched), and how many of all calls were lost.
`, s.Service, 1/s.Service.Seconds(), s.Clients, s.Timeout, s.Pulse, s.Bin, s.After.Seconds())
	columns := []string{"Peer"}
	type cell struct {
		kind behaviour.Kind
		load float64
	}
	var cells []cell
	for _, kind := range behaviour.FullPlan.Kinds {
		for _, load := range behaviour.FullPlan.Loads {
			cells = append(cells, cell{kind, load})
			columns = append(columns, fmt.Sprintf("%s, %.0f%%", kind, 100*load))
		}
	}
	var rows [][]string
	for _, peer := range peers.All {
		row := []string{peer.Name}
		for _, c := range cells {
			row = append(row, recovery(p.pulse(p.Results.Pulses, peer.Name, c.kind, c.load)))
		}
		rows = append(rows, row)
	}
	lone := []string{"ours, a single client"}
	for _, c := range cells {
		lone = append(lone, recovery(p.pulse(p.Lone, peers.Ours, c.kind, c.load)))
	}
	b.WriteString(table(columns, append(rows, lone)))

	// How much later than without retries, and by how many extra requests.
	var slowest, slowestLone, worst float64
	var extra int
	var at cell
	for _, c := range cells {
		none, _ := p.pulse(p.Results.Pulses, peers.None, c.kind, c.load)
		without, _ := none.Recovered()
		if x, ok := p.pulse(p.Results.Pulses, peers.Ours, c.kind, c.load); ok {
			took, _ := x.Recovered()
			if late := (took - without).Seconds(); late > slowest {
				slowest, at, extra = late, c, x.Extra()
			}
			if without > 0 {
				worst = max(worst, took.Seconds()/without.Seconds()-1)
			}
		}
		if x, ok := p.pulse(p.Lone, peers.Ours, c.kind, c.load); ok && without > 0 {
			took, _ := x.Recovered()
			slowestLone = max(slowestLone, took.Seconds()/without.Seconds()-1)
		}
	}
	fmt.Fprintf(&b, "\nOurs recovers always. It takes up to %.2f s longer than no retry at all (%s at %.0f%% load; relatively up to %.0f%%, through a single client up to %.0f%%). That is the price of the retries that each\n"+
		"client holds when the pulse begins, five after timeouts: %d extra requests in that case, %v each, which the server has to serve with the %.0f%% of its capacity that is to spare: %.2f s. A queue that is\n"+
		"almost as long as the timeout answers some calls, which fund some more retries; so near the end of a recovery it can relapse once.\n",
		slowest, at.kind, 100*at.load, 100*worst, 100*slowestLone, extra, s.Service, 100*(1-at.load), float64(extra)*s.Service.Seconds()/(1-at.load))
	b.WriteString(p.longPulses(columns))
	b.WriteString("\n*none* and both of *native* have no timeout of an attempt: their calls have the time of one attempt, and so nothing is repeated that timed out. Retries that never recover are those that\n" +
		"go on at zero goodput: the load stays above the capacity for as long as load · (1 + extra attempts for each call) does.\n")
	b.WriteString(better("recovering", others(func(name string) bool {
		for _, c := range cells {
			x, ok := p.pulse(p.Results.Pulses, name, c.kind, c.load)
			ours, _ := p.pulse(p.Results.Pulses, peers.Ours, c.kind, c.load)
			took, recovered := x.Recovered()
			if than, _ := ours.Recovered(); ok && recovered && took < than {
				return true
			}
		}
		return false
	}), "They retry nothing after a timeout, so a stall is to them what it is without retries; the wait above is what ours adds."))
	b.WriteString(better("calls lost to failures", others(func(name string) bool {
		for _, load := range behaviour.FullPlan.Loads {
			x, ok := p.pulse(p.Results.Pulses, name, behaviour.Failures, load)
			ours, _ := p.pulse(p.Results.Pulses, peers.Ours, behaviour.Failures, load)
			if ok && x.Lost() < ours.Lost() {
				return true
			}
		}
		return false
	}), "They repeat more, and at the lower loads the server has room for it, so calls made near the pulse's end outlast it; the table shows what becomes of the higher ones."))
	return b.String()
}

func (p *page) outage(peer string, failing float64, workers int) behaviour.Outage {
	for _, o := range p.Outages {
		if o.Peer == peer && o.Failing == failing && o.Workers == workers {
			return o
		}
	}
	return behaviour.Outage{}
}

func (p *page) outages() string {
	var b strings.Builder
	plan := behaviour.FullPlan
	fmt.Fprintf(&b, `## A server that fails

%d calls by 1, 8 or 64 callers to a server of which all, half or a tenth of the attempts fail, each independently of the others, after about 10 ms. Requests for each call, and the share of the calls that succeeded.

![a total outage](report/outage.svg)
`, plan.Calls)
	columns := []string{"Peer"}
	for _, failing := range plan.Failing {
		for _, workers := range plan.Workers {
			columns = append(columns, fmt.Sprintf("%.0f%% fail, %d", 100*failing, workers))
		}
	}
	var rows [][]string
	for _, peer := range peers.All {
		row := []string{peer.Name}
		for _, failing := range plan.Failing {
			for _, workers := range plan.Workers {
				o := p.outage(peer.Name, failing, workers)
				cell := fmt.Sprintf("%.3f", o.Amplification())
				if failing < 1 {
					cell += " · " + percent(o.Success())
				}
				row = append(row, cell)
			}
		}
		rows = append(rows, row)
	}
	b.WriteString(table(columns, rows))
	half := p.outage(peers.Ours, 0.5, 64)
	fmt.Fprintf(&b, "\nThe bound of ours is (70 + S)/7 lost extra attempts, S calls having succeeded at once, and one a minute: with half failing and 64 callers %d were lost of %d.\n",
		half.LostExtras(), (70+half.FirstOK)/7+int(half.Took/time.Minute)+1)
	b.WriteString(better("load in a total outage", others(func(name string) bool {
		return p.beats(name, 1, func(x, ours behaviour.Outage) bool { return x.Requests < ours.Requests })
	}), "They have fewer retries to begin with."))
	b.WriteString(better("success while half fails", others(func(name string) bool {
		return p.beats(name, 0.5, func(x, ours behaviour.Outage) bool { return x.OK > ours.OK })
	}), fmt.Sprintf("They repeat whatever fails, by up to %.2f requests for each call where ours makes %.2f: above some 28%% of failures a budget that lives on successes runs dry, and that is what keeps the load "+
		"down when nothing succeeds.", p.mostRequests(0.5), half.Amplification())))
	b.WriteString(better("success while a tenth fails", others(func(name string) bool {
		return p.beats(name, 0.1, func(x, ours behaviour.Outage) bool { return x.OK > ours.OK })
	}), "The bound was reached by chance."))
	return b.String()
}

func (p *page) beats(name string, failing float64, than func(x, ours behaviour.Outage) bool) bool {
	for _, workers := range behaviour.FullPlan.Workers {
		if than(p.outage(name, failing, workers), p.outage(peers.Ours, failing, workers)) {
			return true
		}
	}
	return false
}

func (p *page) mostRequests(failing float64) (most float64) {
	for _, o := range p.Outages {
		if o.Failing == failing {
			most = max(most, o.Amplification())
		}
	}
	return most
}

func (p *page) chains() string {
	var b strings.Builder
	fmt.Fprintf(&b, `## Services that call services

Three or five tiers, each of which retries, and the last one is down. Requests at the last tier for each call at the top. (Eight callers, %d calls; %d for peers without a budget, which do as much for each.)
`, behaviour.FullPlan.Chain, behaviour.FullPlan.Plain)
	cells := map[string]map[int]string{}
	leaf := map[string]float64{}
	var order []string
	for _, c := range p.Chains {
		name := c.Peer
		if c.Server {
			name += ", with its interceptor on the servers"
		}
		if cells[name] == nil {
			cells[name] = map[int]string{}
			order = append(order, name)
		}
		cells[name][c.Tiers] = fmt.Sprintf("%.3f", c.AtTheLeaf())
		if c.Tiers == 5 {
			leaf[name] = c.AtTheLeaf()
		}
	}
	var rows [][]string
	for _, name := range order {
		rows = append(rows, []string{name, cells[name][3], cells[name][5]})
	}
	b.WriteString(table([]string{"Peer", "three tiers", "five tiers"}, rows))
	b.WriteString("\nOurs on the servers answers with `grpc-retry-pushback-ms: -1` when a call of its own was given up, so only the lowest tier retries. Without a budget the attempts multiply; with one they add up.\n")
	b.WriteString(better("load over five tiers", others(func(name string) bool { return leaf[name] < leaf[peers.Ours] }), "They have fewer retries to begin with."))
	return b.String()
}

func (p *page) replicas() string {
	var rows [][]string
	var ours behaviour.Replica
	success := map[string]int{}
	for _, r := range p.Replicas {
		rows = append(rows, []string{r.Peer, fmt.Sprintf("%.2f%%", 100*r.Success()), fmt.Sprintf("%.3f", r.Amplification())})
		success[r.Peer] = r.OK
		if r.Peer == peers.Ours {
			ours = r
		}
	}
	return fmt.Sprintf("## One bad replica of eight\n\n%d calls by 64 callers, in turn to eight servers (round_robin) of which one fails everything.\n", ours.Calls) +
		table([]string{"Peer", "calls that succeed", "requests for each call"}, rows) +
		better("success", others(func(name string) bool { return success[name] > ours.OK }),
			"By single calls that met the bad replica four times, as the turn had it; none was refused for want of budget.")
}

func (p *page) kills() string {
	lost := map[string][]int{}
	victims := 0
	for _, k := range p.Kills {
		lost[k.Peer] = append(lost[k.Peer], k.Lost)
		victims = k.Victims
	}
	columns := []string{"Peer"}
	for _, warm := range behaviour.FullPlan.Warm {
		columns = append(columns, fmt.Sprintf("lost after %d successful calls", warm))
	}
	var rows [][]string
	for _, peer := range peers.All {
		row := []string{peer.Name}
		for _, n := range lost[peer.Name] {
			row = append(row, fmt.Sprint(n))
		}
		rows = append(rows, row)
	}
	return fmt.Sprintf("## One of three servers is killed\n\n%d calls are in flight, %d of them at the server that is killed. How many of all are lost?\n", behaviour.InFlight, victims) +
		table(columns, rows) +
		better("calls lost by a client that has just started", others(func(name string) bool { return first(lost[name]) < first(lost[peers.Ours]) }),
			"They may retry from the start without having earned it. Ours begins with ten retries and has room for more only once calls have succeeded; a larger `Capacity` is the way out, and its price is in docs/budget.md.")
}

func first(list []int) int {
	if len(list) == 0 {
		return math.MaxInt
	}
	return list[0]
}

func (p *page) updates() string {
	var rows [][]string
	granted := map[string]int{}
	var u behaviour.Update
	for _, u = range p.Updates {
		granted[u.Peer] = u.Granted()
		quiet, updated := 0, 0
		for i := range u.Quiet {
			quiet += u.Quiet[i]
			updated += u.Updated[i]
		}
		rows = append(rows, []string{u.Peer, fmt.Sprint(quiet), fmt.Sprint(updated), fmt.Sprint(updated - quiet)})
	}
	return fmt.Sprintf("## The resolver updates during an outage\n\nThree servers are down, and eight callers make %d times %d calls. Extra requests if nothing happens, and if the resolver delivers the same addresses again before each of\nthe rounds but the first, as DNS does.\n", u.Rounds, u.Calls) +
		table([]string{"Peer", "extra requests", "with updates", "granted by them"}, rows) +
		"\nThe throttle of grpc's own retry lives in the channel's service config, and each update fills it anew. Budgets of ours belong to the target.\n" +
		better("what updates grant", others(func(name string) bool { return granted[name] < granted[peers.Ours] }), "")
}

func (p *page) hedgings() string {
	var rows [][]string
	var none behaviour.Hedging
	at := map[string]map[string]behaviour.Hedging{}
	for _, h := range p.Hedgings {
		if h.Hedger == peers.None {
			none = h
		}
		if at[h.Hedger] == nil {
			at[h.Hedger] = map[string]behaviour.Hedging{}
		}
		at[h.Hedger][h.When] = h
		row := []string{hedgerName(h)}
		for _, q := range []float64{0.5, 0.95, 0.99, 0.999} {
			row = append(row, fmt.Sprintf("%.1f ms", h.At(q).Seconds()*1000))
		}
		row = append(row, percent(h.Added()))
		for _, n := range h.SlowExtras {
			row = append(row, fmt.Sprintf("%d, %s", n, percent(float64(n)/float64(h.SlowCalls))))
		}
		rows = append(rows, row)
	}
	var faster, lighter, calmer []string
	for _, h := range p.Hedgings {
		ours := at[peers.Ours][h.When]
		if h.Hedger == peers.Ours || h.Hedger == peers.None {
			continue
		}
		for _, q := range []float64{0.95, 0.99, 0.999} {
			if h.At(q) < ours.At(q) {
				faster = append(faster, fmt.Sprintf("%s (%g%%: %.1f ms, ours %.1f ms)", hedgerName(h), 100*q, h.At(q).Seconds()*1000, ours.At(q).Seconds()*1000))
			}
		}
		if h.Requests < ours.Requests {
			lighter = append(lighter, hedgerName(h))
		}
		if h.SlowExtras[0]+h.SlowExtras[1] < ours.SlowExtras[0]+ours.SlowExtras[1] {
			calmer = append(calmer, hedgerName(h))
		}
	}
	slow := none.SlowCalls
	return fmt.Sprintf("## Hedging\n\n%d calls by eight callers to a server that answers after 9 to 11 ms, one time in twenty ten times as late. Three attempts at most. Then every reply is ten times as late: extra requests in\nthe first %d calls and in the next %d.\n\n![tails](report/hedging.svg)\n", none.Calls, slow, slow) +
		table([]string{"Hedger", "p50", "p95", "p99", "p99.9", "added load", "all slow, at first", "all slow, then"}, rows) +
		"\nfailsafe's own interceptor for grpc lets attempts that overlap write to one reply; here each has its own, around its hedge policy. A quantile of its remembers as many calls as ours.\nHedges of ours live on the calls that are answered before their hedge is due, so they stop where all replies are slow.\n" +
		better("the tail", faster, "Ours tells a quantile by buckets an eighth of a power of two wide, rounded up, so its hedges are due up to 12.5% later; the other estimates it more closely, and hedges more calls for it.") +
		better("added load while one in twenty is slow", lighter, "Its limit on hedges in flight denied some, which the highest quantile shows.") +
		better("added load while all are slow", calmer, "It hedged fewer calls before it knew.")
}

func (p *page) contentions() string {
	var rows [][]string
	runs := 0
	for _, c := range p.Contentions {
		runs = c.Runs
		rows = append(rows, []string{c.Jitter, fmt.Sprintf("%.0f ± %.0f", c.Writes.Value, c.Writes.Margin), fmt.Sprintf("%.1f ± %.1f s", c.Took.Value, c.Took.Margin)})
	}
	return fmt.Sprintf("## Jitter\n\n100 clients change one thing by optimistic concurrency, all at once: read the version, write if it is still that, else wait and start again. Messages take about 10 ms; waits are of 5 ms at first and 2 s at\nmost. It is the setting of [Exponential Backoff And Jitter](https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/). Means of %d runs, with 95%% certainty.\n", runs) +
		table([]string{"Jitter of ours", "writes tried", "until all had succeeded"}, rows)
}

func (p *page) streamCosts() string {
	title := map[string]string{}
	for _, c := range streams.Cases {
		title[c.Name] = c.Title
	}
	var rows [][]string
	columns := []string{"Stream"}
	var dearer []string
	ours := map[string]streams.Figure{}
	for _, f := range p.streams {
		switch f.Peer {
		case peers.None:
			rows = append(rows, []string{title[f.Case], fmt.Sprintf("%.0f µs", f.Micros.Mid)})
			if len(rows) == 1 {
				columns = append(columns, f.Peer)
			}
			continue
		case peers.Ours:
			ours[f.Case] = f
		default:
			if f.Ratio.High < ours[f.Case].Ratio.Low {
				dearer = append(dearer, fmt.Sprintf("%s for %q", f.Peer, title[f.Case]))
			}
		}
		if len(rows) == 1 {
			columns = append(columns, f.Peer)
		}
		rows[len(rows)-1] = append(rows[len(rows)-1], fmt.Sprintf("%.3f (%.3f–%.3f)", f.Ratio.Mid, f.Ratio.Low, f.Ratio.High))
	}
	return "## What streams cost\n\nThis is measured, not counted: the processor time of client and server together, as the ratio to plain grpc in the same round, with the interval in which the median lies with 95% certainty. Peers take\nturns in shuffled order, each with a connection of its own. In the last row plain grpc's caller sends the stream again by hand.\n" +
		table(columns, rows) +
		better("what a stream costs, beyond the intervals", dearer, "Ours keeps messages encoded, as they were at `SendMsg`, and encodes them for that besides grpc's own encoding, because a caller may use a message again; grpc's retry keeps the bytes that it encoded anyway. "+
			"What it gains: a stream may still change to another attempt after a header has come, and its deadline, budget and pushback are those of calls.")
}

func (p *page) colophon() string {
	var rows [][]string
	seen := map[string]bool{}
	for _, peer := range peers.All {
		what := peer.Note
		if peer.Retries() {
			what = fmt.Sprintf("%s %s: %s", peer.Module, version(peer.Module), peer.Note)
		}
		rows = append(rows, []string{peer.Name, what})
		seen[peer.Name] = true
	}
	for _, h := range peers.Hedgers {
		if !seen[h.Name] {
			rows = append(rows, []string{h.Name, h.Module + " " + version(h.Module) + ": " + h.Note})
		}
	}
	var b strings.Builder
	b.WriteString("## What was run, and where\n\n| Peer | What it is |\n|---|---|\n")
	for _, row := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	fmt.Fprintf(&b, "\n%s, %s, %s/%s, %d processors%s, grpc %s.\n", p.now.UTC().Format(time.DateOnly), runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), model(), version("google.golang.org/grpc"))
	return b.String()
}

// model is the processors' name where the system tells it.
func model() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	if m := regexp.MustCompile(`(?m)^model name\s*:\s*(.+)$`).FindSubmatch(text); m != nil {
		return " (" + strings.TrimSpace(string(m[1])) + ")"
	}
	return ""
}

// version is that of a module in this program.
func version(module string) string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == module && m.Version != "v0.0.0" {
				return m.Version
			}
		}
	}
	return "(this tree)"
}
