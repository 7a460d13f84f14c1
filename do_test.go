package grpcretry

import (
	"context"
	"testing"
)

// Work that succeeds at once must cost nothing: it may be as frequent as calls are.
func TestDoDoesNotAllocate(t *testing.T) {
	r := newRetrier(t)
	fn := func(context.Context) error { return nil }
	for _, name := range []string{"jobs/export", "export"} {
		if n := testing.AllocsPerRun(1000, func() {
			if err := r.Do(t.Context(), name, fn); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("Do(%q): %v allocations, want 0", name, n)
		}
	}
}
