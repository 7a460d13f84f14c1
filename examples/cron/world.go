package main

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Store is where exports go.
type Store struct {
	mu    sync.Mutex
	saved map[string]string // by period
}

// Save keeps the export of a period, in the place of one that is there already.
func (s *Store) Save(p Period, orders string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.saved == nil {
		s.saved = map[string]string{}
	}
	s.saved[p.String()] = orders
}

// Periods are those that were saved.
func (s *Store) Periods() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.saved))
}

// World is what the jobs talk to, with the troubles that a demonstration needs.
type World struct {
	Server *testsrv.Server

	mu       sync.Mutex
	down     map[string]map[int]bool // by job: which of its periods fail, counted from 1
	periods  map[string][]string     // by job, in the order in which they came
	letters  map[string]string       // by idempotency key
	repaired bool
}

// newWorld starts the server. The given periods of a job fail until Repair, and
// the confirmation of letters fails as often as it is told.
func newWorld(down map[string]map[int]bool, unconfirmed int) *World {
	w := &World{down: down, periods: map[string][]string{}, letters: map[string]string{}}
	w.Server = testsrv.New(testsrv.Script{
		testpb.TestService_Get_FullMethodName:   testsrv.Func(w.read),
		testpb.TestService_Write_FullMethodName: testsrv.Func(w.post),
		testpb.TestService_Put_FullMethodName:   testsrv.Fail(unconfirmed, codes.Unavailable).ThenOK(),
	}, testsrv.WithName("office"))
	return w
}

// Repair ends all troubles.
func (w *World) Repair() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.repaired = true
}

// Letters is how many letters went out.
func (w *World) Letters() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.letters)
}

// read serves the export and the sync.
func (w *World) read(_ int, a testsrv.Attempt) testsrv.Step {
	job, period, _ := strings.Cut(a.Requests[0].GetText(), " ")
	w.mu.Lock()
	defer w.mu.Unlock()
	nth := 0
	for i, known := range w.periods[job] {
		if known == period {
			nth = i + 1
		}
	}
	if nth == 0 {
		w.periods[job] = append(w.periods[job], period)
		nth = len(w.periods[job])
	}
	if w.down[job][nth] && !w.repaired {
		return testsrv.Step{Code: codes.Unavailable, Message: "the database is being moved"}
	}
	return testsrv.Step{}
}

// post sends a letter, once for each idempotency key.
func (w *World) post(_ int, a testsrv.Attempt) testsrv.Step {
	keys := a.Metadata.Get("idempotency-key")
	if len(keys) != 1 {
		return testsrv.Step{Code: codes.InvalidArgument, Message: "a letter needs an idempotency key"}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, sent := w.letters[keys[0]]; !sent {
		w.letters[keys[0]] = a.Requests[0].GetText()
	}
	return testsrv.Step{}
}
