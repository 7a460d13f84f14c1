package grpcretry

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc/codes"
)

const (
	meterName = "grpcretry"
	keySystem = attribute.Key("rpc.system.name")
	keyBudget = attribute.Key("grpcretry.budget.name")
)

// otherMethod stands for all methods, and budgets, beyond those that a Retrier
// keeps apart, so that the number of series stays bounded.
const otherMethod = "_OTHER"

// retryBounds are the buckets of retries and hedges, as in gRFC A96.
var retryBounds = []float64{1, 2, 3, 4, 5}

// WithMeterProvider sets where the metrics go; the default is the global
// MeterProvider of OpenTelemetry. The NewMeterProvider of the package
// go.opentelemetry.io/otel/metric/noop makes one that switches them off. nil is
// an error of New.
func WithMeterProvider(mp metric.MeterProvider) Option {
	return wiringOption{"WithMeterProvider", func(c *config) {
		switch {
		case mp == nil:
			c.faults.add("WithMeterProvider: provider is nil, want a metric.MeterProvider")
		case c.newMetrics != nil:
			c.faults.add("WithMeterProvider is given twice, want it once")
		}
		c.newMetrics = func(r *Retrier) (*metrics, error) { return newMetrics(mp, r) }
	}}
}

// metrics are the instruments of one Retrier. No attribute names a peer.
type metrics struct {
	attempts   metric.Int64Counter
	retries    metric.Int64Histogram
	hedges     metric.Int64Histogram
	delay      metric.Float64Histogram
	rejections metric.Int64Counter
	givenUp    metric.Int64Counter

	enabled func(context.Context) bool // of attempts; the others are seldom used
	other   methodMetrics
}

// methodMetrics are the attributes of one method, made once each, so that a
// measurement allocates nothing.
type methodMetrics struct {
	method   string
	add      []metric.AddOption
	record   []metric.RecordOption
	attempts [len(codeNames) + 1][len(reasonNames)]atomic.Pointer[[]metric.AddOption]
	reasons  [len(reasonNames)]atomic.Pointer[[]metric.AddOption]
}

func newGlobalMetrics(r *Retrier) (*metrics, error) { return newMetrics(otel.GetMeterProvider(), r) }

func newMetrics(provider metric.MeterProvider, r *Retrier) (*metrics, error) {
	meter := provider.Meter(meterName)
	m := &metrics{enabled: func(context.Context) bool { return true }}
	m.other.init(otherMethod)
	var f faults
	check := func(name string, err error) {
		if err != nil {
			f.add("the meter provider refuses the instrument %s: %v", name, err)
		}
	}
	counter := func(to *metric.Int64Counter, name, unit, description string) {
		var err error
		*to, err = meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		check(name, err)
	}
	histogram := func(to *metric.Int64Histogram, name, unit, description string) {
		var err error
		*to, err = meter.Int64Histogram(name, metric.WithUnit(unit), metric.WithDescription(description),
			metric.WithExplicitBucketBoundaries(retryBounds...))
		check(name, err)
	}
	counter(&m.attempts, "grpcretry.client.attempts", "{attempt}", "Attempts that ended, by status code and by what decided whether another followed.")
	histogram(&m.retries, "grpcretry.client.call.retries", "{retry}", "Retries of a call; calls without any are not recorded.")
	histogram(&m.hedges, "grpcretry.client.call.hedges", "{hedge}", "Hedges of a call; calls without any are not recorded.")
	counter(&m.rejections, "grpcretry.client.budget.rejections", "{retry}", "Retries and hedges that the budget refused.")
	counter(&m.givenUp, "grpcretry.client.calls.given_up", "{call}", "Calls that were given up though a retry was wanted, by reason.")
	var err error
	m.delay, err = meter.Float64Histogram("grpcretry.client.call.retry_delay", metric.WithUnit("s"),
		metric.WithDescription("Time that a call waited between its attempts; calls without any are not recorded."))
	check("grpcretry.client.call.retry_delay", err)
	check("grpcretry.client.budget.balance", observeBalance(meter, r))
	if e, ok := m.attempts.(interface{ Enabled(context.Context) bool }); ok { // OpenTelemetry v1.40 and later
		m.enabled = e.Enabled
	}
	return m, f.err()
}

// maxBudgetsObserved bounds the series of the budgets' balance. A program that
// dials more targets than that, such as a proxy, has one series for the rest.
const maxBudgetsObserved = 64

// observeBalance reports each budget's balance at every collection, for as
// long as the Retrier is in use: the meter must not keep it alive. Those beyond
// the first maxBudgetsObserved that were seen are one, with the lowest balance.
func observeBalance(meter metric.Meter, r *Retrier) error {
	const name = "grpcretry.client.budget.balance"
	gauge, err := meter.Float64ObservableGauge(name, metric.WithUnit("1"),
		metric.WithDescription("Share of a retry budget's capacity that is left."))
	if err != nil {
		return err
	}
	kept := weak.Make(r)
	var mu sync.Mutex // there may be several readers
	named := map[string]metric.ObserveOption{}
	registration, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		r := kept.Value()
		if r == nil {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		others, lowest := false, 1.0
		for _, b := range r.Budgets() {
			name := b.Target + b.Method
			set, ok := named[name]
			if !ok && len(named) < maxBudgetsObserved {
				set = metric.WithAttributeSet(attribute.NewSet(keyBudget.String(name)))
				named[name], ok = set, true
			}
			if ok {
				o.ObserveFloat64(gauge, b.Balance, set)
			} else {
				others, lowest = true, min(lowest, b.Balance)
			}
		}
		if others {
			o.ObserveFloat64(gauge, lowest, metric.WithAttributes(keyBudget.String(otherMethod)))
		}
		return nil
	}, gauge)
	if err != nil {
		return err
	}
	runtime.AddCleanup(r, func(registration metric.Registration) { _ = registration.Unregister() }, registration)
	return nil
}

func (m *methodMetrics) init(method string) {
	m.method = method
	set := m.with()
	m.add, m.record = []metric.AddOption{set}, []metric.RecordOption{set}
}

func (m *methodMetrics) with(attrs ...attribute.KeyValue) metric.MeasurementOption {
	return metric.WithAttributeSet(attribute.NewSet(append(attrs, keySystem.String("grpc"), keyMethod.String(m.method))...))
}

// of gives the attributes of a method, which are made with its first attempt.
func (m *metrics) of(x *method) *methodMetrics {
	if !x.kept {
		return &m.other
	}
	if known := x.metrics.Load(); known != nil {
		return known
	}
	made := new(methodMetrics)
	made.init(x.rpc)
	if !x.metrics.CompareAndSwap(nil, made) {
		made = x.metrics.Load()
	}
	return made
}

// attempt counts an attempt, once it is known what follows it.
func (m *metrics) attempt(ctx context.Context, x *method, code codes.Code, reason Reason) {
	if !m.enabled(ctx) {
		return
	}
	of := m.of(x)
	slot := &of.attempts[min(int(code), len(codeNames))][reason]
	opts := slot.Load()
	if opts == nil {
		opts = &[]metric.AddOption{of.with(keyStatusCode.String(boundedCodeName(code)), keyDecision.String(reason.String()))}
		slot.Store(opts)
	}
	m.attempts.Add(ctx, 1, *opts...)
}

// call records the end of a call that made more than one attempt.
func (m *metrics) call(ctx context.Context, x *method, retries, hedges int, waited time.Duration) {
	of := m.of(x)
	if hedges > 0 {
		m.hedges.Record(ctx, int64(hedges), of.record...)
	}
	if retries > 0 {
		m.retries.Record(ctx, int64(retries), of.record...)
		m.delay.Record(ctx, waited.Seconds(), of.record...)
	}
}

// rejected counts what the budget refused.
func (m *metrics) rejected(ctx context.Context, x *method) {
	m.rejections.Add(ctx, 1, m.of(x).add...)
}

// gaveUp counts a call that was given up.
func (m *metrics) gaveUp(ctx context.Context, x *method, reason Reason) {
	of := m.of(x)
	slot := &of.reasons[reason]
	opts := slot.Load()
	if opts == nil {
		opts = &[]metric.AddOption{of.with(keyDecision.String(reason.String()))}
		slot.Store(opts)
	}
	m.givenUp.Add(ctx, 1, *opts...)
}

// boundedCodeName is codeName, but one name for all codes that gRPC does not define.
func boundedCodeName(c codes.Code) string {
	if int(c) >= len(codeNames) {
		return otherMethod
	}
	return codeName(c)
}
