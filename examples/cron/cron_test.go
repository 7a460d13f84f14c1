package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// In a bubble the clock stands at this moment when a test begins.
var midnight = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

func nights(n int) Period {
	return Period{From: midnight.Add(time.Duration(n-1) * day), To: midnight.Add(time.Duration(n) * day)}
}

// open makes the office of the real plan, and gives what it writes to its log.
func open(t *testing.T, world *World, edit func(*Plan)) (*office, *logged) {
	t.Helper()
	plan, err := inEarnest()
	if err != nil {
		t.Fatal(err)
	}
	if edit != nil {
		edit(&plan)
	}
	log := &logged{}
	t.Cleanup(world.Server.Close)
	o, err := newOffice(plan, world, filepath.Join(t.TempDir(), "missed.jsonl"), log)
	if err != nil {
		t.Fatal(err)
	}
	return o, log
}

// serveUntil runs the job by schedule until that long after midnight.
func serveUntil(t *testing.T, o *office, until time.Duration, job string) {
	t.Helper()
	ctx, cancel := context.WithDeadline(t.Context(), midnight.Add(until))
	defer cancel()
	o.serve(ctx, job)
}

// logged takes a log of JSON lines.
type logged struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

// records are those with the message.
func (l *logged) records(t *testing.T, message string) (all []map[string]any) {
	t.Helper()
	for line := range strings.Lines(l.buf.String()) {
		var record map[string]any
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatal(err)
		}
		if record["msg"] == message {
			all = append(all, record)
		}
	}
	return all
}

// arrivals are the times since midnight at which the method was called.
func arrivals(srv *testsrv.Server, method string) (at []time.Duration) {
	for _, a := range srv.Attempts(method) {
		at = append(at, a.Arrived.Sub(midnight))
	}
	return at
}

func pending(t *testing.T, o *office) []Entry {
	t.Helper()
	entries, err := o.runner.Journal.Pending()
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

const get = testpb.TestService_Get_FullMethodName

// A night that was missed must leave all that its operator needs, and be made up
// for without touching any other; a gap in the exports is found by the customer
// otherwise.
func TestNightlyExport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := newWorld(map[string]map[int]bool{exportJob: {2: true}}, 0)
		o, log := open(t, world, nil)
		serveUntil(t, o, 3*day, exportJob)

		// The second night: five attempts, whose waits are 1 + 2 + 4 + 8 = 15 s.
		const first = 2*time.Hour + 30*time.Minute
		const second, third = first + day, first + 2*day
		want := []time.Duration{first, second, second + time.Second, second + 3*time.Second, second + 7*time.Second, second + 15*time.Second, third}
		if got := arrivals(world.Server, get); !slices.Equal(got, want) {
			t.Errorf("attempts at %v, want %v", got, want)
		}
		missed := nights(1)
		if got := o.store.Periods(); !slices.Equal(got, []string{nights(0).String(), nights(2).String()}) {
			t.Errorf("exported %v", got)
		}

		records := log.records(t, "period missed")
		if len(records) != 1 || records[0]["job"] != exportJob || records[0]["from"] != "2000-01-01T00:00:00Z" ||
			records[0]["to"] != "2000-01-02T00:00:00Z" || records[0]["reason"] != "attempts_exhausted" || records[0]["attempts"] != 5.0 {
			t.Errorf("the log has %v", records)
		}
		if got := o.missed(t.Context()); len(got) != 1 || got[exportJob] != 1 {
			t.Errorf("the metric counts %v, want one export", got)
		}
		if got := log.records(t, "somebody should look at this"); len(got) != 1 || got[0]["failures"] != 1.0 {
			t.Errorf("escalated %v, want the first failure", got)
		}
		entry := Entry{Job: exportJob, Period: missed, Reason: "attempts_exhausted", Code: "Unavailable", Attempts: 5, At: midnight.Add(second + 15*time.Second)}
		if got := pending(t, o); !slices.Equal(got, []Entry{entry}) {
			t.Errorf("the journal has %+v, want %+v", got, entry)
		}

		// As long as the trouble lasts a replay fails, and the entry stays.
		if done, err := o.runner.Replay(t.Context(), o.jobs); done != 0 || err == nil {
			t.Errorf("a replay in vain: %d done, %v", done, err)
		}
		if got := pending(t, o); len(got) != 1 || got[0].Period != missed {
			t.Errorf("after that the journal has %+v", got)
		}
		world.Repair()
		before := world.Server.Count(get)
		for i, want := range []int{1, 0} { // there is nothing left for the second
			if done, err := o.runner.Replay(t.Context(), o.jobs); done != want || err != nil {
				t.Errorf("replay %d: %d done, %v", i+1, done, err)
			}
		}
		if n := world.Server.Count(get) - before; n != 1 {
			t.Errorf("the replays made %d calls, want 1", n)
		}
		if got := o.store.Periods(); !slices.Equal(got, []string{nights(0).String(), missed.String(), nights(2).String()}) {
			t.Errorf("exported in the end %v", got)
		}
	})
}

// Nights that fail in a row must each get all their attempts: a budget that only
// successes fill would be empty in the third.
func TestEveryNightHasItsAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := newWorld(map[string]map[int]bool{exportJob: {1: true, 2: true, 3: true, 4: true}}, 0)
		o, log := open(t, world, nil)
		serveUntil(t, o, 4*day, exportJob)
		if n := world.Server.Count(get); n != 20 {
			t.Errorf("%d attempts in four nights, want 20", n)
		}
		if n := len(log.records(t, "somebody should look at this")); n != 4 {
			t.Errorf("%d escalations, want one each night", n)
		}
	})
}

// The time budget must end a night that hangs, so that it is told the same night.
func TestNightIsBoundedByTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := newWorld(nil, 0)
		o, _ := open(t, world, nil)
		if err := world.Server.Set(get, testsrv.Sequence{{Code: codes.Unavailable}, {Block: true}}); err != nil {
			t.Fatal(err)
		}
		serveUntil(t, o, day, exportJob)
		got := pending(t, o)
		if len(got) != 1 || got[0].Reason != "deadline" || got[0].Attempts != 2 || !got[0].At.Equal(midnight.Add(3*time.Hour+30*time.Minute)) {
			t.Errorf("the journal has %+v, want an end by time at 03:30", got)
		}
	})
}

// A customer must not get a letter for each attempt, neither in one night nor
// because the night is run again.
func TestOneLetter(t *testing.T) {
	for _, tt := range []struct {
		unconfirmed, calls, missed int
		elapsed                    time.Duration
	}{
		{2, 3, 0, 3 * time.Second},
		{5, 5, 1, 15 * time.Second},
	} {
		t.Run(fmt.Sprint(tt.unconfirmed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				world := newWorld(nil, tt.unconfirmed)
				o, _ := open(t, world, nil)
				serveUntil(t, o, day, lettersJob)
				calls := world.Server.Attempts(testpb.TestService_Write_FullMethodName)
				if len(calls) != tt.calls || world.Server.Count(testpb.TestService_Put_FullMethodName) != tt.calls {
					t.Errorf("%d letters posted, want %d", len(calls), tt.calls)
				}
				if got := calls[len(calls)-1].Arrived.Sub(calls[0].Arrived); got != tt.elapsed {
					t.Errorf("the last %v after the first, want %v", got, tt.elapsed)
				}
				if n := world.Letters(); n != 1 {
					t.Errorf("%d letters went out, want 1", n)
				}
				if n := len(pending(t, o)); n != tt.missed {
					t.Errorf("%d periods missed, want %d", n, tt.missed)
				}
				if done, err := o.runner.Replay(t.Context(), o.jobs); done != tt.missed || err != nil {
					t.Errorf("replay: %d, %v", done, err)
				}
				if n := world.Letters(); n != 1 {
					t.Errorf("%d letters went out after the replay, want 1", n)
				}
			})
		})
	}
}

// One minute that is missed must wake nobody up, the second in a row must.
func TestEscalationEveryMinute(t *testing.T) {
	for _, tt := range []struct {
		down map[int]bool
		want []float64 // the failures told of
	}{
		{map[int]bool{2: true}, nil},
		{map[int]bool{2: true, 4: true, 6: true}, nil},
		{map[int]bool{2: true, 3: true}, []float64{2}},
		{map[int]bool{2: true, 3: true, 4: true, 6: true}, []float64{2, 3}},
	} {
		t.Run(fmt.Sprint(tt.down), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				world := newWorld(map[string]map[int]bool{syncJob: tt.down}, 0)
				o, log := open(t, world, nil)
				serveUntil(t, o, 7*time.Minute+30*time.Second, syncJob)
				var got []float64
				for _, r := range log.records(t, "somebody should look at this") {
					got = append(got, r["failures"].(float64))
				}
				if !slices.Equal(got, tt.want) {
					t.Errorf("escalated at %v failures in a row, want %v", got, tt.want)
				}
				if n := o.missed(t.Context())[syncJob]; n != int64(len(tt.down)) {
					t.Errorf("the metric counts %d, want %d", n, len(tt.down))
				}
			})
		})
	}
}

// A run that takes longer than the interval must not meet the next one, and the
// period left out for it must not be forgotten.
func TestSkipIfStillRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := newWorld(nil, 0)
		o, _ := open(t, world, func(p *Plan) { p.MinuteBudget = 5 * time.Minute })
		if err := world.Server.Set(get, testsrv.Sequence{{Delay: 90 * time.Second}, {}}); err != nil {
			t.Fatal(err)
		}
		serveUntil(t, o, 4*time.Minute+time.Second, syncJob)
		if got, want := arrivals(world.Server, get), []time.Duration{time.Minute, 3 * time.Minute, 4 * time.Minute}; !slices.Equal(got, want) {
			t.Errorf("runs at %v, want %v", got, want)
		}
		skipped := Period{From: midnight.Add(time.Minute), To: midnight.Add(2 * time.Minute)}
		if got := pending(t, o); len(got) != 1 || got[0].Period != skipped || got[0].Reason != "still_running" {
			t.Errorf("the journal has %+v, want %v", got, skipped)
		}
	})
}

// A process that is stopped in a wait must end at once, and leave the night to be
// made up for.
func TestShutdownInAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := newWorld(map[string]map[int]bool{exportJob: {1: true}}, 0)
		o, _ := open(t, world, nil)
		stop := 2*time.Hour + 30*time.Minute + 5*time.Second
		serveUntil(t, o, stop, exportJob)
		if got := time.Since(midnight); got != stop {
			t.Errorf("ended %v after midnight, want %v", got, stop)
		}
		if got := pending(t, o); len(got) != 1 || got[0].Period != nights(0) || got[0].Attempts != 3 {
			t.Errorf("the journal has %+v", got)
		}
	})
}

// A panic must not be retried, nor end the other jobs or this one's next nights.
func TestPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world := newWorld(nil, 0)
		o, log := open(t, world, nil)
		runs := 0
		export := o.jobs[0].Run
		o.jobs[0].Run = func(ctx context.Context, p Period) error {
			if runs++; runs == 1 {
				panic("index out of range")
			}
			return export(ctx, p)
		}
		serveUntil(t, o, 2*day, exportJob)
		if got := pending(t, o); runs != 2 || len(got) != 1 || got[0].Period != nights(0) || got[0].Reason != "panic" {
			t.Errorf("%d runs, the journal has %+v", runs, got)
		}
		if n := len(log.records(t, "panic")); n != 1 {
			t.Errorf("%d records of the panic", n)
		}
	})
}

// What the journal holds must survive a restart, duplicates, and be refused with
// its line where it cannot be read.
func TestJournal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "missed.jsonl")
	j := &Journal{Path: path}
	if got, err := j.Pending(); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	for _, e := range []Entry{
		{Job: "a", Period: nights(1), Attempts: 1},
		{Job: "b", Period: nights(1)},
		{Job: "a", Period: nights(2)},
		{Job: "a", Period: nights(1), Attempts: 2}, // again, by a replay
		{Job: "b", Period: nights(1), Done: true},
		{Job: "a", Period: nights(2), Done: true},
		{Job: "a", Period: nights(2), Attempts: 3}, // and missed anew
	} {
		if err := j.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	got, err := (&Journal{Path: path}).Pending()
	want := []Entry{{Job: "a", Period: nights(1), Attempts: 2}, {Job: "a", Period: nights(2), Attempts: 3}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("{\"job\":\n"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Pending(); err == nil || !strings.Contains(err.Error(), "missed.jsonl, line 8") {
		t.Errorf("a broken line: %v", err)
	}
	if err := (&Journal{Path: t.TempDir()}).Append(Entry{}); err == nil {
		t.Error("no error though the journal is a directory")
	}
}

// A journal may name a job that the program no longer has.
func TestReplayOfAnUnknownJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, _ := open(t, newWorld(nil, 0), nil)
		for _, job := range []string{"jobs/gone", exportJob} {
			if err := o.runner.Journal.Append(Entry{Job: job, Period: nights(1)}); err != nil {
				t.Fatal(err)
			}
		}
		done, err := o.runner.Replay(t.Context(), o.jobs)
		if done != 1 || err == nil || !strings.Contains(err.Error(), `"jobs/gone"`) {
			t.Errorf("%d done, %v", done, err)
		}
	})
}

// The command must show what its text promises, and within seconds.
func TestDemonstration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out logged
		start := time.Now()
		if err := demonstrate(t.Context(), &out, ""); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("took %v", took)
		}
		text := out.buf.String()
		for _, want := range []string{
			`"job":"jobs/export","from":"2000-01-01T00:00:00.4Z","to":"2000-01-01T00:00:00.8Z","reason":"attempts_exhausted","code":"Unavailable","attempts":5`,
			`"job":"jobs/export","failures":1`,
			`"job":"jobs/sync","failures":2`,
			"Missed, by job: map[jobs/export:1 jobs/sync:2]. Letters sent: 4,",
			"Periods made up for: 3.",
		} {
			if !strings.Contains(text, want) {
				t.Errorf("the output lacks %s:\n%s", want, text)
			}
		}
		if strings.Contains(text, `"job":"jobs/sync","failures":1`) {
			t.Errorf("one minute woke somebody up:\n%s", text)
		}
	})
}

// The journal of another process is replayed by its path.
func TestReplayCommand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "missed.jsonl")
		j := &Journal{Path: path}
		if err := j.Append(Entry{Job: exportJob, Period: nights(1)}); err != nil {
			t.Fatal(err)
		}
		var out logged
		if err := demonstrate(t.Context(), &out, path); err != nil || !strings.Contains(out.buf.String(), "Periods made up for: 1.") {
			t.Errorf("%v:\n%s", err, out.buf.String())
		}
		if left, err := j.Pending(); len(left) > 0 || err != nil {
			t.Errorf("the journal still has %v, %v", left, err)
		}
		if err := os.WriteFile(path, []byte("nonsense\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := demonstrate(t.Context(), &out, path); err == nil {
			t.Error("no error for a journal that cannot be read")
		}
	})
}
