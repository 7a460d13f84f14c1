package main

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"testing"
	"testing/synctest"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"example.com/grpcretry/internal/attemptevents"
	"example.com/grpcretry/internal/spantree"
)

var update = flag.Bool("update", false, "write the golden file anew")

const golden = "testdata/output.golden"

// The first thing a newcomer runs must show what its headings promise, and no
// more slowly than in two seconds. In the bubble time is exact, so the golden
// file holds the durations too.
func TestOutput(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		start := time.Now()
		if err := run(&out, spantree.Options{Look: func(s []sdktrace.ReadOnlySpan) { attemptevents.CheckSpans(t, s) }}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > 2*time.Second {
			t.Errorf("took %v, want at most 2s", took)
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

// Without durations two runs must print the same, so that readers can compare
// theirs with the README.
func TestOutputIsRepeatable(t *testing.T) {
	var outputs [2]bytes.Buffer
	for i := range outputs {
		synctest.Test(t, func(t *testing.T) {
			// Runs that start at another time of day must not differ.
			time.Sleep(time.Duration(i) * 1234567 * time.Microsecond)
			if err := run(&outputs[i], spantree.Options{HideDurations: true}); err != nil {
				t.Fatal(err)
			}
		})
	}
	if outputs[0].String() != outputs[1].String() {
		t.Errorf("two runs differ:\n%s\n%s", &outputs[0], &outputs[1])
	}
	if bytes.Contains(outputs[0].Bytes(), []byte(" after 5ms")) {
		t.Errorf("the output shows durations though they are hidden:\n%s", &outputs[0])
	}
}

// A closed pipe (quickstart | head) is an error of run, not a panic or silence.
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
