// Command tiers shows what retries do in a chain of services, A -> B -> C -> D,
// while D is down: with every tier retrying by itself, with budgets, and with the
// server interceptors. It prints the requests that each tier gets, and the trace
// of one call across all of them.
//
//	go run ./examples/tiers
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/spantree"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

func main() {
	if err := run(os.Stdout, spantree.Options{Color: spantree.Color(os.Stdout)}); err != nil {
		fmt.Fprintln(os.Stderr, "tiers:", err)
		os.Exit(1)
	}
}

const calls = 20

// run plays everything and prints it to w. Calls that fail belong to it; the
// error is that of something else.
func run(w io.Writer, tree spantree.Options) error {
	var out bytes.Buffer
	fmt.Fprintf(&out, "A calls B, B calls C, and C calls D, which is down. Each tier makes up to four attempts.\n"+
		"What %d calls of A come to, in requests:\n\n", calls)
	row := func(name string, counts ...any) {
		fmt.Fprintf(&out, "   %-44s%9v%9v%9v\n", append([]any{name}, counts...)...)
	}
	row("", "at B", "at C", "at D")
	for _, s := range []struct {
		name string
		setup
	}{
		{"every tier retries by itself", setup{}},
		{"with budgets", setup{budgets: true}},
		{"with the server interceptors", setup{interceptors: true}},
		{"with both, as it should be", setup{budgets: true, interceptors: true}},
	} {
		chain, err := s.start()
		if err != nil {
			return err
		}
		for range calls {
			_ = chain.call()
		}
		row(s.name, chain.requests()...)
		chain.close()
	}

	chain, err := setup{budgets: true, interceptors: true}.start()
	if err != nil {
		return err
	}
	defer chain.close()
	failure := chain.call()
	out.WriteString("\nOne call with both. C retries, since it is next to D; its answer tells B, and B's tells A, that\n" +
		"another attempt would meet the same (the trailer grpc-retry-pushback-ms: -1):\n\n")
	var drawn bytes.Buffer
	if err := spantree.Write(&drawn, chain.spans.Ended(), tree); err != nil {
		return err
	}
	for line := range strings.Lines(drawn.String()) {
		out.WriteString("   " + line)
	}
	fmt.Fprintf(&out, "\n   A got: %v\n", failure)
	_, err = w.Write(out.Bytes())
	return err
}

// setup is what the tiers are equipped with.
type setup struct{ budgets, interceptors bool }

// chain is A -> B -> C -> D.
type chain struct {
	servers []*testsrv.Server        // B, C, D
	client  testpb.TestServiceClient // A's, of B
	spans   *tracetest.SpanRecorder
	tracer  trace.Tracer
}

// start starts D first, because each tier needs a client of the next one.
func (s setup) start() (*chain, error) {
	spans := tracetest.NewSpanRecorder()
	c := &chain{
		spans:  spans,
		tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("tiers"),
	}
	handler := testsrv.Step{Code: codes.Unavailable, Message: "D is down"}
	for _, name := range []string{"D", "C", "B"} {
		server := testsrv.New(
			testsrv.Script{testpb.TestService_Get_FullMethodName: testsrv.Sequence{handler}},
			testsrv.WithName(name),
			testsrv.WithServerOptions(s.serverOptions(c.tracer, name)),
		)
		c.servers = append([]*testsrv.Server{server}, c.servers...)
		client, err := s.dial(server)
		if err != nil {
			c.close()
			return nil, err
		}
		c.client = client
		handler = testsrv.Step{Unary: func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			reply, err := client.Get(ctx, req)
			if err != nil {
				return nil, fmt.Errorf("calling %s: %w", name, err) // as handlers do
			}
			return reply, nil
		}}
	}
	return c, nil
}

// serverOptions are the interceptors of one tier: its span, and ours.
func (s setup) serverOptions(tracer trace.Tracer, name string) grpc.ServerOption {
	unary := []grpc.UnaryServerInterceptor{continueTrace(tracer, name)}
	if s.interceptors {
		unary = append(unary, grpcretry.UnaryServerInterceptor())
	}
	return grpc.ChainUnaryInterceptor(unary...)
}

// dial makes the client of one tier, with a Retrier of its own as in a process of its own.
func (s setup) dial(server *testsrv.Server) (testpb.TestServiceClient, error) {
	options := []grpcretry.Option{
		grpcretry.WithDefaultPolicy(grpcretry.Policy{
			MaxAttempts: 4,
			// Short, and without jitter, so that the example is quick and every run prints the same.
			Backoff: grpcretry.Backoff{Base: time.Millisecond, Max: time.Millisecond, Jitter: grpcretry.NoJitter},
		}),
		grpcretry.WithLogger(slog.New(slog.DiscardHandler)),
	}
	if !s.budgets {
		options = append(options, grpcretry.WithBudget(grpcretry.Unlimited()))
	}
	retry, err := grpcretry.New(options...)
	if err != nil {
		return nil, err
	}
	conn, err := server.Dial(append(retry.DialOptions(), grpc.WithChainUnaryInterceptor(passTrace))...)
	if err != nil {
		return nil, err
	}
	return testpb.NewTestServiceClient(conn), nil
}

// call is one call of A.
func (c *chain) call() error {
	ctx, span := c.tracer.Start(context.Background(), "A")
	defer span.End()
	_, err := c.client.Get(ctx, &testpb.Request{})
	return err
}

// requests are those that B, C and D got.
func (c *chain) requests() (counts []any) {
	for _, s := range c.servers {
		counts = append(counts, s.Count(""))
	}
	return counts
}

func (c *chain) close() {
	for _, s := range c.servers {
		s.Close()
	}
}

// continueTrace starts the span of a request, below that of the caller. Services
// have this from otelgrpc.
func continueTrace(tracer trace.Tracer, name string) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		md, _ := metadata.FromIncomingContext(ctx)
		ctx = propagation.TraceContext{}.Extract(ctx, carrier(md))
		ctx, span := tracer.Start(ctx, name, trace.WithSpanKind(trace.SpanKindServer))
		defer span.End()
		return handler(ctx, req)
	}
}

// passTrace tells the server of the span.
func passTrace(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	md, ok := metadata.FromOutgoingContext(ctx) // a copy
	if !ok {
		md = metadata.MD{}
	}
	propagation.TraceContext{}.Inject(ctx, carrier(md))
	return invoker(metadata.NewOutgoingContext(ctx, md), method, req, reply, cc, opts...)
}

// carrier lets metadata carry the trace context.
type carrier metadata.MD

func (c carrier) Get(key string) string {
	if values := metadata.MD(c).Get(key); len(values) > 0 {
		return values[0]
	}
	return ""
}
func (c carrier) Set(key, value string) { metadata.MD(c).Set(key, value) }
func (c carrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for k := range c {
		keys = append(keys, k)
	}
	return keys
}
