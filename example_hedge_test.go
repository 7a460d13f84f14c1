package grpcretry_test

import (
	"fmt"
	"log"

	"example.com/grpcretry"
)

// A policy that hedges follows the method's own latency.
func ExampleHedge() {
	retry, err := grpcretry.New(
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Get", grpcretry.Policy{
			Idempotency: grpcretry.Idempotent,
			Hedge:       grpcretry.Hedge{MaxAttempts: 3, Quantile: 0.95},
		}),
	)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(retry.Explain("/testsrv.v1.TestService/Get").Policy.Hedge)
	// Output: another one when the latest has taken longer than 95% of the method's recent calls
}
