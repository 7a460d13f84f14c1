package main

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
)

const (
	quote   = "/shop.v1.Orders/Quote"  // reads
	place   = "/shop.v1.Orders/Place"  // writes; nobody says that it may be repeated
	reserve = "/shop.v1.Stock/Reserve" // may be repeated
)

// scene is one request to the shop, and what goes wrong with it.
type scene struct {
	title, told string
	method      string        // of orders, which the shop calls
	deadline    time.Duration // of the shop's request; 0: none

	stock func(ctx context.Context, nth int) error // what reserving comes to
	cut   bool                                     // orders loses its connection to the shop before it answers
}

var scenes = []scene{
	{
		title: "Mended by retries", told: "Stock fails twice, as if it were being replaced. The shop never notices.",
		method: quote,
		stock: func(_ context.Context, nth int) error {
			if nth <= 2 {
				return status.Error(codes.Unavailable, "starting up")
			}
			return nil
		},
	},
	{
		title: "Stock is down for longer", told: "Orders tries as often as its policy allows, and tells the shop not to begin again.",
		method: quote,
		stock:  func(context.Context, int) error { return status.Error(codes.Unavailable, "starting up") },
	},
	{
		title: "A deadline without room", told: "Stock is overloaded and asks to be left alone for half a second; the shop has 300 ms.",
		method: quote, deadline: 300 * time.Millisecond,
		stock: func(ctx context.Context, _ int) error {
			_ = grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", "500"))
			return status.Error(codes.ResourceExhausted, "too many reservations")
		},
	},
	{
		title: "A write whose answer is lost", told: "Orders has placed the order when its connection breaks. The shop cannot know that.",
		method: place, cut: true,
		stock: func(context.Context, int) error { return nil },
	},
}

// play starts the three services, makes the request and returns its trace. When
// it returns, everything has ended.
func (s scene) play(ctx context.Context, tracers trace.TracerProvider, logger *slog.Logger) (trace.TraceID, error) {
	var stockCalls atomic.Int32
	stock := newService("stock", tracers, method(reserve, func(ctx context.Context) error {
		time.Sleep(5 * time.Millisecond)
		return s.stock(ctx, int(stockCalls.Add(1)))
	}))
	defer stock.Close()
	toStock, err := dial(stock, tracers, logger, grpcretry.WithIdempotent("shop.v1.Stock/*"))
	if err != nil {
		return trace.TraceID{}, err
	}
	defer toStock.Close()

	var orders *testsrv.Server
	handle := func(ctx context.Context) error {
		if err := call(ctx, toStock, reserve); err != nil {
			return err
		}
		if s.cut {
			orders.CutConnections()
			<-ctx.Done()
		}
		return nil
	}
	orders = newService("orders", tracers, method(quote, handle), method(place, handle))
	defer orders.Close()
	toOrders, err := dial(orders, tracers, logger, grpcretry.WithIdempotent("shop.v1.Orders/Quote"))
	if err != nil {
		return trace.TraceID{}, err
	}
	defer toOrders.Close()

	// The shop: some request of its own, instrumented by hand.
	ctx, span := tracers.Tracer("shop").Start(ctx, "checkout", trace.WithSpanKind(trace.SpanKindServer))
	defer span.End()
	if s.deadline > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.deadline)
		defer cancel()
	}
	_ = call(ctx, toOrders, s.method) // the trace tells
	return span.SpanContext().TraceID(), nil
}

var tracing = otelgrpc.WithPropagators(propagation.TraceContext{})
var metrics = otelgrpc.WithMeterProvider(noop.NewMeterProvider())

// newService starts a service that is instrumented as a server should be:
// otelgrpc for the span, and grpcretry's interceptor, by which a caller learns
// that somebody further on has given up already.
func newService(name string, tracers trace.TracerProvider, methods ...grpc.MethodDesc) *testsrv.Server {
	service := map[string]string{"stock": "shop.v1.Stock", "orders": "shop.v1.Orders"}[name]
	return testsrv.New(nil, testsrv.WithName(name),
		testsrv.WithServerOptions(
			grpc.StatsHandler(otelgrpc.NewServerHandler(otelgrpc.WithTracerProvider(tracers), tracing, metrics)),
			grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor()),
		),
		testsrv.WithServices(func(r grpc.ServiceRegistrar) {
			r.RegisterService(&grpc.ServiceDesc{ServiceName: service, HandlerType: (*any)(nil), Methods: methods}, nil)
		}))
}

// dial connects to the service as a client should: otelgrpc makes a span of
// each attempt, and AttemptStatsHandler writes its number on it. The waits are
// without jitter, so that two runs look alike.
func dial(srv *testsrv.Server, tracers trace.TracerProvider, logger *slog.Logger, opts ...grpcretry.Option) (*grpc.ClientConn, error) {
	retry, err := grpcretry.New(append(opts, grpcretry.WithLogger(logger),
		grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: grpcretry.Backoff{Base: 50 * time.Millisecond, Jitter: grpcretry.NoJitter}}))...)
	if err != nil {
		return nil, err
	}
	return srv.Dial(append(retry.DialOptions(),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(tracers), tracing, metrics)),
		grpc.WithStatsHandler(grpcretry.AttemptStatsHandler()))...)
}

// method describes a method without a .proto, which a handler serves.
func method(fullMethod string, handle func(context.Context) error) grpc.MethodDesc {
	name := fullMethod[len("/shop.v1.Orders/"):]
	if fullMethod == reserve {
		name = "Reserve"
	}
	return grpc.MethodDesc{MethodName: name, Handler: func(_ any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		in := new(wrapperspb.StringValue)
		if err := decode(in); err != nil {
			return nil, err
		}
		serve := func(ctx context.Context, _ any) (any, error) {
			if err := handle(ctx); err != nil {
				return nil, err
			}
			return wrapperspb.String("done"), nil
		}
		if interceptor == nil {
			return serve(ctx, in)
		}
		return interceptor(ctx, in, &grpc.UnaryServerInfo{FullMethod: fullMethod}, serve)
	}}
}

func call(ctx context.Context, cc *grpc.ClientConn, method string) error {
	return cc.Invoke(ctx, method, wrapperspb.String("a chair"), new(wrapperspb.StringValue), grpc.StaticMethod())
}
