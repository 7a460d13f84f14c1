package spantree

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"example.com/grpcretry"
)

var update = flag.Bool("update", false, "write the golden files anew")

var noon = time.Date(2025, 1, 1, 12, 0, 0, 0, time.UTC)

// at is noon and some milliseconds.
func at(ms int) time.Time { return noon.Add(time.Duration(ms) * time.Millisecond) }

func ids(n byte) trace.SpanContext {
	return trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{n}})
}

// span is a stub from..to ms with the id, below parent (0: a root).
func span(name string, id, parent byte, from, to int, events ...sdktrace.Event) tracetest.SpanStub {
	s := tracetest.SpanStub{Name: name, SpanContext: ids(id), StartTime: at(from), EndTime: at(to), Events: events}
	if parent != 0 {
		s.Parent = ids(parent)
	}
	return s
}

// event is an attempt event with the attributes given as pairs.
func event(ms int, pairs ...any) sdktrace.Event {
	e := sdktrace.Event{Name: attemptEvent, Time: at(ms)}
	for i := 0; i < len(pairs); i += 2 {
		k := attribute.Key(pairs[i].(string))
		switch v := pairs[i+1].(type) {
		case string:
			e.Attributes = append(e.Attributes, k.String(v))
		case int:
			e.Attributes = append(e.Attributes, k.Int(v))
		case float64:
			e.Attributes = append(e.Attributes, k.Float64(v))
		}
	}
	return e
}

// base are the attributes that every attempt event has.
func base(number int, code, decision string, more ...any) []any {
	return append([]any{
		"rpc.method", "shop.v1.Orders/Get", "grpcretry.attempt.number", number, "rpc.response.status_code", code,
		"grpcretry.attempt.decision", decision, "grpcretry.attempt.duration", 0.0034567,
	}, more...)
}

var retried = []sdktrace.Event{
	event(13, base(1, "UNAVAILABLE", "retry", "error.type", "UNAVAILABLE", "grpcretry.attempt.sent", "unsent",
		"grpcretry.retry.delay", 0.05, "grpcretry.retry.delay_source", "backoff", "grpcretry.budget.balance", 0.9)...),
	event(66, base(2, "RESOURCE_EXHAUSTED", "retry", "error.type", "RESOURCE_EXHAUSTED", "grpcretry.attempt.sent", "answered",
		"grpcretry.retry.delay", 0.2, "grpcretry.retry.delay_source", "pushback", "grpcretry.budget.balance", 0.84285,
		"network.peer.address", "2001:db8::1", "network.peer.port", 443)...),
	event(270, base(3, "OK", "success", "grpcretry.attempt.max", 3, "grpcretry.deadline.remaining", 0.73, "network.peer.address", "backend")...),
}

// every is one finished attempt for each decision there is, and for odd events.
func every() []tracetest.SpanStub {
	var stubs []tracetest.SpanStub
	add := func(name string, e sdktrace.Event) {
		id := byte(len(stubs) + 1)
		stubs = append(stubs, span(name, id, 0, int(id), int(id)+5, e))
	}
	decisions := []string{"some_new_word"}
	for r := grpcretry.ReasonSuccess; !strings.HasPrefix(r.String(), "Reason("); r++ {
		decisions = append(decisions, r.String())
	}
	for _, decision := range decisions {
		more := []any{"grpcretry.attempt.sent", "ambiguous", "grpcretry.attempt.max", 4, "grpcretry.deadline.remaining", 0.0123,
			"grpcretry.idempotency", "keyed", "grpcretry.policy.source", "method"}
		switch decision {
		case "budget_exhausted":
			more = append(more, "grpcretry.budget.balance", 0.06)
		case "deadline":
			more = append(more, "grpcretry.retry.delay", 0.5, "grpcretry.retry.delay_source", "pushback")
		case "pushback_stop":
			more = append(more, "grpcretry.retry.delay_source", "pushback")
		case "retry", "resume", "dry_run":
			more = append(more, "grpcretry.retry.delay", 1.5, "grpcretry.retry.delay_source", "retry_info", "grpcretry.budget.balance", 1.0)
		}
		add(decision, event(5, base(4, "UNAVAILABLE", decision, more...)...))
	}
	add("no time left", event(5, base(1, "DEADLINE_EXCEEDED", "deadline", "grpcretry.deadline.remaining", 0.0)...))
	add("nothing left to wait in", event(5, base(1, "UNAVAILABLE", "deadline", "grpcretry.deadline.remaining", 0.0,
		"grpcretry.retry.delay", 0.05, "grpcretry.retry.delay_source", "backoff")...))
	for _, decision := range []string{"pushback_stop", "hedge_failed"} {
		add("asked for too long a wait", event(5, base(1, "UNAVAILABLE", decision, "grpcretry.retry.delay", 300.0, "grpcretry.retry.delay_source", "retry_info")...))
		add("and by pushback", event(5, base(1, "UNAVAILABLE", decision, "grpcretry.retry.delay", 60.001, "grpcretry.retry.delay_source", "pushback")...))
	}
	add("asked for no retry, others run", event(5, base(1, "UNAVAILABLE", "hedge_failed", "grpcretry.retry.delay_source", "pushback")...))
	add("another attempt was asked", event(5, base(2, "UNAVAILABLE", "pushback_stop")...))
	add("long call", event(5, base(40, "UNAVAILABLE", "attempts_exhausted", "grpcretry.attempt.dropped", 8)...))
	add("refused", event(5, base(1, "UNAVAILABLE", "retry", "grpcretry.attempt.sent", "refused")...))
	add("new attributes", event(5, base(1, "ABORTED", "retry", "grpcretry.attempt.sent", "later", "grpcretry.retry.delay", 1e300,
		"grpcretry.something.new", 7)...))
	add("nothing known", sdktrace.Event{Name: attemptEvent, Time: at(5)})
	return stubs
}

// nested is a trace with spans of other instrumentation between the attempts,
// given in the order in which spans end.
func nested() []tracetest.SpanStub {
	failed := span("shop.v1.Orders/Get", 3, 2, 10, 12)
	failed.Attributes = []attribute.KeyValue{attribute.Int("other", 7), attribute.Int("grpcretry.attempt.number", 1)}
	failed.SpanKind, failed.Status = trace.SpanKindClient, sdktrace.Status{Code: otelcodes.Error, Description: "Unavailable"}
	good := span("shop.v1.Orders/Get", 4, 2, 266, 269)
	good.SpanKind = trace.SpanKindClient
	served := span("shop.v1.Orders/Get", 8, 4, 267, 268)
	served.SpanKind, served.Attributes = trace.SpanKindServer, []attribute.KeyValue{attribute.Int("grpcretry.attempt.number", 3), attribute.Float64("grpcretry.deadline.remaining", 0.7335)}
	checkout := span("checkout", 1, 0, 0, 1290, sdktrace.Event{Name: "cart loaded", Time: at(1),
		Attributes: []attribute.KeyValue{attribute.Int("items", 3), attribute.String("who", "\x1b[2Jme")}})
	checkout.Status = sdktrace.Status{Code: otelcodes.Ok}
	two := span("load both", 5, 1, 300, 310,
		event(305, base(1, "OK", "success")...),
		event(307, "rpc.method", "shop.v1.Stock/Get", "grpcretry.attempt.number", 1, "rpc.response.status_code", "OK", "grpcretry.attempt.decision", "success"),
		event(309, "rpc.method", "shop.v1.Stock/Get", "grpcretry.attempt.number", 1, "rpc.response.status_code", "OK", "grpcretry.attempt.decision", "success"))
	two.DroppedEvents = 2
	elsewhere := span("a job whose parent is in another process", 6, 99, 5, 6)
	running := span("still running", 7, 1, 400, 0)
	running.EndTime = time.Time{}
	return []tracetest.SpanStub{failed, served, good, span("load order", 2, 1, 10, 271, retried...), two, running, checkout, elsewhere}
}

// ring is what only stubs made by hand can be: spans that are each other's
// parents, one that is its own, and one that is there twice.
func ring() []tracetest.SpanStub {
	return []tracetest.SpanStub{
		span("a", 1, 2, 0, 1), span("b", 2, 1, 1, 2), span("c", 3, 3, 2, 3), span("d", 4, 0, 3, 4), span("d", 4, 0, 3, 4),
	}
}

// A reader must see which attempt belongs to which span, in the order in which
// things happened, and what each decision means.
func TestWrite(t *testing.T) {
	for name, test := range map[string]struct {
		spans   []tracetest.SpanStub
		options Options
	}{
		"nested":              {nested(), Options{}},
		"nested-color":        {nested(), Options{Color: true}},
		"nested-no-durations": {nested(), Options{HideDurations: true}},
		"decisions":           {every(), Options{}},
		"ring":                {ring(), Options{}},
		"nothing":             {nil, Options{}},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := Write(&out, tracetest.SpanStubs(test.spans).Snapshots(), test.options); err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if out.String() != string(want) {
				t.Errorf("differs from %s; run with -update and look at the difference. It is now:\n%s", golden, out.String())
			}
		})
	}
}

// Who looks at the spans must see all that are printed, or looks at nothing.
func TestLook(t *testing.T) {
	spans, seen := tracetest.SpanStubs(nested()).Snapshots(), 0
	if err := Write(new(bytes.Buffer), spans, Options{Look: func(s []sdktrace.ReadOnlySpan) { seen += len(s) }}); err != nil {
		t.Fatal(err)
	}
	if seen != len(spans) {
		t.Errorf("%d spans were seen, want %d", seen, len(spans))
	}
}

// Hidden durations are for golden files: nothing that differs from run to run may be left.
func TestHideDurations(t *testing.T) {
	draw := func(scale int) string {
		slow := event(13*scale, base(1, "UNAVAILABLE", "deadline", "grpcretry.deadline.remaining", 0.1*float64(scale))...)
		for i, a := range slow.Attributes {
			if a.Key == "grpcretry.attempt.duration" {
				slow.Attributes[i] = a.Key.Float64(0.01 * float64(scale))
			}
		}
		var out bytes.Buffer
		if err := Write(&out, tracetest.SpanStubs{span("call", 1, 0, 0, 20*scale, slow)}.Snapshots(), Options{HideDurations: true}); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if fast, slow := draw(1), draw(3); fast != slow {
		t.Errorf("a slower run prints otherwise:\n%s\n%s", fast, slow)
	}
}

// Escapes in a file or a log are a nuisance, and NO_COLOR is a promise to the user.
func TestColor(t *testing.T) {
	open := func(name string) *os.File {
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() }) // one is closed already
		return f
	}
	file := open(filepath.Join(t.TempDir(), "file"))
	device, closed := open(os.DevNull), open(os.DevNull)
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	none := map[string]string{}
	for name, test := range map[string]struct {
		color bool
		env   map[string]string
		on    func(getenv func(string) string) bool
	}{
		"character device": {true, none, func(e func(string) string) bool { return color(device, e) }},
		"NO_COLOR":         {false, map[string]string{"NO_COLOR": "1"}, func(e func(string) string) bool { return color(device, e) }},
		"NO_COLOR empty":   {true, map[string]string{"NO_COLOR": ""}, func(e func(string) string) bool { return color(device, e) }},
		"dumb terminal":    {false, map[string]string{"TERM": "dumb"}, func(e func(string) string) bool { return color(device, e) }},
		"file":             {false, none, func(e func(string) string) bool { return color(file, e) }},
		"closed":           {false, none, func(e func(string) string) bool { return color(closed, e) }},
		"buffer":           {false, none, func(e func(string) string) bool { return color(new(bytes.Buffer), e) }},
	} {
		t.Run(name, func(t *testing.T) {
			if got := test.on(func(k string) string { return test.env[k] }); got != test.color {
				t.Errorf("color = %v, want %v", got, test.color)
			}
		})
	}
	if Color(new(bytes.Buffer)) {
		t.Error("Color of a buffer = true, want false")
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 999: "999ns", 1234 * time.Nanosecond: "1.23µs", 5*time.Millisecond + 678*time.Microsecond: "5.68ms",
		167 * time.Millisecond: "167ms", 12345 * time.Millisecond: "12.3s", -1500 * time.Nanosecond: "-1.5µs",
		1<<63 - 1: "2561111h6m40s", -1 << 63: "-2561111h6m40s",
	} {
		if got := short(d); got != want {
			t.Errorf("short(%d) = %s, want %s", d, got, want)
		}
	}
}

// The error of the writer is the caller's business.
func TestWriteError(t *testing.T) {
	if err := Write(broken{}, nil, Options{}); !errors.Is(err, errBroken) {
		t.Errorf("Write = %v, want %v", err, errBroken)
	}
}

var errBroken = errors.New("broken pipe")

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errBroken }
