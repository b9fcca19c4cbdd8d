package hostconn

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Become says how a login that is not root gets root's rights.
type Become struct {
	// Argv is the command in front of the program; empty is "sudo -n". It must
	// not ask a question.
	Argv []string
	// PasswordFile holds the sudo password in its first line. It is used only
	// where the command without a password is refused, and only with sudo.
	PasswordFile string
}

type becomeMode int

const (
	becomeNone     becomeMode = iota
	becomePlain               // argv as it is
	becomePassword            // sudo -S with the password on stdin
)

// escalation is what a connection has found out about its become command.
type escalation struct {
	turn     chan struct{} // one asks, the others wait
	known    bool
	mode     becomeMode
	argv     []string
	password []byte
	err      error
}

// command is the argv that starts /bin/sh as root. With a password the shell
// says the token itself: after a wrong one sudo would eat what follows as the
// next password.
func (e *escalation) command(how becomeMode, ready token) []string {
	if how == becomePassword {
		return append(slices.Clone(e.argv), "/bin/sh", "-c", ready.announce()+"; exec /bin/sh")
	}
	return append(slices.Clone(e.argv), "/bin/sh")
}

// escalate says how to run a command, and finds it out the first time.
func (c *Conn) escalate(ctx context.Context, wanted bool) (becomeMode, []byte, error) {
	if !wanted || c.settings.User == "root" {
		return becomeNone, nil, nil
	}
	select {
	case c.become.turn <- struct{}{}:
		defer func() { <-c.become.turn }()
	case <-ctx.Done():
		return becomeNone, nil, context.Cause(ctx)
	}
	e := &c.become
	if !e.known {
		if err := c.findBecome(ctx, e); err != nil {
			return becomeNone, nil, err
		}
		e.known = true
	}
	return e.mode, e.password, e.err
}

// findBecome tries the become command. A refusal goes to e.err and stays: sudo
// counts wrong passwords. An error is a connection that could not tell.
func (c *Conn) findBecome(ctx context.Context, e *escalation) error {
	b := c.target.Become
	argv := b.Argv
	if len(argv) == 0 {
		argv = []string{"sudo", "-n"}
	}
	res, err := c.try(ctx, argv, nil)
	if err != nil {
		return err
	}
	if res.Code == 0 {
		e.mode, e.argv = becomePlain, argv
		return nil
	}
	if b.PasswordFile == "" {
		e.err = refusal(argv, res, "")
		return nil
	}
	if filepath.Base(argv[0]) != "sudo" {
		e.err = refusal(argv, res, "; a password file works with sudo only")
		return nil
	}
	text, err := os.ReadFile(b.PasswordFile)
	if err != nil {
		e.err = fmt.Errorf("%w: reading the password file %q: %w", ErrBecome, b.PasswordFile, withoutPath(err))
		return nil
	}
	password, _, _ := bytes.Cut(text, []byte("\n"))
	password = bytes.TrimSuffix(password, []byte("\r"))
	if len(password) == 0 {
		e.err = fmt.Errorf("%w: the password file %q has an empty first line", ErrBecome, b.PasswordFile)
		return nil
	}
	argv = withPassword(argv)
	// Tried alone first: with stdin at its end, a wrong password ends at once.
	res, err = c.try(ctx, argv, append(bytes.Clone(password), '\n'))
	if err != nil {
		return err
	}
	if res.Code != 0 {
		e.err = refusal(argv, res, " (with the password of the password file)")
		return nil
	}
	e.mode, e.argv, e.password = becomePassword, argv, password
	return nil
}

func (c *Conn) try(ctx context.Context, argv []string, stdin []byte) (Result, error) {
	return c.run(ctx, Command{
		Script:  `LC_ALL=C; export LC_ALL; exec "$@"`,
		Args:    append(slices.Clone(argv), "true"),
		Stdin:   stdin,
		Timeout: 30 * time.Second,
	})
}

func refusal(argv []string, res Result, more string) error {
	why := lastLine(res.Stderr)
	if why == "" {
		why = fmt.Sprintf("exit code %d", res.Code)
	}
	return fmt.Errorf("%w: %q says: %s%s", ErrBecome, argv[0], why, more)
}

// withPassword turns a sudo command that must not ask into one that reads the
// password from stdin: always (-k), without a prompt.
func withPassword(argv []string) []string {
	out := []string{argv[0], "-k", "-S", "-p", ""}
	for _, a := range argv[1:] {
		if a != "-n" && a != "--non-interactive" {
			out = append(out, a)
		}
	}
	return out
}
