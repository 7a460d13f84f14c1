package grpcretry

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// What is allocated on the way of every call becomes the work of every user's
// garbage collector. The numbers are exact: one more is a change for the worse,
// one less is to be written down here.
func TestAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector lets pools forget")
	}
	later, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	tenant := metadata.AppendToOutgoingContext(t.Context(), "x-tenant", "42", "x-request", "7")
	generated := []grpc.CallOption{grpc.StaticMethod()} // what generated code passes
	atOnce := Policy{Idempotency: Idempotent, Backoff: Backoff{Func: func(int, time.Duration, Attempt) time.Duration { return 0 }}}
	down := status.Error(codes.Unavailable, "down")
	cc, err := grpc.NewClient("passthrough:///never-dialled", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	for _, tc := range []struct {
		name   string
		ctx    context.Context
		policy Policy
		opts   []grpc.CallOption
		script []error
		want   float64
	}{
		{"success", t.Context(), Policy{}, generated, nil, 0},
		{"success without call options", t.Context(), Policy{}, nil, nil, 0},
		{"success with wait-for-ready", t.Context(), Policy{}, []grpc.CallOption{grpc.StaticMethod(), grpc.WaitForReady(true)}, nil, 0},
		{"success, the caller has a deadline", later, Policy{}, generated, nil, 0},
		{"success, the caller's deadline is sooner than the attempt's timeout", later, Policy{AttemptTimeout: 2 * time.Hour}, generated, nil, 0},
		{"success, attempts have a timeout", t.Context(), Policy{AttemptTimeout: time.Hour}, generated, nil, 4}, // those of context.WithDeadline
		{"one retry", t.Context(), atOnce, generated, []error{down, nil}, 2},                                    // destinations, metadata
		{"one retry, the caller sends metadata", tenant, atOnce, generated, []error{down, nil}, 8},              // the same, and a copy of the caller's
	} {
		t.Run(tc.name, func(t *testing.T) {
			unary := newRetrier(t, WithDefaultPolicy(tc.policy)).UnaryClientInterceptor()
			invoke := fakeInvoker(tc.script...)
			request, reply := &emptypb.Empty{}, &emptypb.Empty{}
			got := testing.AllocsPerRun(500, func() {
				if err := unary(tc.ctx, get, request, reply, cc, invoke, tc.opts...); err != nil {
					t.Fatal(err)
				}
			})
			if got != tc.want {
				t.Errorf("%v allocations, want %v", got, tc.want)
			}
		})
	}
}
