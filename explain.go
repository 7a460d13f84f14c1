package grpcretry

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

// Effective is the answer of [Retrier.Explain].
type Effective struct {
	// Method is the full method.
	Method string
	// Policy is what is in force, defaults filled in and Idempotency resolved.
	Policy Policy
	// PolicySource says where the policy comes from, all of it but its
	// Timeout and its Idempotency; SourceDefault also where nobody gave one.
	// PolicyPlace says it more exactly: an option with its pattern, the entry of a
	// service config with its line, the file of a .proto; it may be empty.
	PolicySource Source
	PolicyPlace  string
	// TimeoutSource says where Policy.Timeout comes from. It differs from
	// PolicySource where a service config has a timeout and leaves the rest to
	// somebody else.
	TimeoutSource Source
	// IdempotencySource says where Policy.Idempotency comes from, and
	// IdempotencyPlace more exactly; both mean nothing while that is Inherit,
	// which is how "unknown" looks.
	IdempotencySource Source
	IdempotencyPlace  string
	// Resolver tells that a retryPolicy for the method in the service config
	// of a ClientConn takes the place of Policy for calls on that ClientConn.
	// ResolverPolicy is the one that was last seen there; nil: none yet.
	Resolver       bool
	ResolverPolicy *Policy
	// WaitForReady, MaxRequestBytes and MaxResponseBytes are what the service
	// config given in code adds to a call; nil and 0 where it says nothing.
	// ConfigPlace is its entry for the method.
	WaitForReady                      *bool
	MaxRequestBytes, MaxResponseBytes int64
	ConfigPlace                       string
	// ConfigAttempts is the maxAttempts of the service config where
	// Policy.MaxAttempts is less; 0 otherwise.
	ConfigAttempts int
	// DryRun tells that [WithDryRun] keeps retries from being made.
	DryRun bool
	// Budget says in words which budgets the calls are charged to.
	Budget string
	// Fault says what keeps the policy in the method's .proto from being
	// followed; empty: nothing, or there is none.
	Fault string
}

// Explain tells which policy is in force for a full method, "/pkg.Service/Method",
// where each part of it comes from, and whether the method counts as idempotent
// and why; print the answer with its String. It cannot know call options, and of
// the service config of a ClientConn only what calls have met there.
//
// Of work it takes the name that [Retrier.Do] is given. One with a slash it takes
// for a method's until Do has met it.
func (r *Retrier) Explain(fullMethod string) Effective {
	set := r.set.Load()
	m := (*set.cache.Load())[fullMethod]
	if m == nil || m.declared.stale() {
		m = set.resolve(fullMethod) // not kept: nobody called it
	}
	e := Effective{
		Method: m.name, Policy: *m.policy, PolicySource: m.source, PolicyPlace: set.policyPlace(m),
		TimeoutSource:     m.timeoutSource,
		IdempotencySource: m.idemSource,
		Resolver:          m.resolver, DryRun: m.dryRun,
		Budget: r.budgetOf(set, m),
	}
	if e.Policy.Idempotency = m.idempotency; m.idempotency != Inherit {
		e.IdempotencyPlace = set.idempotencyPlace(m)
	}
	if m.work != "" && (!strings.Contains(fullMethod, "/") || set.memories.knows(fullMethod)) {
		e.beWork()
		return e
	}
	if m.declared.fault != nil {
		e.Fault = m.declared.fault.Error()
	}
	if p := m.resolved.Load(); p != nil && m.resolver {
		seen := p.policy
		e.ResolverPolicy = &seen
	}
	if mc := m.config; mc != nil {
		e.WaitForReady, e.MaxRequestBytes, e.MaxResponseBytes = mc.waitForReady, mc.maxRequestSize, mc.maxReplySize
		e.ConfigPlace = mc.place
		if m.source == SourceServiceConfig {
			e.ConfigAttempts = mc.capped
		}
	}
	return e
}

// beWork is what call.beWork does to a call: it leaves what only RPCs follow.
func (e *Effective) beWork() {
	e.Resolver = false
	if e.PolicySource == SourceProto || e.PolicySource == SourceServiceConfig || e.TimeoutSource == SourceServiceConfig {
		idempotency := e.Policy.Idempotency
		e.Policy = *builtinPolicy
		e.Policy.Idempotency = idempotency
		e.PolicySource, e.PolicyPlace, e.TimeoutSource = SourceDefault, "", SourceDefault
	}
	if e.Policy.Idempotency == Inherit {
		e.Policy.Idempotency, e.IdempotencySource, e.IdempotencyPlace = Idempotent, SourceDefault, "work that Do runs"
	}
}

// policyPlace is where m's policy stands within its source.
func (s *policySet) policyPlace(m *method) string {
	service, _, _ := strings.Cut(m.rpc, "/")
	switch {
	case m.source == SourceMethod:
		return fmt.Sprintf("WithMethodPolicy(%q)", m.rpc)
	case m.source == SourceService:
		return fmt.Sprintf("WithMethodPolicy(%q)", service+"/*")
	case m.source == SourceServiceConfig:
		return m.config.place
	case m.source == SourceProto:
		return byOption + " in " + m.declared.file
	case s.fallback != nil:
		return "WithDefaultPolicy"
	}
	return "" // nobody gave one
}

// idempotencyPlace is the same for its idempotency.
func (s *policySet) idempotencyPlace(m *method) string {
	service, _, _ := strings.Cut(m.rpc, "/")
	key, pattern := m.name, m.rpc
	switch m.idemSource {
	case SourceServiceConfig:
		return m.config.place
	case SourceProto:
		return m.declared.idemBy + " in " + m.declared.file
	case SourceDefault:
		return "WithDefaultPolicy"
	case SourceService:
		key, pattern = "/"+service+"/", service+"/*"
	}
	if p := s.level(key); p != nil && p.Idempotency != Inherit {
		return fmt.Sprintf("WithMethodPolicy(%q)", pattern)
	}
	return fmt.Sprintf("WithIdempotent(%q)", pattern)
}

// budgetOf says in words what calls of m are charged to.
func (r *Retrier) budgetOf(set *policySet, m *method) string {
	text := "the default, one for each target"
	switch {
	case r.targets.newBudget != nil:
		text = "from WithBudget or WithBudgetPerTarget"
	case set.config != nil && set.config.throttle != nil:
		t := set.config.throttle
		text = fmt.Sprintf("a throttle of %d tokens, %v for each success, one for each target (from service_config: retryThrottling)", t.maxTokens, t.tokenRatio)
	}
	if m.child != nil {
		text += fmt.Sprintf("; and that of WithMethodBudget(%q)", strings.TrimPrefix(m.child.pattern, "/"))
	}
	return text
}

// String is the whole answer in some lines of text. The text may change.
func (e Effective) String() string {
	var b strings.Builder
	p := e.Policy
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "  %-15s%s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintf(&b, "%s\n", e.Method)
	unless := ""
	if e.Resolver {
		unless = ", unless the ClientConn's service config has a retryPolicy for the method"
	}
	line("policy", "from %s%s", from(e.PolicySource, e.PolicyPlace), unless)
	e.attempts(line)
	line("codes", "%v", p.repeated())
	if p.repeated().Has(codes.ResourceExhausted) && !p.RetryQuota {
		line("", "RESOURCE_EXHAUSTED only with the server's hint when to come back")
	}
	if p.RetryIf != nil {
		line("", "RetryIf may decide otherwise")
	}
	line("backoff", "%v", p.Backoff)
	label := "timeout"
	for _, t := range []struct {
		limit  time.Duration
		what   string
		source Source
	}{
		{p.Timeout, "for the whole call", e.TimeoutSource},
		{p.AttemptTimeout, "for an attempt", e.PolicySource},
		{p.FirstResponseTimeout, "for the first response of a stream", e.PolicySource},
		{p.IdleTimeout, "between the responses of a stream", e.PolicySource},
	} {
		switch {
		case t.limit <= 0:
			continue
		case t.source != e.PolicySource:
			line(label, "%v %s (from %s)", t.limit, t.what, from(t.source, e.ConfigPlace))
		default:
			line(label, "%v %s", t.limit, t.what)
		}
		label = ""
	}
	e.additions(line)
	switch p.Idempotency {
	case Inherit:
		line("idempotency", "unknown: only attempts that never reached a server are repeated; to change that,")
		line("", "declare idempotency_level in the .proto or use WithIdempotent(%q)", strings.TrimPrefix(e.Method, "/"))
	case NotIdempotent:
		line("idempotency", "not idempotent (from %s): only attempts that never reached a server are repeated", from(e.IdempotencySource, e.IdempotencyPlace))
	default:
		line("idempotency", "%v (from %s)", p.Idempotency, from(e.IdempotencySource, e.IdempotencyPlace))
	}
	line("budget", "%s", e.Budget)
	if p := e.ResolverPolicy; p != nil {
		line("resolver", "last seen: at most %d attempts; %v; %v", p.MaxAttempts, p.Codes, p.Backoff)
	}
	if e.DryRun {
		line("dry run", "retries are decided and told, but not made (from WithDryRun)")
	}
	if e.Fault != "" {
		line("not followed", "%s", e.Fault)
	}
	return b.String()
}

// attempts prints how many there are.
func (e *Effective) attempts(line func(name, format string, args ...any)) {
	p := &e.Policy
	switch {
	case p.hedges() && p.Idempotency.repeatable():
		line("attempts", "at most %d that overlap: %v", p.most(), p.Hedge)
		line("", "one after the other for streams other than server streams")
	case p.hedges():
		line("attempts", "at most %d, one after the other: the policy hedges, but the method is not known to be idempotent", p.most())
	case p.MaxAttempts == 1:
		line("attempts", "1: never retried")
	default:
		line("attempts", "at most %d", p.MaxAttempts)
	}
	if e.ConfigAttempts > 0 {
		line("", "the service config asks for %d; WithMaxCallAttempts raises the limit", e.ConfigAttempts)
	}
}

// additions prints what the service config adds to a call beside its policy.
func (e *Effective) additions(line func(name, format string, args ...any)) {
	place := from(SourceServiceConfig, e.ConfigPlace)
	if e.WaitForReady != nil {
		line("wait for ready", "%v unless the call says otherwise (from %s)", *e.WaitForReady, place)
	}
	label := "messages"
	for _, m := range []struct {
		what  string
		bytes int64
	}{{"request", e.MaxRequestBytes}, {"response", e.MaxResponseBytes}} {
		if m.bytes > 0 {
			line(label, "a %s of at most %d bytes (from %s)", m.what, m.bytes, place)
			label = ""
		}
	}
}

// from names a source, and the place within it if there is one.
func from(s Source, place string) string {
	if place == "" {
		return s.String()
	}
	return s.String() + ": " + place
}
