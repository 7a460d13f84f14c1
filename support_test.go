package grpcretry

import (
	"context"
	"log/slog"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// full methods of the scripted server; Get and Put are declared idempotent, Write is not.
const (
	get   = testpb.TestService_Get_FullMethodName
	put   = testpb.TestService_Put_FullMethodName
	write = testpb.TestService_Write_FullMethodName
)

// newRetrier makes a Retrier that logs nothing.
func newRetrier(t testing.TB, opts ...Option) *Retrier {
	t.Helper()
	r, err := New(append(opts, WithLogger(slog.New(slog.DiscardHandler)))...)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	return r
}

// serve starts a scripted server on memory and a client of it through r. Both
// end with the test, so in a synctest bubble t must be the bubble's.
func serve(t testing.TB, r *Retrier, script testsrv.Script, opts ...grpc.DialOption) (*testsrv.Server, testpb.TestServiceClient) {
	t.Helper()
	srv := testsrv.New(script)
	t.Cleanup(srv.Close)
	return srv, dial(t, srv, r, opts...)
}

// dial makes another client of srv through r; opts come after r's dial options.
func dial(t testing.TB, srv *testsrv.Server, r *Retrier, opts ...grpc.DialOption) testpb.TestServiceClient {
	t.Helper()
	cc, err := srv.Dial(append(r.DialOptions(), opts...)...)
	if err != nil {
		t.Fatalf("Dial: %v", err)
	}
	return testpb.NewTestServiceClient(cc)
}

// event is one grpcretry.attempt event with its attributes as plain values.
type event = attemptevents.Event

// traced returns a context with a recording span, and a function that ends the
// span and gives its attempt events in order. They are as the schema wants them.
func traced(t testing.TB, ctx context.Context) (context.Context, func() []event) {
	t.Helper()
	ctx, end := tracedSpan(ctx)
	return ctx, func() []event {
		t.Helper()
		return eventsOf(t, end())
	}
}

// tracedSpan returns a context with a recording span, and a function that ends
// the span and gives it as it was recorded.
func tracedSpan(ctx context.Context) (context.Context, func() sdktrace.ReadOnlySpan) {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder))
	ctx, span := provider.Tracer("test").Start(ctx, "caller")
	return ctx, func() sdktrace.ReadOnlySpan {
		span.End()
		return recorder.Ended()[0]
	}
}

// eventsOf are the span's attempt events.
func eventsOf(t testing.TB, span sdktrace.ReadOnlySpan) []event {
	t.Helper()
	events := attemptevents.Of(t, span)
	if n := len(span.Events()); n != len(events) {
		t.Errorf("%d events on the caller's span, of which %d are of attempts; want no others", n, len(events))
	}
	attemptevents.Check(t, events)
	return events
}

// decisions are the ladder's words of the events, in order.
func decisions(events []event) []string {
	var words []string
	for _, e := range events {
		words = append(words, e["grpcretry.attempt.decision"].(string))
	}
	return words
}
