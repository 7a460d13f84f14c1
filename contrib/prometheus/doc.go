// Package prometheus tests the alerting rules and the dashboard beside it with
// Prometheus itself. It has nothing to import, and is a module of its own so that
// Prometheus is no dependency of grpcretry.
package prometheus
