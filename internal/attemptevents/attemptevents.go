// Package attemptevents checks the attempt events of grpcretry against their
// schema. Every test that records such events has them checked here, in
// whichever module it is, so that none of them can come to lack something, or to
// have something new, unnoticed. It is for tests only.
package attemptevents

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// Name is that of the events.
const Name = "grpcretry.attempt"

// Event is one attempt event with its attributes as plain values.
type Event map[attribute.Key]any

// Of are the span's attempt events, in order. What other libraries left there
// is left out.
func Of(t testing.TB, span sdktrace.ReadOnlySpan) []Event {
	t.Helper()
	var events []Event
	for _, e := range span.Events() {
		if e.Name == Name {
			events = append(events, New(t, e.Attributes))
		}
	}
	return events
}

// New is the event with these attributes.
func New(t testing.TB, attrs []attribute.KeyValue) Event {
	t.Helper()
	e := Event{}
	for _, a := range attrs {
		if _, ok := e[a.Key]; ok {
			t.Errorf("attribute %s is there twice", a.Key)
		}
		e[a.Key] = a.Value.AsInterface()
	}
	return e
}

// CheckSpans is [Check] for the events of each of the spans.
func CheckSpans(t testing.TB, spans []sdktrace.ReadOnlySpan) {
	t.Helper()
	for _, s := range spans {
		Check(t, Of(t, s))
	}
}

var codes = []string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED",
	"RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// Schema is what dashboards and alerts are built on: every attribute that an
// attempt's event may have, with a value of its type or the words it may be.
var Schema = map[attribute.Key]any{
	"grpcretry.attempt.number": int64(0),
	"rpc.response.status_code": codes,
	"error.type":               codes[1:],
	"grpcretry.attempt.decision": []string{
		"success", "hedge_lost", "hedge_failed", "parent_done", "closed", "disabled", "inbound_retry", "committed", "pushback_stop",
		"permanent", "retry_if_stop", "not_retryable", "not_idempotent", "attempts_exhausted", "deadline", "dry_run", "budget_exhausted", "retry", "resume",
	},
	"grpcretry.attempt.duration": float64(0),
	"grpcretry.attempt.sent":     []string{"unsent", "refused", "answered", "ambiguous"},
	"grpcretry.retry.delay":      float64(0),
	"grpcretry.retry.delay_source": []string{
		"backoff", "pushback", "retry_info",
	},
	"grpcretry.budget.balance":     float64(0),
	"grpcretry.attempt.hedge":      true,
	"grpcretry.hedge.refused":      []string{"not_idempotent", "inbound_retry", "dry_run", "pushback_stop", "budget_exhausted"},
	"grpcretry.attempt.max":        int64(0),
	"grpcretry.attempt.dropped":    int64(0),
	"grpcretry.deadline.remaining": float64(0),
	"grpcretry.idempotency":        []string{"idempotent", "not_idempotent", "keyed", "unknown"},
	"grpcretry.policy.source":      []string{"call", "method", "service", "default", "service_config", "resolver", "proto"},
	"grpcretry.commit.cause":       []string{"header", "message", "early_answer", "replay_bytes", "prepared_message", "not_proto"},
	"grpcretry.within.name":        "",
	"grpcretry.within.attempt":     int64(0),
	"network.peer.address":         "",
	"network.peer.port":            int64(0),
	"rpc.method":                   "",
}

// Check fails on an attribute that is unknown, missing, of the wrong type, or
// there without its reason. The events may be those of several calls, each to
// its last event.
func Check(t testing.TB, events []Event) {
	t.Helper()
	type place struct{ method, within, attempt any }
	calls := map[place][]Event{}
	for _, e := range events {
		p := place{e["rpc.method"], e["grpcretry.within.name"], e["grpcretry.within.attempt"]}
		calls[p] = append(calls[p], e)
		if e.last() {
			checkCall(t, calls[p])
			delete(calls, p)
		}
	}
	for p, events := range calls {
		t.Errorf("the %d events of a call of %v have no last one", len(events), p.method)
		checkCall(t, events)
	}
}

// CheckCut is Check for the events of a hedged call that a panic cut, so that
// attempts may have left none.
func CheckCut(t testing.TB, events []Event) {
	t.Helper()
	for i, e := range events {
		check(t, e, fmt.Sprintf("event %d of %d", i+1, len(events)), e.last(), true)
	}
}

// checkCall is Check for the events of one call.
func checkCall(t testing.TB, events []Event) {
	t.Helper()
	// The attempts of a hedged call end in any order.
	hedged := slices.ContainsFunc(events, func(e Event) bool { return e["grpcretry.attempt.hedge"] == true })
	told := slices.ContainsFunc(events, func(e Event) bool {
		return e["grpcretry.attempt.decision"] == "hedge_failed" && e["grpcretry.retry.delay_source"] != nil
	})
	dropped, _ := events[len(events)-1]["grpcretry.attempt.dropped"].(int64)
	made := int64(len(events)) + dropped
	seen := map[int64]bool{}
	for i, e := range events {
		place := fmt.Sprintf("event %d of %d", i+1, len(events))
		last := i == len(events)-1
		check(t, e, place, last, hedged)
		if e["grpcretry.attempt.decision"] == "pushback_stop" && e["grpcretry.retry.delay_source"] == nil && !told && dropped == 0 {
			t.Errorf("%s: no attempt was asked for no retry; it is %v", place, e)
		}
		number, _ := e["grpcretry.attempt.number"].(int64)
		switch {
		case i > 31:
			t.Errorf("%s: more than 32 events", place)
		case seen[number]:
			t.Errorf("%s: number %d is there twice", place, number)
		case hedged:
			if number < 1 || number > made {
				t.Errorf("%s: number %d of %d", place, number, made)
			}
		case !last && number != int64(i+1), last && number != int64(i+1)+dropped:
			t.Errorf("%s: number %d with %d left out", place, number, dropped)
		}
		seen[number] = true
	}
	if dropped > 0 && len(events) != 32 {
		t.Errorf("%d events with %d left out, want 32", len(events), dropped)
	}
}

func (e Event) last() bool {
	_, ok := e["grpcretry.attempt.max"]
	return ok
}

// check looks at one event, which is the last of its call or not.
func check(t testing.TB, e Event, place string, last, hedged bool) {
	t.Helper()
	fault := func(format string, args ...any) {
		t.Helper()
		t.Errorf("%s: %s; it is %v", place, fmt.Sprintf(format, args...), e)
	}
	for key, value := range e {
		if want := wanted(key, value); want != "" {
			fault("%s = %#v, want %s", key, value, want)
		}
	}
	needs := func(when bool, keys ...attribute.Key) {
		t.Helper()
		for _, key := range keys {
			if _, ok := e[key]; ok != when {
				fault("%s is there: %v, want %v", key, ok, when)
			}
		}
	}
	decision, _ := e["grpcretry.attempt.decision"].(string)
	failed := e["rpc.response.status_code"] != "OK"
	waits := decision == "retry" || decision == "resume" || decision == "dry_run"
	aside := decision == "hedge_lost" || decision == "hedge_failed"
	follows := aside || decision == "retry" || decision == "resume"
	needs(true, "grpcretry.attempt.number", "rpc.response.status_code", "grpcretry.attempt.decision", "grpcretry.attempt.duration", "rpc.method")
	needs(failed, "error.type", "grpcretry.attempt.sent")

	const delayKey, sourceKey = "grpcretry.retry.delay", "grpcretry.retry.delay_source"
	delay, delays := e[delayKey].(float64)
	source, sourced := e[sourceKey].(string)
	left, _ := e["grpcretry.deadline.remaining"].(float64)
	switch {
	case waits:
		needs(true, delayKey, sourceKey)
	case decision == "deadline": // where nothing is left there may have been no wait
		needs(true, "grpcretry.deadline.remaining")
		needs(delays || left > 0, delayKey, sourceKey)
		if delay < left {
			fault("the wait would have fitted")
		}
	case decision == "pushback_stop", decision == "hedge_failed": // the server asked for too long a wait, for no retry, or another attempt to stay away
		if source == "backoff" || delays && !sourced || !delays && sourced && source != "pushback" || decision == "pushback_stop" && !hedged && !sourced {
			fault("that is not what a server asks for")
		}
	default:
		needs(false, delayKey, sourceKey)
	}
	needs(waits || decision == "budget_exhausted", "grpcretry.budget.balance")
	needs(last, "grpcretry.attempt.max")
	if decision == "committed" {
		needs(true, "grpcretry.commit.cause")
	}
	needs(last && failed, "grpcretry.idempotency", "grpcretry.policy.source")
	if !last {
		needs(false, "grpcretry.attempt.dropped")
	}
	if !last {
		needs(false, "grpcretry.deadline.remaining", "grpcretry.hedge.refused")
	}
	_, within := e["grpcretry.within.name"]
	needs(within, "grpcretry.within.attempt")
	if _, ok := e["network.peer.address"]; !ok {
		needs(false, "network.peer.port")
	}
	if failed && e["error.type"] != e["rpc.response.status_code"] {
		fault("error.type is not the code")
	}
	if follows == last || (decision == "success") == failed && decision != "hedge_lost" || aside && !hedged {
		fault("decision %q", decision)
	}
	if balance, ok := e["grpcretry.budget.balance"].(float64); ok && balance > 1 {
		fault("balance %v", balance)
	}
}

// wanted says what the attribute should be, and nothing if it is.
func wanted(key attribute.Key, value any) string {
	switch want := Schema[key].(type) {
	case []string:
		// Servers can send codes that gRPC does not define.
		undefined := key == "rpc.response.status_code" || key == "error.type"
		if word, ok := value.(string); !ok || !slices.Contains(want, word) && !(undefined && strings.HasPrefix(word, "CODE(")) {
			return fmt.Sprintf("one of %q", want)
		}
	case int64:
		if n, ok := value.(int64); !ok || n < 0 {
			return "an int of 0 or more"
		}
	case float64:
		if f, ok := value.(float64); !ok || !(f >= 0) {
			return "a double of 0 or more"
		}
	case bool:
		if value != true {
			return "true"
		}
	case string:
		if s, ok := value.(string); !ok || s == "" {
			return "a string"
		}
	default:
		return "no attribute of that name"
	}
	return ""
}
