package grpcretry

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A dry run must show what would have happened and do none of it: neither the
// attempt, nor the wait, nor what it would cost.
func TestDryRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var scheduled, ended int
		hooks := Hooks{RetryScheduled: func(context.Context, Attempt) { scheduled++ }, AttemptEnd: func(context.Context, Attempt) { ended++ }}
		policy := Policy{Backoff: Backoff{Base: 100 * time.Millisecond, Jitter: NoJitter}}
		r := newRetrier(t, WithDefaultPolicy(policy), WithDryRun(), WithHooks(hooks))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		ctx, events := traced(t, t.Context())
		var report Report
		began := time.Now()
		_, err := client.Get(ctx, &testpb.Request{}, WithReport(&report))

		if n := srv.Count(get); n != 1 || time.Since(began) != 0 {
			t.Errorf("%d attempts in %v, want 1 in no time", n, time.Since(began))
		}
		if _, ours := err.(*Error); ours || status.Code(err) != codes.Unavailable {
			t.Errorf("error %v, want the attempt's own", err)
		}
		list := events()
		if len(list) != 1 || list[0]["grpcretry.attempt.decision"] != "dry_run" || list[0]["grpcretry.retry.delay"] != 0.1 ||
			list[0]["grpcretry.retry.delay_source"] != "backoff" || list[0]["grpcretry.budget.balance"] != 1.0 {
			t.Errorf("events %v, want one with dry_run, a delay of 0.1 s and a full budget", list)
		}
		if a := report.Attempts[0]; report.Reason != ReasonDryRun || a.Reason != ReasonDryRun || a.Delay != 100*time.Millisecond {
			t.Errorf("report %+v, want dry_run with a delay of 100ms", report)
		}
		if scheduled != 0 || ended != 1 {
			t.Errorf("hooks: %d scheduled, %d ended; want 0 and 1", scheduled, ended)
		}
		if b := r.Budgets()[0]; b.Granted != 0 || b.Refused != 0 || b.Balance != 1 {
			t.Errorf("budget %+v, want untouched", b)
		}

		// What would not have been retried says why, as ever.
		for _, test := range []struct {
			method string
			code   codes.Code
			want   Reason
		}{{write, codes.Unavailable, ReasonNotIdempotent}, {get, codes.NotFound, ReasonNotRetryable}} {
			if err := srv.Set(test.method, testsrv.Fail(1, test.code)); err != nil {
				t.Fatal(err)
			}
			var err error
			if test.method == write {
				_, err = client.Write(t.Context(), &testpb.Request{}, WithReport(&report))
			} else {
				_, err = client.Get(t.Context(), &testpb.Request{}, WithReport(&report))
			}
			if report.Reason != test.want || status.Code(err) != test.code {
				t.Errorf("%s with %v: %v, %v; want %v", test.method, test.code, report.Reason, err, test.want)
			}
		}
	})
}

// In an incident retries are stopped, and go on afterwards, while calls run; for
// everything or for the methods that are in trouble.
func TestKillSwitch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		options := []Option{WithIdempotent("testsrv.v1.TestService/Write")}
		r := newRetrier(t, append(options, WithBudget(Unlimited()))...)
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		attempts := func() string {
			before := []int{srv.Count(get), srv.Count(put), srv.Count(write)}
			_, _ = client.Get(t.Context(), &testpb.Request{})
			_, _ = client.Put(t.Context(), &testpb.Request{})
			_, _ = client.Write(t.Context(), &testpb.Request{})
			return fmt.Sprint(srv.Count(get)-before[0], srv.Count(put)-before[1], srv.Count(write)-before[2])
		}
		for _, step := range []struct {
			name string
			opts []Option
			want string
		}{
			{"as installed", options, "3 3 3"},
			{"everything off", append(options, WithDryRun()), "1 1 1"},
			{"one method off", append(options, WithDryRun("testsrv.v1.TestService/Get")), "1 3 3"},
			{"two methods off", append(options, WithDryRun("/testsrv.v1.TestService/Get"), WithDryRun(put)), "1 1 3"},
			{"the service off", append(options, WithDryRun("testsrv.v1.TestService/*")), "1 1 1"},
			{"another service off", append(options, WithDryRun("orders.v1.Orders/*")), "3 3 3"},
			{"on again", options, "3 3 3"},
		} {
			if err := r.Update(step.opts...); err != nil {
				t.Fatal(err)
			}
			if got := attempts(); got != step.want {
				t.Errorf("%s: attempts of Get, Put, Write = %s, want %s", step.name, got, step.want)
			}
		}

		// A call in its wait goes on by what it began with.
		done := make(chan struct{})
		before := srv.Count(get)
		go func() {
			defer close(done)
			_, _ = client.Get(t.Context(), &testpb.Request{}, WithCallPolicy(func(p *Policy) {
				p.Backoff = Backoff{Base: time.Second, Jitter: NoJitter}
			}))
		}()
		time.Sleep(500 * time.Millisecond)
		if err := r.Update(WithDryRun()); err != nil {
			t.Fatal(err)
		}
		<-done
		if n := srv.Count(get) - before; n != 3 {
			t.Errorf("%d attempts of a call that began before, want 3", n)
		}
	})
}

// A bad document must change nothing, and say all that is wrong with it.
func TestUpdateRefusesABadServiceConfig(t *testing.T) {
	r := newRetrier(t, WithServiceConfig(configFor("{}", 4)))
	before := r.Explain(get).String()
	err := r.Update(WithServiceConfig(`{"methodConfig": [{"name": [{}], "timeout": "1m"}], "retryThrottling": {"maxTokens": 0, "tokenRatio": 1}}`), WithHooks(Hooks{}))
	for _, want := range []string{`line 1, column 45: methodConfig[0].timeout = "1m"`, "retryThrottling.maxTokens = 0", "Update: WithHooks cannot change"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	if after := r.Explain(get).String(); after != before {
		t.Errorf("changed to\n%s", after)
	}
}

// A reload of retryThrottling must not refill what an outage has used up, in
// whichever direction it changes; and must not lock what is full.
func TestThrottleReload(t *testing.T) {
	throttled := func(tokens int) Option {
		return WithServiceConfig(fmt.Sprintf(`{"retryThrottling": {"maxTokens": %d, "tokenRatio": 0.1}}`, tokens))
	}
	b := &swapBudget{TokenBudget: defaultBudget()}
	balance := func(want float64, step string) {
		t.Helper()
		if got := b.Balance(); got < want-1e-9 || got > want+1e-9 {
			t.Errorf("%s: balance %v, want %v", step, got, want)
		}
	}
	b.swap(&throttleLimits{100, 0.1})
	balance(1, "a full budget becomes a throttle")
	for range 20 {
		b.Record(OutcomeFailure)
	}
	balance(0.8, "20 failures of 100")
	b.swap(&throttleLimits{10, 0.1})
	balance(0.8, "smaller limits")
	b.swap(nil)
	balance(0.6, "back to the default budget: of the 50% that a throttle can lose 30% are left")
	if _, ok := b.Reserve(CostTransient); !ok {
		t.Error("refused at 60%")
	}
	balance(0.5, "a retry for 7 of 70 tokens")
	b.swap(&throttleLimits{1000, 0.1})
	balance(0.75, "a throttle again")
	for range 1000 {
		b.Record(OutcomeFailure)
	}
	balance(0, "all tokens lost")
	b.swap(nil)
	balance(0, "a default budget with nothing in it")
	b.swap(&throttleLimits{10, 0.1})
	balance(0.5, "a throttle that refuses until something succeeds")
	if _, ok := b.Reserve(CostTransient); ok {
		t.Error("granted with nothing left")
	}
	b.Record(OutcomeOK)
	if _, ok := b.Reserve(CostTransient); !ok {
		t.Error("refused after a success")
	}

	// Through Update, for targets that are there and for those that come.
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, throttled(10))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		for range 10 {
			_, _ = client.Get(t.Context(), &testpb.Request{})
		}
		if got := r.Budgets()[0]; got.Capacity != 10 || got.Balance > 0.5 || got.InFlight != 0 {
			t.Fatalf("after an outage: %+v, want an empty throttle", got)
		}
		for _, opts := range [][]Option{{throttled(1000)}, {}, {throttled(10)}, {throttled(10)}} {
			if err := r.Update(opts...); err != nil {
				t.Fatal(err)
			}
			before := srv.Count(get)
			_, _ = client.Get(t.Context(), &testpb.Request{})
			// Without a throttle the default budget has its one free retry a minute.
			if n := srv.Count(get) - before; n > 1 {
				t.Errorf("%d attempts after an update in an outage, want 1; %+v", n, r.Budgets()[0])
			}
		}
		second, err := srv.DialTarget("passthrough:///second", r.DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		_ = callAny(t.Context(), second, put)
		for _, b := range r.Budgets() {
			if b.Capacity != 10 {
				t.Errorf("%s: capacity %v, want that of the throttle in force", b.Target, b.Capacity)
			}
		}
	})
}

// In production the resolver and an operator change policies while thousands of
// calls run. Each change must take effect, none may fail a call, and none may
// refill a budget that an outage has emptied.
func TestReloadUnderLoad(t *testing.T) {
	cluster := testsrv.NewCluster(2, func(int) testsrv.Script {
		return testsrv.Script{
			// Half of the first attempts of Get fail, and all later ones succeed, whatever the policy.
			get: testsrv.Func(func(nth int, a testsrv.Attempt) testsrv.Step {
				if nth%2 == 0 && len(a.Metadata.Get("grpc-previous-rpc-attempts")) == 0 {
					return testsrv.Step{Code: codes.Unavailable}
				}
				return testsrv.Step{}
			}),
			put:  testsrv.Fail(1, codes.Unavailable), // never succeeds
			full: testsrv.Fail(1, codes.Unavailable),
		}
	})
	defer cluster.Close()
	config := func(attempts int) string {
		return strings.Replace(strings.ReplaceAll(configFor(`{"service": "testsrv.v1.TestService"}`, attempts), "0.1s", "0.001s"), "{", `{"loadBalancingConfig": [{"round_robin": {}}],`, 1)
	}
	if err := cluster.SetServiceConfig(config(2)); err != nil {
		t.Fatal(err)
	}

	r := newRetrier(t, WithBudget(Unlimited()))
	cc, err := cluster.Dial(r.DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	client := testpb.NewTestServiceClient(cc)

	// A second Retrier, whose budget an outage has emptied before.
	tight, err := NewBudget(BudgetConfig{FreeInterval: -1})
	if err != nil {
		t.Fatal(err)
	}
	poor := newRetrier(t, WithBudget(tight))
	poorCC, err := cluster.Dial(poor.DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	poorClient := testpb.NewTestServiceClient(poorCC)
	for tight.Balance() >= 0.1 {
		if _, err := poorClient.Put(t.Context(), &testpb.Request{}); err == nil {
			t.Fatal("Put succeeded")
		}
	}
	spent := tight.state().Granted

	// A third one, whose budgets come from service configs in code. Its Put is a
	// method of its own, so that its attempts can be told apart.
	throttled := func(tokens int) Option {
		doc := `{"retryThrottling": {"maxTokens": %d, "tokenRatio": 0.1}}`
		if tokens == 0 {
			doc = "{}%.0d"
		}
		return WithServiceConfig(fmt.Sprintf(doc, tokens))
	}
	empty := newRetrier(t, throttled(10))
	emptyCC, err := cluster.Dial(empty.DialOptions()...)
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		_ = callAny(t.Context(), emptyCC, full)
	}
	arrived := func() int { return cluster.Servers[0].Count(full) + cluster.Servers[1].Count(full) }
	extra := arrived() - 20

	stop := make(chan struct{})
	var wg sync.WaitGroup
	var calls, failed, fruitless atomic.Int64
	for range 8 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				calls.Add(1)
				if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
					failed.Add(1)
					t.Errorf("call failed: %v", err)
					return
				}
				_, _ = poorClient.Put(t.Context(), &testpb.Request{})
				_ = callAny(t.Context(), emptyCC, full)
				fruitless.Add(1)
			}
		})
	}
	wg.Go(func() { // policies in code that leave all to the resolver, again and again
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			if err := r.Update(WithIdempotent(fmt.Sprintf("orders.v1.Orders%d/*", i%7))); err != nil {
				t.Error(err)
			}
			if err := poor.Update(); err != nil {
				t.Error(err)
			}
			if err := empty.Update(throttled([]int{0, 10, 100, 1000}[i%4])); err != nil {
				t.Error(err)
			}
		}
	})

	attempts := func() int { // of one call that fails, by the policy in force
		var report Report
		_, _ = client.Put(t.Context(), &testpb.Request{}, WithReport(&report))
		return report.Made()
	}
	for _, n := range []int{3, 5, 2, 4} {
		if err := cluster.SetServiceConfig(config(n)); err != nil {
			t.Fatal(err)
		}
		if got := attempts(); got != n {
			t.Errorf("after the resolver's config with %d attempts: %d made", n, got)
		}
		before := calls.Load()
		for calls.Load() < before+200 { // under load, not before it
			if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d of %d calls failed", failed.Load(), calls.Load())
	}
	if s := tight.state(); s.Granted != spent || s.Refused == 0 {
		t.Errorf("the empty budget granted %d more and refused %d, want none and many", s.Granted-spent, s.Refused)
	}
	// The default budget, which is in force between the throttles, lets one retry
	// a minute through.
	if more := arrived() - 20 - int(fruitless.Load()) - extra; more > 2 || extra == 0 {
		t.Errorf("%d retries before the throttle was empty, %d after it, over updates of it; want some and none", extra, more)
	}
	if err := r.Update(WithDefaultPolicy(Policy{MaxAttempts: 6, Idempotency: Idempotent, Backoff: Backoff{Base: 1, Max: 1}})); err != nil {
		t.Fatal(err)
	}
	if got := attempts(); got != 6 {
		t.Errorf("after an update in code: %d attempts, want 6", got)
	}
}

// The audit is what a team reads to find where one line would gain retries.
func TestAudit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithoutResolverConfig())
		srv := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		defer srv.Close()
		cc, err := srv.Dial(r.DialOptions()...)
		if err != nil {
			t.Fatal(err)
		}
		for method, n := range map[string]int{get: 1, write: 3, withdrawn: 2, "/orders.v1.Orders/Get": 1} {
			for range n {
				_ = callAny(t.Context(), cc, method)
			}
		}
		r.Explain("/never.called/M")
		const fix = `if it is idempotent, add "option idempotency_level = IDEMPOTENT;" to it in `
		want := []string{
			`/testsrv.v1.TestService/Write: retries refused: 3; ` + fix + `testsrv/v1/testsrv.proto, or pass grpcretry.WithIdempotent("testsrv.v1.TestService/Write")`,
			`/testsrv.v1.DeclaredService/Withdrawn: retries refused: 2, because it is not idempotent (from proto)`,
			`/orders.v1.Orders/Get: retries refused: 0; ` + fix + `its .proto, or pass grpcretry.WithIdempotent("orders.v1.Orders/Get")`,
		}
		check := func(want []string) {
			t.Helper()
			var got []string
			for _, a := range r.Audit() {
				got = append(got, a.String())
			}
			if a, b := strings.Join(got, "\n"), strings.Join(want, "\n"); a != b {
				t.Errorf("audit:\n%s\nwant\n%s", a, b)
			}
		}
		check(want)
		// Counts outlive an update, and what it declares leaves the list.
		if err := r.Update(WithoutResolverConfig(), WithIdempotent("testsrv.v1.TestService/Write")); err != nil {
			t.Fatal(err)
		}
		check(want[1:])
		if err := r.Update(WithoutResolverConfig()); err != nil {
			t.Fatal(err)
		}
		check(want)
	})
}

// A proxy calls more methods than the audit can tell apart; what they lose must
// still be seen.
func TestAuditIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRetrier(t, WithoutResolverConfig())
		fail := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			return status.Error(codes.Unavailable, "down")
		}
		for i := range maxMethodsKept + 5 {
			_ = r.UnaryClientInterceptor()(t.Context(), fmt.Sprintf("/a.B/M%d", i), nil, nil, nil, fail)
		}
		list := r.Audit()
		last := list[len(list)-1]
		if len(list) != maxMethodsKept+1 || last.String() != "all other methods: retries refused: 5" {
			t.Errorf("%d entries, the last %q; want %d and 5 others", len(list), last, maxMethodsKept+1)
		}
	})
}
