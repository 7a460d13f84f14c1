package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Defaults of a [Policy]'s zero fields.
const (
	// DefaultMaxAttempts is what MaxAttempts = 0 means: the first attempt and at most two retries.
	DefaultMaxAttempts = 3
	// DefaultReplayBytes is what ReplayBytes = 0 means: 256 KiB.
	DefaultReplayBytes = 256 << 10
)

// Policy says how the calls of a method are retried. The zero value of every
// field is a useful default, so Policy{} is the default policy. A Policy is
// copied when it is installed; changing the original afterwards has no effect.
type Policy struct {
	// MaxAttempts is the largest number of attempts of one call, the first
	// included, as gRFC A6 counts in its section "Maximum Number of Retries".
	// 0 means [DefaultMaxAttempts], 1 never retries, less is refused; there is
	// no upper bound. With wait-for-ready, attempts that never left the client
	// do not count. With Hedge only 1, which switches that off, means anything.
	MaxAttempts int

	// Timeout bounds the whole call, waits included, from the moment it is
	// made. It only ever shortens the caller's own deadline. 0 means none; a
	// negative value is refused, as for all four timeouts.
	Timeout time.Duration

	// AttemptTimeout bounds each attempt of a unary call, and of a
	// client-streaming call from its half-close. It is cut to what is left of
	// the call's deadline; an attempt that it ends may be retried whatever
	// Codes says. 0 means none.
	AttemptTimeout time.Duration

	// FirstResponseTimeout is, for streams, how long one attempt may keep the
	// caller waiting in RecvMsg or Header before anything arrived. 0 means no
	// limit.
	FirstResponseTimeout time.Duration

	// IdleTimeout is, for streams, the longest silence of the server while the
	// caller waits in RecvMsg or Header. Until the first response arrived
	// FirstResponseTimeout takes its place, where that is set. 0 means no limit.
	IdleTimeout time.Duration

	// Backoff gives the wait before each retry when the server gives no hint.
	Backoff Backoff

	// Codes are the status codes that may be retried. The zero value is the
	// default set: UNAVAILABLE, and RESOURCE_EXHAUSTED where the server itself
	// sent it with a hint when to come back.
	Codes CodeSet

	// RetryIf, if not nil, is asked about every failed attempt that may still
	// be followed by another. [VerdictRetry] makes a code retryable that
	// is not in Codes, and lifts no other rule; [VerdictStop] ends the call.
	// It runs on the caller's goroutine, possibly for many calls at once.
	RetryIf func(Attempt) Verdict

	// Idempotency says whether the method may be repeated after an attempt
	// that may have reached the server. The zero value, [Inherit], takes it from
	// the next less specific place, down to the .proto.
	Idempotency Idempotency

	// Hedge, if its MaxAttempts is more than 1, replaces retries by attempts
	// that overlap.
	Hedge Hedge

	// ReplayBytes is how much of what a stream's caller sent is kept so that
	// it can be sent again, in bytes of encoded messages; of very small ones at
	// most as many as fill it with 32 bytes each, or 1024. 0 means
	// [DefaultReplayBytes]; when it is exceeded the stream is committed.
	ReplayBytes int

	// RetryQuota makes RESOURCE_EXHAUSTED retryable, where the server itself
	// sent it, also without pushback or RetryInfo.
	RetryQuota bool
}

// Hedge describes attempts that overlap: another one starts while earlier ones
// still run, and the first good answer wins. See gRFC A6, section "Hedging
// Policy". The zero value does not hedge.
//
// Unary calls are hedged, and server streams until their first message, where
// the method is known to be idempotent. All other calls of the policy, work that
// [Retrier.Do] runs among them, make their attempts one after the other, within
// the same MaxAttempts and for the same codes, with the policy's Backoff between
// them.
//
// Each attempt has a context, call options and a reply of its own. The winner's
// reply becomes the caller's; the others are cancelled, and the call returns
// when they have returned. So an interceptor further in that does not heed its
// context holds the call up. Where the reply is none of protobuf's, and holds a
// pointer, map or slice when the call is made, no other like it can be made, and
// the call is not hedged.
//
// Calls that were answered before a hedge was due pay for hedges, and one that
// wins is refunded; see [BudgetConfig]. When a service becomes slow altogether a
// fixed Delay leaves no such calls, and hedges stop by themselves. A Quantile
// follows the slow service, and then hedges its tail as before.
type Hedge struct {
	// MaxAttempts is the largest number of attempts of one call, the first
	// included; 0 and 1 do not hedge.
	MaxAttempts int
	// Delay is how long after an attempt began the next one starts; for a
	// server stream it begins with the caller's first RecvMsg or Header. 0 is only
	// accepted together with AtOnce or Quantile. Together with Quantile it is the
	// least that this can come to.
	Delay time.Duration
	// Quantile, in (0, 1), starts the next attempt once the latest one has
	// taken longer than this share of the method's recent calls did. So of the
	// calls 1-Quantile are hedged, as long as the method is as fast as it was. It
	// is never less than 1 ms, or Delay if that is given. There are no such
	// hedges before the method was called 100 times, or 10/(1-Quantile) times if
	// that is more. What it remembers takes 1.1 KiB for each method that has a
	// Quantile; there is none for methods beyond the 1024 that a Retrier keeps.
	// 0 means Delay.
	Quantile float64
	// AtOnce starts all attempts together; it is how Delay 0 is asked for. No
	// call is then answered before its hedges are due, and such calls are what
	// pays for hedges: with the default budget only the first few are hedged. For
	// a service that can bear the multiple of its load [WithBudget] takes a budget
	// with a small HedgeCost, or [Unlimited], which takes the bound from retries too.
	AtOnce bool
	// NonFatal are the codes after which the other attempts go on and the next
	// one starts at once, or when the server's hint says; any other failure ends
	// the call. They take the place of the policy's Codes, for attempts that come
	// one after the other too. The zero value is these Codes.
	NonFatal CodeSet
}

// String describes when hedges are made, for logs and people; the text may change.
func (h Hedge) String() string {
	switch {
	case h.MaxAttempts < 2:
		return "no hedges"
	case h.Quantile > 0 && h.Delay > 0:
		return fmt.Sprintf("another one when the latest has taken longer than %.6g%% of the method's recent calls, but no less than %v", 100*h.Quantile, h.Delay)
	case h.Quantile > 0:
		return fmt.Sprintf("another one when the latest has taken longer than %.6g%% of the method's recent calls", 100*h.Quantile)
	case h.AtOnce:
		return "all at once"
	}
	return fmt.Sprintf("another one %v after the latest began", h.Delay)
}

// Idempotency says whether repeating a call that may already have been
// processed is harmless.
type Idempotency uint8

// The values of [Idempotency].
const (
	// Inherit takes the answer from the next less specific place: service,
	// default, service config, .proto. It is the zero value.
	Inherit Idempotency = iota
	// Idempotent methods may be repeated.
	Idempotent
	// NotIdempotent methods are repeated only after an attempt that provably
	// never reached the server.
	NotIdempotent
	// Keyed methods may be repeated because the server removes duplicates by
	// the idempotency key, which is the same in every attempt of a call; a
	// random one is generated if the caller gave none.
	Keyed
)

// String gives the word that traces print: inherit prints as "unknown".
func (i Idempotency) String() string {
	switch i {
	case Inherit:
		return "unknown"
	case Idempotent:
		return "idempotent"
	case NotIdempotent:
		return "not_idempotent"
	case Keyed:
		return "keyed"
	}
	return fmt.Sprintf("Idempotency(%d)", uint8(i))
}

// repeatable reports whether a call may be repeated though it may have been processed.
func (i Idempotency) repeatable() bool { return i == Idempotent || i == Keyed }

// Verdict is what a [Policy.RetryIf] answers.
type Verdict uint8

// The values of [Verdict].
const (
	// VerdictDefault leaves the decision to the policy's Codes. It is the zero value.
	VerdictDefault Verdict = iota
	// VerdictRetry treats the attempt's code as one of the policy's Codes.
	VerdictRetry
	// VerdictStop ends the call with this attempt.
	VerdictStop
)

// builtinPolicy is what holds where nobody gave a policy. It is never changed.
var builtinPolicy = func() *Policy {
	p := Policy{}.withDefaults()
	return &p
}()

// withDefaults returns p with every zero field replaced by what it stands for.
func (p Policy) withDefaults() Policy {
	if p.MaxAttempts == 0 {
		p.MaxAttempts = DefaultMaxAttempts
	}
	if p.ReplayBytes == 0 {
		p.ReplayBytes = DefaultReplayBytes
	}
	p.Backoff = p.Backoff.withDefaults()
	p.Codes = p.Codes.orDefault()
	return p
}

// hedges reports whether attempts may overlap.
func (p *Policy) hedges() bool { return p.Hedge.MaxAttempts > 1 && p.MaxAttempts != 1 }

// most is the largest number of attempts.
func (p *Policy) most() int {
	if p.hedges() {
		return p.Hedge.MaxAttempts
	}
	return p.MaxAttempts
}

// repeated are the codes after which there may be another attempt.
func (p *Policy) repeated() CodeSet {
	if p.hedges() && p.Hedge.NonFatal != (CodeSet{}) {
		return p.Hedge.NonFatal
	}
	return p.Codes
}

// validate adds every fault of p, each naming its field, the value and what is accepted.
func (p Policy) validate(f *faults) {
	if p.MaxAttempts < 0 {
		f.add("Policy.MaxAttempts = %d, want 0 (default %d) or more", p.MaxAttempts, DefaultMaxAttempts)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"Timeout", p.Timeout},
		{"AttemptTimeout", p.AttemptTimeout},
		{"FirstResponseTimeout", p.FirstResponseTimeout},
		{"IdleTimeout", p.IdleTimeout},
	} {
		if d.value < 0 {
			f.add("Policy.%s = %v, want 0 (none) or more", d.name, d.value)
		}
	}
	if p.ReplayBytes < 0 {
		f.add("Policy.ReplayBytes = %d, want 0 (default %d) or more", p.ReplayBytes, DefaultReplayBytes)
	}
	if p.Idempotency > Keyed {
		f.add("Policy.Idempotency = %d, want Inherit, Idempotent, NotIdempotent or Keyed", uint8(p.Idempotency))
	}
	p.Codes.validate("Policy.Codes", f)
	p.Backoff.validate(f)
	p.Hedge.validate(p.Idempotency, f)
}

// validate adds every fault of h. idem is what the policy itself says of the
// method: hedging a method that is known not to be idempotent is refused here,
// where it can be known.
func (h Hedge) validate(idem Idempotency, f *faults) {
	if h.MaxAttempts < 0 {
		f.add("Policy.Hedge.MaxAttempts = %d, want 0 (no hedging) or more", h.MaxAttempts)
	}
	if h.Delay < 0 {
		f.add("Policy.Hedge.Delay = %v, want 0 or more", h.Delay)
	}
	if math.IsNaN(h.Quantile) || h.Quantile < 0 || h.Quantile >= 1 {
		f.add("Policy.Hedge.Quantile = %v, want 0 (off) or a share in (0, 1)", h.Quantile)
	}
	if h.MaxAttempts > 1 && h.Delay == 0 && h.Quantile == 0 && !h.AtOnce {
		f.add("Policy.Hedge.Delay = 0 without AtOnce or Quantile, want a delay > 0, or AtOnce: true to send all attempts together")
	}
	if h.AtOnce && (h.Delay > 0 || h.Quantile > 0) {
		f.add("Policy.Hedge.AtOnce = true together with Delay or Quantile, want one of them")
	}
	if h.MaxAttempts > 1 && idem == NotIdempotent {
		f.add("Policy.Hedge.MaxAttempts = %d with Idempotency NotIdempotent, want a method that may run twice at once", h.MaxAttempts)
	}
	h.NonFatal.validate("Policy.Hedge.NonFatal", f)
}

// faults collects what is wrong with a configuration, so that all of it can be
// told at once.
type faults struct {
	where string // the option under inspection, as a prefix
	list  []error
}

func (f *faults) add(format string, args ...any) {
	f.list = append(f.list, errors.New("grpcretry: "+f.where+fmt.Sprintf(format, args...)))
}

// err is nil when nothing was added.
func (f *faults) err() error { return errors.Join(f.list...) }
