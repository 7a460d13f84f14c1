//go:build unix

package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// process is a program that we started, alone in its process group.
type process struct {
	cmd    *exec.Cmd
	output *tail
	ended  chan struct{} // closed when the program has ended
	err    error
}

// spawn starts a program. stdout nil: it goes where its errors go.
func spawn(stdout io.Writer, name string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(name, args...), output: &tail{}, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.output, p.output
	if stdout != nil {
		p.cmd.Stdout = stdout
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.WaitDelay = 2 * time.Second // for children that keep the pipes open
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

func (p *process) signal(s syscall.Signal) error { return syscall.Kill(p.cmd.Process.Pid, s) }

// stop ends the program and every child of it that stayed in its group.
func (p *process) stop() {
	select {
	case <-p.ended:
	default:
		_ = p.signal(syscall.SIGTERM) // fails only if it ended meanwhile
	}
	select {
	case <-p.ended:
	case <-time.After(5 * time.Second):
	}
	_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) // fails if nobody is left, as it should be
	<-p.ended
}

func (p *process) describe() string { return fmt.Sprintf("%s: %s", p.cmd.Path, p.output) }

// tail keeps the end of what was written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b...)
	t.b = t.b[max(0, len(t.b)-2000):]
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}

// freePort finds a port that nobody listens on. Somebody else may take it until
// it is used; whoever uses it starts again then.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := l.Addr().(*net.TCPAddr).Port //nolint:errcheck // a TCP listener has no other kind of address
	return port, l.Close()
}
