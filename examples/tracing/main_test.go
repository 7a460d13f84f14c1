package main

import (
	"bytes"
	"context"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"

	"go.opentelemetry.io/contrib/zpages"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/spantree"
)

var update = flag.Bool("update", false, "write the golden file anew")

const golden = "testdata/output.golden"

// The traces that the program prints are those which the documentation reads. In
// the bubble time is exact, so the golden file holds the durations too.
func TestTraces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		if err := demonstrate(t.Context(), &out, spantree.Options{Look: func(s []sdktrace.ReadOnlySpan) { attemptevents.CheckSpans(t, s) }}); err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if out.String() != string(want) {
			t.Errorf("the output differs from %s; run the test with -update and look at the difference. It is now:\n%s", golden, out.String())
		}
	})
}

// What the documentation shows and explains must be what the program prints.
func TestDocumentationShowsTheTraces(t *testing.T) {
	page, err := os.ReadFile("../../docs/why-did-this-call-fail.md")
	if err != nil {
		t.Fatal(err)
	}
	printed, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(page), "```text\n")
	if len(parts) != 4 {
		t.Fatalf("the page has %d traces, want 3", len(parts)-1)
	}
	for _, p := range parts[1:] {
		shown, _, _ := strings.Cut(p, "```")
		if !strings.Contains(string(printed), "\n\n"+shown+"\n") {
			t.Errorf("the program does not print\n%s", shown)
		}
	}
}

// The page at -tracez has to show the spans, or the reader stares at nothing.
func TestTracez(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		spans := zpages.NewSpanProcessor()
		if err := demonstrate(t.Context(), new(bytes.Buffer), spantree.Options{}, spans); err != nil {
			t.Fatal(err)
		}
		handler := zpages.NewTracezHandler(spans)
		for path, want := range map[string]string{
			"/": "checkout",
			"/?zspanname=shop.v1.Orders/Quote&ztype=1&zlatencybucket=5": "grpcretry.attempt", // those of 100 ms to 1 s
		} {
			page := httptest.NewRecorder()
			handler.ServeHTTP(page, httptest.NewRequest(http.MethodGet, path, nil))
			if page.Code != http.StatusOK || !strings.Contains(page.Body.String(), want) {
				t.Errorf("%s: status %d, does not show %s:\n%s", path, page.Code, want, page.Body)
			}
		}
	})
}

// Whoever starts it with -tracez must get a page and be able to end it.
func TestServe(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	addresses := make(chan string, 1)
	go func() { served <- serve(ctx, "localhost:0", zpages.NewSpanProcessor(), addresses) }()
	resp, err := http.Get("http://" + <-addresses + "/")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("status %s", resp.Status)
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("serve = %v, want nil", err)
	}
	if err := serve(t.Context(), "localhost:no-port", zpages.NewSpanProcessor(), addresses); err == nil {
		t.Error("no error for an address that is none")
	}
}
