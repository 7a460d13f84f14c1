package attemptevents

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
)

// faults counts what a check finds.
type faults struct {
	testing.TB
	texts []string
}

func (*faults) Helper() {}
func (f *faults) Errorf(format string, args ...any) {
	f.texts = append(f.texts, fmt.Sprintf(format, args...))
}

// with is e with some attributes changed; nil takes one away.
func with(e Event, changes Event) Event {
	out := maps.Clone(e)
	for k, v := range changes {
		if out[k] = v; v == nil {
			delete(out, k)
		}
	}
	return out
}

var (
	retried = Event{
		"rpc.method": "shop.v1.Orders/Get", "grpcretry.attempt.number": int64(1), "rpc.response.status_code": "UNAVAILABLE",
		"error.type": "UNAVAILABLE", "grpcretry.attempt.sent": "answered", "grpcretry.attempt.decision": "retry", "grpcretry.attempt.duration": 0.01,
		"grpcretry.retry.delay": 0.05, "grpcretry.retry.delay_source": "backoff", "grpcretry.budget.balance": 0.9,
	}
	ended = with(retried, Event{
		"grpcretry.attempt.decision": "not_retryable", "grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": nil, "grpcretry.budget.balance": nil,
		"grpcretry.attempt.max": int64(3), "grpcretry.idempotency": "idempotent", "grpcretry.policy.source": "default",
	})
	good = with(ended, Event{
		"rpc.response.status_code": "OK", "error.type": nil, "grpcretry.attempt.sent": nil, "grpcretry.attempt.decision": "success",
		"grpcretry.attempt.number": int64(2), "grpcretry.idempotency": nil, "grpcretry.policy.source": nil,
	})
	late = with(ended, Event{
		"grpcretry.attempt.decision": "deadline", "grpcretry.deadline.remaining": 0.02, "grpcretry.retry.delay": 0.05, "grpcretry.retry.delay_source": "backoff",
	})
	stopped = with(ended, Event{"grpcretry.attempt.decision": "pushback_stop", "grpcretry.retry.delay_source": "pushback"})
	aside   = with(retried, Event{
		"grpcretry.attempt.decision": "hedge_failed", "grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": "pushback", "grpcretry.budget.balance": nil,
		"grpcretry.attempt.hedge": true, "grpcretry.attempt.number": int64(2),
	})
)

// A check that lets something through is believed for as long as nobody looks.
func TestCheck(t *testing.T) {
	for name, test := range map[string]struct {
		events []Event
		fault  string // "": none
	}{
		"a call":               {[]Event{retried, good}, ""},
		"two calls":            {[]Event{retried, good, ended}, ""},
		"deadline":             {[]Event{late}, ""},
		"deadline, no time":    {[]Event{with(late, Event{"grpcretry.deadline.remaining": 0.0, "grpcretry.retry.delay": nil, "grpcretry.retry.delay_source": nil})}, ""},
		"pushback":             {[]Event{stopped}, ""},
		"pushback, too long":   {[]Event{with(stopped, Event{"grpcretry.retry.delay": 300.0, "grpcretry.retry.delay_source": "retry_info"})}, ""},
		"pushback of another":  {[]Event{aside, with(stopped, Event{"grpcretry.retry.delay_source": nil})}, ""},
		"a code of the server": {[]Event{with(ended, Event{"rpc.response.status_code": "CODE(77)", "error.type": "CODE(77)"})}, ""},

		"unknown attribute":         {[]Event{with(ended, Event{"grpcretry.new": 1})}, "want no attribute of that name"},
		"unknown word":              {[]Event{with(ended, Event{"grpcretry.attempt.decision": "perhaps"})}, "want one of"},
		"int in place of a double":  {[]Event{with(ended, Event{"grpcretry.attempt.duration": int64(1)})}, "want a double"},
		"double in place of an int": {[]Event{with(ended, Event{"grpcretry.attempt.max": 3.0})}, "want an int"},
		"empty":                     {[]Event{with(ended, Event{"rpc.method": ""})}, "want a string"},
		"false":                     {[]Event{with(ended, Event{"grpcretry.attempt.hedge": false})}, "want true"},
		"no number":                 {[]Event{with(ended, Event{"grpcretry.attempt.number": nil})}, "grpcretry.attempt.number is there: false"},
		"no last":                   {[]Event{retried}, "have no last one"},
		"no error type":             {[]Event{with(ended, Event{"error.type": nil})}, "error.type is there: false"},
		"error of a success":        {[]Event{retried, with(good, Event{"error.type": "ABORTED"})}, "error.type is there: true"},
		"other error type":          {[]Event{with(ended, Event{"error.type": "ABORTED"})}, "error.type is not the code"},
		"no delay":                  {[]Event{with(retried, Event{"grpcretry.retry.delay": nil}), good}, "grpcretry.retry.delay is there: false"},
		"a delay for nothing":       {[]Event{with(ended, Event{"grpcretry.retry.delay": 1.0})}, "grpcretry.retry.delay is there: true"},
		"deadline without a delay":  {[]Event{with(late, Event{"grpcretry.retry.delay": nil})}, "grpcretry.retry.delay is there: false"},
		"deadline without a source": {[]Event{with(late, Event{"grpcretry.retry.delay_source": nil})}, "grpcretry.retry.delay_source is there: false"},
		"a wait that fits":          {[]Event{with(late, Event{"grpcretry.retry.delay": 0.01})}, "would have fitted"},
		"deadline of nobody":        {[]Event{with(late, Event{"grpcretry.deadline.remaining": nil})}, "grpcretry.deadline.remaining is there: false"},
		"pushback of nobody":        {[]Event{with(stopped, Event{"grpcretry.retry.delay_source": nil})}, "not what a server asks for"},
		"pushback of the backoff":   {[]Event{with(stopped, Event{"grpcretry.retry.delay": 1.0, "grpcretry.retry.delay_source": "backoff"})}, "not what a server asks for"},
		"RetryInfo without a delay": {[]Event{with(stopped, Event{"grpcretry.retry.delay_source": "retry_info"})}, "not what a server asks for"},
		"pushback of no attempt":    {[]Event{with(aside, Event{"grpcretry.retry.delay_source": nil}), with(stopped, Event{"grpcretry.retry.delay_source": nil})}, "no attempt was asked"},
		"no balance":                {[]Event{with(retried, Event{"grpcretry.budget.balance": nil}), good}, "grpcretry.budget.balance is there: false"},
		"too much balance":          {[]Event{with(retried, Event{"grpcretry.budget.balance": 1.1}), good}, "balance 1.1"},
		"no cause":                  {[]Event{with(ended, Event{"grpcretry.attempt.decision": "committed"})}, "grpcretry.commit.cause is there: false"},
		"no idempotency":            {[]Event{with(ended, Event{"grpcretry.idempotency": nil})}, "grpcretry.idempotency is there: false"},
		"remaining too early":       {[]Event{with(retried, Event{"grpcretry.deadline.remaining": 1.0}), good}, "grpcretry.deadline.remaining is there: true"},
		"half of within":            {[]Event{with(ended, Event{"grpcretry.within.name": "jobs/x"})}, "grpcretry.within.attempt is there: false"},
		"port without address":      {[]Event{with(ended, Event{"network.peer.port": int64(1)})}, "network.peer.port is there: true"},
		"success of a failure":      {[]Event{with(ended, Event{"grpcretry.attempt.decision": "success"})}, `decision "success"`},
		"retry at the end":          {[]Event{with(ended, Event{"grpcretry.attempt.decision": "retry"})}, `decision "retry"`},
		"lost without a hedge":      {[]Event{with(aside, Event{"grpcretry.attempt.hedge": nil, "grpcretry.attempt.number": int64(1)}), good}, `decision "hedge_failed"`},
		"a gap":                     {[]Event{retried, with(good, Event{"grpcretry.attempt.number": int64(3)})}, "number 3 with 0 left out"},
		"twice":                     {[]Event{retried, with(good, Event{"grpcretry.attempt.number": int64(1)})}, "number 1 is there twice"},
		"dropped in silence":        {[]Event{with(ended, Event{"grpcretry.attempt.number": int64(40)})}, "number 40 with 0 left out"},
		"dropped too soon":          {[]Event{with(ended, Event{"grpcretry.attempt.number": int64(40), "grpcretry.attempt.dropped": int64(39)})}, "1 events with 39 left out"},
		"hedged, out of range":      {[]Event{with(aside, Event{"grpcretry.attempt.number": int64(3)}), good}, "number 3 of 2"},
		"dropped before the end":    {[]Event{with(retried, Event{"grpcretry.attempt.dropped": int64(1)}), good}, "grpcretry.attempt.dropped is there: true"},
	} {
		t.Run(name, func(t *testing.T) {
			f := new(faults)
			Check(f, test.events)
			if all := strings.Join(f.texts, "\n"); (test.fault == "") != (all == "") || !strings.Contains(all, test.fault) {
				t.Errorf("found %q, want %q", all, test.fault)
			}
		})
	}
	f := new(faults)
	CheckCut(f, []Event{aside})
	New(f, []attribute.KeyValue{attribute.Int("a", 1), attribute.Int("a", 2)})
	CheckCut(f, []Event{with(aside, Event{"rpc.method": nil})})
	if len(f.texts) != 2 || !strings.Contains(f.texts[0], "twice") || !strings.Contains(f.texts[1], "rpc.method") {
		t.Errorf("found %q, want an attribute twice and a missing one", f.texts)
	}
}
