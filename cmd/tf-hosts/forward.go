package main

import (
	"context"
	"net"
	"sync"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/hostconn"
)

// forward dials through a node's connection. The node may be the one that an
// apply restarts while it serves the state, so a connection that was lost is
// made again.
type forward struct {
	open func(context.Context) (*hostconn.Conn, error)

	mu     sync.Mutex
	conn   *hostconn.Conn
	closed bool
}

// forward opens a connection to a node, through which the backend is reached.
func (w *worker) forward(ctx context.Context, name string, n tfhosts.SetupNode) (bootstrap.Forward, error) {
	target, err := hostconn.TargetOf(name, n.Node, n.Runner)
	if err != nil {
		return bootstrap.Forward{}, err
	}
	f := &forward{open: func(ctx context.Context) (*hostconn.Conn, error) {
		return w.pool.Dial(ctx, target)
	}}
	conn, err := f.current(ctx)
	if err != nil {
		return bootstrap.Forward{}, err
	}
	return bootstrap.Forward{Dial: f.dial, Close: f.close, ConnectLimit: conn.Settings().ConnectTimeout}, nil
}

func (f *forward) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := f.current(ctx)
	if err != nil {
		return nil, err
	}
	return conn.DialContext(ctx, network, addr)
}

// current is the connection, made anew when it was lost.
func (f *forward) current(ctx context.Context) (*hostconn.Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, net.ErrClosed
	}
	if f.conn != nil {
		if f.conn.Err() == nil {
			return f.conn, nil
		}
		_ = f.conn.Close() // it is lost: there is nothing to end
		f.conn = nil
	}
	// A try of the client's is shorter than a login over a slow link may be: the
	// pool's own limits hold, and the next try finds the connection.
	conn, err := f.open(context.WithoutCancel(ctx))
	if err != nil {
		return nil, err
	}
	f.conn = conn
	return conn, nil
}

func (f *forward) close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if f.conn == nil {
		return nil
	}
	return f.conn.Close()
}
