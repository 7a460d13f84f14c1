package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"testing"
	"testing/synctest"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/spantree"
)

var update = flag.Bool("update", false, "write the golden file anew")

const golden = "testdata/output.golden"

// The example must show what its headings promise. In the bubble time is exact,
// so the golden file holds the durations too.
func TestOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		if err := run(&out, spantree.Options{Look: func(s []sdktrace.ReadOnlySpan) { attemptevents.CheckSpans(t, s) }}); err != nil {
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

// A closed pipe (streams | head) is an error of run, not a panic or silence.
func TestOutputFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if err := run(brokenPipe{}, spantree.Options{}); !errors.Is(err, errBroken) {
			t.Errorf("run = %v, want %v", err, errBroken)
		}
	})
}

var errBroken = errors.New("broken pipe")

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, errBroken }
