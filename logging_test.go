package grpcretry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// logBook keeps what was logged, as a JSON handler writes it.
type logBook struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBook) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// text is all that was logged, times left out.
func (b *logBook) text() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// lines are the log's lines, decoded.
func (b *logBook) lines(t testing.TB) []map[string]any {
	t.Helper()
	var lines []map[string]any
	for line := range strings.Lines(b.text()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, m)
	}
	return lines
}

// loggedRetrier makes a Retrier that logs from the level up, and its book.
func loggedRetrier(t testing.TB, level slog.Level, opts ...Option) (*Retrier, *logBook) {
	t.Helper()
	b := new(logBook)
	handler := slog.NewJSONHandler(b, &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	r, err := New(append(opts, WithLogger(slog.New(handler)))...)
	if err != nil {
		t.Fatal(err)
	}
	return r, b
}

const declinedLine = `{"level":"WARN","msg":"grpcretry: not retried: the server may have processed the call, and nothing says that the method is idempotent",` +
	`"method":"/testsrv.v1.TestService/Write","code":"UNAVAILABLE","sent":"answered",` +
	`"fix":"if it is, declare \"option idempotency_level = IDEMPOTENT;\" in its .proto or pass grpcretry.WithIdempotent(\"testsrv.v1.TestService/Write\")"}` + "\n"

// The first question after installing the package is why a call was not retried.
// The log answers it once for each method with the line to add, and then is quiet.
func TestLogDeclined(t *testing.T) {
	unavailable := testsrv.Fail(1, codes.Unavailable)
	for _, tt := range []struct {
		name   string
		opts   []Option
		script testsrv.Reaction
		call   []grpc.CallOption
		want   string
	}{
		{name: "nothing said", script: unavailable, want: declinedLine},
		{name: "NotIdempotent was said", opts: []Option{WithMethodPolicy(write, Policy{Idempotency: NotIdempotent})}, script: unavailable},
		{name: "NotIdempotent was said for the call", script: unavailable, call: []grpc.CallOption{WithCallPolicy(func(p *Policy) { p.Idempotency = NotIdempotent })}},
		{name: "another code", opts: []Option{WithDefaultPolicy(Policy{Codes: Codes(codes.Aborted)})}, script: testsrv.Fail(1, codes.Aborted)},
		{name: "retries are off", opts: []Option{WithDefaultPolicy(Policy{MaxAttempts: 1})}, script: unavailable},
		{name: "a code that is not retried", script: testsrv.Fail(1, codes.NotFound)},
		{name: "success", script: testsrv.Sequence{{}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, book := loggedRetrier(t, slog.LevelDebug, tt.opts...)
				_, client := serve(t, r, testsrv.Script{write: tt.script})
				for range 3 {
					_, _ = client.Write(t.Context(), &testpb.Request{}, tt.call...)
				}
				// New policies do not make it news.
				if err := r.Update(tt.opts...); err != nil {
					t.Fatal(err)
				}
				_, _ = client.Write(t.Context(), &testpb.Request{}, tt.call...)
				if got := book.text(); got != tt.want {
					t.Errorf("logged\n%s\nwant\n%s", got, tt.want)
				}
			})
		})
	}
}

// An outage meets many callers of one method at once; one line is enough.
func TestLogDeclinedOnceUnderLoad(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, book := loggedRetrier(t, slog.LevelInfo)
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() { _, _ = client.Write(t.Context(), &testpb.Request{}) })
		}
		wg.Wait()
		if n := srv.Count(write); n != 100 {
			t.Errorf("%d attempts, want 100", n)
		}
		if got := book.text(); got != declinedLine {
			t.Errorf("logged\n%s\nwant\n%s", got, declinedLine)
		}
	})
}

// Made-up method names must not become as many lines.
func TestLogOfMadeUpMethodsIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, book := loggedRetrier(t, slog.LevelInfo)
		srv := testsrv.New(testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		defer srv.Close()
		// What a proxy for any method does; grpc's own answer to an unknown one would be UNIMPLEMENTED.
		forward := grpc.WithChainUnaryInterceptor(func(ctx context.Context, _ string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			return invoker(ctx, write, req, reply, cc, opts...)
		})
		cc, err := srv.Dial(append(r.DialOptions(), forward)...)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3000 {
			if err := cc.Invoke(t.Context(), fmt.Sprintf("/made.up.Service/M%d", i), &testpb.Request{}, new(testpb.Response)); err == nil {
				t.Fatal("no error")
			}
		}
		// One for each that is remembered, and one for all the others together.
		if n := len(book.lines(t)); n != maxMethodsKept+1 {
			t.Errorf("%d lines, want %d", n, maxMethodsKept+1)
		}
	})
}

// During an outage every call is given up. The log says so at once, then at most
// every ten seconds for each method, with how many lines it held back.
func TestLogGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, book := loggedRetrier(t, slog.LevelWarn, WithBudget(Unlimited()), WithDefaultPolicy(Policy{MaxAttempts: 2, Backoff: Backoff{Base: time.Second, Jitter: NoJitter}}))
		srv, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		// A call takes 1 s: the first is logged at 1 s, the next line is due at 11 s.
		for range 12 {
			_, _ = client.Get(t.Context(), &testpb.Request{})
		}
		line := func(method string, suppressed int) string {
			return fmt.Sprintf(`{"level":"WARN","msg":"grpcretry: call given up","method":"/testsrv.v1.TestService/%s","target":"passthrough:///%s",`+
				`"reason":"attempts_exhausted","code":"UNAVAILABLE","attempts":2,"duration":1000000000,"suppressed":%d}`+"\n", method, srv.Address(), suppressed)
		}
		want := line("Get", 0) + line("Get", 9)
		if got := book.text(); got != want {
			t.Errorf("logged\n%s\nwant\n%s", got, want)
		}
		// Another method has a line of its own.
		_, _ = client.Put(t.Context(), &testpb.Request{})
		want += line("Put", 0)
		// An Update in between does not let the next line through early.
		if err := r.Update(WithDefaultPolicy(Policy{MaxAttempts: 2, Backoff: Backoff{Base: time.Second, Jitter: NoJitter}})); err != nil {
			t.Fatal(err)
		}
		_, _ = client.Get(t.Context(), &testpb.Request{})
		time.Sleep(time.Minute)
		// Many at once after a silence: one line, the others are counted in the next.
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() { _, _ = client.Get(t.Context(), &testpb.Request{}) })
		}
		wg.Wait()
		time.Sleep(10 * time.Second)
		_, _ = client.Get(t.Context(), &testpb.Request{})
		lines := book.lines(t)
		if len(lines) != 5 {
			t.Fatalf("%d lines, want 5:\n%s", len(lines), book.text())
		}
		if got := book.text(); !strings.HasPrefix(got, want) {
			t.Errorf("logged\n%s\nwant first\n%s", got, want)
		}
		// 12 calls, one Update's, 100 and 1 of Get: what was not a line was counted.
		counted := 0.0
		for _, l := range lines {
			if l["method"] == get {
				counted += 1 + l["suppressed"].(float64)
			}
		}
		if counted != 114 {
			t.Errorf("the lines account for %v calls, want 114", counted)
		}
	})
}

// A clock that is set back by an hour must not silence the log for an hour.
func TestLogAfterTheClockWasSetBack(t *testing.T) {
	var line throttledLine
	now := time.Now()
	for _, tt := range []struct {
		at         time.Duration
		ok         bool
		suppressed int64
	}{
		{0, true, 0}, {givenUpInterval - 1, false, 0}, {givenUpInterval, true, 1},
		{-time.Hour, true, 0}, {-time.Hour + 1, false, 0}, {-time.Hour + givenUpInterval, true, 1},
	} {
		if suppressed, ok := line.allow(now.Add(tt.at)); ok != tt.ok || suppressed != tt.suppressed {
			t.Errorf("at %v: %v with %d suppressed, want %v with %d", tt.at, ok, suppressed, tt.ok, tt.suppressed)
		}
	}
}

// Which ends of a call count as given up, and with which word.
func TestLogGivenUpReasons(t *testing.T) {
	one := testsrv.Fail(1, codes.Unavailable)
	for _, tt := range []struct {
		name   string
		script testsrv.Reaction
		policy Policy
		empty  bool // the budget
		cancel time.Duration
		want   string // the line's reason and code, and the wait that was not made; "": no line
	}{
		{name: "attempts", script: one, want: "attempts_exhausted UNAVAILABLE"},
		{name: "budget", script: one, empty: true, want: "budget_exhausted UNAVAILABLE"},
		{name: "deadline", script: one, policy: Policy{Timeout: 1, Backoff: Backoff{Jitter: NoJitter}}, want: "deadline UNAVAILABLE 5e+07 backoff"},
		{name: "pushback", script: testsrv.Sequence{{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "-1")}}, want: "pushback_stop UNAVAILABLE"},
		{name: "pushback too long", script: testsrv.Sequence{{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "300000")}}, want: "pushback_stop UNAVAILABLE 3e+11 pushback"},
		{name: "cut wait", script: one, policy: Policy{Backoff: Backoff{Base: time.Minute, Jitter: NoJitter}}, cancel: time.Second, want: "parent_done CANCELLED"},
		{name: "cut second attempt", script: one.Then(testsrv.Step{Block: true}), policy: Policy{Backoff: Backoff{Base: 1, Max: 1}}, cancel: time.Second, want: "parent_done CANCELLED"},
		{name: "cut first attempt", script: testsrv.Sequence{{Block: true}}, cancel: time.Second},
		{name: "not retryable", script: testsrv.Fail(1, codes.NotFound)},
		{name: "never to be retried", script: one, policy: Policy{MaxAttempts: 1}},
		{name: "withdrawn", script: one, policy: Policy{Idempotency: NotIdempotent}},
		{name: "success after a retry", script: one.ThenOK()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				opts := []Option{WithDefaultPolicy(tt.policy)}
				if tt.empty {
					opts = append(opts, WithBudget(emptyBudget(t)))
				}
				r, book := loggedRetrier(t, slog.LevelInfo, opts...)
				_, client := serve(t, r, testsrv.Script{"*": tt.script})
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.cancel > 0 {
					time.AfterFunc(tt.cancel, cancel)
				}
				_, _ = client.Get(ctx, &testpb.Request{})
				got := ""
				for _, l := range book.lines(t) {
					got += fmt.Sprintf("%v %v", l["reason"], l["code"])
					if l["delay"] != nil {
						got += fmt.Sprintf(" %v %v", l["delay"], l["delay_source"])
					}
				}
				if got != tt.want {
					t.Errorf("logged %q, want %q\n%s", got, tt.want, book.text())
				}
			})
		})
	}
}

// A log is kept for long and read by many: nothing that a caller or a server
// wrote may get into it.
func TestLogHoldsNoPayload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const secret = "Ms Example, born 1970-01-01"
		r, book := loggedRetrier(t, slog.LevelDebug)
		_, client := serve(t, r, testsrv.Script{"*": testsrv.Sequence{{Code: codes.Unavailable, Message: secret, Trailer: metadata.Pairs("k", secret)}}})
		ctx := metadata.AppendToOutgoingContext(t.Context(), "k", secret)
		for _, call := range []func(context.Context, *testpb.Request, ...grpc.CallOption) (*testpb.Response, error){client.Get, client.Write} {
			if _, err := call(ctx, &testpb.Request{Text: secret}, WithIdempotencyKey(secret)); !strings.Contains(err.Error(), secret) {
				t.Fatalf("%v does not have the server's message", err)
			}
		}
		// Two retries, one given up, one declined.
		if n := len(book.lines(t)); n != 4 {
			t.Errorf("%d lines, want 4:\n%s", n, book.text())
		}
		if strings.Contains(book.text(), "Example") {
			t.Errorf("logged\n%s", book.text())
		}
	})
}

// Retries themselves are for debugging: each has a line at Debug, and none at Info.
func TestLogRetries(t *testing.T) {
	for level, want := range map[slog.Level]string{
		slog.LevelInfo: "",
		slog.LevelDebug: `{"level":"DEBUG","msg":"grpcretry: retry","method":"/testsrv.v1.TestService/Get","attempt":1,"code":"UNAVAILABLE","delay":50000000,"delay_source":"backoff"}
{"level":"DEBUG","msg":"grpcretry: retry","method":"/testsrv.v1.TestService/Get","attempt":2,"code":"UNAVAILABLE","delay":7000000,"delay_source":"pushback"}
`,
	} {
		synctest.Test(t, func(t *testing.T) {
			r, book := loggedRetrier(t, level, WithDefaultPolicy(Policy{Backoff: Backoff{Jitter: NoJitter}}))
			_, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable).
				Then(testsrv.Step{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", "7")}).ThenOK()})
			if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
			if got := book.text(); got != want {
				t.Errorf("at %v logged\n%s\nwant\n%s", level, got, want)
			}
		})
	}
}

// Policies that xDS delivers are invisible, which nobody would find out.
func TestLogXDS(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, book := loggedRetrier(t, slog.LevelInfo)
		srv := testsrv.New(nil)
		defer srv.Close()
		xds := manual.NewBuilderWithScheme("xds")
		xds.InitialState(resolver.State{Addresses: []resolver.Address{{Addr: srv.Address()}}})
		for range 2 { // two clients of one target
			cc, err := srv.DialTarget("xds:///orders", append(r.DialOptions(), grpc.WithResolvers(xds))...)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				if _, err := testpb.NewTestServiceClient(cc).Get(t.Context(), &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
			}
			_ = cc.Close()
		}
		if _, err := dial(t, srv, r).Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		const want = `{"level":"WARN","msg":"grpcretry: retry policies of xDS are invisible to an interceptor: give policies in code","target":"xds:///orders"}` + "\n"
		if got := book.text(); got != want {
			t.Errorf("logged\n%s\nwant\n%s", got, want)
		}
	})
}

// An interceptor further in that drops call options takes away what writes are
// repeated by. Whoever wrote it learns of it once for each target.
func TestLogSwallowedOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, book := loggedRetrier(t, slog.LevelInfo)
		swallow := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, _ ...grpc.CallOption) error {
			return invoker(ctx, method, req, reply, cc)
		})
		srv, client := serve(t, r, nil, swallow)
		for range 2 {
			for _, call := range []func(context.Context, *testpb.Request, ...grpc.CallOption) (*testpb.Response, error){client.Get, client.Put} {
				if _, err := call(t.Context(), &testpb.Request{}); err != nil {
					t.Fatal(err)
				}
			}
		}
		want := `{"level":"WARN","msg":"grpcretry: a call succeeded but its call options never reached grpc: an interceptor after this one drops them ` +
			`or answered by itself; what drops them also keeps attempts that never left the client from being told",` +
			`"method":"/testsrv.v1.TestService/Get","target":"passthrough:///` + srv.Address() + `"}` + "\n"
		if got := book.text(); got != want {
			t.Errorf("logged\n%s\nwant\n%s", got, want)
		}
		// A fake without a ClientConn has no options to reach: nothing to report.
		err := r.unary(t.Context(), get, nil, nil, nil, func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil })
		if err != nil || book.text() != want {
			t.Errorf("%v, logged\n%s", err, book.text())
		}
	})
}

// A log handler may send its records by a client of the very same Retrier.
func TestLogHandlerMayMakeCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		handler := &callingHandler{}
		r, err := New(WithLogger(slog.New(handler)))
		if err != nil {
			t.Fatal(err)
		}
		srv := testsrv.New(nil)
		defer srv.Close()
		sink := dial(t, srv, r)
		handler.call = func() { _, _ = sink.Get(context.Background(), &testpb.Request{}) }
		xds := manual.NewBuilderWithScheme("xds")
		xds.InitialState(resolver.State{Addresses: []resolver.Address{{Addr: srv.Address()}}})
		cc, err := srv.DialTarget("xds:///orders", append(r.DialOptions(), grpc.WithResolvers(xds))...)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := testpb.NewTestServiceClient(cc).Put(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		if n := srv.Count(get); n != 1 {
			t.Errorf("the handler made %d calls, want 1", n)
		}
	})
}

type callingHandler struct{ call func() }

func (h *callingHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h *callingHandler) Handle(context.Context, slog.Record) error {
	h.call()
	return nil
}
func (h *callingHandler) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h *callingHandler) WithGroup(string) slog.Handler      { return h }

// Without WithLogger the program's default logger is used, as it is at that time.
func TestLogGoesToTheDefaultLogger(t *testing.T) {
	book := new(logBook)
	before := slog.Default()
	defer slog.SetDefault(before)
	r, err := New()
	if err != nil {
		t.Fatal(err)
	}
	slog.SetDefault(slog.New(slog.NewJSONHandler(book, nil)))
	synctest.Test(t, func(t *testing.T) {
		_, client := serve(t, r, testsrv.Script{"*": testsrv.Fail(1, codes.Unavailable)})
		_, _ = client.Write(t.Context(), &testpb.Request{})
	})
	if lines := book.lines(t); len(lines) != 1 || lines[0]["method"] != write {
		t.Errorf("logged\n%s", book.text())
	}
}

// Whoever asks for hedges and does not get them must learn why, once.
func TestHedgesAreMissedOncePerMethod(t *testing.T) {
	for name, test := range map[string]struct {
		policy Policy
		reply  any
		want   string
		fix    bool
	}{
		"unknown idempotency": {Policy{Hedge: Hedge{MaxAttempts: 2, Delay: time.Second}}, new(testpb.Response), "not known to be idempotent", true},
		"a reply that cannot be doubled": {Policy{Hedge: Hedge{MaxAttempts: 2, Delay: time.Second}, Idempotency: Idempotent},
			&struct{ into *int }{new(int)}, "no other reply like the caller's can be made", false},
		"none": {Policy{Hedge: Hedge{MaxAttempts: 2, Delay: time.Second}, Idempotency: Idempotent}, new(testpb.Response), "", false},
	} {
		r, book := loggedRetrier(t, slog.LevelWarn, WithMethodPolicy("a.B/C", test.policy))
		for range 3 {
			if err := r.unary(t.Context(), "/a.B/C", nil, test.reply, nil, answered); err != nil {
				t.Fatal(err)
			}
			if err := invokeFake(t.Context(), r, put, func(int) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		lines := book.lines(t)
		if test.want == "" {
			if len(lines) > 0 {
				t.Errorf("%s: logged %v, want nothing", name, lines)
			}
			continue
		}
		if len(lines) != 1 || lines[0]["method"] != "/a.B/C" || lines[0]["policy_source"] != "method" || !strings.Contains(lines[0]["msg"].(string), test.want) {
			t.Fatalf("%s: logged %v, want one line: %s", name, lines, test.want)
		}
		if _, ok := lines[0]["fix"]; ok != test.fix {
			t.Errorf("%s: a fix is told: %v", name, ok)
		}
	}
}

// answered is an invoker that succeeds at once.
func answered(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
	return nil
}
