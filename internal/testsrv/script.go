package testsrv

import (
	"context"
	"fmt"
	"slices"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"example.com/grpcretry/internal/testsrv/testpb"
)

// Script says how a server reacts, by full method ("/testsrv.v1.TestService/Get").
// The key "*" stands for every method that has no entry of its own. A method
// without any entry reacts with Step{}, which is an answer. nil is a valid script.
type Script map[string]Reaction

// Reaction chooses what happens to an attempt. nth counts the method's arrivals
// from 1 since the reaction was installed. React may run on several goroutines
// at once.
type Reaction interface {
	React(nth int, a Attempt) Step
}

// Func is a Reaction in code, for what a Sequence cannot say. a.Requests holds
// the request of methods that take a single one.
type Func func(nth int, a Attempt) Step

// React calls f. A nil Func answers.
func (f Func) React(nth int, a Attempt) Step {
	if f == nil {
		return Step{}
	}
	return f(nth, a)
}

// Sequence has one step for each arrival; the last one repeats. An empty one
// answers.
type Sequence []Step

// React returns the nth step.
func (q Sequence) React(nth int, _ Attempt) Step {
	if len(q) == 0 {
		return Step{}
	}
	return q[min(nth, len(q))-1]
}

// Fail is n failures with the code. Without [Sequence.Then] or
// [Sequence.ThenOK] the last one repeats for ever.
func Fail(n int, code codes.Code) Sequence {
	return Sequence{}.Then(slices.Repeat([]Step{{Code: code}}, max(n, 0))...)
}

// Then returns q with more steps at its end. q stays as it is.
func (q Sequence) Then(steps ...Step) Sequence {
	return slices.Concat(q, steps)
}

// ThenOK returns q followed by answers.
func (q Sequence) ThenOK() Sequence { return q.Then(Step{}) }

// Step is the reaction to one attempt. The zero value answers at once. The
// fields are listed in the order in which they act: header, requests, Delay,
// responses, Hold, Block, Cut, status with trailer. Every wait ends early with
// the handler's context; the handler then returns that context's status.
type Step struct {
	// Header goes out with the first response or with the status, whichever is
	// first, or before everything else if SendHeaderFirst. Without both an
	// attempt that fails without a response is a trailers-only answer.
	Header          metadata.MD
	SendHeaderFirst bool

	// Receive is the number of requests that a client-streaming or bidirectional
	// method reads before it goes on. 0: all up to the half-close. Negative: none.
	// A bidirectional method answers each of them at once, unless NoEcho.
	Receive int
	NoEcho  bool

	// Delay is the wait between the requests and what answers them: the first
	// response that is not an echo, or the status if there is none.
	Delay time.Duration

	// Messages is the number of responses of a server-streaming method, and of a
	// bidirectional one beyond the echoes. 0: what the request asks for, numbered
	// from Request.after + 1 to Request.count; nothing on bidirectional methods.
	// Negative: none. They are Every apart. Unary and client-streaming methods
	// respond once, if the status is OK.
	Messages int
	Every    time.Duration

	// Reply is sent in place of each response that the server would make up,
	// which fills in the fields of testpb.Response and a payload of ReplySize
	// bytes.
	Reply     *testpb.Response
	ReplySize int

	// Hold is the wait between the last response of a stream and its end. Before
	// a Cut it gives grpc the time to write what was sent: in a synctest bubble
	// any duration will do, without one the responses may or may not arrive.
	Hold time.Duration

	// Block waits until the handler's context ends.
	Block bool

	// Cut closes the attempt's connection in place of a status, and with it every
	// other attempt on that connection. The handler ends after that.
	Cut bool

	// Trailer goes out with the status.
	Trailer metadata.MD

	// Code, Message and Details make the status. Details are ignored with OK.
	Code    codes.Code
	Message string
	Details []proto.Message

	// Err, if set, is returned by the handler in place of that status.
	Err error

	// Unary and Stream replace all of the above, for odd needs: Unary on unary
	// methods, Stream on all others. The requests that Stream reads are recorded;
	// that of a server-streaming method has been read already and is the second
	// argument, which is nil for the other kinds.
	Unary  func(ctx context.Context, request *testpb.Request) (*testpb.Response, error)
	Stream func(stream grpc.ServerStream, request *testpb.Request) error
}

// status is what the handler returns.
func (s Step) status() error {
	if s.Err != nil {
		return s.Err
	}
	if s.Code == codes.OK {
		return nil
	}
	p := &spb.Status{Code: int32(s.Code), Message: s.Message}
	for i, detail := range s.Details {
		packed, err := anypb.New(detail)
		if err != nil {
			return status.Errorf(codes.Internal, "testsrv: Details[%d] = %v: %v", i, detail, err)
		}
		p.Details = append(p.Details, packed)
	}
	return status.ErrorProto(p)
}

// check reports methods that no server has: a misspelt one would answer, and a
// test that counts on its failure would pass or fail for the wrong reason.
func (s Script) check() error {
	for method := range s {
		if _, ok := methods[method]; !ok && method != "*" {
			return fmt.Errorf("testsrv: Script names %q, want a full method of testsrv.v1 or *", method)
		}
	}
	return nil
}
