package grpcretry

import (
	"context"
	"errors"
	"net"
	"reflect"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Do runs fn by the same rules as a call: attempts, backoff, deadline, budget,
// events, hooks and report. It is for work that is not one RPC: a job, a
// read-modify-write sequence, a scheduled task. ctx is what the context of every
// attempt descends from; when it is done already, fn does not run.
//
// The name chooses the policy as a full method does: "jobs/export" follows
// WithMethodPolicy("jobs/export", ...), else WithMethodPolicy("jobs/*", ...), else
// the default policy. A name without a slash stands for "do/" and the name. A
// name should say what is done and not to what, because each is kept as a target
// is, "do:jobs/export", with a budget of its own unless [WithBudget] is given.
// Work that is so rare that its successes fund no retries needs a budget that
// says so; see [WithBudgetPerTarget].
//
// An error of fn counts as follows, however deeply it is wrapped or joined:
//
//   - [Permanent] ends the work; [Retryable] and [RetryAfter] let it be tried
//     again. The outermost mark counts, and of those joined side by side Permanent,
//     then the longest RetryAfter.
//   - A call inside (an RPC, or a Do) that a Retrier gave up ends the work, so that
//     the attempts do not multiply, unless the policy's Codes were set and have
//     its code (ABORTED, say, for a sequence that has to start again), or the
//     attempt's own timeout ended that call.
//   - An error with a gRPC status counts by its code, as in a call; of several the
//     first. A google.rpc.RetryInfo in it is heeded.
//   - context.Canceled, though ctx is not done, counts as CANCELLED.
//   - Any other is temporary. Where the policy's Codes were set they decide
//     instead: a timeout counts as DEADLINE_EXCEEDED, another error of the network
//     as UNAVAILABLE, and everything else as UNKNOWN.
//
// The policy's RetryIf is asked as in a call. The work is bounded twice: by
// MaxAttempts, and by Timeout and the deadline of ctx, whichever ends sooner.
// AttemptTimeout bounds each run of fn. All of these end the context that fn is
// given; a fn that ignores it cannot be stopped. Do then waits for it, whatever
// it returns in the end counts, and an error is not followed by another attempt
// for which there is no time left.
//
// The work counts as idempotent unless a policy or a call option says otherwise:
// whoever wraps a function in Do says that it may run again from its beginning.
// Under [NotIdempotent] it never does, and under [Keyed] all RPCs that fn makes
// with its context carry one idempotency key, the same in every attempt.
//
// A panic of fn goes through to the caller and is never retried. Of the call
// options, those of this package but WithResume are taken; any other is an
// INTERNAL error, and so is a nil ctx, a nil fn, or a name that no pattern could match.
//
// Events and reports show what is nested: the calls inside leave events of their
// own on the same span, which say in which attempt of what work they were made,
// and [Attempt.Inner] lists those that did not succeed at once.
func (r *Retrier) Do(ctx context.Context, name string, fn func(context.Context) error, opts ...grpc.CallOption) error {
	name = strings.TrimPrefix(name, "/")
	if ctx == nil || fn == nil || len(opts) > 0 || strings.HasPrefix(name, "/") {
		if err := checkWork(ctx, name, fn == nil, opts); err != nil {
			return err
		}
	}
	started, err, made := r.atOnce(ctx, name, fn, opts)
	if made && err == nil {
		return nil
	}
	c, fault := r.begin(ctx, name, nil, opts, true)
	if fault != nil {
		return fault
	}
	if made {
		c.started = started
	}
	return c.run(func(ctx context.Context, _ []grpc.CallOption) error {
		if made {
			made = false
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		return fn(ctx)
	})
}

// atOnce makes the first attempt without a call, which costs as much as all the
// rest, where nobody will ask for one unless the attempt fails. It reports whether
// it did; an error is then for a call to deal with, as that of its first attempt.
func (r *Retrier) atOnce(ctx context.Context, name string, fn func(context.Context) error, opts []grpc.CallOption) (started moment, err error, made bool) {
	m := r.set.Load().lookup(name)
	if len(opts) > 0 || len(r.hooks) > 0 || !m.plainWork || subtrees.Load() || ctx.Err() != nil {
		return 0, nil, false
	}
	if r.traces(ctx) {
		return 0, nil, false
	}
	s := m.child.enter(r.targets.enter(m.work, nil))
	defer s.Leave()
	started = now()
	if err = fn(ctx); err == nil {
		s.Record(OutcomeOK)
		r.metrics.attempt(ctx, m, codes.OK, ReasonSuccess)
	}
	return started, err, true
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
func checkWork(ctx context.Context, name string, noFn bool, opts []grpc.CallOption) error {
	var f faults
	if misnamed(name) {
		f.add(`Do: name = %q, want a name such as "jobs/export" or "export", without spaces or asterisks`, name)
	}
	if ctx == nil {
		f.add("Do(%q): context is nil, want a context", name)
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

// misnamed reports whether no pattern could match work of that name.
func misnamed(name string) bool {
	if !strings.Contains(name, "/") {
		name = "do/" + name
	}
	group, job, _ := strings.Cut(name, "/")
	return group == "" || job == "" || strings.Contains(job, "/") || strings.ContainsAny(name, "* \t\r\n")
}

// classifyWork says what an attempt of some work came to. late tells that the
// attempt's own timer had run out by then.
func classifyWork(err error, late bool, set CodeSet) outcome {
	if err == nil {
		return outcome{}
	}
	o := outcome{err: unmarked(err)}
	st := statusOf(err)
	o.code = st.Code()
	known := hasStatus(err)
	if !known && o.code == codes.Unknown {
		o.code = networkCode(err)
	}
	o.ownTimeout = late && o.code == codes.DeadlineExceeded
	o.hint, _ = retryInfo(st)
	o.byPeer = known // who wrote it cannot be known; fn vouches for it

	var v marks
	v.read(err)
	for _, e := range v.gaveUp {
		code := e.st.Code()
		v.permanent = v.permanent || !set.lists(code) && !(o.ownTimeout && code == codes.DeadlineExceeded)
	}
	switch {
	case v.permanent:
		o.permanent, o.hint = true, hint{}
	case v.temporary:
		o.temporary = true
		if v.hint.given {
			o.hint = v.hint
		}
	case !known && o.code != codes.Canceled:
		o.temporary = !set.given()
	}
	return o
}

// hasStatus reports whether err carries a gRPC status of a failure. That of an
// [Error] is made up if there was none.
func hasStatus(err error) bool {
	var e *Error
	for errors.As(err, &e) && !e.gaveUp() {
		err = e.last
	}
	st, ok := status.FromError(err)
	return ok && st.Code() != codes.OK
}

// marks are what an error says about another attempt whatever its code is.
type marks struct {
	permanent, temporary bool
	hint                 hint
	gaveUp               []*Error
}

// read walks through err as errors.As does. Below a mark, and below a call that
// was given up, it looks no further: what stands there decided something else.
func (v *marks) read(err error) {
	switch e := err.(type) { //nolint:errorlint // this is the walk through the chain
	case *markedError:
		v.permanent = v.permanent || e.permanent
		v.temporary = v.temporary || !e.permanent
		if e.hinted {
			v.hint = hint{given: true, source: DelayRetryInfo, delay: max(v.hint.delay, e.after)}
		}
	case *Error:
		if !e.gaveUp() {
			v.read(e.last)
			return
		}
		v.gaveUp = append(v.gaveUp, e)
	case interface{ Unwrap() error }:
		v.read(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			v.read(err)
		}
	}
}

// networkCode is the code of an error without a status that the network may
// have caused. An errno by itself, such as that of a file, is none of the network's.
func networkCode(err error) codes.Code {
	var wire net.Error
	switch {
	case !errors.As(err, &wire):
		return codes.Unknown
	case wire.Timeout():
		return codes.DeadlineExceeded
	case reflect.ValueOf(wire).Kind() == reflect.Uintptr:
		return codes.Unknown
	}
	return codes.Unavailable
}

// nestKey is the key of the *nest in the context of an attempt of some work.
type nestKey struct{}

// nest is one attempt of some work, as the calls inside see it. They may run
// on many goroutines, and outlive the attempt.
type nest struct {
	name    string // of the work
	attempt int

	mu    sync.Mutex
	calls []Report
	over  bool
}

// within is the attempt of some work in which the call was made, or nil. It is
// sought only for calls that fail, are retried or leave events, because it
// costs a walk through the context.
func (c *call) within() *nest {
	if !c.sought {
		c.outside, _ = c.ctx.Value(nestKey{}).(*nest)
		c.sought = true
	}
	return c.outside
}

// note keeps the report of a call inside, unless the attempt is over.
func (n *nest) note(r Report) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.over && len(n.calls) < maxAttemptsKept {
		n.calls = append(n.calls, r)
	}
}

// end gives the reports of the calls inside.
func (n *nest) end() []Report {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.over = true
	return n.calls
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
// mend. errors.Is, errors.As and status.FromError see through the mark, as
// through those of [Retryable] and [RetryAfter], and Do takes a mark that is
// outermost off what it returns. A mark speaks to the Do that ran the function: to
// make the result of one Do permanent for another around it, mark it again.
// Permanent(nil) is nil.
func Permanent(err error) error { return marked(err, markedError{permanent: true}) }

// Retryable marks err, for [Retrier.Do], as temporary whatever its code.
// Retryable(nil) is nil.
func Retryable(err error) error { return marked(err, markedError{}) }

// RetryAfter marks err, for [Retrier.Do], as temporary, and puts the next attempt
// off for d and the jittered backoff. A d below 0 counts as 0; one above the
// policy's Backoff.MaxHint ends the work, as a hint of a server would.
// RetryAfter(nil, d) is nil.
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
