package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// meter is a MeterProvider whose metrics a test can read.
type meter struct {
	metric.MeterProvider
	reader *sdkmetric.ManualReader
}

func newMeter() meter {
	reader := sdkmetric.NewManualReader()
	return meter{sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)), reader}
}

// metrics are those collected now, by name.
func (m meter) metrics(t testing.TB) map[string]metricdata.Metrics {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	found := map[string]metricdata.Metrics{}
	for _, scope := range all.ScopeMetrics {
		if scope.Scope.Name != "grpcretry" {
			t.Errorf("a meter %q", scope.Scope.Name)
		}
		for _, m := range scope.Metrics {
			found[m.Name] = m
		}
	}
	return found
}

// series are all of them, "name{key=value,...} value", sorted. A histogram's
// value is count/sum. What all names begin with is left out.
func (m meter) series(t testing.TB) []string {
	t.Helper()
	var out []string
	add := func(name string, attrs fmt.Stringer, format string, values ...any) {
		out = append(out, strings.TrimPrefix(name, "grpcretry.client.")+attrs.String()+" "+fmt.Sprintf(format, values...))
	}
	for name, m := range m.metrics(t) {
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			for _, p := range data.DataPoints {
				add(name, labels(p.Attributes.ToSlice()), "%d", p.Value)
			}
		case metricdata.Histogram[int64]:
			for _, p := range data.DataPoints {
				add(name, labels(p.Attributes.ToSlice()), "%d/%d", p.Count, p.Sum)
			}
		case metricdata.Histogram[float64]:
			for _, p := range data.DataPoints {
				add(name, labels(p.Attributes.ToSlice()), "%d/%.3f", p.Count, p.Sum)
			}
		case metricdata.Gauge[float64]:
			for _, p := range data.DataPoints {
				add(name, labels(p.Attributes.ToSlice()), "%.3f", p.Value)
			}
		default:
			t.Errorf("%s is a %T", name, data)
		}
	}
	slices.Sort(out)
	return out
}

// labels prints attributes as Prometheus does, but for the quotes.
type labels []attribute.KeyValue

func (l labels) String() string {
	var pairs []string
	for _, a := range l {
		pairs = append(pairs, string(a.Key)+"="+a.Value.Emit())
	}
	return "{" + strings.Join(pairs, ",") + "}"
}

// countsOf are the series but for the budget's balance.
func (m meter) countsOf(t testing.TB) []string {
	t.Helper()
	return slices.DeleteFunc(m.series(t), func(s string) bool { return strings.HasPrefix(s, "budget.balance") })
}

func checkSeries(t testing.TB, got, want []string) {
	t.Helper()
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("series\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

// Dashboards and alerts are built on names, units and kinds; a change of one
// empties them without a word.
func TestInstruments(t *testing.T) {
	type instrument struct{ kind, unit string }
	want := map[string]instrument{
		"grpcretry.client.attempts":          {"Sum[int64]", "{attempt}"},
		"grpcretry.client.call.retries":      {"Histogram[int64]", "{retry}"},
		"grpcretry.client.call.retry_delay":  {"Histogram[float64]", "s"},
		"grpcretry.client.budget.rejections": {"Sum[int64]", "{retry}"},
		"grpcretry.client.budget.balance":    {"Gauge[float64]", "1"},
		"grpcretry.client.calls.given_up":    {"Sum[int64]", "{call}"},
	}
	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		broke := mustBudget(t, BudgetConfig{Capacity: 14, PerCall: -1, FreeInterval: -1, Costs: BudgetCosts{Transient: 14}})
		_, client := serve(t, newRetrier(t, WithMeterProvider(m), WithBudget(broke), exactly(nil)), testsrv.Script{get: testsrv.Fail(9, codes.Unavailable)})
		if _, err := client.Get(t.Context(), &testpb.Request{}); !errors.Is(err, ErrBudgetExhausted) {
			t.Fatal(err)
		}
		got := m.metrics(t)
		for name, i := range got {
			kind := strings.TrimPrefix(fmt.Sprintf("%T", i.Data), "metricdata.")
			if (instrument{kind, i.Unit}) != want[name] {
				t.Errorf("%s is a %s in %q, want %v", name, kind, i.Unit, want[name])
			}
			if !strings.HasSuffix(i.Description, ".") {
				t.Errorf("%s is described as %q", name, i.Description)
			}
			if sum, ok := i.Data.(metricdata.Sum[int64]); ok && !sum.IsMonotonic {
				t.Errorf("%s is no counter", name)
			}
			if h, ok := i.Data.(metricdata.Histogram[int64]); ok && fmt.Sprint(h.DataPoints[0].Bounds) != "[1 2 3 4 5]" {
				t.Errorf("%s has the bounds %v, want 1 to 5", name, h.DataPoints[0].Bounds)
			}
		}
		if len(got) != len(want) {
			t.Errorf("%v, want %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
		}
	})
}

// What each kind of call adds to which series: whoever reads a dashboard must
// be able to tell retries from failures, and a refusal from a deadline.
func TestMetricsOfCalls(t *testing.T) {
	const of = ",rpc.method=testsrv.v1.TestService/Get"
	attempts := func(decision, code string, n int) string {
		return fmt.Sprintf("attempts{grpcretry.attempt.decision=%s%s,rpc.response.status_code=%s,rpc.system.name=grpc} %d", decision, of, code, n)
	}
	plain := "{" + of[1:] + ",rpc.system.name=grpc} "
	givenUp := func(reason string) string {
		return "calls.given_up{grpcretry.attempt.decision=" + reason + of + ",rpc.system.name=grpc} 1"
	}
	retries := func(n int, waited string) []string {
		return []string{fmt.Sprintf("call.retries%s1/%d", plain, n), "call.retry_delay" + plain + "1/" + waited}
	}
	for name, test := range map[string]struct {
		method  string
		steps   testsrv.Sequence
		policy  func(*Policy)
		options []Option
		cancel  time.Duration
		want    []string
	}{
		"success":           {want: []string{attempts("success", "OK", 1)}},
		"success, observed": {options: []Option{WithHooks(Hooks{CallEnd: func(context.Context, Report, any, error) {}})}, want: []string{attempts("success", "OK", 1)}},
		"retried": {steps: testsrv.Fail(2, codes.Unavailable).ThenOK(),
			want: append(retries(2, "0.030"), attempts("retry", "UNAVAILABLE", 2), attempts("success", "OK", 1))},
		"not retried": {steps: testsrv.Fail(1, codes.NotFound), want: []string{attempts("not_retryable", "NOT_FOUND", 1)}},
		"attempts exhausted": {steps: testsrv.Fail(9, codes.Unavailable),
			want: append(retries(2, "0.030"), attempts("retry", "UNAVAILABLE", 2), attempts("attempts_exhausted", "UNAVAILABLE", 1), givenUp("attempts_exhausted"))},
		"deadline": {steps: testsrv.Fail(9, codes.Unavailable), policy: func(p *Policy) { p.Timeout = 5 * ms },
			want: []string{attempts("deadline", "UNAVAILABLE", 1), givenUp("deadline")}},
		"pushback": {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("-1")}},
			want: []string{attempts("pushback_stop", "UNAVAILABLE", 1), givenUp("pushback_stop")}},
		"budget": {steps: testsrv.Fail(9, codes.Unavailable), options: []Option{WithBudget(mustBudget(t, BudgetConfig{Capacity: 14, PerCall: -1, FreeInterval: -1, Costs: BudgetCosts{Transient: 14}}))},
			want: append(retries(1, "0.010"), attempts("retry", "UNAVAILABLE", 1), attempts("budget_exhausted", "UNAVAILABLE", 1), givenUp("budget_exhausted"), "budget.rejections"+plain+"1")},
		"cancelled in the wait": {steps: testsrv.Fail(9, codes.Unavailable), cancel: 5 * ms,
			want: []string{attempts("parent_done", "UNAVAILABLE", 1), givenUp("parent_done")}},
		"cancelled in an attempt": {steps: testsrv.Sequence{{Block: true}}, cancel: 5 * ms,
			want: []string{attempts("parent_done", "CANCELLED", 1)}},
		"a code that gRPC does not know": {steps: testsrv.Fail(1, 4711), want: []string{attempts("not_retryable", "_OTHER", 1)}},
		"dry run":                        {steps: testsrv.Fail(1, codes.Unavailable), options: []Option{WithDryRun()}, want: []string{attempts("dry_run", "UNAVAILABLE", 1)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMeter()
				_, client := serve(t, newRetrier(t, append(test.options, WithMeterProvider(m), exactly(test.policy))...), testsrv.Script{get: test.steps})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if test.cancel > 0 {
					time.AfterFunc(test.cancel, cancel)
				}
				_, _ = client.Get(ctx, &testpb.Request{})
				checkSeries(t, m.countsOf(t), test.want)
			})
		})
	}
}

// A stream is one call with as many attempts as it took, like any other.
func TestMetricsOfStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		_, cc := serveStreams(t, newRetrier(t, exactly(nil), WithMeterProvider(m)), testsrv.Script{list: refusing(2, codes.Unavailable).ThenOK()})
		stream := open(t, t.Context(), cc, list)
		send(t, stream, 1)
		closeSend(t, stream)
		for range 3 {
			recv(t, stream)
		}
		if err := end(t, stream); err != nil {
			t.Fatal(err)
		}
		const of = "rpc.method=testsrv.v1.TestService/List"
		checkSeries(t, m.countsOf(t), []string{
			"attempts{grpcretry.attempt.decision=retry," + of + ",rpc.response.status_code=UNAVAILABLE,rpc.system.name=grpc} 2",
			"attempts{grpcretry.attempt.decision=success," + of + ",rpc.response.status_code=OK,rpc.system.name=grpc} 1",
			"call.retries{" + of + ",rpc.system.name=grpc} 1/2",
			"call.retry_delay{" + of + ",rpc.system.name=grpc} 1/0.030",
		})
	})
}

// A balance that falls is the first sign of an outage, and must say whose.
func TestBudgetBalanceIsObserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMeter()
		method := mustBudget(t, BudgetConfig{Capacity: 28})
		r := newRetrier(t, WithMeterProvider(m), exactly(nil), WithMethodBudget("testsrv.v1.TestService/Get", method))
		_, one := serve(t, r, testsrv.Script{get: testsrv.Fail(1, codes.Unavailable).ThenOK()})
		if _, err := one.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		if _, err := invoke(t, r, put, failing); err == nil { // two retries to the target ""
			t.Fatal("no error")
		}
		var target string
		for _, b := range r.Budgets() {
			if strings.Contains(b.Target, "testsrv") {
				target = b.Target
			}
		}
		balances := slices.DeleteFunc(m.series(t), func(s string) bool { return !strings.HasPrefix(s, "budget.balance") })
		checkSeries(t, balances, []string{ // the retry that succeeded got back what it took
			"budget.balance{grpcretry.budget.name=} 0.800",
			"budget.balance{grpcretry.budget.name=/testsrv.v1.TestService/Get} 1.000",
			"budget.balance{grpcretry.budget.name=" + target + "} 1.000",
		})
	})
}

// A metric that has a series for each port or for each method that somebody made
// up costs more than what it watches.
func TestSeriesAreBounded(t *testing.T) {
	const many = 10_000
	m := newMeter()
	r := newRetrier(t, WithMeterProvider(m))
	unary := r.UnaryClientInterceptor()
	req, reply := &emptypb.Empty{}, &emptypb.Empty{}
	for i := range many { // peers of one target, and methods
		invoker := fakeInvokerAt(namedAddr(fmt.Sprintf("192.0.2.1:%d", 10_000+i)))
		if err := unary(t.Context(), fmt.Sprintf("/made.Up/M%d", i), req, reply, nil, invoker); err != nil {
			t.Fatal(err)
		}
	}
	balances := map[string]bool{} // in any collection, which is what a backend gets
	collect := func() {
		for _, s := range m.series(t) {
			if name, _, _ := strings.Cut(s, "} "); strings.HasPrefix(s, "budget.balance") {
				balances[name] = true
			}
		}
	}
	for i := range many { // targets
		cc, err := grpc.NewClient(fmt.Sprintf("passthrough:///backend:%d", 10_000+i), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		if err := unary(t.Context(), get, req, reply, cc, fakeInvoker()); err != nil {
			t.Fatal(err)
		}
		cc.Close()
		if i%(many/8) == 0 {
			collect()
		}
	}
	collect()
	methods, calls := map[string]bool{}, int64(0)
	for name, metric := range m.metrics(t) {
		if data, ok := metric.Data.(metricdata.Sum[int64]); ok {
			for _, p := range data.DataPoints {
				method, _ := p.Attributes.Value(keyMethod)
				methods[method.AsString()] = true
				calls += p.Value
				if s := labels(p.Attributes.ToSlice()).String(); strings.Contains(s, "192.0.2.1") || strings.Contains(s, "backend") || strings.Contains(s, "peer") {
					t.Errorf("%s names a peer: %s", name, s)
				}
			}
		}
	}
	runtime.KeepAlive(r)
	if calls != 2*many {
		t.Errorf("%d attempts are counted, want %d", calls, 2*many)
	}
	if len(methods) > maxMethodsKept+1 || !methods["_OTHER"] {
		t.Errorf("series for %d methods, want at most %d and _OTHER", len(methods), maxMethodsKept)
	}
	if want := maxBudgetsObserved + 1; len(balances) != want || !balances["budget.balance{grpcretry.budget.name=_OTHER"] {
		t.Errorf("%d series of balances, want %d, one of them _OTHER", len(balances), want)
	}
}

// The rest of many budgets must show its worst, or an outage hides behind it.
func TestBalanceOfManyTargetsShowsTheLowest(t *testing.T) {
	m := newMeter()
	r := newRetrier(t, WithMeterProvider(m), WithDefaultPolicy(Policy{Idempotency: Idempotent, Backoff: atOnce}))
	for i := range maxBudgetsObserved + 3 {
		if err := r.Do(t.Context(), fmt.Sprintf("jobs/%03d", i), func(context.Context) error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	m.metrics(t)
	_ = r.Do(t.Context(), fmt.Sprintf("jobs/%03d", maxBudgetsObserved+1), func(context.Context) error { return status.Error(codes.Unavailable, "down") })
	series := m.series(t)
	if !slices.Contains(series, "budget.balance{grpcretry.budget.name=_OTHER} 0.800") {
		t.Errorf("no balance of 0.8 for the others: %s", strings.Join(series, "\n"))
	}
}

// Metrics must cost the calls nothing but time, whether anybody collects them or not.
func TestMetricsDoNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector lets pools forget")
	}
	down := status.Error(codes.Unavailable, "down")
	quick := WithDefaultPolicy(Policy{Idempotency: Idempotent, Backoff: atOnce})
	for _, call := range []struct {
		name   string
		script []error
		want   float64 // nothing of it for metrics
	}{{"success", nil, 0}, {"retry", []error{down, nil}, 2}} {
		for name, mp := range map[string]metric.MeterProvider{"off": noop.NewMeterProvider(), "on": newMeter(), "global": otel.GetMeterProvider()} {
			t.Run(call.name+"/"+name, func(t *testing.T) {
				unary := newRetrier(t, quick, WithBudget(Unlimited()), WithMeterProvider(mp)).UnaryClientInterceptor()
				req, reply, invoker := &emptypb.Empty{}, &emptypb.Empty{}, fakeInvoker(call.script...)
				got := testing.AllocsPerRun(500, func() {
					if err := unary(t.Context(), get, req, reply, nil, invoker); err != nil {
						t.Fatal(err)
					}
				})
				if got != call.want {
					t.Errorf("%v allocations, want %v", got, call.want)
				}
			})
		}
	}
	m := newMeter()
	r := newRetrier(t, WithMeterProvider(m))
	x := r.set.Load().lookup(get)
	if n := testing.AllocsPerRun(500, func() {
		r.metrics.attempt(t.Context(), x, codes.Unavailable, ReasonBudgetExhausted)
		r.metrics.call(t.Context(), x, 2, 1, time.Second)
		r.metrics.rejected(t.Context(), x)
		r.metrics.gaveUp(t.Context(), x, ReasonBudgetExhausted)
	}); n != 0 {
		t.Errorf("%v allocations for one measurement of each kind, want 0", n)
	}
}

// Programs that make a Retrier per tenant or per test must get rid of it.
func TestMeterDoesNotKeepTheRetrier(t *testing.T) {
	m := &unregistering{meter: newMeter(), done: make(chan struct{})}
	r := newRetrier(t, WithMeterProvider(m))
	if err := r.Do(t.Context(), "jobs/one", func(context.Context) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if n := len(m.metrics(t)); n != 2 { // an attempt, a balance
		t.Fatalf("%d metrics, want 2", n)
	}
	kept := weak.Make(r)
	r = nil
	for range 3 { // a pool lets go of what is in it in the second round
		runtime.GC()
	}
	if kept.Value() != nil {
		t.Fatal("the Retrier is still there")
	}
	if _, ok := m.metrics(t)["grpcretry.client.budget.balance"]; ok {
		t.Error("the balance is still observed")
	}
	<-m.done // until the callback is unregistered
}

// unregistering closes done when a callback was unregistered.
type unregistering struct {
	meter
	done chan struct{}
}

func (u *unregistering) Meter(name string, opts ...metric.MeterOption) metric.Meter {
	return &unregisteringMeter{u.meter.Meter(name, opts...), u.done}
}

type unregisteringMeter struct {
	metric.Meter
	done chan struct{}
}

func (m *unregisteringMeter) RegisterCallback(f metric.Callback, instruments ...metric.Observable) (metric.Registration, error) {
	r, err := m.Meter.RegisterCallback(f, instruments...)
	return &unregisteringRegistration{r, m.done}, err
}

type unregisteringRegistration struct {
	metric.Registration
	done chan struct{}
}

func (r *unregisteringRegistration) Unregister() error {
	close(r.done)
	return r.Registration.Unregister()
}

var errRefused = errors.New("no more instruments")

// refusingMeter makes no instrument.
type refusingMeter struct {
	noop.Meter
	onlyCallbacks bool
}

type refusingProvider struct {
	noop.MeterProvider
	meter refusingMeter
}

func (p refusingProvider) Meter(string, ...metric.MeterOption) metric.Meter { return p.meter }
func (m refusingMeter) fault() error {
	if m.onlyCallbacks {
		return nil
	}
	return errRefused
}
func (m refusingMeter) Int64Counter(string, ...metric.Int64CounterOption) (metric.Int64Counter, error) {
	return noop.Int64Counter{}, m.fault()
}
func (m refusingMeter) Int64Histogram(string, ...metric.Int64HistogramOption) (metric.Int64Histogram, error) {
	return noop.Int64Histogram{}, m.fault()
}
func (m refusingMeter) Float64Histogram(string, ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return noop.Float64Histogram{}, m.fault()
}
func (m refusingMeter) Float64ObservableGauge(string, ...metric.Float64ObservableGaugeOption) (metric.Float64ObservableGauge, error) {
	return noop.Float64ObservableGauge{}, m.fault()
}
func (m refusingMeter) RegisterCallback(metric.Callback, ...metric.Observable) (metric.Registration, error) {
	return nil, errRefused
}

// A view that does not fit an instrument shows at the start and not as a hole
// in a dashboard; the error tells all of them.
func TestMeterProviderThatRefuses(t *testing.T) {
	for _, only := range []bool{false, true} {
		_, err := New(WithMeterProvider(refusingProvider{meter: refusingMeter{onlyCallbacks: only}}))
		if err == nil {
			t.Fatal("no error")
		}
		for _, name := range []string{"attempts", "call.retries", "call.hedges", "call.retry_delay", "budget.rejections", "calls.given_up", "budget.balance"} {
			line := "the meter provider refuses the instrument grpcretry.client." + name + ": " + errRefused.Error()
			if want := !only || name == "budget.balance"; strings.Contains(err.Error(), line) != want {
				t.Errorf("New = %v; %q in it: %v", err, line, !want)
			}
		}
	}
	for name, opts := range map[string][]Option{
		"provider is nil":     {WithMeterProvider(nil)},
		"is given twice":      {WithMeterProvider(newMeter()), WithMeterProvider(newMeter())},
		"cannot change after": nil,
	} {
		var err error
		if opts != nil {
			_, err = New(opts...)
		} else {
			err = newRetrier(t).Update(WithMeterProvider(newMeter()))
		}
		if err == nil || !strings.Contains(err.Error(), "WithMeterProvider") || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want one that says %q", err, name)
		}
	}
}
