package grpcretry

import (
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// The words of the schema are those that the code has, and the other way round.
func TestSchemaHasTheWords(t *testing.T) {
	for key, want := range map[attribute.Key][]string{
		"rpc.response.status_code":   codeNames[:],
		"error.type":                 codeNames[1:],
		"grpcretry.attempt.decision": reasonNames[1:],
	} {
		if got := attemptevents.Schema[key]; !slices.Equal(got.([]string), want) {
			t.Errorf("%s is one of %q, want %q", key, got, want)
		}
	}
}

// plainReasons are the words of TestEventsOfEveryReason.
var plainReasons = []string{
	"success", "retry", "parent_done", "closed", "disabled", "pushback_stop", "retry_if_stop", "not_retryable", "not_idempotent",
	"attempts_exhausted", "deadline", "dry_run", "inbound_retry", "budget_exhausted",
}

// Every word by which a unary call can end has its event, complete to the last
// attribute: this table is the reference for those who build on them.
func TestEventsOfEveryReason(t *testing.T) {
	const secret = "for jane@example.com"
	unavailable := testsrv.Step{Code: codes.Unavailable, Message: secret}
	retried := event{
		"rpc.method": "testsrv.v1.TestService/Get", "grpcretry.attempt.number": int64(1),
		"rpc.response.status_code": "UNAVAILABLE", "error.type": "UNAVAILABLE", "grpcretry.attempt.decision": "retry",
		"grpcretry.attempt.duration": 0.0, "grpcretry.attempt.sent": "answered", "grpcretry.retry.delay": 0.01,
		"grpcretry.retry.delay_source": "backoff", "grpcretry.budget.balance": 0.9, "network.peer.address": "testsrv",
	}
	with := func(e event, changes event) event {
		out := event{}
		for _, m := range []event{e, changes} {
			for k, v := range m {
				if out[k] = v; v == nil {
					delete(out, k)
				}
			}
		}
		return out
	}
	final := with(retried, event{ // of one attempt, before its own changes
		"grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": nil, "grpcretry.budget.balance": nil,
		"grpcretry.attempt.max": int64(3), "grpcretry.idempotency": "idempotent", "grpcretry.policy.source": "default",
	})
	ok := with(final, event{
		"rpc.response.status_code": "OK", "error.type": nil, "grpcretry.attempt.sent": nil, "grpcretry.attempt.decision": "success",
		"grpcretry.idempotency": nil, "grpcretry.policy.source": nil,
	})
	empty, err := NewBudget(BudgetConfig{FreeInterval: -1})
	if err != nil {
		t.Fatal(err)
	}
	for range 10 {
		empty.Reserve(CostTransient)
	}
	listed := map[string]bool{}
	for name, test := range map[string]struct {
		method  string
		steps   testsrv.Sequence
		options []Option
		policy  func(*Policy)
		call    []grpc.CallOption
		parent  time.Duration
		cancel  time.Duration
		down    bool
		closed  bool
		inbound bool // below an inbound retry
		want    []event
	}{
		"success":       {want: []event{ok}},
		"success, slow": {steps: testsrv.Sequence{{Delay: 250 * ms}}, parent: time.Second, want: []event{with(ok, event{"grpcretry.attempt.duration": 0.25, "grpcretry.deadline.remaining": 0.75})}},
		"retry":         {steps: testsrv.Sequence{unavailable, {}}, want: []event{retried, with(ok, event{"grpcretry.attempt.number": int64(2)})}},
		"retry by pushback": {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("7")}, {}}, want: []event{
			with(retried, event{"grpcretry.retry.delay": 0.007, "grpcretry.retry.delay_source": "pushback", "grpcretry.budget.balance": 66.0 / 70}),
			with(ok, event{"grpcretry.attempt.number": int64(2)}),
		}},
		"retry by RetryInfo": {steps: testsrv.Sequence{{Code: codes.ResourceExhausted, Details: retryAfter(200 * ms)}, {}}, want: []event{
			with(retried, event{"rpc.response.status_code": "RESOURCE_EXHAUSTED", "error.type": "RESOURCE_EXHAUSTED", "grpcretry.retry.delay": 0.21, "grpcretry.retry.delay_source": "retry_info"}),
			with(ok, event{"grpcretry.attempt.number": int64(2)}),
		}},
		"parent done": {steps: testsrv.Sequence{{Block: true}}, parent: 250 * ms, want: []event{with(final, event{
			"rpc.response.status_code": "DEADLINE_EXCEEDED", "error.type": "DEADLINE_EXCEEDED", "grpcretry.attempt.decision": "parent_done",
			"grpcretry.attempt.duration": 0.25, "grpcretry.attempt.sent": "ambiguous", "grpcretry.deadline.remaining": 0.0,
		})}},
		"parent done in the wait": {steps: testsrv.Sequence{unavailable}, cancel: 5 * ms, want: []event{with(final, event{"grpcretry.attempt.decision": "parent_done"})}},
		"parent done at once": {cancel: -1, want: []event{with(final, event{
			"rpc.response.status_code": "CANCELLED", "error.type": "CANCELLED", "grpcretry.attempt.decision": "parent_done",
			"grpcretry.attempt.sent": "ambiguous", "network.peer.address": nil,
		})}},
		"closed": {closed: true, want: []event{with(final, event{
			"rpc.response.status_code": "CANCELLED", "error.type": "CANCELLED", "grpcretry.attempt.decision": "closed",
			"grpcretry.attempt.sent": "ambiguous", "network.peer.address": nil,
		})}},
		"disabled":           {steps: testsrv.Sequence{unavailable}, call: []grpc.CallOption{WithoutRetry()}, want: []event{with(final, event{"grpcretry.attempt.decision": "disabled"})}},
		"disabled by policy": {steps: testsrv.Sequence{unavailable}, policy: attemptsOf(1), want: []event{with(final, event{"grpcretry.attempt.decision": "disabled", "grpcretry.attempt.max": int64(1)})}},
		"pushback stop": {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("-1")}}, want: []event{with(final, event{
			"grpcretry.attempt.decision": "pushback_stop", "grpcretry.retry.delay_source": "pushback",
		})}},
		"pushback stop, malformed": {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("soon")}}, want: []event{with(final, event{
			"grpcretry.attempt.decision": "pushback_stop", "grpcretry.retry.delay_source": "pushback",
		})}},
		"pushback too long": {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("60001")}}, want: []event{with(final, event{
			"grpcretry.attempt.decision": "pushback_stop", "grpcretry.retry.delay": 60.001, "grpcretry.retry.delay_source": "pushback",
		})}},
		"RetryInfo too long": {steps: testsrv.Sequence{{Code: codes.ResourceExhausted, Details: retryAfter(5 * time.Minute)}}, want: []event{with(final, event{
			"rpc.response.status_code": "RESOURCE_EXHAUSTED", "error.type": "RESOURCE_EXHAUSTED",
			"grpcretry.attempt.decision": "pushback_stop", "grpcretry.retry.delay": 300.0, "grpcretry.retry.delay_source": "retry_info",
		})}},
		"RetryIf stop":   {steps: testsrv.Sequence{unavailable}, policy: func(p *Policy) { p.RetryIf = func(Attempt) Verdict { return VerdictStop } }, want: []event{with(final, event{"grpcretry.attempt.decision": "retry_if_stop"})}},
		"not retryable":  {steps: testsrv.Sequence{{Code: codes.NotFound, Message: secret}}, want: []event{with(final, event{"rpc.response.status_code": "NOT_FOUND", "error.type": "NOT_FOUND", "grpcretry.attempt.decision": "not_retryable"})}},
		"not idempotent": {method: write, steps: testsrv.Sequence{unavailable}, want: []event{with(final, event{"rpc.method": "testsrv.v1.TestService/Write", "grpcretry.attempt.decision": "not_idempotent", "grpcretry.idempotency": "unknown"})}},
		"not idempotent, told": {method: write, steps: testsrv.Sequence{unavailable}, options: []Option{WithMethodPolicy(write, Policy{Idempotency: NotIdempotent})}, want: []event{with(final, event{
			"rpc.method": "testsrv.v1.TestService/Write", "grpcretry.attempt.decision": "not_idempotent", "grpcretry.idempotency": "not_idempotent", "grpcretry.policy.source": "method",
		})}},
		"not idempotent, refused": {method: write, steps: testsrv.Sequence{{Code: codes.Unavailable, SendHeaderFirst: true, Message: "the connection is draining"}}, want: []event{with(final, event{
			"rpc.method": "testsrv.v1.TestService/Write", "grpcretry.attempt.decision": "not_idempotent", "grpcretry.idempotency": "unknown", "grpcretry.attempt.sent": "refused",
		})}},
		"attempts exhausted": {steps: testsrv.Sequence{unavailable}, call: []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.MaxAttempts, p.Idempotency = 2, Keyed })}, want: []event{
			retried, with(final, event{"grpcretry.attempt.number": int64(2), "grpcretry.attempt.decision": "attempts_exhausted", "grpcretry.attempt.max": int64(2), "grpcretry.policy.source": "call", "grpcretry.idempotency": "keyed"}),
		}},
		"attempts exhausted, unsent": {method: write, down: true, policy: attemptsOf(2), want: []event{
			with(retried, event{"rpc.method": "testsrv.v1.TestService/Write", "grpcretry.attempt.sent": "unsent", "network.peer.address": nil, "grpcretry.budget.balance": 1.0}),
			with(final, event{"rpc.method": "testsrv.v1.TestService/Write", "grpcretry.attempt.sent": "unsent", "network.peer.address": nil, "grpcretry.idempotency": "unknown", "grpcretry.attempt.number": int64(2), "grpcretry.attempt.decision": "attempts_exhausted", "grpcretry.attempt.max": int64(2)}),
		}},
		"deadline": {steps: testsrv.Sequence{unavailable}, policy: func(p *Policy) { p.Timeout = 5 * ms }, want: []event{with(final, event{
			"grpcretry.attempt.decision": "deadline", "grpcretry.deadline.remaining": 0.005, "grpcretry.retry.delay": 0.01, "grpcretry.retry.delay_source": "backoff",
		})}},
		"deadline, by the server's hint": {steps: testsrv.Sequence{{Code: codes.Unavailable, Trailer: pushbackOf("500")}}, parent: 300 * ms, want: []event{with(final, event{
			"grpcretry.attempt.decision": "deadline", "grpcretry.deadline.remaining": 0.3, "grpcretry.retry.delay": 0.5, "grpcretry.retry.delay_source": "pushback",
		})}},
		"deadline in the attempt": {steps: testsrv.Sequence{{Block: true}}, policy: func(p *Policy) { p.Timeout = 250 * ms }, want: []event{with(final, event{
			"rpc.response.status_code": "DEADLINE_EXCEEDED", "error.type": "DEADLINE_EXCEEDED", "grpcretry.attempt.decision": "deadline",
			"grpcretry.attempt.duration": 0.25, "grpcretry.attempt.sent": "ambiguous", "grpcretry.deadline.remaining": 0.0,
		})}},
		"deadline of a service": {steps: testsrv.Sequence{unavailable}, options: []Option{WithMethodPolicy("testsrv.v1.TestService/*", Policy{Timeout: ms, Backoff: Backoff{Base: time.Second, Jitter: NoJitter}})}, want: []event{with(final, event{
			"grpcretry.attempt.decision": "deadline", "grpcretry.deadline.remaining": 0.001, "grpcretry.policy.source": "service",
			"grpcretry.retry.delay": 1.0, "grpcretry.retry.delay_source": "backoff",
		})}},
		"dry run":          {steps: testsrv.Sequence{unavailable}, options: []Option{WithDryRun()}, want: []event{with(final, event{"grpcretry.attempt.decision": "dry_run", "grpcretry.retry.delay": 0.01, "grpcretry.retry.delay_source": "backoff", "grpcretry.budget.balance": 1.0})}},
		"inbound retry":    {steps: testsrv.Sequence{unavailable}, inbound: true, want: []event{with(final, event{"grpcretry.attempt.decision": "inbound_retry"})}},
		"budget exhausted": {steps: testsrv.Sequence{unavailable}, options: []Option{WithBudget(empty)}, want: []event{with(final, event{"grpcretry.attempt.decision": "budget_exhausted", "grpcretry.budget.balance": 0.0})}},
	} {
		for _, word := range decisions(test.want) {
			listed[word] = true
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = get
				}
				srv := testsrv.New(testsrv.Script{test.method: test.steps})
				t.Cleanup(srv.Close)
				cc, err := srv.Dial(newRetrier(t, append(test.options, exactly(test.policy))...).DialOptions()...)
				if err != nil {
					t.Fatal(err)
				}
				if test.down {
					srv.Kill()
				}
				if test.closed {
					_ = cc.Close()
				}
				start := time.Now()
				ctx, end := tracedSpan(t.Context())
				if test.inbound {
					again := metadata.NewIncomingContext(t.Context(), metadata.Pairs(attemptsHeader, "1"))
					ctx = context.WithValue(ctx, inboundKey{}, newInbound(again, newServerConfig([]ServerOption{WithRetrySubtree()})))
				}
				if test.parent > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, test.parent)
					defer cancel()
				}
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				switch {
				case test.cancel < 0:
					cancel()
				case test.cancel > 0:
					time.AfterFunc(test.cancel, cancel)
				}
				_, _ = unaryOf(testpb.NewTestServiceClient(cc), test.method)(ctx, &testpb.Request{}, test.call...)
				span := end()
				got := eventsOf(t, span)
				for i := range max(len(got), len(test.want)) {
					switch {
					case i >= len(got):
						t.Errorf("no event %d, want %v", i+1, test.want[i])
					case i >= len(test.want):
						t.Errorf("event %d is too many: %v", i+1, got[i])
					default:
						for key := range attemptevents.Schema {
							if got[i][key] != test.want[i][key] {
								t.Errorf("event %d: %s = %v, want %v", i+1, key, got[i][key], test.want[i][key])
							}
						}
					}
				}
				at := start // an event's time is the end of its attempt
				for i, e := range span.Events() {
					at = at.Add(time.Duration(test.want[i]["grpcretry.attempt.duration"].(float64) * float64(time.Second)))
					if !e.Time.Equal(at) {
						t.Errorf("event %d is of %v, want %v", i+1, e.Time.Sub(start), at.Sub(start))
					}
					if wait, ok := test.want[i]["grpcretry.retry.delay"].(float64); ok {
						at = at.Add(time.Duration(wait * float64(time.Second)))
					}
				}
				checkSpanUntouched(t, span.Status().Code, span.Name(), len(span.Attributes()))
				if text := fmt.Sprint(got); strings.Contains(text, "jane") {
					t.Errorf("the message is in the events: %s", text)
				}
			})
		})
	}
	if got, want := slices.Sorted(maps.Keys(listed)), slices.Sorted(slices.Values(plainReasons)); !slices.Equal(got, want) {
		t.Errorf("the events had the words %q, want %q", got, want)
	}
}

// The words that only streams, hedged calls and work can end by have their
// events too; and with those above they are all that there are.
func TestEventsOfEveryOtherReason(t *testing.T) {
	all := map[string]bool{}
	for _, word := range plainReasons {
		all[word] = true
	}
	breaksOff := testsrv.Script{list: testsrv.Sequence{breaking(1, codes.Unavailable)}.ThenOK()}
	receive := func(opts ...grpc.CallOption) func(*testing.T, context.Context, *Retrier, *grpc.ClientConn) {
		return func(t *testing.T, ctx context.Context, _ *Retrier, cc *grpc.ClientConn) {
			stream := open(t, ctx, cc, list, opts...)
			send(t, stream, 1)
			closeSend(t, stream)
			_, _ = drain(receiver{stream})
		}
	}
	getOnce := func(_ *testing.T, ctx context.Context, _ *Retrier, cc *grpc.ClientConn) {
		_, _ = testpb.NewTestServiceClient(cc).Get(ctx, &testpb.Request{})
	}
	for name, test := range map[string]struct {
		options []Option
		script  testsrv.Script
		call    func(*testing.T, context.Context, *Retrier, *grpc.ClientConn)
		want    []event // only what is particular
	}{
		"committed": {script: breaksOff, call: receive(), want: []event{{"grpcretry.attempt.decision": "committed", "grpcretry.commit.cause": "message"}}},
		"resumed": {script: breaksOff, call: receive(WithResume(afterLast)), want: []event{
			{"grpcretry.attempt.decision": "resume", "grpcretry.retry.delay": 0.01, "grpcretry.retry.delay_source": "backoff"},
			{"grpcretry.attempt.decision": "success"},
		}},
		"not resumed": {script: breaksOff, call: receive(WithResume(func(*testpb.Request, *testpb.Response) (*testpb.Request, bool) { return nil, false })), want: []event{
			{"grpcretry.attempt.decision": "committed", "grpcretry.commit.cause": "message"},
		}},
		"permanent": {options: []Option{WithDefaultPolicy(Policy{})}, call: func(t *testing.T, ctx context.Context, r *Retrier, _ *grpc.ClientConn) {
			_ = r.Do(ctx, "jobs/restock", func(context.Context) error { return Permanent(status.Error(codes.Unavailable, "gone")) })
		}, want: []event{{"grpcretry.attempt.decision": "permanent", "rpc.response.status_code": "UNAVAILABLE"}}},
		"hedged": {
			options: []Option{hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms})},
			script:  testsrv.Script{get: testsrv.Sequence{{Delay: 200 * ms}, {Delay: 5 * ms, Code: codes.Unavailable}, {Delay: 5 * ms}}},
			call:    getOnce,
			want: []event{
				{"grpcretry.attempt.decision": "hedge_failed", "grpcretry.attempt.number": int64(2), "grpcretry.attempt.hedge": true, "grpcretry.retry.delay_source": nil},
				{"grpcretry.attempt.decision": "hedge_lost", "grpcretry.attempt.number": int64(1), "grpcretry.attempt.hedge": nil},
				{"grpcretry.attempt.decision": "success", "grpcretry.attempt.number": int64(3), "grpcretry.attempt.hedge": true},
			},
		},
		"hedged, and asked for no more": {
			options: []Option{hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms})},
			script:  testsrv.Script{get: testsrv.Sequence{{Delay: 200 * ms, Code: codes.Unavailable}, {Delay: 5 * ms, Code: codes.Unavailable, Trailer: pushbackOf("-1")}}},
			call:    getOnce,
			want: []event{
				{"grpcretry.attempt.decision": "hedge_failed", "grpcretry.attempt.number": int64(2), "grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": "pushback"},
				{"grpcretry.attempt.decision": "pushback_stop", "grpcretry.attempt.number": int64(1), "grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": nil, "grpcretry.hedge.refused": "pushback_stop"},
			},
		},
		"hedged, and asked to come back much later": {
			options: []Option{hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms})},
			script:  testsrv.Script{get: testsrv.Sequence{{Delay: 200 * ms, Code: codes.Unavailable}, {Delay: 5 * ms, Code: codes.Unavailable, Trailer: pushbackOf("300000")}}},
			call:    getOnce,
			want: []event{
				{"grpcretry.attempt.decision": "hedge_failed", "grpcretry.attempt.number": int64(2), "grpcretry.retry.delay": 300.0, "grpcretry.retry.delay_source": "pushback"},
				{"grpcretry.attempt.decision": "pushback_stop", "grpcretry.attempt.number": int64(1), "grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": nil},
			},
		},
	} {
		for _, word := range decisions(test.want) {
			all[word] = true
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				options := test.options
				if options == nil {
					options = []Option{exactly(nil)}
				}
				r := newRetrier(t, options...)
				_, cc := serveStreams(t, r, test.script)
				ctx, events := traced(t, t.Context())
				test.call(t, ctx, r, cc)
				got := events()
				if len(got) != len(test.want) {
					t.Fatalf("events %v, want %v", got, test.want)
				}
				for i, want := range test.want {
					for key, value := range want {
						if got[i][key] != value {
							t.Errorf("event %d: %s = %v, want %v", i+1, key, got[i][key], value)
						}
					}
				}
			})
		})
	}
	for _, word := range reasonNames[1:] {
		if !all[word] {
			t.Errorf("no test has an event with the decision %q", word)
		}
	}
}

// checkSpanUntouched: the span is the caller's, who alone says whether its
// operation failed.
func checkSpanUntouched(t *testing.T, code otelcodes.Code, name string, attributes int) {
	t.Helper()
	if code != otelcodes.Unset || name != "caller" || attributes != 0 {
		t.Errorf("the caller's span has status %v, name %q, %d attributes", code, name, attributes)
	}
}

// Trace backends find a server by address and port apart.
func TestEventsTellThePeer(t *testing.T) {
	srv, err := testsrv.Listen(nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	client := dial(t, srv, newRetrier(t))
	ctx, events := traced(t, t.Context())
	if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
		t.Fatal(err)
	}
	host, port, _ := net.SplitHostPort(srv.Address())
	got := events()
	if len(got) != 1 || got[0]["network.peer.address"] != host || fmt.Sprint(got[0]["network.peer.port"]) != port {
		t.Errorf("events %v, want the peer %s and %s", got, host, port)
	}
	for addr, want := range map[string]event{
		"[2001:db8::1]:443": {"network.peer.address": "2001:db8::1", "network.peer.port": int64(443)},
		"[fe80::1%eth0]:80": {"network.peer.address": "fe80::1%eth0", "network.peer.port": int64(80)},
		"/run/app.sock":     {"network.peer.address": "/run/app.sock"},
		"@abstract":         {"network.peer.address": "@abstract"},
		"host:https":        {"network.peer.address": "host"},
		"bufconn":           {"network.peer.address": "bufconn"},
	} {
		ctx, events := traced(t, t.Context())
		err := newRetrier(t).UnaryClientInterceptor()(ctx, get, &testpb.Request{}, &testpb.Response{}, nil,
			func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
				for _, o := range opts {
					if o, ok := o.(grpc.PeerCallOption); ok {
						*o.PeerAddr = peer.Peer{Addr: namedAddr(addr)}
					}
				}
				return nil
			})
		if err != nil {
			t.Fatal(err)
		}
		got := events()
		for _, key := range []attribute.Key{"network.peer.address", "network.peer.port"} {
			if len(got) != 1 || got[0][key] != want[key] {
				t.Errorf("%s: %s = %v, want %v", addr, key, got[0][key], want[key])
			}
		}
	}
}

type namedAddr string

func (namedAddr) Network() string  { return "test" }
func (a namedAddr) String() string { return string(a) }

// A span keeps a limited number of events and evicts the oldest, so a call that
// is retried for long must not push out what else is on the span, nor hide how
// it began.
func TestEventsAreBounded(t *testing.T) {
	for _, failures := range []int{30, 31, 32, 33, 100} {
		t.Run(fmt.Sprint(failures, " failures"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, client := serve(t, newRetrier(t, WithBudget(Unlimited()), exactly(func(p *Policy) {
					p.MaxAttempts = 1000
					p.Backoff.Func = func(int, time.Duration, Attempt) time.Duration { return 0 }
				})), testsrv.Script{get: testsrv.Fail(failures, codes.Unavailable).ThenOK()})
				ctx, events := traced(t, t.Context())
				if _, err := client.Get(ctx, &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
				got := events()
				if want := min(failures+1, 32); len(got) != want {
					t.Fatalf("%d events, want %d", len(got), want)
				}
				last := got[len(got)-1]
				var dropped any
				if failures > 31 {
					dropped = int64(failures - 31)
				}
				if last["grpcretry.attempt.number"] != int64(failures+1) || last["grpcretry.attempt.dropped"] != dropped || last["grpcretry.attempt.decision"] != "success" {
					t.Errorf("last event %v, want number %d, %v dropped", last, failures+1, dropped)
				}
			})
		})
	}
}

// Most calls succeed at once; whoever finds that their events are noise can
// have those of the others alone.
func TestEventsOnlyOnRetry(t *testing.T) {
	for name, test := range map[string]struct {
		method string
		steps  testsrv.Sequence
		cancel time.Duration
		want   string
	}{
		"success":           {},
		"failure":           {steps: testsrv.Fail(1, codes.NotFound)},
		"not idempotent":    {method: write, steps: testsrv.Fail(1, codes.Unavailable)},
		"cut in the wait":   {steps: testsrv.Fail(1, codes.Unavailable), cancel: 5 * ms},
		"retried":           {steps: testsrv.Fail(1, codes.Unavailable).ThenOK(), want: "retry success"},
		"retried in vain":   {steps: testsrv.Fail(1, codes.Unavailable), want: "retry retry attempts_exhausted"},
		"cut in the second": {steps: testsrv.Fail(1, codes.Unavailable), cancel: 20 * ms, want: "retry parent_done"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				if test.method == "" {
					test.method = get
				}
				_, client := serve(t, newRetrier(t, WithEventsOnlyOnRetry(), exactly(nil)), testsrv.Script{test.method: test.steps})
				ctx, events := traced(t, t.Context())
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				if test.cancel > 0 {
					time.AfterFunc(test.cancel, cancel)
				}
				_, _ = unaryOf(client, test.method)(ctx, &testpb.Request{})
				if got := strings.Join(decisions(events()), " "); got != test.want {
					t.Errorf("events %q, want %q", got, test.want)
				}
			})
		})
	}
}

// deaf is a span that does not record, as those of calls that are not sampled.
type deaf struct {
	noop.Span
	t *testing.T
}

func (deaf) IsRecording() bool { return false }
func (d deaf) AddEvent(string, ...trace.EventOption) {
	d.t.Error("an event was built for a span that does not record")
}
func (d deaf) SetStatus(otelcodes.Code, string)        { d.t.Error("the status was set") }
func (d deaf) SetAttributes(...attribute.KeyValue)     { d.t.Error("attributes were set") }
func (d deaf) RecordError(error, ...trace.EventOption) { d.t.Error("an error was recorded") }

// Nine in ten spans are not recorded. What is built for them is thrown away.
func TestNothingIsBuiltWithoutRecording(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).Then(testsrv.Step{Code: codes.NotFound})})
		ctx := trace.ContextWithSpan(t.Context(), deaf{t: t})
		for range 3 {
			if _, err := client.Get(ctx, &testpb.Request{}); status.Code(err) != codes.NotFound {
				t.Errorf("error %v", err)
			}
		}
	})
}

// strict is a span that records and must only ever get events.
type strict struct {
	deaf
	events *int
}

func (strict) IsRecording() bool                       { return true }
func (s strict) AddEvent(string, ...trace.EventOption) { *s.events++ }

// A failure that was dealt with is no error of the caller's operation.
func TestSpanGetsEventsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, client := serve(t, newRetrier(t, exactly(nil)), testsrv.Script{get: testsrv.Sequence{{
			Code: codes.Unavailable, Message: "private", Details: []proto.Message{&testpb.Request{Text: "private"}}, Trailer: metadata.MD{"private": {"1"}},
		}}})
		n := 0
		if _, err := client.Get(trace.ContextWithSpan(t.Context(), strict{deaf{t: t}, &n}), &testpb.Request{}); err == nil {
			t.Error("no error")
		}
		if n != 3 {
			t.Errorf("%d events, want 3", n)
		}
	})
}
