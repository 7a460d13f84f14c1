package testsrv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv/testpb"
)

// services are those that every server has.
var services = []*grpc.ServiceDesc{&testpb.TestService_ServiceDesc, &testpb.DeclaredService_ServiceDesc}

// methods are the full methods of services.
var methods = func() map[string]struct{} {
	all := map[string]struct{}{}
	for _, desc := range services {
		for _, m := range desc.Methods {
			all[fullMethod(desc, m.MethodName)] = struct{}{}
		}
		for _, m := range desc.Streams {
			all[fullMethod(desc, m.StreamName)] = struct{}{}
		}
	}
	return all
}()

func fullMethod(desc *grpc.ServiceDesc, name string) string {
	return "/" + desc.ServiceName + "/" + name
}

// scripted returns desc with handlers that play the script in place of the
// generated ones: as all methods take and return the same messages, one handler
// serves all unary methods and one all streams.
func (s *Server) scripted(desc *grpc.ServiceDesc) *grpc.ServiceDesc {
	own := &grpc.ServiceDesc{ServiceName: desc.ServiceName, HandlerType: (*any)(nil), Metadata: desc.Metadata}
	for _, m := range desc.Methods {
		method := fullMethod(desc, m.MethodName)
		own.Methods = append(own.Methods, grpc.MethodDesc{
			MethodName: m.MethodName,
			Handler: func(_ any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
				in := new(testpb.Request)
				if err := decode(in); err != nil {
					return nil, err
				}
				handle := func(ctx context.Context, in any) (any, error) { return s.unary(ctx, method, in) }
				if interceptor == nil {
					return handle(ctx, in)
				}
				return interceptor(ctx, in, &grpc.UnaryServerInfo{Server: s, FullMethod: method}, handle)
			},
		})
	}
	for _, stream := range desc.Streams {
		method := fullMethod(desc, stream.StreamName)
		stream.Handler = func(_ any, ss grpc.ServerStream) error { return s.stream(ss, method, stream) }
		own.Streams = append(own.Streams, stream)
	}
	return own
}

// unary plays one attempt of a unary method.
func (s *Server) unary(ctx context.Context, method string, in any) (_ any, err error) {
	request, ok := in.(*testpb.Request)
	if !ok {
		return nil, status.Errorf(codes.Internal, "testsrv: %s: an interceptor passed a %T, want %T", method, in, request)
	}
	a, end := s.record.begin(ctx, method, request)
	defer func() { end(err) }()

	step := s.react(a)
	if step.Unary != nil {
		response, err := step.Unary(ctx, request)
		if err != nil {
			return nil, err
		}
		s.sent(a)
		return response, nil
	}
	if err := step.sendHeader(unaryHeader{ctx}); err != nil {
		return nil, err
	}
	if err := wait(ctx, step.Delay); err != nil {
		return nil, err
	}
	if err := step.finish(ctx, unaryHeader{ctx}); err != nil {
		return nil, err
	}
	s.sent(a)
	return s.response(step, a, 1, request.GetText()), nil
}

// stream plays one attempt of a method of another kind.
func (s *Server) stream(ss grpc.ServerStream, method string, desc grpc.StreamDesc) (err error) {
	ctx := ss.Context()
	a, end := s.record.begin(ctx, method)
	defer func() { end(err) }()
	ss = &recordedStream{ServerStream: ss, server: s, attempt: a}

	var request *testpb.Request
	if !desc.ClientStreams {
		request = new(testpb.Request)
		if err := ss.RecvMsg(request); err != nil {
			return err
		}
	}
	step := s.react(a)
	if step.Stream != nil {
		return step.Stream(ss, request)
	}
	if err := step.sendHeader(ss); err != nil {
		return err
	}

	echoes, text := int64(0), request.GetText()
	for n := 0; desc.ClientStreams && (step.Receive == 0 || n < step.Receive); n++ {
		in := new(testpb.Request)
		if err := ss.RecvMsg(in); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		text = in.GetText()
		if desc.ServerStreams && !step.NoEcho {
			echoes++
			if err := ss.SendMsg(s.response(step, a, echoes, text)); err != nil {
				return err
			}
		}
	}

	if err := wait(ctx, step.Delay); err != nil {
		return err
	}
	if desc.ServerStreams {
		first, last := echoes+1, echoes+int64(step.Messages)
		if step.Messages == 0 && !desc.ClientStreams {
			first, last = request.GetAfter()+1, request.GetCount()
		}
		for number := first; number <= last; number++ {
			if number > first {
				if err := wait(ctx, step.Every); err != nil {
					return err
				}
			}
			if err := ss.SendMsg(s.response(step, a, number, text)); err != nil {
				return err
			}
		}
	}
	if err := wait(ctx, step.Hold); err != nil {
		return err
	}
	if err := step.finish(ctx, ss); err != nil || desc.ServerStreams {
		return err
	}
	return ss.SendMsg(s.response(step, a, 1, text))
}

// react asks the script for the attempt's step.
func (s *Server) react(a *Attempt) Step {
	s.mu.Lock()
	entry := s.script[a.Method]
	if entry == nil {
		entry = s.script["*"]
	}
	nth := 0
	if entry != nil {
		entry.arrivals[a.Method]++
		nth = entry.arrivals[a.Method]
	}
	s.mu.Unlock()
	if nth == 0 || entry.reaction == nil {
		return Step{}
	}
	return entry.reaction.React(nth, s.record.read(a))
}

// headerSender is what sets header and trailer: a stream, or a unary context.
type headerSender interface {
	SetHeader(metadata.MD) error
	SendHeader(metadata.MD) error
	SetTrailer(metadata.MD)
}

type unaryHeader struct{ ctx context.Context }

func (h unaryHeader) SetHeader(md metadata.MD) error  { return grpc.SetHeader(h.ctx, md) }
func (h unaryHeader) SendHeader(md metadata.MD) error { return grpc.SendHeader(h.ctx, md) }

// SetTrailer can fail only outside a handler.
func (h unaryHeader) SetTrailer(md metadata.MD) { _ = grpc.SetTrailer(h.ctx, md) }

func (s Step) sendHeader(to headerSender) error {
	if s.SendHeaderFirst {
		return to.SendHeader(s.Header)
	}
	return to.SetHeader(s.Header)
}

// finish plays what follows the responses.
func (s Step) finish(ctx context.Context, to headerSender) error {
	if s.Block {
		<-ctx.Done()
		return status.FromContextError(ctx.Err()).Err()
	}
	if s.Cut {
		if err := cut(ctx); err != nil {
			return err
		}
		<-ctx.Done() // the transport ends it when it finds its connection closed
		return status.FromContextError(ctx.Err()).Err()
	}
	to.SetTrailer(s.Trailer)
	return s.status()
}

// cut closes the connection that an attempt came on.
func cut(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok {
		if addr, ok := p.Addr.(*connAddr); ok {
			_ = addr.conn.Close() // fails only if it was cut already
			return nil
		}
	}
	return status.Error(codes.Internal, "testsrv: Cut: the attempt came on a connection that is not ours")
}

// wait returns after d, or with the context's status once that has ended.
func wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// response makes up a response, unless the step has one.
func (s *Server) response(step Step, a *Attempt, number int64, text string) *testpb.Response {
	if step.Reply != nil {
		return step.Reply
	}
	now := s.record.read(a)
	r := &testpb.Response{
		Arrival:  int64(now.Number),
		Server:   s.name,
		Text:     text,
		Number:   number,
		Received: int64(len(now.Requests)),
		Items:    []string{fmt.Sprintf("%s/%d", s.name, now.Number)},
	}
	if step.ReplySize > 0 {
		r.Payload = make([]byte, step.ReplySize)
	}
	return r
}

// sent counts a response.
func (s *Server) sent(a *Attempt) {
	s.record.change(func() { a.Responses++ })
}

// recordedStream records what passes.
type recordedStream struct {
	grpc.ServerStream
	server  *Server
	attempt *Attempt
}

func (r *recordedStream) RecvMsg(m any) error {
	if err := r.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	if request, ok := m.(*testpb.Request); ok {
		request = proto.CloneOf(request)
		r.server.record.change(func() { r.attempt.Requests = append(r.attempt.Requests, request) })
	}
	return nil
}

func (r *recordedStream) SendMsg(m any) error {
	if err := r.ServerStream.SendMsg(m); err != nil {
		return err
	}
	r.server.sent(r.attempt)
	return nil
}
