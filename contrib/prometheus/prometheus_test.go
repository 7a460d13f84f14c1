package prometheus

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"google.golang.org/grpc/codes"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

var quiet = slog.New(slog.DiscardHandler)

// exposed are the series that the exporter shows, with their values in each of
// several scrapes.
type exposed map[string][]float64

// scrape adds what reg shows now. A series that was not there before gets no value for then.
func (e exposed) scrape(t *testing.T, reg prometheus.Gatherer, nth int) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			add := func(name string, value float64, more ...string) {
				pairs := slices.Clone(more)
				for _, l := range m.GetLabel() {
					pairs = append(pairs, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
				}
				slices.Sort(pairs)
				key := name + "{" + strings.Join(append(pairs, `job="shop"`), ",") + "}"
				for len(e[key]) < nth {
					e[key] = append(e[key], -1)
				}
				e[key] = append(e[key], value)
			}
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				add(f.GetName(), m.GetCounter().GetValue())
			case dto.MetricType_GAUGE:
				add(f.GetName(), m.GetGauge().GetValue())
			case dto.MetricType_HISTOGRAM:
				h := m.GetHistogram()
				for _, b := range h.GetBucket() {
					add(f.GetName()+"_bucket", float64(b.GetCumulativeCount()), fmt.Sprintf("le=%q", fmt.Sprint(b.GetUpperBound())))
				}
				add(f.GetName()+"_bucket", float64(h.GetSampleCount()), `le="+Inf"`)
				add(f.GetName()+"_count", float64(h.GetSampleCount()))
				add(f.GetName()+"_sum", h.GetSampleSum())
			default:
				t.Fatalf("%s is a %v", f.GetName(), f.GetType())
			}
		}
	}
}

// load is the series in the language of Prometheus' tests, a minute apart.
func (e exposed) load() string {
	var b strings.Builder
	b.WriteString("load 1m\n")
	for _, key := range slices.Sorted(maps.Keys(e)) {
		fmt.Fprintf(&b, "  %s", key)
		for _, v := range e[key] {
			if v < 0 {
				b.WriteString(" _")
			} else {
				fmt.Fprintf(&b, " %v", v)
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// situation is what happens to a client in every minute: calls and how they go.
type situation struct {
	calls    int
	method   string
	reaction func(nth int) testsrv.Step
	policy   grpcretry.Policy
	budget   func() grpcretry.Budget
	timeout  time.Duration
}

// run lives through the situation and gives what the exporter showed in each of the minutes.
func run(t *testing.T, minutes int, situations ...situation) exposed {
	e := exposed{}
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(reg))
		if err != nil {
			t.Fatal(err)
		}
		meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
		type actor struct {
			situation
			client testpb.TestServiceClient
		}
		var actors []actor
		for i, s := range situations {
			opts := []grpcretry.Option{grpcretry.WithMeterProvider(meters), grpcretry.WithDefaultPolicy(s.policy), grpcretry.WithLogger(quiet)}
			if s.budget != nil {
				opts = append(opts, grpcretry.WithBudget(s.budget()))
			}
			r, err := grpcretry.New(opts...)
			if err != nil {
				t.Fatal(err)
			}
			srv := testsrv.New(testsrv.Script{s.method: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step { return s.reaction(nth) })},
				testsrv.WithName(fmt.Sprintf("server%d", i)))
			t.Cleanup(srv.Close)
			cc, err := srv.Dial(r.DialOptions()...)
			if err != nil {
				t.Fatal(err)
			}
			actors = append(actors, actor{s, testpb.NewTestServiceClient(cc)})
		}
		for minute := range minutes {
			e.scrape(t, reg, minute)
			next := time.Now().Add(time.Minute)
			for _, a := range actors {
				for range a.calls {
					ctx := t.Context()
					cancel := func() {}
					if a.timeout > 0 {
						ctx, cancel = context.WithTimeout(ctx, a.timeout)
					}
					if a.method == testpb.TestService_Write_FullMethodName {
						_, _ = a.client.Write(ctx, &testpb.Request{})
					} else {
						_, _ = a.client.Get(ctx, &testpb.Request{})
					}
					cancel()
				}
			}
			time.Sleep(time.Until(next)) // virtual: the scrapes are a minute apart
		}
	})
	return e
}

const (
	get   = testpb.TestService_Get_FullMethodName
	write = testpb.TestService_Write_FullMethodName
)

var hedged = grpcretry.Policy{Idempotency: grpcretry.Idempotent, Hedge: grpcretry.Hedge{MaxAttempts: 3, Delay: 15 * time.Millisecond}}

var short = grpcretry.Policy{Backoff: grpcretry.Backoff{Base: 10 * time.Millisecond, Jitter: grpcretry.NoJitter}}

// every n-th attempt fails.
func every(n int) func(int) testsrv.Step {
	return func(nth int) testsrv.Step {
		if nth%n == 0 {
			return testsrv.Step{Code: codes.Unavailable}
		}
		return testsrv.Step{}
	}
}

func fine(int) testsrv.Step { return testsrv.Step{} }

// slowTail is slow to answer every twentieth attempt.
func slowTail(nth int) testsrv.Step {
	if nth%20 == 0 {
		return testsrv.Step{Delay: 100 * time.Millisecond}
	}
	return testsrv.Step{Delay: 10 * time.Millisecond}
}

var situations = map[string]situation{
	"healthy":        {calls: 60, method: get, reaction: fine, policy: short},
	"sporadic":       {calls: 60, method: get, reaction: every(50), policy: short},
	"flaky":          {calls: 60, method: get, reaction: every(4), policy: short, budget: grpcretry.Unlimited},
	"outage":         {calls: 20, method: get, reaction: every(1), policy: short},
	"no budget":      {calls: 20, method: get, reaction: every(1), policy: short, budget: grpcretry.Unlimited},
	"short deadline": {calls: 60, method: get, reaction: every(10), policy: short, timeout: 8 * time.Millisecond},
	"writes":         {calls: 60, method: write, reaction: every(30), policy: short},
	"hedged":         {calls: 60, method: get, reaction: slowTail, policy: hedged},
}

// An alert that cannot fire, or that fires at every hiccup, is worse than none:
// each must tell exactly those situations that it is for.
func TestAlerts(t *testing.T) {
	want := map[string][]string{
		"healthy":        nil,
		"sporadic":       nil,
		"flaky":          {"GRPCRetryManyRetries"},
		"outage":         {"GRPCRetryBudgetExhausted", "GRPCRetryBudgetLow", "GRPCRetryCallsGivenUp"},
		"no budget":      {"GRPCRetryCallsGivenUp", "GRPCRetryManyRetries"},
		"short deadline": {"GRPCRetryCallsGivenUp", "GRPCRetryDeadlineTooShort"},
		"writes":         {"GRPCRetryNotIdempotent"},
		"hedged":         nil,
	}
	fired, told := map[string]bool{}, map[string]bool{}
	for name, s := range situations {
		t.Run(name, func(t *testing.T) {
			const minutes = 75
			store := promqltest.LoadedStorage(t, run(t, minutes, s).load())
			engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 100_000)
			firing := map[string]bool{}
			manager := rules.NewManager(&rules.ManagerOptions{
				QueryFunc: rules.EngineQueryFunc(engine, store), Queryable: store, AppendableV2: store, Logger: quiet, Context: t.Context(),
				Parser: parser.NewParser(parser.Options{}),
				NotifyFunc: func(_ context.Context, _ string, alerts ...*rules.Alert) {
					for _, a := range alerts {
						firing[a.Labels.Get(labels.AlertName)] = true
						for _, key := range []string{"summary", "description"} {
							if text := a.Annotations.Get(key); text == "" || strings.Contains(text, "error expanding") || strings.Contains(text, "<no value>") {
								t.Errorf("%s: %s = %q", a.Labels, key, text)
							}
						}
						if by := a.Labels.Get("rpc_method") + a.Labels.Get("grpcretry_budget_name"); by == "" || a.Labels.Get("job") != "shop" {
							t.Errorf("the alert %s does not say what it is about", a.Labels)
						}
					}
				},
			})
			groups, errs := manager.LoadGroups(time.Minute, labels.EmptyLabels(), "", nil, false, "alerts.yaml")
			if errs != nil {
				t.Fatal(errs)
			}
			for _, g := range groups {
				for minute := range minutes {
					g.Eval(t.Context(), time.Unix(0, 0).Add(time.Duration(minute)*time.Minute))
				}
				for _, r := range g.Rules() {
					if err := r.LastError(); err != nil {
						t.Errorf("%s: %v", r.Name(), err)
					}
					told[r.Name()] = true
				}
			}
			got := slices.Sorted(maps.Keys(firing))
			if !slices.Equal(got, want[name]) {
				t.Errorf("fired %v, want %v", got, want[name])
			}
			for _, a := range got {
				fired[a] = true
			}
		})
	}
	if !maps.Equal(fired, told) {
		t.Errorf("only %v of %v were seen to fire", slices.Sorted(maps.Keys(fired)), slices.Sorted(maps.Keys(told)))
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	for name := range told {
		if !strings.Contains(string(readme), "| `"+name+"` |") {
			t.Errorf("README.md does not tell what to do about %s", name)
		}
	}
}

// dashboard is what of a Grafana dashboard matters here.
type dashboard struct {
	UID, Title string
	Templating struct {
		List []struct{ Name, Type, Query string }
	}
	Panels []struct {
		ID                 int
		Title, Description string
		GridPos            struct{ X, Y, W, H int }
		FieldConfig        struct{ Defaults struct{ Unit string } }
		Datasource         struct{ Type, UID string }
		Targets            []struct{ RefID, Expr, LegendFormat string }
	}
}

// A panel whose query names a metric or a label that is not exposed stays empty,
// which looks like good news.
func TestDashboard(t *testing.T) {
	b, err := os.ReadFile("dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(b, &d); err != nil {
		t.Fatal(err)
	}
	e := run(t, 12, slices.Collect(maps.Values(situations))...)
	store := promqltest.LoadedStorage(t, e.load())
	engine := promqltest.NewTestEngine(t, false, 5*time.Minute, 100_000)
	metrics, labelNames := map[string]bool{}, map[string]bool{"le": true}
	for series := range e {
		name, rest, _ := strings.Cut(series, "{")
		metrics[name] = true
		for _, m := range regexp.MustCompile(`(\w+)=`).FindAllStringSubmatch(rest, -1) {
			labelNames[m[1]] = true
		}
	}
	used := map[string]bool{}
	ids, places := map[int]bool{}, map[[2]int]bool{}
	for _, p := range d.Panels {
		place := [2]int{p.GridPos.X, p.GridPos.Y}
		if ids[p.ID] || places[place] || p.Title == "" || p.Description == "" || p.FieldConfig.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
			t.Errorf("panel %d %q: id or place twice, or something is missing", p.ID, p.Title)
		}
		ids[p.ID], places[place] = true, true
		for _, target := range p.Targets {
			query := strings.NewReplacer("$__rate_interval", "5m", "$method", ".*").Replace(target.Expr)
			if strings.Contains(query, "$") {
				t.Errorf("%s: a variable that is not known in %s", p.Title, target.Expr)
			}
			expr, err := parser.NewParser(parser.Options{}).ParseExpr(query)
			if err != nil {
				t.Errorf("%s: %v", p.Title, err)
				continue
			}
			parser.Inspect(expr, func(n parser.Node, _ []parser.Node) error {
				switch n := n.(type) {
				case *parser.VectorSelector:
					used[n.Name] = true
					if !metrics[n.Name] {
						t.Errorf("%s: %s is not exposed", p.Title, n.Name)
					}
					for _, m := range n.LabelMatchers {
						if !labelNames[m.Name] && m.Name != model.MetricNameLabel {
							t.Errorf("%s: no series has the label %s", p.Title, m.Name)
						}
					}
				case *parser.AggregateExpr:
					for _, l := range n.Grouping {
						if !labelNames[l] {
							t.Errorf("%s: no series has the label %s", p.Title, l)
						}
					}
				}
				return nil
			})
			for _, m := range regexp.MustCompile(`\{\{(\w+)\}\}`).FindAllStringSubmatch(target.LegendFormat, -1) {
				if !strings.Contains(target.Expr, "by ("+m[1]+")") {
					t.Errorf("%s: the legend shows %s, which the query does not give", p.Title, m[1])
				}
			}
			q, err := engine.NewInstantQuery(t.Context(), store, nil, query, time.Unix(0, 0).Add(11*time.Minute))
			if err != nil {
				t.Errorf("%s: %v", p.Title, err)
				continue
			}
			result := q.Exec(t.Context())
			vector, err := result.Vector()
			if err != nil || !slices.ContainsFunc(vector, func(s promql.Sample) bool { return s.F > 0 }) {
				t.Errorf("%s shows nothing: %v, %v", p.Title, result, err)
			}
			q.Close()
		}
	}
	for _, v := range d.Templating.List {
		if m := regexp.MustCompile(`^label_values\((\w+), (\w+)\)$`).FindStringSubmatch(v.Query); v.Type == "query" && (m == nil || !metrics[m[1]] || !labelNames[m[2]]) {
			t.Errorf("the variable %s asks for %s", v.Name, v.Query)
		}
	}
	// What is exposed and shown nowhere has been forgotten.
	for name := range metrics {
		base := strings.TrimSuffix(strings.TrimSuffix(name, "_sum"), "_count")
		if strings.HasPrefix(name, "grpcretry_") && !used[name] && !used[base+"_bucket"] {
			t.Errorf("no panel shows %s", name)
		}
	}
}
