package grpcretry

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A call that succeeds at once is nearly every call there is, so what it costs
// is what having the package costs.
func TestHappyCallDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector lets pools forget")
	}
	silent := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
	finishes := func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		for _, o := range opts {
			if o, ok := o.(grpc.OnFinishCallOption); ok {
				o.OnFinish(nil)
			}
		}
		return nil
	}
	deadline, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	opts := []grpc.CallOption{grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(1 << 20)}
	for name, test := range map[string]struct {
		ctx     context.Context
		options []Option
		invoker grpc.UnaryInvoker
		call    []grpc.CallOption
	}{
		"a fake that does nothing":       {ctx: t.Context(), invoker: silent},
		"one that fills the peer":        {ctx: t.Context(), invoker: fakeInvoker()},
		"one that runs OnFinish":         {ctx: t.Context(), invoker: finishes},
		"a deadline":                     {ctx: deadline, invoker: fakeInvoker()},
		"metadata":                       {ctx: metadata.AppendToOutgoingContext(t.Context(), "k", "1"), invoker: fakeInvoker()},
		"a span that does not record":    {ctx: trace.ContextWithSpan(t.Context(), deaf{t: t}), invoker: fakeInvoker()},
		"other call options":             {ctx: t.Context(), invoker: fakeInvoker(), call: opts},
		"a policy of its own":            {ctx: t.Context(), options: []Option{WithMethodPolicy(get, Policy{MaxAttempts: 4, Codes: Codes(codes.Aborted)})}, invoker: fakeInvoker()},
		"a budget of the method besides": {ctx: t.Context(), options: []Option{WithMethodBudget(get, mustBudget(t, BudgetConfig{}))}, invoker: fakeInvoker()},
	} {
		t.Run(name, func(t *testing.T) {
			unary := newRetrier(t, test.options...).UnaryClientInterceptor()
			request, reply := &testpb.Request{}, &testpb.Response{}
			if n := testing.AllocsPerRun(1000, func() {
				if err := unary(test.ctx, get, request, reply, nil, test.invoker, test.call...); err != nil {
					t.Fatal(err)
				}
			}); n != 0 {
				t.Errorf("%v allocations for a call, want none", n)
			}
		})
	}
}

// The option slice of a call goes back to a pool when the call is over, and to
// another call from there. That is only safe because grpc copies it before it
// does anything else: were that to change, calls would get each other's headers.
func TestGRPCCopiesTheOptionsOfAUnaryCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var opts []grpc.CallOption
		var header, trailer, otherHeader, otherTrailer metadata.MD
		var finished, otherFinished int
		srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{{Unary: func(ctx context.Context, _ *testpb.Request) (*testpb.Response, error) {
			for i := range opts { // the client waits for us
				opts[i] = grpc.MaxCallRecvMsgSize(0)
			}
			opts[0], opts[1], opts[2] = grpc.Header(&otherHeader), grpc.Trailer(&otherTrailer), grpc.OnFinish(func(error) { otherFinished++ })
			md := metadata.MD{"n": {"1"}}
			if err := grpc.SetHeader(ctx, md); err != nil {
				return nil, err
			}
			return &testpb.Response{Text: "x"}, grpc.SetTrailer(ctx, md)
		}}}})
		t.Cleanup(srv.Close)
		cc, err := srv.Dial(grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, given ...grpc.CallOption) error {
			opts = given
			return invoker(ctx, method, req, reply, cc, opts...)
		}))
		if err != nil {
			t.Fatal(err)
		}
		_, err = testpb.NewTestServiceClient(cc).Get(t.Context(), &testpb.Request{},
			grpc.Header(&header), grpc.Trailer(&trailer), grpc.OnFinish(func(error) { finished++ }), grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		if len(header["n"]) != 1 || len(trailer["n"]) != 1 || finished != 1 {
			t.Errorf("header %v, trailer %v, OnFinish ran %d times", header, trailer, finished)
		}
		if otherHeader != nil || otherTrailer != nil || otherFinished != 0 {
			t.Errorf("grpc went by what came into the slice later: header %v, trailer %v, OnFinish %d", otherHeader, otherTrailer, otherFinished)
		}
	})
}

// What a call's own attempt left must not show in the next call that gets the
// same memory from the pool.
func TestPooledCallsAreClean(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, client := serve(t, newRetrier(t, WithBudget(Unlimited()), exactly(nil)), testsrv.Script{
			get: testsrv.Sequence{{Header: metadata.MD{"n": {"1"}}, Trailer: metadata.Join(metadata.MD{"n": {"1"}}, pushbackOf("-1"))}},
			put: testsrv.Sequence{{Cut: true}},
		})
		for range 50 {
			var header, trailer metadata.MD
			if _, err := client.Get(t.Context(), &testpb.Request{Text: "x"}, grpc.Header(&header), grpc.Trailer(&trailer), grpc.WaitForReady(true)); err != nil || header["n"] == nil || trailer["n"] == nil {
				t.Fatalf("error %v, header %v, trailer %v", err, header, trailer)
			}
			var report Report
			_, err := client.Put(t.Context(), &testpb.Request{}, WithReport(&report), WithCallPolicy(attemptsOf(2)))
			checkCode(t, err, codes.Unavailable)
			checkCall(t, &report, 2, ReasonAttemptsExhausted) // not pushback_stop
			for _, a := range report.Attempts {
				if len(a.Trailer) > 0 || a.Evidence == Answered {
					t.Fatalf("attempt %+v has what another call was sent", a)
				}
			}
		}
	})
}

// BenchmarkUnaryParallel shows whether calls get in each other's way: run it
// with -cpu 1,2,4 and compare. A random source, a budget or a pool behind one
// lock shows here, and nowhere else.
func BenchmarkUnaryParallel(b *testing.B) {
	unavailable := status.Error(codes.Unavailable, "down")
	for name, test := range map[string]struct {
		options  []Option
		failures int
	}{
		"outcome=ok": {},
		"outcome=retry": {[]Option{WithBudget(Unlimited()), WithDefaultPolicy(Policy{
			Idempotency: Idempotent, Backoff: Backoff{Base: 1, Max: 1},
		})}, 1},
	} {
		b.Run(name, func(b *testing.B) {
			unary := newRetrier(b, test.options...).UnaryClientInterceptor()
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				var request, reply proto.Message = &testpb.Request{}, &testpb.Response{}
				errs := make([]error, test.failures, test.failures+1)
				for i := range errs {
					errs[i] = unavailable
				}
				invoker := fakeInvoker(append(errs, nil)...)
				for pb.Next() {
					if err := unary(context.Background(), get, request, reply, nil, invoker); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}
