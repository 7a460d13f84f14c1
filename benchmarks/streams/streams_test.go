package streams

import (
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry/benchmarks/costs"
	"example.com/grpcretry/benchmarks/peers"
)

// A benchmark that nobody runs rots, and one whose retries do not happen
// compares nothing: every case runs through every peer, twice on one connection.
func TestEveryCaseRuns(t *testing.T) {
	for _, c := range Cases {
		for _, p := range Peers {
			t.Run(c.Name+"/"+p.Name, func(t *testing.T) {
				client, stop, err := c.start(p)
				if err != nil {
					t.Fatal(err)
				}
				defer stop()
				for range 2 {
					if err := c.once(t.Context(), client, p); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
}

// The server fails the first stream of two: whoever succeeds has repeated it,
// and without a peer the failure shows.
func TestReplayHappens(t *testing.T) {
	c := Cases[len(Cases)-1]
	for _, p := range Peers {
		client, stop, err := c.start(p)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		err = c.run(t.Context(), client)
		if failed := status.Code(err) == codes.Unavailable; failed == p.Retries() || !failed && err != nil {
			t.Errorf("%s: %v", p.Name, err)
		}
	}
}

// The figures are ratios to the first peer, which therefore has exactly 1.
func TestMeasure(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	figures, err := Cases[2].Measure(t.Context(), 2, time.Millisecond, random)
	if err != nil {
		t.Fatal(err)
	}
	if len(figures) != len(Peers) || figures[0].Peer != peers.None || figures[0].Ratio != (costs.Interval{Mid: 1, Low: 1, High: 1}) {
		t.Errorf("figures %+v, want those of none first, with a ratio of 1", figures)
	}
	for _, f := range figures {
		if f.Micros.Mid <= 0 || f.Ratio.Low > f.Ratio.Mid || f.Ratio.Mid > f.Ratio.High {
			t.Errorf("figure %+v", f)
		}
	}
	if _, err := Cases[0].Measure(t.Context(), 0, time.Millisecond, random); err == nil {
		t.Error("no rounds at all were measured")
	}
}
