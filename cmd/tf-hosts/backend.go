package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
)

func newBackendCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "backend",
		Short: "the state server",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(newServeCommand(p))
	return c
}

type serveOptions struct {
	dir, listen        string
	users              string
	certFile, certKey  string
	insecure, unlocked bool
	keepVersions       int
}

func (o *serveOptions) addFlags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.dir, "dir", "", "folder of the states (required)")
	f.StringVar(&o.listen, "listen", "127.0.0.1:8080", "address to listen on")
	f.StringVar(&o.users, "users", "", "credentials file: a JSON list of {name, password} or {name, password_sha256}")
	f.StringVar(&o.certFile, "tls-cert", "", "PEM file of the certificate chain; read again when it changes")
	f.StringVar(&o.certKey, "tls-key", "", "PEM file of the certificate's key")
	f.BoolVar(&o.insecure, "insecure", false, "serve without credentials; on loopback only")
	f.BoolVar(&o.unlocked, "allow-unlocked-writes", false, "accept writes without a lock")
	f.IntVar(&o.keepVersions, "keep-versions", 50, "how many old versions of a state are kept")
}

func newServeCommand(p *program) *cobra.Command {
	opts := &serveOptions{}
	c := &cobra.Command{
		Use:   "serve --dir DIR",
		Short: "serve states at /state/PROJECT/NAME, kept as files in one folder",
		Args:  cobra.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return p.runServe(c.Context(), opts) },
	}
	opts.addFlags(c)
	return c
}

// runServe serves until the first interrupt.
func (p *program) runServe(ctx context.Context, opts *serveOptions) error {
	if opts.dir == "" {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts backend serve --dir /var/lib/tf-hosts-states", errors.New("--dir is missing"))
	}
	cfg := server.Config{
		Insecure: opts.insecure, AllowUnlockedWrites: opts.unlocked,
		Logger: slog.New(slog.NewTextHandler(p.stderr, nil)),
	}
	if opts.users != "" {
		users, err := server.ReadUsers(opts.users)
		if err != nil {
			return tfhosts.WithExit(tfhosts.ExitUsage, "", err)
		}
		cfg.Users = users
	}
	if (opts.certFile == "") != (opts.certKey == "") {
		return tfhosts.WithExit(tfhosts.ExitUsage, "give both", errors.New("--tls-cert and --tls-key belong together"))
	}
	if opts.certFile != "" {
		tlsConfig, err := server.LoadTLS(opts.certFile, opts.certKey, cfg.Logger)
		if err != nil {
			return tfhosts.WithExit(tfhosts.ExitUsage, "", err)
		}
		cfg.TLS = tlsConfig
	}
	states, err := store.OpenFiles(opts.dir, store.FilesConfig{KeepVersions: opts.keepVersions})
	if err != nil {
		return fmt.Errorf("opening the states in %q: %w", opts.dir, err)
	}
	cfg.Store = states
	srv, err := server.New(cfg)
	if err != nil {
		err = errors.Join(err, states.Close())
		if errors.Is(err, server.ErrNoCredentials) {
			return tfhosts.WithExit(tfhosts.ExitUsage, "name a credentials file with --users, or --insecure on loopback", err)
		}
		return err
	}
	serveCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-p.interrupt:
			cancel()
		case <-serveCtx.Done():
		}
	}()
	err = srv.ListenAndServe(serveCtx, opts.listen)
	cancel()
	<-stopped
	if errors.Is(err, server.ErrNoCredentials) {
		err = tfhosts.WithExit(tfhosts.ExitUsage, "name a credentials file with --users", err)
	}
	return errors.Join(err, states.Close())
}
