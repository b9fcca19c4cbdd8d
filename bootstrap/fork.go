package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"

	"golang.org/x/sync/errgroup"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

// mayExist says why cycle 1 must not start on an empty working dir though
// nothing answers at the backend's address: a node that may serve the state can
// not be asked, or it serves one, and the address is at fault (a name that does
// not resolve, a proxy that is down). nil: there is no state to fork.
//
// Where no node is named (BOOTSTRAP_SELF_BACKEND=1 alone, FR-008) it is still
// one of the graph's that serves: the one that the address names, else any of
// them, so each is asked.
func (s *session) mayExist(ctx context.Context) error {
	if s.Worker.Forward == nil {
		return nil
	}
	if self := s.Setup.Self; self != nil {
		address, err := derivedAddress(self, s.Setup.Nodes[self.Node].Host)
		if err != nil {
			return err
		}
		return s.servesState(ctx, self.Node, address)
	}
	u, err := url.Parse(s.Setup.Backend.Address)
	if err != nil {
		return errors.New("the backend's address is no URL")
	}
	var asked []string
	for _, name := range tfhosts.SortedNames(s.Setup.Nodes) {
		switch {
		case !s.member(name):
		case s.Setup.Nodes[name].Host == u.Hostname():
			return s.servesState(ctx, name, s.Setup.Backend.Address)
		default:
			asked = append(asked, name)
		}
	}
	var group errgroup.Group
	group.SetLimit(askedAtOnce)
	errs := make([]error, len(asked))
	for i, name := range asked {
		group.Go(func() error {
			errs[i] = s.servesState(ctx, name, onHost(*u, s.Setup.Nodes[name].Host))
			return nil
		})
	}
	return errors.Join(group.Wait(), errors.Join(errs...))
}

// askedAtOnce bounds the connections that are made at a time: sshd of a shared
// bastion refuses more than MaxStartups (10) that have not logged in yet.
const askedAtOnce = 10

// onHost is an address with another host.
func onHost(u url.URL, host string) string {
	if port := u.Port(); port != "" {
		u.Host = net.JoinHostPort(host, port)
	} else {
		u.Host = host
		if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
			u.Host = "[" + host + "]"
		}
	}
	return u.String()
}

// servesState is an error when a node serves a state at an address, as seen from
// the node, or can not be asked.
func (s *session) servesState(ctx context.Context, name, address string) error {
	forward, err := s.Worker.Forward(ctx, name, s.Setup.Nodes[name])
	if err != nil {
		return fmt.Errorf("node %q can not be asked whether it serves the state: %w", name, err)
	}
	if err := forward.Close(); err != nil {
		return fmt.Errorf("asking node %q for the state: %w", name, err)
	}
	f, err := s.try(ctx, place{address: address, through: name})
	switch {
	case errors.Is(err, api.ErrUnreachable):
		return nil
	case err != nil:
		return fmt.Errorf("node %q has a server that may hold the state: %w", name, err)
	}
	exists := f.gone || f.body != nil
	if err := f.close(); err != nil {
		return err
	}
	if exists {
		return fmt.Errorf("node %q serves the state at %s", name, address)
	}
	return nil
}
