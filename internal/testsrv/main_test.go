package testsrv_test

import (
	"context"
	"io"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Short names of the methods.
const (
	get   = testpb.TestService_Get_FullMethodName
	put   = testpb.TestService_Put_FullMethodName
	list  = testpb.TestService_List_FullMethodName
	store = testpb.TestService_Store_FullMethodName
	chat  = testpb.TestService_Chat_FullMethodName
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// dialer is a Server or a Cluster.
type dialer interface {
	Dial(...grpc.DialOption) (*grpc.ClientConn, error)
}

func client(t *testing.T, d dialer, opts ...grpc.DialOption) testpb.TestServiceClient {
	t.Helper()
	cc, err := d.Dial(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return testpb.NewTestServiceClient(cc)
}

func requireCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if got := status.Code(err); got != want {
		t.Fatalf("code = %v (%v), want %v", got, err, want)
	}
}

func requireElapsed(t *testing.T, since time.Time, want time.Duration) {
	t.Helper()
	if got := time.Since(since); got != want {
		t.Errorf("elapsed = %v, want exactly %v", got, want)
	}
}

// drain reads a stream to its end.
func drain(s grpc.ServerStreamingClient[testpb.Response]) (numbers []int64, err error) {
	for {
		r, err := s.Recv()
		if err == io.EOF {
			return numbers, nil
		}
		if err != nil {
			return numbers, err
		}
		numbers = append(numbers, r.GetNumber())
	}
}

// within is a context for tests in real time: long enough to be reached only by
// a defect.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

var _ = []dialer{(*testsrv.Server)(nil), (*testsrv.Cluster)(nil)}
