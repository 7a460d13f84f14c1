// Command quickstart shows in a second or two what grpcretry does: it starts a
// flaky server in this process, calls it in five situations, and prints what
// the caller got beside what the caller's trace span says about each attempt.
//
//	go run ./examples/quickstart
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/spantree"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// The methods that are called. The .proto of Get declares that it has no side
// effects; that of Write declares nothing.
const (
	get   = testpb.TestService_Get_FullMethodName
	write = testpb.TestService_Write_FullMethodName
)

func main() {
	if err := run(os.Stdout, spantree.Options{Color: spantree.Color(os.Stdout)}); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

// run plays the five situations and prints them to w. Calls that fail belong to
// it; the error is that of something else.
func run(w io.Writer, tree spantree.Options) error {
	backend := testsrv.New(nil, testsrv.WithName("backend"))
	defer backend.Close()

	var logged bytes.Buffer
	retry, err := grpcretry.New(
		// Without jitter every run prints the same. Leave this out in a service:
		// the default spreads the delays, so that clients do not come back all at once.
		grpcretry.WithDefaultPolicy(grpcretry.Policy{
			Backoff: grpcretry.Backoff{Jitter: grpcretry.NoJitter},
		}),
		grpcretry.WithLogger(slog.New(logTo{&logged})),
	)
	if err != nil {
		return err
	}
	conn, err := backend.Dial(retry.DialOptions()...) // elsewhere: grpc.NewClient(target, append(retry.DialOptions(), ...)...)
	if err != nil {
		return err
	}
	client := testpb.NewTestServiceClient(conn)

	spans := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("quickstart")

	for i, s := range situations {
		if err := backend.Set(s.method, s.backend); err != nil {
			return err
		}
		said := s.before(client)
		logged.Reset()
		spans.Reset()

		// The caller's own span. It needs nothing of grpcretry.
		ctx, span := tracer.Start(context.Background(), s.span)
		start := time.Now()
		reply, err := s.call(ctx, client)
		took := time.Since(start)
		span.End()

		var out bytes.Buffer
		fmt.Fprintf(&out, "%d. %s\n%s\n", i+1, s.title, indent(s.about+said))
		fmt.Fprintf(&out, "%s\n", indent("The caller got"+after(took, tree)+": "+result(reply, err)+"\n"+logged.String()))
		var drawn bytes.Buffer
		if err := spantree.Write(&drawn, spans.Ended(), tree); err != nil {
			return err
		}
		fmt.Fprintf(&out, "%s\n", indent(drawn.String()))
		if _, err := w.Write(out.Bytes()); err != nil {
			return err
		}
	}
	return nil
}

// situation is one call and what it meets.
type situation struct {
	title, about string
	method       string
	backend      testsrv.Sequence // how the server reacts to each attempt
	span         string
	before       func(testpb.TestServiceClient) string // what happens before; adds to about
	call         func(context.Context, testpb.TestServiceClient) (*testpb.Response, error)
}

// answer and unavailable take the server 5 ms.
var (
	answer      = testsrv.Step{Delay: 5 * time.Millisecond}
	unavailable = testsrv.Step{Delay: 5 * time.Millisecond, Code: codes.Unavailable, Message: "shutting down"}
)

var situations = []situation{
	{
		title: "A call that succeeds at once",
		about: "Nothing is added to it but one event on the caller's span.",

		method:  get,
		backend: testsrv.Sequence{answer},
		span:    "show order",
		before:  nothing,
		call:    callGet,
	},
	{
		title: "A call that succeeds after two retries",
		about: "The server answers UNAVAILABLE twice, as if it were being replaced. Get declares in its .proto\n" +
			"that it has no side effects, so it may be repeated.",

		method:  get,
		backend: testsrv.Sequence{unavailable, unavailable, answer},
		span:    "show order",
		before:  nothing,
		call:    callGet,
	},
	{
		title: "A call of a method that is not known to be idempotent",
		about: "The server answers UNAVAILABLE once, after it may have done the work. Nothing says that Write\n" +
			"may be applied twice, so the caller gets the server's error, and the log says how to change that.",

		method:  write,
		backend: testsrv.Sequence{unavailable, answer},
		span:    "place order",
		before:  nothing,
		call: func(ctx context.Context, client testpb.TestServiceClient) (*testpb.Response, error) {
			return client.Write(ctx, &testpb.Request{})
		},
	},
	{
		title: "A call with a short deadline",
		about: "The caller has 300 ms, and the server asks to be left alone for 500 ms. Waiting would be in vain,\n" +
			"so the caller gets the server's error now, and not DEADLINE_EXCEEDED later.",

		method: get,
		backend: testsrv.Sequence{{
			Delay: 5 * time.Millisecond, Code: codes.Unavailable, Message: "overloaded",
			Trailer: metadata.Pairs("grpc-retry-pushback-ms", "500"),
		}},
		span:   "show order",
		before: nothing,
		call: func(ctx context.Context, client testpb.TestServiceClient) (*testpb.Response, error) {
			ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			return client.Get(ctx, &testpb.Request{})
		},
	},
	{
		title: "A call while the retry budget is spent",
		about: "The server fails for good. ",

		method:  get,
		backend: testsrv.Sequence{unavailable},
		span:    "show order",
		before:  spendBudget,
		call:    callGet,
	},
}

func nothing(testpb.TestServiceClient) string { return "" }

func callGet(ctx context.Context, client testpb.TestServiceClient) (*testpb.Response, error) {
	return client.Get(ctx, &testpb.Request{})
}

// spendBudget calls until the budget refuses a retry.
func spendBudget(client testpb.TestServiceClient) string {
	for n := 1; ; n++ {
		_, err := client.Get(context.Background(), &testpb.Request{})
		if errors.Is(err, grpcretry.ErrBudgetExhausted) || err == nil {
			return fmt.Sprintf("%d calls before this one used up the budget. Only successful calls fill\n"+
				"it again, so this one is not retried: a server that only fails gets no extra load.", n)
		}
	}
}

// result is what the caller sees of a call.
func result(reply *testpb.Response, err error) string {
	if err != nil {
		return err.Error()
	}
	return "a reply from " + reply.GetServer()
}

// after is how long the call took.
func after(d time.Duration, tree spantree.Options) string {
	if tree.HideDurations {
		return ""
	}
	return fmt.Sprintf(" after %v", d.Round(time.Millisecond))
}

// logTo is a slog.Handler that prints warnings without what differs from run to run.
type logTo struct{ w io.Writer }

func (logTo) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (h logTo) WithAttrs([]slog.Attr) slog.Handler         { return h }
func (h logTo) WithGroup(string) slog.Handler              { return h }
func (h logTo) Handle(_ context.Context, r slog.Record) error {
	_, err := fmt.Fprintf(h.w, "The log got: %s\n", r.Message)
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "method", "reason", "fix":
			_, err = fmt.Fprintf(h.w, "    %s: %s\n", a.Key, a.Value)
		}
		return err == nil
	})
	return err
}

// indent sets every line of text off from the headings, and ends the last one.
func indent(text string) string {
	return "   " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n   ") + "\n"
}
