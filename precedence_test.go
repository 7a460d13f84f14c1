package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

const (
	full      = testpb.DeclaredService_Full_FullMethodName      // declares a whole policy, with 5 attempts
	withdrawn = testpb.DeclaredService_Withdrawn_FullMethodName // declares that it is not idempotent
	keyed     = testpb.DeclaredService_Keyed_FullMethodName
	invalid   = testpb.DeclaredService_Invalid_FullMethodName // declares what no client can follow
)

// callAny makes one call of any method.
func callAny(ctx context.Context, cc *grpc.ClientConn, method string, opts ...grpc.CallOption) error {
	return cc.Invoke(ctx, method, &testpb.Request{}, &testpb.Response{}, opts...)
}

// configFor is a service config with a policy for a name, which is JSON.
func configFor(name string, attempts int, more ...string) string {
	return fmt.Sprintf(`{"methodConfig": [{"name": [%s], "retryPolicy": {"maxAttempts": %d, "initialBackoff": "0.1s", "maxBackoff": "1s",
		"backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE", "ABORTED"]}}%s]}`, name, attempts, strings.Join(more, ""))
}

const declaredService = `{"service": "testsrv.v1.DeclaredService"}`

// Each team expects its own setting to win where it is the more binding one. All
// combinations of sources: the most binding one decides, in what is done and in
// what the event says.
func TestPolicyPrecedence(t *testing.T) {
	type level struct {
		source   string
		attempts int
	}
	levels := []level{{"call", 9}, {"method", 8}, {"service", 7}, {"default", 6}, {"service_config", 4}, {"resolver", 2}, {"proto", 5}}
	for mask := range 1 << len(levels) {
		given := func(i int) bool { return mask&(1<<i) != 0 }
		method, want := get, level{"default", DefaultMaxAttempts}
		if given(6) {
			method = full
		}
		for i := range levels {
			if given(i) {
				want = levels[i]
				break
			}
		}
		policy := func(i int) Policy {
			return Policy{MaxAttempts: levels[i].attempts, Idempotency: Idempotent}
		}
		var opts []Option
		var dials []grpc.DialOption
		var calls []grpc.CallOption
		service := method[1:strings.LastIndex(method, "/")]
		if given(0) {
			calls = append(calls, WithCallPolicy(func(p *Policy) { p.MaxAttempts = levels[0].attempts }))
		}
		if given(1) {
			opts = append(opts, WithMethodPolicy(method, policy(1)))
		}
		if given(2) {
			opts = append(opts, WithMethodPolicy(service+"/*", policy(2)))
		}
		if given(3) {
			opts = append(opts, WithDefaultPolicy(policy(3)))
		}
		if given(4) {
			opts = append(opts, WithServiceConfig(configFor(fmt.Sprintf(`{"service": %q}`, service), levels[4].attempts)))
		}
		if given(5) {
			dials = append(dials, grpc.WithDefaultServiceConfig(configFor(fmt.Sprintf(`{"service": %q}`, service), levels[5].attempts)))
		}
		synctest.Test(t, func(t *testing.T) {
			srv := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
			defer srv.Close()
			cc, err := srv.Dial(append(newRetrier(t, append(opts, WithBudget(Unlimited()))...).DialOptions(), dials...)...)
			if err != nil {
				t.Fatal(err)
			}
			ctx, events := traced(t, t.Context())
			_ = callAny(ctx, cc, method, calls...)
			list := events()
			last := list[len(list)-1]
			if n := srv.Count(method); n != want.attempts || last["grpcretry.policy.source"] != want.source {
				t.Errorf("sources %07b: %d attempts from %v, want %d from %s", mask, n, last["grpcretry.policy.source"], want.attempts, want.source)
			}
		})
	}
}

// A write that somebody calls unsafe must not be repeated because somebody less
// binding calls it safe. All combinations of what can be said of a method.
func TestIdempotencyPrecedence(t *testing.T) {
	said := []Idempotency{Inherit, Idempotent, NotIdempotent}
	for _, method := range []string{get, write, withdrawn} { // the .proto says yes, nothing, no
		declared := map[string]Idempotency{get: Idempotent, withdrawn: NotIdempotent}[method]
		service := method[1:strings.LastIndex(method, "/")]
		for n := range 3 * 3 * 3 * 3 * 3 {
			exact, ofService, fallback := said[n%3], said[n/3%3], said[n/9%3]
			config, resolver := n/27%3, n/81%3 // 0 has no policy, 1 names the service, 2 says {}
			want := declared
			for _, i := range []Idempotency{named(resolver), named(config), fallback, ofService, exact} {
				if i != Inherit {
					want = i
				}
			}
			var opts []Option
			var dials []grpc.DialOption
			opts = append(opts,
				WithMethodPolicy(method, Policy{Idempotency: exact}),
				WithMethodPolicy(service+"/*", Policy{Idempotency: ofService}),
				WithDefaultPolicy(Policy{Idempotency: fallback}), WithBudget(Unlimited()))
			name := map[int]string{1: fmt.Sprintf(`{"service": %q}`, service), 2: "{}"}
			if config > 0 {
				opts = append(opts, WithServiceConfig(configFor(name[config], 3)))
			}
			if resolver > 0 {
				dials = append(dials, grpc.WithDefaultServiceConfig(configFor(name[resolver], 3)))
			}
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				defer srv.Close()
				cc, err := srv.Dial(append(newRetrier(t, opts...).DialOptions(), dials...)...)
				if err != nil {
					t.Fatal(err)
				}
				_ = callAny(t.Context(), cc, method)
				if repeated := srv.Count(method) > 1; repeated != want.repeatable() {
					t.Errorf("%s: exact %v, service %v, default %v, config %d, resolver %d: repeated %v, want %v", method, exact, ofService, fallback, config, resolver, repeated, want)
				}
			})
		}
	}
}

func named(config int) Idempotency {
	if config == 1 {
		return Idempotent
	}
	return Inherit
}

// Where the .proto says that the server knows repeated calls by their key, a
// service config that names the method must not take the key away.
func TestServiceConfigKeepsTheKey(t *testing.T) {
	for _, inCode := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			var opts []Option
			var dials []grpc.DialOption
			if doc := configFor(declaredService, 3); inCode {
				opts = append(opts, WithServiceConfig(doc))
			} else {
				dials = append(dials, grpc.WithDefaultServiceConfig(doc))
			}
			srv := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
			defer srv.Close()
			cc, err := srv.Dial(append(newRetrier(t, opts...).DialOptions(), dials...)...)
			if err != nil {
				t.Fatal(err)
			}
			for call := range 2 { // the first comes before the ClientConn has a config
				_ = callAny(t.Context(), cc, keyed)
				keys := map[string]bool{}
				for _, a := range srv.Attempts(keyed)[3*call:] {
					keys[strings.Join(a.Metadata.Get("idempotency-key"), ",")] = true
				}
				if n := srv.Count(keyed); n != 3*(call+1) || len(keys) != 1 || keys[""] {
					t.Errorf("in code %v, call %d: %d attempts with keys %v, want 3 with the same key", inCode, call+1, n, keys)
				}
			}
		})
	}
}

// An entry without a policy takes its methods out of a less specific one's, as
// gRPC does, also where the .proto would allow retries.
func TestEntryWithoutPolicyIsNotRetried(t *testing.T) {
	const out = `, {"name": [{"service": "testsrv.v1.TestService", "method": "Get"}], "timeout": "20s"}`
	doc := configFor("{}", 3, out)
	for name, options := range map[string]struct {
		opts  []Option
		dials []grpc.DialOption
	}{
		"config in code":           {opts: []Option{WithServiceConfig(doc)}},
		"config of the ClientConn": {dials: []grpc.DialOption{grpc.WithDefaultServiceConfig(doc)}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				srv := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				defer srv.Close()
				cc, err := srv.Dial(append(newRetrier(t, options.opts...).DialOptions(), options.dials...)...)
				if err != nil {
					t.Fatal(err)
				}
				for method, want := range map[string]int{get: 1, put: 3} {
					if _ = callAny(t.Context(), cc, method); srv.Count(method) != want {
						t.Errorf("%s: %d attempts, want %d", method, srv.Count(method), want)
					}
				}
				if left := srv.Attempts(get)[0].Left; left != 20*time.Second {
					t.Errorf("the attempt has %v left, want the entry's 20s", left)
				}
			})
		})
	}
}

// A service config that only has a timeout must not switch off what somebody
// less binding says of retries, and must hold all the same.
func TestServiceConfigTimeoutAlone(t *testing.T) {
	doc := fmt.Sprintf(`{"methodConfig": [{"name": [%s], "timeout": "0.25s"}]}`, declaredService)
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithServiceConfig(doc))
		srv := testsrv.New(testsrv.Script{"*": testsrv.Func(func(int, testsrv.Attempt) testsrv.Step {
			return testsrv.Step{Code: codes.Aborted, Delay: 100 * time.Millisecond}
		})})
		defer srv.Close()
		cc, err := srv.Dial(r.DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		e := r.Explain(full)
		if e.PolicySource != SourceProto || e.TimeoutSource != SourceServiceConfig || e.Policy.Timeout != 250*time.Millisecond || e.Policy.MaxAttempts != 5 {
			t.Errorf("Explain: %+v", e)
		}
		// The backoff of Full is 100 ms +- 25%, so one retry fits 250 ms but is cut short.
		began := time.Now()
		err = callAny(t.Context(), cc, full)
		if took := time.Since(began); took > 250*time.Millisecond || took < 175*time.Millisecond {
			t.Errorf("the call took %v, want at most the service config's 250ms: %v", took, err)
		}
		if n := srv.Count(full); n != 2 {
			t.Errorf("%d attempts, want 2", n)
		}
	})
}

// The timeout of a service config in code must hold also where a call edits the
// policy that the resolver has.
func TestServiceConfigTimeoutOfAnEditedCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithServiceConfig(`{"methodConfig": [{"name": [{}], "timeout": "5s"}]}`))
		srv := testsrv.New(nil)
		defer srv.Close()
		cc, err := srv.Dial(append(r.DialOptions(), grpc.WithDefaultServiceConfig(configFor("{}", 3)))...)
		if err != nil {
			t.Fatal(err)
		}
		for range 2 { // the first comes before the ClientConn has a config
			if err := callAny(t.Context(), cc, get, WithCallPolicy(func(p *Policy) { p.MaxAttempts = 7 })); err != nil {
				t.Fatal(err)
			}
		}
		for i, a := range srv.Attempts(get) {
			if a.Left != 5*time.Second {
				t.Errorf("call %d has %v left, want 5s", i+1, a.Left)
			}
		}
	})
}

// With waitForReady from a service config, attempts that end before there is a
// connection must not use up maxAttempts, as with the call's own option.
func TestServiceConfigWaitForReadyKeepsAttempts(t *testing.T) {
	doc := strings.Replace(configFor("{}", 2), `"retryPolicy": {`, `"waitForReady": true, "retryPolicy": {"perAttemptRecvTimeout": "1s", `, 1)
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t, WithServiceConfig(doc)), nil)
		srv.Kill()
		go func() {
			time.Sleep(30 * time.Second)
			if err := srv.Restart(); err != nil {
				t.Error(err)
			}
		}()
		var report Report
		if _, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report)); err != nil || report.Made() < 10 {
			t.Errorf("%v after %d attempts, want success after the server came back", err, report.Made())
		}
	})
}

// What a service config adds to the attempts of one method must not reach those of another.
func TestServiceConfigAdditionsStayWithTheirMethod(t *testing.T) {
	doc := `{"methodConfig": [{"name": [{"service": "testsrv.v1.TestService", "method": "Get"}], "maxResponseMessageBytes": 1000}]}`
	synctest.Test(t, func(t *testing.T) {
		_, client := serve(t, newRetrier(t, WithServiceConfig(doc)), testsrv.Script{"*": testsrv.Sequence{{ReplySize: 2000}}})
		for range 3 {
			if _, err := client.Get(t.Context(), &testpb.Request{}); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("Get: %v, want RESOURCE_EXHAUSTED", err)
			}
			if _, err := client.Put(t.Context(), &testpb.Request{}); err != nil {
				t.Errorf("Put: %v", err)
			}
		}
	})
}

// With a policy in the .proto and another at the resolver only the resolver's
// counts, from the first attempt on.
func TestResolverReplacesDeclaredTimeouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{"*": testsrv.Sequence{{}, {Delay: 3 * time.Second}}})
		defer srv.Close()
		cc, err := srv.Dial(append(newRetrier(t).DialOptions(), grpc.WithDefaultServiceConfig(configFor(declaredService, 3)))...)
		if err != nil {
			t.Fatal(err)
		}
		if err := callAny(t.Context(), cc, full); err != nil { // only now has the name been resolved
			t.Fatal(err)
		}
		if err := callAny(t.Context(), cc, full); err != nil { // Full declares an attempt_timeout of 1.5 s
			t.Errorf("the declared timeout ended the call: %v", err)
		}
		if n := srv.Count(full); n != 2 {
			t.Errorf("%d attempts, want 2", n)
		}
	})
}

// What is in a service config beside retries must hold, or be refused.
func TestServiceConfigAddsToCalls(t *testing.T) {
	const config = `{"methodConfig": [{"name": [{}], "waitForReady": %v, "maxRequestMessageBytes": 1000, "maxResponseMessageBytes": 2000}]}`
	for _, inCode := range []bool{true, false} { // with and without a policy in code beside it
		opts := []Option{WithServiceConfig(fmt.Sprintf(config, true))}
		if inCode {
			opts = append(opts, WithDefaultPolicy(Policy{}))
		}
		synctest.Test(t, func(t *testing.T) {
			srv, client := serve(t, newRetrier(t, opts...), testsrv.Script{put: testsrv.Sequence{{ReplySize: 3000}}})
			limit := func(n int) grpc.CallOption { return grpc.MaxCallSendMsgSize(n) }
			for _, test := range []struct {
				name string
				size int
				opts []grpc.CallOption
				want codes.Code
			}{
				{"below both limits", 500, []grpc.CallOption{limit(5000)}, codes.OK},
				{"above the config's", 1500, nil, codes.ResourceExhausted},
				{"above the config's, below the call's", 1500, []grpc.CallOption{limit(5000)}, codes.ResourceExhausted},
				{"below the config's, above the call's", 500, []grpc.CallOption{limit(100)}, codes.ResourceExhausted},
			} {
				if _, err := client.Get(t.Context(), &testpb.Request{Payload: make([]byte, test.size)}, test.opts...); status.Code(err) != test.want {
					t.Errorf("request %s: %v, want %v", test.name, err, test.want)
				}
			}
			if _, err := client.Put(t.Context(), &testpb.Request{}, grpc.MaxCallRecvMsgSize(1e6)); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("response above the config's limit: %v, want RESOURCE_EXHAUSTED", err)
			}

			srv.Kill()
			go func() {
				time.Sleep(time.Minute)
				if err := srv.Restart(); err != nil {
					t.Error(err)
				}
			}()
			began := time.Now()
			if _, err := client.Get(t.Context(), &testpb.Request{}, grpc.WaitForReady(false)); status.Code(err) != codes.Unavailable || time.Since(began) > 10*time.Second {
				t.Errorf("the call's own WaitForReady(false): %v after %v, want UNAVAILABLE within the retries", err, time.Since(began))
			}
			var report Report
			if _, err := client.Get(t.Context(), &testpb.Request{}, WithReport(&report)); err != nil || time.Since(began) < time.Minute || report.Made() != 1 {
				t.Errorf("waitForReady: %v after %v and %d attempts, want success after a minute and 1", err, time.Since(began), report.Made())
			}
		})
	}
	// In code beats the ClientConn's.
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t, WithServiceConfig(fmt.Sprintf(config, false))), nil,
			grpc.WithDefaultServiceConfig(fmt.Sprintf(config, true)))
		if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		srv.Kill()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := client.Get(ctx, &testpb.Request{}); status.Code(err) != codes.Unavailable {
			t.Errorf("waitForReady false in code, true at the resolver: %v, want UNAVAILABLE", err)
		}
	})
}

// perAttemptRecvTimeout is why a user of gRPC for Java has the config.
func TestServiceConfigAttemptTimeout(t *testing.T) {
	doc := strings.Replace(configFor("{}", 2), `"maxAttempts"`, `"perAttemptRecvTimeout": "0.3s", "maxAttempts"`, 1)
	synctest.Test(t, func(t *testing.T) {
		srv, client := serve(t, newRetrier(t, WithServiceConfig(doc)), testsrv.Script{get: testsrv.Sequence{{Block: true}, {}}})
		if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		attempts := srv.Attempts(get)
		if len(attempts) != 2 || attempts[0].Left != 300*time.Millisecond {
			t.Errorf("%d attempts, the first with %v left; want 2 and 300ms", len(attempts), attempts[0].Left)
		}
	})
}

// Whoever moves a hedgingPolicy over from another language must have its hedges.
func TestHedgingPolicyOfServiceConfig(t *testing.T) {
	doc := `{"methodConfig": [{"name": [{"service": "testsrv.v1.TestService"}], "hedgingPolicy":
		{"maxAttempts": 3, "hedgingDelay": "0.5s", "nonFatalStatusCodes": ["UNAVAILABLE"]}}]}`
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithServiceConfig(doc))
		srv, client := serve(t, r, testsrv.Script{get: testsrv.Sequence{{Delay: time.Minute}, {Delay: 100 * ms, Code: codes.Unavailable}, {}}})
		begun := time.Now()
		_, err := client.Get(t.Context(), &testpb.Request{})
		if n := srv.Count(get); n != 3 || err != nil {
			t.Errorf("%d attempts, %v; want 3 and success", n, err)
		}
		checkElapsed(t, begun, 600*ms)
		text := r.Explain(get).String()
		if want := "at most 3 that overlap: another one 500ms after the latest began"; !strings.Contains(text, want) {
			t.Errorf("Explain does not say %q:\n%s", want, text)
		}
	})
}

// Somebody who asks why a call was or was not retried must find every part of
// the answer with its source.
func TestExplainOfServiceConfigs(t *testing.T) {
	doc := `{
  "methodConfig": [
    {
      "name": [{"service": "orders.v1.Orders"}],
      "timeout": "2s",
      "waitForReady": true,
      "maxRequestMessageBytes": 1000,
      "retryPolicy": {"maxAttempts": 10, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}
    },
    {"name": [{}], "timeout": "30s"}
  ],
  "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1}
}`
	method, err := NewBudget(BudgetConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r := newRetrier(t, WithServiceConfig(doc), WithDryRun("orders.v1.Orders/*"), WithMethodBudget("orders.v1.Orders/List", method),
		WithMethodPolicy("orders.v1.Orders/List", Policy{AttemptTimeout: time.Second}), WithIdempotent("orders.v1.Orders/*"))
	for name, want := range map[string]string{
		"orders.v1.Orders/Get": `/orders.v1.Orders/Get
  policy         from service_config: methodConfig[0] (line 3, column 5)
  attempts       at most 5
                 the service config asks for 10; WithMaxCallAttempts raises the limit
  codes          UNAVAILABLE
  backoff        100ms times 2 up to 1s, ProportionalJitter(0.2); overload like any failure; hints up to 1m0s
  timeout        2s for the whole call
  wait for ready true unless the call says otherwise (from service_config: methodConfig[0] (line 3, column 5))
  messages       a request of at most 1000 bytes (from service_config: methodConfig[0] (line 3, column 5))
  idempotency    idempotent (from service: WithIdempotent("orders.v1.Orders/*"))
  budget         a throttle of 100 tokens, 0.1 for each success, one for each target (from service_config: retryThrottling)
  dry run        retries are decided and told, but not made (from WithDryRun)
`,
		"/orders.v1.Orders/List": `/orders.v1.Orders/List
  policy         from method: WithMethodPolicy("orders.v1.Orders/List")
  attempts       at most 3
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  timeout        1s for an attempt
  wait for ready true unless the call says otherwise (from service_config: methodConfig[0] (line 3, column 5))
  messages       a request of at most 1000 bytes (from service_config: methodConfig[0] (line 3, column 5))
  idempotency    idempotent (from service: WithIdempotent("orders.v1.Orders/*"))
  budget         a throttle of 100 tokens, 0.1 for each success, one for each target (from service_config: retryThrottling); and that of WithMethodBudget("orders.v1.Orders/List")
  dry run        retries are decided and told, but not made (from WithDryRun)
`,
		withdrawn: `/testsrv.v1.DeclaredService/Withdrawn
  policy         from proto: option (grpcretry.v1.retry) in testsrv/v1/declared.proto, unless the ClientConn's service config has a retryPolicy for the method
  attempts       at most 3
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  timeout        30s for the whole call (from service_config: methodConfig[1] (line 10, column 5))
  idempotency    not idempotent (from proto: option (grpcretry.v1.retry) in testsrv/v1/declared.proto): only attempts that never reached a server are repeated
  budget         a throttle of 100 tokens, 0.1 for each success, one for each target (from service_config: retryThrottling)
`,
		invalid: `/testsrv.v1.DeclaredService/Invalid
  policy         from default, unless the ClientConn's service config has a retryPolicy for the method
  attempts       at most 3
  codes          RESOURCE_EXHAUSTED, UNAVAILABLE
                 RESOURCE_EXHAUSTED only with the server's hint when to come back
  backoff        50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s
  timeout        30s for the whole call (from service_config: methodConfig[1] (line 10, column 5))
  idempotency    unknown: only attempts that never reached a server are repeated; to change that,
                 declare idempotency_level in the .proto or use WithIdempotent("testsrv.v1.DeclaredService/Invalid")
  budget         a throttle of 100 tokens, 0.1 for each success, one for each target (from service_config: retryThrottling)
  not followed   grpcretry: option (grpcretry.v1.retry) of testsrv.v1.DeclaredService/Invalid: max_attempts = -1, want 0 (default 3) or more
`,
	} {
		if got := r.Explain(name).String(); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
	if n := len(*r.set.Load().cache.Load()); n != 0 {
		t.Errorf("Explain left %d methods in the cache, as if they had been called", n)
	}
}

// After a call the resolver's policy is known, and told.
func TestExplainTellsTheResolversPolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t)
		_, client := serve(t, r, testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)}, grpc.WithDefaultServiceConfig(configFor("{}", 2)))
		_, _ = client.Get(t.Context(), &testpb.Request{})
		e := r.Explain(get)
		want := "  resolver       last seen: at most 2 attempts; ABORTED, UNAVAILABLE; 100ms times 2 up to 1s, ProportionalJitter(0.2); overload like any failure; hints up to 1m0s\n"
		if e.ResolverPolicy == nil || !strings.Contains(e.String(), want) {
			t.Errorf("Explain:\n%vwant\n%s", e, want)
		}
	})
}

// A service config may name methods that this program's version of the API does
// not have; the log must say so, lest a misspelt name do nothing in silence.
func TestServiceConfigNamesAMissingMethod(t *testing.T) {
	var log strings.Builder
	doc := configFor(`{"service": "testsrv.v1.TestService", "method": "Gte"}, {"service": "unknown.v1.Service", "method": "Get"}`, 3)
	_, err := New(WithServiceConfig(doc), WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "method=/testsrv.v1.TestService/Gte") || !strings.Contains(log.String(), "methodConfig[0]") {
		t.Errorf("log:\n%swant one line about Gte", log.String())
	}
}

// Work that is not an RPC must not follow what a service config says of RPCs.
func TestDoIgnoresServiceConfigs(t *testing.T) {
	for _, doc := range []string{configFor("{}", 5), `{"methodConfig": [{"name": [{}], "timeout": "0.001s"}]}`} {
		synctest.Test(t, func(t *testing.T) {
			r := newRetrier(t, WithServiceConfig(doc))
			runs := 0
			err := r.Do(t.Context(), "jobs/export", func(context.Context) error { runs++; return status.Error(codes.Unavailable, "down") })
			if runs != DefaultMaxAttempts {
				t.Errorf("%s: %d runs, %v; want %d", doc, runs, err, DefaultMaxAttempts)
			}
		})
	}
}
