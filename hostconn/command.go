package hostconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// Command is one run of a script.
type Command struct {
	// Script is POSIX sh. Args are its $1, $2, …; they are quoted, may hold
	// anything but NUL, and stand in no process list.
	Script string
	Args   []string
	// Stdin is the script's standard input.
	Stdin []byte
	// Stdout and Stderr take what the script says as it says it, without a bound;
	// the Result then lacks it. A Run that ended by ctx or Timeout may still write
	// to them until the connection is closed.
	Stdout, Stderr io.Writer
	// Become runs it as root: by the target's become command, or as it is when
	// the login is root.
	Become bool
	// Timeout bounds it, the wait for a free session included; 0 is
	// Config.CommandTimeout.
	Timeout time.Duration
}

// Result is how a Command ended.
type Result struct {
	Stdout, Stderr []byte
	// Code is the exit code, 128 + the number for a signal.
	Code int
}

// Run runs cmd and waits for it. A code other than 0 is no error. The error wraps
// ErrLost, ErrTimeout, ErrBecome, ErrShell, or is ctx's; after it the script may
// still run on the host, and the Result holds what it had said so far.
func (c *Conn) Run(ctx context.Context, cmd Command) (Result, error) {
	res, err := c.run(ctx, cmd)
	if err != nil {
		return res, fmt.Errorf("running a command on %q: %w", c.target.label(), err)
	}
	return res, nil
}

func (c *Conn) run(ctx context.Context, cmd Command) (Result, error) {
	limit := cmd.Timeout
	if limit <= 0 {
		limit = c.pool.cfg.CommandTimeout
	}
	tooLong := fmt.Errorf("%w: it did not end within %v", ErrTimeout, limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, tooLong)
	defer cancel()
	line, err := program(cmd.Script, cmd.Args)
	if err != nil {
		return Result{Code: -1}, err
	}
	how, password, err := c.escalate(ctx, cmd.Become)
	if err != nil {
		return Result{Code: -1}, err
	}
	if err := c.acquire(ctx); err != nil {
		return Result{Code: -1}, err
	}
	// A blocked transport would hold every call of the session, so the work has
	// a goroutine that may outlast this call; Close waits for it.
	w := &work{stdout: &afterToken{max: c.pool.cfg.MaxOutput}, done: make(chan struct{})}
	c.wg.Go(func() {
		defer c.releaseSlot()
		defer close(w.done)
		w.run(ctx, c, line, cmd, how, password)
	})
	select {
	case <-w.done:
	case <-ctx.Done():
		grace := time.NewTimer(time.Second)
		defer grace.Stop()
		select {
		case <-w.done:
		case <-grace.C:
			return Result{Code: -1, Stdout: w.stdout.bytes()}, context.Cause(ctx)
		}
	}
	if w.err != nil && ctx.Err() != nil && !errors.Is(w.err, ErrBecome) {
		w.err = context.Cause(ctx)
	}
	return w.res, w.err
}

// work is the part of a Run that may block on the transport.
type work struct {
	stdout *afterToken
	done   chan struct{} // closed when res and err are set
	res    Result
	err    error
}

func (w *work) run(ctx context.Context, c *Conn, line string, cmd Command, how becomeMode, password []byte) {
	w.res.Code = -1
	p, err := c.start(ctx, line, how, password)
	if err != nil {
		w.err = err
		return
	}
	defer p.release()
	fed := make(chan struct{})
	go func() { // ends with the session; waited for below
		defer close(fed)
		_, _ = p.stdin.Write(cmd.Stdin) // a program need not read it all
		_ = p.stdin.Close()
	}()
	if cmd.Stderr != nil {
		p.stderr.passTo(cmd.Stderr)
	}
	var stdout io.Writer = w.stdout
	if cmd.Stdout != nil {
		stdout = cmd.Stdout
	}
	_, copyErr := io.Copy(stdout, p.stdout)
	if copyErr != nil {
		_ = p.session.Close()
	}
	w.res.Code, w.err = p.code(c)
	if copyErr != nil && (w.err == nil || errors.Is(copyErr, errOutput)) {
		w.err = copyErr
	}
	_ = p.session.Close()
	<-fed
	w.res.Stdout, w.res.Stderr = w.stdout.bytes(), p.stderr.bytes()
}

// acquire waits for a free session.
func (c *Conn) acquire(ctx context.Context) error {
	select {
	case <-c.ended:
		return c.Err()
	default:
	}
	select {
	case c.sessions <- struct{}{}:
		return nil
	case <-c.ended:
		return c.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *Conn) releaseSlot() { <-c.sessions }
