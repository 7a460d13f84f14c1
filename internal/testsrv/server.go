// Package testsrv is a gRPC server that does to each attempt what a script says
// and records what each attempt brought.
//
//	srv := testsrv.New(testsrv.Script{
//		testpb.TestService_Get_FullMethodName: testsrv.Fail(2, codes.Unavailable).ThenOK(),
//	})
//	defer srv.Close()
//	conn, err := srv.Dial(retry.DialOptions()...)
//
// New serves on memory (bufconn) and works inside a testing/synctest bubble,
// provided that server and client are made there; Listen serves on loopback TCP
// and does not. Both are real grpc servers. The package does not depend on
// testing, so that examples can use it, and no two servers share anything.
package testsrv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
)

// bufferSize is how many bytes either end of a bufconn connection can write
// ahead of the other's reading.
const bufferSize = 64 << 10

// Server is a scripted server. Its methods may be called from several goroutines
// at once. Kill and Close wait for the handlers, so a handler must not call them.
type Server struct {
	name    string
	tcp     bool
	options []grpc.ServerOption
	extra   []func(grpc.ServiceRegistrar)
	invalid error // why the script cannot be played
	record  *recorder

	total atomic.Int64 // connections so far

	mu     sync.Mutex
	script map[string]*entry

	life    sync.Mutex // guards what follows
	address string     // what clients dial: the name, or host:port
	up      *incarnation
	clients []*grpc.ClientConn
	closed  bool
}

// entry is a reaction and how often each method has called for it.
type entry struct {
	reaction Reaction
	arrivals map[string]int
}

// incarnation is what lives from a start to the next Kill.
type incarnation struct {
	grpc     *grpc.Server
	acceptor *acceptor
	memory   *bufconn.Listener // nil on TCP
	served   chan struct{}     // closed when Serve has returned
}

// Option adjusts a server.
type Option func(*Server)

// WithName sets the name that responses, and the client's peer address on
// bufconn, show. Default: "testsrv".
func WithName(name string) Option { return func(s *Server) { s.name = name } }

// WithServerOptions adds options of the grpc server: interceptors, limits,
// credentials. Repeatable.
func WithServerOptions(opts ...grpc.ServerOption) Option {
	return func(s *Server) { s.options = append(s.options, opts...) }
}

// WithServices registers services beside the scripted ones. Repeatable.
func WithServices(register func(grpc.ServiceRegistrar)) Option {
	return func(s *Server) { s.extra = append(s.extra, register) }
}

// New starts a server on memory. An invalid script is reported by Dial.
func New(script Script, opts ...Option) *Server {
	s := newServer(script, opts)
	s.address = s.name
	s.start(bufconn.Listen(bufferSize))
	return s
}

// Listen starts a server on a free TCP port of the loopback interface.
func Listen(script Script, opts ...Option) (*Server, error) {
	s := newServer(script, opts)
	if s.invalid != nil {
		return nil, s.invalid
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("testsrv: Listen: %w", err)
	}
	s.tcp = true
	s.address = l.Addr().String()
	s.start(l)
	return s, nil
}

func newServer(script Script, opts []Option) *Server {
	s := &Server{name: "testsrv", record: newRecorder(), script: map[string]*entry{}, invalid: script.check()}
	for _, opt := range opts {
		opt(s)
	}
	for method, reaction := range script {
		s.script[method] = &entry{reaction: reaction, arrivals: map[string]int{}}
	}
	return s
}

// start serves on l. The caller holds life, or is the only one to know s.
func (s *Server) start(l net.Listener) {
	// Stop then waits for the handlers too.
	options := append([]grpc.ServerOption{grpc.WaitForHandlers(true)}, s.options...)
	up := &incarnation{grpc: grpc.NewServer(options...), acceptor: newAcceptor(l, &s.total), served: make(chan struct{})}
	up.memory, _ = l.(*bufconn.Listener)
	for _, desc := range services {
		up.grpc.RegisterService(s.scripted(desc), s)
	}
	for _, register := range s.extra {
		register(up.grpc)
	}
	s.up = up
	go func() {
		defer close(up.served)
		// It returns when the listener is closed, which is what Kill does.
		_ = up.grpc.Serve(up.acceptor)
	}()
}

// Name returns the server's name.
func (s *Server) Name() string { return s.name }

// Address is what a client dials: host:port on TCP, the name on bufconn, where
// it means something only together with [Server.DialOptions].
func (s *Server) Address() string { return s.address }

// Set installs another reaction for a method, or for "*"; it counts arrivals
// from 1 again. A handler may call it.
func (s *Server) Set(method string, reaction Reaction) error {
	if err := (Script{method: reaction}).check(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.script[method] = &entry{reaction: reaction, arrivals: map[string]int{}}
	return nil
}

// Dial makes a client of the server. opts come after those that lead to the
// server and can replace them. The connection may be closed by the caller, and
// is closed by Close otherwise.
func (s *Server) Dial(opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	return s.DialTarget("passthrough:///"+s.address, opts...)
}

// DialTarget is Dial with a target of the caller's, for opts with a resolver of
// their own. On bufconn every address that is resolved leads to the server.
func (s *Server) DialTarget(target string, opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	if s.invalid != nil {
		return nil, s.invalid
	}
	cc, err := grpc.NewClient(target, append(s.DialOptions(), opts...)...)
	if err != nil {
		return nil, fmt.Errorf("testsrv: dial %q: %w", target, err)
	}
	s.life.Lock()
	defer s.life.Unlock()
	if s.closed {
		_ = cc.Close()
		return nil, fmt.Errorf("testsrv: dial %q: the server is closed", target)
	}
	s.clients = append(s.clients, cc)
	return cc, nil
}

// DialOptions are what a client needs to reach the server: no transport
// security, and on bufconn the way there.
func (s *Server) DialOptions() []grpc.DialOption {
	opts := []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	if !s.tcp {
		opts = append(opts, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return s.connect(ctx)
		}))
	}
	return opts
}

// connect opens a connection to the server.
func (s *Server) connect(ctx context.Context) (net.Conn, error) {
	if s.tcp {
		return new(net.Dialer).DialContext(ctx, "tcp", s.address)
	}
	s.life.Lock()
	up := s.up
	s.life.Unlock()
	if up == nil {
		return nil, fmt.Errorf("testsrv: %s is down", s.name)
	}
	c, err := up.memory.DialContext(ctx)
	if err != nil {
		return nil, err
	}
	return namedConn{Conn: c, name: s.name}, nil
}

// CutConnections closes all connections as they are. New ones are accepted. A
// handler may call it.
func (s *Server) CutConnections() {
	s.life.Lock()
	up := s.up
	s.life.Unlock()
	if up != nil {
		up.acceptor.cut(false)
	}
}

// Kill is the end of the server's process: connections are closed as they are
// and new ones refused. It returns when all handlers have, which their contexts
// tell them to. Killing a server that is down does nothing.
func (s *Server) Kill() {
	s.life.Lock()
	up := s.up
	s.up = nil
	s.life.Unlock()
	up.stop()
}

// Restart starts a server that was killed, at the same address and with the
// script and records that it had. Nothing happens if it is up.
func (s *Server) Restart() error {
	s.life.Lock()
	defer s.life.Unlock()
	if s.closed {
		return errors.New("testsrv: Restart: the server is closed")
	}
	if s.up != nil {
		return nil
	}
	if !s.tcp {
		s.start(bufconn.Listen(bufferSize))
		return nil
	}
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		return fmt.Errorf("testsrv: Restart: %w", err)
	}
	s.start(l)
	return nil
}

// Close closes the clients that Dial made, then kills the server. It may be
// called more than once.
func (s *Server) Close() {
	s.life.Lock()
	clients := s.clients
	s.clients, s.closed = nil, true
	s.life.Unlock()
	for _, cc := range clients {
		_ = cc.Close() // fails only if it was closed already
	}
	s.Kill()
}

// stop cuts, and waits for everything that start began.
func (up *incarnation) stop() {
	if up == nil {
		return
	}
	up.acceptor.cut(true)
	up.grpc.Stop()
	<-up.served
}
