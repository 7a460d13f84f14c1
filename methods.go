package grpcretry

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// maxMethodsKept bounds the cache of a policySet; methods beyond it are
// resolved anew at every call, so that a proxy whose callers make up names
// does not grow without end.
const maxMethodsKept = 1024

// Source says where a part of a policy comes from.
type Source uint8

// The places of a policy, from the most to the least binding.
const (
	// SourceDefault: WithDefaultPolicy, or, if there is none, what the package does by itself.
	SourceDefault Source = iota
	// SourceCall: a call option.
	SourceCall
	// SourceMethod: a pattern in code that names the method.
	SourceMethod
	// SourceService: a pattern in code that names the service.
	SourceService
	// SourceServiceConfig: a service config given in code.
	SourceServiceConfig
	// SourceResolver: the service config of the ClientConn.
	SourceResolver
	// SourceProto: the method's .proto.
	SourceProto
)

// String gives the word that traces print.
func (s Source) String() string {
	switch s {
	case SourceDefault:
		return "default"
	case SourceCall:
		return "call"
	case SourceMethod:
		return "method"
	case SourceService:
		return "service"
	case SourceServiceConfig:
		return "service_config"
	case SourceResolver:
		return "resolver"
	case SourceProto:
		return "proto"
	}
	return fmt.Sprintf("Source(%d)", uint8(s))
}

// method is all that is known of one full method within one policySet.
type method struct {
	name          string // "/pkg.Service/Method"
	rpc           string // "pkg.Service/Method", as OpenTelemetry wants it
	asked         string // as the caller spelled it: that of an RPC begins with a slash, that of work does not
	work          string // the target of work of that name, see Do
	misnamed      bool   // it is the name of neither
	plainWork     bool   // work of that name needs no context of its own
	policy        *Policy
	source        Source
	timeoutSource Source // of the policy's Timeout
	idempotency   Idempotency
	idemSource    Source
	child         *child // nil: none
	dryRun        bool   // retries are decided and told, and not made

	config   *methodConfig     // of the service config given in code; nil: none
	extra    []grpc.CallOption // which that adds to every attempt
	declared declaration

	// follow tells that the ClientConn's service config is followed at all,
	// resolver that no policy in code speaks for the method, so that the
	// one which the ClientConn's service config holds is followed; resolverIdem
	// the same for its idempotency.
	follow, resolver, resolverIdem bool
	askFirst                       bool // before the first attempt
	resolved                       atomic.Pointer[resolverPolicy]

	memory  *methodMemory
	metrics atomic.Pointer[methodMetrics]
	kept    bool // in the cache, and so with series of its own
}

// policySet is what New or Update installed: immutable but for its cache.
type policySet struct {
	exact, service map[string]*Policy // by "/pkg.Service/Method" and "/pkg.Service/"
	idempotent     map[string]bool    // patterns of WithIdempotent, keyed alike
	fallback       *Policy            // nil without WithDefaultPolicy
	config         *serviceConfig     // nil without WithServiceConfig
	dryRun         map[string]bool    // patterns of WithDryRun, keyed alike
	dryRunAll      bool
	httpGet        bool
	followResolver bool
	children       map[string]*child // keyed alike; they outlive the policySet

	cache    atomic.Pointer[map[string]*method]
	mu       sync.Mutex
	memories *methodMemories // those of the policySet before this one, if there was one
}

// newPolicySet indexes what the options said, and adds to c.faults what is wrong with it.
func newPolicySet(c *config) *policySet {
	s := &policySet{
		exact:          map[string]*Policy{},
		service:        map[string]*Policy{},
		idempotent:     map[string]bool{},
		dryRun:         map[string]bool{},
		dryRunAll:      c.dryRunAll,
		httpGet:        c.httpGet,
		children:       map[string]*child{},
		followResolver: !c.noResolver,
		memories:       new(methodMemories),
	}
	s.cache.Store(&map[string]*method{})
	f := &c.faults
	for _, p := range c.policies {
		f.where = fmt.Sprintf("WithMethodPolicy(%q): ", p.pattern)
		p.policy.validate(f)
		key, err := parsePattern(p.pattern)
		switch {
		case err != nil:
			f.add("%v", err)
		case s.level(key) != nil:
			f.add("duplicate pattern, want each method or service once")
		case isService(key):
			s.service[key] = &p.policy
		default:
			s.exact[key] = &p.policy
		}
	}
	for _, pattern := range c.idempotent {
		f.where = fmt.Sprintf("WithIdempotent(%q): ", pattern)
		key, err := parsePattern(pattern)
		if err != nil {
			f.add("%v", err)
			continue
		}
		if s.idempotent[key] {
			f.add("duplicate pattern, want each method or service once")
		}
		s.idempotent[key] = true
		if p := s.level(key); p != nil && p.Idempotency != Inherit && p.Idempotency != Idempotent {
			f.add("contradicts the WithMethodPolicy for the same pattern, whose Idempotency is %v; want one of the two", p.Idempotency)
		}
	}
	for _, m := range c.methodBudgets {
		f.where = fmt.Sprintf("WithMethodBudget(%q): ", m.pattern)
		key, err := parsePattern(m.pattern)
		switch {
		case err != nil:
			f.add("%v", err)
		case s.children[key] != nil:
			f.add("duplicate pattern, want each method or service once")
		default:
			pattern := key
			if isService(key) {
				pattern += "*"
			}
			s.children[key] = &child{pattern, m.budget}
		}
		if fault := budgetFault(m.budget); fault != "" {
			f.add("budget is %s", fault)
		} else if shareLeaf(m.budget, c.shared) {
			f.add("budget is also that of WithBudget, want one of its own")
		}
	}
	f.where = "WithDefaultPolicy: "
	for _, p := range c.fallback {
		p.validate(f)
		if s.fallback != nil {
			f.add("given twice, want it once")
		}
		s.fallback = &p
	}
	for _, p := range c.policies {
		f.where = fmt.Sprintf("WithMethodPolicy(%q): ", p.pattern)
		if key, err := parsePattern(p.pattern); err == nil {
			s.checkHedge(key, p.policy, f)
		}
	}
	for _, pattern := range c.dryRun {
		f.where = fmt.Sprintf("WithDryRun(%q): ", pattern)
		key, err := parsePattern(pattern)
		if err != nil {
			f.add("%v", err)
			continue
		}
		s.dryRun[key] = true
	}
	f.where = ""
	maxAttempts := defaultMaxCallAttempts
	for i, n := range c.maxCallAttempts {
		maxAttempts = n
		switch {
		case n < 2:
			f.add("WithMaxCallAttempts: n = %d, want 2 or more", n)
		case i > 0:
			f.add("WithMaxCallAttempts is given twice, want it once")
		}
	}
	f.where = "WithServiceConfig: "
	for i, doc := range c.serviceConfigs {
		s.config = parseServiceConfig(doc, maxAttempts, f)
		if i > 0 {
			f.add("given twice, want one document")
		}
	}
	f.where = ""
	return s
}

// checkHedge adds a fault if p hedges what a less specific option says is not
// idempotent. What p itself says has been checked.
func (s *policySet) checkHedge(key string, p Policy, f *faults) {
	m := &method{name: key}
	if p.Idempotency != Inherit || !p.hedges() {
		return
	}
	if s.chooseIdempotency(m, key[:strings.LastIndex(key, "/")+1], false); m.idempotency == NotIdempotent {
		f.add("Policy.Hedge.MaxAttempts = %d, but the Idempotency of the %v policy is NotIdempotent; want a method that may run twice at once", p.Hedge.MaxAttempts, m.idemSource)
	}
}

// throttle gives the limits of the service config's retryThrottling, or nil.
func (s *policySet) throttle() *throttleLimits {
	if s.config == nil {
		return nil
	}
	return s.config.throttle
}

// checkThrottle adds a fault if both an option and the service config say what
// bounds the retries.
func (s *policySet) checkThrottle(budgetGiven bool, f *faults) {
	if budgetGiven && s.throttle() != nil {
		f.add("WithServiceConfig: retryThrottling together with WithBudget or WithBudgetPerTarget, want only one of them: NewThrottle makes the same of it for WithBudget")
	}
}

// level is the policy given for exactly this key, or nil.
func (s *policySet) level(key string) *Policy {
	if isService(key) {
		return s.service[key]
	}
	return s.exact[key]
}

// lookup gives what is known of a full method; on the usual path it is one map access.
// Methods that the cache has no room for are resolved at each call.
func (s *policySet) lookup(fullMethod string) *method {
	if m := (*s.cache.Load())[fullMethod]; m != nil && !m.declared.stale() {
		return m
	}
	m := s.resolve(fullMethod)
	s.mu.Lock()
	defer s.mu.Unlock()
	old := *s.cache.Load()
	known := old[fullMethod]
	if known != nil && !known.declared.stale() {
		return known
	}
	if len(old) >= maxMethodsKept && known == nil {
		m.memory = &s.memories.others
		return m
	}
	m.memory, m.kept = s.memories.of(m.asked), true
	cache := make(map[string]*method, len(old)+1)
	for name, m := range old {
		cache[name] = m
	}
	cache[m.asked] = m
	s.cache.Store(&cache)
	return m
}

// resolve applies the precedence: of the policies in code, that of a service
// config given in code, the resolver's (which is looked up during the call) and
// that of the .proto, the first one counts as a whole. Idempotency is looked for
// separately, from the first that says anything.
func (s *policySet) resolve(fullMethod string) *method {
	asked := strings.Clone(fullMethod)
	m := &method{name: asked, asked: asked, follow: s.followResolver}
	if !strings.HasPrefix(asked, "/") {
		m.name = "/" + asked
		if !strings.Contains(asked, "/") {
			m.name = "/do/" + asked
		}
		m.work, m.misnamed = "do:"+m.name[1:], misnamed(asked)
	}
	name := m.name
	m.rpc = name[1:]
	service := name[:strings.LastIndex(name, "/")+1]
	m.dryRun = s.dryRun[name] || s.dryRun[service] || s.dryRunAll
	m.child = s.children[name]
	if m.child == nil {
		m.child = s.children[service]
	}
	m.declared = declarationOf(name, s.httpGet)
	var named bool
	if m.config, named = s.config.methodConfigOf(name, service); m.config != nil {
		m.extra = m.config.callOptions()
	}
	s.choosePolicy(m, service)
	s.chooseIdempotency(m, service, named)
	m.plainWork = m.work != "" && !m.misnamed && m.policy.Timeout == 0 && m.policy.AttemptTimeout == 0 && m.idempotency != Keyed
	return m
}

// choosePolicy sets m's policy. The service config's timeout holds also where
// its entry leaves the retries to somebody less binding.
func (s *policySet) choosePolicy(m *method, service string) {
	policy, inCode := &Policy{}, true
	switch configured := s.config.policyOf(m.name, service); {
	case s.exact[m.name] != nil:
		policy, m.source = s.exact[m.name], SourceMethod
	case s.service[service] != nil:
		policy, m.source = s.service[service], SourceService
	case s.fallback != nil:
		policy, m.source = s.fallback, SourceDefault
	case configured != nil:
		policy, m.source, inCode = configured, SourceServiceConfig, false
	default:
		m.resolver, inCode = s.followResolver, false
		if m.declared.policy != nil {
			policy, m.source = m.declared.policy, SourceProto
		}
	}
	full := policy.withDefaults()
	m.timeoutSource = m.source
	if !inCode && m.config != nil && m.config.timeout > 0 {
		full.Timeout, m.timeoutSource = m.config.timeout, SourceServiceConfig
	}
	m.policy = &full
	// Otherwise the resolver is asked only once an attempt has failed.
	m.askFirst = m.resolver && m.source == SourceProto
}

// chooseIdempotency sets m's idempotency. What a service config names for
// retries its operator calls idempotent; where the .proto says that this rests
// on a key, the key is still sent.
func (s *policySet) chooseIdempotency(m *method, service string, named bool) {
	for _, level := range []struct {
		policy     *Policy
		idempotent bool
		source     Source
	}{
		{s.exact[m.name], s.idempotent[m.name], SourceMethod},
		{s.service[service], s.idempotent[service], SourceService},
		{s.fallback, false, SourceDefault},
	} {
		switch {
		case level.policy != nil && level.policy.Idempotency != Inherit:
			m.idempotency, m.idemSource = level.policy.Idempotency, level.source
			return
		case level.idempotent:
			m.idempotency, m.idemSource = Idempotent, level.source
			return
		}
	}
	if named && m.config.policy != nil && m.declared.idempotency != Keyed {
		m.idempotency, m.idemSource = Idempotent, SourceServiceConfig
		return
	}
	m.resolverIdem = s.followResolver
	if m.declared.idempotency != Inherit {
		m.idempotency, m.idemSource = m.declared.idempotency, SourceProto
	}
}

// parsePattern turns "/pkg.Service/Method", "pkg.Service/Method" and
// "pkg.Service/*" into the key of an exact method, "/pkg.Service/Method", or of
// a service, "/pkg.Service/". A method that a registered service lacks is refused.
func parsePattern(pattern string) (key string, err error) {
	const want = `want "pkg.Service/Method" or "pkg.Service/*"`
	trimmed := strings.TrimPrefix(pattern, "/")
	service, name, ok := strings.Cut(trimmed, "/")
	switch {
	case pattern == "":
		return "", errors.New("empty pattern, " + want)
	case trimmed == "*" || trimmed == "*/*":
		return "", errors.New("pattern for every method, " + want + ", or WithDefaultPolicy for all of them")
	case !ok || service == "" || name == "":
		return "", errors.New("pattern without a service or a method, " + want)
	case strings.Contains(name, "/") || strings.ContainsAny(service, "* \t\r\n") || name != "*" && strings.ContainsAny(name, "* \t\r\n"):
		return "", errors.New("malformed pattern, " + want)
	}
	if d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service)); err == nil {
		sd, ok := d.(protoreflect.ServiceDescriptor)
		if !ok {
			return "", fmt.Errorf("%s is not a service, %s", service, want)
		}
		if name != "*" && sd.Methods().ByName(protoreflect.Name(name)) == nil {
			return "", fmt.Errorf("service %s has no method %q, want one of %s", service, name, strings.Join(methodNames(sd), ", "))
		}
	}
	if name == "*" {
		name = ""
	}
	return "/" + service + "/" + name, nil
}

func isService(key string) bool { return strings.HasSuffix(key, "/") }

func methodNames(sd protoreflect.ServiceDescriptor) []string {
	var names []string
	for i := range sd.Methods().Len() {
		names = append(names, string(sd.Methods().Get(i).Name()))
	}
	slices.Sort(names)
	return names
}
