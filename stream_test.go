package grpcretry

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
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

// full methods of the scripted server's streams; Take, Append and Chat are not
// declared idempotent, the others are.
const (
	list       = testpb.TestService_List_FullMethodName
	take       = testpb.TestService_Take_FullMethodName
	store      = testpb.TestService_Store_FullMethodName
	appendOnly = testpb.TestService_Append_FullMethodName
	syncUp     = testpb.TestService_Sync_FullMethodName
	chat       = testpb.TestService_Chat_FullMethodName
)

// refusing is n attempts that fail before they answer anything.
func refusing(n int, code codes.Code) testsrv.Sequence {
	return slices.Repeat(testsrv.Sequence{{Messages: -1, NoEcho: true, Receive: -1, Code: code}}, n)
}

// streamDesc is the description of a stream of the scripted server.
func streamDesc(method string) *grpc.StreamDesc {
	for i, d := range testpb.TestService_ServiceDesc.Streams {
		if strings.HasSuffix(method, "/"+d.StreamName) {
			return &testpb.TestService_ServiceDesc.Streams[i]
		}
	}
	panic("no stream of the scripted server: " + method)
}

// serveStreams is serve for those who open streams by themselves.
func serveStreams(t testing.TB, r *Retrier, script testsrv.Script, opts ...grpc.DialOption) (*testsrv.Server, *grpc.ClientConn) {
	t.Helper()
	srv := testsrv.New(script)
	t.Cleanup(srv.Close)
	cc, err := srv.Dial(append(r.DialOptions(), opts...)...)
	if err != nil {
		t.Fatalf("Dial: %v", err)
	}
	return srv, cc
}

// open opens a stream of the method.
func open(t testing.TB, ctx context.Context, cc *grpc.ClientConn, method string, opts ...grpc.CallOption) grpc.ClientStream {
	t.Helper()
	stream, err := cc.NewStream(ctx, streamDesc(method), method, opts...)
	if err != nil {
		t.Fatalf("NewStream: %v", err)
	}
	return stream
}

// send sends a request with each of the numbers, which no attempt may refuse.
func send(t testing.TB, stream grpc.ClientStream, numbers ...int64) {
	t.Helper()
	for _, n := range numbers {
		if err := stream.SendMsg(&testpb.Request{Number: n, Count: 3}); err != nil {
			t.Fatalf("SendMsg of %d: %v", n, err)
		}
	}
}

// closeSend half-closes the stream, which cannot fail.
func closeSend(t testing.TB, stream interface{ CloseSend() error }) {
	t.Helper()
	if err := stream.CloseSend(); err != nil {
		t.Errorf("CloseSend = %v, want nil always", err)
	}
}

// recv receives a message, which must come.
func recv(t testing.TB, stream grpc.ClientStream) *testpb.Response {
	t.Helper()
	m := new(testpb.Response)
	if err := stream.RecvMsg(m); err != nil {
		t.Fatalf("RecvMsg: %v", err)
	}
	return m
}

// end receives the end of the stream, before which no message may come.
func end(t testing.TB, stream grpc.ClientStream) error {
	t.Helper()
	m := new(testpb.Response)
	err := stream.RecvMsg(m)
	if err == nil {
		t.Fatalf("RecvMsg gave %v, want the end of the stream", m)
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// numbersOf are the numbers of the requests that an attempt read.
func numbersOf(a testsrv.Attempt) (numbers []int64) {
	for _, m := range a.Requests {
		numbers = append(numbers, m.GetNumber())
	}
	return numbers
}

// checkRead compares the requests that each attempt read with those wanted.
func checkRead(t testing.TB, srv *testsrv.Server, method string, want ...[]int64) {
	t.Helper()
	var got [][]int64
	for _, a := range srv.Attempts(method) {
		got = append(got, numbersOf(a))
	}
	if !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("the attempts read %v, want %v", got, want)
	}
}

func checkDecisions(t testing.TB, events []event, want ...string) {
	t.Helper()
	if got := decisions(events); !slices.Equal(got, want) {
		t.Errorf("decisions %v, want %v", got, want)
	}
}

// drain reads a stream to its end, and gives the numbers of its messages; the
// error is nil after io.EOF.
func drain(s interface {
	Recv() (*testpb.Response, error)
}) (numbers []int64, err error) {
	for {
		m, err := s.Recv()
		switch {
		case err == io.EOF:
			return numbers, nil
		case err != nil:
			return numbers, err
		}
		numbers = append(numbers, m.GetNumber())
	}
}

// A stream opens without a word from the server, so that its failure shows only
// when the first message is awaited. Who takes the opening for a success gives
// the error to the caller, with nothing retried.
func TestStreamLateErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{list: refusing(2, codes.Unavailable).ThenOK()})
		ctx, events := traced(t, t.Context())
		start := time.Now()
		stream, err := client.List(ctx, &testpb.Request{Count: 3})
		if err != nil {
			t.Fatal(err)
		}
		got, err := drain(stream)
		if err != nil || !slices.Equal(got, []int64{1, 2, 3}) {
			t.Errorf("received %v, %v; want 1 2 3", got, err)
		}
		checkElapsed(t, start, 30*ms)
		if n := srv.Count(list); n != 3 {
			t.Errorf("%d attempts, want 3", n)
		}
		for i, a := range srv.Attempts(list) {
			if got := a.Metadata.Get(attemptsHeader); i == 0 && got != nil || i > 0 && !slices.Equal(got, []string{[]string{"1", "2"}[i-1]}) {
				t.Errorf("attempt %d has the header %v", i+1, got)
			}
		}
		checkDecisions(t, events(), "retry", "retry", "success")
	})
}

// What was delivered cannot be taken back: a stream that breaks off after two
// messages must not begin again at the first.
func TestStreamBreaksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t), testsrv.Script{list: testsrv.Sequence{{Messages: 2, Code: codes.Unavailable, Message: "gone"}}.ThenOK()})
		ctx, events := traced(t, t.Context())
		stream, err := client.List(ctx, &testpb.Request{Count: 3})
		if err != nil {
			t.Fatal(err)
		}
		got, err := drain(stream)
		if !slices.Equal(got, []int64{1, 2}) || wrapped(err) || status.Convert(err).Message() != "gone" {
			t.Errorf("received %v, %v; want 1 2 and the server's own error", got, err)
		}
		if n := srv.Count(list); n != 1 {
			t.Errorf("%d attempts, want 1", n)
		}
		all := events()
		checkDecisions(t, all, "committed")
		if cause := all[0]["grpcretry.commit.cause"]; cause != "message" {
			t.Errorf("committed for %v, want message", cause)
		}
	})
}

// The scenarios of gRPC's own retry tests for streams: with the interceptor in
// place of that retry, its users must see nothing worse.
func TestStreamAsGRPCRetries(t *testing.T) {
	pushback := func(values ...string) metadata.MD { return metadata.MD{"grpc-retry-pushback-ms": values} }
	failing := func(reads int, trailer metadata.MD) testsrv.Step {
		return testsrv.Step{Receive: reads, NoEcho: true, Code: codes.Unavailable, Trailer: trailer}
	}
	for name, test := range map[string]struct {
		script  testsrv.Sequence
		call    func(*testing.T, grpc.ClientStream) error
		code    codes.Code
		read    [][]int64
		reasons []string
		elapsed time.Duration
		policy  func(*Policy)
	}{
		"a fatal code": {
			script: testsrv.Sequence{{Receive: 1, NoEcho: true, Code: codes.InvalidArgument}}, call: pingPong(1),
			code: codes.InvalidArgument, read: [][]int64{{1}}, reasons: []string{"not_retryable"},
		},
		"one retry": {
			script: testsrv.Sequence{failing(1, nil)}.ThenOK(), call: pingPong(1),
			read: [][]int64{{1}, {1}}, reasons: []string{"retry", "success"}, elapsed: 10 * ms,
		},
		"exhaustion": {
			script: testsrv.Sequence{failing(1, nil)}, call: pingPong(1),
			code: codes.Unavailable, read: [][]int64{{1}, {1}, {1}}, reasons: []string{"retry", "retry", "attempts_exhausted"}, elapsed: 30 * ms,
		},
		"several sends are replayed": {
			script: testsrv.Sequence{failing(3, nil)}.ThenOK(), call: pingPong(3),
			read: [][]int64{{1, 2, 3}, {1, 2, 3}}, reasons: []string{"retry", "success"}, elapsed: 10 * ms,
		},
		"failures between sends": {
			script: testsrv.Sequence{failing(1, nil), failing(2, nil)}.ThenOK(),
			call: func(t *testing.T, stream grpc.ClientStream) error {
				for n := range int64(3) {
					send(t, stream, n+1)
					time.Sleep(100 * ms)
				}
				return pingPong(0)(t, stream)
			},
			read: [][]int64{{1}, {1, 2}, {1, 2, 3}}, reasons: []string{"retry", "retry", "success"}, elapsed: 330 * ms,
		},
		"no retry after a delivered message": {
			script: testsrv.Sequence{{Receive: 1, Code: codes.Unavailable}}.ThenOK(),
			call: func(t *testing.T, stream grpc.ClientStream) error {
				send(t, stream, 1)
				recv(t, stream)
				return end(t, stream)
			},
			code: codes.Unavailable, read: [][]int64{{1}}, reasons: []string{"committed"},
		},
		"seen through Header": {
			script: testsrv.Sequence{failing(1, nil)}.Then(testsrv.Step{Header: metadata.Pairs("from", "second")}),
			call: func(t *testing.T, stream grpc.ClientStream) error {
				send(t, stream, 1)
				if md, err := stream.Header(); err != nil || !slices.Equal(md.Get("from"), []string{"second"}) {
					t.Errorf("Header = %v, %v; want that of the second attempt", md, err)
				}
				return pingPong(0)(t, stream)
			},
			read: [][]int64{{1}, {1}}, reasons: []string{"retry", "success"}, elapsed: 10 * ms,
		},
		"no retry after Header": {
			script: testsrv.Sequence{{SendHeaderFirst: true, NoEcho: true, Receive: 2, Code: codes.Unavailable}}.ThenOK(),
			call: func(t *testing.T, stream grpc.ClientStream) error {
				send(t, stream, 1)
				if md, err := stream.Header(); err != nil || md == nil {
					t.Errorf("Header = %v, %v; want one", md, err)
				}
				send(t, stream, 2)
				return end(t, stream)
			},
			code: codes.Unavailable, read: [][]int64{{1, 2}}, reasons: []string{"committed"},
		},
		"a header that nobody asked for": { // gRPC's own retry stops at it
			script: testsrv.Sequence{{SendHeaderFirst: true, NoEcho: true, Receive: 1, Code: codes.Unavailable}}.ThenOK(), call: pingPong(1),
			read: [][]int64{{1}, {1}}, reasons: []string{"retry", "success"}, elapsed: 10 * ms,
		},
		"the half-close is replayed": {
			script: testsrv.Sequence{failing(0, nil)}.ThenOK(), call: pingPong(2),
			read: [][]int64{{1, 2}, {1, 2}}, reasons: []string{"retry", "success"}, elapsed: 10 * ms,
		},
		"negative pushback": {
			script: testsrv.Sequence{failing(1, pushback("-1"))}, call: pingPong(1),
			code: codes.Unavailable, read: [][]int64{{1}}, reasons: []string{"pushback_stop"},
		},
		"pushback that is no number": {
			script: testsrv.Sequence{failing(1, pushback("soon"))}, call: pingPong(1),
			code: codes.Unavailable, read: [][]int64{{1}}, reasons: []string{"pushback_stop"},
		},
		"pushback given twice": {
			script: testsrv.Sequence{failing(1, pushback("10", "10"))}, call: pingPong(1),
			code: codes.Unavailable, read: [][]int64{{1}}, reasons: []string{"pushback_stop"},
		},
		"pushback of a second": {
			script: testsrv.Sequence{failing(1, pushback("1000"))}.ThenOK(), call: pingPong(1),
			read: [][]int64{{1}, {1}}, reasons: []string{"retry", "success"}, elapsed: time.Second,
		},
		"overflow commits": {
			script: testsrv.Sequence{failing(3, nil)}.ThenOK(), call: pingPong(3),
			policy: func(p *Policy) { p.ReplayBytes = 10 }, // each request has 4 bytes
			code:   codes.Unavailable, read: [][]int64{{1, 2, 3}}, reasons: []string{"committed"},
		},
		"failure before the overflow": {
			script: testsrv.Sequence{failing(2, nil)}.ThenOK(),
			call: func(t *testing.T, stream grpc.ClientStream) error {
				send(t, stream, 1, 2)
				synctest.Wait() // the attempt is over, so that the next message goes to the second one
				send(t, stream, 3)
				return pingPong(0)(t, stream)
			},
			policy: func(p *Policy) { p.ReplayBytes = 10 },
			read:   [][]int64{{1, 2}, {1, 2, 3}}, reasons: []string{"retry", "success"}, elapsed: 10 * ms,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, cc := serveStreams(t, newRetrier(t, exactly(test.policy)), testsrv.Script{syncUp: test.script})
				ctx, events := traced(t, t.Context())
				var report Report
				start := time.Now()
				err := test.call(t, open(t, ctx, cc, syncUp, WithReport(&report)))
				checkElapsed(t, start, test.elapsed)
				checkCode(t, err, test.code)
				checkRead(t, srv, syncUp, test.read...)
				checkDecisions(t, events(), test.reasons...)
				if report.Reason.String() != test.reasons[len(test.reasons)-1] || report.Made() != len(test.read) {
					t.Errorf("report: %v after %d attempts", report.Reason, report.Made())
				}
			})
		})
	}
}

// pingPong sends n requests, closes, and reads to the end.
func pingPong(n int) func(*testing.T, grpc.ClientStream) error {
	return func(t *testing.T, stream grpc.ClientStream) error {
		for i := range n {
			send(t, stream, int64(i+1))
		}
		closeSend(t, stream)
		for {
			if err := stream.RecvMsg(new(testpb.Response)); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
		}
	}
}

// A client-streaming call has one moment at which it can fail: when the
// response is awaited. Everything sent is sent again, and the reply holds what
// the second attempt said and nothing of what was there before.
func TestClientStreaming(t *testing.T) {
	for name, test := range map[string]struct {
		script   testsrv.Sequence
		received int64
		reasons  []string
		code     codes.Code
	}{
		"answered":                  {script: nil, received: 3, reasons: []string{"success"}},
		"fails before it reads":     {script: refusing(2, codes.Unavailable).ThenOK(), received: 3, reasons: []string{"retry", "retry", "success"}},
		"fails after half":          {script: testsrv.Sequence{{Receive: 2, Code: codes.Unavailable}}.ThenOK(), received: 3, reasons: []string{"retry", "success"}},
		"fails after the last":      {script: testsrv.Sequence{{Code: codes.Unavailable}}.ThenOK(), received: 3, reasons: []string{"retry", "success"}},
		"its header comes too soon": {script: testsrv.Sequence{{SendHeaderFirst: true, Code: codes.Unavailable}}.ThenOK(), received: 3, reasons: []string{"retry", "success"}},
		"fails for good":            {script: testsrv.Sequence{{Code: codes.NotFound}}, code: codes.NotFound, reasons: []string{"not_retryable"}},
		"answers too soon":          {script: testsrv.Sequence{{Receive: 1}}, received: 1, reasons: []string{"success"}},
		"answers, and then fails": {script: testsrv.Sequence{{Stream: func(stream grpc.ServerStream, _ *testpb.Request) error {
			for stream.RecvMsg(new(testpb.Request)) == nil {
			}
			if err := stream.SendMsg(&testpb.Response{Items: []string{"void"}}); err != nil {
				return err
			}
			return status.Error(codes.Unavailable, "after all not")
		}}}.ThenOK(), received: 3, reasons: []string{"retry", "success"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, cc := serveStreams(t, newRetrier(t), testsrv.Script{store: test.script})
				ctx, events := traced(t, t.Context())
				finished := 0
				stream := open(t, ctx, cc, store, grpc.OnFinish(func(error) { finished++ }))
				for n := range int64(3) {
					if err := stream.SendMsg(&testpb.Request{Number: n + 1}); err == io.EOF && name == "answers too soon" {
						break // it may be too soon for this request, or not
					} else if err != nil {
						t.Fatalf("SendMsg: %v", err)
					}
				}
				closeSend(t, stream)
				reply := &testpb.Response{Items: []string{"from before"}}
				err := stream.RecvMsg(reply)
				checkCode(t, err, test.code)
				if err == nil && (reply.Received != test.received || len(reply.Items) != 1 || reply.Items[0] == "void") {
					t.Errorf("reply %v, want one of %d requests and one item", reply, test.received)
				}
				if finished != 1 {
					t.Errorf("OnFinish ran %d times, want once", finished)
				}
				checkDecisions(t, events(), test.reasons...)
			})
		})
	}
}

// A sender who never receives must still learn that its server is gone, or that
// another took over: without that an upload stops at the first restart.
func TestSenderAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, cc := serveStreams(t, newRetrier(t, exactly(nil)), testsrv.Script{store: testsrv.Sequence{
			{Receive: 2, Code: codes.Unavailable}, {Receive: 3, Code: codes.Unavailable},
		}.ThenOK()})
		stream := open(t, t.Context(), cc, store)
		for n := range int64(6) {
			send(t, stream, n+1)
			synctest.Wait()
		}
		closeSend(t, stream)
		if got := recv(t, stream).Received; got != 6 {
			t.Errorf("the server counts %d requests, want 6", got)
		}
		checkRead(t, srv, store, []int64{1, 2}, []int64{1, 2, 3}, []int64{1, 2, 3, 4, 5, 6})
	})
}

// A server may end a stream early, with an answer or an error for good. The
// sender is told by a bare io.EOF, as code everywhere compares with ==.
func TestSenderIsToldByEOF(t *testing.T) {
	for name, test := range map[string]struct {
		step   testsrv.Step
		code   codes.Code
		reason string
	}{
		"an error for good":        {testsrv.Step{Receive: 1, NoEcho: true, Code: codes.InvalidArgument}, codes.InvalidArgument, "not_retryable"},
		"success without a header": {testsrv.Step{Receive: 1, NoEcho: true}, codes.OK, "success"},
		"success with a header":    {testsrv.Step{Receive: 1, NoEcho: true, SendHeaderFirst: true}, codes.OK, "success"},
		"an answer":                {testsrv.Step{Receive: 1}, codes.OK, "success"},
		"an answer and an error":   {testsrv.Step{Receive: 1, Code: codes.Unavailable}, codes.Unavailable, "committed"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, cc := serveStreams(t, newRetrier(t), testsrv.Script{syncUp: testsrv.Sequence{test.step}})
				ctx, events := traced(t, t.Context())
				stream := open(t, ctx, cc, syncUp)
				send(t, stream, 1)
				synctest.Wait()
				for range 2 {
					if err := stream.SendMsg(&testpb.Request{}); err != io.EOF {
						t.Errorf("SendMsg = %v, want io.EOF", err)
					}
				}
				if !test.step.NoEcho {
					recv(t, stream)
				}
				for range 2 {
					checkCode(t, end(t, stream), test.code)
				}
				if n := srv.Count(syncUp); n != 1 {
					t.Errorf("%d attempts, want 1", n)
				}
				all := events()
				checkDecisions(t, all, test.reason)
				if cause, ok := all[0]["grpcretry.commit.cause"]; test.reason == "committed" != ok || ok && cause != "early_answer" {
					t.Errorf("committed for %v, want early_answer", cause)
				}
			})
		})
	}
}

// Generated code of server streams sends, half-closes and only then returns. An
// attempt that failed by then must not make it fail, or nothing is retried.
func TestServerStreamOpensOnAFailedAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		arrived := 0
		srv := testsrv.New(nil, testsrv.WithServerOptions(grpc.ChainStreamInterceptor(
			func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
				if arrived++; arrived == 1 {
					return status.Error(codes.Unavailable, "before anything was read")
				}
				return handler(server, stream)
			})))
		t.Cleanup(srv.Close)
		client := dial(t, srv, newRetrier(t), grpc.WithChainStreamInterceptor(
			func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				defer synctest.Wait() // until the answer is there, before anything was sent
				return streamer(ctx, desc, cc, method, opts...)
			}))
		stream, err := client.List(t.Context(), &testpb.Request{Count: 3})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := drain(stream); err != nil || !slices.Equal(got, []int64{1, 2, 3}) {
			t.Errorf("received %v, %v; want 1 2 3", got, err)
		}
		if arrived != 2 {
			t.Errorf("%d attempts, want 2", arrived)
		}
	})
}

// Timers of attempts must not end a stream that delivers, nor one that is
// merely quiet while nobody waits, and must end one that keeps its caller waiting.
func TestStreamTimeouts(t *testing.T) {
	const attemptTimedOut = codes.DeadlineExceeded
	for name, test := range map[string]struct {
		method  string
		script  testsrv.Sequence
		policy  func(*Policy)
		parent  time.Duration
		call    func(*testing.T, grpc.ClientStream) error // nil: drain
		code    codes.Code
		reasons []string
		elapsed time.Duration
	}{
		"AttemptTimeout is none of a server stream's": {
			script: testsrv.Sequence{{Messages: 5, Every: 100 * ms}}, policy: func(p *Policy) { p.AttemptTimeout = 150 * ms },
			reasons: []string{"success"}, elapsed: 400 * ms,
		},
		"a first response that comes in time": {
			script: testsrv.Sequence{{Delay: 99 * ms, Messages: 3, Every: time.Hour}}, policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			reasons: []string{"success"}, elapsed: 2*time.Hour + 99*ms,
		},
		"a header is a response": {
			script: testsrv.Sequence{{SendHeaderFirst: true, Delay: time.Hour}}, policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			reasons: []string{"success"}, elapsed: time.Hour,
		},
		"a first response that does not come": {
			script: testsrv.Sequence{{Block: true, Messages: -1}}.ThenOK(), policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			reasons: []string{"retry", "success"}, elapsed: 110 * ms,
		},
		"a first response that does not come after more was sent than is kept": {
			method: syncUp,
			script: testsrv.Sequence{{Block: true, NoEcho: true, Messages: -1}}, policy: func(p *Policy) { p.FirstResponseTimeout, p.ReplayBytes = 100*ms, 1 },
			parent: time.Hour, call: pingPong(1),
			code: attemptTimedOut, reasons: []string{"committed"}, elapsed: 100 * ms,
		},
		"a first response that never comes": {
			script: testsrv.Sequence{{Block: true, Messages: -1}}, policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			code: attemptTimedOut, reasons: []string{"retry", "retry", "attempts_exhausted"}, elapsed: 330 * ms,
		},
		"a header that does not come": {
			script: testsrv.Sequence{{Block: true, Messages: -1}}.ThenOK(), policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				if md, err := stream.Header(); md == nil || err != nil {
					t.Errorf("Header = %v, %v; want that of the second attempt", md, err)
				}
				return pingPong(0)(t, stream)
			},
			reasons: []string{"retry", "success"}, elapsed: 110 * ms,
		},
		"nobody waits for the first response": {
			script: testsrv.Sequence{{Delay: time.Second}}, policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				time.Sleep(time.Hour)
				return pingPong(0)(t, stream)
			},
			reasons: []string{"success"}, elapsed: time.Hour,
		},
		"silence before anything": {
			script: testsrv.Sequence{{Block: true, Messages: -1}}.ThenOK(), policy: func(p *Policy) { p.IdleTimeout = 100 * ms },
			reasons: []string{"retry", "success"}, elapsed: 110 * ms,
		},
		"silence in the middle": {
			script: testsrv.Sequence{{Messages: 2, Every: 99 * ms, Block: true}}.ThenOK(), policy: func(p *Policy) { p.IdleTimeout = 100 * ms },
			code: attemptTimedOut, reasons: []string{"committed"}, elapsed: 199 * ms,
		},
		"a long stream that is never silent": {
			script: testsrv.Sequence{{Messages: 100, Every: 99 * ms}}, policy: func(p *Policy) { p.IdleTimeout = 100 * ms },
			reasons: []string{"success"}, elapsed: 99 * 99 * ms,
		},
		"nobody waits in the silence": {
			script: testsrv.Sequence{{Messages: 2, Every: time.Second}}, policy: func(p *Policy) { p.IdleTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				recv(t, stream)
				time.Sleep(time.Hour)
				return pingPong(0)(t, stream)
			},
			reasons: []string{"success"}, elapsed: time.Hour,
		},
		"both: the first response may take longer": {
			script:  testsrv.Sequence{{Delay: 300 * ms, Messages: 1, Block: true}},
			policy:  func(p *Policy) { p.FirstResponseTimeout, p.IdleTimeout = 400*ms, 100*ms },
			code:    attemptTimedOut,
			reasons: []string{"committed"}, elapsed: 400 * ms,
		},
		"the policy's Timeout is over all": {
			script: testsrv.Sequence{{Messages: 100, Every: 100 * ms}}, policy: func(p *Policy) { p.Timeout = 250 * ms },
			code: codes.DeadlineExceeded, reasons: []string{"committed"}, elapsed: 250 * ms,
		},
		"the policy's Timeout before anything came": {
			script: testsrv.Sequence{{Block: true, Messages: -1}}, policy: func(p *Policy) { p.Timeout, p.FirstResponseTimeout = 250*ms, 100*ms },
			code: codes.DeadlineExceeded, reasons: []string{"retry", "retry", "deadline"}, elapsed: 250 * ms,
		},
		"the caller's deadline is over all": {
			script: testsrv.Sequence{{Block: true, Messages: -1}}, parent: 250 * ms, policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			code: codes.DeadlineExceeded, reasons: []string{"retry", "retry", "parent_done"}, elapsed: 250 * ms,
		},
		"a method that is not idempotent": {
			method: take,
			script: testsrv.Sequence{{Block: true, Messages: -1}}.ThenOK(), policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			code: attemptTimedOut, reasons: []string{"not_idempotent"}, elapsed: 100 * ms,
		},
		"AttemptTimeout runs from the half-close": {
			method: store,
			script: testsrv.Sequence{{Delay: time.Hour}}.ThenOK(), policy: func(p *Policy) { p.AttemptTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				time.Sleep(time.Minute)
				closeSend(t, stream)
				return response(stream)
			},
			reasons: []string{"retry", "success"}, elapsed: time.Minute + 110*ms,
		},
		"AttemptTimeout of a client stream, each time": {
			method: store,
			script: testsrv.Sequence{{Delay: time.Hour}}, policy: func(p *Policy) { p.AttemptTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				send(t, stream, 1, 2)
				closeSend(t, stream)
				return response(stream)
			},
			code: attemptTimedOut, reasons: []string{"retry", "retry", "attempts_exhausted"}, elapsed: 330 * ms,
		},
		"a response that is there does not time out": {
			method: store,
			script: testsrv.Sequence{{Delay: 50 * ms}}, policy: func(p *Policy) { p.AttemptTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				closeSend(t, stream)
				time.Sleep(time.Hour)
				return response(stream)
			},
			reasons: []string{"success"}, elapsed: time.Hour,
		},
		"a response that is overdue when it is asked for": {
			method: store,
			script: testsrv.Sequence{{Block: true}}.ThenOK(), policy: func(p *Policy) { p.AttemptTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error {
				closeSend(t, stream)
				time.Sleep(time.Hour)
				return response(stream)
			},
			reasons: []string{"retry", "success"}, elapsed: time.Hour + 10*ms,
		},
		"before the half-close nothing runs": {
			method: store,
			script: testsrv.Sequence{{Receive: -1, Delay: time.Hour}}, policy: func(p *Policy) { p.AttemptTimeout = 100 * ms },
			call: func(t *testing.T, stream grpc.ClientStream) error { return response(stream) }, reasons: []string{"success"}, elapsed: time.Hour,
		},
		"AttemptTimeout is none of a bidirectional stream's": {
			method: syncUp,
			script: testsrv.Sequence{{Delay: time.Hour}}, policy: func(p *Policy) { p.AttemptTimeout = 100 * ms },
			call: pingPong(0), reasons: []string{"success"}, elapsed: time.Hour,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = list
				}
				srv, cc := serveStreams(t, newRetrier(t, exactly(test.policy)), testsrv.Script{test.method: test.script})
				ctx, events := traced(t, t.Context())
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				start := time.Now()
				stream := open(t, ctx, cc, test.method)
				if test.method == list || test.method == take {
					send(t, stream, 1)
					closeSend(t, stream)
				}
				if test.call == nil {
					test.call = pingPong(0)
				}
				err := test.call(t, stream)
				checkElapsed(t, start, test.elapsed)
				checkCode(t, err, test.code)
				all := events()
				checkDecisions(t, all, test.reasons...)
				if test.code == attemptTimedOut && len(all) == 1 && test.policy != nil && !strings.Contains(name, "policy") &&
					!strings.Contains(status.Convert(err).Message(), "attempt timed out: nothing received within") {
					t.Errorf("error %v, want one that tells which timeout ended the attempt", err)
				}
				synctest.Wait()
				if n := srv.Running(); n != 0 {
					t.Errorf("%d handlers run on", n)
				}
			})
		})
	}
}

// response receives the response of a client-streaming call.
func response(stream grpc.ClientStream) error { return stream.RecvMsg(new(testpb.Response)) }

// In every way in which a stream can end, its call ends once: for the budget,
// OnFinish, the span, the report, the server and the caller's context. Who
// forgets one of them leaks with every stream that ends so.
func TestStreamEndings(t *testing.T) {
	type call struct {
		srv    *testsrv.Server
		cc     *grpc.ClientConn
		cancel context.CancelFunc
		stream grpc.ClientStream
	}
	first := func(t *testing.T, c call, method string) {
		if !streamDesc(method).ClientStreams {
			send(t, c.stream, 1)
			closeSend(t, c.stream)
		} else {
			_ = c.stream.SendMsg(&testpb.Request{Number: 1}) // the attempt may be over already
		}
	}
	rest := func(t *testing.T, c call) error {
		closeSend(t, c.stream)
		for {
			switch err := c.stream.RecvMsg(new(testpb.Response)); {
			case err == io.EOF:
				return nil
			case err != nil:
				return err
			}
		}
	}
	unasked := errors.New("nobody asked")
	block := testsrv.Step{Receive: -1, Messages: -1, Block: true}
	answerThenBlock := testsrv.Step{SendHeaderFirst: true, Receive: -1, Messages: 1, Block: true}
	for name, test := range map[string]struct {
		step    testsrv.Step
		refuse  bool // the server is down
		act     func(t *testing.T, c call, method string) error
		code    codes.Code
		reasons []Reason
	}{
		"drained": {
			act:     func(t *testing.T, c call, method string) error { return rest(t, c) },
			reasons: []Reason{ReasonSuccess},
		},
		"failed": {
			step:    testsrv.Step{Receive: -1, Messages: -1, Code: codes.NotFound},
			act:     func(t *testing.T, c call, method string) error { return rest(t, c) },
			code:    codes.NotFound,
			reasons: []Reason{ReasonNotRetryable},
		},
		"retried in vain": {
			step:    testsrv.Step{Receive: -1, Messages: -1, Code: codes.Unavailable},
			act:     func(t *testing.T, c call, method string) error { return rest(t, c) },
			code:    codes.Unavailable,
			reasons: []Reason{ReasonAttemptsExhausted, ReasonNotIdempotent},
		},
		"cancelled while its caller waits": {
			step: block,
			act: func(t *testing.T, c call, method string) error {
				time.AfterFunc(ms, c.cancel)
				return rest(t, c)
			},
			code: codes.Canceled, reasons: []Reason{ReasonParentDone},
		},
		"cancelled while its caller waits for the header": {
			step: block,
			act: func(t *testing.T, c call, method string) error {
				time.AfterFunc(ms, c.cancel)
				if md, err := c.stream.Header(); md != nil || err != nil {
					t.Errorf("Header = %v, %v; want neither", md, err)
				}
				return unasked
			},
			code: codes.Canceled, reasons: []Reason{ReasonParentDone},
		},
		"cancelled in the wait": {
			step: testsrv.Step{Receive: -1, Messages: -1, Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "1000")},
			act: func(t *testing.T, c call, method string) error {
				time.AfterFunc(500*ms, c.cancel)
				err := rest(t, c)
				if status.Code(err) == codes.Unavailable { // of a method that is not repeated
					return unasked
				}
				return err
			},
			code: codes.Canceled, reasons: []Reason{ReasonParentDone, ReasonNotIdempotent},
		},
		"abandoned before anything came": {
			step:    block,
			act:     func(t *testing.T, c call, method string) error { c.cancel(); return unasked },
			code:    codes.Canceled,
			reasons: []Reason{ReasonParentDone},
		},
		"abandoned after the header": {
			step: answerThenBlock,
			act: func(t *testing.T, c call, method string) error {
				if md, err := c.stream.Header(); md == nil || err != nil {
					t.Errorf("Header = %v, %v; want one", md, err)
				}
				c.cancel()
				return unasked
			},
			code: codes.Canceled, reasons: []Reason{ReasonParentDone},
		},
		"abandoned after a message": {
			step: answerThenBlock,
			act: func(t *testing.T, c call, method string) error {
				if streamDesc(method).ServerStreams {
					recv(t, c.stream)
				}
				c.cancel()
				return unasked
			},
			code: codes.Canceled, reasons: []Reason{ReasonParentDone},
		},
		"abandoned, then asked after all": {
			step: block,
			act: func(t *testing.T, c call, method string) error {
				c.cancel()
				synctest.Wait()
				checkCode(t, rest(t, c), codes.Canceled)
				return rest(t, c)
			},
			code: codes.Canceled, reasons: []Reason{ReasonParentDone},
		},
		"its connection closed": {
			step:    block,
			act:     func(t *testing.T, c call, method string) error { c.cc.Close(); return unasked },
			code:    codes.Canceled,
			reasons: []Reason{ReasonClosed},
		},
		"its connection closed while its caller waits": {
			step: block,
			act: func(t *testing.T, c call, method string) error {
				time.AfterFunc(ms, func() { c.cc.Close() })
				return rest(t, c)
			},
			code: codes.Canceled, reasons: []Reason{ReasonClosed},
		},
		"its connection closed after a message": {
			step: answerThenBlock,
			act: func(t *testing.T, c call, method string) error {
				if streamDesc(method).ServerStreams {
					recv(t, c.stream)
				}
				c.cc.Close()
				return unasked
			},
			code: codes.Canceled, reasons: []Reason{ReasonClosed},
		},
		"its server killed": {
			step: block,
			act: func(t *testing.T, c call, method string) error {
				time.AfterFunc(ms, c.srv.Kill)
				return rest(t, c)
			},
			code: codes.Unavailable, reasons: []Reason{ReasonAttemptsExhausted, ReasonNotIdempotent},
		},
		"never opened": {
			refuse: true, code: codes.Unavailable, reasons: []Reason{ReasonAttemptsExhausted},
		},
		"a message that is too large": {
			step: block,
			act: func(t *testing.T, c call, method string) error {
				err := c.stream.SendMsg(&testpb.Request{Payload: make([]byte, 100)})
				if !streamDesc(method).ClientStreams { // it has but one request
					checkCode(t, err, codes.Internal)
					return unasked
				}
				if wrapped(err) {
					t.Errorf("SendMsg = %v, want grpc's own error", err)
				}
				return err
			},
			code: codes.ResourceExhausted, reasons: []Reason{ReasonPermanent, ReasonDisabled},
		},
	} {
		for _, method := range []string{list, take, store, appendOnly, syncUp, chat} {
			t.Run(name+"/"+method[strings.LastIndex(method, "/")+1:], func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					budget := newBudget(t)
					ended := 0
					spans := newEndings()
					r := newRetrier(t, exactly(nil), WithBudget(budget), WithCallSpan(spans), WithHooks(Hooks{
						CallEnd: func(context.Context, Report, any, error) { ended++ },
					}))
					srv, cc := serveStreams(t, r, testsrv.Script{method: testsrv.Sequence{test.step}})
					if test.refuse {
						srv.Kill()
					}
					start := time.Now()
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					var report Report
					var finished []error
					opts := []grpc.CallOption{WithReport(&report), grpc.MaxCallSendMsgSize(50), grpc.OnFinish(func(err error) { finished = append(finished, err) })}
					stream, err := cc.NewStream(ctx, streamDesc(method), method, opts...)
					if err == nil {
						c := call{srv, cc, cancel, stream}
						first(t, c, method)
						err = test.act(t, c, method)
					}
					if err != unasked {
						checkCode(t, err, test.code)
					}
					synctest.Wait()
					if !slices.Contains(test.reasons, report.Reason) {
						t.Errorf("the call ended for %v, want %v", report.Reason, test.reasons)
					}
					if len(finished) != 1 || status.Code(finished[0]) != test.code && err != unasked || ended != 1 {
						t.Errorf("OnFinish ran with %v and CallEnd %d times, want both once", finished, ended)
					}
					if got := budget.state(); got.InFlight != 0 {
						t.Errorf("%d calls in flight, want 0", got.InFlight)
					}
					if n := srv.Running(); n != 0 {
						t.Errorf("%d handlers run on", n)
					}
					span := spans.one(t)
					last := report.Attempts[len(report.Attempts)-1]
					code, errorType := codeName(last.Code), ""
					if report.Reason == ReasonParentDone || report.Reason == ReasonClosed {
						code = "CANCELLED"
					}
					if code != "OK" {
						errorType = code
					}
					checkCallSpan(t, span, method[1:], code, errorType, report.Made())
					if !span.StartTime().Equal(start) || !span.EndTime().Equal(time.Now()) {
						t.Errorf("the span lasts from %v to %v, want %v to %v, when the stream ended", span.StartTime(), span.EndTime(), start, time.Now())
					}
					all := eventsOf(t, span)
					if len(all) != report.Made() || all[len(all)-1]["grpcretry.attempt.decision"] != report.Reason.String() {
						t.Errorf("events %v, want one for each of %d attempts, the last saying %v", decisions(all), report.Made(), report.Reason)
					}
				})
			})
		}
	}
}

func newBudget(t testing.TB) *TokenBudget {
	t.Helper()
	b, err := NewBudget(BudgetConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return b
}
