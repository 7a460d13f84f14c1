package grpcretry_test

import (
	"context"
	"fmt"
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A service between others: its client retries, and its server tells those above
// when that was in vain.
func ExampleUnaryServerInterceptor() {
	newServer := func() *grpc.Server {
		return grpc.NewServer(
			grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor()),
			grpc.ChainStreamInterceptor(grpcretry.StreamServerInterceptor()),
		)
	}
	newServer().Stop()

	// The same by hand, over a backend that is down.
	retry, err := grpcretry.New(grpcretry.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		fmt.Println(err)
		return
	}
	backend := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
	defer backend.Close()
	conn, err := backend.Dial(retry.DialOptions()...)
	if err != nil {
		fmt.Println(err)
		return
	}
	client := testpb.NewTestServiceClient(conn)
	service := testsrv.New(testsrv.Script{"*": testsrv.Sequence{{
		Unary: func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			return client.Get(ctx, req) // with the context of the request
		},
	}}}, testsrv.WithServerOptions(grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor())))
	defer service.Close()
	top, err := service.Dial(retry.DialOptions()...)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, _ = testpb.NewTestServiceClient(top).Get(context.Background(), &testpb.Request{})
	fmt.Println(service.Count(""), "request at the service,", backend.Count(""), "at the backend")
	// Output: 1 request at the service, 3 at the backend
}

// For the few services of which each failure is a matter of chance.
func ExampleWithoutGivenUpPushback() {
	interceptor := grpcretry.UnaryServerInterceptor(grpcretry.WithoutGivenUpPushback(), grpcretry.WithRetrySubtree())
	fmt.Println(interceptor != nil)
	// Output: true
}

// A handler that does less work for attempts that came before, and recognises
// one call by its key.
func ExamplePreviousAttempts() {
	handle := func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
		if n := grpcretry.PreviousAttempts(ctx); n > 0 {
			fmt.Println("retry", n, "of the call", grpcretry.IdempotencyKeyFromContext(ctx))
		}
		return &testpb.Response{}, nil
	}
	ctx := metadata.NewIncomingContext(context.Background(), // as a client's first retry brings it
		metadata.Pairs("grpc-previous-rpc-attempts", "1", "idempotency-key", "order-4711"))
	if _, err := handle(ctx, &testpb.Request{}); err != nil {
		fmt.Println(err)
	}
	// Output: retry 1 of the call order-4711
}
