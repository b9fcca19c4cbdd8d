package runner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
)

// rebootScript restarts the host whose boot is still $1. It returns before the
// host goes down.
const rebootScript = toolPath + `
[ "$(cat /proc/sys/kernel/random/boot_id)" = "$1" ] || exit 0
if [ -d /run/systemd/system ]; then systemctl --no-block reboot; else reboot; fi
`

// bootedScript prints the id of the boot once it is over.
const bootedScript = toolPath + `
case $(systemctl is-system-running 2>/dev/null) in initializing | starting | stopping) exit 75 ;; esac
cat /proc/sys/kernel/random/boot_id
`

// refusedPause lies between two logins that a booting host refused: it lets
// nobody but root in, and OpenSSH locks out who is refused too often.
const refusedPause = 15 * time.Second

// rebootIfNeeded restarts a host that has all of the new system but what only a
// boot starts, and sees that it comes back with it. Only a good deploy is followed
// by it.
func (d *deploy) rebootIfNeeded(ctx context.Context) error {
	if d.req.Settings.RebootIfNeeded == nil || !*d.req.Settings.RebootIfNeeded || d.goal() == goalTest {
		return nil
	}
	why := strings.Join(d.last.pending, " ")
	switch {
	case d.verdict.Status == tfhosts.RebootPending:
		why = "the boot of the new system"
	case why == "":
		return nil
	}
	if ctx.Err() != nil {
		d.verdict.Status = tfhosts.RebootPending
		d.verdict.Sentence += "; the restart was not begun: interrupted"
		return nil
	}
	d.begun = true
	id := d.last.bootID
	if err := d.step(ctx, "reboot.start", "reboot", d.limits.command, func(ctx context.Context) error {
		return d.startReboot(ctx, id)
	}); err != nil {
		return d.rebootFailure(tfhosts.Degraded, fmt.Errorf("the new system needs a restart, which could not be started: %w", err))
	}
	if err := d.step(ctx, "reboot.wait", "reboot", d.limits.reboot, func(ctx context.Context) error {
		return d.awaitBoot(ctx, id)
	}); err != nil {
		return d.rebootFailure(tfhosts.Timeout, fmt.Errorf("the host was restarted and is not back: %w", err))
	}
	return d.judgeBoot(ctx, why)
}

// startReboot takes a connection that ends with the host for an answer.
func (d *deploy) startReboot(ctx context.Context, bootID string) error {
	res, err := d.conn.Run(ctx, hostconn.Command{Script: rebootScript, Args: []string{bootID}, Become: true, Timeout: untilDeadline(ctx)})
	if err != nil {
		if d.lost(err) {
			return nil
		}
		return err
	}
	if res.Code != 0 {
		return fmt.Errorf("exit %d: %s", res.Code, tail(res.Stderr, 3))
	}
	return nil
}

// awaitBoot returns when another boot than the given one is over.
func (d *deploy) awaitBoot(ctx context.Context, bootID string) error {
	for {
		id, err := d.bootedID(ctx)
		if err == nil && id != "" && id != bootID {
			return nil
		}
		pauseFor := time.Second
		var hostKey *hostconn.HostKeyError
		switch {
		case errors.As(err, &hostKey):
			return err
		case errors.Is(err, hostconn.ErrAuth), errors.Is(err, hostconn.ErrShell), errors.Is(err, hostconn.ErrBecome):
			pauseFor = refusedPause
		}
		if !pause(ctx, pauseFor) {
			if err == nil {
				err = errors.New("it did not go down, or its boot does not end")
			}
			return err
		}
	}
}

// bootedID is the boot of a host that has booted, "" while it has not.
func (d *deploy) bootedID(ctx context.Context) (string, error) {
	select {
	case <-d.conn.Done():
		if err := d.reconnect(ctx); err != nil {
			return "", err
		}
	default:
	}
	res, err := d.conn.Run(ctx, hostconn.Command{Script: bootedScript, Timeout: min(10*time.Second, untilDeadline(ctx))})
	if err != nil {
		_ = d.conn.Close() // it is of the boot before, or of no use
		return "", err
	}
	if res.Code != 0 {
		return "", nil
	}
	return strings.TrimSpace(string(res.Stdout)), nil
}

// judgeBoot is the verdict of a host that is back.
func (d *deploy) judgeBoot(ctx context.Context, why string) error {
	if _, err := d.Observe(ctx); err != nil {
		return d.rebootFailure(tfhosts.Degraded, fmt.Errorf("the host is back after its restart and could not be looked at: %w", err))
	}
	var wrong []string
	for _, is := range []struct{ name, path string }{
		{fieldRunning, d.last.running}, {fieldProfile, d.last.profile}, {fieldDefault, d.last.bootDefault},
	} {
		unknown := is.name == fieldDefault && is.path == ""
		if is.path != d.system && !unknown {
			wrong = append(wrong, fmt.Sprintf("%s: want %s, got %s", is.name, d.system, orNone(is.path)))
		}
	}
	bad := d.newlyFailed()
	switch {
	case len(wrong) > 0:
		f := d.rebootFailure(tfhosts.Degraded, errors.New("the host was restarted and is not as it should be: "+strings.Join(wrong, "; ")))
		f.hint = "see what it booted: " + d.ssh("readlink -f /run/current-system /nix/var/nix/profiles/system")
		f.units = bad
		return f
	case len(bad) > 0:
		d.verdict.Tolerated = d.policy() == "warn"
		f := d.rebootFailure(tfhosts.Degraded, fmt.Errorf("the host was restarted with the new system, and these units failed: %s", strings.Join(bad, " ")))
		f.units, f.log, f.hint = bad, d.unitLog(ctx, bad), d.ssh("systemctl status "+strings.Join(bad, " "))
		return f
	}
	if err := d.checkHealth(ctx, tfhosts.HealthAfter); err != nil {
		f := d.rebootFailure(tfhosts.Degraded, err)
		if unhealthy, ok := errors.AsType[*failure](err); ok {
			f.err, f.hint = unhealthy.err, unhealthy.hint
		}
		f.err = fmt.Errorf("the host was restarted with the new system, but %w", f.err)
		return f
	}
	d.verdict.Status, d.verdict.Hint = tfhosts.Deployed, ""
	d.verdict.Sentence = "runs the new system, restarted for: " + why
	if len(d.last.failed) > 0 {
		d.verdict.Sentence += "; units that had failed before: " + strings.Join(d.last.failed, " ")
	}
	return nil
}

// rebootFailure is a failure after a good deploy.
func (d *deploy) rebootFailure(status tfhosts.Status, err error) *failure {
	f := &failure{status: status, err: err, hint: "restart it by hand: " + d.sshRoot("systemctl reboot")}
	if status == tfhosts.Timeout {
		f.hint = fmt.Sprintf("look at its console; the boot menu has the system of before, %s. If a boot takes longer, raise runner.limits.reboot", d.first.running)
	}
	return f
}
