package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// streamScenario is all that happens to one stream: what its caller does on two
// goroutines, how each attempt of the server ends, and when the caller cancels.
type streamScenario struct {
	method      string
	sender      []streamOp
	receiver    []streamOp
	attempts    []serverAttempt // the failing ones; the one after them answers
	cancelAt    time.Duration   // 0: not at all
	replayBytes int
	backoff     time.Duration
	idle        time.Duration // the policy's timeouts; 0: none
	first       time.Duration
	resume      bool
}

// streamOp is one act of the caller.
type streamOp struct {
	Op string // send, recv, header, sleep
	N  int    // bytes, milliseconds
}

// serverAttempt is an attempt that ends after a time, whatever it has done by then.
type serverAttempt struct {
	After  time.Duration
	Echo   bool // it answers until then
	Header bool // it sends its header at once
	Cut    bool // it ends with its connection
}

func drawScenario(t *rapid.T) streamScenario {
	ops := func(name string, kinds ...string) []streamOp {
		return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) streamOp {
			return streamOp{rapid.SampledFrom(kinds).Draw(t, "op"), rapid.IntRange(0, 3).Draw(t, "n")}
		}), 0, 8).Draw(t, name)
	}
	return streamScenario{
		method:   rapid.SampledFrom([]string{list, store, syncUp}).Draw(t, "method"),
		sender:   ops("sender", "send", "send", "send", "sleep", "header"),
		receiver: ops("receiver", "recv", "recv", "sleep", "header"),
		attempts: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) serverAttempt {
			return serverAttempt{
				After:  time.Duration(rapid.IntRange(0, 5).Draw(t, "after")) * time.Millisecond,
				Echo:   rapid.IntRange(0, 3).Draw(t, "echo") == 0,
				Header: rapid.Bool().Draw(t, "header"),
				Cut:    rapid.IntRange(0, 3).Draw(t, "cut") == 0,
			}
		}), 0, 4).Draw(t, "attempts"),
		cancelAt:    time.Duration(rapid.SampledFrom([]int{0, 0, 0, 1, 3, 5}).Draw(t, "cancel")) * time.Millisecond,
		replayBytes: rapid.SampledFrom([]int{4 << 20, 4 << 20, 4}).Draw(t, "replayBytes"),
		backoff:     time.Duration(rapid.IntRange(0, 2).Draw(t, "backoff")) * time.Millisecond,
		idle:        time.Duration(rapid.SampledFrom([]int{0, 0, 2}).Draw(t, "idle")) * time.Millisecond,
		first:       time.Duration(rapid.SampledFrom([]int{0, 0, 2}).Draw(t, "first")) * time.Millisecond,
		resume:      rapid.Bool().Draw(t, "resume"),
	}
}

// serve is the server's side of one attempt.
func (p serverAttempt) serve(method string, answers bool, stream grpc.ServerStream, request *testpb.Request) error {
	if p.Header {
		if err := stream.SendHeader(metadata.Pairs("from", "server")); err != nil {
			return err
		}
	}
	in := make(chan *testpb.Request)
	done := make(chan struct{})
	defer close(done)
	go func() {
		defer close(in)
		if request != nil {
			for range request.Count - request.After {
				select {
				case in <- &testpb.Request{}:
				case <-done:
					return
				}
			}
			return
		}
		for {
			m := new(testpb.Request)
			if stream.RecvMsg(m) != nil {
				return
			}
			select {
			case in <- m:
			case <-done:
				return
			}
		}
	}()
	var ends <-chan time.Time
	if !answers {
		timer := time.NewTimer(p.After)
		defer timer.Stop()
		ends = timer.C
	}
	for n := request.GetAfter(); ; {
		select {
		case <-ends:
			return status.Error(codes.Unavailable, "the attempt ends")
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		case _, more := <-in:
			switch {
			case !more && !answers:
				in = nil // the end is still to come
				continue
			case !more && method == store:
				return stream.SendMsg(&testpb.Response{Number: n})
			case !more:
				return nil
			}
			n++
			if (p.Echo || answers) && method != store {
				if err := stream.SendMsg(&testpb.Response{Number: n}); err != nil {
					return err
				}
			}
		}
	}
}

// One stream, on which anything may happen at any time, behaves as a single
// attempt would that does not fail: nothing is lost, doubled or out of order,
// and every call ends. The model says when it may fail at all: when its caller
// was already given something, sent more than is kept, or cancelled.
func TestStreamModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) { // -rapid.checks=20000 for more
		s := drawScenario(rt)
		var err error
		synctest.Test(t, func(t *testing.T) { err = s.run(t) })
		if err != nil {
			rt.Fatalf("%v\n%+v", err, s)
		}
	})
}

// run plays the scenario, and returns what the model does not allow.
func (s streamScenario) run(t *testing.T) error {
	budget, err := NewBudget(BudgetConfig{Capacity: 1000})
	if err != nil {
		return err
	}
	r := newRetrier(t, WithBudget(budget), WithDefaultPolicy(Policy{
		MaxAttempts: 100, ReplayBytes: s.replayBytes, IdleTimeout: s.idle, FirstResponseTimeout: s.first,
		Backoff: Backoff{Func: func(int, time.Duration, Attempt) time.Duration { return s.backoff }},
	}))
	srv := testsrv.New(nil)
	t.Cleanup(srv.Close)
	if err := srv.Set(s.method, testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
		plan, answers := serverAttempt{}, nth > len(s.attempts)
		if !answers {
			plan = s.attempts[nth-1]
		}
		return testsrv.Step{Stream: func(stream grpc.ServerStream, request *testpb.Request) error {
			err := plan.serve(s.method, answers, stream, request)
			if plan.Cut && stream.Context().Err() == nil {
				srv.CutConnections()
				<-stream.Context().Done()
			}
			return err
		}}
	})); err != nil {
		return err
	}
	cc, err := srv.Dial(r.DialOptions()...)
	if err != nil {
		return err
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	if s.cancelAt > 0 {
		time.AfterFunc(s.cancelAt, cancel)
	}
	var c modelCaller
	begun := time.Now()
	opts := []grpc.CallOption{WithReport(&c.report), grpc.OnFinish(func(err error) { c.finished = append(c.finished, err) })}
	if s.resume {
		opts = append(opts, WithResume(afterLast))
	}
	c.stream, err = cc.NewStream(ctx, streamDesc(s.method), s.method, opts...)
	if err != nil {
		c.end = err
	} else {
		sent := make(chan struct{})
		go func() {
			defer close(sent)
			c.send(s)
		}()
		c.receive(s)
		<-sent
	}
	synctest.Wait()
	if took := time.Since(begun); took > time.Minute {
		return fmt.Errorf("the call took %v", took)
	}
	return errors.Join(c.violation, s.judge(&c, srv), idle(budget, srv))
}

// modelCaller is the caller of the stream, and what it saw.
type modelCaller struct {
	stream    grpc.ClientStream
	report    Report
	finished  []error // by OnFinish
	sent      []int64 // the numbers that SendMsg took
	sentSize  int
	cutShort  bool // SendMsg said io.EOF
	numbers   []int64
	sawHeader bool  // of its two goroutines, the receiving one
	headerTo  bool  // and the sending one
	end       error // of RecvMsg
	violation error
}

func (c *modelCaller) send(s streamScenario) {
	defer c.closeSend()
	if s.method == list {
		if err := c.stream.SendMsg(&testpb.Request{Count: 5}); err != nil {
			c.violation = fmt.Errorf("SendMsg of a server stream: %w", err)
		}
		c.closeSend()
	}
	for _, op := range s.sender {
		switch op.Op {
		case "sleep":
			time.Sleep(time.Duration(op.N) * time.Millisecond)
		case "header":
			if s.method == list || s.method == syncUp && len(c.sent) > 0 { // else the server would wait for the caller
				c.headerTo = c.header() || c.headerTo
			}
		case "send":
			if s.method == list {
				continue
			}
			m := &testpb.Request{Number: int64(len(c.sent) + 1), Payload: make([]byte, op.N)}
			c.sentSize += proto.Size(m)
			err := c.stream.SendMsg(m)
			m.Number = -1 // the caller may do so: what was sent was sent
			switch err {
			case nil:
				c.sent = append(c.sent, int64(len(c.sent)+1))
			case io.EOF:
				c.cutShort = true
				return
			default:
				c.violation = fmt.Errorf("SendMsg: %w", err)
				return
			}
		}
	}
}

func (c *modelCaller) closeSend() {
	if err := c.stream.CloseSend(); err != nil {
		c.violation = fmt.Errorf("CloseSend: %w", err)
	}
}

func (c *modelCaller) receive(s streamScenario) {
	recv := func() {
		m := &testpb.Response{Items: []string{"left from before"}}
		c.end = c.stream.RecvMsg(m)
		if c.end == nil {
			c.numbers = append(c.numbers, m.Number)
		}
	}
	for _, op := range s.receiver {
		switch op.Op {
		case "sleep":
			time.Sleep(time.Duration(op.N) * time.Millisecond)
		case "header":
			c.sawHeader = c.header() || c.sawHeader
		case "recv":
			if c.end == nil {
				recv()
			}
		}
	}
	for c.end == nil {
		recv()
	}
}

// header reports whether there was one.
func (c *modelCaller) header() bool {
	md, err := c.stream.Header()
	if err != nil {
		c.violation = fmt.Errorf("Header: %w", err)
	}
	return md != nil
}

// judge compares what the caller and the server saw with what a single attempt
// that does not fail would have shown them.
func (s streamScenario) judge(c *modelCaller, srv *testsrv.Server) error {
	given := c.sawHeader || c.headerTo || len(c.numbers) > 0
	overflow := c.sentSize > s.replayBytes
	answered := slices.ContainsFunc(s.attempts, func(a serverAttempt) bool { return a.Header || a.Echo })
	attempts := srv.Attempts(s.method)
	last := &testsrv.Attempt{}
	for i := range attempts {
		last = &attempts[i]
		for k, m := range last.Requests {
			if s.method != list && m.Number != int64(k+1) {
				return fmt.Errorf("attempt %d read the request %d in place of %d", i+1, m.Number, k+1)
			}
		}
	}
	want := len(c.sent)
	switch s.method {
	case list:
		want = 5
	case store:
		if len(c.numbers) > 0 && !slices.Equal(c.numbers, []int64{int64(want)}) {
			return fmt.Errorf("responses %v, want one that counts %d requests", c.numbers, want)
		}
		want = 1
	}
	if s.method != store {
		if err := inOrder(c.numbers, len(c.numbers), 1); err != nil {
			return err
		}
	}
	switch code := status.Code(c.end); {
	case c.end == io.EOF:
		if len(c.numbers) != want {
			return fmt.Errorf("%d responses, want %d", len(c.numbers), want)
		}
		// An attempt that would have answered can time out while its caller sends.
		if n := len(s.attempts) + 1; len(attempts) < n || len(attempts) > n && s.idle+s.first == 0 {
			return fmt.Errorf("success after %d attempts, want %d", len(attempts), len(s.attempts)+1)
		}
		if s.method != list && len(last.Requests) != len(c.sent) {
			return fmt.Errorf("the server read %d requests, want %d", len(last.Requests), len(c.sent))
		}
	case s.cancelAt > 0 && (code == codes.Canceled || c.report.Reason == ReasonParentDone):
	case code != codes.Unavailable && (code != codes.DeadlineExceeded || s.idle+s.first == 0):
		return fmt.Errorf("the call ended with %w", c.end)
	case s.resume && s.method == list:
		return fmt.Errorf("the call was not resumed: %w", c.end)
	case !given && !overflow && !(c.cutShort && answered):
		return fmt.Errorf("the call was not repeated though nothing of it had been seen: %w", c.end)
	case len(attempts) > len(s.attempts) && s.idle+s.first == 0:
		return fmt.Errorf("an error though the server answered: %w", c.end)
	}
	if c.cutShort && s.cancelAt == 0 && !given && !overflow && !answered {
		return errors.New("SendMsg said io.EOF though the call could be repeated")
	}
	finish := c.end
	if finish == io.EOF {
		finish = nil
	}
	// What had arrived before the caller cancelled is still there to be read.
	late := s.cancelAt > 0 && len(c.finished) == 1 && status.Code(c.finished[0]) == codes.Canceled
	if len(c.finished) != 1 || status.Code(c.finished[0]) != status.Code(finish) && !late {
		return fmt.Errorf("OnFinish ran with %v, want once with %v", c.finished, finish)
	}
	if c.report.Made() < len(attempts) || c.report.Reason == ReasonNone {
		return fmt.Errorf("report %+v of %d attempts", c.report, len(attempts))
	}
	return nil
}

// idle reports what a call has left behind.
func idle(budget Budget, srv *testsrv.Server) error {
	if n := budget.state().InFlight; n != 0 {
		return fmt.Errorf("%d calls in flight, want 0", n)
	}
	if n := srv.Running(); n != 0 {
		return fmt.Errorf("%d handlers run on, want 0", n)
	}
	return nil
}
