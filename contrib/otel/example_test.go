package otel

import (
	"log"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	experimental "google.golang.org/grpc/experimental/opentelemetry"
	"google.golang.org/grpc/stats/opentelemetry"

	"example.com/grpcretry"
)

// One span for the call, one for each attempt, and the events on the call's.
func Example_plugin() {
	meters, tracers := sdkmetric.NewMeterProvider(), sdktrace.NewTracerProvider()
	target, creds := "localhost:50051", insecure.NewCredentials()
	retry, err := grpcretry.New()
	if err != nil {
		log.Fatal(err)
	}
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{
		opentelemetry.DialOption(opentelemetry.Options{ // google.golang.org/grpc/stats/opentelemetry; before grpcretry's
			MetricsOptions: opentelemetry.MetricsOptions{MeterProvider: meters},
			TraceOptions:   experimental.TraceOptions{TracerProvider: tracers, TextMapPropagator: propagation.TraceContext{}},
		}),
		grpc.WithStatsHandler(grpcretry.AttemptStatsHandler()),
		grpc.WithTransportCredentials(creds),
	}, retry.DialOptions()...)...)
	if err != nil {
		log.Fatal(err)
	}
	_ = conn.Close()
	// Output:
}

// A span for each attempt below the caller's, which holds the events.
func Example_otelgrpc() {
	target, creds := "localhost:50051", insecure.NewCredentials()
	retry, err := grpcretry.New()
	if err != nil {
		log.Fatal(err)
	}
	conn, err := grpc.NewClient(target, append(retry.DialOptions(),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler()),
		grpc.WithStatsHandler(grpcretry.AttemptStatsHandler()), // after otelgrpc's
		grpc.WithTransportCredentials(creds),
	)...)
	if err != nil {
		log.Fatal(err)
	}
	_ = conn.Close()
	// Output:
}
