package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"fediversity.eu/tf-hosts/bootstrap"
)

func newRestoreCommand(p *program) *cobra.Command {
	opts := &bootstrap.RestoreOptions{}
	c := &cobra.Command{
		Use:   "state-restore",
		Short: "put the last state that this machine knows back on an empty backend",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return p.runRestore(c.Context(), *opts) },
	}
	addRestoreFlags(c, opts)
	return c
}

func addRestoreFlags(c *cobra.Command, opts *bootstrap.RestoreOptions) {
	c.Flags().BoolVar(&opts.Local, "local", false, "make it the local state, when the backend's machine is gone for good; then BOOTSTRAP=1 tf-hosts apply")
}

func (p *program) runRestore(ctx context.Context, opts bootstrap.RestoreOptions) error {
	if err := p.checkBootstrap("state-restore"); err != nil {
		return err
	}
	cfg, w, err := p.wrapperConfig()
	if err != nil {
		return err
	}
	cfg.Verb = bootstrap.VerbRestore()
	p.code, err = bootstrap.Restore(ctx, cfg, opts)
	return errors.Join(err, w.close())
}
