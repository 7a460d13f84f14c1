// Command costs measures what a call costs through each of the peers and
// writes the table as Markdown to standard output.
package main

import (
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"regexp"
	"time"

	"example.com/grpcretry/benchmarks/costs"
	"example.com/grpcretry/benchmarks/peers"
)

func main() {
	e := costs.Effort{}
	flag.IntVar(&e.Rounds, "rounds", 60, "batches of each peer in each case")
	flag.DurationVar(&e.Batch, "batch", 4*time.Millisecond, "length of a batch; those of real calls are ten times as long")
	only := flag.String("case", "", "measure only the cases whose name matches this `regexp`")
	who := flag.String("peer", "", "measure only the peers whose name matches this `regexp`, beside none")
	seed := flag.Uint64("seed", 1, "of the order of the batches and of the intervals")
	flag.Parse()
	if err := run(os.Stdout, e, *only, *who, *seed); err != nil {
		fmt.Fprintln(os.Stderr, "costs:", err)
		os.Exit(1)
	}
}

func run(w io.Writer, e costs.Effort, only, who string, seed uint64) error {
	if e.Rounds < 2 || e.Batch <= 0 {
		return fmt.Errorf("-rounds = %d and -batch = %v, want at least 2 and more than 0", e.Rounds, e.Batch)
	}
	cases, err := regexp.Compile(only)
	if err != nil {
		return fmt.Errorf("-case: %w", err)
	}
	names, err := regexp.Compile(who)
	if err != nil {
		return fmt.Errorf("-peer: %w", err)
	}
	list := peers.All[:1:1]
	for _, p := range peers.All[1:] {
		if names.MatchString(p.Name) {
			list = append(list, p)
		}
	}
	random := rand.New(rand.NewPCG(seed, seed))
	table := costs.NewTable(list, costs.Least(e.Rounds, e.Batch))
	for _, c := range costs.Cases {
		if !cases.MatchString(c.Bench) {
			continue
		}
		effort := e
		if c.EndToEnd {
			effort.Batch *= 10
		}
		figures, err := c.Measure(list, effort, random)
		if err != nil {
			return err
		}
		table.Add(c, figures)
		fmt.Fprintln(os.Stderr, c.Title)
	}
	return table.Write(w)
}
