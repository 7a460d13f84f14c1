package grpcretry

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"

	grpcretryv1 "example.com/grpcretry/proto/grpcretry/v1"
)

// Field numbers within google.protobuf.MethodOptions and google.api.HttpRule.
const (
	fieldIdempotencyLevel = 34
	fieldHTTP             = 72295728 // google.api.http

	fieldHTTPGet                = 2
	fieldHTTPFirst              = fieldHTTPGet // the pattern's fields are 2 to 6, and 8
	fieldHTTPLast               = 6
	fieldHTTPCustom             = 8
	fieldHTTPAdditionalBindings = 11
)

// Where the idempotency of a declaration stands.
const (
	byLevel  = "idempotency_level"
	byOption = "option (grpcretry.v1.retry)"
	byHTTP   = "google.api.http"
)

// declaration is what the .proto of a method says of it.
type declaration struct {
	file        string  // the path of the .proto; empty if none is registered
	policy      *Policy // nil: no option of ours, or one that cannot be followed
	idempotency Idempotency
	idemBy      string
	get         bool  // google.api.http maps it to GET only
	fault       error // what is wrong with the option
	files       int   // how many files were registered when it was looked for
}

// stale reports whether files have come since, one of which may declare the
// method: programs that load schemas at run time can do so after the first call.
func (d *declaration) stale() bool {
	return d.file == "" && d.files != protoregistry.GlobalFiles.NumFiles()
}

// declarationOf looks for the method's .proto among those linked into the
// program, or registered with protoregistry.GlobalFiles since. httpGet tells
// whether a mapping to GET counts as a declaration.
func declarationOf(fullMethod string, httpGet bool) (d declaration) {
	d.files = protoregistry.GlobalFiles.NumFiles()
	method := findMethod(fullMethod)
	if method == nil {
		return d
	}
	d.file = method.ParentFile().Path()
	o, err := readMethodOptions(method.Options())
	if err != nil {
		d.fault = fmt.Errorf("grpcretry: the options of %s cannot be read: %w", fullMethod[1:], err)
		return d
	}
	d.get = o.httpGet
	var declared Idempotency
	if o.declared {
		d.policy, declared, d.fault = declaredPolicy(fullMethod[1:], o.retry)
	}
	switch {
	case declared != Inherit:
		d.idempotency, d.idemBy = declared, byOption
	case o.level == descriptorpb.MethodOptions_NO_SIDE_EFFECTS, o.level == descriptorpb.MethodOptions_IDEMPOTENT:
		d.idempotency, d.idemBy = Idempotent, byLevel
	case httpGet && o.httpGet:
		d.idempotency, d.idemBy = Idempotent, byHTTP
	}
	return d
}

// findMethod gives the registered descriptor of a full method, or nil.
func findMethod(fullMethod string) protoreflect.MethodDescriptor {
	service, name, _ := strings.Cut(fullMethod[1:], "/")
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service + "." + name))
	if err != nil || d.Parent().FullName() != protoreflect.FullName(service) {
		return nil // unknown, or the dots of another service's method
	}
	method, _ := d.(protoreflect.MethodDescriptor)
	return method
}

// methodOptions is what we read of google.protobuf.MethodOptions.
type methodOptions struct {
	level    descriptorpb.MethodOptions_IdempotencyLevel
	declared bool   // our option is there
	retry    []byte // and this is its encoding
	httpGet  bool
}

// readMethodOptions reads the options by their encoding. There it is all the
// same whether an option is a field that the program knows, an unknown field,
// or dynamic, as in a file that was loaded at run time.
func readMethodOptions(options proto.Message) (o methodOptions, err error) {
	b, err := proto.MarshalOptions{AllowPartial: true}.Marshal(options)
	if err != nil {
		return o, err
	}
	var http []byte
	err = eachField(b, func(number protowire.Number, varint uint64, bytes []byte) {
		switch number {
		case fieldIdempotencyLevel:
			o.level = descriptorpb.MethodOptions_IdempotencyLevel(varint)
		case grpcretryv1.E_Retry.TypeDescriptor().Number():
			// Several encodings of one message are merged by joining them.
			o.declared, o.retry = true, append(o.retry, bytes...)
		case fieldHTTP:
			http = append(http, bytes...)
		}
	})
	if err == nil && len(http) > 0 {
		o.httpGet, err = onlyGet(http)
	}
	return o, err
}

// onlyGet reports whether every binding of a google.api.HttpRule is a GET.
func onlyGet(rule []byte) (bool, error) {
	get, others := false, true
	var faults []error
	err := eachField(rule, func(number protowire.Number, _ uint64, bytes []byte) {
		switch {
		case number >= fieldHTTPFirst && number <= fieldHTTPLast, number == fieldHTTPCustom:
			get = number == fieldHTTPGet // of a oneof the last one counts
		case number == fieldHTTPAdditionalBindings:
			also, err := onlyGet(bytes)
			others = others && also
			faults = append(faults, err)
		}
	})
	return get && others, errors.Join(append(faults, err)...)
}

// eachField walks over an encoded message. A field that is not of the type
// which its reader expects has neither varint nor bytes.
func eachField(b []byte, field func(number protowire.Number, varint uint64, bytes []byte)) error {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		var varint uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			varint, n = protowire.ConsumeVarint(b)
		case protowire.BytesType:
			bytes, n = protowire.ConsumeBytes(b)
		default:
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		field(number, varint, bytes)
		b = b[n:]
	}
	return nil
}

// declaredPolicy decodes our option. Of one that cannot be followed only the
// idempotency is kept, and an idempotency that this version does not know
// counts as NotIdempotent, which is safe whatever it means.
func declaredPolicy(method string, encoded []byte) (*Policy, Idempotency, error) {
	f := faults{where: "option (grpcretry.v1.retry) of " + method + ": "}
	var option grpcretryv1.Policy
	if err := proto.Unmarshal(encoded, &option); err != nil {
		f.add("cannot be decoded: %v", err)
		return nil, Inherit, f.err()
	}
	p := policyFromProto(&option, &f)
	p.validate(&f)
	if err := f.err(); err != nil {
		return nil, p.Idempotency, errors.New(inProtoTerms(err.Error()))
	}
	return &p, p.Idempotency, nil
}

// policyFromProto translates an option. Whatever a Policy cannot express is a
// fault; what it can, its own validation judges.
func policyFromProto(o *grpcretryv1.Policy, f *faults) Policy {
	p := Policy{
		MaxAttempts:          int(o.GetMaxAttempts()),
		Timeout:              fromProtoDuration("timeout", o.GetTimeout(), f),
		AttemptTimeout:       fromProtoDuration("attempt_timeout", o.GetAttemptTimeout(), f),
		FirstResponseTimeout: fromProtoDuration("first_response_timeout", o.GetFirstResponseTimeout(), f),
		IdleTimeout:          fromProtoDuration("idle_timeout", o.GetIdleTimeout(), f),
		Codes:                fromProtoCodes("codes", o.GetCodes(), f),
		Idempotency:          fromProtoIdempotency(o.GetIdempotency(), f),
		RetryQuota:           o.GetRetryQuota(),
		ReplayBytes:          int(max(min(o.GetReplayBytes(), math.MaxInt), -1)),
	}
	if b := o.GetBackoff(); b != nil {
		p.Backoff = Backoff{
			Base:       fromProtoDuration("backoff.base", b.GetBase(), f),
			Max:        fromProtoDuration("backoff.max", b.GetMax(), f),
			Multiplier: b.GetMultiplier(),
			Jitter:     fromProtoJitter(b, f),
			Overload:   fromProtoDuration("backoff.overload", b.GetOverload(), f),
			MaxHint:    fromProtoDuration("backoff.max_hint", b.GetMaxHint(), f),
		}
	}
	if h := o.GetHedge(); h != nil {
		p.Hedge = Hedge{
			MaxAttempts: int(h.GetMaxAttempts()),
			Delay:       fromProtoDuration("hedge.delay", h.GetDelay(), f),
			Quantile:    h.GetQuantile(),
			AtOnce:      h.GetAtOnce(),
			NonFatal:    fromProtoCodes("hedge.non_fatal", h.GetNonFatal(), f),
		}
		if h.GetMaxAttempts() < 2 {
			f.add("hedge.max_attempts = %d, want 2 or more", h.GetMaxAttempts())
		}
	}
	return p
}

// fromProtoIdempotency relies on both having the same numbers.
func fromProtoIdempotency(i grpcretryv1.Idempotency, f *faults) Idempotency {
	if i < 0 || i > grpcretryv1.Idempotency(Keyed) {
		f.add("idempotency = %d, want one of the values of grpcretry.v1.Idempotency", i)
		return NotIdempotent
	}
	return Idempotency(i)
}

func fromProtoDuration(field string, d *durationpb.Duration, f *faults) time.Duration {
	if d == nil {
		return 0
	}
	if err := d.CheckValid(); err != nil {
		f.add("%s = {seconds: %d nanos: %d}, want a valid duration of 0 or more", field, d.GetSeconds(), d.GetNanos())
		return 0
	}
	return d.AsDuration() // at most that of a time.Duration
}

func fromProtoCodes(field string, list []grpcretryv1.Code, f *faults) CodeSet {
	if len(list) == 0 {
		return CodeSet{}
	}
	var set []codes.Code
	for _, c := range list {
		if c <= 0 || int(c) >= len(codeNames) {
			f.add("%s holds %d, want codes from CODE_CANCELLED (1) to CODE_UNAUTHENTICATED (16)", field, c)
			continue
		}
		set = append(set, codes.Code(c))
	}
	return Codes(set...)
}

func fromProtoJitter(b *grpcretryv1.Backoff, f *faults) Jitter {
	proportional := b.GetJitter() == grpcretryv1.Jitter_JITTER_PROPORTIONAL
	if !proportional && b.GetJitterFraction() != 0 {
		f.add("backoff.jitter_fraction = %v with backoff.jitter = %v, want it only with JITTER_PROPORTIONAL", b.GetJitterFraction(), b.GetJitter())
	}
	switch b.GetJitter() {
	case grpcretryv1.Jitter_JITTER_UNSPECIFIED, grpcretryv1.Jitter_JITTER_FULL:
		return FullJitter
	case grpcretryv1.Jitter_JITTER_EQUAL:
		return EqualJitter
	case grpcretryv1.Jitter_JITTER_DECORRELATED:
		return DecorrelatedJitter
	case grpcretryv1.Jitter_JITTER_NONE:
		return NoJitter
	case grpcretryv1.Jitter_JITTER_PROPORTIONAL:
		if fraction := b.GetJitterFraction(); !(fraction > 0 && fraction <= 1) {
			f.add("backoff.jitter_fraction = %v, want a share above 0 and at most 1", fraction)
			return FullJitter
		}
		return ProportionalJitter(b.GetJitterFraction())
	}
	f.add("backoff.jitter = %d, want one of the values of grpcretry.v1.Jitter", b.GetJitter())
	return FullJitter
}

var goField = regexp.MustCompile(`\b(Policy\.[A-Za-z.]*[A-Za-z]|AtOnce|Quantile|Max|Delay)\b`)

// inProtoTerms turns the names of Go fields in the text of a fault into those
// of the option: Policy.Backoff.MaxHint is backoff.max_hint there.
func inProtoTerms(fault string) string {
	return goField.ReplaceAllStringFunc(fault, func(name string) string {
		var b strings.Builder
		for i, c := range strings.TrimPrefix(name, "Policy.") {
			if unicode.IsUpper(c) && i > 0 && b.String()[b.Len()-1] != '.' {
				b.WriteByte('_')
			}
			b.WriteRune(unicode.ToLower(c))
		}
		return b.String()
	})
}
