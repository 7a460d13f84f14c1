package grpcretry

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Callers tie what belongs to a stream to its context: a goroutine, a lock, a
// pooled connection. Taken at any moment it has to end with the stream, as
// gRPC's own does, or all that waits for it is left behind; and it must not end
// before, with an attempt that is replaced.
func TestStreamContextEndsWithTheStream(t *testing.T) {
	resume := WithResume(func(request *testpb.Request, last *testpb.Response) (*testpb.Request, bool) {
		request.After = last.Number
		return request, true
	})
	breaksOff := testsrv.Sequence{{Messages: 1, Code: codes.Unavailable}}.ThenOK()
	for name, test := range map[string]struct {
		method string
		script testsrv.Sequence
		opts   []grpc.CallOption
		read   int // messages before the context is taken
	}{
		"never to be repeated":              {method: take},
		"before anything came":              {method: list},
		"after a message":                   {method: list, read: 1},
		"over a retry":                      {method: list, script: refusing(1, codes.Unavailable).ThenOK()},
		"over a resumption":                 {method: list, script: breaksOff, opts: []grpc.CallOption{resume}},
		"over a resumption, from a message": {method: list, script: breaksOff, opts: []grpc.CallOption{resume}, read: 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, cc := serveStreams(t, newRetrier(t, exactly(nil)), testsrv.Script{test.method: test.script})
				stream := open(t, t.Context(), cc, test.method, test.opts...)
				send(t, stream, 1)
				closeSend(t, stream)
				for range test.read {
					recv(t, stream)
				}
				ctx := stream.Context()
				for range 3 - test.read {
					recv(t, stream)
					if ctx.Err() != nil {
						t.Errorf("the context ended before the stream: %v", ctx.Err())
					}
				}
				if err := end(t, stream); err != nil {
					t.Fatal(err)
				}
				if ctx.Err() != context.Canceled || stream.Context().Err() == nil {
					t.Errorf("after the stream its context says %v, and now %v; want that it is over", ctx.Err(), stream.Context().Err())
				}
			})
		})
	}
}

// While a stream waits for its next attempt there is none, and yet its context
// has to know what every attempt's does: messages are prepared with it.
func TestStreamContextBetweenAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		block := make(chan struct{})
		opened := 0
		slow := grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if opened++; opened > 1 {
				<-block
			}
			return streamer(context.WithValue(ctx, key{}, "of an attempt"), desc, cc, method, opts...)
		})
		_, cc := serveStreams(t, newRetrier(t, exactly(nil)), testsrv.Script{syncUp: refusing(1, codes.Unavailable).ThenOK()}, slow)
		stream := open(t, t.Context(), cc, syncUp)
		ended := make(chan error)
		go func() { ended <- stream.RecvMsg(new(testpb.Response)) }()
		time.Sleep(time.Second)
		if v := stream.Context().Value(key{}); v != "of an attempt" {
			t.Errorf("the context's value is %v, want that which an attempt's has", v)
		}
		if err := new(grpc.PreparedMsg).Encode(stream, &testpb.Request{}); err != nil {
			t.Errorf("Encode: %v", err)
		}
		close(block)
		closeSend(t, stream)
		if err := <-ended; err != io.EOF {
			t.Errorf("RecvMsg = %v, want io.EOF", err)
		}
	})
}

// inProcess is a stream of a channel that is none of gRPC's. Such a channel knows
// nothing of OnFinish, and need not make up a header where the handler set none.
type inProcess struct {
	ctx       context.Context
	responses chan int64
	over      bool // the handler has returned
}

func (s *inProcess) Header() (metadata.MD, error) { return nil, nil }
func (s *inProcess) Trailer() metadata.MD         { return nil }
func (s *inProcess) CloseSend() error             { return nil }
func (s *inProcess) Context() context.Context     { return s.ctx }
func (s *inProcess) SendMsg(any) error {
	if s.over {
		return io.EOF
	}
	return nil
}

func (s *inProcess) RecvMsg(m any) error {
	select {
	case n, more := <-s.responses:
		if !more {
			return io.EOF
		}
		if m, ok := m.(*testpb.Response); ok {
			m.Number = n
		}
		return nil
	case <-s.ctx.Done():
		return status.FromContextError(s.ctx.Err()).Err()
	}
}

// streamer opens the one stream.
func (s *inProcess) streamer(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	s.ctx = ctx
	return s, nil
}

// A handler in the process that answers and returns while its caller still sends
// has given an answer, of which no message may be lost.
func TestInProcessStreamAnswersEarly(t *testing.T) {
	s := &inProcess{over: true, responses: make(chan int64, 2)}
	s.responses <- 1
	s.responses <- 2
	close(s.responses)
	stream, err := newRetrier(t).StreamClientInterceptor()(t.Context(), streamDesc(syncUp), nil, syncUp, s.streamer)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(&testpb.Request{}); err != io.EOF {
		t.Errorf("SendMsg = %v, want io.EOF", err)
	}
	for n := range int64(2) {
		if m := recv(t, stream); m.Number != n+1 {
			t.Errorf("received %d, want %d", m.Number, n+1)
		}
	}
	if err := end(t, stream); err != nil {
		t.Error(err)
	}
}

// Who cancels a stream and walks away has ended the call, also where no gRPC is
// there to say so. A call that stays in flight for good makes room in the budget
// for retries that nobody earned.
func TestInProcessStreamIsAbandoned(t *testing.T) {
	for name, leave := range map[string]func(*testing.T, grpc.ClientStream){
		"at once": func(*testing.T, grpc.ClientStream) {},
		"after a message": func(t *testing.T, stream grpc.ClientStream) {
			recv(t, stream)
		},
		"in RecvMsg": func(t *testing.T, stream grpc.ClientStream) {
			recv(t, stream)
			checkCode(t, end(t, stream), codes.Canceled)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := newBudget(t)
				s := &inProcess{responses: make(chan int64, 1)}
				s.responses <- 1
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(time.Second, cancel)
				var ends []error
				var report Report
				stream, err := newRetrier(t, WithBudget(budget)).StreamClientInterceptor()(ctx, streamDesc(syncUp), nil, syncUp, s.streamer,
					WithReport(&report), grpc.OnFinish(func(err error) { ends = append(ends, err) }))
				if err != nil {
					t.Fatal(err)
				}
				leave(t, stream)
				time.Sleep(time.Minute)
				synctest.Wait()
				if n := budget.state().InFlight; n != 0 {
					t.Errorf("%d calls in flight, want 0", n)
				}
				if len(ends) != 1 || statusOf(ends[0]).Code() != codes.Canceled || report.Reason != ReasonParentDone {
					t.Errorf("OnFinish ran with %v, report %+v; want CANCELLED once, parent_done", ends, report)
				}
			})
		})
	}
}
