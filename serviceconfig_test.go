package grpcretry

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/big"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"example.com/grpcretry/internal/configdocs"
)

var update = flag.Bool("update", false, "write testdata/serviceconfig.txt and docs/service-config.md")

const documents = "testdata/serviceconfig.txt"

func loadDocuments(t testing.TB) []configdocs.Doc {
	t.Helper()
	docs, err := configdocs.Load(documents)
	if err != nil {
		t.Fatal(err)
	}
	return docs
}

// A user whose document is refused must read where and why, all of it at once;
// and where gRPC itself thinks otherwise, that must be meant and explained.
func TestServiceConfigDocuments(t *testing.T) {
	docs := loadDocuments(t)
	users := 0
	for i, d := range docs {
		ours, theirs := verdict(d.JSON), acceptedByGRPC(t, d.JSON)
		if *update {
			docs[i].Ours, docs[i].GRPC = ours, theirs
		}
		if ours != docs[i].Ours {
			t.Errorf("%s: we say\n%s\nwant\n%s", d.Name, ours, d.Ours)
		}
		if theirs != docs[i].GRPC {
			t.Errorf("%s: accepted by gRPC = %v, want %v", d.Name, theirs, d.GRPC)
		}
		if (ours == "") != theirs && d.Why == "" {
			t.Errorf("%s: gRPC and we differ, and nothing says why", d.Name)
		}
		if d.User {
			users++
		}
	}
	if len(docs) < 60 || users < 20 {
		t.Errorf("%d documents, %d of them users', want at least 60 and 20", len(docs), users)
	}
	if *update {
		if err := configdocs.Store(documents, docs); err != nil {
			t.Fatal(err)
		}
	}
}

// The page for users must list every difference from gRPC, and show errors as they are.
func TestServiceConfigPage(t *testing.T) {
	const page, begin, end = "docs/service-config.md", "<!-- documents: written by go test -run TestServiceConfigPage -update . -->\n", "<!-- end -->\n"
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	head, rest, ok := strings.Cut(text, begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the table", page)
	}
	var table strings.Builder
	table.WriteString("| Document | gRPC for Go | grpcretry | Why |\n|---|---|---|---|\n")
	cell := func(s string) string { return strings.NewReplacer("|", "\\|", "\n", "<br>").Replace(s) }
	for _, d := range loadDocuments(t) {
		if (d.Ours == "") == d.GRPC {
			continue
		}
		theirs, ours := "refuses it", "accepts it"
		if d.GRPC {
			theirs = "accepts it"
		}
		if d.Ours != "" {
			ours = "`" + strings.ReplaceAll(cell(d.Ours), "<br>", "`<br>`") + "`"
		}
		name := d.Name
		if !strings.Contains(d.JSON, "\n") && len(d.JSON) < 80 {
			name += ": `" + cell(d.JSON) + "`"
		}
		fmt.Fprintf(&table, "| %s | %s | %s | %s |\n", name, theirs, ours, cell(d.Why))
	}
	want := head + begin + table.String() + end + tail
	if *update && want != text {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != text {
		t.Errorf("the table of %s is out of date: run this test with -update", page)
	}

	_, example, _ := strings.Cut(head, "```json\n")
	example, shown, _ := strings.Cut(example, "```\n")
	var lines []string
	for line := range strings.SplitSeq(shown, "\n") {
		if line, ok := strings.CutPrefix(line, "    "); ok {
			lines = append(lines, line)
		}
	}
	if _, err := New(WithServiceConfig(example)); err == nil || err.Error() != strings.Join(lines, "\n") {
		t.Errorf("the page's example gives\n%v\nand the page shows\n%s", err, strings.Join(lines, "\n"))
	}
}

// verdict is our error about a document, without what stands before each fault.
func verdict(doc string) string {
	_, err := New(WithServiceConfig(doc))
	if err == nil {
		return ""
	}
	return strings.ReplaceAll(err.Error(), "grpcretry: WithServiceConfig: ", "")
}

func acceptedByGRPC(t testing.TB, doc string) bool {
	t.Helper()
	cc, err := grpc.NewClient("passthrough:///nowhere", grpc.WithDefaultServiceConfig(doc), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return false
	}
	_ = cc.Close()
	return true
}

// A document that is accepted must come out as what it says.
func TestServiceConfigValues(t *testing.T) {
	var f faults
	c := parseServiceConfig(`{
		"methodConfig": [
			{
				"name": [{"service": "a.B", "method": "C"}, {"service": "a.B"}],
				"timeout": "2.5s", "waitForReady": true, "maxRequestMessageBytes": 10, "maxResponseMessageBytes": 4294967295,
				"retryPolicy": {"maxAttempts": 9, "initialBackoff": "0.1s", "maxBackoff": "0.000000001s", "backoffMultiplier": 1.5,
					"retryableStatusCodes": ["unavailable", 10], "perAttemptRecvTimeout": "1s"}
			},
			{"name": [{}], "hedgingPolicy": {"maxAttempts": 3, "hedgingDelay": "0.5s", "nonFatalStatusCodes": ["INTERNAL"]}},
			{"name": [{"service": "x.Y"}], "hedgingPolicy": {"maxAttempts": 2}}
		],
		"retryThrottling": {"maxTokens": 1e1, "tokenRatio": 0.5466}
	}`, 5, &f)
	if err := f.err(); err != nil {
		t.Fatal(err)
	}
	exact, ok := c.methodConfigOf("/a.B/C", "/a.B/")
	if service, _ := c.methodConfigOf("/a.B/D", "/a.B/"); !ok || service != exact {
		t.Error("the method and its service have not the same entry")
	}
	want := Policy{
		MaxAttempts: 5, Timeout: 2500 * time.Millisecond, AttemptTimeout: time.Second, RetryQuota: true,
		Codes:   Codes(codes.Unavailable, codes.Aborted),
		Backoff: Backoff{Base: 1, Max: 1, Multiplier: 1.5, Jitter: ProportionalJitter(0.2), Overload: 1},
	}.withDefaults()
	if !reflect.DeepEqual(*exact.policy, want) {
		t.Errorf("retryPolicy = %+v, want %+v", *exact.policy, want)
	}
	if exact.capped != 9 || !*exact.waitForReady || exact.maxRequestSize != 10 || exact.maxReplySize != math.MaxUint32 {
		t.Errorf("entry = %+v, want capped 9, waitForReady, 10 and 4294967295 bytes", *exact)
	}
	hedged, named := c.methodConfigOf("/other.S/M", "/other.S/")
	internal := Codes(codes.Internal)
	if want := (Hedge{MaxAttempts: 3, Delay: 500 * time.Millisecond, NonFatal: internal}); hedged.policy.Hedge != want || named {
		t.Errorf("hedgingPolicy = %+v, named %v, want %+v and not named", hedged.policy.Hedge, named, want)
	}
	if want, got := (Hedge{MaxAttempts: 2, AtOnce: true, NonFatal: Codes()}), c.methods["/x.Y/"].policy.Hedge; got != want {
		t.Errorf("hedgingPolicy without delay = %+v, want %+v", got, want)
	}
	if want := (throttleLimits{10, 0.5466}); c.throttle == nil || *c.throttle != want {
		t.Errorf("retryThrottling = %+v, want %+v", c.throttle, want)
	}
}

// Two documents, or a limit that makes no sense, must not be settled in silence.
func TestServiceConfigOptionFaults(t *testing.T) {
	const throttled = `{"retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}`
	for _, test := range []struct {
		name string
		opts []Option
		want string
	}{
		{"two documents", []Option{WithServiceConfig("{}"), WithServiceConfig("{}")}, "grpcretry: WithServiceConfig: given twice, want one document"},
		{"limit of 1", []Option{WithMaxCallAttempts(1)}, "grpcretry: WithMaxCallAttempts: n = 1, want 2 or more"},
		{"two limits", []Option{WithMaxCallAttempts(2), WithMaxCallAttempts(3)}, "grpcretry: WithMaxCallAttempts is given twice, want it once"},
		{"throttling and a budget", []Option{WithServiceConfig(throttled), WithBudget(Unlimited())},
			"grpcretry: WithServiceConfig: retryThrottling together with WithBudget or WithBudgetPerTarget, want only one of them: NewThrottle makes the same of it for WithBudget"},
		{"dry run of nothing", []Option{WithDryRun("")}, `grpcretry: WithDryRun(""): empty pattern, want "pkg.Service/Method" or "pkg.Service/*"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := New(test.opts...); err == nil || err.Error() != test.want {
				t.Errorf("New: %v\nwant %s", err, test.want)
			}
		})
	}
	r := newRetrier(t, WithBudget(Unlimited()))
	if err := r.Update(WithServiceConfig(throttled)); err == nil || !strings.Contains(err.Error(), "retryThrottling together with") {
		t.Errorf("Update of a Retrier with a budget of its own: %v, want a refusal", err)
	}
}

// Documents come from outside: whatever they hold, the parser must not panic,
// must say a place that exists, and must accept nothing that gRPC would read
// as something else.
func FuzzServiceConfig(f *testing.F) {
	for _, d := range loadDocuments(f) {
		f.Add(d.JSON)
	}
	place := regexp.MustCompile(`^grpcretry: line (\d+), column (\d+): `)
	f.Fuzz(func(t *testing.T, doc string) {
		var found faults
		c := parseServiceConfig(doc, defaultMaxCallAttempts, &found)
		if err := found.err(); err != nil {
			for _, err := range found.list {
				m := place.FindStringSubmatch(err.Error())
				if m == nil {
					if strings.TrimSpace(doc) != "" {
						t.Fatalf("no place in %q", err)
					}
					continue
				}
				line, _ := strconv.Atoi(m[1])
				column, _ := strconv.Atoi(m[2])
				lines := strings.Split(doc, "\n")
				if line < 1 || line > len(lines) || column < 1 || column > 1+len([]rune(lines[line-1])) {
					t.Fatalf("%q: there is no such place", err)
				}
			}
			return
		}
		for key, m := range c.methods {
			if m.policy != nil {
				var faults faults
				if m.policy.validate(&faults); faults.err() != nil {
					t.Fatalf("%q: %v", key, faults.err())
				}
				if attempts := max(m.policy.MaxAttempts, m.policy.Hedge.MaxAttempts); attempts < 2 || attempts > defaultMaxCallAttempts {
					t.Fatalf("%q: MaxAttempts = %d", key, attempts)
				}
			}
		}
		if c.throttle != nil {
			if _, err := NewThrottle(c.throttle.maxTokens, c.throttle.tokenRatio); err != nil {
				t.Fatal(err)
			}
		}
		// Written down again, gRPC must accept it, and it must mean the same to us.
		again := c.json()
		if !acceptedByGRPC(t, again) {
			t.Fatalf("accepted, but gRPC refuses\n%s", again)
		}
		var none faults
		if c2 := parseServiceConfig(again, defaultMaxCallAttempts, &none); none.err() != nil || c2.json() != again {
			t.Fatalf("%v; written down twice:\n%s\n%s", none.err(), again, c2.json())
		}
	})
}

// json writes a config in the strictest form that there is.
func (c *serviceConfig) json() string {
	var entries []string
	quoted := func(s string) string {
		b, _ := json.Marshal(s)
		return string(b)
	}
	for _, key := range slices.Sorted(maps.Keys(c.methods)) {
		m := c.methods[key]
		service, method, _ := strings.Cut(strings.TrimPrefix(key, "/"), "/")
		fields := []string{fmt.Sprintf(`"name": [{"service": %s, "method": %s}]`, quoted(service), quoted(method))}
		if m.timeout > 0 {
			fields = append(fields, fmt.Sprintf(`"timeout": %q`, protoDuration(m.timeout)))
		}
		if m.waitForReady != nil {
			fields = append(fields, fmt.Sprintf(`"waitForReady": %v`, *m.waitForReady))
		}
		if m.maxRequestSize > 0 {
			fields = append(fields, fmt.Sprintf(`"maxRequestMessageBytes": %d`, m.maxRequestSize))
		}
		if m.maxReplySize > 0 {
			fields = append(fields, fmt.Sprintf(`"maxResponseMessageBytes": %d`, m.maxReplySize))
		}
		list := func(s CodeSet) string {
			if s.String() == "none" {
				return "[]"
			}
			return `["` + strings.ReplaceAll(s.String(), ", ", `", "`) + `"]`
		}
		switch p := m.policy; {
		case p != nil && p.Hedge.MaxAttempts > 0:
			fields = append(fields, fmt.Sprintf(`"hedgingPolicy": {"maxAttempts": %d, "hedgingDelay": %q, "nonFatalStatusCodes": %s}`,
				p.Hedge.MaxAttempts, protoDuration(p.Hedge.Delay), list(p.Hedge.NonFatal)))
		case p != nil:
			extra := ""
			if p.AttemptTimeout > 0 {
				extra = fmt.Sprintf(`, "perAttemptRecvTimeout": %q`, protoDuration(p.AttemptTimeout))
			}
			fields = append(fields, fmt.Sprintf(`"retryPolicy": {"maxAttempts": %d, "initialBackoff": %q, "maxBackoff": %q, "backoffMultiplier": %v, "retryableStatusCodes": %s%s}`,
				p.MaxAttempts, protoDuration(p.Backoff.Base), protoDuration(p.Backoff.Max), p.Backoff.Multiplier, list(p.Codes), extra))
		}
		entries = append(entries, "{"+strings.Join(fields, ", ")+"}")
	}
	doc := `"methodConfig": [` + strings.Join(entries, ",\n") + "]"
	if t := c.throttle; t != nil {
		doc += fmt.Sprintf(`, "retryThrottling": {"maxTokens": %d, "tokenRatio": %v}`, t.maxTokens, t.tokenRatio)
	}
	return "{" + doc + "}"
}

// A duration that is read as another one is a wait of another length.
func FuzzDuration(f *testing.F) {
	for _, s := range []string{
		"0.1s", "1s", "0s", "-1s", ".01s", "1.s", "1.5m", "100ms", "01s", "+1s", "0.123456789s", "0.1234567891s", "1e3s", "s", "", "-s", "-.5s", "--1s",
		"9223372036.854775807s", "9223372036.854775808s", "-9223372036.854775808s", "315576000000s", "315576000000.000000001s", "99999999999999999999s", "١s", "1 s", "1s ",
	} {
		f.Add(s)
	}
	form := regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]{1,9})?s$`)
	f.Fuzz(func(t *testing.T, s string) {
		d, err := parseProtoDuration(s)
		exact, ok := new(big.Rat).SetString(strings.TrimSuffix(s, "s"))
		switch {
		case !form.MatchString(s):
			if err == nil {
				t.Fatalf("%q is not in the form of proto3 JSON, and read as %v", s, d)
			}
			return
		case !ok:
			t.Fatalf("%q is no number to math/big", s)
		case new(big.Rat).Abs(exact).Cmp(big.NewRat(315_576_000_000, 1)) > 0:
			if err == nil {
				t.Fatalf("%q is more than a google.protobuf.Duration holds, and read as %v", s, d)
			}
			return
		case err != nil:
			t.Fatalf("%q: %v", s, err)
		}
		nanos := exact.Mul(exact, big.NewRat(1e9, 1))
		if !nanos.IsInt() {
			t.Fatalf("%q has a fraction of a nanosecond", s)
		}
		want := time.Duration(math.MaxInt64)
		switch n := nanos.Num(); {
		case n.IsInt64() && n.Int64() > math.MinInt64:
			want = time.Duration(n.Int64())
		case n.Sign() < 0:
			want = -want
		}
		if d != want {
			t.Fatalf("%q = %v, want %v", s, d, want)
		}
	})
}
