package logevents_test

import (
	"fmt"
	"log"

	"go.opentelemetry.io/otel/log/noop"

	"example.com/grpcretry"
	"example.com/grpcretry/contrib/logevents"
)

func ExampleNew() {
	loggerProvider := noop.NewLoggerProvider()
	if err := func() error {
		sink, err := logevents.New(loggerProvider)
		if err != nil {
			return err
		}
		retry, err := grpcretry.New(grpcretry.WithEventSink(sink))
		fmt.Println(retry != nil, err)
		return err
	}(); err != nil {
		log.Fatal(err)
	}
	// Output: true <nil>
}
