// Package spantree prints finished OpenTelemetry spans as a tree, with the
// attempt events of grpcretry in words:
//
//	load order  156ms
//	|-- attempt 1 of shop.v1.Orders/Get: UNAVAILABLE after 3ms; the server answered (backend)
//	|   => retry: another attempt in 50ms (backoff); 90% of the budget left
//	`-- attempt 2: OK after 3ms (backend)
//	    => success
//
// It is for examples and for tests that compare with a golden file; no service
// should need it.
package spantree

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"

	otelcodes "go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Options say how the tree looks. The zero value is plain text with durations.
type Options struct {
	// Color marks codes and decisions with ANSI escapes; see [Color].
	Color bool
	// HideDurations leaves out how long spans and attempts took and what was
	// left of the deadline, which differ from run to run. The delays
	// before retries stay: a golden file wants a policy without jitter.
	HideDurations bool
	// Look, if it is not nil, is given the spans before they are printed: a
	// test of an example looks at what the text leaves out.
	Look func([]sdktrace.ReadOnlySpan)
}

// Color reports whether w is a terminal whose user did not ask for plain text:
// NO_COLOR is unset or empty, and TERM is not "dumb".
func Color(w io.Writer) bool { return color(w, os.Getenv) }

// color takes any character device for a terminal. That is wrong for a few,
// such as the null device, where it does not matter.
func color(w io.Writer, getenv func(string) string) bool {
	f, ok := w.(*os.File)
	if !ok || getenv("NO_COLOR") != "" || getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Write prints the spans to w with one call of its Write, whose error it
// returns. A span stands below its parent; where that is not among the spans it
// is a root. Roots, and what stands below one span, are in the order of
// their time: spans by their start, events by their timestamp. Of an
// [tracetest.SpanStubs] pass the Snapshots.
func Write(w io.Writer, spans []sdktrace.ReadOnlySpan, o Options) error {
	if o.Look != nil {
		o.Look(spans)
	}
	t := tree{Options: o, children: map[key][]sdktrace.ReadOnlySpan{}, printed: map[key]bool{}}
	known := map[key]bool{}
	for _, s := range spans {
		known[keyOf(s.SpanContext())] = true
	}
	var roots []sdktrace.ReadOnlySpan
	for _, s := range spans {
		if parent := keyOf(s.Parent()); s.Parent().HasSpanID() && known[parent] {
			t.children[parent] = append(t.children[parent], s)
		} else {
			roots = append(roots, s)
		}
	}
	byStart(roots)
	for _, s := range roots {
		t.span(s, "", "")
	}
	// Stubs made by hand may form a ring; none of it is lost.
	for _, s := range spans {
		t.span(s, "", "")
	}
	_, err := w.Write(t.out.Bytes())
	return err
}

type key struct {
	trace trace.TraceID
	span  trace.SpanID
}

func keyOf(c trace.SpanContext) key { return key{c.TraceID(), c.SpanID()} }

type tree struct {
	Options
	out      bytes.Buffer
	children map[key][]sdktrace.ReadOnlySpan
	printed  map[key]bool
}

// node is something below a span: another span, or an event.
type node struct {
	at    time.Time
	span  sdktrace.ReadOnlySpan // nil for an event
	event sdktrace.Event
}

// span prints s and all below it, unless that was done. Its first line begins
// with first, the others with rest.
func (t *tree) span(s sdktrace.ReadOnlySpan, first, rest string) {
	id := keyOf(s.SpanContext())
	if t.printed[id] {
		return
	}
	t.printed[id] = true
	t.line(first, t.headline(s))

	var below []node
	for _, c := range t.children[id] {
		if !t.printed[keyOf(c.SpanContext())] {
			below = append(below, node{at: c.StartTime(), span: c})
		}
	}
	for _, e := range s.Events() {
		below = append(below, node{at: e.Time, event: e})
	}
	slices.SortStableFunc(below, func(a, b node) int { return a.at.Compare(b.at) })
	method := ""
	for i, n := range below {
		branch, rail := "|-- ", "|   "
		if i == len(below)-1 {
			branch, rail = "`-- ", "    "
		}
		branch, rail = rest+branch, rest+rail
		switch {
		case n.span != nil:
			t.span(n.span, branch, rail)
		case n.event.Name == attemptEvent:
			a := parse(n.event.Attributes)
			t.line(branch, t.attempt(a, method))
			for _, line := range t.decision(a) {
				t.line(rail, line)
			}
			method = a.method
		default:
			t.line(branch, eventLine(n.event))
		}
	}
	if s.DroppedEvents() > 0 {
		t.line(rest, fmt.Sprintf("(%d events dropped by the SDK's limits)", s.DroppedEvents()))
	}
}

// headline is a span in one line.
func (t *tree) headline(s sdktrace.ReadOnlySpan) string {
	parts := []string{clean(s.Name())}
	if k := s.SpanKind(); k != trace.SpanKindInternal && k != trace.SpanKindUnspecified {
		parts = append(parts, "["+k.String()+"]")
	}
	for _, a := range s.Attributes() {
		if a.Key == "grpcretry.attempt.number" {
			parts = append(parts, "attempt "+a.Value.Emit())
		}
	}
	switch {
	case s.EndTime().IsZero():
		parts = append(parts, "unfinished")
	case !t.HideDurations:
		parts = append(parts, short(s.EndTime().Sub(s.StartTime())))
	}
	for _, a := range s.Attributes() {
		if a.Key == "grpcretry.deadline.remaining" && !t.HideDurations {
			parts = append(parts, "deadline after "+short(seconds(a.Value.AsFloat64())))
		}
	}
	switch st := s.Status(); st.Code {
	case otelcodes.Ok:
		parts = append(parts, t.paint(green, "ok"))
	case otelcodes.Error:
		text := "ERROR"
		if st.Description != "" {
			text += ": " + clean(st.Description)
		}
		parts = append(parts, t.paint(red, text))
	}
	return strings.Join(parts, "  ")
}

func (t *tree) line(prefix, text string) {
	t.out.WriteString(strings.TrimRight(prefix+text, " "))
	t.out.WriteByte('\n')
}

// eventLine is an event that is none of ours.
func eventLine(e sdktrace.Event) string {
	text := "event " + clean(e.Name)
	for _, a := range e.Attributes {
		text += " " + clean(string(a.Key)) + "=" + clean(a.Value.Emit())
	}
	return text
}

func byStart(spans []sdktrace.ReadOnlySpan) {
	slices.SortStableFunc(spans, func(a, b sdktrace.ReadOnlySpan) int {
		return a.StartTime().Compare(b.StartTime())
	})
}

// The ANSI escapes of the colours in use.
const (
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	reset  = "\x1b[0m"
)

func (t *tree) paint(color, text string) string {
	if !t.Color {
		return text
	}
	return color + text + reset
}

// clean keeps text from a span, which may come from a peer, from steering the terminal.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, text)
}

// short rounds d to three digits.
func short(d time.Duration) string {
	unit := time.Duration(1)
	for d.Abs()/unit >= 1000 {
		unit *= 10
	}
	return d.Round(unit).String()
}
