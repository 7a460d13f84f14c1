package costs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	avast "github.com/avast/retry-go/v5"
	cenkalti "github.com/cenkalti/backoff/v5"
	sethvargo "github.com/sethvargo/go-retry"

	"example.com/grpcretry"
)

// doer runs a function that is to be tried three times at most, with waits that
// begin at 50 ms and double, with jitter, and that end with the context. That is
// what each of the libraries is asked for, in the manner of its documentation.
type doer struct {
	name string
	note string
	do   func(ctx context.Context, fn func(context.Context) error) error
}

// doers are all of them; ours comes first.
func doers() ([]doer, error) {
	retry, err := grpcretry.New(grpcretry.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		return nil, err
	}
	return []doer{
		{"ours", "Retrier.Do with the default policy and budget", func(ctx context.Context, fn func(context.Context) error) error {
			return retry.Do(ctx, "jobs/export", fn)
		}},
		{"cenkalti", "backoff.Retry", func(ctx context.Context, fn func(context.Context) error) error {
			b := &cenkalti.ExponentialBackOff{InitialInterval: 50 * time.Millisecond, RandomizationFactor: 0.5, Multiplier: 2, MaxInterval: 2 * time.Second}
			_, err := cenkalti.Retry(ctx, func() (struct{}, error) { return struct{}{}, fn(ctx) }, cenkalti.WithBackOff(b), cenkalti.WithMaxTries(3))
			return err
		}},
		{"avast", "a Retrier for each function, because it holds the context", func(ctx context.Context, fn func(context.Context) error) error {
			return avast.New(
				avast.Context(ctx), avast.Attempts(3), avast.Delay(50*time.Millisecond), avast.MaxDelay(2*time.Second),
				avast.DelayType(avast.FullJitterBackoffDelay), avast.LastErrorOnly(true),
			).Do(func() error { return fn(ctx) })
		}},
		{"sethvargo", "a Backoff for each function, because it counts", func(ctx context.Context, fn func(context.Context) error) error {
			b := sethvargo.WithFullJitter(sethvargo.WithCappedDuration(2*time.Second, sethvargo.NewExponential(50*time.Millisecond)))
			return sethvargo.Do(ctx, sethvargo.WithMaxRetries(2, b), func(ctx context.Context) error {
				return sethvargo.RetryableError(fn(ctx))
			})
		}},
	}, nil
}

// What is compared must do the same: three attempts, and an end with the context.
func TestDoersAreAlike(t *testing.T) {
	all, err := doers()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range all {
		t.Run(d.name, func(t *testing.T) {
			errDown := errors.New("down")
			runs := 0
			if err := d.do(t.Context(), func(context.Context) error { runs++; return errDown }); !errors.Is(err, errDown) || runs != 3 {
				t.Errorf("%d runs, %v; want 3 and the function's error", runs, err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			runs = 0
			_ = d.do(ctx, func(context.Context) error { runs++; cancel(); return errDown })
			if runs != 1 {
				t.Errorf("%d runs though the context ended in the first", runs)
			}
		})
	}
}

// BenchmarkDo is the cost of a function that succeeds at once, for each library.
func BenchmarkDo(b *testing.B) {
	all, err := doers()
	if err != nil {
		b.Fatal(err)
	}
	ctx := context.Background()
	fn := func(context.Context) error { return nil }
	for _, d := range all {
		b.Run("peer="+d.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := d.do(ctx, fn); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDoRatio is what ours costs for each nanosecond of another's: the
// median over rounds in which each has one batch, in shuffled order, with the
// bounds of its 95% interval. Below 1 ours is faster. A batch is so long that each
// collects its own garbage.
func BenchmarkDoRatio(b *testing.B) {
	all, err := doers()
	if err != nil {
		b.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	ctx := context.Background()
	fn := func(context.Context) error { return nil }
	var entries []*entry
	for _, d := range all {
		x := &entry{runner: &Runner{parallel: 1, call: []func() error{func() error { return d.do(ctx, fn) }}}}
		if err := x.runner.Run(1000); err != nil { // the first one fills caches, and would pass for a batch
			b.Fatal(err)
		}
		if x.batch, err = calibrate(x.runner, 20*time.Millisecond); err != nil {
			b.Fatal(err)
		}
		entries = append(entries, x)
	}
	order := append([]*entry(nil), entries...)
	rounds := 0
	for b.Loop() {
		rounds++
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, x := range order {
			runtime.GC() // and not in the batch of somebody else
			if err := (Case{}).round(x); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(0, "ns/op") // the rounds' own time is of no interest
	ours := Figure{nanos: entries[0].nanos}
	for i, x := range entries {
		at := Median(x.nanos, random)
		text := fmt.Sprintf("%-10s %4.0f ns (%.0f to %.0f)", all[i].name, at.Mid, at.Low, at.High)
		if i > 0 {
			r := ours.Beside(Figure{nanos: x.nanos}, random)
			b.ReportMetric(r.Mid, "ours/"+all[i].name)
			text += fmt.Sprintf("; ours / %s = %.2f (%.2f to %.2f)", all[i].name, r.Mid, r.Low, r.High)
		}
		b.Logf("%s, %d rounds: %s", text, rounds, all[i].note)
	}
}
