package bootstrap

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// Config is everything that one verb needs. Setup, Verb, StateDir, Executable,
// Environ and Worker are required; the zero value of the rest works.
type Config struct {
	Setup *tfhosts.Setup
	Verb  tfhosts.Verb
	// Args follow the verb: OpenTofu's own flags and operands.
	Args []string
	// StateDir is BOOTSTRAP_STATE_DIR; the working dir is a folder below it.
	StateDir string
	// CallerDir is what relative paths in Args are relative to.
	CallerDir string
	// Executable is the argv of "tf-hosts run", for the provisioner.
	Executable []string
	Engine     tofu.FindConfig
	// Environ is the caller's environment.
	Environ []string
	// Answer receives the answer of the verb, Story what OpenTofu tells.
	Answer, Story io.Writer
	Stdin         io.Reader
	// Color keeps OpenTofu's colours.
	Color bool
	// Ask confirms a plan; nil never asks.
	Ask func(question string) (bool, error)
	// BuildPlan: plan builds what it would deploy, for the closure diff.
	BuildPlan bool
	// WhatRestarts: plan and apply have the hosts say what the activation would
	// do. It implies BuildPlan.
	WhatRestarts bool
	Events       func(tfhosts.Event)
	// Interrupt is closed at the first INT, TERM or HUP.
	Interrupt <-chan struct{}
	// Bootstrap is BOOTSTRAP=1, AllowLost BOOTSTRAP_ALLOW_LOST_STATE=1,
	// ReclaimOwnLock TF_RECLAIM_OWN_LOCK=1, SelfBackend
	// BOOTSTRAP_SELF_BACKEND=1: the graph serves its own state though the
	// setup names no node for it.
	Bootstrap, AllowLost, ReclaimOwnLock, SelfBackend bool
	// Deployment is DEPLOYMENT: a submission, which published_names_expr takes
	// to the names of the nodes that stay in the graph. It is the path of a JSON
	// file, relative to CallerDir, or a JSON object itself. Empty: all nodes.
	Deployment string
	// On limits the verb to the nodes that these patterns of tfhosts.Select
	// select, OnFailed to those whose last verdict failed; both to what both
	// select. Each becomes a -target of OpenTofu's.
	On       []string
	OnFailed bool
	// NoWaves applies to all nodes at once, whatever the setup's waves say.
	NoWaves bool
	// Redeploy names nodes that an apply deploys again though nothing about them
	// changed; the word "drifted" stands for those whose hosts drifted.
	Redeploy []string
	// AllowEmpty lets a submission turn off every node.
	AllowEmpty bool
	// Wait limits the wait for a backend; zero is 10 minutes.
	Wait   time.Duration
	Worker Worker
	// Fault, when set, may fail an operation by its name; for tests.
	Fault func(op string) error

	scope
}

// Worker is what the wrapper can not do itself.
type Worker struct {
	// Identity gives the config identity of a node: what changes exactly when
	// its system does, and what Build builds.
	Identity func(ctx context.Context, node, nixosConf, given string) (string, error)
	// Build builds all identities in one go. The error is that of the whole
	// build; what one identity lacks is in its Built.
	Build func(ctx context.Context, identities []string) (map[string]Built, error)
	// Outputs maps identities to the store paths of their systems, which need
	// not be built; those that it can not tell are left out. It builds nothing.
	Outputs func(ctx context.Context, identities []string) (map[string]string, error)
	// Closures lists the packages of systems; those that are not on this machine
	// are left out. Outputs and Closures are nil where there is no closure diff.
	Closures func(ctx context.Context, systems []string) (map[string][]nix.Path, error)
	// Look looks at one node and changes nothing; nil only where nothing looks.
	Look func(ctx context.Context, req LookRequest) tfhosts.Observed
	// Deploy brings one node to a built system.
	Deploy func(ctx context.Context, req DeployRequest) tfhosts.Verdict
	// Names applies published_names_expr to a submission, a JSON file. An error
	// without an exit code of its own is the expression's or the submission's.
	Names func(ctx context.Context, expr, submission string) ([]string, error)
	// Release drops the roots of store paths; nil where nothing is rooted.
	Release func(storePaths []string) error
	// Forward dials through a node's SSH connection; nil where there is none.
	Forward func(ctx context.Context, name string, node tfhosts.SetupNode) (Forward, error)
}

// Built is the outcome of building one identity.
type Built struct {
	// Out is the store path of the system.
	Out string
	Err error
}

// DeployRequest is one node to deploy.
type DeployRequest struct {
	Name     string
	Node     tfhosts.Node
	Settings tfhosts.NodeSettings
	// Built is zero when the node builds its own system.
	Built Built
	// Drop is closed when a deploy that has not begun to activate should end
	// as dropped.
	Drop <-chan struct{}
}

// ErrDeclined says that the operator did not confirm.
var ErrDeclined = errors.New("not confirmed; nothing was changed")

func (c *Config) event(e tfhosts.Event) {
	if c.Events != nil {
		c.Events(e)
	}
}

func (c *Config) step(op, message string) {
	c.event(tfhosts.Event{Kind: tfhosts.EventStep, Op: op, Message: message})
}

func (c *Config) notice(message string) {
	c.event(tfhosts.Event{Kind: tfhosts.EventNotice, Message: message})
}

func (c *Config) fault(op string) error {
	if c.Fault == nil {
		return nil
	}
	return c.Fault(op)
}

func (c *Config) interrupted() bool {
	select {
	case <-c.Interrupt:
		return true
	default:
		return false
	}
}

// serial lets the two streams of tofu and the verdict table share one writer.
type serial struct {
	mu sync.Mutex
	w  io.Writer
}

func (s *serial) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.w.Write(b)
}
