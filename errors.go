package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// maxAttemptsKept bounds how many attempts a [Report] lists and how many span
// events a call leaves: the first 31 and the last.
const maxAttemptsKept = 32

// Attempt is what is known of one finished attempt. In a RetryIf, a
// Backoff.Func and the hooks it is a copy; the Trailer in it must not be changed.
type Attempt struct {
	// Method is the full method, "/pkg.Service/Method".
	Method string
	// Target is the canonical target of the ClientConn; empty without one.
	Target string
	// Number counts the call's attempts from 1.
	Number int
	// Hedge tells that the attempt overlapped an earlier one.
	Hedge bool
	// Start is when the attempt began.
	Start time.Time
	// Duration is how long it ran, 0 or more, without the wait that follows.
	Duration time.Duration
	// Err is the attempt's own error, untouched; nil for a success.
	Err error
	// Code is the error's status code. An error without a status counts as
	// UNKNOWN, and a bare context error as the code of its context.
	Code codes.Code
	// Evidence is how far the attempt got; Ambiguous for a success.
	Evidence Evidence
	// Peer is the address of the server; nil if the attempt reached none.
	Peer net.Addr
	// Trailer is what the server sent at the end of a failed attempt.
	Trailer metadata.MD
	// Reason says why the attempt was or was not followed by another;
	// ReasonNone while that is still undecided (in RetryIf and Backoff.Func).
	Reason Reason
	// Delay is the wait before the next attempt. Where none follows it is with
	// ReasonDryRun the wait that would have been, with ReasonDeadline the one that
	// did not fit into Remaining, and where the server asked for a wait above
	// Backoff.MaxHint, with ReasonPushbackStop or ReasonHedgeFailed, that one; 0 if
	// there was none.
	Delay time.Duration
	// DelaySource says who set Delay. Where that is 0 because the server asked
	// for no other attempt at all, it is DelayPushback; otherwise DelayBackoff.
	DelaySource DelaySource
	// Inner are, of work that [Retrier.Do] runs, the calls made through a
	// Retrier with the attempt's context that failed or needed more than one
	// attempt: in the order of their ends, those that ended before the attempt
	// did, and of these the first 32. They are kept only where somebody wants to
	// know of the work's attempts: [WithReport], hooks, or a span that records.
	Inner []Report
	// Remaining is what was left of the call's deadline when the attempt
	// ended: 0 when it had passed, -1 when there is none.
	Remaining time.Duration
}

// Report tells what happened in one call. Its zero value is that of a call that
// has not ended; after a call that was refused before its first attempt, for a
// bad edit of the policy, it has no attempts and ReasonNone.
type Report struct {
	// Method is the full method.
	Method string
	// Target is the canonical target; empty without a ClientConn.
	Target string
	// Attempts are the call's attempts in the order of their start: all of
	// them up to 32, of a longer call the first 31 and the last.
	Attempts []Attempt
	// Dropped is how many attempts Attempts leaves out before its last.
	Dropped int
	// Reason says how the call ended: ReasonSuccess, or why there was no further attempt.
	Reason Reason
}

// Made is the number of attempts that the call made.
func (r *Report) Made() int { return len(r.Attempts) + r.Dropped }

// Error is what a call returns that was retried, or would have been, and did
// not succeed. It carries the status of the last attempt unchanged, so code,
// message and details are what the server sent; only where the caller's context
// ended a wait is the code that of the context (DEADLINE_EXCEEDED or CANCELLED).
//
// A call that was not to be retried in the first place returns its attempt's
// own error instead. An Error does not change once it is returned, so it may be
// read by many goroutines at once.
type Error struct {
	Report
	last  error          // of the last attempt
	st    *status.Status // what the caller is told
	cut   error          // the context's error, where it ended a wait
	cause error          // and its context.Cause
}

func newError(r Report, last, cut error) *Error {
	e := &Error{Report: r, last: last, cut: cut, st: statusOf(last)}
	if cut != nil {
		st := statusOf(cut)
		e.st = status.New(st.Code(), st.Message()+" while waiting for the next attempt")
	}
	return e
}

// gaveUp reports whether the call would have been retried, had it been allowed
// to. Where its context ended the call, a failure had come before.
func (e *Error) gaveUp() bool { return e.Reason.givesUp() || e.Reason == ReasonParentDone }

// Error starts with the text of the error that the caller would have seen
// without retries, and ends with how the call was given up.
func (e *Error) Error() string {
	attempts := "attempts"
	if e.Made() == 1 {
		attempts = "attempt"
	}
	if e.cut != nil {
		return fmt.Sprintf("%v (grpcretry: %v after %d %s, the last: %v)", e.st.Err(), e.Reason, e.Made(), attempts, e.last)
	}
	wait := ""
	if n := len(e.Attempts); n > 0 && e.Reason == ReasonPushbackStop && e.Attempts[n-1].Delay > 0 {
		wait = fmt.Sprintf(", the server asked for a wait of %v", e.Attempts[n-1].Delay)
	}
	return fmt.Sprintf("%v (grpcretry: %v after %d %s%s)", e.last, e.Reason, e.Made(), attempts, wait)
}

// Unwrap gives the error of the last attempt.
func (e *Error) Unwrap() error { return e.last }

// GRPCStatus is what status.FromError and status.Code see; it is never nil and never OK.
func (e *Error) GRPCStatus() *status.Status { return e.st }

// Is makes errors.Is find the sentinel that belongs to the Reason. Where the
// caller's context ended a wait it also finds context.Canceled or
// context.DeadlineExceeded, and the context's [context.Cause].
func (e *Error) Is(target error) bool {
	switch target {
	case ErrAttemptsExhausted:
		return e.Reason == ReasonAttemptsExhausted
	case ErrBudgetExhausted:
		return e.Reason == ReasonBudgetExhausted
	case ErrDeadlineTooClose:
		return e.Reason == ReasonDeadline
	case ErrPushbackStop:
		return e.Reason == ReasonPushbackStop
	case context.Canceled, context.DeadlineExceeded:
		return e.cut != nil && errors.Is(e.cut, target)
	}
	return e.cause != nil && errors.Is(e.cause, target)
}

// Sentinels for errors.Is: why a call was given up.
var (
	// ErrAttemptsExhausted: MaxAttempts were made.
	ErrAttemptsExhausted = errors.New("grpcretry: attempts exhausted")
	// ErrBudgetExhausted: the budget refused another attempt.
	ErrBudgetExhausted = errors.New("grpcretry: retry budget exhausted")
	// ErrDeadlineTooClose: the next wait would not have fitted the call's
	// deadline, or the policy's Timeout for the whole call ended the last attempt.
	ErrDeadlineTooClose = errors.New("grpcretry: the wait does not fit the deadline")
	// ErrPushbackStop: the server asked not to be retried, or not before longer
	// than Backoff.MaxHint.
	ErrPushbackStop = errors.New("grpcretry: the server asked for no retry")
)
