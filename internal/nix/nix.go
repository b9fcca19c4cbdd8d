// Package nix runs the Nix command line tools: evaluation, build, path-info and
// copy. It is the only package that does, and works with clients from 2.8.0 on.
//
// It never changes a profile or a host, never writes a lock file of a flake, and
// never half-closes a connection (see Copy).
//
//	c := nix.New(nix.Config{RootsDir: dir})
//	id, err := c.Identity(ctx, setup.Dir, "./app1.nix", "")
//	built, err := c.Build(ctx, []string{id})
package nix

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// DefaultStore is the store that every closure lives in.
const DefaultStore = "/nix/store"

// Config of a Client. Its zero value runs the tools on PATH in the process's
// own environment and working dir.
type Config struct {
	// BinDir holds nix, nix-store and nix-instantiate; empty means PATH.
	BinDir string
	// Env is added to the process's environment ("NIX_REMOTE=local").
	Env []string
	// Options are words put into every command line: "--option", "sandbox",
	// "false".
	Options []string
	// RootsDir gets a link, registered as an indirect garbage collector root,
	// for each derivation and each output; empty roots nothing.
	RootsDir string
	// Events may be nil.
	Events func(tfhosts.Event)
}

// Client runs Nix. It is safe for concurrent use.
type Client struct{ cfg Config }

// New makes a Client. It runs nothing.
func New(cfg Config) *Client { return &Client{cfg: cfg} }

// ErrNotInstalled says that the Nix tools were not found.
var ErrNotInstalled = errors.New("nix is not installed")

// commandError is a tool that ended with a code other than 0.
type commandError struct {
	tool   string
	stderr string
	err    error
}

func (e *commandError) Error() string {
	if text := errorText(e.stderr); text != "" {
		return e.tool + ": " + text
	}
	return fmt.Sprintf("%s: %v", e.tool, e.err)
}

func (e *commandError) Unwrap() error { return e.err }

// errorText is what a Nix tool says went wrong: from the first "error:" on,
// without the word, at most 20 lines.
func errorText(stderr string) string {
	stderr = strings.TrimSpace(stderr)
	if i := strings.LastIndex("\n"+stderr, "\nerror:"); i >= 0 {
		stderr = strings.TrimSpace(strings.TrimPrefix(stderr[i:], "error:"))
	}
	return strings.Join(lastLines(stderr, 20), "\n")
}

func lastLines(text string, n int) []string {
	text = strings.TrimRight(text, "\n")
	if text == "" {
		return nil
	}
	lines := strings.Split(text, "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return lines
}

// argv is the command line of one of the tools.
func (c *Client) argv(tool string, args ...string) []string {
	argv := []string{tool}
	if c.cfg.BinDir != "" {
		argv[0] = filepath.Join(c.cfg.BinDir, tool)
	}
	if tool == "nix" {
		argv = append(argv, "--extra-experimental-features", "nix-command flakes")
	}
	argv = append(argv, c.cfg.Options...)
	return append(argv, args...)
}

// run starts argv and returns its stdout. Lines of stderr go to onLine, which
// may be nil, as they come.
func (c *Client) run(ctx context.Context, argv []string, onLine func(string)) (string, error) {
	return c.runIn(ctx, "", argv, onLine)
}

// runIn is run in the folder dir; empty means the working dir.
func (c *Client) runIn(ctx context.Context, dir string, argv []string, onLine func(string)) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), c.cfg.Env...)
	// A builder that was left behind holds our pipes open; do not wait for it.
	cmd.WaitDelay = 5 * time.Second
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	var stdout, stderr bytes.Buffer
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr
	if onLine != nil {
		cmd.Stderr = io.MultiWriter(&stderr, &lineWriter{line: onLine})
	}
	err := cmd.Run()
	tool := filepath.Base(argv[0])
	switch {
	case err == nil:
		return stdout.String(), nil
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, os.ErrNotExist) && cmd.Process == nil:
		return "", fmt.Errorf("running %s: %w: %w", tool, ErrNotInstalled, err)
	case ctx.Err() != nil:
		return stdout.String(), fmt.Errorf("running %s: %w", tool, context.Cause(ctx))
	}
	return stdout.String(), &commandError{tool: tool, stderr: stderr.String(), err: err}
}

// lineWriter hands whole lines on.
type lineWriter struct {
	line func(string)
	rest []byte
}

func (w *lineWriter) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(p), nil
		}
		w.line(string(w.rest[:i]))
		w.rest = w.rest[i+1:]
	}
}

func (c *Client) event(e tfhosts.Event) {
	if c.cfg.Events == nil {
		return
	}
	e.Time = time.Now()
	c.cfg.Events(e)
}

// IsStorePath says whether p names something directly in the Nix store.
func IsStorePath(p string) bool {
	name, ok := strings.CutPrefix(p, DefaultStore+"/")
	return ok && len(name) > 33 && name[32] == '-' && !strings.Contains(name, "/")
}

// IsDerivation says whether p is a store path of a derivation.
func IsDerivation(p string) bool { return IsStorePath(p) && strings.HasSuffix(p, ".drv") }

// rootLink is where the root of a store path is kept.
func (c *Client) rootLink(storePath string) string {
	return filepath.Join(c.cfg.RootsDir, filepath.Base(storePath))
}

// Release drops the roots of store paths that were applied or superseded. A
// path without a root is no error.
func (c *Client) Release(storePaths ...string) error {
	if c.cfg.RootsDir == "" {
		return nil
	}
	var errs []error
	for _, p := range storePaths {
		if err := os.Remove(c.rootLink(p)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("releasing the root of %q: %w", p, err))
		}
	}
	return errors.Join(errs...)
}
