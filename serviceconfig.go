package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// defaultMaxCallAttempts is what a service config may ask for at most, unless
// the client raises it (gRFC A6, "Limits on Retries and Hedges").
const defaultMaxCallAttempts = 5

// serviceConfig is a service config given in code.
type serviceConfig struct {
	methods  map[string]*methodConfig // by "/pkg.Service/Method", "/pkg.Service/" and, for every other method, ""
	throttle *throttleLimits          // nil: it has no retryThrottling
}

// methodConfig is one entry of methodConfig.
type methodConfig struct {
	place   string // "methodConfig[0] (line 3, column 5)"
	policy  *Policy
	capped  int           // what maxAttempts asks for, if that is more than the client allows
	timeout time.Duration // 0: none
	// What an attempt is called with; the caller's own options follow and win,
	// but for a limit that is larger than the config's.
	waitForReady                 *bool
	maxRequestSize, maxReplySize int64 // bytes; 0: not said
}

// throttleLimits is a retryThrottling block that NewThrottle accepts.
type throttleLimits struct {
	maxTokens  int
	tokenRatio float64
}

// parseServiceConfig reads a service config strictly and adds to f everything
// that is wrong with it, in the order of the document. maxAttempts is the most
// that the client allows.
func parseServiceConfig(doc string, maxAttempts int, f *faults) *serviceConfig {
	r := configReader{doc: doc, maxAttempts: maxAttempts, config: &serviceConfig{methods: map[string]*methodConfig{}}}
	root, at, err := parseJSON(doc)
	switch {
	case strings.TrimSpace(doc) == "":
		f.add("the document is empty, want a service config in JSON")
		return r.config
	case err != nil:
		line, column := lineAndColumn(doc, at)
		f.add("line %d, column %d: %v", line, column, err)
		return r.config
	}
	r.root(root)
	slices.SortStableFunc(r.faults, func(a, b placedFault) int { return a.at - b.at })
	for _, fault := range r.faults {
		line, column := lineAndColumn(doc, fault.at)
		f.add("line %d, column %d: %s", line, column, fault.text)
	}
	return r.config
}

// methodConfigOf gives the most specific entry for a full method, and whether
// it names the method or its service; nil if there is none.
func (c *serviceConfig) methodConfigOf(method, service string) (m *methodConfig, named bool) {
	if c == nil {
		return nil, false
	}
	if m := c.methods[method]; m != nil {
		return m, true
	}
	if m := c.methods[service]; m != nil {
		return m, true
	}
	return c.methods[""], false
}

// policyOf gives the policy that the config has for a method. An entry without
// one speaks for itself only where it takes a method out of a less specific
// entry that has one: an entry replaces another as a whole, so that its methods
// are not retried.
func (c *serviceConfig) policyOf(method, service string) *Policy {
	m, _ := c.methodConfigOf(method, service)
	switch {
	case m == nil:
		return nil
	case m.policy != nil:
		return m.policy
	}
	for _, key := range []string{service, ""} {
		if less := c.methods[key]; less != nil && less.policy != nil {
			return &Policy{MaxAttempts: 1, Timeout: m.timeout}
		}
	}
	return nil
}

// missing are the methods that the config names but their service, if the
// program knows it, does not have.
func (c *serviceConfig) missing() (names []string) {
	if c == nil {
		return nil
	}
	for key := range c.methods {
		if _, err := parsePattern(key); key != "" && !isService(key) && err != nil {
			names = append(names, key)
		}
	}
	slices.Sort(names)
	return names
}

// callOptions are what the config adds to an attempt, before the caller's own.
func (m *methodConfig) callOptions() []grpc.CallOption {
	var opts []grpc.CallOption
	if m.waitForReady != nil {
		opts = append(opts, grpc.WaitForReady(*m.waitForReady))
	}
	if m.maxRequestSize > 0 {
		opts = append(opts, grpc.MaxCallSendMsgSize(clampInt(m.maxRequestSize)))
	}
	if m.maxReplySize > 0 {
		opts = append(opts, grpc.MaxCallRecvMsgSize(clampInt(m.maxReplySize)))
	}
	return opts
}

// outbids reports whether a caller's option asks for a larger message than the
// config allows: of the two the smaller limit holds.
func (m *methodConfig) outbids(o grpc.CallOption) bool {
	switch o := o.(type) {
	case grpc.MaxSendMsgSizeCallOption:
		return m.maxRequestSize > 0 && int64(o.MaxSendMsgSize) > m.maxRequestSize
	case grpc.MaxRecvMsgSizeCallOption:
		return m.maxReplySize > 0 && int64(o.MaxRecvMsgSize) > m.maxReplySize
	}
	return false
}

// configReader walks a document along the schema of grpc.service_config.
type configReader struct {
	doc         string
	maxAttempts int
	config      *serviceConfig
	named       map[string]int // where each name was given first
	faults      []placedFault
}

type placedFault struct {
	at   int
	text string
}

func (r *configReader) fault(at int, format string, args ...any) {
	r.faults = append(r.faults, placedFault{at, fmt.Sprintf(format, args...)})
}

// field is one field that an object may have: it is read, or it is refused.
type field struct {
	name    string
	read    func(n *jsonNode, path string)
	want    string // not empty: the field is required, and this is what is wanted
	refused string // not empty: why
}

// object reads the fields of an object; null is a field that is left out. It
// reports whether n is an object.
func (r *configReader) object(n *jsonNode, path string, fields []field) bool {
	if n.kind != jsonObject {
		r.fault(n.at, "%s%v, want an object", valueOf(path), n)
		return false
	}
	seen := map[string]int{}
	for _, m := range n.members {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == m.name })
		first, again := seen[m.name]
		switch {
		case i < 0:
			meant, want := misspelt(m.name, fields)
			r.fault(m.at, "%s is an unknown field, want %s", quote(join(path, m.name)), want)
			if meant == nil || seen[meant.name] > 0 {
				continue
			}
			seen[meant.name] = m.at // so that it is not missing as well, and its own faults are told
			if meant.refused == "" && m.value.kind != jsonNull {
				meant.read(m.value, join(path, meant.name))
			}
			continue
		case again:
			line, column := lineAndColumn(r.doc, first)
			r.fault(m.at, "%s is given twice, first at line %d, column %d", join(path, m.name), line, column)
			continue
		}
		seen[m.name] = m.at
		switch f := fields[i]; {
		case f.refused != "":
			r.fault(m.at, "%s %s", join(path, f.name), f.refused)
		case m.value.kind != jsonNull:
			f.read(m.value, join(path, f.name))
		case f.want != "":
			r.fault(m.at, "%s = null, want %s", join(path, f.name), f.want)
		}
	}
	for _, f := range fields {
		if _, ok := seen[f.name]; !ok && f.want != "" {
			r.fault(n.at, "%s is missing, want %s", join(path, f.name), f.want)
		}
	}
	return true
}

// misspelt says which field an unknown one was meant to be, nil if that is not
// clear, and what to write for it.
func misspelt(name string, fields []field) (meant *field, want string) {
	var all, wanted []string
	for _, f := range fields {
		all = append(all, f.name)
		if f.refused == "" {
			wanted = append(wanted, f.name)
		}
	}
	if near := nearest(name, all); near != "" {
		return &fields[slices.Index(all, near)], strconv.Quote(near)
	}
	return nil, "one of " + strings.Join(wanted, ", ")
}

const ofChannel = "is an affair of the ClientConn that an interceptor cannot take over: remove it here and give it to grpc.WithDefaultServiceConfig"

func (r *configReader) root(n *jsonNode) {
	r.named = map[string]int{}
	r.object(n, "", []field{
		{name: "methodConfig", read: r.methodConfigs},
		{name: "retryThrottling", read: r.throttling},
		{name: "loadBalancingConfig", refused: ofChannel},
		{name: "loadBalancingPolicy", refused: ofChannel},
		{name: "healthCheckConfig", refused: ofChannel},
		{name: "connectionScaling", refused: ofChannel},
	})
}

func (r *configReader) methodConfigs(n *jsonNode, path string) {
	for i, item := range r.array(n, path) {
		r.methodConfig(item, fmt.Sprintf("%s[%d]", path, i))
	}
}

// wantName says what a methodConfig needs to apply to anything.
const wantName = `at least one {"service": "pkg.Service"}, or [{}] for every method`

func (r *configReader) methodConfig(n *jsonNode, path string) {
	line, column := lineAndColumn(r.doc, n.at)
	m := &methodConfig{place: fmt.Sprintf("%s (line %d, column %d)", path, line, column)}
	var keys []string
	retry := Policy{}
	policyAt := -1
	one := func(read func(*methodConfig, *jsonNode, string, *Policy)) func(*jsonNode, string) {
		return func(n *jsonNode, path string) {
			if policyAt >= 0 {
				line, column := lineAndColumn(r.doc, policyAt)
				r.fault(n.at, "%s stands beside the other policy at line %d, column %d, want only one of retryPolicy and hedgingPolicy", path, line, column)
				return
			}
			policyAt = n.at
			read(m, n, path, &retry)
		}
	}
	ok := r.object(n, path, []field{
		{name: "name", want: wantName, read: func(n *jsonNode, path string) { keys = r.names(n, path) }},
		{name: "timeout", read: func(n *jsonNode, path string) { m.timeout = r.duration(n, path, "0.1s") }},
		{name: "waitForReady", read: func(n *jsonNode, path string) { m.waitForReady = r.bool(n, path) }},
		{name: "retryPolicy", read: one(r.retryPolicy)},
		{name: "hedgingPolicy", read: one(r.hedgingPolicy)},
		{name: "maxRequestMessageBytes", read: func(n *jsonNode, path string) { m.maxRequestSize = r.integer(n, path, 1, math.MaxUint32, sizeWanted) }},
		{name: "maxResponseMessageBytes", read: func(n *jsonNode, path string) { m.maxReplySize = r.integer(n, path, 1, math.MaxUint32, sizeWanted) }},
	})
	if !ok {
		return
	}
	if policyAt >= 0 {
		retry.Timeout = m.timeout
		m.policy = &retry
	}
	for _, key := range keys {
		r.config.methods[key] = m
	}
}

const (
	sizeWanted     = "a number of bytes from 1 to 4294967295"
	attemptsWanted = "a whole number from 2 to 4294967295"
	codesWanted    = `at least one code such as "UNAVAILABLE"`
	ratioWanted    = "a number of at least 0.001"
	tokensWanted   = "a whole number from 1 to 1000"
	growthWanted   = "a number above 0"
)

// names gives the keys of the methods, "/pkg.Service/Method", "/pkg.Service/"
// or "".
func (r *configReader) names(n *jsonNode, path string) (keys []string) {
	items := r.array(n, path)
	if n.kind == jsonArray && len(items) == 0 {
		r.fault(n.at, "%s is empty, want %s", path, wantName)
	}
	for i, item := range items {
		service, method := "", ""
		path := fmt.Sprintf("%s[%d]", path, i)
		before := len(r.faults)
		ok := r.object(item, path, []field{
			{name: "service", read: func(n *jsonNode, path string) {
				service = r.namePart(n, path, `a service with its package, "pkg.Service"`)
			}},
			{name: "method", read: func(n *jsonNode, path string) {
				method = r.namePart(n, path, `a method without its service, "Method", or none for every method of the service`)
			}},
		})
		if !ok || len(r.faults) > before {
			continue
		}
		key := ""
		switch {
		case service != "":
			key = "/" + service + "/" + method
		case method != "":
			r.fault(item.at, "%s has the method %s without a service, want both", path, quote(method))
			continue
		}
		if first, ok := r.named[key]; ok {
			line, column := lineAndColumn(r.doc, first)
			r.fault(item.at, "%s names %s again, first at line %d, column %d; want every name once", path, keyName(key), line, column)
			continue
		}
		r.named[key] = item.at
		keys = append(keys, key)
	}
	return keys
}

func (r *configReader) namePart(n *jsonNode, path, want string) string {
	switch {
	case n.kind != jsonString:
		r.fault(n.at, "%s = %v, want %s", path, n, want)
	case strings.ContainsAny(n.text, "/* \t\r\n"):
		r.fault(n.at, "%s = %v, want %s", path, n, want)
	default:
		return n.text
	}
	return ""
}

// retryPolicy reads the retryPolicy of gRFC A6, and the perAttemptRecvTimeout
// that gRPC for Java and C++ know in it.
func (r *configReader) retryPolicy(m *methodConfig, n *jsonNode, path string, p *Policy) {
	var initial, most, attempt time.Duration
	var attempts int64
	var growth float64
	var set CodeSet
	if !r.object(n, path, []field{
		{name: "maxAttempts", want: attemptsWanted, read: func(n *jsonNode, path string) { attempts = r.attempts(m, n, path) }},
		{name: "initialBackoff", want: `a duration such as "0.1s"`, read: func(n *jsonNode, path string) { initial = r.duration(n, path, "0.1s") }},
		{name: "maxBackoff", want: `a duration such as "1s"`, read: func(n *jsonNode, path string) { most = r.duration(n, path, "1s") }},
		{name: "backoffMultiplier", want: growthWanted, read: func(n *jsonNode, path string) {
			growth = r.number(n, path, math.SmallestNonzeroFloat64, growthWanted)
		}},
		{name: "retryableStatusCodes", want: codesWanted, read: func(n *jsonNode, path string) { set = r.codes(n, path, true) }},
		{name: "perAttemptRecvTimeout", read: func(n *jsonNode, path string) { attempt = r.duration(n, path, "0.1s") }},
	}) {
		return
	}
	*p = a6Policy(int(attempts), initial, most, growth, set)
	p.AttemptTimeout = attempt
}

// hedgingPolicy reads the hedgingPolicy of gRFC A6.
func (r *configReader) hedgingPolicy(m *methodConfig, n *jsonNode, path string, p *Policy) {
	var attempts int64
	var delay time.Duration
	set := Codes()
	if !r.object(n, path, []field{
		{name: "maxAttempts", want: attemptsWanted, read: func(n *jsonNode, path string) { attempts = r.attempts(m, n, path) }},
		{name: "hedgingDelay", read: func(n *jsonNode, path string) {
			if d, err := parseProtoDuration(n.text); n.kind != jsonString || err != nil || d != 0 {
				delay = r.duration(n, path, "0.1s")
			} // 0 means at once, as if it were left out
		}},
		{name: "nonFatalStatusCodes", read: func(n *jsonNode, path string) { set = r.codes(n, path, false) }},
	}) {
		return
	}
	*p = Policy{
		Codes:      set,
		RetryQuota: true,
		Hedge:      Hedge{MaxAttempts: int(attempts), Delay: delay, AtOnce: delay == 0, NonFatal: set},
	}
}

func (r *configReader) throttling(n *jsonNode, path string) {
	before := len(r.faults)
	var tokens int64
	var ratio float64
	r.object(n, path, []field{
		{name: "maxTokens", want: tokensWanted, read: func(n *jsonNode, path string) {
			tokens = r.integer(n, path, 1, maxThrottleTokens, tokensWanted)
		}},
		{name: "tokenRatio", want: ratioWanted, read: func(n *jsonNode, path string) { ratio = r.number(n, path, 0.001, ratioWanted) }},
	})
	if len(r.faults) == before {
		r.config.throttle = &throttleLimits{int(tokens), ratio}
	}
}

func (r *configReader) attempts(m *methodConfig, n *jsonNode, path string) int64 {
	asked := r.integer(n, path, 2, math.MaxUint32, attemptsWanted)
	if asked > int64(r.maxAttempts) {
		m.capped = clampInt(asked)
	}
	return min(asked, int64(r.maxAttempts))
}

func (r *configReader) codes(n *jsonNode, path string, required bool) CodeSet {
	var set []codes.Code
	items := r.array(n, path)
	if required && n.kind == jsonArray && len(items) == 0 {
		r.fault(n.at, "%s is empty, want %s", path, codesWanted)
	}
	for i, item := range items {
		path := fmt.Sprintf("%s[%d]", path, i)
		switch code, err := parseCode(item); {
		case err != nil:
			r.fault(item.at, "%s = %v, %v", path, item, err)
		default:
			set = append(set, code)
		}
	}
	return Codes(set...)
}

func (r *configReader) array(n *jsonNode, path string) []*jsonNode {
	if n.kind != jsonArray {
		r.fault(n.at, "%s = %v, want an array", path, n)
		return nil
	}
	return n.items
}

func (r *configReader) bool(n *jsonNode, path string) *bool {
	if n.kind != jsonBool {
		r.fault(n.at, "%s = %v, want true or false", path, n)
		return nil
	}
	b := n.text == "true"
	return &b
}

// duration reads a duration above 0; of more than 292 years it makes these.
func (r *configReader) duration(n *jsonNode, path, example string) time.Duration {
	err := fmt.Errorf("want a string such as %q", example)
	if n.kind == jsonString {
		var d time.Duration
		if d, err = parseProtoDuration(n.text); err == nil && d > 0 {
			return d
		} else if err == nil {
			err = errors.New("want more than 0s")
		}
	}
	r.fault(n.at, "%s = %v, %v", path, n, err)
	return 0
}

// integer reads a whole number, however it is written: 4, 4.0, 4e0.
func (r *configReader) integer(n *jsonNode, path string, least, most int64, want string) int64 {
	if n.kind == jsonNumber {
		// Everything that is accepted is far below 2^53, so float64 is exact.
		f, err := strconv.ParseFloat(n.text, 64)
		if err == nil && f == math.Trunc(f) && f >= float64(least) && f <= float64(most) {
			return int64(f)
		}
	}
	r.fault(n.at, "%s = %v, want %s%s", path, n, want, unquoted(n))
	return 0
}

// number reads a finite number of at least least.
func (r *configReader) number(n *jsonNode, path string, least float64, want string) float64 {
	if n.kind == jsonNumber {
		if f, err := strconv.ParseFloat(n.text, 64); err == nil && f >= least {
			return f
		}
	}
	r.fault(n.at, "%s = %v, want %s%s", path, n, want, unquoted(n))
	return 0
}

// unquoted is the advice that goes with a number in quotes.
func unquoted(n *jsonNode) string {
	if _, err := strconv.ParseFloat(n.text, 64); n.kind == jsonString && err == nil {
		return ", without quotes"
	}
	return ""
}

// parseCode reads a status code: its number, or its name in upper or lower case.
func parseCode(n *jsonNode) (codes.Code, error) {
	const want = "want a code from 1 to 16, or its name"
	switch n.kind {
	case jsonNumber:
		f, err := strconv.ParseFloat(n.text, 64)
		if err == nil && f == math.Trunc(f) && f >= 1 && f < float64(len(codeNames)) {
			return codes.Code(f), nil
		}
	case jsonString:
		i := slices.Index(codeNames[:], strings.ToUpper(n.text))
		switch near := nearest(n.text, codeNames[1:]); {
		case i > 0:
			return codes.Code(i), nil
		case i == 0:
			return 0, errors.New("which is no failure; " + want)
		case near != "":
			return 0, fmt.Errorf("want %q", near)
		default:
			return 0, errors.New(want + ` such as "UNAVAILABLE"` + unquoted(n))
		}
	}
	return 0, errors.New(want)
}

// parseProtoDuration reads a google.protobuf.Duration in its JSON form: digits,
// perhaps a point and 1 to 9 more digits, and an "s". What is more than fits a
// time.Duration becomes the largest one; what is more than the 10,000 years of
// google.protobuf.Duration is refused.
func parseProtoDuration(s string) (time.Duration, error) {
	const want = `want seconds with an "s" at the end, such as "0.1s"`
	number, ok := strings.CutSuffix(s, "s")
	number, negative := strings.CutPrefix(number, "-")
	whole, fraction, pointed := strings.Cut(number, ".")
	switch {
	case ok && whole == "" && isDigits(fraction):
		return 0, fmt.Errorf("want a digit before the point: %q", "0"+number+"s")
	case !ok, !isDigits(whole), len(whole) > 1 && whole[0] == '0':
		if d, err := time.ParseDuration(s); err == nil && d > 0 {
			return 0, fmt.Errorf("want it in seconds: %q", protoDuration(d))
		}
		return 0, errors.New(want)
	case pointed && !isDigits(fraction):
		return 0, errors.New("want digits after the point, or no point")
	case len(fraction) > 9:
		return 0, errors.New("want at most 9 digits after the point")
	}
	const most = 315_576_000_000 // google.protobuf.Duration, about 10,000 years
	seconds, err := strconv.ParseInt(whole, 10, 64)
	nanos, _ := strconv.ParseInt((fraction + "000000000")[:9], 10, 64) // digits only
	if err != nil || seconds > most || seconds == most && nanos > 0 {
		return 0, fmt.Errorf("want at most \"%ds\"", int64(most))
	}
	d := time.Duration(math.MaxInt64)
	if limit := int64(math.MaxInt64); seconds < limit/1e9 || seconds == limit/1e9 && nanos <= limit%1e9 {
		d = time.Duration(seconds*1e9 + nanos)
	}
	if negative {
		d = -d
	}
	return d, nil
}

// protoDuration writes d in the JSON form of google.protobuf.Duration.
func protoDuration(d time.Duration) string {
	whole, fraction := d/time.Second, d%time.Second
	return strings.TrimRight(strings.TrimRight(fmt.Sprintf("%d.%09d", whole, fraction), "0"), ".") + "s"
}

func isDigits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// keyName is a key as people read it.
func keyName(key string) string {
	switch {
	case key == "":
		return "every method"
	case isService(key):
		return "the service " + strings.Trim(key, "/")
	}
	return "the method " + key[1:]
}

// join is the path of a field; valueOf begins a sentence about the value at path.
func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func valueOf(path string) string {
	if path == "" {
		return "the document is "
	}
	return path + " = "
}

func clampInt(n int64) int { return int(min(n, math.MaxInt)) }
