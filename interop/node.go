//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

// nodeServer starts server.js with grpc-js server options.
func nodeServer(t tools, options string) func(context.Context, *world) error {
	return func(ctx context.Context, w *world) error {
		lines, stdout := io.Pipe()
		p, err := spawn(stdout, t.node, t.server, t.proto, options)
		if err != nil {
			return err
		}
		go func() {
			<-p.ended
			_ = stdout.Close() // the reader then comes to its end
		}()
		log := &nodeLog{port: make(chan int, 1), changed: make(chan struct{}), closed: make(chan struct{})}
		go log.read(lines)
		w.onStop(func() {
			p.stop()
			<-log.closed
		})
		w.arrivals = log.seen
		w.busy = log.busy
		select {
		case port := <-log.port:
			w.address = fmt.Sprintf("127.0.0.1:%d", port)
			return nil
		case <-p.ended:
			return fmt.Errorf("node does not start: %w: %s", p.err, p.describe())
		case <-ctx.Done():
			return fmt.Errorf("node does not start: %w: %s", context.Cause(ctx), p.describe())
		}
	}
}

// nodeLog is what server.js wrote.
type nodeLog struct {
	port   chan int
	closed chan struct{}

	mu       sync.Mutex
	attempts []string
	changed  chan struct{}
}

func (l *nodeLog) read(r io.Reader) {
	defer close(l.closed)
	for s := bufio.NewScanner(r); s.Scan(); {
		var line struct {
			Port    int
			Attempt *string
		}
		if json.Unmarshal(s.Bytes(), &line) != nil {
			continue // not ours
		}
		if line.Port > 0 {
			l.port <- line.Port
		}
		if line.Attempt != nil {
			l.mu.Lock()
			l.attempts = append(l.attempts, *line.Attempt)
			close(l.changed)
			l.changed = make(chan struct{})
			l.mu.Unlock()
		}
	}
}

func (l *nodeLog) seen() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.attempts
}

// busy waits for the first call.
func (l *nodeLog) busy(ctx context.Context) error {
	for {
		l.mu.Lock()
		n, changed := len(l.attempts), l.changed
		l.mu.Unlock()
		if n > 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func nodeFaults(t tools) []fault {
	row := func(name string, code codes.Code, text string) fault {
		return fault{group: "A server of @grpc/grpc-js", name: name, code: code, text: text, start: nodeServer(t, "{}")}
	}
	with := func(options string, f fault) fault {
		f.start = nodeServer(t, options)
		return f
	}
	slow := row("handler slower than the attempt's timeout", codes.DeadlineExceeded, `{"delay": 5000}`)
	slow.attemptTimeout = 300 * time.Millisecond
	return []fault{
		row("all is well", codes.OK, ""),
		row("UNAVAILABLE", codes.Unavailable, `{"code": 14}`),
		row("UNAVAILABLE, pushback 10", codes.Unavailable, `{"code": 14, "pushback": "10"}`),
		row("UNAVAILABLE, pushback -1", codes.Unavailable, `{"code": 14, "pushback": "-1"}`),
		row("UNAVAILABLE, RetryInfo of 10 ms", codes.Unavailable, `{"code": 14, "retryInfo": 10}`),
		row("RESOURCE_EXHAUSTED", codes.ResourceExhausted, `{"code": 8}`),
		row("RESOURCE_EXHAUSTED, RetryInfo of 10 ms", codes.ResourceExhausted, `{"code": 8, "retryInfo": 10}`),
		row("RESOURCE_EXHAUSTED, pushback 10", codes.ResourceExhausted, `{"code": 8, "pushback": "10"}`),
		row("a header, then UNAVAILABLE", codes.Unavailable, `{"header": true, "code": 14}`),
		row("a header, then CANCELLED", codes.Canceled, `{"header": true, "code": 1}`),
		row("the handler throws", codes.Unknown, `{"throw": true}`),
		row("graceful shutdown in the call", codes.OK, `{"shutdown": "graceful", "delay": 300}`),
		row("forced shutdown in the call", codes.Unavailable, `{"shutdown": "forced"}`),
		row("the process is killed in the call", codes.Unavailable, `{"exit": true}`),
		slow,
		with(`{"grpc.max_receive_message_length": 1}`, row("request larger than the server takes", codes.ResourceExhausted, `{}`)),
		with(`{"grpc.max_send_message_length": 100}`, row("reply larger than the server sends", codes.ResourceExhausted, `{"reply": 1000}`)),
		with(`{"grpc.max_concurrent_streams": 1}`, row("one stream at a time allowed", codes.OK, "")),
		row("reply larger than the client takes", codes.ResourceExhausted, fmt.Sprintf(`{"reply": %d}`, 5<<20)),
	}
}
