// Command hedging measures what hedging does to the slowest calls, and what it
// costs: it calls a service that is slow to answer one call in twenty without
// hedging, with a fixed delay and with a quantile, and then makes the service
// slow altogether, which has to stop the hedges. It prints a table and three
// traces, and draws how the latencies are distributed.
//
//	go -C examples/hedging run .                    # takes 16 seconds
//	go -C examples/hedging run . -out hedging.svg   # and says where the picture goes
//
// docs/hedging.md explains what it prints. It is a module of its own for the
// library that draws. The service is in this process, the calls are real ones.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"example.com/grpcretry/internal/spantree"
)

const leastCalls, mostCalls = 1000, 10_000

func main() {
	if err := interruptible(); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "hedging:", err)
		os.Exit(1)
	}
}

func interruptible() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return command(ctx, os.Stdout, os.Stderr, os.Args[1:])
}

func command(ctx context.Context, out, complaints io.Writer, args []string) error {
	flags := flag.NewFlagSet("hedging", flag.ContinueOnError)
	flags.SetOutput(complaints)
	path := flags.String("out", "", "write the picture to this `file`; by default to a new directory for temporary files")
	calls := flags.Int("calls", 2000, fmt.Sprintf("make this `number` of calls for each line of the table, from %d to %d", leastCalls, mostCalls))
	seed := flags.Uint64("seed", 1, "let chance begin with this `number`, from 0 to 2^64 - 1")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *calls < leastCalls || *calls > mostCalls {
		return fmt.Errorf("-calls = %d, want %d to %d", *calls, leastCalls, mostCalls)
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("arguments %q, want flags only", flags.Args())
	}
	file, err := create(*path) // before the measurement, which takes its time
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	picture, err := demonstrate(ctx, out, *calls, *seed, spantree.Options{Color: spantree.Color(out)})
	if err != nil {
		return err
	}
	if _, err := file.Write(picture); err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "The picture is in %s\n", file.Name())
	return err
}

// create opens the file for the picture; if path is empty, in a new directory.
func create(path string) (*os.File, error) {
	if path == "" {
		dir, err := os.MkdirTemp("", "hedging")
		if err != nil {
			return nil, err
		}
		path = filepath.Join(dir, "hedging.svg")
	}
	return os.Create(path)
}

// demonstrate measures, prints the table and the traces, and gives the picture.
func demonstrate(ctx context.Context, out io.Writer, calls int, seed uint64, options spantree.Options) ([]byte, error) {
	if _, err := fmt.Fprintf(out, "%d callers make %d calls for each line. Times are in milliseconds.\n\n", callers, calls); err != nil {
		return nil, err
	}
	all, err := compare(ctx, out, calls, seed)
	if err != nil {
		return nil, err
	}
	if err := traces(ctx, out, options); err != nil {
		return nil, err
	}
	return draw(all)
}
