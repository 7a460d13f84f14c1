package grpcretry

import (
	"context"
	"net"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
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

// callTrace is the span on which a call leaves its events: the one in the
// caller's context when the call was made.
type callTrace struct {
	span      trace.Span
	recording bool
}

// begin takes the span. Nothing is built later if it does not record.
func (t *callTrace) begin(ctx context.Context) {
	t.span = trace.SpanFromContext(ctx)
	t.recording = t.span.IsRecording()
}

// attempt adds the event of one finished attempt, at the time of its end. Of a
// call with many attempts only the first 31 and the last leave one, because a
// span keeps a limited number of events and evicts the oldest.
func (t *callTrace) attempt(c *call, a *Attempt, last bool) {
	if !last && a.Number >= maxAttemptsKept || c.r.eventsOnlyOnRetry && last && a.Number == 1 {
		return
	}
	attrs := make([]attribute.KeyValue, 0, 21)
	attrs = append(attrs,
		keyMethod.String(c.method.rpc),
		keyNumber.Int(a.Number),
		keyStatusCode.String(codeName(a.Code)),
		keyDecision.String(a.Reason.String()),
		keyDuration.Float64(a.Duration.Seconds()),
	)
	if a.Code != codes.OK {
		attrs = append(attrs, keyErrorType.String(codeName(a.Code)), keySent.String(a.Evidence.String()))
	}
	if a.Reason == ReasonRetry || a.Reason == ReasonResume || a.Reason == ReasonDryRun {
		attrs = append(attrs, keyDelay.Float64(a.Delay.Seconds()), keyDelaySource.String(a.DelaySource.String()))
	}
	if a.Reason == ReasonRetry || a.Reason == ReasonResume || a.Reason == ReasonDryRun || a.Reason == ReasonBudgetExhausted {
		attrs = append(attrs, keyBalance.Float64(c.balance))
	}
	if a.Reason == ReasonCommitted || c.committed.unreplayable() {
		attrs = append(attrs, keyCommitCause.String(string(c.committed)))
	}
	if last {
		attrs = append(attrs, keyMax.Int(c.policy.MaxAttempts))
		if a.Remaining >= 0 {
			attrs = append(attrs, keyRemaining.Float64(a.Remaining.Seconds()))
		}
		if a.Code != codes.OK {
			attrs = append(attrs, keyIdempotency.String(c.idempotency.String()), keyPolicySource.String(c.source.String()))
		}
		if c.dropped > 0 {
			attrs = append(attrs, keyDropped.Int(c.dropped))
		}
	}
	if n := c.within(); n != nil {
		attrs = append(attrs, keyWithin.String(n.name), keyWithinAttempt.Int(n.attempt))
	}
	attrs = appendPeer(attrs, a.Peer)
	t.span.AddEvent(eventAttempt, trace.WithTimestamp(a.Start.Add(a.Duration)), trace.WithAttributes(attrs...))
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

// appendPeer splits an address the way OpenTelemetry wants it; one without a
// port (a Unix socket, an in-memory listener) is given whole.
func appendPeer(attrs []attribute.KeyValue, addr net.Addr) []attribute.KeyValue {
	if addr == nil {
		return attrs
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
