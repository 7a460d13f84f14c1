package grpcretryv1_test

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	_ "example.com/grpcretry/internal/testsrv/testpb" // linked for its descriptors
	grpcretryv1 "example.com/grpcretry/proto/grpcretry/v1"
)

// With another number every .proto that was compiled before loses its policy
// without a word, and `buf breaking` does not watch extension numbers.
func TestExtensionNumber(t *testing.T) {
	desc := grpcretryv1.E_Retry.TypeDescriptor()
	if got, want := desc.Number(), protoreflect.FieldNumber(77481); got != want {
		t.Errorf("number of %s = %d, want %d", desc.FullName(), got, want)
	}
	if got, want := desc.FullName(), protoreflect.FullName("grpcretry.v1.retry"); got != want {
		t.Errorf("full name = %s, want %s", got, want)
	}
}

// Code is cast to codes.Code: a number that differs would retry another code
// than the one that the .proto names.
func TestCodesAreGRPCs(t *testing.T) {
	names := map[string]bool{}
	for number, name := range grpcretryv1.Code_name {
		if number == 0 {
			continue
		}
		var code codes.Code
		upper := strings.TrimPrefix(name, "CODE_")
		if err := code.UnmarshalJSON([]byte(`"` + upper + `"`)); err != nil {
			t.Errorf("%s is no gRPC code: %v", name, err)
			continue
		}
		if code != codes.Code(number) {
			t.Errorf("%s = %d, gRPC says %d", name, number, code)
		}
		names[upper] = true
	}
	if len(names) != 16 {
		t.Errorf("%d codes, want the 16 that are not OK", len(names))
	}
}

// A client reads the policy from the descriptor that is linked into it.
func TestPolicyIsReadableAtRunTime(t *testing.T) {
	full := policyOf(t, "testsrv.v1.DeclaredService.Full")
	if got := full.GetMaxAttempts(); got != 5 {
		t.Errorf("max_attempts = %d, want 5", got)
	}
	if got := full.GetAttemptTimeout().AsDuration(); got != 1500*time.Millisecond {
		t.Errorf("attempt_timeout = %v, want 1.5s", got)
	}
	if got := full.GetCodes(); len(got) != 2 || got[1] != grpcretryv1.Code_CODE_ABORTED {
		t.Errorf("codes = %v, want UNAVAILABLE and ABORTED", got)
	}
	// DeclaredService/Full stands for "everything": a field that it leaves out
	// is one that no test of the policy reads.
	requireAllSet(t, full.ProtoReflect(), "hedge")

	if got := policyOf(t, "testsrv.v1.DeclaredService.Hedged").GetHedge().GetDelay().AsDuration(); got != 20*time.Millisecond {
		t.Errorf("hedge.delay = %v, want 20ms", got)
	}
	if method := methodOptions(t, "testsrv.v1.TestService.Get"); proto.HasExtension(method, grpcretryv1.E_Retry) {
		t.Error("TestService/Get has a retry policy, want none")
	}
}

// The methods stand for the three levels; were one of them lost in a
// regeneration, tests of idempotency would pass for the wrong reason.
func TestIdempotencyLevels(t *testing.T) {
	for method, want := range map[protoreflect.FullName]descriptorpb.MethodOptions_IdempotencyLevel{
		"testsrv.v1.TestService.Get":    descriptorpb.MethodOptions_NO_SIDE_EFFECTS,
		"testsrv.v1.TestService.Put":    descriptorpb.MethodOptions_IDEMPOTENT,
		"testsrv.v1.TestService.Write":  descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN,
		"testsrv.v1.TestService.List":   descriptorpb.MethodOptions_NO_SIDE_EFFECTS,
		"testsrv.v1.TestService.Take":   descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN,
		"testsrv.v1.TestService.Store":  descriptorpb.MethodOptions_IDEMPOTENT,
		"testsrv.v1.TestService.Append": descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN,
		"testsrv.v1.TestService.Sync":   descriptorpb.MethodOptions_IDEMPOTENT,
		"testsrv.v1.TestService.Chat":   descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN,
	} {
		if got := methodOptions(t, method).GetIdempotencyLevel(); got != want {
			t.Errorf("%s: idempotency_level = %v, want %v", method, got, want)
		}
	}
}

func methodOptions(t *testing.T, name protoreflect.FullName) *descriptorpb.MethodOptions {
	t.Helper()
	desc, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		t.Fatal(err)
	}
	options, ok := desc.Options().(*descriptorpb.MethodOptions)
	if !ok {
		t.Fatalf("options of %s are a %T", name, desc.Options())
	}
	return options
}

func policyOf(t *testing.T, name protoreflect.FullName) *grpcretryv1.Policy {
	t.Helper()
	options := methodOptions(t, name)
	if !proto.HasExtension(options, grpcretryv1.E_Retry) {
		t.Fatalf("%s has no retry policy", name)
	}
	return proto.GetExtension(options, grpcretryv1.E_Retry).(*grpcretryv1.Policy)
}

func requireAllSet(t *testing.T, m protoreflect.Message, except ...protoreflect.Name) {
	t.Helper()
	fields := m.Descriptor().Fields()
next:
	for i := range fields.Len() {
		field := fields.Get(i)
		for _, name := range except {
			if field.Name() == name {
				continue next
			}
		}
		if !m.Has(field) {
			t.Errorf("%s is not set", field.FullName())
		}
	}
	if backoff := fields.ByName("backoff"); backoff != nil {
		requireAllSet(t, m.Get(backoff).Message())
	}
}
