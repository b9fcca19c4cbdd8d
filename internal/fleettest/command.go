package fleettest

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
)

// CommandError is a command that ran and failed.
type CommandError struct {
	Argv   []string
	Code   int // exit code, -1 when a signal ended it
	Stderr string
	Err    error
}

func (e *CommandError) Error() string {
	return fmt.Sprintf("running %q: %v: %s", strings.Join(e.Argv, " "), e.Err, lastLines(e.Stderr, 12))
}

func (e *CommandError) Unwrap() error { return e.Err }

// command runs argv on this machine and returns its stdout.
func command(ctx context.Context, argv ...string) (string, error) {
	return runCommand(exec.CommandContext(ctx, argv[0], argv[1:]...))
}

func runCommand(cmd *exec.Cmd) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		code := -1
		if cmd.ProcessState != nil {
			code = cmd.ProcessState.ExitCode()
		}
		return stdout.String(), &CommandError{Argv: cmd.Args, Code: code, Stderr: stderr.String(), Err: err}
	}
	return stdout.String(), nil
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "\n")
}
