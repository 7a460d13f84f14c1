package grpcretry

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// fakeInvoker answers in place of grpc: it shows a peer and ends the attempt, as
// grpc does, and gives the errors in turn, over and over.
func fakeInvoker(errs ...error) grpc.UnaryInvoker {
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
				*o.PeerAddr = peer.Peer{Addr: fakeAddr{}}
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
