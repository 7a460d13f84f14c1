package testsrv_test

import (
	"context"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A raw server that counted wrongly would let a repeated write pass unseen.
func TestRawServerCountsWhatItSaw(t *testing.T) {
	answer := []testsrv.Act{
		testsrv.Process(),
		testsrv.Headers(":status", "200", "content-type", "application/grpc"),
		testsrv.Message(&testpb.Response{Text: "raw"}),
		testsrv.Trailers("grpc-status", "0"),
	}
	reactions := [][]testsrv.Act{
		{testsrv.Reset(http2.ErrCodeInternal)},
		{testsrv.Early(), testsrv.Cut()},
		answer,
	}
	memory := testsrv.NewRaw(reactions)
	tcp, err := testsrv.ListenRaw(reactions)
	if err != nil {
		t.Fatal(err)
	}
	for name, srv := range map[string]*testsrv.RawServer{"memory": memory, "tcp": tcp} {
		t.Run(name, func(t *testing.T) {
			defer srv.Close()
			c := client(t, srv)
			ctx := metadata.AppendToOutgoingContext(within(t), "k", "v")
			get := func(ctx context.Context) (*testpb.Response, error) {
				return c.Get(ctx, &testpb.Request{Payload: make([]byte, 100_000)})
			}
			_, err := get(ctx)
			requireCode(t, err, codes.Internal)
			_, err = get(ctx)
			requireCode(t, err, codes.Unavailable)
			for range 2 {
				r, err := get(ctx)
				requireCode(t, err, codes.OK)
				if r.GetText() != "raw" {
					t.Errorf("reply %v, want the scripted one", r)
				}
			}
			streams := srv.Streams()
			if len(streams) != 4 {
				t.Fatalf("%d streams, want 4", len(streams))
			}
			for i, want := range []testsrv.RawStream{
				{Connection: 1, ID: 1, Complete: true},
				{Connection: 1, ID: 3},
				{Connection: 2, ID: 1, Complete: true, Processed: true},
				{Connection: 2, ID: 3, Complete: true, Processed: true},
			} {
				got := streams[i]
				if got.Header["k"] != "v" || got.Header[":path"] != testpb.TestService_Get_FullMethodName {
					t.Errorf("stream %d: header %v", i, got.Header)
				}
				got.Header = nil
				if got.Connection != want.Connection || got.ID != want.ID || got.Complete != want.Complete || got.Processed != want.Processed {
					t.Errorf("stream %d: %+v, want %+v", i, got, want)
				}
			}
		})
	}
}
