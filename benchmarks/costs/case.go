// Package costs measures what a call costs that goes through each of the
// peers: once through the interceptor alone, with an invoker that answers at
// once, and once from end to end on a connection in memory.
package costs

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Case is one situation in which calls are made.
type Case struct {
	Bench string // its part of a benchmark's name
	Title string // in a table
	// EndToEnd tells that real calls are made, whose cost is told as a ratio.
	// Each connection has luck of its own, so every batch gets a new one.
	EndToEnd bool
	// Parallel is how many goroutines make the calls.
	Parallel int

	config  peers.Config
	script  []error // of the attempts, over and over; nil: all succeed
	context func() (context.Context, context.CancelFunc)
	span    bool // in a recording span of its own, as an instrumented caller has it
	size    int  // of request and response; end to end only
}

// Cases are all of them, those of the interceptor alone first.
var Cases = []Case{
	{Bench: "outcome=ok", Title: "success at once"},
	{Bench: "outcome=ok/parallel", Title: "the same, in 8 goroutines", Parallel: 8},
	{Bench: "outcome=ok/deadline", Title: "success, the caller has a deadline", context: withDeadline},
	{Bench: "outcome=ok/timeout", Title: "success, attempts have a timeout", config: peers.Config{AttemptTimeout: time.Hour}},
	{Bench: "outcome=ok/deadline+timeout", Title: "success, the caller's deadline comes before the attempt's timeout",
		context: withDeadline, config: peers.Config{AttemptTimeout: 2 * time.Hour}},
	{Bench: "outcome=ok/span", Title: "success in a recording span", span: true},
	{Bench: "outcome=retry", Title: "one retry without a wait", script: []error{errDown, nil}},
	{Bench: "outcome=retry/metadata", Title: "the same, the caller sends metadata", script: []error{errDown, nil}, context: withMetadata},
	{Bench: "outcome=retry/wait", Title: "one retry after 1 µs", script: []error{errDown, nil}, config: peers.Config{Base: time.Microsecond}},
	{Bench: "size=100B", Title: "real call, 100 B", EndToEnd: true, size: 100},
	{Bench: "size=100B/parallel", Title: "the same, in 8 goroutines", EndToEnd: true, size: 100, Parallel: 8},
	{Bench: "size=64KiB", Title: "real call, 64 KiB", EndToEnd: true, size: 64 << 10},
	{Bench: "size=64KiB/parallel", Title: "the same, in 8 goroutines", EndToEnd: true, size: 64 << 10, Parallel: 8},
}

var errDown = status.Error(codes.Unavailable, "down")

func withDeadline() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Hour)
}

func withMetadata() (context.Context, context.CancelFunc) {
	ctx := metadata.AppendToOutgoingContext(context.Background(), "x-tenant", "42", "x-request", "7")
	return context.WithCancel(ctx)
}

// Runner makes calls of one peer in one case.
type Runner struct {
	parallel int
	call     []func() error // one for each goroutine
	close    []func()
}

// Start prepares a Runner, which is to be closed. It fails with
// [peers.ErrUnable] if the peer cannot take part in the case.
func (c Case) Start(p peers.Peer) (*Runner, error) {
	r := &Runner{parallel: max(c.Parallel, 1)}
	start := c.alone
	if c.EndToEnd {
		start = c.endToEnd
	}
	if err := start(r, p); err != nil {
		r.Close()
		return nil, fmt.Errorf("%s, peer %s: %w", c.Bench, p.Name, err)
	}
	return r, nil
}

// Run makes n calls, or the next multiple of the number of goroutines.
func (r *Runner) Run(n int) error {
	if r.parallel == 1 {
		call := r.call[0]
		for range n {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	}
	var wg sync.WaitGroup
	errs := make([]error, r.parallel)
	for i, call := range r.call {
		wg.Go(func() {
			for range (n + r.parallel - 1) / r.parallel {
				if errs[i] = call(); errs[i] != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Close ends what Start began.
func (r *Runner) Close() {
	for i := len(r.close) - 1; i >= 0; i-- {
		r.close[i]()
	}
}

// alone lets the interceptor call an invoker that answers at once.
func (c Case) alone(r *Runner, p peers.Peer) error {
	intercept, err := p.Interceptor(c.config)
	if err != nil {
		return err
	}
	// Never dialled, but what every real call has.
	cc, err := grpc.NewClient("passthrough:///orders", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDisableRetry())
	if err != nil {
		return err
	}
	r.close = append(r.close, func() { _ = cc.Close() })
	ctx, cancel := context.Background(), context.CancelFunc(func() {})
	if c.context != nil {
		ctx, cancel = c.context()
	}
	r.close = append(r.close, cancel)
	var tracer trace.Tracer
	if c.span {
		tp := sdktrace.NewTracerProvider()
		r.close = append(r.close, func() { _ = tp.Shutdown(context.Background()) })
		tracer = tp.Tracer("costs")
	}
	options := []grpc.CallOption{grpc.StaticMethod()} // as generated clients pass it
	for range r.parallel {
		invoke := answer(c.script)
		if !p.Retries() {
			invoke = answer(nil) // nobody would repeat it
		}
		request, reply := &testpb.Request{}, &testpb.Response{}
		call := func(ctx context.Context) error {
			return intercept(ctx, testpb.TestService_Get_FullMethodName, request, reply, cc, invoke, options...)
		}
		if !c.span {
			r.call = append(r.call, func() error { return call(ctx) })
			continue
		}
		r.call = append(r.call, func() error {
			ctx, span := tracer.Start(ctx, "call")
			defer span.End()
			return call(ctx)
		})
	}
	return nil
}

// answer makes an invoker that gives the errors in turn. It serves the call
// options that the peers add, as grpc does.
func answer(script []error) grpc.UnaryInvoker {
	n := 0
	return func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		var err error
		if script != nil {
			err = script[n%len(script)]
			n++
		}
		for _, o := range opts {
			switch o := o.(type) {
			case grpc.PeerCallOption:
				*o.PeerAddr = peer.Peer{Addr: address{}}
			case grpc.OnFinishCallOption:
				o.OnFinish(err)
			}
		}
		return err
	}
}

type address struct{}

func (address) Network() string { return "none" }
func (address) String() string  { return "none" }

// endToEnd makes real calls to a server in this process.
func (c Case) endToEnd(r *Runner, p peers.Peer) error {
	opts, err := p.DialOptions(c.config)
	if err != nil {
		return err
	}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	testpb.RegisterTestServiceServer(server, &echo{})
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	r.close = append(r.close, func() { server.Stop(); <-served })
	cc, err := grpc.NewClient("passthrough:///orders", append(opts,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
	)...)
	if err != nil {
		return err
	}
	r.close = append(r.close, func() { _ = cc.Close() })
	client := testpb.NewTestServiceClient(cc)
	request := &testpb.Request{Payload: make([]byte, c.size)}
	for range r.parallel {
		r.call = append(r.call, func() error {
			_, err := client.Get(context.Background(), request)
			return err
		})
	}
	return nil
}

// echo gives back what it is sent.
type echo struct {
	testpb.UnimplementedTestServiceServer
}

func (*echo) Get(_ context.Context, in *testpb.Request) (*testpb.Response, error) {
	return &testpb.Response{Payload: in.Payload}, nil
}
