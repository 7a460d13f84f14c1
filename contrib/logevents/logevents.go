// Package logevents makes OpenTelemetry log records of grpcretry's attempt
// events, in place of the span events:
//
//	sink, err := logevents.New(loggerProvider)
//	if err != nil {
//		return err
//	}
//	retry, err := grpcretry.New(grpcretry.WithEventSink(sink))
//
// Name and attributes are those of the span events, of which there are none
// then. It is a module of its own, because the log API of OpenTelemetry is not
// yet stable.
package logevents

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/log"

	"example.com/grpcretry"
)

// Sink emits the events as log records. It is made by [New], and safe for
// concurrent use.
type Sink struct{ logger log.Logger }

var _ grpcretry.EventSink = (*Sink)(nil)

// New returns a Sink that emits to a logger of the provider by the name
// "grpcretry". A nil provider is an error.
func New(lp log.LoggerProvider) (*Sink, error) {
	if lp == nil {
		return nil, errors.New("logevents: provider is nil, want a log.LoggerProvider")
	}
	return &Sink{lp.Logger("grpcretry")}, nil
}

// Enabled implements [grpcretry.EventSink]: it asks the logger, for the higher of
// the severities that events have.
func (s *Sink) Enabled(ctx context.Context) bool {
	return s.logger.Enabled(ctx, log.EnabledParameters{Severity: log.SeverityWarn, EventName: "grpcretry.attempt"})
}

// Emit implements [grpcretry.EventSink]. An attempt that failed has the severity
// WARN, any other INFO. The record has no body: what there is to say is in the
// attributes. The logger takes the ids of the trace and the span from ctx.
func (s *Sink) Emit(ctx context.Context, name string, at time.Time, attrs []attribute.KeyValue) {
	var r log.Record
	r.SetEventName(name)
	r.SetTimestamp(at)
	r.SetSeverity(log.SeverityInfo)
	for _, a := range attrs {
		if a.Key == "error.type" {
			r.SetSeverity(log.SeverityWarn)
		}
	}
	r.AddAttributes(attrs...) // copies them
	s.logger.Emit(ctx, r)
}
