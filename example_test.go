package grpcretry_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// The methods of the scripted server in these examples: the .proto of Get says
// that it has no side effects, and that of Write says nothing.
const (
	get   = testpb.TestService_Get_FullMethodName
	write = testpb.TestService_Write_FullMethodName
)

var (
	ctx   = context.Background()
	req   = &testpb.Request{}
	quiet = grpcretry.WithLogger(slog.New(slog.DiscardHandler))
	// fast keeps the examples from waiting.
	fast = grpcretry.Backoff{Base: time.Millisecond}
)

// connect makes a client of srv, as grpc.NewClient would of a real server.
func connect(srv *testsrv.Server, retry *grpcretry.Retrier) testpb.TestServiceClient {
	conn, err := srv.Dial(retry.DialOptions()...)
	if err != nil {
		panic(err)
	}
	return testpb.NewTestServiceClient(conn)
}

func must(opts ...grpcretry.Option) *grpcretry.Retrier {
	retry, err := grpcretry.New(append(opts, quiet)...)
	if err != nil {
		panic(err)
	}
	return retry
}

// dialOrders is the whole installation.
func dialOrders(target string, creds credentials.TransportCredentials) (*grpc.ClientConn, error) {
	retry, err := grpcretry.New(
		grpcretry.WithIdempotent("orders.v1.Catalog/*"),
		grpcretry.WithMethodPolicy("orders.v1.Orders/Get", grpcretry.Policy{
			MaxAttempts:    4,
			AttemptTimeout: 200 * time.Millisecond,
			Idempotency:    grpcretry.Idempotent,
		}),
	)
	if err != nil {
		return nil, err
	}
	return grpc.NewClient(target, append(retry.DialOptions(), grpc.WithTransportCredentials(creds))...)
}

// All that a client needs: a Retrier, and its dial options.
func Example() {
	conn, err := dialOrders("dns:///orders.example.com:443", insecure.NewCredentials())
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(conn.Target())
	fmt.Println(conn.Close())
	// Output:
	// dns:///orders.example.com:443
	// <nil>
}

// Without options a method that is declared to have no side effects is retried,
// and another only after attempts that no server saw.
func ExampleNew() {
	srv := testsrv.New(testsrv.Script{
		get:   testsrv.Fail(2, codes.Unavailable).ThenOK(),
		write: testsrv.Fail(2, codes.Unavailable).ThenOK(),
	})
	defer srv.Close()

	retry, err := grpcretry.New(grpcretry.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		fmt.Println(err)
		return
	}
	client := connect(srv, retry)
	_, err = client.Get(ctx, req)
	fmt.Println("Get:", status.Code(err), "after", srv.Count(get), "attempts")
	_, err = client.Write(ctx, req)
	fmt.Println("Write:", status.Code(err), "after", srv.Count(write), "attempt")
	// Output:
	// Get: OK after 3 attempts
	// Write: Unavailable after 1 attempt
}

// Every fault is told at once.
func ExampleNew_invalid() {
	_, err := grpcretry.New(
		grpcretry.WithDefaultPolicy(grpcretry.Policy{MaxAttempts: -1, Timeout: -time.Second}),
		grpcretry.WithIdempotent("orders.v1.Orders"),
	)
	fmt.Println(err)
	// Output:
	// grpcretry: WithIdempotent("orders.v1.Orders"): pattern without a service or a method, want "pkg.Service/Method" or "pkg.Service/*"
	// grpcretry: WithDefaultPolicy: Policy.MaxAttempts = -1, want 0 (default 3) or more
	// grpcretry: WithDefaultPolicy: Policy.Timeout = -1s, want 0 (none) or more
}

// The dial options go beside those that the connection has already.
func ExampleRetrier_DialOptions() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable).ThenOK()})
	defer srv.Close()
	retry := must()

	opts := []grpc.DialOption{grpc.WithUserAgent("shop/1.0")}
	conn, err := srv.Dial(append(opts, retry.DialOptions()...)...)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = testpb.NewTestServiceClient(conn).Get(ctx, req)
	fmt.Println(status.Code(err), "after", srv.Count(get), "attempts")
	// Output:
	// OK after 2 attempts
}

// A policy for one method, and another for the rest of its service.
func ExampleWithMethodPolicy() {
	retry, err := grpcretry.New(
		grpcretry.WithMethodPolicy("orders.v1.Orders/*", grpcretry.Policy{
			Timeout: 2 * time.Second,
		}),
		grpcretry.WithMethodPolicy("orders.v1.Orders/List", grpcretry.Policy{
			MaxAttempts:    5,
			AttemptTimeout: 300 * time.Millisecond,
			Backoff:        grpcretry.Backoff{Base: 20 * time.Millisecond, Max: time.Second},
			Codes:          grpcretry.Codes(codes.Unavailable, codes.Aborted),
			Idempotency:    grpcretry.Idempotent,
		}),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, method := range []string{"List", "Place"} {
		p := retry.Explain("/orders.v1.Orders/" + method).Policy
		fmt.Println(method, p.MaxAttempts, p.Timeout, p.AttemptTimeout, p.Codes)
	}
	// Output:
	// List 5 0s 300ms ABORTED, UNAVAILABLE
	// Place 3 2s 0s RESOURCE_EXHAUSTED, UNAVAILABLE
}

// A method whose .proto declares nothing, but which is safe to repeat.
func ExampleWithIdempotent() {
	srv := testsrv.New(testsrv.Script{write: testsrv.Fail(2, codes.Unavailable).ThenOK()})
	defer srv.Close()

	retry := must(grpcretry.WithIdempotent("testsrv.v1.TestService/Write"))
	_, err := connect(srv, retry).Write(ctx, req)
	fmt.Println(status.Code(err), "after", srv.Count(write), "attempts")
	// Output:
	// OK after 3 attempts
}

// One call that gets more attempts than the others, and a limit for all of them together.
func ExampleWithCallPolicy() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(4, codes.Unavailable).ThenOK()})
	defer srv.Close()
	client := connect(srv, must(grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast})))

	_, err := client.Get(ctx, req, grpcretry.WithCallPolicy(func(p *grpcretry.Policy) {
		p.MaxAttempts = 5
		p.Timeout = 2 * time.Second
	}))
	fmt.Println(status.Code(err), "after", srv.Count(get), "attempts")
	// Output:
	// OK after 5 attempts
}

// One call that is made once, whatever the policy says.
func ExampleWithoutRetry() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable).ThenOK()})
	defer srv.Close()
	client := connect(srv, must())

	_, err := client.Get(ctx, req, grpcretry.WithoutRetry())
	fmt.Println(status.Code(err), "after", srv.Count(get), "attempt")
	// Output:
	// Unavailable after 1 attempt
}

// What happened in a call that succeeded in the end, which its error cannot tell.
func ExampleWithReport() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()})
	defer srv.Close()
	client := connect(srv, must())

	var report grpcretry.Report
	_, err := client.Get(ctx, req, grpcretry.WithReport(&report))
	fmt.Println(status.Code(err), "after", report.Made(), "attempts")
	for _, a := range report.Attempts {
		fmt.Println(a.Number, a.Code, a.Reason)
	}
	// Output:
	// OK after 3 attempts
	// 1 Unavailable retry
	// 2 Unavailable retry
	// 3 OK success
}

// The server recognises the order by its key, so Write may be repeated.
func ExampleWithIdempotencyKey() {
	srv := testsrv.New(testsrv.Script{write: testsrv.Fail(1, codes.Unavailable).ThenOK()})
	defer srv.Close()
	client := connect(srv, must(
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Write", grpcretry.Policy{
			Idempotency: grpcretry.Keyed,
		}),
	))

	_, err := client.Write(ctx, req, grpcretry.WithIdempotencyKey("order-4711"))
	fmt.Println(status.Code(err))
	for _, a := range srv.Attempts(write) {
		fmt.Println(a.Number, a.Metadata.Get("idempotency-key"))
	}
	// Output:
	// OK
	// 1 [order-4711]
	// 2 [order-4711]
}

// A stream that breaks off goes on after the last message that was delivered.
func ExampleWithResume() {
	srv := testsrv.New(testsrv.Script{testpb.TestService_List_FullMethodName: testsrv.Sequence{
		{Messages: 2, Hold: time.Millisecond, Code: codes.Unavailable},
	}.ThenOK()})
	defer srv.Close()
	client := connect(srv, must(grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast})))

	req := &testpb.Request{Count: 4}
	stream, err := client.List(ctx, req, grpcretry.WithResume(
		func(req *testpb.Request, last *testpb.Response) (*testpb.Request, bool) {
			req.After = last.GetNumber()
			return req, true
		}))
	for err == nil {
		var m *testpb.Response
		if m, err = stream.Recv(); err == nil {
			fmt.Println("message", m.GetNumber())
		}
	}
	fmt.Println(err)
	// Output:
	// message 1
	// message 2
	// message 3
	// message 4
	// EOF
}

// A stream that is silent for too long is ended, and so is one that does not
// answer at all, which is then tried again.
func ExamplePolicy_streams() {
	retry := must(
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/List", grpcretry.Policy{
			FirstResponseTimeout: 10 * time.Second,
			IdleTimeout:          time.Minute,
			ReplayBytes:          1 << 20,
		}),
	)
	p := retry.Explain("/testsrv.v1.TestService/List").Policy
	fmt.Println(p.FirstResponseTimeout, p.IdleTimeout, p.ReplayBytes)
	// Output:
	// 10s 1m0s 1048576
}

// Which policy is in force, and why.
func ExampleRetrier_Explain() {
	retry := must(grpcretry.WithIdempotent("orders.v1.Orders/*"))
	fmt.Println(retry.Explain("/orders.v1.Orders/Get"))
	fmt.Println(retry.Explain("/payments.v1.Payments/Charge"))
	// Output:
	// /orders.v1.Orders/Get
	//   policy         from default, unless the ClientConn's service config has a retryPolicy for the method
	//   attempts       at most 3
	//   codes          RESOURCE_EXHAUSTED, UNAVAILABLE
	//                  RESOURCE_EXHAUSTED only with the server's hint when to come back
	//   backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
	//   idempotency    idempotent (from service: WithIdempotent("orders.v1.Orders/*"))
	//   budget         the default, one for each target
	//
	// /payments.v1.Payments/Charge
	//   policy         from default, unless the ClientConn's service config has a retryPolicy for the method
	//   attempts       at most 3
	//   codes          RESOURCE_EXHAUSTED, UNAVAILABLE
	//                  RESOURCE_EXHAUSTED only with the server's hint when to come back
	//   backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
	//   idempotency    unknown: only attempts that never reached a server are repeated; to change that,
	//                  declare idempotency_level in the .proto or use WithIdempotent("payments.v1.Payments/Charge")
	//   budget         the default, one for each target
}

// New policies while calls run: retries are switched off during an incident.
func ExampleRetrier_Update() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
	defer srv.Close()
	retry := must(grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast}))
	client := connect(srv, retry)

	_, err := client.Get(ctx, req)
	fmt.Println(status.Code(err), "after", srv.Count(get), "attempts")

	err = retry.Update(grpcretry.WithDefaultPolicy(grpcretry.Policy{MaxAttempts: 1}))
	fmt.Println(err)
	_, err = client.Get(ctx, req)
	fmt.Println(status.Code(err), "after", srv.Count(get)-3, "attempt")
	// Output:
	// Unavailable after 3 attempts
	// <nil>
	// Unavailable after 1 attempt
}

// Counters of one's own, without OpenTelemetry.
func ExampleWithHooks() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()})
	defer srv.Close()

	client := connect(srv, must(grpcretry.WithHooks(grpcretry.Hooks{
		RetryScheduled: func(_ context.Context, a grpcretry.Attempt) {
			fmt.Println("retry", a.Number, "because of", a.Code)
		},
		CallEnd: func(_ context.Context, r grpcretry.Report, _ any, err error) {
			fmt.Println("ended", status.Code(err), "after", r.Made(), "attempts")
		},
	})))
	_, err := client.Get(ctx, req)
	fmt.Println(err)
	// Output:
	// retry 1 because of Unavailable
	// retry 2 because of Unavailable
	// ended OK after 3 attempts
	// <nil>
}

// Two retries, and no more until calls succeed. This server never answers, so
// ten calls make 12 attempts instead of 30.
func ExampleWithBudget() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
	defer srv.Close()

	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{Capacity: 14})
	if err != nil {
		fmt.Println(err)
		return
	}
	client := connect(srv, must(
		grpcretry.WithBudget(budget),
		grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast}),
	))
	for range 10 {
		_, err = client.Get(ctx, req)
	}
	fmt.Println(errors.Is(err, grpcretry.ErrBudgetExhausted), srv.Count(get))
	// Output:
	// true 12
}

// A code of which only the caller knows that it is temporary.
func ExamplePolicy_retryIf() {
	srv := testsrv.New(testsrv.Script{
		get: testsrv.Sequence{{Code: codes.Internal, Message: "lock timeout"}, {Code: codes.Internal, Message: "bug"}},
	})
	defer srv.Close()

	client := connect(srv, must(grpcretry.WithDefaultPolicy(grpcretry.Policy{
		Backoff: fast,
		RetryIf: func(a grpcretry.Attempt) grpcretry.Verdict {
			if a.Code == codes.Internal && status.Convert(a.Err).Message() == "lock timeout" {
				return grpcretry.VerdictRetry
			}
			return grpcretry.VerdictDefault
		},
	})))
	_, err := client.Get(ctx, req)
	fmt.Println(status.Convert(err).Message(), "after", srv.Count(get), "attempts")
	// Output:
	// bug after 2 attempts
}

// What a call returns that was given up: the server's own status, and why.
func ExampleError() {
	srv := testsrv.New(testsrv.Script{
		get: testsrv.Sequence{{Code: codes.Unavailable, Message: "shutting down"}},
	})
	defer srv.Close()
	client := connect(srv, must(grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast})))

	_, err := client.Get(ctx, req)

	fmt.Println(status.Code(err), status.Convert(err).Message()) // the server's own words
	if errors.Is(err, grpcretry.ErrAttemptsExhausted) {          // why there is no further attempt
		fmt.Println("all attempts are made")
	}
	var gaveUp *grpcretry.Error
	if errors.As(err, &gaveUp) { // what happened in each attempt
		for _, a := range gaveUp.Attempts {
			fmt.Println(a.Number, a.Code, a.Evidence, a.Reason)
		}
	}
	fmt.Println(err)
	// Output:
	// Unavailable shutting down
	// all attempts are made
	// 1 Unavailable answered retry
	// 2 Unavailable answered retry
	// 3 Unavailable answered attempts_exhausted
	// rpc error: code = Unavailable desc = shutting down (grpcretry: attempts_exhausted after 3 attempts)
}
