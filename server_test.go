package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

type unaryHandler = func(context.Context, *testpb.Request) (*testpb.Response, error)

// interceptors are the server interceptors for both kinds of methods.
func interceptors(opts ...ServerOption) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(UnaryServerInterceptor(opts...)),
		grpc.ChainStreamInterceptor(StreamServerInterceptor(opts...)),
	}
}

// middle starts a server whose Get runs handle behind the interceptors.
func middle(t testing.TB, handle unaryHandler, opts ...grpc.ServerOption) *testsrv.Server {
	t.Helper()
	if opts == nil {
		opts = interceptors()
	}
	srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{{Unary: handle}}}, testsrv.WithServerOptions(opts...))
	t.Cleanup(srv.Close)
	return srv
}

// ask calls Get of srv once, without retries, and gives what pushback came back.
func ask(t testing.TB, srv *testsrv.Server, opts ...grpc.CallOption) ([]string, error) {
	t.Helper()
	var trailer metadata.MD
	opts = append(opts, grpc.Trailer(&trailer), WithoutRetry())
	_, err := dial(t, srv, newRetrier(t)).Get(t.Context(), &testpb.Request{}, opts...)
	return trailer[pushbackTrailer], err
}

// failingLeaf starts a backend of which every call fails, and a client of it.
func failingLeaf(t testing.TB, code codes.Code, message string, opts ...Option) (*testsrv.Server, testpb.TestServiceClient) {
	t.Helper()
	return serve(t, newRetrier(t, opts...), testsrv.Script{"*": testsrv.Sequence{{Code: code, Message: message}}})
}

var stop = []string{"-1"}

// A failure at the leaf is retried by the tier next to it alone; without the
// trailer every tier above would multiply its attempts. Handlers rewrap errors
// in every way there is. And an error that has nothing to do with the leaf must
// stay one that is worth a retry.
func TestServerAsksForNoRetryOfCallsGivenUp(t *testing.T) {
	for _, tt := range []struct {
		name   string
		rewrap func(error) error
		stops  bool
	}{
		{"as it is", func(err error) error { return err }, true},
		{"wrapped", func(err error) error { return fmt.Errorf("backend: %w", err) }, true},
		{"wrapped thrice", func(err error) error { return fmt.Errorf("a: %w", fmt.Errorf("b: %w", fmt.Errorf("c: %w", err))) }, true},
		{"joined", func(err error) error { return errors.Join(errors.New("cache is cold"), err) }, true},
		{"joined behind a status", func(err error) error { return errors.Join(status.Error(codes.NotFound, "not here"), err) }, true},
		{"wrapped twice at once", func(err error) error { return fmt.Errorf("%w and %w", context.Canceled, err) }, true},
		{"behind an Error that was not given up", func(err error) error {
			return errors.Join(newError(Report{Reason: ReasonNotRetryable}, status.Error(codes.NotFound, "not here"), nil), err)
		}, true},
		{"its cause alone", errors.Unwrap, true},
		{"as text", func(err error) error { return fmt.Errorf("backend: %v", err) }, true},
		{"as text of another code", func(err error) error { return status.Errorf(codes.Internal, "backend: %v", err) }, true},
		{"as text of its cause", func(err error) error { return status.Errorf(codes.Internal, "backend: %v", errors.Unwrap(err)) }, true},
		{"as its status", func(err error) error { return status.Convert(err).Err() }, true},
		{"as its status and back", func(err error) error { st, _ := status.FromError(err); return st.Err() }, true},
		{"as the status of what wraps it", func(err error) error { return status.Convert(fmt.Errorf("backend: %w", err)).Err() }, true},
		{"its message, with another code", func(err error) error {
			return status.Error(codes.Aborted, "sorry: "+status.Convert(err).Message())
		}, true},
		{"its code, with other words", func(err error) error { return status.Error(status.Code(err), "come back later") }, true},

		{"answered", func(error) error { return nil }, false},
		{"answered with another code and other words", func(error) error { return status.Error(codes.NotFound, "no such order") }, false},
		{"an error without a status", func(error) error { return errors.New("disk full") }, false},
		{"a context's error", func(error) error { return context.DeadlineExceeded }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, leaf := failingLeaf(t, codes.Unavailable, "the leaf is overloaded")
				srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
					_, err := leaf.Get(ctx, req)
					return &testpb.Response{}, tt.rewrap(err)
				})
				if got, err := ask(t, srv); slices.Equal(got, stop) != tt.stops {
					t.Errorf("pushback %q with the error %v, want -1: %v", got, err, tt.stops)
				}
			})
		})
	}
}

// A message of a word or two is found in any text, so it proves nothing.
func TestServerIsNotMisledByShortMessages(t *testing.T) {
	for _, tt := range []struct {
		message, answer string
		stops           bool
	}{
		{"", "no such order", false},
		{"down", "shutdown is denied", false},
		{"overload", "backend: overload", true},
		{"down", `rpc error: code = Unavailable desc = down`, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			_, leaf := failingLeaf(t, codes.Unavailable, tt.message)
			srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				_, _ = leaf.Get(ctx, req)
				return nil, status.Error(codes.FailedPrecondition, tt.answer)
			})
			if got, _ := ask(t, srv); slices.Equal(got, stop) != tt.stops {
				t.Errorf("message %q, answer %q: pushback %q, want -1: %v", tt.message, tt.answer, got, tt.stops)
			}
		})
	}
}

// Only a call that was given up, or of which the server below said that it was,
// speaks against a retry further up. An answer that was final at once does not,
// for another attempt of the request may find another server. What the server
// below asks for travels up whatever stood in the way of a retry here: a tier
// that does not retry must not hide it from those that do.
func TestWhichCallsServersSpeakFor(t *testing.T) {
	withinASecond := func(ctx context.Context, c testpb.TestServiceClient) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := c.Get(ctx, &testpb.Request{})
		return err
	}
	policy := func(edit func(*Policy)) grpc.CallOption { return WithCallPolicy(edit) }
	minusOne := metadata.Pairs(pushbackTrailer, "-1")
	for _, tt := range []struct {
		name   string
		leaf   testsrv.Step
		call   func(context.Context, testpb.TestServiceClient) error
		reason Reason
		stops  bool
	}{
		{name: "attempts used up", leaf: testsrv.Step{Code: codes.Unavailable}, reason: ReasonAttemptsExhausted, stops: true},
		{name: "no time", leaf: testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs(pushbackTrailer, "5000")}, reason: ReasonDeadline, stops: true,
			call: withinASecond},
		{name: "the call's own timeout", leaf: testsrv.Step{Block: true}, reason: ReasonDeadline, stops: true,
			call: func(ctx context.Context, c testpb.TestServiceClient) error {
				_, err := c.Get(ctx, &testpb.Request{}, policy(func(p *Policy) { p.Timeout = time.Second }))
				return err
			}},
		{name: "the server below asked", leaf: testsrv.Step{Code: codes.Unavailable, Trailer: minusOne}, reason: ReasonPushbackStop, stops: true},
		{name: "the server below asked, malformed", leaf: testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs(pushbackTrailer, "soon")}, reason: ReasonPushbackStop, stops: true},
		{name: "the server below asked, no retries here", leaf: testsrv.Step{Code: codes.Unavailable, Trailer: minusOne}, reason: ReasonDisabled, stops: true,
			call: func(ctx context.Context, c testpb.TestServiceClient) error {
				_, err := c.Get(ctx, &testpb.Request{}, WithoutRetry())
				return err
			}},
		{name: "the server below asked, of a write", leaf: testsrv.Step{Code: codes.Unavailable, Trailer: minusOne}, reason: ReasonPushbackStop, stops: true,
			call: func(ctx context.Context, c testpb.TestServiceClient) error {
				_, err := c.Write(ctx, &testpb.Request{})
				return err
			}},

		{name: "not retryable", leaf: testsrv.Step{Code: codes.NotFound}, reason: ReasonNotRetryable},
		{name: "not idempotent", leaf: testsrv.Step{Code: codes.Unavailable}, reason: ReasonNotIdempotent,
			call: func(ctx context.Context, c testpb.TestServiceClient) error {
				_, err := c.Write(ctx, &testpb.Request{})
				return err
			}},
		{name: "retries switched off", leaf: testsrv.Step{Code: codes.Unavailable}, reason: ReasonDisabled,
			call: func(ctx context.Context, c testpb.TestServiceClient) error {
				_, err := c.Get(ctx, &testpb.Request{}, WithoutRetry())
				return err
			}},
		{name: "the handler's context ended", leaf: testsrv.Step{Block: true}, reason: ReasonParentDone,
			call: withinASecond},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ended Reason
				hooks := WithHooks(Hooks{CallEnd: func(_ context.Context, r Report, _ any, _ error) { ended = r.Reason }})
				_, leaf := serve(t, newRetrier(t, hooks), testsrv.Script{"*": testsrv.Sequence{tt.leaf}})
				srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
					if tt.call != nil {
						return nil, tt.call(ctx, leaf)
					}
					_, err := leaf.Get(ctx, req)
					return nil, err
				})
				got, err := ask(t, srv)
				if ended != tt.reason {
					t.Errorf("the call below ended with %v, want %v", ended, tt.reason)
				}
				if slices.Equal(got, stop) != tt.stops {
					t.Errorf("pushback %q with the error %v, want -1: %v", got, err, tt.stops)
				}
			})
		})
	}
}

// With the budget spent the lowest tier no longer retries at all, and those
// above must not begin to.
func TestServerSpeaksForASpentBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		backend, leaf := failingLeaf(t, codes.Unavailable, "", WithBudget(emptyBudget(t)))
		srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) { return leaf.Get(ctx, req) })
		if got, err := ask(t, srv); !slices.Equal(got, stop) || backend.Count("") != 1 {
			t.Errorf("pushback %q after %d attempts, error %v; want -1 after one", got, backend.Count(""), err)
		}
	})
}

// A request that needs several backends fails for one of them. Whether that is
// one whose calls were given up decides, not what became of the others.
func TestServerWithSeveralBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, down := failingLeaf(t, codes.Unavailable, "down for maintenance")
		_, full := failingLeaf(t, codes.ResourceExhausted, "quota of today is used up")
		_, missing := failingLeaf(t, codes.NotFound, "no such order")
		_, well := serve(t, newRetrier(t), nil)
		for _, tt := range []struct {
			name  string
			calls []testpb.TestServiceClient // in turn; what became of the last is returned
			join  bool                       // all errors are
			stops bool
		}{
			{"the one that is down", []testpb.TestServiceClient{well, down}, false, true},
			{"another", []testpb.TestServiceClient{down, missing}, false, false},
			{"another that is not retried", []testpb.TestServiceClient{down, full}, false, false},
			{"none", []testpb.TestServiceClient{down, missing, well}, false, false},
			{"both", []testpb.TestServiceClient{down, missing}, true, true},
			{"both, in the other order", []testpb.TestServiceClient{missing, down}, true, true},
			{"both of those that are up", []testpb.TestServiceClient{missing, full}, true, false},
		} {
			srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				var all []error
				for _, c := range tt.calls {
					_, err := c.Get(ctx, req)
					all = append(all, err)
				}
				if tt.join {
					return &testpb.Response{}, errors.Join(all...)
				}
				return &testpb.Response{}, all[len(all)-1]
			})
			if got, err := ask(t, srv); slices.Equal(got, stop) != tt.stops {
				t.Errorf("%s: pushback %q with the error %v, want -1: %v", tt.name, got, err, tt.stops)
			}
		}
	})
}

// A handler that asks a hundred backends at once returns one of their errors.
// What is remembered of them is bounded, and must do all the same.
func TestServerWithManyBackends(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, leaf := serve(t, newRetrier(t), testsrv.Script{get: testsrv.Func(func(_ int, a testsrv.Attempt) testsrv.Step {
			return testsrv.Step{Code: codes.Unavailable, Message: "no shard " + a.Requests[0].GetText()}
		})})
		remembered := 0
		srv := middle(t, func(ctx context.Context, _ *testpb.Request) (*testpb.Response, error) {
			var wg sync.WaitGroup
			errs := make([]error, 100)
			for i := range errs {
				wg.Go(func() { _, errs[i] = leaf.Get(ctx, &testpb.Request{Text: fmt.Sprint(i)}) })
			}
			wg.Wait()
			remembered = len(inboundOf(ctx).givenUp)
			return nil, status.Error(status.Code(errs[0]), "some shards are missing")
		})
		if got, err := ask(t, srv); !slices.Equal(got, stop) || remembered != maxGivenUp {
			t.Errorf("pushback %q with the error %v and %d remembered, want -1 and %d", got, err, remembered, maxGivenUp)
		}
	})
}

// A handler that polls one backend a hundred times must not forget the other.
func TestServerRemembersOneFailureOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, leaf := failingLeaf(t, codes.Unavailable, "the ledger is closed")
		_, other := failingLeaf(t, codes.Unavailable, "the cache is cold")
		srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			_, err := leaf.Get(ctx, req)
			for range 100 {
				_, _ = other.Get(ctx, req)
			}
			return nil, status.Error(codes.Internal, status.Convert(err).Message())
		})
		if got, err := ask(t, srv); !slices.Equal(got, stop) {
			t.Errorf("pushback %q with the error %v, want -1", got, err)
		}
	})
}

// A panic is none of ours: it must reach whoever recovers it, outside or inside,
// and what the client gets is what that makes of it.
func TestServerLetsPanicsPass(t *testing.T) {
	recovering := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (_ any, err error) {
		defer func() {
			if p := recover(); p != nil {
				err = status.Errorf(codes.Internal, "panic: %v", p)
			}
		}()
		return handler(ctx, req)
	}
	for _, tt := range []struct {
		name  string
		chain []grpc.UnaryServerInterceptor
		what  func(error) any
		stops bool
	}{
		{"recovered outside", []grpc.UnaryServerInterceptor{recovering, UnaryServerInterceptor()}, func(err error) any { return err }, false},
		{"recovered inside, with the error", []grpc.UnaryServerInterceptor{UnaryServerInterceptor(), recovering}, func(err error) any { return err }, true},
		{"recovered inside, with something else", []grpc.UnaryServerInterceptor{UnaryServerInterceptor(), recovering}, func(error) any { return "index out of range" }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, leaf := failingLeaf(t, codes.Unavailable, "")
				srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
					_, err := leaf.Get(ctx, req)
					panic(tt.what(err))
				}, grpc.ChainUnaryInterceptor(tt.chain...))
				got, err := ask(t, srv)
				if status.Code(err) != codes.Internal || !strings.HasPrefix(status.Convert(err).Message(), "panic: ") {
					t.Errorf("error %v, want that of the panic", err)
				}
				if slices.Equal(got, stop) != tt.stops {
					t.Errorf("pushback %q, want -1: %v", got, tt.stops)
				}
			})
		})
	}
}

// A handler that has sent its header before it fails cannot send a trailers-only
// answer any more. The trailer still goes out, and our client obeys it there too.
func TestServerSpeaksAfterTheHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, leaf := failingLeaf(t, codes.Unavailable, "")
		srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			if err := grpc.SendHeader(ctx, metadata.Pairs("early", "yes")); err != nil {
				t.Error(err)
			}
			return leaf.Get(ctx, req)
		})
		var header metadata.MD
		if got, err := ask(t, srv, grpc.Header(&header)); !slices.Equal(got, stop) || len(header["early"]) != 1 {
			t.Errorf("pushback %q, header %v with the error %v, want -1 after the early header", got, header, err)
		}
		_, err := dial(t, srv, newRetrier(t)).Get(t.Context(), &testpb.Request{})
		if got := srv.Count(get); got != 2 || !errors.Is(err, ErrPushbackStop) {
			t.Errorf("%d attempts with the error %v, want one more than before, and pushback_stop", got, err)
		}
	})
}

// Two libraries may each install the interceptor. Two values of -1 would do as
// well as one, but two flags, of which the inner hides the outer, would not.
func TestServerInterceptorsStacked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, leaf := failingLeaf(t, codes.Unavailable, "")
		handle := func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) { return leaf.Get(ctx, req) }
		// rewrap stands between the two: the inner one sees another error than the outer.
		rewrap := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			if _, err := handler(ctx, req); err == nil {
				t.Error("the handler answered")
			}
			return &testpb.Response{}, nil
		}
		on, off := UnaryServerInterceptor(), UnaryServerInterceptor(WithoutGivenUpPushback())
		for _, tt := range []struct {
			name  string
			chain []grpc.UnaryServerInterceptor
			want  []string
		}{
			{"two", []grpc.UnaryServerInterceptor{on, on}, stop},
			{"three", []grpc.UnaryServerInterceptor{on, on, on}, stop},
			{"the outer one is off", []grpc.UnaryServerInterceptor{off, on}, nil},
			{"the inner one is off", []grpc.UnaryServerInterceptor{on, off}, stop},
			{"the error is dealt with in between", []grpc.UnaryServerInterceptor{on, rewrap, on}, nil},
		} {
			if got, _ := ask(t, middle(t, handle, grpc.ChainUnaryInterceptor(tt.chain...))); !slices.Equal(got, tt.want) {
				t.Errorf("%s: pushback %q, want %q", tt.name, got, tt.want)
			}
		}
	})
}

// A pushback that the handler set goes out as it is. Beside ours it does not
// invite anybody: clients take two values for no retry.
func TestServerBesideAPushbackOfTheHandler(t *testing.T) {
	for _, tt := range []struct {
		own      string
		givenUp  bool
		want     []string
		attempts int
	}{
		{"20", false, []string{"20"}, 3},
		{"-1", false, stop, 1},
		{"20", true, []string{"20", "-1"}, 1},
		{"-1", true, []string{"-1", "-1"}, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			_, leaf := failingLeaf(t, codes.Unavailable, "")
			srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				if err := grpc.SetTrailer(ctx, metadata.Pairs(pushbackTrailer, tt.own)); err != nil {
					t.Error(err)
				}
				if tt.givenUp {
					return leaf.Get(ctx, req)
				}
				return nil, status.Error(codes.Unavailable, "not now")
			})
			var trailer metadata.MD
			_, _ = dial(t, srv, newRetrier(t)).Get(t.Context(), &testpb.Request{}, grpc.Trailer(&trailer))
			if got := trailer[pushbackTrailer]; !slices.Equal(got, tt.want) || srv.Count(get) != tt.attempts {
				t.Errorf("%+v: pushback %q and %d attempts, want %q and %d", tt, got, srv.Count(get), tt.want, tt.attempts)
			}
		})
	}
}

// Calls are made with other contexts than the handler's own: values without its
// cancellation, one from elsewhere, or one whose request is long over.
func TestServerAndDetachedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, leaf := failingLeaf(t, codes.Unavailable, "", WithBudget(Unlimited()))
		late := make(chan error, 1)
		for _, tt := range []struct {
			name   string
			handle unaryHandler
			want   []string
		}{
			{"without cancel, as text", func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				_, err := leaf.Get(context.WithoutCancel(ctx), req)
				return nil, fmt.Errorf("backend: %v", err)
			}, stop},
			{"another context, the error itself", func(_ context.Context, req *testpb.Request) (*testpb.Response, error) {
				_, err := leaf.Get(context.Background(), req)
				return nil, fmt.Errorf("backend: %w", err)
			}, stop},
			{"another context, as text", func(_ context.Context, req *testpb.Request) (*testpb.Response, error) {
				_, err := leaf.Get(context.Background(), req)
				return nil, status.Errorf(codes.Unavailable, "backend: %v", err)
			}, nil},
			{"another context, in work that was retried", func(_ context.Context, req *testpb.Request) (*testpb.Response, error) {
				runs := 0
				return nil, newRetrier(t).Do(context.Background(), "jobs/a", func(ctx context.Context) error {
					if runs++; runs == 1 {
						return Retryable(errors.New("not yet"))
					}
					_, err := leaf.Get(ctx, req)
					return err
				})
			}, stop},
			{"on a goroutine", func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				ch := make(chan error)
				go func() {
					_, err := leaf.Get(ctx, req)
					ch <- err
				}()
				return nil, fmt.Errorf("backend: %v", <-ch)
			}, stop},
			{"after the answer", func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				ctx = context.WithoutCancel(ctx)
				go func() {
					time.Sleep(time.Minute) // longer than the request
					_, err := leaf.Get(ctx, req)
					late <- err
				}()
				return nil, status.Error(codes.Unavailable, "working on it")
			}, nil},
		} {
			srv := middle(t, tt.handle)
			if got, err := ask(t, srv); !slices.Equal(got, tt.want) {
				t.Errorf("%s: pushback %q with the error %v, want %q", tt.name, got, err, tt.want)
			}
		}
		if err := <-late; !errors.Is(err, ErrAttemptsExhausted) {
			t.Errorf("the call after the answer ended with %v, want the attempts used up", err)
		}
	})
}

// Work inside a handler is made of calls like any other, and is one itself.
func TestServerAndWork(t *testing.T) {
	for _, tt := range []struct {
		name  string
		work  func(r *Retrier, ctx context.Context, leaf testpb.TestServiceClient) error
		stops bool
	}{
		{"a call inside was given up", func(r *Retrier, ctx context.Context, leaf testpb.TestServiceClient) error {
			return r.Do(ctx, "jobs/a", func(ctx context.Context) error {
				_, err := leaf.Get(ctx, &testpb.Request{})
				return err
			})
		}, true},
		{"a call inside was given up, told as text", func(r *Retrier, ctx context.Context, leaf testpb.TestServiceClient) error {
			err := r.Do(ctx, "jobs/a", func(ctx context.Context) error {
				_, err := leaf.Get(ctx, &testpb.Request{})
				return err
			})
			return fmt.Errorf("job: %v", err)
		}, true},
		{"the work itself was given up", func(r *Retrier, ctx context.Context, _ testpb.TestServiceClient) error {
			err := r.Do(ctx, "jobs/a", func(context.Context) error { return Retryable(errors.New("the disk is busy")) })
			return fmt.Errorf("job: %v", err)
		}, true},
		{"the work failed for good", func(r *Retrier, ctx context.Context, _ testpb.TestServiceClient) error {
			return r.Do(ctx, "jobs/a", func(context.Context) error { return Permanent(errors.New("no such job")) })
		}, false},
		{"the work dealt with it", func(r *Retrier, ctx context.Context, leaf testpb.TestServiceClient) error {
			return r.Do(ctx, "jobs/a", func(ctx context.Context) error {
				_, _ = leaf.Get(ctx, &testpb.Request{})
				return nil
			})
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t)
				_, leaf := failingLeaf(t, codes.Unavailable, "")
				srv := middle(t, func(ctx context.Context, _ *testpb.Request) (*testpb.Response, error) {
					return &testpb.Response{}, tt.work(r, ctx, leaf)
				})
				if got, err := ask(t, srv); slices.Equal(got, stop) != tt.stops {
					t.Errorf("pushback %q with the error %v, want -1: %v", got, err, tt.stops)
				}
			})
		})
	}
}

// Streams end with a trailer as unary calls do, whatever was sent before.
func TestServerAsksForNoRetryOfStreams(t *testing.T) {
	list, sync := testpb.TestService_List_FullMethodName, testpb.TestService_Sync_FullMethodName
	for _, tt := range []struct {
		name   string
		before func(grpc.ServerStream) error
		rewrap func(error) error
		own    string
		want   []string
	}{
		{name: "at once", want: stop},
		{name: "as text", rewrap: func(err error) error { return fmt.Errorf("backend: %v", err) }, want: stop},
		{name: "after the header", before: func(ss grpc.ServerStream) error { return ss.SendHeader(metadata.Pairs("early", "yes")) }, want: stop},
		{name: "after a message", before: func(ss grpc.ServerStream) error { return ss.SendMsg(&testpb.Response{}) }, want: stop},
		{name: "beside a pushback of the handler", own: "20", want: []string{"20", "-1"}},
		{name: "dealt with", rewrap: func(error) error { return nil }},
		{name: "dealt with by another error", rewrap: func(error) error { return status.Error(codes.NotFound, "no such order") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, leaf := failingLeaf(t, codes.Unavailable, "")
				handle := func(ss grpc.ServerStream, _ *testpb.Request) error {
					if tt.before != nil {
						if err := tt.before(ss); err != nil {
							t.Error(err)
						}
					}
					if tt.own != "" {
						ss.SetTrailer(metadata.Pairs(pushbackTrailer, tt.own))
					}
					_, err := leaf.Get(ss.Context(), &testpb.Request{})
					if tt.rewrap != nil {
						err = tt.rewrap(err)
					}
					return err
				}
				srv := testsrv.New(testsrv.Script{list: testsrv.Sequence{{Stream: handle}}, sync: testsrv.Sequence{{Stream: handle}}},
					testsrv.WithServerOptions(append(interceptors(), interceptors()...)...)) // stacked
				t.Cleanup(srv.Close)
				client := dial(t, srv, newRetrier(t))

				down, err := client.List(t.Context(), &testpb.Request{})
				if err != nil {
					t.Fatal(err)
				}
				for err == nil {
					_, err = down.Recv()
				}
				if got := down.Trailer()[pushbackTrailer]; !slices.Equal(got, tt.want) {
					t.Errorf("List: pushback %q with the error %v, want %q", got, err, tt.want)
				}

				both, err := client.Sync(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				for err == nil {
					_, err = both.Recv()
				}
				if got := both.Trailer()[pushbackTrailer]; !slices.Equal(got, tt.want) {
					t.Errorf("Sync: pushback %q with the error %v, want %q", got, err, tt.want)
				}
				if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
					t.Errorf("Get = %v, want an answer", err)
				}
			})
		})
	}
}

// A handler's call may be a stream. It is given up as a unary call is; and
// where its caller already had a part of the answer, what the server below asks
// for in the end is passed on, and nothing else.
func TestServerSpeaksForOutboundStreams(t *testing.T) {
	list, store := testpb.TestService_List_FullMethodName, testpb.TestService_Store_FullMethodName
	down := testsrv.Step{Code: codes.Unavailable, Message: "the leaf is down"}
	asking := down
	asking.Trailer = metadata.Pairs(pushbackTrailer, "-1")
	broken := func(s testsrv.Step) testsrv.Step { s.Messages = 1; return s }
	for _, tt := range []struct {
		name     string
		leaf     testsrv.Step
		attempts int
		stops    bool
	}{
		{"given up", down, 3, true},
		{"the server below asked", asking, 1, true},
		{"committed", broken(down), 1, false},
		{"committed, and the server below asked", broken(asking), 1, true},
	} {
		for _, method := range []string{list, store} {
			if method == store && tt.leaf.Messages > 0 {
				continue // a client-streaming call has no part of an answer
			}
			t.Run(tt.name+method, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					backend, leaf := serve(t, newRetrier(t), testsrv.Script{method: testsrv.Sequence{tt.leaf}})
					srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
						if method == store {
							stream, err := leaf.Store(ctx)
							if err != nil {
								return nil, err
							}
							_ = stream.Send(req) // CloseAndRecv tells of a failure
							_, err = stream.CloseAndRecv()
							return nil, fmt.Errorf("backend: %v", err)
						}
						stream, err := leaf.List(ctx, req)
						for err == nil {
							_, err = stream.Recv()
						}
						return nil, fmt.Errorf("backend: %v", err)
					})
					got, err := ask(t, srv)
					if slices.Equal(got, stop) != tt.stops || backend.Count(method) != tt.attempts {
						t.Errorf("pushback %q with the error %v after %d attempts, want -1: %v after %d", got, err, backend.Count(method), tt.stops, tt.attempts)
					}
				})
			})
		}
	}
}

// A trailer that goes out with another request's failure makes its client give
// up for nothing; one that is lost multiplies. Ten thousand requests run beside
// each other, on the same connections, of every kind there is.
func TestServerKeepsRequestsApart(t *testing.T) {
	const requests, workers = 10_000, 64
	synctest.Test(t, func(t *testing.T) {
		_, leaf := serve(t, newRetrier(t, WithBudget(Unlimited())), nil, grpc.WithChainUnaryInterceptor(
			func(context.Context, string, any, any, *grpc.ClientConn, grpc.UnaryInvoker, ...grpc.CallOption) error {
				return status.Error(codes.Unavailable, "the leaf is down")
			}))
		kinds := []struct {
			handle unaryHandler
			stops  bool
		}{
			{func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) { return leaf.Get(ctx, req) }, true},
			{func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				_, err := leaf.Get(ctx, req)
				return nil, status.Errorf(codes.Internal, "backend: %v", err)
			}, true},
			{func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				go leaf.Get(context.WithoutCancel(ctx), req) //nolint:errcheck // outlives the request
				return nil, status.Error(codes.FailedPrecondition, "the leaf has nothing to do with it")
			}, false},
			{func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
				_, _ = leaf.Get(ctx, req)
				return nil, status.Error(codes.NotFound, "no such order")
			}, false},
			{func(context.Context, *testpb.Request) (*testpb.Response, error) {
				return nil, status.Error(codes.Unavailable, "the leaf is down") // no call of its own
			}, false},
			{func(context.Context, *testpb.Request) (*testpb.Response, error) { return &testpb.Response{}, nil }, false},
		}
		srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			return kinds[req.GetNumber()].handle(ctx, req)
		})
		client := dial(t, srv, newRetrier(t))
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for i := w; i < requests; i += workers {
					n := i % len(kinds)
					var trailer metadata.MD
					_, err := client.Get(t.Context(), &testpb.Request{Number: int64(n)}, WithoutRetry(), grpc.Trailer(&trailer))
					if got := trailer[pushbackTrailer]; slices.Equal(got, stop) != kinds[n].stops {
						t.Errorf("request %d of kind %d: pushback %q with the error %v, want -1: %v", i, n, got, err, kinds[n].stops)
					}
				}
			})
		}
		wg.Wait()
	})
}

// An interceptor that is called without a grpc server, as in unit tests of
// handlers, has nowhere to put a trailer. It must not get in the way.
func TestServerInterceptorWithoutServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, leaf := failingLeaf(t, codes.Unavailable, "")
		reply, err := UnaryServerInterceptor(nil, WithRetrySubtree(), nil)(t.Context(), &testpb.Request{}, &grpc.UnaryServerInfo{},
			func(ctx context.Context, req any) (any, error) { return leaf.Get(ctx, req.(*testpb.Request)) })
		if !errors.Is(err, ErrAttemptsExhausted) {
			t.Errorf("(%v, %v), want the handler's own error", reply, err)
		}
	})
}

// What a client says of its attempts is outside input. Whatever it is, handlers
// get a number that they can count with.
func TestPreviousAttempts(t *testing.T) {
	for _, tt := range []struct {
		values []string
		want   int
	}{
		{nil, 0},
		{[]string{"0"}, 0},
		{[]string{"1"}, 1},
		{[]string{"4"}, 4},
		{[]string{"007"}, 7},
		{[]string{"2147483647"}, 1<<31 - 1},
		{[]string{"2147483648"}, 1<<31 - 1},
		{[]string{"9223372036854775807"}, 1<<31 - 1},
		{[]string{"99999999999999999999999999"}, 1<<31 - 1},
		{[]string{""}, 0},
		{[]string{"-1"}, 0},
		{[]string{"+1"}, 0},
		{[]string{" 1"}, 0},
		{[]string{"1.0"}, 0},
		{[]string{"0x10"}, 0},
		{[]string{"1_000"}, 0},
		{[]string{"two"}, 0},
		{[]string{"1", "1"}, 0},
	} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.MD{attemptsHeader: tt.values})
		if got := PreviousAttempts(ctx); got != tt.want {
			t.Errorf("PreviousAttempts of %q = %d, want %d", tt.values, got, tt.want)
		}
	}
	if got := PreviousAttempts(t.Context()); got != 0 {
		t.Errorf("PreviousAttempts outside a handler = %d, want 0", got)
	}
}

// Handlers tell attempts of one call apart, and recognise the call by its key,
// with no interceptor in the server.
func TestHandlersKnowAttemptAndKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var attempts []int
		var keys []string
		_, client := serve(t, newRetrier(t), testsrv.Script{get: testsrv.Sequence{{
			Unary: func(ctx context.Context, _ *testpb.Request) (*testpb.Response, error) {
				attempts, keys = append(attempts, PreviousAttempts(ctx)), append(keys, IdempotencyKeyFromContext(ctx))
				return nil, status.Error(codes.Unavailable, "")
			},
		}}})
		if _, err := client.Get(t.Context(), &testpb.Request{}, WithIdempotencyKey("order-4711")); err == nil {
			t.Fatal("no error")
		}
		if !slices.Equal(attempts, []int{0, 1, 2}) || !slices.Equal(keys, []string{"order-4711", "order-4711", "order-4711"}) {
			t.Errorf("attempts %v with keys %q, want 0, 1, 2 with the same key", attempts, keys)
		}
		if got := IdempotencyKeyFromContext(t.Context()); got != "" {
			t.Errorf("key %q outside a handler, want none", got)
		}
	})
}

// retrying makes a context by which the next tier takes the call for a retry.
func retrying(ctx context.Context, n string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, attemptsHeader, n)
}

// Below a retry nothing is retried and nothing is earned, whatever the failure
// was, and the mark goes on to the tiers below. Otherwise attempts multiply, and
// the successes that a retry storm brings along pay for the next one.
func TestRetrySubtree(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []ServerOption
		header string
		marked bool
	}{
		{"a retry", []ServerOption{WithRetrySubtree()}, "2", true},
		{"a first attempt", []ServerOption{WithRetrySubtree()}, "", false},
		{"said to be one", []ServerOption{WithRetrySubtree()}, "0", false},
		{"malformed", []ServerOption{WithRetrySubtree()}, "many", false},
		{"without the option", nil, "2", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, wiring := newAccounts(t)
				for _, b := range []Budget{a.target, a.method} { // so that there is room for a deposit
					grant, _ := b.Reserve(CostTransient)
					b.Settle(grant, false)
				}
				a.throttle.Record(OutcomeFailure)
				leaf, client := serve(t, newRetrier(t, wiring...), testsrv.Script{
					get: testsrv.Fail(1, codes.Unavailable).ThenOK(), put: nil,
				})
				var report Report
				srv := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
					if _, err := client.Put(ctx, req); err != nil { // would be paid in
						t.Error(err)
					}
					ctx = metadata.AppendToOutgoingContext(ctx, "tenant", "blue")
					return client.Get(ctx, req, WithReport(&report))
				}, interceptors(tt.opts...)...)
				ctx := t.Context()
				if tt.header != "" {
					ctx = retrying(ctx, tt.header)
				}
				var trailer metadata.MD
				_, err := dial(t, srv, newRetrier(t)).Get(ctx, &testpb.Request{}, grpc.Trailer(&trailer), WithoutRetry())
				if got := trailer[pushbackTrailer]; got != nil {
					t.Errorf("pushback %q: that a call was suppressed is no reason for one", got)
				}
				var told []string
				for _, at := range leaf.Attempts("") {
					if at.Method == get && !slices.Equal(at.Metadata["tenant"], []string{"blue"}) {
						t.Errorf("metadata %v, want the handler's own kept", at.Metadata)
					}
					told = append(told, strings.Join(at.Metadata[attemptsHeader], "+"))
				}
				switch {
				case tt.marked && (status.Code(err) != codes.Unavailable || report.Reason != ReasonInboundRetry || !slices.Equal(told, []string{"2", "2"})):
					t.Errorf("error %v, report %v, headers at the leaf %q; want one attempt each, marked as retries", err, report.Reason, told)
				case !tt.marked && (err != nil || report.Made() != 2 || !slices.Equal(told, []string{"", "", "1"})):
					t.Errorf("error %v, %d attempts, headers at the leaf %q; want a retry", err, report.Made(), told)
				}
				if tt.marked {
					a.check(t, "below a retry", 63, 63, 9)
				} else {
					a.check(t, "elsewhere", 64, 63, 8.2) // Put's success; of Get a failure and a retry that won
				}
			})
		})
	}
}

// The mark travels on over tiers that install the option, also where one in
// between makes its call inside work, or could not even connect.
func TestRetrySubtreeOverTiers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leaf, client := failingLeaf(t, codes.Unavailable, "")
		runs := 0
		r := newRetrier(t)
		lower := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			return DoValue(ctx, r, "jobs/a", func(ctx context.Context) (*testpb.Response, error) {
				runs++
				return client.Get(ctx, req, WithCallPolicy(func(p *Policy) { p.MaxAttempts = 5 }))
			})
		}, interceptors(WithRetrySubtree())...)
		below := dial(t, lower, newRetrier(t))
		upper := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) {
			return below.Get(ctx, req)
		}, interceptors(WithRetrySubtree())...)

		var trailer metadata.MD
		_, err := dial(t, upper, newRetrier(t)).Get(retrying(t.Context(), "1"), &testpb.Request{}, WithoutRetry(), grpc.Trailer(&trailer))
		if status.Code(err) != codes.Unavailable || lower.Count(get) != 1 || runs != 1 || leaf.Count(get) != 1 {
			t.Errorf("error %v with %d requests, %d runs of the work and %d attempts at the leaf, want one of each", err, lower.Count(get), runs, leaf.Count(get))
		}
		if got := leaf.Attempts(get)[0].Metadata[attemptsHeader]; !slices.Equal(got, []string{"1"}) {
			t.Errorf("%s at the leaf: %q, want that of the request", attemptsHeader, got)
		}
		if got := trailer[pushbackTrailer]; got != nil {
			t.Errorf("pushback %q, want none: nothing was given up", got)
		}

		leaf.Kill() // from now on attempts are not even sent
		_, err = dial(t, upper, newRetrier(t)).Get(retrying(t.Context(), "1"), &testpb.Request{}, WithoutRetry())
		if status.Code(err) != codes.Unavailable || lower.Count(get) != 2 || runs != 2 {
			t.Errorf("error %v with %d requests and %d runs, want one more of each", err, lower.Count(get), runs)
		}
	})
}

// Streams are calls like any other: below a retry they have one attempt, and
// carry the mark on, whatever kind of request they serve.
func TestRetrySubtreeOfStreams(t *testing.T) {
	list := testpb.TestService_List_FullMethodName
	synctest.Test(t, func(t *testing.T) {
		leaf, client := failingLeaf(t, codes.Unavailable, "")
		handle := func(ss grpc.ServerStream, req *testpb.Request) error {
			stream, err := client.List(ss.Context(), req)
			for err == nil {
				_, err = stream.Recv()
			}
			return err
		}
		srv := testsrv.New(testsrv.Script{list: testsrv.Sequence{{Stream: handle}}}, testsrv.WithServerOptions(interceptors(WithRetrySubtree())...))
		t.Cleanup(srv.Close)
		stream, err := dial(t, srv, newRetrier(t)).List(retrying(t.Context(), "1"), &testpb.Request{}, WithoutRetry())
		for err == nil {
			_, err = stream.Recv()
		}
		at := leaf.Attempts(list)
		if status.Code(err) != codes.Unavailable || len(at) != 1 || !slices.Equal(at[0].Metadata[attemptsHeader], []string{"1"}) {
			t.Errorf("error %v after the attempts %+v, want one that is marked", err, at)
		}
		if got := stream.Trailer()[pushbackTrailer]; got != nil {
			t.Errorf("pushback %q, want none", got)
		}
	})
}

// Where the tier below does not know of the subtree and gave up by itself, its
// wish for no retry must not end at the tier that was suppressed.
func TestRetrySubtreePassesTheWishOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leaf, client := failingLeaf(t, codes.Unavailable, "")
		lower := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) { return client.Get(ctx, req) })
		below := dial(t, lower, newRetrier(t))
		upper := middle(t, func(ctx context.Context, req *testpb.Request) (*testpb.Response, error) { return below.Get(ctx, req) },
			interceptors(WithRetrySubtree())...)
		var trailer metadata.MD
		_, err := dial(t, upper, newRetrier(t)).Get(retrying(t.Context(), "1"), &testpb.Request{}, WithoutRetry(), grpc.Trailer(&trailer))
		if got := trailer[pushbackTrailer]; !slices.Equal(got, stop) || lower.Count(get) != 1 || leaf.Count(get) != 3 {
			t.Errorf("pushback %q with the error %v after %d requests and %d attempts, want -1 after 1 and 3", got, err, lower.Count(get), leaf.Count(get))
		}
	})
}

// The span of a request tells which attempt it was and how much time it had.
// The names and types are those of the events, so that one query finds both.
func TestServerSpanAttributes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		header string
		limit  time.Duration
		want   map[attribute.Key]attribute.Value
	}{
		{"a first attempt", "", 0, map[attribute.Key]attribute.Value{"grpcretry.attempt.number": attribute.IntValue(1)}},
		{"a third with a deadline", "2", 1500 * time.Millisecond, map[attribute.Key]attribute.Value{
			"grpcretry.attempt.number": attribute.IntValue(3), "grpcretry.deadline.remaining": attribute.Float64Value(1.5)}},
		{"the greatest", "99999999999", 0, map[attribute.Key]attribute.Value{"grpcretry.attempt.number": attribute.IntValue(1 << 31)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				spans := tracetest.NewSpanRecorder()
				tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
				spanned := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
					ctx, span := tracer.Start(ctx, "request")
					defer span.End()
					return handler(ctx, req)
				}
				srv := middle(t, func(context.Context, *testpb.Request) (*testpb.Response, error) { return &testpb.Response{}, nil },
					grpc.ChainUnaryInterceptor(spanned, UnaryServerInterceptor()))
				ctx := t.Context()
				if tt.header != "" {
					ctx = retrying(ctx, tt.header)
				}
				if tt.limit > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.limit)
					defer cancel()
				}
				if _, err := dial(t, srv, newRetrier(t)).Get(ctx, &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
				got := map[attribute.Key]attribute.Value{}
				for _, a := range spans.Ended()[0].Attributes() {
					got[a.Key] = a.Value
					if have, want := fmt.Sprintf("%T", a.Value.AsInterface()), fmt.Sprintf("%T", attemptevents.Schema[a.Key]); have != want {
						t.Errorf("%s is a %s, in the schema of the events a %s", a.Key, have, want)
					}
				}
				if !maps.Equal(got, tt.want) {
					t.Errorf("attributes %v, want %v", got, tt.want)
				}
			})
		})
	}
}
