package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// endings is a TracerProvider that also counts how often spans are begun and
// how often End is called; the SDK's spans forgive a second End.
type endings struct {
	trace.TracerProvider
	recorder    *tracetest.SpanRecorder
	begun, ends atomic.Int32
}

func newEndings(opts ...sdktrace.TracerProviderOption) *endings {
	e := &endings{recorder: tracetest.NewSpanRecorder()}
	e.TracerProvider = sdktrace.NewTracerProvider(append(opts, sdktrace.WithSpanProcessor(e.recorder))...)
	return e
}

func (e *endings) Tracer(name string, opts ...trace.TracerOption) trace.Tracer {
	return countingTracer{e.TracerProvider.Tracer(name, opts...), e}
}

type countingTracer struct {
	trace.Tracer
	e *endings
}

func (t countingTracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	t.e.begun.Add(1)
	ctx, span := t.Tracer.Start(ctx, name, opts...)
	span = countingSpan{span, t.e}
	return trace.ContextWithSpan(ctx, span), span
}

type countingSpan struct {
	trace.Span
	e *endings
}

func (s countingSpan) End(opts ...trace.SpanEndOption) {
	s.e.ends.Add(1)
	s.Span.End(opts...)
}

// one is the only span there is; it was ended once.
func (e *endings) one(t testing.TB) sdktrace.ReadOnlySpan {
	t.Helper()
	ended := e.recorder.Ended()
	if begun, ends := e.begun.Load(), e.ends.Load(); begun != 1 || ends != 1 || len(ended) != 1 {
		t.Fatalf("%d spans begun, End called %d times, %d ended; want 1 each", begun, ends, len(ended))
	}
	return ended[0]
}

func attributesOf(span sdktrace.ReadOnlySpan) event {
	all := event{}
	for _, a := range span.Attributes() {
		all[a.Key] = a.Value.AsInterface()
	}
	return all
}

// checkCallSpan checks all that a call span says in the end.
func checkCallSpan(t testing.TB, span sdktrace.ReadOnlySpan, name, code, errorType string, attempts int) {
	t.Helper()
	want := event{"rpc.method": name, "rpc.response.status_code": code, "grpcretry.call.attempts": int64(attempts)}
	if strings.HasPrefix(name, "testsrv") {
		want["rpc.system.name"] = "grpc"
	}
	status := otelcodes.Unset
	if errorType != "" {
		want["error.type"], status = errorType, otelcodes.Error
	}
	if got := attributesOf(span); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("attributes %v, want %v", got, want)
	}
	if span.Name() != name || span.Status().Code != status || span.Status().Description != "" || span.SpanKind() != trace.SpanKindInternal {
		t.Errorf("span %q, status %v, kind %v; want %q, status %v without text, kind internal", span.Name(), span.Status(), span.SpanKind(), name, status)
	}
}

// Somebody whose program has no spans wants one trace per call, red only if the
// call failed, and not a span that is still open when the call is over.
func TestCallSpan(t *testing.T) {
	const service = "testsrv.v1.TestService/"
	secret := testsrv.Step{Code: codes.Unavailable, Message: "for jane@example.com"}
	boom := func(Attempt) Verdict { panic("boom") }
	for name, test := range map[string]struct {
		method    string
		steps     testsrv.Sequence
		policy    func(*Policy)
		options   []Option
		cancel    time.Duration // < 0: before the call
		closed    bool
		panics    bool
		attempts  int
		code      string
		errorType string // "": = code
		decisions string
	}{
		"success":                   {attempts: 1, code: "OK", decisions: "success"},
		"success at the third":      {steps: testsrv.Sequence{secret, secret, {}}, attempts: 3, code: "OK", decisions: "retry retry success"},
		"given up":                  {steps: testsrv.Sequence{secret}, attempts: 3, code: "UNAVAILABLE", decisions: "retry retry attempts_exhausted"},
		"not retried":               {method: write, steps: testsrv.Sequence{secret}, attempts: 1, code: "UNAVAILABLE", decisions: "not_idempotent"},
		"not found":                 {steps: testsrv.Sequence{{Code: codes.NotFound}}, attempts: 1, code: "NOT_FOUND", decisions: "not_retryable"},
		"cancelled in the wait":     {steps: testsrv.Sequence{secret}, cancel: 5 * ms, attempts: 1, code: "CANCELLED", decisions: "parent_done"},
		"cancelled in an attempt":   {steps: testsrv.Sequence{{Block: true}}, cancel: 5 * ms, attempts: 1, code: "CANCELLED", decisions: "parent_done"},
		"cancelled before":          {cancel: -1, attempts: 1, code: "CANCELLED", decisions: "parent_done"},
		"connection closed":         {closed: true, attempts: 1, code: "CANCELLED", decisions: "closed"},
		"attempt timeout, then OK":  {steps: testsrv.Sequence{{Block: true}, {}}, policy: func(p *Policy) { p.AttemptTimeout = 50 * ms }, attempts: 2, code: "OK", decisions: "retry success"},
		"events only on retry":      {options: []Option{WithEventsOnlyOnRetry()}, attempts: 1, code: "OK"},
		"RetryIf panics":            {steps: testsrv.Sequence{secret}, policy: func(p *Policy) { p.RetryIf = boom }, panics: true, attempts: 1, code: "INTERNAL", errorType: "panic"},
		"AttemptEnd panics":         {options: []Option{WithHooks(Hooks{AttemptEnd: func(context.Context, Attempt) { panic("boom") }})}, panics: true, attempts: 1, code: "INTERNAL", errorType: "panic", decisions: "success"},
		"CallEnd panics":            {options: []Option{WithHooks(Hooks{CallEnd: func(context.Context, Report, any, error) { panic("boom") }})}, panics: true, attempts: 1, code: "OK", decisions: "success"},
		"CallEnd panics at failure": {method: write, steps: testsrv.Sequence{secret}, options: []Option{WithHooks(Hooks{CallEnd: func(context.Context, Report, any, error) { panic("boom") }})}, panics: true, attempts: 1, code: "UNAVAILABLE", decisions: "not_idempotent"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = get
				}
				if test.errorType == "" && test.code != "OK" {
					test.errorType = test.code
				}
				tp := newEndings()
				srv := testsrv.New(testsrv.Script{test.method: test.steps})
				t.Cleanup(srv.Close)
				cc, err := srv.Dial(newRetrier(t, append(test.options, WithCallSpan(tp), exactly(test.policy))...).DialOptions()...)
				if err != nil {
					t.Fatal(err)
				}
				if test.closed {
					_ = cc.Close()
				}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				switch {
				case test.cancel < 0:
					cancel()
				case test.cancel > 0:
					time.AfterFunc(test.cancel, cancel)
				}
				start := time.Now()
				func() {
					defer func() {
						if p := recover(); (p != nil) != test.panics {
							t.Errorf("panic %v, want one: %v", p, test.panics)
						}
					}()
					_, _ = unaryOf(testpb.NewTestServiceClient(cc), test.method)(ctx, &testpb.Request{})
				}()
				span := tp.one(t)
				if !span.StartTime().Equal(start) || !span.EndTime().Equal(time.Now()) {
					t.Errorf("span from %v to %v, want the whole call: %v to %v", span.StartTime(), span.EndTime(), start, time.Now())
				}
				checkCallSpan(t, span, service+test.method[len(service)+1:], test.code, test.errorType, test.attempts)
				if span.Parent().IsValid() {
					t.Error("the span has a parent")
				}
				if test.code == "INTERNAL" && test.decisions == "" { // RetryIf, before there was a decision
					return
				}
				if got := strings.Join(decisions(eventsOf(t, span)), " "); got != test.decisions {
					t.Errorf("events %q, want %q", got, test.decisions)
				}
			})
		})
	}
}

// A call below a span of the caller's must not leave that trace, nor write on
// that span, and what runs within the attempts belongs below the call.
func TestCallSpanStandsBetweenCallerAndAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tp := newEndings()
		var attempts, hooks []trace.SpanContext
		hook := func(ctx context.Context) { hooks = append(hooks, trace.SpanContextFromContext(ctx)) }
		_, client := serve(t, newRetrier(t, exactly(nil), WithCallSpan(tp), WithHooks(Hooks{
			AttemptEnd: func(ctx context.Context, _ Attempt) { hook(ctx) },
			CallEnd:    func(ctx context.Context, _ Report, _ any, _ error) { hook(ctx) },
		})), testsrv.Script{put: testsrv.Fail(2, codes.Unavailable).ThenOK()},
			grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				attempts = append(attempts, trace.SpanContextFromContext(ctx))
				if md, _ := metadata.FromOutgoingContext(ctx); len(md.Get(keyHeader)) != 1 {
					t.Errorf("metadata %v, want an idempotency key", md)
				}
				return invoker(ctx, method, req, reply, cc, opts...)
			}))
		ctx, end := tracedSpan(t.Context())
		parent := trace.SpanContextFromContext(ctx)
		if _, err := client.Put(ctx, &testpb.Request{}, WithIdempotencyKey("")); err != nil {
			t.Fatal(err)
		}
		if caller := end(); len(caller.Events()) != 0 || len(caller.Attributes()) != 0 {
			t.Errorf("the caller's span has events %v and attributes %v", caller.Events(), caller.Attributes())
		}
		span := tp.one(t)
		if span.Parent().SpanID() != parent.SpanID() || span.SpanContext().TraceID() != parent.TraceID() {
			t.Errorf("the parent of the call's span is %v, want %v", span.Parent(), parent)
		}
		for _, seen := range append(attempts, hooks...) {
			if seen.SpanID() != span.SpanContext().SpanID() {
				t.Errorf("an attempt or hook is below %v, want %v", seen, span.SpanContext())
			}
		}
		if len(attempts) != 3 || len(hooks) != 4 {
			t.Errorf("%d attempts and %d hooks, want 3 and 4", len(attempts), len(hooks))
		}
	})
}

// The user's options decide what kind of span it is.
func TestCallSpanOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tp := newEndings()
		_, client := serve(t, newRetrier(t, WithCallSpan(tp, trace.WithSpanKind(trace.SpanKindClient), trace.WithNewRoot(),
			trace.WithAttributes(attribute.String("team", "orders")))), nil)
		ctx, end := tracedSpan(t.Context())
		defer end()
		if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		span := tp.one(t)
		if span.SpanKind() != trace.SpanKindClient || span.Parent().IsValid() || attributesOf(span)["team"] != "orders" {
			t.Errorf("kind %v, parent %v, attributes %v", span.SpanKind(), span.Parent(), span.Attributes())
		}
	})
}

// seen keeps what a sampler was shown, and drops everything.
type dropAll struct{ seen []sdktrace.SamplingParameters }

func (d *dropAll) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	d.seen = append(d.seen, p)
	return sdktrace.SamplingResult{Decision: sdktrace.Drop}
}
func (*dropAll) Description() string { return "drop all" }

// Where the sampler does not want call spans, nothing is written on them; a
// caller that records still gets its events.
func TestCallSpanNotSampled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sampler := &dropAll{}
		tp := newEndings(sdktrace.WithSampler(sampler))
		_, client := serve(t, newRetrier(t, WithCallSpan(tp)), nil)
		if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		ctx, events := traced(t, t.Context())
		if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(decisions(events()), " "); got != "success" {
			t.Errorf("events on the caller's span %q, want success", got)
		}
		if begun, ends := tp.begun.Load(), tp.ends.Load(); begun != 2 || ends != 2 {
			t.Errorf("%d begun, %d ended, want 2 and 2", begun, ends)
		}
		want := []attribute.KeyValue{attribute.String("rpc.method", "testsrv.v1.TestService/Get"), attribute.String("rpc.system.name", "grpc")}
		if got := sampler.seen[0]; got.Name != "testsrv.v1.TestService/Get" || fmt.Sprint(got.Attributes) != fmt.Sprint(want) {
			t.Errorf("the sampler saw %q %v, want %v", got.Name, got.Attributes, want)
		}
	})
}

// Work has a span too, with the spans of the calls inside below it.
func TestCallSpanOfWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tp := newEndings()
		r := newRetrier(t, exactly(nil), WithCallSpan(tp))
		_, client := serve(t, r, testsrv.Script{get: testsrv.Fail(1, codes.Unavailable).ThenOK()})
		runs := 0
		if err := r.Do(t.Context(), "jobs/restock", func(ctx context.Context) error {
			runs++
			if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
				return err
			}
			if runs == 1 {
				return errors.New("not yet")
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		ended := tp.recorder.Ended()
		if len(ended) != 3 {
			t.Fatalf("%d spans, want 3", len(ended))
		}
		work := ended[2]
		checkCallSpan(t, work, "jobs/restock", "OK", "", 2)
		for _, inner := range ended[:2] {
			if inner.Parent().SpanID() != work.SpanContext().SpanID() {
				t.Error("a call inside is not below the work")
			}
		}
		if begun, ends := tp.begun.Load(), tp.ends.Load(); begun != 3 || ends != 3 {
			t.Errorf("%d begun, %d ended", begun, ends)
		}
		func() {
			defer func() { _ = recover() }()
			_ = r.Do(t.Context(), "jobs/restock", func(context.Context) error { panic("boom") })
		}()
		checkCallSpan(t, tp.recorder.Ended()[3], "jobs/restock", "INTERNAL", "panic", 1)
	})
}

// A stream that changes to other attempts is one call all the same, also for
// whoever asks it for its context, and though the caller's span has ended.
func TestCallSpanOfStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tp := newEndings()
		var attempts []trace.SpanContext
		_, cc := serveStreams(t, newRetrier(t, exactly(nil), WithCallSpan(tp)), testsrv.Script{list: refusing(2, codes.Unavailable).ThenOK()},
			grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				attempts = append(attempts, trace.SpanContextFromContext(ctx))
				return streamer(ctx, desc, cc, method, opts...)
			}))
		ctx, endCaller := tracedSpan(t.Context())
		stream := open(t, ctx, cc, list)
		endCaller()
		if got := trace.SpanContextFromContext(stream.Context()); !got.Equal(attempts[0]) {
			t.Errorf("the stream's context has the span %v, want %v", got, attempts[0])
		}
		send(t, stream, 1)
		closeSend(t, stream)
		for range 3 {
			recv(t, stream)
		}
		if n := tp.ends.Load(); n != 0 {
			t.Errorf("the span was ended %d times before the stream was", n)
		}
		if err := end(t, stream); err != nil {
			t.Fatal(err)
		}
		span := tp.one(t)
		checkCallSpan(t, span, list[1:], "OK", "", 3)
		if got := strings.Join(decisions(eventsOf(t, span)), " "); got != "retry retry success" {
			t.Errorf("events %q", got)
		}
		for _, a := range attempts {
			if a.SpanID() != span.SpanContext().SpanID() {
				t.Errorf("an attempt is below %v", a)
			}
		}
		if len(attempts) != 3 {
			t.Errorf("%d attempts, want 3", len(attempts))
		}
	})
}

// A callback of the user's that panics must not leave the span open.
func TestCallSpanOfStreamThatPanics(t *testing.T) {
	panics := func() { panic("boom") }
	for name, hooks := range map[string]Hooks{
		"AttemptEnd":     {AttemptEnd: func(context.Context, Attempt) { panics() }},
		"RetryScheduled": {RetryScheduled: func(context.Context, Attempt) { panics() }},
		"CallEnd":        {CallEnd: func(context.Context, Report, any, error) { panics() }},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tp := newEndings()
				_, cc := serveStreams(t, newRetrier(t, exactly(nil), WithCallSpan(tp), WithHooks(hooks)), testsrv.Script{list: refusing(1, codes.Unavailable).ThenOK()})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream := open(t, ctx, cc, list)
				send(t, stream, 1)
				closeSend(t, stream)
				func() {
					defer func() {
						if recover() == nil {
							t.Error("no panic")
						}
					}()
					for stream.RecvMsg(new(testpb.Response)) == nil {
					}
				}()
				cancel()
				synctest.Wait()
				if span := tp.one(t); (span.Status().Code == otelcodes.Error) != (name != "CallEnd") {
					t.Errorf("status %v", span.Status())
				}
			})
		})
	}
}

// What is the user's and runs before the first attempt may panic too. Whoever
// recovers from that must find nothing left open: not the span, nor a call that
// counts as in flight, nor a caller who waits for OnFinish, nor a lock that the
// next call waits for.
func TestPanicBeforeTheFirstAttempt(t *testing.T) {
	calls := map[string]func(context.Context, *Retrier, *grpc.ClientConn, ...grpc.CallOption) error{
		"unary": func(ctx context.Context, _ *Retrier, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
			_, err := testpb.NewTestServiceClient(cc).Get(ctx, &testpb.Request{}, opts...)
			return err
		},
		"stream": func(ctx context.Context, _ *Retrier, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
			stream, err := testpb.NewTestServiceClient(cc).List(ctx, &testpb.Request{}, opts...)
			for err == nil {
				_, err = stream.Recv()
			}
			if err == io.EOF {
				return nil
			}
			return err
		},
		"work": func(ctx context.Context, r *Retrier, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			return r.Do(ctx, "jobs/restock", func(context.Context) error { return nil })
		},
	}
	for kind, call := range calls {
		for _, where := range []string{"newBudget", "newBudget exits", "Enabled", "tracer"} {
			t.Run(kind+", "+where, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					tp, first := newEndings(), true
					once := func(place string) {
						if first && strings.HasPrefix(where, place) {
							first = false
							if strings.HasSuffix(where, "exits") {
								runtime.Goexit()
							}
							panic("boom")
						}
					}
					budget := newBudget(t)
					r := newRetrier(t, WithCallSpan(faultyTracers{tp, func() { once("tracer") }}),
						WithEventSink(faultySink{func() { once("Enabled") }}),
						WithBudgetPerTarget(func(string) Budget { once("newBudget"); return budget }))
					_, cc := serveStreams(t, r, nil)
					var report Report
					var ends []error
					ended := make(chan any)
					go func() {
						defer func() { ended <- recover() }()
						_ = call(t.Context(), r, cc, WithReport(&report), grpc.OnFinish(func(err error) { ends = append(ends, err) }))
						t.Error("the call returned")
					}()
					if got := <-ended; (got == nil) != strings.HasSuffix(where, "exits") {
						t.Errorf("recovered %v", got)
					}
					spans := 0
					if where != "tracer" {
						spans = 1
						name := map[string]string{"unary": get[1:], "stream": list[1:], "work": "jobs/restock"}[kind]
						checkCallSpan(t, tp.one(t), name, "INTERNAL", "panic", 0)
					}
					if kind != "work" {
						if len(ends) != 1 || status.Code(ends[0]) != codes.Internal {
							t.Errorf("OnFinish was told %v, want INTERNAL once", ends)
						}
						if report.Target != cc.CanonicalTarget() || report.Made() != 0 || report.Reason != ReasonNone {
							t.Errorf("report %+v, want one of no attempts", report)
						}
					}
					if err := call(t.Context(), r, cc); err != nil {
						t.Errorf("the next call: %v", err)
					}
					if s := budget.state(); s.InFlight != 0 {
						t.Errorf("%d calls in flight", s.InFlight)
					}
					for _, x := range r.targets.all() {
						if n := x.inflight.Load(); n != 0 {
							t.Errorf("%d calls to %s in flight", n, x.name)
						}
					}
					if begun, ends := int(tp.begun.Load()), int(tp.ends.Load()); begun != spans+1 || ends != spans+1 {
						t.Errorf("%d spans begun, %d ended, want %d", begun, ends, spans+1)
					}
				})
			})
		}
	}
}

// faultyTracers run a function before each span.
type faultyTracers struct {
	trace.TracerProvider
	before func()
}

func (f faultyTracers) Tracer(name string, opts ...trace.TracerOption) trace.Tracer {
	return faultyTracer{f.TracerProvider.Tracer(name, opts...), f.before}
}

type faultyTracer struct {
	trace.Tracer
	before func()
}

func (f faultyTracer) Start(ctx context.Context, name string, opts ...trace.SpanStartOption) (context.Context, trace.Span) {
	f.before()
	return f.Tracer.Start(ctx, name, opts...)
}

// faultySink runs a function when it is asked, and takes nothing.
type faultySink struct{ enabled func() }

func (f faultySink) Enabled(context.Context) bool                                { f.enabled(); return false }
func (faultySink) Emit(context.Context, string, time.Time, []attribute.KeyValue) {}

// What is passed through, or refused before it begins, has no span.
func TestCallSpanOnlyWhereThereIsACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		outer, inner := newEndings(), newEndings()
		r := newRetrier(t, WithCallSpan(outer))
		_, client := serve(t, r, nil, newRetrier(t, WithCallSpan(inner)).DialOptions()...)
		if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		if _, err := client.Get(t.Context(), &testpb.Request{}, WithCallPolicy(func(p *Policy) { p.MaxAttempts = -1 })); err == nil {
			t.Error("a bad policy is no error")
		}
		outer.one(t)
		if n := inner.begun.Load(); n != 0 {
			t.Errorf("%d spans of the Retrier that passes calls through, want 0", n)
		}
	})
}

func TestTracingOptionFaults(t *testing.T) {
	tp := newEndings()
	for name, test := range map[string]struct {
		opts []Option
		want string
	}{
		"no provider":     {[]Option{WithCallSpan(nil)}, "WithCallSpan: provider is nil, want a trace.TracerProvider"},
		"nil option":      {[]Option{WithCallSpan(tp, trace.WithNewRoot(), nil)}, "WithCallSpan: option 2 of 2 is nil, want a trace.SpanStartOption"},
		"call span twice": {[]Option{WithCallSpan(tp), WithCallSpan(tp)}, "WithCallSpan is given twice, want it once"},
		"no sink":         {[]Option{WithEventSink(nil)}, "WithEventSink: sink is nil, want an EventSink"},
		"sink twice":      {[]Option{WithEventSink(&sinkHole{}), WithEventSink(&sinkHole{})}, "WithEventSink is given twice, want it once"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := New(test.opts...); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("New = %v, want %q", err, test.want)
			}
			if err := newRetrier(t).Update(test.opts...); err == nil || !strings.Contains(err.Error(), "cannot change after New") {
				t.Errorf("Update = %v, want a refusal", err)
			}
		})
	}
}

// sinkHole keeps the events that it is given, if it is on.
type sinkHole struct {
	off    bool
	asked  int
	events []event
	times  []time.Time
}

func (s *sinkHole) Enabled(context.Context) bool { s.asked++; return !s.off }
func (s *sinkHole) Emit(_ context.Context, name string, at time.Time, attrs []attribute.KeyValue) {
	e := event{}
	for _, a := range attrs {
		e[a.Key] = a.Value.AsInterface()
	}
	if name != "grpcretry.attempt" {
		e["unknown name"] = name
	}
	s.events, s.times = append(s.events, e), append(s.times, at)
}

// Whoever sends the events to a log wants each of them there, and none twice.
func TestEventSinkTakesThePlaceOfTheSpan(t *testing.T) {
	for _, off := range []bool{false, true} {
		t.Run(fmt.Sprint("off=", off), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				sink := &sinkHole{off: off}
				_, client := serve(t, newRetrier(t, exactly(nil), WithEventSink(sink)), testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()})
				ctx, end := tracedSpan(t.Context())
				start := time.Now()
				if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
				if n := len(end().Events()); n != 0 {
					t.Errorf("%d events on the span, want 0", n)
				}
				want := "retry retry success"
				if off {
					want = ""
				}
				if got := strings.Join(decisions(sink.events), " "); got != want || sink.asked != 1 {
					t.Errorf("events %q, asked %d times; want %q, once", got, sink.asked, want)
				}
				attemptevents.Check(t, sink.events)
				for i, at := range sink.times {
					if after := []time.Duration{0, 10 * ms, 30 * ms}[i]; at.Sub(start) != after {
						t.Errorf("event %d after %v, want %v", i+1, at.Sub(start), after)
					}
				}
			})
		})
	}
}

// attemptSpans is a stats handler that makes a span for each attempt.
type attemptSpans struct{ tracer trace.Tracer }

func (h attemptSpans) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	ctx, _ = h.tracer.Start(ctx, "attempt")
	return ctx
}
func (attemptSpans) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if _, ok := s.(*stats.End); ok {
		trace.SpanFromContext(ctx).End()
	}
}
func (attemptSpans) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (attemptSpans) HandleConn(context.Context, stats.ConnStats)                       {}

// Three spans of the same name tell nothing; with their numbers they do.
func TestAttemptStatsHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tp := newEndings()
		_, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()},
			grpc.WithStatsHandler(attemptSpans{tp.Tracer("test")}), grpc.WithStatsHandler(AttemptStatsHandler()))
		for _, ctx := range []context.Context{t.Context(), metadata.AppendToOutgoingContext(t.Context(), "x-tenant", "42")} {
			if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
		}
		var numbers []any
		for _, s := range tp.recorder.Ended() {
			numbers = append(numbers, attributesOf(s)["grpcretry.attempt.number"])
		}
		if got := fmt.Sprint(numbers); got != "[1 2 3 1]" {
			t.Errorf("numbers %s, want [1 2 3 1]", got)
		}
		h := AttemptStatsHandler()
		if n := testing.AllocsPerRun(100, func() { h.TagRPC(t.Context(), nil); h.HandleRPC(t.Context(), nil) }); n != 0 {
			t.Errorf("%v allocations without a span, want 0", n)
		}
	})
}

// What an event costs is paid by every sampled call.
func TestEventAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector lets pools forget")
	}
	for _, tc := range eventCosts(t) {
		t.Run(tc.name, func(t *testing.T) {
			without := testing.AllocsPerRun(500, func() { tc.call(t.Context()) })
			with := testing.AllocsPerRun(500, func() { tc.call(tc.recording) })
			if each := (with - without) / float64(tc.events); each > 4 {
				t.Errorf("%v allocations for each of %d events, want at most 4", each, tc.events)
			} else {
				t.Logf("%v allocations for each of %d events", each, tc.events)
			}
		})
	}
}
