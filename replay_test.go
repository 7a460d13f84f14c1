package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// echoing is a bidirectional method that sends `times` responses for each
// request, numbered as the request is, and ends with the half-close. The first
// failures attempts read a number of requests instead that fail chooses, and fail.
func echoing(times, failures int, fail func() int) testsrv.Reaction {
	return testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
		if nth <= failures {
			return testsrv.Step{Receive: fail(), NoEcho: true, Code: codes.Unavailable}
		}
		return testsrv.Step{Stream: func(stream grpc.ServerStream, _ *testpb.Request) error {
			for {
				in := new(testpb.Request)
				switch err := stream.RecvMsg(in); {
				case err == io.EOF:
					return nil
				case err != nil:
					return err
				}
				for range times {
					if err := stream.SendMsg(&testpb.Response{Number: in.Number, Payload: in.Payload}); err != nil {
						return err
					}
				}
			}
		}}
	})
}

// inOrder reports what is wrong with the responses: each number from 1 to n has
// to come `times` times, in order.
func inOrder(numbers []int64, n, times int) error {
	for i, got := range numbers {
		if want := int64(i/times + 1); got != want {
			return fmt.Errorf("response %d has the number %d, want %d", i, got, want)
		}
	}
	if len(numbers) != n*times {
		return fmt.Errorf("%d responses, want %d", len(numbers), n*times)
	}
	return nil
}

// Replaying must not wait for a server that waits for its answers to be read:
// with small windows that is a deadlock, and the call hangs until its deadline.
// The clock of the bubble then leaps to that deadline, so that a hang fails at once.
func TestReplayCannotDeadlock(t *testing.T) {
	runs := 1002
	if testing.Short() {
		runs = 102
	}
	const window = 64 << 10
	// Everybody writes more than the windows and the buffers between them hold,
	// but for callers of a single goroutine, who could not do so without retries either.
	callers := []struct {
		name  string
		times int // responses for each request
		size  int
		n     int
		most  int // requests that the caller sends before it reads
		call  func(stream grpc.BidiStreamingClient[testpb.Request, testpb.Response], send func(int) error, n, times int) ([]int64, error)
	}{
		{"echo, two goroutines", 1, 16 << 10, 24, 24, twoGoroutines},
		{"twice, two goroutines", 2, 16 << 10, 24, 24, twoGoroutines},
		{"echo, in turn", 1, 16 << 10, 24, 1, inTurn},
		{"twice, in turn", 2, 16 << 10, 24, 1, inTurn},
		{"echo, first all requests", 1, 4 << 10, 12, 12, allFirst},
		{"twice, first all requests", 2, 4 << 10, 12, 12, allFirst},
	}
	for i, c := range callers {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithBudget(Unlimited()), WithDefaultPolicy(Policy{MaxAttempts: 5, ReplayBytes: 4 << 20, Backoff: atOnce}))
				srv := testsrv.New(nil, testsrv.WithServerOptions(grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window)))
				t.Cleanup(srv.Close)
				client := dial(t, srv, r, grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(window))
				random := rand.New(rand.NewPCG(45, uint64(i)))
				for run := range runs / len(callers) {
					failures := random.IntN(4)
					reads := [4]int{}
					for k := range reads {
						reads[k] = 1 + random.IntN(c.most)
						if random.IntN(8) == 0 {
							reads[k] = -1 // none
						}
					}
					k := 0
					if err := srv.Set(syncUp, echoing(c.times, failures, func() int { k++; return reads[k-1] })); err != nil {
						t.Fatal(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					stream, err := client.Sync(ctx)
					if err != nil {
						t.Fatal(err)
					}
					send := func(number int) error {
						return stream.Send(&testpb.Request{Number: int64(number), Payload: make([]byte, c.size)})
					}
					numbers, err := c.call(stream, send, c.n, c.times)
					cancel()
					if err == nil {
						err = inOrder(numbers, c.n, c.times)
					}
					if err != nil {
						t.Fatalf("run %d, after %d failures that read %v: %v", run, failures, reads, err)
					}
				}
			})
		})
	}
}

// twoGoroutines sends and receives at the same time.
func twoGoroutines(stream grpc.BidiStreamingClient[testpb.Request, testpb.Response], send func(int) error, n, _ int) ([]int64, error) {
	sent := make(chan error, 1)
	go func() {
		for i := range n {
			if err := send(i + 1); err != nil {
				sent <- fmt.Errorf("send %d: %w", i+1, err)
				return
			}
		}
		sent <- stream.CloseSend()
	}()
	numbers, err := drain(stream)
	return numbers, errors.Join(err, <-sent)
}

// inTurn sends one request and reads its responses, then the next.
func inTurn(stream grpc.BidiStreamingClient[testpb.Request, testpb.Response], send func(int) error, n, times int) (numbers []int64, err error) {
	for i := range n {
		if err := send(i + 1); err != nil {
			return numbers, fmt.Errorf("send %d: %w", i+1, err)
		}
		for range times {
			m, err := stream.Recv()
			if err != nil {
				return numbers, fmt.Errorf("receive for %d: %w", i+1, err)
			}
			numbers = append(numbers, m.GetNumber())
		}
	}
	if err := stream.CloseSend(); err != nil {
		return numbers, err
	}
	rest, err := drain(stream)
	return append(numbers, rest...), err
}

// allFirst sends all requests, then reads all responses.
func allFirst(stream grpc.BidiStreamingClient[testpb.Request, testpb.Response], send func(int) error, n, _ int) ([]int64, error) {
	for i := range n {
		if err := send(i + 1); err != nil {
			return nil, fmt.Errorf("send %d: %w", i+1, err)
		}
	}
	if err := stream.CloseSend(); err != nil {
		return nil, err
	}
	return drain(stream)
}

// A server that fails at random while one goroutine sends must in the end have
// read every message once, in order, however often it failed: run with -race.
func TestReplayInOrder(t *testing.T) {
	const n = 1000
	for seed := range uint64(5) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				random := rand.New(rand.NewPCG(45, seed))
				srv := testsrv.New(nil)
				t.Cleanup(srv.Close)
				if err := srv.Set(syncUp, testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
					if nth > 6 {
						return testsrv.Step{}
					}
					return testsrv.Step{Receive: 1 + random.IntN(n), NoEcho: true, Cut: nth%3 == 0, Code: codes.Unavailable}
				})); err != nil {
					t.Fatal(err)
				}
				cc, err := srv.Dial(newRetrier(t, WithBudget(Unlimited()), WithDefaultPolicy(Policy{MaxAttempts: 100, Backoff: atOnce})).DialOptions()...)
				if err != nil {
					t.Fatal(err)
				}
				stream := open(t, t.Context(), cc, syncUp)
				sent := make(chan error, 1)
				go func() {
					m := new(testpb.Request) // the same one each time
					for i := range n {
						m.Number, m.Text = int64(i+1), fmt.Sprint("message ", i+1)
						if err := stream.SendMsg(m); err != nil {
							sent <- err
							return
						}
						if i%100 == 50 {
							time.Sleep(ms) // so that some failures meet the sender
						}
					}
					sent <- stream.CloseSend()
				}()
				responses := 0
				for {
					m := new(testpb.Response)
					if err := stream.RecvMsg(m); err == io.EOF {
						break
					} else if err != nil {
						t.Fatal(err)
					}
					if responses++; m.Text != fmt.Sprint("message ", responses) {
						t.Fatalf("response %d is to %q", responses, m.Text)
					}
				}
				if err := <-sent; err != nil || responses != n {
					t.Errorf("%d responses, want %d; sent: %v", responses, n, err)
				}
				attempts := srv.Attempts(syncUp)
				for _, a := range attempts {
					for i, m := range a.Requests {
						if m.Number != int64(i+1) {
							t.Fatalf("attempt %d read %d in place of %d", a.Number, m.Number, i+1)
						}
					}
				}
				if last := attempts[len(attempts)-1]; len(last.Requests) != n {
					t.Errorf("the last attempt read %d requests, want %d", len(last.Requests), n)
				}
			})
		})
	}
}

// An upload may be of any size, and the log may not: it holds no more than
// ReplayBytes, nothing once they are exceeded, and the event says that this is
// why the stream was not repeated.
func TestReplayLogIsBounded(t *testing.T) {
	const limit, small, large, total = 1 << 20, 20 << 10, 1 << 20, 200 << 20
	fake := &fakeStream{end: status.Error(codes.Unavailable, "just before the end")}
	ctx, events := traced(t, t.Context())
	r := newRetrier(t, WithDefaultPolicy(Policy{ReplayBytes: limit}))
	stream, err := r.StreamClientInterceptor()(ctx, streamDesc(store), nil, store, fakeStreamer(fake))
	if err != nil {
		t.Fatal(err)
	}
	log := &stream.(*clientStream).log
	most, memory := 0, 0
	for sent := 0; sent < total; {
		request := &testpb.Request{Payload: make([]byte, large)}
		if sent < 2*limit {
			request.Payload = request.Payload[:small] // many in the log, and one that does not fit
		}
		if err := stream.SendMsg(request); err != nil {
			t.Fatal(err)
		}
		sent += len(request.Payload)
		held := cap(log.room) - len(log.room)
		for _, e := range log.entries {
			held += len(e.data)
		}
		most, memory = max(most, log.size), max(memory, held)
	}
	if most > limit || most < limit-small-100 {
		t.Errorf("the log held %d bytes, want nearly %d", most, limit)
	}
	if memory > limit+len(logChunk{}) {
		t.Errorf("the log took %d bytes of memory for %d of messages", memory, most)
	}
	if log.entries != nil || log.size != 0 || log.pooled != nil || log.room != nil {
		t.Errorf("the log still holds %d messages", len(log.entries))
	}
	closeSend(t, stream)
	checkCode(t, end(t, stream), codes.Unavailable)
	all := events()
	checkDecisions(t, all, "committed")
	if cause := all[0]["grpcretry.commit.cause"]; cause != "replay_bytes" {
		t.Errorf("committed for %v, want replay_bytes", cause)
	}
}

// A full log during a replay must not be dropped for the message that does not
// fit: that one waits, and goes out after the rest.
func TestOverflowDuringAReplay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const window, size = 64 << 10, 16 << 10
		srv := testsrv.New(testsrv.Script{store: testsrv.Sequence{
			{Receive: 20, Code: codes.Unavailable},
			{Stream: func(stream grpc.ServerStream, _ *testpb.Request) error {
				time.Sleep(time.Second) // the replay fills the window, and stops
				for n := int64(0); ; n++ {
					if err := stream.RecvMsg(new(testpb.Request)); err == io.EOF {
						return stream.SendMsg(&testpb.Response{Received: n})
					} else if err != nil {
						return err
					}
				}
			}},
		}}, testsrv.WithServerOptions(grpc.InitialWindowSize(window), grpc.InitialConnWindowSize(window)))
		t.Cleanup(srv.Close)
		cc, err := srv.Dial(newRetrier(t, exactly(func(p *Policy) { p.ReplayBytes = 20*size + 1000 })).DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		ctx, events := traced(t, t.Context())
		stream := open(t, ctx, cc, store)
		request := func(n int) *testpb.Request { return &testpb.Request{Number: int64(n), Payload: make([]byte, size)} }
		for n := range 20 {
			if err := stream.SendMsg(request(n + 1)); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait() // the first attempt is over
		start := time.Now()
		for n := 20; n < 25; n++ {
			if err := stream.SendMsg(request(n + 1)); err != nil {
				t.Fatal(err)
			}
		}
		checkElapsed(t, start, 10*ms+time.Second)
		closeSend(t, stream)
		if got := recv(t, stream).Received; got != 25 {
			t.Errorf("the server counts %d requests, want 25", got)
		}
		var want []int64
		for n := range int64(25) {
			want = append(want, n+1)
		}
		checkRead(t, srv, store, want[:20], want)
		all := events()
		checkDecisions(t, all, "retry", "success")
		if cause := all[1]["grpcretry.commit.cause"]; cause != "replay_bytes" {
			t.Errorf("committed for %v, want replay_bytes", cause)
		}
	})
}

// Whatever goes into the log comes out the same, also messages that protobuf's
// encoding refuses, and the log's memory can go to another stream at once.
func TestReplayLogKeepsMessages(t *testing.T) {
	messages := []proto.Message{
		&testpb.Request{},
		(*testpb.Request)(nil),
		&testpb.Request{Text: "text", Payload: []byte{0, 1, 2}, Count: 1, After: 2, Number: 3},
		&testpb.Request{Text: "\xff is no UTF-8"},
		&testpb.Response{Items: []string{"a", "", "b"}},
		&testpb.Request{Payload: make([]byte, len(logChunk{})-100)},
		&testpb.Request{Payload: make([]byte, len(logChunk{})+1)},
		&testpb.Request{Number: 1 << 60},
	}
	unknown := &testpb.Request{Number: 1}
	unknown.ProtoReflect().SetUnknown([]byte{0xfa, 0x01, 0x01, 'x'})
	messages = append(messages, unknown)
	for round := range 3 {
		log := replayLog{limit: 1 << 30}
		var want []proto.Message
		for range 20 {
			for _, m := range messages {
				p := wrapUp(m)
				if !log.keep(&p) || !p.logged {
					t.Fatalf("%v is not kept", m)
				}
				if !m.ProtoReflect().IsValid() { // a nil pointer is sent as a message with nothing in it
					m = &testpb.Request{}
				}
				want = append(want, proto.Clone(m))
			}
		}
		for i, m := range want {
			got := log.message(i)
			if !proto.Equal(got, m) || got.ProtoReflect().Descriptor() != m.ProtoReflect().Descriptor() {
				t.Fatalf("round %d: message %d is %v, want %v", round, i, got, m)
			}
			proto.Reset(got)
			if !proto.Equal(log.message(i), m) {
				t.Fatalf("round %d: message %d changed with what was given out", round, i)
			}
		}
		log.free()
	}
}

// A stream of heartbeats may go on for days without an answer. Its messages are
// empty, so that no number of bytes would ever end the keeping of them.
func TestLogOfEmptyMessagesIsBounded(t *testing.T) {
	l := replayLog{limit: DefaultReplayBytes}
	const most = DefaultReplayBytes / 32
	n := 0
	for n <= most && l.keep(&parcel{message: &testpb.Request{}}) {
		n++
	}
	if n != most {
		t.Errorf("%d empty messages were kept, want %d", n, most)
	}
}
