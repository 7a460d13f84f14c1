package peers_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// scripts are what the server does to the attempts of one call, and what a peer
// makes of it that retries UNAVAILABLE, three attempts in all.
var scripts = []struct {
	name     string
	script   []codes.Code
	attempts int
	code     codes.Code
}{
	{"success at once", []codes.Code{codes.OK}, 1, codes.OK},
	{"success after a retry", []codes.Code{codes.Unavailable, codes.OK}, 2, codes.OK},
	{"success at the last attempt", []codes.Code{codes.Unavailable, codes.Unavailable, codes.OK}, 3, codes.OK},
	{"no success", []codes.Code{codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.OK}, 3, codes.Unavailable},
	{"an answer that is not retried", []codes.Code{codes.NotFound, codes.OK}, 1, codes.NotFound},
	{"such an answer after a retry", []codes.Code{codes.Unavailable, codes.InvalidArgument, codes.OK}, 2, codes.InvalidArgument},
}

var configs = []peers.Config{
	{},
	{AttemptTimeout: time.Minute},
	{Base: time.Microsecond},
	{Base: time.Microsecond, Max: 2 * time.Microsecond, Jitter: true},
}

// Figures of peers that do different things with the same failures could not be
// compared: on a real connection each makes the same attempts and gives the
// caller the same code.
func TestPeersAgree(t *testing.T) {
	for _, p := range peers.All {
		for _, c := range configs {
			for _, s := range scripts {
				t.Run(fmt.Sprintf("%s/%+v/%s", p.Name, c, s.name), func(t *testing.T) {
					opts, err := p.DialOptions(c)
					if errors.Is(err, peers.ErrUnable) && c.AttemptTimeout > 0 {
						t.Skip(err)
					} else if err != nil {
						t.Fatal(err)
					}
					var steps testsrv.Sequence
					for _, code := range s.script {
						if code == codes.OK {
							steps = steps.ThenOK()
							continue
						}
						steps = append(steps, testsrv.Fail(1, code)...)
					}
					server := testsrv.New(testsrv.Script{testpb.TestService_Get_FullMethodName: steps})
					defer server.Close()
					cc, err := server.Dial(opts...)
					if err != nil {
						t.Fatal(err)
					}
					_, err = testpb.NewTestServiceClient(cc).Get(t.Context(), &testpb.Request{})
					check(t, p, server.Count(testpb.TestService_Get_FullMethodName), err, s.attempts, s.code, s.script[0])
				})
			}
		}
	}
}

// The same without a connection, as the costs of the interceptors alone are measured.
func TestInterceptorsAgree(t *testing.T) {
	for _, p := range peers.All {
		for _, c := range configs {
			for _, s := range scripts {
				t.Run(fmt.Sprintf("%s/%+v/%s", p.Name, c, s.name), func(t *testing.T) {
					intercept, err := p.Interceptor(c)
					if errors.Is(err, peers.ErrUnable) && (p.Name == "native" || p.Name == "native-throttle") {
						t.Skip(err)
					} else if err != nil {
						t.Fatal(err)
					}
					attempts := 0
					err = intercept(t.Context(), testpb.TestService_Get_FullMethodName, &testpb.Request{}, &testpb.Response{}, nil,
						func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
							attempts++
							return status.Error(s.script[attempts-1], "as the script says")
						})
					check(t, p, attempts, err, s.attempts, s.code, s.script[0])
				})
			}
		}
	}
}

// A timeout of the attempt alone is retried by every peer that has one, and the
// end of the caller's own deadline by none: without the first, figures under
// load would compare retries with none.
func TestAttemptTimeoutsAreRetried(t *testing.T) {
	config := peers.Config{Base: time.Millisecond, AttemptTimeout: 100 * time.Millisecond}
	for _, p := range peers.All {
		for _, tt := range []struct {
			name     string
			deadline time.Duration
			attempts int
		}{
			{"the attempt's", time.Minute, 2},
			{"the caller's", 50 * time.Millisecond, 1},
		} {
			t.Run(p.Name+"/"+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					opts, err := p.DialOptions(config)
					if errors.Is(err, peers.ErrUnable) && !p.TimesAttempts() {
						t.Skip(err)
					} else if err != nil {
						t.Fatal(err)
					}
					server := testsrv.New(testsrv.Script{testpb.TestService_Get_FullMethodName: testsrv.Sequence{{Block: true}, {}}})
					defer server.Close()
					cc, err := server.Dial(opts...)
					if err != nil {
						t.Fatal(err)
					}
					ctx, cancel := context.WithTimeout(t.Context(), tt.deadline)
					defer cancel()
					_, err = testpb.NewTestServiceClient(cc).Get(ctx, &testpb.Request{})
					want := tt.attempts
					if !p.TimesAttempts() {
						want = 1
					}
					if got := server.Count(""); got != want || (err == nil) != (want == 2) {
						t.Errorf("%d attempts and %v, want %d", got, err, want)
					}
				})
			})
		}
	}
}

// Experiments with several servers need each peer to reach all of them.
func TestRoundRobin(t *testing.T) {
	for _, p := range peers.All {
		t.Run(p.Name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				opts, err := p.DialOptions(peers.Config{RoundRobin: true})
				if err != nil {
					t.Fatal(err)
				}
				cluster := testsrv.NewCluster(3, nil)
				defer cluster.Close()
				if err := cluster.SetServiceConfig(""); err != nil {
					t.Fatal(err)
				}
				cc, err := cluster.Dial(opts...)
				if err != nil {
					t.Fatal(err)
				}
				cc.Connect()
				synctest.Wait() // until all are connected
				for range 6 {
					if _, err := testpb.NewTestServiceClient(cc).Get(t.Context(), &testpb.Request{}); err != nil {
						t.Fatal(err)
					}
				}
				for _, s := range cluster.Servers {
					if got := s.Count(""); got != 2 {
						t.Errorf("%s got %d of 6 calls, want 2", s.Name(), got)
					}
				}
			})
		})
	}
}

func check(t *testing.T, p peers.Peer, attempts int, err error, wantAttempts int, wantCode, first codes.Code) {
	t.Helper()
	if !p.Retries() {
		wantAttempts, wantCode = 1, first
	}
	if code := status.Code(err); attempts != wantAttempts || code != wantCode {
		t.Errorf("%d attempts and %v, want %d and %v (error: %v)", attempts, code, wantAttempts, wantCode, err)
	}
}
