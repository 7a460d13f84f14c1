package testsrv

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
)

// roundRobin is the service config of a new cluster.
const roundRobin = `{"loadBalancingConfig": [{"round_robin": {}}]}`

// Cluster is several servers behind one target. Its methods may be called from
// several goroutines at once.
type Cluster struct {
	// Servers must not be changed.
	Servers []*Server

	mu      sync.Mutex
	config  string
	members []*Server
	conns   map[resolver.ClientConn]struct{}
	clients []*grpc.ClientConn
	closed  bool
}

// NewCluster starts n servers on memory, named "server-0" and so on. script
// gives each its own; nil: all of them answer.
func NewCluster(n int, script func(i int) Script, opts ...Option) *Cluster {
	c := emptyCluster()
	for i := range n {
		c.Servers = append(c.Servers, New(scriptOf(script, i), named(i, opts)...))
	}
	c.members = c.Servers
	return c
}

// ListenCluster is NewCluster on loopback TCP.
func ListenCluster(n int, script func(i int) Script, opts ...Option) (*Cluster, error) {
	c := emptyCluster()
	for i := range n {
		s, err := Listen(scriptOf(script, i), named(i, opts)...)
		if err != nil {
			c.Close()
			return nil, err
		}
		c.Servers = append(c.Servers, s)
	}
	c.members = c.Servers
	return c, nil
}

func emptyCluster() *Cluster {
	return &Cluster{config: roundRobin, conns: map[resolver.ClientConn]struct{}{}}
}

func scriptOf(script func(int) Script, i int) Script {
	if script == nil {
		return nil
	}
	return script(i)
}

// named puts the name last: it is how the cluster's dialer finds the server.
func named(i int, opts []Option) []Option {
	return append(slices.Clone(opts), WithName(fmt.Sprintf("server-%d", i)))
}

// Dial makes a client of all servers, whose resolver delivers their addresses
// and the service config (at first one that says round_robin).
func (c *Cluster) Dial(opts ...grpc.DialOption) (*grpc.ClientConn, error) {
	for _, s := range c.Servers {
		if s.invalid != nil {
			return nil, s.invalid
		}
	}
	cc, err := grpc.NewClient(clusterScheme+":///cluster", append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithResolvers(clusterBuilder{c}),
		grpc.WithContextDialer(c.connect),
	}, opts...)...)
	if err != nil {
		return nil, fmt.Errorf("testsrv: dial the cluster: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = cc.Close()
		return nil, fmt.Errorf("testsrv: dial the cluster: it is closed")
	}
	c.clients = append(c.clients, cc)
	return cc, nil
}

// connect opens a connection to the server of that address.
func (c *Cluster) connect(ctx context.Context, address string) (net.Conn, error) {
	for _, s := range c.Servers {
		if s.Address() == address {
			return s.connect(ctx)
		}
	}
	return nil, fmt.Errorf("testsrv: no server of the cluster has the address %q", address)
}

// SetServiceConfig delivers another service config (JSON; "": none) to all
// clients, present and future. Say round_robin in it, or grpc picks the first
// server. It returns the first refusal of a present client.
func (c *Cluster) SetServiceConfig(json string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.config = json
	return c.deliver()
}

// SetServers delivers another list of addresses, in that order, to all clients.
// Only servers of the cluster can be reached.
func (c *Cluster) SetServers(servers ...*Server) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.members = slices.Clone(servers)
	return c.deliver()
}

// deliver requires the lock.
func (c *Cluster) deliver() error {
	var first error
	for cc := range c.conns {
		if err := c.update(cc); err != nil && first == nil {
			first = fmt.Errorf("testsrv: update of the cluster: %w", err)
		}
	}
	return first
}

// update requires the lock.
func (c *Cluster) update(cc resolver.ClientConn) error {
	var state resolver.State
	for _, s := range c.members {
		state.Addresses = append(state.Addresses, resolver.Address{Addr: s.Address()})
	}
	if c.config != "" {
		state.ServiceConfig = cc.ParseServiceConfig(c.config)
		if state.ServiceConfig.Err != nil {
			return state.ServiceConfig.Err
		}
	}
	return cc.UpdateState(state)
}

// Close closes the clients that Dial made, then all servers. It may be called
// more than once.
func (c *Cluster) Close() {
	c.mu.Lock()
	clients := c.clients
	c.clients, c.closed = nil, true
	c.mu.Unlock()
	for _, cc := range clients {
		_ = cc.Close() // fails only if it was closed already
	}
	for _, s := range c.Servers {
		s.Close()
	}
}

const clusterScheme = "testsrv"

// clusterBuilder builds resolvers that follow the cluster. Unlike grpc's manual
// resolver it serves several clients, and can be updated before the first call.
type clusterBuilder struct{ cluster *Cluster }

func (clusterBuilder) Scheme() string { return clusterScheme }

func (b clusterBuilder) Build(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) (resolver.Resolver, error) {
	c := b.cluster
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns[cc] = struct{}{}
	if err := c.update(cc); err != nil {
		cc.ReportError(err)
	}
	return clusterResolver{cluster: c, cc: cc}, nil
}

type clusterResolver struct {
	cluster *Cluster
	cc      resolver.ClientConn
}

func (clusterResolver) ResolveNow(resolver.ResolveNowOptions) {}

func (r clusterResolver) Close() {
	r.cluster.mu.Lock()
	defer r.cluster.mu.Unlock()
	delete(r.cluster.conns, r.cc)
}
