package grpcretry

import (
	"context"
	"fmt"
	"io"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"

	"example.com/grpcretry/internal/testsrv/testpb"
)

// streamLoads are the streams that the benchmarks make: many small messages in
// one direction, one at a time in both, and more than the log keeps.
var streamLoads = []struct {
	name   string
	method string
	run    func(ctx context.Context, cc *grpc.ClientConn) error
}{
	{"server=10000", list, func(ctx context.Context, cc *grpc.ClientConn) error {
		stream, err := testpb.NewTestServiceClient(cc).List(ctx, &testpb.Request{Count: 10000})
		if err != nil {
			return err
		}
		return readAll(stream, 10000)
	}},
	{"pingpong=1000", syncUp, func(ctx context.Context, cc *grpc.ClientConn) error {
		stream, err := testpb.NewTestServiceClient(cc).Sync(ctx)
		if err != nil {
			return err
		}
		request, response := &testpb.Request{Number: 1}, new(testpb.Response)
		for range 1000 {
			if err := stream.Send(request); err != nil {
				return err
			}
			if err := stream.RecvMsg(response); err != nil {
				return err
			}
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		return readAll(stream, 0)
	}},
	{"client=1000x1KiB", store, func(ctx context.Context, cc *grpc.ClientConn) error {
		stream, err := testpb.NewTestServiceClient(cc).Store(ctx)
		if err != nil {
			return err
		}
		request := &testpb.Request{Payload: make([]byte, 1<<10)}
		for range 1000 {
			if err := stream.Send(request); err != nil {
				return err
			}
		}
		reply, err := stream.CloseAndRecv()
		if err == nil && reply.Number != 1000 {
			err = fmt.Errorf("the server read %d requests, want 1000", reply.Number)
		}
		return err
	}},
}

// readAll reads n messages and the end.
func readAll(stream grpc.ClientStream, n int) error {
	response := new(testpb.Response)
	for {
		switch err := stream.RecvMsg(response); {
		case err == nil:
			n--
		case err == io.EOF && n == 0:
			return nil
		case err == io.EOF:
			return fmt.Errorf("%d messages are missing", n)
		default:
			return err
		}
	}
}

// plainStream is the server's side, with as little of its own as can be.
func plainStream(stream grpc.ServerStream, request *testpb.Request) error {
	response := &testpb.Response{Number: 1}
	for range request.GetCount() {
		if err := stream.SendMsg(response); err != nil {
			return err
		}
	}
	return nil
}

func plainEcho(stream grpc.ServerStream, _ *testpb.Request) error {
	request, response := new(testpb.Request), &testpb.Response{Number: 1}
	for {
		if err := stream.RecvMsg(request); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := stream.SendMsg(response); err != nil {
			return err
		}
	}
}

func plainCount(stream grpc.ServerStream, _ *testpb.Request) error {
	request := new(testpb.Request)
	for n := int64(0); ; n++ {
		if err := stream.RecvMsg(request); err == io.EOF {
			return stream.SendMsg(&testpb.Response{Number: n})
		} else if err != nil {
			return err
		}
	}
}

// plainService is a server that records nothing.
var plainService = grpc.ServiceDesc{ServiceName: testpb.TestService_ServiceDesc.ServiceName, HandlerType: (*any)(nil), Streams: func() (all []grpc.StreamDesc) {
	for method, handle := range map[string]func(grpc.ServerStream, *testpb.Request) error{list: plainStream, syncUp: plainEcho, store: plainCount} {
		d := *streamDesc(method)
		d.Handler = func(_ any, stream grpc.ServerStream) error {
			if d.ClientStreams {
				return handle(stream, nil)
			}
			request := new(testpb.Request)
			if err := stream.RecvMsg(request); err != nil {
				return err
			}
			return handle(stream, request)
		}
		all = append(all, d)
	}
	return all
}()}

// streamConn is a connection to the plain server; opts come last.
func streamConn(b *testing.B, opts ...grpc.DialOption) *grpc.ClientConn {
	b.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	server.RegisterService(&plainService, nil)
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	b.Cleanup(func() { server.Stop(); <-served })
	cc, err := grpc.NewClient("passthrough:///plain", append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
	}, opts...)...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { cc.Close() })
	return cc
}

// BenchmarkStream is a whole stream, plain and through the interceptor.
func BenchmarkStream(b *testing.B) {
	for _, peer := range []string{"none", "ours"} {
		for _, load := range streamLoads {
			b.Run("peer="+peer+"/"+load.name, func(b *testing.B) {
				opts := []grpc.DialOption{grpc.WithDisableRetry()}
				if peer == "ours" {
					opts = newRetrier(b).DialOptions()
				}
				cc := streamConn(b, opts...)
				b.ReportAllocs()
				for b.Loop() {
					if err := load.run(b.Context(), cc); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
