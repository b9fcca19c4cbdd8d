package main

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/tofu"
	"fediversity.eu/tf-hosts/setup"
)

type verbOptions struct {
	ask, onFailed, build, restarts bool
	redeploy                       []string
}

func (o *verbOptions) addFlags(c *cobra.Command, verb tfhosts.Verb) {
	if verb.Name == "apply" {
		c.Flags().BoolVar(&o.ask, "ask", false, "show the plan and ask before it is applied")
		c.Flags().StringSliceVar(&o.redeploy, "redeploy", nil, "deploy this node again though nothing about it changed; \"drifted\" looks at the hosts and takes those that drifted")
	}
	if verb.Name == "plan" {
		c.Flags().BoolVar(&o.build, "build", false, "build what would be deployed, to compare its packages with those of the host")
	}
	if verb.Name == "apply" || verb.Name == "plan" {
		c.Flags().BoolVar(&o.restarts, "what-restarts", false, "copy what would be deployed to the hosts, and have them say what its activation would restart; nothing that runs is changed")
		c.Flags().BoolVar(&o.onFailed, "on-failed", false, "limit the verb to the nodes whose last deploy failed")
	}
}

// listFlag is a flag whose values gather, parted by commas.
type listFlag struct{ text string }

func (l *listFlag) String() string { return l.text }
func (l *listFlag) Type() string   { return "patterns" }
func (l *listFlag) Set(value string) error {
	if l.text != "" {
		value = l.text + "," + value
	}
	l.text = value
	return nil
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
	if asksHelp(args) {
		return p.tofuHelp(ctx, verb)
	}
	cfg, w, err := p.wrapperConfig()
	if err != nil {
		return err
	}
	p.forVerb(&cfg, opts, verb, args)
	code, err := bootstrap.Run(ctx, cfg)
	p.code = code
	return errors.Join(err, w.close())
}

// forVerb makes cfg that of one verb.
func (p *program) forVerb(cfg *bootstrap.Config, opts *verbOptions, verb tfhosts.Verb, args []string) {
	cfg.Verb, cfg.Args, cfg.OnFailed, cfg.BuildPlan = verb, args, opts.onFailed, opts.build
	cfg.Redeploy, cfg.WhatRestarts = opts.redeploy, opts.restarts
	if on := p.environment().Value("TF_HOSTS_ON"); on != "" && verb.Selects {
		cfg.On = []string{on}
	}
	if verb.Name == "apply" || verb.Name == "destroy" {
		cfg.Color = p.colored(p.stderr)
	}
	if opts.ask || verb.Name == "destroy" && isTerminal(p.stdin) && isTerminal(p.stderr) && p.getenv("CI") == "" {
		cfg.Ask = p.ask
	}
}

// wrapperConfig is what every run of the wrapper needs; the worker must be
// closed after it.
func (p *program) wrapperConfig() (bootstrap.Config, *worker, error) {
	var cfg bootstrap.Config
	s, err := p.loadSetup(false)
	if err != nil {
		return cfg, nil, err
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return cfg, nil, err
	}
	cacheDir, err := p.cacheDir()
	if err != nil {
		return cfg, nil, err
	}
	self, err := runArgv()
	if err != nil {
		return cfg, nil, err
	}
	reboot, err := p.rebootIfNeeded()
	if err != nil {
		return cfg, nil, err
	}
	for name, node := range s.Nodes {
		node.Runner = withReboot(node.Runner, reboot)
		s.Nodes[name] = node
	}
	w := newWorker(s, bootstrap.WorkDir(stateDir, s.Backend.Address), p.teller.event)
	cfg = bootstrap.Config{
		Setup: s, StateDir: stateDir, CallerDir: p.dir, Executable: self,
		Engine:  tofu.FindConfig{Explicit: p.environment().Value("TF_HOSTS_TOFU"), CacheDir: cacheDir},
		Environ: p.environ, Answer: p.stdout, Story: p.teller, Stdin: p.stdin,
		Deployment: p.environment().Value("DEPLOYMENT"),
		Color:      p.colored(p.stdout), Events: p.teller.event, Interrupt: p.interrupt, Worker: w.funcs(),
	}
	for name, to := range map[string]*bool{
		"BOOTSTRAP": &cfg.Bootstrap, "BOOTSTRAP_SELF_BACKEND": &cfg.SelfBackend,
		"BOOTSTRAP_ALLOW_LOST_STATE": &cfg.AllowLost, "TF_RECLAIM_OWN_LOCK": &cfg.ReclaimOwnLock,
		"TF_HOSTS_ALLOW_EMPTY": &cfg.AllowEmpty, "TF_HOSTS_NO_WAVES": &cfg.NoWaves,
	} {
		if *to, err = p.environment().Bool(name); err != nil {
			return cfg, nil, tfhosts.WithExit(tfhosts.ExitUsage, "unset it, or set it to 1", err)
		}
	}
	if on, from := p.environment().Lookup("TF_HOSTS_ON"); from == setup.FromFlag {
		cfg.On = []string{on} // a verb that does not take it refuses it
	}
	cfg.SelfBackend = cfg.SelfBackend || s.Bootstrap
	if cfg.Bootstrap && !cfg.SelfBackend {
		return cfg, nil, tfhosts.WithExit(tfhosts.ExitUsage, `name its node in self_backend, or set "bootstrap": true`,
			errors.New("BOOTSTRAP=1, and the setup does not say that this graph deploys its own backend"))
	}
	return cfg, w, nil
}

// completeNodes completes the names of nodes.
func (p *program) completeNodes(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	s, err := p.loadSetup(true)
	if err != nil {
		return nil, cobra.ShellCompDirectiveDefault
	}
	return tfhosts.SortedNames(s.Nodes), cobra.ShellCompDirectiveNoFileComp
}
