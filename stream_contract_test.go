package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Before a stream is committed its context is the caller's: what the caller put
// in is there, and asking for it commits nothing. Afterwards it is that of the
// attempt, with its peer, and ends with it.
func TestStreamContext(t *testing.T) {
	type key struct{}
	synctest.Test(t, func(t *testing.T) {
		srv, cc := serveStreams(t, newRetrier(t), testsrv.Script{syncUp: testsrv.Sequence{{Receive: 1, NoEcho: true, Code: codes.Unavailable}}.ThenOK()})
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "mine"), time.Hour)
		defer cancel()
		want, _ := ctx.Deadline()
		check := func(when string, stream grpc.ClientStream) {
			t.Helper()
			got := stream.Context()
			if deadline, ok := got.Deadline(); !ok || !deadline.Equal(want) || got.Value(key{}) != "mine" || got.Value(t) != nil || got.Err() != nil {
				t.Errorf("%s: context %v, want one with the caller's deadline and value", when, got)
			}
		}
		stream := open(t, ctx, cc, syncUp)
		check("opened", stream)
		early := stream.Context()
		send(t, stream, 1)
		check("sent", stream)
		recv(t, stream)
		check("committed", stream)
		if p, ok := peer.FromContext(stream.Context()); !ok || p.Addr.String() != "testsrv" {
			t.Errorf("peer %v in the context of a committed stream, want that of the attempt", p)
		}
		closeSend(t, stream)
		if err := end(t, stream); err != nil {
			t.Error(err)
		}
		if stream.Context().Err() == nil {
			t.Error("the context of the attempt is alive after its end")
		}
		if early.Err() == nil {
			t.Error("the context that was asked for early is alive after the end of the stream")
		}
		if ctx.Err() != nil {
			t.Error("the caller's own context ended with the stream")
		}
		if n := srv.Count(syncUp); n != 2 {
			t.Errorf("%d attempts, want 2: asking for the context committed the stream", n)
		}
	})
}

// Header may be asked for beside RecvMsg. A sender that waits for the header
// before it sends more hangs if it has to wait for the receiver, whose message
// comes only after that.
func TestHeaderBesideRecvMsg(t *testing.T) {
	header := testsrv.Step{SendHeaderFirst: true, Header: metadata.Pairs("k", "v")}
	for name, test := range map[string]struct {
		script testsrv.Sequence
		before bool // something is sent before the header is asked for
		code   codes.Code
	}{
		"at once":       {script: testsrv.Sequence{header}},
		"after a retry": {script: testsrv.Sequence{{Receive: 1, NoEcho: true, Code: codes.Unavailable}, header}, before: true},
		"none":          {script: testsrv.Sequence{{Receive: 1, NoEcho: true, Code: codes.NotFound}}, before: true, code: codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, cc := serveStreams(t, newRetrier(t, exactly(nil)), testsrv.Script{syncUp: test.script})
				stream := open(t, t.Context(), cc, syncUp)
				received := make(chan error)
				go func() { received <- stream.RecvMsg(new(testpb.Response)) }()
				synctest.Wait()
				if test.before {
					send(t, stream, 1)
				}
				for range 2 {
					md, err := stream.Header()
					if want := test.code == codes.OK; err != nil || slices.Equal(md.Get("k"), []string{"v"}) != want || (md != nil) != want {
						t.Errorf("Header = %v, %v; want that of the server: %v", md, err, want)
					}
				}
				if !test.before {
					send(t, stream, 1)
				}
				checkCode(t, <-received, test.code)
				closeSend(t, stream)
				checkCode(t, end(t, stream), test.code)
			})
		})
	}
}

// What a stream has after its end stays the same however often it is asked for,
// and CloseSend may be called at any time.
func TestStreamAfterItsEnd(t *testing.T) {
	for name, step := range map[string]testsrv.Step{
		"success":            {Header: metadata.Pairs("h", "1"), Trailer: metadata.Pairs("t", "1")},
		"failure":            {Header: metadata.Pairs("h", "1"), SendHeaderFirst: true, Trailer: metadata.Pairs("t", "1"), Code: codes.NotFound},
		"failure at once":    {Receive: -1, Trailer: metadata.Pairs("t", "1"), Code: codes.NotFound},
		"failure after some": {Messages: 1, Trailer: metadata.Pairs("t", "1"), Code: codes.NotFound},
	} {
		for _, method := range []string{syncUp, chat} {
			t.Run(name+"/"+method[strings.LastIndex(method, "/")+1:], func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					_, cc := serveStreams(t, newRetrier(t), testsrv.Script{method: testsrv.Sequence{step}})
					stream := open(t, t.Context(), cc, method)
					if md := stream.Trailer(); md != nil {
						t.Errorf("Trailer = %v before the end", md)
					}
					closeSend(t, stream)
					closeSend(t, stream)
					_, first := drain(receiver{stream})
					checkCode(t, first, step.Code)
					for range 3 {
						_, again := drain(receiver{stream})
						if again != first {
							t.Errorf("RecvMsg = %v, want %v as before", again, first)
						}
						md, err := stream.Header()
						if wantHeader := name != "failure at once"; (md != nil) != wantHeader || err != nil {
							t.Errorf("Header = %v, %v", md, err)
						}
						if got := stream.Trailer().Get("t"); !slices.Equal(got, []string{"1"}) {
							t.Errorf("Trailer has %v, want 1", got)
						}
						closeSend(t, stream)
						if err := stream.SendMsg(&testpb.Request{}); err == nil {
							t.Error("SendMsg after the end = nil")
						}
					}
				})
			})
		}
	}
}

// The destinations in the call options are those of the attempt that is
// returned; what an earlier one left must not show, and OnFinish runs once.
func TestStreamCallOptions(t *testing.T) {
	first := testsrv.Step{SendHeaderFirst: true, Header: metadata.Pairs("h", "1"), Messages: -1, Code: codes.Unavailable, Trailer: metadata.Pairs("t", "1", "k", "1")}
	second := testsrv.Step{Header: metadata.Pairs("h", "2"), Trailer: metadata.Pairs("t", "2")}
	for name, test := range map[string]struct {
		script          testsrv.Sequence
		kill            bool
		code            codes.Code
		header, trailer []string
		peer            bool
	}{
		"at once":              {script: testsrv.Sequence{second}, header: []string{"2"}, trailer: []string{"2"}, peer: true},
		"after a retry":        {script: testsrv.Sequence{first, second}, header: []string{"2"}, trailer: []string{"2"}, peer: true},
		"in vain":              {script: testsrv.Sequence{first}, code: codes.Unavailable, header: []string{"1"}, trailer: []string{"1"}, peer: true},
		"then it was not sent": {script: testsrv.Sequence{first}, kill: true, code: codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, cc := serveStreams(t, newRetrier(t, exactly(nil)), testsrv.Script{list: test.script})
				header, trailer := metadata.Pairs("left", "over"), metadata.Pairs("left", "over")
				from := peer.Peer{Addr: &net.IPAddr{}}
				var finished []error
				stream := open(t, t.Context(), cc, list, grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&from),
					grpc.OnFinish(func(err error) { finished = append(finished, err) }))
				send(t, stream, 1)
				closeSend(t, stream)
				if test.kill {
					synctest.Wait()
					srv.Kill()
				}
				_, err := drain(receiver{stream})
				checkCode(t, err, test.code)
				if len(finished) != 1 || status.Code(finished[0]) != test.code {
					t.Errorf("OnFinish ran with %v, want once with %v", finished, test.code)
				}
				if got := header.Get("h"); !slices.Equal(got, test.header) || header.Get("left") != nil {
					t.Errorf("header %v, want h=%v", header, test.header)
				}
				if got := trailer.Get("t"); !slices.Equal(got, test.trailer) || trailer.Get("left") != nil || test.header != nil && test.header[0] == "2" && trailer.Get("k") != nil {
					t.Errorf("trailer %v, want t=%v", trailer, test.trailer)
				}
				if (from.Addr != nil) != test.peer {
					t.Errorf("peer %v", from.Addr)
				}
			})
		})
	}
}

// A method that nobody knows to be idempotent is retried where no attempt of it
// left the client, and otherwise passes through as it is, of whatever kind.
func TestStreamsThatAreNotRepeated(t *testing.T) {
	for _, method := range []string{take, appendOnly, chat} {
		t.Run(method[strings.LastIndex(method, "/")+1:], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv, cc := serveStreams(t, newRetrier(t, exactly(attemptsOf(20))), testsrv.Script{method: testsrv.Sequence{{Receive: 1, NoEcho: true, Messages: -1, Code: codes.Unavailable}}})
				srv.Kill()
				time.AfterFunc(15*ms, func() {
					if err := srv.Restart(); err != nil {
						t.Error(err)
					}
				})
				ctx, events := traced(t, t.Context())
				stream := open(t, ctx, cc, method)
				send(t, stream, 1)
				closeSend(t, stream)
				err := end(t, stream)
				checkCode(t, err, codes.Unavailable)
				if n := srv.Count(method); n != 1 {
					t.Errorf("%d attempts reached the server, want 1", n)
				}
				all := events()
				for i, e := range all {
					want := "unsent"
					if i == len(all)-1 {
						want = "answered"
					}
					if e["grpcretry.attempt.sent"] != want {
						t.Errorf("attempt %d: %v, want %s", i+1, e["grpcretry.attempt.sent"], want)
					}
				}
				if words := decisions(all); len(words) < 2 || words[len(words)-1] != "not_idempotent" || words[0] != "retry" {
					t.Errorf("decisions %v, want retries of what was unsent, then not_idempotent", words)
				}
			})
		})
	}
}

// Switching retries off must do so for streams too, and two Retriers in a chain
// must not multiply their attempts.
func TestStreamSwitches(t *testing.T) {
	for name, test := range map[string]struct {
		policy   func(*Policy)
		options  []grpc.CallOption
		twice    bool
		attempts int
		reason   Reason
	}{
		"by default":      {attempts: 3, reason: ReasonAttemptsExhausted},
		"WithoutRetry":    {options: []grpc.CallOption{WithoutRetry()}, attempts: 1, reason: ReasonDisabled},
		"MaxAttempts 1":   {policy: attemptsOf(1), attempts: 1, reason: ReasonDisabled},
		"WithCallPolicy":  {options: []grpc.CallOption{WithCallPolicy(attemptsOf(2))}, attempts: 2, reason: ReasonAttemptsExhausted},
		"two Retriers":    {twice: true, attempts: 3, reason: ReasonAttemptsExhausted},
		"NotIdempotent":   {policy: func(p *Policy) { p.Idempotency = NotIdempotent }, attempts: 1, reason: ReasonNotIdempotent},
		"RetryIf":         {policy: func(p *Policy) { p.RetryIf = func(Attempt) Verdict { return VerdictStop } }, attempts: 1, reason: ReasonRetryIfStop},
		"Codes":           {policy: func(p *Policy) { p.Codes = Codes(codes.Aborted) }, attempts: 1, reason: ReasonNotRetryable},
		"the key is kept": {options: []grpc.CallOption{WithIdempotencyKey("order-1")}, attempts: 3, reason: ReasonAttemptsExhausted},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var opts []grpc.DialOption
				if test.twice {
					opts = newRetrier(t, exactly(nil)).DialOptions()
				}
				srv, cc := serveStreams(t, newRetrier(t, exactly(test.policy)), testsrv.Script{syncUp: testsrv.Sequence{{Receive: 1, NoEcho: true, Code: codes.Unavailable}}}, opts...)
				var report Report
				stream := open(t, t.Context(), cc, syncUp, append(test.options, WithReport(&report))...)
				send(t, stream, 1)
				checkCode(t, end(t, stream), codes.Unavailable)
				if n := srv.Count(syncUp); n != test.attempts {
					t.Errorf("%d attempts, want %d", n, test.attempts)
				}
				checkCall(t, &report, test.attempts, test.reason)
				for _, a := range srv.Attempts(syncUp) {
					if got := a.Metadata.Get(keyHeader); name == "the key is kept" && !slices.Equal(got, []string{"order-1"}) {
						t.Errorf("attempt %d has the key %v", a.Number, got)
					}
				}
			})
		})
	}
	t.Run("a bad edit", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			srv, cc := serveStreams(t, newRetrier(t), nil)
			_, err := cc.NewStream(t.Context(), streamDesc(list), list, WithCallPolicy(attemptsOf(-1)))
			if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "Policy.MaxAttempts = -1") {
				t.Errorf("error %v, want INTERNAL that names the field", err)
			}
			if n := srv.Count(""); n != 0 {
				t.Errorf("%d attempts, want none", n)
			}
		})
	})
}

// Messages that cannot be kept commit the stream, and the event says so; the
// stream itself works as ever.
func TestStreamsThatCannotBeReplayed(t *testing.T) {
	for name, test := range map[string]struct {
		send    func(grpc.ClientStream) error
		options []grpc.CallOption
		cause   string
	}{
		"a PreparedMsg": {
			send: func(stream grpc.ClientStream) error {
				m := new(grpc.PreparedMsg)
				return errors.Join(m.Encode(stream, &testpb.Request{Number: 1}), stream.SendMsg(m))
			},
			cause: "prepared_message",
		},
		"bytes of a codec": {
			send: func(stream grpc.ClientStream) error {
				b, err := proto.Marshal(&testpb.Request{Number: 1})
				return errors.Join(err, stream.SendMsg(&rawMessage{b}))
			},
			options: []grpc.CallOption{grpc.ForceCodec(rawCodec{})},
			cause:   "not_proto",
		},
		"a struct around a message": { // which passes for the message, but a copy would lose the rest
			send: func(stream grpc.ClientStream) error {
				return stream.SendMsg(&envelope{Request: new(testpb.Request), number: 1})
			},
			options: []grpc.CallOption{grpc.ForceCodec(rawCodec{})},
			cause:   "not_proto",
		},
		"more than ReplayBytes": {
			send: func(stream grpc.ClientStream) error {
				return stream.SendMsg(&testpb.Request{Number: 1, Payload: make([]byte, 100)})
			},
			cause: "replay_bytes",
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, step := range []testsrv.Step{{Receive: 1, NoEcho: true, Code: codes.Unavailable}, {}} {
				synctest.Test(t, func(t *testing.T) {
					srv, cc := serveStreams(t, newRetrier(t, exactly(func(p *Policy) { p.ReplayBytes = 100 })), testsrv.Script{syncUp: testsrv.Sequence{step}.ThenOK()})
					ctx, events := traced(t, t.Context())
					stream := open(t, ctx, cc, syncUp, test.options...)
					if err := test.send(stream); err != nil {
						t.Fatal(err)
					}
					closeSend(t, stream)
					var err error
					for err == nil {
						err = stream.RecvMsg(new(testpb.Response))
					}
					want := "success"
					if step.Code != codes.OK {
						want = "committed"
						checkCode(t, err, step.Code)
					} else if err != io.EOF {
						t.Error(err)
					}
					checkRead(t, srv, syncUp, []int64{1})
					all := events()
					checkDecisions(t, all, want)
					if all[0]["grpcretry.commit.cause"] != test.cause {
						t.Errorf("committed for %v, want %s", all[0]["grpcretry.commit.cause"], test.cause)
					}
				})
			}
		})
	}
}

// rawCodec is one of those by which proxies pass messages on as they are.
type rawCodec struct{}

type rawMessage struct{ data []byte }

// envelope is a message with something beside it that the codec knows about.
type envelope struct {
	*testpb.Request
	number int64
}

func (rawCodec) Name() string { return "proto" }
func (rawCodec) Marshal(v any) ([]byte, error) {
	switch m := v.(type) {
	case *rawMessage:
		return m.data, nil
	case *envelope:
		return proto.Marshal(&testpb.Request{Number: m.number})
	case proto.Message:
		return proto.Marshal(m)
	}
	return nil, fmt.Errorf("a %T", v)
}
func (rawCodec) Unmarshal(data []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("a %T", v)
	}
	return proto.Unmarshal(data, m)
}

// A callback that panics takes its caller along, and nothing else: the stream
// has ended, its call too, and who else waits for it is told.
func TestStreamPanics(t *testing.T) {
	for _, in := range []string{"RetryIf", "Func", "AttemptEnd", "RetryScheduled", "CallEnd", "OnFinish", "resume"} {
		t.Run(in, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fail := func(where string) {
					if where == in {
						panic("in " + where)
					}
				}
				budget := newBudget(t)
				r := newRetrier(t, WithBudget(budget), WithDefaultPolicy(Policy{
					RetryIf: func(Attempt) Verdict { fail("RetryIf"); return VerdictDefault },
					Backoff: Backoff{Func: func(int, time.Duration, Attempt) time.Duration { fail("Func"); return 0 }},
				}), WithHooks(Hooks{
					AttemptEnd:     func(context.Context, Attempt) { fail("AttemptEnd") },
					RetryScheduled: func(context.Context, Attempt) { fail("RetryScheduled") },
					CallEnd:        func(context.Context, Report, any, error) { fail("CallEnd") },
				}))
				first := refusing(1, codes.Unavailable)
				if in == "resume" {
					first = testsrv.Sequence{breaking(1, codes.Unavailable)}
				}
				srv, cc := serveStreams(t, r, testsrv.Script{list: first.ThenOK()})
				stream := open(t, t.Context(), cc, list, grpc.OnFinish(func(error) { fail("OnFinish") }),
					WithResume(func(req *testpb.Request, _ *testpb.Response) (*testpb.Request, bool) {
						fail("resume")
						return req, true
					}))
				send(t, stream, 1)
				closeSend(t, stream)
				func() {
					defer func() {
						if r := recover(); r != "in "+in {
							t.Errorf("recovered %v, want the panic of %s", r, in)
						}
					}()
					_, err := drain(receiver{stream})
					t.Errorf("the stream ended with %v, want a panic", err)
				}()
				if err := stream.RecvMsg(new(testpb.Response)); status.Code(err) != codes.Internal {
					t.Errorf("RecvMsg after the panic = %v, want INTERNAL", err)
				}
				if md, err := stream.Header(); err != nil {
					t.Errorf("Header after the panic = %v, %v", md, err)
				}
				_ = stream.SendMsg(&testpb.Request{})
				closeSend(t, stream)
				synctest.Wait()
				if got := budget.state(); got.InFlight != 0 {
					t.Errorf("%d calls in flight", got.InFlight)
				}
				if n := srv.Running(); n != 0 {
					t.Errorf("%d handlers left", n)
				}
			})
		})
	}
}

// oddStream is a stream of an interceptor further in that does not do as gRPC does.
type oddStream struct {
	grpc.ClientStream
	recv func(grpc.ClientStream, any) error
}

func (s oddStream) RecvMsg(m any) error { return s.recv(s.ClientStream, m) }

// Interceptors further in do what they like: they lose our call options, give
// other errors than gRPC's, fail after the stream is open, or give no stream at
// all. None of that may hang a call, leak it, or have it repeated wrongly.
func TestStreamOddInterceptors(t *testing.T) {
	type opener func(opts []grpc.CallOption) (grpc.ClientStream, error)
	mapped := errors.New("mapped")
	for name, test := range map[string]struct {
		inner  func(open opener, opts []grpc.CallOption) (grpc.ClientStream, error)
		method string
		script testsrv.Sequence
		got    []int64
		code   codes.Code
		err    error
		counts int // of attempts at the server
		open   bool
	}{
		"loses the options": {
			inner:  func(open opener, _ []grpc.CallOption) (grpc.ClientStream, error) { return open(nil) },
			script: refusing(2, codes.Unavailable).ThenOK(), got: []int64{1, 2, 3}, counts: 3,
		},
		"maps errors": {
			inner: func(open opener, opts []grpc.CallOption) (grpc.ClientStream, error) {
				stream, err := open(opts)
				return oddStream{stream, func(s grpc.ClientStream, m any) error {
					if err := s.RecvMsg(m); err != nil && err != io.EOF {
						return mapped
					} else {
						return err
					}
				}}, err
			},
			script: refusing(1, codes.Unavailable).ThenOK(), code: codes.Unknown, err: mapped, counts: 1,
		},
		"fails once the stream is open, of a write": { // UNAVAILABLE with no peer, but the server has it
			inner: func(open opener, opts []grpc.CallOption) (grpc.ClientStream, error) {
				stream, err := open(opts)
				if err != nil {
					return nil, err
				}
				if err := errors.Join(stream.SendMsg(&testpb.Request{}), stream.CloseSend()); err != nil {
					return nil, err
				}
				for err == nil {
					err = stream.RecvMsg(new(testpb.Response))
				}
				return nil, status.Error(codes.Unavailable, "made up")
			},
			method: take, code: codes.Unavailable, counts: 1, open: true,
		},
		"no stream and no error": {
			inner: func(opener, []grpc.CallOption) (grpc.ClientStream, error) { return nil, nil },
			code:  codes.Internal, open: true,
		},
		"its own error, no call": {
			inner:  func(opener, []grpc.CallOption) (grpc.ClientStream, error) { return nil, mapped },
			method: take, code: codes.Unknown, err: mapped, open: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = list
				}
				budget := newBudget(t)
				srv, cc := serveStreams(t, newRetrier(t, WithBudget(budget)), testsrv.Script{test.method: test.script}, grpc.WithChainStreamInterceptor(
					func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
						return test.inner(func(opts []grpc.CallOption) (grpc.ClientStream, error) {
							return streamer(ctx, desc, cc, method, opts...)
						}, opts)
					}))
				var report Report
				finished := 0
				stream, err := cc.NewStream(t.Context(), streamDesc(test.method), test.method, WithReport(&report), grpc.OnFinish(func(error) { finished++ }))
				if (err != nil) != test.open {
					t.Fatalf("NewStream: %v", err)
				}
				var got []int64
				if err == nil {
					send(t, stream, 1)
					closeSend(t, stream)
					got, err = drain(receiver{stream})
				}
				if !slices.Equal(got, test.got) || status.Code(err) != test.code || test.err != nil && err != test.err {
					t.Errorf("received %v, %v; want %v, %v", got, err, test.got, test.code)
				}
				synctest.Wait()
				if n := srv.Count(test.method); n != test.counts {
					t.Errorf("%d attempts, want %d", n, test.counts)
				}
				if got := budget.state(); got.InFlight != 0 || finished != 1 || report.Made() == 0 {
					t.Errorf("%d calls in flight, OnFinish ran %d times, report %+v", got.InFlight, finished, report)
				}
			})
		})
	}
}

// A message that cannot be sent fails every attempt alike. Who retries the stream
// because the code is one of the policy's, though another goroutine was told that
// its SendMsg failed, makes attempts in vain, and tells two stories of one call.
func TestMessageThatCannotBeSentBesideReceiver(t *testing.T) {
	bad := &testpb.Request{Text: "\xff is no UTF-8"}
	for _, method := range []string{syncUp, store} {
		for name, first := range map[string]bool{"as the first message": true, "after others": false} {
			t.Run(method+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRetrier(t, WithDefaultPolicy(Policy{Codes: Codes(codes.Internal, codes.Unavailable), Backoff: Backoff{Base: ms, Jitter: NoJitter}}))
					srv, cc := serveStreams(t, r, testsrv.Script{method: testsrv.Sequence{{NoEcho: true}}})
					ctx, events := traced(t, t.Context())
					stream, err := cc.NewStream(ctx, streamDesc(method), method)
					if err != nil {
						t.Fatal(err)
					}
					received := make(chan error)
					go func() { received <- stream.RecvMsg(new(testpb.Response)) }()
					synctest.Wait()
					if !first {
						if err := stream.SendMsg(&testpb.Request{}); err != nil {
							t.Fatal(err)
						}
					}
					checkCode(t, stream.SendMsg(bad), codes.Internal)
					if err := <-received; status.Code(err) == codes.OK {
						t.Error("received an answer")
					}
					synctest.Wait()
					checkDecisions(t, events(), "permanent")
					if n := srv.Count(method); n != 1 || srv.Running() != 0 {
						t.Errorf("%d attempts, %d run; want 1 and none", n, srv.Running())
					}
				})
			})
		}
	}
}
