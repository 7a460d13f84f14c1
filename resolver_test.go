package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// resolverConfig is a config with round_robin and these method configs (JSON).
func resolverConfig(methods string) string {
	return `{"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": [` + methods + `]}`
}

// retryConfig is one method config with a retryPolicy; names and codes are JSON lists.
func retryConfig(names string, attempts int, codes string) string {
	return fmt.Sprintf(`{"name": [%s], "retryPolicy": {"maxAttempts": %d, "initialBackoff": "0.1s", "maxBackoff": "0.3s", "backoffMultiplier": 2, "retryableStatusCodes": [%s]}}`,
		names, attempts, codes)
}

const (
	namesWrite   = `{"service": "testsrv.v1.TestService", "method": "Write"}`
	namesService = `{"service": "testsrv.v1.TestService"}`
	namesAll     = `{}`
)

// cluster starts one server behind a resolver that delivers config, and a client
// of it through r. A connection that was lost is tried again every 100 ms.
func cluster(t testing.TB, r *Retrier, config string, script testsrv.Script) (*testsrv.Cluster, testpb.TestServiceClient) {
	t.Helper()
	c := testsrv.NewCluster(1, func(int) testsrv.Script { return script })
	t.Cleanup(c.Close)
	if err := c.SetServiceConfig(config); err != nil {
		t.Fatal(err)
	}
	steady := backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1, MaxDelay: 100 * time.Millisecond}
	cc, err := c.Dial(append(r.DialOptions(), grpc.WithConnectParams(grpc.ConnectParams{Backoff: steady}))...)
	if err != nil {
		t.Fatal(err)
	}
	return c, testpb.NewTestServiceClient(cc)
}

// Whoever installs the package switches grpc's own retries off. A retryPolicy
// that worked before must go on working, for the methods that it did work for,
// and say for whom it vouches.
func TestResolverPolicy(t *testing.T) {
	four := func(names string) string { return resolverConfig(retryConfig(names, 4, `"UNAVAILABLE"`)) }
	for _, tt := range []struct {
		name    string
		opts    []Option
		config  string
		method  string
		code    codes.Code
		calls   []grpc.CallOption
		runs    int
		reason  Reason
		sources string // of policy and idempotency, as the trace has them
	}{
		{name: "names the method", config: four(namesWrite), method: write, code: codes.Unavailable, runs: 4, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "names the service", config: four(namesService), method: write, code: codes.Unavailable, runs: 4, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "names another method", config: four(namesWrite), method: get, code: codes.Unavailable, runs: 3, reason: ReasonAttemptsExhausted, sources: "default idempotent"},
		{name: "the wildcard vouches for nobody", config: four(namesAll), method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotIdempotent, sources: "resolver unknown"},
		{name: "the wildcard's policy for a declared method", config: four(namesAll), method: get, code: codes.Unavailable, runs: 4, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "wildcard and service", config: resolverConfig(retryConfig(namesAll, 2, `"UNAVAILABLE"`) + "," + retryConfig(namesService, 4, `"UNAVAILABLE"`)),
			method: write, code: codes.Unavailable, runs: 4, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "wildcard and another service", config: resolverConfig(retryConfig(namesAll, 2, `"UNAVAILABLE"`) + "," + retryConfig(`{"service": "a.B"}`, 4, `"UNAVAILABLE"`)),
			method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotIdempotent, sources: "resolver unknown"},
		{name: "wildcard and service in one entry: not to be told apart", config: four(namesAll + "," + namesService), method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotIdempotent, sources: "resolver unknown"},
		{name: "an entry without retryPolicy hides the wider one", config: resolverConfig(`{"name": [` + namesWrite + `]},` + retryConfig(namesService, 4, `"UNAVAILABLE"`)),
			method: write, code: codes.Unavailable, runs: 1, reason: ReasonDisabled, sources: "resolver unknown"},
		{name: "its codes", config: resolverConfig(retryConfig(namesWrite, 4, `"ABORTED", "INTERNAL"`)), method: write, code: codes.Internal, runs: 4, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "not its codes", config: resolverConfig(retryConfig(namesWrite, 4, `"ABORTED", "INTERNAL"`)), method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotRetryable, sources: "resolver idempotent"},
		{name: "codes as numbers", config: resolverConfig(retryConfig(namesWrite, 2, `10`)), method: write, code: codes.Aborted, runs: 2, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "quota without a hint, as it lists it", config: resolverConfig(retryConfig(namesWrite, 2, `"RESOURCE_EXHAUSTED"`)), method: write, code: codes.ResourceExhausted, runs: 2, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "more than grpc's five", config: resolverConfig(retryConfig(namesWrite, 9, `"UNAVAILABLE"`)), method: write, code: codes.Unavailable, runs: 5, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},

		{name: "opted out", opts: []Option{WithoutResolverConfig()}, config: four(namesWrite), method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotIdempotent, sources: "default unknown"},
		{name: "opted out of a declared method", opts: []Option{WithoutResolverConfig()}, config: four(namesService), method: get, code: codes.Unavailable, runs: 3, reason: ReasonAttemptsExhausted, sources: "default idempotent"},
		{name: "a policy in code wins, and inherits the idempotency", opts: []Option{WithMethodPolicy(write, Policy{MaxAttempts: 2})}, config: four(namesWrite), method: write, code: codes.Unavailable, runs: 2, reason: ReasonAttemptsExhausted, sources: "method idempotent"},
		{name: "the default in code wins too", opts: []Option{WithDefaultPolicy(Policy{MaxAttempts: 2})}, config: four(namesWrite), method: write, code: codes.Unavailable, runs: 2, reason: ReasonAttemptsExhausted, sources: "default idempotent"},
		{name: "NotIdempotent in code wins", opts: []Option{WithMethodPolicy(write, Policy{Idempotency: NotIdempotent})}, config: four(namesWrite), method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotIdempotent, sources: "method not_idempotent"},
		{name: "WithIdempotent besides the wildcard", opts: []Option{WithIdempotent(write)}, config: four(namesAll), method: write, code: codes.Unavailable, runs: 4, reason: ReasonAttemptsExhausted, sources: "resolver idempotent"},
		{name: "WithoutRetry", calls: []grpc.CallOption{WithoutRetry()}, config: four(namesWrite), method: write, code: codes.Unavailable, runs: 1, reason: ReasonDisabled, sources: "resolver idempotent"},
		{name: "no method config", config: resolverConfig(""), method: write, code: codes.Unavailable, runs: 1, reason: ReasonNotIdempotent, sources: "default unknown"},
		{name: "no config at all", config: "", method: get, code: codes.Unavailable, runs: 3, reason: ReasonAttemptsExhausted, sources: "default idempotent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, append(tt.opts, WithBudget(Unlimited()))...)
				c, client := cluster(t, r, tt.config, testsrv.Script{"*": testsrv.Fail(1, tt.code)})
				ctx, events := traced(t, t.Context())
				var report Report
				call := client.Write
				if tt.method == get {
					call = client.Get
				}
				_, err := call(ctx, &testpb.Request{}, append(tt.calls, WithReport(&report))...)
				if status.Code(err) != tt.code {
					t.Errorf("%v, want %v", err, tt.code)
				}
				if n := c.Servers[0].Count(tt.method); n != tt.runs || report.Reason != tt.reason {
					t.Errorf("%d attempts, %v; want %d, %v", n, report.Reason, tt.runs, tt.reason)
				}
				all := events()
				last := all[len(all)-1]
				if got := fmt.Sprint(last["grpcretry.policy.source"], " ", last["grpcretry.idempotency"]); got != tt.sources {
					t.Errorf("the last event says %q, want %q", got, tt.sources)
				}
			})
		})
	}
}

// gRFC A6 fixes the delays: the cap first, then 20% either way. A fleet that was
// tuned by them must see them again, spread over the whole range.
func TestResolverBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithBudget(Unlimited()))
		_, client := cluster(t, r, resolverConfig(retryConfig(namesWrite, 5, `"UNAVAILABLE"`)), testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		drawn := make([][]float64, 4)
		for range 200 {
			ctx, events := traced(t, t.Context())
			start := time.Now()
			var report Report
			if _, err := client.Write(ctx, &testpb.Request{}, WithReport(&report)); !errors.Is(err, ErrAttemptsExhausted) {
				t.Fatal(err)
			}
			var waited time.Duration
			for i, e := range events()[:4] {
				seconds := e["grpcretry.retry.delay"].(float64)
				if seconds != report.Attempts[i].Delay.Seconds() {
					t.Fatalf("the event says %v s, the report %v", seconds, report.Attempts[i].Delay)
				}
				drawn[i] = append(drawn[i], seconds)
				waited += report.Attempts[i].Delay
			}
			if d := time.Since(start); d != waited {
				t.Fatalf("the call took %v, its delays are %v", d, waited)
			}
		}
		for i, middle := range []float64{0.1, 0.2, 0.3, 0.3} {
			least, most := slices.Min(drawn[i]), slices.Max(drawn[i])
			if least < 0.8*middle-1e-9 || most > 1.2*middle+1e-9 {
				t.Errorf("delay %d lies between %v and %v s, want %v to %v", i+1, least, most, 0.8*middle, 1.2*middle)
			}
			// 200 draws leave a tenth of the range at either end empty once in 10^9 runs.
			if least > 0.84*middle || most < 1.16*middle {
				t.Errorf("delay %d lies between %v and %v s, want them spread from %v to %v", i+1, least, most, 0.8*middle, 1.2*middle)
			}
		}
	})
}

// grpc's own retries accept any positive multiplier and an initialBackoff above
// the maximum; such a config must keep its delays and not be refused by ours.
func TestResolverBackoffOddities(t *testing.T) {
	want := Policy{
		MaxAttempts: 4, Codes: Codes(codes.Aborted), RetryQuota: true, ReplayBytes: DefaultReplayBytes,
		Backoff: Backoff{Base: time.Second, Max: time.Second, Multiplier: 0.5, Jitter: ProportionalJitter(0.2), Overload: 1, MaxHint: time.Minute},
	}
	p := a6Policy(4, time.Hour, time.Second, 0.5, Codes(codes.Aborted))
	if !reflect.DeepEqual(p, want) {
		t.Errorf("%+v\nwant %+v", p, want)
	}
	half := alwaysDraw(0.5)
	for retry, want := range []time.Duration{time.Second, 500 * time.Millisecond, 250 * time.Millisecond} {
		if d := p.Backoff.delay(retry+1, 0, half); d != want {
			t.Errorf("retry %d waits %v, want %v", retry+1, d, want)
		}
	}
}

// A6: the server's pushback is followed exactly, and after it the delays start
// again from the first.
func TestResolverPushback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithBudget(Unlimited()))
		pushed := testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "5000")}
		_, client := cluster(t, r, resolverConfig(retryConfig(namesWrite, 5, `"UNAVAILABLE"`)), testsrv.Script{"*": testsrv.Fail(2, codes.Unavailable).Then(pushed).Then(testsrv.Step{Code: codes.Unavailable})})
		var report Report
		_, _ = client.Write(t.Context(), &testpb.Request{}, WithReport(&report))
		for i, middle := range []time.Duration{100, 200, 0, 100} {
			d := report.Attempts[i].Delay
			if i == 2 {
				if d != 5*time.Second || report.Attempts[i].DelaySource != DelayPushback {
					t.Errorf("after the pushback: %v from %v, want 5s", d, report.Attempts[i].DelaySource)
				}
				continue
			}
			if middle *= time.Millisecond; d < middle*8/10 || d > middle*12/10 {
				t.Errorf("delay %d is %v, want %v and 20%% either way", i+1, d, middle)
			}
		}
	})
}

// grpc applies the config's timeout to each attempt, because it knows no others.
// Its owner meant the call: three attempts must not take three times as long.
func TestResolverTimeout(t *testing.T) {
	const ms = time.Millisecond
	config := func(timeout string) string {
		return resolverConfig(`{"name": [` + namesService + `], "timeout": "` + timeout + `"}`)
	}
	edit := WithCallPolicy(func(p *Policy) { p.Backoff = Backoff{Base: 100 * ms, Jitter: NoJitter} })
	for _, tt := range []struct {
		name    string
		opts    []Option
		config  string
		parent  time.Duration
		calls   []grpc.CallOption
		script  testsrv.Reaction
		runs    int
		elapsed time.Duration
		reason  Reason
	}{
		{name: "whole call", config: config("0.25s"), script: testsrv.Fail(1, codes.Unavailable), runs: 3, elapsed: 150 * ms, reason: ReasonAttemptsExhausted},
		{name: "a wait that does not fit", config: config("0.15s"), script: testsrv.Fail(1, codes.Unavailable), runs: 2, elapsed: 50 * ms, reason: ReasonDeadline},
		{name: "first attempt", config: config("0.25s"), script: testsrv.Sequence{{Block: true}}, runs: 1, elapsed: 250 * ms, reason: ReasonDeadline},
		{name: "second attempt", config: config("0.25s"), script: testsrv.Fail(1, codes.Unavailable).Then(testsrv.Step{Block: true}), runs: 2, elapsed: 250 * ms, reason: ReasonDeadline},
		{name: "the caller's is sooner", config: config("0.25s"), parent: 200 * ms, script: testsrv.Sequence{{Block: true}}, runs: 1, elapsed: 200 * ms, reason: ReasonParentDone},
		{name: "the policy's is sooner", opts: []Option{WithDefaultPolicy(Policy{Timeout: 200 * ms})}, config: config("0.25s"), script: testsrv.Sequence{{Block: true}}, runs: 1, elapsed: 200 * ms, reason: ReasonDeadline},
		{name: "the policy's is later", opts: []Option{WithDefaultPolicy(Policy{Timeout: time.Hour})}, config: config("0.25s"), script: testsrv.Sequence{{Block: true}}, runs: 1, elapsed: 250 * ms, reason: ReasonDeadline},
		{name: "of an edited call", config: config("0.25s"), calls: []grpc.CallOption{edit}, script: testsrv.Fail(1, codes.Unavailable), runs: 2, elapsed: 100 * ms, reason: ReasonDeadline},
		{name: "of an edited call with a timeout", config: config("0.25s"), calls: []grpc.CallOption{edit, WithCallPolicy(func(p *Policy) { p.Timeout = time.Hour })},
			script: testsrv.Fail(1, codes.Unavailable).Then(testsrv.Step{Block: true}), runs: 2, elapsed: 250 * ms, reason: ReasonDeadline},
		{name: "attempts within", opts: []Option{WithDefaultPolicy(Policy{AttemptTimeout: 100 * ms, MaxAttempts: 9, Backoff: Backoff{Jitter: NoJitter}})}, config: config("0.2s"), script: testsrv.Sequence{{Block: true}}, runs: 2, elapsed: 200 * ms, reason: ReasonDeadline},
		{name: "opted out: left to grpc, for each attempt", opts: []Option{WithoutResolverConfig(), WithDefaultPolicy(Policy{Codes: Codes(codes.DeadlineExceeded), Backoff: Backoff{Base: 100 * ms, Max: 100 * ms, Jitter: NoJitter}})},
			config: config("0.25s"), script: testsrv.Sequence{{Block: true}}, runs: 3, elapsed: 950 * ms, reason: ReasonAttemptsExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				opts := append(tt.opts, WithBudget(Unlimited()))
				if len(tt.opts) == 0 {
					opts = append(opts, WithDefaultPolicy(Policy{Backoff: Backoff{Jitter: NoJitter}}))
				}
				r := newRetrier(t, opts...)
				c, client := cluster(t, r, tt.config, testsrv.Script{"*": tt.script})
				warm(t, c.Servers[0], client)
				time.Sleep(time.Hour) // the process is older than any timeout
				ctx := t.Context()
				if tt.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.parent)
					defer cancel()
				}
				start := time.Now()
				var report Report
				_, err := client.Get(ctx, &testpb.Request{}, append(tt.calls, WithReport(&report))...)
				if n := c.Servers[0].Count(get); n != tt.runs || time.Since(start) != tt.elapsed || report.Reason != tt.reason {
					t.Errorf("%d attempts in %v, %v; want %d in %v, %v (%v)", n, time.Since(start), report.Reason, tt.runs, tt.elapsed, tt.reason, err)
				}
			})
		})
	}
}

// An operator changes the config while clients run, and expects the next call to
// follow it.
func TestResolverUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithBudget(Unlimited()))
		c, client := cluster(t, r, resolverConfig(retryConfig(namesWrite, 2, `"UNAVAILABLE"`)), testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		for _, step := range []struct {
			name   string
			config string // "-": as it was
			bad    bool
			runs   int
		}{
			{"first", "-", false, 2},
			{"more attempts", resolverConfig(retryConfig(namesWrite, 4, `"UNAVAILABLE"`)), false, 4},
			{"the same once more", resolverConfig(retryConfig(namesWrite, 4, `"UNAVAILABLE"`)), false, 4},
			{"a bad one keeps the last", `{"methodConfig": [{"name": [` + namesWrite + `], "retryPolicy": {"maxAttempts": 1}}]}`, true, 4},
			{"wildcard only", resolverConfig(retryConfig(namesAll, 4, `"UNAVAILABLE"`)), false, 1},
			{"another code", resolverConfig(retryConfig(namesWrite, 4, `"ABORTED"`)), false, 1},
			{"named again", resolverConfig(retryConfig(namesService, 3, `"UNAVAILABLE"`)), false, 3},
			{"none", resolverConfig(""), false, 1},
			{"named once more", resolverConfig(retryConfig(namesWrite, 5, `"UNAVAILABLE"`)), false, 5},
		} {
			if step.config != "-" {
				if err := c.SetServiceConfig(step.config); (err != nil) != step.bad {
					t.Fatalf("%s: %v", step.name, err)
				}
				synctest.Wait()
			}
			before := c.Servers[0].Count(write)
			_, _ = client.Write(t.Context(), &testpb.Request{})
			if n := c.Servers[0].Count(write) - before; n != step.runs {
				t.Errorf("%s: %d attempts, want %d", step.name, n, step.runs)
			}
		}
	})
}

// A config that changes in the middle of a call leaves that call as it began.
func TestResolverUpdateDuringACall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithBudget(Unlimited()))
		c, client := cluster(t, r, resolverConfig(retryConfig(namesWrite, 5, `"UNAVAILABLE"`)), testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		time.AfterFunc(200*time.Millisecond, func() {
			if err := c.SetServiceConfig(resolverConfig("")); err != nil {
				t.Error(err)
			}
		})
		for _, want := range []int{5, 6} {
			_, _ = client.Write(t.Context(), &testpb.Request{})
			if n := c.Servers[0].Count(write); n != want {
				t.Errorf("%d attempts so far, want %d", n, want)
			}
		}
	})
}

// Two ClientConns with different configs go through one Retrier: each call
// follows its own, however they alternate.
func TestResolverOfEachClientConn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithBudget(Unlimited()))
		fail := testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)}
		two, clientTwo := cluster(t, r, resolverConfig(retryConfig(namesWrite, 2, `"UNAVAILABLE"`)), fail)
		four, clientFour := cluster(t, r, resolverConfig(retryConfig(namesWrite, 4, `"UNAVAILABLE"`)), fail)
		for range 3 {
			_, _ = clientTwo.Write(t.Context(), &testpb.Request{})
			_, _ = clientFour.Write(t.Context(), &testpb.Request{})
		}
		if a, b := two.Servers[0].Count(write), four.Servers[0].Count(write); a != 6 || b != 12 {
			t.Errorf("%d and %d attempts, want 6 and 12", a, b)
		}
	})
}

// The config is there only once the first call has had it resolved. An edit must
// not make that call forget it.
func TestResolverPolicyOfTheFirstCall(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		edit func(*Policy)
		runs int
	}{
		{"unedited", nil, nil, 4},
		{"edited", nil, func(p *Policy) { p.RetryQuota = false }, 4},
		{"edited relative to the config", nil, func(p *Policy) { p.MaxAttempts++ }, 5},
		{"withdrawn", nil, func(p *Policy) { p.Idempotency = NotIdempotent }, 1},
		{"good for the default, bad for the config", nil, func(p *Policy) { p.Backoff.Base = time.Second }, 1},
		{"policy in code", []Option{WithMethodPolicy(write, Policy{MaxAttempts: 2})}, func(p *Policy) { p.MaxAttempts++ }, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, append(tt.opts, WithBudget(Unlimited()))...)
				c, client := cluster(t, r, resolverConfig(retryConfig(namesWrite, 4, `"UNAVAILABLE"`)), testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
				var opts []grpc.CallOption
				if tt.edit != nil {
					opts = append(opts, WithCallPolicy(tt.edit))
				}
				if _, err := client.Write(t.Context(), &testpb.Request{}, opts...); status.Code(err) != codes.Unavailable {
					t.Errorf("%v", err)
				}
				if n := c.Servers[0].Count(write); n != tt.runs {
					t.Errorf("the first call made %d attempts, want %d", n, tt.runs)
				}
			})
		})
	}
}

// With wait-for-ready an attempt that never left the client uses up none of the
// attempts, whoever asked for it; without, it does.
func TestResolverWaitForReady(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config string
		calls  []grpc.CallOption
		ok     bool
		made   int
	}{
		{name: "by the config", config: resolverConfig(`{"name": [{}], "waitForReady": true}`), ok: true, made: 7},
		{name: "by the call", calls: []grpc.CallOption{grpc.WaitForReady(true)}, ok: true, made: 7},
		{name: "by the config, which the call overrules", config: resolverConfig(`{"name": [{}], "waitForReady": true}`), calls: []grpc.CallOption{grpc.WaitForReady(false)}, made: 2},
		{name: "by the call against the config", config: resolverConfig(`{"name": [{}], "waitForReady": false}`), calls: []grpc.CallOption{grpc.WaitForReady(true)}, ok: true, made: 7},
		{name: "by nobody", made: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRetrier(t, WithDefaultPolicy(Policy{MaxAttempts: 2, AttemptTimeout: time.Second, Backoff: Backoff{Base: time.Second, Max: time.Second, Jitter: NoJitter}}))
				c, client := cluster(t, r, tt.config, nil)
				warm(t, c.Servers[0], client)
				c.Servers[0].Kill()
				synctest.Wait()
				time.AfterFunc(11500*time.Millisecond, func() {
					if err := c.Servers[0].Restart(); err != nil {
						t.Error(err)
					}
				})
				var report Report
				_, err := client.Write(t.Context(), &testpb.Request{}, append(tt.calls, WithReport(&report))...)
				// One second each, one second apart: the seventh begins at 12 s.
				if (err == nil) != tt.ok || report.Made() != tt.made {
					t.Errorf("%v after %d attempts, want success: %v after %d", err, report.Made(), tt.ok, tt.made)
				}
				for _, a := range report.Attempts[:min(tt.made, 6)] {
					if a.Evidence != Unsent {
						t.Errorf("attempt %d: %v, want unsent", a.Number, a.Evidence)
					}
				}
			})
		})
	}
}
