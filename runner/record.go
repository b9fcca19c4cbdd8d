package runner

import (
	"context"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// record is one that an earlier activation left on the host, or that another
// deployer's has there now.
type record struct {
	name string
	// state is "alive", "gone" (its process is, without a verdict) or "ended".
	state  string
	phase  string // "none" before the first
	action string
	system string
}

func parseRecord(text string) (record, bool) {
	f := strings.Fields(text)
	if len(f) != 5 {
		return record{}, false
	}
	return record{name: f[0], state: f[1], phase: f[2], action: f[3], system: f[4]}, true
}

// finishing: it ends by itself, and changes the host until then.
func (r record) finishing() bool {
	switch r.phase {
	case "set", "boot", "committed", "back", "back-boot":
		return true
	}
	return r.state == "gone"
}

// readRecords waits for what an earlier deployer left unfinished, and tells how it
// ended; it is true when the host may be another since it was observed. A record
// that a living deployer reads is left to that one, and so is an activation that
// still runs: what waits for a confirmation is adopted or waited for by ours.
func (d *deploy) readRecords(ctx context.Context) (bool, error) {
	again, unread := false, false
	for _, r := range d.last.records {
		switch {
		case r.state == "ended":
			unread = true
		case r.finishing():
			again, unread = true, true
			limit := 4*d.limits.activate + 2*d.limits.connect + d.limits.command
			d.outcome = outcome{record: r.name, code: -1}
			err := d.step(ctx, "record.settle", "observe", limit, func(ctx context.Context) error { return d.waitFor(ctx, "") })
			d.outcome = outcome{}
			if err != nil {
				return again, err
			}
		}
	}
	if !unread {
		return again, nil
	}
	return again, d.step(ctx, "record.read", "observe", d.limits.command, func(ctx context.Context) error {
		return d.readAndRemove(ctx, "", "no")
	})
}

// adoptable is the record of an activation of the same system that still runs:
// that of a deployer that was killed, or of one that works beside us. It is
// confirmed, not repeated: a second switch would restart what the first one
// started.
func (d *deploy) adoptable() string {
	for _, r := range d.first.records {
		if r.state == "alive" && !r.finishing() && r.action == d.goal() && d.goal() == "switch" && r.system == d.system {
			return r.name
		}
	}
	return ""
}

// adopt is true when the activation of an earlier deployer ended well, or ended as
// this one decided; else ours is still to be made.
func (d *deploy) adopt(ctx context.Context, name string) (bool, error) {
	d.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "activate.wait", Message: "the host already activates this system for another run: " + name})
	d.outcome = outcome{record: name, code: -1}
	d.begun = true
	d.verdict.Unit = "tf-hosts-" + name + ".service"
	if err := d.follow(ctx); err != nil {
		return false, err
	}
	if d.outcome.old != "" {
		d.first.running = d.outcome.old
		d.verdict.OldPath = d.outcome.old
	}
	switch d.outcome.word {
	case "deployed", "degraded", "reboot_pending":
	default:
		if d.unhealthy == nil {
			d.release(ctx, false)
			return false, nil
		}
	}
	return true, d.outcomeError(ctx)
}

// release removes the record that was read, and after a success the root of the
// new system. The verdict stands without it: what stays is removed by a later run.
func (d *deploy) release(ctx context.Context, success bool) {
	yes := "no"
	if success {
		yes = "yes"
	}
	err := d.step(ctx, "root.release", "verify", d.limits.command, func(ctx context.Context) error {
		return d.readAndRemove(ctx, d.outcome.record, yes)
	})
	if err != nil {
		d.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "root.release", Message: "the record of the activation stays on the host: " + err.Error()})
	}
}

// readAndRemove removes a record that was read, and those that nobody reads any
// more: what they say is told.
func (d *deploy) readAndRemove(ctx context.Context, name, success string) error {
	res, err := d.script(ctx, releaseScript, nil, name, success, d.id)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(res.Stdout)) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "left "); ok {
			d.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "record.read", Message: "an earlier activation of this host ended unseen: " + text})
		}
	}
	return nil
}
