package otel

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	experimental "google.golang.org/grpc/experimental/opentelemetry"
	"google.golang.org/grpc/stats/opentelemetry"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/spantree"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

var update = flag.Bool("update", false, "write the golden files anew")

const ms = time.Millisecond

// layout is an arrangement of instrumentation around a Retrier.
type layout struct {
	name     string
	caller   bool // the caller has a span,
	early    bool // which ends before the call does
	sampler  sdktrace.Sampler
	options  func(tp trace.TracerProvider) []grpcretry.Option
	dial     func(e *env, retry []grpc.DialOption) []grpc.DialOption
	failures int // of the attempts; 3 is all of them

	calls    map[string]string // metric -> count of each status: of ONE call, or of its attempts
	statuses []string          // of the spans that stand for the call
}

// env is what a layout is made of.
type env struct {
	recorder *tracetest.SpanRecorder
	tracers  *sdktrace.TracerProvider
	meters   *sdkmetric.MeterProvider
	reader   *sdkmetric.ManualReader
}

func (e *env) otelgrpc() grpc.DialOption {
	return grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(e.tracers), otelgrpc.WithMeterProvider(e.meters)))
}

func (e *env) plugin() grpc.DialOption {
	return opentelemetry.DialOption(opentelemetry.Options{
		MetricsOptions: opentelemetry.MetricsOptions{MeterProvider: e.meters},
		TraceOptions:   experimental.TraceOptions{TracerProvider: e.tracers, TextMapPropagator: propagation.TraceContext{}},
	})
}

var numbers = grpc.WithStatsHandler(grpcretry.AttemptStatsHandler())

func callSpan(opts ...trace.SpanStartOption) func(trace.TracerProvider) []grpcretry.Option {
	return func(tp trace.TracerProvider) []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithCallSpan(tp, opts...)}
	}
}

func before(of func(*env) []grpc.DialOption) func(*env, []grpc.DialOption) []grpc.DialOption {
	return func(e *env, retry []grpc.DialOption) []grpc.DialOption { return append(of(e), retry...) }
}

const (
	rpcDuration  = "rpc.client.call.duration"  // otelgrpc's
	grpcDuration = "grpc.client.call.duration" // the plugin's
	grpcStarted  = "grpc.client.attempt.started"
)

func layouts() []layout {
	withOtelgrpc := before(func(e *env) []grpc.DialOption { return []grpc.DialOption{e.otelgrpc(), numbers} })
	outside := before(func(e *env) []grpc.DialOption { return []grpc.DialOption{e.plugin(), numbers} })
	perAttempt := map[string]string{rpcDuration: "OK:1 UNAVAILABLE:2"}
	one := map[string]string{grpcDuration: "OK:1", grpcStarted: "3"}
	return []layout{
		{name: "caller", caller: true, failures: 2, statuses: []string{"caller Unset"}},
		{name: "caller-otelgrpc", caller: true, failures: 2, dial: withOtelgrpc, calls: perAttempt, statuses: []string{"caller Unset"}},
		{name: "caller-otelgrpc-without-numbers", caller: true, failures: 2, calls: perAttempt,
			dial: before(func(e *env) []grpc.DialOption { return []grpc.DialOption{e.otelgrpc()} }), statuses: []string{"caller Unset"}},
		{name: "caller-otelgrpc-given-up", caller: true, failures: 3, dial: withOtelgrpc, calls: map[string]string{rpcDuration: "UNAVAILABLE:3"}, statuses: []string{"caller Unset"}},
		{name: "otelgrpc", failures: 2, dial: withOtelgrpc, calls: perAttempt},
		{name: "call-span", failures: 2, options: callSpan(trace.WithSpanKind(trace.SpanKindClient)), statuses: []string{"METHOD Unset"}},
		{name: "call-span-otelgrpc", failures: 2, options: callSpan(), dial: withOtelgrpc, calls: perAttempt, statuses: []string{"METHOD Unset"}},
		{name: "call-span-otelgrpc-given-up", failures: 3, options: callSpan(), dial: withOtelgrpc, calls: map[string]string{rpcDuration: "UNAVAILABLE:3"}, statuses: []string{"METHOD Error"}},
		{name: "caller-call-span-otelgrpc", caller: true, failures: 2, options: callSpan(), dial: withOtelgrpc, calls: perAttempt, statuses: []string{"METHOD Unset", "caller Unset"}},
		{name: "plugin-outside", failures: 2, dial: outside, calls: one, statuses: []string{"Sent.METHOD Ok"}},
		{name: "plugin-outside-given-up", failures: 3, dial: outside, calls: map[string]string{grpcDuration: "UNAVAILABLE:1", grpcStarted: "3"}, statuses: []string{"Sent.METHOD Error"}},
		{name: "caller-plugin-outside", caller: true, failures: 2, dial: outside, calls: one, statuses: []string{"Sent.METHOD Ok", "caller Unset"}},
		{name: "plugin-inside", caller: true, failures: 2, calls: map[string]string{grpcDuration: "OK:1 UNAVAILABLE:2", grpcStarted: "3"}, statuses: []string{"caller Unset"},
			dial: func(e *env, retry []grpc.DialOption) []grpc.DialOption { return append(retry, e.plugin(), numbers) }},
		{name: "plugin-outside-otelgrpc", failures: 2, statuses: []string{"Sent.METHOD Ok"},
			calls: map[string]string{grpcDuration: "OK:1", grpcStarted: "3", rpcDuration: "OK:1 UNAVAILABLE:2"},
			dial:  before(func(e *env) []grpc.DialOption { return []grpc.DialOption{e.plugin(), e.otelgrpc(), numbers} })},
		{name: "unsampled", caller: true, sampler: sdktrace.NeverSample(), failures: 2, dial: withOtelgrpc, options: callSpan(), calls: perAttempt},
		{name: "caller-ended-early", caller: true, early: true, failures: 2, dial: withOtelgrpc, calls: perAttempt, statuses: []string{"caller Unset"}},
		{name: "caller-ended-early-call-span", caller: true, early: true, failures: 2, options: callSpan(), dial: withOtelgrpc, calls: perAttempt, statuses: []string{"METHOD Unset", "caller Unset"}},
	}
}

// kinds of calls, each with the steps of an attempt that fails and of one that does not.
var kinds = []struct {
	name, method string
	fails, works testsrv.Step
	call         func(ctx context.Context, client testpb.TestServiceClient) error
}{
	{"unary", testpb.TestService_Get_FullMethodName,
		testsrv.Step{Delay: 5 * ms, Code: codes.Unavailable, Message: "warming up"}, testsrv.Step{Delay: 5 * ms},
		func(ctx context.Context, client testpb.TestServiceClient) error {
			_, err := client.Get(ctx, &testpb.Request{})
			return err
		}},
	{"stream", testpb.TestService_List_FullMethodName,
		testsrv.Step{Delay: 5 * ms, Messages: -1, Code: codes.Unavailable, Message: "warming up"}, testsrv.Step{Delay: 3 * ms, Messages: 2, Every: 2 * ms}, // the first not in the moment of the request
		func(ctx context.Context, client testpb.TestServiceClient) error {
			stream, err := client.List(ctx, &testpb.Request{})
			for err == nil {
				_, err = stream.Recv()
			}
			if err == io.EOF {
				return nil
			}
			return err
		}},
}

// What a page of documentation promises about spans of three libraries must be
// what they really make, in every layout, to the last event; and where a layout
// is said to count calls, a call that needed three attempts is one call.
func TestLayouts(t *testing.T) {
	for _, l := range layouts() {
		for _, kind := range kinds {
			t.Run(l.name+"/"+kind.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					name := strings.TrimPrefix(kind.method, "/")
					reader := sdkmetric.NewManualReader()
					e := &env{recorder: tracetest.NewSpanRecorder(), reader: reader, meters: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))}
					tpOptions := []sdktrace.TracerProviderOption{sdktrace.WithSpanProcessor(e.recorder)}
					if l.sampler != nil {
						tpOptions = append(tpOptions, sdktrace.WithSampler(l.sampler))
					}
					e.tracers = sdktrace.NewTracerProvider(tpOptions...)

					options := []grpcretry.Option{
						grpcretry.WithMeterProvider(e.meters),
						grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: grpcretry.Backoff{Base: 50 * ms, Jitter: grpcretry.NoJitter}}),
					}
					if l.options != nil {
						options = append(options, l.options(e.tracers)...)
					}
					r, err := grpcretry.New(options...)
					if err != nil {
						t.Fatal(err)
					}
					script := append(slices.Repeat(testsrv.Sequence{kind.fails}, l.failures), kind.works)
					srv := testsrv.New(testsrv.Script{kind.method: script})
					t.Cleanup(srv.Close)
					dial := r.DialOptions()
					if l.dial != nil {
						dial = l.dial(e, dial)
					}
					cc, err := srv.Dial(dial...)
					if err != nil {
						t.Fatal(err)
					}
					connect(t, cc)
					ctx, endCaller := t.Context(), func(...trace.SpanEndOption) {}
					if l.caller {
						var span trace.Span
						ctx, span = e.tracers.Tracer("app").Start(ctx, "caller")
						endCaller = span.End
					}
					if l.early {
						time.AfterFunc(30*ms, func() { endCaller() }) // in the first wait
					}
					start := time.Now()
					err = kind.call(ctx, testpb.NewTestServiceClient(cc))
					took := time.Since(start)
					if !l.early {
						endCaller()
					}
					if (err != nil) != (l.failures == 3) {
						t.Errorf("the call's error is %v", err)
					}
					synctest.Wait()

					checkGolden(t, l.name+"-"+kind.name, e.recorder.Ended())
					attemptevents.CheckSpans(t, e.recorder.Ended())
					checkNothingLeft(t, e.recorder)
					var statuses []string
					for _, s := range e.recorder.Ended() {
						sent := "Sent." + strings.ReplaceAll(name, "/", ".")
						is := map[string]string{"caller": "caller", name: "METHOD", sent: "Sent.METHOD"}[s.Name()]
						ofAttempt := s.SpanKind() == trace.SpanKindClient && (is == "METHOD" && l.dial != nil || is == "Sent.METHOD" && l.name == "plugin-inside")
						if is == "" || ofAttempt {
							continue
						}
						statuses = append(statuses, is+" "+s.Status().Code.String())
						if !l.early && s.EndTime().Sub(s.StartTime()) != took {
							t.Errorf("the span %s lasts %v, but the call %v", s.Name(), s.EndTime().Sub(s.StartTime()), took)
						}
					}
					slices.Sort(statuses)
					want := slices.Sorted(slices.Values(l.statuses))
					if !slices.Equal(statuses, want) {
						t.Errorf("the spans of the call have the statuses %q, want %q", statuses, want)
					}
					checkCalls(t, e.reader, l, took)
				})
			})
		}
	}
}

// connect waits until calls need not wait for a connection, about which gRPC's
// plugin leaves an event now and then.
func connect(t *testing.T, cc *grpc.ClientConn) {
	t.Helper()
	cc.Connect()
	for state := cc.GetState(); state != connectivity.Ready; state = cc.GetState() {
		cc.WaitForStateChange(t.Context(), state)
	}
}

// checkGolden compares the tree of the spans with what the documentation shows.
func checkGolden(t *testing.T, name string, spans []sdktrace.ReadOnlySpan) {
	t.Helper()
	var out bytes.Buffer
	if err := spantree.Write(&out, spans, spantree.Options{}); err != nil {
		t.Fatal(err)
	}
	if out.Len() == 0 {
		out.WriteString("(no span)\n")
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
		t.Errorf("differs from %s; run with -update and look at the difference. It is now:\n%s", golden, &out)
	}
}

// checkNothingLeft: what was begun was ended.
func checkNothingLeft(t *testing.T, recorder *tracetest.SpanRecorder) {
	t.Helper()
	if begun, ended := len(recorder.Started()), len(recorder.Ended()); begun != ended {
		t.Errorf("%d spans were begun, %d ended", begun, ended)
	}
}

// checkCalls compares what the layouts' own metrics count, and for that of one
// call its duration.
func checkCalls(t *testing.T, reader *sdkmetric.ManualReader, l layout, took time.Duration) {
	t.Helper()
	var all metricdata.ResourceMetrics
	if err := reader.Collect(t.Context(), &all); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			var counts []string
			switch data := m.Data.(type) {
			case metricdata.Histogram[float64]:
				for _, p := range data.DataPoints {
					code, ok := p.Attributes.Value("grpc.status")
					if !ok {
						code, _ = p.Attributes.Value("rpc.response.status_code")
					}
					counts = append(counts, fmt.Sprintf("%s:%d", code.AsString(), p.Count))
					if want := took.Seconds(); m.Name == grpcDuration && l.name != "plugin-inside" && !near(p.Sum, want) {
						t.Errorf("%s is %v, want that of the call, %v", m.Name, p.Sum, want)
					}
				}
			case metricdata.Sum[int64]:
				n := int64(0)
				for _, p := range data.DataPoints {
					n += p.Value
				}
				counts = append(counts, fmt.Sprint(n))
			}
			slices.Sort(counts)
			switch m.Name {
			case rpcDuration, grpcDuration, grpcStarted:
				got[m.Name] = strings.Join(counts, " ")
			case "grpcretry.client.attempts":
				if n := "3"; strings.Join(counts, " ") != n {
					t.Errorf("%s are %v, want %s", m.Name, counts, n)
				}
			}
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(l.calls) && len(got)+len(l.calls) > 0 {
		t.Errorf("counted %v, want %v", got, l.calls)
	}
}

// near allows for the arithmetic of seconds in floating point.
func near(a, b float64) bool { return a-b < 1e-9 && b-a < 1e-9 }

// The page of documentation shows what TestLayouts saw, each layout once, and
// nothing of its own making.
func TestDocumentationShowsTheLayouts(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("..", "..", "docs", "tracing.md"))
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	for _, m := range regexp.MustCompile("(?ms)^<!-- (\\S+) -->\n```text\n(.*?)^```$").FindAllStringSubmatch(page, -1) {
		want, err := os.ReadFile(filepath.Join("testdata", m[1]+".golden"))
		if err != nil {
			t.Errorf("docs/tracing.md shows the layout %s: %v", m[1], err)
		} else if m[2] != string(want) {
			t.Errorf("docs/tracing.md shows for %s\n%s\nwant\n%s", m[1], m[2], want)
		}
	}
	if blocks, marks := strings.Count(page, "```text\n"), strings.Count(page, "\n<!-- "); blocks != marks {
		t.Errorf("docs/tracing.md has %d text blocks and %d names of layouts", blocks, marks)
	}
	for _, l := range layouts() {
		if !strings.Contains(page, "<!-- "+l.name+"-unary -->") && !strings.Contains(page, "`"+l.name+"`") {
			t.Errorf("docs/tracing.md does not show or tell of the layout %s", l.name)
		}
	}
}
