package grpcretry

import (
	"fmt"
	"reflect"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// WithResume lets a server stream go on after a failure though its caller was
// already given messages. Where the failure is one that is retried, next is asked
// with what request to go on, from the call's first request and the last message
// delivered; it may change and return req. With false it declines, and the
// caller gets the error. For example, where every message carries a token:
//
//	grpcretry.WithResume(func(req *pb.ListRequest, last *pb.Item) (*pb.ListRequest, bool) {
//		req.After = last.Token
//		return req, true
//	})
//
// Both arguments are copies. A stream that failed before any message is
// repeated with the first request, and next is not asked. next runs on the
// goroutine that called RecvMsg, before the budget is asked, whose answer may
// still be no.
//
// All rules of retries hold, as in [Reason], but the count of attempts begins
// anew with each attempt that delivered a message: MaxAttempts bounds those
// without progress, Timeout the whole, and the budget what it costs. The method
// must be known to be idempotent. Each message is copied when it is delivered.
//
// Req and Resp are the types of the call's messages, pointers to generated
// structs; others fail the call with INTERNAL, and so does a nil next. On
// calls that are not server streams, and without the interceptor, the option
// does nothing.
func WithResume[Req, Resp any](next func(req Req, last Resp) (Req, bool)) grpc.CallOption {
	o := resumeOption{
		isRequest: isA[Req], request: reflect.TypeFor[Req](),
		isMessage: isA[Resp], message: reflect.TypeFor[Resp](),
	}
	if next != nil {
		o.next = func(req, last any) (any, bool) {
			// Their types were checked when they were sent and received.
			r, _ := req.(Req)
			l, _ := last.(Resp)
			return next(r, l)
		}
	}
	return o
}

func isA[T any](m any) bool {
	_, ok := m.(T)
	return ok
}

type resumeOption struct {
	grpc.EmptyCallOption
	next                 func(req, last any) (any, bool)
	isRequest, isMessage func(any) bool
	request, message     reflect.Type
}

// resumption is the state of WithResume in one call.
type resumption struct {
	resumeOption
	first     proto.Message // the call's first request, guarded by the stream's mu
	last      proto.Message // the last message delivered
	following proto.Message // with what to go on
}

func (r *resumption) check() error {
	if r != nil && r.next == nil {
		return status.Error(codes.Internal, "grpcretry: WithResume: callback is nil, want a function")
	}
	return nil
}

func (o resumeOption) acceptsRequest(m any) error {
	if o.isRequest(m) {
		return nil
	}
	return status.Error(codes.Internal, fmt.Sprintf("grpcretry: WithResume: the request is a %T, want %v as in the callback", m, o.request))
}

func (o resumeOption) acceptsMessage(m any) error {
	if o.isMessage(m) {
		return nil
	}
	return status.Error(codes.Internal, fmt.Sprintf("grpcretry: WithResume: the message is a %T, want %v as in the callback", m, o.message))
}

// keep keeps the first request, and reports whether there is one.
func (r *resumption) keep(sent *replayLog) bool {
	if len(sent.entries) == 0 {
		return false
	}
	r.first = sent.message(0)
	return true
}

// delivered keeps a copy of m, and reports false if that cannot be.
func (r *resumption) delivered(m any) bool {
	p, ok := m.(proto.Message)
	if ok = ok && whole(p); ok {
		r.last = proto.Clone(p)
	}
	return ok
}

// ask finds out with what to go on; false: with nothing.
func (r *resumption) ask() bool {
	if r.last == nil {
		r.following = r.first
		return true
	}
	next, ok := r.next(proto.Clone(r.first), proto.Clone(r.last))
	if !ok {
		return false
	}
	m, ok := next.(proto.Message)
	if ok {
		r.following = proto.Clone(m)
	}
	return ok
}
