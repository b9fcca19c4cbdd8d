package main

import (
	"context"
	"errors"
	"fmt"

	"al.essio.dev/pkg/shellescape"
	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/nix"
)

func newStatusCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "look at the hosts: what they run, and whether that is what was deployed",
		Long: `status looks at the hosts, --on or all, as many at once as runner.parallelism says,
over one connection each, and compares them with what the state says was deployed
last. It takes no lock and changes nothing. Where the state can not be read it warns
and compares with what this machine deployed last.

STATE is ok, or
  drifted: FIELDS   running, profile, default (of the boot loader) or units (one
                    failed) is not as it was left
  pending           the setup has another system; the next apply deploys it
  tainted           the last deploy failed; the next apply deploys it again
  wanted unknown    never deployed, or the system of the state is not known here
  unreachable, auth_failed, host_key_changed, timeout: not looked at

SINCE is when the running system was switched to, by the host's clock. With --json
stdout is one document, {"nodes": […]}.

Exit 2: a node drifted. Exit 6, which wins: a node could not be looked at.`,
		Example: "  tf-hosts status\n  tf-hosts status --on @web --json",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts status --on "+shellescape.Quote(args[0]), fmt.Errorf("status takes no operand %q", args[0]))
		},
		RunE: func(c *cobra.Command, _ []string) error { return p.runStatus(c.Context()) },
	}
}

func (p *program) runStatus(ctx context.Context) error {
	s, err := p.loadSetup(false)
	if err != nil {
		return err
	}
	names := tfhosts.SortedNames(s.Nodes)
	if on := p.environment().Value("TF_HOSTS_ON"); on != "" {
		if names, err = tfhosts.Select(s.Nodes, []string{on}); err != nil {
			return err
		}
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return err
	}
	self, err := p.environment().Bool("BOOTSTRAP_SELF_BACKEND")
	if err != nil {
		return tfhosts.WithExit(tfhosts.ExitUsage, "unset it, or set it to 1", err)
	}
	pool, done, err := p.lookingPool(s)
	if err != nil {
		return err
	}
	ctx, stop := p.untilInterrupt(ctx, "interrupted; nothing was changed")
	defer stop()
	// Without a folder for roots: a look keeps nothing.
	w := (&worker{dir: s.Dir, pool: pool, nixCfg: nix.Config{Options: s.Runner.NixOptions}}).with(nil)
	seen, err := bootstrap.Status(ctx, bootstrap.Config{
		Setup: s, StateDir: stateDir, SelfBackend: self || s.Bootstrap, Interrupt: p.interrupt,
		Events: p.teller.event, Worker: w.funcs(),
	}, names)
	if err := errors.Join(err, done()); err != nil {
		return err
	}
	if p.jsonLog {
		err = bootstrap.WriteObservedJSON(p.stdout, seen, "  ")
	} else {
		err = bootstrap.WriteObserved(p.stdout, seen)
	}
	if err != nil {
		return err
	}
	bootstrap.TellUnseen(seen, p.teller.event)
	p.code = bootstrap.ObservedCode(seen)
	return nil
}
