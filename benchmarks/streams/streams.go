// Package streams measures what a whole stream costs through grpcretry and
// through grpc's own retry, beside plain grpc: real ones on a connection in
// memory, with as little as can be on the server's side.
package streams

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"runtime"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"example.com/grpcretry/benchmarks/costs"
	"example.com/grpcretry/benchmarks/peers"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Peers are those that can retry every kind of stream, and none.
var Peers = func() (some []peers.Peer) {
	for _, p := range peers.All {
		if p.Name == peers.None || p.Name == peers.Ours || p.Name == "native" {
			some = append(some, p)
		}
	}
	return some
}()

// Case is a kind of stream.
type Case struct {
	Name  string
	Title string
	fails bool // the first of two, which is then repeated
	run   func(context.Context, testpb.TestServiceClient) error
}

const messages, uploaded = 1000, 200

// Cases are all of them.
var Cases = []Case{
	{Name: "server", Title: "10,000 small messages from the server", run: download},
	{Name: "pingpong", Title: "1,000 small messages each way, in turn", run: pingPong},
	{Name: "client", Title: "200 messages of 1 KiB to the server", run: upload},
	{Name: "replay", Title: "the same, and once more, because the first attempt failed at its end", fails: true, run: upload},
}

// Figure is what a case costs through one peer.
type Figure struct {
	Case, Peer string
	Micros     costs.Interval // of processor time for each stream
	Ratio      costs.Interval // to none in the same round
}

// Measure runs the case through every peer, in turn and in an order that is
// drawn anew for each round, with a connection of its own for each batch. A batch
// takes about so much processor time; that of client and server counts, garbage included.
func (c Case) Measure(ctx context.Context, rounds int, batch time.Duration, random *rand.Rand) ([]Figure, error) {
	if rounds < 1 {
		return nil, fmt.Errorf("streams: rounds = %d, want 1 or more", rounds)
	}
	order := make([]int, len(Peers))
	for i := range order {
		order[i] = i
	}
	nanos := make([][]float64, len(Peers))
	for range rounds {
		random.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		for _, i := range order {
			cost, err := c.batch(ctx, Peers[i], batch)
			if err != nil {
				return nil, fmt.Errorf("streams: %s through %s: %w", c.Name, Peers[i].Name, err)
			}
			nanos[i] = append(nanos[i], cost)
		}
	}
	figures := make([]Figure, 0, len(Peers))
	for i, p := range Peers {
		micros, ratios := make([]float64, rounds), make([]float64, rounds)
		for r := range rounds {
			micros[r], ratios[r] = nanos[i][r]/1000, nanos[i][r]/nanos[0][r]
		}
		figures = append(figures, Figure{Case: c.Name, Peer: p.Name, Micros: costs.Median(micros, random), Ratio: costs.Median(ratios, random)})
	}
	return figures, nil
}

// batch is the cost of a stream, in nanoseconds.
func (c Case) batch(ctx context.Context, p peers.Peer, length time.Duration) (float64, error) {
	client, stop, err := c.start(p)
	if err != nil {
		return 0, err
	}
	defer stop()
	if err := c.once(ctx, client, p); err != nil { // connects
		return 0, err
	}
	runtime.GC() // what the batch before left is no cost of this one
	start := costs.ProcessorTime()
	for n := 1; ; n++ {
		if err := c.once(ctx, client, p); err != nil {
			return 0, err
		}
		if d := costs.ProcessorTime() - start; d >= length {
			return float64(d) / float64(n), nil
		}
	}
}

// once is one stream, as the application sees it. Without a peer the
// application repeats it itself.
func (c Case) once(ctx context.Context, client testpb.TestServiceClient, p peers.Peer) error {
	err := c.run(ctx, client)
	if c.fails && !p.Retries() && status.Code(err) == codes.Unavailable {
		err = c.run(ctx, client)
	}
	return err
}

// start begins a server and a client of it.
func (c Case) start(p peers.Peer) (testpb.TestServiceClient, func(), error) {
	opts, err := p.DialOptions(peers.Config{})
	if err != nil {
		return nil, nil, err
	}
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	testpb.RegisterTestServiceServer(server, &plain{fails: c.fails})
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener)
	}()
	stop := func() { server.Stop(); <-served }
	cc, err := grpc.NewClient("passthrough:///plain", append(opts,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
	)...)
	if err != nil {
		stop()
		return nil, nil, err
	}
	return testpb.NewTestServiceClient(cc), func() { _ = cc.Close(); stop() }, nil
}

func download(ctx context.Context, client testpb.TestServiceClient) error {
	stream, err := client.List(ctx, &testpb.Request{Count: 10 * messages})
	if err != nil {
		return err
	}
	return readAll(stream, 10*messages)
}

func pingPong(ctx context.Context, client testpb.TestServiceClient) error {
	stream, err := client.Sync(ctx)
	if err != nil {
		return err
	}
	request, response := &testpb.Request{Number: 1}, &testpb.Response{}
	for range messages {
		if err := stream.Send(request); err != nil {
			return err
		}
		if err := stream.RecvMsg(response); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return readAll(stream, 0)
}

func upload(ctx context.Context, client testpb.TestServiceClient) error {
	stream, err := client.Store(ctx)
	if err != nil {
		return err
	}
	request := &testpb.Request{Payload: make([]byte, 1<<10)}
	for range uploaded {
		if err := stream.Send(request); errors.Is(err, io.EOF) {
			break // the reply says why
		} else if err != nil {
			return err
		}
	}
	reply, err := stream.CloseAndRecv()
	if err == nil && reply.GetNumber() != uploaded {
		return fmt.Errorf("the server read %d requests, want %d", reply.GetNumber(), uploaded)
	}
	return err
}

// readAll reads n messages and the end.
func readAll(stream grpc.ClientStream, n int) error {
	response := &testpb.Response{}
	for {
		switch err := stream.RecvMsg(response); {
		case err == nil:
			n--
		case errors.Is(err, io.EOF) && n == 0:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%d messages are missing", n)
		default:
			return err
		}
	}
}

// plain is the server's side.
type plain struct {
	testpb.UnimplementedTestServiceServer
	fails bool
	seen  atomic.Int64 // uploads
}

// List sends as many messages as the request says.
func (*plain) List(request *testpb.Request, stream grpc.ServerStreamingServer[testpb.Response]) error {
	response := &testpb.Response{Number: 1}
	for range request.GetCount() {
		if err := stream.Send(response); err != nil {
			return err
		}
	}
	return nil
}

// Sync answers each message.
func (*plain) Sync(stream grpc.BidiStreamingServer[testpb.Request, testpb.Response]) error {
	request, response := &testpb.Request{}, &testpb.Response{Number: 1}
	for {
		if err := stream.RecvMsg(request); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := stream.Send(response); err != nil {
			return err
		}
	}
}

// Store counts messages. If it is to fail it does so every other time, after all of them.
func (p *plain) Store(stream grpc.ClientStreamingServer[testpb.Request, testpb.Response]) error {
	nth := p.seen.Add(1)
	request := &testpb.Request{}
	for n := int64(0); ; n++ {
		if err := stream.RecvMsg(request); errors.Is(err, io.EOF) {
			if p.fails && nth%2 == 1 {
				return status.Error(codes.Unavailable, "once more, please")
			}
			return stream.SendAndClose(&testpb.Response{Number: n})
		} else if err != nil {
			return err
		}
	}
}
