package hostconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// Conn is one authenticated connection to a host. Its methods may be called
// concurrently. It does not reconnect.
type Conn struct {
	pool     *Pool
	target   Target
	settings Settings
	client   *ssh.Client
	wire     *wire
	shared   bool

	deadAfter, keepAlive time.Duration

	sessions chan struct{} // a slot per session (sshd's MaxSessions)
	become   escalation
	wg       sync.WaitGroup
	ended    chan struct{} // closed when the transport has ended

	mu     sync.Mutex
	closed bool // Close was called
	cause  error
}

func newConn(p *Pool, r route, client *ssh.Client, w *wire) *Conn {
	c := &Conn{
		pool: p, target: r.target, settings: r.settings, client: client, wire: w, shared: r.shared,
		deadAfter: p.cfg.DeadAfter, keepAlive: p.cfg.KeepAlive,
		sessions: make(chan struct{}, p.cfg.MaxSessions),
		become:   escalation{turn: make(chan struct{}, 1)},
		ended:    make(chan struct{}),
	}
	if s := r.settings; s.ServerAliveInterval > 0 {
		c.keepAlive = s.ServerAliveInterval
		c.deadAfter = s.ServerAliveInterval * time.Duration(s.ServerAliveCountMax)
	}
	c.keepAlive = min(c.keepAlive, c.deadAfter/3)
	c.wg.Go(c.waitForEnd)
	c.wg.Go(c.watch)
	c.wg.Go(c.probe)
	return c
}

// Target is what was dialled.
func (c *Conn) Target() Target { return c.target }

// Settings are the settings that the connection was made with.
func (c *Conn) Settings() Settings { return c.settings }

// Done is closed when the connection has ended, for whatever reason.
func (c *Conn) Done() <-chan struct{} { return c.ended }

// Err is nil while the connection stands, then an error that wraps ErrLost, or
// net.ErrClosed after Close.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cause
}

// Close ends the connection and waits for what was under way on it. Remote
// commands are not killed.
func (c *Conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	err := c.wire.Close()
	c.wg.Wait()
	c.pool.mu.Lock()
	delete(c.pool.conns, c)
	c.pool.mu.Unlock()
	if err != nil && !errors.Is(err, net.ErrClosed) && c.Err() == nil {
		return fmt.Errorf("closing the connection to %q: %w", c.target.label(), err)
	}
	return nil
}

// fail ends the connection with a reason; the first one counts.
func (c *Conn) fail(err error) {
	c.mu.Lock()
	if c.cause == nil {
		c.cause = err
	}
	c.mu.Unlock()
	_ = c.wire.Close()
}

func (c *Conn) waitForEnd() {
	err := c.client.Wait()
	c.mu.Lock()
	if c.cause == nil {
		if c.closed {
			c.cause = net.ErrClosed
		} else {
			c.cause = fmt.Errorf("%w: %w", ErrLost, err)
		}
	}
	c.mu.Unlock()
	_ = c.wire.Close()
	close(c.ended)
}

// watch gives the connection up when nothing was heard for deadAfter.
func (c *Conn) watch() {
	for {
		left := c.deadAfter - c.wire.silence()
		if left <= 0 {
			c.fail(fmt.Errorf("%w: nothing heard for %v", ErrLost, c.deadAfter))
			return
		}
		t := time.NewTimer(left)
		select {
		case <-t.C:
		case <-c.ended:
			t.Stop()
			return
		}
	}
}

// probe makes a silent peer speak. It waits for each answer as long as it takes.
func (c *Conn) probe() {
	tick := time.NewTicker(c.keepAlive)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-c.ended:
			return
		}
		if c.wire.silence() < c.keepAlive/2 {
			continue
		}
		if _, _, err := c.client.SendRequest("keepalive@openssh.com", true, nil); err != nil {
			return // the connection has ended
		}
	}
}

// lost gives the connection's own error where err is but its echo.
func (c *Conn) lost(err error) error {
	select {
	case <-c.ended:
		return c.Err()
	default:
	}
	if c.Err() != nil {
		return c.Err()
	}
	return err
}

// DialContext connects from the host to addr: network "tcp" with "host:port", or
// "unix" with a path. It costs no session of sshd's MaxSessions. The result knows
// no deadlines. The error wraps ErrLost when the connection has ended, ErrForward
// when sshd does not let it connect to anywhere or to addr.
func (c *Conn) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := c.client.DialContext(ctx, network, addr)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if refused, ok := errors.AsType[*ssh.OpenChannelError](err); ok && refused.Reason == ssh.Prohibited {
			err = fmt.Errorf("%w: %w", ErrForward, err)
		}
		return nil, fmt.Errorf("connecting from %q to %s: %w", c.target.label(), addr, c.lost(err))
	}
	return nc, nil
}
