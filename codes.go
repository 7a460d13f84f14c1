package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// CodeSet is a set of gRPC status codes. The zero value stands for the default
// set: UNAVAILABLE, and RESOURCE_EXHAUSTED where the server sent it with a
// hint. It is immutable and comparable.
type CodeSet struct {
	mask uint32 // bit c is code c; explicitSet tells Codes() from the zero value
	bad  uint64 // 1 + the first code that cannot be in a set, for validate
}

const (
	explicitSet = 1 << 31
	defaultSet  = 1 << 30 // nobody listed the codes
)

var defaultCodes = CodeSet{mask: explicitSet | defaultSet | 1<<codes.Unavailable | 1<<codes.ResourceExhausted}

// Codes returns the set of the given codes. Codes() is the empty set, which
// retries nothing by its code; it differs from the zero CodeSet, the default
// set. OK and numbers that gRPC does not define (above 16) are refused where the
// set is installed: by [New], or by the call if [WithCallPolicy] put it there.
func Codes(c ...codes.Code) CodeSet {
	s := CodeSet{mask: explicitSet}
	for _, c := range c {
		if c == codes.OK || c >= codes.Code(len(codeNames)) {
			if s.bad == 0 {
				s.bad = uint64(c) + 1
			}
			continue
		}
		s.mask |= 1 << c
	}
	return s
}

// Has reports whether c is in the set; in the zero value it looks in the default set.
func (s CodeSet) Has(c codes.Code) bool {
	return c < codes.Code(len(codeNames)) && s.orDefault().mask&(1<<c) != 0
}

// lists reports whether somebody put c into the set.
func (s CodeSet) lists(c codes.Code) bool { return s.given() && s.Has(c) }

// given reports whether somebody made the set.
func (s CodeSet) given() bool { return s.orDefault().mask&defaultSet == 0 }

// String lists the names of the codes, in the order of their numbers, or "none".
func (s CodeSet) String() string {
	var names []string
	for c := range codes.Code(len(codeNames)) {
		if s.Has(c) {
			names = append(names, codeName(c))
		}
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, ", ")
}

func (s CodeSet) orDefault() CodeSet {
	if s.mask == 0 {
		return defaultCodes
	}
	return s
}

func (s CodeSet) validate(field string, f *faults) {
	if s.bad != 0 {
		f.add("%s holds the code %d, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)", field, s.bad-1)
	}
}

// Evidence is how far a failed attempt got, as far as the client can prove it.
type Evidence uint8

// The values of [Evidence].
const (
	// Ambiguous: the server may or may not have processed the call. It is the
	// zero value, and what everything unproven counts as.
	Ambiguous Evidence = iota
	// Unsent: no stream was ever made on a connection, so no server can have
	// seen the call. Only this lets a method be repeated that is not idempotent.
	Unsent
	// Refused: the text of the error says that the server refused the stream
	// unprocessed. It is told, and permits nothing: texts can be forwarded.
	Refused
	// Answered: the peer wrote a header or a trailer.
	Answered
)

// String gives the word that traces print.
func (e Evidence) String() string {
	switch e {
	case Ambiguous:
		return "ambiguous"
	case Unsent:
		return "unsent"
	case Refused:
		return "refused"
	case Answered:
		return "answered"
	}
	return fmt.Sprintf("Evidence(%d)", uint8(e))
}

// Reason is the rung of the ladder that decided what followed an attempt, or
// how a call ended. Its String is what traces, metrics and logs print.
type Reason uint8

// The reasons, in the order in which the ladder asks for them.
const (
	// ReasonNone is the zero value: nothing was decided yet.
	ReasonNone Reason = iota
	// ReasonSuccess: the attempt succeeded.
	ReasonSuccess
	// ReasonHedgeLost: another attempt decided the hedged call, mostly by its
	// success. This one was cancelled, or its result came too late.
	ReasonHedgeLost
	// ReasonHedgeFailed: the attempt failed, and others of the hedged call went on.
	ReasonHedgeFailed
	// ReasonParentDone: the caller's context ended, in an attempt or in a wait.
	ReasonParentDone
	// ReasonClosed: the ClientConn is closed.
	ReasonClosed
	// ReasonDisabled: retries are switched off for the call or the method.
	ReasonDisabled
	// ReasonInboundRetry: the call serves a request that is itself a retry.
	ReasonInboundRetry
	// ReasonCommitted: the caller was already given a part of the answer.
	ReasonCommitted
	// ReasonPushbackStop: the server asked not to be retried, by a pushback that
	// is negative, malformed or repeated (gRFC A6, section "Pushback"), or to be
	// left alone for longer than Backoff.MaxHint.
	ReasonPushbackStop
	// ReasonPermanent: the error of some work is marked as permanent, or comes
	// of a call inside that was given up; see Retrier.Do.
	ReasonPermanent
	// ReasonRetryIfStop: the policy's RetryIf said stop.
	ReasonRetryIfStop
	// ReasonNotRetryable: the policy does not retry the code.
	ReasonNotRetryable
	// ReasonNotIdempotent: the server may have processed the call, and the
	// method is not known to be idempotent.
	ReasonNotIdempotent
	// ReasonAttemptsExhausted: MaxAttempts were made.
	ReasonAttemptsExhausted
	// ReasonDeadline: the wait does not fit what is left of the call's deadline,
	// or the policy's Timeout for the whole call ended the attempt.
	ReasonDeadline
	// ReasonDryRun: another attempt would have followed after the delay, if the
	// budget had granted it, but for [WithDryRun].
	ReasonDryRun
	// ReasonBudgetExhausted: the budget refused.
	ReasonBudgetExhausted
	// ReasonRetry: another attempt follows after the delay.
	ReasonRetry
	// ReasonResume: a committed server stream goes on with another attempt.
	ReasonResume
)

var reasonNames = [...]string{
	"none", "success", "hedge_lost", "hedge_failed", "parent_done", "closed", "disabled", "inbound_retry", "committed", "pushback_stop",
	"permanent", "retry_if_stop", "not_retryable", "not_idempotent", "attempts_exhausted", "deadline", "dry_run", "budget_exhausted", "retry", "resume",
}

// String gives the ladder's word.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("Reason(%d)", uint8(r))
}

// givesUp reports whether a call that ends for r would have been retried, had
// it been allowed to.
func (r Reason) givesUp() bool {
	switch r {
	case ReasonAttemptsExhausted, ReasonDeadline, ReasonBudgetExhausted, ReasonPushbackStop:
		return true
	}
	return false
}

// goesOn reports whether an attempt that ended for r does not end its call.
func (r Reason) goesOn() bool {
	switch r {
	case ReasonRetry, ReasonResume, ReasonHedgeLost, ReasonHedgeFailed:
		return true
	}
	return false
}

// DelaySource says who set the wait before a retry.
type DelaySource uint8

// The values of [DelaySource].
const (
	// DelayBackoff: the policy's Backoff. It is the zero value.
	DelayBackoff DelaySource = iota
	// DelayPushback: the server's grpc-retry-pushback-ms trailer, in whole
	// milliseconds from 0; see gRFC A6, section "Pushback". It is waited for exactly.
	DelayPushback
	// DelayRetryInfo: a google.rpc.RetryInfo in the status, or a [RetryAfter],
	// plus the jittered backoff.
	DelayRetryInfo
)

// String gives the word that traces print.
func (s DelaySource) String() string {
	switch s {
	case DelayBackoff:
		return "backoff"
	case DelayPushback:
		return "pushback"
	case DelayRetryInfo:
		return "retry_info"
	}
	return fmt.Sprintf("DelaySource(%d)", uint8(s))
}

// sighting is what grpc reported of an attempt beside its error.
type sighting struct {
	peer    bool        // the attempt had a transport stream
	options bool        // the error is the one with which grpc ended the attempt: without this, a missing peer proves nothing
	header  bool        // the peer sent a header
	trailer metadata.MD // what the peer sent at the end
}

// hint is what the server said about coming back. The zero value is none.
type hint struct {
	stop   bool
	given  bool
	source DelaySource
	delay  time.Duration
}

// outcome is what an attempt came to.
type outcome struct {
	err        error
	code       codes.Code
	evidence   Evidence
	byPeer     bool // the status was written by the peer, not made on this side
	ownTimeout bool // our attempt timer ended it
	permanent  bool
	temporary  bool // retryable whatever its code
	hint       hint
}

// classify says what an attempt that ended with err came to. late tells that
// the attempt's own timer had run out by then.
func classify(err error, s sighting, late bool) outcome {
	o := outcome{err: err}
	if err == nil {
		return o
	}
	st := statusOf(err)
	o.code = st.Code()
	o.ownTimeout = late && o.code == codes.DeadlineExceeded
	// grpc puts content-type into the trailer only where header and trailer
	// were one frame, and never makes up details.
	info, details := retryInfo(st)
	o.byPeer = len(s.trailer["content-type"]) > 0 || details
	o.evidence = s.evidence(st, o.ownTimeout)
	o.hint = pushback(s.trailer)
	if !o.hint.given && !o.hint.stop {
		o.hint = info
	}
	return o
}

// evidence follows the proof only: the error's text can take a permission
// away, never give one.
func (s sighting) evidence(st *status.Status, ownTimeout bool) Evidence {
	switch {
	case s.header || len(s.trailer) > 0:
		return Answered
	case !s.peer:
		unsent := st.Code() == codes.Unavailable || st.Code() == codes.Unauthenticated || ownTimeout
		if s.options && unsent && !strings.Contains(st.Message(), "dropped") {
			return Unsent
		}
	case strings.Contains(st.Message(), "error code: REFUSED_STREAM"), strings.Contains(st.Message(), "the connection is draining"):
		return Refused
	}
	return Ambiguous
}

// pushback reads the trailer grpc-retry-pushback-ms (gRFC A6, "Pushback"): a
// negative, malformed or repeated value asks for no retry at all.
func pushback(trailer metadata.MD) hint {
	values := trailer[pushbackTrailer]
	if len(values) == 0 {
		return hint{}
	}
	ms, err := strconv.ParseInt(values[0], 10, 32)
	if err != nil || ms < 0 || len(values) > 1 {
		return hint{stop: true, source: DelayPushback}
	}
	return hint{given: true, source: DelayPushback, delay: time.Duration(ms) * time.Millisecond}
}

// retryInfo reads google.rpc.RetryInfo from the status; of several the longest
// counts, and a negative or missing delay counts as 0. details tells whether
// the status has any.
func retryInfo(st *status.Status) (h hint, details bool) {
	all := st.Details() // one that cannot be decoded is an error in the list
	for _, d := range all {
		if info, ok := d.(*errdetails.RetryInfo); ok {
			h.given, h.source = true, DelayRetryInfo
			h.delay = max(h.delay, info.GetRetryDelay().AsDuration())
		}
	}
	return h, len(all) > 0
}

// facts is all that the ladder looks at.
type facts struct {
	outcome
	policy      *Policy // defaults filled in
	idempotency Idempotency
	attempts    int // that count against MaxAttempts, this one included

	parentDone  bool // the caller's context ended
	timeUp      bool // the call's own Timeout has passed
	closed      bool // the ClientConn is closed
	disabled    bool
	inbound     bool // below an inbound retry
	committed   bool
	hedging     bool        // attempts may overlap,
	others      bool        // some do,
	stopped     bool        // and one of them was told by the server that there should be no more
	resume      func() bool // not nil: a committed stream that may go on; asks with what
	dryRun      bool        // retries are told and not made
	reauthed    bool        // the attempt began after an UNAUTHENTICATED was already retried in this call
	ready       bool        // the channel is READY, so that an unsent attempt did cost somebody
	hasDeadline bool
	remaining   time.Duration // of the call's deadline
}

// decision is what follows an attempt. Its delay is told also where nothing
// follows after it: one that does not fit, or that the server asked for in vain.
type decision struct {
	retry   bool
	failure bool // counts as a failure for the budget
	last    bool // of a hedged call: no more attempts, those that run aside
	reason  Reason
	source  DelaySource
	delay   time.Duration
	cost    Cost
}

// decide is the ladder: the first rung that fits wins. It is pure but for its
// two questions to the policy, which it asks only on the rung that needs the
// answer, and before anything is reserved. The budget is asked by the caller,
// last of all.
func decide(f *facts, retryIf func() Verdict, backoff func() time.Duration) decision {
	stop := func(r Reason) decision { return decision{reason: r} }
	turnedAway := f.hint.stop || f.hint.delay > f.policy.Backoff.MaxHint
	switch {
	case f.err == nil:
		return stop(ReasonSuccess)
	case f.parentDone:
		return stop(ReasonParentDone)
	case f.closed:
		return stop(ReasonClosed)
	case f.disabled:
		return stop(ReasonDisabled)
	case f.inbound:
		return stop(ReasonInboundRetry)
	case f.committed && f.resume == nil:
		return stop(ReasonCommitted)
	case f.timeUp && f.code == codes.DeadlineExceeded:
		return stop(ReasonDeadline) // the call's own Timeout ended the attempt
	case turnedAway && !f.others:
		return decision{reason: ReasonPushbackStop, failure: true, delay: f.hint.delay, source: f.hint.source}
	case f.permanent:
		return stop(ReasonPermanent)
	}
	verdict := retryIf()
	if verdict == VerdictStop {
		return stop(ReasonRetryIfStop)
	}
	if verdict != VerdictRetry && !f.retryable() {
		return stop(ReasonNotRetryable)
	}
	// From here on the failure is one that retries are meant for, so a budget
	// that counts failures hears of it, whatever stops the retry.
	d := decision{failure: true, cost: f.cost()}
	switch {
	case f.others && turnedAway:
		d.reason, d.last = ReasonHedgeFailed, true
		d.delay, d.source = f.hint.delay, f.hint.source
		return d
	case f.others:
		d.reason = ReasonHedgeFailed
		d.delay, d.source = f.wait(backoff)
		return d
	case f.stopped:
		d.reason = ReasonPushbackStop
		return d
	case f.evidence != Unsent && !f.idempotency.repeatable():
		d.reason = ReasonNotIdempotent
		return d
	case f.attempts >= f.policy.most():
		d.reason = ReasonAttemptsExhausted
		return d
	}
	d.delay, d.source = f.wait(backoff)
	if f.hasDeadline && d.delay >= f.remaining {
		d.reason = ReasonDeadline
		return d
	}
	if f.dryRun {
		d.reason = ReasonDryRun
		return d
	}
	if f.resume != nil {
		if !f.resume() {
			return decision{failure: true, reason: ReasonCommitted}
		}
		d.retry, d.reason, d.cost = true, ReasonResume, CostResume
		return d
	}
	d.retry, d.reason = true, ReasonRetry
	return d
}

// retryable reports whether the policy retries the outcome for its code.
func (f *facts) retryable() bool {
	if f.ownTimeout || f.temporary {
		return true
	}
	if !f.policy.repeated().Has(f.code) {
		return false
	}
	switch f.code {
	case codes.ResourceExhausted:
		// Made on this side it means a message larger than a limit, which no
		// retry mends; from the server it may be a quota that lasts for days.
		return f.byPeer && (f.hint.given || f.policy.RetryQuota)
	case codes.Unauthenticated:
		return !f.reauthed // the credentials run again, once
	}
	return true
}

// wait is the delay before the next attempt. A pushback is followed exactly;
// to any other hint the jittered backoff is added, so that clients that were
// told the same do not come back together.
func (f *facts) wait(backoff func() time.Duration) (time.Duration, DelaySource) {
	switch {
	case f.hint.given && f.hint.source == DelayPushback:
		return f.hint.delay, DelayPushback
	case f.hint.delay > 0:
		return saturatingAdd(f.hint.delay, backoff()), DelayRetryInfo
	case f.hedging && f.evidence != Unsent: // who would rather have two answers than wait does not wait for one
		return 0, DelayBackoff
	case f.code == codes.ResourceExhausted:
		return saturatingAdd(f.policy.Backoff.Overload, backoff()), DelayBackoff
	}
	return backoff(), DelayBackoff
}

// cost is the price of the attempt that would follow.
func (f *facts) cost() Cost {
	switch {
	case f.evidence == Unsent && !f.ready:
		return CostUnsent
	case f.hint.given && f.hint.source == DelayPushback:
		return CostInvited
	case f.ownTimeout:
		return CostTimeout
	case f.code == codes.ResourceExhausted:
		return CostOverload
	}
	return CostTransient
}

// statusOf is the status of a non-nil error, never nil and never OK: an error
// that claims OK, or has no status, is UNKNOWN, and a bare context error has
// its context's code.
func statusOf(err error) *status.Status {
	st, ok := status.FromError(err)
	switch {
	case ok && st.Code() != codes.OK:
		return st
	case ok:
		return status.New(codes.Unknown, err.Error())
	case errors.Is(err, context.DeadlineExceeded):
		return status.New(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.New(codes.Canceled, err.Error())
	}
	return status.New(codes.Unknown, err.Error())
}

func saturatingAdd(a, b time.Duration) time.Duration {
	if sum := a + b; sum >= a {
		return sum
	}
	return 1<<63 - 1
}

var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// codeName is the name of c in the gRPC specification, as OpenTelemetry wants it.
func codeName(c codes.Code) string {
	if c < codes.Code(len(codeNames)) {
		return codeNames[c]
	}
	return "CODE(" + strconv.FormatUint(uint64(c), 10) + ")"
}
