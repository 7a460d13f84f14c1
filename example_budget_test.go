package grpcretry_test

import (
	"fmt"
	"log/slog"
	"time"

	"example.com/grpcretry"
)

// A fleet of clients that call seldom: its outages are made of the retries that
// each client may make at once, so these are what to size.
func ExampleNewBudget() {
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{
		Capacity: 21,                                // three retries at the start: 3 * 7
		Deposit:  0.5,                               // then at most 0.5/7 = 7% of the calls that succeed
		Costs:    grpcretry.BudgetCosts{Timeout: 7}, // a server that hangs counts like one that fails
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	granted := 0
	for range 10 {
		if _, ok := budget.Reserve(grpcretry.CostTransient); ok {
			granted++
		}
	}
	fmt.Println(granted, "retries granted")
	// Output: 3 retries granted
}

// A client that must not lose a call when one of three servers dies, from its
// first second on: 64 calls in flight, 22 of them there, seven tokens for each.
func ExampleWithBudgetPerTarget() {
	newBudget := func(target string) grpcretry.Budget {
		budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{Capacity: 22 * 7})
		if err != nil {
			return nil // the default budget, then
		}
		return budget
	}
	retry, err := grpcretry.New(grpcretry.WithBudgetPerTarget(newBudget))
	fmt.Println(retry != nil, err)
	// Output: true <nil>
}

// The retryThrottling block of a service config, {"maxTokens": 10,
// "tokenRatio": 0.1}, as it was.
func ExampleNewThrottle() {
	throttle := func(string) grpcretry.Budget {
		t, _ := grpcretry.NewThrottle(10, 0.1) // maxTokens, tokenRatio
		return t
	}
	retry, err := grpcretry.New(grpcretry.WithBudgetPerTarget(throttle))
	fmt.Println(retry != nil, err)
	// Output: true <nil>
}

// A search that may fail a lot must not use up the retries of the calls beside
// it: it gets a budget of its own, which must grant too.
func ExampleWithMethodBudget() {
	search, err := grpcretry.NewBudget(grpcretry.BudgetConfig{Capacity: 14, PerCall: -1})
	if err != nil {
		fmt.Println(err)
		return
	}
	retry, err := grpcretry.New(grpcretry.WithMethodBudget("orders.v1.Catalog/Search", search))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, b := range retry.Budgets() {
		fmt.Printf("%s%s: %.0f%% of %.0f\n", b.Target, b.Method, 100*b.Balance, b.Capacity)
	}
	// Output: /orders.v1.Catalog/Search: 100% of 14
}

// Limits that an operator changes while calls run: the share that is left stays
// as it was, so a reload in mid-outage sends no new wave.
func ExampleTokenBudget_Rescale() {
	budget, err := grpcretry.NewBudget(grpcretry.BudgetConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 5 {
		budget.Reserve(grpcretry.CostTransient)
	}
	fmt.Println(budget.Balance())
	if err := budget.Rescale(grpcretry.BudgetConfig{Capacity: 700, FreeInterval: 10 * time.Second}); err != nil {
		fmt.Println(err)
	}
	fmt.Println(budget.Balance())
	// Output:
	// 0.5
	// 0.5
}

// What a debugging page or a metric reads.
func ExampleRetrier_Budgets() {
	retry, err := grpcretry.New(grpcretry.WithMethodBudget("orders.v1.Catalog/*", grpcretry.Unlimited()))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, b := range retry.Budgets() {
		slog.Debug("budget", "target", b.Target, "method", b.Method, "balance", b.Balance,
			"granted", b.Granted, "refused", b.Refused, "in_flight", b.InFlight)
	}
	fmt.Println(len(retry.Budgets()))
	// Output: 1
}

// Where a central limit for the whole process is wanted beside others, all of
// them must grant.
func ExampleAllOf() {
	tokens, err := grpcretry.NewBudget(grpcretry.BudgetConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	throttle, err := grpcretry.NewThrottle(100, 0.1)
	if err != nil {
		fmt.Println(err)
		return
	}
	both, err := grpcretry.AllOf(tokens, throttle)
	if err != nil {
		fmt.Println(err)
		return
	}
	retry, err := grpcretry.New(grpcretry.WithBudget(both))
	fmt.Println(retry != nil, err)
	// Output: true <nil>
}
