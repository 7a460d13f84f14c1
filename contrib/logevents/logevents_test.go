package logevents

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/log"
	sdklog "go.opentelemetry.io/otel/sdk/log"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// kept is a log processor that keeps the records.
type kept struct {
	records []sdklog.Record
	least   log.Severity // below it nothing is wanted
}

func (k *kept) OnEmit(_ context.Context, r *sdklog.Record) error {
	k.records = append(k.records, r.Clone())
	return nil
}
func (k *kept) Enabled(_ context.Context, p sdklog.EnabledParameters) bool {
	return p.Severity >= k.least
}
func (*kept) Shutdown(context.Context) error   { return nil }
func (*kept) ForceFlush(context.Context) error { return nil }

func text(name string, at time.Time, attrs []attribute.KeyValue) string {
	parts := []string{name, at.UTC().Format(time.RFC3339Nano)}
	for _, a := range attrs {
		parts = append(parts, fmt.Sprintf("%s=%s:%s", a.Key, a.Value.Type(), a.Value.String()))
	}
	return strings.Join(parts, " ")
}

// call makes a call that fails twice and succeeds then, below a span, and gives
// what it left on that and in the log.
func call(t *testing.T, k *kept, sampler sdktrace.Sampler, withSink bool) (onSpan, inLog []string, span trace.SpanContext) {
	recorder := tracetest.NewSpanRecorder()
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder), sdktrace.WithSampler(sampler))
	sink, err := New(sdklog.NewLoggerProvider(sdklog.WithProcessor(k)))
	if err != nil {
		t.Fatal(err)
	}
	opts := []grpcretry.Option{grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: grpcretry.Backoff{Jitter: grpcretry.NoJitter}})}
	if withSink {
		opts = append(opts, grpcretry.WithEventSink(sink))
	}
	r, err := grpcretry.New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	srv := testsrv.New(testsrv.Script{testpb.TestService_Get_FullMethodName: testsrv.Fail(2, codes.Unavailable).ThenOK()})
	defer srv.Close()
	cc, err := srv.Dial(r.DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	ctx, s := tracers.Tracer("test").Start(t.Context(), "caller")
	if _, err := testpb.NewTestServiceClient(cc).Get(ctx, &testpb.Request{}); err != nil {
		t.Fatal(err)
	}
	s.End()
	attemptevents.CheckSpans(t, recorder.Ended())
	var logged []attemptevents.Event
	for _, s := range recorder.Ended() {
		for _, e := range s.Events() {
			onSpan = append(onSpan, text(e.Name, e.Time, e.Attributes))
		}
	}
	for _, r := range k.records {
		var attrs []attribute.KeyValue
		r.WalkAttributes(func(a attribute.KeyValue) bool { attrs = append(attrs, a); return true })
		inLog = append(inLog, text(r.EventName(), r.Timestamp(), attrs))
		logged = append(logged, attemptevents.New(t, attrs))
	}
	attemptevents.Check(t, logged)
	return onSpan, inLog, s.SpanContext()
}

// Whoever moves the events to a log must find each of them there as it was on
// the span, once, and find the way back to the trace.
func TestRecordsAreTheSpanEvents(t *testing.T) {
	var before []string
	synctest.Test(t, func(t *testing.T) {
		onSpan, inLog, _ := call(t, &kept{}, sdktrace.AlwaysSample(), false)
		if len(onSpan) != 3 || len(inLog) != 0 {
			t.Fatalf("without the sink %d events and %d records, want 3 and 0", len(onSpan), len(inLog))
		}
		before = onSpan
	})
	for _, sampler := range []sdktrace.Sampler{sdktrace.AlwaysSample(), sdktrace.NeverSample()} {
		synctest.Test(t, func(t *testing.T) {
			k := &kept{}
			onSpan, inLog, span := call(t, k, sampler, true)
			if len(onSpan) != 0 {
				t.Errorf("events on the span too: %q", onSpan)
			}
			if strings.Join(inLog, "\n") != strings.Join(before, "\n") {
				t.Errorf("%s: records\n%s\nwant\n%s", sampler.Description(), strings.Join(inLog, "\n"), strings.Join(before, "\n"))
			}
			for i, r := range k.records {
				if r.TraceID() != span.TraceID() || r.SpanID() != span.SpanID() {
					t.Errorf("record %d is of span %v, want %v", i+1, r.SpanID(), span.SpanID())
				}
				if want := []log.Severity{log.SeverityWarn, log.SeverityWarn, log.SeverityInfo}[i]; r.Severity() != want {
					t.Errorf("record %d has severity %v, want %v", i+1, r.Severity(), want)
				}
			}
		})
	}
}

// A log that is set to errors only must not make the calls build events.
func TestNothingIsEmittedWhereNothingIsWanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		onSpan, inLog, _ := call(t, &kept{least: log.SeverityError}, sdktrace.AlwaysSample(), true)
		if len(onSpan)+len(inLog) != 0 {
			t.Errorf("%d events, %d records, want none", len(onSpan), len(inLog))
		}
	})
}

func TestNewRefusesNoProvider(t *testing.T) {
	if _, err := New(nil); err == nil || errors.Unwrap(err) != nil || !strings.Contains(err.Error(), "provider is nil") {
		t.Errorf("New(nil) = %v", err)
	}
}
