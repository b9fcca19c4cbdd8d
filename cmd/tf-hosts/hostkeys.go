package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/hostconn"
)

func newHostKeysCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "host-keys [NODE...]",
		Short: "print the host keys that the nodes show, as pins for the setup",
		Long: `host-keys asks each node for its host key and prints the keys as JSON, ready for
SSH_NODES or for host_key in the setup file. NODE is a name, a glob, @tag or
!exclude; without any, all nodes are asked. A host with several keys is asked for
the pinned or known one, else for its ed25519 key.

It logs in nowhere but on jump hosts, changes nothing and remembers nothing. What
is printed is what the network shows: compare a new or changed key with what the
host itself says (ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub on its console).

stderr says for each node whether its key is the pinned one, is in known_hosts, is
new or has changed. Exit 1: a key has changed. Exit 6: a node could not be asked.`,
		Example:           "  SSH_NODES=$(tf-hosts host-keys) tf-hosts plan\n  tf-hosts host-keys prod.app1",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: p.completeNodes,
		RunE:              func(c *cobra.Command, args []string) error { return p.runHostKeys(c.Context(), args) },
	}
}

func (p *program) runHostKeys(ctx context.Context, args []string) error {
	s, err := p.loadSetup(true)
	if err != nil {
		return err
	}
	if len(args) == 0 {
		args = []string{"*"}
	}
	names, err := tfhosts.Select(s.Nodes, args)
	if err != nil {
		return err
	}
	pool, done, err := p.lookingPool(s)
	if err != nil {
		return err
	}
	ctx, stop := p.untilInterrupt(ctx, "interrupted; nothing was changed")
	defer stop()
	keys := make([]hostconn.HostKey, len(names))
	failed := make([]error, len(names))
	var group errgroup.Group
	group.SetLimit(parallelism(s))
	for i, name := range names {
		group.Go(func() error {
			var target hostconn.Target
			if target, failed[i] = hostconn.TargetOf(name, s.Nodes[name].Node, s.Nodes[name].Runner); failed[i] == nil {
				keys[i], failed[i] = pool.HostKey(ctx, target)
			}
			return nil
		})
	}
	if err := errors.Join(group.Wait(), done()); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return p.tellHostKeys(names, keys, failed)
}

// tellHostKeys prints the keys, and says what they are.
func (p *program) tellHostKeys(names []string, keys []hostconn.HostKey, failed []error) error {
	type pin struct {
		HostKey string `json:"host_key"`
	}
	pins := map[string]pin{}
	changed, unasked := 0, 0
	for i, name := range names {
		if failed[i] != nil {
			unasked++
			p.teller.event(tfhosts.Event{Kind: tfhosts.EventError, Node: name, Message: tfhosts.Printable(failed[i].Error())})
			continue
		}
		pins[name] = pin{keys[i].Pin}
		e := tfhosts.Event{Kind: tfhosts.EventNotice, Node: name, Op: "hostkey", Message: standing(keys[i])}
		if keys[i].Standing == hostconn.KeyChanged {
			changed++
			e.Kind = tfhosts.EventWarning
		}
		p.teller.event(e)
	}
	enc := json.NewEncoder(p.stdout)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(pins); err != nil {
		return fmt.Errorf("printing the host keys: %w", err)
	}
	var errs []error
	if changed > 0 {
		errs = append(errs, tfhosts.WithExit(tfhosts.ExitFailed,
			"pin a new key only when the host itself says the same: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub on its console",
			fmt.Errorf("%s changed", english.Plural(changed, "host key has", "host keys have"))))
	}
	if unasked > 0 {
		errs = append(errs, tfhosts.WithExit(tfhosts.ExitNodesFailed, "",
			fmt.Errorf("%d of %s could not be asked", unasked, english.Plural(len(names), "node", ""))))
	}
	return errors.Join(errs...) // the first code counts
}

// standing is what is known of a key, in words.
func standing(k hostconn.HostKey) string {
	switch k.Standing {
	case hostconn.KeyPinned:
		return k.Fingerprint + " is the pinned key"
	case hostconn.KeyKnown:
		return k.Fingerprint + " is in known_hosts and not pinned"
	case hostconn.KeyChanged:
		return k.Fingerprint + " is not the expected key: want " + strings.Join(k.Want, " or ")
	}
	return k.Fingerprint + " is new: nothing is pinned or known"
}

// lookingPool makes connections for a verb that only looks: it trusts the keys
// that the working dir knows and adds none, a look being no reason to trust. done
// must be called.
func (p *program) lookingPool(s *tfhosts.Setup) (_ *hostconn.Pool, done func() error, err error) {
	stateDir, err := p.stateDir()
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp("", "tf-hosts-look-")
	if err != nil {
		return nil, nil, fmt.Errorf("making a folder for known hosts: %w", err)
	}
	known := filepath.Join(dir, "known_hosts")
	if text, err := os.ReadFile(bootstrap.KnownHosts(bootstrap.WorkDir(stateDir, s.Backend.Address))); err == nil {
		if err := os.WriteFile(known, text, 0o600); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("copying the known hosts: %w", err), os.RemoveAll(dir))
		}
	}
	pool := hostconn.NewPool(hostconn.Config{KnownHosts: known, Events: func(e tfhosts.Event) {
		if e.Kind == tfhosts.EventWarning {
			p.teller.event(e)
		}
	}})
	return pool, func() error { return errors.Join(pool.Close(), os.RemoveAll(dir)) }, nil
}
