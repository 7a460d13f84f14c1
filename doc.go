// Package grpcretry retries gRPC calls: safely by default, bounded by a budget,
// aware of the deadline, and visible in traces.
//
//	retry, err := grpcretry.New(
//		grpcretry.WithIdempotent("orders.v1.Catalog/*"),
//		grpcretry.WithMethodPolicy("orders.v1.Orders/Get", grpcretry.Policy{
//			MaxAttempts:    4,
//			AttemptTimeout: 200 * time.Millisecond,
//			Idempotency:    grpcretry.Idempotent,
//		}),
//	)
//	if err != nil {
//		return nil, err
//	}
//	return grpc.NewClient(target, append(retry.DialOptions(), grpc.WithTransportCredentials(creds))...)
//
// # What it guarantees
//
//   - A method that is not known to be idempotent is repeated only after an
//     attempt that provably never reached a server. The text of an error never
//     counts as proof.
//   - The extra load is bounded by a token bucket for each target that only
//     successful calls fill; see [TokenBudget]. While nothing succeeds, one retry a
//     minute remains.
//   - A wait that does not fit what is left of the deadline does not begin: the
//     server's own error comes back at once.
//   - The caller sees one call: reply, header, trailer, peer, OnFinish and status
//     are those of the attempt that is returned.
//   - Each attempt leaves one event, grpcretry.attempt, on the OpenTelemetry span
//     in the caller's context. It says what happened, and why another attempt did
//     or did not follow.
//   - Nothing outlives its call.
//   - A call that succeeds at once allocates nothing here.
//
// # What is not retried
//
// Status codes outside the policy's set (by default UNAVAILABLE, and
// RESOURCE_EXHAUSTED that the server sent with a hint when to come back); calls
// that may have reached the server, of methods that nobody declared idempotent;
// errors by which the server asks for no retry (grpc-retry-pushback-ms: -1); and
// whatever would exceed MaxAttempts, the deadline or the budget.
// [Retrier.Explain] tells the policy in force for a method and where each part
// of it comes from. The rules, in the order in which they are asked, are the
// [Reason] constants.
//
// A method counts as idempotent when its .proto declares it (idempotency_level,
// or our own option), when [WithIdempotent] or a policy's Idempotency says so, or
// when a retryPolicy in a service config names it or its service.
//
// # Where policies come from
//
// From code ([WithMethodPolicy], [WithDefaultPolicy]), else from a service config
// given in code ([WithServiceConfig]), else from that of the ClientConn, else from
// the option (grpcretry.v1.retry) in the method's .proto. [Retrier.Update] changes
// them while calls run, and [WithDryRun] shows what they would do.
//
// # Streams
//
// A stream of any kind is retried, with all that was sent on it, until its
// caller was given something of the answer: the header or a message, or the
// response of a client-streaming call. Then it is committed: its attempt is the
// last, and it costs no more than without the interceptor. The same happens when
// more was sent than Policy.ReplayBytes keeps. A server stream can go on after
// that, from where it broke off, if the caller says how: see [WithResume].
//
// # Hedging
//
// A policy with a [Hedge] makes another attempt while the first still runs, takes
// the first good answer and cancels the rest, for unary calls and, until their
// first message, server streams of idempotent methods. Every attempt has a reply
// and call options of its own. Hedges are paid for by calls that were answered
// before one was due, from funds that retries do not touch.
//
// # Services that call services
//
// Where each tier of a system retries, their attempts multiply while the last one
// is down. [UnaryServerInterceptor] and [StreamServerInterceptor] prevent it: when
// a handler fails because a call that it made with the request's context was
// given up, its answer tells the clients above, ours and others, to make no
// further attempt. Only the tier next to the failure retries then.
//
// # Beside gRPC's own retries
//
// [Retrier.DialOptions] switches gRPC's own retries off, because they would
// multiply with these; the retryPolicy that the service config holds for a
// method is followed here instead. gRPC's transparent retries, of streams that
// never left the client or that the server refused, stay on. Retry policies
// which xDS delivers cannot be seen by an interceptor.
//
// # The order of interceptors
//
// The interceptor should come after those that are meant to see one call
// (logging, metrics of calls) and before those that are meant to see every
// attempt (per-attempt authentication). Where two Retriers meet in one chain
// the outer one retries, and the inner one passes its attempts through.
//
// An interceptor further in that makes calls of its own with the call options of
// an attempt, such as one that mirrors requests and does not wait for the copy,
// writes where the attempt's result is expected. It belongs before this one, or
// has to leave the options out.
package grpcretry
