package grpcretry

import (
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"example.com/grpcretry/internal/testsrv/testpb"
)

// A pattern that matches nothing is a policy that is silently not in force, so
// every way of misspelling one must be told, with what was meant to be there.
func TestPatterns(t *testing.T) {
	const want = `want "pkg.Service/Method" or "pkg.Service/*"`
	for _, tt := range []struct {
		pattern string
		key     string
		fault   string
	}{
		{"/testsrv.v1.TestService/Get", get, ""},
		{"testsrv.v1.TestService/Get", get, ""},
		{"testsrv.v1.TestService/*", "/testsrv.v1.TestService/", ""},
		{"/testsrv.v1.TestService/*", "/testsrv.v1.TestService/", ""},
		{"unknown.v1.Service/AnyMethod", "/unknown.v1.Service/AnyMethod", ""},
		{"unknown.v1.Service/*", "/unknown.v1.Service/", ""},
		{"NoPackage/Method", "/NoPackage/Method", ""},

		{"", "", "empty pattern, " + want},
		{"*", "", "pattern for every method, " + want + ", or WithDefaultPolicy for all of them"},
		{"/*", "", "pattern for every method, " + want + ", or WithDefaultPolicy for all of them"},
		{"*/*", "", "pattern for every method, " + want + ", or WithDefaultPolicy for all of them"},
		{"/*/*", "", "pattern for every method, " + want + ", or WithDefaultPolicy for all of them"},
		{"/", "", "pattern without a service or a method, " + want},
		{"//", "", "pattern without a service or a method, " + want},
		{"pkg.Service", "", "pattern without a service or a method, " + want},
		{"/pkg.Service", "", "pattern without a service or a method, " + want},
		{"pkg.Service/", "", "pattern without a service or a method, " + want},
		{"/pkg.Service/", "", "pattern without a service or a method, " + want},
		{"//pkg.Service/M", "", "pattern without a service or a method, " + want},
		{"pkg.Service/M/", "", "malformed pattern, " + want},
		{"pkg.Service/M/N", "", "malformed pattern, " + want},
		{"pkg.*/M", "", "malformed pattern, " + want},
		{"pkg.Service/Get*", "", "malformed pattern, " + want},
		{"pkg.Service/**", "", "malformed pattern, " + want},
		{"pkg.Service/Get ", "", "malformed pattern, " + want},
		{" pkg.Service/Get", "", "malformed pattern, " + want},
		{"pkg.Service/Get\n", "", "malformed pattern, " + want},
		{"testsrv.v1.TestService/Gte", "",
			`service testsrv.v1.TestService has no method "Gte", want one of Append, Chat, Get, List, Put, Store, Sync, Take, Write`},
		{"testsrv.v1.TestService/get", "",
			`service testsrv.v1.TestService has no method "get", want one of Append, Chat, Get, List, Put, Store, Sync, Take, Write`},
		{"testsrv.v1.Request/Get", "", "testsrv.v1.Request is not a service, " + want},
		{"testsrv.v1.Request/*", "", "testsrv.v1.Request is not a service, " + want},
	} {
		key, err := parsePattern(tt.pattern)
		if key != tt.key || errText(err) != tt.fault {
			t.Errorf("%q: %q, %v\nwant %q, %s", tt.pattern, key, err, tt.key, tt.fault)
		}
	}
}

// The more specific word wins, and an Idempotency of Inherit asks the next. With
// a wrong precedence a method that its owner excluded is repeated after all.
func TestPrecedence(t *testing.T) {
	const service = "testsrv.v1.TestService/*"
	attempts := func(n int) Policy { return Policy{MaxAttempts: n} }
	idem := func(n int, i Idempotency) Policy { return Policy{MaxAttempts: n, Idempotency: i} }
	type opts = []Option
	for _, tt := range []struct {
		name       string
		opts       opts
		method     string
		attempts   int
		source     Source
		idem       Idempotency
		idemSource Source
	}{
		{"nothing said, nothing declared", nil, write, 3, SourceDefault, Inherit, SourceDefault},
		{"nothing said, NO_SIDE_EFFECTS declared", nil, get, 3, SourceDefault, Idempotent, SourceProto},
		{"nothing said, IDEMPOTENT declared", nil, put, 3, SourceDefault, Idempotent, SourceProto},
		{"default", opts{WithDefaultPolicy(attempts(4))}, write, 4, SourceDefault, Inherit, SourceDefault},
		{"service before default", opts{WithDefaultPolicy(attempts(4)), WithMethodPolicy(service, attempts(5))}, write, 5, SourceService, Inherit, SourceDefault},
		{"exact before both", opts{WithMethodPolicy(write, attempts(6)), WithDefaultPolicy(attempts(4)), WithMethodPolicy(service, attempts(5))}, write, 6, SourceMethod, Inherit, SourceDefault},
		{"exact for another method", opts{WithMethodPolicy(put, attempts(6)), WithMethodPolicy(service, attempts(5))}, write, 5, SourceService, Inherit, SourceDefault},
		{"another service", opts{WithMethodPolicy("testsrv.v1.DeclaredService/*", attempts(5))}, write, 3, SourceDefault, Inherit, SourceDefault},
		{"a policy replaces the wider one as a whole", opts{WithMethodPolicy(write, Policy{}), WithMethodPolicy(service, attempts(5))}, write, 3, SourceMethod, Inherit, SourceDefault},

		{"idempotency of the exact policy", opts{WithMethodPolicy(write, idem(6, Idempotent))}, write, 6, SourceMethod, Idempotent, SourceMethod},
		{"inherited from the service", opts{WithMethodPolicy(write, attempts(6)), WithMethodPolicy(service, idem(5, Keyed))}, write, 6, SourceMethod, Keyed, SourceService},
		{"inherited from the default", opts{WithMethodPolicy(write, attempts(6)), WithMethodPolicy(service, attempts(5)), WithDefaultPolicy(idem(4, Idempotent))}, write, 6, SourceMethod, Idempotent, SourceDefault},
		{"inherited from the .proto", opts{WithMethodPolicy(get, attempts(6)), WithMethodPolicy(service, attempts(5)), WithDefaultPolicy(attempts(4))}, get, 6, SourceMethod, Idempotent, SourceProto},
		{"withdrawn for the method", opts{WithMethodPolicy(get, idem(6, NotIdempotent))}, get, 6, SourceMethod, NotIdempotent, SourceMethod},
		{"withdrawn for the service", opts{WithMethodPolicy(service, idem(5, NotIdempotent))}, get, 5, SourceService, NotIdempotent, SourceService},
		{"withdrawn by default", opts{WithDefaultPolicy(idem(4, NotIdempotent))}, get, 4, SourceDefault, NotIdempotent, SourceDefault},

		{"WithIdempotent, exact", opts{WithIdempotent(write)}, write, 3, SourceDefault, Idempotent, SourceMethod},
		{"WithIdempotent, service", opts{WithIdempotent(service)}, write, 3, SourceDefault, Idempotent, SourceService},
		{"WithIdempotent leaves the policy alone", opts{WithIdempotent(write), WithMethodPolicy(service, attempts(5))}, write, 5, SourceService, Idempotent, SourceMethod},
		{"WithIdempotent of the service, withdrawn for the method", opts{WithIdempotent(service), WithMethodPolicy(write, idem(6, NotIdempotent))}, write, 6, SourceMethod, NotIdempotent, SourceMethod},
		{"WithIdempotent of the method, withdrawn for the service", opts{WithIdempotent(write), WithMethodPolicy(service, idem(5, NotIdempotent))}, write, 5, SourceService, Idempotent, SourceMethod},
		{"WithIdempotent of the service, withdrawn by default", opts{WithIdempotent(service), WithDefaultPolicy(idem(4, NotIdempotent))}, write, 4, SourceDefault, Idempotent, SourceService},
		{"WithIdempotent says what the policy says", opts{WithIdempotent(write), WithMethodPolicy(write, idem(6, Idempotent))}, write, 6, SourceMethod, Idempotent, SourceMethod},
		{"several patterns in one", opts{WithIdempotent(put, write)}, write, 3, SourceDefault, Idempotent, SourceMethod},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newRetrier(t, tt.opts...).Explain(tt.method)
			if e.Method != tt.method || e.Policy.MaxAttempts != tt.attempts || e.PolicySource != tt.source ||
				e.Policy.Idempotency != tt.idem || e.IdempotencySource != tt.idemSource {
				t.Errorf("%s: %d attempts from %v, %v from %v; want %d from %v, %v from %v", e.Method,
					e.Policy.MaxAttempts, e.PolicySource, e.Policy.Idempotency, e.IdempotencySource,
					tt.attempts, tt.source, tt.idem, tt.idemSource)
			}
		})
	}
}

// Only what the .proto says of this very method counts as declared. A name that
// leads elsewhere must not make a write repeatable.
func TestDeclaredIdempotency(t *testing.T) {
	for method, want := range map[string]bool{
		testpb.TestService_Get_FullMethodName:    true,
		testpb.TestService_Put_FullMethodName:    true,
		testpb.TestService_Write_FullMethodName:  false,
		testpb.TestService_List_FullMethodName:   true,
		testpb.TestService_Take_FullMethodName:   false,
		testpb.TestService_Store_FullMethodName:  true,
		testpb.TestService_Append_FullMethodName: false,
		testpb.TestService_Sync_FullMethodName:   true,
		testpb.TestService_Chat_FullMethodName:   false,

		"/testsrv.v1.TestService/Gone":     false,
		"/testsrv.v1.TestService/get":      false,
		"/testsrv.v1.TestService/Get/":     false,
		"/testsrv.v1.TestService/":         false,
		"/testsrv.v1/TestService.Get":      false,
		"/testsrv/v1.TestService.Get":      false,
		"/testsrv.v1.TestService.Get":      false,
		"//testsrv.v1.TestService/Get":     false,
		"/testsrv.v1/TestService":          false,
		"/testsrv.v1.Request/text":         false,
		"/gone.v1.Service/Get":             false,
		"/google.protobuf/MethodOptions":   false,
		"/google.protobuf.MethodOptions/.": false,
		"/":                                false,
		"//":                               false,
		"/.":                               false,
	} {
		if got := declarationOf(method, false).idempotency == Idempotent; got != want {
			t.Errorf("%s: %v, want %v", method, got, want)
		}
	}
}

// Full methods come from callers, in proxies even from strangers. Whatever they
// are, looking one up gives a policy, the same for each form of the same name.
func TestLookupOfAnyName(t *testing.T) {
	r := newRetrier(t, WithMethodPolicy("a.B/C", Policy{MaxAttempts: 7}), WithMethodPolicy("a.B/*", Policy{MaxAttempts: 6}))
	for name, want := range map[string]int{
		"/a.B/C": 7, "a.B/C": 7, "/a.B/D": 6, "/a.B/": 6, "/a.B": 3, "": 3, "/": 3, "x": 3, "//a.B/C": 3, "/a.B/C/": 3, "/x/a.B/C": 3,
	} {
		m := r.set.Load().lookup(name)
		if m.policy.MaxAttempts != want {
			t.Errorf("%q: %d attempts, want %d", name, m.policy.MaxAttempts, want)
		}
		called := "/" + strings.TrimPrefix(name, "/")
		if !strings.Contains(name, "/") {
			called = "/do/" + name // the name of work that Do repeats
		}
		if m.name != called || m.rpc != called[1:] {
			t.Errorf("%q is called %q and %q", name, m.name, m.rpc)
		}
		if again := r.set.Load().lookup(name); again != m {
			t.Errorf("%q was resolved twice", name)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.String(), rapid.StringMatching(`[/.a-zA-Z*]{0,40}`)).Draw(t, "name")
		if m := r.set.Load().resolve(name); m.policy == nil || !strings.HasPrefix(m.name, "/") {
			t.Fatalf("%q: %+v", name, m)
		}
		key, err := parsePattern(name)
		if (err == nil) != (strings.HasPrefix(key, "/") && strings.Count(key, "/") == 2) {
			t.Fatalf("pattern %q: %q, %v", name, key, err)
		}
	})
}

// A proxy whose callers make up method names must not grow without end, keep
// their long names alive, or slow down the methods that are really there.
func TestMethodCacheIsBounded(t *testing.T) {
	r := newRetrier(t)
	set := r.set.Load()
	known := set.lookup(get)
	suffix := strings.Repeat("x", 1<<10)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range 10_000 {
		m := set.lookup(fmt.Sprintf("/made.up.Service%d/%s", i, suffix))
		if m.policy.MaxAttempts != DefaultMaxAttempts || m.memory == nil {
			t.Fatalf("method %d: %+v", i, m)
		}
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if n := len(*set.cache.Load()); n != maxMethodsKept {
		t.Errorf("%d methods are kept, want %d", n, maxMethodsKept)
	}
	if n := len(set.memories.byName); n > maxMethodsKept {
		t.Errorf("what was told of %d methods is kept, want at most %d", n, maxMethodsKept)
	}
	// Each entry has two copies of a name of 1 KiB at most, and some 300 bytes beside.
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > maxMethodsKept*4<<10 {
		t.Errorf("10,000 made-up methods hold %d KiB", grown>>10)
	}
	if set.lookup(get) != known {
		t.Error("a method that was there before lost its place")
	}
	runtime.KeepAlive(r)
}

// Many goroutines meet a method for the first time at once: all must get the
// same entry, or what is learnt of the method is lost.
func TestLookupConcurrently(t *testing.T) {
	set := newRetrier(t).set.Load()
	var wg sync.WaitGroup
	found := make([][]*method, 50)
	for g := range found {
		wg.Go(func() {
			for i := range 100 {
				found[g] = append(found[g], set.lookup(fmt.Sprintf("/a.B/M%d", i)))
			}
		})
	}
	wg.Wait()
	for g := range found {
		for i, m := range found[g] {
			if m != found[0][i] {
				t.Fatalf("goroutines 0 and %d have different entries for %s", g, m.name)
			}
		}
	}
}
