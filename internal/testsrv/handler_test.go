package testsrv_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Header, trailer, details and message are what the tests of a retried call
// compare: each must come from the step that was played.
func TestUnaryFailureThenAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{
			{
				Code: codes.ResourceExhausted, Message: "later", Delay: 10 * time.Millisecond,
				Details: []proto.Message{&errdetails.RetryInfo{RetryDelay: durationpb.New(3 * time.Second)}},
				Trailer: metadata.Pairs("grpc-retry-pushback-ms", "50"),
			},
			{Header: metadata.Pairs("h", "2"), Trailer: metadata.Pairs("t", "2"), ReplySize: 7},
		}})
		defer srv.Close()
		c := client(t, srv)

		var header, trailer metadata.MD
		start := time.Now()
		_, err := c.Get(t.Context(), &testpb.Request{}, grpc.Header(&header), grpc.Trailer(&trailer))
		requireElapsed(t, start, 10*time.Millisecond)
		requireCode(t, err, codes.ResourceExhausted)
		if got := status.Convert(err); got.Message() != "later" || len(got.Details()) != 1 {
			t.Errorf("status = %v with %v, want \"later\" with one detail", got, got.Details())
		} else if info, ok := got.Details()[0].(*errdetails.RetryInfo); !ok || info.GetRetryDelay().GetSeconds() != 3 {
			t.Errorf("detail = %v, want RetryInfo of 3 s", got.Details()[0])
		}
		if len(header) != 0 || !slices.Equal(trailer["grpc-retry-pushback-ms"], []string{"50"}) {
			t.Errorf("header, trailer = %v, %v: want a trailers-only answer with the pushback", header, trailer)
		}

		start = time.Now()
		r, err := c.Get(t.Context(), &testpb.Request{Text: "x"}, grpc.Header(&header), grpc.Trailer(&trailer))
		requireElapsed(t, start, 0)
		requireCode(t, err, codes.OK)
		want := &testpb.Response{Arrival: 2, Server: "testsrv", Text: "x", Payload: make([]byte, 7), Number: 1, Received: 1, Items: []string{"testsrv/2"}}
		if !proto.Equal(r, want) {
			t.Errorf("response = %v, want %v", r, want)
		}
		if !slices.Equal(header["h"], []string{"2"}) || !slices.Equal(trailer["t"], []string{"2"}) {
			t.Errorf("header, trailer = %v, %v", header, trailer)
		}
	})
}

// A failure after the header is what grpc's own retry gives up on.
func TestHeaderThenFailure(t *testing.T) {
	for name, step := range map[string]testsrv.Step{
		"with the status": {Header: metadata.Pairs("h", "1"), Code: codes.Unavailable},
		"before it":       {SendHeaderFirst: true, Header: metadata.Pairs("h", "1"), Code: codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{step}})
				defer srv.Close()
				var header metadata.MD
				_, err := client(t, srv).Get(t.Context(), &testpb.Request{}, grpc.Header(&header))
				requireCode(t, err, codes.Unavailable)
				if !slices.Equal(header["h"], []string{"1"}) {
					t.Errorf("header = %v, want h: 1", header)
				}
			})
		})
	}
}

// SendHeaderFirst must reach the client before the wait and not with the status.
func TestHeaderComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{list: testsrv.Sequence{{SendHeaderFirst: true, Delay: time.Second, Messages: 1}}})
		defer srv.Close()
		start := time.Now()
		s, err := client(t, srv).List(t.Context(), &testpb.Request{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Header(); err != nil {
			t.Fatal(err)
		}
		requireElapsed(t, start, 0)
		if numbers, err := drain(s); err != nil || len(numbers) != 1 {
			t.Errorf("messages, error = %v, %v", numbers, err)
		}
		requireElapsed(t, start, time.Second)
	})
}

// What a blocked or delayed handler leaves behind is how tests see that a
// deadline reached the server, and that a loser was cancelled.
func TestWaitsEndWithTheContext(t *testing.T) {
	for name, step := range map[string]testsrv.Step{
		"block": {Block: true},
		"delay": {Delay: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{"*": testsrv.Sequence{step}})
				defer srv.Close()
				c := client(t, srv)
				start := time.Now()

				ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
				defer cancel()
				_, err := c.Get(ctx, &testpb.Request{})
				requireCode(t, err, codes.DeadlineExceeded)
				requireElapsed(t, start, 200*time.Millisecond)

				ctx, cancel = context.WithCancel(t.Context())
				time.AfterFunc(50*time.Millisecond, cancel)
				_, err = c.Put(ctx, &testpb.Request{})
				requireCode(t, err, codes.Canceled)

				synctest.Wait()
				late, gone := srv.Attempts(get)[0], srv.Attempts(put)[0]
				if !late.HasDeadline || late.Left != 200*time.Millisecond || late.ContextEnded.Sub(start) != 200*time.Millisecond ||
					late.Ended != late.ContextEnded {
					t.Errorf("deadline: %+v", late)
				}
				if gone.HasDeadline || gone.ContextEnded.Sub(start) != 250*time.Millisecond || gone.ContextErr != context.Canceled ||
					status.Code(gone.Err) != codes.Canceled {
					t.Errorf("cancel: %+v", gone)
				}
				if n := srv.Running(); n != 0 {
					t.Errorf("%d handlers run, want none", n)
				}
			})
		})
	}
}

// A connection cut under an attempt must look to the client like a lost server:
// UNAVAILABLE with no trailer, though the handler ran.
func TestCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{
			get:  testsrv.Sequence{{Delay: time.Second, Cut: true}, {}},
			list: testsrv.Sequence{{Messages: 2, Hold: time.Millisecond, Cut: true}},
			put:  testsrv.Sequence{{Block: true}},
		})
		defer srv.Close()
		c := client(t, srv)
		start := time.Now()

		bystander := make(chan error)
		go func() {
			_, err := c.Put(t.Context(), &testpb.Request{})
			bystander <- err
		}()
		synctest.Wait()
		var trailer metadata.MD
		_, err := c.Get(t.Context(), &testpb.Request{}, grpc.Trailer(&trailer))
		requireCode(t, err, codes.Unavailable)
		requireElapsed(t, start, time.Second)
		if len(trailer) != 0 {
			t.Errorf("trailer = %v, want none", trailer)
		}
		requireCode(t, <-bystander, codes.Unavailable)

		_, err = c.Get(t.Context(), &testpb.Request{})
		requireCode(t, err, codes.OK)
		synctest.Wait() // the client can learn of the cut before the handler does
		attempts := srv.Attempts(get)
		if len(attempts) != 2 || attempts[0].Connection != 1 || attempts[1].Connection != 2 {
			t.Errorf("attempts = %+v, want two on two connections", attempts)
		}
		if got := attempts[0].ContextErr; got != context.Canceled {
			t.Errorf("the cut handler's context ended with %v, want %v", got, context.Canceled)
		}

		s, err := c.List(t.Context(), &testpb.Request{})
		if err != nil {
			t.Fatal(err)
		}
		numbers, err := drain(s)
		requireCode(t, err, codes.Unavailable)
		if !slices.Equal(numbers, []int64{1, 2}) {
			t.Errorf("messages before the cut = %v, want 1 and 2", numbers)
		}
	})
}

func TestServerStream(t *testing.T) {
	for _, test := range []struct {
		name    string
		step    testsrv.Step
		request *testpb.Request
		want    []int64
		code    codes.Code
		elapsed time.Duration
	}{
		{"what the request asks for", testsrv.Step{}, &testpb.Request{Count: 3}, []int64{1, 2, 3}, codes.OK, 0},
		{"resumed", testsrv.Step{}, &testpb.Request{Count: 5, After: 3}, []int64{4, 5}, codes.OK, 0},
		{"nothing", testsrv.Step{Messages: -1}, &testpb.Request{Count: 3}, nil, codes.OK, 0},
		{"breaks off", testsrv.Step{Messages: 2, Every: time.Second, Hold: 5 * time.Second, Code: codes.Unavailable}, &testpb.Request{Count: 3},
			[]int64{1, 2}, codes.Unavailable, 6 * time.Second},
		{"fails at once", testsrv.Step{Messages: -1, Code: codes.Aborted}, &testpb.Request{}, nil, codes.Aborted, 0},
		{"spaced", testsrv.Step{Delay: 100 * time.Millisecond, Every: time.Second}, &testpb.Request{Count: 4}, []int64{1, 2, 3, 4}, codes.OK, 3100 * time.Millisecond},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{list: testsrv.Sequence{test.step}})
				defer srv.Close()
				start := time.Now()
				s, err := client(t, srv).List(t.Context(), test.request)
				if err != nil {
					t.Fatal(err)
				}
				numbers, err := drain(s)
				requireCode(t, err, test.code)
				requireElapsed(t, start, test.elapsed)
				if !slices.Equal(numbers, test.want) {
					t.Errorf("messages = %v, want %v", numbers, test.want)
				}
				if a := srv.Attempts(list)[0]; a.Responses != len(test.want) || len(a.Requests) != 1 {
					t.Errorf("attempt = %+v", a)
				}
			})
		})
	}
}

func TestClientStream(t *testing.T) {
	for _, test := range []struct {
		name string
		step testsrv.Step
		code codes.Code
		read int
	}{
		{"all", testsrv.Step{}, codes.OK, 4},
		{"fails after all", testsrv.Step{Code: codes.Unavailable}, codes.Unavailable, 4},
		{"fails after two", testsrv.Step{Receive: 2, Code: codes.Unavailable}, codes.Unavailable, 2},
		{"answers after two", testsrv.Step{Receive: 2}, codes.OK, 2},
		{"fails unread", testsrv.Step{Receive: -1, Code: codes.Aborted}, codes.Aborted, 0},
		{"wants more than there are", testsrv.Step{Receive: 9}, codes.OK, 4},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{store: testsrv.Sequence{test.step}})
				defer srv.Close()
				s, err := client(t, srv).Store(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for i := range int64(4) {
					if err := s.Send(&testpb.Request{Number: i}); err != nil && err != io.EOF {
						t.Fatal(err)
					}
				}
				r, err := s.CloseAndRecv()
				requireCode(t, err, test.code)
				if err == nil && r.GetReceived() != int64(test.read) {
					t.Errorf("received = %d, want %d", r.GetReceived(), test.read)
				}
				synctest.Wait()
				requests := srv.Attempts(store)[0].Requests
				if len(requests) != test.read {
					t.Fatalf("%d requests were read, want %d", len(requests), test.read)
				}
				for i, request := range requests {
					if request.GetNumber() != int64(i) {
						t.Errorf("request %d has number %d", i, request.GetNumber())
					}
				}
			})
		})
	}
}

func TestBidirectional(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{chat: testsrv.Sequence{
			{},
			{Receive: 2, NoEcho: true, Messages: 3, Code: codes.Unavailable},
		}})
		defer srv.Close()
		c := client(t, srv)

		s, err := c.Chat(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{"a", "b"} {
			if err := s.Send(&testpb.Request{Text: text}); err != nil {
				t.Fatal(err)
			}
			r, err := s.Recv()
			if err != nil || r.GetText() != text {
				t.Fatalf("echo = %v, %v, want %s", r, err, text)
			}
		}
		if err := s.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Recv(); err != io.EOF {
			t.Errorf("the end = %v, want io.EOF", err)
		}

		if s, err = c.Chat(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := s.Send(&testpb.Request{}); err != nil {
				t.Fatal(err)
			}
		}
		var numbers []int64
		for {
			r, err := s.Recv()
			if err != nil {
				requireCode(t, err, codes.Unavailable)
				break
			}
			numbers = append(numbers, r.GetNumber())
		}
		if !slices.Equal(numbers, []int64{1, 2, 3}) {
			t.Errorf("messages = %v, want 1, 2, 3", numbers)
		}
	})
}

// Steps in code must be recorded like the others.
func TestStepsInCode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		odd := errors.New("odd")
		srv := testsrv.New(testsrv.Script{
			get: testsrv.Func(func(nth int, a testsrv.Attempt) testsrv.Step {
				return testsrv.Step{Unary: func(_ context.Context, request *testpb.Request) (*testpb.Response, error) {
					if nth == 1 {
						return nil, odd
					}
					return &testpb.Response{Text: a.Requests[0].GetText() + request.GetText()}, nil
				}}
			}),
			list: testsrv.Sequence{{Stream: func(s grpc.ServerStream, request *testpb.Request) error {
				return s.SendMsg(&testpb.Response{Number: request.GetCount()})
			}}},
			put: testsrv.Sequence{{Err: context.DeadlineExceeded}, {Reply: &testpb.Response{Text: "own"}}},
		})
		defer srv.Close()
		c := client(t, srv)

		_, err := c.Get(t.Context(), &testpb.Request{})
		requireCode(t, err, codes.Unknown)
		if got := srv.Attempts(get)[0].Err; got != odd {
			t.Errorf("recorded error = %v, want %v", got, odd)
		}
		if r, err := c.Get(t.Context(), &testpb.Request{Text: "x"}); err != nil || r.GetText() != "xx" {
			t.Errorf("response, error = %v, %v", r, err)
		}
		if s, err := c.List(t.Context(), &testpb.Request{Count: 9}); err != nil {
			t.Error(err)
		} else if numbers, err := drain(s); err != nil || !slices.Equal(numbers, []int64{9}) {
			t.Errorf("messages, error = %v, %v", numbers, err)
		}
		if got := srv.Attempts(list)[0].Responses; got != 1 {
			t.Errorf("responses = %d, want 1", got)
		}
		_, err = c.Put(t.Context(), &testpb.Request{})
		if err == nil {
			t.Error("Err was not returned")
		}
		if r, err := c.Put(t.Context(), &testpb.Request{}); err != nil || r.GetText() != "own" {
			t.Errorf("response, error = %v, %v", r, err)
		}
	})
}

// Server interceptors are what server.go offers; a handler that goes round them
// would make every test of them pass.
func TestInterceptorsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []string
		srv := testsrv.New(nil, testsrv.WithServerOptions(
			grpc.UnaryInterceptor(func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
				seen = append(seen, info.FullMethod)
				return next(ctx, req)
			}),
			grpc.StreamInterceptor(func(s any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
				seen = append(seen, info.FullMethod)
				return next(s, ss)
			}),
		))
		defer srv.Close()
		c := client(t, srv)
		if _, err := c.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		s, err := c.List(t.Context(), &testpb.Request{Count: 1})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := drain(s); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(seen, []string{get, list}) {
			t.Errorf("intercepted = %v", seen)
		}
	})
}

// Every method of the schema must be served, the declared ones too.
func TestDeclaredServiceIsServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{testpb.DeclaredService_Full_FullMethodName: testsrv.Fail(1, codes.Aborted).ThenOK()})
		defer srv.Close()
		cc, err := srv.Dial()
		if err != nil {
			t.Fatal(err)
		}
		c := testpb.NewDeclaredServiceClient(cc)
		_, err = c.Full(t.Context(), &testpb.Request{})
		requireCode(t, err, codes.Aborted)
		_, err = c.Full(t.Context(), &testpb.Request{})
		requireCode(t, err, codes.OK)
		s, err := c.Watch(t.Context(), &testpb.Request{Count: 2})
		if err != nil {
			t.Fatal(err)
		}
		if numbers, err := drain(s); err != nil || len(numbers) != 2 {
			t.Errorf("messages, error = %v, %v", numbers, err)
		}
	})
}
