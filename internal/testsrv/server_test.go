package testsrv_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// reconnectAtOnce takes grpc's own, jittered waits out of the picture.
var reconnectAtOnce = grpc.WithConnectParams(grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: time.Second, Multiplier: 1, Jitter: 0, MaxDelay: time.Second},
	MinConnectTimeout: time.Second,
})

// kinds runs a test on memory in a bubble, and on loopback TCP in real time.
func kinds(t *testing.T, script testsrv.Script, test func(t *testing.T, srv *testsrv.Server)) {
	t.Run("bufconn", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			srv := testsrv.New(script)
			defer srv.Close()
			test(t, srv)
		})
	})
	t.Run("tcp", func(t *testing.T) {
		defer goleak.VerifyNone(t)
		srv, err := testsrv.Listen(script)
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Close()
		test(t, srv)
	})
}

// A killed server must be unreachable (so that an attempt is unsent: no peer),
// end the attempts it had, and come back at the same address.
func TestKillAndRestart(t *testing.T) {
	kinds(t, testsrv.Script{get: testsrv.Sequence{{Block: true}, {}}}, func(t *testing.T, srv *testsrv.Server) {
		ctx := within(t)
		c := client(t, srv, reconnectAtOnce)
		result := make(chan error)
		go func() {
			_, err := c.Get(ctx, &testpb.Request{})
			result <- err
		}()
		if err := srv.WaitCount(ctx, get, 1); err != nil {
			t.Fatal(err)
		}
		if n := srv.Running(); n != 1 {
			t.Errorf("%d handlers run, want 1", n)
		}
		srv.Kill()
		if n := srv.Running(); n != 0 {
			t.Errorf("%d handlers run after Kill, want none", n)
		}
		requireCode(t, <-result, codes.Unavailable)

		var p peer.Peer
		_, err := c.Get(ctx, &testpb.Request{}, grpc.Peer(&p))
		requireCode(t, err, codes.Unavailable)
		if p.Addr != nil || srv.Count(get) != 1 {
			t.Errorf("peer %v and %d arrivals, want none and 1: the server is down", p.Addr, srv.Count(get))
		}
		srv.Kill() // does nothing

		for range 2 { // the second one does nothing
			if err := srv.Restart(); err != nil {
				t.Fatal(err)
			}
		}
		_, err = c.Get(ctx, &testpb.Request{}, grpc.WaitForReady(true), grpc.Peer(&p))
		requireCode(t, err, codes.OK)
		if p.Addr.String() != srv.Address() {
			t.Errorf("peer = %v, want %s", p.Addr, srv.Address())
		}
		if a := srv.Attempts(get); len(a) != 2 || a[1].Number != 2 || a[1].Connection != 2 {
			t.Errorf("attempts = %+v, want a second one on a second connection", a)
		}
	})
}

// After CutConnections the attempts in flight have failed and the next one
// succeeds on a new connection.
func TestCutConnections(t *testing.T) {
	kinds(t, testsrv.Script{get: testsrv.Sequence{{Block: true}, {}}}, func(t *testing.T, srv *testsrv.Server) {
		ctx := within(t)
		c := client(t, srv, reconnectAtOnce)
		result := make(chan error)
		go func() {
			_, err := c.Get(ctx, &testpb.Request{})
			result <- err
		}()
		if err := srv.WaitCount(ctx, get, 1); err != nil {
			t.Fatal(err)
		}
		srv.CutConnections()
		requireCode(t, <-result, codes.Unavailable)
		if err := srv.WaitIdle(ctx); err != nil {
			t.Fatal(err)
		}
		_, err := c.Get(ctx, &testpb.Request{}, grpc.WaitForReady(true))
		requireCode(t, err, codes.OK)
	})
}

// A test that waits for what never comes must end with its context's cause.
func TestWaitsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{get: testsrv.Sequence{{Block: true}}})
		defer srv.Close()
		late := errors.New("late")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, late)
		defer cancel()
		start := time.Now()
		if err := srv.WaitCount(ctx, "", 1); err != late {
			t.Errorf("WaitCount = %v, want %v", err, late)
		}
		requireElapsed(t, start, time.Second)

		callCtx, hangUp := context.WithCancel(t.Context())
		done := make(chan struct{})
		c := client(t, srv)
		go func() {
			defer close(done)
			_, err := c.Get(callCtx, &testpb.Request{})
			if err == nil {
				t.Error("the blocked call succeeded")
			}
		}()
		synctest.Wait()
		if err := srv.WaitIdle(ctx); err != late {
			t.Errorf("WaitIdle = %v, want %v", err, late)
		}
		hangUp()
		<-done
		if err := srv.WaitIdle(t.Context()); err != nil {
			t.Errorf("WaitIdle = %v", err)
		}
	})
}

// Metadata and arrival times are what tests of attempt numbers, keys and backoff
// look at.
func TestRecords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(nil, testsrv.WithName("a"))
		defer srv.Close()
		c := client(t, srv)
		start := time.Now()
		request := &testpb.Request{Text: "first"}
		for range 2 {
			ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "k", "v"), time.Minute)
			if _, err := c.Get(ctx, request); err != nil {
				t.Fatal(err)
			}
			cancel()
			request.Text = "second"
			time.Sleep(time.Second)
		}
		if _, err := c.Put(t.Context(), request); err != nil {
			t.Fatal(err)
		}
		attempts := srv.Attempts(get)
		if len(attempts) != 2 || srv.Count("") != 3 || srv.Count(put) != 1 || len(srv.Attempts("")) != 3 {
			t.Fatalf("%d of %d attempts are Get, want 2 of 3", len(attempts), srv.Count(""))
		}
		for i, a := range attempts {
			if a.Method != get || a.Number != i+1 || a.Arrived.Sub(start) != time.Duration(i)*time.Second || a.Ended != a.Arrived ||
				!a.HasDeadline || a.Left != time.Minute || len(a.Metadata["k"]) != 1 || a.Responses != 1 || a.Err != nil || !a.ContextEnded.IsZero() {
				t.Errorf("attempt %d = %+v", i+1, a)
			}
		}
		if got := attempts[0].Requests[0].GetText(); got != "first" {
			t.Errorf("request = %q, want what was sent at the time", got)
		}
	})
}

// A resolver's service config is how users of grpc's own retries come to us.
func TestOwnTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable).ThenOK()})
		defer srv.Close()
		own := manual.NewBuilderWithScheme("own")
		own.InitialState(resolver.State{Addresses: []resolver.Address{{Addr: "anything"}}})
		cc, err := srv.DialTarget("own:///x", grpc.WithResolvers(own), grpc.WithDefaultServiceConfig(`{"methodConfig": [{
			"name": [{"service": "testsrv.v1.TestService"}],
			"retryPolicy": {"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`))
		if err != nil {
			t.Fatal(err)
		}
		if got := cc.Target(); got != "own:///x" {
			t.Errorf("target = %s", got)
		}
		r, err := testpb.NewTestServiceClient(cc).Get(t.Context(), &testpb.Request{})
		if err != nil || r.GetArrival() != 2 {
			t.Errorf("response, error = %v, %v, want the second arrival", r, err)
		}
		if a := srv.Attempts(get); len(a[1].Metadata["grpc-previous-rpc-attempts"]) != 1 {
			t.Errorf("metadata of the retry = %v", a[1].Metadata)
		}
	})
}

func TestOtherServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(nil, testsrv.WithServices(func(r grpc.ServiceRegistrar) {
			healthpb.RegisterHealthServer(r, health.NewServer())
		}))
		defer srv.Close()
		cc, err := srv.Dial()
		if err != nil {
			t.Fatal(err)
		}
		r, err := healthpb.NewHealthClient(cc).Check(t.Context(), &healthpb.HealthCheckRequest{})
		if err != nil || r.GetStatus() != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("health = %v, %v", r, err)
		}
	})
}

// Use after Close must end in an error: a client made then would never be closed.
func TestClosed(t *testing.T) {
	kinds(t, nil, func(t *testing.T, srv *testsrv.Server) {
		c := client(t, srv)
		srv.Close()
		if _, err := c.Get(within(t), &testpb.Request{}); err == nil {
			t.Error("a call succeeded after Close")
		}
		if _, err := srv.Dial(); err == nil {
			t.Error("Dial succeeded after Close")
		}
		if err := srv.Restart(); err == nil {
			t.Error("Restart succeeded after Close")
		}
	})
}
