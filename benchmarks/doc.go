// Package benchmarks measures the budgets of grpcretry beside other limiters;
// BUDGET.md has the result. Beside every other way to retry, which peers sets up
// alike, what whole calls cost is measured in costs (COSTS.md), what streams cost
// in streams, and how retries behave when servers fail or are slow in behaviour;
// cmd/report makes a page with pictures of the latter two (REPORT.md).
package benchmarks
