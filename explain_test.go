package grpcretry

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Explain is what a user reads when a call was not retried: it must tell the
// policy, its origin and what would change the answer, for each source.
func TestExplain(t *testing.T) {
	const service = "testsrv.v1.TestService/*"
	for _, tt := range []struct {
		name   string
		opts   []Option
		method string
		want   string
	}{
		{"nothing said", nil, write, `/testsrv.v1.TestService/Write
  policy         from default, unless the ClientConn's service config has a retryPolicy for the method
  attempts       at most 3
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  idempotency    unknown: only attempts that never reached a server are repeated; to change that,
                 declare idempotency_level in the .proto or use WithIdempotent("testsrv.v1.TestService/Write")
  budget         the default, one for each target
`},
		{"declared in the .proto, resolver off", []Option{WithoutResolverConfig()}, get, `/testsrv.v1.TestService/Get
  policy         from default
  attempts       at most 3
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  idempotency    idempotent (from proto: idempotency_level in testsrv/v1/testsrv.proto)
  budget         the default, one for each target
`},
		{"default, nothing retried by its code", []Option{WithDefaultPolicy(Policy{Codes: Codes(), MaxAttempts: 2, Backoff: Backoff{Jitter: NoJitter, Multiplier: 1}})}, get, `/testsrv.v1.TestService/Get
  policy         from default: WithDefaultPolicy
  attempts       at most 2
  codes          none
  backoff        50ms times 1 up to 2s, NoJitter; overload 1s; hints up to 1m0s
  idempotency    idempotent (from proto: idempotency_level in testsrv/v1/testsrv.proto)
  budget         the default, one for each target
`},
		{"service, withdrawn, never", []Option{WithMethodPolicy(service, Policy{MaxAttempts: 1, AttemptTimeout: time.Second, Idempotency: NotIdempotent})}, get, `/testsrv.v1.TestService/Get
  policy         from service: WithMethodPolicy("testsrv.v1.TestService/*")
  attempts       1: never retried
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  timeout        1s for an attempt
  idempotency    not idempotent (from service: WithMethodPolicy("testsrv.v1.TestService/*")): only attempts that never reached a server are repeated
  budget         the default, one for each target
`},
		{"method, everything set", []Option{WithIdempotent(service), WithMethodPolicy(write, Policy{
			MaxAttempts: 5, Timeout: 10 * time.Second, AttemptTimeout: time.Second, FirstResponseTimeout: 2 * time.Second, IdleTimeout: 5 * time.Second,
			Codes: Codes(codes.ResourceExhausted, codes.Aborted), RetryQuota: true, RetryIf: func(Attempt) Verdict { return VerdictDefault },
			Backoff: Backoff{Base: time.Second, Max: time.Minute, Jitter: ProportionalJitter(0.2), Overload: 3 * time.Second, MaxHint: time.Hour},
		})}, "testsrv.v1.TestService/Write", `/testsrv.v1.TestService/Write
  policy         from method: WithMethodPolicy("testsrv.v1.TestService/Write")
  attempts       at most 5
  codes          RESOURCE_EXHAUSTED, ABORTED
                 RetryIf may decide otherwise
  backoff        1s times 2 up to 1m0s, ProportionalJitter(0.2); overload 3s; hints up to 1h0m0s
  timeout        10s for the whole call
                 1s for an attempt
                 2s for the first response of a stream
                 5s between the responses of a stream
  idempotency    idempotent (from service: WithIdempotent("testsrv.v1.TestService/*"))
  budget         the default, one for each target
`},
		{"keyed", []Option{WithMethodPolicy("a.B/C", Policy{Idempotency: Keyed, Codes: Codes(codes.Unavailable)})}, "/a.B/C", `/a.B/C
  policy         from method: WithMethodPolicy("a.B/C")
  attempts       at most 3
  codes          UNAVAILABLE
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  idempotency    keyed (from method: WithMethodPolicy("a.B/C"))
  budget         the default, one for each target
`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := newRetrier(t, tt.opts...).Explain(tt.method).String(); got != tt.want {
				t.Errorf("%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// Work may run again unless somebody says otherwise, and follows no policy that is
// meant for RPCs. An Explain that says otherwise sends its reader after a fault
// that is none, and so does an Audit that lists it.
func TestExplainAndAuditKnowWork(t *testing.T) {
	const config = `{"methodConfig": [{"name": [{}], "timeout": "9s", "retryPolicy": {"maxAttempts": 5, "initialBackoff": "1s",
		"maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["ABORTED"]}}]}`
	const rest = `
  policy         from default
  attempts       at most 3
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  idempotency    idempotent (from default: work that Do runs)
  budget         the default, one for each target
`
	r := newRetrier(t, WithServiceConfig(config), WithMethodPolicy("once/*", Policy{Idempotency: NotIdempotent}))
	check := func() {
		t.Helper()
		for name, want := range map[string]string{"reindex": "/do/reindex", "jobs/export": "/jobs/export"} {
			if got := r.Explain(name).String(); got != want+rest {
				t.Errorf("%s\nwant\n%s", got, want+rest)
			}
		}
	}
	fail := func(context.Context) error { return status.Error(codes.DataLoss, "lost") }
	for _, name := range []string{"jobs/export", "reindex", "once/letter"} {
		_ = r.Do(t.Context(), name, fail)
	}
	check()
	if got := r.Explain("/jobs/export").Policy; got.Idempotency != Inherit || got.MaxAttempts != 5 {
		t.Errorf("an RPC of the same name: %v, %d attempts; want unknown, 5", got.Idempotency, got.MaxAttempts)
	}
	if list := r.Audit(); len(list) != 1 || list[0].Method != "/once/letter" || list[0].Idempotency != NotIdempotent {
		t.Errorf("audit: %v, want only the work that may not run twice", list)
	}
	if err := r.Update(WithServiceConfig(config)); err != nil {
		t.Fatal(err)
	}
	check()
	if list := r.Audit(); len(list) != 0 {
		t.Errorf("audit: %v, want nothing", list)
	}
}

// What Explain says must be what calls do, also after an Update.
func TestExplainIsWhatCallsDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithMethodPolicy(get, Policy{MaxAttempts: 4, Backoff: Backoff{Jitter: NoJitter}}))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		for i, update := range []func() error{
			func() error { return nil },
			func() error { return r.Update(WithMethodPolicy("testsrv.v1.TestService/*", Policy{MaxAttempts: 2})) },
			func() error { return r.Update(WithMethodPolicy(get, Policy{Idempotency: NotIdempotent})) },
		} {
			if err := update(); err != nil {
				t.Fatal(err)
			}
			before := srv.Count(get)
			var report Report
			if _, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report)); err == nil {
				t.Fatal("no error")
			}
			e := r.Explain(get)
			want := e.Policy.MaxAttempts
			if !e.Policy.Idempotency.repeatable() {
				want = 1
			}
			if n := srv.Count(get) - before; n != want || n != []int{4, 2, 1}[i] {
				t.Errorf("%d attempts, but\n%v", n, e)
			}
		}
	})
}

// The Effective that Explain returns carries the same facts for programs.
func TestEffective(t *testing.T) {
	r := newRetrier(t, WithMethodPolicy("testsrv.v1.TestService/*", Policy{MaxAttempts: 5}))
	got := r.Explain(get)
	want := Effective{
		Method: get, Policy: Policy{MaxAttempts: 5, Idempotency: Idempotent}.withDefaults(),
		PolicySource: SourceService, PolicyPlace: `WithMethodPolicy("testsrv.v1.TestService/*")`, TimeoutSource: SourceService,
		IdempotencySource: SourceProto, IdempotencyPlace: "idempotency_level in testsrv/v1/testsrv.proto",
		Budget: "the default, one for each target",
	}
	if got, want := fmt.Sprintf("%#v", got), fmt.Sprintf("%#v", want); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	if e := r.Explain("/a.B/C"); !e.Resolver || e.PolicySource != SourceDefault || e.Policy.Idempotency != Inherit {
		t.Errorf("%+v, want the default policy, unless the resolver has one", e)
	}
	if e := newRetrier(t, WithoutResolverConfig()).Explain("/a.B/C"); e.Resolver {
		t.Errorf("%+v, want no resolver", e)
	}
}
