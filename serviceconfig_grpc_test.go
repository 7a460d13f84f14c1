package grpcretry_test

import (
	"testing"

	"example.com/grpcretry/internal/configdocs"
	"example.com/grpcretry/internal/configdocs/compare"
)

// A team that moves its service config from gRPC to here must find the retries
// that it had. The nested module in compat does the same with another version of gRPC.
func TestServiceConfigLikeGRPC(t *testing.T) {
	docs, err := configdocs.Load("testdata/serviceconfig.txt")
	if err != nil {
		t.Fatal(err)
	}
	t.Run("attempts", func(t *testing.T) { compare.Attempts(t, docs) })
	t.Run("throttling", compare.Throttling)
}
