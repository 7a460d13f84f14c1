package grpcretry_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A sequence in which somebody else may come between the reading and the writing:
// the server then answers ABORTED, and all of it has to start again.
func ExampleRetrier_Do() {
	srv := testsrv.New(testsrv.Script{put: testsrv.Fail(1, codes.Aborted).ThenOK()})
	defer srv.Close()
	retry := must(
		grpcretry.WithMethodPolicy("jobs/restock", grpcretry.Policy{
			MaxAttempts: 5,
			Timeout:     time.Minute,
			Codes:       grpcretry.Codes(codes.Aborted),
		}),
	)
	client := connect(srv, retry)

	err := retry.Do(ctx, "jobs/restock", func(ctx context.Context) error {
		item, err := client.Get(ctx, req)
		if err != nil {
			return err
		}
		_, err = client.Put(ctx, restocked(item))
		return err
	})
	fmt.Println("error:", err)
	fmt.Println("read", srv.Count(get), "times, written", srv.Count(put), "times")
	// Output:
	// error: <nil>
	// read 2 times, written 2 times
}

// put is declared idempotent in its .proto.
const put = testpb.TestService_Put_FullMethodName

func restocked(*testpb.Response) *testpb.Request { return &testpb.Request{} }

// Work with a result, and without any gRPC in it: an error without a mark is
// temporary.
func ExampleDoValue() {
	retry := must(grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast}))
	rates := []error{errors.New("connection reset"), nil}
	rate, err := grpcretry.DoValue(ctx, retry, "jobs/rates", func(context.Context) (float64, error) {
		err := rates[0]
		rates = rates[1:]
		return 1.08, err
	})
	fmt.Println(rate, err)
	// Output:
	// 1.08 <nil>
}

// What another attempt cannot mend is marked by the code that knows it. The mark
// is gone from the result.
func ExamplePermanent() {
	errMonth := errors.New("there is no month 13")
	var report grpcretry.Report
	err := must().Do(ctx, "jobs/export", func(context.Context) error {
		return grpcretry.Permanent(errMonth)
	}, grpcretry.WithReport(&report))
	fmt.Println(err == errMonth, report.Made(), report.Reason)
	// Output:
	// true 1 permanent
}

// Of an HTTP server that answers 503 with Retry-After the next attempt keeps off
// for that long, and for the backoff.
func ExampleRetryAfter() {
	retry := must(grpcretry.WithDefaultPolicy(grpcretry.Policy{
		Backoff: grpcretry.Backoff{Base: time.Millisecond, Jitter: grpcretry.NoJitter},
	}))
	answers := []error{grpcretry.RetryAfter(errors.New("503 Service Unavailable"), 5*time.Millisecond), nil}
	var report grpcretry.Report
	err := retry.Do(ctx, "jobs/fetch", func(context.Context) error {
		err := answers[0]
		answers = answers[1:]
		return err
	}, grpcretry.WithReport(&report))
	fmt.Println(err, report.Attempts[0].Delay)
	// Output:
	// <nil> 6ms
}

// The delays without growth: each is the same.
func ExampleBackoff_constant() {
	b := grpcretry.Backoff{Base: 30 * time.Second, Max: 30 * time.Second, Multiplier: 1, Jitter: grpcretry.NoJitter}
	for retry := 1; retry <= 3; retry++ {
		fmt.Println(b.Delay(retry, 0))
	}
	// Output:
	// 30s
	// 30s
	// 30s
}
