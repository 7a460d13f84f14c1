package grpcretry

import (
	"context"
	"log/slog"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Retrier retries the calls of any number of ClientConns by one set of
// policies, with one budget for each target. It is made by [New], since its zero
// value is not usable, and takes effect through [Retrier.DialOptions]. All its
// methods are safe for concurrent use.
type Retrier struct {
	set     atomic.Pointer[policySet]
	updates sync.Mutex // one at a time
	targets targets
	calls   sync.Pool // of *call

	logger            *slog.Logger // nil: slog.Default()
	hooks             []Hooks
	eventsOnlyOnRetry bool
	callSpan          *callSpan // nil: none
	eventSink         EventSink // nil: the span
	metrics           *metrics
}

// New returns a Retrier. With no options it follows the retry policies of each
// ClientConn's service config, retries methods whose .proto declares an
// idempotency_level, and repeats for all others only attempts that provably
// never reached a server. The error names every fault of the options at once.
func New(opts ...Option) (*Retrier, error) {
	c := newConfig(opts)
	set := newPolicySet(c)
	set.checkThrottle(c.newBudget != nil, &c.faults)
	if err := c.faults.err(); err != nil {
		return nil, err
	}
	r := &Retrier{logger: c.logger, hooks: c.hooks, eventsOnlyOnRetry: c.eventsOnlyOnRetry, callSpan: c.callSpan, eventSink: c.eventSink}
	r.set.Store(set)
	r.targets.init(c.newBudget, r.logXDS)
	r.targets.throttle(set.throttle())
	r.calls.New = func() any { return &call{r: r} }
	if c.newMetrics == nil {
		c.newMetrics = newGlobalMetrics
	}
	var err error
	if r.metrics, err = c.newMetrics(r); err != nil {
		return nil, err
	}
	r.logMissing(set)
	return r, nil
}

// Update replaces all policies by those of the options, as if New had been
// given them, while calls run: those under way keep the policy they began
// with. Options that concern wiring (budgets, logger, hooks, telemetry) are
// refused. On an error, which names every fault, nothing changes.
//
// Budgets keep their balance. Where a service config has another retryThrottling
// than the one before, or one of the two has none, what takes the place of a
// budget begins with the share that was left of it.
func (r *Retrier) Update(opts ...Option) error {
	c := newConfig(opts)
	set := newPolicySet(c)
	set.checkThrottle(r.targets.newBudget != nil, &c.faults)
	if len(c.wiring) > 0 {
		c.faults.add("Update: %s cannot change after New, want policy options only", strings.Join(c.wiring, ", "))
	}
	if err := c.faults.err(); err != nil {
		return err
	}
	r.updates.Lock()
	defer r.updates.Unlock()
	set.memories = r.set.Load().memories // a new policy is no reason to tell everything once more
	set.children = r.set.Load().children
	r.set.Store(set)
	r.targets.throttle(set.throttle())
	r.logMissing(set)
	return nil
}

// DialOptions returns what a ClientConn needs: both interceptors, chained after
// those already given, and grpc.WithDisableRetry, without which gRPC's own
// retries would multiply with ours.
func (r *Retrier) DialOptions() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(r.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(r.StreamClientInterceptor()),
		grpc.WithDisableRetry(),
	}
}

// UnaryClientInterceptor returns the interceptor for unary calls. Whoever
// installs it without [Retrier.DialOptions] should give grpc.WithDisableRetry too.
func (r *Retrier) UnaryClientInterceptor() grpc.UnaryClientInterceptor { return r.unary }

// unary makes one call.
func (r *Retrier) unary(ctx context.Context, fullMethod string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	c, err := r.begin(ctx, fullMethod, cc, opts, false)
	if err != nil {
		return err
	}
	if c == nil {
		return invoker(ctx, fullMethod, req, reply, cc, opts...)
	}
	c.request = req
	if c.hedging {
		return c.run(c.hedged(reply, func(ctx context.Context, reply any, opts []grpc.CallOption) error {
			return invoker(ctx, fullMethod, req, reply, cc, opts...)
		}))
	}
	blank := blankOf(reply)
	return c.run(func(ctx context.Context, opts []grpc.CallOption) error {
		if c.number > 1 {
			reset(reply, blank)
		}
		return invoker(ctx, fullMethod, req, reply, cc, opts...)
	})
}

// blankOf keeps what is in a reply that has no Reset of its own: the caller may
// have put something there, such as defaults, a buffer, or a pointer to what the
// codec is to fill.
func blankOf(reply any) (blank reflect.Value) {
	switch reply.(type) {
	case nil, proto.Message, interface{ Reset() }:
		return blank
	}
	if v := reflect.ValueOf(reply); v.Kind() == reflect.Pointer && !v.IsNil() {
		blank = reflect.New(v.Type().Elem()).Elem()
		blank.Set(v.Elem())
	}
	return blank
}

// reset makes a reply that a failed attempt may have filled as it was: some
// codecs merge into what is there.
func reset(reply any, blank reflect.Value) {
	v := reflect.ValueOf(reply)
	if v.Kind() == reflect.Pointer && v.IsNil() {
		return
	}
	switch m := reply.(type) {
	case proto.Message:
		proto.Reset(m)
	case interface{ Reset() }:
		m.Reset()
	default:
		if blank.IsValid() {
			v.Elem().Set(blank)
		}
	}
}
