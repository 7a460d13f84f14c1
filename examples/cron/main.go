// Command cron runs scheduled work through [grpcretry.Retrier.Do]: each tick is
// bounded by attempts and by time, no two runs of a job overlap, and a period that
// was missed leaves a log record, a metric, and an entry in a journal, from which
// exactly that period can be run again.
//
//	go -C examples/cron run .                # nights of 400 ms; takes two seconds
//	go -C examples/cron run . -replay FILE   # runs the periods again that the journal holds
//
// It is a module of its own, because a package that retries RPCs should not
// depend on a scheduler. Everything that it talks to is in this process.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/robfig/cron/v3"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"example.com/grpcretry/internal/testsrv/testpb"
)

func main() {
	if err := command(); err != nil {
		fmt.Fprintln(os.Stderr, "cron:", err)
		os.Exit(1)
	}
}

func command() error {
	replay := flag.String("replay", "", "run the periods again that this `journal` holds")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	return demonstrate(ctx, os.Stdout, *replay)
}

// demonstrate shows some nights, of which one goes wrong, and makes up for it; or
// it makes up for what a journal holds.
func demonstrate(ctx context.Context, out io.Writer, replay string) (err error) {
	path := replay
	if path == "" {
		dir, err := os.MkdirTemp("", "cron")
		if err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
		path = filepath.Join(dir, "missed.jsonl")
	}
	world := newWorld(map[string]map[int]bool{exportJob: {2: true}, syncJob: {3: true, 4: true}}, 2)
	defer world.Server.Close()
	o, err := newOffice(inSeconds(), world, path, out)
	if err != nil {
		return err
	}
	if replay == "" {
		fmt.Fprintln(out, "# Nights of 400 ms. In the second one the database is being moved.")
		nights, stop := context.WithTimeout(ctx, 4*o.plan.Night+5*o.plan.Minute/2)
		defer stop()
		o.serve(nights)
		fmt.Fprintf(out, "\n# Missed, by job: %v. Letters sent: %d, though confirming the first one failed twice.\n", o.missed(ctx), world.Letters())
	}
	world.Repair()
	fmt.Fprintln(out, "\n# Replay: exactly what was missed.")
	done, err := o.runner.Replay(ctx, o.jobs)
	fmt.Fprintf(out, "# Periods made up for: %d.\n", done)
	return err
}

// office is all that there is in the process.
type office struct {
	plan   Plan
	runner *Runner
	jobs   []Job
	store  *Store
	reader *sdkmetric.ManualReader
}

// newOffice puts it together: log and escalations go to out, missed periods to
// the journal at path.
func newOffice(plan Plan, world *World, path string, out io.Writer) (*office, error) {
	log := slog.New(slog.NewJSONHandler(out, nil))
	retry, err := newRetrier(plan, log)
	if err != nil {
		return nil, err
	}
	conn, err := world.Server.Dial(retry.DialOptions()...)
	if err != nil {
		return nil, err
	}
	reader := sdkmetric.NewManualReader()
	meter := sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("cron")
	counter, err := meter.Int64Counter("jobs.missed", metric.WithUnit("{period}"), metric.WithDescription("periods of scheduled jobs that were missed"))
	if err != nil {
		return nil, err
	}
	store := &Store{}
	return &office{
		plan: plan, reader: reader, store: store,
		jobs: newJobs(plan, testpb.NewTestServiceClient(conn), store),
		runner: &Runner{
			Retry: retry, Log: log, Missed: counter, Journal: &Journal{Path: path},
			Escalate: func(job string, failures int, p Period) {
				log.Error("somebody should look at this", "job", job, "failures", failures, "from", p.From, "to", p.To)
			},
		},
	}, nil
}

// serve runs the named jobs by schedule, all if none is named, until ctx ends;
// it returns when no run goes on any more.
func (o *office) serve(ctx context.Context, only ...string) {
	c := cron.New(cron.WithLocation(time.UTC))
	for _, job := range o.jobs {
		if len(only) > 0 && only[0] != job.Name {
			continue
		}
		at := o.plan.Nightly
		if job.Name == syncJob {
			at = o.plan.Minutely
		}
		o.runner.Schedule(ctx, c, at, job)
	}
	c.Start()
	<-ctx.Done()
	<-c.Stop().Done()
}

// missed reads the metric: how many periods were missed, by job.
func (o *office) missed(ctx context.Context) map[string]int64 {
	var all metricdata.ResourceMetrics
	missed := map[string]int64{}
	if err := o.reader.Collect(context.WithoutCancel(ctx), &all); err != nil {
		return missed
	}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			sum, _ := m.Data.(metricdata.Sum[int64])
			for _, point := range sum.DataPoints {
				job, _ := point.Attributes.Value("job")
				missed[job.AsString()] += point.Value
			}
		}
	}
	return missed
}
