package behaviour

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"example.com/grpcretry"
)

// Contention is what it takes until each of several clients, all of which begin at
// once, has changed one thing by optimistic concurrency: it reads the version,
// and writes if that is still the version; if not, it waits and starts again.
type Contention struct {
	Jitter  string
	Clients int

	Writes int           // tried, over all clients
	Took   time.Duration // until the last one had succeeded
}

// Jitters are the kinds that are compared.
var Jitters = []grpcretry.Jitter{
	grpcretry.NoJitter, grpcretry.ProportionalJitter(0.2), grpcretry.DecorrelatedJitter, grpcretry.EqualJitter, grpcretry.FullJitter,
}

// RunContention is the setting in which the AWS Architecture Blog compares
// jitters: each message takes about 10 ms, drawn from a normal distribution with a deviation
// of 2 ms, and waits start from 5 ms and are at most 2 s. run seeds the messages;
// the waits draw from a source that nobody can seed.
func RunContention(ctx context.Context, jitter grpcretry.Jitter, clients int, run uint64) (Contention, error) {
	result := Contention{Jitter: jitter.String(), Clients: clients}
	retrier, err := grpcretry.New(
		grpcretry.WithDefaultPolicy(grpcretry.Policy{
			MaxAttempts: 1 << 20,
			Codes:       grpcretry.Codes(codes.Aborted),
			Backoff:     grpcretry.Backoff{Base: 5 * time.Millisecond, Max: 2 * time.Second, Jitter: jitter},
		}),
		grpcretry.WithBudget(grpcretry.Unlimited()),
		grpcretry.WithLogger(slog.New(slog.DiscardHandler)),
	)
	if err != nil {
		return result, err
	}
	var mu sync.Mutex
	version := 0
	start := time.Now()
	var wg sync.WaitGroup
	errs := make([]error, clients)
	for i := range clients {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(run, uint64(i)))
			message := func() {
				time.Sleep(max(0, time.Duration((10+2*random.NormFloat64())*float64(time.Millisecond))))
			}
			errs[i] = retrier.Do(ctx, "contention/change", func(context.Context) error {
				message()
				mu.Lock()
				seen := version
				mu.Unlock()
				message()
				message()
				mu.Lock()
				result.Writes++
				fresh := seen == version
				if fresh {
					version++
				}
				mu.Unlock()
				message()
				if !fresh {
					return status.Error(codes.Aborted, "somebody else was faster")
				}
				return nil
			})
		})
	}
	wg.Wait()
	result.Took = time.Since(start)
	for i, err := range errs {
		if err != nil {
			return result, fmt.Errorf("contention, %v, client %d: %w", jitter, i, err)
		}
	}
	return result, nil
}
