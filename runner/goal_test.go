package runner_test

import (
	"slices"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// test runs a system until the next boot, with the guard and without; what fails
// goes back without a write to profile or boot default.
func TestGoalTest(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	no := false
	b.shell("touch -h -d @1 /boot/default /nix/var/nix/profiles/system")
	for _, guard := range []*bool{nil, &no} {
		name := "guarded"
		if guard != nil {
			name = "plain"
		}
		t.Run(name, func(t *testing.T) {
			c := b.closure(fleettest.ClosureSpec{Name: "test" + name, Marker: name})
			settings := tfhosts.NodeSettings{Goal: "test", Guard: guard, OnInhibitor: "boot"}
			v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
			b.want(v, tfhosts.Deployed, c.Out, old, old)
			if !strings.Contains(v.Sentence, "until the next boot") {
				t.Errorf("sentence = %q, want how long it holds", v.Sentence)
			}
			b.want(b.deploy(runner.Request{Built: c.Out, Settings: settings}), tfhosts.Unchanged, c.Out, old, old)

			bad := b.closure(fleettest.ClosureSpec{Name: "bad" + name, Behaviour: map[string]fleettest.Behaviour{"test": {Exit: 2}}})
			b.want(b.deploy(runner.Request{Built: bad.Out, Settings: settings}), tfhosts.RolledBack, c.Out, old, old)
			inhibited := b.closure(fleettest.ClosureSpec{Name: "init" + name, Behaviour: map[string]fleettest.Behaviour{"test": {Exit: 100, Nothing: true}}})
			b.want(b.deploy(runner.Request{Built: inhibited.Out, Settings: settings}), tfhosts.CheckRefused, c.Out, old, old)
		})
	}
	if got := b.shell("stat -c %Y /boot/default /nix/var/nix/profiles/system"); got != "1\n1" {
		t.Errorf("boot default and profile were written at %q, want never", got)
	}
	if err := b.host.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := b.system(); s.Running != old {
		t.Errorf("after a boot the host runs %s, want %s", s.Running, old)
	}
}

func TestGoalDryActivate(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "dry", Behaviour: map[string]fleettest.Behaviour{
		"dry-activate": {Shell: `for i in $(seq 50); do echo "would start unit $i" >&2; done`},
	}})
	settings := tfhosts.NodeSettings{Goal: "dry-activate"}
	v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
	b.want(v, tfhosts.DryRun, old, old, old)
	if v.Failed() || len(v.Log) != 50 || v.Log[0] != "would start unit 1" {
		t.Errorf("verdict = %+v, want all that the host said and exit 0", v)
	}
	if ops := b.ops(); slices.Contains(ops, "activate.start") || !slices.Contains(ops, "activate.dry") {
		t.Errorf("operations = %v, want no activation", ops)
	}
	if got := b.shell("systemctl is-active " + fleettest.DemoUnit + " || true"); got != "inactive" {
		t.Errorf("the new system's service is %s, want inactive", got)
	}

	bad := b.closure(fleettest.ClosureSpec{Name: "baddry", Behaviour: map[string]fleettest.Behaviour{"dry-activate": {Exit: 3, Shell: "echo no idea"}}})
	v = b.deploy(runner.Request{Built: bad.Out, Settings: settings})
	b.want(v, tfhosts.CheckRefused, old, old, old)
	if !strings.Contains(strings.Join(v.Log, "\n"), "no idea") {
		t.Errorf("log = %q, want the host's words", v.Log)
	}
}
