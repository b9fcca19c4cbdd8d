package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
)

type allOptions struct {
	groups []string
}

func (o *allOptions) addFlags(c *cobra.Command) {
	c.PersistentFlags().StringArrayVar(&o.groups, groupFlag, nil, "run this group; may be given several times (default: all groups)")
}

const groupFlag = "group"

func newAllCommand(p *program) *cobra.Command {
	opts := &allOptions{}
	all := &cobra.Command{
		Use:   "all VERB [-- OPENTOFU-FLAGS]",
		Short: "run a verb on every group of nodes as a graph of its own",
		Long: `all runs a verb on every group of the setup as a graph of its own, in parallel.
Each group has a state of its own, at the address with "-GROUP" behind its path.
Every node must have a group. An address is used either by all or without it.

Running deploys share one limit, runner.parallelism or -parallelism. With
BOOTSTRAP=1 the group of the self_backend node runs first and alone; a destroy
runs it last, and a destroy at a terminal is asked about once, before any group
begins. There is one verdict table at the end, and the exit code is that
of the group that ended worst.

A node's name as the argument of a verb runs it in the group of that node. What
concerns one state (a plan file, force-unlock, state-push) needs --group GROUP.

stderr: each line begins with "[GROUP] ". stdout, when all have ended:
  apply, state-pull, and output, show, validate with -json
                      one JSON document, keyed by group; a group without an
                      answer is not in it
  other verbs, -json  one object a line, with a member "group"
  other verbs         text, each line behind "[GROUP] "
With exactly one --group it is that group's answer, as without all.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			verb, err := p.bareVerb(c, args)
			if err != nil || verb == nil {
				return err
			}
			return p.runAll(c.Context(), &verbOptions{}, opts, *verb, nil, nil)
		},
	}
	all.SuggestionsMinimumDistance = 2
	opts.addFlags(all)
	for _, v := range tfhosts.Verbs() {
		all.AddCommand(newAllVerbCommand(p, opts, v))
	}
	restore := &bootstrap.RestoreOptions{}
	r := newRestoreCommand(p)
	r.ResetFlags()
	addRestoreFlags(r, restore)
	r.RunE = func(c *cobra.Command, _ []string) error {
		if err := p.checkBootstrap("state-restore"); err != nil {
			return err
		}
		return p.runAll(c.Context(), &verbOptions{}, opts, bootstrap.VerbRestore(), nil, restore)
	}
	all.AddCommand(r)
	return all
}

func newAllVerbCommand(p *program, all *allOptions, verb tfhosts.Verb) *cobra.Command {
	opts := &verbOptions{}
	c := newVerbCommand(p, verb)
	c.GroupID = ""
	c.ResetFlags()
	opts.addFlags(c, verb)
	c.RunE = func(c *cobra.Command, args []string) error {
		if err := p.checkBootstrap(verb.Name); err != nil {
			return err
		}
		return p.runAll(c.Context(), opts, all, verb, args, nil)
	}
	return c
}

// runAll runs one verb on every group.
func (p *program) runAll(ctx context.Context, opts *verbOptions, all *allOptions, verb tfhosts.Verb, args []string, restore *bootstrap.RestoreOptions) error {
	if asksHelp(args) {
		return p.tofuHelp(ctx, verb)
	}
	cfg, w, err := p.wrapperConfig()
	if err != nil {
		return err
	}
	p.forVerb(&cfg, opts, verb, args)
	// The connections are shared; what they tell has a node and no group.
	p.teller.groupOf = func(node string) string { return cfg.Setup.Nodes[node].Group }
	p.code, err = bootstrap.RunAll(ctx, cfg, bootstrap.AllOptions{
		Groups: all.groups, Restore: restore,
		Worker: func(_ string, events func(tfhosts.Event)) bootstrap.Worker { return w.with(events).funcs() },
	})
	return errors.Join(err, w.close())
}

// bareVerb is the verb of a command line that names none: TF_VERB, or apply with
// BOOTSTRAP=1. Without either there is help, and nil.
func (p *program) bareVerb(c *cobra.Command, args []string) (*tfhosts.Verb, error) {
	if len(args) > 0 {
		return nil, noVerbError(c, args[0])
	}
	if err := p.checkBootstrap(""); err != nil {
		return nil, err
	}
	name := p.environment().Value("TF_VERB")
	if name == "" {
		on, err := p.environment().Bool("BOOTSTRAP")
		if err != nil || !on {
			return nil, errors.Join(err, c.Help())
		}
		name = "apply"
	}
	verb, ok := tfhosts.LookupVerb(name)
	if !ok {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts --help", fmt.Errorf("TF_VERB: there is no verb %q", name))
	}
	return &verb, nil
}
