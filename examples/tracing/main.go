// Command tracing follows calls through three services, shop -> orders -> stock,
// and shows of each the whole trace: what every attempt met, who decided that
// there would be no other, and where in the chain that was.
//
//	go -C examples/tracing run .                          # prints four traces
//	go -C examples/tracing run . -tracez localhost:8088   # and shows them at http://localhost:8088/
//
// docs/why-did-this-call-fail.md reads three of them. It is a module of its own for
// otelgrpc and zpages. All services are in this process.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"go.opentelemetry.io/contrib/zpages"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"example.com/grpcretry/internal/spantree"
)

func main() {
	if err := command(); err != nil {
		fmt.Fprintln(os.Stderr, "tracing:", err)
		os.Exit(1)
	}
}

func command() error {
	tracez := flag.String("tracez", "", "serve the spans at this `address` until interrupted; keep it on localhost")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	spans := zpages.NewSpanProcessor()
	if err := demonstrate(ctx, os.Stdout, spantree.Options{Color: spantree.Color(os.Stdout)}, spans); err != nil || *tracez == "" {
		return err
	}
	address := make(chan string, 1)
	go func() {
		fmt.Printf("The spans are at http://%s/; \"checkout\" is the shop's. Ctrl-C ends this.\n", <-address)
	}()
	return serve(ctx, *tracez, spans, address)
}

// serve shows the spans at the address until ctx ends, and sends where that is.
func serve(ctx context.Context, address string, spans *zpages.SpanProcessor, at chan<- string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: zpages.NewTracezHandler(spans), ReadHeaderTimeout: 5 * time.Second}
	end := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer end()
	at <- listener.Addr().String()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// demonstrate lives through the scenes and prints the trace of each.
func demonstrate(ctx context.Context, out io.Writer, options spantree.Options, processors ...sdktrace.SpanProcessor) error {
	recorder := tracetest.NewSpanRecorder()
	opts := []sdktrace.TracerProviderOption{sdktrace.WithSpanProcessor(recorder)}
	for _, p := range processors {
		opts = append(opts, sdktrace.WithSpanProcessor(p))
	}
	tracers := sdktrace.NewTracerProvider(opts...)
	traces := make([]trace.TraceID, len(scenes))
	for i, s := range scenes {
		var err error
		if traces[i], err = s.play(ctx, tracers, slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
	}
	for i, s := range scenes {
		var spans []sdktrace.ReadOnlySpan
		for _, span := range recorder.Ended() {
			if span.SpanContext().TraceID() == traces[i] {
				spans = append(spans, span)
			}
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
