package runner

import (
	"context"
	_ "embed" // activate.sh
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

//go:embed activate.sh
var activateScript []byte

// outcome is what the host's record says about an activation.
type outcome struct {
	record string
	// state is "alive", "ended", "gone" (ended without a verdict) or "none" (no
	// record).
	state string
	// phase is how far the record came; see activate.sh.
	phase string
	// old is the system that ran before.
	old string
	// word is the verdict's first word, reason the rest.
	word, reason string
	// code is the exit code of the switch, -1 when it did not end.
	code    int
	newly   []string // failed units
	journal []string
	log     []string
}

// activate starts the switch on the host and waits for its end.
//
// With a guard the new system runs as a trial first: only when this process gets
// in again over a new connection, and the health checks pass, does it become the
// profile and the boot default. Without a confirmation in time the host itself
// goes back to what it recorded, and so it does when anything fails, in the plain
// form too. What an end of the connection, of this process or of the unit leaves
// behind is settled on the host.
func (d *deploy) activate(ctx context.Context) error {
	if name := d.adoptable(); name != "" {
		if done, err := d.adopt(ctx, name); done || err != nil {
			return err
		}
	}
	d.outcome = outcome{record: d.id, code: -1}
	if err := d.step(ctx, "activate.start", "activate", d.limits.command, d.start); err != nil {
		return err
	}
	if err := d.follow(ctx); err != nil {
		return err
	}
	return d.outcomeError(ctx)
}

// follow waits for the activation of the record at hand, and confirms it where the
// host waits for that.
func (d *deploy) follow(ctx context.Context) error {
	// The switch, the way back, and what surrounds them.
	limit := d.lockWait() + 3*d.limits.activate + 2*d.limits.connect
	if err := d.step(ctx, "activate.wait", "activate", limit, d.wait); err != nil {
		return err
	}
	if d.outcome.state != "alive" {
		return nil
	}
	return d.confirmed(ctx)
}

// guarded says whether the host waits for a confirmation. A system that is only
// to be booted changes nothing that could lock us out.
func (d *deploy) guarded() bool { return d.req.Settings.Guarded() && d.goal() != goalBoot }

// lockWait is how long the host waits for another activation: what a killed
// deployer started ends with its guard.
func (d *deploy) lockWait() time.Duration { return d.limits.command + d.limits.guard }

func (d *deploy) policy() string {
	switch p := d.req.Settings.OnDegraded; p {
	case "rollback", "warn":
		return p
	}
	return "fail"
}

// start is the point of no return: what is dropped before it leaves the host as
// it was.
func (d *deploy) start(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d.begun = true
	d.verdict.Unit = "tf-hosts-" + d.outcome.record + ".service"
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.limits.command)
	defer cancel()
	guard, inhibitor := "0", d.req.Settings.OnInhibitor
	if d.goal() == goalTest {
		inhibitor = "" // it makes nothing the boot default
	}
	if d.guarded() {
		guard = seconds(d.limits.guard)
	}
	res, err := d.script(ctx, startScript, activateScript,
		d.outcome.record, d.system, d.goal(), seconds(d.limits.activate),
		d.policy(), inhibitor, guard, seconds(d.lockWait()),
		d.r.cfg.RunID+" since "+time.Now().UTC().Format(time.RFC3339))
	if err != nil {
		return err
	}
	if res.Code != 0 {
		return &failure{
			status: tfhosts.CheckRefused,
			err:    fmt.Errorf("the activation could not be started; nothing was changed: %s", tail(res.Stderr, 3)),
			log:    lastLines(string(res.Stderr), 20),
		}
	}
	return nil
}

// pollSeconds is how long one question for the verdict waits on the host.
const pollSeconds = 5

// wait returns when the record has its verdict, or when the host waits for the
// confirmation: then the outcome's state is "alive".
func (d *deploy) wait(ctx context.Context) error { return d.waitFor(ctx, "confirm") }

// settleTries is how often a record is asked to be settled. A host that goes down
// may take the unit that does it along, more than once.
const settleTries = 20

// waitFor waits for the verdict, or for the phase where it is not empty.
func (d *deploy) waitFor(ctx context.Context, phase string) error {
	for tries := 0; ; {
		err := d.poll(ctx, phase)
		if err != nil {
			return err
		}
		switch d.outcome.state {
		case "alive":
			if phase != "" && d.outcome.phase == phase {
				return nil
			}
		case "gone":
			// The unit was killed, or the host went down under it.
			if tries == settleTries {
				return nil
			}
			down, err := d.settle(ctx)
			if err != nil {
				return err
			}
			if !down {
				tries++
			}
		default:
			return nil
		}
	}
}

// settle has the host end a record without a verdict, and gives it a second to
// begin. It is true while the host is shutting down.
func (d *deploy) settle(ctx context.Context) (bool, error) {
	res, err := d.script(ctx, settleScript, nil, d.outcome.record)
	if err != nil {
		return false, err
	}
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-time.After(time.Second):
		return res.Code == 75, nil
	}
}

func seconds(d time.Duration) string { return strconv.Itoa(int(d.Seconds())) }

func (d *deploy) poll(ctx context.Context, phase string) error {
	res, err := d.script(ctx, waitScript, nil, d.outcome.record, strconv.Itoa(pollSeconds), strconv.Itoa(len(d.outcome.log)), phase, d.id)
	if err != nil {
		return err
	}
	lines, err := d.outcome.read(string(res.Stdout))
	if err != nil {
		return fmt.Errorf("%w: %s", err, tail(res.Stderr, 3))
	}
	for _, line := range lines {
		d.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "activate.wait", Message: line})
	}
	return nil
}

// read takes an answer of waitScript in, and returns the log's new lines.
func (o *outcome) read(text string) ([]string, error) {
	var fresh []string
	whole := false
	next := *o
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimRight(line, "\n"), " ")
		switch key {
		case "state":
			next.state = value
		case "phase":
			next.phase = value
		case "old":
			next.old = value
		case "code":
			if n, err := strconv.Atoi(value); err == nil {
				next.code = n
			}
		case "verdict":
			next.word, next.reason, _ = strings.Cut(value, " ")
		case "new":
			next.newly = append(next.newly, value)
		case "journal":
			next.journal = append(next.journal, value)
		case "log":
			fresh = append(fresh, value)
		case "end":
			whole = true
		}
	}
	if !whole {
		return nil, errAnswer
	}
	next.log = append(next.log, fresh...)
	*o = next
	return fresh, nil
}

// outcomeError is nil when the new system is in place, degraded or not; then the
// record is removed by judge. Otherwise it is removed here, once it was read.
func (d *deploy) outcomeError(ctx context.Context) error {
	o := &d.outcome
	f := &failure{log: append(lastLines(strings.Join(o.log, "\n"), 20), o.journal...), units: o.newly}
	old := o.old // another activation may have ended since the host was observed
	if old == "" {
		old = d.first.running
	}
	seeLog := "see the host's log: " + d.sshRoot("cat /var/log/tf-hosts/activation.log")
	switch o.word {
	case "deployed", "degraded":
		return nil
	case "reboot_pending":
		d.bootOnly = true
		return nil
	case "rolled_back":
		f.status = tfhosts.RolledBack
		f.err = fmt.Errorf("%s; the host went back to %s", o.reason, orNone(old))
		if d.unhealthy != nil {
			f.hint = d.unhealthy.hint
		} else {
			f.hint = "mend the system and apply again; what the host says: " + d.sshRoot("journalctl --boot --priority=warning --lines=50")
		}
	case "rollback_failed":
		f.status = tfhosts.RollbackFailed
		f.err = fmt.Errorf("%s, and the host could not go back to %s in whole", o.reason, orNone(old))
		f.hint = "look at the host: " + d.ssh("readlink -f /run/current-system /nix/var/nix/profiles/system")
	case "init_changed":
		f.status = tfhosts.CheckRefused
		f.err = errors.New("the new system needs a reboot: its init interface changed (exit 100); nothing was activated")
		f.hint = `deploy it with the goal "boot", then: ` + d.sshRoot("systemctl reboot")
	case "locked":
		f.status = tfhosts.Locked
		f.err = fmt.Errorf("another activation holds the host: %s", orNone(o.reason))
		f.hint = "wait for it to end, then apply again"
	case "not_started":
		f.status = tfhosts.CheckRefused
		f.err = fmt.Errorf("the activation did not start; nothing was changed: %s", o.reason)
		f.hint = seeLog
	default:
		f.status = tfhosts.RollbackFailed
		f.err = errors.New("the activation ended without a result")
		f.hint = seeLog
	}
	if o.state == "none" {
		f.status = tfhosts.Timeout
		f.err = errors.New("how the activation ended was not seen: a later run has read its record")
		f.hint = "see what the host runs: " + d.ssh("readlink -f /run/current-system /nix/var/nix/profiles/system")
	}
	if o.word != "" {
		d.release(ctx, false)
	}
	if o.word == "rolled_back" || o.word == "locked" || o.word == "init_changed" || o.word == "not_started" {
		d.verdict.NewPath = old
	}
	return f
}

func orNone(s string) string {
	if s == "" {
		return "nothing known"
	}
	return s
}
