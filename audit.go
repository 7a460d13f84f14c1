package grpcretry

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// AuditEntry is a method that was called and is not known to be idempotent.
type AuditEntry struct {
	// Method is the full method. It is empty in the one entry that stands for
	// all methods beyond the 1024 which are told apart.
	Method string
	// Idempotency is Inherit, where nobody said anything, or NotIdempotent,
	// and then Source says who.
	Idempotency Idempotency
	Source      Source
	// Resolver tells that calls on a ClientConn whose service config names the
	// method in a retryPolicy are an exception: there it counts as idempotent.
	Resolver bool
	// Refused counts the retries that were refused for that reason since the
	// Retrier was made; of attempts that never reached a server none is.
	Refused int64
	// File is the .proto that declares the method, as far as the program knows
	// it, and Declare the line which, within the method there, would declare it
	// idempotent. Pattern is the option that does so in the client. All are
	// empty where somebody said that the method is not idempotent.
	File, Declare, Pattern string
	// HTTPGet tells that the .proto maps the method to HTTP GET, which
	// [WithHTTPGetIdempotent] would take as a declaration.
	HTTPGet bool
}

// String is the entry on one line.
func (a AuditEntry) String() string {
	if a.Method == "" {
		return fmt.Sprintf("all other methods: retries refused: %d", a.Refused)
	}
	refused := fmt.Sprintf("%s: retries refused: %d", a.Method, a.Refused)
	if a.Pattern == "" {
		return fmt.Sprintf("%s, because it is not idempotent (from %v)", refused, a.Source)
	}
	file := "its .proto"
	if a.File != "" {
		file = a.File
	}
	get := ""
	if a.HTTPGet {
		get = "; it is an HTTP GET, which WithHTTPGetIdempotent() takes as idempotent"
	}
	return fmt.Sprintf("%s; if it is idempotent, add %q to it in %s, or pass %s%s", refused, a.Declare, file, a.Pattern, get)
}

// Audit lists the methods that were called since the Retrier was made and that
// the policies in force do not know to be idempotent, those with the most refused
// retries first. It is for a look now and then at what a line in a .proto would
// gain.
func (r *Retrier) Audit() []AuditEntry {
	set := r.set.Load()
	var entries []AuditEntry
	for name, refused := range set.memories.called() {
		m := (*set.cache.Load())[name]
		if m == nil || m.declared.stale() {
			m = set.resolve(name)
		}
		work := !strings.HasPrefix(name, "/")
		if m.idempotency.repeatable() || work && m.idempotency == Inherit {
			continue // work may run again unless somebody says otherwise
		}
		e := AuditEntry{
			Method: m.name, Idempotency: m.idempotency, Source: m.idemSource, Resolver: m.resolverIdem, Refused: refused,
		}
		if m.idempotency == Inherit {
			e.File, e.HTTPGet = m.declared.file, m.declared.get
			e.Declare = "option idempotency_level = IDEMPOTENT;"
			e.Pattern = fmt.Sprintf("grpcretry.WithIdempotent(%q)", m.rpc)
		}
		entries = append(entries, e)
	}
	slices.SortFunc(entries, func(a, b AuditEntry) int {
		return cmp.Or(cmp.Compare(b.Refused, a.Refused), strings.Compare(a.Method, b.Method))
	})
	if n := set.memories.others.refused.Load(); n > 0 {
		entries = append(entries, AuditEntry{Refused: n})
	}
	return entries
}
