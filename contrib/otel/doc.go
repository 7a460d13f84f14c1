// Package otel holds the proof of what docs/tracing.md shows: span trees and
// metrics of grpcretry together with otelgrpc and with gRPC's own OpenTelemetry
// plugin. It is a module of its own, because those need newer versions than
// grpcretry does, and has nothing to import.
package otel
