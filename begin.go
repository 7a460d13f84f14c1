package grpcretry

import (
	"context"
	"crypto/rand"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// begin sets up a call. It returns nil where another Retrier further out
// already has the call in its care, and an error for a bad edit of the policy.
func (r *Retrier) begin(ctx context.Context, fullMethod string, cc *grpc.ClientConn, opts []grpc.CallOption, work bool) (*call, error) {
	c := r.calls.Get().(*call)
	c.work = work
	return c.begin(ctx, fullMethod, cc, opts)
}

func (c *call) begin(ctx context.Context, fullMethod string, cc *grpc.ClientConn, opts []grpc.CallOption) (*call, error) {
	r := c.r
	c.ctx, c.base, c.cc, c.opts = ctx, ctx, cc, opts
	key, hasKey, edits := "", false, 0
	for _, o := range opts {
		switch o := o.(type) {
		case takenOption:
			c.recycle()
			return nil, nil
		case grpc.HeaderCallOption:
			c.header, c.copies = true, true
		case grpc.TrailerCallOption, grpc.PeerCallOption, grpc.OnFinishCallOption:
			c.copies = true
		case grpc.FailFastCallOption:
			c.waitReady = !o.FailFast
		case callPolicyOption:
			edits++
		case withoutRetryOption:
			c.disabled = true
		case reportOption:
			c.reports = c.reports || o.report != nil
		case keyOption:
			key, hasKey = o.key, true
		case resumeOption:
			if c.stream.fromServer() {
				c.resume = &resumption{resumeOption: o}
			}
		}
	}
	if set := r.set.Load(); c.set != set || c.asked != fullMethod {
		m := set.lookup(fullMethod)
		c.set, c.asked, c.method = set, m.asked, m
		r.logUnusable(c.method)
	} else if !c.work && c.method.declared.stale() {
		c.method = set.lookup(fullMethod)
	}
	if c.work && c.method.misnamed {
		c.recycle()
		return nil, checkWork(ctx, fullMethod, false, nil)
	}
	c.policy, c.source = c.method.policy, c.method.source
	c.idempotency, c.idemSource = c.method.idempotency, c.method.idemSource
	if c.work {
		c.beWork()
	}
	c.started = now()
	if mc := c.method.config; mc != nil && mc.waitForReady != nil && !c.failFastSaid() {
		c.waitReady = *mc.waitForReady
	}
	if edits > 0 || c.method.askFirst {
		c.consultResolver()
	}
	refused := c.resume.check()
	if edits > 0 && refused == nil {
		refused = c.edit()
	}
	if refused != nil {
		c.refuse(refused)
		c.recycle()
		return nil, refused
	}
	if hasKey || c.idempotency == Keyed {
		c.sendKey(key)
	}
	if subtrees.Load() {
		c.serve()
	}
	if c.policy.Timeout > 0 {
		c.due = earlier(c.due, c.started.time(time.Now()).Add(c.policy.Timeout))
	}
	if c.policy.hedges() && !c.work && (c.stream == nil || c.stream.fromServer()) {
		c.hedging, c.ended = c.mayHedge(), time.Time{}
	}
	c.join()
	return c, nil
}

// join begins the span and counts the call in, last of all, because from here
// on it must be closed. What is the user's and runs here (a tracer, an
// [EventSink], the function that makes a budget) may panic: then the call is
// over before its first attempt.
func (c *call) join() {
	joined := false
	defer func() {
		if joined {
			return
		}
		defer c.endTrace(codes.Internal, true)
		c.refuse(status.Error(codes.Internal, "grpcretry: the call panicked"))
	}()
	c.beginTrace()
	c.observed = c.reports || len(c.r.hooks) > 0 || c.trace.recording
	c.target = c.r.targets.enter(c.dialed(), c.cc)
	c.budget = c.method.child.enter(c.target)
	joined = true
}

// refuse tells the caller's destinations of an end before the first attempt.
func (c *call) refuse(err error) {
	name := c.dialed()
	if c.cc != nil {
		name = c.cc.CanonicalTarget()
	}
	c.target, c.dest = &target{name: name}, newDestinations(nil)
	c.handOver(err)
}

// dialed is the name under which the call's target is kept.
func (c *call) dialed() string {
	switch {
	case c.work:
		return c.method.work
	case c.cc != nil:
		return c.cc.Target()
	}
	return ""
}

// beWork leaves what only RPCs follow: policies of service configs and .protos.
func (c *call) beWork() {
	if m := c.method; m.source == SourceProto || m.source == SourceServiceConfig || m.timeoutSource == SourceServiceConfig {
		c.policy, c.source = builtinPolicy, SourceDefault
	}
	if c.idempotency == Inherit {
		c.idempotency, c.idemSource = Idempotent, SourceDefault
	}
}

// edit applies the call's own edits to a copy of the policy in force.
func (c *call) edit() error {
	p := *c.policy
	f := faults{where: "WithCallPolicy: "}
	p.Idempotency = c.idempotency
	hedge := p.Hedge
	for _, o := range c.opts {
		if o, ok := o.(callPolicyOption); ok {
			if o.edit == nil {
				f.add("callback is nil, want a function")
				continue
			}
			o.edit(&p)
		}
	}
	checked := p
	if p.Hedge == hedge && p.Idempotency == c.idempotency {
		checked.Idempotency = Inherit // what was in force together stays so, without hedges
	}
	checked.validate(&f)
	if err := f.err(); err != nil {
		return status.Error(codes.Internal, err.Error())
	}
	if p.Idempotency != Inherit && p.Idempotency != c.idempotency {
		c.idempotency, c.idemSource = p.Idempotency, SourceCall
	}
	p = p.withDefaults()
	c.policy, c.source = &p, SourceCall
	return nil
}

// sendKey puts the idempotency key into the metadata of every attempt. A key
// of the caller's own stays.
func (c *call) sendKey(key string) {
	if md, ok := metadata.FromOutgoingContext(c.ctx); ok && len(md.Get(keyHeader)) > 0 {
		return
	}
	if key == "" {
		key = rand.Text()
	}
	c.base = metadata.AppendToOutgoingContext(c.base, keyHeader, key)
}
