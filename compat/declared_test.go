// Package compat_test uses grpcretry as another module does.
package compat_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/grpcretry"
	"example.com/grpcretry/compat/shoppb"
	"example.com/grpcretry/internal/testsrv"
)

// shop fails every call, and notes when it was called and with which key.
type shop struct {
	shoppb.UnimplementedOrderServiceServer
	code  codes.Code
	times []time.Time
	keys  []string
}

func (s *shop) fail(ctx context.Context) error {
	md, _ := metadata.FromIncomingContext(ctx)
	s.times = append(s.times, time.Now())
	s.keys = append(s.keys, strings.Join(md["idempotency-key"], ","))
	return status.Error(s.code, "closed")
}

func (s *shop) GetOrder(ctx context.Context, r *shoppb.GetOrderRequest) (*shoppb.GetOrderResponse, error) {
	if r.GetName() == "slow" {
		_ = s.fail(ctx)
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return nil, s.fail(ctx)
}

func (s *shop) PlaceOrder(ctx context.Context, _ *shoppb.PlaceOrderRequest) (*shoppb.PlaceOrderResponse, error) {
	return nil, s.fail(ctx)
}

func (s *shop) CancelOrder(ctx context.Context, _ *shoppb.CancelOrderRequest) (*shoppb.CancelOrderResponse, error) {
	return nil, s.fail(ctx)
}

// call makes one call of a client that configures nothing, and gives what the shop saw.
func call(t *testing.T, code codes.Code, do func(context.Context, shoppb.OrderServiceClient) error) (s *shop, err error) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s = &shop{code: code}
		server := testsrv.New(nil, testsrv.WithServices(func(r grpc.ServiceRegistrar) { shoppb.RegisterOrderServiceServer(r, s) }))
		defer server.Close()
		r, newErr := grpcretry.New(grpcretry.WithLogger(slog.New(slog.DiscardHandler)))
		if newErr != nil {
			t.Fatal(newErr)
		}
		cc, dialErr := server.Dial(r.DialOptions()...)
		if dialErr != nil {
			t.Fatal(dialErr)
		}
		err = do(t.Context(), shoppb.NewOrderServiceClient(cc))
	})
	return s, err
}

// The owner of an API declares the retries; clients that only link the generated
// code must follow, or the declaration is for nothing.
func TestDeclaredPolicyIsFollowed(t *testing.T) {
	get := func(name string) func(context.Context, shoppb.OrderServiceClient) error {
		return func(ctx context.Context, c shoppb.OrderServiceClient) error {
			_, err := c.GetOrder(ctx, &shoppb.GetOrderRequest{Name: name})
			return err
		}
	}
	gaps := func(s *shop) (gaps []time.Duration) {
		for i, t := range s.times[1:] {
			gaps = append(gaps, t.Sub(s.times[i]))
		}
		return gaps
	}

	s, err := call(t, codes.Aborted, get("1"))
	want := []time.Duration{100 * time.Millisecond, 300 * time.Millisecond, 900 * time.Millisecond}
	if got := gaps(s); !slices.Equal(got, want) || status.Code(err) != codes.Aborted {
		t.Errorf("GetOrder: waits %v, then %v; want %v, then Aborted", got, err, want)
	}
	s, err = call(t, codes.Aborted, get("slow"))
	for i := range want {
		want[i] += 200 * time.Millisecond // attempt_timeout
	}
	if got := gaps(s); !slices.Equal(got, want) || status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("GetOrder, slow: waits %v, then %v; want %v, then DeadlineExceeded", got, err, want)
	}
	if s, _ = call(t, codes.Internal, get("1")); len(s.times) != 1 {
		t.Errorf("GetOrder, with a code that is not declared: %d attempts, want 1", len(s.times))
	}
	s, _ = call(t, codes.Unavailable, func(ctx context.Context, c shoppb.OrderServiceClient) error {
		_, err := c.PlaceOrder(ctx, &shoppb.PlaceOrderRequest{})
		return err
	})
	if len(s.keys) != 3 || s.keys[0] == "" || s.keys[0] != s.keys[1] || s.keys[0] != s.keys[2] {
		t.Errorf("PlaceOrder: keys %q, want the same three times", s.keys)
	}
	s, _ = call(t, codes.Unavailable, func(ctx context.Context, c shoppb.OrderServiceClient) error {
		_, err := c.CancelOrder(ctx, &shoppb.CancelOrderRequest{})
		return err
	})
	if len(s.times) != 1 {
		t.Errorf("CancelOrder, of which nothing is declared: %d attempts, want 1", len(s.times))
	}
}
