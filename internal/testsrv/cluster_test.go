package testsrv_test

import (
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// Without an even spread a test of "the retry goes to another host" would pass or
// fail by chance.
func TestClusterIsRoundRobin(t *testing.T) {
	test := func(t *testing.T, cluster *testsrv.Cluster) {
		ctx := within(t)
		c := client(t, cluster)
		// grpc starts to pick when the first connection is up: wait for all.
		for reached := map[string]bool{}; len(reached) < len(cluster.Servers); {
			r, err := c.Put(ctx, &testpb.Request{})
			if err != nil {
				t.Fatal(err)
			}
			reached[r.GetServer()] = true
		}
		for range 4 * len(cluster.Servers) {
			var p peer.Peer
			r, err := c.Get(ctx, &testpb.Request{}, grpc.Peer(&p))
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range cluster.Servers {
				if s.Name() == r.GetServer() && p.Addr.String() != s.Address() {
					t.Errorf("%s answered, the peer is %v", s.Name(), p.Addr)
				}
			}
		}
		for _, s := range cluster.Servers {
			if got := s.Count(get); got != 4 {
				t.Errorf("%s got %d calls, want 4", s.Name(), got)
			}
		}
	}
	t.Run("bufconn", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			cluster := testsrv.NewCluster(3, nil)
			defer cluster.Close()
			test(t, cluster)
		})
	})
	t.Run("tcp", func(t *testing.T) {
		defer goleak.VerifyNone(t)
		cluster, err := testsrv.ListenCluster(3, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer cluster.Close()
		test(t, cluster)
	})
}

// Each server has its own script, and what the resolver delivers can change
// while clients are in use.
func TestClusterUpdates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := testsrv.NewCluster(2, func(i int) testsrv.Script {
			if i == 0 {
				return testsrv.Script{get: testsrv.Fail(1, codes.Unavailable)}
			}
			return nil
		})
		defer cluster.Close()
		if err := cluster.SetServers(cluster.Servers[0]); err != nil { // before there is a client
			t.Fatal(err)
		}
		c, other := client(t, cluster), client(t, cluster)
		for _, c := range []testpb.TestServiceClient{c, other} {
			_, err := c.Get(t.Context(), &testpb.Request{})
			requireCode(t, err, codes.Unavailable)
		}
		if err := cluster.SetServers(cluster.Servers[1]); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, c := range []testpb.TestServiceClient{c, other} {
			r, err := c.Get(t.Context(), &testpb.Request{})
			if err != nil || r.GetServer() != "server-1" {
				t.Errorf("response, error = %v, %v, want server-1", r, err)
			}
		}

		// A timeout from the resolver's config shows as a deadline.
		if err := cluster.SetServiceConfig(`{"methodConfig": [{"name": [{}], "timeout": "5s"}]}`); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, err := c.Put(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		if a := cluster.Servers[1].Attempts(put)[0]; !a.HasDeadline || a.Left.Seconds() != 5 {
			t.Errorf("attempt = %+v, want a deadline of 5 s", a)
		}
		if err := cluster.SetServiceConfig(`{`); err == nil {
			t.Error("a broken service config was taken")
		}
	})
}

// One dead server of three must leave the others in use.
func TestClusterSurvivesAKill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cluster := testsrv.NewCluster(3, nil)
		defer cluster.Close()
		c := client(t, cluster)
		if _, err := c.Get(t.Context(), &testpb.Request{}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		cluster.Servers[0].Kill()
		synctest.Wait()
		for range 6 {
			if r, err := c.Get(t.Context(), &testpb.Request{}); err != nil || r.GetServer() == "server-0" {
				t.Errorf("response, error = %v, %v, want one of the others", r, err)
			}
		}
	})
}
