package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/lifecycle"
)

// state is what a host answered to observeScript. Empty is absent or unknown.
type state struct {
	arch, bootID              string
	running, booted           string
	profile, generation       string
	bootDefault               string // "" where no boot loader says it
	freeKiB                   int64  // -1 where it is unknown
	hasNix, hasSystemd, valid bool
	failed                    []string
	records                   []record
	// pending are the parts of the wanted system that only a boot starts and that
	// differ from what was booted.
	pending []string
}

var errAnswer = errors.New("the host's answer is incomplete")

func parseState(text string) (*state, error) {
	s := &state{freeKiB: -1}
	whole := false
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimRight(line, "\n"), " ")
		switch key {
		case "arch":
			s.arch = value
		case "boot_id":
			s.bootID = value
		case "running":
			s.running = value
		case "booted":
			s.booted = value
		case "profile":
			s.profile = value
		case "generation":
			s.generation = value
		case "default":
			s.bootDefault = value
		case "free":
			if n, err := strconv.ParseInt(value, 10, 64); err == nil {
				s.freeKiB = n
			}
		case "nix":
			s.hasNix = true
		case "valid":
			s.valid = true
		case "systemd":
			s.hasSystemd = true
		case "pending":
			s.pending = append(s.pending, value)
		case "failed":
			s.failed = append(s.failed, value)
		case "record":
			if r, ok := parseRecord(value); ok {
				s.records = append(s.records, r)
			}
		case "end":
			whole = true
		}
	}
	if !whole {
		return nil, errAnswer
	}
	slices.Sort(s.failed)
	return s, nil
}

// generationNumber is N of system-N-link, 0 otherwise.
func (s *state) generationNumber() int {
	name := strings.TrimSuffix(strings.TrimPrefix(s.generation, "system-"), "-link")
	n, err := strconv.Atoi(name)
	if err != nil {
		return 0
	}
	return n
}

// systemType is the NixOS system of a node: it is there on every host, so it is
// only ever updated.
func systemType() lifecycle.Type {
	return lifecycle.Type{Name: "NixOS system", Actions: []lifecycle.Action{lifecycle.Update}}
}

// The fields of a NixOS system. booted is observed and never declared: only a
// reboot changes it. units is "healthy" when no unit has failed beyond those that
// had failed before the deploy; a host with the wanted system and a failed unit
// is thus activated again.
const (
	fieldRunning = "running"
	fieldProfile = "profile"
	fieldDefault = "default"
	fieldBooted  = "booted"
	fieldUnits   = "units"

	healthy = "healthy"
)

func (d *deploy) goal() string {
	if d.bootOnly {
		return goalBoot
	}
	switch g := d.req.Settings.Goal; g {
	case goalBoot, goalTest, goalDry:
		return g
	}
	return goalSwitch
}

func (d *deploy) resource() lifecycle.Resource {
	fields := lifecycle.Fields{
		fieldProfile: lifecycle.Text(d.system),
		fieldDefault: lifecycle.Text(d.system),
	}
	if d.goal() == goalTest {
		clear(fields) // they stay as they are
	}
	if d.goal() != goalBoot {
		fields[fieldRunning] = lifecycle.Text(d.system)
		fields[fieldUnits] = lifecycle.Text(healthy)
	}
	return lifecycle.Resource{Name: d.req.Name, Type: systemType(), Exists: true, Fields: fields}
}

// Observe asks the host in one round trip, and again where an earlier activation
// had still to end.
func (d *deploy) Observe(ctx context.Context) (lifecycle.Observation, error) {
	o, err := d.observe(ctx)
	if err != nil || d.begun || len(d.last.records) == 0 {
		return o, err
	}
	again, err := d.readRecords(ctx)
	if err != nil || !again {
		return o, err
	}
	d.first = nil
	return d.observe(ctx)
}

func (d *deploy) observe(ctx context.Context) (lifecycle.Observation, error) {
	op, key := "observe", "observe"
	if d.first != nil {
		op, key = "verify", "verify"
	}
	err := d.step(ctx, op, key, d.limits.command, func(ctx context.Context) error {
		res, err := d.script(ctx, observeScript, nil, d.system, d.id)
		if err != nil {
			return err
		}
		d.last, err = parseState(string(res.Stdout))
		if err != nil {
			return fmt.Errorf("%w: %s", err, tail(res.Stderr, 3))
		}
		return nil
	})
	if err != nil {
		return lifecycle.Observation{}, err
	}
	if d.first == nil {
		d.first = d.last
		d.verdict.OldPath = d.last.running
		if !d.last.hasNix {
			return lifecycle.Observation{}, &failure{
				status: tfhosts.CopyFailed, err: errors.New("the host has no nix-store on its PATH"),
				hint: "install Nix on the host; tf-hosts deploys NixOS systems",
			}
		}
	}
	d.verdict.NewPath = d.last.running
	d.verdict.Generation = d.last.generationNumber()
	return lifecycle.Observation{Exists: true, Fields: d.fields()}, nil
}

func (d *deploy) fields() lifecycle.Fields {
	link := func(path string) lifecycle.Value {
		if path == "" {
			return lifecycle.AbsentValue()
		}
		return lifecycle.Text(path)
	}
	f := lifecycle.Fields{
		fieldRunning: link(d.last.running),
		fieldProfile: link(d.last.profile),
		fieldBooted:  link(d.last.booted),
		fieldDefault: lifecycle.UnobservableValue(),
		fieldUnits:   lifecycle.UnobservableValue(),
	}
	if d.last.bootDefault != "" {
		f[fieldDefault] = lifecycle.Text(d.last.bootDefault)
	}
	if d.last.hasSystemd {
		f[fieldUnits] = lifecycle.Text(healthy)
		if bad := d.newlyFailed(); len(bad) > 0 {
			f[fieldUnits] = lifecycle.Text("failed: " + strings.Join(bad, " "))
		}
	}
	return f
}

// newlyFailed are the failed units that had not failed when the activation began;
// before it, all of them.
func (d *deploy) newlyFailed() []string {
	var bad []string
	for _, unit := range d.last.failed {
		if !d.begun || !slices.Contains(d.first.failed, unit) {
			bad = append(bad, unit)
		}
	}
	return bad
}

// tail is the last n lines of text in one.
func tail(text []byte, n int) string {
	return strings.Join(lastLines(string(text), n), " | ")
}

func lastLines(text string, n int) []string {
	text = strings.TrimSpace(text)
	if text == "" {
		return nil
	}
	lines := strings.Split(text, "\n")
	return lines[max(0, len(lines)-n):]
}
