package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	spb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"pgregory.net/rapid"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// ladderFacts are facts that no rung stops: the call is retried after 10 ms.
func ladderFacts() facts {
	p := Policy{}.withDefaults()
	return facts{
		outcome:     outcome{err: errors.New("failed"), code: codes.Unavailable},
		policy:      &p,
		idempotency: Idempotent,
		attempts:    1,
		hasDeadline: true,
		remaining:   time.Hour,
	}
}

// rung is one rung of the ladder and the least that makes it fit.
type rung struct {
	name string
	set  func(f *facts, verdict *Verdict)
	want decision
}

// ladder is the whole ladder from top to bottom, as it is documented. The budget
// is asked after it, by the call.
var ladder = []rung{
	{"success", func(f *facts, _ *Verdict) { f.err = nil }, decision{reason: ReasonSuccess}},
	{"parent_done", func(f *facts, _ *Verdict) { f.parentDone = true }, decision{reason: ReasonParentDone}},
	{"closed", func(f *facts, _ *Verdict) { f.closed = true }, decision{reason: ReasonClosed}},
	{"disabled", func(f *facts, _ *Verdict) { f.disabled = true }, decision{reason: ReasonDisabled}},
	{"inbound_retry", func(f *facts, _ *Verdict) { f.inbound = true }, decision{reason: ReasonInboundRetry}},
	{"committed", func(f *facts, _ *Verdict) { f.committed = true }, decision{reason: ReasonCommitted}},
	{"deadline", func(f *facts, _ *Verdict) { f.timeUp, f.code = true, codes.DeadlineExceeded }, decision{reason: ReasonDeadline}},
	{"pushback_stop", func(f *facts, _ *Verdict) { f.hint = hint{stop: true, source: DelayPushback} },
		decision{reason: ReasonPushbackStop, failure: true, source: DelayPushback}},
	{"permanent", func(f *facts, _ *Verdict) { f.permanent = true }, decision{reason: ReasonPermanent}},
	{"retry_if_stop", func(_ *facts, v *Verdict) { *v = VerdictStop }, decision{reason: ReasonRetryIfStop}},
	{"not_retryable", func(f *facts, _ *Verdict) { f.policy.Codes = Codes() }, decision{reason: ReasonNotRetryable}},
	{"not_idempotent", func(f *facts, _ *Verdict) { f.idempotency = Inherit },
		decision{reason: ReasonNotIdempotent, failure: true, cost: CostTransient}},
	{"attempts_exhausted", func(f *facts, _ *Verdict) { f.attempts = f.policy.MaxAttempts },
		decision{reason: ReasonAttemptsExhausted, failure: true, cost: CostTransient}},
	{"deadline", func(f *facts, _ *Verdict) { f.remaining = 10 * time.Millisecond },
		decision{reason: ReasonDeadline, failure: true, cost: CostTransient, delay: 10 * time.Millisecond}},
	{"retry", func(*facts, *Verdict) {},
		decision{reason: ReasonRetry, failure: true, cost: CostTransient, delay: 10 * time.Millisecond, retry: true}},
}

// climb runs the ladder with a backoff of 10 ms, and counts its questions.
func climb(f *facts, v Verdict) (d decision, asked, drawn int) {
	d = decide(f, func() Verdict { asked++; return v }, func() time.Duration { drawn++; return 10 * time.Millisecond })
	return d, asked, drawn
}

// A rung in the wrong place turns one reason into another: a write is repeated
// because it counted as retryable first, or a server that asked to be left alone
// is asked again. So each rung must win against all below it at once.
func TestLadder(t *testing.T) {
	for i, r := range ladder {
		t.Run(fmt.Sprintf("%02d_%s", i, r.name), func(t *testing.T) {
			f, v := ladderFacts(), VerdictDefault
			r.set(&f, &v)
			got, asked, drawn := climb(&f, v)
			if got != r.want {
				t.Errorf("alone: %+v, want %+v", got, r.want)
			}
			if got.reason.String() != r.name {
				t.Errorf("the reason prints as %q, want %q", got.reason, r.name)
			}
			// RetryIf may be slow or count its calls, and a drawn backoff moves
			// the next one: both are asked on the rung that needs them and no earlier.
			if wantAsked := i >= 9; (asked == 1) != wantAsked || asked > 1 {
				t.Errorf("RetryIf was asked %d times, want it asked: %v", asked, wantAsked)
			}
			if wantDrawn := i >= 13; (drawn == 1) != wantDrawn || drawn > 1 {
				t.Errorf("the backoff was drawn %d times, want it drawn: %v", drawn, wantDrawn)
			}

			f, v = ladderFacts(), VerdictDefault
			for _, below := range slices.Backward(ladder[i:]) {
				below.set(&f, &v)
			}
			if got, _, _ := climb(&f, v); got.reason != r.want.reason || got.failure != r.want.failure {
				t.Errorf("with every rung below it: %+v, want %v", got, r.want.reason)
			}
		})
	}
}

// The budget is asked last: a call that is not to be retried for another reason
// must not take a token, and one that the budget refuses must not wait first.
func TestLadderAsksTheBudgetLast(t *testing.T) {
	for _, tt := range []struct {
		name    string
		method  string
		policy  Policy
		timeout time.Duration
		want    Reason
		refused uint64
	}{
		{"refused", get, Policy{}, time.Hour, ReasonBudgetExhausted, 1},
		{"not retryable", get, Policy{Codes: Codes()}, time.Hour, ReasonNotRetryable, 0},
		{"not idempotent", write, Policy{}, time.Hour, ReasonNotIdempotent, 0},
		{"never retried", get, Policy{MaxAttempts: 1}, time.Hour, ReasonDisabled, 0},
		{"no time left", get, Policy{Backoff: Backoff{Base: time.Minute, Max: time.Minute, Jitter: NoJitter}}, time.Second, ReasonDeadline, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				empty := emptyBudget(t)
				before := empty.state().Refused
				r := newRetrier(t, WithBudget(empty), WithDefaultPolicy(tt.policy))
				srv, _ := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				ctx, cancel := context.WithTimeout(t.Context(), tt.timeout)
				defer cancel()
				start := time.Now()
				var report Report
				err := invokeMethod(t, ctx, srv, r, tt.method, WithReport(&report))
				if status.Code(err) != codes.Unavailable {
					t.Errorf("error %v, want UNAVAILABLE", err)
				}
				if report.Reason != tt.want || report.Made() != 1 {
					t.Errorf("%v after %d attempts, want %v after 1", report.Reason, report.Made(), tt.want)
				}
				if got := empty.state().Refused - before; got != tt.refused {
					t.Errorf("the budget refused %d times, want %d", got, tt.refused)
				}
				if d := time.Since(start); d != 0 {
					t.Errorf("the call took %v, want 0: it had nothing to wait for", d)
				}
			})
		})
	}
}

// invokeMethod makes one unary call of any method over a new ClientConn to srv.
func invokeMethod(t testing.TB, ctx context.Context, srv *testsrv.Server, r *Retrier, method string, opts ...grpc.CallOption) error {
	t.Helper()
	cc, err := srv.Dial(r.DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	return cc.Invoke(ctx, method, &testpb.Request{}, new(testpb.Response), opts...)
}

// emptyBudget returns a budget that refuses every extra attempt, also the free one.
func emptyBudget(t testing.TB) *TokenBudget {
	t.Helper()
	b := mustBudget(t, BudgetConfig{FreeInterval: -1})
	for ok := true; ok; {
		_, ok = b.Reserve(CostTransient)
	}
	return b
}

// modelReason is the ladder once more, told as plainly as can be: for each
// reason whether it applies, in the documented order, without shortcuts.
func modelReason(f *facts, v Verdict, delay time.Duration) Reason {
	inSet := false
	for _, c := range []codes.Code{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16} {
		if c == f.code && strings.Contains(", "+f.policy.Codes.String()+",", ", "+codeName(c)+",") {
			inSet = true
		}
	}
	quotaFits := f.byPeer && f.hint.given || f.byPeer && f.policy.RetryQuota
	retryable := inSet && !(f.code == codes.ResourceExhausted && !quotaFits) && !(f.code == codes.Unauthenticated && f.reauthed)
	applies := []struct {
		reason Reason
		when   bool
	}{
		{ReasonSuccess, f.err == nil},
		{ReasonParentDone, f.parentDone},
		{ReasonClosed, f.closed},
		{ReasonDisabled, f.disabled},
		{ReasonInboundRetry, f.inbound},
		{ReasonCommitted, f.committed},
		{ReasonDeadline, f.timeUp && f.code == codes.DeadlineExceeded},
		{ReasonPushbackStop, f.hint.stop},
		{ReasonPushbackStop, f.hint.delay > f.policy.Backoff.MaxHint},
		{ReasonPermanent, f.permanent},
		{ReasonRetryIfStop, v == VerdictStop},
		{ReasonNotRetryable, v == VerdictDefault && !f.ownTimeout && !retryable},
		{ReasonNotIdempotent, f.evidence != Unsent && f.idempotency != Idempotent && f.idempotency != Keyed},
		{ReasonAttemptsExhausted, f.attempts >= f.policy.MaxAttempts},
		{ReasonDeadline, f.hasDeadline && delay >= f.remaining},
		{ReasonRetry, true},
	}
	for _, a := range applies {
		if a.when {
			return a.reason
		}
	}
	return ReasonNone
}

// modelWait and modelCost tell the rules of the wait and of the price.
func modelWait(f *facts, backoff time.Duration) (time.Duration, DelaySource) {
	if f.hint.given && f.hint.source == DelayPushback {
		return f.hint.delay, DelayPushback
	}
	if f.hint.given && f.hint.delay > 0 {
		return f.hint.delay + backoff, DelayRetryInfo
	}
	if f.code == codes.ResourceExhausted {
		return f.policy.Backoff.Overload + backoff, DelayBackoff
	}
	return backoff, DelayBackoff
}

func modelCost(f *facts) Cost {
	invited := f.hint.given && f.hint.source == DelayPushback
	unsent := f.evidence == Unsent && !f.ready
	prices := map[Cost]bool{
		CostUnsent:    unsent,
		CostInvited:   !unsent && invited,
		CostTimeout:   !unsent && !invited && f.ownTimeout,
		CostOverload:  !unsent && !invited && !f.ownTimeout && f.code == codes.ResourceExhausted,
		CostTransient: !unsent && !invited && !f.ownTimeout && f.code != codes.ResourceExhausted,
	}
	for cost, applies := range prices {
		if applies {
			return cost
		}
	}
	return 0
}

// Facts meet in combinations that no table thinks of; for all of them the ladder
// must say what its documentation says.
func TestLadderAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		usually := func(name string) bool { return rapid.IntRange(0, 9).Draw(t, name) == 0 }
		either := rapid.Bool()
		set := Codes()
		for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
			if either.Draw(t, "in the set") {
				set.mask |= 1 << c
			}
		}
		policy := Policy{
			MaxAttempts: rapid.IntRange(0, 4).Draw(t, "MaxAttempts"), Codes: set, RetryQuota: either.Draw(t, "RetryQuota"),
			Backoff: Backoff{MaxHint: time.Duration(rapid.IntRange(0, 3).Draw(t, "MaxHint")) * time.Second},
		}.withDefaults()
		f := facts{
			outcome: outcome{
				err:        errors.New("failed"),
				code:       codes.Code(rapid.IntRange(1, 20).Draw(t, "code")),
				evidence:   rapid.SampledFrom([]Evidence{Ambiguous, Unsent, Refused, Answered}).Draw(t, "evidence"),
				byPeer:     either.Draw(t, "byPeer"),
				ownTimeout: usually("ownTimeout"),
				permanent:  usually("permanent"),
			},
			policy:      &policy,
			idempotency: rapid.SampledFrom([]Idempotency{Inherit, Idempotent, NotIdempotent, Keyed}).Draw(t, "idempotency"),
			attempts:    rapid.IntRange(1, 4).Draw(t, "attempts"),
			parentDone:  usually("parentDone"),
			timeUp:      usually("timeUp"),
			closed:      usually("closed"),
			disabled:    usually("disabled"),
			inbound:     usually("inbound"),
			committed:   usually("committed"),
			reauthed:    either.Draw(t, "reauthed"),
			ready:       either.Draw(t, "ready"),
			hasDeadline: either.Draw(t, "hasDeadline"),
			remaining:   time.Duration(rapid.IntRange(0, 3000).Draw(t, "remaining")) * time.Millisecond,
		}
		if usually("success") {
			f.err = nil
		}
		switch rapid.IntRange(0, 3).Draw(t, "hint") {
		case 1:
			f.hint = hint{stop: true, source: DelayPushback}
		case 2:
			f.hint = hint{given: true, source: DelayPushback, delay: time.Duration(rapid.IntRange(0, 4000).Draw(t, "pushback")) * time.Millisecond}
		case 3:
			f.hint = hint{given: true, source: DelayRetryInfo, delay: time.Duration(rapid.IntRange(0, 4000).Draw(t, "RetryInfo")) * time.Millisecond}
		}
		verdict := rapid.SampledFrom([]Verdict{VerdictDefault, VerdictRetry, VerdictStop}).Draw(t, "verdict")
		backoff := time.Duration(rapid.IntRange(0, 500).Draw(t, "backoff")) * time.Millisecond

		wait, source := modelWait(&f, backoff)
		want := modelReason(&f, verdict, wait)
		drawn := 0
		got := decide(&f, func() Verdict { return verdict }, func() time.Duration { drawn++; return backoff })
		if got.reason != want {
			t.Fatalf("%+v: reason %v, want %v", f, got.reason, want)
		}
		if got.retry != (want == ReasonRetry) {
			t.Fatalf("%+v: %+v", f, got)
		}
		if got.retry && (got.delay != wait || got.source != source || got.cost != modelCost(&f)) {
			t.Fatalf("%+v: waits %v (%v) at cost %v, want %v (%v) at cost %v",
				f, got.delay, got.source, got.cost, wait, source, modelCost(&f))
		}
		// What is told of a wait that does not come must be true as well.
		timeout := f.timeUp && f.code == codes.DeadlineExceeded
		if want == ReasonDeadline && !timeout && (got.delay != wait || got.source != source) ||
			want == ReasonDeadline && timeout && got.delay != 0 ||
			want == ReasonPushbackStop && (got.delay != f.hint.delay || got.source != f.hint.source) ||
			want != ReasonDeadline && want != ReasonPushbackStop && !got.retry && (got.delay != 0 || got.source != DelayBackoff) {
			t.Fatalf("%+v: tells of a wait of %v (%v)", f, got.delay, got.source)
		}
		if drawn > 1 || got.retry && source != DelayPushback && drawn != 1 {
			t.Fatalf("the backoff was drawn %d times", drawn)
		}
		// What A6 counts: failures that retries are meant for, whatever stops them.
		counts := slices.Contains([]Reason{ReasonPushbackStop, ReasonNotIdempotent, ReasonAttemptsExhausted, ReasonRetry}, want) ||
			want == ReasonDeadline && !(f.timeUp && f.code == codes.DeadlineExceeded)
		if got.failure != counts {
			t.Fatalf("%+v: %v counts as a failure: %v, want %v", f, want, got.failure, counts)
		}
		// Whatever the reason, a write is not repeated unless it was never sent.
		if got.retry && f.evidence != Unsent && (f.idempotency == Inherit || f.idempotency == NotIdempotent) {
			t.Fatalf("%+v: a write is repeated", f)
		}
	})
}

// Each code has its own rule for idempotent methods and for others. A code in
// the wrong column either repeats a write or gives up what a retry would mend.
func TestCodeTable(t *testing.T) {
	all := func() CodeSet {
		s := Codes()
		for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
			s.mask |= 1 << c
		}
		return s
	}()
	reason := func(set CodeSet, o outcome, idem Idempotency) Reason {
		f := ladderFacts()
		o.err = errors.New("failed")
		f.outcome, f.policy.Codes, f.idempotency = o, set, idem
		d, _, _ := climb(&f, VerdictDefault)
		return d.reason
	}
	for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
		t.Run(codeName(c), func(t *testing.T) {
			byDefault, listed := ReasonNotRetryable, ReasonRetry
			if c == codes.Unavailable {
				byDefault = ReasonRetry
			}
			if c == codes.ResourceExhausted {
				listed = ReasonNotRetryable // not without a hint of the peer
			}
			if got := reason(CodeSet{}, outcome{code: c}, Idempotent); got != byDefault {
				t.Errorf("idempotent, default set: %v, want %v", got, byDefault)
			}
			if got := reason(all, outcome{code: c}, Idempotent); got != listed {
				t.Errorf("idempotent, listed: %v, want %v", got, listed)
			}
			want := ReasonNotIdempotent
			if listed == ReasonNotRetryable {
				want = ReasonNotRetryable
			}
			for _, e := range []Evidence{Ambiguous, Refused, Answered} {
				for _, idem := range []Idempotency{Inherit, NotIdempotent} {
					if got := reason(all, outcome{code: c, evidence: e}, idem); got != want {
						t.Errorf("%v, listed, %v: %v, want %v", idem, e, got, want)
					}
				}
			}
		})
	}

	for _, tt := range []struct {
		name string
		set  CodeSet
		o    outcome
		idem Idempotency
		want Reason
	}{
		{"unsent write", CodeSet{}, outcome{code: codes.Unavailable, evidence: Unsent}, NotIdempotent, ReasonRetry},
		{"own timeout, though no code is listed", Codes(), outcome{code: codes.DeadlineExceeded, ownTimeout: true}, Idempotent, ReasonRetry},
		{"own timeout of a write", Codes(), outcome{code: codes.DeadlineExceeded, ownTimeout: true}, Inherit, ReasonNotIdempotent},
		{"own timeout of a write, unsent", Codes(), outcome{code: codes.DeadlineExceeded, ownTimeout: true, evidence: Unsent}, Inherit, ReasonRetry},
		{"the server's DEADLINE_EXCEEDED", CodeSet{}, outcome{code: codes.DeadlineExceeded, byPeer: true}, Idempotent, ReasonNotRetryable},
		{"quota, hinted by pushback", CodeSet{}, outcome{code: codes.ResourceExhausted, byPeer: true, hint: hint{given: true, source: DelayPushback}}, Idempotent, ReasonRetry},
		{"quota, hinted by RetryInfo of 0", CodeSet{}, outcome{code: codes.ResourceExhausted, byPeer: true, hint: hint{given: true, source: DelayRetryInfo}}, Idempotent, ReasonRetry},
		{"quota without a hint", CodeSet{}, outcome{code: codes.ResourceExhausted, byPeer: true}, Idempotent, ReasonNotRetryable},
		{"too large for us, though hinted", CodeSet{}, outcome{code: codes.ResourceExhausted, hint: hint{given: true, source: DelayRetryInfo}}, Idempotent, ReasonNotRetryable},
		{"quota of a write", CodeSet{}, outcome{code: codes.ResourceExhausted, byPeer: true, hint: hint{given: true}}, Inherit, ReasonNotIdempotent},
	} {
		if got := reason(tt.set, tt.o, tt.idem); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}

	// RetryQuota lifts the hint, and not the rule that the peer must have said it.
	f := ladderFacts()
	f.policy.RetryQuota = true
	f.code, f.byPeer = codes.ResourceExhausted, true
	if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonRetry {
		t.Errorf("quota with RetryQuota: %v, want retry", d.reason)
	}
	f.byPeer = false
	if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonNotRetryable {
		t.Errorf("too large with RetryQuota: %v, want not_retryable", d.reason)
	}
	// VerdictRetry lifts that rung, and no other.
	f.policy.Codes, f.policy.RetryQuota, f.idempotency = Codes(), false, Inherit
	if d, _, _ := climb(&f, VerdictRetry); d.reason != ReasonNotIdempotent {
		t.Errorf("VerdictRetry on a write: %v, want not_idempotent", d.reason)
	}
	// Credentials run again once, not for ever.
	f = ladderFacts()
	f.policy.Codes, f.code = Codes(codes.Unauthenticated), codes.Unauthenticated
	if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonRetry {
		t.Errorf("UNAUTHENTICATED, first time: %v, want retry", d.reason)
	}
	f.reauthed = true
	if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonNotRetryable {
		t.Errorf("UNAUTHENTICATED, second time: %v, want not_retryable", d.reason)
	}
}

// The wait decides whether clients that were told the same come back together,
// and whether an overloaded server gets the rest that it needs.
func TestWait(t *testing.T) {
	const ms = time.Millisecond
	pushback := func(d time.Duration) hint { return hint{given: true, source: DelayPushback, delay: d} }
	info := func(d time.Duration) hint { return hint{given: true, source: DelayRetryInfo, delay: d} }
	for _, tt := range []struct {
		name   string
		code   codes.Code
		hint   hint
		want   time.Duration
		source DelaySource
		drawn  int // a pushback leaves the backoff undrawn
	}{
		{"backoff", codes.Unavailable, hint{}, 10 * ms, DelayBackoff, 1},
		{"pushback, exactly", codes.Unavailable, pushback(200 * ms), 200 * ms, DelayPushback, 0},
		{"pushback 0", codes.Unavailable, pushback(0), 0, DelayPushback, 0},
		{"pushback 0 after overload", codes.ResourceExhausted, pushback(0), 0, DelayPushback, 0},
		{"pushback at MaxHint", codes.Unavailable, pushback(time.Minute), time.Minute, DelayPushback, 0},
		{"RetryInfo plus backoff", codes.Unavailable, info(200 * ms), 210 * ms, DelayRetryInfo, 1},
		{"RetryInfo 0", codes.Unavailable, info(0), 10 * ms, DelayBackoff, 1},
		{"RetryInfo after overload", codes.ResourceExhausted, info(200 * ms), 210 * ms, DelayRetryInfo, 1},
		{"RetryInfo 0 after overload", codes.ResourceExhausted, info(0), 1010 * ms, DelayBackoff, 1},
	} {
		f := ladderFacts()
		f.code, f.hint, f.byPeer = tt.code, tt.hint, true
		d, _, drawn := climb(&f, VerdictDefault)
		if !d.retry || d.delay != tt.want || d.source != tt.source || drawn != tt.drawn {
			t.Errorf("%s: %+v with %d draws, want %v from %v with %d", tt.name, d, drawn, tt.want, tt.source, tt.drawn)
		}
		// A wait that is as long as what is left does not fit; a nanosecond more does.
		f.remaining = tt.want
		if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonDeadline {
			t.Errorf("%s, %v left: %v, want deadline", tt.name, f.remaining, d.reason)
		}
		f.remaining++
		if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonRetry {
			t.Errorf("%s, %v left: %v, want retry", tt.name, f.remaining, d.reason)
		}
	}
	for _, h := range []hint{pushback(time.Minute + 1), info(time.Minute + 1), info(math.MaxInt64)} {
		f := ladderFacts()
		f.hint = h
		if d, _, _ := climb(&f, VerdictDefault); d.reason != ReasonPushbackStop || !d.failure {
			t.Errorf("hint of %v: %+v, want pushback_stop", h.delay, d)
		}
	}
	// A MaxHint without limit and a hint without end must not become a wait of nothing.
	f := ladderFacts()
	f.policy.Backoff.MaxHint, f.hint, f.hasDeadline = math.MaxInt64, info(math.MaxInt64), false
	if d, _, _ := climb(&f, VerdictDefault); d.delay != math.MaxInt64 {
		t.Errorf("endless hint: wait %v, want %v", d.delay, time.Duration(math.MaxInt64))
	}
}

// A price too low lets retries through that the servers cannot bear.
func TestCost(t *testing.T) {
	pushback := hint{given: true, source: DelayPushback}
	info := hint{given: true, source: DelayRetryInfo, delay: 1}
	for _, tt := range []struct {
		name string
		o    outcome
		up   bool // the channel is READY
		want Cost
	}{
		{"failure", outcome{code: codes.Unavailable}, true, CostTransient},
		{"refused", outcome{code: codes.Unavailable, evidence: Refused}, true, CostTransient},
		{"told by RetryInfo", outcome{code: codes.Unavailable, hint: info}, true, CostTransient},
		{"invited", outcome{code: codes.Unavailable, hint: pushback}, true, CostInvited},
		{"invited after overload", outcome{code: codes.ResourceExhausted, hint: pushback}, true, CostInvited},
		{"overload", outcome{code: codes.ResourceExhausted, hint: info}, true, CostOverload},
		{"own timeout", outcome{code: codes.DeadlineExceeded, ownTimeout: true}, true, CostTimeout},
		{"the server's timeout", outcome{code: codes.DeadlineExceeded}, true, CostTransient},
		{"unsent", outcome{code: codes.Unavailable, evidence: Unsent}, false, CostUnsent},
		{"own timeout, unsent", outcome{code: codes.DeadlineExceeded, evidence: Unsent, ownTimeout: true}, false, CostUnsent},
		{"unsent on a READY channel: its credentials asked somebody", outcome{code: codes.Unauthenticated, evidence: Unsent}, true, CostTransient},
	} {
		f := facts{outcome: tt.o, ready: tt.up}
		if got := f.cost(); got != tt.want {
			t.Errorf("%s: cost %d, want %d", tt.name, got, tt.want)
		}
	}
}

// failingCredentials are per-RPC credentials that get no token.
type failingCredentials struct{ err error }

func (c failingCredentials) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return nil, c.err
}
func (failingCredentials) RequireTransportSecurity() bool { return false }

var _ credentials.PerRPCCredentials = failingCredentials{}

// Evidence is what the safety of writes rests on, so it is taken from real grpc:
// only what no server can have seen may count as unsent, and a text proves nothing.
func TestEvidence(t *testing.T) {
	const refusedText = "stream terminated by RST_STREAM with error code: REFUSED_STREAM"
	down := func(opts ...grpc.DialOption) []grpc.DialOption {
		return append(opts, grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			return nil, errors.New("connection refused")
		}))
	}
	for _, tt := range []struct {
		name  string
		step  testsrv.Step
		dial  []grpc.DialOption
		opts  []grpc.CallOption
		code  codes.Code
		want  Evidence
		retry bool // of a method that nobody declared idempotent
		runs  int  // of the handler
	}{
		{name: "trailers only", step: testsrv.Step{Code: codes.Unavailable},
			code: codes.Unavailable, want: Answered, runs: 1},
		{name: "trailer of its own after a header", step: testsrv.Step{SendHeaderFirst: true, Code: codes.Unavailable, Trailer: metadata.Pairs("k", "v")},
			code: codes.Unavailable, want: Answered, runs: 1},
		{name: "empty trailer after a header", step: testsrv.Step{SendHeaderFirst: true, Code: codes.Unavailable},
			code: codes.Unavailable, want: Ambiguous, runs: 1},
		{name: "connection cut", step: testsrv.Step{Cut: true},
			code: codes.Unavailable, want: Ambiguous, runs: 1},
		{name: "no connection", dial: down(),
			code: codes.Unavailable, want: Unsent, retry: true},
		{name: "own timeout while waiting for a connection", dial: down(), opts: []grpc.CallOption{grpc.WaitForReady(true)},
			code: codes.DeadlineExceeded, want: Unsent, retry: true},
		{name: "own timeout in the handler", step: testsrv.Step{Block: true},
			code: codes.DeadlineExceeded, want: Ambiguous, runs: 1},
		{name: "credentials without a token", dial: []grpc.DialOption{grpc.WithPerRPCCredentials(failingCredentials{errors.New("no token")})},
			code: codes.Unauthenticated, want: Unsent, retry: true},
		{name: "a call's credentials without a token", opts: []grpc.CallOption{grpc.PerRPCCredentials(failingCredentials{errors.New("no token")})},
			code: codes.Internal, want: Ambiguous},
		{name: "credentials that fail for now", opts: []grpc.CallOption{grpc.PerRPCCredentials(failingCredentials{status.Error(codes.Unavailable, "token service is down")})},
			code: codes.Unavailable, want: Unsent, retry: true},
		{name: "credentials that fail for good", opts: []grpc.CallOption{grpc.PerRPCCredentials(failingCredentials{status.Error(codes.Internal, "no key")})},
			code: codes.Internal, want: Ambiguous},
		{name: "a load balancer's drop", opts: []grpc.CallOption{grpc.PerRPCCredentials(failingCredentials{status.Error(codes.Unavailable, "RPC is dropped")})},
			code: codes.Unavailable, want: Ambiguous},
		{name: "forwarded text of a refusal", step: testsrv.Step{Code: codes.Unavailable, Message: refusedText},
			code: codes.Unavailable, want: Answered, runs: 1},
		{name: "forwarded text of a refusal after a header", step: testsrv.Step{SendHeaderFirst: true, Code: codes.Unavailable, Message: refusedText},
			code: codes.Unavailable, want: Refused, runs: 1},
		{name: "forwarded text of a drain after a header", step: testsrv.Step{SendHeaderFirst: true, Code: codes.Unavailable, Message: "the connection is draining"},
			code: codes.Unavailable, want: Refused, runs: 1},
		{name: "reply too large", step: testsrv.Step{ReplySize: 1000}, opts: []grpc.CallOption{grpc.MaxCallRecvMsgSize(10)},
			code: codes.ResourceExhausted, want: Ambiguous, runs: 1},
		{name: "request too large", opts: []grpc.CallOption{grpc.MaxCallSendMsgSize(1)},
			code: codes.ResourceExhausted, want: Ambiguous},
		{name: "metadata that cannot be sent", opts: []grpc.CallOption{WithIdempotencyKey("\x00")},
			code: codes.Internal, want: Ambiguous},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithDefaultPolicy(Policy{
					MaxAttempts: 2, AttemptTimeout: time.Second, Backoff: Backoff{Jitter: NoJitter},
					Codes: Codes(codes.Unavailable, codes.Unauthenticated, codes.Internal, codes.ResourceExhausted, codes.DeadlineExceeded)}))
				srv, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{tt.step}}, tt.dial...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				var report Report
				_, err := client.Write(ctx, &testpb.Request{Text: "four"}, append(tt.opts, WithReport(&report))...)
				a := report.Attempts[0]
				if a.Code != tt.code || a.Evidence != tt.want {
					t.Errorf("%v, %v; want %v, %v (%v)", codeName(a.Code), a.Evidence, codeName(tt.code), tt.want, a.Err)
				}
				if retried := report.Made() > 1; retried != tt.retry {
					t.Errorf("retried: %v (%v), want %v", retried, report.Reason, tt.retry)
				}
				if err == nil || status.Code(err) != tt.code {
					t.Errorf("the caller got %v, want %v", err, codeName(tt.code))
				}
				if n := srv.Count(write); n != tt.runs {
					t.Errorf("the handler ran %d times, want %d", n, tt.runs)
				}
			})
		})
	}
}

// An interceptor further in may lose our call options. A peer that is missing
// for that reason proves nothing, and must not let a write be repeated.
func TestEvidenceNeedsOurOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t)
		swallow := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, _ ...grpc.CallOption) error {
			return invoker(ctx, method, req, reply, cc)
		}
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{{Cut: true}}}, grpc.WithChainUnaryInterceptor(swallow))
		var report Report
		_, err := client.Write(t.Context(), &testpb.Request{}, WithReport(&report))
		if status.Code(err) != codes.Unavailable || report.Made() != 1 || report.Attempts[0].Evidence != Ambiguous {
			t.Errorf("%v after %d attempts, %v", err, report.Made(), report.Attempts[0].Evidence)
		}
		if n := srv.Count(write); n != 1 {
			t.Errorf("the handler ran %d times, want 1", n)
		}
	})
}

// What classify says of an error decides everything after it.
func TestClassify(t *testing.T) {
	seen := sighting{peer: true, options: true}
	trailersOnly := metadata.Pairs("content-type", "application/grpc")
	withInfo := func(code codes.Code, delays ...time.Duration) error {
		p := &spb.Status{Code: int32(code), Message: "later"}
		for _, d := range delays {
			packed, err := anypb.New(&errdetails.RetryInfo{RetryDelay: durationpb.New(d)})
			if err != nil {
				t.Fatal(err)
			}
			p.Details = append(p.Details, packed)
		}
		return status.ErrorProto(p)
	}
	for _, tt := range []struct {
		name string
		err  error
		s    sighting
		late bool
		want outcome // without err
	}{
		{"success", nil, seen, true, outcome{}},
		{"plain error", errors.New("x"), seen, false, outcome{code: codes.Unknown}},
		{"bare context error", context.DeadlineExceeded, seen, false, outcome{code: codes.DeadlineExceeded}},
		{"bare context error, late", context.DeadlineExceeded, seen, true, outcome{code: codes.DeadlineExceeded, ownTimeout: true}},
		{"wrapped context error", fmt.Errorf("x: %w", context.Canceled), seen, false, outcome{code: codes.Canceled}},
		{"another code, late", status.Error(codes.Canceled, ""), seen, true, outcome{code: codes.Canceled}},
		{"an error that claims OK", okError{}, seen, false, outcome{code: codes.Unknown}},
		{"an error whose status is nil", nilStatusError{}, seen, false, outcome{code: codes.Unknown}},
		{"wrapped", fmt.Errorf("x: %w", status.Error(codes.Aborted, "y")), seen, false, outcome{code: codes.Aborted}},
		{"a code of the future", status.Error(99, "x"), seen, false, outcome{code: 99}},
		{"by the peer", status.Error(codes.ResourceExhausted, "x"), sighting{peer: true, trailer: trailersOnly}, false,
			outcome{code: codes.ResourceExhausted, evidence: Answered, byPeer: true}},
		{"a header alone says nothing of the status", status.Error(codes.ResourceExhausted, "x"), sighting{peer: true, header: true}, false,
			outcome{code: codes.ResourceExhausted, evidence: Answered}},
		{"details come from the peer", withInfo(codes.ResourceExhausted, time.Second), seen, false,
			outcome{code: codes.ResourceExhausted, byPeer: true, hint: hint{given: true, source: DelayRetryInfo, delay: time.Second}}},
		{"the longest RetryInfo", withInfo(codes.Unavailable, time.Second, 3*time.Second, 2*time.Second), seen, false,
			outcome{code: codes.Unavailable, byPeer: true, hint: hint{given: true, source: DelayRetryInfo, delay: 3 * time.Second}}},
		{"pushback before RetryInfo", withInfo(codes.Unavailable, time.Second),
			sighting{peer: true, trailer: metadata.Pairs("grpc-retry-pushback-ms", "7")}, false,
			outcome{code: codes.Unavailable, evidence: Answered, byPeer: true, hint: hint{given: true, source: DelayPushback, delay: 7 * time.Millisecond}}},
		{"a stop before RetryInfo", withInfo(codes.Unavailable, time.Second),
			sighting{peer: true, trailer: metadata.Pairs("grpc-retry-pushback-ms", "-1")}, false,
			outcome{code: codes.Unavailable, evidence: Answered, byPeer: true, hint: hint{stop: true, source: DelayPushback}}},
		{"nothing seen, options proven", status.Error(codes.Unavailable, "x"), sighting{options: true}, false,
			outcome{code: codes.Unavailable, evidence: Unsent}},
		{"nothing seen, options lost", status.Error(codes.Unavailable, "x"), sighting{}, false, outcome{code: codes.Unavailable}},
		{"nothing seen, a code that handlers cause too", status.Error(codes.Internal, "x"), sighting{options: true}, false, outcome{code: codes.Internal}},
		{"nothing seen, a deadline that is not ours", status.Error(codes.DeadlineExceeded, "x"), sighting{options: true}, false, outcome{code: codes.DeadlineExceeded}},
		{"nothing seen, our timeout", status.Error(codes.DeadlineExceeded, "x"), sighting{options: true}, true,
			outcome{code: codes.DeadlineExceeded, evidence: Unsent, ownTimeout: true}},
		{"dropped on purpose", status.Error(codes.Unavailable, "RPC is dropped"), sighting{options: true}, false, outcome{code: codes.Unavailable}},
	} {
		got := classify(tt.err, tt.s, tt.late)
		if got.err != tt.err {
			t.Errorf("%s: err %v, want it as it came", tt.name, got.err)
		}
		got.err = nil
		if got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
	}
}

// Pushback values from real servers, odd ones included: what asks for no retry
// must not become a retry at once.
func TestPushback(t *testing.T) {
	const ms = time.Millisecond
	stop := hint{stop: true, source: DelayPushback}
	after := func(d time.Duration) hint { return hint{given: true, source: DelayPushback, delay: d} }
	for _, tt := range []struct {
		values []string
		want   hint
	}{
		{nil, hint{}},
		{[]string{"0"}, after(0)},
		{[]string{"1"}, after(ms)},
		{[]string{"007"}, after(7 * ms)},
		{[]string{"+5"}, after(5 * ms)},
		{[]string{"2147483647"}, after(math.MaxInt32 * ms)},
		{[]string{"2147483648"}, stop},
		{[]string{"99999999999"}, stop},
		{[]string{"99999999999999999999999999"}, stop},
		{[]string{"-0"}, after(0)},
		{[]string{"-1"}, stop},
		{[]string{"-2147483649"}, stop},
		{[]string{""}, stop},
		{[]string{" 1"}, stop},
		{[]string{"abc"}, stop},
		{[]string{"1.5"}, stop},
		{[]string{"1e3"}, stop},
		{[]string{"0x10"}, stop},
		{[]string{"1_000"}, stop},
		{[]string{"١"}, stop},
		{[]string{"1", "2"}, stop},
		{[]string{"1", "1"}, stop},
	} {
		if got := pushback(metadata.MD{"grpc-retry-pushback-ms": tt.values}); got != tt.want {
			t.Errorf("%q: %+v, want %+v", tt.values, got, tt.want)
		}
	}
}

// The same values on the wire, with the attempts that they lead to.
func TestPushbackOnTheWire(t *testing.T) {
	for _, tt := range []struct {
		values   []string
		attempts int
		elapsed  time.Duration
		reason   Reason
	}{
		{[]string{"-1"}, 1, 0, ReasonPushbackStop},
		{[]string{"abc"}, 1, 0, ReasonPushbackStop},
		{[]string{"1", "2"}, 1, 0, ReasonPushbackStop},
		{[]string{"99999999999"}, 1, 0, ReasonPushbackStop},
		{[]string{"60001"}, 1, 0, ReasonPushbackStop},
		{[]string{"0"}, 2, 0, ReasonAttemptsExhausted},
		{[]string{"1234"}, 2, 1234 * time.Millisecond, ReasonAttemptsExhausted},
		{[]string{"60000"}, 2, time.Minute, ReasonAttemptsExhausted},
	} {
		t.Run(strings.Join(tt.values, ","), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 2}))
				_, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{
					{Code: codes.Unavailable, Trailer: metadata.MD{"grpc-retry-pushback-ms": tt.values}}}})
				start := time.Now()
				var report Report
				_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
				if report.Made() != tt.attempts || report.Reason != tt.reason || time.Since(start) != tt.elapsed {
					t.Errorf("%d attempts in %v, %v; want %d in %v, %v (%v)",
						report.Made(), time.Since(start), report.Reason, tt.attempts, tt.elapsed, tt.reason, err)
				}
			})
		})
	}
}

// RetryInfo from real servers. A detail of an unknown type beside it, a negative
// or an absurd delay must neither hide it nor turn into a storm.
func TestRetryInfoOnTheWire(t *testing.T) {
	info := func(d time.Duration) proto.Message { return &errdetails.RetryInfo{RetryDelay: durationpb.New(d)} }
	text, err := structpb.NewValue("not an answer")
	if err != nil {
		t.Fatal(err)
	}
	const backoff = 50 * time.Millisecond
	for _, tt := range []struct {
		name     string
		code     codes.Code
		details  []proto.Message
		attempts int
		elapsed  time.Duration
		source   DelaySource
		reason   Reason
	}{
		{"200 ms", codes.Unavailable, []proto.Message{info(200 * time.Millisecond)}, 2, 200*time.Millisecond + backoff, DelayRetryInfo, ReasonAttemptsExhausted},
		{"beside another", codes.Unavailable, []proto.Message{text, info(time.Second)}, 2, time.Second + backoff, DelayRetryInfo, ReasonAttemptsExhausted},
		{"negative", codes.Unavailable, []proto.Message{info(-time.Hour)}, 2, backoff, DelayBackoff, ReasonAttemptsExhausted},
		{"without a delay", codes.Unavailable, []proto.Message{&errdetails.RetryInfo{}}, 2, backoff, DelayBackoff, ReasonAttemptsExhausted},
		{"of ten thousand years", codes.Unavailable, []proto.Message{&errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: 315_576_000_000}}}, 1, 0, DelayRetryInfo, ReasonPushbackStop},
		{"invalid nanos", codes.Unavailable, []proto.Message{&errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: 1, Nanos: -1}}}, 2, time.Second - 1 + backoff, DelayRetryInfo, ReasonAttemptsExhausted},
		{"of 0 after overload", codes.ResourceExhausted, []proto.Message{info(0)}, 2, time.Second + backoff, DelayBackoff, ReasonAttemptsExhausted},
		{"quota without any", codes.ResourceExhausted, nil, 1, 0, DelayBackoff, ReasonNotRetryable},
		{"quota with another detail", codes.ResourceExhausted, []proto.Message{text}, 1, 0, DelayBackoff, ReasonNotRetryable},
		{"on a code that is not retried", codes.InvalidArgument, []proto.Message{info(0)}, 1, 0, DelayBackoff, ReasonNotRetryable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 2, Backoff: Backoff{Jitter: NoJitter}}))
				_, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{{Code: tt.code, Message: "m", Details: tt.details}}})
				start := time.Now()
				var report Report
				_, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
				if report.Made() != tt.attempts || report.Reason != tt.reason || time.Since(start) != tt.elapsed {
					t.Errorf("%d attempts in %v, %v; want %d in %v, %v (%v)",
						report.Made(), time.Since(start), report.Reason, tt.attempts, tt.elapsed, tt.reason, err)
				}
				if got := report.Attempts[0].DelaySource; got != tt.source {
					t.Errorf("the wait came from %v, want %v", got, tt.source)
				}
				if st := status.Convert(err); st.Message() != "m" || len(st.Details()) != len(tt.details) {
					t.Errorf("the caller got message %q with %d details, want those of the server", st.Message(), len(st.Details()))
				}
			})
		})
	}
}

// Whatever a server puts into the trailer, reading it must not panic, wait for
// a negative time, or take several values for an invitation.
func FuzzPushback(f *testing.F) {
	for _, v := range []string{"", "0", "10", "-1", "+7", "abc", "99999999999", "2147483648", "1\x00", "\xff", "1 "} {
		f.Add(v, "", 1)
		f.Add(v, v, 2)
	}
	f.Fuzz(func(t *testing.T, first, second string, n int) {
		values := []string{first, second}[:min(max(n, 0), 2)]
		trailer := metadata.MD{"grpc-retry-pushback-ms": values}
		got := pushback(trailer)
		switch {
		case len(values) == 0:
			if got != (hint{}) {
				t.Fatalf("no value: %+v", got)
			}
			return
		case got.source != DelayPushback || got.stop == got.given:
			t.Fatalf("%q: %+v, want either a stop or a delay", values, got)
		case got.stop && got.delay != 0:
			t.Fatalf("%q: %+v, a stop with a delay", values, got)
		case len(values) == 2 && got.given:
			t.Fatalf("%q: %+v, two values are no invitation", values, got)
		case got.given:
			// The reverse: only a number from 0 to the largest int32 gives this delay.
			ms := int64(got.delay / time.Millisecond)
			if got.delay < 0 || ms > math.MaxInt32 {
				t.Fatalf("%q: %v", values, got.delay)
			}
			digits := strings.TrimLeft(strings.TrimLeft(first, "+-"), "0")
			if digits == "" {
				digits = "0"
			}
			if digits != strconv.FormatInt(ms, 10) {
				t.Fatalf("%q: %v", values, got.delay)
			}
		}
		o := classify(status.Error(codes.Unavailable, "x"), sighting{peer: true, options: true, trailer: trailer}, false)
		if o.hint != got || o.evidence != Answered {
			t.Fatalf("%q: classify makes %+v of it", values, o)
		}
	})
}

// A status is bytes from the network: details that are malformed, of unknown
// types or absurd must not panic, and only a RetryInfo that decodes is a hint.
func FuzzRetryInfo(f *testing.F) {
	const url = "type.googleapis.com/google.rpc.RetryInfo"
	packed := func(d *durationpb.Duration) []byte {
		b, err := proto.Marshal(&errdetails.RetryInfo{RetryDelay: d})
		if err != nil {
			f.Fatal(err)
		}
		return b
	}
	for _, d := range []*durationpb.Duration{nil, {}, {Seconds: 1}, {Seconds: -1}, {Seconds: math.MaxInt64}, {Seconds: math.MinInt64, Nanos: math.MinInt32}, {Nanos: math.MaxInt32}} {
		f.Add(uint32(codes.ResourceExhausted), url, packed(d))
	}
	f.Add(uint32(codes.Unavailable), "google.rpc.RetryInfo", packed(nil))
	f.Add(uint32(codes.Unavailable), url, []byte{0xff})
	f.Add(uint32(codes.Unavailable), url, bytes.Repeat([]byte{0x0a}, 100))
	f.Add(uint32(codes.Unavailable), "type.googleapis.com/of.Nothing", []byte("x"))
	f.Add(uint32(codes.Unavailable), "", []byte(nil))
	f.Add(uint32(99), "///", []byte("x"))
	f.Fuzz(func(t *testing.T, code uint32, typeURL string, value []byte) {
		if code == 0 {
			return // no error at all
		}
		err := status.ErrorProto(&spb.Status{Code: int32(code), Details: []*anypb.Any{{TypeUrl: typeURL, Value: value}}})
		o := classify(err, sighting{peer: true, options: true}, false)
		if o.code != codes.Code(code) || !o.byPeer || o.hint.stop || o.hint.delay < 0 || !o.hint.given && o.hint != (hint{}) {
			t.Fatalf("%+v", o)
		}
		var info errdetails.RetryInfo
		is := typeURL[strings.LastIndex(typeURL, "/")+1:] == "google.rpc.RetryInfo" && proto.Unmarshal(value, &info) == nil
		if o.hint.given != is {
			t.Fatalf("%q %x is a hint: %v, want %v", typeURL, value, o.hint.given, is)
		}
		if is && o.hint.delay != max(0, info.GetRetryDelay().AsDuration()) {
			t.Fatalf("delay %v, want %v", o.hint.delay, info.GetRetryDelay().AsDuration())
		}
		p := Policy{RetryQuota: true}.withDefaults()
		fs := facts{outcome: o, policy: &p, idempotency: Idempotent, attempts: 1}
		if d, _, _ := climb(&fs, VerdictDefault); d.retry && (d.delay < 0 || d.delay > time.Minute+time.Second+10*time.Millisecond) {
			t.Fatalf("%+v waits %v", o, d.delay)
		}
	})
}

// A set of codes that silently loses or gains one changes what is retried.
func TestCodeSet(t *testing.T) {
	for _, tt := range []struct {
		name  string
		set   CodeSet
		has   []codes.Code
		text  string
		fault string
	}{
		{"zero: the default set", CodeSet{}, []codes.Code{codes.ResourceExhausted, codes.Unavailable}, "RESOURCE_EXHAUSTED, UNAVAILABLE", ""},
		{"explicitly nothing", Codes(), nil, "none", ""},
		{"one", Codes(codes.Aborted), []codes.Code{codes.Aborted}, "ABORTED", ""},
		{"the last", Codes(codes.Unauthenticated), []codes.Code{codes.Unauthenticated}, "UNAUTHENTICATED", ""},
		{"in the order of numbers, once", Codes(codes.Unavailable, codes.Canceled, codes.Unavailable), []codes.Code{codes.Canceled, codes.Unavailable}, "CANCELLED, UNAVAILABLE", ""},
		{"OK", Codes(codes.OK), nil, "none", "grpcretry: F holds the code 0, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)"},
		{"one past the end", Codes(17), nil, "none", "grpcretry: F holds the code 17, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)"},
		{"as many as the mask has bits", Codes(31, 32), nil, "none", "grpcretry: F holds the code 31, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)"},
		{"the largest number", Codes(math.MaxUint32), nil, "none", "grpcretry: F holds the code 4294967295, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)"},
		{"good and bad", Codes(codes.Aborted, 40, codes.OK), []codes.Code{codes.Aborted}, "ABORTED", "grpcretry: F holds the code 40, want codes from 1 (CANCELLED) to 16 (UNAUTHENTICATED)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, c := range append(slices.Collect(codesUpTo(40)), math.MaxUint32) {
				if got, want := tt.set.Has(c), slices.Contains(tt.has, c); got != want {
					t.Errorf("Has(%d) = %v, want %v", c, got, want)
				}
			}
			if got := tt.set.String(); got != tt.text {
				t.Errorf("String() = %q, want %q", got, tt.text)
			}
			var f faults
			tt.set.validate("F", &f)
			if got := errText(f.err()); got != tt.fault {
				t.Errorf("validate: %q, want %q", got, tt.fault)
			}
		})
	}
	if Codes(codes.Aborted, codes.Canceled) != Codes(codes.Canceled, codes.Aborted) {
		t.Error("equal sets compare as different")
	}
	if Codes() == (CodeSet{}) {
		t.Error("Codes() equals the zero value, so nothing to retry would mean the default set")
	}
}

func codesUpTo(n codes.Code) func(func(codes.Code) bool) {
	return func(yield func(codes.Code) bool) {
		for c := range n {
			if !yield(c) {
				return
			}
		}
	}
}

// errText is the text of err, or nothing.
func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// Names go into traces, metrics and dashboards: a changed word breaks them.
func TestNames(t *testing.T) {
	for _, tt := range []struct {
		values []fmt.Stringer
		want   string
	}{
		{[]fmt.Stringer{ReasonNone, ReasonSuccess, ReasonHedgeLost, ReasonParentDone, ReasonClosed, ReasonDisabled, ReasonInboundRetry, ReasonCommitted,
			ReasonPushbackStop, ReasonPermanent, ReasonRetryIfStop, ReasonNotRetryable, ReasonNotIdempotent, ReasonAttemptsExhausted,
			ReasonDeadline, ReasonBudgetExhausted, ReasonRetry, ReasonResume, Reason(200)},
			"none success hedge_lost parent_done closed disabled inbound_retry committed pushback_stop permanent retry_if_stop not_retryable " +
				"not_idempotent attempts_exhausted deadline budget_exhausted retry resume Reason(200)"},
		{[]fmt.Stringer{Ambiguous, Unsent, Refused, Answered, Evidence(9)}, "ambiguous unsent refused answered Evidence(9)"},
		{[]fmt.Stringer{DelayBackoff, DelayPushback, DelayRetryInfo, DelaySource(9)}, "backoff pushback retry_info DelaySource(9)"},
		{[]fmt.Stringer{Inherit, Idempotent, NotIdempotent, Keyed, Idempotency(9)}, "unknown idempotent not_idempotent keyed Idempotency(9)"},
		{[]fmt.Stringer{SourceDefault, SourceCall, SourceMethod, SourceService, SourceServiceConfig, SourceResolver, SourceProto, Source(9)},
			"default call method service service_config resolver proto Source(9)"},
	} {
		var words []string
		for _, v := range tt.values {
			words = append(words, v.String())
		}
		if got := strings.Join(words, " "); got != tt.want {
			t.Errorf("%q\nwant %q", got, tt.want)
		}
	}
	if got := codeName(codes.Canceled) + " " + codeName(16) + " " + codeName(17); got != "CANCELLED UNAUTHENTICATED CODE(17)" {
		t.Errorf("code names %q", got)
	}
}

// okError and nilStatusError are errors whose authors got GRPCStatus wrong.
type (
	okError        struct{}
	nilStatusError struct{}
)

func (okError) Error() string                     { return "claims OK" }
func (okError) GRPCStatus() *status.Status        { return status.New(codes.OK, "") }
func (nilStatusError) Error() string              { return "has no status" }
func (nilStatusError) GRPCStatus() *status.Status { return nil }
