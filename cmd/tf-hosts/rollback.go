package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/runner"
)

type rollbackOptions struct{ to string }

func (o *rollbackOptions) addFlags(c *cobra.Command) {
	c.Flags().StringVar(&o.to, "to", "", "a system that is on the host, as /nix/store/… (default: the one before the last deploy)")
}

func newRollbackCommand(p *program) *cobra.Command {
	opts := &rollbackOptions{}
	c := &cobra.Command{
		Use:   "rollback NODE [--to PATH]",
		Short: "take a node back to the system that it ran before",
		Long: `rollback activates another system that is on the node's host already: the one that
ran before the last deploy that changed it, as verdict.json of the working dir has
it, or the one of --to. The activation is guarded as that of a deploy, and ends in a
verdict; a second rollback goes forth again.

The node's resource is tainted right before its host is changed: the next apply
deploys the system of the setup again, unless the setup is reverted first. Where
the host refuses before that (not reached, the system is not there), nothing is
tainted. A group's state is not worked on: the setup must be run without "all".`,
		Args: cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes,
		RunE: func(c *cobra.Command, args []string) error { return p.runRollback(c.Context(), opts, args) },
	}
	opts.addFlags(c)
	return c
}

func (p *program) runRollback(ctx context.Context, opts *rollbackOptions, args []string) error {
	if len(args) != 1 {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts rollback NODE", errors.New("rollback takes one node"))
	}
	if err := p.checkBootstrap("rollback"); err != nil {
		return err
	}
	cfg, w, err := p.wrapperConfig()
	if err != nil {
		return err
	}
	if _, err := nodeNamed(cfg.Setup, args[0]); err != nil {
		return errors.Join(err, w.close())
	}
	cfg.Answer = p.teller // what OpenTofu says of the taint is part of the story
	p.code, err = bootstrap.Rollback(ctx, cfg, bootstrap.RollbackOptions{Node: args[0], To: opts.to, Back: w.rollback})
	return errors.Join(err, w.close())
}

// rollback is the worker's half of it.
func (w *worker) rollback(ctx context.Context, req bootstrap.DeployRequest, changing func(context.Context) error) tfhosts.Verdict {
	return w.runner.Rollback(ctx, runner.Request{
		Name: req.Name, Node: req.Node, Settings: req.Settings, Built: req.Built.Out, Drop: req.Drop,
	}, changing)
}
