package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
	grpcretryv1 "example.com/grpcretry/proto/grpcretry/v1"
)

// What the owner of an API declares must arrive field by field.
func TestDeclaredPolicy(t *testing.T) {
	for method, want := range map[string]declaration{
		full: {
			idempotency: Idempotent, idemBy: byOption,
			policy: &Policy{
				MaxAttempts: 5, Timeout: 10 * time.Second, AttemptTimeout: 1500 * time.Millisecond,
				FirstResponseTimeout: 2 * time.Second, IdleTimeout: 3 * time.Second,
				Backoff: Backoff{
					Base: 100 * time.Millisecond, Max: 4 * time.Second, Multiplier: 1.5, Jitter: ProportionalJitter(0.25),
					Overload: 5 * time.Second, MaxHint: 6 * time.Second,
				},
				Codes: Codes(codes.Unavailable, codes.Aborted), Idempotency: Idempotent, RetryQuota: true, ReplayBytes: 1024,
			},
		},
		testpb.DeclaredService_Hedged_FullMethodName: {
			idempotency: Idempotent, idemBy: byLevel,
			policy: &Policy{Hedge: Hedge{MaxAttempts: 3, Delay: 20 * time.Millisecond, NonFatal: Codes(codes.Unavailable)}},
		},
		keyed:     {idempotency: Keyed, idemBy: byOption, policy: &Policy{Idempotency: Keyed}},
		withdrawn: {idempotency: NotIdempotent, idemBy: byOption, policy: &Policy{Idempotency: NotIdempotent}},
		testpb.DeclaredService_Watch_FullMethodName: {
			idempotency: Idempotent, idemBy: byOption,
			policy: &Policy{IdleTimeout: time.Second, Idempotency: Idempotent},
		},
		get:   {idempotency: Idempotent, idemBy: byLevel},
		write: {},
	} {
		got := declarationOf(method, true)
		if got.fault != nil || got.file == "" || got.idempotency != want.idempotency || got.idemBy != want.idemBy || !reflect.DeepEqual(got.policy, want.policy) {
			t.Errorf("%s: %+v, want %+v", method, got, want)
		}
		if got.stale() {
			t.Errorf("%s: looked for again at each call", method)
		}
	}
}

// An option that no client can follow must be told with the names that stand in
// the .proto, all faults at once, and must not take a statement that a method is
// not idempotent with it.
func TestDeclaredPolicyFaults(t *testing.T) {
	seconds := func(n int64) *durationpb.Duration { return &durationpb.Duration{Seconds: n} }
	for _, test := range []struct {
		option *grpcretryv1.Policy
		want   string
		idem   Idempotency
	}{
		{&grpcretryv1.Policy{MaxAttempts: -1, Idempotency: 2}, "max_attempts = -1, want 0 (default 3) or more", NotIdempotent},
		{&grpcretryv1.Policy{Timeout: seconds(-1), Idempotency: 1}, "timeout = -1s, want 0 (none) or more", Idempotent},
		{&grpcretryv1.Policy{AttemptTimeout: &durationpb.Duration{Nanos: -5}}, "attempt_timeout = -5ns, want 0 (none) or more", Inherit},
		{&grpcretryv1.Policy{IdleTimeout: &durationpb.Duration{Nanos: 2e9}}, "idle_timeout = {seconds: 0 nanos: 2000000000}, want a valid duration of 0 or more", Inherit},
		{&grpcretryv1.Policy{FirstResponseTimeout: seconds(math.MaxInt64)}, "first_response_timeout = {seconds: 9223372036854775807 nanos: 0}, want a valid duration of 0 or more", Inherit},
		{&grpcretryv1.Policy{Codes: []grpcretryv1.Code{0, 14, 17, -1}}, `codes holds 0, want codes from CODE_CANCELLED (1) to CODE_UNAUTHENTICATED (16)
codes holds 17, want codes from CODE_CANCELLED (1) to CODE_UNAUTHENTICATED (16)
codes holds -1, want codes from CODE_CANCELLED (1) to CODE_UNAUTHENTICATED (16)`, Inherit},
		{&grpcretryv1.Policy{ReplayBytes: math.MinInt64}, "replay_bytes = -1, want 0 (default 262144) or more", Inherit},
		{&grpcretryv1.Policy{Idempotency: 4}, "idempotency = 4, want one of the values of grpcretry.v1.Idempotency", NotIdempotent},
		{&grpcretryv1.Policy{Idempotency: -1}, "idempotency = -1, want one of the values of grpcretry.v1.Idempotency", NotIdempotent},
		{&grpcretryv1.Policy{Idempotency: 257}, "idempotency = 257, want one of the values of grpcretry.v1.Idempotency", NotIdempotent},
		{&grpcretryv1.Policy{Backoff: &grpcretryv1.Backoff{Base: seconds(3), Max: seconds(2), MaxHint: seconds(-1), Multiplier: math.NaN()}},
			`backoff.base = 3s, want at most max = 2s
backoff.multiplier = NaN, want 0 (default 2) or a finite number above 0
backoff.max_hint = -1s, want 0 (default 1m0s) or more`, Inherit},
		{&grpcretryv1.Policy{Backoff: &grpcretryv1.Backoff{Jitter: 4}}, "backoff.jitter_fraction = 0, want a share above 0 and at most 1", Inherit},
		{&grpcretryv1.Policy{Backoff: &grpcretryv1.Backoff{Jitter: 2, JitterFraction: 0.5}}, "backoff.jitter_fraction = 0.5 with backoff.jitter = JITTER_EQUAL, want it only with JITTER_PROPORTIONAL", Inherit},
		{&grpcretryv1.Policy{Backoff: &grpcretryv1.Backoff{Jitter: 9}}, "backoff.jitter = 9, want one of the values of grpcretry.v1.Jitter", Inherit},
		{&grpcretryv1.Policy{Hedge: &grpcretryv1.Hedge{MaxAttempts: 1}}, "hedge.max_attempts = 1, want 2 or more", Inherit},
		{&grpcretryv1.Policy{Hedge: &grpcretryv1.Hedge{MaxAttempts: 2}}, "hedge.delay = 0 without at_once or quantile, want a delay > 0, or at_once: true to send all attempts together", Inherit},
		{&grpcretryv1.Policy{Hedge: &grpcretryv1.Hedge{MaxAttempts: 2, AtOnce: true, NonFatal: []grpcretryv1.Code{0}}}, "hedge.non_fatal holds 0, want codes from CODE_CANCELLED (1) to CODE_UNAUTHENTICATED (16)", Inherit},
	} {
		encoded, err := proto.Marshal(test.option)
		if err != nil {
			t.Fatal(err)
		}
		p, idem, err := declaredPolicy("a.B/C", encoded)
		got := ""
		if err != nil {
			got = strings.ReplaceAll(err.Error(), "grpcretry: option (grpcretry.v1.retry) of a.B/C: ", "")
		}
		if p != nil || idem != test.idem || got != test.want {
			t.Errorf("%v: policy %v, %v, error\n%s\nwant none, %v and\n%s", test.option, p, idem, got, test.idem, test.want)
		}
	}
	if _, _, err := declaredPolicy("a.B/C", []byte{0x08}); err == nil || !strings.Contains(err.Error(), "cannot be decoded") {
		t.Errorf("a truncated option: %v, want a refusal", err)
	}
	for jitter, want := range map[grpcretryv1.Jitter]Jitter{0: FullJitter, 1: FullJitter, 2: EqualJitter, 3: DecorrelatedJitter, 5: NoJitter} {
		var f faults
		if got := fromProtoJitter(&grpcretryv1.Backoff{Jitter: jitter}, &f); got != want || f.err() != nil {
			t.Errorf("%v = %v, %v; want %v", jitter, got, f.err(), want)
		}
	}
}

// An option that is not followed must be told once in the log, or its owner
// believes that it is.
func TestUnusableDeclarationIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		r, err := New(WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		if err != nil {
			t.Fatal(err)
		}
		srv := testsrv.New(nil)
		defer srv.Close()
		cc, err := srv.Dial(r.DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if err := callAny(t.Context(), cc, invalid); err != nil {
				t.Fatal(err)
			}
			if err := r.Update(); err != nil {
				t.Fatal(err)
			}
		}
		if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "max_attempts = -1") || !strings.Contains(text, "testsrv/v1/declared.proto") {
			t.Errorf("log:\n%swant one line with the fault and the file", text)
		}
	})
}

var dynamicFiles sync.Map // names given out

// register registers a .proto at run time, as a program does that loads schemas:
// a service named service with a method M that has these options.
func register(t *testing.T, service string, options *descriptorpb.MethodOptions) {
	t.Helper()
	if _, taken := dynamicFiles.LoadOrStore(service, true); taken {
		return // -count: the registry keeps what it has
	}
	pkg, name, _ := strings.Cut(service, ".")
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String(service + ".proto"), Package: proto.String(pkg), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{{Name: proto.String(name + "Message")}},
		Service: []*descriptorpb.ServiceDescriptorProto{{Name: &name, Method: []*descriptorpb.MethodDescriptorProto{{
			Name: proto.String("M"), InputType: proto.String("." + pkg + "." + name + "Message"), OutputType: proto.String("." + pkg + "." + name + "Message"),
			Options: options,
		}}}},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := protoregistry.GlobalFiles.RegisterFile(file); err != nil {
		t.Fatal(err)
	}
}

// unknown are options that this program does not know, as fields of a number
// with an encoded message.
func unknown(t *testing.T, number protowire.Number, messages ...[]byte) *descriptorpb.MethodOptions {
	t.Helper()
	var b []byte
	for _, m := range messages {
		b = protowire.AppendTag(b, number, protowire.BytesType)
		b = protowire.AppendBytes(b, m)
	}
	o := &descriptorpb.MethodOptions{}
	o.ProtoReflect().SetUnknown(b)
	return o
}

// Schemas that are loaded at run time carry our option as an unknown field or as
// a dynamic message; a gateway that loads them must follow it all the same.
func TestDynamicDeclarations(t *testing.T) {
	encoded := func(p *grpcretryv1.Policy) []byte {
		b, err := proto.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	option := grpcretryv1.E_Retry.TypeDescriptor()
	dynamic := &descriptorpb.MethodOptions{}
	{
		desc := (&grpcretryv1.Policy{}).ProtoReflect().Descriptor()
		message := dynamicpb.NewMessage(desc)
		message.Set(desc.Fields().ByName("max_attempts"), protoreflect.ValueOfInt32(7))
		proto.SetExtension(dynamic, dynamicpb.NewExtensionType(option.Descriptor()), message)
	}
	register(t, "dynamic.Unknown", unknown(t, option.Number(), encoded(&grpcretryv1.Policy{MaxAttempts: 7, Idempotency: grpcretryv1.Idempotency_IDEMPOTENCY_KEYED})))
	register(t, "dynamic.Split", unknown(t, option.Number(), encoded(&grpcretryv1.Policy{MaxAttempts: 2}), encoded(&grpcretryv1.Policy{MaxAttempts: 7})))
	register(t, "dynamic.Dynamic", dynamic)
	register(t, "dynamic.Broken", unknown(t, option.Number(), []byte{0x08}))
	register(t, "dynamic.None", nil)

	for service, want := range map[string]struct {
		attempts int
		idem     Idempotency
		fault    bool
	}{
		"dynamic.Unknown": {7, Keyed, false},
		"dynamic.Split":   {7, Inherit, false},
		"dynamic.Dynamic": {7, Inherit, false},
		"dynamic.Broken":  {3, Inherit, true},
		"dynamic.None":    {3, Inherit, false},
	} {
		e := newRetrier(t).Explain(service + "/M")
		if e.Policy.MaxAttempts != want.attempts || e.Policy.Idempotency != want.idem || (e.Fault != "") != want.fault {
			t.Errorf("%s: %d attempts, %v, fault %v; want %+v", service, e.Policy.MaxAttempts, e.Policy.Idempotency, e.Fault, want)
		}
	}

	// Options of a message type of the program's own.
	desc := (&descriptorpb.MethodOptions{}).ProtoReflect().Descriptor()
	own := dynamicpb.NewMessage(desc)
	own.Set(desc.Fields().ByName("idempotency_level"), protoreflect.ValueOfEnum(2))
	own.SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, option.Number(), protowire.BytesType), encoded(&grpcretryv1.Policy{MaxAttempts: 7})))
	o, err := readMethodOptions(own)
	if err != nil || o.level != descriptorpb.MethodOptions_IDEMPOTENT || !o.declared || len(o.retry) == 0 {
		t.Errorf("dynamic MethodOptions: %+v, %v", o, err)
	}
}

// A schema may be loaded after the first call of its methods: from then on it
// counts, or the order of two goroutines at start decides about retries for good.
func TestDeclarationThatComesLate(t *testing.T) {
	service := fmt.Sprintf("late.S%d", time.Now().UnixNano())
	method := "/" + service + "/M"
	r := newRetrier(t)
	if m := r.set.Load().lookup(method); m.idempotency != Inherit || m.source != SourceDefault {
		t.Fatalf("before: %v from %v", m.idempotency, m.source)
	}
	memory := r.set.Load().lookup(method).memory
	option, err := proto.Marshal(&grpcretryv1.Policy{MaxAttempts: 7, Idempotency: grpcretryv1.Idempotency_IDEMPOTENCY_IDEMPOTENT})
	if err != nil {
		t.Fatal(err)
	}
	register(t, service, unknown(t, grpcretryv1.E_Retry.TypeDescriptor().Number(), option))
	m := r.set.Load().lookup(method)
	if m.idempotency != Idempotent || m.policy.MaxAttempts != 7 || m.memory != memory {
		t.Errorf("after: %v, %d attempts, the same memory %v; want Idempotent, 7 and true", m.idempotency, m.policy.MaxAttempts, m.memory == memory)
	}
	if again := r.set.Load().lookup(method); again != m {
		t.Error("resolved at every call")
	}

	// The same through calls, which remember the method of the call before.
	service = fmt.Sprintf("late.T%d", time.Now().UnixNano()) // a bubble's time is the same each time
	synctest.Test(t, func(t *testing.T) {
		invoker := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			return status.Error(codes.Unavailable, "down")
		}
		r := newRetrier(t)
		attempts := func() int {
			var report Report
			_ = r.UnaryClientInterceptor()(t.Context(), "/"+service+"/M", nil, nil, nil, invoker, WithReport(&report))
			return report.Made()
		}
		for range 3 {
			if n := attempts(); n != 1 {
				t.Errorf("%d attempts before, want 1", n)
			}
		}
		register(t, service, unknown(t, grpcretryv1.E_Retry.TypeDescriptor().Number(), option))
		if n := attempts(); n != 7 {
			t.Errorf("%d attempts after, want 7", n)
		}
	})
}

// A GET that also is a POST may write; only what is nothing but GET may count, and
// only if the option says so.
func TestHTTPGet(t *testing.T) {
	str := func(field protowire.Number, s string) []byte {
		return protowire.AppendString(protowire.AppendTag(nil, field, protowire.BytesType), s)
	}
	join := func(parts ...[]byte) (all []byte) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	also := func(rule []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, fieldHTTPAdditionalBindings, protowire.BytesType), rule)
	}
	const get, post, body, custom, selector = 2, 4, 7, 8, 1
	for i, test := range []struct {
		name string
		rule []byte
		want Idempotency
	}{
		{"get", str(get, "/v1/things"), Idempotent},
		{"get with a selector and a response body", join(str(selector, "a.B.C"), str(get, "/v1/things"), str(12, "thing")), Idempotent},
		{"put", str(3, "/v1/things"), Inherit},
		{"post", join(str(post, "/v1/things"), str(body, "*")), Inherit},
		{"delete", str(5, "/v1/things"), Inherit},
		{"patch", str(6, "/v1/things"), Inherit},
		{"custom", str(custom, "\x0a\x04HEAD"), Inherit},
		{"get, then post in the same oneof", join(str(get, "/v1/things"), str(post, "/v1/things")), Inherit},
		{"get, and get", join(str(get, "/v1/things"), also(str(get, "/v1/others"))), Idempotent},
		{"get, and post", join(str(get, "/v1/things"), also(str(post, "/v1/others"))), Inherit},
		{"nothing", nil, Inherit},
		{"no pattern", str(selector, "a.B.C"), Inherit},
	} {
		service := fmt.Sprintf("http.S%d", i)
		register(t, service, unknown(t, fieldHTTP, test.rule))
		if got := newRetrier(t, WithHTTPGetIdempotent()).Explain(service + "/M"); got.Policy.Idempotency != test.want {
			t.Errorf("%s: %v, want %v", test.name, got.Policy.Idempotency, test.want)
		} else if test.want == Idempotent && got.IdempotencyPlace != "google.api.http in "+service+".proto" {
			t.Errorf("%s: by %s", test.name, got.IdempotencyPlace)
		}
		if got := newRetrier(t).Explain(service + "/M").Policy.Idempotency; got != Inherit {
			t.Errorf("%s, without the option: %v, want unknown", test.name, got)
		}
	}
	register(t, "http.Broken", unknown(t, fieldHTTP, []byte{0x12}))
	if e := newRetrier(t, WithHTTPGetIdempotent()).Explain("http.Broken/M"); e.Fault == "" || e.Policy.Idempotency != Inherit {
		t.Errorf("a truncated rule: %v, %v; want a fault and unknown", e.Fault, e.Policy.Idempotency)
	}
	// The weakest statement: every other one wins.
	o := unknown(t, fieldHTTP, str(get, "/v1/things"))
	proto.SetExtension(o, grpcretryv1.E_Retry, &grpcretryv1.Policy{Idempotency: grpcretryv1.Idempotency_IDEMPOTENCY_NOT_IDEMPOTENT})
	register(t, "http.Withdrawn", o)
	if got := newRetrier(t, WithHTTPGetIdempotent()).Explain("http.Withdrawn/M").Policy.Idempotency; got != NotIdempotent {
		t.Errorf("GET whose option says not idempotent: %v, want that", got)
	}
}

// Whatever bytes stand in the options of a schema from outside, reading them must end.
func FuzzMethodOptions(f *testing.F) {
	f.Add([]byte(nil))
	for _, method := range []string{full, keyed, get} {
		b, err := proto.Marshal(findMethod(method).Options())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add(protowire.AppendBytes(protowire.AppendTag(nil, fieldHTTP, protowire.BytesType), []byte{0x12, 0x02, '/', 'a', 0x5a, 0x00}))
	f.Fuzz(func(t *testing.T, b []byte) {
		o := &descriptorpb.MethodOptions{}
		o.ProtoReflect().SetUnknown(b)
		read, err := readMethodOptions(o)
		if err != nil || !read.declared {
			return
		}
		p, idempotency, err := declaredPolicy("a.B/C", read.retry)
		if idempotency > Keyed || (p == nil) == (err == nil) {
			t.Fatalf("policy %v, %v, %v", p, idempotency, err)
		}
		if p != nil {
			var faults faults
			if p.validate(&faults); faults.err() != nil {
				t.Fatal(faults.err())
			}
		}
	})
}
