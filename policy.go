package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
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
	// included. 0 means [DefaultMaxAttempts], 1 never retries; there is no
	// upper bound. With wait-for-ready, attempts that never left the client do
	// not count.
	MaxAttempts int

	// Timeout bounds the whole call, waits included, from the moment it is
	// made. It only ever shortens the caller's own deadline. 0 means none.
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
	// caller waits in RecvMsg. 0 means no limit.
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

	// Hedge, if its MaxAttempts is not 0, replaces retries by overlapping attempts.
	Hedge Hedge

	// ReplayBytes is how much of what a stream's caller sent is kept so that
	// it can be sent again, in bytes of encoded messages. 0 means
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

// Effective is the answer of [Retrier.Explain].
type Effective struct {
	// Method is the full method.
	Method string
	// Policy is what is in force, defaults filled in and Idempotency resolved.
	Policy Policy
	// PolicySource says where the policy comes from, all of it but its
	// Idempotency; SourceDefault also where nobody gave one.
	PolicySource Source
	// IdempotencySource says where Policy.Idempotency comes from; it means
	// nothing while that is Inherit, which is how "unknown" looks.
	IdempotencySource Source
	// Resolver tells that a retryPolicy for the method in the service config
	// of a ClientConn takes the place of Policy for calls on that ClientConn.
	Resolver bool
}

// Explain tells which policy is in force for a full method, "/pkg.Service/Method",
// where it comes from, and whether the method counts as idempotent and why. It
// cannot know call options, nor the service config of a ClientConn; print the
// answer with its String.
func (r *Retrier) Explain(fullMethod string) Effective {
	m := r.set.Load().lookup(fullMethod)
	e := Effective{
		Method: m.name, Policy: *m.policy, PolicySource: m.source,
		IdempotencySource: m.idemSource, Resolver: m.resolver,
	}
	e.Policy.Idempotency = m.idempotency
	return e
}

// String is the whole answer in some lines of text.
func (e Effective) String() string {
	var b strings.Builder
	p := e.Policy
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-15s%s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(&b, "%s\n", e.Method)
	from := "from " + e.PolicySource.String()
	if e.Resolver {
		from += ", unless the ClientConn's service config has a retryPolicy for the method"
	}
	line("policy", "%s", from)
	if p.MaxAttempts == 1 {
		line("attempts", "1: never retried")
	} else {
		line("attempts", "at most %d", p.MaxAttempts)
	}
	line("codes", "%v", p.Codes)
	if p.Codes.Has(codes.ResourceExhausted) && !p.RetryQuota {
		line("", "RESOURCE_EXHAUSTED only with the server's hint when to come back")
	}
	if p.RetryIf != nil {
		line("", "RetryIf may decide otherwise")
	}
	line("backoff", "%v", p.Backoff)
	label := "timeout"
	for _, t := range []struct {
		limit time.Duration
		what  string
	}{
		{p.Timeout, "for the whole call"},
		{p.AttemptTimeout, "for an attempt"},
		{p.FirstResponseTimeout, "for the first response of a stream"},
		{p.IdleTimeout, "between the responses of a stream"},
	} {
		if t.limit > 0 {
			line(label, "%v %s", t.limit, t.what)
			label = ""
		}
	}
	switch p.Idempotency {
	case Inherit:
		line("idempotency", "unknown: only attempts that never reached a server are repeated; to change that,")
		line("", "declare idempotency_level in the .proto or use WithIdempotent(%q)", strings.TrimPrefix(e.Method, "/"))
	case NotIdempotent:
		line("idempotency", "not idempotent (from %v): only attempts that never reached a server are repeated", e.IdempotencySource)
	default:
		line("idempotency", "%v (from %v)", p.Idempotency, e.IdempotencySource)
	}
	return b.String()
}
