package grpcretry_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"example.com/grpcretry"
)

// The exponential delays of the default Backoff, without the jitter.
func ExampleBackoff_Delay() {
	b := grpcretry.Backoff{Jitter: grpcretry.NoJitter}
	for retry := 1; retry <= 7; retry++ {
		fmt.Println(retry, b.Delay(retry, 0))
	}
	// Output:
	// 1 50ms
	// 2 100ms
	// 3 200ms
	// 4 400ms
	// 5 800ms
	// 6 1.6s
	// 7 2s
}

// A loop of one's own: each pass waits for the next delay, or for the end of the
// context.
func ExampleBackoff_Delays() {
	failures := 3
	connect := func() error {
		if failures > 0 {
			failures--
			return errors.New("refused")
		}
		return nil
	}
	dial := func(ctx context.Context, b grpcretry.Backoff) (retries int, err error) {
		err = connect()
		for delay := range b.Delays() {
			if err == nil || retries == 10 {
				break
			}
			select {
			case <-ctx.Done():
				return retries, err
			case <-time.After(delay):
			}
			retries++
			err = connect()
		}
		return retries, err
	}

	b := grpcretry.Backoff{Base: time.Microsecond, Max: 5 * time.Microsecond}
	retries, err := dial(context.Background(), b)
	fmt.Println(retries, "retries, error:", err)
	// Output:
	// 3 retries, error: <nil>
}

// The delays of gRPC's own retries (gRFC A6) with initialBackoff 0.1s, maxBackoff 1s
// and backoffMultiplier 2: the jitter comes after the cap.
func ExampleProportionalJitter() {
	b := grpcretry.Backoff{
		Base:   100 * time.Millisecond,
		Max:    time.Second,
		Jitter: grpcretry.ProportionalJitter(0.2),
	}
	d := b.Delay(10, 0)
	fmt.Println(d >= 800*time.Millisecond, d <= 1200*time.Millisecond)
	// Output:
	// true true
}

// A schedule of one's own in the place of the formula.
func ExampleBackoff_func() {
	steps := []time.Duration{10 * time.Millisecond, 100 * time.Millisecond, time.Second}
	b := grpcretry.Backoff{
		Func: func(retry int, _ time.Duration, _ grpcretry.Attempt) time.Duration {
			return steps[min(retry, len(steps))-1]
		},
	}
	n := 0
	for delay := range b.Delays() {
		fmt.Println(delay)
		if n++; n == 4 {
			break
		}
	}
	// Output:
	// 10ms
	// 100ms
	// 1s
	// 1s
}
