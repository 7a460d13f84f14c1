package grpcretry

import (
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A zero field means its documented default, and a set one means itself: a
// default that creeps in makes retries that nobody asked for.
func TestPolicyDefaults(t *testing.T) {
	want := Policy{
		MaxAttempts: 3,
		Backoff:     Backoff{Base: 50 * time.Millisecond, Max: 2 * time.Second, Multiplier: 2, Overload: time.Second, MaxHint: time.Minute},
		Codes:       defaultCodes,
		ReplayBytes: 262144,
	}
	if got := (Policy{}).withDefaults(); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v\nwant %+v", got, want)
	}
	full := Policy{
		MaxAttempts: 1, Timeout: 2, AttemptTimeout: 3, FirstResponseTimeout: 4, IdleTimeout: 5,
		Backoff: Backoff{Base: 6, Max: 7, Multiplier: 8, Jitter: EqualJitter, Overload: 9, MaxHint: 10},
		Codes:   Codes(), Idempotency: Keyed, Hedge: Hedge{MaxAttempts: 11, Delay: 12, NonFatal: Codes()}, ReplayBytes: 13, RetryQuota: true,
	}
	if got := full.withDefaults(); !reflect.DeepEqual(got, full) {
		t.Errorf("%+v\nwant %+v", got, full)
	}
	// A new field needs a default, a check and a line here.
	if n := reflect.TypeFor[Policy]().NumField(); n != 12 {
		t.Errorf("Policy has %d fields; this test knows 12", n)
	}
}

// The defaults as a user meets them: a policy that says nothing makes three
// attempts, and the documented backoff lies between them.
func TestPolicyDefaultsInACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: Backoff{Jitter: NoJitter}}))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		start := time.Now()
		if _, err := client.Get(t.Context(), &testpb.Request{}); err == nil {
			t.Fatal("no error")
		}
		if n := srv.Count(get); n != 3 || time.Since(start) != 150*time.Millisecond {
			t.Errorf("%d attempts in %v, want 3 in 150ms", n, time.Since(start))
		}
	})
}
