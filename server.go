package grpcretry

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const pushbackTrailer = "grpc-retry-pushback-ms" // gRFC A6, "Pushback"

// ServerOption configures [UnaryServerInterceptor] and [StreamServerInterceptor].
// A nil ServerOption is ignored.
type ServerOption interface{ applyServer(*serverConfig) }

type serverConfig struct {
	noPushback bool
	subtree    bool
}

type serverOption func(*serverConfig)

func (o serverOption) applyServer(c *serverConfig) { o(c) }

// WithoutGivenUpPushback keeps the server from asking its callers for no retry
// when a call of its own was given up. Each tier then retries on top of the
// tiers below it, so that their attempts multiply in an outage.
func WithoutGivenUpPushback() ServerOption {
	return serverOption(func(c *serverConfig) { c.noPushback = true })
}

// WithRetrySubtree keeps the calls that a handler makes with its context from
// being retried, and from paying into a budget, while it serves a request that
// is itself a retry: one with grpc-previous-rpc-attempts above 0. The calls carry
// that header on, so that the tiers below do the same. The attempts of the
// tiers then add up instead of multiplying. The default is off.
func WithRetrySubtree() ServerOption {
	return serverOption(func(c *serverConfig) {
		c.subtree = true
		subtrees.Store(true)
	})
}

// subtrees tells whether any server asked for [WithRetrySubtree]; until then
// calls need not look for an inbound request.
var subtrees atomic.Bool

// UnaryServerInterceptor keeps retries from multiplying over the tiers of a
// system. When a handler fails because a call that it made with its context was
// given up (for want of attempts, budget or time, or because the server below
// asked for no retry), the answer carries the trailer grpc-retry-pushback-ms: -1,
// by which every client that follows gRFC A6 leaves off, so that only the tier
// next to the failure retries. The failure is recognised through wrapping, and
// where the handler returns a new error with the code or the text of the old
// one. An error that the handler dealt with leaves no trace: what it answers
// with another code and other words goes out as it is.
//
// A wish of the server below for no retry is passed on also where the call was
// not to be retried anyway. A pushback that the handler set by itself stays, and
// the -1 beside it counts: gRFC A6 takes a repeated value for no retry.
//
// The span of the request, if it records, is given the number of the attempt
// and what is left of its deadline.
//
// It is safe for concurrent use. Of several in one chain the outermost acts. A
// panic of the handler passes through, and asks for nothing.
func UnaryServerInterceptor(opts ...ServerOption) grpc.UnaryServerInterceptor {
	config := newServerConfig(opts)
	return func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if inboundOf(ctx) != nil {
			return handler(ctx, req)
		}
		in := newInbound(ctx, config)
		reply, err := handler(context.WithValue(ctx, inboundKey{}, in), req)
		if in.stops(err) {
			_ = grpc.SetTrailer(ctx, noRetry) // fails only outside a real server
		}
		return reply, err
	}
}

// StreamServerInterceptor is [UnaryServerInterceptor] for streams.
func StreamServerInterceptor(opts ...ServerOption) grpc.StreamServerInterceptor {
	config := newServerConfig(opts)
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		ctx := ss.Context()
		if inboundOf(ctx) != nil {
			return handler(srv, ss)
		}
		in := newInbound(ctx, config)
		err := handler(srv, &inboundStream{ServerStream: ss, ctx: context.WithValue(ctx, inboundKey{}, in)})
		if in.stops(err) {
			ss.SetTrailer(noRetry)
		}
		return err
	}
}

// PreviousAttempts is how many attempts of the call came before the one that
// the handler of ctx serves, as its client says (gRFC A6, "Exposed Retry
// Metadata": grpc-previous-rpc-attempts): from 0 for the first, which is also
// where the header is missing, repeated or malformed, to 2^31-1, which stands
// for all above it. It needs no interceptor.
func PreviousAttempts(ctx context.Context) int {
	return previousOf(metadata.ValueFromIncomingContext(ctx, attemptsHeader))
}

// previousOf reads the values of the attempt header.
func previousOf(values []string) int {
	if len(values) != 1 {
		return 0
	}
	n, _ := strconv.ParseUint(values[0], 10, 31) // 0 if malformed, the greatest if too large
	return int(n)
}

// IdempotencyKeyFromContext is the idempotency key of the call that the handler
// of ctx serves, the same for all its attempts; "" if the client sent none. It
// needs no interceptor.
func IdempotencyKeyFromContext(ctx context.Context) string {
	values := metadata.ValueFromIncomingContext(ctx, keyHeader)
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

var noRetry = metadata.Pairs(pushbackTrailer, "-1")

func newServerConfig(opts []ServerOption) serverConfig {
	var c serverConfig
	for _, o := range opts {
		if o != nil {
			o.applyServer(&c)
		}
	}
	return c
}

// inbound is one request that a server works on, as the calls made for it see
// it in their context. They may run on many goroutines, and outlive the request.
type inbound struct {
	config   serverConfig
	attempts int // made before this one

	mu      sync.Mutex
	givenUp []givenUp // the latest maxGivenUp, no two alike
}

// givenUp is what is kept of a call that was given up.
type givenUp struct {
	code    codes.Code
	message string // of its status
	text    string // of the error of its last attempt
}

const (
	maxGivenUp = 32 // bounds what one request remembers

	// minTelling is the length from which the message of a status is found again
	// in that of another code. "down" or "error" would be found anywhere.
	minTelling = 8
)

type inboundKey struct{}

func newInbound(ctx context.Context, config serverConfig) *inbound {
	in := &inbound{config: config, attempts: PreviousAttempts(ctx)}
	traceInbound(ctx, in.attempts)
	return in
}

// inboundOf is the request that ctx serves, or nil.
func inboundOf(ctx context.Context) *inbound {
	in, _ := ctx.Value(inboundKey{}).(*inbound)
	return in
}

// note remembers a call that was given up.
func (in *inbound) note(g givenUp) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if slices.Contains(in.givenUp, g) {
		return
	}
	if len(in.givenUp) == maxGivenUp {
		in.givenUp = slices.Delete(in.givenUp, 0, 1)
	}
	in.givenUp = append(in.givenUp, g)
}

// stops reports whether the handler's error comes from a call that was given
// up, so that another attempt of the request would meet the same.
func (in *inbound) stops(err error) bool {
	if err == nil || in.config.noPushback {
		return false
	}
	if holdsGivenUp(err) {
		return true // also where the call was made with a context of its own
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.givenUp) == 0 {
		return false
	}
	st := statusOf(err)
	return slices.ContainsFunc(in.givenUp, func(g givenUp) bool { return g.within(st) })
}

// within reports whether a handler that returned st may have made it of g.
func (g *givenUp) within(st *status.Status) bool {
	return st.Code() == g.code ||
		g.text != "" && strings.Contains(st.Message(), g.text) ||
		len(g.message) >= minTelling && strings.Contains(st.Message(), g.message)
}

// holdsGivenUp looks for a call that was given up in all of err's tree, not only
// for the first Error: that may be one that ended for another reason.
func holdsGivenUp(err error) bool {
	switch e := err.(type) { //nolint:errorlint // this is the walk through the tree
	case *Error:
		return e.Reason.givesUp() || holdsGivenUp(e.last)
	case interface{ Unwrap() error }:
		return holdsGivenUp(e.Unwrap())
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), holdsGivenUp)
	}
	return false
}

// inboundStream is a stream whose context holds the inbound request.
type inboundStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *inboundStream) Context() context.Context { return s.ctx }

// serve looks for the request that the call is made for.
func (c *call) serve() {
	if in := inboundOf(c.ctx); in != nil && in.config.subtree && in.attempts > 0 {
		c.inbound = true
		c.base = withPreviousAttempts(c.base, in.attempts)
	}
}

// tellInbound lets the request that the call was made for know that it was
// given up, or that the server asked for no retry, err being the call's result.
// That it was suppressed below an inbound retry is no reason by itself.
func (c *call) tellInbound(err error) {
	in := inboundOf(c.ctx)
	if in == nil || in.config.noPushback {
		return
	}
	a := c.last()
	if a.Err == nil || !a.Reason.givesUp() && !pushback(a.Trailer).stop {
		return
	}
	st := statusOf(err)
	in.note(givenUp{code: st.Code(), message: st.Message(), text: a.Err.Error()})
}
