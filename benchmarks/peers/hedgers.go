package peers

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/failsafe-go/failsafe-go"
	failsafebudget "github.com/failsafe-go/failsafe-go/budget"
	"github.com/failsafe-go/failsafe-go/hedgepolicy"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry"
)

// HedgeConfig is what every hedger is asked for. One of Delay and Quantile is set.
type HedgeConfig struct {
	MaxAttempts int           // of one call, the first included
	Delay       time.Duration // from one attempt to the next
	Quantile    float64       // or once a call has taken longer than this share of the recent ones
}

// Hedger is one way to let attempts overlap, or none.
type Hedger struct {
	Name   string
	Module string // the Go module it comes from; "" for none
	Note   string

	options func(HedgeConfig) ([]grpc.DialOption, error)
}

// Hedgers is the table. None comes first and Ours second. Nothing else among the
// peers hedges: grpc for Go does not implement the hedging of its service config.
var Hedgers = []Hedger{
	{Name: None, Note: "no interceptor", options: func(HedgeConfig) ([]grpc.DialOption, error) {
		return []grpc.DialOption{grpc.WithDisableRetry()}, nil
	}},
	{Name: Ours, Module: "example.com/grpcretry", Note: "with its default budget", options: func(c HedgeConfig) ([]grpc.DialOption, error) {
		r, err := grpcretry.New(grpcretry.WithDefaultPolicy(grpcretry.Policy{
			Idempotency: grpcretry.Idempotent,
			Hedge:       grpcretry.Hedge{MaxAttempts: c.MaxAttempts, Delay: c.Delay, Quantile: c.Quantile},
		}), grpcretry.WithLogger(slog.New(slog.DiscardHandler)))
		if err != nil {
			return nil, err
		}
		return r.DialOptions(), nil
	}},
	{Name: "failsafe", Module: "github.com/failsafe-go/failsafe-go", Note: "its hedge policy around the call", options: func(c HedgeConfig) ([]grpc.DialOption, error) {
		return failsafeHedge(c, nil)
	}},
	{Name: "failsafe-budget", Module: "github.com/failsafe-go/failsafe-go", Note: "the same with its budget", options: func(c HedgeConfig) ([]grpc.DialOption, error) {
		return failsafeHedge(c, failsafebudget.New())
	}},
}

// DialOptions returns what gives a ClientConn this hedger.
func (h Hedger) DialOptions(c HedgeConfig) ([]grpc.DialOption, error) {
	if c.MaxAttempts < 2 || (c.Delay > 0) == (c.Quantile > 0) || c.Quantile >= 1 {
		return nil, fmt.Errorf("peers: HedgeConfig = %+v, want MaxAttempts of 2 or more, and either Delay > 0 or Quantile in (0, 1)", c)
	}
	return h.options(c)
}

// failsafeHedge gives each attempt a reply of its own, which the interceptor of
// failsafegrpc does not: there, attempts that overlap write to the caller's.
func failsafeHedge(c HedgeConfig, budget failsafebudget.Budget) ([]grpc.DialOption, error) {
	// It remembers 1000 calls, about as many as ours, and waits for 100.
	b := hedgepolicy.NewBuilderWithDelay[proto.Message](c.Delay)
	if c.Quantile > 0 {
		b = hedgepolicy.NewBuilderWithDelayQuantile[proto.Message](c.Quantile, 1000, 100)
	}
	b = b.WithMaxHedges(c.MaxAttempts - 1)
	if budget != nil {
		b = b.WithBudget(budget)
	}
	executor := failsafe.With(b.Build())
	hedge := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		to, ok := reply.(proto.Message)
		if !ok {
			return fmt.Errorf("%w: reply to a %T", ErrUnable, reply)
		}
		from, err := executor.WithContext(ctx).GetWithExecution(func(e failsafe.Execution[proto.Message]) (proto.Message, error) {
			own := to.ProtoReflect().New().Interface()
			return own, invoker(e.Context(), method, req, own, cc, opts...)
		})
		if err == nil {
			proto.Reset(to)
			proto.Merge(to, from)
		}
		return err
	}
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(hedge), grpc.WithDisableRetry()}, nil
}
