package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

const job = "jobs/export"

// everySecond is a policy for jobs whose waits are 1 s, 2 s, 4 s ...
func everySecond(edit func(*Policy)) Option {
	p := Policy{MaxAttempts: 4, Backoff: Backoff{Base: time.Second, Max: time.Minute, Jitter: NoJitter}}
	if edit != nil {
		edit(&p)
	}
	return WithMethodPolicy("jobs/*", p)
}

// script is work that fails with the errors in turn, and then succeeds.
func script(errs ...error) func(context.Context) error {
	n := 0
	return func(context.Context) error {
		if n == len(errs) {
			return nil
		}
		n++
		return errs[n-1]
	}
}

// always is work that fails with err for ever.
func always(err error) func(context.Context) error {
	return func(context.Context) error { return err }
}

func delaysOf(r *Report) []time.Duration {
	var all []time.Duration
	for _, a := range r.Attempts {
		if a.Reason == ReasonRetry {
			all = append(all, a.Delay)
		}
	}
	return all
}

// stateOf is the budget of the target.
func stateOf(t *testing.T, r *Retrier, target string) BudgetState {
	t.Helper()
	for _, s := range r.Budgets() {
		if s.Target == target {
			return s
		}
	}
	t.Fatalf("no budget for %q", target)
	return BudgetState{}
}

var errReset = fmt.Errorf("read page 3: %w", &net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET})

// The kinds of failure that a job meets: each must be treated as its owner would,
// and no second sooner or later than the policy says.
func TestDoFailureKinds(t *testing.T) {
	unavailable := status.Error(codes.Unavailable, "being replaced")
	hinted, err := status.New(codes.Unavailable, "later").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(10 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	busy := errors.New("503 Service Unavailable")
	until := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	attemptTimeout := func(p *Policy) { p.AttemptTimeout = 500 * ms }
	for _, tt := range []struct {
		name     string
		edit     func(*Policy)
		work     func(context.Context) error
		attempts int
		reason   Reason
		delays   []time.Duration
		elapsed  time.Duration
	}{
		{"lost connection", nil, script(errReset, errReset, errReset),
			4, ReasonSuccess, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}, 7 * time.Second},
		{"lost connection for ever", nil, always(errReset),
			4, ReasonAttemptsExhausted, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}, 7 * time.Second},
		{"timeout of the attempt", attemptTimeout, until,
			4, ReasonAttemptsExhausted, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}, 9 * time.Second},
		{"timeout of the attempt, whatever Codes says", func(p *Policy) { attemptTimeout(p); p.Codes = Codes(codes.Aborted) }, until,
			4, ReasonAttemptsExhausted, []time.Duration{time.Second, 2 * time.Second, 4 * time.Second}, 9 * time.Second},
		{"timeout of the network", nil, script(os.ErrDeadlineExceeded, os.ErrDeadlineExceeded),
			3, ReasonSuccess, []time.Duration{time.Second, 2 * time.Second}, 3 * time.Second},
		{"UNAVAILABLE", nil, script(unavailable, unavailable),
			3, ReasonSuccess, []time.Duration{time.Second, 2 * time.Second}, 3 * time.Second},
		{"UNAVAILABLE with a hint", nil, script(hinted.Err(), hinted.Err()),
			3, ReasonSuccess, []time.Duration{11 * time.Second, 12 * time.Second}, 23 * time.Second},
		{"503 with a hint", nil, script(RetryAfter(busy, 10*time.Second), RetryAfter(busy, 0), RetryAfter(busy, -time.Hour)),
			4, ReasonSuccess, []time.Duration{11 * time.Second, 2 * time.Second, 4 * time.Second}, 17 * time.Second},
		{"503 with a hint as long as MaxHint", nil, script(RetryAfter(busy, time.Minute)),
			2, ReasonSuccess, []time.Duration{61 * time.Second}, 61 * time.Second},
		{"503 with a hint beyond MaxHint", nil, script(RetryAfter(busy, time.Minute+1)),
			1, ReasonPushbackStop, nil, 0},
		{"validation", nil, script(status.Error(codes.InvalidArgument, "no such month")),
			1, ReasonNotRetryable, nil, 0},
		{"validation without gRPC", nil, script(Permanent(errors.New("no such month"))),
			1, ReasonPermanent, nil, 0},
		{"half-way through a write, NotIdempotent", func(p *Policy) { p.Idempotency = NotIdempotent }, script(errReset),
			1, ReasonNotIdempotent, nil, 0},
		{"half-way through a write, NotIdempotent, Retryable", func(p *Policy) { p.Idempotency = NotIdempotent }, script(Retryable(errReset)),
			1, ReasonNotIdempotent, nil, 0},
		{"half-way through a write, Keyed", func(p *Policy) { p.Idempotency = Keyed }, script(errReset),
			2, ReasonSuccess, []time.Duration{time.Second}, time.Second},
		{"quota without a hint", nil, script(status.Error(codes.ResourceExhausted, "quota")),
			1, ReasonNotRetryable, nil, 0},
		{"quota without a hint, RetryQuota", func(p *Policy) { p.RetryQuota = true }, script(status.Error(codes.ResourceExhausted, "quota")),
			2, ReasonSuccess, []time.Duration{2 * time.Second}, 2 * time.Second},
		{"quota with a hint of one's own", nil, script(RetryAfter(status.Error(codes.ResourceExhausted, "quota"), 5*time.Second)),
			2, ReasonSuccess, []time.Duration{6 * time.Second}, 6 * time.Second},
		{"RetryIf stops", func(p *Policy) {
			p.RetryIf = func(a Attempt) Verdict {
				if errors.Is(a.Err, fs.ErrNotExist) {
					return VerdictStop
				}
				return VerdictDefault
			}
		}, script(errReset, fmt.Errorf("open: %w", fs.ErrNotExist)),
			2, ReasonRetryIfStop, []time.Duration{time.Second}, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, everySecond(tt.edit))
				var report Report
				start := time.Now()
				err := r.Do(t.Context(), job, tt.work, WithReport(&report))
				checkElapsed(t, start, tt.elapsed)
				checkCall(t, &report, tt.attempts, tt.reason)
				if got := delaysOf(&report); !slices.Equal(got, tt.delays) {
					t.Errorf("waits %v, want %v", got, tt.delays)
				}
				if (err == nil) != (tt.reason == ReasonSuccess) {
					t.Errorf("error %v with %v", err, tt.reason)
				}
				if want := tt.attempts > 1 || tt.reason.givesUp(); err != nil && wrapped(err) != want {
					t.Errorf("error %#v, want an *Error: %v", err, want)
				}
				if report.Method != "/"+job || report.Target != "do:"+job {
					t.Errorf("report of %q at %q", report.Method, report.Target)
				}
			})
		})
	}
}

// What a plain error, a mark or a status means must not depend on how it is
// wrapped, and a policy whose Codes somebody set must be obeyed.
func TestDoClassifies(t *testing.T) {
	refused := fmt.Errorf("connect: %w", &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED})
	plain := errors.New("plain")
	aborted := status.Error(codes.Aborted, "start again")
	gaveUp := func(reason Reason, err error) error {
		return newError(Report{Reason: reason, Attempts: make([]Attempt, 3)}, err, nil)
	}
	wrap := func(err error) error { return fmt.Errorf("step 2: %w", err) }
	again, stop, never := ReasonRetry, ReasonNotRetryable, ReasonPermanent
	only := Codes(codes.Unavailable, codes.Aborted) // and not UNKNOWN
	for _, tt := range []struct {
		name         string
		err          error
		code         codes.Code
		byDefault    Reason
		withOnly     Reason // Codes: UNAVAILABLE, ABORTED
		withDeadline Reason // Codes: DEADLINE_EXCEEDED, UNKNOWN
	}{
		{"plain", plain, codes.Unknown, again, stop, again},
		{"file that is not there", &fs.PathError{Op: "open", Path: "x", Err: syscall.ENOENT}, codes.Unknown, again, stop, again},
		{"refused connection", refused, codes.Unavailable, again, again, stop},
		{"unknown host", &net.DNSError{Err: "no such host", Name: "x", IsNotFound: true}, codes.Unavailable, again, again, stop},
		{"timeout of the network", wrap(os.ErrDeadlineExceeded), codes.DeadlineExceeded, again, stop, again},
		{"a context of fn's own timed out", wrap(context.DeadlineExceeded), codes.DeadlineExceeded, again, stop, again},
		{"a context of fn's own was cancelled", wrap(context.Canceled), codes.Canceled, stop, stop, stop},
		{"status", wrap(aborted), codes.Aborted, stop, again, stop},
		{"status joined", errors.Join(plain, aborted), codes.Aborted, stop, again, stop},
		{"two statuses", errors.Join(aborted, status.Error(codes.Internal, "x")), codes.Aborted, stop, again, stop},
		{"status UNKNOWN", status.Error(codes.Unknown, "x"), codes.Unknown, stop, stop, again},
		{"DEADLINE_EXCEEDED of a server", status.Error(codes.DeadlineExceeded, "x"), codes.DeadlineExceeded, stop, stop, again},
		{"status nil", nilStatusError{}, codes.Unknown, again, stop, again},
		{"status OK", okError{}, codes.Unknown, again, stop, again},
		{"status OK wrapped", wrap(okError{}), codes.Unknown, again, stop, again},

		{"Permanent", Permanent(refused), codes.Unavailable, never, never, never},
		{"Permanent wrapped", wrap(Permanent(refused)), codes.Unavailable, never, never, never},
		{"Permanent in the middle", wrap(Permanent(wrap(aborted))), codes.Aborted, never, never, never},
		{"Permanent with the longest hint", Permanent(RetryAfter(refused, time.Hour)), codes.Unavailable, never, never, never},
		{"Retryable", Retryable(plain), codes.Unknown, again, again, again},
		{"Retryable with a status", wrap(Retryable(status.Error(codes.InvalidArgument, "x"))), codes.InvalidArgument, again, again, again},
		{"Retryable context.Canceled", Retryable(context.Canceled), codes.Canceled, again, again, again},
		{"both, Retryable outermost", Retryable(wrap(Permanent(plain))), codes.Unknown, again, again, again},
		{"both, Permanent outermost", Permanent(wrap(Retryable(plain))), codes.Unknown, never, never, never},
		{"both, side by side", errors.Join(Retryable(plain), Permanent(plain)), codes.Unknown, never, never, never},
		{"both, side by side, wrapped", fmt.Errorf("%w and %w", wrap(Permanent(plain)), wrap(Retryable(plain))), codes.Unknown, never, never, never},
		{"joined with a plain one", errors.Join(plain, Permanent(plain)), codes.Unknown, never, never, never},

		{"a call that was given up", wrap(gaveUp(ReasonAttemptsExhausted, aborted)), codes.Aborted, never, again, never},
		{"a call that was given up in time", gaveUp(ReasonDeadline, aborted), codes.Aborted, never, again, never},
		{"a call that was given up for the budget", gaveUp(ReasonBudgetExhausted, aborted), codes.Aborted, never, again, never},
		{"a call that the server stopped", gaveUp(ReasonPushbackStop, aborted), codes.Aborted, never, again, never},
		{"a call that its context ended", gaveUp(ReasonParentDone, context.DeadlineExceeded), codes.DeadlineExceeded, never, never, again},
		{"a call that was given up, UNAVAILABLE", gaveUp(ReasonAttemptsExhausted, refused), codes.Unknown, never, never, again},
		{"a call retried and then refused", gaveUp(ReasonNotRetryable, aborted), codes.Aborted, stop, again, stop},
		{"work retried and then permanent", gaveUp(ReasonPermanent, plain), codes.Unknown, again, stop, again},
		{"a mark inside a call that was given up", gaveUp(ReasonAttemptsExhausted, wrap(Retryable(plain))), codes.Unknown, never, never, again},
		{"a call that was given up, Retryable", Retryable(gaveUp(ReasonAttemptsExhausted, aborted)), codes.Aborted, again, again, again},
		{"a call that was given up, joined", errors.Join(Retryable(plain), gaveUp(ReasonAttemptsExhausted, aborted)), codes.Aborted, never, again, never},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, in := range []struct {
				set  CodeSet
				want Reason
			}{{CodeSet{}, tt.byDefault}, {only, tt.withOnly}, {Codes(codes.DeadlineExceeded, codes.Unknown), tt.withDeadline}} {
				r := newRetrier(t, WithDefaultPolicy(Policy{Codes: in.set, Backoff: atOnce}))
				var report Report
				err := r.Do(t.Context(), job, script(tt.err), WithReport(&report))
				first := report.Attempts[0]
				if first.Code != tt.code || first.Reason != in.want {
					t.Errorf("Codes %v: %v, %v; want %v, %v", in.set, first.Code, first.Reason, tt.code, in.want)
				}
				if (err == nil) != (in.want == ReasonRetry) {
					t.Errorf("Codes %v: error %v", in.set, err)
				}
			}
		})
	}
}

// Whatever marked the error: the caller must find what it would have found
// without marks, or code that looks at errors breaks when Do is put around it.
func TestDoMarksDoNotLeak(t *testing.T) {
	server, err := status.New(codes.Aborted, "start again").WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(ms)})
	if err != nil {
		t.Fatal(err)
	}
	errPlain := errors.New("plain")
	for _, original := range []error{server.Err(), errPlain, &fs.PathError{Op: "open", Path: "x", Err: fs.ErrNotExist}} {
		for _, tt := range []struct {
			name     string
			mark     func(error) error
			attempts int
			exact    bool // the result, or what the *Error unwraps to, is the original itself
		}{
			{"Permanent", Permanent, 1, true},
			{"Permanent twice", func(err error) error { return Permanent(Permanent(err)) }, 1, true},
			{"Permanent wrapped", func(err error) error { return fmt.Errorf("step: %w", Permanent(err)) }, 1, false},
			{"Retryable", Retryable, 3, true},
			{"RetryAfter", func(err error) error { return RetryAfter(err, 0) }, 3, true},
			{"both", func(err error) error { return Permanent(Retryable(err)) }, 1, true},
		} {
			t.Run(tt.name, func(t *testing.T) {
				r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce}))
				var report Report
				var ended error
				err := r.Do(t.Context(), job, always(tt.mark(original)), WithReport(&report), WithCallPolicy(func(p *Policy) {
					p.RetryIf = func(a Attempt) Verdict { ended = a.Err; return VerdictDefault }
				}))
				if report.Made() != tt.attempts {
					t.Errorf("%d attempts, want %d", report.Made(), tt.attempts)
				}
				if !errors.Is(err, original) {
					t.Errorf("errors.Is(%v, original) is false", err)
				}
				want, wantOK := status.FromError(original)
				got, ok := status.FromError(err)
				if got.Code() != want.Code() || len(got.Details()) != len(want.Details()) {
					t.Errorf("status %v, want %v", got, want)
				}
				if !wrapped(err) && ok != wantOK {
					t.Errorf("has a status: %v, want %v", ok, wantOK)
				}
				last := err
				if wrapped(err) {
					last = errors.Unwrap(err)
				}
				if exact := last == original; exact != tt.exact {
					t.Errorf("the error is %#v, the original itself: %v, want %v", last, exact, tt.exact)
				}
				if kept := report.Attempts[0].Err; (kept == original) != tt.exact || tt.attempts > 1 && (ended == original) != tt.exact {
					t.Errorf("the report has %#v, RetryIf saw %#v", kept, ended)
				}
			})
		}
	}
	if Permanent(nil) != nil || Retryable(nil) != nil || RetryAfter(nil, time.Second) != nil {
		t.Error("a mark turns nil into an error")
	}
	if got := Permanent(errPlain).Error(); got != "plain" {
		t.Errorf("the mark changes the text to %q", got)
	}
}

// A job that fails must be bounded both by attempts and by time, whichever is
// reached first, or it runs into the next one.
func TestDoIsBoundedTwice(t *testing.T) {
	for _, tt := range []struct {
		name    string
		timeout time.Duration // the policy's
		parent  time.Duration // of the caller's context
		made    int
		reason  Reason
		elapsed time.Duration
	}{
		{"attempts first", time.Minute, 0, 5, ReasonAttemptsExhausted, 15 * time.Second},
		{"time first: the wait of 4 s would end at 7 s", 6 * time.Second, 0, 3, ReasonDeadline, 3 * time.Second},
		{"a wait that ends with the time does not begin", 7 * time.Second, 0, 3, ReasonDeadline, 3 * time.Second},
		{"a wait that ends just before does", 7*time.Second + 1, 0, 4, ReasonDeadline, 7 * time.Second},
		{"the caller's own deadline", 0, 6 * time.Second, 3, ReasonDeadline, 3 * time.Second},
		{"the caller's is sooner", time.Minute, 2 * time.Second, 2, ReasonDeadline, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, everySecond(func(p *Policy) { p.MaxAttempts, p.Timeout = 5, tt.timeout }))
				ctx := t.Context()
				if tt.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.parent)
					defer cancel()
				}
				var report Report
				start := time.Now()
				err := r.Do(ctx, job, always(errReset), WithReport(&report))
				checkElapsed(t, start, tt.elapsed)
				checkCall(t, &report, tt.made, tt.reason)
				if !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("error %v, want the work's own", err)
				}
			})
		})
	}
}

// The time of an attempt ends the context that fn is given. A fn that ignores it
// cannot be stopped: its result counts when it comes, and nothing follows for
// which there is no time.
func TestDoTimeouts(t *testing.T) {
	heeds := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	ignores := func(err error) func(context.Context) error {
		return func(context.Context) error { time.Sleep(5 * time.Second); return err }
	}
	var deadlines []time.Duration
	asks := func(ctx context.Context) error {
		d, ok := ctx.Deadline()
		if !ok {
			return Permanent(errors.New("no deadline"))
		}
		deadlines = append(deadlines, time.Until(d))
		return errReset
	}
	for _, tt := range []struct {
		name            string
		attempt, whole  time.Duration
		fn              func(context.Context) error
		made            int
		reason          Reason
		elapsed         time.Duration
		code            codes.Code
		deadlinesOfThem []time.Duration
	}{
		{"each attempt has its own", 2 * time.Second, 0, asks, 3, ReasonAttemptsExhausted, 3 * time.Second, codes.Unknown,
			[]time.Duration{2 * time.Second, 2 * time.Second, 2 * time.Second}},
		{"cut to what is left", 2 * time.Second, 4 * time.Second, asks, 3, ReasonAttemptsExhausted, 3 * time.Second, codes.Unknown,
			[]time.Duration{2 * time.Second, 2 * time.Second, time.Second}},
		{"the whole ends the attempt", 0, 2 * time.Second, heeds, 1, ReasonDeadline, 2 * time.Second, codes.DeadlineExceeded, nil},
		{"ignored, success", time.Second, 2 * time.Second, ignores(nil), 1, ReasonSuccess, 5 * time.Second, codes.OK, nil},
		{"ignored, failure", time.Second, 2 * time.Second, ignores(errReset), 1, ReasonDeadline, 5 * time.Second, codes.Unknown, nil},
		{"attempt's ignored, failure", time.Second, 12 * time.Second, ignores(errReset), 2, ReasonDeadline, 11 * time.Second, codes.Unknown, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				deadlines = nil
				r := newRetrier(t, everySecond(func(p *Policy) { p.MaxAttempts, p.AttemptTimeout, p.Timeout = 3, tt.attempt, tt.whole }))
				var report Report
				start := time.Now()
				err := r.Do(t.Context(), job, tt.fn, WithReport(&report))
				checkElapsed(t, start, tt.elapsed)
				checkCall(t, &report, tt.made, tt.reason)
				checkCode(t, err, tt.code)
				if !slices.Equal(deadlines, tt.deadlinesOfThem) {
					t.Errorf("deadlines %v, want %v", deadlines, tt.deadlinesOfThem)
				}
			})
		})
	}
}

var errShutdown = errors.New("the process is shutting down")

// Who leaves must not be kept: the work stops at once, in an attempt and in a
// wait, and the caller can tell why it stopped and what had gone wrong before.
func TestDoStopsWithItsCaller(t *testing.T) {
	heeds := func(ctx context.Context) error { <-ctx.Done(); return fmt.Errorf("page 3: %w", ctx.Err()) }
	for _, tt := range []struct {
		name  string
		first time.Duration // when the caller leaves; negative: before
		fn    func(context.Context) error
		made  int
		cause bool // the context's cause can be found in the error
		last  error
	}{
		{"before", -1, always(errReset), 1, false, context.Canceled},
		{"in the first attempt", 300 * ms, heeds, 1, false, context.Canceled},
		{"in the first wait", 700 * ms, always(errReset), 1, true, syscall.ECONNRESET},
		{"in the second wait", 2500 * ms, always(errReset), 2, true, syscall.ECONNRESET},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, everySecond(nil))
				ctx, cancel := context.WithCancelCause(t.Context())
				if tt.first < 0 {
					cancel(errShutdown)
				} else {
					time.AfterFunc(tt.first, func() { cancel(errShutdown) })
				}
				runs := 0
				var report Report
				start := time.Now()
				err := r.Do(ctx, job, func(ctx context.Context) error { runs++; return tt.fn(ctx) }, WithReport(&report))
				checkElapsed(t, start, max(0, tt.first))
				checkCall(t, &report, tt.made, ReasonParentDone)
				if tt.first < 0 && runs > 0 {
					t.Error("fn ran though its caller had left")
				}
				if !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("error %v, want one that is context.Canceled", err)
				}
				if !errors.Is(err, tt.last) {
					t.Errorf("error %v does not lead to %v", err, tt.last)
				}
				if errors.Is(err, errShutdown) != tt.cause {
					t.Errorf("error %v leads to the cause: %v, want %v", err, !tt.cause, tt.cause)
				}
				if wrapped(err) {
					checkCode(t, err, codes.Canceled)
				}
				// Nothing stays reserved: what the wait held is back, with the tokens it started with.
				if s := stateOf(t, r, "do:"+job); s.InFlight != 0 || tt.made == 1 && s.Balance != 1 {
					t.Errorf("the budget is left with %+v", s)
				}
			})
		})
	}
}

// A panic is a fault of the program, and running it again repeats the damage. It
// must reach the caller as it is, and leave neither a call in flight nor a grant
// behind, because a leak of either changes the budget for good.
func TestDoPanics(t *testing.T) {
	for _, tt := range []struct {
		name    string
		timeout time.Duration
		before  []error
		balance float64
	}{
		{"in the first attempt", 0, nil, 1},
		{"in a retry", 0, []error{errReset}, 0.9}, // what the retry took is not given back
		{"in the first attempt, with a timeout", time.Minute, nil, 1},
		{"in a retry, with a timeout", time.Minute, []error{errReset}, 0.9},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, everySecond(func(p *Policy) { p.Timeout = tt.timeout }))
				runs := 0
				var inner context.Context
				caught := func() (p any) {
					defer func() { p = recover() }()
					_ = r.Do(t.Context(), job, func(ctx context.Context) error {
						inner = ctx
						if runs++; runs <= len(tt.before) {
							return tt.before[runs-1]
						}
						panic("index out of range")
					})
					return nil
				}()
				if caught != "index out of range" {
					t.Errorf("recovered %v", caught)
				}
				if runs != len(tt.before)+1 {
					t.Errorf("fn ran %d times, want %d", runs, len(tt.before)+1)
				}
				if tt.timeout > 0 && inner.Err() == nil {
					t.Error("the attempt's context lives on")
				}
				if s := stateOf(t, r, "do:"+job); s.InFlight != 0 || s.Balance != tt.balance {
					t.Errorf("the budget is left with %+v, want a balance of %v and nothing in flight", s, tt.balance)
				}
				if err := r.Do(t.Context(), job, script()); err != nil {
					t.Errorf("the next one fails: %v", err)
				}
			})
		})
	}
}

// Jobs must not use up each other's budgets, nor those of the servers.
func TestDoBudgetPerName(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 100, Backoff: atOnce}))
		var report Report
		err := r.Do(t.Context(), job, always(errReset), WithReport(&report))
		checkCall(t, &report, 11, ReasonBudgetExhausted) // the first, and ten that were paid for
		if !errors.Is(err, ErrBudgetExhausted) {
			t.Errorf("error %v", err)
		}
		for _, name := range []string{"jobs/letters", "letters"} {
			if err := r.Do(t.Context(), name, script(errReset)); err != nil {
				t.Errorf("%s has to do without retries: %v", name, err)
			}
		}
		if s := stateOf(t, r, "do:jobs/letters"); s.Balance != 1 {
			t.Errorf("a retry that succeeded is not refunded: %+v", s)
		}
		stateOf(t, r, "do:do/letters")
		if s := stateOf(t, r, "do:"+job); s.Balance != 0 {
			t.Errorf("balance %v of the job that fails, want 0", s.Balance)
		}
	})
}

// Nobody asked to be told, so the first attempt is made without more ado; yet when
// it fails, the error must tell of it as of every other, the budget must count
// the work once, and fn must not run once more for it.
func TestDoUnobserved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, everySecond(nil))
		start := time.Now()
		runs := 0
		fn := func(context.Context) error { time.Sleep(300 * ms); runs++; return errReset }
		err := r.Do(t.Context(), job, fn)
		var e *Error
		if !errors.As(err, &e) || runs != 4 || e.Made() != 4 || e.Reason != ReasonAttemptsExhausted {
			t.Fatalf("%d runs, %v", runs, err)
		}
		at := time.Duration(0)
		for i, a := range e.Attempts {
			if a.Number != i+1 || a.Start.Sub(start) != at || a.Duration != 300*ms || a.Err != errReset || a.Method != "/"+job {
				t.Errorf("attempt %+v, want number %d, %v after the start", a, i+1, at)
			}
			at += 300*ms + time.Second<<i
		}
		if s := stateOf(t, r, "do:"+job); s.InFlight != 0 || s.Tokens != 70-3*7 {
			t.Errorf("the budget is left with %+v", s)
		}
		fn = func(context.Context) error { return nil }
		if err := r.Do(t.Context(), job, fn); err != nil {
			t.Error(err)
		}
		if s := stateOf(t, r, "do:"+job); s.InFlight != 0 || s.Tokens != 70-3*7+1 {
			t.Errorf("after a success the budget is left with %+v", s)
		}
	})
}

// The policy must be found by the name, as for methods: exact, group, default.
func TestDoNames(t *testing.T) {
	attempts := func(n int) Policy { return Policy{MaxAttempts: n, Backoff: atOnce} }
	r := newRetrier(t, WithBudget(Unlimited()), WithDefaultPolicy(attempts(2)), WithMethodPolicy("jobs/*", attempts(3)),
		WithMethodPolicy("jobs/export", attempts(4)), WithMethodPolicy("do/export", attempts(5)),
		WithMethodPolicy(write, Policy{MaxAttempts: 6, Backoff: atOnce}))
	for _, tt := range []struct {
		name, method string
		attempts     int
	}{
		{"jobs/export", "/jobs/export", 4},
		{"/jobs/export", "/jobs/export", 4},
		{"jobs/letters", "/jobs/letters", 3},
		{"nightly.jobs.v1/letters", "/nightly.jobs.v1/letters", 2},
		{"export", "/do/export", 5},
		{"/export", "/do/export", 5},
		{"do/export", "/do/export", 5},
		{"Übersicht", "/do/Übersicht", 2},
		{write, write, 6}, // the policy of an RPC serves the work of that name
	} {
		for range 2 {
			var report Report
			_ = r.Do(t.Context(), tt.name, always(errReset), WithReport(&report))
			checkCall(t, &report, tt.attempts, ReasonAttemptsExhausted)
			if report.Method != tt.method || report.Target != "do:"+tt.method[1:] {
				t.Errorf("Do(%q) is reported as %q at %q, want %q", tt.name, report.Method, report.Target, tt.method)
			}
		}
	}
}

// What cannot be meant must be refused with the reason, before fn runs.
func TestDoRefuses(t *testing.T) {
	r := newRetrier(t)
	var md metadata.MD
	for _, tt := range []struct {
		what, name string
		opts       []grpc.CallOption
		text       string
	}{
		{"no name", "", nil, `Do: name = "", want a name such as "jobs/export"`},
		{"a slash", "/", nil, `name = ""`},
		{"no job", "jobs/", nil, `name = "jobs/"`},
		{"no group", "//export", nil, `name = "/export"`},
		{"too deep", "jobs/export/daily", nil, `name = "jobs/export/daily"`},
		{"a pattern", "jobs/*", nil, `name = "jobs/*"`},
		{"a space", "jobs/daily export", nil, `name = "jobs/daily export"`},
		{"a line break", "export\n", nil, `name = "export\n"`},
		{"Header", job, []grpc.CallOption{grpc.Header(&md)}, `Do("jobs/export"): call option grpc.HeaderCallOption means nothing here`},
		{"WaitForReady", job, []grpc.CallOption{grpc.WaitForReady(true)}, "grpc.FailFastCallOption"},
		{"nil option", job, []grpc.CallOption{nil}, "call option <nil>"},
		{"EmptyCallOption", job, []grpc.CallOption{grpc.EmptyCallOption{}}, "grpc.EmptyCallOption"},
		{"one among good ones", job, []grpc.CallOption{WithoutRetry(), grpc.MaxCallRecvMsgSize(1)}, "grpc.MaxRecvMsgSizeCallOption"},
		{"a bad edit", job, []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.MaxAttempts = -1 })}, "Policy.MaxAttempts = -1"},
		{"a nil edit", job, []grpc.CallOption{WithCallPolicy(nil)}, "WithCallPolicy: callback is nil"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			for range 2 { // the second time the name is known
				ran := false
				err := r.Do(t.Context(), tt.name, func(context.Context) error { ran = true; return nil }, tt.opts...)
				checkCode(t, err, codes.Internal)
				if ran || err == nil || !strings.Contains(err.Error(), tt.text) {
					t.Errorf("ran: %v; error %v, want one with %q", ran, err, tt.text)
				}
			}
		})
	}
	var none context.Context
	err := r.Do(none, "a b", nil, grpc.WaitForReady(true))
	for _, want := range []string{`name = "a b"`, "context is nil", "function is nil", "FailFastCallOption"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want all faults at once, also %q", err, want)
		}
	}
	if _, err := DoValue[int](t.Context(), r, job, nil); status.Code(err) != codes.Internal {
		t.Errorf("DoValue without a function: %v", err)
	}
	for _, s := range r.Budgets() {
		if s.InFlight != 0 {
			t.Errorf("a refused one stays in flight: %+v", s)
		}
	}
}

// Options of the call must work as in an RPC, and an edit that replaces the whole
// policy must not take away that work may be repeated.
func TestDoCallOptions(t *testing.T) {
	r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce}))
	for _, tt := range []struct {
		name     string
		opts     []grpc.CallOption
		attempts int
		reason   Reason
	}{
		{"none", nil, 3, ReasonAttemptsExhausted},
		{"WithoutRetry", []grpc.CallOption{WithoutRetry()}, 1, ReasonDisabled},
		{"one attempt", []grpc.CallOption{WithCallPolicy(attemptsOf(1))}, 1, ReasonDisabled},
		{"a whole policy", []grpc.CallOption{WithCallPolicy(func(p *Policy) { *p = Policy{MaxAttempts: 5, Backoff: atOnce} })}, 5, ReasonAttemptsExhausted},
		{"NotIdempotent", []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.Idempotency = NotIdempotent })}, 1, ReasonNotIdempotent},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var first, second Report
			_ = r.Do(t.Context(), job, always(errReset), append(tt.opts, WithReport(&first), WithReport(nil), WithReport(&second))...)
			checkCall(t, &first, tt.attempts, tt.reason)
			checkCall(t, &second, tt.attempts, tt.reason)
		})
	}
}

// The value must be that of the attempt which succeeded, and none of a failed one.
func TestDoValue(t *testing.T) {
	r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce}))
	n := 0
	got, err := DoValue(t.Context(), r, job, func(context.Context) (int, error) {
		if n++; n < 3 {
			return -n, errReset
		}
		return n, nil
	})
	if got != 3 || err != nil {
		t.Errorf("%d, %v; want 3 and no error", got, err)
	}
	got, err = DoValue(t.Context(), r, job, func(context.Context) (int, error) { return 7, errReset })
	if got != 0 || !errors.Is(err, ErrAttemptsExhausted) {
		t.Errorf("%d, %v; want 0 and an error", got, err)
	}
}

// Keyed: a server can only remove duplicates if all attempts carry one key, and
// two runs of the work must not share one.
func TestDoKeyed(t *testing.T) {
	keyOf := func(a testsrv.Attempt) string { return strings.Join(a.Metadata.Get(keyHeader), ",") }
	for _, tt := range []struct {
		name string
		ctx  []string // metadata of the caller
		opts []grpc.CallOption
		want string // "" = random
	}{
		{"a random one", nil, nil, ""},
		{"the call's", nil, []grpc.CallOption{WithIdempotencyKey("letter-4711")}, "letter-4711"},
		{"the caller's metadata", []string{keyHeader, "from-outside"}, []grpc.CallOption{WithIdempotencyKey("letter-4711")}, "from-outside"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, everySecond(func(p *Policy) { p.Idempotency = Keyed }))
				srv, client := serve(t, r, testsrv.Script{put: testsrv.Fail(2, codes.Unavailable).ThenOK()})
				ctx := metadata.AppendToOutgoingContext(t.Context(), tt.ctx...)
				for range 2 {
					if err := srv.Set(put, testsrv.Fail(2, codes.Unavailable).ThenOK()); err != nil {
						t.Fatal(err)
					}
					err := r.Do(ctx, "jobs/letters", func(ctx context.Context) error {
						if _, err := client.Write(ctx, &testpb.Request{}); err != nil {
							return err
						}
						_, err := client.Put(ctx, &testpb.Request{}, WithoutRetry())
						return err
					}, tt.opts...)
					if err != nil {
						t.Error(err)
					}
				}
				var keys []string
				for _, method := range []string{write, put} {
					all := srv.Attempts(method)
					if len(all) != 6 {
						t.Fatalf("%d arrivals of %s, want 6", len(all), method)
					}
					for i, a := range all {
						if keys = append(keys, keyOf(a)); keys[i] == "" || keys[len(keys)-1] != keys[i] || i%3 > 0 && keys[i] != keys[i-1] {
							t.Errorf("keys %q, want the same in all attempts of one run, for both methods", keys)
						}
						if len(a.Metadata.Get(attemptsHeader)) > 0 {
							t.Error("an RPC of its own carries the header of a retry")
						}
					}
				}
				if tt.want != "" && keys[0] != tt.want {
					t.Errorf("key %q, want %q", keys[0], tt.want)
				}
				if tt.want == "" && keys[0] == keys[3] {
					t.Errorf("two runs share the key %q", keys[0])
				}
			})
		})
	}
}

// RPCs inside must not multiply the attempts of the work: three times three
// attempts are nine, which is what budgets and limits are there to prevent.
func TestDoNested(t *testing.T) {
	for _, tt := range []struct {
		name    string
		script  testsrv.Sequence
		codes   CodeSet // of the work
		timeout time.Duration
		wrap    func(error) error
		made    int // by the work
		reason  Reason
		arrived int
		inner   int // attempts of the inner call that the work's first attempt reports; 0: none
	}{
		{"given up", testsrv.Fail(99, codes.Unavailable), CodeSet{}, 0, nil, 1, ReasonPermanent, 3, 3},
		{"given up, and the code is listed", testsrv.Fail(99, codes.Unavailable), Codes(codes.Unavailable), 0, nil, 3, ReasonAttemptsExhausted, 9, 3},
		{"given up, and another code is listed", testsrv.Fail(99, codes.Unavailable), Codes(codes.Aborted), 0, nil, 1, ReasonPermanent, 3, 3},
		{"given up, and marked", testsrv.Fail(99, codes.Unavailable), CodeSet{}, 0, Retryable, 3, ReasonAttemptsExhausted, 9, 3},
		{"given up, and turned into text", testsrv.Fail(99, codes.Unavailable), CodeSet{}, 0, func(err error) error { return errors.New(err.Error()) }, 3, ReasonAttemptsExhausted, 9, 3},
		{"retried with success", testsrv.Fail(2, codes.Unavailable).ThenOK(), CodeSet{}, 0, nil, 1, ReasonSuccess, 3, 3},
		{"success at once", testsrv.Sequence{}, CodeSet{}, 0, nil, 1, ReasonSuccess, 1, 0},
		{"ABORTED starts the sequence again", testsrv.Fail(2, codes.Aborted).ThenOK(), Codes(codes.Aborted), 0, nil, 3, ReasonSuccess, 3, 1},
		{"ABORTED is not listed", testsrv.Fail(2, codes.Aborted), CodeSet{}, 0, nil, 1, ReasonNotRetryable, 1, 1},
		{"ABORTED after a retry", testsrv.Fail(1, codes.Unavailable).Then(testsrv.Fail(1, codes.Aborted).ThenOK()...), Codes(codes.Aborted), 0, nil, 2, ReasonSuccess, 3, 2},
		{"the attempt's own timeout", testsrv.Sequence{{Block: true}, {}}, CodeSet{}, time.Second, nil, 2, ReasonSuccess, 2, 1},
		{"the attempt's own timeout, after a retry", testsrv.Sequence{{Code: codes.Unavailable}, {Block: true}, {}}, CodeSet{}, time.Second, nil, 2, ReasonSuccess, 3, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, exactly(nil), everySecond(func(p *Policy) { p.MaxAttempts, p.Codes, p.AttemptTimeout = 3, tt.codes, tt.timeout }))
				srv, client := serve(t, r, testsrv.Script{get: tt.script})
				var report Report
				err := r.Do(t.Context(), job, func(ctx context.Context) error {
					_, err := client.Get(ctx, &testpb.Request{})
					if err != nil && tt.wrap != nil {
						return tt.wrap(err)
					}
					return err
				}, WithReport(&report))
				checkCall(t, &report, tt.made, tt.reason)
				if (err == nil) != (tt.reason == ReasonSuccess) {
					t.Errorf("error %v", err)
				}
				if n := srv.Count(get); n != tt.arrived {
					t.Errorf("%d arrivals, want %d", n, tt.arrived)
				}
				inner := report.Attempts[0].Inner
				if tt.inner == 0 {
					if inner != nil {
						t.Errorf("reports %+v of a call that succeeded at once", inner)
					}
					return
				}
				if len(inner) != 1 || inner[0].Method != get || inner[0].Made() != tt.inner {
					t.Fatalf("inner calls %+v, want one of %d attempts", inner, tt.inner)
				}
				if last := inner[0].Attempts[tt.inner-1]; last.Reason != inner[0].Reason || last.Number != tt.inner {
					t.Errorf("the inner call ended with %v, its last attempt with %v", inner[0].Reason, last.Reason)
				}
			})
		})
	}
}

// Nor may two Dos, one inside the other, multiply: here they would make four
// times four attempts.
func TestDoNestedInDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, everySecond(nil))
		runs := 0
		var report Report
		err := r.Do(t.Context(), job, func(ctx context.Context) error {
			return r.Do(ctx, "jobs/page", func(context.Context) error { runs++; return errReset })
		}, WithReport(&report))
		checkCall(t, &report, 1, ReasonPermanent)
		if runs != 4 {
			t.Errorf("%d runs, want 4", runs)
		}
		var e *Error
		if !errors.As(err, &e) || e.Method != "/jobs/page" || !errors.Is(err, ErrAttemptsExhausted) {
			t.Errorf("error %v, want that of the inner work, untouched", err)
		}
		inner := report.Attempts[0].Inner
		if len(inner) != 1 || inner[0].Method != "/jobs/page" || inner[0].Made() != 4 {
			t.Errorf("the report shows %+v inside", inner)
		}
	})
}

// An inner call whose wait the caller's own, shorter context cut was given up
// as well.
func TestDoNestedCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, everySecond(nil))
		var report Report
		err := r.Do(t.Context(), job, func(ctx context.Context) error {
			ctx, cancel := context.WithCancel(ctx)
			time.AfterFunc(500*ms, cancel)
			return r.Do(ctx, "jobs/page", always(errReset))
		}, WithReport(&report))
		checkCall(t, &report, 1, ReasonPermanent)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("error %v", err)
		}
	})
}

// The events of what is nested stand on one span; each must say where it
// belongs, or nobody can read them.
func TestDoEventsShowNesting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, exactly(nil), everySecond(func(p *Policy) { p.Codes = Codes(codes.Aborted) }))
		_, client := serve(t, r, testsrv.Script{
			get: testsrv.Fail(1, codes.Unavailable).ThenOK(),
			put: testsrv.Fail(1, codes.Aborted).ThenOK(),
		})
		ctx, events := traced(t, t.Context())
		err := r.Do(ctx, "jobs/outer", func(ctx context.Context) error {
			return r.Do(ctx, job, func(ctx context.Context) error {
				if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
					return err
				}
				_, err := client.Put(ctx, &testpb.Request{})
				return err
			})
		})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range events() {
			line := fmt.Sprint(e[keyMethod], " ", e[keyNumber], " ", e[keyDecision])
			if within := e[keyWithin]; within != nil {
				line += fmt.Sprint(" in ", within, " ", e[keyWithinAttempt])
			}
			got = append(got, line)
		}
		want := []string{
			"testsrv.v1.TestService/Get 1 retry in jobs/export 1",
			"testsrv.v1.TestService/Get 2 success in jobs/export 1",
			"testsrv.v1.TestService/Put 1 not_retryable in jobs/export 1",
			"jobs/export 1 retry in jobs/outer 1",
			"testsrv.v1.TestService/Get 1 success in jobs/export 2",
			"testsrv.v1.TestService/Put 1 success in jobs/export 2",
			"jobs/export 2 success in jobs/outer 1",
			"jobs/outer 1 success",
		}
		if !slices.Equal(got, want) {
			t.Errorf("events\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// Calls inside may run at once, be many, and outlive the attempt; a report that
// the caller already reads must not change under it.
func TestDoInnerReports(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce}))
		page := func(ctx context.Context) error { return r.Do(ctx, "jobs/page", always(Permanent(errReset))) }
		release := make(chan struct{})
		var report Report
		var late sync.WaitGroup
		err := r.Do(t.Context(), job, func(ctx context.Context) error {
			var pages sync.WaitGroup
			for range maxAttemptsKept + 8 {
				pages.Go(func() { _ = page(ctx) })
			}
			late.Go(func() { <-release; _ = page(context.WithoutCancel(ctx)) })
			pages.Wait()
			return nil
		}, WithReport(&report))
		if err != nil {
			t.Fatal(err)
		}
		if n := len(report.Attempts[0].Inner); n != maxAttemptsKept {
			t.Errorf("%d inner calls, want the first %d", n, maxAttemptsKept)
		}
		close(release)
		late.Wait()
		if n := len(report.Attempts[0].Inner); n != maxAttemptsKept {
			t.Errorf("%d inner calls after a late one", n)
		}
	})
}

// Hooks and the error must tell of what is inside as well; without anybody who
// wants to know, nothing is kept.
func TestDoInnerForHooks(t *testing.T) {
	var inHook []Report
	nested := func(r *Retrier) error {
		return r.Do(t.Context(), job, func(ctx context.Context) error {
			return Retryable(r.Do(ctx, "jobs/page", always(Permanent(errReset))))
		})
	}
	err := nested(newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce}), WithHooks(Hooks{AttemptEnd: func(_ context.Context, a Attempt) {
		inHook = append(inHook, a.Inner...)
	}})))
	var e *Error
	if !errors.As(err, &e) || len(e.Attempts) != 3 || len(e.Attempts[0].Inner) != 1 || len(inHook) != 3 {
		t.Errorf("the error shows %+v, the hook %+v", e, inHook)
	}
	err = nested(newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce})))
	if !errors.As(err, &e) || len(e.Attempts) != 3 || e.Attempts[0].Inner != nil {
		t.Errorf("kept though nobody asked: %+v", e)
	}
}

// A connection that is really refused, and one that really times out, must be
// taken for what they are; errors made up by a test might look different.
func TestDoRealNetworkErrors(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refusing := gone.Addr().String()
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	dialTo := func(address string) func(context.Context) error {
		return func(ctx context.Context) error {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", address)
			if err != nil {
				return fmt.Errorf("connect: %w", err)
			}
			defer func() { _ = c.Close() }()
			if err := c.SetReadDeadline(time.Now().Add(-time.Second)); err != nil {
				return err
			}
			_, err = c.Read(make([]byte, 1))
			return err
		}
	}
	for _, tt := range []struct {
		name, address string
		code          codes.Code
	}{
		{"refused", refusing, codes.Unavailable},
		{"timeout", l.Addr().String(), codes.DeadlineExceeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, set := range []CodeSet{{}, Codes(tt.code)} {
				r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: atOnce, Codes: set}))
				var report Report
				if err := r.Do(t.Context(), job, dialTo(tt.address), WithReport(&report)); err == nil {
					t.Fatal("no error")
				}
				checkCall(t, &report, 3, ReasonAttemptsExhausted)
				if got := report.Attempts[0].Code; got != tt.code {
					t.Errorf("code %v, want %v", got, tt.code)
				}
			}
		})
	}
}

// Work that succeeds at once must cost nothing: it may be as frequent as calls are.
func TestDoDoesNotAllocate(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector lets pools forget")
	}
	r := newRetrier(t)
	ctx := t.Context()
	fn := func(context.Context) error { return nil }
	value := func(context.Context) (int, error) { return 7, nil }
	for _, name := range []string{"jobs/export", "/jobs/export", "export"} {
		if n := testing.AllocsPerRun(1000, func() {
			if err := r.Do(ctx, name, fn); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("Do(%q): %v allocations, want 0", name, n)
		}
	}
	if n := testing.AllocsPerRun(1000, func() {
		if v, err := DoValue(ctx, r, job, value); v != 7 || err != nil {
			t.Fatal(v, err)
		}
	}); n > 2 { // the result, and the function that writes it
		t.Errorf("DoValue: %v allocations, want at most 2", n)
	}
}

// BenchmarkDo is the cost of work that succeeds at once.
func BenchmarkDo(b *testing.B) {
	r := newRetrier(b)
	fn := func(context.Context) error { return nil }
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := r.Do(ctx, job, fn); err != nil {
			b.Fatal(err)
		}
	}
}
