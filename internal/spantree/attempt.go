package spantree

import (
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
)

// attemptEvent is the name of the events that grpcretry leaves.
const attemptEvent = "grpcretry.attempt"

// attempt holds the attributes of one attempt event as text and numbers; what
// is absent is empty, or negative for seconds and the balance.
type attempt struct {
	method, code, sent, decision, delaySource, idempotency, source, peer string

	number, most, dropped               int64
	duration, delay, balance, remaining float64

	others []attribute.KeyValue
}

// parse takes the attributes apart. Those it does not know are kept, so that
// the tree shows all there is.
func parse(attrs []attribute.KeyValue) attempt {
	a := attempt{duration: -1, delay: -1, balance: -1, remaining: -1}
	host, port := "", int64(0)
	for _, kv := range attrs {
		v := kv.Value
		switch kv.Key {
		case "rpc.method":
			a.method = v.AsString()
		case "rpc.response.status_code":
			a.code = v.AsString()
		case "error.type": // the code once more
		case "network.peer.address":
			host = v.AsString()
		case "network.peer.port":
			port = v.AsInt64()
		case "grpcretry.attempt.number":
			a.number = v.AsInt64()
		case "grpcretry.attempt.decision":
			a.decision = v.AsString()
		case "grpcretry.attempt.duration":
			a.duration = v.AsFloat64()
		case "grpcretry.attempt.sent":
			a.sent = v.AsString()
		case "grpcretry.attempt.max":
			a.most = v.AsInt64()
		case "grpcretry.attempt.dropped":
			a.dropped = v.AsInt64()
		case "grpcretry.retry.delay":
			a.delay = v.AsFloat64()
		case "grpcretry.retry.delay_source":
			a.delaySource = v.AsString()
		case "grpcretry.budget.balance":
			a.balance = v.AsFloat64()
		case "grpcretry.deadline.remaining":
			a.remaining = v.AsFloat64()
		case "grpcretry.idempotency":
			a.idempotency = v.AsString()
		case "grpcretry.policy.source":
			a.source = v.AsString()
		default:
			a.others = append(a.others, kv)
		}
	}
	a.peer = host
	if port != 0 {
		a.peer = net.JoinHostPort(host, strconv.FormatInt(port, 10))
	}
	return a
}

// attempt is the line that says what happened. The method is told where it is
// not that of the event before.
func (t *tree) attempt(a attempt, before string) string {
	text := fmt.Sprintf("attempt %d", a.number)
	if a.method != before {
		text += " of " + clean(a.method)
	}
	code := t.paint(red, clean(a.code))
	if a.code == "OK" {
		code = t.paint(green, a.code)
	}
	text += ": " + code
	if a.duration >= 0 && !t.HideDurations {
		text += " after " + short(seconds(a.duration))
	}
	if a.sent != "" {
		text += "; " + sentWords(a.sent)
	}
	if a.peer != "" {
		text += " (" + clean(a.peer) + ")"
	}
	return text
}

// decision says what followed and why, and on a second line, where there is
// more to know, what that rests on.
func (t *tree) decision(a attempt) []string {
	color := red
	switch a.decision {
	case "success":
		color = green
	case "retry", "resume":
		color = yellow
	}
	first := "=> " + t.paint(color, clean(a.decision))
	if words := t.decisionWords(a); words != "" {
		first += ": " + words
	}
	if a.balance >= 0 {
		first += fmt.Sprintf("; %.0f%% of the budget left", 100*a.balance)
	}
	var facts []string
	if a.idempotency != "" {
		facts = append(facts, "idempotency: "+clean(a.idempotency))
	}
	if a.source != "" {
		facts = append(facts, "policy from: "+clean(a.source))
	}
	if a.remaining >= 0 && !t.HideDurations && a.decision != "deadline" {
		facts = append(facts, "deadline: "+short(seconds(a.remaining))+" left")
	}
	if a.dropped > 0 {
		facts = append(facts, fmt.Sprintf("attempts before it without an event: %d", a.dropped))
	}
	for _, kv := range a.others {
		facts = append(facts, clean(string(kv.Key))+": "+clean(kv.Value.Emit()))
	}
	if facts == nil {
		return []string{first}
	}
	return []string{first, "   " + strings.Join(facts, "; ")}
}

// decisionWords explain the ladder's word to somebody who meets it for the first time.
func (t *tree) decisionWords(a attempt) string {
	switch a.decision {
	case "retry", "resume", "dry_run":
		what := "another attempt"
		switch a.decision {
		case "resume":
			what = "the stream goes on with another attempt"
		case "dry_run":
			what = "retries are only shown: another attempt would have followed"
		}
		if a.delay < 0 {
			return what
		}
		return what + " in " + a.wait()
	case "attempts_exhausted":
		if a.most > 0 {
			return fmt.Sprintf("the policy allows %d attempts", a.most)
		}
		return "the policy allows no more attempts"
	case "deadline":
		wait, left := "the wait", "what is"
		if a.delay >= 0 {
			wait = "a wait of " + a.wait()
		}
		switch {
		case a.remaining == 0 && a.delay < 0:
			return "the call's time is up"
		case a.remaining == 0:
			return "the call's time is up, without " + wait
		case a.remaining > 0 && !t.HideDurations:
			left = "the " + short(seconds(a.remaining))
		}
		return wait + " does not fit " + left + " left of the deadline"
	case "pushback_stop":
		if words := a.refusal(); words != "" {
			return words
		}
		return "another attempt of the call was asked for no retry"
	case "hedge_failed":
		words := "other attempts of the call go on"
		if refusal := a.refusal(); refusal != "" {
			words += "; " + refusal
		}
		return words
	}
	return reasonWords[a.decision]
}

// refusal says by what the server kept other attempts away, if it did.
func (a attempt) refusal() string {
	switch {
	case a.delay >= 0 && a.delaySource == "retry_info":
		return "the server asked by RetryInfo for a wait of " + short(seconds(a.delay)) + ", longer than the policy's MaxHint"
	case a.delay >= 0:
		return "the server asked by pushback for a wait of " + short(seconds(a.delay)) + ", longer than the policy's MaxHint"
	case a.delaySource != "":
		return "the server asked for no retry"
	}
	return ""
}

// wait is the delay, and who set it.
func (a attempt) wait() string {
	text := short(seconds(a.delay))
	if a.delaySource != "" {
		text += " (" + delayWords(a.delaySource) + ")"
	}
	return text
}

// reasonWords are the words for decisions that need no numbers.
var reasonWords = map[string]string{
	"hedge_lost":       "another attempt decided the call before this one",
	"parent_done":      "the caller's context ended",
	"closed":           "the connection was closed on this side",
	"disabled":         "retries are switched off for this call or method",
	"inbound_retry":    "the call serves a request that is itself a retry",
	"committed":        "the caller already has a part of the answer",
	"permanent":        "the error is marked as permanent",
	"retry_if_stop":    "the policy's RetryIf said stop",
	"not_retryable":    "the policy does not retry this code",
	"not_idempotent":   "the server may have processed it, and nothing says that it may be repeated",
	"budget_exhausted": "the retry budget is spent",
}

func sentWords(sent string) string {
	switch sent {
	case "unsent":
		return "no server saw it"
	case "refused":
		return "by its text, refused unprocessed"
	case "answered":
		return "the server answered"
	case "ambiguous":
		return "the server may or may not have seen it"
	}
	return "sent: " + clean(sent)
}

func delayWords(source string) string {
	switch source {
	case "pushback":
		return "the server's pushback"
	case "retry_info":
		return "the server's RetryInfo and backoff"
	}
	return clean(strings.ReplaceAll(source, "_", " "))
}

// seconds is s as a Duration, clamped: not every float64 has one.
func seconds(s float64) time.Duration {
	if ns := math.Round(s * 1e9); ns < math.MaxInt64 {
		return time.Duration(ns)
	}
	return math.MaxInt64
}
