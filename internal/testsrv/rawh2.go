package testsrv

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
)

// Act is one thing that a [RawServer] does on a stream, and a Reaction of a raw
// server is a list of them. The acts of a stream run in order, once its whole
// request has been read; if the first is [Early], as soon as its headers have.
type Act struct {
	kind   actKind
	frame  http2.FrameType
	flags  http2.Flags
	fields []hpack.HeaderField
	data   []byte
	end    bool
	code   http2.ErrCode
	last   int // for a GOAWAY, counted from the stream's own id
}

type actKind uint8

const (
	actEarly actKind = iota
	actProcess
	actHeaders
	actData
	actReset
	actGoAway
	actFrame
	actBytes
	actCut
)

// Early makes the acts run before the request is read; it must be the first.
func Early() Act { return Act{kind: actEarly} }

// Process counts the stream as processed: here the method would do its work.
func Process() Act { return Act{kind: actProcess} }

// Headers sends a HEADERS frame with the fields, name and value in turn.
func Headers(fields ...string) Act { return Act{kind: actHeaders, fields: headerFields(fields)} }

// Trailers is Headers with END_STREAM.
func Trailers(fields ...string) Act {
	return Act{kind: actHeaders, fields: headerFields(fields), end: true}
}

// Data sends the bytes in one DATA frame, as they are.
func Data(b []byte, end bool) Act { return Act{kind: actData, data: b, end: end} }

// Message is the DATA frame of one message, with gRPC's five bytes before it.
func Message(m proto.Message) Act {
	b, _ := proto.Marshal(m) // fails only on text that is not UTF-8
	return Data(Framed(0, len(b), b), false)
}

// Reset sends RST_STREAM.
func Reset(code http2.ErrCode) Act { return Act{kind: actReset, code: code} }

// GoAway sends GOAWAY. last is added to the stream's id to make the last stream
// id, but not below 0: 0 says that the stream was or will be processed, -2 that
// it was not.
func GoAway(last int, code http2.ErrCode, debug string) Act {
	return Act{kind: actGoAway, last: last, code: code, data: []byte(debug)}
}

// Frame sends a frame of any type on the stream.
func Frame(kind http2.FrameType, flags http2.Flags, payload []byte) Act {
	return Act{kind: actFrame, frame: kind, flags: flags, data: payload}
}

// Bytes writes to the connection what need not be a frame.
func Bytes(b []byte) Act { return Act{kind: actBytes, data: b} }

// Cut closes the connection.
func Cut() Act { return Act{kind: actCut} }

// Framed puts gRPC's prefix before a message: the flag that tells whether it is
// compressed, and an announced length that may be a lie.
func Framed(compressed byte, announced int, message []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{compressed}, uint32(announced))
	return append(b, message...)
}

func headerFields(pairs []string) []hpack.HeaderField {
	var out []hpack.HeaderField
	for i := 0; i+1 < len(pairs); i += 2 {
		out = append(out, hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return out
}

// RawStream is what a raw server saw of one stream.
type RawStream struct {
	// Connection and ID tell the stream apart, Connection from 1.
	Connection int
	ID         uint32
	// Header is the request's, by name.
	Header map[string]string
	// Complete tells that the whole request was read, Processed that the acts
	// came to [Process].
	Complete  bool
	Processed bool
}

// RawServer speaks HTTP/2 frame by frame, in order to break rules that grpc's
// own server keeps. Its methods may be called from several goroutines at once.
type RawServer struct {
	reactions [][]Act
	settings  []http2.Setting
	noPings   bool
	hangUp    bool
	listener  net.Listener
	memory    *bufconn.Listener // nil on TCP
	serving   sync.WaitGroup

	mu      sync.Mutex
	conns   map[net.Conn]struct{} // nil once closed
	opened  int
	streams []*RawStream
	clients []*grpc.ClientConn
}

// RawOption adjusts a raw server.
type RawOption func(*RawServer)

// RawSettings are sent in place of an empty SETTINGS frame.
func RawSettings(settings ...http2.Setting) RawOption {
	return func(s *RawServer) { s.settings = settings }
}

// RawNoPings leaves the client's PING frames unanswered.
func RawNoPings() RawOption { return func(s *RawServer) { s.noPings = true } }

// RawHangUp closes every connection as soon as it is accepted.
func RawHangUp() RawOption { return func(s *RawServer) { s.hangUp = true } }

// NewRaw starts a raw server on memory. There is one reaction for each stream
// in the order of arrival, over all connections; the last one repeats. Without
// any, no stream is answered.
func NewRaw(reactions [][]Act, opts ...RawOption) *RawServer {
	memory := bufconn.Listen(bufferSize)
	s := newRaw(memory, reactions, opts)
	s.memory = memory
	return s
}

// ListenRaw is NewRaw on a free TCP port of the loopback interface.
func ListenRaw(reactions [][]Act, opts ...RawOption) (*RawServer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("testsrv: ListenRaw: %w", err)
	}
	return newRaw(l, reactions, opts), nil
}

func newRaw(l net.Listener, reactions [][]Act, opts []RawOption) *RawServer {
	s := &RawServer{reactions: reactions, listener: l, conns: map[net.Conn]struct{}{}}
	for _, opt := range opts {
		opt(s)
	}
	s.serving.Go(s.accept)
	return s
}

// Dial makes a client of the server; opts come last. It is closed by Close.
func (s *RawServer) Dial(opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	own := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if s.memory != nil {
		own = append(own, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			c, err := s.memory.DialContext(ctx)
			if err != nil {
				return nil, err
			}
			return namedConn{Conn: c, name: "raw"}, nil
		}))
	}
	cc, err := grpc.NewClient("passthrough:///"+s.Address(), append(own, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("testsrv: dial the raw server: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = append(s.clients, cc)
	return cc, nil
}

// Address is what a client dials.
func (s *RawServer) Address() string {
	if s.memory != nil {
		return "raw"
	}
	return s.listener.Addr().String()
}

// Streams returns what was seen of each stream, in the order of arrival.
func (s *RawServer) Streams() []RawStream {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]RawStream, len(s.streams))
	for i, stream := range s.streams {
		out[i] = *stream
	}
	return out
}

// Close closes the clients that Dial made, then everything else, and waits for
// the server's goroutines. It may be called more than once.
func (s *RawServer) Close() {
	s.mu.Lock()
	clients, conns := s.clients, s.conns
	s.clients, s.conns = nil, nil
	s.mu.Unlock()
	for _, cc := range clients {
		_ = cc.Close() // fails only if it was closed already
	}
	_ = s.listener.Close()
	for c := range conns {
		_ = c.Close()
	}
	s.serving.Wait()
}

func (s *RawServer) accept() {
	for {
		c, err := s.listener.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.conns == nil || s.hangUp {
			s.mu.Unlock()
			_ = c.Close()
			continue
		}
		s.conns[c] = struct{}{}
		s.opened++
		conn := &rawConn{server: s, net: c, number: s.opened, open: map[uint32]*openStream{}}
		s.mu.Unlock()
		s.serving.Go(func() {
			conn.serve()
			s.mu.Lock()
			delete(s.conns, c)
			s.mu.Unlock()
			_ = c.Close()
		})
	}
}

// arrive records a stream and chooses its acts.
func (s *RawServer) arrive(connection int, id uint32, header map[string]string) *openStream {
	s.mu.Lock()
	defer s.mu.Unlock()
	stream := &RawStream{Connection: connection, ID: id, Header: header}
	s.streams = append(s.streams, stream)
	o := &openStream{RawStream: stream}
	if n := len(s.reactions); n > 0 {
		o.acts = s.reactions[min(len(s.streams), n)-1]
	}
	return o
}

// mark edits the record of a stream.
func (s *RawServer) mark(edit func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	edit()
}

type openStream struct {
	*RawStream
	acts []Act
}

// rawConn is one connection. One goroutine reads and writes it.
type rawConn struct {
	server *RawServer
	net    net.Conn
	number int
	framer *http2.Framer
	coded  bytes.Buffer
	coder  *hpack.Encoder
	open   map[uint32]*openStream
}

// errCut ends a connection by an act.
var errCut = errors.New("cut")

// serve runs until the connection fails or is cut.
func (c *rawConn) serve() {
	// A client that is closed before it said anything must not keep us.
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(c.net, preface); err != nil || string(preface) != http2.ClientPreface {
		return
	}
	c.framer = http2.NewFramer(c.net, c.net)
	c.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	c.framer.AllowIllegalWrites = true
	c.coder = hpack.NewEncoder(&c.coded)
	if c.framer.WriteSettings(c.server.settings...) != nil {
		return
	}
	for {
		f, err := c.framer.ReadFrame()
		if err != nil || c.handle(f) != nil {
			return
		}
	}
}

func (c *rawConn) handle(f http2.Frame) error {
	switch f := f.(type) {
	case *http2.SettingsFrame:
		if !f.IsAck() {
			return c.framer.WriteSettingsAck()
		}
	case *http2.PingFrame:
		if !f.IsAck() && !c.server.noPings {
			return c.framer.WritePing(true, f.Data)
		}
	case *http2.MetaHeadersFrame:
		header := map[string]string{}
		for _, field := range f.Fields {
			header[field.Name] = field.Value
		}
		stream := c.server.arrive(c.number, f.StreamID, header)
		c.open[f.StreamID] = stream
		if len(stream.acts) > 0 && stream.acts[0].kind == actEarly {
			return c.act(stream)
		}
		if f.StreamEnded() {
			return c.complete(stream)
		}
	case *http2.DataFrame:
		if n := uint32(len(f.Data())); n > 0 {
			if err := errors.Join(c.framer.WriteWindowUpdate(0, n), c.framer.WriteWindowUpdate(f.StreamID, n)); err != nil {
				return err
			}
		}
		if stream := c.open[f.StreamID]; stream != nil && f.StreamEnded() {
			return c.complete(stream)
		}
	case *http2.RSTStreamFrame:
		delete(c.open, f.StreamID)
	}
	return nil
}

// complete is called when the whole request has been read.
func (c *rawConn) complete(stream *openStream) error {
	delete(c.open, stream.ID)
	c.server.mark(func() { stream.Complete = true })
	if len(stream.acts) > 0 && stream.acts[0].kind == actEarly {
		return nil // it has acted
	}
	return c.act(stream)
}

// act runs the acts of a stream.
func (c *rawConn) act(stream *openStream) error {
	for _, a := range stream.acts {
		var err error
		switch a.kind {
		case actEarly:
		case actProcess:
			c.server.mark(func() { stream.Processed = true })
		case actHeaders:
			err = c.headers(stream.ID, a)
		case actData:
			err = c.framer.WriteData(stream.ID, a.end, a.data)
		case actReset:
			err = c.framer.WriteRSTStream(stream.ID, a.code)
		case actGoAway:
			err = c.framer.WriteGoAway(uint32(max(0, int(stream.ID)+a.last)), a.code, a.data)
		case actFrame:
			err = c.framer.WriteRawFrame(a.frame, a.flags, stream.ID, a.data)
		case actBytes:
			_, err = c.net.Write(a.data)
		case actCut:
			err = errCut
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// headers writes a header block in as many frames as it takes.
func (c *rawConn) headers(id uint32, a Act) error {
	c.coded.Reset()
	for _, f := range a.fields {
		if err := c.coder.WriteField(f); err != nil {
			return err
		}
	}
	const most = 16 << 10
	block := c.coded.Bytes()
	first := block[:min(len(block), most)]
	rest := block[len(first):]
	err := c.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndStream: a.end, EndHeaders: len(rest) == 0})
	for err == nil && len(rest) > 0 {
		part := rest[:min(len(rest), most)]
		rest = rest[len(part):]
		err = c.framer.WriteContinuation(id, len(rest) == 0, part)
	}
	return err
}
