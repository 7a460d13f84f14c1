// Command streams shows how grpcretry repeats streams: each of the three kinds
// against a server that fails, a stream that breaks off after its caller was
// given a part of it, and one that goes on from a token. It prints what the
// caller got, what the server read, and what the caller's trace span says.
//
//	go run ./examples/streams
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/spantree"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

func main() {
	if err := run(os.Stdout, spantree.Options{Color: spantree.Color(os.Stdout)}); err != nil {
		fmt.Fprintln(os.Stderr, "streams:", err)
		os.Exit(1)
	}
}

// run plays the situations and prints them to w. Streams that fail belong to
// it; the error is that of something else.
func run(w io.Writer, tree spantree.Options) error {
	backend := testsrv.New(nil, testsrv.WithName("backend"))
	defer backend.Close()
	retry, err := grpcretry.New(grpcretry.WithDefaultPolicy(grpcretry.Policy{
		// Without jitter every run prints the same. Leave this out in a service.
		Backoff: grpcretry.Backoff{Jitter: grpcretry.NoJitter},
	}))
	if err != nil {
		return err
	}
	conn, err := backend.Dial(retry.DialOptions()...) // elsewhere: grpc.NewClient(target, append(retry.DialOptions(), ...)...)
	if err != nil {
		return err
	}
	client := testpb.NewTestServiceClient(conn)

	spans := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("streams")

	for i, s := range situations {
		if err := backend.Set(s.method, s.backend); err != nil {
			return err
		}
		spans.Reset()
		before := backend.Count("")
		ctx, span := tracer.Start(context.Background(), s.span)
		got, err := s.call(ctx, client)
		span.End()

		var out bytes.Buffer
		fmt.Fprintf(&out, "%d. %s\n%s\n", i+1, s.title, indent(s.about))
		fmt.Fprintf(&out, "%s\n", indent("The caller got: "+result(got, err)+"\n"+reads(backend.Attempts("")[before:])))
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

// situation is one stream and what it meets.
type situation struct {
	title, about string
	method       string
	backend      testsrv.Sequence // how the server reacts to each attempt
	span         string
	call         func(context.Context, testpb.TestServiceClient) ([]int64, error)
}

const (
	takes = 5 * time.Millisecond // the server, for everything
	down  = "shutting down"
)

var situations = []situation{
	{
		title: "A server stream that is refused twice",
		about: "The stream opens without a word from the server, so its failure shows only when the first message\n" +
			"is awaited. Nothing was given to the caller by then, so the request is sent again.",

		method: testpb.TestService_List_FullMethodName,
		backend: testsrv.Sequence{
			{Delay: takes, Messages: -1, Code: codes.Unavailable, Message: down},
			{Delay: takes, Messages: -1, Code: codes.Unavailable, Message: down},
			{Delay: takes},
		},
		span: "list orders",
		call: func(ctx context.Context, client testpb.TestServiceClient) ([]int64, error) {
			stream, err := client.List(ctx, &testpb.Request{Count: 3})
			if err != nil {
				return nil, err
			}
			return drain(stream)
		},
	},
	{
		title: "A client stream whose server goes away",
		about: "The server fails after it has read two of four requests. All that was sent is sent again to the\n" +
			"second attempt, from a log that holds copies, while the caller goes on sending.",

		method: testpb.TestService_Store_FullMethodName,
		backend: testsrv.Sequence{
			{Receive: 2, Code: codes.Unavailable, Message: down},
			{Delay: takes},
		},
		span: "import orders",
		call: func(ctx context.Context, client testpb.TestServiceClient) ([]int64, error) {
			stream, err := client.Store(ctx)
			if err != nil {
				return nil, err
			}
			if err := send(stream, 4); err != nil {
				return nil, err
			}
			reply, err := stream.CloseAndRecv()
			return []int64{reply.GetReceived()}, err
		},
	},
	{
		title: "A bidirectional stream whose server fails before its first answer",
		about: "As long as the caller was given neither the header nor a message, the same holds here.",

		method: testpb.TestService_Sync_FullMethodName,
		backend: testsrv.Sequence{
			{Receive: 3, NoEcho: true, Code: codes.Unavailable, Message: down},
			{},
		},
		span: "synchronise",
		call: func(ctx context.Context, client testpb.TestServiceClient) ([]int64, error) {
			stream, err := client.Sync(ctx)
			if err != nil {
				return nil, err
			}
			if err := send(stream, 3); err != nil {
				return nil, err
			}
			if err := stream.CloseSend(); err != nil {
				return nil, err
			}
			return drain(stream)
		},
	},
	{
		title: "A server stream that breaks off",
		about: "The server fails when two of four messages were delivered. They cannot be taken back, and what a\n" +
			"repeated request would bring is unknown, so the caller gets the error.",

		method:  testpb.TestService_List_FullMethodName,
		backend: testsrv.Sequence{{Delay: takes, Messages: 2, Every: takes, Code: codes.Unavailable, Message: down}},
		span:    "list orders",
		call: func(ctx context.Context, client testpb.TestServiceClient) ([]int64, error) {
			stream, err := client.List(ctx, &testpb.Request{Count: 4})
			if err != nil {
				return nil, err
			}
			return drain(stream)
		},
	},
	{
		title: "A server stream that is resumed",
		about: "The same, but the caller says how to go on: from the number of the last message, as one would\n" +
			"with the token of a page. So it gets all four messages, once each.",

		method: testpb.TestService_List_FullMethodName,
		backend: testsrv.Sequence{
			{Delay: takes, Messages: 2, Every: takes, Code: codes.Unavailable, Message: down},
			{Delay: takes, Messages: -1, Code: codes.Unavailable, Message: down},
			{Delay: takes},
		},
		span: "list orders",
		call: func(ctx context.Context, client testpb.TestServiceClient) ([]int64, error) {
			stream, err := client.List(ctx, &testpb.Request{Count: 4},
				grpcretry.WithResume(func(req *testpb.Request, last *testpb.Response) (*testpb.Request, bool) {
					req.After = last.GetNumber()
					return req, true
				}))
			if err != nil {
				return nil, err
			}
			return drain(stream)
		},
	},
}

// send sends n requests with the numbers from 1. A millisecond lies between
// them, so that the server's failure meets the caller in the middle.
func send(stream interface{ Send(*testpb.Request) error }, n int) error {
	for i := range n {
		if err := stream.Send(&testpb.Request{Number: int64(i + 1)}); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return nil
}

// drain reads a stream to its end, and gives the numbers of its messages.
func drain(stream interface {
	Recv() (*testpb.Response, error)
}) (numbers []int64, err error) {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return numbers, nil
		}
		if err != nil {
			return numbers, err
		}
		numbers = append(numbers, m.GetNumber())
	}
}

// result is what the caller sees of a stream.
func result(got []int64, err error) string {
	if err != nil {
		return fmt.Sprintf("messages %v, then %v: %s", got, status.Code(err), status.Convert(err).Message())
	}
	return fmt.Sprintf("messages %v, then the end", got)
}

// reads is what the server read in each attempt: of a server stream the place
// from which it is to begin, of the others the numbers of the requests.
func reads(attempts []testsrv.Attempt) string {
	var read []string
	for _, a := range attempts {
		var numbers []int64
		for _, m := range a.Requests {
			numbers = append(numbers, m.GetNumber())
		}
		text := fmt.Sprintf("requests %v", numbers)
		if a.Method == testpb.TestService_List_FullMethodName {
			text = fmt.Sprintf("\"all after %d\"", a.Requests[0].GetAfter())
		}
		read = append(read, text)
	}
	return "The server read: " + strings.Join(read, ", then ")
}

// indent sets every line of text off from the headings, and ends the last one.
func indent(text string) string {
	return "   " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n   ") + "\n"
}
