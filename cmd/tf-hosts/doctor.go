package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"text/tabwriter"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/doctor"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

type doctorOptions struct{ format string }

func (o *doctorOptions) addFlags(c *cobra.Command) {
	c.Flags().StringVar(&o.format, "format", "text", "text: one line a check; json: one document for machines")
}

func newDoctorCommand(p *program) *cobra.Command {
	opts := &doctorOptions{}
	c := &cobra.Command{
		Use:   "doctor",
		Short: "check tools, setup, backend and nodes, and say what to do; changes nothing",
		Long: `doctor checks everything that a run needs and says for each thing that is wrong
what to do about it. It changes nothing: of the backend it takes and releases the
lock, and on each node it runs scripts that read, over one connection.

It exits 0 when nothing failed, warnings or not, and 1 otherwise, also where the
setup file has problems, which other verbs answer with 64.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return p.runDoctor(c.Context(), opts) },
	}
	opts.addFlags(c)
	return c
}

func (p *program) runDoctor(ctx context.Context, opts *doctorOptions) error {
	if opts.format != "text" && opts.format != "json" {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts doctor --format json", fmt.Errorf("--format %q is neither text nor json", opts.format))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	interrupted := tfhosts.WithExit(tfhosts.ExitInterrupted, "", errors.New("interrupted; nothing was changed"))
	go func() { // ends with the ctx
		select {
		case <-p.interrupt:
			cancel(interrupted)
		case <-ctx.Done():
		}
	}()
	cfg, done, err := p.doctorConfig()
	if err != nil {
		return err
	}
	results := doctor.Run(ctx, cfg)
	if err := done(); err != nil {
		return err
	}
	if err := printDoctor(p.stdout, opts.format, results); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if n := doctor.Failed(results); n > 0 {
		return tfhosts.WithExit(tfhosts.ExitFailed, "", fmt.Errorf("%d of %s failed", n, english.Plural(len(results), "check", "")))
	}
	return nil
}

// doctorConfig wires the checks; done must be called after them.
func (p *program) doctorConfig() (cfg doctor.Config, done func() error, err error) {
	cacheDir, err := p.cacheDir()
	if err != nil {
		return cfg, nil, err
	}
	cfg = doctor.Config{
		Engine:  tofu.FindConfig{Explicit: p.environment().Value("TF_HOSTS_TOFU"), CacheDir: cacheDir},
		Environ: p.environ, CheckEnviron: bootstrap.CheckEnviron, Foreign: bootstrap.WhyForeign,
	}
	s, err := p.loadSetup(false)
	if err != nil {
		cfg.SetupErr, cfg.Nix = err, nix.New(nix.Config{})
		return cfg, func() error { return nil }, nil
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return cfg, nil, err
	}
	s.Backend.RetryMax = 0 // what is wrong is told at once
	cfg.Setup, cfg.Nix = s, nix.New(nix.Config{Options: s.Runner.NixOptions})
	cfg.WorkDir = bootstrap.WorkDir(stateDir, s.Backend.Address)
	cfg.ReadWorkDir = func() (doctor.WorkDir, error) {
		r, err := bootstrap.ExamineWorkDir(cfg.WorkDir, s.Backend.Address)
		return doctor.WorkDir{Mode: string(r.Mode), Salvage: r.Salvage, Journaled: r.Journaled, Holder: r.Holder}, err
	}
	cfg.Backend = func(ctx context.Context, forward doctor.Forward) (doctor.Backend, error) {
		return p.examine(ctx, s, stateDir, "", forward)
	}
	for _, group := range bootstrap.GroupsOf(s) {
		cfg.Groups = append(cfg.Groups, doctor.GroupBackend{Group: group, Backend: func(ctx context.Context, forward doctor.Forward) (doctor.Backend, error) {
			return p.examine(ctx, s, stateDir, group, forward)
		}})
	}
	// What can not be read is told by the check of the working dir.
	if plain, groups, err := bootstrap.AddressesInUse(s, stateDir); err == nil {
		cfg.InUse = doctor.InUse{Plain: plain, Groups: groups}
	}
	cfg.Pool, done, err = p.lookingPool(s)
	return cfg, done, err
}

// examine is the wrapper's own search for the backend, or for that of a group:
// flows never import flows.
func (p *program) examine(ctx context.Context, s *tfhosts.Setup, stateDir, group string, forward doctor.Forward) (doctor.Backend, error) {
	self, err := p.environment().Bool("BOOTSTRAP_SELF_BACKEND")
	if err != nil {
		return doctor.Backend{}, err
	}
	cfg := bootstrap.Config{
		Setup: s, StateDir: stateDir, SelfBackend: self || s.Bootstrap, Interrupt: p.interrupt,
		Worker: bootstrap.Worker{Forward: func(ctx context.Context, name string, _ tfhosts.SetupNode) (bootstrap.Forward, error) {
			dial, err := forward(ctx, name)
			return bootstrap.Forward{Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
				return dial(ctx, network, addr)
			}, Close: func() error { return nil }}, err // the connection is the node's, and stays
		}},
	}
	var e *bootstrap.Examination
	if group == "" {
		e, err = bootstrap.Examine(ctx, cfg)
	} else {
		e, err = bootstrap.ExamineGroup(ctx, cfg, group)
	}
	b := doctor.Backend{Client: e.Client, Lost: e.Lost, LostHint: e.LostHint, Close: e.Close, Holds: "there is none yet"}
	for _, t := range e.Tried {
		b.Tried = append(b.Tried, doctor.Place{Address: t.Address, Through: t.Through, Err: t.Err})
	}
	switch {
	case e.Gone:
		b.Holds = "the server says that it lost it"
	case e.State != nil && e.State.Encrypted:
		b.Holds = fmt.Sprintf("serial %d, encrypted", e.State.Serial)
	case e.State != nil:
		b.Holds = fmt.Sprintf("serial %d with %s", e.State.Serial, english.Plural(e.State.Resources, "resource", ""))
	}
	return b, err
}

// printDoctor is the answer. A hint stands below its line.
func printDoctor(w io.Writer, format string, results []doctor.Result) error {
	if format == "json" {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		err := enc.Encode(struct {
			OK     bool            `json:"ok"`
			Checks []doctor.Result `json:"checks"`
		}{doctor.Failed(results) == 0, results})
		if err != nil {
			return fmt.Errorf("printing the checks: %w", err)
		}
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.StripEscape)
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%s\t%s\n", r.Level, r.Check, r.Message) //nolint:errcheck // tabwriter keeps the error for Flush
		if r.Hint != "" {
			fmt.Fprintf(t, "\t\thint: %s\n", r.Hint) //nolint:errcheck // as above
		}
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("printing the checks: %w", err)
	}
	return nil
}
