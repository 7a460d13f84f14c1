//go:build unix

package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"example.com/grpcretry/internal/testsrv"
	"example.com/grpcretry/internal/testsrv/testpb"
)

// nginxConfig has the places %s for its directory, what a fault adds outside
// the server, the port, and what the server says.
const nginxConfig = `
daemon off;
worker_processes 1;
pid %[1]s/nginx.pid;
error_log stderr warn;
%[2]s
events { worker_connections 64; }
http {
	access_log off;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	%[3]s
	server {
		listen 127.0.0.1:%[4]d http2;
		%[5]s
	}
}
`

// proxy is nginx as a fault wants it. %BACKEND% in its texts is the address of
// the real server.
type proxy struct {
	main     string // outside http
	http     string // outside server
	server   string // default: location / { grpc_pass grpc://%BACKEND%; }
	reaction testsrv.Reaction
	down     bool // the backend does not run
	warmUp   bool // one call that succeeds comes first
}

func (p proxy) start(t tools) func(context.Context, *world) error {
	return func(ctx context.Context, w *world) error {
		backend, err := testsrv.Listen(testsrv.Script{"*": p.reaction})
		if err != nil {
			return err
		}
		w.onStop(backend.Close)
		w.arrivals = func() []string {
			var out []string
			for _, a := range backend.Attempts("") {
				out = append(out, previous(a.Metadata.Get("grpc-previous-rpc-attempts")))
			}
			return out
		}
		w.busy = func(ctx context.Context) error { return backend.WaitCount(ctx, "", w.earlier+1) }
		if p.down {
			backend.Kill()
		}
		master, port, err := p.run(ctx, t, w, backend.Address())
		if err != nil {
			return err
		}
		w.address = fmt.Sprintf("127.0.0.1:%d", port)
		w.hup = func() error { return master.signal(syscall.SIGHUP) }
		if p.warmUp {
			w.earlier = 1
			return once(ctx, w.address)
		}
		return nil
	}
}

// run starts nginx, again if its port was taken meanwhile.
func (p proxy) run(ctx context.Context, t tools, w *world, backend string) (*process, int, error) {
	dir, err := os.MkdirTemp("", "grpcretry-nginx-")
	if err != nil {
		return nil, 0, err
	}
	w.onStop(func() { _ = os.RemoveAll(dir) }) // what is left is in the directory for such things
	server := p.server
	if server == "" {
		server = "location / { grpc_pass grpc://%BACKEND%; }"
	}
	fill := strings.NewReplacer("%BACKEND%", backend)
	for try := 1; ; try++ {
		port, err := freePort()
		if err != nil {
			return nil, 0, err
		}
		// A worker that root starts runs as nobody, who may not be a user here.
		user := ""
		if os.Geteuid() == 0 {
			user = "user root;\n"
		}
		config := filepath.Join(dir, "nginx.conf")
		text := fmt.Sprintf(nginxConfig, dir, user+p.main, fill.Replace(p.http), port, fill.Replace(server))
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return nil, 0, err
		}
		master, err := spawn(nil, t.nginx, "-p", dir, "-e", "stderr", "-c", config)
		if err != nil {
			return nil, 0, err
		}
		err = listening(ctx, port, master)
		if err == nil {
			w.onStop(master.stop)
			return master, port, nil
		}
		master.stop()
		if try == 3 {
			return nil, 0, fmt.Errorf("nginx does not start: %w: %s", err, master.describe())
		}
	}
}

// listening waits until the port takes connections.
func listening(ctx context.Context, port int, p *process) error {
	for {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			return c.Close()
		}
		select {
		case <-p.ended:
			return fmt.Errorf("it ended: %w", p.err)
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// once makes one plain call.
func once(ctx context.Context, address string) error {
	cc, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer cc.Close()
	return cc.Invoke(ctx, write, &testpb.Request{}, new(testpb.Response))
}

// grpcStatus is the server that answers with a gRPC status where nginx would
// say 502.
func grpcStatus(answer string) string {
	return `
		location / { grpc_pass grpc://%BACKEND%; error_page 502 = @unavailable; }
		location @unavailable { internal; default_type application/grpc; add_header grpc-status 14; add_header grpc-message unavailable; return ` + answer + `; }`
}

func nginxFaults(t tools) []fault {
	row := func(name string, code codes.Code, p proxy) fault {
		return fault{group: "nginx with grpc_pass, before a real server", name: name, code: code, start: p.start(t)}
	}
	during := func(f fault, act func(w *world) error) fault {
		f.during = act
		return f
	}
	hup := func(w *world) error { return w.hup() }
	slow := testsrv.Sequence{{Delay: 500 * time.Millisecond}}
	cut := testsrv.Sequence{{Cut: true}}
	two := "upstream both { server %BACKEND% max_fails=0; server %BACKEND% max_fails=0; }"
	pushback := func(ms string) testsrv.Reaction {
		return testsrv.Sequence{{Code: codes.Unavailable, Trailer: metadata.Pairs("grpc-retry-pushback-ms", ms)}}
	}
	return []fault{
		row("all is well", codes.OK, proxy{}),
		row("backend down (nginx's 502)", codes.Unavailable, proxy{down: true}),
		row("backend's connection cut in the call (502)", codes.Unavailable, proxy{reaction: cut}),
		row("the same with two backends and grpc_next_upstream as it is by default", codes.Unavailable,
			proxy{http: two, server: "location / { grpc_pass grpc://both; }", reaction: cut}),
		row("the same with grpc_next_upstream error non_idempotent", codes.Unavailable,
			proxy{http: two, server: "location / { grpc_pass grpc://both; grpc_next_upstream error non_idempotent; }", reaction: cut}),
		row("backend slower than grpc_read_timeout (504)", codes.Unavailable,
			proxy{server: "location / { grpc_pass grpc://%BACKEND%; grpc_read_timeout 200ms; }", reaction: testsrv.Sequence{{Block: true}}}),
		row("nginx's own 503", codes.Unavailable, proxy{server: "location / { return 503; }"}),
		row("limit_req with status 429", codes.Unavailable, proxy{
			http:   "limit_req_zone $binary_remote_addr zone=one:64k rate=1r/m;",
			server: "limit_req zone=one; limit_req_status 429; location / { grpc_pass grpc://%BACKEND%; }", warmUp: true}),
		row("request larger than client_max_body_size (413)", codes.Unknown, proxy{server: "client_max_body_size 1; location / { grpc_pass grpc://%BACKEND%; }"}),
		row("502 turned into grpc-status 14 by error_page and return 204, the usual recipe", codes.Unknown, proxy{down: true, server: grpcStatus("204")}),
		row("502 turned into grpc-status 14 by error_page and return 200", codes.Unavailable, proxy{down: true, server: grpcStatus(`200 ""`)}),
		row("backend says UNAVAILABLE", codes.Unavailable, proxy{reaction: testsrv.Fail(1, codes.Unavailable)}),
		row("backend says UNAVAILABLE, pushback 10", codes.Unavailable, proxy{reaction: pushback("10")}),
		row("backend says UNAVAILABLE, pushback -1", codes.Unavailable, proxy{reaction: pushback("-1")}),
		row("backend sends a header, then UNAVAILABLE", codes.Unavailable, proxy{reaction: testsrv.Sequence{{SendHeaderFirst: true, Code: codes.Unavailable}}}),
		during(row("reload in the call", codes.OK, proxy{reaction: slow}), hup),
		during(row("reload in the call, worker_shutdown_timeout shorter than the call", codes.Unavailable,
			proxy{main: "worker_shutdown_timeout 100ms;", reaction: testsrv.Sequence{{Block: true}, {}}}), hup),
		row("keepalive_requests 1: a GOAWAY with every answer", codes.OK, proxy{http: "keepalive_requests 1;", warmUp: true}),
		func() fault {
			f := row("handler slower than the attempt's timeout", codes.DeadlineExceeded, proxy{reaction: testsrv.Sequence{{Block: true}}})
			f.attemptTimeout = 300 * time.Millisecond
			return f
		}(),
	}
}
