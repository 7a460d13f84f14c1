package grpcretry

import (
	"context"
	"errors"
	"math"
	"net"
	"reflect"
	"slices"
	"strconv"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// destinations are what one attempt lets grpc write to. An attempt that was
// given up can still write, so no other attempt may share them.
type destinations struct {
	peer    peer.Peer
	header  metadata.MD
	trailer metadata.MD
	probe   *probe // nil for work, of which grpc knows nothing

	opts   []grpc.CallOption
	form   optionsForm
	inline [6]grpc.CallOption // the attempt's own, and grpc.StaticMethod
}

// unwritten is what a peer destination holds before grpc writes to it. The zero
// Peer will not do: a transport may have neither address nor security to show.
var unwritten net.Addr = new(net.IPAddr)

func newDestinations(p *probe) *destinations {
	return &destinations{peer: peer.Peer{Addr: unwritten}, probe: p}
}

func (d *destinations) sawPeer() bool { return d.peer.Addr != unwritten }

// seenPeer is the peer that grpc wrote, the zero Peer if it wrote none.
func (d *destinations) seenPeer() peer.Peer {
	if !d.sawPeer() {
		return peer.Peer{}
	}
	return d.peer
}

// probe is an attempt's OnFinish. Once grpc has ended the attempt, and no other
// with the same options, the next can have it, because it notes everything
// atomically: first is written by whoever was first to count a failure, and read
// only through failure.
type probe struct {
	option   grpc.OnFinishCallOption
	ends     atomic.Uint32         // how many attempts grpc has ended
	earlier  uint32                // of these, before this attempt
	failure  atomic.Pointer[error] // how this one failed, as grpc saw it
	failures atomic.Uint32         // how often: an interceptor further in may call again
	first    error                 // room for the first
}

// optionsForm says whether options are the same from call to call.
type optionsForm uint8

const (
	optionsVary   optionsForm = iota
	optionsOwn                // the attempt's own, and no other
	optionsStatic             // these and grpc.StaticMethod, which generated code passes
)

func newProbe() *probe {
	p := new(probe)
	p.option.OnFinish = p.finish
	return p
}

// finish is what grpc calls. It has written to the destinations by then, if it
// does at all.
func (p *probe) finish(err error) {
	if err != nil {
		failure := &p.first
		if p.failures.Add(1) > 1 {
			failure = new(error)
		}
		*failure = err
		p.failure.Store(failure)
	}
	p.ends.Add(1)
}

// ended reports whether grpc is done with the attempt, and with its destinations.
func (p *probe) ended() bool { return p.ends.Load() != p.earlier }

// endedOnce reports whether it ended no more than this one with these options.
func (p *probe) endedOnce() bool { return p.ends.Load() == p.earlier+1 }

// renew prepares the probe for another attempt.
func (p *probe) renew() {
	p.earlier = p.ends.Load()
	if p.failures.Load() > 0 {
		p.failure.Store(nil)
		p.first = nil
		p.failures.Store(0)
	}
}

// proves reports whether a missing peer proves that err came from an attempt
// which never left the client: grpc itself must have ended this very attempt
// with this very error. It proves nothing where an interceptor further in drops
// call options, answers by itself, or had another try by other means.
func (p *probe) proves(err error) bool {
	failure := p.failure.Load()
	return failure != nil && onlyWraps(err, *failure)
}

// onlyWraps reports whether err is cause with nothing but text around it.
func onlyWraps(err, cause error) bool {
	for ; err != nil; err = errors.Unwrap(err) {
		if reflect.ValueOf(err).Comparable() && err == cause { //nolint:errorlint // one layer after the other; errors.Is would also look into joined errors
			return true
		}
	}
	return false
}

// arrange gives the attempt destinations. Those of a failed attempt stay its
// own, but its probe is handed on if grpc has ended it, once.
func (c *call) arrange() {
	d := c.own
	if d == nil {
		d = newDestinations(nil)
		if last := c.dest; last != nil && last.probe != nil && last.probe.endedOnce() {
			d.probe = last.probe
			d.probe.renew()
		}
	}
	c.dest, c.own = d, nil
}

// options are the caller's call options without the destinations and OnFinish,
// which the call serves itself at its end, and with the attempt's own.
func (c *call) options() []grpc.CallOption {
	d := c.dest
	form := c.optionsForm()
	if form != optionsVary && form == d.form {
		return d.opts // as they were for the call before
	}
	d.form = form
	out := append(d.inline[:0], c.method.extra...)
	for _, o := range c.opts {
		if len(c.method.extra) > 0 && c.method.config.outbids(o) {
			continue
		}
		switch o.(type) {
		case grpc.HeaderCallOption, grpc.TrailerCallOption, grpc.PeerCallOption, grpc.OnFinishCallOption,
			callPolicyOption, withoutRetryOption, reportOption, keyOption, resumeOption:
			continue
		}
		out = append(out, o)
	}
	out = append(out, takenOption{}, grpc.PeerCallOption{PeerAddr: &d.peer}, grpc.TrailerCallOption{TrailerAddr: &d.trailer})
	if c.header {
		out = append(out, grpc.HeaderCallOption{HeaderAddr: &d.header})
	}
	if d.probe == nil {
		d.probe = newProbe()
	}
	out = append(out, d.probe.option)
	d.opts = slices.Clip(out) // who appends to it further in makes a copy
	return d.opts
}

func (c *call) optionsForm() optionsForm {
	switch {
	case c.method.extra != nil:
	case len(c.opts) == 0:
		return optionsOwn
	case len(c.opts) == 1:
		if _, ok := c.opts[0].(grpc.StaticMethodCallOption); ok {
			return optionsStatic
		}
	}
	return optionsVary
}

// checkOptions finds out, at a success, that the call options of its attempt did
// not reach grpc. Nothing rests on it but a line in the log.
func (c *call) checkOptions() {
	if c.cc != nil && !c.dest.sawPeer() && !c.dest.probe.ended() && c.target.swallowed.CompareAndSwap(false, true) {
		c.r.logSwallowed(c)
	}
}

// turnAway leaves the destinations of an attempt that grpc has not ended: an
// interceptor further in did not wait for it, so that it may still write to
// them, or keeps them from it.
func (c *call) turnAway() {
	if c.cc != nil && !c.dest.probe.ended() {
		c.dest = newDestinations(newProbe())
	}
}

// handOver fills the caller's reports, gives it the header, trailer and peer of
// the attempt that is returned, and runs its OnFinish: each once per call, as
// without retries.
func (c *call) handOver(err error) {
	if !c.copies && !c.reports {
		return
	}
	for _, o := range c.opts {
		switch o := o.(type) {
		case grpc.HeaderCallOption:
			give(o.HeaderAddr, c.dest.header)
		case grpc.TrailerCallOption:
			give(o.TrailerAddr, c.dest.trailer)
		case grpc.PeerCallOption:
			give(o.PeerAddr, c.dest.seenPeer())
		case reportOption:
			if o.report != nil {
				*o.report = c.result()
			}
		}
	}
	for _, o := range c.opts {
		if o, ok := o.(grpc.OnFinishCallOption); ok && o.OnFinish != nil {
			o.OnFinish(err)
		}
	}
}

func give[T any](to *T, value T) {
	if to != nil {
		*to = value
	}
}

// withPreviousAttempts sets the attempt header, leaving the caller's metadata as it is.
func withPreviousAttempts(ctx context.Context, n int) context.Context {
	md, ok := metadata.FromOutgoingContext(ctx) // a copy
	if !ok && n <= len(previousAttempts) {
		return &metadataContext{Context: ctx, outgoing: previousAttempts[n-1]}
	}
	if !ok {
		md = make(metadata.MD, 1)
	}
	md[attemptsHeader] = []string{strconv.Itoa(min(n, math.MaxInt32))}
	return metadata.NewOutgoingContext(ctx, md)
}

// metadataContext is a context with outgoing metadata that was made beforehand.
type metadataContext struct {
	context.Context
	outgoing context.Context // holds nothing but metadata
}

func (c *metadataContext) Value(key any) any {
	if v := c.outgoing.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// previousAttempts are the attempt headers of the retries that most calls make.
var previousAttempts = func() (made [4]context.Context) {
	for i := range made {
		md := metadata.MD{attemptsHeader: {strconv.Itoa(i + 1)}}
		made[i] = metadata.NewOutgoingContext(context.Background(), md)
	}
	return made
}()
