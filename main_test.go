package grpcretry

import (
	"io"
	"testing"

	"go.uber.org/goleak"
	"google.golang.org/grpc/grpclog"
)

// TestMain fails the package if any test leaves a goroutine behind: a call
// that outlives its caller is a leak that only shows in production.
func TestMain(m *testing.M) {
	// Servers that break the protocol make grpc complain, hundreds of times.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, io.Discard))
	goleak.VerifyTestMain(m)
}
