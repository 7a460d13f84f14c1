package testsrv

import (
	"context"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"example.com/grpcretry/internal/testsrv/testpb"
)

// Attempt is what reached a handler, and what became of it.
type Attempt struct {
	// Method is the full method, Number the method's arrival on this server,
	// from 1.
	Method string
	Number int

	// Arrived is when the handler started. Left is the time to the attempt's
	// deadline at that moment; it means nothing unless HasDeadline.
	Arrived     time.Time
	Left        time.Duration
	HasDeadline bool

	// Metadata is what came in with the attempt.
	Metadata metadata.MD

	// Connection tells apart the connections of one server, from 1.
	Connection int

	// Requests are the messages read so far, Responses counts those sent. On
	// methods with one response that is 1 if the handler returned it.
	Requests  []*testpb.Request
	Responses int

	// Ended is when the handler returned, zero while it runs, and Err what it
	// returned. Both are set before the client can see the status.
	Ended time.Time
	Err   error

	// ContextEnded is when the handler's context ended while the handler ran, and
	// ContextErr why: context.Canceled or context.DeadlineExceeded. Zero if the
	// context outlived the handler.
	ContextEnded time.Time
	ContextErr   error
}

// recorder keeps the attempts of one server.
type recorder struct {
	mu       sync.Mutex
	attempts []*Attempt     // in order of arrival
	count    map[string]int // by method
	running  int
	changed  chan struct{} // closed and replaced at every change
}

func newRecorder() *recorder {
	return &recorder{count: map[string]int{}, changed: make(chan struct{})}
}

// begin records an arrival. The caller must call the returned function with what
// its handler returns.
func (r *recorder) begin(ctx context.Context, method string, requests ...*testpb.Request) (*Attempt, func(error)) {
	now := time.Now()
	a := &Attempt{Method: method, Arrived: now}
	for _, request := range requests {
		a.Requests = append(a.Requests, proto.CloneOf(request))
	}
	if deadline, ok := ctx.Deadline(); ok {
		a.Left, a.HasDeadline = deadline.Sub(now), true
	}
	a.Metadata, _ = metadata.FromIncomingContext(ctx)
	if p, ok := peer.FromContext(ctx); ok {
		if addr, ok := p.Addr.(*connAddr); ok {
			a.Connection = addr.conn.number
		}
	}
	r.change(func() {
		r.count[method]++
		a.Number = r.count[method]
		r.attempts = append(r.attempts, a)
		r.running++
	})

	recorded := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(recorded)
		r.change(func() { a.ContextEnded, a.ContextErr = time.Now(), ctx.Err() })
	})
	return a, func(err error) {
		stopped := stop()
		if !stopped {
			<-recorded
		}
		r.change(func() {
			a.Ended, a.Err = time.Now(), err
			// A handler that the context's end woke up can be here before the
			// function above was started.
			if stopped && ctx.Err() != nil {
				a.ContextEnded, a.ContextErr = a.Ended, ctx.Err()
			}
			r.running--
		})
	}
}

// change applies an edit and wakes those who wait for one.
func (r *recorder) change(edit func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	edit()
	close(r.changed)
	r.changed = make(chan struct{})
}

// read copies an attempt as it is now.
func (r *recorder) read(a *Attempt) Attempt {
	r.mu.Lock()
	defer r.mu.Unlock()
	return a.clone()
}

// wait blocks until the condition, which runs under the lock, holds.
func (r *recorder) wait(ctx context.Context, condition func() bool) error {
	for {
		r.mu.Lock()
		ok, changed := condition(), r.changed
		r.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// clone requires the recorder's lock.
func (a *Attempt) clone() Attempt {
	c := *a
	c.Requests = slices.Clone(a.Requests)
	return c
}

// Attempts returns what arrived for a method, or for all if method is "", in the
// order of arrival. The result is a copy; attempts that still run are in it.
func (s *Server) Attempts(method string) []Attempt {
	r := s.record
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Attempt
	for _, a := range r.attempts {
		if method == "" || a.Method == method {
			out = append(out, a.clone())
		}
	}
	return out
}

// Count is the number of attempts that arrived for a method, or for all if
// method is "".
func (s *Server) Count(method string) int {
	s.record.mu.Lock()
	defer s.record.mu.Unlock()
	return s.record.arrived(method)
}

// arrived requires the lock.
func (r *recorder) arrived(method string) int {
	if method == "" {
		return len(r.attempts)
	}
	return r.count[method]
}

// Running is the number of handlers that have not returned.
func (s *Server) Running() int {
	s.record.mu.Lock()
	defer s.record.mu.Unlock()
	return s.record.running
}

// WaitCount blocks until n attempts have arrived for a method, or for all if
// method is "". It returns the cause if ctx ends first.
func (s *Server) WaitCount(ctx context.Context, method string, n int) error {
	return s.record.wait(ctx, func() bool { return s.record.arrived(method) >= n })
}

// WaitIdle blocks until no handler runs. It returns the cause if ctx ends first.
func (s *Server) WaitIdle(ctx context.Context) error {
	return s.record.wait(ctx, func() bool { return s.record.running == 0 })
}
