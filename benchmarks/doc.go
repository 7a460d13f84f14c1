// Package benchmarks measures the budgets of grpcretry beside other limiters;
// BUDGET.md has the result. What whole calls cost is measured in costs.
package benchmarks
