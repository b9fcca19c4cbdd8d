package hostconn

import (
	"context"
	"fmt"
	"strings"
)

// CheckKeys says which keys a Dial to t would offer, as fingerprints with their
// origin. It reads the key files and asks the agent, and connects to no host.
// The error wraps ErrAuth when there is no key to offer, or when the target's
// key file can not be used: missing, unreadable, or encrypted without an agent
// that holds it; it is an *OptionError where Dial would give one.
func (p *Pool) CheckKeys(ctx context.Context, t Target) ([]string, error) {
	s, err := resolve(t, p.cfg)
	if err != nil {
		return nil, fmt.Errorf("resolving the SSH settings of %q: %w", t.label(), err)
	}
	cred, err := loadCredentials(ctx, route{target: t, settings: s})
	if err != nil {
		return nil, err
	}
	defer cred.close()
	if len(cred.names) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrAuth, strings.Join(append([]string{"there is no key to offer"}, cred.notes...), "; "))
	}
	return cred.names, nil
}
