// Package peers is the table of what retries the unary calls of a gRPC client
// in Go, so that every benchmark and experiment sets all of them up alike.
package peers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"time"

	avast "github.com/avast/retry-go/v5"
	cenkalti "github.com/cenkalti/backoff/v5"
	"github.com/failsafe-go/failsafe-go"
	failsafebudget "github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/failsafegrpc"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	failsafetimeout "github.com/failsafe-go/failsafe-go/timeout"
	"github.com/googleapis/gax-go/v2"
	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	sethvargo "github.com/sethvargo/go-retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry"
)

// Config is what every peer is asked for: UNAVAILABLE is retried, whatever the
// method, and so is the attempt's own timeout; nothing else is.
type Config struct {
	// MaxAttempts counts the first attempt too; 0 means 3.
	MaxAttempts int
	// Base is the wait before the first retry; each further one is twice as
	// long, up to Max. 0: no wait. The native peers cannot do without, and get 1 ns.
	Base, Max time.Duration
	// Jitter lets the waits vary in the manner that the peer recommends.
	// Native and gax always do.
	Jitter bool
	// AttemptTimeout bounds each attempt; 0 means none. An attempt that it ends
	// is retried like one that came to UNAVAILABLE. The native peers have none:
	// ErrUnable.
	AttemptTimeout time.Duration
	// RoundRobin lets a ClientConn that the peer makes use all addresses in turn,
	// by its default service config.
	RoundRobin bool
}

// Peer is one way to retry, or none.
type Peer struct {
	Name   string
	Module string // the Go module it comes from; "" for none
	Note   string // how it is used here

	interceptor func(Config) (grpc.UnaryClientInterceptor, error)
	options     func(Config) ([]grpc.DialOption, error)
	timeouts    bool // can be asked for an AttemptTimeout
	budget      bool
}

// All is the table. None comes first and Ours second.
var All = []Peer{
	{
		Name: None, Note: "no interceptor, and grpc's own retries off",
		interceptor: func(Config) (grpc.UnaryClientInterceptor, error) { return passOn, nil },
		options: func(c Config) ([]grpc.DialOption, error) {
			return c.balanced(grpc.WithDisableRetry()), nil
		},
		timeouts: true, // it has none to keep, and is what the others are compared with
	},
	{
		Name: Ours, Module: "example.com/grpcretry", Note: "with its default budget",
		interceptor: func(c Config) (grpc.UnaryClientInterceptor, error) {
			r, err := ours(c)
			if err != nil {
				return nil, err
			}
			return r.UnaryClientInterceptor(), nil
		},
		options: func(c Config) ([]grpc.DialOption, error) {
			r, err := ours(c)
			if err != nil {
				return nil, err
			}
			return c.balanced(r.DialOptions()...), nil
		},
		timeouts: true, budget: true,
	},
	{
		Name: "middleware", Module: "github.com/grpc-ecosystem/go-grpc-middleware/v2", Note: "its retry interceptor",
		interceptor: func(c Config) (grpc.UnaryClientInterceptor, error) { return throughMiddleware(c), nil },
		timeouts:    true,
	},
	{
		Name: "failsafe", Module: "github.com/failsafe-go/failsafe-go", Note: "its failsafegrpc interceptor with a retry policy",
		interceptor: func(c Config) (grpc.UnaryClientInterceptor, error) { return throughFailsafe(c, nil), nil },
		timeouts:    true,
	},
	{
		Name: "failsafe-budget", Module: "github.com/failsafe-go/failsafe-go", Note: "the same with its budget",
		interceptor: func(c Config) (grpc.UnaryClientInterceptor, error) {
			return throughFailsafe(c, failsafebudget.New()), nil
		},
		timeouts: true, budget: true,
	},
	{
		Name: "native", Module: "google.golang.org/grpc", Note: "grpc's own retry, by service config",
		options: func(c Config) ([]grpc.DialOption, error) { return native(c, false), nil },
	},
	{
		Name: "native-throttle", Module: "google.golang.org/grpc", Note: "the same with retryThrottling",
		options: func(c Config) ([]grpc.DialOption, error) { return native(c, true), nil },
		budget:  true,
	},
	{
		Name: "gax", Module: "github.com/googleapis/gax-go/v2", Note: "gax.Invoke around the call",
		interceptor: around(throughGax), timeouts: true,
	},
	{
		Name: "cenkalti", Module: "github.com/cenkalti/backoff/v5", Note: "backoff.Retry around the call",
		interceptor: around(throughCenkalti), timeouts: true,
	},
	{
		Name: "avast", Module: "github.com/avast/retry-go/v5", Note: "a Retrier for each call, because it holds the call's context",
		interceptor: around(throughAvast), timeouts: true,
	},
	{
		Name: "sethvargo", Module: "github.com/sethvargo/go-retry", Note: "retry.Do around the call",
		interceptor: around(throughSethvargo), timeouts: true,
	},
}

// Names of the two peers that every comparison refers to.
const (
	None = "none"
	Ours = "ours"
)

// ErrUnable is the error of a peer that cannot do what a Config asks for.
var ErrUnable = errors.New("peers: the peer cannot do this")

// Retries reports whether the peer retries at all.
func (p Peer) Retries() bool { return p.Module != "" }

// Interceptor returns the peer as an interceptor. The native peers are none:
// ErrUnable.
func (p Peer) Interceptor(c Config) (grpc.UnaryClientInterceptor, error) {
	if p.interceptor == nil || c.AttemptTimeout > 0 && !p.timeouts {
		return nil, fmt.Errorf("%w: %s as an interceptor with %+v", ErrUnable, p.Name, c)
	}
	return p.interceptor(c.withDefaults())
}

// DialOptions returns what gives a ClientConn this peer, and no other retries.
func (p Peer) DialOptions(c Config) ([]grpc.DialOption, error) {
	if c.AttemptTimeout > 0 && !p.timeouts {
		return nil, fmt.Errorf("%w: %s with %+v", ErrUnable, p.Name, c)
	}
	c = c.withDefaults()
	if p.options != nil {
		return p.options(c)
	}
	i, err := p.interceptor(c)
	if err != nil {
		return nil, err
	}
	return c.balanced(grpc.WithChainUnaryInterceptor(i), grpc.WithDisableRetry()), nil
}

// ServerOptions returns what the peer offers for servers that make calls
// themselves: nothing, for all but ours.
func (p Peer) ServerOptions() []grpc.ServerOption {
	if p.Name != Ours {
		return nil
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor())}
}

// Budgeted reports whether the peer bounds its retries over all calls, and not
// only those of each call.
func (p Peer) Budgeted() bool { return p.budget }

// TimesAttempts reports whether the peer can be asked for an AttemptTimeout and
// keeps it. None cannot, as its caller's deadline is all there is.
func (p Peer) TimesAttempts() bool { return p.timeouts && p.Retries() }

const roundRobin = `"loadBalancingConfig": [{"round_robin": {}}]`

// balanced adds the balancer to the options of a peer that has no service config.
func (c Config) balanced(opts ...grpc.DialOption) []grpc.DialOption {
	if c.RoundRobin {
		opts = append(opts, grpc.WithDefaultServiceConfig("{"+roundRobin+"}"))
	}
	return opts
}

func (c Config) withDefaults() Config {
	if c.MaxAttempts == 0 {
		c.MaxAttempts = 3
	}
	c.Max = max(c.Max, c.Base)
	return c
}

// wait is the wait before a retry, counted from 1, without jitter.
func (c Config) wait(retry int) time.Duration {
	return time.Duration(min(float64(c.Base)*math.Pow(2, float64(retry-1)), float64(c.Max)))
}

func passOn(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	return invoker(ctx, method, req, reply, cc, opts...)
}

func ours(c Config) (*grpcretry.Retrier, error) {
	b := grpcretry.Backoff{Base: c.Base, Max: c.Max}
	switch {
	case c.Base == 0:
		b = grpcretry.Backoff{Func: func(int, time.Duration, grpcretry.Attempt) time.Duration { return 0 }}
	case !c.Jitter:
		b.Jitter = grpcretry.NoJitter
	}
	return grpcretry.New(grpcretry.WithDefaultPolicy(grpcretry.Policy{
		MaxAttempts:    c.MaxAttempts,
		AttemptTimeout: c.AttemptTimeout,
		Backoff:        b,
		Idempotency:    grpcretry.Idempotent,
	}), grpcretry.WithLogger(slog.New(slog.DiscardHandler))) // the others log nothing either
}

func throughMiddleware(c Config) grpc.UnaryClientInterceptor {
	backoff := func(_ context.Context, attempt uint) time.Duration { return c.wait(int(attempt)) }
	if c.Jitter {
		backoff = middleware.BackoffExponentialWithJitterBounded(c.Base, 0.1, c.Max)
	}
	opts := []middleware.CallOption{
		middleware.WithMax(uint(c.MaxAttempts)),
		middleware.WithCodes(codes.Unavailable),
		middleware.WithBackoff(backoff),
	}
	if c.AttemptTimeout > 0 {
		opts = append(opts, middleware.WithPerRetryTimeout(c.AttemptTimeout))
	}
	return middleware.UnaryClientInterceptor(opts...)
}

func throughFailsafe(c Config, budget failsafebudget.Budget) grpc.UnaryClientInterceptor {
	b := retrypolicy.NewBuilder[any]().
		HandleIf(func(_ any, err error) bool { return unavailable(err) || errors.Is(err, failsafetimeout.ErrExceeded) }).
		WithMaxAttempts(c.MaxAttempts).
		ReturnLastFailure()
	switch {
	case c.Base > 0 && c.Max > c.Base:
		b = b.WithBackoff(c.Base, c.Max)
	case c.Base > 0:
		b = b.WithDelay(c.Base)
	}
	if c.Jitter {
		b = b.WithJitterFactor(0.25)
	}
	if budget != nil {
		b = b.WithBudget(budget)
	}
	policies := []failsafe.Policy[any]{b.Build()}
	if c.AttemptTimeout > 0 {
		policies = append(policies, failsafetimeout.New[any](c.AttemptTimeout))
	}
	return failsafegrpc.NewUnaryClientInterceptor(policies...)
}

// native is grpc's retry. It makes at most five attempts.
func native(c Config, throttle bool) []grpc.DialOption {
	seconds := func(d time.Duration) string {
		return strconv.FormatFloat(max(d, 1).Seconds(), 'f', 9, 64) + "s"
	}
	throttling := ""
	if throttle {
		throttling = `, "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1}`
	}
	if c.RoundRobin {
		throttling += ", " + roundRobin
	}
	return []grpc.DialOption{grpc.WithDefaultServiceConfig(fmt.Sprintf(`{"methodConfig": [{"name": [{}], "retryPolicy": {
		"maxAttempts": %d, "initialBackoff": %q, "maxBackoff": %q, "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]
	}}]%s}`, c.MaxAttempts, seconds(c.Base), seconds(c.Max), throttling))}
}

// around makes an interceptor of a function that repeats work.
func around(through func(context.Context, Config, func(context.Context) error) error) func(Config) (grpc.UnaryClientInterceptor, error) {
	return func(c Config) (grpc.UnaryClientInterceptor, error) {
		return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return through(ctx, c, func(ctx context.Context) error {
				if c.AttemptTimeout <= 0 {
					return invoker(ctx, method, req, reply, cc, opts...)
				}
				attempt, cancel := context.WithTimeout(ctx, c.AttemptTimeout)
				defer cancel()
				err := invoker(attempt, method, req, reply, cc, opts...)
				if status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil {
					return attemptTimeout{err} // the attempt's own, not the caller's
				}
				return err
			})
		}, nil
	}
}

func throughGax(ctx context.Context, c Config, work func(context.Context) error) error {
	return gax.Invoke(ctx,
		func(ctx context.Context, _ gax.CallSettings) error { return work(ctx) },
		gax.WithRetry(func() gax.Retryer {
			return &gaxRetryer{left: c.MaxAttempts - 1, none: c.Base == 0, backoff: gax.Backoff{Initial: c.Base, Max: c.Max, Multiplier: 2}}
		}))
}

// gaxRetryer counts attempts, which gax's own retryers do not.
type gaxRetryer struct {
	left    int
	none    bool // no wait, which the zero gax.Backoff does not mean
	backoff gax.Backoff
}

func (r *gaxRetryer) Retry(err error) (time.Duration, bool) {
	if r.left == 0 || !retryable(err) {
		return 0, false
	}
	r.left--
	if r.none {
		return 0, true
	}
	return r.backoff.Pause(), true
}

func throughCenkalti(ctx context.Context, c Config, work func(context.Context) error) error {
	var b cenkalti.BackOff
	switch {
	case c.Base == 0:
		b = &cenkalti.ZeroBackOff{}
	default:
		e := &cenkalti.ExponentialBackOff{InitialInterval: c.Base, Multiplier: 2, MaxInterval: c.Max}
		if c.Jitter {
			e.RandomizationFactor = cenkalti.DefaultRandomizationFactor
		}
		b = e
	}
	_, err := cenkalti.Retry(ctx, func() (struct{}, error) {
		err := work(ctx)
		if err != nil && !retryable(err) {
			err = cenkalti.Permanent(err)
		}
		return struct{}{}, err
	}, cenkalti.WithBackOff(b), cenkalti.WithMaxTries(uint(c.MaxAttempts)))
	return err
}

func throughAvast(ctx context.Context, c Config, work func(context.Context) error) error {
	delay := avast.BackOffDelay
	switch {
	case c.Base == 0:
		delay = avast.FixedDelay
	case c.Jitter:
		delay = avast.FullJitterBackoffDelay
	}
	return avast.New(
		avast.Context(ctx),
		avast.Attempts(uint(c.MaxAttempts)),
		avast.Delay(c.Base),
		avast.MaxDelay(c.Max),
		avast.DelayType(delay),
		avast.RetryIf(retryable),
		avast.LastErrorOnly(true),
	).Do(func() error { return work(ctx) })
}

func throughSethvargo(ctx context.Context, c Config, work func(context.Context) error) error {
	retries := 0
	var b sethvargo.Backoff = sethvargo.BackoffFunc(func() (time.Duration, bool) {
		retries++
		return c.wait(retries), false
	})
	if c.Jitter {
		b = sethvargo.WithFullJitter(b)
	}
	return sethvargo.Do(ctx, sethvargo.WithMaxRetries(uint64(c.MaxAttempts-1), b), func(ctx context.Context) error {
		err := work(ctx)
		if retryable(err) {
			err = sethvargo.RetryableError(err)
		}
		return err
	})
}

// attemptTimeout marks the error of an attempt that its own timeout ended.
type attemptTimeout struct{ error }

func (e attemptTimeout) GRPCStatus() *status.Status { return status.Convert(e.error) }

func unavailable(err error) bool { return err != nil && status.Code(err) == codes.Unavailable }

// retryable is what the peers retry that are put around a call.
func retryable(err error) bool {
	var timeout attemptTimeout
	return unavailable(err) || errors.As(err, &timeout)
}
