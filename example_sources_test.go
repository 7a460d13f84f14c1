package grpcretry_test

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry"
	"example.com/grpcretry/internal/testsrv"
)

// The policy is in the service config that clients in other languages use too.
func ExampleWithServiceConfig() {
	const config = `{
  "methodConfig": [{
    "name": [{"service": "orders.v1.Orders"}],
    "timeout": "5s",
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.1s",
      "maxBackoff": "1s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`
	retry, err := grpcretry.New(grpcretry.WithServiceConfig(config))
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(retry.Explain("orders.v1.Orders/Get"))
	// Output:
	// /orders.v1.Orders/Get
	//   policy         from service_config: methodConfig[0] (line 2, column 20)
	//   attempts       at most 4
	//   codes          UNAVAILABLE
	//   backoff        100ms times 2 up to 1s, ProportionalJitter(0.2); overload like any failure; hints up to 1m0s
	//   timeout        5s for the whole call
	//   idempotency    idempotent (from service_config: methodConfig[0] (line 2, column 20))
	//   budget         the default, one for each target
}

// Every fault is told, with its place.
func ExampleWithServiceConfig_invalid() {
	_, err := grpcretry.New(grpcretry.WithServiceConfig(`{
  "methodConfig": [{
    "name": [{"service": "orders.v1.Orders"}],
    "timeout": "100ms",
    "waitforready": true
  }]
}`))
	fmt.Println(err)
	// Output:
	// grpcretry: WithServiceConfig: line 4, column 16: methodConfig[0].timeout = "100ms", want it in seconds: "0.1s"
	// grpcretry: WithServiceConfig: line 5, column 5: "methodConfig[0].waitforready" is an unknown field, want "waitForReady"
}

// More attempts than a service config may ask for by itself.
func ExampleWithMaxCallAttempts() {
	const config = `{"methodConfig": [{"name": [{"service": "jobs.v1.Jobs"}], "retryPolicy": {"maxAttempts": 10,
		"initialBackoff": "0.1s", "maxBackoff": "5s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`
	fmt.Println(must(grpcretry.WithServiceConfig(config)).Explain("jobs.v1.Jobs/Run").Policy.MaxAttempts)
	fmt.Println(must(grpcretry.WithServiceConfig(config), grpcretry.WithMaxCallAttempts(8)).Explain("jobs.v1.Jobs/Run").Policy.MaxAttempts)
	// Output:
	// 5
	// 8
}

// A dry run shows what would happen, and leaves calls as they are. In an incident
// it stops all retries.
func ExampleWithDryRun() {
	srv := testsrv.New(testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)})
	defer srv.Close()
	options := []grpcretry.Option{grpcretry.WithDefaultPolicy(grpcretry.Policy{Backoff: fast})}
	if err := stopAndGo(srv, options); err != nil {
		fmt.Println(err)
	}
	// Output:
	// dry_run after 1 attempt
	// attempts_exhausted after 3 attempts
	// dry_run after 1 attempt
}

func stopAndGo(srv *testsrv.Server, options []grpcretry.Option) error {
	options = append(options, quiet)
	retry, err := grpcretry.New(append(options, grpcretry.WithDryRun())...)
	if err != nil {
		return err
	}
	options = options[:len(options)-1] // a logger is for New alone
	client := connect(srv, retry)
	call := func() {
		var report grpcretry.Report
		_, _ = client.Get(ctx, req, grpcretry.WithReport(&report))
		fmt.Printf("%v after %d %s\n", report.Reason, report.Made(), strings.TrimSuffix("attempts", "s"[min(report.Made()-1, 1):]))
	}
	call()
	if err := retry.Update(options...); err != nil {
		return err
	}
	call()
	if err := incident(retry, options); err != nil {
		return err
	}
	call()
	return nil
}

// incident stops all retries.
func incident(retry *grpcretry.Retrier, options []grpcretry.Option) error {
	err := retry.Update(append(options, grpcretry.WithDryRun())...)
	return err
}

// A new document takes effect while calls run, and one with a fault changes nothing.
func ExampleRetrier_Update_serviceConfig() {
	const config = `{"methodConfig": [{"name": [{}], "timeout": "%s"}]}`
	options := []grpcretry.Option{grpcretry.WithIdempotent("orders.v1.Orders/*")}
	retry := must(append(options, grpcretry.WithServiceConfig(fmt.Sprintf(config, "5s")))...)
	for _, timeout := range []string{"1s", "1m"} {
		newConfig := fmt.Sprintf(config, timeout)
		err := retry.Update(append(options, grpcretry.WithServiceConfig(newConfig))...)
		fmt.Println(retry.Explain("orders.v1.Orders/Get").Policy.Timeout, err)
	}
	// Output:
	// 1s <nil>
	// 1s grpcretry: WithServiceConfig: line 1, column 45: methodConfig[0].timeout = "1m", want it in seconds: "60s"
}

// What a line in a .proto would gain.
func ExampleRetrier_Audit() {
	srv := testsrv.New(testsrv.Script{write: testsrv.Fail(1, codes.Unavailable)})
	defer srv.Close()
	retry := must()
	client := connect(srv, retry)
	_, _ = client.Write(ctx, req)
	for _, entry := range retry.Audit() {
		fmt.Println(entry)
	}
	// Output:
	// /testsrv.v1.TestService/Write: retries refused: 1; if it is idempotent, add "option idempotency_level = IDEMPOTENT;" to it in testsrv/v1/testsrv.proto, or pass grpcretry.WithIdempotent("testsrv.v1.TestService/Write")
}
