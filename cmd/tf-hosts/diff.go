package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"al.essio.dev/pkg/shellescape"
	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/runner"
)

type diffOptions struct{ build bool }

func (o *diffOptions) addFlags(c *cobra.Command) {
	c.Flags().BoolVar(&o.build, "build", false, "build the system of the setup where it is not built here")
}

func newDiffCommand(p *program) *cobra.Command {
	opts := &diffOptions{}
	c := &cobra.Command{
		Use:   "diff NODE",
		Short: "compare what a node's host runs with what the setup would deploy",
		Long: `diff asks the node's host for the closure of the system that runs there, and compares
it package by package with the system of the setup: versions, sizes, what is added and
what is removed. It changes nothing on the host and reads no state. With --json stdout
is one object.

The system of the setup must be built on this machine, or --build builds it.

Exit 6: the host could not be asked.`,
		Args: cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes,
		RunE: func(c *cobra.Command, args []string) error { return p.runDiff(c.Context(), opts, args) },
	}
	opts.addFlags(c)
	return c
}

func (p *program) runDiff(ctx context.Context, opts *diffOptions, args []string) error {
	if len(args) != 1 {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts diff NODE", errors.New("diff takes one node"))
	}
	s, err := p.loadSetup(true)
	if err != nil {
		return err
	}
	n, err := nodeNamed(s, args[0])
	if err != nil {
		return err
	}
	pool, done, err := p.lookingPool(s)
	if err != nil {
		return err
	}
	ctx, stop := p.untilInterrupt(ctx, "interrupted; nothing was changed")
	defer stop()
	w := (&worker{dir: s.Dir, pool: pool, nixCfg: nix.Config{Options: s.Runner.NixOptions}}).with(p.teller.event)
	diff, err := w.diff(ctx, args[0], n, opts.build)
	if err := errors.Join(err, done()); err != nil {
		return err
	}
	if p.jsonLog {
		enc := json.NewEncoder(p.stdout)
		enc.SetIndent("", "  ")
		err = enc.Encode(diff)
	} else {
		_, err = fmt.Fprintf(p.stdout, "%s -> %s\n", diff.Old, diff.New)
		for _, line := range diffLines(diff) {
			if err == nil {
				_, err = fmt.Fprintln(p.stdout, tfhosts.Printable(line))
			}
		}
	}
	if err != nil {
		return fmt.Errorf("printing the diff: %w", err)
	}
	return nil
}

// diff compares what the host runs with the system of the setup.
func (w *worker) diff(ctx context.Context, name string, n tfhosts.SetupNode, build bool) (*tfhosts.Diff, error) {
	system, err := w.systemOf(ctx, name, n, build)
	if err != nil {
		return nil, err
	}
	wanted, err := w.nix.Closures(ctx, []string{system})
	if err != nil {
		return nil, err
	}
	if wanted[system] == nil {
		return nil, tfhosts.WithExit(tfhosts.ExitFailed, "tf-hosts diff --build "+shellescape.Quote(name),
			fmt.Errorf("comparing %q: its system %s is not built here", name, system))
	}
	running, paths, err := w.runner.Closure(ctx, runner.ObserveRequest{Name: name, Node: n.Node, Settings: n.Runner})
	if err != nil {
		hint := ""
		var unseen *runner.ClosureError
		if errors.As(err, &unseen) {
			hint = unseen.Hint
		}
		return nil, tfhosts.WithExit(tfhosts.ExitNodesFailed, hint, fmt.Errorf("comparing %q: %w", name, err))
	}
	d := nix.Diff(paths, wanted[system])
	d.Old, d.New = running, system
	return &d, nil
}

// systemOf is the store path of the system that the setup has for a node.
func (w *worker) systemOf(ctx context.Context, name string, n tfhosts.SetupNode, build bool) (string, error) {
	identity, err := w.identity(ctx, name, n.NixosConf, n.ConfigIdentity)
	if err != nil {
		return "", fmt.Errorf("evaluating %q: %w", name, err)
	}
	if build {
		built, err := w.build(ctx, []string{identity})
		if err == nil {
			err = built[identity].Err
		}
		if err != nil {
			return "", fmt.Errorf("building %q: %w", name, err)
		}
		return built[identity].Out, nil
	}
	if !nix.IsDerivation(identity) {
		return identity, nil
	}
	outs, err := w.nix.Outputs(ctx, []string{identity})
	if err == nil && outs[identity] == "" {
		err = tfhosts.WithExit(tfhosts.ExitFailed, "tf-hosts diff --build "+shellescape.Quote(name),
			fmt.Errorf("comparing %q: the derivation %s is not known here", name, identity))
	}
	return outs[identity], err
}
