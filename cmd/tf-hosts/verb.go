package main

import (
	"context"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/tofu"
)

type verbOptions struct {
	ask bool
}

func (o *verbOptions) addFlags(c *cobra.Command, verb tfhosts.Verb) {
	if verb.Name == "apply" {
		c.Flags().BoolVar(&o.ask, "ask", false, "show the plan and ask before it is applied")
	}
}

func newVerbCommand(p *program, verb tfhosts.Verb) *cobra.Command {
	opts := &verbOptions{}
	c := &cobra.Command{
		Use:               verb.Name + " [-- OPENTOFU-FLAGS]",
		Short:             verb.Short,
		GroupID:           "tofu",
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: p.completeNodes,
		RunE: func(c *cobra.Command, args []string) error {
			if err := p.checkBootstrap(verb.Name); err != nil {
				return err
			}
			return p.runVerb(c.Context(), opts, verb, args)
		},
	}
	opts.addFlags(c, verb)
	return c
}

// runVerb runs one verb of OpenTofu's on the graph.
func (p *program) runVerb(ctx context.Context, opts *verbOptions, verb tfhosts.Verb, args []string) error {
	s, err := p.loadSetup(false)
	if err != nil {
		return err
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return err
	}
	cacheDir, err := p.cacheDir()
	if err != nil {
		return err
	}
	self, err := runArgv()
	if err != nil {
		return err
	}
	workDir := bootstrap.WorkDir(stateDir, s.Backend.Address)
	w := newWorker(s, workDir, p.teller.event)
	cfg := bootstrap.Config{
		Setup: s, Verb: verb, Args: args, StateDir: stateDir, CallerDir: p.dir, Executable: self,
		Engine:  tofu.FindConfig{Explicit: p.environment().Value("TF_HOSTS_TOFU"), CacheDir: cacheDir},
		Environ: p.environ, Answer: p.stdout, Story: p.teller, Stdin: p.stdin,
		Color: p.colored(p.stdout), Events: p.teller.event, Interrupt: p.interrupt, Worker: w.funcs(),
	}
	if verb.Name == "apply" || verb.Name == "destroy" {
		cfg.Color = p.colored(p.stderr)
	}
	if opts.ask || verb.Name == "destroy" && isTerminal(p.stdin) && isTerminal(p.stderr) && p.getenv("CI") == "" {
		cfg.Ask = p.ask
	}
	code, err := bootstrap.Run(ctx, cfg)
	if cerr := w.close(); cerr != nil && err == nil {
		err = cerr
	}
	p.code = code
	return err
}

// completeNodes completes the names of nodes.
func (p *program) completeNodes(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	s, err := p.loadSetup(true)
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return tfhosts.SortedNames(s.Nodes), cobra.ShellCompDirectiveNoFileComp
}
