package grpcretry

import (
	"context"
	"io"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry/internal/testsrv/testpb"
)

// fakeStream is a stream of grpc that does nothing: it delivers messages until
// they are used up, and then ends.
type fakeStream struct {
	ctx      context.Context
	single   bool // the first message is the last, and ends it
	messages int
	end      error // nil: io.EOF
	finish   func(error)
	trailer  metadata.MD
}

func (s *fakeStream) Header() (metadata.MD, error) { return s.trailer, nil }
func (s *fakeStream) Trailer() metadata.MD         { return s.trailer }
func (s *fakeStream) CloseSend() error             { return nil }
func (s *fakeStream) Context() context.Context     { return s.ctx }
func (s *fakeStream) SendMsg(any) error            { return nil }
func (s *fakeStream) RecvMsg(any) error {
	s.messages--
	if s.messages < 0 || s.single {
		s.finish(s.end)
	}
	if s.messages < 0 && s.end != nil {
		return s.end
	}
	if s.messages < 0 {
		return io.EOF
	}
	return nil
}

// fakeStreamer opens the one fake stream again and again.
func fakeStreamer(s *fakeStream) grpc.Streamer {
	return func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		s.ctx, s.finish = ctx, func(error) {}
		for _, o := range opts {
			if o, ok := o.(grpc.OnFinishCallOption); ok {
				s.finish = o.OnFinish
			}
		}
		return s, nil
	}
}

// A stream costs a constant: what a call needs that any goroutine may still ask
// for, so that nothing of it can be pooled. It may carry any number of messages,
// so each of them must cost nothing.
func TestStreamCost(t *testing.T) {
	const (
		// The stream with its call in it, the attempt, its context (2), the
		// destinations, and the OnFinish with what it needs (3);
		plain = 8
		// and where it may have to be sent again the log: its list, its bytes.
		logged = plain + 2
	)
	cc, err := grpc.NewClient("passthrough:///unused", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	for name, test := range map[string]struct {
		method string
		want   float64
	}{
		"a server stream":           {list, logged},
		"one never to be repeated":  {take, plain},
		"a bidirectional stream":    {syncUp, logged},
		"one never to be repeated ": {chat, plain},
		"a client stream":           {store, logged},
	} {
		t.Run(name, func(t *testing.T) {
			desc := streamDesc(test.method)
			open := newRetrier(t).StreamClientInterceptor()
			fake := &fakeStream{single: !desc.ServerStreams}
			streamer := fakeStreamer(fake)
			request, response := &testpb.Request{Number: 1}, &testpb.Response{}
			run := func(messages int) {
				fake.messages = messages
				stream, err := open(t.Context(), desc, cc, test.method, streamer)
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(request); err != nil {
					t.Fatal(err)
				}
				if err := stream.CloseSend(); err != nil {
					t.Fatal(err)
				}
				for err == nil {
					if err = stream.RecvMsg(response); !desc.ServerStreams {
						break
					}
				}
				if desc.ServerStreams && err != io.EOF || fake.messages >= 0 && desc.ServerStreams {
					t.Fatalf("RecvMsg = %v with %d messages left", err, fake.messages)
				}
			}
			few := testing.AllocsPerRun(200, func() { run(3) })
			if few != test.want {
				t.Errorf("%v allocations for a stream, want %v", few, test.want)
			}
			if many := testing.AllocsPerRun(20, func() { run(3000) }); many != few {
				t.Errorf("%v allocations for a stream of 3000 messages and %v for one of 3, want the same", many, few)
			}
		})
	}
}

// The sending side of a committed stream is as free as the receiving one.
func TestCommittedSendsDoNotAllocate(t *testing.T) {
	fake := &fakeStream{messages: 1}
	stream, err := newRetrier(t).StreamClientInterceptor()(t.Context(), streamDesc(syncUp), nil, syncUp, fakeStreamer(fake))
	if err != nil {
		t.Fatal(err)
	}
	request := &testpb.Request{Payload: make([]byte, 1<<10)}
	send(t, stream, 1)
	recv(t, stream)
	if n := testing.AllocsPerRun(1000, func() {
		if err := stream.SendMsg(request); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations for a message, want none", n)
	}
	if err := end(t, stream); err != nil {
		t.Fatal(err)
	}
}
