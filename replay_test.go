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
