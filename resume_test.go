package grpcretry

import (
	"context"
	"errors"
	"fmt"
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
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// afterLast goes on after the last message that was delivered.
func afterLast(req *testpb.Request, last *testpb.Response) (*testpb.Request, bool) {
	req.After = last.GetNumber()
	return req, true
}

// breaking is a server stream that sends n messages from where it is to begin,
// each a moment after the other, and then fails.
func breaking(n int64, code codes.Code) testsrv.Step {
	return testsrv.Step{Stream: func(stream grpc.ServerStream, request *testpb.Request) error {
		for i := range n {
			if err := stream.SendMsg(&testpb.Response{Number: request.After + i + 1}); err != nil {
				return err
			}
			time.Sleep(ms)
		}
		return status.Error(code, "broke off")
	}}
}

// begunAfter are the places from which the attempts were to begin.
func begunAfter(srv *testsrv.Server, method string) (places []int64) {
	for _, a := range srv.Attempts(method) {
		places = append(places, a.Requests[0].GetAfter())
	}
	return places
}

// A stream that breaks off goes on from where it broke off: each message once,
// whether attempts in between bring nothing, fail at once, or cannot be opened.
func TestResume(t *testing.T) {
	for name, test := range map[string]struct {
		script  testsrv.Sequence
		policy  func(*Policy)
		next    func(*testpb.Request, *testpb.Response) (*testpb.Request, bool)
		method  string
		got     []int64
		code    codes.Code
		from    []int64
		reasons []string
		elapsed time.Duration
	}{
		"once": {
			script: testsrv.Sequence{breaking(2, codes.Unavailable)}.ThenOK(),
			got:    []int64{1, 2, 3, 4, 5}, from: []int64{0, 2}, reasons: []string{"resume", "success"}, elapsed: 12 * ms,
		},
		"several times": {
			script: testsrv.Sequence{breaking(2, codes.Unavailable), breaking(1, codes.Unavailable), breaking(1, codes.Unavailable)}.ThenOK(),
			got:    []int64{1, 2, 3, 4, 5}, from: []int64{0, 2, 3, 4}, reasons: []string{"resume", "resume", "resume", "success"}, elapsed: 34 * ms,
		},
		"from nothing": { // attempts that bring nothing begin where the last message was, not where nothing was
			script: testsrv.Sequence{breaking(1, codes.Unavailable), breaking(0, codes.Unavailable), breaking(0, codes.Unavailable)}.ThenOK(),
			policy: attemptsOf(4),
			got:    []int64{1, 2, 3, 4, 5}, from: []int64{0, 1, 1, 1}, reasons: []string{"resume", "resume", "resume", "success"}, elapsed: 71 * ms,
		},
		"without an end": {
			script: testsrv.Sequence{breaking(1, codes.Unavailable), breaking(0, codes.Unavailable)},
			got:    []int64{1}, code: codes.Unavailable, from: []int64{0, 1, 1},
			reasons: []string{"resume", "resume", "attempts_exhausted"}, elapsed: 31 * ms,
		},
		"progress begins the count and the backoff anew": {
			script: testsrv.Sequence{
				breaking(1, codes.Unavailable), breaking(0, codes.Unavailable), breaking(1, codes.Unavailable), breaking(0, codes.Unavailable),
			}.ThenOK(),
			got: []int64{1, 2, 3, 4, 5}, from: []int64{0, 1, 1, 2, 2},
			reasons: []string{"resume", "resume", "resume", "resume", "success"}, elapsed: 62 * ms,
		},
		"before anything was delivered it is a retry": {
			script: testsrv.Sequence{breaking(0, codes.Unavailable), breaking(2, codes.Unavailable)}.ThenOK(),
			got:    []int64{1, 2, 3, 4, 5}, from: []int64{0, 0, 2}, reasons: []string{"retry", "resume", "success"}, elapsed: 22 * ms,
		},
		"declined": {
			script: testsrv.Sequence{breaking(2, codes.Unavailable)}.ThenOK(),
			next:   func(req *testpb.Request, _ *testpb.Response) (*testpb.Request, bool) { return req, false },
			got:    []int64{1, 2}, code: codes.Unavailable, from: []int64{0}, reasons: []string{"committed"}, elapsed: 2 * ms,
		},
		"a failure that is not retried": {
			script: testsrv.Sequence{breaking(2, codes.NotFound)}.ThenOK(),
			next: func(*testpb.Request, *testpb.Response) (*testpb.Request, bool) {
				panic("asked about a failure that is not retried")
			},
			got: []int64{1, 2}, code: codes.NotFound, from: []int64{0}, reasons: []string{"not_retryable"}, elapsed: 2 * ms,
		},
		"a method that is not known to be idempotent": {
			method: take, script: testsrv.Sequence{breaking(2, codes.Unavailable)}.ThenOK(),
			got: []int64{1, 2}, code: codes.Unavailable, from: []int64{0}, reasons: []string{"not_idempotent"}, elapsed: 2 * ms,
		},
		"retries switched off": {
			policy: attemptsOf(1), script: testsrv.Sequence{breaking(2, codes.Unavailable)}.ThenOK(),
			got: []int64{1, 2}, code: codes.Unavailable, from: []int64{0}, reasons: []string{"disabled"}, elapsed: 2 * ms,
		},
		"silence": {
			script: testsrv.Sequence{{Messages: 1, Block: true}}.ThenOK(), policy: func(p *Policy) { p.IdleTimeout = 100 * ms },
			got: []int64{1, 2, 3, 4, 5}, from: []int64{0, 1}, reasons: []string{"resume", "success"}, elapsed: 110 * ms,
		},
		"no answer after that": {
			script: testsrv.Sequence{breaking(1, codes.Unavailable), {Messages: -1, Block: true}}.ThenOK(),
			policy: func(p *Policy) { p.FirstResponseTimeout = 100 * ms },
			got:    []int64{1, 2, 3, 4, 5}, from: []int64{0, 1, 1}, reasons: []string{"resume", "resume", "success"}, elapsed: 131 * ms,
		},
		"the wait does not fit": {
			script: testsrv.Sequence{breaking(1, codes.Unavailable)}.ThenOK(), policy: func(p *Policy) { p.Timeout = 5 * ms },
			got: []int64{1}, code: codes.Unavailable, from: []int64{0}, reasons: []string{"deadline"}, elapsed: ms,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = list
				}
				if test.next == nil {
					test.next = afterLast
				}
				srv, cc := serveStreams(t, newRetrier(t, exactly(test.policy)), testsrv.Script{test.method: test.script})
				ctx, events := traced(t, t.Context())
				start := time.Now()
				stream := open(t, ctx, cc, test.method, WithResume(test.next))
				if err := stream.SendMsg(&testpb.Request{Count: 5}); err != nil {
					t.Fatal(err)
				}
				closeSend(t, stream)
				got, err := drain(receiver{stream})
				checkElapsed(t, start, test.elapsed)
				checkCode(t, err, test.code)
				if !slices.Equal(got, test.got) {
					t.Errorf("received %v, want %v", got, test.got)
				}
				if places := begunAfter(srv, test.method); !slices.Equal(places, test.from) {
					t.Errorf("the attempts began after %v, want %v", places, test.from)
				}
				checkDecisions(t, events(), test.reasons...)
			})
		})
	}
}

// receiver gives a raw stream the Recv of generated code, which makes a message
// each time.
type receiver struct{ grpc.ClientStream }

func (r receiver) Recv() (*testpb.Response, error) {
	m := new(testpb.Response)
	return m, r.RecvMsg(m)
}

// The callback is given copies, and what it returns is copied: it may change
// them, and so may the caller what it was given, into which it may receive again.
func TestResumeWorksOnCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, cc := serveStreams(t, newRetrier(t), testsrv.Script{list: testsrv.Sequence{
			breaking(1, codes.Unavailable), breaking(0, codes.Unavailable), breaking(1, codes.Unavailable),
		}.ThenOK()})
		var seen []string
		var returned *testpb.Request
		stream := open(t, t.Context(), cc, list, WithResume(func(req *testpb.Request, last *testpb.Response) (*testpb.Request, bool) {
			seen = append(seen, fmt.Sprintf("%s of %d after %d", req.Text, req.Count, last.Number))
			if returned != nil {
				returned.After = 99
			}
			req.After, req.Text, last.Number = last.Number, "changed", 99
			returned = req
			return req, true
		}))
		request := &testpb.Request{Count: 4, Text: "as sent"}
		if err := stream.SendMsg(request); err != nil {
			t.Fatal(err)
		}
		closeSend(t, stream)
		proto.Reset(request)
		var got []int64
		m := new(testpb.Response)
		for {
			err := stream.RecvMsg(m)
			if err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			got = append(got, m.Number)
			m.Number = 77
		}
		if !slices.Equal(got, []int64{1, 2, 3, 4}) {
			t.Errorf("received %v, want 1 2 3 4", got)
		}
		if want := []string{"as sent of 4 after 1", "as sent of 4 after 1", "as sent of 4 after 2"}; !slices.Equal(seen, want) {
			t.Errorf("the callback saw %q, want %q", seen, want)
		}
		if places := begunAfter(srv, list); !slices.Equal(places, []int64{0, 1, 1, 2}) {
			t.Errorf("the attempts began after %v, want 0 1 1 2", places)
		}
	})
}

// Who asked for the header has been given something, but no message: the stream
// begins again with the first request, and nobody need be asked about nothing.
func TestResumeAfterTheHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, cc := serveStreams(t, newRetrier(t), testsrv.Script{list: testsrv.Sequence{
			{SendHeaderFirst: true, Header: metadata.Pairs("from", "first"), Delay: ms, Messages: -1, Code: codes.Unavailable},
			{Header: metadata.Pairs("from", "second")},
		}})
		stream := open(t, t.Context(), cc, list, WithResume(func(*testpb.Request, *testpb.Response) (*testpb.Request, bool) {
			t.Error("asked though nothing was delivered")
			return nil, false
		}))
		send(t, stream, 1)
		closeSend(t, stream)
		for range 2 { // the header that was given stays the header
			if md, err := stream.Header(); err != nil || !slices.Equal(md.Get("from"), []string{"first"}) {
				t.Errorf("Header = %v, %v; want that of the first attempt", md, err)
			}
			if got, err := drain(receiver{stream}); err != nil || len(got) != 0 && !slices.Equal(got, []int64{1, 2, 3}) {
				t.Errorf("received %v, %v; want 1 2 3", got, err)
			}
		}
		if n := srv.Count(list); n != 2 {
			t.Errorf("%d attempts, want 2", n)
		}
	})
}

// A server that is gone must not be hammered by the streams that it had: they
// reopen by the schedule, and stop with the call's time.
func TestResumeFollowsTheSchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv, cc := serveStreams(t, newRetrier(t, exactly(func(p *Policy) {
			p.MaxAttempts, p.Timeout = 1000, 2*time.Second
			p.Backoff.Base, p.Backoff.Max = 100*ms, 400*ms
		})), testsrv.Script{list: testsrv.Sequence{{Messages: 1, Block: true}}})
		var report Report
		start := time.Now()
		stream := open(t, t.Context(), cc, list, WithResume(afterLast), WithReport(&report))
		send(t, stream, 1)
		closeSend(t, stream)
		recv(t, stream)
		srv.Kill()
		err := end(t, stream)
		checkCode(t, err, codes.Unavailable)
		var at []time.Duration
		for _, a := range report.Attempts {
			at = append(at, a.Start.Sub(start))
		}
		want := []time.Duration{0, 100 * ms, 300 * ms, 700 * ms, 1100 * ms, 1500 * ms, 1900 * ms}
		if !slices.Equal(at, want) {
			t.Errorf("attempts at %v, want %v", at, want)
		}
		checkElapsed(t, start, 1900*ms) // the next wait would not fit
		checkCall(t, &report, len(want), ReasonDeadline)
		if last := report.Attempts[1]; last.Evidence != Unsent {
			t.Errorf("evidence %v of an attempt for which there was no connection, want unsent", last.Evidence)
		}
	})
}

// A server that sends one message and then hangs, fifty times: each attempt that
// was given up must be over on the server too, or they pile up there.
func TestResumeLeavesNoAttemptBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const resumes = 50
		budget := newBudget(t)
		srv, cc := serveStreams(t, newRetrier(t, WithBudget(budget), exactly(func(p *Policy) { p.IdleTimeout = 100 * ms })),
			testsrv.Script{list: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
				if nth <= resumes {
					return testsrv.Step{Stream: func(stream grpc.ServerStream, request *testpb.Request) error {
						if err := stream.SendMsg(&testpb.Response{Number: request.After + 1}); err != nil {
							return err
						}
						<-stream.Context().Done()
						return stream.Context().Err()
					}}
				}
				return testsrv.Step{}
			})})
		if err := budget.Rescale(BudgetConfig{Capacity: 1000}); err != nil {
			t.Fatal(err)
		}
		ctx, events := traced(t, t.Context())
		var report Report
		stream := open(t, ctx, cc, list, WithResume(afterLast), WithReport(&report))
		if err := stream.SendMsg(&testpb.Request{Count: resumes + 1}); err != nil {
			t.Fatal(err)
		}
		closeSend(t, stream)
		got, err := drain(receiver{stream})
		if err := errors.Join(err, inOrder(got, resumes+1, 1)); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		for _, a := range srv.Attempts(list)[:resumes] {
			if a.Ended.IsZero() || a.ContextErr != context.Canceled {
				t.Errorf("attempt %d ended with %v, want its context cancelled", a.Number, a.ContextErr)
			}
		}
		checkCall(t, &report, resumes+1, ReasonSuccess)
		all := events()
		if len(all) != 32 || all[31]["grpcretry.attempt.dropped"] != int64(resumes+1-32) || all[31]["grpcretry.attempt.number"] != int64(resumes+1) {
			t.Errorf("%d events, the last %v; want the first 31 and the last, with the number left out", len(all), all[len(all)-1])
		}
	})
}

// Resuming is extra load like any other, so the budget bounds it, also where
// every attempt delivers something before it fails.
func TestResumeIsPaidFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, cc := serveStreams(t, newRetrier(t, exactly(func(p *Policy) { p.Backoff = atOnce })), testsrv.Script{list: testsrv.Sequence{breaking(1, codes.Unavailable)}})
		var report Report
		stream := open(t, t.Context(), cc, list, WithResume(afterLast), WithReport(&report))
		if err := stream.SendMsg(&testpb.Request{Count: 1000}); err != nil {
			t.Fatal(err)
		}
		closeSend(t, stream)
		got, err := drain(receiver{stream})
		checkCode(t, err, codes.Unavailable)
		if len(got) != 11 || !errors.Is(err, ErrBudgetExhausted) { // ten resumptions
			t.Errorf("%d messages, then %v; want 11 and a budget that is exhausted", len(got), err)
		}
		checkCall(t, &report, 11, ReasonBudgetExhausted)
	})
}

// A callback for other messages than those of the call would fail only when the
// stream breaks, that is, in production. It must fail at once and say why.
func TestResumeOfOtherMessages(t *testing.T) {
	for name, test := range map[string]struct {
		option grpc.CallOption
		want   string
	}{
		"nil":           {WithResume[*testpb.Request, *testpb.Response](nil), "grpcretry: WithResume: callback is nil, want a function"},
		"other request": {WithResume(func(r *testpb.Response, _ *testpb.Response) (*testpb.Response, bool) { return r, true }), "grpcretry: WithResume: the request is a *testpb.Request, want *testpb.Response as in the callback"},
		"other message": {WithResume(func(r *testpb.Request, _ *testpb.Request) (*testpb.Request, bool) { return r, true }), "grpcretry: WithResume: the message is a *testpb.Response, want *testpb.Request as in the callback"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := newBudget(t)
				srv, client := serve(t, newRetrier(t, WithBudget(budget)), nil)
				finished := 0
				stream, err := client.List(t.Context(), &testpb.Request{Count: 3}, test.option, grpc.OnFinish(func(error) { finished++ }))
				if err == nil {
					_, err = stream.Recv()
				}
				if st := status.Convert(err); st.Code() != codes.Internal || !strings.HasPrefix(st.Message(), test.want) {
					t.Errorf("error %v, want INTERNAL: %s", err, test.want)
				}
				synctest.Wait()
				if n, m := budget.state().InFlight, srv.Running(); n != 0 || m != 0 || finished != 1 {
					t.Errorf("%d calls in flight and %d handlers left, OnFinish ran %d times; want 0, 0 and 1", n, m, finished)
				}
			})
		})
	}
}

// On other calls the option does nothing, so that it can be a default of a connection.
func TestResumeElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		option := grpc.WithDefaultCallOptions(WithResume[*testpb.Response, *testpb.Request](nil))
		_, cc := serveStreams(t, newRetrier(t), nil, option)
		client := testpb.NewTestServiceClient(cc)
		if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Error(err)
		}
		up, err := client.Store(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := up.CloseAndRecv(); err != nil {
			t.Error(err)
		}
		both, err := client.Sync(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		closeSend(t, both)
		if _, err := drain(both); err != nil {
			t.Error(err)
		}
	})
}

// A caller who leaves in the wait for a resumption gets the error of its
// context, with what the server said within, and nothing is left behind.
func TestResumeCancelledInTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		budget := newBudget(t)
		srv, cc := serveStreams(t, newRetrier(t, WithBudget(budget), exactly(func(p *Policy) { p.Backoff.Base = time.Second })),
			testsrv.Script{list: testsrv.Sequence{breaking(1, codes.Unavailable)}})
		ctx, cancel := context.WithCancel(t.Context())
		stream := open(t, ctx, cc, list, WithResume(afterLast))
		send(t, stream, 1)
		closeSend(t, stream)
		recv(t, stream)
		time.AfterFunc(500*ms, cancel)
		start := time.Now()
		err := end(t, stream)
		checkElapsed(t, start, 500*ms)
		var e *Error
		if status.Code(err) != codes.Canceled || !errors.As(err, &e) || status.Code(e.Unwrap()) != codes.Unavailable || e.Reason != ReasonParentDone {
			t.Errorf("error %v, want CANCELLED around the server's", err)
		}
		if got := budget.state(); got.InFlight != 0 || got.Tokens != 70 {
			t.Errorf("budget %+v, want what was reserved given back", got)
		}
		if n := srv.Count(list); n != 1 {
			t.Errorf("%d attempts, want 1", n)
		}
	})
}

// A struct around a message is more than the copies of messages that a callback
// is given. Without a copy there is no going on, and the caller gets the error.
func TestResumeOfAStructAroundAMessage(t *testing.T) {
	type around struct{ *testpb.Response }
	synctest.Test(t, func(t *testing.T) {
		srv, cc := serveStreams(t, newRetrier(t, exactly(nil)), testsrv.Script{list: testsrv.Sequence{{Messages: 1, Code: codes.Unavailable}}.ThenOK()})
		stream := open(t, t.Context(), cc, list, WithResume(func(r *testpb.Request, last *around) (*testpb.Request, bool) {
			r.After = last.Number
			return r, true
		}))
		send(t, stream, 1)
		closeSend(t, stream)
		if err := stream.RecvMsg(&around{new(testpb.Response)}); err != nil {
			t.Fatal(err)
		}
		checkCode(t, stream.RecvMsg(&around{new(testpb.Response)}), codes.Unavailable)
		if n := srv.Count(list); n != 1 {
			t.Errorf("%d attempts, want 1", n)
		}
	})
}
