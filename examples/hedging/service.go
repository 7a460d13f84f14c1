package main

import (
	"fmt"
	"math/rand/v2"
	"time"

	"example.com/grpcretry/internal/testsrv"
)

// season is how the service does for a while: it takes the usual time for a reply,
// but for one in every so many the long time.
type season struct {
	title       string
	usual, long time.Duration
	oneIn       int // 0: none takes the long time
}

const tail = 20

var (
	usual = season{fmt.Sprintf("The service takes 10 ms, and 100 ms for one reply in %d", tail), 10 * time.Millisecond, 100 * time.Millisecond, tail}
	slow  = season{"It takes 100 ms for every reply", 100 * time.Millisecond, 0, 0}
	worse = season{fmt.Sprintf("It takes 100 ms, and a second for one reply in %d", tail), 100 * time.Millisecond, time.Second, tail}
)

// react is the service. How long a reply takes, give or take a tenth, depends on
// nothing but the seed, the number of the call and that of the attempt: whoever
// comes first, each call meets the same.
func (s season) react(seed uint64) testsrv.Func {
	return func(_ int, a testsrv.Attempt) testsrv.Step {
		attempt := uint64(0)
		if previous := a.Metadata.Get("grpc-previous-rpc-attempts"); len(previous) == 1 {
			attempt = uint64(previous[0][0] - '0') // of three attempts at most
		}
		chance := rand.New(rand.NewPCG(seed, uint64(a.Requests[0].GetNumber())<<2|attempt))
		takes := s.usual
		if s.oneIn > 0 && chance.IntN(s.oneIn) == 0 {
			takes = s.long
		}
		return testsrv.Step{Delay: time.Duration(float64(takes) * (0.9 + 0.2*chance.Float64()))}
	}
}
