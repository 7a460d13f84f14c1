// Package compare holds the tests that let gRPC itself and grpcretry follow the
// same service configs. They are here, and not in a test file, because they run
// twice: in the root module with the oldest gRPC that we support, and in the
// nested module with the newest.
package compare

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/configdocs"
	"example.com/grpcretry/internal/testsrv"
)

// Accepted reports whether the gRPC that is linked accepts a document.
func Accepted(doc string) bool {
	cc, err := grpc.NewClient("passthrough:///nowhere", grpc.WithDefaultServiceConfig(doc), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return false
	}
	_ = cc.Close()
	return true
}

// Documents checks that the gRPC that is linked and we think of every document
// what the file says.
func Documents(t *testing.T, docs []configdocs.Doc) {
	for _, d := range docs {
		if got := Accepted(d.JSON); got != d.GRPC {
			t.Errorf("%s: accepted by gRPC %s = %v, want %v", d.Name, grpc.Version, got, d.GRPC)
		}
		_, err := grpcretry.New(grpcretry.WithServiceConfig(d.JSON))
		if ours := ""; err != nil {
			ours = strings.ReplaceAll(err.Error(), "grpcretry: WithServiceConfig: ", "")
			if ours != d.Ours {
				t.Errorf("%s: we say\n%s\nwant\n%s", d.Name, ours, d.Ours)
			}
		} else if d.Ours != "" {
			t.Errorf("%s: accepted, want\n%s", d.Name, d.Ours)
		}
	}
}

// How a client comes to retry.
const (
	byGRPC     = "gRPC itself"
	byCode     = "grpcretry, config in code"
	byResolver = "grpcretry, config of the ClientConn"
)

// Attempts checks that a server sees the same attempts from gRPC's own retry as
// from ours, for every document that both accept: as many, with the same
// attempt headers, and after waits in the same range.
func Attempts(t *testing.T, docs []configdocs.Doc) {
	compared := 0
	for _, d := range docs {
		if d.Ours != "" || !d.GRPC || strings.Contains(d.JSON, "hedgingPolicy") {
			continue // gRPC for Go does not hedge
		}
		c := decode(t, d)
		for _, method := range c.methods() {
			p, ok := c.policy(method)
			if !ok {
				continue // the document says nothing about its retries
			}
			compared++
			for _, s := range scripts(p) {
				t.Run(fmt.Sprintf("%s/%s/%s", d.Name, method[1:], s.name), func(t *testing.T) {
					want := play(t, byGRPC, d.JSON, method, s)
					check(t, byGRPC, want, p, s)
					for _, by := range []string{byCode, byResolver} {
						got := play(t, by, d.JSON, method, s)
						check(t, by, got, p, s)
						if !slices.Equal(got.headers, want.headers) || got.code != want.code {
							t.Errorf("%s: attempts %v, then %v; of gRPC itself: %v, then %v", by, got.headers, got.code, want.headers, want.code)
						}
					}
				})
			}
		}
	}
	if compared < 20 {
		t.Errorf("%d methods compared, want at least 20", compared)
	}
}

// Throttling checks the same for retryThrottling: call after call, of which
// first all fail, then all succeed, then all fail again.
func Throttling(t *testing.T) {
	const doc = `{
		"retryThrottling": {"maxTokens": %d, "tokenRatio": %v},
		"methodConfig": [{"name": [{"service": "a.B"}], "retryPolicy":
			{"maxAttempts": 3, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]
	}`
	for _, limits := range []struct {
		tokens int
		ratio  float64
	}{{10, 0.1}, {1, 1}, {3, 0.5}, {100, 2}, {1000, 0.001}} {
		t.Run(fmt.Sprintf("%d tokens, %v for a success", limits.tokens, limits.ratio), func(t *testing.T) {
			var all [2][]int
			for i, by := range []string{byGRPC, byCode} {
				synctest.Test(t, func(t *testing.T) {
					fails, seen := true, 0
					server := serve(t, func(grpc.ServerStream) error {
						seen++
						if fails {
							return status.Error(codes.Unavailable, "down")
						}
						return nil
					})
					cc := dial(t, server, by, fmt.Sprintf(doc, limits.tokens, limits.ratio), false)
					for n := range 900 {
						fails = n < 600 || n >= 800
						before := seen
						_ = cc.Invoke(t.Context(), "/a.B/C", &emptypb.Empty{}, &emptypb.Empty{})
						all[i] = append(all[i], seen-before)
					}
				})
			}
			if !slices.Equal(all[0], all[1]) {
				t.Errorf("attempts of each call of gRPC itself\n%v\nof grpcretry\n%v", all[0], all[1])
			}
			// A throttle of one token refuses from the first failure on.
			if total := sum(all[0]); (total == 900) != (limits.tokens == 1) || total == 700*3+200 {
				t.Errorf("%d attempts: the throttle was never or always in the way", total)
			}
		})
	}
}

// config is a document as the specification reads it.
type config struct {
	MethodConfig []struct {
		Name        []struct{ Service, Method string }
		RetryPolicy *policy
	}
}

type policy struct {
	MaxAttempts                int
	InitialBackoff, MaxBackoff string
	BackoffMultiplier          float64
	RetryableStatusCodes       []codes.Code
}

func decode(t *testing.T, d configdocs.Doc) (c config) {
	t.Helper()
	if err := json.Unmarshal([]byte(d.JSON), &c); err != nil {
		t.Fatalf("%s: %v", d.Name, err)
	}
	return c
}

// methods are some to which the document's entries apply, and one that it does not name.
func (c config) methods() []string {
	methods := []string{other}
	for _, m := range c.MethodConfig {
		for _, n := range m.Name {
			if n.Service != "" {
				methods = append(methods, "/"+n.Service+"/"+n.Method)
			}
			if n.Service != "" && n.Method == "" {
				methods[len(methods)-1] += "Any"
			}
		}
	}
	return methods
}

const other = "/other.v1.Service/Other"

// policy is the policy for a method: nil if it is not retried, although another
// entry has a policy; and false if the document leaves that open.
func (c config) policy(method string) (*policy, bool) {
	service, name, _ := strings.Cut(method[1:], "/")
	without := false
	for _, key := range []struct{ Service, Method string }{{service, name}, {service, ""}, {"", ""}} {
		for _, m := range c.MethodConfig {
			if slices.Contains(m.Name, key) {
				if m.RetryPolicy != nil {
					if without {
						return nil, true // a more specific entry has none
					}
					return m.RetryPolicy, true
				}
				without = true
			}
		}
	}
	return nil, false
}

// step is what the server does to an attempt.
type step struct {
	code     codes.Code
	pushback []string
}

type script struct {
	name  string
	steps []step // the last one again and again
}

func scripts(p *policy) []script {
	if p == nil {
		return []script{{"fails", []step{{code: codes.Unavailable}}}}
	}
	listed := p.RetryableStatusCodes[0]
	unlisted := codes.InvalidArgument
	all := []script{
		{"fails with a code that is not listed", []step{{code: unlisted}}},
		{"not listed, with pushback", []step{{code: unlisted, pushback: []string{"10"}}}},
		{"fails once", []step{{code: listed}, {}}},
		{"fails, then with another code", []step{{code: listed}, {code: unlisted}}},
		{"pushback at first", []step{{code: listed, pushback: []string{"70"}}, {code: listed}}},
		{"pushback later", []step{{code: listed}, {code: listed, pushback: []string{"70"}}, {code: listed}}},
		{"pushback of 0", []step{{code: listed, pushback: []string{"0"}}, {code: listed}}},
		{"pushback always", []step{{code: listed, pushback: []string{"1234"}}}},
		{"pushback -1", []step{{code: listed, pushback: []string{"-1"}}}},
		{"pushback that is no number", []step{{code: listed, pushback: []string{"soon"}}}},
		{"pushback twice", []step{{code: listed, pushback: []string{"1", "2"}}}},
	}
	for _, code := range p.RetryableStatusCodes {
		all = append(all, script{"fails with " + code.String(), []step{{code: code}}})
	}
	return all
}

// seen is what the server and the caller saw.
type seen struct {
	headers []string // grpc-previous-rpc-attempts of each attempt
	gaps    []time.Duration
	code    codes.Code
}

func play(t *testing.T, by, doc, method string, s script) (out seen) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var last time.Time
		server := serve(t, func(stream grpc.ServerStream) error {
			mu.Lock()
			defer mu.Unlock()
			md, _ := metadata.FromIncomingContext(stream.Context())
			if out.headers != nil {
				out.gaps = append(out.gaps, time.Since(last))
			}
			last = time.Now()
			out.headers = append(out.headers, strings.Join(md["grpc-previous-rpc-attempts"], ","))
			step := s.steps[min(len(out.headers), len(s.steps))-1]
			if step.pushback != nil {
				stream.SetTrailer(metadata.MD{"grpc-retry-pushback-ms": step.pushback})
			}
			return status.Error(step.code, "scripted")
		})
		cc := dial(t, server, by, doc, true)
		out.code = status.Code(cc.Invoke(t.Context(), method, &emptypb.Empty{}, &emptypb.Empty{}))
	})
	return out
}

// serve starts a server that has every method.
func serve(t *testing.T, handle func(grpc.ServerStream) error) *testsrv.Server {
	server := testsrv.New(nil, testsrv.WithServerOptions(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		if err := stream.RecvMsg(&emptypb.Empty{}); err != nil {
			return err
		}
		if err := handle(stream); err != nil {
			return err
		}
		return stream.SendMsg(&emptypb.Empty{})
	})))
	t.Cleanup(server.Close)
	return server
}

// dial makes a client that follows the document. unlimited lifts the budget of
// ours where the document has no throttle, as gRPC has none then.
func dial(t *testing.T, server *testsrv.Server, by, doc string, unlimited bool) *grpc.ClientConn {
	t.Helper()
	var opts []grpc.DialOption
	if by != byCode {
		opts = append(opts, grpc.WithDefaultServiceConfig(doc))
	}
	if by != byGRPC {
		// gRPC asks nobody whether a method may be repeated; we do where the document does not name it.
		retrier := []grpcretry.Option{grpcretry.WithIdempotent("other.v1.Service/*"), grpcretry.WithLogger(slog.New(slog.DiscardHandler))}
		if by == byCode {
			retrier = append(retrier, grpcretry.WithServiceConfig(doc))
		}
		if unlimited && (by == byResolver || !strings.Contains(doc, "retryThrottling")) {
			retrier = append(retrier, grpcretry.WithBudget(grpcretry.Unlimited()))
		}
		r, err := grpcretry.New(retrier...)
		if err != nil {
			t.Fatal(err)
		}
		opts = append(opts, r.DialOptions()...)
	}
	cc, err := server.Dial(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return cc
}

// check compares what was seen with gRFC A6.
func check(t *testing.T, by string, got seen, p *policy, s script) {
	t.Helper()
	attempts, retries := 1, 0
	for p != nil && attempts < min(p.MaxAttempts, 5) {
		step := s.steps[min(attempts, len(s.steps))-1]
		if !slices.Contains(p.RetryableStatusCodes, step.code) {
			break
		}
		low, high := backoff(t, p, retries)
		retries++
		if step.pushback != nil {
			ms, err := strconv.Atoi(step.pushback[0])
			if err != nil || ms < 0 || len(step.pushback) > 1 {
				break
			}
			low, high, retries = time.Duration(ms)*time.Millisecond, time.Duration(ms)*time.Millisecond, 0
		}
		attempts++
		if len(got.headers) < attempts {
			continue
		}
		if gap := got.gaps[attempts-2]; gap < low || gap > high {
			t.Errorf("%s: %v before attempt %d, want %v to %v", by, gap, attempts, low, high)
		}
		if want := strconv.Itoa(attempts - 1); got.headers[attempts-1] != want {
			t.Errorf("%s: attempt header of attempt %d = %q, want %s", by, attempts, got.headers[attempts-1], want)
		}
	}
	if len(got.headers) != attempts {
		t.Errorf("%s: %d attempts, want %d", by, len(got.headers), attempts)
	}
}

// backoff is the range of the wait before a retry, of which n came before it.
func backoff(t *testing.T, p *policy, n int) (low, high time.Duration) {
	t.Helper()
	initial, err := time.ParseDuration(p.InitialBackoff)
	if err != nil {
		t.Fatal(err)
	}
	most := time.Duration(math.MaxInt64)
	if d, err := time.ParseDuration(p.MaxBackoff); err == nil { // else more than fits
		most = d
	}
	exp := min(float64(initial)*math.Pow(p.BackoffMultiplier, float64(n)), float64(most))
	return time.Duration(exp * 0.8), time.Duration(math.Ceil(exp * 1.2))
}

func sum(list []int) (total int) {
	for _, n := range list {
		total += n
	}
	return total
}
