package grpcretry

import (
	"testing"
	"testing/synctest"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"google.golang.org/grpc/codes"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Whoever watches a dashboard must see each attempt, and what became of it.
func TestMetricsCountAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reader := sdkmetric.NewManualReader()
		r := newRetrier(t, WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))))
		_, client := serve(t, r, testsrv.Script{get: testsrv.Fail(2, codes.Unavailable).ThenOK()})
		for range 2 { // three attempts, then one
			if _, err := client.Get(t.Context(), &testpb.Request{}); err != nil {
				t.Fatal(err)
			}
		}
		var got metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &got); err != nil {
			t.Fatal(err)
		}
		counts := map[string]int64{}
		for _, m := range got.ScopeMetrics[0].Metrics {
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					decision, _ := p.Attributes.Value(keyDecision)
					counts[m.Name+" "+decision.AsString()] += p.Value
				}
			case metricdata.Histogram[int64]:
				for _, p := range data.DataPoints {
					counts[m.Name] += p.Sum
				}
			}
		}
		for name, want := range map[string]int64{
			"grpcretry.client.attempts retry":   2,
			"grpcretry.client.attempts success": 2,
			"grpcretry.client.call.retries":     2,
		} {
			if counts[name] != want {
				t.Errorf("%s = %d, want %d", name, counts[name], want)
			}
		}
	})
}
