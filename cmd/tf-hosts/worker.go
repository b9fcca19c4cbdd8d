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
	nixCfg nix.Config
	nix    *nix.Client
	runner *runner.Runner
}

func newWorker(s *tfhosts.Setup, workDir string, events func(tfhosts.Event)) *worker {
	w := &worker{
		dir:  s.Dir,
		pool: hostconn.NewPool(hostconn.Config{KnownHosts: bootstrap.KnownHosts(workDir), Events: events}),
	}
	w.nixCfg = nix.Config{Options: s.Runner.NixOptions, RootsDir: bootstrap.Roots(workDir)}
	return w.with(events)
}

// with is the same worker, over the same connections, that tells its story
// elsewhere.
func (w *worker) with(events func(tfhosts.Event)) *worker {
	other := *w
	other.nixCfg.Events = events
	other.nix = nix.New(other.nixCfg)
	other.runner = runner.New(runner.Config{Dial: w.pool.Dial, Nix: other.nix, Dir: w.dir, Events: events})
	return &other
}

func (w *worker) close() error { return w.pool.Close() }

// funcs is the worker as the wrapper knows it: flows never import flows.
func (w *worker) funcs() bootstrap.Worker {
	return bootstrap.Worker{
		Identity: w.identity, Build: w.build, Outputs: w.nix.Outputs, Closures: w.nix.Closures,
		Deploy: w.deploy, Names: w.names, Release: w.release, Forward: w.forward, Look: w.look,
	}
}

// look is silent: what it has to say is its answer.
func (w *worker) look(ctx context.Context, req bootstrap.LookRequest) tfhosts.Observed {
	r := runner.New(runner.Config{Dial: w.pool.Dial, Nix: w.nix, Dir: w.dir})
	return r.Observe(ctx, runner.ObserveRequest{Name: req.Name, Node: req.Node, Settings: req.Settings, Wanted: req.Wanted})
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

func (w *worker) release(storePaths []string) error { return w.nix.Release(storePaths...) }

// runArgv is the argv of "tf-hosts run" for the provisioner.
func runArgv() ([]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding the own executable: %w", err)
	}
	return []string{self, "run"}, nil
}
