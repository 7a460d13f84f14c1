package grpcretry

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// slowHeaders holds up the nth streams that grpc opens once their headers are
// sent, so that what the server says to these arrives before anything else is.
type slowHeaders struct {
	opened atomic.Int64
	nth    []int64
}

func (h *slowHeaders) HandleRPC(_ context.Context, s stats.RPCStats) {
	if _, ok := s.(*stats.OutHeader); ok && slices.Contains(h.nth, h.opened.Add(1)) {
		time.Sleep(ms)
	}
}
func (*slowHeaders) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*slowHeaders) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (*slowHeaders) HandleConn(context.Context, stats.ConnStats)                       {}

// A stream that the server refuses at its headers can lose the race against what
// its caller sends, and so can the one with which grpc repeats it by itself. To
// take a refused stream for an empty answer would lose what was sent. Here the
// streams of the list are certain to be refused before the rest is sent, and the
// others may be at any moment.
func TestStreamRefusedAtItsHeaders(t *testing.T) {
	for _, k := range streamKinds {
		for _, nth := range [][]int64{nil, {1}, {2}, {1, 2}, {3}, {1, 3}, {1, 2, 3}} {
			t.Run(fmt.Sprintf("%v/%v", k, nth), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					r := newRetrier(t, WithDefaultPolicy(Policy{Backoff: Backoff{Base: 100 * ms, Jitter: NoJitter}}), WithBudget(Unlimited()))
					w := &world{t: t, ctx: t.Context(), request: &testpb.Request{}, dial: append(r.DialOptions(), grpc.WithStatsHandler(&slowHeaders{nth: nth}))}
					w.raw(false, frames(testsrv.Early(), testsrv.Reset(http2.ErrCodeRefusedStream)))
					var report Report
					err := w.invoke(t.Context(), k, WithReport(&report))
					want := []string{"not_idempotent"}
					if k.idempotent {
						want = []string{"retry", "retry", "attempts_exhausted"}
					}
					if status.Code(err) != codes.Unavailable || !same(words(&report), want) {
						t.Errorf("%v after %v, want UNAVAILABLE after %v", err, words(&report), want)
					}
					for _, a := range report.Attempts {
						if a.Evidence != Refused {
							t.Errorf("attempt %d: %v, want refused", a.Number, a.Evidence)
						}
					}
					if n := len(w.arrived()); n != 2*len(want) {
						t.Errorf("%d streams arrived, want two for each attempt", n)
					}
				})
			})
		}
	}
}
