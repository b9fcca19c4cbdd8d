package tofu

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Command is one run of the engine.
type Command struct {
	Args []string
	// Dir is the working folder; errored.tfstate of a failed save lands there.
	Dir string
	// Env is the whole environment.
	Env []string
	// StdoutFile and StderrFile are created, 0600.
	StdoutFile, StderrFile string
	// Stdout and Stderr receive what the files receive, as it comes; nil is
	// silent.
	Stdout, Stderr io.Writer
	// Stdin is nil for an empty one.
	Stdin io.Reader
}

// Process is a running engine.
type Process struct {
	cmd       *exec.Cmd
	name      string
	exited    chan struct{}
	followers []chan error
	files     []*os.File
}

// Build makes the command without starting it: its own process group, so that
// a Ctrl-C at the terminal reaches only the wrapper, and no Pdeathsig.
func (e *Engine) Build(c Command) *exec.Cmd {
	cmd := exec.Command(e.Path, c.Args...)
	cmd.Dir = c.Dir
	cmd.Env = c.Env
	cmd.Stdin = c.Stdin
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// Start starts the engine. The process outlives the caller: only Wait ends it.
func (e *Engine) Start(c Command) (*Process, error) {
	p := &Process{cmd: e.Build(c), name: "tofu " + firstArg(c.Args), exited: make(chan struct{})}
	closeFiles := func() {
		for _, f := range p.files {
			f.Close() //nolint:errcheck // nothing was written through this descriptor
		}
	}
	for _, path := range []string{c.StdoutFile, c.StderrFile} {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
		if err != nil {
			closeFiles()
			return nil, fmt.Errorf("starting %s: %w", p.name, err)
		}
		p.files = append(p.files, f)
	}
	p.cmd.Stdout, p.cmd.Stderr = p.files[0], p.files[1]
	if err := p.cmd.Start(); err != nil {
		closeFiles()
		return nil, fmt.Errorf("starting %s: %w", p.name, err)
	}
	for path, w := range map[string]io.Writer{c.StdoutFile: c.Stdout, c.StderrFile: c.Stderr} {
		if w == nil {
			continue
		}
		done := make(chan error, 1)
		p.followers = append(p.followers, done)
		go func() { done <- follow(path, w, p.exited) }()
	}
	return p, nil
}

// Pid is the engine's process ID.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Interrupt sends one SIGINT to the engine and to nothing else. A second one
// would make it leave its lock and lose state, so callers send it once.
func (p *Process) Interrupt() error {
	if err := p.cmd.Process.Signal(syscall.SIGINT); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("interrupting %s: %w", p.name, err)
	}
	return nil
}

// Wait waits for the end and for the output to be passed on. The code is that
// of the engine, 128 + n when signal n ended it.
func (p *Process) Wait() (int, error) {
	err := p.cmd.Wait()
	close(p.exited)
	var errs []error
	for _, done := range p.followers {
		if ferr := <-done; ferr != nil {
			errs = append(errs, ferr)
		}
	}
	for _, f := range p.files {
		f.Close() //nolint:errcheck // nothing was written through this descriptor
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit):
		if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
			return 128 + int(ws.Signal()), errors.Join(errs...)
		}
	default:
		errs = append(errs, fmt.Errorf("waiting for %s: %w", p.name, err))
	}
	return p.cmd.ProcessState.ExitCode(), errors.Join(errs...)
}

// Run starts the engine, sends one SIGINT when interrupt is closed, and waits.
func (e *Engine) Run(ctx context.Context, c Command, interrupt <-chan struct{}) (int, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	p, err := e.Start(c)
	if err != nil {
		return 0, err
	}
	waited := make(chan struct{})
	signalled := make(chan error, 1)
	go func() {
		select {
		case <-interrupt:
			signalled <- p.Interrupt()
		case <-waited:
			signalled <- nil
		}
	}()
	code, err := p.Wait()
	close(waited)
	return code, errors.Join(err, <-signalled)
}

// followEvery bounds how stale the followed output is. The end of the process
// is waited for as a condition and drains at once.
const followEvery = 40 * time.Millisecond

// follow copies a growing file to w until done is closed and the rest is read.
func follow(path string, w io.Writer, done <-chan struct{}) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("following the output of tofu: %w", err)
	}
	defer f.Close()
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		ended := false
		select {
		case <-done:
			ended = true
		case <-tick.C:
		}
		if _, err := io.Copy(w, f); err != nil {
			return fmt.Errorf("following the output of tofu: %w", err)
		}
		if ended {
			return nil
		}
	}
}

func firstArg(args []string) string {
	if len(args) == 0 {
		return ""
	}
	return args[0]
}
