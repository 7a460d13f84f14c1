package grpcretry

import (
	"context"
	"errors"
	"net"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Do runs fn by the same rules as a call: attempts, backoff, deadline, budget,
// events, hooks and report. It is for work that is not one RPC: a job, a
// read-modify-write sequence, a scheduled task. ctx is what fn's context
// descends from; fn must heed the context that it is given.
//
// The name chooses the policy as a full method does: "jobs/export" follows
// WithMethodPolicy("jobs/export", ...), else WithMethodPolicy("jobs/*", ...), else
// the default policy. A name without a slash stands for "do/" and the name. Each
// name has a budget of its own, as a target has, under the name "do:jobs/export".
//
// An error of fn counts as follows, however deeply it is wrapped:
//
//   - [Permanent] ends the work; [Retryable] and [RetryAfter] let it be tried again;
//   - an RPC inside that was itself given up ends the work, so that its attempts
//     do not multiply, unless the policy's Codes list its code (ABORTED, say, for
//     a sequence that has to start again);
//   - an error with a gRPC status counts by its code, as in a call;
//   - any other is temporary. A policy whose Codes somebody set decides by them:
//     a network error counts as UNAVAILABLE, or DEADLINE_EXCEEDED if it is a
//     timeout, and everything else as UNKNOWN.
//
// AttemptTimeout bounds each run of fn, Timeout the whole. The work counts as
// idempotent unless a policy or WithIdempotent says otherwise: under
// [NotIdempotent] it is never repeated, and under [Keyed] the RPCs that fn
// makes with its context carry the same idempotency key in every attempt.
//
// A panic of fn is never retried. Of the call options, those of this package
// but WithResume are taken; any other is an INTERNAL error, and so is a nil fn or
// an empty name.
func (r *Retrier) Do(ctx context.Context, name string, fn func(context.Context) error, opts ...grpc.CallOption) error {
	if err := checkWork(name, fn == nil, opts); err != nil {
		return err
	}
	c, err := r.begin(ctx, name, nil, opts, true)
	if err != nil {
		return err
	}
	return c.run(func(ctx context.Context, _ []grpc.CallOption) error { return fn(ctx) })
}

// DoValue is [Retrier.Do] for work that has a result: that of the attempt which
// succeeded, and the zero value with every error.
func DoValue[T any](ctx context.Context, r *Retrier, name string, fn func(context.Context) (T, error), opts ...grpc.CallOption) (T, error) {
	var result T
	work := func(ctx context.Context) (err error) {
		result, err = fn(ctx)
		return err
	}
	if fn == nil {
		work = nil
	}
	if err := r.Do(ctx, name, work, opts...); err != nil {
		var zero T
		return zero, err
	}
	return result, nil
}

// checkWork tells all that is wrong with the arguments of Do.
func checkWork(name string, noFn bool, opts []grpc.CallOption) error {
	var f faults
	if group, job, ok := strings.Cut(strings.TrimPrefix(name, "/"), "/"); group == "" || ok && job == "" || strings.Contains(job, "/") {
		f.add(`Do: name = %q, want a name such as "jobs/export" or "export"`, name)
	}
	if noFn {
		f.add("Do(%q): function is nil, want a function", name)
	}
	for _, o := range opts {
		switch o.(type) {
		case callPolicyOption, withoutRetryOption, reportOption, keyOption:
		default:
			f.add("Do(%q): call option %T means nothing here, want options of grpcretry", name, o)
		}
	}
	if err := f.err(); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	return nil
}

// classifyWork says what an attempt of some work came to.
func classifyWork(err error, late bool, set CodeSet) outcome {
	o := outcome{err: err}
	if err == nil {
		return o
	}
	st := statusOf(err)
	o.code = st.Code()
	o.ownTimeout = late && o.code == codes.DeadlineExceeded
	o.hint, o.byPeer = retryInfo(st)

	var (
		mark *markedError
		call *Error
		wire net.Error
	)
	_, isStatus := status.FromError(err)
	switch {
	case errors.As(err, &mark):
		o.permanent, o.temporary = mark.permanent, !mark.permanent
		if mark.hinted {
			o.hint = hint{given: true, source: DelayRetryInfo, delay: mark.after}
		}
	case errors.As(err, &call):
		o.permanent = (call.Reason.givesUp() || call.cut != nil) && !set.lists(o.code)
	case isStatus || o.code == codes.Canceled:
	default:
		if o.code == codes.Unknown && errors.As(err, &wire) {
			o.code = codes.Unavailable
			if wire.Timeout() {
				o.code = codes.DeadlineExceeded
			}
		}
		o.temporary = !set.given() || set.Has(o.code)
	}
	return o
}

// markedError is what Permanent, Retryable and RetryAfter return.
type markedError struct {
	err       error
	permanent bool
	hinted    bool
	after     time.Duration
}

func (e *markedError) Error() string { return e.err.Error() }
func (e *markedError) Unwrap() error { return e.err }

// Permanent marks err, for [Retrier.Do], as one that another attempt cannot
// mend. Do returns err itself, without the mark if that is outermost.
// Permanent(nil) is nil.
func Permanent(err error) error { return marked(err, markedError{permanent: true}) }

// Retryable marks err, for [Retrier.Do], as temporary whatever its code.
// Retryable(nil) is nil.
func Retryable(err error) error { return marked(err, markedError{}) }

// RetryAfter marks err, for [Retrier.Do], as temporary, and puts the next attempt
// off for d and the jittered backoff. A d below 0 counts as 0; one above the
// policy's Backoff.MaxHint ends the work. RetryAfter(nil, d) is nil.
func RetryAfter(err error, d time.Duration) error {
	return marked(err, markedError{hinted: true, after: max(0, d)})
}

func marked(err error, m markedError) error {
	if err == nil {
		return nil
	}
	m.err = err
	return &m
}

// unmarked takes away a mark that is outermost: it has served its purpose.
func unmarked(err error) error {
	for {
		m, ok := err.(*markedError) //nolint:errorlint // only the outermost can be taken away
		if !ok {
			return err
		}
		err = m.err
	}
}
