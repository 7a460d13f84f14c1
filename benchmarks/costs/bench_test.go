package costs

import (
	"errors"
	"testing"

	"example.com/grpcretry/benchmarks/peers"
)

// BenchmarkUnary is the interceptor alone: BenchmarkUnary/peer=ours/outcome=ok.
func BenchmarkUnary(b *testing.B) { run(b, false) }

// BenchmarkCall is the real call: BenchmarkCall/peer=ours/size=100B.
func BenchmarkCall(b *testing.B) { run(b, true) }

func run(b *testing.B, endToEnd bool) {
	for _, p := range peers.All {
		for _, c := range Cases {
			if c.EndToEnd != endToEnd {
				continue
			}
			b.Run("peer="+p.Name+"/"+c.Bench, func(b *testing.B) {
				r, err := c.Start(p)
				if errors.Is(err, peers.ErrUnable) {
					b.Skip(err)
				} else if err != nil {
					b.Fatal(err)
				}
				defer r.Close()
				b.ReportAllocs()
				if c.Parallel > 1 {
					for b.Loop() {
						if err := r.Run(c.Parallel); err != nil {
							b.Fatal(err)
						}
					}
					return
				}
				call := r.call[0]
				for b.Loop() {
					if err := call(); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
