package grpcretry

import (
	"sync"
	"sync/atomic"
)

// methodMemory is what is remembered of one method whatever becomes of its
// policies: what the log has told of it, and how fast it is.
type methodMemory struct {
	// declined is set once the log has told that a retry was refused for want
	// of idempotency.
	declined atomic.Bool
	// unusable is set once the log has told that the .proto declares a policy
	// which cannot be followed.
	unusable atomic.Bool
	// unhedged is set once the log has told that the policy hedges and the
	// calls are not hedged.
	unhedged atomic.Bool
	refused  atomic.Int64 // retries, for want of idempotency; for the audit
	givenUp  throttledLine
	// latency is made with the first call that asks for it.
	latency atomic.Pointer[latencies]
}

// methodMemories are what a Retrier remembers of its methods, over changes of
// policy. The zero value is ready.
type methodMemories struct {
	others methodMemory // of all methods beyond maxMethodsKept

	mu     sync.Mutex
	byName map[string]*methodMemory
}

func (m *methodMemories) of(name string) *methodMemory {
	m.mu.Lock()
	defer m.mu.Unlock()
	if known := m.byName[name]; known != nil {
		return known
	}
	if len(m.byName) >= maxMethodsKept {
		return &m.others
	}
	if m.byName == nil {
		m.byName = map[string]*methodMemory{}
	}
	made := new(methodMemory)
	m.byName[name] = made
	return made
}

// knows reports whether something of that name was called.
func (m *methodMemories) knows(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.byName[name] != nil
}

// called gives what was called, under the names by which it was asked for, with
// the number of retries that were refused for want of idempotency.
func (m *methodMemories) called() map[string]int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make(map[string]int64, len(m.byName))
	for name, known := range m.byName {
		all[name] = known.refused.Load()
	}
	return all
}
