package grpcretry_test

import (
	"fmt"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/grpcretry"
)

// The first code a user copies must compile: each Go block of the README, of the
// pages in docs and of the package's documentation stands, but for its indentation, in a file of
// examples that the tests compile and run.
func TestSnippetsCompile(t *testing.T) {
	var compiled []string
	for _, pattern := range []string{"example*_test.go", "examples/*/*.go", "contrib/*/example_test.go"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			compiled = append(compiled, "\n"+strings.Join(trimmed(read(t, file)), "\n")+"\n")
		}
	}
	snippets := map[string]string{}
	for i, b := range blocks(read(t, "README.md"), "go") {
		snippets[fmt.Sprintf("README.md, Go block %d", i+1)] = b
	}
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "DESIGN.md") {
		for i, b := range blocks(read(t, page), "go") {
			snippets[fmt.Sprintf("%s, Go block %d", page, i+1)] = b
		}
	}
	for i, b := range packageSnippets(t) {
		snippets[fmt.Sprintf("doc.go, block %d", i+1)] = b
	}
	if len(snippets) < 8 {
		t.Errorf("%d snippets found, want those of README.md and doc.go", len(snippets))
	}
	for where, snippet := range snippets {
		want := "\n" + strings.Join(trimmed(snippet), "\n") + "\n"
		if !slices.ContainsFunc(compiled, func(file string) bool { return strings.Contains(file, want) }) {
			t.Errorf("%s stands in no example:\n%s", where, snippet)
		}
	}
}

// The output that the README shows is what the quickstart prints. Its golden
// file is compared with the program by the program's own test; only durations
// may differ, and a line of three dots stands for what the README leaves out.
func TestReadmeShowsTheQuickstart(t *testing.T) {
	durations := regexp.MustCompile(`\b[0-9.]+(ns|µs|ms|s)\b`)
	same := func(text string) string { return durations.ReplaceAllString(text, "TIME") }
	printed := same(read(t, "examples/quickstart/testdata/output.golden"))
	shown := blocks(read(t, "README.md"), "text")
	if len(shown) != 1 {
		t.Fatalf("README.md has %d text blocks, want the quickstart's output and no other", len(shown))
	}
	rest := printed
	for part := range strings.SplitSeq("\n"+shown[0]+"\n", "\n...\n") {
		part = strings.Trim(part, "\n")
		if part == "" {
			continue
		}
		_, after, ok := strings.Cut("\n"+rest, "\n"+same(part)+"\n")
		if !ok {
			t.Errorf("the quickstart does not print this, or not in this order:\n%s", part)
			continue
		}
		rest = after
	}
}

// The same for the figures of the tiers, which the page about them shows too.
func TestPagesShowTheTiers(t *testing.T) {
	printed := read(t, "examples/tiers/testdata/output.golden")
	for _, page := range []string{"README.md", "docs/tiers.md"} {
		shown := blocks(read(t, page), "console")
		if len(shown) != 1 || !strings.Contains(printed, "\n"+shown[0]+"\n") {
			t.Errorf("%s does not show what examples/tiers prints, once: %q", page, shown)
		}
	}
}

// A field or a decision that the tables leave out is one that users meet
// without being told what it means.
func TestReadmeTablesAreComplete(t *testing.T) {
	var rows []string // the first cells
	for line := range strings.SplitSeq(read(t, "README.md"), "\n") {
		if cell, ok := strings.CutPrefix(line, "| "); ok {
			cell, _, _ = strings.Cut(cell, " | ")
			rows = append(rows, cell)
		}
	}
	told := func(word string) {
		t.Helper()
		if !slices.ContainsFunc(rows, func(row string) bool { return strings.Contains(row, "`"+word+"`") }) {
			t.Errorf("no table of README.md has a row for %s", word)
		}
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[grpcretry.Policy]()) {
		told(f.Name)
	}
	for r := grpcretry.ReasonSuccess; !strings.HasPrefix(r.String(), "Reason("); r++ {
		told(r.String())
	}
	for name := range eventKeys(t) {
		told(name)
	}
	metrics := regexp.MustCompile(`"(grpcretry\.client\.[a-z._]+)"`).FindAllStringSubmatch(read(t, "metrics.go"), -1)
	if len(metrics) == 0 {
		t.Error("no metric found in metrics.go")
	}
	for _, m := range metrics {
		told(m[1])
	}
}

// eventKeys are the attributes that tracing.go gives to events.
func eventKeys(t *testing.T) map[string]bool {
	t.Helper()
	keys := map[string]bool{}
	for _, m := range regexp.MustCompile(`attribute\.Key\("([^"]+)"\)`).FindAllStringSubmatch(read(t, "tracing.go"), -1) {
		keys[m[1]] = true
	}
	if len(keys) == 0 {
		t.Error("no attribute found in tracing.go")
	}
	return keys
}

// The costs that the README shows are those of the page that the measurement
// writes, for the peers that it shows, so that nobody improves them by hand.
func TestReadmeShowsTheCosts(t *testing.T) {
	const corner = "Call"
	measured, shown := table(read(t, "benchmarks/COSTS.md"), corner), table(read(t, "README.md"), corner)
	if len(measured) < 2 || len(shown) != len(measured) {
		t.Fatalf("README.md shows a table of %d rows, want the %d of benchmarks/COSTS.md", len(shown), len(measured))
	}
	for row := range shown {
		for column, peer := range shown[0] {
			from := slices.Index(measured[0], peer)
			if from < 0 {
				t.Fatalf("column %q of README.md is not measured", peer)
			}
			if got, want := shown[row][column], measured[row][from]; got != want {
				t.Errorf("row %q, column %q: %q, want %q", shown[row][0], peer, got, want)
			}
		}
	}
}

// So are the figures of the report: each stands in a row of the same peer there.
func TestReadmeShowsTheReport(t *testing.T) {
	shown := table(read(t, "README.md"), "Fault")
	if len(shown) < 2 {
		t.Fatal("README.md shows nothing of the report")
	}
	report := strings.Split(read(t, "benchmarks/REPORT.md"), "\n")
	for _, row := range shown[1:] {
		for column, cell := range row[1:] {
			peer := shown[0][column+1]
			if !slices.ContainsFunc(report, func(line string) bool {
				return strings.HasPrefix(line, "| "+peer) && strings.Contains(line, "| "+cell)
			}) {
				t.Errorf("%s, %s: no row of benchmarks/REPORT.md has %q", row[0], peer, cell)
			}
		}
	}
}

// table is the Markdown table with this first cell, without the line beneath its head.
func table(markdown, corner string) (rows [][]string) {
	for line := range strings.SplitSeq(markdown, "\n") {
		if len(rows) == 0 && !strings.HasPrefix(line, "| "+corner+" |") {
			continue
		}
		if !strings.HasPrefix(line, "|") {
			return rows
		}
		if cells := strings.Split(strings.Trim(line, "| "), " | "); len(cells) > 1 {
			rows = append(rows, cells)
		}
	}
	return rows
}

// A link to a file or a heading that is not there is a dead end.
func TestReadmeLinks(t *testing.T) {
	readme := read(t, "README.md")
	anchors := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(readme, -1) {
		anchor := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(m[1]), "")
		anchors["#"+strings.ReplaceAll(anchor, " ", "-")] = true
	}
	for _, m := range regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(readme, -1) {
		switch link := m[1]; {
		case strings.HasPrefix(link, "https://"):
		case strings.HasPrefix(link, "#"):
			if !anchors[link] {
				t.Errorf("README.md links to %s, which is no heading of it", link)
			}
		default:
			if _, err := os.Stat(link); err != nil {
				t.Errorf("README.md links to %s: %v", link, err)
			}
		}
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.FromSlash(file))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// blocks are the fenced blocks of a Markdown text that are marked with the language.
func blocks(markdown, language string) []string {
	var found []string
	for _, m := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(markdown, -1) {
		if m[1] == language {
			found = append(found, strings.TrimRight(m[2], "\n"))
		}
	}
	return found
}

// packageSnippets are the code blocks of the package's documentation.
func packageSnippets(t *testing.T) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "doc.go", nil, parser.ParseComments|parser.PackageClauseOnly)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, block := range new(comment.Parser).Parse(file.Doc.Text()).Content {
		if code, ok := block.(*comment.Code); ok {
			found = append(found, strings.TrimRight(code.Text, "\n"))
		}
	}
	return found
}

// trimmed are the lines of text without indentation and without what aligns comments.
func trimmed(text string) []string {
	var lines []string
	for line := range strings.SplitSeq(text, "\n") {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return lines
}
