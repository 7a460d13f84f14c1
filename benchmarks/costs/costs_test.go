package costs

import (
	"errors"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"example.com/grpcretry/benchmarks/peers"
)

// A benchmark that nobody runs rots: every case makes some calls through every
// peer, and only the native peers may stay away, from the interceptor alone.
func TestEveryCaseRuns(t *testing.T) {
	for _, c := range Cases {
		for _, p := range peers.All {
			t.Run(c.Bench+"/peer="+p.Name, func(t *testing.T) {
				r, err := c.Start(p)
				if errors.Is(err, peers.ErrUnable) && strings.HasPrefix(p.Name, "native") && !c.EndToEnd {
					t.Skip(err)
				} else if err != nil {
					t.Fatal(err)
				}
				defer r.Close()
				if err := r.Run(10); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// The intervals are what the page claims, so they have to hold what they were
// made from, and to be narrow where the sample is.
func TestMedianInterval(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	missed := 0
	const trials = 400
	for range trials {
		sample := make([]float64, 40)
		for i := range sample {
			sample[i] = 100 + random.NormFloat64()
		}
		got := Median(sample, random)
		if got.Low > got.Mid || got.Mid > got.High {
			t.Fatalf("interval %+v is out of order", got)
		}
		if got.High-got.Low > 2 {
			t.Errorf("interval %+v is wider than the sample's spread", got)
		}
		if got.Low > 100 || got.High < 100 {
			missed++
		}
	}
	// 5% are to miss; with the fixed seed this is exact.
	if share := float64(missed) / trials; share < 0.02 || share > 0.08 {
		t.Errorf("%.1f%% of the intervals missed the true median, want about 5%%", 100*share)
	}
}

// One slow batch, or a machine that is slower for a while, must not show in a ratio.
func TestPairsCancelTheMachine(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	base, twice := make([]float64, 60), make([]float64, 60)
	for i := range base {
		machine := 1 + 5*random.Float64()
		base[i], twice[i] = machine, 2*machine
	}
	twice[7] *= 50
	got := Figure{nanos: twice}.Beside(Figure{nanos: base}, random)
	if got != (Interval{2, 2, 2}) {
		t.Errorf("ratio %+v, want 2 exactly", got)
	}
}

// The table has a cell for every peer in every row, and says which could not take part.
func TestTable(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	table := NewTable(peers.All, Least(2, time.Millisecond))
	for _, c := range Cases[:1] {
		figures, err := c.Measure(peers.All, Effort{Rounds: 3, Batch: 50 * time.Microsecond}, random)
		if err != nil {
			t.Fatal(err)
		}
		table.Add(c, figures)
	}
	lines := strings.Split(strings.TrimSpace(table.Markdown()), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines, want a heading, a rule and a row:\n%s", len(lines), table.Markdown())
	}
	cells := strings.Split(strings.Trim(lines[2], "| "), " | ")
	if len(cells) != 1+len(peers.All) {
		t.Fatalf("%d cells, want one for the title and %d for the peers: %q", len(cells), len(peers.All), cells)
	}
	for i, p := range peers.All {
		want := `^\+?-?[0-9.]+ \(-?[0-9.]+–-?[0-9.]+\) · [+-][0-9]+$`
		switch {
		case !p.Retries():
			want = `^[0-9.]+ ns$`
		case strings.HasPrefix(p.Name, "native"):
			want = `^-$`
		}
		if !regexp.MustCompile(want).MatchString(cells[i+1]) {
			t.Errorf("cell of %s is %q, want %s", p.Name, cells[i+1], want)
		}
	}
}
