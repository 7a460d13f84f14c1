package main

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Names of the jobs.
const (
	exportJob  = "jobs/export"  // every night: the orders of the day before
	lettersJob = "jobs/letters" // every night: one letter
	syncJob    = "jobs/sync"    // every minute
)

// Plan is when the jobs run and how long they may take.
type Plan struct {
	Nightly, Minutely cron.Schedule
	Night, Minute     time.Duration // lengths of the periods
	Base              time.Duration // wait before the first retry; it doubles from one to the next
	NightBudget       time.Duration // for all attempts and waits of one run
	MinuteBudget      time.Duration
}

// inEarnest is the plan for a real service, in UTC.
func inEarnest() (Plan, error) {
	nightly, err := cron.ParseStandard("30 2 * * *")
	if err != nil {
		return Plan{}, err
	}
	minutely, err := cron.ParseStandard("* * * * *")
	if err != nil {
		return Plan{}, err
	}
	return Plan{
		Nightly: nightly, Minutely: minutely, Night: 24 * time.Hour, Minute: time.Minute,
		Base: time.Second, NightBudget: time.Hour, MinuteBudget: 50 * time.Second,
	}, nil
}

// inSeconds is the plan in which a night lasts 400 ms, to watch it.
func inSeconds() Plan {
	const night, minute = 400 * time.Millisecond, 100 * time.Millisecond
	return Plan{
		Nightly: every(night), Minutely: every(minute), Night: night, Minute: minute,
		Base: 10 * time.Millisecond, NightBudget: 350 * time.Millisecond, MinuteBudget: 80 * time.Millisecond,
	}
}

// every is a cron.Schedule for intervals of less than a second, which cron's own
// rounds up.
type every time.Duration

// Next is the next multiple of the interval.
func (e every) Next(t time.Time) time.Time {
	return t.Truncate(time.Duration(e)).Add(time.Duration(e))
}

// newRetrier sets the jobs' policies. Nobody else waits for them, so their waits
// need no jitter. A budget is filled by what succeeds; for work that succeeds once
// a night the attempts and the time are the bound, and the budget that of the server.
func newRetrier(p Plan, log *slog.Logger) (*grpcretry.Retrier, error) {
	backoff := grpcretry.Backoff{Base: p.Base, Max: 60 * p.Base, Jitter: grpcretry.NoJitter}
	return grpcretry.New(
		grpcretry.WithLogger(log),
		grpcretry.WithMethodPolicy(exportJob, grpcretry.Policy{MaxAttempts: 5, Timeout: p.NightBudget, Backoff: backoff}),
		grpcretry.WithMethodPolicy(lettersJob, grpcretry.Policy{
			MaxAttempts: 5, Timeout: p.NightBudget, Backoff: backoff, Idempotency: grpcretry.Keyed,
		}),
		grpcretry.WithMethodPolicy(syncJob, grpcretry.Policy{MaxAttempts: 3, Timeout: p.MinuteBudget, Backoff: backoff}),
		grpcretry.WithBudgetPerTarget(func(target string) grpcretry.Budget {
			if strings.HasPrefix(target, "do:jobs/") {
				return grpcretry.Unlimited()
			}
			return nil // the default
		}),
	)
}

// newJobs makes the jobs, whose RPCs go through client and whose exports into
// store. Do repeats a job as a whole, so the RPCs inside are made once.
func newJobs(p Plan, client testpb.TestServiceClient, store *Store) []Job {
	once := grpcretry.WithoutRetry()
	return []Job{
		{
			Name: exportJob, Length: p.Night, EscalateAfter: 1,
			Run: func(ctx context.Context, p Period) error {
				orders, err := client.Get(ctx, &testpb.Request{Text: exportJob + " " + p.String()}, once)
				if err != nil {
					return err
				}
				store.Save(p, orders.GetText())
				return nil
			},
		},
		{
			Name: lettersJob, Length: p.Night, EscalateAfter: 1,
			Key: func(p Period) string { return lettersJob + " " + p.String() },
			Run: func(ctx context.Context, p Period) error {
				// Keyed: the post sees by the key, which is in ctx, whether it has the letter already.
				if _, err := client.Write(ctx, &testpb.Request{Text: "letter of " + p.String()}, once); err != nil {
					return err
				}
				_, err := client.Put(ctx, &testpb.Request{Text: "confirmed " + p.String()}, once)
				return err
			},
		},
		{
			Name: syncJob, Length: p.Minute, EscalateAfter: 2,
			Run: func(ctx context.Context, p Period) error {
				_, err := client.Get(ctx, &testpb.Request{Text: syncJob + " " + p.String()}, once)
				return err
			},
		},
	}
}
