package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/spantree"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// scene is a call of a policy with Delay: 15 ms, and what its attempts meet.
type scene struct {
	title, told string
	attempts    testsrv.Sequence
	before      int // hedged calls before it
}

var scenes = []scene{
	{
		title: "The hedge wins", told: "The first attempt is slow. The second begins after 15 ms and is quick.",
		attempts: testsrv.Sequence{{Delay: 100 * time.Millisecond}, {Delay: 10 * time.Millisecond}},
	},
	{
		title: "An attempt fails while another runs", told: "The first attempt fails after 20 ms. The third takes its place at once, and the second wins.",
		attempts: testsrv.Sequence{{Delay: 20 * time.Millisecond, Code: codes.Unavailable, Message: "shutting down"}, {Delay: 10 * time.Millisecond}, {Delay: 10 * time.Millisecond}},
	},
	{
		title: "The hedges' funds are empty", told: "The call waits for its only attempt, as if there were no hedging.",
		attempts: testsrv.Sequence{{Delay: 100 * time.Millisecond}},
		before:   1, // with two hedges, of which none wins
	},
}

// traces prints what the caller's span says of each scene.
func traces(ctx context.Context, out io.Writer, options spantree.Options) error {
	for i, s := range scenes {
		spans, err := s.play(ctx)
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "%d. %s\n   %s\n\n", i+1, s.title, s.told); err != nil {
			return err
		}
		if err := spantree.Write(out, spans, options); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out); err != nil {
			return err
		}
	}
	return nil
}

// play makes the call, from funds that suffice for two hedges.
func (s scene) play(ctx context.Context) ([]sdktrace.ReadOnlySpan, error) {
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{HedgeCapacity: 10, HedgeCost: 5})
	if err != nil {
		return nil, err
	}
	retry, err := grpcretry.New(
		grpcretry.WithBudget(budget),
		grpcretry.WithLogger(slog.New(slog.DiscardHandler)),
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Get", grpcretry.Policy{
			Idempotency: grpcretry.Idempotent,
			Hedge:       grpcretry.Hedge{MaxAttempts: 3, Delay: 15 * time.Millisecond},
		}))
	if err != nil {
		return nil, err
	}
	srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{{Delay: 100 * time.Millisecond}}}, testsrv.WithName("backend"))
	defer srv.Close()
	conn, err := srv.Dial(retry.DialOptions()...)
	if err != nil {
		return nil, err
	}
	client := testpb.NewTestServiceClient(conn)
	for range s.before {
		if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
			return nil, err
		}
	}
	if err := srv.Set(get, s.attempts); err != nil {
		return nil, err
	}
	recorder := tracetest.NewSpanRecorder()
	ctx, span := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)).Tracer("shop").Start(ctx, "show order")
	_, err = client.Get(ctx, &testpb.Request{})
	span.End()
	return recorder.Ended(), err
}
