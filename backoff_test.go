package grpcretry

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// almostOne is the largest number that a random source in [0, 1) can give.
var almostOne = math.Nextafter(1, 0)

// alwaysDraw returns a random source that gives r every time.
func alwaysDraw(r float64) func() float64 { return func() float64 { return r } }

// everyJitter holds one value of each kind, and both ends of the fraction's range.
var everyJitter = []Jitter{
	FullJitter, EqualJitter, DecorrelatedJitter, NoJitter,
	ProportionalJitter(0.2), ProportionalJitter(1), ProportionalJitter(math.SmallestNonzeroFloat64),
	AdditiveJitter(100 * time.Millisecond), AdditiveJitter(math.MaxInt64),
}

// faultOf returns what validate has to say of b.
func faultOf(b Backoff) error {
	var f faults
	b.validate(&f)
	return f.err()
}

// longestDelay is the longest delay that the documentation of b's jitter allows.
func longestDelay(b Backoff) time.Duration {
	b = b.withDefaults()
	sum := float64(b.Max)
	switch b.Jitter.kind() {
	case proportionalJitter:
		sum *= 1 + b.Jitter.fraction()
	case additiveJitter:
		sum += float64(b.Jitter.extra())
	default:
		return b.Max
	}
	if sum >= math.MaxInt64 {
		return math.MaxInt64
	}
	return time.Duration(math.Round(sum))
}

// A user who sets only one of Base and Max means it: the default of the other
// must give way instead of turning the policy into an error or ignoring the field.
func TestBackoffDefaults(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name string
		set  Backoff
		want Backoff
	}{
		{"zero", Backoff{},
			Backoff{Base: 50 * ms, Max: 2 * time.Second, Multiplier: 2, Overload: time.Second, MaxHint: time.Minute}},
		{"base below the default max", Backoff{Base: time.Second},
			Backoff{Base: time.Second, Max: 2 * time.Second, Multiplier: 2, Overload: time.Second, MaxHint: time.Minute}},
		{"base above the default max", Backoff{Base: time.Hour},
			Backoff{Base: time.Hour, Max: time.Hour, Multiplier: 2, Overload: time.Second, MaxHint: time.Minute}},
		{"max above the default base", Backoff{Max: time.Hour},
			Backoff{Base: 50 * ms, Max: time.Hour, Multiplier: 2, Overload: time.Second, MaxHint: time.Minute}},
		{"max below the default base", Backoff{Max: 10 * ms},
			Backoff{Base: 10 * ms, Max: 10 * ms, Multiplier: 2, Overload: time.Second, MaxHint: time.Minute}},
		{"all set", Backoff{Base: 1, Max: 2, Multiplier: 3, Jitter: NoJitter, Overload: 4, MaxHint: 5},
			Backoff{Base: 1, Max: 2, Multiplier: 3, Jitter: NoJitter, Overload: 4, MaxHint: 5}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.set.withDefaults()
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("withDefaults: %+v, want %+v", got, tt.want)
			}
			if again := got.withDefaults(); !reflect.DeepEqual(again, got) {
				t.Errorf("withDefaults of what withDefaults gave: %+v, want it unchanged: %+v", again, got)
			}
			if err := faultOf(got); err != nil {
				t.Errorf("withDefaults of a good Backoff is refused: %v", err)
			}
		})
	}
}

// A mistake in a policy must come out when it is installed, with what is wrong
// and what is accepted, and not as a loop without waits during an outage.
func TestBackoffValidate(t *testing.T) {
	for _, tt := range []struct {
		b    Backoff
		want []string // one line each, after "grpcretry: Policy.Backoff."
	}{
		{Backoff{}, nil},
		{Backoff{Base: 1, Max: 1, Multiplier: 1, Jitter: ProportionalJitter(1), Overload: 1, MaxHint: 1}, nil},
		{Backoff{Base: math.MaxInt64, Multiplier: math.MaxFloat64, Jitter: AdditiveJitter(1)}, nil},
		{Backoff{Base: time.Hour}, nil},
		{Backoff{Max: 1}, nil},
		{Backoff{Base: -time.Second}, []string{"Base = -1s, want 0 (default 50ms) or more"}},
		{Backoff{Max: -time.Second}, []string{"Max = -1s, want 0 (default 2s) or more"}},
		{Backoff{Base: 3 * time.Second, Max: time.Second}, []string{"Base = 3s, want at most Max = 1s"}},
		{Backoff{Multiplier: -2}, []string{"Multiplier = -2, want 0 (default 2) or a finite number above 0"}},
		{Backoff{Multiplier: 0.5}, nil},
		{Backoff{Multiplier: math.NaN()}, []string{"Multiplier = NaN, want 0 (default 2) or a finite number above 0"}},
		{Backoff{Multiplier: math.Inf(1)}, []string{"Multiplier = +Inf, want 0 (default 2) or a finite number above 0"}},
		{Backoff{Multiplier: math.Inf(-1)}, []string{"Multiplier = -Inf, want 0 (default 2) or a finite number above 0"}},
		{Backoff{Jitter: ProportionalJitter(0)},
			[]string{"Jitter = ProportionalJitter(0), want a fraction above 0 and at most 1 (NoJitter is none at all)"}},
		{Backoff{Jitter: ProportionalJitter(1.5)},
			[]string{"Jitter = ProportionalJitter(1.5), want a fraction above 0 and at most 1 (NoJitter is none at all)"}},
		{Backoff{Jitter: ProportionalJitter(math.NaN())},
			[]string{"Jitter = ProportionalJitter(NaN), want a fraction above 0 and at most 1 (NoJitter is none at all)"}},
		{Backoff{Jitter: AdditiveJitter(0)},
			[]string{"Jitter = AdditiveJitter(0s), want a duration above 0 (NoJitter is none at all)"}},
		{Backoff{Jitter: AdditiveJitter(-time.Second)},
			[]string{"Jitter = AdditiveJitter(-1s), want a duration above 0 (NoJitter is none at all)"}},
		{Backoff{Overload: -time.Second}, []string{"Overload = -1s, want 0 (default 1s) or more"}},
		{Backoff{MaxHint: -time.Second}, []string{"MaxHint = -1s, want 0 (default 1m0s) or more"}},
		{Backoff{Base: -1, Max: -2, Multiplier: -3, Jitter: AdditiveJitter(-4), Overload: -5, MaxHint: -6}, []string{
			"Base = -1ns, want 0 (default 50ms) or more",
			"Max = -2ns, want 0 (default 2s) or more",
			"Multiplier = -3, want 0 (default 2) or a finite number above 0",
			"Jitter = AdditiveJitter(-4ns), want a duration above 0 (NoJitter is none at all)",
			"Overload = -5ns, want 0 (default 1s) or more",
			"MaxHint = -6ns, want 0 (default 1m0s) or more",
		}},
	} {
		var got []string
		if err := faultOf(tt.b); err != nil {
			got = strings.Split(err.Error(), "\n")
		}
		for i := range got {
			got[i] = strings.TrimPrefix(got[i], "grpcretry: Policy.Backoff.")
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("validate of %+v:\n got %q\nwant %q", tt.b, got, tt.want)
		}
	}
}

// The tables in the comments are what users size their timeouts with.
func TestBackoffDocumentedTables(t *testing.T) {
	docs := backoffDocs(t)
	for name, jitter := range documentedJitters {
		t.Run(name, func(t *testing.T) {
			doc := docs[name]
			if jitter.kind() == proportionalJitter && !strings.Contains(doc, "With ProportionalJitter(0.2):") ||
				jitter.kind() == additiveJitter && !strings.Contains(doc, "With AdditiveJitter(100 * time.Millisecond):") {
				t.Errorf("the comment of %s does not say what its table is of", name)
			}
			rows := map[string][]string{}
			for line := range strings.Lines(doc) {
				if cells := strings.Fields(line); strings.HasPrefix(line, "\t") && len(cells) == 8 {
					rows[cells[0]] = cells[1:]
				}
			}
			b := Backoff{Jitter: jitter}.withDefaults()
			want := map[string][]string{}
			var least, most time.Duration
			for retry := 1; retry <= 7; retry++ {
				least, most = b.delay(retry, least, alwaysDraw(0)), b.delay(retry, most, alwaysDraw(almostOne))
				want["retry"] = append(want["retry"], strconv.Itoa(retry))
				want["least"] = append(want["least"], least.String())
				want["most"] = append(want["most"], most.String())
			}
			if !maps.EqualFunc(rows, want, slices.Equal) {
				t.Errorf("the comment of %s has the table %v, the code gives %v", name, rows, want)
			}
		})
	}
}

// documentedJitters are the values that the tables in the comments are made of.
var documentedJitters = map[string]Jitter{
	"FullJitter":         FullJitter,
	"EqualJitter":        EqualJitter,
	"DecorrelatedJitter": DecorrelatedJitter,
	"ProportionalJitter": ProportionalJitter(0.2),
	"AdditiveJitter":     AdditiveJitter(100 * time.Millisecond),
	"NoJitter":           NoJitter,
}

// A formula in a comment that differs from the code misleads whoever relies on
// it, so the test computes with the comments: they are written as Go expressions.
func TestBackoffDocumentedFormulas(t *testing.T) {
	docs := backoffDocs(t)
	exp := documentedFormula(t, docs["Backoff"], "exp")
	rng := rand.New(rand.NewPCG(1, 2))
	for name := range documentedJitters {
		t.Run(name, func(t *testing.T) {
			formula := documentedFormula(t, docs[name], "delay")
			for range 5000 {
				fraction, extra := float64(1+rng.IntN(1e9))/1e9, time.Duration(1+rng.IntN(1e10)) // a Jitter keeps billionths
				jitter := map[string]Jitter{
					"ProportionalJitter": ProportionalJitter(fraction), "AdditiveJitter": AdditiveJitter(extra),
				}[name]
				if jitter == 0 {
					jitter = documentedJitters[name]
				}
				base := time.Duration(1 + rng.IntN(1e10))
				b := Backoff{
					Base: base, Max: base + time.Duration(rng.IntN(1e12)), Multiplier: 1 + 3*rng.Float64(), Jitter: jitter,
				}
				retry, draw := 2+rng.IntN(30), rng.Float64()
				previous := base + time.Duration(rng.IntN(1e12))
				vars := map[string]float64{
					"Base": float64(b.Base), "Max": float64(b.Max), "Multiplier": b.Multiplier,
					"retry": float64(retry), "previous": float64(previous), "f": fraction, "d": float64(extra),
				}
				vars["exp"] = evaluateFormula(t, exp, vars, draw)
				want := evaluateFormula(t, formula, vars, draw)
				got := b.delay(retry, previous, alwaysDraw(draw))
				if math.Abs(float64(got)-want) > 1 { // half for rounding, the rest for the order of the float operations
					t.Fatalf("%+v: delay(%d, %v) with draw %v = %v, the comment gives %v",
						b, retry, previous, draw, got, time.Duration(want))
				}
			}
		})
	}
}

// backoffDocs returns the comments of the types and functions of backoff.go.
func backoffDocs(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "backoff.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	docs := map[string]string{}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			docs[decl.Name.Name] = decl.Doc.Text()
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					docs[spec.Name.Name] = decl.Doc.Text()
				case *ast.ValueSpec:
					docs[spec.Names[0].Name] = spec.Doc.Text()
				}
			}
		}
	}
	return docs
}

// documentedFormula finds the line "name = expression" of a comment.
func documentedFormula(t *testing.T, doc, name string) ast.Expr {
	t.Helper()
	for line := range strings.Lines(doc) {
		if text, ok := strings.CutPrefix(line, "\t"+name+" = "); ok {
			expr, err := parser.ParseExpr(text)
			if err != nil {
				t.Fatalf("formula %q: %v", line, err)
			}
			return expr
		}
	}
	t.Fatalf("no formula for %s in the comment %q", name, doc)
	return nil
}

// evaluateFormula computes a formula; U(a, b) is a plus the given draw of the way to b.
func evaluateFormula(t *testing.T, expr ast.Expr, vars map[string]float64, draw float64) float64 {
	t.Helper()
	switch e := expr.(type) {
	case *ast.BasicLit:
		if v, err := strconv.ParseFloat(e.Value, 64); err == nil {
			return v
		}
	case *ast.Ident:
		if v, ok := vars[e.Name]; ok {
			return v
		}
	case *ast.BinaryExpr:
		x, y := evaluateFormula(t, e.X, vars, draw), evaluateFormula(t, e.Y, vars, draw)
		switch e.Op {
		case token.ADD:
			return x + y
		case token.SUB:
			return x - y
		case token.MUL:
			return x * y
		case token.QUO:
			return x / y
		}
	case *ast.CallExpr:
		if f, ok := e.Fun.(*ast.Ident); ok && len(e.Args) == 2 {
			x, y := evaluateFormula(t, e.Args[0], vars, draw), evaluateFormula(t, e.Args[1], vars, draw)
			switch f.Name {
			case "min":
				return min(x, y)
			case "pow":
				return math.Pow(x, y)
			case "U":
				return x + draw*(y-x)
			}
		}
	}
	t.Fatalf("the formula has a part that the test cannot compute: %#v", expr)
	return 0
}

// An exponential delay that overflows turns negative after some dozens of
// retries, and the loop spins; a call without a deadline gets there.
func TestBackoffNeverOverflows(t *testing.T) {
	for _, base := range []time.Duration{1, 50 * time.Millisecond, time.Hour} {
		for _, maxDelay := range []time.Duration{0, math.MaxInt64} {
			for _, multiplier := range []float64{1, 1.5, 2, 1e300, math.MaxFloat64} {
				for _, jitter := range everyJitter {
					b := Backoff{Base: base, Max: maxDelay, Multiplier: multiplier, Jitter: jitter}.withDefaults()
					if err := faultOf(b); err != nil {
						t.Fatal(err)
					}
					limit := longestDelay(b)
					for _, draw := range []float64{0, 0.5, almostOne} {
						random := alwaysDraw(draw)
						var d time.Duration
						for retry := range 10_001 {
							d = b.delay(retry, d, random)
							if d < 0 || d > limit {
								t.Fatalf("%+v: delay(%d) with draw %v = %v, want within [0, %v]", b, retry, draw, d, limit)
							}
						}
						// The largest draw is 1 less 1/2^53, so the end of the range is met but for that much.
						atEnd := float64(d) >= almostOne*float64(limit)
						switch grew := multiplier > 1; {
						case jitter.kind() == FullJitter && draw == 0 && d != 0,
							jitter.kind() == FullJitter && draw == almostOne && grew && !atEnd,
							jitter.kind() == EqualJitter && draw == almostOne && grew && !atEnd,
							jitter.kind() == NoJitter && grew && d != b.Max,
							jitter.kind() == NoJitter && !grew && d != b.Base,
							jitter.kind() == DecorrelatedJitter && draw == 0 && d != b.Base,
							jitter.kind() == DecorrelatedJitter && draw == almostOne && d != b.Max,
							jitter.kind() == additiveJitter && draw == almostOne && grew && !atEnd,
							jitter.kind() == proportionalJitter && draw == almostOne && grew && !atEnd:
							t.Fatalf("%+v: delay(10000) with draw %v = %v, the end of the range is missed", b, draw, d)
						}
					}
				}
			}
		}
	}
}

// The conversion of a float64 that an int64 cannot hold differs between
// processors: on some it turns the longest delay into a negative one.
func TestToDuration(t *testing.T) {
	for _, tt := range []struct {
		ns          float64
		limit, want time.Duration
	}{
		{0, 10, 0}, {0.4, 10, 0}, {0.5, 10, 1}, {9.4, 10, 9}, {9.9, 10, 10}, {10, 10, 10}, {11, 10, 10},
		{-1, 10, 0}, {math.Inf(-1), 10, 0}, {math.Inf(1), 10, 10}, {math.NaN(), 10, 0},
		{1 << 62, math.MaxInt64, 1 << 62}, {1 << 63, math.MaxInt64, math.MaxInt64}, {1e300, math.MaxInt64, math.MaxInt64},
		{math.Nextafter(1<<63, 0), math.MaxInt64, 1<<63 - 1024}, {1 << 63, math.MaxInt64 - 1, math.MaxInt64 - 1},
	} {
		if got := toDuration(tt.ns, tt.limit); got != tt.want {
			t.Errorf("toDuration(%v, %d) = %d, want %d", tt.ns, tt.limit, got, tt.want)
		}
	}
}

// Delays that leave the documented range break users' timeouts; delays that
// bunch, or turn constant at the cap, bring all clients back in one moment.
func TestBackoffSamples(t *testing.T) {
	const samples = 10_000
	ms := func(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }
	for _, tt := range []struct {
		jitter    Jitter
		retry     int
		previous  time.Duration
		low, high time.Duration // drawn evenly between them
		limit     time.Duration // and then cut to this; 0 = not cut
	}{
		{FullJitter, 1, 0, 0, ms(50), 0},
		{FullJitter, 4, ms(100), 0, ms(400), 0},
		{FullJitter, 7, ms(100), 0, ms(2000), 0},
		{FullJitter, 10_000, ms(2000), 0, ms(2000), 0},
		{EqualJitter, 1, 0, ms(25), ms(50), 0},
		{EqualJitter, 4, ms(100), ms(200), ms(400), 0},
		{EqualJitter, 10_000, ms(2000), ms(1000), ms(2000), 0},
		{DecorrelatedJitter, 1, 0, ms(50), ms(150), 0},
		{DecorrelatedJitter, 1, time.Hour, ms(50), ms(150), 0}, // retries that start again, as after pushback
		{DecorrelatedJitter, 2, ms(1), ms(50), ms(150), 0},     // a wait below Base
		{DecorrelatedJitter, 4, ms(100), ms(50), ms(300), 0},
		{DecorrelatedJitter, 10_000, ms(2000), ms(50), ms(6000), ms(2000)},
		{ProportionalJitter(0.2), 1, 0, ms(40), ms(60), 0},
		{ProportionalJitter(0.2), 4, ms(100), ms(320), ms(480), 0},
		{ProportionalJitter(0.2), 10_000, ms(2000), ms(1600), ms(2400), 0},
		{ProportionalJitter(1), 10_000, ms(2000), 0, ms(4000), 0},
		{AdditiveJitter(ms(100)), 1, 0, ms(50), ms(150), 0},
		{AdditiveJitter(ms(100)), 10_000, ms(2000), ms(2000), ms(2100), 0},
	} {
		t.Run(fmt.Sprintf("%v/retry=%d/previous=%v", tt.jitter, tt.retry, tt.previous), func(t *testing.T) {
			b := Backoff{Jitter: tt.jitter}.withDefaults()
			rng := rand.New(rand.NewPCG(37, 1))
			low, high := float64(tt.low), float64(tt.high)
			top, mean := high, (low+high)/2
			if tt.limit > 0 {
				top = float64(tt.limit)
				below := (top - low) / (high - low)
				mean = below*(low+top)/2 + (1-below)*top
			}
			var sum float64
			var tenths [10]int
			seen := map[time.Duration]bool{}
			for range samples {
				d := b.delay(tt.retry, tt.previous, rng.Float64)
				if float64(d) < low || float64(d) > top {
					t.Fatalf("a delay of %v, want within [%v, %v]", d, tt.low, time.Duration(top))
				}
				sum += float64(d)
				seen[d] = true
				tenths[min(int(10*(float64(d)-low)/(high-low)), 9)]++
			}
			// An even draw has a standard error of (high-low)/sqrt(12*samples), 0.3% of the range.
			if got := sum / samples; math.Abs(got-mean) > 0.01*(high-low) {
				t.Errorf("mean %v, want %v", time.Duration(got), time.Duration(mean))
			}
			if tt.limit > 0 {
				return
			}
			if len(seen) < samples*9/10 {
				t.Errorf("%d different delays in %d", len(seen), samples)
			}
			for i, n := range tenths { // 1000 expected, standard deviation 30
				if n < 850 || n > 1150 {
					t.Errorf("%d of %d delays in tenth %d of the range, want about a tenth", n, samples, i)
				}
			}
		})
	}
}

// The delays of production come from another source than those of the tests
// above: it must be a spread one too, and safe for calls that run at once on one
// Backoff.
func TestBackoffDelayDrawsAtOnce(t *testing.T) {
	for _, jitter := range documentedJitters {
		b := Backoff{Jitter: jitter}
		limit := longestDelay(b)
		var mu sync.Mutex
		seen := map[time.Duration]bool{}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 1000 {
					d := b.Delay(100, time.Second)
					if d < 0 || d > limit {
						t.Errorf("%v: Delay = %v, want within [0, %v]", jitter, d, limit)
						return
					}
					mu.Lock()
					seen[d] = true
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		switch {
		case jitter == NoJitter && len(seen) != 1:
			t.Errorf("%v: %d different delays, want one", jitter, len(seen))
		case jitter != NoJitter && len(seen) < 1000:
			t.Errorf("%v: %d different delays in 8000", jitter, len(seen))
		}
	}
}

// Delay has no error to return. Were a mistake to give waits of 0, a loop of the
// user's own would spin against a server that is down.
func TestBackoffDelayOfRefusedBackoff(t *testing.T) {
	for _, b := range []Backoff{
		{Base: -time.Second, Jitter: NoJitter},
		{Max: -time.Second, Jitter: DecorrelatedJitter},
		{Base: time.Hour, Max: time.Second},
		{Multiplier: math.NaN()},
		{Jitter: AdditiveJitter(-time.Hour)},
		{Overload: -1, Base: time.Hour},
	} {
		if faultOf(b) == nil {
			t.Fatalf("%+v is not refused", b)
		}
		var longest time.Duration
		for range 1000 {
			d := b.Delay(7, time.Hour)
			if d < 0 || d > 2*time.Second {
				t.Fatalf("%+v: Delay = %v, want within [0, 2s]", b, d)
			}
			longest = max(longest, d)
		}
		if longest < time.Second {
			t.Errorf("%+v: the longest of 1000 delays is %v, want that of Backoff{}, near 2s", b, longest)
		}
	}
}

// A retry number below 1 is a slip of the caller's that must not give a shorter
// wait than the first retry has.
func TestBackoffDelayBelowFirstRetry(t *testing.T) {
	for _, retry := range []int{math.MinInt, -1, 0, 1} {
		b := Backoff{Jitter: NoJitter}
		if d := b.Delay(retry, 0); d != 50*time.Millisecond {
			t.Errorf("Delay(%d) = %v, want 50ms", retry, d)
		}
		b.Func = func(n int, _ time.Duration, _ Attempt) time.Duration { return time.Duration(n) }
		if d := b.Delay(retry, 0); d != 1 {
			t.Errorf("Delay(%d) gave Func the retry %d, want 1", retry, d)
		}
	}
}

// Func is the user's own schedule: it gets what it was promised, and nothing of
// the formula is applied to its result.
func TestBackoffFunc(t *testing.T) {
	var retry int
	var previous time.Duration
	var attempt Attempt
	result := time.Duration(-5)
	b := Backoff{Max: time.Second, Func: func(n int, p time.Duration, a Attempt) time.Duration {
		retry, previous, attempt = n, p, a
		return result
	}}
	b = b.withDefaults()
	noDraw := func() float64 { t.Error("Func is set, and a random number was drawn"); return 0 }

	a := Attempt{Number: 3, Method: "/pkg.Service/Method"}
	if d := b.next(3, 7, &a, noDraw); d != 0 {
		t.Errorf("Func returned -5ns, next = %v, want 0s", d)
	}
	if retry != 3 || previous != 7 || attempt.Number != 3 || attempt.Method != "/pkg.Service/Method" {
		t.Errorf("Func was given (%d, %v, %+v), want (3, 7ns, %+v)", retry, previous, attempt, a)
	}
	result = time.Hour
	if d := b.next(1, 0, &a, noDraw); d != time.Hour {
		t.Errorf("Func returned 1h, next = %v", d)
	}
	if d := b.Delay(4, 9); d != time.Hour || retry != 4 || previous != 9 {
		t.Errorf("Delay(4, 9) = %v with Func given (%d, %v), want 1h with (4, 9ns)", d, retry, previous)
	}
	if !reflect.ValueOf(attempt).IsZero() {
		t.Errorf("Delay gave Func the attempt %+v, want a zero one", attempt)
	}
}

// Without Func, next is the formula with the source that it was given.
func TestBackoffNextIsDelay(t *testing.T) {
	b := Backoff{Jitter: DecorrelatedJitter}.withDefaults()
	if got, want := b.next(2, 400*time.Millisecond, &Attempt{}, alwaysDraw(0.5)), 625*time.Millisecond; got != want {
		t.Errorf("next = %v, want %v: halfway from 50ms to 1.2s", got, want)
	}
}

// A schedule that forgot the delay before, or that one call used up for the next
// (as stateful ones do), would be wrong from the second call on.
func TestBackoffDelays(t *testing.T) {
	b := Backoff{Func: func(retry int, previous time.Duration, _ Attempt) time.Duration {
		return 10*previous + time.Duration(retry)
	}}
	delays := b.Delays()
	for round := range 2 {
		var got []time.Duration
		for d := range delays {
			if got = append(got, d); len(got) == 5 {
				break
			}
		}
		if want := []time.Duration{1, 12, 123, 1234, 12345}; !slices.Equal(got, want) {
			t.Errorf("round %d: %v, want %v", round, got, want)
		}
	}
}

// Policies are compared to tell whether a reload changed anything.
func TestJitterIsComparable(t *testing.T) {
	if FullJitter != 0 {
		t.Error("the zero Jitter is not FullJitter")
	}
	same := map[Jitter]int{}
	for range 2 {
		for _, j := range everyJitter {
			same[j]++
		}
		same[ProportionalJitter(0.3)]++
		same[AdditiveJitter(time.Second)]++
	}
	if len(same) != len(everyJitter)+2 {
		t.Errorf("%d different jitters, want %d", len(same), len(everyJitter)+2)
	}
}

// An explanation of the policy in force prints the Backoff: it has to show what
// holds, not the zeros that were written, nor the address of a function.
func TestBackoffString(t *testing.T) {
	for _, tt := range []struct {
		b    Backoff
		want string
	}{
		{Backoff{}, "50ms times 2 up to 2s, FullJitter; overload 1s; hints up to 1m0s"},
		{Backoff{Base: time.Second, Multiplier: 1.6, Max: time.Minute, Jitter: ProportionalJitter(0.2), Overload: 3, MaxHint: 4},
			"1s times 1.6 up to 1m0s, ProportionalJitter(0.2); overload 3ns; hints up to 4ns"},
		{Backoff{Func: func(int, time.Duration, Attempt) time.Duration { return 0 }},
			"given by Func; overload 1s; hints up to 1m0s"},
	} {
		if got := tt.b.String(); got != tt.want {
			t.Errorf("String = %q, want %q", got, tt.want)
		}
	}
}

// String is what an explanation of the policy in force prints.
func TestJitterString(t *testing.T) {
	for want, j := range map[string]Jitter{
		"FullJitter": 0, "EqualJitter": EqualJitter, "DecorrelatedJitter": DecorrelatedJitter,
		"ProportionalJitter(0.2)": ProportionalJitter(0.2), "AdditiveJitter(100ms)": AdditiveJitter(100 * time.Millisecond),
		"NoJitter": NoJitter,
	} {
		if got := j.String(); got != want {
			t.Errorf("String of %#v = %q, want %q", j, got, want)
		}
	}
}

// A delay is computed for every failure of an outage; it must not feed the
// garbage collector.
func TestBackoffDoesNotAllocate(t *testing.T) {
	var sink time.Duration
	a := &Attempt{Number: 1}
	check := func(what string, f func()) {
		t.Helper()
		if n := testing.AllocsPerRun(1000, f); n != 0 {
			t.Errorf("%s: %v allocations, want 0", what, n)
		}
	}
	for _, jitter := range everyJitter {
		b := Backoff{Jitter: jitter}
		d := b.withDefaults()
		check("next with "+jitter.String(), func() { sink += d.next(3, 100*time.Millisecond, a, rand.Float64) })
		check("Delay with "+jitter.String(), func() { sink += b.Delay(3, 100*time.Millisecond) })
	}
	f := Backoff{Func: func(retry int, previous time.Duration, a Attempt) time.Duration { return time.Duration(a.Number) }}
	check("next with Func", func() { sink += f.next(3, 100*time.Millisecond, a, rand.Float64) })
	check("Delay with Func", func() { sink += f.Delay(3, 100*time.Millisecond) })
}

// The choice of the default: clients that contend for one row must need the
// fewest calls with it. The setting is that of the article that Jitter links to:
// 100 clients under optimistic concurrency control, one way through the network
// 10 ms with a standard deviation of 2 ms, cap 2 s, first exponential delay 10 ms
// (twice the base of 5 ms, which decorrelated jitter starts from).
func TestJitterContention(t *testing.T) {
	const clients, rounds = 100, 50
	with := func(base time.Duration, j Jitter) func(int, time.Duration, func() float64) time.Duration {
		b := Backoff{Base: base * time.Millisecond, Jitter: j}.withDefaults()
		return b.delay
	}
	none := func(int, time.Duration, func() float64) time.Duration { return 0 }

	kinds := []struct { // in the order of the calls that they cost
		name      string
		delay     func(int, time.Duration, func() float64) time.Duration
		published float64 // calls; 0 = not in the article
	}{
		{"no backoff", none, 2423},
		{"NoJitter", with(10, NoJitter), 1857},
		{"AdditiveJitter", with(10, AdditiveJitter(10*time.Millisecond)), 0},
		{"DecorrelatedJitter", with(5, DecorrelatedJitter), 1005},
		{"ProportionalJitter", with(10, ProportionalJitter(0.2)), 0},
		{"EqualJitter", with(10, EqualJitter), 810},
		{"FullJitter", with(10, FullJitter), 796},
	}
	t.Logf("means of %d rounds of %d clients", rounds, clients)
	t.Logf("%-20s %8s %10s %8s", "jitter", "calls", "published", "time")
	more := math.Inf(1)
	for _, kind := range kinds {
		var total int
		var took time.Duration
		for round := range uint64(rounds) {
			n, end := contend(clients, kind.delay, rand.New(rand.NewPCG(7, round)))
			total += n
			took += end
		}
		calls := float64(total) / rounds
		t.Logf("%-20s %8.0f %10.0f %8v", kind.name, calls, kind.published, (took / rounds).Round(time.Millisecond))
		if calls >= more {
			t.Errorf("%s needed %.0f calls, want fewer than the %.0f of the kind before it", kind.name, calls, more)
		}
		if kind.published > 0 && math.Abs(calls/kind.published-1) > 0.02 {
			t.Errorf("%s needed %.0f calls, want the published %.0f within 2%%", kind.name, calls, kind.published)
		}
		more = calls
	}
}

// contend plays clients that each read the version of one row and then write it;
// a write is refused if the version has changed since its client's read, and the
// client starts again after the delay. It returns the number of writes that
// the server saw and the time until every client had succeeded.
func contend(clients int, delay func(int, time.Duration, func() float64) time.Duration, rng *rand.Rand) (writes int, end time.Duration) {
	type client struct {
		version, retry int
		previous       time.Duration
	}
	hop := func() time.Duration {
		return time.Duration(math.Abs(10+2*rng.NormFloat64()) * float64(time.Millisecond))
	}
	state := make([]client, clients)
	version := 0
	var queue contentionQueue
	add := func(at time.Duration, who int, do contentionStep) {
		queue.made++
		heap.Push(&queue, contentionEvent{at: at, order: queue.made, who: who, do: do})
	}
	for who := range clients {
		add(hop(), who, serverReads)
	}
	for queue.Len() > 0 {
		now := heap.Pop(&queue).(contentionEvent)
		c := &state[now.who]
		switch now.do {
		case serverReads:
			c.version = version
			add(now.at+hop(), now.who, clientWrites)
		case clientWrites:
			add(now.at+hop(), now.who, serverWrites)
		case serverWrites:
			writes++
			if c.version == version {
				version++
				end = now.at + hop()
				continue
			}
			add(now.at+hop(), now.who, clientRefused)
		case clientRefused:
			c.retry++
			c.previous = delay(c.retry, c.previous, rng.Float64)
			add(now.at+c.previous+hop(), now.who, serverReads)
		}
	}
	return writes, end
}

type contentionStep uint8

const (
	serverReads contentionStep = iota
	clientWrites
	serverWrites
	clientRefused
)

type contentionEvent struct {
	at    time.Duration
	order int // of two at one time, the one made first comes first
	who   int
	do    contentionStep
}

// contentionQueue is a heap.Interface, the earliest first.
type contentionQueue struct {
	all  []contentionEvent
	made int
}

func (s *contentionQueue) Len() int { return len(s.all) }
func (s *contentionQueue) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(s.all[i].at, s.all[j].at), cmp.Compare(s.all[i].order, s.all[j].order)) < 0
}
func (s *contentionQueue) Swap(i, j int) { s.all[i], s.all[j] = s.all[j], s.all[i] }
func (s *contentionQueue) Push(x any)    { s.all = append(s.all, x.(contentionEvent)) }
func (s *contentionQueue) Pop() any {
	last := s.all[len(s.all)-1]
	s.all = s.all[:len(s.all)-1]
	return last
}

// Whatever a Backoff holds: a good one gives delays within the documented range,
// and a bad one is refused and waits like the default.
func FuzzBackoffDelay(f *testing.F) {
	f.Add(int64(0), int64(0), 0.0, uint8(0), 0.0, int64(0), 1, int64(0), 0.5)
	f.Add(int64(time.Hour), int64(math.MaxInt64), math.MaxFloat64, uint8(proportionalJitter), 1.0, int64(0), 10_000, int64(math.MaxInt64), almostOne)
	f.Add(int64(1), int64(math.MaxInt64), 1.0, uint8(additiveJitter), 0.0, int64(math.MaxInt64), math.MaxInt, int64(-1), 0.0)
	f.Add(int64(-1), int64(-1), math.NaN(), uint8(DecorrelatedJitter), math.NaN(), int64(-1), math.MinInt, int64(math.MinInt64), 0.0)
	f.Fuzz(func(t *testing.T, base, maxDelay int64, multiplier float64, kind uint8, fraction float64, extra int64, retry int, previous int64, draw float64) {
		if !(draw >= 0 && draw < 1) {
			t.Skip("a random source does not give this")
		}
		jitter := []Jitter{
			FullJitter, EqualJitter, DecorrelatedJitter, ProportionalJitter(fraction), AdditiveJitter(time.Duration(extra)), NoJitter,
		}[kind%6]
		b := Backoff{Base: time.Duration(base), Max: time.Duration(maxDelay), Multiplier: multiplier, Jitter: jitter}
		err := faultOf(b)
		limit := longestDelay(Backoff{})
		if err == nil {
			limit = longestDelay(b)
			whole := b.withDefaults()
			if again := faultOf(whole); again != nil {
				t.Fatalf("%+v is good, and refused with its defaults filled in: %v", b, again)
			}
			if whole.Base <= 0 || whole.Max < whole.Base {
				t.Fatalf("%+v has the defaults %+v", b, whole)
			}
			if d := whole.delay(retry, time.Duration(previous), alwaysDraw(draw)); d < 0 || d > limit {
				t.Fatalf("%+v: delay(%d, %v) with draw %v = %v, want within [0, %v]", b, retry, time.Duration(previous), draw, d, limit)
			}
		} else if joined := (interface{ Unwrap() []error })(nil); !errors.As(err, &joined) || len(joined.Unwrap()) == 0 {
			t.Fatalf("%+v: the error %v does not list its faults", b, err)
		}
		if d := b.Delay(retry, time.Duration(previous)); d < 0 || d > limit {
			t.Fatalf("%+v: Delay(%d, %v) = %v, want within [0, %v]", b, retry, time.Duration(previous), d, limit)
		}
	})
}

// The parallel rows must not be slower per operation than the serial ones: a lock
// around the random source would make every failing call wait for every other.
func BenchmarkBackoffDelay(b *testing.B) {
	for _, jitter := range []Jitter{FullJitter, EqualJitter, DecorrelatedJitter, ProportionalJitter(0.2), AdditiveJitter(time.Second), NoJitter} {
		policy := Backoff{Jitter: jitter}.withDefaults()
		name, _, _ := strings.Cut(jitter.String(), "(")
		b.Run("jitter="+name+"/mode=serial", func(b *testing.B) {
			b.ReportAllocs()
			a, sum := &Attempt{}, time.Duration(0)
			for b.Loop() {
				sum += policy.next(3, 100*time.Millisecond, a, rand.Float64)
			}
			_ = sum
		})
		b.Run("jitter="+name+"/mode=parallel", func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				a, sum := &Attempt{}, time.Duration(0)
				for pb.Next() {
					sum += policy.next(3, 100*time.Millisecond, a, rand.Float64)
				}
				_ = sum
			})
		})
	}
}
