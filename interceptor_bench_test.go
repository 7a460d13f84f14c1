package grpcretry

import (
	"context"
	"net"
	"testing"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// fakeInvoker answers in place of grpc: it shows a peer and ends the attempt, as
// grpc does, and gives the errors in turn, over and over.
func fakeInvoker(errs ...error) grpc.UnaryInvoker { return fakeInvokerAt(fakeAddr{}, errs...) }

// fakeInvokerAt shows addr as the peer.
func fakeInvokerAt(addr net.Addr, errs ...error) grpc.UnaryInvoker {
	n := 0
	return func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		var err error
		if len(errs) > 0 {
			err = errs[n%len(errs)]
			n++
		}
		for _, o := range opts {
			switch o := o.(type) {
			case grpc.PeerCallOption:
				*o.PeerAddr = peer.Peer{Addr: addr}
			case grpc.OnFinishCallOption:
				o.OnFinish(err)
			}
		}
		return err
	}
}

type fakeAddr struct{}

func (fakeAddr) Network() string { return "fake" }
func (fakeAddr) String() string  { return "fake" }

// BenchmarkUnary is the cost of the interceptor alone.
func BenchmarkUnary(b *testing.B) {
	deadline, cancel := context.WithTimeout(b.Context(), time.Hour)
	defer cancel()
	unavailable := status.Error(codes.Unavailable, "down")
	for _, bm := range []struct {
		name string
		ctx  context.Context
		opts []Option
		inv  grpc.UnaryInvoker
	}{
		{"outcome=ok", context.Background(), nil, fakeInvoker()},
		{"outcome=ok/deadline", deadline, nil, fakeInvoker()},
		{"outcome=ok/timeout", context.Background(), []Option{WithDefaultPolicy(Policy{AttemptTimeout: time.Hour})}, fakeInvoker()},
		{"outcome=retry", context.Background(), []Option{WithBudget(Unlimited()), WithDefaultPolicy(Policy{
			Idempotency: Idempotent, Backoff: Backoff{Func: func(int, time.Duration, Attempt) time.Duration { return 0 }},
		})}, fakeInvoker(unavailable, nil)},
	} {
		b.Run(bm.name, func(b *testing.B) {
			u := newRetrier(b, bm.opts...).UnaryClientInterceptor()
			req, reply := &emptypb.Empty{}, &emptypb.Empty{}
			b.ReportAllocs()
			for b.Loop() {
				if err := u(bm.ctx, get, req, reply, nil, bm.inv); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// eventCost is a call that leaves events.
type eventCost struct {
	name      string
	recording context.Context
	events    int
	call      func(context.Context)
}

// eventCosts are calls with every kind of event, on a span that is full, so that
// its list of events does not grow any more.
func eventCosts(t testing.TB) []eventCost {
	down := status.Error(codes.Unavailable, "down")
	missing := status.Error(codes.NotFound, "missing")
	later, err := status.New(codes.Unavailable, "later").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	tcp := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 443}
	span := func() context.Context {
		ctx, span := sdktrace.NewTracerProvider().Tracer("test").Start(t.Context(), "caller")
		for range 200 {
			span.AddEvent("earlier")
		}
		return ctx
	}
	cost := func(name string, events int, addr net.Addr, script ...error) eventCost {
		u := newRetrier(t, WithBudget(Unlimited()), WithDefaultPolicy(Policy{
			Idempotency: Idempotent, Backoff: Backoff{Func: func(int, time.Duration, Attempt) time.Duration { return 0 }},
		})).UnaryClientInterceptor()
		inv := fakeInvokerAt(addr, script...)
		req, reply := &emptypb.Empty{}, &emptypb.Empty{}
		return eventCost{name, span(), events, func(ctx context.Context) {
			_ = u(ctx, get, req, reply, nil, inv)
		}}
	}
	return []eventCost{
		cost("ok", 1, tcp),
		cost("ok/memory", 1, fakeAddr{}),
		cost("not_retryable", 1, tcp, missing),
		cost("pushback_stop", 1, tcp, later.Err()),
		cost("retried", 3, tcp, down, down, nil),
	}
}

// BenchmarkEvent is what recording spans add to a call; divide by the events
// after subtracting the row without.
func BenchmarkEvent(b *testing.B) {
	for _, bm := range eventCosts(b) {
		for _, row := range []struct {
			name string
			ctx  context.Context
		}{{"none", b.Context()}, {"recording", bm.recording}} {
			b.Run("call="+bm.name+"/span="+row.name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					bm.call(row.ctx)
				}
			})
		}
	}
}
