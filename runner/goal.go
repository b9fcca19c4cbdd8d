package runner

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/lifecycle"
)

// The goals, in the words of switch-to-configuration. Only switch and boot change
// what the host boots.
const (
	goalSwitch = "switch"
	goalBoot   = "boot"
	goalTest   = "test"
	goalDry    = "dry-activate"
)

// dryScript has the system $1 say what its activation would do, within $2 seconds.
const dryScript = toolPath + `timeout -k 5 "$2" "$1/bin/switch-to-configuration" dry-activate </dev/null 2>&1`

// dryRun brings the system onto the host and asks what its activation would do.
func (d *deploy) dryRun(ctx context.Context) error {
	if _, err := d.Observe(ctx); err != nil {
		return err
	}
	for _, op := range []func(context.Context) error{d.transfer, d.check} {
		if err := op(ctx); err != nil {
			return err
		}
	}
	return d.step(ctx, "activate.dry", "activate", d.limits.activate, func(ctx context.Context) error {
		res, err := d.script(ctx, dryScript, nil, d.system, strconv.Itoa(wholeSeconds(ctx)))
		if err != nil {
			return err
		}
		said := strings.TrimSpace(string(res.Stdout))
		switch {
		case res.Code == 124 || res.Code == 137:
			return fmt.Errorf("the host ended it: %w", context.DeadlineExceeded)
		case res.Code != 0 && strings.Contains(said, "Could not acquire lock"):
			return &failure{
				status: tfhosts.Locked, log: lastLines(said, 20), hint: "wait for it to end, then ask again",
				err: errors.New("another switch-to-configuration holds the host"),
			}
		case res.Code != 0:
			return &failure{
				status: tfhosts.CheckRefused, log: lastLines(said, 20),
				err:  fmt.Errorf("the new system's dry-activate ended with exit %d; nothing was changed", res.Code),
				hint: "see why: " + d.sshRoot(d.system+"/bin/switch-to-configuration dry-activate"),
			}
		}
		d.outcome.log = lastLines(said, len(said)+1)
		d.verdict.Status = tfhosts.DryRun
		d.verdict.Sentence = "nothing was changed; the system is on the host"
		if d.first.running == d.system {
			d.verdict.Sentence += " and runs already"
		}
		return nil
	})
}

// succeed fills the verdict of a host that is as it should be.
func (d *deploy) succeed(res lifecycle.Result) {
	v := &d.verdict
	if res.Plan.Action == lifecycle.None && d.last.running == d.system {
		v.Status, v.Sentence = tfhosts.Unchanged, "already runs the wanted system"
		d.sayPending()
		return
	}
	if d.goal() == goalBoot && d.last.running != d.system {
		v.Status, v.Sentence = tfhosts.RebootPending, "the next boot starts the new system"
		if d.outcome.reason != "" {
			v.Sentence += ": " + d.outcome.reason
		}
		v.Hint = d.sshRoot("systemctl reboot")
		return
	}
	v.Status, v.Sentence = tfhosts.Deployed, "runs the new system"
	if d.goal() == goalTest {
		v.Sentence = "runs the new system until the next boot; profile and boot default are as they were"
	}
	if len(d.last.failed) > 0 {
		v.Sentence += "; units that had failed before: " + strings.Join(d.last.failed, " ")
	} else if d.outcome.reason != "" {
		v.Sentence += ", " + d.outcome.reason
	}
	d.sayPending()
}

// sayPending names what only a boot starts.
func (d *deploy) sayPending() {
	if len(d.last.pending) > 0 && d.goal() != goalTest {
		d.verdict.Sentence += "; what the next boot starts: " + strings.Join(d.last.pending, " ")
		d.verdict.Hint = d.sshRoot("systemctl reboot")
	}
}
