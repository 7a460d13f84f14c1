package main

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/spantree"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

var update = flag.Bool("update", false, "write the golden files anew")

const (
	golden  = "testdata/output.golden"
	picture = "../../docs/hedging.svg"
)

// What the program prints and draws is what the documentation shows. In the
// bubble time is exact, and no two things of a client happen in the same moment,
// so it is the same in every run; in real time the machine adds something.
func TestOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		svg, err := demonstrate(t.Context(), &out, 2000, 1, spantree.Options{Look: func(s []sdktrace.ReadOnlySpan) { attemptevents.CheckSpans(t, s) }})
		if err != nil {
			t.Fatal(err)
		}
		same(t, golden, out.Bytes())
		same(t, picture, svg)
	})
}

func same(t *testing.T, file string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("the output differs from %s; run the test with -update and look at the difference. It is now:\n%s", file, got)
	}
}

// A picture that is not well-formed shows in no browser, and one without a line
// or a unit tells nothing.
func TestPicture(t *testing.T) {
	svg, err := os.ReadFile(picture)
	if err != nil {
		t.Fatal(err)
	}
	var texts, colors []string
	for d := xml.NewDecoder(bytes.NewReader(svg)); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.CharData:
			texts = append(texts, string(token))
		case xml.StartElement:
			for _, a := range token.Attr {
				if _, after, ok := strings.Cut(a.Value, "stroke:"); ok && a.Name.Local == "style" {
					color, _, _ := strings.Cut(after, ";")
					colors = append(colors, color)
				}
			}
		}
	}
	want := []string{usual.title, "x, milliseconds", "calls that took longer than x, percent", "0.1", "100", "200"}
	for _, p := range plans {
		want = append(want, p.name)
	}
	for _, text := range want {
		if !slices.Contains(texts, text) {
			t.Errorf("the picture does not say %q", text)
		}
	}
	for _, color := range []string{"#D55E00", "#0072B2", "#009E73", "#CC79A7"} {
		if !slices.Contains(colors, color) {
			t.Errorf("the picture has no line in %s: %q", color, slices.Compact(colors))
		}
	}
}

// What the page shows and explains must be what the program prints.
func TestDocumentationShowsTheOutput(t *testing.T) {
	page, err := os.ReadFile("../../docs/hedging.md")
	if err != nil {
		t.Fatal(err)
	}
	printed, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(page), "```text\n")
	if len(parts) != 1+len(scenes)+3 {
		t.Fatalf("the page shows %d parts of the output, want the three blocks of the table and the %d traces", len(parts)-1, len(scenes))
	}
	for _, p := range parts[1:] {
		shown, _, _ := strings.Cut(p, "```")
		if !strings.Contains(string(printed), "\n\n"+shown+"\n") {
			t.Errorf("the program does not print\n%s", shown)
		}
	}
}

// The reason to hedge: whoever follows the documentation must get most of the
// tail's time back for a small share of load, and pay nothing when the service as
// a whole is slow. The first 2000 calls are left out of the latencies, because
// a quantile has to be known first, but not out of the load.
func TestHedgingPays(t *testing.T) {
	const calls = 2000
	synctest.Test(t, func(t *testing.T) {
		for seed := range uint64(2) {
			var bare time.Duration // p99 without hedging
			for _, p := range plans {
				c, err := newClient(p, seed)
				if err != nil {
					t.Fatal(err)
				}
				var f []figures
				for _, s := range []season{usual, usual, slow, slow} {
					next, err := c.measure(t.Context(), s, calls)
					if err != nil {
						t.Fatal(err)
					}
					f = append(f, next)
				}
				c.close()
				p99 := f[1].quantile(0.99)
				if p.hedge.MaxAttempts == 0 {
					bare = p99
					continue
				}
				most := 1.1
				if q := p.hedge.Quantile; q > 0 {
					most = 1 + (1 - q) + 0.01
				}
				t.Logf("seed %d, %s: p99 %v of %v; attempts per call %.4f, %.4f, and slow %.4f, %.4f", seed, p.name, p99, bare,
					f[0].perCall(), f[1].perCall(), f[2].perCall(), f[3].perCall())
				if p99 > bare*3/10 {
					t.Errorf("seed %d, %s: p99 %v, want at most 30%% of %v", seed, p.name, p99, bare)
				}
				for _, f := range f[:2] {
					if load := f.perCall(); load > most || load == 1 {
						t.Errorf("seed %d, %s: %.4f attempts per call, want hedges and at most %.2f", seed, p.name, load, most)
					}
				}
				// What the funds hold is spent first, or what a quantile takes to follow. That is all.
				if load := f[2].perCall(); load == 1 || load > 1.03 || p.hedge.Quantile == 0 && load > 1.005 {
					t.Errorf("seed %d, %s: %.4f attempts per call when all are slow, want 10 hedges, and at most 1.03 with a quantile", seed, p.name, load)
				}
				if hedges := f[3].attempts - calls; hedges != 0 {
					t.Errorf("seed %d, %s: %d hedges when all have been slow for a while, want none", seed, p.name, hedges)
				}
			}
		}
	})
}

// The page says what becomes of AtOnce: with the default budget it ends after ten
// hedges that lost, with the one that the page shows it goes on.
func TestAtOnce(t *testing.T) {
	const calls = 1000
	p := plan{"AtOnce", grpcretry.Hedge{MaxAttempts: 2, AtOnce: true}}
	for name, test := range map[string]struct {
		config grpcretry.BudgetConfig
		all    bool // calls are hedged
	}{
		"the default budget": {},
		"a budget for it":    {config: grpcretry.BudgetConfig{HedgeCapacity: 1 << 19, HedgeCost: 1. / 64}, all: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				budget, err := grpcretry.NewBudget(test.config)
				if err != nil {
					t.Fatal(err)
				}
				c, err := newClient(p, 1, grpcretry.WithBudget(budget))
				if err != nil {
					t.Fatal(err)
				}
				defer c.close()
				f, err := c.measure(t.Context(), usual, calls)
				if err != nil {
					t.Fatal(err)
				}
				hedges := f.attempts - calls
				lost := 0
				for _, a := range c.srv.Attempts(get) {
					if a.Metadata.Get("grpc-previous-rpc-attempts") != nil && a.ContextErr != nil {
						lost++
					}
				}
				t.Logf("%d hedges in %d calls, of which %d lost; p99 %v", hedges, calls, lost, f.quantile(0.99))
				if test.all && hedges != calls {
					t.Errorf("%d hedges in %d calls, want one each", hedges, calls)
				}
				if !test.all && lost != 10 {
					t.Errorf("%d hedges lost, want the 10 that the funds pay for", lost)
				}
			})
		})
	}
}

// A plan must not look better because it meets another service: whoever calls
// first, a call meets the same replies, and one in twenty is slow among the
// first attempts as among the second ones, whatever the first was.
func TestService(t *testing.T) {
	const calls = 20_000
	react := usual.react(1)
	long := func(number int, previous ...string) bool {
		a := testsrv.Attempt{Requests: []*testpb.Request{{Number: int64(number)}}}
		if previous != nil {
			a.Metadata = map[string][]string{"grpc-previous-rpc-attempts": previous}
		}
		d := react(1, a).Delay
		if again := react(2, a).Delay; again != d {
			t.Fatalf("the same attempt takes %v, and then %v", d, again)
		}
		if d < 9*time.Millisecond || d >= 11*time.Millisecond && d < 90*time.Millisecond || d >= 110*time.Millisecond {
			t.Fatalf("a reply takes %v, want 10 or 100 ms, give or take a tenth", d)
		}
		return d > 50*time.Millisecond
	}
	var first, second, both int
	for n := range calls {
		one, two := long(n), long(n, "1")
		if one {
			first++
		}
		if two {
			second++
		}
		if one && two {
			both++
		}
	}
	t.Logf("of %d replies %d and %d are slow, %d twice", calls, first, second, both)
	// Four standard deviations.
	if first < 877 || first > 1123 || second < 877 || second > 1123 || both < 22 || both > 78 {
		t.Errorf("of %d replies %d and %d are slow, %d twice; want about 1000, 1000 and 50", calls, first, second, both)
	}
}

// A value out of range is named before any call is made, and a file that cannot
// be written is too.
func TestFlags(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none", "hedging.svg")
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"-calls", "999"}, "-calls = 999, want 1000 to 10000"},
		{[]string{"-calls", "10001"}, "-calls = 10001, want 1000 to 10000"},
		{[]string{"-calls", "many"}, `invalid value "many" for flag -calls`},
		{[]string{"-seed", "-1"}, `invalid value "-1" for flag -seed`},
		{[]string{"-seed", "18446744073709551616"}, "value out of range"},
		{[]string{"x"}, `arguments ["x"], want flags only`},
		{[]string{"-out", missing}, missing},
	} {
		var out bytes.Buffer
		err := command(t.Context(), &out, io.Discard, test.args)
		if err == nil || !strings.Contains(err.Error(), test.want) || out.Len() > 0 {
			t.Errorf("%q: error %v after %q, want %q at once", test.args, err, &out, test.want)
		}
	}
}

// The picture must be where the program says, and be whole.
func TestOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "picture.svg")
		var out bytes.Buffer
		if err := command(t.Context(), &out, io.Discard, []string{"-out", path, "-calls", "1000", "-seed", "2"}); err != nil {
			t.Fatal(err)
		}
		if want := "The picture is in " + path + "\n"; !strings.HasSuffix(out.String(), want) {
			t.Errorf("the output does not end with %q:\n%s", want, &out)
		}
		svg, err := os.ReadFile(path)
		if err != nil || !bytes.HasSuffix(bytes.TrimSpace(svg), []byte("</svg>")) {
			t.Errorf("%s: error %v, ends with %q", path, err, svg[max(len(svg)-20, 0):])
		}
	})
}

// Whoever interrupts it wants it to end, with an error and not with a picture of
// half the calls.
func TestInterrupted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		begun := time.Now()
		svg, err := demonstrate(ctx, io.Discard, 1000, 1, spantree.Options{})
		if err == nil || svg != nil || time.Since(begun) > time.Second {
			t.Errorf("%d bytes and error %v after %v, want an error at once", len(svg), err, time.Since(begun))
		}
	})
}
