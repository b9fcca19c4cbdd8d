package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/runner"
)

// worker is what does the work on nodes: one pool of connections, one nix, one
// runner for the whole process.
type worker struct {
	dir    string
	pool   *hostconn.Pool
	nix    *nix.Client
	runner *runner.Runner
}

func newWorker(s *tfhosts.Setup, workDir string, events func(tfhosts.Event)) *worker {
	w := &worker{
		dir:  s.Dir,
		pool: hostconn.NewPool(hostconn.Config{KnownHosts: bootstrap.KnownHosts(workDir), Events: events}),
		nix:  nix.New(nix.Config{Options: s.Runner.NixOptions, RootsDir: bootstrap.Roots(workDir), Events: events}),
	}
	w.runner = runner.New(runner.Config{Dial: w.pool.Dial, Nix: w.nix, Dir: s.Dir, Events: events})
	return w
}

func (w *worker) close() error { return w.pool.Close() }

// funcs is the worker as the wrapper knows it: flows never import flows.
func (w *worker) funcs() bootstrap.Worker {
	return bootstrap.Worker{Identity: w.identity, Build: w.build, Deploy: w.deploy, Names: w.names, Forward: w.forward}
}

func (w *worker) identity(ctx context.Context, _, conf, given string) (string, error) {
	return w.nix.Identity(ctx, w.dir, conf, given)
}

func (w *worker) names(ctx context.Context, expr, submission string) ([]string, error) {
	names, err := w.nix.Names(ctx, w.dir, expr, submission)
	if err != nil && !errors.Is(err, nix.ErrNames) {
		return nil, tfhosts.WithExit(tfhosts.ExitFailed, "", err)
	}
	return names, err
}

func (w *worker) build(ctx context.Context, identities []string) (map[string]bootstrap.Built, error) {
	results, err := w.nix.Build(ctx, identities)
	if err != nil {
		return nil, err
	}
	built := make(map[string]bootstrap.Built, len(results))
	for id, r := range results {
		built[id] = bootstrap.Built{Out: r.Out, Err: r.Err}
	}
	return built, nil
}

func (w *worker) deploy(ctx context.Context, req bootstrap.DeployRequest) tfhosts.Verdict {
	return w.runner.Deploy(ctx, runner.Request{
		Name: req.Name, Node: req.Node, Settings: req.Settings,
		Built: req.Built.Out, BuildErr: req.Built.Err, Drop: req.Drop,
	})
}

// runArgv is the argv of "tf-hosts run" for the provisioner.
func runArgv() ([]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding the own executable: %w", err)
	}
	return []string{self, "run"}, nil
}
