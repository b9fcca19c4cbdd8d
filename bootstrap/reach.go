package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

// Forward dials through a node's SSH connection.
type Forward struct {
	Dial  func(ctx context.Context, network, addr string) (net.Conn, error)
	Close func() error
	// ConnectLimit bounds each Dial: the node's ConnectTimeout; zero is the
	// limit of a direct connection.
	ConnectLimit time.Duration
}

// found is a state server that answered.
type found struct {
	client *client.Client
	served Served
	// body is the state that it holds, nil when it has none.
	body  []byte
	gone  bool
	close func() error
}

// place is one way to reach the backend.
type place struct {
	address string
	through string // node, or empty
	// asIs: the configured address, with its own lock addresses.
	asIs bool
}

// places lists the ways to the backend, in the order in which they are tried.
// An address that served is used again and no other: falling through to another
// one would find another state, or none.
func (s *session) places() ([]place, error) {
	b, self := s.Setup.Backend, s.Setup.Self
	if served := s.ledger.Served; served != nil {
		p := []place{{address: served.Address, through: served.Through, asIs: served.Address == b.Address}}
		if self != nil && served.Through == "" {
			p = append(p, place{address: served.Address, through: self.Node, asIs: p[0].asIs})
		}
		return p, nil
	}
	p := []place{{address: b.Address, asIs: true}}
	if self == nil {
		return p, nil
	}
	if b.Pinned {
		return append(p, place{address: b.Address, through: self.Node, asIs: true}), nil
	}
	derived, err := derivedAddress(self, s.Setup.Nodes[self.Node].Host)
	if err != nil {
		return nil, err
	}
	return append(p, place{address: derived}, place{address: derived, through: self.Node}), nil
}

// derivedAddress is where the graph's own backend serves, by its node.
func derivedAddress(self *tfhosts.SelfBackend, host string) (string, error) {
	u := url.URL{Scheme: self.Scheme, Host: net.JoinHostPort(host, strconv.Itoa(self.Port))}
	if u.Scheme == "" {
		u.Scheme = "http"
	}
	// The path is one as it stands in an address: escaped, and perhaps with a query.
	address := u.String() + self.Path
	if _, err := url.Parse(address); err != nil {
		return "", fmt.Errorf("deriving the backend's address from node %q: %w", self.Node, err)
	}
	return address, nil
}

// reach looks for the backend at each place in turn. Without a server anywhere
// it gives nil and the reason, an api.ErrUnreachable. What answers and is no
// state server, or does not let us in, is an error: cycle 1 must never start
// beside a server that may hold the state.
func (s *session) reach(ctx context.Context) (*found, error) {
	if err := s.fault("backend.reach"); err != nil {
		return nil, err
	}
	places, err := s.places()
	if err != nil {
		return nil, err
	}
	var away []error
	for _, p := range places {
		f, err := s.try(ctx, p)
		if s.tried != nil {
			s.tried(Tried{Served: Served{Address: p.address, Through: p.through}, Err: err})
		}
		switch {
		case err == nil:
			return f, nil
		case errors.Is(err, api.ErrUnreachable):
			away = append(away, err)
		case !p.asIs || s.Setup.Backend.Pinned || s.Setup.Self == nil || !errors.Is(err, api.ErrNoState):
			return nil, err
		default:
			// The unpinned default, where something else than a state server listens.
			s.notice(fmt.Sprintf("what answers at %s is no state server; looking at node %q", p.address, s.Setup.Self.Node))
			away = append(away, err)
		}
	}
	return nil, fmt.Errorf("%w: %w", api.ErrUnreachable, errors.Join(away...))
}

// try probes one place.
func (s *session) try(ctx context.Context, p place) (*found, error) {
	cfg, err := client.FromBackend(s.Setup.Backend)
	if err != nil {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "correct http_backend in the setup file", err)
	}
	if !p.asIs {
		cfg.Address, cfg.LockAddress, cfg.UnlockAddress = p.address, "", ""
	}
	closeForward := func() error { return nil }
	if p.through != "" {
		if s.Worker.Forward == nil {
			return nil, fmt.Errorf("%w: no way through node %q", api.ErrUnreachable, p.through)
		}
		node, ok := s.Setup.Nodes[p.through]
		if !ok {
			return nil, fmt.Errorf("%w: node %q is not in the setup", api.ErrUnreachable, p.through)
		}
		forward, err := s.Worker.Forward(ctx, p.through, node)
		if err != nil {
			return nil, fmt.Errorf("%w: through node %q: %w", api.ErrUnreachable, p.through, err)
		}
		cfg.DialContext, closeForward = onNode(forward.Dial, node.Host), forward.Close
		cfg.DialTimeout = forward.ConnectLimit
	}
	c, err := client.New(cfg)
	if err != nil {
		return nil, errors.Join(tfhosts.WithExit(tfhosts.ExitUsage, "correct http_backend in the setup file", err), closeForward())
	}
	f := &found{client: c, served: Served{Address: p.address, Through: p.through}}
	f.close = func() error { c.Close(); return closeForward() }
	probe, err := c.Probe(ctx)
	switch {
	case errors.Is(err, api.ErrGone):
		f.gone = true
		return f, nil
	case err != nil:
		return nil, errors.Join(err, f.close())
	}
	if probe.Kind == client.KindState {
		f.body = probe.Body
	}
	return f, nil
}

// onNode dials the node's own address on its loopback: a state server behind a
// forward often listens there alone.
func onNode(dial func(context.Context, string, string) (net.Conn, error), host string) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		h, port, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, err
		}
		if h != host {
			return dial(ctx, network, addr)
		}
		conn, err := dial(ctx, network, net.JoinHostPort("localhost", port))
		if err == nil {
			return conn, nil
		}
		other, oerr := dial(ctx, network, addr)
		if oerr != nil {
			return nil, errors.Join(err, oerr)
		}
		return other, nil
	}
}
