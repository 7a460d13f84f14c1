package testsrv

import (
	"net"
	"sync"
	"sync/atomic"
)

// acceptor is a listener whose connections can be cut.
type acceptor struct {
	net.Listener

	mu    sync.Mutex
	open  map[*conn]struct{} // nil once closed
	total *atomic.Int64      // connections so far, over all listeners of the server
}

func newAcceptor(l net.Listener, total *atomic.Int64) *acceptor {
	return &acceptor{Listener: l, open: map[*conn]struct{}{}, total: total}
}

// Accept wraps the next connection.
func (l *acceptor) Accept() (net.Conn, error) {
	raw, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open == nil {
		_ = raw.Close()
		return nil, net.ErrClosed
	}
	c := &conn{Conn: raw, number: int(l.total.Add(1)), from: l}
	l.open[c] = struct{}{}
	return c, nil
}

// cut closes all connections. With refuse there will be no more of them.
func (l *acceptor) cut(refuse bool) {
	l.mu.Lock()
	victims := l.open
	if refuse {
		l.open = nil
	} else {
		l.open = map[*conn]struct{}{}
	}
	l.mu.Unlock()
	for c := range victims {
		_ = c.Close()
	}
}

// conn is the server's end of a connection.
type conn struct {
	net.Conn
	number int
	from   *acceptor
}

// RemoteAddr leads back to the connection: grpc shows it to handlers as the
// peer's address.
func (c *conn) RemoteAddr() net.Addr { return &connAddr{Addr: c.Conn.RemoteAddr(), conn: c} }

func (c *conn) Close() error {
	c.from.mu.Lock()
	delete(c.from.open, c)
	c.from.mu.Unlock()
	return c.Conn.Close()
}

type connAddr struct {
	net.Addr
	conn *conn
}

// namedConn is the client's end of a bufconn connection. It shows the server's
// name as its peer, where bufconn would show the same address for all.
type namedConn struct {
	net.Conn
	name string
}

func (c namedConn) RemoteAddr() net.Addr { return nameAddr(c.name) }

type nameAddr string

func (nameAddr) Network() string  { return "bufconn" }
func (n nameAddr) String() string { return string(n) }
