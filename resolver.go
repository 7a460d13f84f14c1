package grpcretry

import (
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// resolverPolicy is a retryPolicy of a ClientConn's service config as a Policy.
type resolverPolicy struct {
	origin any  // grpc's own pointer to it: another one means another config
	named  bool // the config names the method or its service, not just {}
	policy Policy
}

// consultResolver asks the ClientConn's service config, once and only when the
// answer is needed: a call that succeeds at once never does.
func (c *call) consultResolver() {
	if c.consulted || c.cc == nil || !c.method.follow {
		return
	}
	mc := c.cc.GetMethodConfig(c.method.name)
	if c.made == 0 && mc.RetryPolicy == nil && mc.Timeout == nil && mc.WaitForReady == nil {
		return // perhaps not yet resolved: ask again after the attempt
	}
	c.consulted = true
	if mine := c.method.config; mc.WaitForReady != nil && (mine == nil || mine.waitForReady == nil) && !c.failFastSaid() {
		c.waitReady = *mc.WaitForReady
	}
	if c.source == SourceProto && c.method.timeoutSource == SourceProto && (mc.RetryPolicy != nil || c.leftOut()) {
		c.due = time.Time{} // it goes with the policy that is replaced
	}
	if mc.Timeout != nil && *mc.Timeout >= 0 {
		// grpc puts this timeout on every attempt; its owner meant the call.
		c.due = earlier(c.due, c.started.time(time.Now()).Add(*mc.Timeout))
	}
	retry := mc.RetryPolicy
	p := c.method.resolved.Load()
	switch {
	case retry == nil && (!c.method.resolver || !c.leftOut()): // it has nothing to say, or nothing that counts
		return
	case retry == nil:
		p = &resolverPolicy{policy: Policy{MaxAttempts: 1, Timeout: c.method.configTimeout()}.withDefaults()}
	case p == nil || p.origin != any(retry):
		// What the config says of a method that it cannot name is what it says
		// of all; asked before and after, lest an update come in between.
		wild := c.cc.GetMethodConfig("/").RetryPolicy
		named := retry != wild && c.cc.GetMethodConfig(c.method.name).RetryPolicy == retry
		var set []codes.Code
		for code, ok := range retry.RetryableStatusCodes {
			if ok {
				set = append(set, code)
			}
		}
		p = &resolverPolicy{origin: retry, named: named, policy: a6Policy(
			retry.MaxAttempts, retry.InitialBackoff, retry.MaxBackoff, retry.BackoffMultiplier, Codes(set...))}
		p.policy.Timeout = c.method.configTimeout()
		c.method.resolved.Store(p)
	}
	edited := c.source == SourceCall
	policy, idempotency, idemSource := c.policy, c.idempotency, c.idemSource
	if edited { // before there was a config: once more, of what the config says
		c.policy, c.source = c.method.policy, c.method.source
		c.idempotency, c.idemSource = c.method.idempotency, c.method.idemSource
	}
	c.follow(p)
	if edited && c.edit() != nil {
		c.policy, c.source, c.idempotency, c.idemSource = policy, SourceCall, idempotency, idemSource
	}
}

// follow puts p in force as far as nothing in code says otherwise.
func (c *call) follow(p *resolverPolicy) {
	if c.method.resolver {
		c.policy, c.source = &p.policy, SourceResolver
	}
	if c.method.resolverIdem && p.named && c.idempotency != Keyed {
		c.idempotency, c.idemSource = Idempotent, SourceResolver
	}
}

// leftOut reports whether the service config has an entry for the method that
// takes it out of a less specific entry with a retryPolicy. It is asked when
// the entry for the method has none.
func (c *call) leftOut() bool {
	service := c.method.name[:strings.LastIndexByte(c.method.name, '/')+1]
	return c.cc.GetMethodConfig(service).RetryPolicy != nil || c.cc.GetMethodConfig("/").RetryPolicy != nil
}

// configTimeout is the timeout of the service config given in code; 0: none.
func (m *method) configTimeout() time.Duration {
	if m.config == nil {
		return 0
	}
	return m.config.timeout
}

// a6Policy is the retryPolicy of gRFC A6: its jitter is 20% either way, after
// the cap. RESOURCE_EXHAUSTED, where the config lists it, is retried like any
// other code: without a hint, and as soon.
func a6Policy(attempts int, initial, most time.Duration, multiplier float64, set CodeSet) Policy {
	return Policy{
		MaxAttempts: attempts,
		Backoff: Backoff{
			Base: min(initial, most), Max: most, Multiplier: multiplier, Jitter: ProportionalJitter(0.2),
			Overload: time.Nanosecond, // 0 would be a second
		},
		Codes:      set,
		RetryQuota: true,
	}.withDefaults()
}

// failFastSaid reports whether the caller chose wait-for-ready or its opposite.
func (c *call) failFastSaid() bool {
	return slices.ContainsFunc(c.opts, func(o grpc.CallOption) bool {
		_, ok := o.(grpc.FailFastCallOption)
		return ok
	})
}
