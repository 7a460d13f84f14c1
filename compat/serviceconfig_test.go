package compat_test

import (
	"testing"

	"google.golang.org/grpc"

	"example.com/grpcretry/internal/configdocs"
	"example.com/grpcretry/internal/configdocs/compare"
)

// What docs/service-config.md says of gRPC must be true of the newest version
// too; the root's tests ask the oldest.
func TestServiceConfigWithNewestGRPC(t *testing.T) {
	if grpc.Version != "1.85.0" {
		t.Errorf("gRPC %s is linked, want 1.85.0", grpc.Version)
	}
	docs, err := configdocs.Load("../testdata/serviceconfig.txt")
	if err != nil {
		t.Fatal(err)
	}
	t.Run("documents", func(t *testing.T) { compare.Documents(t, docs) })
	t.Run("attempts", func(t *testing.T) { compare.Attempts(t, docs) })
	t.Run("throttling", compare.Throttling)
}
