package grpcretry

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A failure at the leaf is retried by the tier next to it alone; without the
// trailer every tier above would multiply its attempts.
func TestServerAsksForNoRetryOfCallsGivenUp(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rewrap func(error) error
		stops  bool
	}{
		{"as it is", func(err error) error { return err }, true},
		{"wrapped", func(err error) error { return fmt.Errorf("backend: %w", err) }, true},
		{"as text", func(err error) error { return fmt.Errorf("backend: %v", err) }, true},
		{"dealt with", func(error) error { return nil }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, leaf := serve(t, newRetrier(t), testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
				middle := testsrv.New(testsrv.Script{get: testsrv.Sequence{{
					Unary: func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
						_, err := leaf.Get(ctx, req)
						return &testpb.Response{}, tt.rewrap(err)
					},
				}}}, testsrv.WithServerOptions(grpc.UnaryInterceptor(UnaryServerInterceptor())))
				t.Cleanup(middle.Close)
				var trailer metadata.MD
				_, err := dial(t, middle, newRetrier(t)).Get(t.Context(), &testpb.Request{}, grpc.Trailer(&trailer))
				if stopped := len(trailer[pushbackTrailer]) == 1; stopped != tt.stops {
					t.Errorf("trailer %v of error %v, want the pushback: %v", trailer, err, tt.stops)
				}
			})
		})
	}
}
