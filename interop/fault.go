//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv/testpb"
)

const (
	put   = testpb.TestService_Put_FullMethodName
	write = testpb.TestService_Write_FullMethodName
)

// fault is one row of the table.
type fault struct {
	group, name string
	// start builds the world of one call; the world is stopped after it.
	start func(ctx context.Context, w *world) error
	// text is the request's.
	text string
	// attemptTimeout of the policy; 0: none.
	attemptTimeout time.Duration
	// during runs once the first attempt is being processed.
	during func(w *world) error
	code   codes.Code // of the first attempt
}

// world is what one call meets.
type world struct {
	address  string
	arrivals func() []string // grpc-previous-rpc-attempts of each call processed, once the world has stopped
	busy     func(ctx context.Context) error
	hup      func() error // reload
	earlier  int          // arrivals before the call
	stops    []func()
}

func (w *world) onStop(f func()) { w.stops = append(w.stops, f) }

func (w *world) stop() {
	for len(w.stops) > 0 {
		last := len(w.stops) - 1
		f := w.stops[last]
		w.stops = w.stops[:last]
		f()
	}
}

// sight is what was seen of one call.
type sight struct {
	first     grpcretry.Attempt
	attempts  int
	processed int
	repeated  int // processed again in another attempt of ours
	resent    int // processed again within one attempt
}

func (s sight) cell() string {
	return fmt.Sprintf("%v: %d/%d", s.first.Reason, s.processed, s.attempts)
}

// meet makes a call that may not be repeated, under a policy that lists every
// code, and one that may, under the default codes.
func (f *fault) meet(ctx context.Context) (string, error) {
	all := grpcretry.Codes(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)
	w, err := f.call(ctx, write, all)
	if err != nil {
		return "", fmt.Errorf("write: %w", err)
	}
	p, err := f.call(ctx, put, grpcretry.CodeSet{})
	if err != nil {
		return "", fmt.Errorf("idempotent: %w", err)
	}
	if w.repeated > 0 {
		return "", fmt.Errorf("a write was processed by %d attempts more than one", w.repeated)
	}
	evidence := w.first.Evidence.String()
	switch {
	case w.first.Err == nil:
		evidence = "-"
	case f.attemptTimeout > 0 && w.first.Evidence != grpcretry.Unsent:
		evidence = "ambiguous or answered" // the server keeps the same time, and may be the first to say so
	}
	return fmt.Sprintf("| %s | %v | %s | %s | %s | %d | %d |\n", f.name, w.first.Code, evidence, w.cell(), p.cell(), w.repeated, w.resent), nil
}

func (f *fault) call(ctx context.Context, method string, set grpcretry.CodeSet) (s sight, err error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	w := &world{}
	defer w.stop()
	if err := f.start(ctx, w); err != nil {
		return s, err
	}
	retry, err := grpcretry.New(
		grpcretry.WithBudget(grpcretry.Unlimited()),
		grpcretry.WithLogger(slog.New(slog.DiscardHandler)),
		grpcretry.WithDefaultPolicy(grpcretry.Policy{
			MaxAttempts: 3, AttemptTimeout: f.attemptTimeout, Codes: set,
			Backoff: grpcretry.Backoff{Base: 20 * time.Millisecond, Overload: 20 * time.Millisecond, Jitter: grpcretry.NoJitter},
		}),
	)
	if err != nil {
		return s, err
	}
	cc, err := grpc.NewClient(w.address, append(retry.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		return s, err
	}
	defer cc.Close()

	var report grpcretry.Report
	ended := make(chan error, 1)
	go func() {
		ended <- cc.Invoke(ctx, method, &testpb.Request{Text: f.text}, new(testpb.Response), grpcretry.WithReport(&report))
	}()
	if f.during != nil {
		if err := errors.Join(w.busy(ctx), f.during(w)); err != nil {
			cancel()
			return s, errors.Join(err, <-ended)
		}
	}
	err = <-ended
	if ctx.Err() != nil {
		return s, fmt.Errorf("the call never ended by itself: %w", err)
	}
	w.stop()
	s.first, s.attempts = report.Attempts[0], report.Made()
	s.count(w.arrivals()[w.earlier:])
	if s.first.Code != f.code && s.first.Err == nil {
		return s, fmt.Errorf("attempt 1 succeeded, want code %v", f.code)
	}
	if s.first.Code != f.code {
		return s, fmt.Errorf("attempt 1: code %v, want %v: %w", s.first.Code, f.code, s.first.Err)
	}
	for i, a := range report.Attempts[:len(report.Attempts)-1] {
		if method == write && a.Evidence != grpcretry.Unsent {
			return s, fmt.Errorf("attempt %d of a write was followed by another though it was %v: %w", i+1, a.Evidence, a.Err)
		}
	}
	return s, nil
}

func (s *sight) count(arrivals []string) {
	attempts := map[string]bool{}
	for _, a := range arrivals {
		attempts[a] = true
	}
	s.processed = len(arrivals)
	s.repeated = max(0, len(attempts)-1)
	s.resent = len(arrivals) - len(attempts)
}

func previous(values []string) string { return strings.Join(values, "+") }
