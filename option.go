package grpcretry

import (
	"context"
	"log/slog"

	"google.golang.org/grpc"
)

// Option configures a [Retrier]. The options are made by the With functions of
// this package; a nil Option is an error of [New].
type Option interface{ apply(*config) }

// config is what a list of options says, before it is checked.
type config struct {
	fallback   []Policy
	policies   []patternPolicy
	idempotent []string
	noResolver bool

	serviceConfigs  []string
	maxCallAttempts []int
	dryRun          []string
	dryRunAll       bool
	httpGet         bool

	wiring            []string // the options given that only New takes
	newBudget         func(target string) Budget
	shared            Budget // of WithBudget
	methodBudgets     []methodBudget
	logger            *slog.Logger
	hooks             []Hooks
	eventsOnlyOnRetry bool
	callSpan          *callSpan
	eventSink         EventSink
	newMetrics        func(*Retrier) (*metrics, error) // nil: with the global MeterProvider

	faults faults
}

type methodBudget struct {
	pattern string
	budget  Budget
}

type patternPolicy struct {
	pattern string
	policy  Policy
}

// newConfig applies the options; their faults are in its faults.
func newConfig(opts []Option) *config {
	c := &config{}
	for i, o := range opts {
		if o == nil {
			c.faults.add("option %d of %d is nil, want an Option", i+1, len(opts))
			continue
		}
		o.apply(c)
	}
	return c
}

// policyOption may be given to New and to Update.
type policyOption func(*config)

func (o policyOption) apply(c *config) { o(c) }

// wiringOption may be given to New only.
type wiringOption struct {
	name string
	set  func(*config)
}

func (o wiringOption) apply(c *config) {
	c.wiring = append(c.wiring, o.name)
	o.set(c)
}

// WithDefaultPolicy sets the policy of every method that no pattern names.
// Without it such methods follow the retryPolicy of the ClientConn's service
// config, if that has one for them, and Policy{} otherwise.
func WithDefaultPolicy(p Policy) Option {
	return policyOption(func(c *config) { c.fallback = append(c.fallback, p) })
}

// WithMethodPolicy sets the policy of one method, "/pkg.Service/Method" or
// "pkg.Service/Method", or of the other methods of a service, "pkg.Service/*".
// The more specific policy replaces the less specific one as a whole; only an
// Idempotency of [Inherit] is looked for further. A pattern may be given once.
// If the service's .proto is linked into the program, the method must exist.
func WithMethodPolicy(pattern string, p Policy) Option {
	return policyOption(func(c *config) { c.policies = append(c.policies, patternPolicy{pattern, p}) })
}

// WithIdempotent declares methods, "pkg.Service/Method", or whole services,
// "pkg.Service/*", to be idempotent, so that they may be repeated though the
// server may have processed them. Policies stay as they are. Where a policy's
// Idempotency says otherwise the more specific pattern wins; for the same
// pattern a contradiction is an error of [New]. Without patterns it declares nothing.
func WithIdempotent(patterns ...string) Option {
	return policyOption(func(c *config) { c.idempotent = append(c.idempotent, patterns...) })
}

// WithServiceConfig takes policies from a gRPC service config, the JSON document
// that resolvers and grpc.WithDefaultServiceConfig deliver too (gRFC A6). Its
// retryPolicy and hedgingPolicy count for the methods that they apply to unless
// an option here has a policy for them. A method which one of them names, or
// whose service it names, counts as idempotent unless an option here says
// otherwise; {} in its place names no method. Where the document has no policy
// for a method the next source decides.
//
// The document is read strictly: all its faults, among them unknown and repeated
// fields, are one error, each with its line and column. Fields that concern the
// ClientConn (load balancing, health checks) are refused. Where gRPC would take
// a value for another, or ignore it, docs/service-config.md tells the difference.
//
//   - maxAttempts is cut to 5; see [WithMaxCallAttempts].
//   - timeout is the policy's Timeout, and limits the whole call.
//   - waitForReady holds unless the call has a grpc.WaitForReady of its own, and
//     of the message limits in the document and in the call the smaller holds.
//     They hold also for methods whose policy is in code.
//   - perAttemptRecvTimeout, which gRPC for Java and C++ have in a retryPolicy,
//     is the policy's AttemptTimeout.
//   - hedgingPolicy becomes the policy's Hedge, without hedgingDelay AtOnce.
//   - retryThrottling makes the budget of each target a [Throttle], in place of
//     the default one; together with [WithBudget] or [WithBudgetPerTarget] it is an error.
//
// [Retrier.Update] with another document changes all this while calls run, and
// keeps the share of the budgets that is left.
func WithServiceConfig(json string) Option {
	return policyOption(func(c *config) { c.serviceConfigs = append(c.serviceConfigs, json) })
}

// WithMaxCallAttempts raises, or lowers, the 5 attempts to which the maxAttempts
// of a document given to [WithServiceConfig] is cut; n is 2 or more. The
// document may come from elsewhere than the program, hence the limit. For the
// service config of a ClientConn it is grpc.WithMaxCallAttempts; policies in code
// and in a .proto have no such limit.
func WithMaxCallAttempts(n int) Option {
	return policyOption(func(c *config) { c.maxCallAttempts = append(c.maxCallAttempts, n) })
}

// WithDryRun decides about retries as ever and tells them in events, hooks and
// reports ([ReasonDryRun], with the delay that would have passed), but makes
// none: every call is one attempt, whose own result it returns. Without patterns
// this holds for all methods; else for one method, "pkg.Service/Method", or a
// service, "pkg.Service/*". It may be repeated.
//
// In New it lets a roll-out show first what it would do. In [Retrier.Update],
// together with the options otherwise in force, it stops all retries at once
// in an incident, and another Update without it lets them go on. Nothing is
// taken from a budget; what calls and failures do to it goes on.
func WithDryRun(patterns ...string) Option {
	return policyOption(func(c *config) {
		c.dryRun = append(c.dryRun, patterns...)
		c.dryRunAll = c.dryRunAll || len(patterns) == 0
	})
}

// WithHTTPGetIdempotent takes a method as idempotent whose .proto maps it to
// HTTP GET, and to nothing else, by google.api.http. That is the weakest
// statement: everything else that says anything of the method's idempotency wins.
func WithHTTPGetIdempotent() Option {
	return policyOption(func(c *config) { c.httpGet = true })
}

// WithoutResolverConfig keeps the Retrier from following the retryPolicy and
// the timeout that the ClientConn's service config holds for a method. gRPC
// itself goes on applying the timeout, to each attempt.
func WithoutResolverConfig() Option {
	return policyOption(func(c *config) { c.noResolver = true })
}

// WithBudget makes every target share the one budget b. The default is a
// budget of its own, NewBudget(BudgetConfig{}), for each target. b must have
// been made by this package.
func WithBudget(b Budget) Option {
	return wiringOption{"WithBudget", func(c *config) {
		if fault := budgetFault(b); fault != "" {
			c.faults.add("WithBudget: budget is %s (Unlimited() for no limit)", fault)
			return
		}
		c.shared = b
		c.setBudget(func(string) Budget { return b })
	}}
}

// WithBudgetPerTarget calls newBudget once for each target, with its canonical
// name ("dns:///orders:443"), to get its budget. newBudget must not be nil and
// must not make calls through the Retrier; where it returns nil, or a budget
// that this package did not make, the default budget is used.
//
// A target's budget serves all ClientConns to it, and is kept while they
// reconnect or are closed and dialled anew. A Retrier keeps up to 4096 targets;
// when there are more, the 256 used least recently are forgotten, each with the
// balance of its budget, and newBudget is called again when one of them comes
// back. A target with calls in flight is never forgotten.
func WithBudgetPerTarget(newBudget func(target string) Budget) Option {
	return wiringOption{"WithBudgetPerTarget", func(c *config) {
		if newBudget == nil {
			c.faults.add("WithBudgetPerTarget: callback is nil, want a function")
			return
		}
		c.setBudget(newBudget)
	}}
}

// WithMethodBudget gives calls of one method, "pkg.Service/Method", or of the
// other methods of a service, "pkg.Service/*", a budget b beside that of their
// target: an extra attempt needs the grant of both, and every outcome is
// recorded with both. So a method that fails all the time cannot use up what
// the others need. b is one for all targets and must have been made by this
// package; the same b may be given for several patterns, each of which may be
// given once. Where both forms fit a method, only the exact one counts.
//
// Like every budget it stays when [Retrier.Update] replaces the policies. To
// change its limits while calls run, use Rescale of the budget itself.
func WithMethodBudget(pattern string, b Budget) Option {
	return wiringOption{"WithMethodBudget", func(c *config) {
		c.methodBudgets = append(c.methodBudgets, methodBudget{pattern, b})
	}}
}

func (c *config) setBudget(newBudget func(string) Budget) {
	if c.newBudget != nil {
		c.faults.add("WithBudget and WithBudgetPerTarget are given more than once in all, want one of them once")
	}
	c.newBudget = newBudget
}

// WithEventsOnlyOnRetry leaves out the span events of calls that made one
// attempt only. The default is an event for every attempt.
func WithEventsOnlyOnRetry() Option {
	return wiringOption{"WithEventsOnlyOnRetry", func(c *config) { c.eventsOnlyOnRetry = true }}
}

// WithLogger sets where the Retrier logs; the default is slog.Default().
// slog.New(slog.DiscardHandler) silences it; nil is an error of New.
func WithLogger(l *slog.Logger) Option {
	return wiringOption{"WithLogger", func(c *config) {
		switch {
		case l == nil:
			c.faults.add("WithLogger: logger is nil, want a *slog.Logger")
		case c.logger != nil:
			c.faults.add("WithLogger is given twice, want it once")
		}
		c.logger = l
	}}
}

// WithHooks adds hooks; it may be repeated, and they run in the order given.
// At least one function must be set.
func WithHooks(h Hooks) Option {
	return wiringOption{"WithHooks", func(c *config) {
		if h.AttemptEnd == nil && h.RetryScheduled == nil && h.CallEnd == nil {
			c.faults.add("WithHooks: every callback is nil, want at least one function")
			return
		}
		c.hooks = append(c.hooks, h)
	}}
}

// Hooks are functions that are told what happens. They run on the goroutine of
// the call, outside locks, possibly for many calls at once, so they should be
// quick. A panic in one goes through to the caller; nothing is lost by it. Those
// of a stream that its caller left, by cancelling its context or closing the
// ClientConn, run on a goroutine of gRPC's.
type Hooks struct {
	// AttemptEnd runs after each attempt, when it is decided what follows.
	AttemptEnd func(ctx context.Context, a Attempt)
	// RetryScheduled runs before the wait for another attempt, only when one
	// is to follow: the budget has granted it and the wait fits the deadline.
	// Still the caller's context may end the wait.
	RetryScheduled func(ctx context.Context, a Attempt)
	// CallEnd runs once, before the call returns err. request is the message
	// of a unary call, nil for a stream.
	CallEnd func(ctx context.Context, r Report, request any, err error)
}

// WithCallPolicy edits, for one call, a copy of the policy in force, in which
// the defaults are filled in. An edit that leaves the policy invalid fails the
// call with INTERNAL, and the message names the field. Several are applied in
// order. They run again if the ClientConn's service config, and with it another
// policy to edit, arrives only while the first attempt waits for a connection.
// edit runs on the caller's goroutine and must not keep the pointer; a nil edit
// fails the call with INTERNAL too. Without the interceptor it does nothing.
func WithCallPolicy(edit func(*Policy)) grpc.CallOption { return callPolicyOption{edit: edit} }

// WithoutRetry makes the call once, whatever [WithCallPolicy] or the policy in
// force says. Without the interceptor it does nothing.
func WithoutRetry() grpc.CallOption { return withoutRetryOption{} }

// WithReport fills *r when the call ends, whatever its result. Each call needs
// a Report of its own, which must not be read before the call returned, or, of a
// stream, before it ended. A nil r is ignored, and of several Reports each is
// filled. Without the interceptor it does nothing.
func WithReport(r *Report) grpc.CallOption { return reportOption{report: r} }

// WithIdempotencyKey sends the metadata "idempotency-key: key", the same in
// every attempt of the call, for servers that remove duplicates by it. An
// empty key stands for a fresh random one. A key that the caller's outgoing
// metadata already holds wins. The key alone does not make a call idempotent;
// see [Keyed]. It must be printable ASCII, or gRPC fails the call with INTERNAL
// before it is sent. Without the interceptor it does nothing.
//
// The name is that of the header in the IETF draft [The Idempotency-Key HTTP
// Header Field], section 2, whose quotes around the value gRPC metadata does not need.
//
// [The Idempotency-Key HTTP Header Field]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/
func WithIdempotencyKey(key string) grpc.CallOption { return keyOption{key: key} }

// The call options embed EmptyCallOption, by which grpc itself ignores them.
type (
	callPolicyOption struct {
		grpc.EmptyCallOption
		edit func(*Policy)
	}
	withoutRetryOption struct{ grpc.EmptyCallOption }
	reportOption       struct {
		grpc.EmptyCallOption
		report *Report
	}
	keyOption struct {
		grpc.EmptyCallOption
		key string
	}
	// takenOption marks every attempt as in the care of a Retrier, so that
	// another one further in passes it through and their retries do not multiply.
	takenOption struct{ grpc.EmptyCallOption }
)
