// Command report makes the page REPORT.md and its pictures out of what the
// experiments of package behaviour found, and of what streams cost, which it
// measures itself. `make -C benchmarks report` runs all of it.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"example.com/grpcretry/benchmarks/behaviour"
	"example.com/grpcretry/benchmarks/streams"
)

func main() {
	results := flag.String("results", "", "`file` that TestMeasure of package behaviour wrote")
	to := flag.String("to", ".", "`directory` for REPORT.md and the pictures, which go to report/ in it")
	rounds := flag.Int("rounds", 20, "batches of each kind of stream through each peer")
	flag.Parse()
	if err := run(*results, *to, *rounds); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func run(results, to string, rounds int) error {
	text, err := os.ReadFile(results)
	if err != nil {
		return fmt.Errorf("-results: %w", err)
	}
	p := page{now: time.Now()}
	if err := json.Unmarshal(text, &p.Results); err != nil {
		return fmt.Errorf("-results: %w", err)
	}
	random := rand.New(rand.NewPCG(1, 1))
	for _, c := range streams.Cases {
		figures, err := c.Measure(context.Background(), rounds, 50*time.Millisecond, random)
		if err != nil {
			return err
		}
		p.streams = append(p.streams, figures...)
	}
	pictures, err := drawAll(p.Results)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(to, "report"), 0o755); err != nil {
		return err
	}
	for name, picture := range pictures {
		if err := os.WriteFile(filepath.Join(to, "report", name), picture, 0o644); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(to, "REPORT.md"), []byte(p.markdown()), 0o644)
}

// page is what there is to tell.
type page struct {
	behaviour.Results
	streams []streams.Figure
	now     time.Time
}
