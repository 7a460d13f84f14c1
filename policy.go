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
	// do not count.
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

	// Hedge, if its MaxAttempts is more than 1, replaces retries by overlapping
	// attempts. These are not made yet: such a policy makes a single attempt.
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

// Hedge describes overlapping attempts: another attempt starts while earlier
// ones are still running, and the first good answer wins. The zero value does
// not hedge.
type Hedge struct {
	// MaxAttempts is the largest number of attempts of one call, the first
	// included; 0 and 1 do not hedge.
	MaxAttempts int
	// Delay is how long after an attempt began the next one starts. 0 is only
	// accepted together with AtOnce or Quantile.
	Delay time.Duration
	// Quantile, in (0, 1), starts the next attempt once the running one has
	// taken longer than this share of the method's recent calls. 0 means Delay.
	Quantile float64
	// AtOnce starts all attempts together; it is how Delay 0 is asked for.
	AtOnce bool
	// NonFatal are the codes after which the other attempts go on and the next
	// hedge starts at once. The zero value is the policy's Codes.
	NonFatal CodeSet
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

// single reports whether every call makes a single attempt. That holds also for
// a policy that hedges: there are no hedges yet, and retries, which it does not
// ask for, are no substitute.
func (p *Policy) single() bool { return p.MaxAttempts == 1 || p.Hedge.MaxAttempts > 1 }

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
