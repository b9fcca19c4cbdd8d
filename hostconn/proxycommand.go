package hostconn

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// proxyConn is the socket to a ProxyCommand; closing it ends the command.
type proxyConn struct {
	net.Conn
	cmd    *exec.Cmd
	stderr *tail
	once   sync.Once
	err    error
}

// startProxy runs command with a socket as its stdin and stdout. It gets a
// process group of its own: a Ctrl-C at the terminal is for us to handle.
func startProxy(command string) (net.Conn, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("making a socket for ProxyCommand: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "proxy"), os.NewFile(uintptr(fds[1]), "proxy")
	defer ours.Close()
	defer theirs.Close()
	nc, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("making a socket for ProxyCommand: %w", err)
	}
	p := &proxyConn{Conn: nc, stderr: &tail{max: 4 << 10}}
	p.cmd = exec.Command("/bin/sh", "-c", "exec "+command)
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = theirs, theirs, p.stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.WaitDelay = time.Second // a descendant that left the group may hold stderr
	if err := p.cmd.Start(); err != nil {
		_ = nc.Close()
		return nil, fmt.Errorf("starting ProxyCommand: %w", err)
	}
	return p, nil
}

func (p *proxyConn) Read(b []byte) (int, error) {
	n, err := p.Conn.Read(b)
	if err != nil && n == 0 {
		if said := p.stderr.last(); said != "" {
			err = fmt.Errorf("%w (ProxyCommand: %s)", err, said)
		}
	}
	return n, err
}

func (p *proxyConn) Close() error {
	p.once.Do(func() {
		p.err = p.Conn.Close()
		_ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
		_ = p.cmd.Wait() // it was killed; its code says nothing
	})
	return p.err
}
