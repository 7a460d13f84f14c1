package grpcretry

import (
	"context"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
)

// Names of the event and its attributes. The rpc.*, error.* and network.* keys
// are those of the OpenTelemetry semantic conventions (RPC, release candidate);
// names of our own begin with grpcretry.
const (
	eventAttempt = "grpcretry.attempt"

	keyStatusCode  = attribute.Key("rpc.response.status_code")
	keyMethod      = attribute.Key("rpc.method")
	keyErrorType   = attribute.Key("error.type")
	keyPeerAddress = attribute.Key("network.peer.address")
	keyPeerPort    = attribute.Key("network.peer.port")

	keyNumber        = attribute.Key("grpcretry.attempt.number")
	keyDecision      = attribute.Key("grpcretry.attempt.decision")
	keyDuration      = attribute.Key("grpcretry.attempt.duration")
	keySent          = attribute.Key("grpcretry.attempt.sent")
	keyHedge         = attribute.Key("grpcretry.attempt.hedge")
	keyUnhedged      = attribute.Key("grpcretry.hedge.refused")
	keyMax           = attribute.Key("grpcretry.attempt.max")
	keyDropped       = attribute.Key("grpcretry.attempt.dropped")
	keyCommitCause   = attribute.Key("grpcretry.commit.cause")
	keyDelay         = attribute.Key("grpcretry.retry.delay")
	keyDelaySource   = attribute.Key("grpcretry.retry.delay_source")
	keyBalance       = attribute.Key("grpcretry.budget.balance")
	keyRemaining     = attribute.Key("grpcretry.deadline.remaining")
	keyIdempotency   = attribute.Key("grpcretry.idempotency")
	keyPolicySource  = attribute.Key("grpcretry.policy.source")
	keyWithin        = attribute.Key("grpcretry.within.name")
	keyWithinAttempt = attribute.Key("grpcretry.within.attempt")
)

// tracerName is the instrumentation scope of the call span.
const tracerName = "grpcretry"

// Attributes of the call span, beside those that its event and it share.
const keyAttempts = attribute.Key("grpcretry.call.attempts")

// WithCallSpan makes a span over all attempts of each call, for callers that
// have none of their own: the events are on it, and the attempts' spans, such as
// those of otelgrpc, are below it, so that one call is one trace. Where ctx has a
// span this one is its child.
//
// The span is named by the method, "pkg.Service/Method", and begins with the
// attributes rpc.system.name and rpc.method, which samplers see. Its kind is
// INTERNAL, because otelgrpc makes CLIENT spans of the attempts; where nothing
// does, pass trace.WithSpanKind(trace.SpanKindClient). opts come after ours. It
// ends once with the call, however that ends; a stream's end when the stream does.
// Then it has rpc.response.status_code and grpcretry.call.attempts, and, only if
// the call failed in the end, the status Error, without a text, and error.type.
//
// If the sampler drops the span the events go to the span in ctx. A call that is
// refused for a bad option of its own makes no attempt and no span. A nil
// provider or option is an error of [New].
func WithCallSpan(tp trace.TracerProvider, opts ...trace.SpanStartOption) Option {
	return wiringOption{"WithCallSpan", func(c *config) {
		switch {
		case tp == nil:
			c.faults.add("WithCallSpan: provider is nil, want a trace.TracerProvider")
			return
		case c.callSpan != nil:
			c.faults.add("WithCallSpan is given twice, want it once")
		}
		for i, o := range opts {
			if o == nil {
				c.faults.add("WithCallSpan: option %d of %d is nil, want a trace.SpanStartOption", i+1, len(opts))
			}
		}
		c.callSpan = &callSpan{tp.Tracer(tracerName), slices.Clone(opts)}
	}}
}

// callSpan is how to begin the span of a call.
type callSpan struct {
	tracer trace.Tracer
	opts   []trace.SpanStartOption
}

// start begins the span of a call of the method.
func (s *callSpan) start(ctx context.Context, m *method, work bool) (context.Context, trace.Span) {
	attrs := []attribute.KeyValue{keyMethod.String(m.rpc)}
	if !work {
		attrs = append(attrs, keySystem.String("grpc"))
	}
	opts := append(make([]trace.SpanStartOption, 0, 2+len(s.opts)), trace.WithSpanKind(trace.SpanKindInternal), trace.WithAttributes(attrs...))
	return s.tracer.Start(ctx, m.rpc, append(opts, s.opts...)...)
}

// EventSink takes the attempt events in place of the span; see [WithEventSink].
// Its methods are called on many goroutines at once.
type EventSink interface {
	// Enabled reports whether the events of a call with this context are wanted.
	// It is asked once per call, when that begins.
	Enabled(ctx context.Context) bool
	// Emit takes an event that happened at the given time. attrs are those that
	// the span event would have; they must not be kept or changed.
	Emit(ctx context.Context, name string, at time.Time, attrs []attribute.KeyValue)
}

// WithEventSink sends the attempt events elsewhere, and then never to a span:
// contrib/logevents makes OpenTelemetry log records of them. Name, attributes
// and number of the events are the same. ctx is that of the call, by which a log
// record finds its span. nil is an error of [New].
func WithEventSink(s EventSink) Option {
	return wiringOption{"WithEventSink", func(c *config) {
		switch {
		case s == nil:
			c.faults.add("WithEventSink: sink is nil, want an EventSink")
		case c.eventSink != nil:
			c.faults.add("WithEventSink is given twice, want it once")
		}
		c.eventSink = s
	}}
}

// callTrace is where a call leaves its events: the span in the caller's
// context when the call was made, that of the call if there is one, or a sink.
type callTrace struct {
	span      trace.Span
	own       trace.Span // the call's, until it has ended
	sink      EventSink
	recording bool
	events    int // so far
}

// traces reports whether a call with ctx may leave a span or events.
func (r *Retrier) traces(ctx context.Context) bool {
	return r.callSpan != nil || r.eventSink != nil || trace.SpanFromContext(ctx).IsRecording()
}

// beginTrace takes the span. Nothing is built later if it does not record.
func (c *call) beginTrace() {
	t := &c.trace
	t.span = trace.SpanFromContext(c.ctx)
	if c.r.callSpan != nil {
		c.ctx, t.own = c.r.callSpan.start(c.ctx, c.method, c.work)
		c.base = trace.ContextWithSpan(c.base, t.own)
		if t.own.IsRecording() {
			t.span = t.own
		}
	}
	t.recording = t.span.IsRecording()
	if t.sink = c.r.eventSink; t.sink != nil {
		t.recording = t.sink.Enabled(c.ctx)
	}
}

// endTrace ends the span of the call, if it has one, once. panicked says that
// a callback of the user's did, so that there is no result.
func (c *call) endTrace(code codes.Code, panicked bool) {
	span := c.trace.own
	if span == nil {
		return
	}
	c.trace.own = nil
	if span.IsRecording() {
		name := codeName(code)
		span.SetAttributes(keyStatusCode.String(name), keyAttempts.Int(c.made))
		switch {
		case panicked:
			span.SetAttributes(keyErrorType.String("panic"))
		case code != codes.OK:
			span.SetAttributes(keyErrorType.String(name))
		}
		if panicked || code != codes.OK {
			span.SetStatus(otelcodes.Error, "")
		}
	}
	span.End()
}

// eventBuffer is what an event is put together in. Who reads the options of a
// span event copies them (trace.NewEventConfig), and an [EventSink] must not keep
// them, so it can be used again.
type eventBuffer struct {
	attrs [24]attribute.KeyValue
	opts  [2]trace.EventOption
}

var eventBuffers = sync.Pool{New: func() any { return new(eventBuffer) }}

// attempt emits the event of one finished attempt, at the time of its end. Of a
// call with many attempts only the first 31 and the last leave one, because a
// span keeps a limited number of events and evicts the oldest.
func (t *callTrace) attempt(c *call, a *Attempt, last bool) {
	if !last && t.events >= maxAttemptsKept-1 || c.r.eventsOnlyOnRetry && last && c.made == 1 {
		return
	}
	t.events++
	b, _ := eventBuffers.Get().(*eventBuffer)
	attrs := appendAttempt(b.attrs[:0], c, a, last)
	if at := a.Start.Add(a.Duration); t.sink != nil {
		t.sink.Emit(c.ctx, eventAttempt, at, attrs)
	} else {
		b.opts = [2]trace.EventOption{trace.WithTimestamp(at), trace.WithAttributes(attrs...)}
		t.span.AddEvent(eventAttempt, b.opts[:]...)
	}
	clear(b.attrs[:])
	clear(b.opts[:])
	eventBuffers.Put(b)
}

// appendAttempt gives the attributes of an attempt's event.
func appendAttempt(attrs []attribute.KeyValue, c *call, a *Attempt, last bool) []attribute.KeyValue {
	attrs = append(attrs,
		keyMethod.String(c.method.rpc),
		keyNumber.Int(a.Number),
		keyStatusCode.String(codeName(a.Code)),
		keyDecision.String(a.Reason.String()),
		keyDuration.Float64(a.Duration.Seconds()),
	)
	if a.Hedge {
		attrs = append(attrs, keyHedge.Bool(true))
	}
	if a.Code != codes.OK {
		attrs = append(attrs, keyErrorType.String(codeName(a.Code)), keySent.String(a.Evidence.String()))
	}
	waits := a.Reason == ReasonRetry || a.Reason == ReasonResume || a.Reason == ReasonDryRun
	if waits || a.Delay > 0 {
		attrs = append(attrs, keyDelay.Float64(a.Delay.Seconds()))
	}
	if waits || a.Delay > 0 || a.DelaySource != DelayBackoff {
		attrs = append(attrs, keyDelaySource.String(a.DelaySource.String()))
	}
	if waits || a.Reason == ReasonBudgetExhausted {
		attrs = append(attrs, keyBalance.Float64(c.balance))
	}
	if a.Reason == ReasonCommitted || c.committed.unreplayable() {
		attrs = append(attrs, keyCommitCause.String(string(c.committed)))
	}
	if last {
		attrs = append(attrs, keyMax.Int(c.policy.most()))
		if a.Remaining >= 0 {
			attrs = append(attrs, keyRemaining.Float64(a.Remaining.Seconds()))
		}
		if a.Code != codes.OK {
			attrs = append(attrs, keyIdempotency.String(c.idempotency.String()), keyPolicySource.String(c.source.String()))
		}
		if c.unhedged != ReasonNone {
			attrs = append(attrs, keyUnhedged.String(c.unhedged.String()))
		}
		if c.dropped > 0 {
			attrs = append(attrs, keyDropped.Int(c.dropped))
		}
	}
	if n := c.within(); n != nil {
		attrs = append(attrs, keyWithin.String(n.name), keyWithinAttempt.Int(n.attempt))
	}
	return appendPeer(attrs, a.Peer)
}

// traceInbound puts what a server can tell of an attempt on the span of the
// request, if that records.
func traceInbound(ctx context.Context, previous int) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	attrs := append(make([]attribute.KeyValue, 0, 2), keyNumber.Int(previous+1))
	if deadline, ok := ctx.Deadline(); ok {
		attrs = append(attrs, keyRemaining.Float64(left(deadline, time.Now()).Seconds()))
	}
	span.SetAttributes(attrs...)
}

// AttemptStatsHandler returns a stats handler that writes the number of the
// attempt, from 1, on the span of the attempt, as grpcretry.attempt.number. That
// span is made by another stats handler, such as otelgrpc's, so this one has to be
// registered after it:
//
//	grpc.WithStatsHandler(otelgrpc.NewClientHandler()),
//	grpc.WithStatsHandler(grpcretry.AttemptStatsHandler()),
//
// It goes by the metadata with which a [Retrier] numbers its attempts, and leaves
// the spans of other calls the number 1. Where nothing makes a span per attempt,
// or the span does not record, it does nothing, without allocating. Where no
// stats handler makes spans but the caller has one it would write on that, so
// leave it out then. It may be shared by any number of ClientConns.
func AttemptStatsHandler() stats.Handler { return attemptHandler{} }

type attemptHandler struct{}

// TagRPC implements stats.Handler. gRPC calls it once for each attempt.
func (attemptHandler) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return ctx
	}
	number := 1
	if md, ok := metadata.FromOutgoingContext(ctx); ok {
		number += previousOf(md[attemptsHeader])
	}
	span.SetAttributes(keyNumber.Int(number))
	return ctx
}

// HandleRPC implements stats.Handler.
func (attemptHandler) HandleRPC(context.Context, stats.RPCStats) {}

// TagConn implements stats.Handler.
func (attemptHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (attemptHandler) HandleConn(context.Context, stats.ConnStats) {}

// appendPeer splits an address the way OpenTelemetry wants it; one without a
// port (a Unix socket, an in-memory listener) is given whole.
func appendPeer(attrs []attribute.KeyValue, addr net.Addr) []attribute.KeyValue {
	if addr == nil {
		return attrs
	}
	if tcp, ok := addr.(*net.TCPAddr); ok && tcp != nil {
		if ip := tcp.AddrPort().Addr().Unmap(); ip.IsValid() { // one allocation in place of four
			return append(attrs, keyPeerAddress.String(ip.String()), keyPeerPort.Int(tcp.Port))
		}
	}
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return append(attrs, keyPeerAddress.String(addr.String()))
	}
	attrs = append(attrs, keyPeerAddress.String(host))
	if n, err := strconv.Atoi(port); err == nil {
		attrs = append(attrs, keyPeerPort.Int(n))
	}
	return attrs
}
