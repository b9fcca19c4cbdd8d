package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"al.essio.dev/pkg/shellescape"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/lifecycle"
)

// failure is an end of a deploy that knows its status.
type failure struct {
	status tfhosts.Status
	err    error
	hint   string
	log    []string
	units  []string
}

func (f *failure) Error() string { return f.err.Error() }

func (f *failure) Unwrap() error { return f.err }

// stepError names the operation that went wrong.
type stepError struct {
	op  string
	err error
}

func (e *stepError) Error() string { return e.op + ": " + e.err.Error() }

func (e *stepError) Unwrap() error { return e.err }

// timeoutError is a step that did not end within its limit.
type timeoutError struct {
	op    string
	limit time.Duration
	err   error
}

func (e *timeoutError) Error() string {
	return fmt.Sprintf("%s did not end within %s", e.op, e.limit)
}

func (e *timeoutError) Unwrap() error { return e.err }

// judge turns what the lifecycle saw into the verdict of a node whose provider
// reported no error.
func (d *deploy) judge(ctx context.Context, res lifecycle.Result) error {
	if res.Plan.Action == lifecycle.None && d.last.running == d.system {
		if f := d.finalHealth(ctx); f != nil {
			return f
		}
		d.succeed(res)
		return nil
	}
	if res.Applied {
		defer d.release(ctx, d.goal() != goalTest) // what only runs stays rooted
	}
	var wrong []string
	for _, diff := range res.Unverified {
		running := diff.Field == fieldRunning && d.goal() == "boot"
		if diff.Field != fieldUnits && !running {
			wrong = append(wrong, diff.String())
		}
	}
	bad := slices.Concat(d.outcome.newly, d.newlyFailed())
	slices.Sort(bad)
	bad = slices.Compact(bad)
	var unhealthy *failure
	if len(wrong) == 0 && d.last.running == d.system {
		unhealthy = d.finalHealth(ctx)
	}
	switch {
	case len(wrong) > 0:
		return &failure{
			status: tfhosts.Degraded, units: bad, log: lastLines(strings.Join(d.outcome.log, "\n"), 20),
			err:  errors.New("the host is not as it should be after the activation: " + strings.Join(wrong, "; ")),
			hint: "apply again; " + d.ssh("readlink -f /run/current-system /nix/var/nix/profiles/system"),
		}
	case unhealthy != nil:
		unhealthy.units, unhealthy.log = bad, d.outcome.journal
		if len(bad) > 0 {
			unhealthy.err = fmt.Errorf("%w; and these units failed: %s", unhealthy.err, strings.Join(bad, " "))
		}
		return unhealthy
	case len(bad) > 0:
		d.verdict.Tolerated = d.policy() == "warn"
		return &failure{
			status: tfhosts.Degraded, units: bad, log: d.unitLog(ctx, bad),
			err:  fmt.Errorf("the new system runs, and these units failed: %s", strings.Join(bad, " ")),
			hint: d.ssh("systemctl status " + strings.Join(bad, " ")),
		}
	}
	d.succeed(res)
	return nil
}

// unitLog is the journal of the units, from the record or asked for now.
func (d *deploy) unitLog(ctx context.Context, units []string) []string {
	if len(d.outcome.journal) > 0 {
		return d.outcome.journal
	}
	var lines []string
	_ = d.step(ctx, "verify", "verify", d.limits.command, func(ctx context.Context) error {
		res, err := d.script(ctx, journalScript, nil, units...)
		lines = lastLines(string(res.Stdout), 40)
		return err // without its journal the verdict is still true
	})
	return lines
}

// conclude fills the verdict from the error that ended the deploy.
func (d *deploy) conclude(err error) {
	v := &d.verdict
	keep := 20
	if v.Status == tfhosts.DryRun {
		keep = len(d.outcome.log)
	}
	v.Log = lastLines(strings.Join(d.outcome.log, "\n"), keep)
	if err == nil {
		return
	}
	v.Sentence = err.Error()
	var f *failure
	if errors.As(err, &f) {
		v.Status, v.Sentence, v.Hint, v.Log, v.FailedUnits = f.status, f.Error(), f.hint, f.log, f.units
		if v.Hint == "" {
			v.Hint = d.hint(f.status)
		}
		return
	}
	v.Status = d.statusOf(err)
	v.Hint = d.hint(v.Status)
	if d.begun {
		v.NewPath = "" // not known
		v.Sentence = "the activation began and its end was not seen: " + v.Sentence
		v.Hint = "the activation goes on without us; see how it ended: " + d.sshRoot("tail -n 20 /var/lib/tf-hosts/runs/"+d.outcome.record+"/log /var/lib/tf-hosts/runs/"+d.outcome.record+"/verdict")
	}
}

func (d *deploy) statusOf(err error) tfhosts.Status {
	var hostKey *hostconn.HostKeyError
	var limit *timeoutError
	var step *stepError
	switch {
	case errors.As(err, &hostKey):
		return tfhosts.HostKeyChanged
	case errors.Is(err, hostconn.ErrAuth), errors.Is(err, hostconn.ErrBecome), errors.Is(err, hostconn.ErrShell):
		return tfhosts.AuthFailed
	case errors.Is(err, errDropped), !d.begun && errors.Is(err, context.Canceled):
		return tfhosts.Dropped
	case errors.As(err, &limit) && limit.op == "connect":
		return tfhosts.Unreachable
	case errors.Is(err, hostconn.ErrUnreachable), errors.Is(err, hostconn.ErrLost):
		return tfhosts.Unreachable
	case errors.As(err, &limit), errors.Is(err, hostconn.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		return tfhosts.Timeout
	case errors.As(err, &step):
		switch step.op {
		case "build":
			return tfhosts.BuildFailed
		case "root.link", "substitute", "space.check", "copy", "copy.check":
			return tfhosts.CopyFailed
		case "check", "health.before", "activate.start":
			return tfhosts.CheckRefused
		case "activate.wait", "activate.result", "verify":
			return tfhosts.Timeout
		}
	}
	return tfhosts.Unreachable
}

func (d *deploy) hint(s tfhosts.Status) string {
	switch s {
	case tfhosts.Unreachable:
		return "see whether it answers: " + d.ssh("true")
	case tfhosts.AuthFailed:
		return "see which key is refused, and whether sudo asks for a password: " + d.ssh("sudo -n true")
	case tfhosts.HostKeyChanged:
		return "if the host was installed anew, pin its new key: tf-hosts host-keys " + shellescape.Quote(d.req.Name)
	case tfhosts.BuildFailed:
		return "build it alone to see the whole log: nix-store --realise " + shellescape.Quote(d.req.Node.ConfigIdentity)
	case tfhosts.CopyFailed:
		return "run the same command again; what arrived is not sent twice"
	case tfhosts.CheckRefused:
		return "see what it is: " + d.ssh("ls "+d.system)
	case tfhosts.Timeout:
		return "raise the limit of this step in the setup's runner.limits, or see what holds the host: " + d.ssh("systemctl list-jobs")
	case tfhosts.Dropped:
		return "apply again: the node is still to be deployed"
	}
	return ""
}

// sshRoot is ssh for a command that needs root.
func (d *deploy) sshRoot(command string) string {
	if user := d.req.Node.Username; user != "" && user != "root" {
		command = "sudo " + command
	}
	return d.ssh(command)
}

// ssh is a command that the operator can paste.
func (d *deploy) ssh(command string) string {
	argv := []string{"ssh"}
	if d.req.Node.KeyFile != "" {
		argv = append(argv, "-i", d.req.Node.KeyFile)
	}
	for _, opt := range d.target.Options {
		argv = append(argv, "-o", opt)
	}
	host := d.req.Node.Host
	if d.req.Node.Username != "" {
		host = d.req.Node.Username + "@" + host
	}
	return shellescape.QuoteCommand(append(argv, host, command))
}
