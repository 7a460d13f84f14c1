package grpcretry

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
)

// givenUpInterval is the least time between two lines about calls of one
// method that were given up, so that an outage does not flood the log.
const givenUpInterval = 10 * time.Second

// throttledLine lets one log line through per interval and counts the rest.
// The zero value is ready.
type throttledLine struct {
	next       atomic.Int64 // Unix nanoseconds
	suppressed atomic.Int64
}

// allow reports whether a line may be written now, and how many were not since
// the one before.
func (t *throttledLine) allow(now time.Time) (suppressed int64, ok bool) {
	next := t.next.Load()
	wait := next - now.UnixNano()
	// A longer wait than the interval means that the clock was set back.
	if wait > 0 && wait <= int64(givenUpInterval) || !t.next.CompareAndSwap(next, now.Add(givenUpInterval).UnixNano()) {
		t.suppressed.Add(1)
		return 0, false
	}
	return t.suppressed.Swap(0), true
}

func (r *Retrier) log() *slog.Logger {
	if r.logger != nil {
		return r.logger
	}
	return slog.Default()
}

// logDeclined tells, once per method, that a retry was refused only because
// nobody said that the method is idempotent, and how to say it.
func (r *Retrier) logDeclined(c *call, a *Attempt) {
	if a.Code != codes.Unavailable || c.idempotency != Inherit || !c.method.memory.declined.CompareAndSwap(false, true) {
		return
	}
	r.log().LogAttrs(c.ctx, slog.LevelWarn, "grpcretry: not retried: the server may have processed the call, and nothing says that the method is idempotent",
		slog.String("method", c.method.name),
		slog.String("code", codeName(a.Code)),
		slog.String("sent", a.Evidence.String()),
		slog.String("fix", c.method.declareIdempotent()),
	)
}

// logUnhedged tells, once per method, that its policy hedges and its calls are
// not hedged, and why.
func (r *Retrier) logUnhedged(c *call, why string) {
	if !c.method.memory.unhedged.CompareAndSwap(false, true) {
		return
	}
	attrs := []slog.Attr{slog.String("method", c.method.name), slog.String("policy_source", c.source.String()), slog.String("idempotency", c.idempotency.String())}
	if c.idempotency == Inherit {
		attrs = append(attrs, slog.String("fix", c.method.declareIdempotent()))
	}
	r.log().LogAttrs(c.ctx, slog.LevelWarn, "grpcretry: not hedged, though the policy says so: "+why, attrs...)
}

// declareIdempotent says how to say that a method is idempotent.
func (m *method) declareIdempotent() string {
	return `if it is, declare "option idempotency_level = IDEMPOTENT;" in its .proto or pass grpcretry.WithIdempotent("` + m.rpc + `")`
}

// logUnusable tells, once per method, that the policy which its .proto declares
// cannot be followed.
func (r *Retrier) logUnusable(m *method) {
	if m.declared.fault == nil || !m.memory.unusable.CompareAndSwap(false, true) {
		return
	}
	r.log().LogAttrs(context.Background(), slog.LevelWarn, "grpcretry: the retry policy in the .proto cannot be followed, so another one is in force",
		slog.String("method", m.name), slog.String("file", m.declared.file), slog.String("fault", m.declared.fault.Error()))
}

// logMissing tells of methods that a service config names but their service,
// which is linked into the program, does not have. Not an error: a document
// may serve clients of several versions.
func (r *Retrier) logMissing(s *policySet) {
	for _, name := range s.config.missing() {
		r.log().LogAttrs(context.Background(), slog.LevelWarn, "grpcretry: the service config names a method that its service does not have",
			slog.String("method", name), slog.String("place", s.config.methods[name].place))
	}
}

// logRetry tells of each retry, for debugging only.
func (r *Retrier) logRetry(c *call, a *Attempt) {
	if l := r.log(); l.Enabled(c.ctx, slog.LevelDebug) {
		l.LogAttrs(c.ctx, slog.LevelDebug, "grpcretry: retry",
			slog.String("method", c.method.name), slog.Int("attempt", a.Number),
			slog.String("code", codeName(a.Code)), slog.Duration("delay", a.Delay), slog.String("delay_source", a.DelaySource.String()))
	}
}

// logGivenUp tells of a call that was given up; never a message or payload,
// which may hold personal data.
func (r *Retrier) logGivenUp(c *call, err error) {
	wall := time.Now()
	suppressed, ok := c.method.memory.givenUp.allow(wall)
	if !ok {
		return
	}
	a := c.last()
	attrs := []slog.Attr{
		slog.String("method", c.method.name),
		slog.String("target", c.target.name),
		slog.String("reason", a.Reason.String()),
		slog.String("code", codeName(statusOf(err).Code())),
		slog.Int("attempts", c.made),
		slog.Duration("duration", wall.Sub(c.started.time(wall))),
	}
	if a.Delay > 0 { // that did not fit, or was too long
		attrs = append(attrs, slog.Duration("delay", a.Delay), slog.String("delay_source", a.DelaySource.String()))
	}
	r.log().LogAttrs(c.ctx, slog.LevelWarn, "grpcretry: call given up", append(attrs, slog.Int64("suppressed", suppressed))...)
}

// logSwallowed tells, once per target, that an interceptor further in keeps our
// call options from grpc, or answers by itself.
func (r *Retrier) logSwallowed(c *call) {
	r.log().LogAttrs(c.ctx, slog.LevelWarn, "grpcretry: a call succeeded but its call options never reached grpc: "+
		"an interceptor after this one drops them or answered by itself; what drops them also keeps attempts that never left the client from being told",
		slog.String("method", c.method.name), slog.String("target", c.target.name))
}

// logXDS tells, once per target, that retry policies which xDS delivers cannot be seen.
func (r *Retrier) logXDS(t *target) {
	if strings.HasPrefix(t.name, "xds:") {
		r.log().LogAttrs(context.Background(), slog.LevelWarn, "grpcretry: retry policies of xDS are invisible to an interceptor: give policies in code",
			slog.String("target", t.name))
	}
}
