package costs

import (
	"fmt"
	"io"
	"math"
	"runtime"
	"runtime/debug"
	"strings"

	"example.com/grpcretry/benchmarks/peers"
)

// Table is what has been measured, as Markdown.
type Table struct {
	peers []peers.Peer
	rows  []row
	least float64
}

type row struct {
	c       Case
	figures map[string]Figure
}

// NewTable returns an empty table with a column for each peer. least is what
// [Least] measured.
func NewTable(list []peers.Peer, least float64) *Table { return &Table{peers: list, least: least} }

// Add adds the row of a case.
func (t *Table) Add(c Case, figures []Figure) {
	r := row{c: c, figures: map[string]Figure{}}
	for _, f := range figures {
		r.figures[f.Peer] = f
	}
	t.rows = append(t.rows, r)
}

// Write writes the page: what the figures are, the table, what was measured and where.
func (t *Table) Write(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, heading, nanos(t.least))
	b.WriteString(t.Markdown())
	b.WriteString("\n| Column | What it is |\n|---|---|\n")
	for _, p := range t.peers {
		what := p.Note
		if p.Retries() {
			what = fmt.Sprintf("%s %s: %s", p.Module, version(p.Module), p.Note)
		}
		fmt.Fprintf(&b, "| %s | %s |\n", p.Name, what)
	}
	fmt.Fprintf(&b, "\n%s, %s/%s, %d processors, grpc %s.\n", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.GOMAXPROCS(0), version("google.golang.org/grpc"))
	_, err := io.WriteString(w, b.String())
	return err
}

const heading = `# What a call costs

` + "`make -C benchmarks costs`" + ` writes this page. Every cell has what a call costs more than without an interceptor, and after the point how many allocations more.
The upper rows are the interceptor alone, with an invoker that answers at once, in nanoseconds. The lower ones are real calls over a connection in memory, as the ratio to the
same calls without an interceptor. It is the processor time of the whole process, the server and collecting garbage included, because that leaves out what other processes take.
In brackets stands the interval in which the median lies with 95%% certainty: batches of all columns are run in turn, in shuffled order, and each is compared with the one without
interceptor of the same round, so that a machine which is slower for a while slows both alike.

Not all columns do the same for their cost: only ours, middleware and grpc's own retry tell the server of a retry, in metadata, only ours leaves an event on the caller's span and
knows how long each attempt took, and only ours, failsafe-budget and native-throttle have a budget. A reading of the clock, the count of the calls in flight that the budget follows, a look at the budget
and a pool for the call's state are %s ns by themselves on this machine, in the same run: nothing that has them can be faster than that.

`

// Markdown is the table alone.
func (t *Table) Markdown() string {
	var b strings.Builder
	b.WriteString("| Call |")
	for _, p := range t.peers {
		b.WriteString(" " + p.Name + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("--:|", len(t.peers)) + "\n")
	for _, r := range t.rows {
		b.WriteString("| " + r.c.Title + " |")
		for _, p := range t.peers {
			f, ok := r.figures[p.Name]
			b.WriteString(" " + f.cell(r.c, p.Retries(), ok) + " |")
		}
		b.WriteString("\n")
	}
	return b.String()
}

func (f Figure) cell(c Case, retries, measured bool) string {
	allocs := ""
	if c.Parallel <= 1 {
		allocs = fmt.Sprintf(" · %+.0f", math.Round(f.Allocs)+0)
	}
	switch {
	case !measured:
		return "-"
	case !retries:
		return nanos(f.Nanos.Mid) + " ns"
	case c.EndToEnd:
		return fmt.Sprintf("%.3f (%.3f–%.3f)%s", f.Ratio.Mid, f.Ratio.Low, f.Ratio.High, allocs)
	default:
		return fmt.Sprintf("+%s (%s–%s)%s", nanos(f.Added.Mid), nanos(f.Added.Low), nanos(f.Added.High), allocs)
	}
}

// nanos has three digits that count, at least.
func nanos(n float64) string {
	if math.Abs(n) < 100 {
		return fmt.Sprintf("%.1f", n)
	}
	return fmt.Sprintf("%.0f", n)
}

// version is that of a module in this program.
func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	if info != nil {
		for _, m := range info.Deps {
			if m.Path == module && m.Version != "v0.0.0" {
				return m.Version
			}
		}
	}
	return "(this tree)"
}
