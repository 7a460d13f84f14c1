package grpcretry_test

import (
	"fmt"
	"log"
	"time"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry"
)

// A policy that hedges follows the method's own latency.
func ExampleHedge() {
	retry, err := grpcretry.New(
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Get", grpcretry.Policy{
			Idempotency: grpcretry.Idempotent,
			Hedge:       grpcretry.Hedge{MaxAttempts: 3, Quantile: 0.9},
		}),
	)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(retry.Explain("/testsrv.v1.TestService/Get").Policy.Hedge)
	// Output: another one when the latest has taken longer than 90% of the method's recent calls
}

// One reply in twenty is slow, and a single server may be broken.
func ExampleHedge_fields() {
	retry, err := grpcretry.New(
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Get", grpcretry.Policy{
			Idempotency: grpcretry.Idempotent,
			Hedge: grpcretry.Hedge{
				MaxAttempts: 2,
				Quantile:    0.9,
				Delay:       5 * time.Millisecond, // at least
				NonFatal:    grpcretry.Codes(codes.Unavailable, codes.Internal),
			},
		}),
	)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(retry.Explain("/testsrv.v1.TestService/Get").Policy.Hedge)
	// Output: another one when the latest has taken longer than 90% of the method's recent calls, but no less than 5ms
}

// A service that is built for twice its load can have all attempts sent at once.
// The default budget ends that after ten hedges that lost.
func ExampleHedge_atOnce() {
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{
		HedgeCapacity: 1 << 19,
		HedgeCost:     1. / 64, // so the funds last for 33 million hedges that lose
	})
	if err != nil {
		log.Fatal(err)
	}
	retry, err := grpcretry.New(
		grpcretry.WithBudget(budget),
		grpcretry.WithMethodPolicy("testsrv.v1.TestService/Get", grpcretry.Policy{
			Idempotency: grpcretry.Idempotent,
			Hedge:       grpcretry.Hedge{MaxAttempts: 2, AtOnce: true},
		}),
	)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(retry.Explain("/testsrv.v1.TestService/Get").Policy.Hedge)
	// Output: all at once
}

// A client that hedges one call in five pays for all of them: a hedge costs 5,
// and the four calls that needed none earn 1.25 each.
func ExampleBudgetConfig_hedges() {
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{
		HedgeCapacity: 25,   // five hedges may lose in a row
		HedgeDeposit:  1.25, // then one for every four calls that needed none
	})
	if err != nil {
		log.Fatal(err)
	}
	granted := 0
	for range 10 {
		if _, ok := budget.Reserve(grpcretry.CostHedge); ok {
			granted++
		}
	}
	for range 4 {
		budget.Record(grpcretry.OutcomeHedgeUnneeded)
	}
	_, ok := budget.Reserve(grpcretry.CostHedge)
	fmt.Println(granted, "hedges granted, after four calls another one:", ok)
	// Output: 5 hedges granted, after four calls another one: true
}
