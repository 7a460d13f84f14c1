package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/robfig/cron/v3"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"

	"example.com/grpcretry"
)

// Period is what one run of a job is for: from From up to, and without, To.
type Period struct {
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
}

func (p Period) String() string {
	return p.From.Format(time.RFC3339Nano) + "/" + p.To.Format(time.RFC3339Nano)
}

// periodBefore is the latest period of that length that is over at t.
func periodBefore(t time.Time, length time.Duration) Period {
	to := t.UTC().Truncate(length)
	return Period{From: to.Add(-length), To: to}
}

// Job is work that is done once for every period. All that it does depends on
// the period alone, so that one which was missed can be run again at any time.
type Job struct {
	Name   string        // by which the Retrier finds its policy
	Length time.Duration // of its periods
	Run    func(context.Context, Period) error

	// Key, if set, is the idempotency key of a period: the same also when the
	// period is run again days later.
	Key func(Period) string

	// EscalateAfter is how many failures in a row wake somebody up: one night that
	// was missed is an incident, one minute is not.
	EscalateAfter int
}

// Runner runs jobs, and leaves of each period that was missed a record in the
// log, a metric, and an entry in the journal.
type Runner struct {
	Retry    *grpcretry.Retrier
	Log      *slog.Logger
	Missed   metric.Int64Counter
	Journal  *Journal
	Escalate func(job string, failures int, p Period)

	mu       sync.Mutex
	failures map[string]int // in a row, by job
}

// Schedule adds the job to c. A tick that comes while the run before it still
// goes on is skipped, and its period counts as missed. ctx ends the runs.
func (r *Runner) Schedule(ctx context.Context, c *cron.Cron, at cron.Schedule, job Job) {
	skip := cron.SkipIfStillRunning(skipped(func() {
		r.missed(ctx, Entry{Job: job.Name, Period: periodBefore(time.Now(), job.Length), Reason: "still_running"})
	}))
	c.Schedule(at, cron.NewChain(skip).Then(cron.FuncJob(func() {
		r.Tick(ctx, job, periodBefore(time.Now(), job.Length))
	})))
}

// skipped is the cron.Logger through which SkipIfStillRunning tells of a tick
// that it leaves out; it is told nothing else.
type skipped func()

func (s skipped) Info(string, ...any)         { s() }
func (s skipped) Error(error, string, ...any) {}

// Tick is one run by schedule.
func (r *Runner) Tick(ctx context.Context, job Job, p Period) {
	err := r.Run(ctx, job, p)
	r.mu.Lock()
	if r.failures == nil {
		r.failures = map[string]int{}
	}
	r.failures[job.Name]++
	if err == nil {
		r.failures[job.Name] = 0
	}
	n := r.failures[job.Name]
	r.mu.Unlock()
	if n >= job.EscalateAfter && err != nil {
		r.Escalate(job.Name, n, p)
	}
}

// Run runs the job for one period, in as many attempts and as much time as its
// policy allows.
func (r *Runner) Run(ctx context.Context, job Job, p Period) error {
	var report grpcretry.Report
	options := []grpc.CallOption{grpcretry.WithReport(&report)}
	if job.Key != nil {
		options = append(options, grpcretry.WithIdempotencyKey(job.Key(p)))
	}
	err := r.protect(ctx, job, func() error {
		return r.Retry.Do(ctx, job.Name, func(ctx context.Context) error { return job.Run(ctx, p) }, options...)
	})
	if err == nil {
		return nil
	}
	e := Entry{Job: job.Name, Period: p, Reason: report.Reason.String(), Attempts: report.Made()}
	if n := len(report.Attempts); n > 0 {
		e.Code = report.Attempts[n-1].Code.String()
	}
	if errors.Is(err, errPanicked) {
		e.Reason = "panic"
	}
	r.missed(ctx, e)
	return err
}

var errPanicked = errors.New("the job panicked")

// protect turns a panic, which Do hands on and never retries, into an error:
// other jobs should go on.
func (r *Runner) protect(ctx context.Context, job Job, run func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			r.Log.ErrorContext(ctx, "panic", "job", job.Name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = errPanicked
		}
	}()
	return run()
}

// missed leaves all the traces of a period that was missed. It does so also
// where ctx is done, because then the process is about to end.
func (r *Runner) missed(ctx context.Context, e Entry) {
	e.At = time.Now().UTC()
	r.Log.ErrorContext(ctx, "period missed", "job", e.Job, "from", e.From, "to", e.To, "reason", e.Reason, "code", e.Code, "attempts", e.Attempts)
	r.Missed.Add(context.WithoutCancel(ctx), 1, metric.WithAttributes(attribute.String("job", e.Job), attribute.String("reason", e.Reason)))
	if err := r.Journal.Append(e); err != nil {
		r.Log.ErrorContext(ctx, "the journal cannot be written", "error", err)
	}
}

// Replay runs exactly the periods again that the journal holds, and strikes out
// those that succeed. It tells how many did.
func (r *Runner) Replay(ctx context.Context, jobs []Job) (done int, err error) {
	pending, err := r.Journal.Pending()
	if err != nil {
		return 0, err
	}
	var failed []error
	for _, e := range pending {
		job, err := jobNamed(jobs, e.Job)
		if err == nil {
			err = r.Run(ctx, job, e.Period)
		}
		if err == nil {
			err = r.Journal.Append(Entry{Job: e.Job, Period: e.Period, Done: true, At: time.Now().UTC()})
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("%s %v: %w", e.Job, e.Period, err))
			continue
		}
		done++
	}
	return done, errors.Join(failed...)
}

func jobNamed(jobs []Job, name string) (Job, error) {
	for _, job := range jobs {
		if job.Name == name {
			return job, nil
		}
	}
	return Job{}, fmt.Errorf("the journal names a job %q that does not exist", name)
}
