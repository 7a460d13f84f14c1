package grpcretry

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

const faultsPage = "docs/faults.md"

// fault is one way in which a call can go wrong. It is a reaction of the raw
// server, which then also runs over loopback TCP, or whatever setup makes.
type fault struct {
	group    string
	name     string
	raw      [][]testsrv.Act
	rawOpts  []testsrv.RawOption
	dial     []grpc.DialOption
	setup    func(w *world)
	code     codes.Code // of the first attempt
	evidence Evidence   // of the first attempt
	bubble   bool       // needs virtual time, so not over TCP
	unary    bool       // has no counterpart among streams, whose own timeouts begin with the wait for an answer
}

// kind is a method by which a fault is met.
type kind struct {
	method     string
	desc       *grpc.StreamDesc // nil: unary
	idempotent bool
}

var (
	unaryKinds = []kind{{method: write}, {method: put, idempotent: true}}

	serverStream = &grpc.StreamDesc{ServerStreams: true}
	bothStreams  = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}
	streamKinds  = []kind{
		{method: testpb.TestService_Take_FullMethodName, desc: serverStream},
		{method: testpb.TestService_List_FullMethodName, desc: serverStream, idempotent: true},
		{method: testpb.TestService_Chat_FullMethodName, desc: bothStreams},
		{method: testpb.TestService_Sync_FullMethodName, desc: bothStreams, idempotent: true},
	}
)

func (k kind) String() string { return k.method[strings.LastIndexByte(k.method, '/')+1:] }

// world is what one call meets.
type world struct {
	t       *testing.T
	ctx     context.Context
	dial    []grpc.DialOption // the Retrier's; a fault adds its own
	opts    []grpc.CallOption
	request *testpb.Request
	cc      *grpc.ClientConn
	arrived func() []arrival
	earlier int // arrivals of calls made beforehand
}

// arrival is a stream that reached a server.
type arrival struct {
	attempt   string // grpc-previous-rpc-attempts: grpc's own resends repeat it
	processed bool
}

// sight is what was seen of one call.
type sight struct {
	code      codes.Code // of the first attempt, as all that follows
	evidence  Evidence
	reason    Reason
	attempts  int
	processed int // by the server, in all
	repeated  int // processed in another attempt of ours again
	resent    int // streams that grpc itself sent again
	ok        bool
}

// A wrong belief about what became of an attempt repeats a payment. Each fault
// is met by a call that is not known to be idempotent and by one that is, under
// the default codes and under a policy that would retry every code: only the
// evidence then stands between the write and its repetition.
func TestFaults(t *testing.T) {
	var table strings.Builder
	group, seen := "", map[string]bool{}
	for _, f := range faultRows() {
		if seen[f.name] {
			t.Errorf("two faults are called %q", f.name)
		}
		seen[f.name] = true
		var cells [4]sight
		for i := range cells {
			k, every := unaryKinds[i/2], i%2 == 1
			t.Run(fmt.Sprintf("%s/%v/every=%t", f.name, k, every), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { cells[i] = f.meet(t, k, every, false) })
			})
		}
		if f.group != group {
			group = f.group
			fmt.Fprintf(&table, "\n### %s\n\n", group)
			table.WriteString("| fault | code | evidence | write | write, every code | idempotent | idempotent, every code | writes repeated | resent by grpc |\n")
			table.WriteString("|---|---|---|---|---|---|---|---|---|\n")
		}
		fmt.Fprintf(&table, "| %s | %s | %s |", f.name, codeName(cells[0].code), cells[0].told())
		for _, c := range cells {
			fmt.Fprintf(&table, " %v: %d/%d |", c.reason, c.processed, c.attempts)
		}
		fmt.Fprintf(&table, " %d | %d |\n", cells[0].repeated+cells[1].repeated, cells[1].resent)
	}
	if n := len(seen); n < 35 {
		t.Errorf("%d faults, want at least 35", n)
	}
	if t.Failed() {
		return // what a failing run saw is not worth keeping
	}
	checkGenerated(t, faultsPage, "faults", fmt.Sprintf("%d faults.\n%s", len(seen), table.String()))
}

func (s sight) told() string {
	if s.code == codes.OK {
		return "-"
	}
	return s.evidence.String()
}

// Streams meet the same faults. They have more ways to learn of one, and a
// header of the server's tells them more; what they may not do is the same.
func TestFaultsOfStreams(t *testing.T) {
	var table strings.Builder
	table.WriteString("| fault | code | evidence | server stream | idempotent server stream | both ways | idempotent both ways | writes repeated | resent by grpc |\n|---|---|---|---|---|---|---|---|---|\n")
	rows := 0
	for _, f := range faultRows() {
		if f.unary {
			continue
		}
		rows++
		var cells [4]sight
		for i, k := range streamKinds {
			t.Run(fmt.Sprintf("%s/%v", f.name, k), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { cells[i] = f.meet(t, k, true, false) })
			})
		}
		fmt.Fprintf(&table, "| %s | %s | %s |", f.name, codeName(cells[0].code), cells[0].told())
		for _, c := range cells {
			fmt.Fprintf(&table, " %v: %d/%d |", c.reason, c.processed, c.attempts)
		}
		fmt.Fprintf(&table, " %d | %d |\n", cells[0].repeated+cells[2].repeated, cells[0].resent)
	}
	if t.Failed() {
		return
	}
	checkGenerated(t, faultsPage, "streams", fmt.Sprintf("%d faults.\n\n%s", rows, table.String()))
}

// TestFaultsOnLoopback shows the same faults over a real network stack, where
// frames can be split and merged and a closed connection is noticed late.
func TestFaultsOnLoopback(t *testing.T) {
	for _, f := range faultRows() {
		if f.raw == nil || f.bubble {
			continue
		}
		for _, k := range slices.Concat(unaryKinds, streamKinds) {
			t.Run(fmt.Sprintf("%s/%v", f.name, k), func(t *testing.T) { f.meet(t, k, true, true) })
		}
	}
}

// meet makes the call and checks what must hold for every fault.
func (f *fault) meet(t *testing.T, k kind, every, tcp bool) sight {
	p := Policy{MaxAttempts: 3, Backoff: Backoff{Base: 100 * time.Millisecond, Jitter: NoJitter}}
	if tcp {
		p.Backoff.Base = time.Millisecond
	}
	if every {
		p.Codes = allCodes()
	}
	r := newRetrier(t, WithDefaultPolicy(p), WithBudget(Unlimited()))
	// It ends only a call that a defect leaves without an answer.
	patience := time.Hour
	if tcp {
		patience = 20 * time.Second
	}
	patient, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	w := &world{t: t, ctx: patient, dial: append(r.DialOptions(), f.dial...), request: &testpb.Request{Text: "hello"}}
	if f.raw != nil {
		w.raw(tcp, f.raw, f.rawOpts...)
	}
	if f.setup != nil {
		f.setup(w)
	}
	if t.Failed() {
		return sight{}
	}

	var report Report
	ctx, events := traced(t, w.ctx)
	ctx, done := context.WithCancel(ctx)
	err := w.invoke(ctx, k, append(w.opts, WithReport(&report))...)
	done()
	if !tcp {
		synctest.Wait()
	}
	if patient.Err() != nil {
		t.Fatalf("the call never ended by itself: %+v", report.Attempts)
	}
	first := report.Attempts[0]
	s := sight{code: first.Code, evidence: first.Evidence, reason: first.Reason, attempts: report.Made(), ok: err == nil}
	arrivals := w.arrived()[w.earlier:]
	s.count(arrivals)

	if k.desc == nil && (first.Code != f.code || first.Evidence != f.evidence) {
		t.Errorf("attempt 1: %v, %v (%v), want %v, %v", codeName(first.Code), first.Evidence, first.Err, codeName(f.code), f.evidence)
	}
	if s.repeated > 0 && !k.idempotent {
		t.Errorf("a write was processed again by another attempt: %+v", arrivals)
	}
	for i, e := range events() {
		a := report.Attempts[i]
		if got, want := e["grpcretry.attempt.decision"], a.Reason.String(); got != want {
			t.Errorf("attempt %d: the event says %v, the report %v", a.Number, got, want)
		}
		if got, want := e["grpcretry.attempt.sent"], a.Evidence.String(); a.Err != nil && got != want {
			t.Errorf("attempt %d: the event says %v, the report %v", a.Number, got, want)
		}
		if last := i == len(report.Attempts)-1; !last && !k.idempotent && a.Evidence != Unsent {
			t.Errorf("attempt %d of a write was followed by another though it was %v (%v)", a.Number, a.Evidence, a.Err)
		}
		if a.Evidence == Unsent && slices.ContainsFunc(arrivals, func(x arrival) bool { return x.attempt == attemptHeader(a.Number) }) {
			t.Errorf("attempt %d counts as unsent (%v), but it reached a server", a.Number, a.Err)
		}
	}
	return s
}

// invoke makes the call: one request, and all there is of an answer.
func (w *world) invoke(ctx context.Context, k kind, opts ...grpc.CallOption) error {
	if k.desc == nil {
		return w.cc.Invoke(ctx, k.method, w.request, new(testpb.Response), opts...)
	}
	stream, err := w.cc.NewStream(ctx, k.desc, k.method, opts...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(w.request); err != nil && err != io.EOF {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for {
		if err := stream.RecvMsg(new(testpb.Response)); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func attemptHeader(number int) string {
	if number == 1 {
		return ""
	}
	return fmt.Sprint(number - 1)
}

func (s *sight) count(arrivals []arrival) {
	byAttempt, processed := map[string]int{}, map[string]bool{}
	for _, a := range arrivals {
		byAttempt[a.attempt]++
		if a.processed {
			processed[a.attempt] = true
			s.processed++
		}
	}
	s.resent = len(arrivals) - len(byAttempt)
	s.repeated = max(0, len(processed)-1)
}

func allCodes() CodeSet {
	var all []codes.Code
	for c := codes.Canceled; c <= codes.Unauthenticated; c++ {
		all = append(all, c)
	}
	return Codes(all...)
}

// raw makes the raw server the one that is called.
func (w *world) raw(tcp bool, reactions [][]testsrv.Act, opts ...testsrv.RawOption) *testsrv.RawServer {
	var srv *testsrv.RawServer
	if tcp {
		var err error
		if srv, err = testsrv.ListenRaw(reactions, opts...); err != nil {
			w.t.Fatal(err)
		}
	} else {
		srv = testsrv.NewRaw(reactions, opts...)
	}
	w.t.Cleanup(srv.Close)
	w.arrived = func() []arrival {
		var out []arrival
		for _, s := range srv.Streams() {
			out = append(out, arrival{s.Header[attemptsHeader], s.Processed})
		}
		return out
	}
	w.connect(srv.Dial)
	return srv
}

// scripted makes a real server with the script the one that is called.
func (w *world) scripted(reaction testsrv.Reaction, opts ...testsrv.Option) *testsrv.Server {
	srv := testsrv.New(testsrv.Script{"*": reaction}, opts...)
	w.t.Cleanup(srv.Close)
	w.arrived = func() []arrival { return handled(srv) }
	w.connect(srv.Dial)
	return srv
}

func handled(srv *testsrv.Server) []arrival {
	var out []arrival
	for _, a := range srv.Attempts("") {
		out = append(out, arrival{strings.Join(a.Metadata.Get(attemptsHeader), "+"), true})
	}
	return out
}

func (w *world) connect(dial func(...grpc.DialOption) (*grpc.ClientConn, error)) {
	cc, err := dial(w.dial...)
	if err != nil {
		w.t.Fatalf("Dial: %v", err)
	}
	w.cc = cc
}

// warmUp makes a call that succeeds.
func (w *world) warmUp(methods ...string) {
	for _, method := range methods {
		if err := w.cc.Invoke(w.ctx, method, w.request, new(testpb.Response)); err != nil {
			w.t.Errorf("the call before, %s: %v", method, err)
		}
	}
	w.earlier = len(methods)
}

func (w *world) attemptTimeout(d time.Duration) {
	w.opts = append(w.opts, WithCallPolicy(func(p *Policy) { p.AttemptTimeout, p.FirstResponseTimeout = d, d }))
}

// frames is one reaction, to every stream.
func frames(acts ...testsrv.Act) [][]testsrv.Act { return [][]testsrv.Act{acts} }

// okHeaders begin every gRPC response.
func okHeaders() testsrv.Act {
	return testsrv.Headers(":status", "200", "content-type", "application/grpc")
}

func answer(before ...testsrv.Act) []testsrv.Act {
	return append(before, testsrv.Process(), okHeaders(), testsrv.Message(&testpb.Response{Text: "hello"}), testsrv.Trailers("grpc-status", "0"))
}

// trailersOnly is an answer of one frame.
func trailersOnly(fields ...string) testsrv.Act {
	return testsrv.Trailers(append([]string{":status", "200", "content-type", "application/grpc"}, fields...)...)
}

// httpAnswer is what a proxy says that knows nothing of gRPC.
func httpAnswer(code string) [][]testsrv.Act {
	return frames(testsrv.Headers(":status", code, "content-type", "text/html"), testsrv.Data([]byte("<h1>no</h1>"), true))
}

func faultRows() []fault {
	return slices.Concat(resetFaults(), goAwayFaults(), httpFaults(), malformedFaults(), pushbackFaults(), unsentFaults(), lookalikes(), cutFaults())
}

func resetFaults() []fault {
	const group = "Streams that the server resets"
	process, reset := testsrv.Process, testsrv.Reset
	return []fault{
		{group: group, name: "RST_STREAM REFUSED_STREAM, always", raw: frames(reset(http2.ErrCodeRefusedStream)), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "RST_STREAM REFUSED_STREAM once, then an answer", raw: [][]testsrv.Act{{reset(http2.ErrCodeRefusedStream)}, answer()}, code: codes.OK},
		{group: group, name: "RST_STREAM REFUSED_STREAM before the request is read", raw: frames(testsrv.Early(), reset(http2.ErrCodeRefusedStream)), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "RST_STREAM REFUSED_STREAM by a server that lies: it did process", raw: frames(process(), reset(http2.ErrCodeRefusedStream)), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "RST_STREAM INTERNAL_ERROR", raw: frames(process(), reset(http2.ErrCodeInternal)), code: codes.Internal},
		{group: group, name: "RST_STREAM CANCEL", raw: frames(process(), reset(http2.ErrCodeCancel)), code: codes.Canceled},
		{group: group, name: "RST_STREAM ENHANCE_YOUR_CALM", raw: frames(process(), reset(http2.ErrCodeEnhanceYourCalm)), code: codes.ResourceExhausted},
		{group: group, name: "RST_STREAM NO_ERROR", raw: frames(process(), reset(http2.ErrCodeNo)), code: codes.Internal},
		{group: group, name: "RST_STREAM INADEQUATE_SECURITY", raw: frames(process(), reset(http2.ErrCodeInadequateSecurity)), code: codes.PermissionDenied},
		{group: group, name: "RST_STREAM HTTP_1_1_REQUIRED", raw: frames(process(), reset(http2.ErrCodeHTTP11Required)), code: codes.Internal},
		{group: group, name: "RST_STREAM with an unknown code", raw: frames(process(), reset(0xff)), code: codes.Unknown},
		{group: group, name: "headers, then RST_STREAM INTERNAL_ERROR", raw: frames(process(), okHeaders(), reset(http2.ErrCodeInternal)), code: codes.Internal},
		{group: group, name: "headers, then RST_STREAM CANCEL", raw: frames(process(), okHeaders(), reset(http2.ErrCodeCancel)), code: codes.Canceled},
		{group: group, name: "headers, then RST_STREAM REFUSED_STREAM", raw: frames(process(), okHeaders(), reset(http2.ErrCodeRefusedStream)), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "headers and the reply, then RST_STREAM INTERNAL_ERROR", raw: frames(process(), okHeaders(), testsrv.Message(&testpb.Response{}), reset(http2.ErrCodeInternal)), code: codes.Internal},
		{group: group, name: "the reply and its trailers, then RST_STREAM NO_ERROR", raw: frames(append(answer(), reset(http2.ErrCodeNo))...), code: codes.OK},
	}
}

func goAwayFaults() []fault {
	const group = "Connections that the server ends in order"
	below, above := -2, 0
	process := testsrv.Process
	return []fault{
		{group: group, name: "GOAWAY with last stream 0, once, then an answer", raw: [][]testsrv.Act{{testsrv.GoAway(below, http2.ErrCodeNo, "")}, answer()}, code: codes.OK},
		{group: group, name: "GOAWAY with last stream 0, on every connection", raw: frames(testsrv.GoAway(below, http2.ErrCodeNo, "")), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "GOAWAY that includes an earlier stream only", raw: [][]testsrv.Act{answer(), {testsrv.GoAway(below, http2.ErrCodeNo, "")}, answer()}, setup: func(w *world) { w.warmUp(get) }, code: codes.OK},
		{group: group, name: "GOAWAY that includes the stream, then the answer", raw: frames(answer(testsrv.GoAway(above, http2.ErrCodeNo, ""))...), code: codes.OK},
		{group: group, name: "GOAWAY that includes the stream, then the connection is closed", raw: frames(process(), testsrv.GoAway(above, http2.ErrCodeNo, ""), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "GOAWAY ENHANCE_YOUR_CALM too_many_pings, lower last stream", raw: frames(testsrv.GoAway(below, http2.ErrCodeEnhanceYourCalm, "too_many_pings")), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "GOAWAY that includes the stream, then one that does not", raw: frames(process(), testsrv.GoAway(above, http2.ErrCodeNo, ""), testsrv.GoAway(below, http2.ErrCodeNo, "")), code: codes.Unavailable, evidence: Refused},
		{group: group, name: "GOAWAY with an even stream id, then the answer", raw: frames(answer(testsrv.GoAway(1, http2.ErrCodeNo, ""))...), code: codes.OK},
	}
}

func httpFaults() []fault {
	const group = "Answers without gRPC, as proxies give them"
	rows := []fault{
		{group: group, name: "HTTP 503, and END_STREAM on the headers", raw: frames(testsrv.Trailers(":status", "503")), code: codes.Unavailable},
		{group: group, name: "HTTP 503 that says application/grpc, no grpc-status", raw: frames(testsrv.Trailers(":status", "503", "content-type", "application/grpc")), code: codes.Unknown, evidence: Answered},
		{group: group, name: "HTTP 503 after the server processed", raw: frames(testsrv.Process(), testsrv.Trailers(":status", "503")), code: codes.Unavailable},
		{group: group, name: "HTTP 103, then the answer", raw: frames(append([]testsrv.Act{testsrv.Headers(":status", "103")}, answer()...)...), code: codes.OK},
		{group: group, name: "HTTP 103 with END_STREAM", raw: frames(testsrv.Trailers(":status", "103")), code: codes.Internal},
		{group: group, name: "no HTTP status", raw: frames(testsrv.Trailers("content-type", "text/html")), code: codes.Internal},
		{group: group, name: "HTTP status that is not a number", raw: frames(testsrv.Trailers(":status", "teapot")), code: codes.Internal},
	}
	for _, h := range []struct {
		status string
		code   codes.Code
	}{
		{"200", codes.Unknown}, {"301", codes.Unknown}, {"400", codes.Internal}, {"401", codes.Unauthenticated}, {"403", codes.PermissionDenied},
		{"404", codes.Unimplemented}, {"429", codes.Unavailable}, {"500", codes.Unknown}, {"502", codes.Unavailable}, {"503", codes.Unavailable}, {"504", codes.Unavailable},
	} {
		rows = append(rows, fault{group: group, name: "HTTP " + h.status, raw: httpAnswer(h.status), code: h.code})
	}
	return rows
}

func malformedFaults() []fault {
	const group = "Answers that break the protocol"
	process, bytes := testsrv.Process, testsrv.Bytes
	reply := testsrv.Message(&testpb.Response{})
	status := func(value string) [][]testsrv.Act { return frames(process(), trailersOnly("grpc-status", value)) }
	return []fault{
		{group: group, name: "trailers-only UNAVAILABLE", raw: status("14"), code: codes.Unavailable, evidence: Answered},
		{group: group, name: "trailers-only OK, no reply", raw: status("0"), code: codes.Internal, evidence: Answered},
		{group: group, name: "grpc-status missing in the trailers", raw: frames(process(), okHeaders(), reply, testsrv.Trailers("k", "v")), code: codes.Unknown, evidence: Answered},
		{group: group, name: "grpc-status missing, trailers empty", raw: frames(process(), okHeaders(), testsrv.Trailers()), code: codes.Unknown},
		{group: group, name: "grpc-status 17", raw: status("17"), code: codes.Code(17), evidence: Answered},
		{group: group, name: "grpc-status -1", raw: status("-1"), code: codes.Code(1<<32 - 1), evidence: Answered},
		{group: group, name: "grpc-status that is not a number", raw: status("unavailable"), code: codes.Unknown},
		{group: group, name: "grpc-status beyond 32 bits", raw: status("99999999999"), code: codes.Unknown},
		{group: group, name: "grpc-status twice, first 14 then 0", raw: frames(process(), trailersOnly("grpc-status", "14", "grpc-status", "0")), code: codes.Internal, evidence: Answered},
		{group: group, name: "END_STREAM on the data, no trailers", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(0, 0, nil), true)), code: codes.Internal},
		{group: group, name: "two messages on a unary call", raw: frames(process(), okHeaders(), reply, reply, testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "a reply, and then the status UNAVAILABLE", raw: frames(process(), okHeaders(), reply, testsrv.Trailers("grpc-status", "14")), code: codes.Unavailable},
		{group: group, name: "message longer than announced", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(0, 2, []byte("\x0a\x00garbage")), false), testsrv.Trailers("grpc-status", "0")), code: codes.ResourceExhausted},
		{group: group, name: "message shorter than announced", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(0, 100, []byte("x")), false), testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "message that announces 4 GiB", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(0, 1<<32-1, []byte("x")), false)), code: codes.ResourceExhausted},
		{group: group, name: "message that is no protobuf", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(0, 2, []byte{0xff, 0xff}), false), testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "compression flag without grpc-encoding", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(1, 1, []byte("x")), false), testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "compression flag 2", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(2, 1, []byte("x")), false), testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "unknown grpc-encoding", raw: frames(process(), testsrv.Headers(":status", "200", "content-type", "application/grpc", "grpc-encoding", "lzma"), testsrv.Data(testsrv.Framed(1, 1, []byte("x")), false), testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "one trailer beyond the client's limit", raw: frames(process(), okHeaders(), reply, testsrv.Trailers("grpc-status", "0", "k", strings.Repeat("v", 70_000))), dial: []grpc.DialOption{grpc.WithMaxHeaderListSize(64 << 10)}, code: codes.Unavailable},
		{group: group, name: "many trailers beyond the client's limit", raw: frames(process(), okHeaders(), reply, testsrv.Trailers(slices.Repeat([]string{"k", strings.Repeat("v", 2000)}, 40)...)), dial: []grpc.DialOption{grpc.WithMaxHeaderListSize(64 << 10)}, code: codes.Internal},
		{group: group, name: "trailer that is no base64", raw: frames(process(), okHeaders(), reply, testsrv.Trailers("grpc-status", "0", "k-bin", "!")), code: codes.Internal},
		{group: group, name: "grpc-status-details-bin that is no base64", raw: frames(process(), trailersOnly("grpc-status", "14", "grpc-status-details-bin", "!")), code: codes.Internal},
		{group: group, name: "grpc-status-details-bin that is no protobuf", raw: frames(process(), trailersOnly("grpc-status", "14", "grpc-status-details-bin", "////")), code: codes.Unavailable, evidence: Answered},
		{group: group, name: "grpc-status-details-bin of another code", raw: frames(process(), trailersOnly("grpc-status", "14", "grpc-status-details-bin", "CAM")), code: codes.Internal, evidence: Answered},
		{group: group, name: "header name in upper case", raw: frames(process(), testsrv.Headers(":status", "200", "content-type", "application/grpc", "Upper", "x"), testsrv.Trailers("grpc-status", "0")), code: codes.Internal},
		{group: group, name: "headers in the middle of a stream", raw: frames(process(), okHeaders(), okHeaders()), code: codes.Internal},
		{group: group, name: "data before headers", raw: frames(process(), testsrv.Data(testsrv.Framed(0, 0, nil), false), trailersOnly("grpc-status", "0")), code: codes.OK},
		{group: group, name: "header block that is no HPACK", raw: frames(process(), testsrv.Frame(http2.FrameHeaders, http2.FlagHeadersEndHeaders, []byte{0xff, 0xff, 0xff, 0xff, 0xff})), code: codes.Unavailable},
		{group: group, name: "frame larger than allowed", raw: frames(process(), bytes([]byte{0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1})), code: codes.Unavailable},
		{group: group, name: "data on stream 0", raw: frames(process(), bytes([]byte{0, 0, 1, 0, 0, 0, 0, 0, 0, 1})), code: codes.Unavailable},
		{group: group, name: "frame of an unknown type, then the answer", raw: frames(answer(testsrv.Frame(0x42, 0, []byte("x")))...), code: codes.OK},
		{group: group, name: "WINDOW_UPDATE of 0 on the stream", raw: frames(process(), testsrv.Frame(http2.FrameWindowUpdate, 0, make([]byte, 4))), code: codes.Internal},
		{group: group, name: "PUSH_PROMISE cut short", raw: frames(process(), testsrv.Frame(http2.FramePushPromise, http2.FlagPushPromiseEndHeaders, []byte{0, 0})), code: codes.Unavailable},
		{group: group, name: "text that is no HTTP/2", raw: frames(process(), bytes([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"))), code: codes.Unavailable},
	}
}

func pushbackFaults() []fault {
	const group = "Hints"
	hint := func(fields ...string) [][]testsrv.Act {
		return frames(testsrv.Process(), trailersOnly(append([]string{"grpc-status", "14"}, fields...)...))
	}
	const key = "grpc-retry-pushback-ms"
	row := func(name string, fields ...string) fault {
		return fault{group: group, name: "UNAVAILABLE, " + name, raw: hint(fields...), code: codes.Unavailable, evidence: Answered}
	}
	return []fault{
		row("pushback 0", key, "0"),
		row("pushback 10", key, "10"),
		row("pushback -1", key, "-1"),
		row("pushback that is not a number", key, "soon"),
		row("pushback empty", key, ""),
		row("pushback beyond 32 bits", key, "99999999999"),
		row("pushback beyond the policy's MaxHint", key, "2000000000"),
		row("pushback twice", key, "1", key, "2"),
		row("pushback of 60 kB", key, strings.Repeat("1", 60_000)),
		row("RetryInfo of 10 ms", "grpc-status-details-bin", encodedStatus(codes.Unavailable, &errdetails.RetryInfo{RetryDelay: durationpb.New(10 * time.Millisecond)})),
		{group: group, name: "pushback 0 with header and trailer apart", raw: frames(testsrv.Process(), okHeaders(), testsrv.Trailers("grpc-status", "14", key, "0")), code: codes.Unavailable, evidence: Answered},
		{group: group, name: "RESOURCE_EXHAUSTED, pushback 10, header and trailer apart", raw: frames(testsrv.Process(), okHeaders(), testsrv.Trailers("grpc-status", "8", key, "10")), code: codes.ResourceExhausted, evidence: Answered},
		{group: group, name: "RESOURCE_EXHAUSTED without a hint", raw: frames(testsrv.Process(), trailersOnly("grpc-status", "8")), code: codes.ResourceExhausted, evidence: Answered},
		{group: group, name: "RESOURCE_EXHAUSTED, pushback 10", raw: frames(testsrv.Process(), trailersOnly("grpc-status", "8", key, "10")), code: codes.ResourceExhausted, evidence: Answered},
	}
}

// encodedStatus is the value of grpc-status-details-bin.
func encodedStatus(code codes.Code, details ...protoadapt.MessageV1) string {
	st, err := status.New(code, "").WithDetails(details...)
	if err != nil {
		panic(err)
	}
	b, err := proto.Marshal(st.Proto())
	if err != nil {
		panic(err)
	}
	return base64.RawStdEncoding.EncodeToString(b)
}

func unsentFaults() []fault {
	const group = "Before anything is sent"
	plain := func(w *world) { w.scripted(testsrv.Sequence{}) }
	with := func(opts ...grpc.DialOption) func(*world) {
		return func(w *world) { w.dial = append(w.dial, opts...); plain(w) }
	}
	option := func(opts ...grpc.CallOption) func(*world) {
		return func(w *world) { w.opts = append(w.opts, opts...); plain(w) }
	}
	picker := func(name string) func(*world) {
		return with(grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"` + name + `": {}}]}`))
	}
	nothing := func() []arrival { return nil }
	resolve := func(b resolver.Builder) func(*world) {
		return func(w *world) {
			w.arrived = nothing
			w.connect(func(opts ...grpc.DialOption) (*grpc.ClientConn, error) {
				return grpc.NewClient(b.Scheme()+":///x", append(opts, grpc.WithResolvers(b), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
			})
			w.t.Cleanup(func() { w.cc.Close() })
		}
	}
	return []fault{
		{group: group, name: "connection refused", setup: func(w *world) { w.scripted(testsrv.Sequence{}).Kill() }, code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "connection accepted and closed", raw: frames(), rawOpts: []testsrv.RawOption{testsrv.RawHangUp()}, code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "wait for ready, server down, attempt times out", setup: func(w *world) {
			w.opts = append(w.opts, grpc.WaitForReady(true), WithCallPolicy(func(p *Policy) { p.Timeout = 3500 * time.Millisecond }))
			w.attemptTimeout(time.Second)
			w.scripted(testsrv.Sequence{}).Kill()
		}, code: codes.DeadlineExceeded, evidence: Unsent},
		{group: group, unary: true, name: "no more streams allowed (MAX_CONCURRENT_STREAMS 0), attempt times out", raw: frames(answer()...),
			rawOpts: []testsrv.RawOption{testsrv.RawSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 0})},
			setup:   func(w *world) { w.attemptTimeout(time.Second) }, bubble: true, code: codes.DeadlineExceeded, evidence: Unsent},
		{group: group, name: "name resolution fails", setup: resolve(brokenResolver{}), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "name resolution cannot start", setup: resolve(brokenResolver{build: true}), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "name resolution finds no address", setup: resolve(brokenResolver{empty: true}), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "ClientConn closed before the call", setup: func(w *world) { plain(w); w.cc.Close() }, code: codes.Canceled},
		{group: group, name: "caller's context ended before the call", setup: func(w *world) {
			plain(w)
			ctx, cancel := context.WithCancel(w.ctx)
			cancel()
			w.ctx = ctx
		}, code: codes.Canceled},
		{group: group, name: "load balancer drops the call", setup: picker("faults_drop"), code: codes.Unavailable},
		{group: group, name: "load balancer ends the call with UNAVAILABLE", setup: picker("faults_unavailable"), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "load balancer fails without a status", setup: picker("faults_plain"), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "load balancer ends the call with RESOURCE_EXHAUSTED", setup: picker("faults_exhausted"), code: codes.ResourceExhausted},
		{group: group, name: "load balancer ends the call with a code it may not use", setup: picker("faults_restricted"), code: codes.Internal},
		{group: group, name: "call credentials fail without a status", setup: option(grpc.PerRPCCredentials(callCredentials{err: errors.New("no token")})), code: codes.Internal},
		{group: group, name: "call credentials fail with UNAVAILABLE", setup: option(grpc.PerRPCCredentials(callCredentials{err: status.Error(codes.Unavailable, "token service down")})), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "call credentials fail with UNAUTHENTICATED", setup: option(grpc.PerRPCCredentials(callCredentials{err: status.Error(codes.Unauthenticated, "token expired")})), code: codes.Unauthenticated, evidence: Unsent},
		{group: group, name: "call credentials fail with DEADLINE_EXCEEDED", setup: option(grpc.PerRPCCredentials(callCredentials{err: status.Error(codes.DeadlineExceeded, "token service slow")})), code: codes.DeadlineExceeded},
		{group: group, name: "call credentials fail with a code they may not use", setup: option(grpc.PerRPCCredentials(callCredentials{err: status.Error(codes.NotFound, "no such user")})), code: codes.Internal},
		{group: group, unary: true, name: "call credentials block until the attempt times out", setup: func(w *world) {
			w.attemptTimeout(time.Second)
			option(grpc.PerRPCCredentials(callCredentials{block: true}))(w)
		}, code: codes.DeadlineExceeded, evidence: Unsent},
		{group: group, name: "call credentials that want TLS, on a connection without", setup: option(grpc.PerRPCCredentials(callCredentials{secure: true})), code: codes.Unauthenticated, evidence: Unsent},
		{group: group, name: "TLS client, server without", setup: with(grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}))), code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "TLS server, client without", setup: func(w *world) {
			w.scripted(testsrv.Sequence{}, testsrv.WithServerOptions(grpc.Creds(credentials.NewServerTLSFromCert(serverCertificate()))))
		}, code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "TLS, certificate of an unknown authority", setup: func(w *world) {
			w.dial = append(w.dial, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{ServerName: "testsrv"})))
			w.scripted(testsrv.Sequence{}, testsrv.WithServerOptions(grpc.Creds(credentials.NewServerTLSFromCert(serverCertificate()))))
		}, code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "authority that the certificate does not have", setup: func(w *world) {
			w.dial = append(w.dial, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})))
			w.opts = append(w.opts, grpc.CallAuthority("elsewhere"))
			w.scripted(testsrv.Sequence{}, testsrv.WithServerOptions(grpc.Creds(credentials.NewServerTLSFromCert(serverCertificate()))))
		}, code: codes.Unavailable, evidence: Unsent},
		{group: group, name: "metadata that HTTP/2 does not allow", setup: func(w *world) {
			plain(w)
			w.ctx = metadata.AppendToOutgoingContext(w.ctx, "k", "\x00")
		}, code: codes.Internal},
		{group: group, name: "more metadata than the server allows", raw: frames(answer()...),
			rawOpts: []testsrv.RawOption{testsrv.RawSettings(http2.Setting{ID: http2.SettingMaxHeaderListSize, Val: 16})}, code: codes.Internal},
		{group: group, name: "request larger than the client may send", setup: option(grpc.MaxCallSendMsgSize(1)), code: codes.ResourceExhausted},
		{group: group, name: "request that cannot be encoded", setup: func(w *world) { plain(w); w.request = &testpb.Request{Text: "\xff"} }, code: codes.Internal},
		{group: group, name: "compressor that is not installed", setup: option(grpc.UseCompressor("lzma")), code: codes.Internal},
		{group: group, name: "codec that is not installed", setup: option(grpc.CallContentSubtype("yaml")), code: codes.Internal},
	}
}

func lookalikes() []fault {
	const group = "Lookalikes"
	forwarded := func(first testsrv.Step, text string) func(*world) {
		return func(w *world) { w.middle(first, text) }
	}
	header := testsrv.Step{SendHeaderFirst: true, Header: metadata.Pairs("k", "v")}
	fail := func(code codes.Code) testsrv.Step {
		s := header
		s.Code, s.Message = code, "no"
		return s
	}
	return []fault{
		{group: group, unary: true, name: "a middle tier sends a header, then forwards the text of a REFUSED_STREAM", setup: forwarded(header, "stream terminated by RST_STREAM with error code: REFUSED_STREAM"), code: codes.Unavailable, evidence: Refused},
		{group: group, unary: true, name: "a middle tier sends a header, then forwards the text of a drain", setup: forwarded(header, "the connection is draining"), code: codes.Unavailable, evidence: Refused},
		{group: group, unary: true, name: "a middle tier forwards the text of a REFUSED_STREAM", setup: forwarded(testsrv.Step{}, "stream terminated by RST_STREAM with error code: REFUSED_STREAM"), code: codes.Unavailable, evidence: Answered},
		{group: group, unary: true, name: "a middle tier forwards the text of a refused connection", setup: forwarded(testsrv.Step{}, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`), code: codes.Unavailable, evidence: Answered},
		{group: group, unary: true, name: "a middle tier sends a header, then forwards the text of a refused connection", setup: forwarded(header, `connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`), code: codes.Unavailable},
		{group: group, unary: true, name: "a middle tier forwards \"RPC is dropped\"", setup: forwarded(header, "RPC is dropped"), code: codes.Unavailable},
		{group: group, name: "the server sends a header, then CANCELLED", setup: func(w *world) { w.scripted(testsrv.Sequence{fail(codes.Canceled)}) }, code: codes.Canceled},
		{group: group, name: "the server sends a header, then UNAVAILABLE", setup: func(w *world) { w.scripted(testsrv.Sequence{fail(codes.Unavailable)}) }, code: codes.Unavailable},
		{group: group, name: "the server sends a header, then UNAUTHENTICATED", setup: func(w *world) { w.scripted(testsrv.Sequence{fail(codes.Unauthenticated)}) }, code: codes.Unauthenticated},
		{group: group, name: "the server sends a header, then UNAVAILABLE, and the caller wants the header", setup: func(w *world) {
			w.opts = append(w.opts, grpc.Header(new(metadata.MD)))
			w.scripted(testsrv.Sequence{fail(codes.Unavailable)})
		}, code: codes.Unavailable, evidence: Answered},
		{group: group, name: "the server itself says CANCELLED", setup: func(w *world) { w.scripted(testsrv.Fail(1, codes.Canceled)) }, code: codes.Canceled, evidence: Answered},
		{group: group, name: "the server itself says DEADLINE_EXCEEDED at once", setup: func(w *world) { w.scripted(testsrv.Fail(1, codes.DeadlineExceeded)) }, code: codes.DeadlineExceeded, evidence: Answered},
		// A real server ends the call at the same moment as the client does, and whoever is first decides the evidence.
		{group: group, name: "no answer until the attempt times out", raw: frames(testsrv.Process()),
			setup: func(w *world) { w.attemptTimeout(time.Second) }, bubble: true, code: codes.DeadlineExceeded},
		{group: group, name: "no answer until the caller's deadline", raw: frames(testsrv.Process()), setup: func(w *world) {
			ctx, cancel := context.WithTimeout(w.ctx, time.Second)
			w.t.Cleanup(cancel)
			w.ctx = ctx
		}, bubble: true, code: codes.DeadlineExceeded},
		{group: group, name: "ClientConn closed while the handler works", setup: func(w *world) {
			w.scripted(testsrv.Func(func(int, testsrv.Attempt) testsrv.Step { w.cc.Close(); return testsrv.Step{Block: true} }))
		}, code: codes.Canceled},
		{group: group, unary: true, name: "an interceptor further in loses the call options, the connection is cut", setup: func(w *world) {
			w.dial = append(w.dial, grpc.WithChainUnaryInterceptor(dropOptions(1)))
			w.scripted(testsrv.Sequence{{NoEcho: true, Cut: true}})
		}, code: codes.Unavailable},
		{group: group, unary: true, name: "an interceptor further in loses the call options after a call that had them, the connection is cut", setup: func(w *world) {
			w.dial = append(w.dial, grpc.WithChainUnaryInterceptor(dropOptions(2)))
			w.scripted(testsrv.Sequence{{}, {NoEcho: true, Cut: true}})
			w.warmUp(write, put)
		}, code: codes.Unavailable},
		{group: group, unary: true, name: "an interceptor further in answers UNAVAILABLE itself after it made the call", setup: func(w *world) {
			w.dial = append(w.dial, grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, _ ...grpc.CallOption) error {
				if err := invoke(ctx, method, req, reply, cc); err != nil {
					return err
				}
				return status.Error(codes.Unavailable, "mirror is down")
			}))
			w.scripted(testsrv.Sequence{})
		}, code: codes.Unavailable},
		{group: group, name: "a connection that shows no address and no credentials, cut after the handler ran", setup: func(w *world) {
			w.dial = append(w.dial, grpc.WithTransportCredentials(namelessCredentials{insecure.NewCredentials()}))
			w.scripted(testsrv.Sequence{{NoEcho: true, Cut: true}})
		}, code: codes.Unavailable},
	}
}

func cutFaults() []fault {
	const group = "Connections that break"
	process := testsrv.Process
	return []fault{
		{group: group, name: "cut when the headers arrive", raw: frames(testsrv.Early(), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut when the request has been read", raw: frames(testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut after the handler ran", raw: frames(process(), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut after the headers of the answer", raw: frames(process(), okHeaders(), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut within the reply", raw: frames(process(), okHeaders(), testsrv.Data(testsrv.Framed(0, 100, []byte("half")), false), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut between the reply and its trailers", raw: frames(process(), okHeaders(), testsrv.Message(&testpb.Response{}), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut within a frame header", raw: frames(process(), testsrv.Bytes([]byte{0, 0}), testsrv.Cut()), code: codes.Unavailable},
		{group: group, name: "cut after the handler of a real server ran", setup: func(w *world) { w.scripted(testsrv.Sequence{{NoEcho: true, Cut: true}}) }, code: codes.Unavailable},
		{group: group, name: "server killed while the handler works", setup: func(w *world) {
			var srv *testsrv.Server
			srv = w.scripted(testsrv.Func(func(int, testsrv.Attempt) testsrv.Step { go srv.Kill(); return testsrv.Step{NoEcho: true, Block: true} }))
		}, code: codes.Unavailable},
		{group: group, name: "the network goes dead, keepalive notices", raw: frames(process()), rawOpts: []testsrv.RawOption{testsrv.RawNoPings()},
			dial:   []grpc.DialOption{grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: time.Second})},
			bubble: true, code: codes.Unavailable},
		{group: group, name: "the network goes dead, the attempt times out", raw: frames(process()), rawOpts: []testsrv.RawOption{testsrv.RawNoPings()},
			setup: func(w *world) { w.attemptTimeout(time.Second) }, bubble: true, code: codes.DeadlineExceeded},
	}
}

// middle is a real server whose handler writes to another real server, and then
// forwards a failure as text.
func (w *world) middle(first testsrv.Step, text string) {
	leaf := testsrv.New(nil)
	w.t.Cleanup(leaf.Close)
	cc, err := leaf.Dial()
	if err != nil {
		w.t.Fatal(err)
	}
	mid := w.scripted(testsrv.Sequence{{Unary: func(ctx context.Context, in *testpb.Request) (*testpb.Response, error) {
		if first.SendHeaderFirst {
			if err := grpc.SendHeader(ctx, first.Header); err != nil {
				return nil, err
			}
		}
		if _, err := testpb.NewTestServiceClient(cc).Write(ctx, in); err != nil {
			return nil, err
		}
		return nil, status.Error(codes.Unavailable, text)
	}}})
	w.arrived = func() []arrival {
		if got, want := leaf.Count(write), mid.Count(""); got != want {
			w.t.Errorf("the leaf was written to %d times, the middle tier called %d times", got, want)
		}
		return handled(mid)
	}
}

// dropOptions loses the call options from the nth call of each method on.
func dropOptions(nth int) grpc.UnaryClientInterceptor {
	var mu sync.Mutex
	calls := map[string]int{}
	return func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		mu.Lock()
		calls[method]++
		drop := calls[method] >= nth
		mu.Unlock()
		if drop {
			return invoke(ctx, method, req, reply, cc)
		}
		return invoke(ctx, method, req, reply, cc, opts...)
	}
}

// brokenResolver fails in every way.
type brokenResolver struct{ build, empty bool }

func (brokenResolver) Scheme() string { return "broken" }

func (b brokenResolver) Build(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	switch {
	case b.build:
		return nil, errors.New("bad resolver")
	case b.empty:
		_ = cc.UpdateState(resolver.State{}) // says itself that it is bad
	default:
		cc.ReportError(errors.New("no such host"))
	}
	return b, nil
}

func (brokenResolver) ResolveNow(resolver.ResolveNowOptions) {}
func (brokenResolver) Close()                                {}

// callCredentials fail in every way.
type callCredentials struct {
	err    error
	block  bool
	secure bool
}

func (c callCredentials) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	if c.block {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return nil, c.err
}

func (c callCredentials) RequireTransportSecurity() bool { return c.secure }

// namelessCredentials make connections of which grpc knows neither address nor
// security, as some in-process transports do.
type namelessCredentials struct {
	credentials.TransportCredentials
}

func (namelessCredentials) ClientHandshake(_ context.Context, _ string, c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return namelessConn{c}, nil, nil
}

func (c namelessCredentials) Clone() credentials.TransportCredentials { return c }

type namelessConn struct{ net.Conn }

func (namelessConn) RemoteAddr() net.Addr { return nil }

// fixedBalancer picks nothing: every call ends with err.
type fixedBalancer struct {
	balancer.Balancer
	name string
	cc   balancer.ClientConn
	err  error
}

func init() {
	for name, err := range map[string]error{
		"faults_drop":        status.Error(codes.Unavailable, "RPC is dropped"),
		"faults_unavailable": status.Error(codes.Unavailable, "no backend in this zone"),
		"faults_plain":       errors.New("no backend in this zone"),
		"faults_exhausted":   status.Error(codes.ResourceExhausted, "circuit breaker"),
		"faults_restricted":  status.Error(codes.NotFound, "no such cluster"),
	} {
		balancer.Register(fixedBalancer{name: name, err: err})
	}
}

func (b fixedBalancer) Name() string { return b.name }

func (b fixedBalancer) Build(cc balancer.ClientConn, _ balancer.BuildOptions) balancer.Balancer {
	b.cc = cc
	return b
}

func (b fixedBalancer) UpdateClientConnState(balancer.ClientConnState) error {
	b.cc.UpdateState(balancer.State{ConnectivityState: connectivity.TransientFailure, Picker: b})
	return nil
}

func (b fixedBalancer) Pick(balancer.PickInfo) (balancer.PickResult, error) {
	return balancer.PickResult{}, b.err
}
func (fixedBalancer) ResolverError(error) {}
func (fixedBalancer) ExitIdle()           {}
func (fixedBalancer) Close()              {}

// serverCertificate is made once; in a bubble the clock shows the year 2000.
var serverCertificate = sync.OnceValue(func() *tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"testsrv"},
		NotBefore: time.Unix(0, 0), NotAfter: time.Unix(1<<32, 0),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
})

// checkGenerated compares a page's part between the markers "name: begin" and
// "name: end" with want, or with -update rewrites it.
func checkGenerated(t *testing.T, page, name, want string) {
	t.Helper()
	b, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	begin, end := fmt.Sprintf("<!-- %s: begin, generated by go test -run TestFaults -update . -->\n", name), fmt.Sprintf("<!-- %s: end -->\n", name)
	before, rest, ok := strings.Cut(string(b), begin)
	have, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no markers %q and %q", page, begin, end)
	}
	if have == want {
		return
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	haveLines, wantLines := strings.Split(have, "\n"), strings.Split(want, "\n")
	for i := range max(len(haveLines), len(wantLines)) {
		var h, w string
		if i < len(haveLines) {
			h = haveLines[i]
		}
		if i < len(wantLines) {
			w = wantLines[i]
		}
		if h != w {
			t.Errorf("%s is not what the test saw (run it with -update and look at the difference):\nhave %s\nwant %s", page, h, w)
		}
	}
}
