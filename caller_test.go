package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/anypb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// wanted is a caller that wants everything of a call that there is, and left
// what an earlier call gave it in place.
type wanted struct {
	headers, trailers [2]metadata.MD
	peers             [2]peer.Peer
	finished          []error
}

func newWanted() *wanted {
	w := &wanted{}
	for i := range w.headers {
		w.headers[i], w.trailers[i] = metadata.MD{"stale": {"1"}}, metadata.MD{"stale": {"1"}}
		w.peers[i] = peer.Peer{Addr: fakeAddr{}}
	}
	return w
}

func (w *wanted) options() []grpc.CallOption {
	finish := grpc.OnFinish(func(err error) { w.finished = append(w.finished, err) })
	return []grpc.CallOption{
		grpc.Header(&w.headers[0]), grpc.Trailer(&w.trailers[0]), grpc.Peer(&w.peers[0]), finish,
		grpc.Peer(&w.peers[1]), grpc.Trailer(&w.trailers[1]), grpc.Header(&w.headers[1]), finish,
	}
}

// check compares what the caller got with the values of the key "n" that the
// returned attempt's header and trailer should hold, and its peer.
func (w *wanted) check(t *testing.T, err error, header, trailer []string, peer string) {
	t.Helper()
	for i := range w.headers {
		if got := w.headers[i]["n"]; !slices.Equal(got, header) || len(w.headers[i]["stale"]) > 0 {
			t.Errorf("header %d is %v, want n = %q", i, w.headers[i], header)
		}
		if got := w.trailers[i]["n"]; !slices.Equal(got, trailer) || len(w.trailers[i]["stale"]) > 0 {
			t.Errorf("trailer %d is %v, want n = %q", i, w.trailers[i], trailer)
		}
		got := ""
		if w.peers[i].Addr != nil {
			got = w.peers[i].Addr.String()
		}
		if got != peer {
			t.Errorf("peer %d is %q, want %q", i, got, peer)
		}
	}
	if len(w.finished) != 2 || w.finished[0] != err || w.finished[1] != err {
		t.Errorf("OnFinish ran with %v, want both once with %v", w.finished, err)
	}
}

// Header, trailer and peer that stayed from an attempt before, or from the call
// before, send whoever looks into a failure to the wrong server.
func TestDestinationsAreOfTheReturnedAttempt(t *testing.T) {
	step := func(n string, code codes.Code) testsrv.Step {
		return testsrv.Step{Header: metadata.MD{"n": {"h" + n}}, SendHeaderFirst: true, Trailer: metadata.MD{"n": {"t" + n}}, Code: code}
	}
	bare := testsrv.Step{Code: codes.Unavailable}
	for name, test := range map[string]struct {
		steps           testsrv.Sequence
		policy          func(*Policy)
		options         []grpc.CallOption
		kill            bool // the server, before the second attempt
		cancel          time.Duration
		code            codes.Code
		header, trailer []string
		peer            string
	}{
		"first attempt":               {steps: testsrv.Sequence{step("1", codes.OK)}, header: []string{"h1"}, trailer: []string{"t1"}, peer: "testsrv"},
		"second attempt":              {steps: testsrv.Sequence{step("1", codes.Unavailable), step("2", codes.OK)}, header: []string{"h2"}, trailer: []string{"t2"}, peer: "testsrv"},
		"second attempt, nothing set": {steps: testsrv.Sequence{step("1", codes.Unavailable), {}}, peer: "testsrv"},
		"failure":                     {steps: testsrv.Sequence{step("1", codes.NotFound)}, code: codes.NotFound, header: []string{"h1"}, trailer: []string{"t1"}, peer: "testsrv"},
		"the last failure":            {steps: testsrv.Sequence{bare, bare, step("3", codes.Unavailable)}, code: codes.Unavailable, header: []string{"h3"}, trailer: []string{"t3"}, peer: "testsrv"},
		"the last failure, bare":      {steps: testsrv.Sequence{step("1", codes.Unavailable), step("2", codes.Unavailable), bare}, code: codes.Unavailable, peer: "testsrv"},
		"then the server is gone":     {steps: testsrv.Sequence{step("1", codes.Unavailable)}, kill: true, code: codes.Unavailable},
		"the connection breaks":       {steps: testsrv.Sequence{step("1", codes.Unavailable), {Cut: true}}, policy: attemptsOf(2), code: codes.Unavailable, peer: "testsrv"},
		"attempt timeout": {
			steps: testsrv.Sequence{step("1", codes.Unavailable), {Block: true}}, policy: func(p *Policy) { p.MaxAttempts, p.AttemptTimeout = 2, 50*ms },
			code: codes.DeadlineExceeded, peer: "testsrv",
		},
		"cancelled in the wait":         {steps: testsrv.Sequence{step("1", codes.Unavailable)}, cancel: 5 * ms, code: codes.Canceled, header: []string{"h1"}, trailer: []string{"t1"}, peer: "testsrv"},
		"cancelled in the second":       {steps: testsrv.Sequence{step("1", codes.Unavailable), {Block: true}}, cancel: 15 * ms, code: codes.Canceled, peer: "testsrv"},
		"cancelled before the call":     {cancel: -1, code: codes.Canceled},
		"no retries":                    {steps: testsrv.Sequence{step("1", codes.Unavailable)}, options: []grpc.CallOption{WithoutRetry()}, code: codes.Unavailable, header: []string{"h1"}, trailer: []string{"t1"}, peer: "testsrv"},
		"an edit that is refused":       {options: []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.MaxAttempts = -1 })}, code: codes.Internal},
		"an edit that is a nil pointer": {options: []grpc.CallOption{WithCallPolicy(nil)}, code: codes.Internal},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var srv *testsrv.Server
				r := newRetrier(t, exactly(test.policy), WithHooks(Hooks{RetryScheduled: func(_ context.Context, a Attempt) {
					if test.kill {
						srv.Kill()
					}
				}}))
				srv, client := serveLater(t, &srv, r, testsrv.Script{get: test.steps})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				switch {
				case test.cancel < 0:
					cancel()
				case test.cancel > 0:
					time.AfterFunc(test.cancel, cancel)
				}
				w := newWanted()
				_, err := client.Get(ctx, &testpb.Request{}, append(w.options(), test.options...)...)
				checkCode(t, err, test.code)
				w.check(t, err, test.header, test.trailer, test.peer)
			})
		})
	}
}

// serveLater is serve for a Retrier whose hooks need the server.
func serveLater(t testing.TB, to **testsrv.Server, r *Retrier, script testsrv.Script) (*testsrv.Server, testpb.TestServiceClient) {
	t.Helper()
	srv, client := serve(t, r, script)
	*to = srv
	return srv, client
}

// OnFinish is how others count calls. Run once for each attempt, or not at all
// when a call ends in an unusual way, it makes their counts wrong.
func TestOnFinishRunsOnce(t *testing.T) {
	retries := func(opts ...grpc.DialOption) func(t *testing.T, options ...Option) []grpc.DialOption {
		return func(t *testing.T, options ...Option) []grpc.DialOption {
			r := newRetrier(t, append(options, exactly(nil))...)
			return append(r.DialOptions(), opts...)
		}
	}
	empty, err := NewBudget(BudgetConfig{FreeInterval: -1})
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		empty.Reserve(CostTransient)
	}
	for name, test := range map[string]struct {
		step    testsrv.Step
		fails   int
		dial    func(t *testing.T, options ...Option) []grpc.DialOption
		option  Option
		method  string
		options []grpc.CallOption
		down    bool // the server
		close   bool // the ClientConn
		code    codes.Code
		reason  Reason
	}{
		"success":            {reason: ReasonSuccess},
		"retried":            {fails: 2, reason: ReasonSuccess},
		"not retryable":      {step: testsrv.Step{Code: codes.NotFound}, code: codes.NotFound, reason: ReasonNotRetryable},
		"not idempotent":     {method: write, fails: 1, code: codes.Unavailable, reason: ReasonNotIdempotent},
		"attempts exhausted": {fails: 3, code: codes.Unavailable, reason: ReasonAttemptsExhausted},
		"does not fit":       {fails: 1, options: []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.Timeout = ms })}, code: codes.Unavailable, reason: ReasonDeadline},
		"pushback":           {step: testsrv.Step{Code: codes.Unavailable, Trailer: pushbackOf("-1")}, code: codes.Unavailable, reason: ReasonPushbackStop},
		"budget exhausted":   {fails: 3, option: WithBudget(empty), code: codes.Unavailable, reason: ReasonBudgetExhausted},
		"WithoutRetry":       {fails: 1, options: []grpc.CallOption{WithoutRetry()}, code: codes.Unavailable, reason: ReasonDisabled},
		"too large":          {step: testsrv.Step{ReplySize: 1000}, options: []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)}, code: codes.ResourceExhausted, reason: ReasonNotRetryable},
		"never sent":         {down: true, code: codes.Unavailable, reason: ReasonAttemptsExhausted},
		"closed":             {close: true, code: codes.Canceled, reason: ReasonClosed},
		"refused edit":       {options: []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.Timeout = -1 })}, code: codes.Internal, reason: ReasonNone},
		"two Retriers": {fails: 2, dial: func(t *testing.T, options ...Option) []grpc.DialOption {
			return retries(newRetrier(t, exactly(nil)).DialOptions()...)(t, options...)
		}, reason: ReasonSuccess},
		"an interceptor answers": {dial: retries(innermost(func(int, func() error) error { return nil })), reason: ReasonSuccess},
		"an interceptor refuses": {dial: retries(innermost(func(int, func() error) error { return status.Error(codes.Aborted, "") })), code: codes.Aborted, reason: ReasonNotRetryable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = get
				}
				if test.dial == nil {
					test.dial = retries()
				}
				srv := testsrv.New(testsrv.Script{test.method: testsrv.Fail(test.fails, codes.Unavailable).Then(test.step)})
				t.Cleanup(srv.Close)
				var options []Option
				if test.option != nil {
					options = append(options, test.option)
				}
				cc, err := srv.Dial(test.dial(t, options...)...)
				if err != nil {
					t.Fatal(err)
				}
				if test.down {
					srv.Kill()
				}
				if test.close {
					_ = cc.Close()
				}
				var order []string
				var got []error
				note := func(name string) grpc.CallOption {
					return grpc.OnFinish(func(err error) { order, got = append(order, name), append(got, err) })
				}
				reports := [2]Report{{Method: "stale"}, {Method: "stale"}}
				_, err = unaryOf(testpb.NewTestServiceClient(cc), test.method)(t.Context(), &testpb.Request{},
					append([]grpc.CallOption{note("a"), WithReport(&reports[0]), WithReport(nil), note("b"), WithReport(&reports[1])}, test.options...)...)
				checkCode(t, err, test.code)
				if !slices.Equal(order, []string{"a", "b"}) || got[0] != err || got[1] != err {
					t.Errorf("OnFinish ran as %v with %v, want a and b with %v", order, got, err)
				}
				for i := range reports {
					if r := &reports[i]; r.Reason != test.reason || r.Method != test.method || r.Target != cc.CanonicalTarget() {
						t.Errorf("report %d: %v of %q to %q, want %v", i, r.Reason, r.Method, r.Target, test.reason)
					}
				}
			})
		})
	}
}

// merging is a codec that adds to what is in the reply, as some fast ones do.
type merging struct{}

func (merging) Name() string                  { return "proto" }
func (merging) Marshal(v any) ([]byte, error) { return proto.Marshal(v.(proto.Message)) }

func (merging) Unmarshal(data []byte, v any) error {
	var got testpb.Response
	if err := proto.Unmarshal(data, &got); err != nil {
		return err
	}
	switch v := v.(type) {
	case proto.Message:
		return proto.UnmarshalOptions{Merge: true}.Unmarshal(data, v)
	case *plainReply:
		v.Items = append(v.Items, got.GetItems()...)
		v.sum += got.GetArrival()
		if v.Into != nil {
			*v.Into += strings.Join(got.GetItems(), ",")
		}
	case *resettable:
		v.items = append(v.items, got.GetItems()...)
	case *[]byte:
		*v = append(*v, strings.Join(got.GetItems(), ",")...)
	case *map[string]string:
		if *v == nil {
			*v = map[string]string{}
		}
		for _, item := range got.GetItems() {
			(*v)[item] = item
		}
	default:
		return fmt.Errorf("a reply of type %T", v)
	}
	return nil
}

type plainReply struct {
	Items []string
	Kept  string
	Into  *string
	sum   int64
}

type resettable struct{ items []string }

func (r *resettable) Reset() { r.items = nil }

// An attempt can fill the reply and fail all the same. What it left there must
// not mix with the answer of the next one, whatever the codec; and what the
// caller put there must not be lost either.
func TestReplyIsResetBetweenAttempts(t *testing.T) {
	desc := (&testpb.Response{}).ProtoReflect().Descriptor()
	into := ""
	for name, test := range map[string]struct {
		reply any
		got   func(reply any) any
		want  any
	}{
		"generated message": {
			reply: &testpb.Response{},
			got:   func(reply any) any { return reply.(*testpb.Response).GetItems() },
			want:  []string{"testsrv/3"},
		},
		"dynamic message": {
			reply: dynamicpb.NewMessage(desc),
			got: func(reply any) any {
				var items []string
				list := reply.(protoreflect.ProtoMessage).ProtoReflect().Get(desc.Fields().ByName("items")).List()
				for i := range list.Len() {
					items = append(items, list.Get(i).String())
				}
				return items
			},
			want: []string{"testsrv/3"},
		},
		"struct": {
			reply: &plainReply{Kept: "by the caller"},
			got:   func(reply any) any { return *reply.(*plainReply) },
			want:  plainReply{Items: []string{"testsrv/3"}, Kept: "by the caller", sum: 3},
		},
		"struct that points to what is to be filled": {
			reply: &plainReply{Into: &into},
			got:   func(reply any) any { return reply.(*plainReply).Into == &into },
			want:  true,
		},
		"type with a Reset of its own": {
			reply: &resettable{},
			got:   func(reply any) any { return reply.(*resettable).items },
			want:  []string{"testsrv/3"},
		},
		"bytes": {
			reply: new([]byte),
			got:   func(reply any) any { return string(*reply.(*[]byte)) },
			want:  "testsrv/3",
		},
		"bytes in a buffer": {
			reply: func() any { b := make([]byte, 0, 100); return &b }(),
			got:   func(reply any) any { return fmt.Sprintf("%s %d", *reply.(*[]byte), cap(*reply.(*[]byte))) },
			want:  "testsrv/3 100",
		},
		"map": {
			reply: new(map[string]string),
			got:   func(reply any) any { return *reply.(*map[string]string) },
			want:  map[string]string{"testsrv/3": "testsrv/3"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(nil)
				t.Cleanup(srv.Close)
				cc, err := srv.Dial(append(newRetrier(t, exactly(nil)).DialOptions(), innermost(func(attempt int, invoke func() error) error {
					if err := invoke(); err != nil || attempt == 2 {
						return err
					}
					return status.Error(codes.Unavailable, "the reply did not please an interceptor")
				}))...)
				if err != nil {
					t.Fatal(err)
				}
				if err := cc.Invoke(t.Context(), get, &testpb.Request{}, test.reply, grpc.ForceCodec(merging{})); err != nil {
					t.Fatal(err)
				}
				if got := test.got(test.reply); !reflect.DeepEqual(got, test.want) {
					t.Errorf("reply %v, want %v", got, test.want)
				}
			})
		})
	}
}

// A reply that cannot be reset must not turn a failure into a panic.
func TestReplyThatIsNoPointer(t *testing.T) {
	for name, reply := range map[string]any{
		"nil":                      nil,
		"nil pointer to a message": (*testpb.Response)(nil),
		"nil pointer":              (*plainReply)(nil),
		"nil pointer with a Reset": (*resettable)(nil),
		"struct":                   plainReply{},
		"nil map":                  map[string]string(nil),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
				t.Cleanup(srv.Close)
				cc, err := srv.Dial(newRetrier(t, exactly(nil)).DialOptions()...)
				if err != nil {
					t.Fatal(err)
				}
				checkCode(t, cc.Invoke(t.Context(), get, &testpb.Request{}, reply), codes.Unavailable)
				if n := srv.Count(get); n != 3 {
					t.Errorf("%d attempts, want 3", n)
				}
			})
		})
	}
}

// The details of a status may be of types that this program does not know but
// its caller does. Decoding and encoding them again would lose them.
func TestDetailsOfUnknownTypes(t *testing.T) {
	want := &spb.Status{Code: int32(codes.Unavailable), Message: "no room", Details: []*anypb.Any{
		{TypeUrl: "type.googleapis.com/other.v1.Unknown", Value: []byte{8, 150, 1}},
		{TypeUrl: "type.googleapis.com/google.rpc.RetryInfo", Value: []byte("not a RetryInfo")},
		{TypeUrl: "nonsense"},
	}}
	for name, test := range map[string]struct {
		policy  func(*Policy)
		timeout time.Duration
		method  string
		wrapped bool
	}{
		"not retried":        {method: write},
		"one attempt":        {method: get, policy: attemptsOf(1)},
		"attempts exhausted": {method: get, wrapped: true},
		"does not fit":       {method: get, policy: func(p *Policy) { p.Timeout = ms }, wrapped: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, client := serve(t, newRetrier(t, exactly(test.policy)), testsrv.Script{test.method: testsrv.Sequence{{Err: status.ErrorProto(want)}}})
				_, err := unaryOf(client, test.method)(t.Context(), &testpb.Request{})
				if got := status.Convert(err).Proto(); !proto.Equal(got, want) {
					t.Errorf("status %v, want %v", got, want)
				}
				if wrapped(err) != test.wrapped {
					t.Errorf("wrapped: %v, want %v", wrapped(err), test.wrapped)
				}
				if !strings.HasPrefix(err.Error(), status.ErrorProto(want).Error()) {
					t.Errorf("text %q does not start with the server's", err)
				}
			})
		})
	}
}

// foreign is a call option of somebody else's.
type foreign struct {
	grpc.EmptyCallOption
	name string
}

// A caller may keep one option slice for all its calls, and a slice of it for
// each: what is appended in place goes into its neighbours.
func TestOptionSliceIsNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			return testsrv.Step{Code: []codes.Code{codes.Unavailable, codes.OK}[nth%2]}
		})})
		t.Cleanup(srv.Close)
		// It appends to what it is given, without a copy, as many do.
		appends := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			a := append(opts, foreign{name: "a"})
			_ = append(opts, foreign{name: "b"})
			if last := a[len(a)-1].(foreign).name; last != "a" {
				t.Errorf("two appends met: a became %s", last)
			}
			return invoker(ctx, method, req, reply, cc, a...)
		}
		r := newRetrier(t, WithBudget(Unlimited()), exactly(attemptsOf(50)))
		cc, err := srv.Dial(append(r.DialOptions(), grpc.WithChainUnaryInterceptor(appends))...)
		if err != nil {
			t.Fatal(err)
		}
		backing := make([]grpc.CallOption, 16)
		for i := range backing {
			backing[i] = foreign{name: fmt.Sprint(i)}
		}
		backing[1], backing[2] = grpc.WaitForReady(true), WithCallPolicy(func(*Policy) {})
		before := slices.Clone(backing)
		var calls sync.WaitGroup
		for n := range 50 {
			calls.Go(func() {
				if err := cc.Invoke(t.Context(), get, &testpb.Request{}, &testpb.Response{}, backing[:n%9]...); err != nil {
					t.Error(err)
				}
			})
		}
		calls.Wait()
		for i := range backing {
			if i != 2 && backing[i] != before[i] { // a func in number 2 cannot be compared
				t.Errorf("entry %d is now %v", i, backing[i])
			}
		}
	})
}

// rotating gives another token each time.
type rotating struct{ runs int }

func (c *rotating) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	c.runs++
	return map[string]string{"token": fmt.Sprint(c.runs)}, nil
}
func (*rotating) RequireTransportSecurity() bool { return false }

var _ credentials.PerRPCCredentials = (*rotating)(nil)

// A token that has expired must not be sent again, and not beside the fresh one.
func TestCredentialsRunForEveryAttempt(t *testing.T) {
	for name, dialled := range map[string]bool{"of the ClientConn": true, "of the call": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				creds := &rotating{}
				var dialOptions []grpc.DialOption
				var options []grpc.CallOption
				if dialled {
					dialOptions = append(dialOptions, grpc.WithPerRPCCredentials(creds))
				} else {
					options = append(options, grpc.PerRPCCredentials(creds))
				}
				srv, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()}, dialOptions...)
				if _, err := client.Get(t.Context(), &testpb.Request{}, options...); err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, a := range srv.Attempts(get) {
					got = append(got, a.Metadata["token"]...)
				}
				if !slices.Equal(got, []string{"1", "2", "3"}) || creds.runs != 3 {
					t.Errorf("tokens %q of %d runs, want 1, 2, 3", got, creds.runs)
				}
			})
		})
	}
}

// The trailer that hooks and RetryIf see belongs to that attempt, and stays as
// it was when later attempts have theirs.
func TestAttemptsKeepTheirOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{get: testsrv.Func(func(nth int, _ testsrv.Attempt) testsrv.Step {
			return testsrv.Step{Code: codes.Unavailable, Message: fmt.Sprint(nth), Trailer: metadata.MD{"n": {fmt.Sprint(nth)}}}
		})})
		var report Report
		_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
		var e *Error
		if !errors.As(err, &e) {
			t.Fatalf("error %v", err)
		}
		for i, a := range report.Attempts {
			n := fmt.Sprint(i + 1)
			if a.Number != i+1 || !slices.Equal(a.Trailer["n"], []string{n}) || status.Convert(a.Err).Message() != n || a.Peer.String() != "testsrv" || a.Evidence != Answered {
				t.Errorf("attempt %d: %+v", i+1, a)
			}
			if b := e.Attempts[i]; b.Number != a.Number || !maps.EqualFunc(b.Trailer, a.Trailer, slices.Equal) {
				t.Errorf("the error tells %+v of attempt %d, the report %+v", b, i+1, a)
			}
		}
	})
}
