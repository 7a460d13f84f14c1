// Package benchmarks measures the budgets of grpcretry beside other limiters;
// BUDGET.md has the result. What whole calls cost is measured in costs, and how
// retries behave when servers fail, beside every other way to retry, in behaviour.
package benchmarks
