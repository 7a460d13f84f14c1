package grpcretry

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A server stream must be hedged until its first message, and whoever wins must
// deliver all of it: no message lost, doubled, or of another attempt.
func TestHedgedServerStreams(t *testing.T) {
	msgs := func(d time.Duration) testsrv.Step { return testsrv.Step{Delay: d, Messages: 3, Every: 5 * ms} }
	every20 := Hedge{MaxAttempts: 3, Delay: 20 * ms}
	for name, test := range map[string]struct {
		script  testsrv.Sequence
		hedge   Hedge
		policy  func(*Policy)
		header  bool          // the caller asks for the header first
		pause   time.Duration // and waits that long before anything
		starts  []time.Duration
		words   []string
		code    codes.Code
		server  string // whose messages arrive
		got     int
		elapsed time.Duration
	}{
		"the first is fast":      {script: testsrv.Sequence{msgs(10 * ms)}, hedge: every20, starts: []time.Duration{0}, words: []string{"success"}, server: "/1", got: 3, elapsed: 20 * ms},
		"the hedge wins":         {script: testsrv.Sequence{msgs(time.Second), msgs(5 * ms)}, hedge: every20, starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "success"}, server: "/2", got: 3, elapsed: 35 * ms},
		"the first wins late":    {script: testsrv.Sequence{msgs(25 * ms), msgs(time.Second)}, hedge: every20, starts: []time.Duration{0, 20 * ms}, words: []string{"success", "hedge_lost"}, server: "/1", got: 3, elapsed: 35 * ms},
		"no hedge once it began": {script: testsrv.Sequence{{Messages: 3, Every: 100 * ms}}, hedge: every20, starts: []time.Duration{0}, words: []string{"success"}, server: "/1", got: 3, elapsed: 200 * ms},
		"an empty stream wins":   {script: testsrv.Sequence{msgs(time.Second), {Delay: 5 * ms, Messages: -1}}, hedge: every20, starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "success"}, elapsed: 25 * ms},
		"a failure sends the next at once": {
			script: testsrv.Sequence{msgs(time.Second), {Delay: 5 * ms, Messages: -1, Code: codes.Unavailable}, msgs(5 * ms)}, hedge: every20,
			starts: []time.Duration{0, 20 * ms, 25 * ms}, words: []string{"hedge_lost", "hedge_failed", "success"}, server: "/3", got: 3, elapsed: 40 * ms,
		},
		"the first fails alone": {
			script: testsrv.Sequence{{Delay: 5 * ms, Messages: -1, Code: codes.Unavailable}, msgs(5 * ms)}, hedge: every20,
			starts: []time.Duration{0, 5 * ms}, words: []string{"retry", "success"}, server: "/2", got: 3, elapsed: 20 * ms,
		},
		"a fatal failure": {
			script: testsrv.Sequence{msgs(time.Second), {Delay: 5 * ms, Messages: -1, Code: codes.NotFound}}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "not_retryable"}, code: codes.NotFound, elapsed: 25 * ms,
		},
		"all fail": {
			script: testsrv.Sequence{{Delay: 45 * ms, Messages: -1, Code: codes.Unavailable}, {Messages: -1, Code: codes.Unavailable}}, hedge: every20,
			starts: []time.Duration{0, 20 * ms, 20 * ms}, words: []string{"attempts_exhausted", "hedge_failed", "hedge_failed"}, code: codes.Unavailable, elapsed: 45 * ms,
		},
		"it fails after its first message": {
			script: testsrv.Sequence{msgs(time.Second), {Delay: 5 * ms, Messages: 1, Code: codes.Unavailable}}, hedge: every20,
			starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "committed"}, server: "/2", got: 1, code: codes.Unavailable, elapsed: 25 * ms,
		},
		"the header decides": {
			script: testsrv.Sequence{msgs(time.Second), {SendHeaderFirst: true, Header: metadata.Pairs("n", "2"), Delay: 50 * ms, Messages: 3}}, hedge: every20, header: true,
			starts: []time.Duration{0, 20 * ms}, words: []string{"hedge_lost", "success"}, server: "/2", got: 3, elapsed: 70 * ms,
		},
		"the clock runs while the caller waits": {
			script: testsrv.Sequence{msgs(60 * ms)}, hedge: every20, pause: 50 * ms,
			starts: []time.Duration{0}, words: []string{"success"}, server: "/1", got: 3, elapsed: 70 * ms,
		},
		"each attempt has its own first-response timeout": {
			script: testsrv.Sequence{{Block: true}, {Block: true}, msgs(5 * ms)}, hedge: every20, policy: func(p *Policy) { p.FirstResponseTimeout = 30 * ms },
			starts: []time.Duration{0, 20 * ms, 30 * ms}, words: []string{"hedge_failed", "hedge_lost", "success"}, server: "/3", got: 3, elapsed: 45 * ms,
		},
		"at once": {
			script: testsrv.Sequence{msgs(10 * ms)}, hedge: Hedge{MaxAttempts: 3, AtOnce: true},
			starts: []time.Duration{0, 0, 0}, got: 3, elapsed: 20 * ms,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				policy := test.policy
				if policy == nil {
					policy = func(*Policy) {}
				}
				budget := mustBudget(t, BudgetConfig{})
				srv, client := serve(t, newRetrier(t, hedged(test.hedge, policy), WithBudget(budget)), testsrv.Script{list: test.script})
				if _, err := client.Put(t.Context(), &testpb.Request{}); err != nil { // connects
					t.Fatal(err)
				}
				ctx, events := traced(t, t.Context())
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				begun := time.Now()
				var report Report
				stream, err := client.List(ctx, &testpb.Request{Text: "for all"}, WithReport(&report))
				if err != nil {
					t.Fatal(err)
				}
				if test.pause > 0 {
					time.Sleep(test.pause)
				}
				if test.header {
					md, err := stream.Header()
					if err != nil || len(md.Get("n")) != 1 || md.Get("n")[0] != "2" {
						t.Errorf("header %v, %v; want that of attempt 2", md, err)
					}
				}
				got := 0
				for {
					var m *testpb.Response
					if m, err = stream.Recv(); err != nil {
						break
					}
					got++
					if test.server != "" && m.GetItems()[0] != "testsrv"+test.server {
						t.Errorf("message %d is that of %s, want %s", got, m.GetItems()[0], test.server)
					}
					if m.GetNumber() != int64(got) || m.GetText() != "for all" {
						t.Errorf("message %d has number %d and text %q", got, m.GetNumber(), m.GetText())
					}
				}
				checkElapsed(t, begun, test.elapsed)
				if errors.Is(err, io.EOF) {
					err = nil
				}
				checkCode(t, err, test.code)
				if got != test.got {
					t.Errorf("%d messages, want %d", got, test.got)
				}
				if test.words != nil && !same(words(&report), test.words) {
					t.Errorf("attempts: %v, want %v", words(&report), test.words)
				}
				if len(report.Attempts) != len(test.starts) {
					t.Fatalf("%d attempts, want %d", len(report.Attempts), len(test.starts))
				}
				for i, a := range report.Attempts {
					if at := a.Start.Sub(begun); at != test.starts[i] || a.Number != i+1 {
						t.Errorf("attempt %d, number %d, began at %v, want %v", i+1, a.Number, at, test.starts[i])
					}
				}
				events()
				synctest.Wait()
				if n := srv.Running(); n != 0 {
					t.Errorf("%d attempts still run on the server", n)
				}
				if n := budget.state().InFlight; n != 0 {
					t.Errorf("%d calls in flight", n)
				}
			})
		})
	}
}

// Streams of the other kinds, whose callers go on sending, make their attempts
// one after the other.
func TestOtherStreamsAreNotHedged(t *testing.T) {
	for _, method := range []string{store, syncUp} {
		synctest.Test(t, func(t *testing.T) {
			srv, cc := serveStreams(t, newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms})), testsrv.Script{method: testsrv.Sequence{
				{Delay: 100 * ms, Messages: -1, NoEcho: true, Code: codes.Unavailable}, {Delay: 100 * ms, Messages: 1, NoEcho: true},
			}})
			begun := time.Now()
			stream, err := cc.NewStream(t.Context(), streamDesc(method), method)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(stream.SendMsg(&testpb.Request{}), stream.CloseSend()); err != nil {
				t.Fatal(err)
			}
			if err := stream.RecvMsg(new(testpb.Response)); err != nil {
				t.Errorf("%s: %v", method, err)
			}
			checkElapsed(t, begun, 210*ms)
			if n := srv.Count(method); n != 2 {
				t.Errorf("%s: %d attempts, want 2", method, n)
			}
			_ = stream.RecvMsg(new(testpb.Response))
		})
	}
}

// A caller who leaves a hedged stream must leave nothing behind, in whatever
// state it is.
func TestHedgedStreamLeft(t *testing.T) {
	for name, after := range map[string]time.Duration{"before a hedge": 10 * ms, "with hedges": 50 * ms} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget := mustBudget(t, BudgetConfig{})
				srv, client := serve(t, newRetrier(t, hedged(Hedge{MaxAttempts: 3, Delay: 20 * ms}), WithBudget(budget)), testsrv.Script{list: testsrv.Sequence{{Block: true}}})
				ctx, cancel := context.WithTimeout(t.Context(), after)
				defer cancel()
				stream, err := client.List(ctx, &testpb.Request{})
				if err != nil {
					t.Fatal(err)
				}
				var m grpc.ClientStream = stream
				err = m.RecvMsg(new(testpb.Response))
				checkCode(t, err, codes.DeadlineExceeded)
				synctest.Wait()
				if srv.Running() != 0 || budget.state().InFlight != 0 {
					t.Errorf("%d attempts run, %d calls in flight", srv.Running(), budget.state().InFlight)
				}
			})
		})
	}
}
