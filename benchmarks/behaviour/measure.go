package behaviour

import (
	"context"
	"fmt"
	"math"
	"time"

	"example.com/grpcretry/benchmarks/peers"
)

// Results are what came of all experiments.
type Results struct {
	Outages     []Outage
	Chains      []Chain
	Replicas    []Replica
	Kills       []Kill
	Updates     []Update
	Pulses      []Pulse // through as many clients as the plan's scene has
	Lone        []Pulse // through a single one
	Long        []Pulse // with a pulse that lasts, through none and ours
	Contentions []Contentions
	Hedgings    []Hedging
}

// Contentions are several runs with one jitter.
type Contentions struct {
	Jitter       string
	Runs         int
	Writes, Took Mean // of writes tried, and in seconds
}

// Mean is a mean, and how far from it the true one may lie either way with 95% certainty.
type Mean struct{ Value, Margin float64 }

// Plan says how large the experiments are.
type Plan struct {
	Failing []float64
	Workers []int
	Calls   int // in each outage
	Ours    int // the same for ours, whose bound is asserted

	Tiers    []int
	Chain    int // calls of each chain
	Plain    int // the same through peers without a budget, which do as much for each
	Replica  int
	Warm     []int // successful calls before a server is killed
	Rounds   int   // of calls between updates of the resolver
	PerRound int

	Scene     Scene
	Loads     []float64
	Kinds     []Kind
	Bystander []float64 // the loads that peers other than none and ours are given
	Lasting   Scene     // of the long pulses
	LongLoads []float64

	Runs int // of the contention with each jitter

	Hedged, Slow int // calls of RunHedging
}

// FullPlan is that of the report.
var FullPlan = Plan{
	Failing: []float64{1, 0.5, 0.1}, Workers: []int{1, 8, 64}, Calls: 2000, Ours: 2000,
	Tiers: []int{3, 5}, Chain: 500, Plain: 20, Replica: 8000, Warm: []int{0, 990}, Rounds: 20, PerRound: 100,
	Scene: Full, Loads: []float64{0.7, 0.85, 0.93}, Kinds: Kinds, Bystander: []float64{0.7, 0.85, 0.93},
	Lasting: Lasting, LongLoads: []float64{0.7, 0.85, 0.93},
	Runs: 200, Hedged: 20000, Slow: 2000,
}

// SmallPlan takes seconds, and still asks of ours all that is promised.
var SmallPlan = Plan{
	Failing: []float64{1, 0.5, 0.1}, Workers: []int{64}, Calls: 64, Ours: 1000,
	Tiers: []int{3}, Chain: 40, Plain: 1, Replica: 160, Warm: []int{0, 2 * InFlight}, Rounds: 2, PerRound: 24,
	Scene: Scene{
		Service: 10 * time.Millisecond, Timeout: 300 * time.Millisecond, Pulse: time.Second,
		Before: 500 * time.Millisecond, Settle: 800 * time.Millisecond, Bin: 100 * time.Millisecond, Clients: 1, Even: true,
	},
	Loads: []float64{0.7, 0.85, 0.93}, Kinds: Kinds,
	Lasting: Lasting, LongLoads: []float64{0.7},
	Runs: 2, Hedged: 240, Slow: 100,
}

// Experiment is one of a plan: to be run in a bubble of its own, where it puts
// what came of it into the results.
type Experiment struct {
	Name string
	Run  func(context.Context) error
}

// Experiments lists all of the plan, in the order of their results.
func (plan Plan) Experiments(r *Results) (all []Experiment) {
	add := func(run func(context.Context) error, name string, args ...any) {
		all = append(all, Experiment{Name: fmt.Sprintf(name, args...), Run: run})
	}
	for _, p := range peers.All {
		for _, failing := range plan.Failing {
			for _, workers := range plan.Workers {
				n := plan.Calls
				if p.Name == peers.Ours {
					n = plan.Ours
				}
				add(func(ctx context.Context) error {
					return keep(&r.Outages)(RunOutage(ctx, p, failing, workers, n))
				}, "outage/%s/%v/%d", p.Name, failing, workers)
			}
		}
		for _, tiers := range plan.Tiers {
			n := plan.Chain
			if !p.Budgeted() {
				n = plan.Plain
			}
			add(func(ctx context.Context) error {
				return keep(&r.Chains)(RunChain(ctx, p, false, tiers, n))
			}, "chain/%s/%d", p.Name, tiers)
			if p.ServerOptions() != nil {
				add(func(ctx context.Context) error {
					return keep(&r.Chains)(RunChain(ctx, p, true, tiers, n))
				}, "chain/%s/%d/server", p.Name, tiers)
			}
		}
		add(func(ctx context.Context) error {
			return keep(&r.Replicas)(RunReplica(ctx, p, plan.Replica))
		}, "replica/%s", p.Name)
		for _, warm := range plan.Warm {
			add(func(ctx context.Context) error {
				return keep(&r.Kills)(RunKill(ctx, p, warm))
			}, "kill/%s/%d", p.Name, warm)
		}
		add(func(ctx context.Context) error {
			return keep(&r.Updates)(RunUpdate(ctx, p, plan.Rounds, plan.PerRound))
		}, "update/%s", p.Name)
		loads := plan.Loads
		if p.Name != peers.None && p.Name != peers.Ours {
			loads = plan.Bystander
		}
		for _, kind := range plan.Kinds {
			for _, load := range loads {
				add(func(ctx context.Context) error {
					return keep(&r.Pulses)(plan.Scene.RunPulse(ctx, p, kind, load))
				}, "pulse/%s/%s/%v", p.Name, kind, load)
				if plan.Scene.Clients == 1 || p.Name != peers.Ours && p.Name != peers.None {
					continue
				}
				lone := plan.Scene
				lone.Clients = 1
				add(func(ctx context.Context) error {
					return keep(&r.Lone)(lone.RunPulse(ctx, p, kind, load))
				}, "pulse/%s/%s/%v/lone", p.Name, kind, load)
			}
		}
	}
	for _, p := range peers.All[:2] {
		for _, kind := range plan.Kinds {
			for _, load := range plan.LongLoads {
				add(func(ctx context.Context) error {
					return keep(&r.Long)(plan.Lasting.RunPulse(ctx, p, kind, load))
				}, "pulse/%s/%s/%v/long", p.Name, kind, load)
			}
		}
	}
	for _, jitter := range Jitters {
		var runs []Contention
		for run := range plan.Runs {
			add(func(ctx context.Context) error {
				err := keep(&runs)(RunContention(ctx, jitter, 100, uint64(run)))
				if err == nil && len(runs) == plan.Runs {
					r.Contentions = append(r.Contentions, meansOf(runs))
				}
				return err
			}, "contention/%v/%d", jitter, run)
		}
	}
	for _, h := range peers.Hedgers {
		for i, config := range HedgeConfigs {
			if h.Name == peers.None && i > 0 {
				continue
			}
			add(func(ctx context.Context) error {
				return keep(&r.Hedgings)(RunHedging(ctx, h, config, plan.Hedged, plan.Slow))
			}, "hedging/%s/%+v", h.Name, config)
		}
	}
	return all
}

// keep appends what an experiment returns, unless it failed.
func keep[T any](to *[]T) func(T, error) error {
	return func(result T, err error) error {
		if err == nil {
			*to = append(*to, result)
		}
		return err
	}
}

func meansOf(runs []Contention) Contentions {
	c := Contentions{Jitter: runs[0].Jitter, Runs: len(runs)}
	var writes, took []float64
	for _, r := range runs {
		writes = append(writes, float64(r.Writes))
		took = append(took, r.Took.Seconds())
	}
	c.Writes, c.Took = meanOf(writes), meanOf(took)
	return c
}

func meanOf(sample []float64) Mean {
	n := float64(len(sample))
	var sum, squares float64
	for _, x := range sample {
		sum += x
	}
	for _, x := range sample {
		squares += (x - sum/n) * (x - sum/n)
	}
	return Mean{Value: sum / n, Margin: 1.96 * math.Sqrt(squares/max(1, n-1)/n)}
}
