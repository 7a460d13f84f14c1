package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// What grpc and the errors package look for in an error.
var _ interface {
	error
	GRPCStatus() *status.Status
	Unwrap() error
	Is(error) bool
} = (*Error)(nil)

var sentinels = map[string]error{
	"ErrAttemptsExhausted": ErrAttemptsExhausted,
	"ErrBudgetExhausted":   ErrBudgetExhausted,
	"ErrDeadlineTooClose":  ErrDeadlineTooClose,
	"ErrPushbackStop":      ErrPushbackStop,
}

// Callers branch on the code, show the message and log the text. A call that was
// given up must give them what the server said, and say how it was given up.
func TestErrorOfACall(t *testing.T) {
	detail := &errdetails.ErrorInfo{Reason: "BACKEND_DOWN", Domain: "example.com"}
	down := testsrv.Step{Code: codes.Unavailable, Message: "backend down", Details: []proto.Message{detail}}
	pushed := down
	pushed.Trailer = metadata.Pairs("grpc-retry-pushback-ms", "-1")
	later := down
	later.Trailer = metadata.Pairs("grpc-retry-pushback-ms", "300000")
	for _, tt := range []struct {
		name     string
		step     testsrv.Step
		empty    bool // the budget
		policy   Policy
		timeout  time.Duration
		text     string
		sentinel string
	}{
		{name: "attempts exhausted", step: down, policy: Policy{MaxAttempts: 2}, sentinel: "ErrAttemptsExhausted",
			text: "rpc error: code = Unavailable desc = backend down (grpcretry: attempts_exhausted after 2 attempts)"},
		{name: "budget exhausted", step: down, empty: true, sentinel: "ErrBudgetExhausted",
			text: "rpc error: code = Unavailable desc = backend down (grpcretry: budget_exhausted after 1 attempt)"},
		{name: "does not fit", step: down, policy: Policy{Backoff: Backoff{Base: time.Minute, Jitter: NoJitter}}, timeout: time.Minute, sentinel: "ErrDeadlineTooClose",
			text: "rpc error: code = Unavailable desc = backend down (grpcretry: deadline after 1 attempt)"},
		{name: "pushback", step: pushed, sentinel: "ErrPushbackStop",
			text: "rpc error: code = Unavailable desc = backend down (grpcretry: pushback_stop after 1 attempt)"},
		{name: "pushback too long", step: later, sentinel: "ErrPushbackStop",
			text: "rpc error: code = Unavailable desc = backend down (grpcretry: pushback_stop after 1 attempt, the server asked for a wait of 5m0s)"},
		{name: "never to be retried", step: down, policy: Policy{MaxAttempts: 1},
			text: "rpc error: code = Unavailable desc = backend down"},
		{name: "not retryable", step: down, policy: Policy{Codes: Codes(codes.Aborted)},
			text: "rpc error: code = Unavailable desc = backend down"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				options := []Option{WithDefaultPolicy(tt.policy)}
				if tt.empty {
					options = append(options, WithBudget(emptyBudget(t)))
				}
				r := newRetrier(t, options...)
				srv, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{tt.step}})
				ctx := t.Context()
				if tt.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.timeout)
					defer cancel()
				}
				_, err := client.Get(ctx, &testpb.Request{})
				if err.Error() != tt.text {
					t.Errorf("text %q, want %q", err, tt.text)
				}
				for name, err := range map[string]error{"itself": err, "wrapped": fmt.Errorf("get: %w", err), "joined": errors.Join(errors.New("a"), err)} {
					st, ok := status.FromError(err)
					if !ok || st.Code() != codes.Unavailable || len(st.Details()) != 1 || !proto.Equal(st.Details()[0].(proto.Message), detail) {
						t.Errorf("%s: status %v with %v, want the server's", name, st, st.Details())
					}
					for sentinel, target := range sentinels {
						if got, want := errors.Is(err, target), sentinel == tt.sentinel; got != want {
							t.Errorf("%s: errors.Is(%s) = %v, want %v", name, sentinel, got, want)
						}
					}
				}
				if st := status.Convert(err); st.Message() != "backend down" {
					t.Errorf("message %q, want the server's", st.Message())
				}

				var e *Error
				if errors.As(err, &e) != (tt.sentinel != "") {
					t.Fatalf("%T, want an *Error exactly where a retry was wanted", err)
				}
				if e == nil {
					return
				}
				last := e.Attempts[len(e.Attempts)-1]
				if e.Unwrap() != last.Err || e.Method != get || e.Made() != srv.Count(get) || e.Reason != last.Reason {
					t.Errorf("%+v does not tell the call", e.Report)
				}
			})
		})
	}
}

// A caller whose patience ends during a wait gets the code of that, as from any
// call, but must still be able to learn what the server had said.
func TestErrorOfACutWait(t *testing.T) {
	detail := &errdetails.ErrorInfo{Reason: "BACKEND_DOWN"}
	pushback := testsrv.Step{Code: codes.Unavailable, Message: "backend down", Details: []proto.Message{detail},
		Trailer: metadata.Pairs("grpc-retry-pushback-ms", "10000")}
	for _, tt := range []struct {
		name string
		ctx  func(context.Context) (context.Context, context.CancelFunc)
		code codes.Code
		is   error
		not  error
		text string
	}{
		{"cancelled", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(time.Second, cancel)
			return ctx, cancel
		}, codes.Canceled, context.Canceled, context.DeadlineExceeded,
			"rpc error: code = Canceled desc = context canceled while waiting for the next attempt " +
				"(grpcretry: parent_done after 1 attempt, the last: rpc error: code = Unavailable desc = backend down)"},
		{"a deadline that the context does not tell", func(ctx context.Context) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			return hiddenDeadline{ctx}, cancel
		}, codes.DeadlineExceeded, context.DeadlineExceeded, context.Canceled,
			"rpc error: code = DeadlineExceeded desc = context deadline exceeded while waiting for the next attempt " +
				"(grpcretry: parent_done after 1 attempt, the last: rpc error: code = Unavailable desc = backend down)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t)
				_, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{pushback}})
				ctx, cancel := tt.ctx(t.Context())
				defer cancel()
				start := time.Now()
				_, err := client.Get(ctx, &testpb.Request{})
				if d := time.Since(start); d != time.Second {
					t.Errorf("returned after %v, want 1s", d)
				}
				if err.Error() != tt.text {
					t.Errorf("text %q\nwant %q", err, tt.text)
				}
				if status.Code(err) != tt.code || status.Code(fmt.Errorf("x: %w", err)) != tt.code || !errors.Is(err, tt.is) || errors.Is(err, tt.not) {
					t.Errorf("code %v, is %v: %v, is %v: %v", status.Code(err), tt.is, errors.Is(err, tt.is), tt.not, errors.Is(err, tt.not))
				}
				st := status.Convert(errors.Unwrap(err))
				if st.Code() != codes.Unavailable || st.Message() != "backend down" || len(st.Details()) != 1 {
					t.Errorf("the server's status is %v with %v, want it as it came", st, st.Details())
				}
				var e *Error
				if !errors.As(err, &e) || e.Reason != ReasonParentDone || len(e.Attempts) != 1 || e.Attempts[0].Reason != ReasonParentDone || e.Attempts[0].Delay != 0 {
					t.Errorf("%+v", e)
				}
				for name, target := range sentinels {
					if errors.Is(err, target) {
						t.Errorf("errors.Is(%s)", name)
					}
				}
			})
		})
	}
}

// hiddenDeadline ends by a deadline without telling it beforehand, as contexts of other packages may.
type hiddenDeadline struct{ context.Context }

func (hiddenDeadline) Deadline() (time.Time, bool) { return time.Time{}, false }

// Errors come from interceptors too, and not all of them carry a proper status.
// None may end up as OK, which a caller would take for an answer.
func TestErrorsOfOtherInterceptors(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want codes.Code
	}{
		{"no status", errors.New("plain"), codes.Unknown},
		{"claims OK", okError{}, codes.Unknown},
		{"wraps one that claims OK", fmt.Errorf("x: %w", okError{}), codes.Unknown},
		{"nil status", nilStatusError{}, codes.Unknown},
		{"wraps one with a nil status", fmt.Errorf("x: %w", nilStatusError{}), codes.Unknown},
		{"bare deadline", context.DeadlineExceeded, codes.DeadlineExceeded},
		{"wrapped cancel", fmt.Errorf("x: %w", context.Canceled), codes.Canceled},
		{"wrapped status", fmt.Errorf("x: %w", status.Error(codes.Aborted, "y")), codes.Aborted},
		{"joined status", errors.Join(errors.New("x"), status.Error(codes.Aborted, "y")), codes.Aborted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				broken := func(context.Context, string, any, any, *grpc.ClientConn, grpc.UnaryInvoker, ...grpc.CallOption) error {
					return tt.err
				}
				r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 2, RetryIf: func(Attempt) Verdict { return VerdictRetry }}))
				_, client := serve(t, r, nil, grpc.WithChainUnaryInterceptor(broken))
				var report Report
				_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
				if report.Made() != 2 || report.Attempts[1].Code != tt.want {
					t.Errorf("%d attempts, the last %v, want 2 with %v", report.Made(), report.Attempts[1].Code, tt.want)
				}
				if got := status.Code(err); got != tt.want {
					t.Errorf("code %v, want %v", got, tt.want)
				}
				if !errors.Is(err, tt.err) || !strings.HasPrefix(err.Error(), tt.err.Error()+" (grpcretry: ") {
					t.Errorf("%v does not lead to the interceptor's error %v", err, tt.err)
				}
			})
		})
	}
}

// The status of an Error is asked by many pieces of code; it is never nil or OK,
// whatever the Error was made of.
func TestErrorStatusIsNeverOK(t *testing.T) {
	for _, last := range []error{errors.New("x"), okError{}, nilStatusError{}, status.Error(codes.NotFound, ""), context.Canceled} {
		for _, cut := range []error{nil, context.Canceled, context.DeadlineExceeded, errors.New("a context's own error")} {
			e := newError(Report{Reason: ReasonParentDone, Attempts: make([]Attempt, 2), Dropped: 3}, last, cut)
			st, ok := status.FromError(fmt.Errorf("x: %w", e))
			if !ok || st.Code() == codes.OK || e.GRPCStatus() == nil || status.Code(e) == codes.OK {
				t.Errorf("last %v, cut %v: status %v", last, cut, st)
			}
			if !strings.Contains(e.Error(), "after 5 attempts") {
				t.Errorf("%q does not count the attempts that the list leaves out", e.Error())
			}
			if errors.Is(e, uncomparable{nil}) {
				t.Error("an Error is something that it is not")
			}
		}
	}
}

// uncomparable is an error that == cannot be asked about.
type uncomparable struct{ list []error }

func (uncomparable) Error() string { return "uncomparable" }

// A long call must not make its report grow without end, nor lose its last attempt.
func TestReportKeepsTheFirstAndTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithBudget(Unlimited()), WithDefaultPolicy(Policy{MaxAttempts: 100, Backoff: Backoff{Base: 1, Max: 1, Jitter: NoJitter}}))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{{Code: codes.Unavailable}}})
		var report Report
		_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
		if report.Made() != 100 || srv.Count(get) != 100 || len(report.Attempts) != 32 || report.Dropped != 68 {
			t.Fatalf("%d made, %d listed, %d dropped", report.Made(), len(report.Attempts), report.Dropped)
		}
		for i, a := range report.Attempts {
			want := i + 1
			if i == 31 {
				want = 100
			}
			if a.Number != want {
				t.Errorf("entry %d is attempt %d, want %d", i, a.Number, want)
			}
		}
		if !strings.HasSuffix(err.Error(), "(grpcretry: attempts_exhausted after 100 attempts)") {
			t.Errorf("text %q", err)
		}
		// The error has a list of its own: changing one does not change the other.
		var e *Error
		if !errors.As(err, &e) {
			t.Fatalf("%T", err)
		}
		report.Attempts[0].Number = -1
		if e.Attempts[0].Number != 1 {
			t.Error("the report and the error share their attempts")
		}
	})
}
