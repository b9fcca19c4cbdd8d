package runner

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/lifecycle"
)

// statusScript is observeScript with what only a look wants to know. since is the
// time of the link itself, which a switch writes. The boot time is that of
// process 1, so that it is right in a container too. kernel, initrd and modules
// are the same where they are the same file or have the same bytes;
// init-interface-version is NixOS's own word for an init that needs a restart.
const statusScript = `
tell() { printf '%s %s\n' "$1" "$2"; }
R=/run/current-system B=/run/booted-system
tell since "$(stat -c %Y "$R" 2>/dev/null)"
began=$(sed -n 's/^btime //p' /proc/stat 2>/dev/null)
ticks=$(sed 's/.*) //' /proc/1/stat 2>/dev/null | cut -d ' ' -f 20)
tell booted_at "$((${began:-0} + ${ticks:-0} / 100))"
if [ -e "$R" ] && [ -e "$B" ]; then
	for f in kernel initrd kernel-modules init-interface-version; do
		[ "$(readlink -f "$R/$f")" = "$(readlink -f "$B/$f")" ] && continue
		[ -d "$R/$f" ] || ! cmp -s "$R/$f" "$B/$f" || continue
		[ -e "$R/$f" ] || [ -e "$B/$f" ] || continue
		tell reboot "$f"
	done
fi
` + observeScript

// ObserveRequest is one node to look at.
type ObserveRequest struct {
	Name     string
	Node     tfhosts.Node
	Settings tfhosts.NodeSettings
	// Wanted is the system that was deployed last. Empty: nobody knows, and
	// nothing is compared.
	Wanted string
}

// Observe looks at one node over a connection of its own, in one round trip. It
// takes no lock, leaves nothing on the host, and compares what it sees as a
// deploy does. It never fails: what stood in the way is in Status, Error and Hint.
func (r *Runner) Observe(ctx context.Context, req ObserveRequest) tfhosts.Observed {
	seen := tfhosts.Observed{Node: req.Name, Wanted: req.Wanted}
	d := &deploy{
		r: r, req: Request{Name: req.Name, Node: req.Node, Settings: req.Settings},
		limits: limitsOf(req.Settings.Limits), system: req.Wanted,
	}
	d.verdict.Seconds = map[string]float64{}
	err := d.look(ctx, &seen)
	if d.conn != nil {
		_ = d.conn.Close() // the answer was read, or is lost
	}
	if err != nil {
		d.conclude(err)
		seen.Status, seen.Error, seen.Hint = d.verdict.Status, d.verdict.Sentence, d.verdict.Hint
	}
	return seen
}

func (d *deploy) look(ctx context.Context, seen *tfhosts.Observed) error {
	if err := d.connect(ctx); err != nil {
		return err
	}
	var answer string
	err := d.step(ctx, "status.observe", "observe", d.limits.command, func(ctx context.Context) error {
		res, err := d.conn.Run(ctx, hostconn.Command{Script: statusScript, Args: []string{d.system}, Become: true, Timeout: untilDeadline(ctx)})
		if err != nil {
			return err
		}
		answer = string(res.Stdout)
		if d.last, err = parseState(answer); err != nil {
			return fmt.Errorf("%w: %s", err, tail(res.Stderr, 3))
		}
		return nil
	})
	if err != nil {
		return err
	}
	seen.Running, seen.Profile, seen.Default, seen.Booted = d.last.running, d.last.profile, d.last.bootDefault, d.last.booted
	seen.Generation, seen.FailedUnits = d.last.generationNumber(), d.last.failed
	readTimes(answer, seen)
	if d.system != "" {
		diffs, _ := lifecycle.Diff(d.resource().Fields, d.fields())
		for _, diff := range diffs { // sorted by field
			seen.Drift = append(seen.Drift, diff.Field)
		}
	}
	return nil
}

// readTimes reads what statusScript prints beside the state.
func readTimes(answer string, seen *tfhosts.Observed) {
	at := func(value string) time.Time {
		seconds, err := strconv.ParseInt(value, 10, 64)
		if err != nil || seconds <= 0 {
			return time.Time{} // a host without it, or without stat
		}
		return time.Unix(seconds, 0).UTC()
	}
	for line := range strings.Lines(answer) {
		key, value, _ := strings.Cut(strings.TrimRight(line, "\n"), " ")
		switch key {
		case "since":
			seen.Since = at(value)
		case "booted_at":
			seen.BootedAt = at(value)
		case "reboot":
			seen.NeedsReboot = true
		}
	}
}
