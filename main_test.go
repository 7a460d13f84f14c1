package grpcretry

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails the package if any test leaves a goroutine behind: a call
// that outlives its caller is a leak that only shows in production.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
