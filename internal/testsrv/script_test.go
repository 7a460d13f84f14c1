package testsrv_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// A sequence that ended early or skipped a step would let a test of "two
// failures, then success" pass with one retry.
func TestSequence(t *testing.T) {
	for _, test := range []struct {
		name string
		seq  testsrv.Sequence
		want []codes.Code // of arrivals 1, 2, ...
	}{
		{"empty answers", nil, []codes.Code{codes.OK, codes.OK}},
		{"the last repeats", testsrv.Fail(1, codes.Aborted), []codes.Code{codes.Aborted, codes.Aborted, codes.Aborted}},
		{"fail, then OK", testsrv.Fail(2, codes.Unavailable).ThenOK(), []codes.Code{codes.Unavailable, codes.Unavailable, codes.OK, codes.OK}},
		{"two failures and an answer", testsrv.Fail(1, codes.Unavailable).Then(testsrv.Fail(1, codes.Aborted)...).ThenOK(),
			[]codes.Code{codes.Unavailable, codes.Aborted, codes.OK}},
		{"none fails", testsrv.Fail(0, codes.Unavailable).ThenOK(), []codes.Code{codes.OK, codes.OK}},
		{"fewer than none", testsrv.Fail(-1, codes.Unavailable), []codes.Code{codes.OK}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []codes.Code
			for nth := range len(test.want) {
				got = append(got, test.seq.React(nth+1, testsrv.Attempt{}).Code)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("codes = %v, want %v", got, test.want)
			}
		})
	}
}

// Two continuations of one prefix must not write into the same array.
func TestSequenceIsNotShared(t *testing.T) {
	prefix := make(testsrv.Sequence, 1, 8)
	a := prefix.Then(testsrv.Step{Code: codes.Aborted})
	b := prefix.Then(testsrv.Step{Code: codes.NotFound})
	if a[1].Code != codes.Aborted || b[1].Code != codes.NotFound {
		t.Errorf("second steps = %v and %v, want Aborted and NotFound", a[1].Code, b[1].Code)
	}
}

// The misspelt method would answer where the test wants a failure.
func TestUnknownMethodIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := testsrv.Script{"/testsrv.v1.TestService/Gte": testsrv.Fail(1, codes.Aborted)}
		srv := testsrv.New(bad)
		defer srv.Close()
		_, err := srv.Dial()
		if err == nil || !strings.Contains(err.Error(), `"/testsrv.v1.TestService/Gte"`) {
			t.Errorf("Dial: %v, want an error that names the method", err)
		}
		if err := srv.Set("testsrv.v1.TestService/Get", nil); err == nil {
			t.Error("Set took a method without its slash")
		}
		cluster := testsrv.NewCluster(1, func(int) testsrv.Script { return bad })
		defer cluster.Close()
		if _, err := cluster.Dial(); err == nil {
			t.Error("the cluster dialled a server with an invalid script")
		}
	})
	if _, err := testsrv.Listen(testsrv.Script{"Get": nil}); err == nil {
		t.Error("Listen took a method without its service")
	}
}

// The wildcard counts each method by itself, an own entry goes first, and Set
// starts to count anew.
func TestWhichReaction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		srv := testsrv.New(testsrv.Script{
			"*": testsrv.Fail(1, codes.Unavailable).ThenOK(),
			put: testsrv.Func(nil),
		})
		defer srv.Close()
		c := client(t, srv)
		call := func(method string, want codes.Code) {
			t.Helper()
			var err error
			switch method {
			case get:
				_, err = c.Get(t.Context(), &testpb.Request{})
			case put:
				_, err = c.Put(t.Context(), &testpb.Request{})
			default:
				_, err = c.Write(t.Context(), &testpb.Request{})
			}
			requireCode(t, err, want)
		}
		call(get, codes.Unavailable)
		call(get, codes.OK)
		call("write", codes.Unavailable)
		call(put, codes.OK)

		if err := srv.Set(get, testsrv.Fail(1, codes.Aborted).ThenOK()); err != nil {
			t.Fatal(err)
		}
		call(get, codes.Aborted)
		call(get, codes.OK)
		if err := srv.Set(get, nil); err != nil {
			t.Fatal(err)
		}
		call(get, codes.OK)
		if got := srv.Count(get); got != 5 {
			t.Errorf("Get arrived %d times, want 5: Set must not reset the records", got)
		}
	})
}
