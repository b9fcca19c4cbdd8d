package bootstrap

import (
	"context"
	"errors"
	"fmt"

	"fediversity.eu/tf-hosts/backend/api"
)

// mayExist says why cycle 1 must not start on an empty working dir though
// nothing answers at the backend's address: the node that serves the state can
// not be asked, or it serves one, and the address is at fault (a name that does
// not resolve, a proxy that is down). nil: there is no state to fork.
func (s *session) mayExist(ctx context.Context) error {
	self := s.Setup.Self
	if self == nil || s.Worker.Forward == nil {
		return nil
	}
	node := s.Setup.Nodes[self.Node]
	forward, err := s.Worker.Forward(ctx, self.Node, node)
	if err != nil {
		return fmt.Errorf("node %q can not be asked whether it serves the state: %w", self.Node, err)
	}
	if err := forward.Close(); err != nil {
		return fmt.Errorf("asking node %q for the state: %w", self.Node, err)
	}
	address, err := derivedAddress(self, node.Host)
	if err != nil {
		return err
	}
	f, err := s.try(ctx, place{address: address, through: self.Node})
	switch {
	case errors.Is(err, api.ErrUnreachable):
		return nil
	case err != nil:
		return fmt.Errorf("node %q has a server that may hold the state: %w", self.Node, err)
	}
	exists := f.gone || f.body != nil
	if err := f.close(); err != nil {
		return err
	}
	if exists {
		return fmt.Errorf("node %q serves the state at %s", self.Node, address)
	}
	return nil
}
