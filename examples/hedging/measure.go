package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

const (
	callers = 50
	get     = testpb.TestService_Get_FullMethodName
)

// plan is a way to hedge.
type plan struct {
	name  string
	hedge grpcretry.Hedge
}

var plans = []plan{
	{"no hedging", grpcretry.Hedge{}},
	{"Delay: 15 ms", grpcretry.Hedge{MaxAttempts: 3, Delay: 15 * time.Millisecond}},
	{"Quantile: 0.9", grpcretry.Hedge{MaxAttempts: 3, Quantile: 0.9}},
	{"Quantile: 0.95", grpcretry.Hedge{MaxAttempts: 3, Quantile: 0.95}},
}

// figures are what calls of a plan came to.
type figures struct {
	plan     plan
	took     []time.Duration // sorted
	attempts int             // that the service got
}

// perCall is how many attempts the service got for each call.
func (f figures) perCall() float64 { return float64(f.attempts) / float64(len(f.took)) }

// quantile is the least time that the share q of the calls did not exceed.
func (f figures) quantile(q float64) time.Duration {
	return f.took[max(int(math.Ceil(q*float64(len(f.took)))), 1)-1]
}

// compare prints the table, one block for each season, and gives the figures of
// the first. Where the service is quick the plans are measured one after the
// other, because together they would want more than a small machine has; where
// it is slow they wait most of the time, and are measured at once.
func compare(ctx context.Context, out io.Writer, calls int, seed uint64) ([]figures, error) {
	var first []figures
	var clients []*client
	defer func() {
		for _, c := range clients {
			c.close()
		}
	}()
	for _, p := range plans {
		c, err := newClient(p, seed)
		if err != nil {
			return nil, err
		}
		clients = append(clients, c)
	}
	for i, s := range []season{usual, slow, worse} {
		all, err := measureAll(ctx, clients, s, calls, i > 0)
		if err != nil {
			return nil, err
		}
		if err := table(out, s, all); err != nil {
			return nil, err
		}
		if i == 0 {
			first = all
		}
	}
	return first, nil
}

// table prints a block of the table.
func table(out io.Writer, s season, all []figures) error {
	if _, err := fmt.Fprintf(out, "%-56s %5s %7s %7s %7s   attempts per call\n", s.title, "p50", "p95", "p99", "p99.9"); err != nil {
		return err
	}
	for _, f := range all {
		fmt.Fprintf(out, "   %-50s", f.plan.name)
		for _, q := range []float64{0.5, 0.95, 0.99, 0.999} {
			fmt.Fprintf(out, " %7.1f", float64(f.quantile(q))/float64(time.Millisecond))
		}
		fmt.Fprintf(out, "   %17.3f\n", f.perCall())
	}
	_, err := fmt.Fprintln(out)
	return err
}

// measureAll measures a season with every client.
func measureAll(ctx context.Context, clients []*client, s season, calls int, atOnce bool) ([]figures, error) {
	all, errs := make([]figures, len(clients)), make([]error, len(clients))
	var wg sync.WaitGroup
	for i, c := range clients {
		wg.Go(func() { all[i], errs[i] = c.measure(ctx, s, calls) })
		if !atOnce {
			wg.Wait()
		}
	}
	wg.Wait()
	return all, errors.Join(errs...)
}

// client calls a service of its own by a plan.
type client struct {
	plan plan
	seed uint64
	srv  *testsrv.Server
	conn *grpc.ClientConn
	made int // calls so far
}

func newClient(p plan, seed uint64, opts ...grpcretry.Option) (*client, error) {
	retry, err := grpcretry.New(append(opts,
		grpcretry.WithLogger(slog.New(slog.DiscardHandler)),
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Get", grpcretry.Policy{Idempotency: grpcretry.Idempotent, Hedge: p.hedge}))...)
	if err != nil {
		return nil, err
	}
	c := &client{plan: p, seed: seed, srv: testsrv.New(nil)}
	if c.conn, err = c.srv.Dial(retry.DialOptions()...); err != nil {
		c.srv.Close()
		return nil, err
	}
	return c, nil
}

func (c *client) close() {
	_ = c.conn.Close()
	c.srv.Close()
}

// measure makes the calls, each caller one after the other, and waits for them.
// The callers begin one after the other too, within the time of a reply.
func (c *client) measure(ctx context.Context, s season, calls int) (figures, error) {
	if err := c.srv.Set(get, s.react(c.seed)); err != nil {
		return figures{}, err
	}
	stub, before := testpb.NewTestServiceClient(c.conn), c.srv.Count(get)
	took, errs := make([]time.Duration, calls), make([]error, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			time.Sleep(s.usual * time.Duration(i) / callers)
			for n := i; n < calls; n += callers {
				begun := time.Now()
				if _, errs[i] = stub.Get(ctx, &testpb.Request{Number: int64(c.made + n)}); errs[i] != nil {
					return
				}
				took[n] = time.Since(begun)
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return figures{}, fmt.Errorf("%s: %w", c.plan.name, err)
	}
	c.made += calls
	slices.Sort(took)
	return figures{c.plan, took, c.srv.Count(get) - before}, nil
}
