package runner_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

func TestPreSwitchCheck(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	refusing := b.closure(fleettest.ClosureSpec{Name: "refusing", Behaviour: map[string]fleettest.Behaviour{
		"check": {Nothing: true, Exit: 1, Shell: ":"},
	}})
	b.want(b.deploy(runner.Request{Built: refusing.Out}), tfhosts.CheckRefused, old, old, old)

	v := b.deploy(runner.Request{Built: refusing.Out, Settings: tfhosts.NodeSettings{OnInhibitor: "boot"}})
	b.want(v, tfhosts.RebootPending, old, refusing.Out, refusing.Out)

	older := b.closure(fleettest.ClosureSpec{Name: "older", Behaviour: map[string]fleettest.Behaviour{
		"check": {Exit: 1, Shell: `echo "Usage: $0 [switch|boot|test|dry-activate]" >&2`},
	}})
	b.want(b.deploy(runner.Request{Built: older.Out}), tfhosts.Deployed, older.Out, older.Out, older.Out)
}

func TestSwitchThatFails(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	first := b.closure(fleettest.ClosureSpec{Name: "first", Marker: "first"})
	b.want(b.deploy(runner.Request{Built: first.Out}), tfhosts.Deployed, first.Out, first.Out, first.Out)
	for _, tt := range []struct {
		name      string
		behaviour fleettest.Behaviour
		limit     int
		want      tfhosts.Status
		says      string
	}{
		{"exit 2 after half of the work", fleettest.Behaviour{Exit: 2, Shell: "echo half done >&2"}, 0, tfhosts.RolledBack, "exited 2"},
		{"exit 101 before any work", fleettest.Behaviour{Exit: 101, Nothing: true}, 0, tfhosts.RolledBack, "exited 101"},
		{"exit 100: the init interface changed", fleettest.Behaviour{Exit: 100, Nothing: true}, 0, tfhosts.CheckRefused, "reboot"},
		{"hangs", fleettest.Behaviour{Hang: true}, 2, tfhosts.RolledBack, "within 2 s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bad := b.closure(fleettest.ClosureSpec{Name: "bad", Marker: "bad", Behaviour: map[string]fleettest.Behaviour{"activate": tt.behaviour}})
			v := b.deploy(runner.Request{Built: bad.Out, Settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Activate: tt.limit}}})
			b.want(v, tt.want, first.Out, first.Out, first.Out)
			if !strings.Contains(v.Sentence, tt.says) {
				t.Errorf("sentence = %q, want %q in it", v.Sentence, tt.says)
			}
			if s := b.system(); s.Demo != "first" {
				t.Errorf("the service shows %q, want first", s.Demo)
			}
		})
	}
}

// custom is a system whose switch-to-configuration is script alone.
func (b *bed) custom(name, script string) *fleettest.Closure {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "stc")
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		b.t.Fatal(err)
	}
	return b.closure(fleettest.ClosureSpec{Name: name, Bare: true, Files: map[string]string{"bin/switch-to-configuration": file}})
}

// Exit 100 of the switch: the init interface changed, and nothing was activated.
func TestInhibitorBoots(t *testing.T) {
	for name, settings := range map[string]tfhosts.NodeSettings{"guarded": {}, "plain": unguarded()} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, fleettest.HostConfig{})
			old := b.system().Running
			c := b.closure(fleettest.ClosureSpec{Name: "inhibited", Behaviour: map[string]fleettest.Behaviour{"activate": {Exit: 100, Nothing: true}}})
			b.want(b.deploy(runner.Request{Built: c.Out, Settings: settings}), tfhosts.CheckRefused, old, old, old)
			settings.OnInhibitor = "boot"
			v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
			b.want(v, tfhosts.RebootPending, old, c.Out, c.Out)
			if v.Failed() || !strings.Contains(v.Sentence, "exit 100") {
				t.Errorf("verdict = %+v, want a success that says why", v)
			}
			if err := b.host.Reboot(t.Context()); err != nil {
				t.Fatal(err)
			}
			b.want(b.deploy(runner.Request{Built: c.Out, Settings: settings}), tfhosts.Unchanged, c.Out, c.Out, c.Out)
		})
	}
}

func TestAnotherActivationHoldsTheHost(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "locked"})
	b.shell("mkdir -p /run/tf-hosts; echo run-of-alice >/run/tf-hosts/holder; setsid flock /run/tf-hosts/lock sleep 60 >/dev/null 2>&1 </dev/null &")
	v := b.deploy(runner.Request{Built: c.Out, Settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Command: 2, Guard: 1}}})
	b.want(v, tfhosts.Locked, old, old, old)
	if !strings.Contains(v.Sentence, "run-of-alice") {
		t.Errorf("sentence = %q, want the holder", v.Sentence)
	}
}

// A boot loader that names its default is read, and a switch that leaves it
// behind is not taken for a success.
func TestBootLoaderSaysTheDefault(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	entry := func(system string) string {
		return "mkdir -p /boot/loader/entries; echo 'default nixos-generation-7.conf' >/boot/loader/loader.conf; " +
			"echo 'options init=" + system + "/init loglevel=4' >/boot/loader/entries/nixos-generation-7.conf"
	}
	b.shell(entry(old))
	writes := b.closure(fleettest.ClosureSpec{Name: "writes", Behaviour: map[string]fleettest.Behaviour{"activate": {Shell: entry("$toplevel") + `; sed -i "s|.toplevel|$toplevel|" /boot/loader/entries/*`}}})
	b.want(b.deploy(runner.Request{Built: writes.Out}), tfhosts.Deployed, writes.Out, writes.Out, writes.Out)
	forgets := b.closure(fleettest.ClosureSpec{Name: "forgets"})
	v := b.deploy(runner.Request{Built: forgets.Out, Settings: tfhosts.NodeSettings{OnDegraded: "warn"}})
	b.want(v, tfhosts.Degraded, forgets.Out, forgets.Out, forgets.Out)
	if !v.Failed() || !strings.Contains(v.Sentence, "default: want "+forgets.Out+", got "+writes.Out) {
		t.Errorf("verdict = %+v, want a failure that names the boot default", v)
	}
}

func TestSwitchByHandIsUnderWay(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.custom("byhand", `[ "$1" = check ] && exit 0; echo "Could not acquire lock" >&2; exit 11`)
	v := b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.Locked, old, old, old)
}

func TestHostWithoutSystemd(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.custom("plain", `[ "$1" = check ] && exit 0; ln -sfn @toplevel@ /run/current-system; ln -sfn @toplevel@ /boot/default`)
	bad := b.custom("bad", `[ "$1" = check ] && exit 0; ln -sfn @toplevel@ /run/current-system; exit 1`)
	b.shell("mount -t tmpfs none /run/systemd")
	good := b.deploy(runner.Request{Built: c.Out})
	failed := b.deploy(runner.Request{Built: bad.Out})
	b.shell("umount /run/systemd")
	if good.Status != tfhosts.Deployed || good.OldPath != old {
		t.Errorf("verdict = %+v, want deployed", good)
	}
	b.want(failed, tfhosts.RolledBack, c.Out, c.Out, c.Out)
}

func TestUnitKilledDuringTheSwitch(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "killed", Behaviour: map[string]fleettest.Behaviour{"activate": {Hang: true}}})
	b.cfg.Fault = func(op string) error {
		if op == "activate.wait" {
			b.shell("until [ \"$(readlink -f /run/current-system)\" = " + c.Out + " ]; do sleep 0.1; done; systemctl stop 'tf-hosts-prod*'")
		}
		return nil
	}
	b.want(b.deploy(runner.Request{Built: c.Out}), tfhosts.RolledBack, old, old, old)
}

func TestRestoreThatFails(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	stuck := b.closure(fleettest.ClosureSpec{Name: "stuck", Behaviour: map[string]fleettest.Behaviour{"test": {Exit: 2, Nothing: true}}})
	b.want(b.deploy(runner.Request{Built: stuck.Out, Settings: unguarded()}), tfhosts.Deployed, stuck.Out, stuck.Out, stuck.Out)
	bad := b.closure(fleettest.ClosureSpec{Name: "bad", Behaviour: map[string]fleettest.Behaviour{"activate": {Exit: 3}}})
	b.want(b.deploy(runner.Request{Built: bad.Out}), tfhosts.RollbackFailed, bad.Out, stuck.Out, stuck.Out)
}

func TestUnitsThatFail(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	unit := map[string]string{"bad.service": fleettest.FailingUnit()}
	c := b.closure(fleettest.ClosureSpec{Name: "units", Units: unit})
	wantUnits := func(v tfhosts.Verdict) {
		t.Helper()
		if !slices.Equal(v.FailedUnits, []string{"bad.service"}) || !strings.Contains(strings.Join(v.Log, "\n"), "fails on purpose") {
			t.Errorf("verdict = %+v, want bad.service with its journal", v)
		}
	}

	v := b.deploy(runner.Request{Built: c.Out, Settings: tfhosts.NodeSettings{OnDegraded: "rollback"}})
	b.want(v, tfhosts.RolledBack, old, old, old)
	wantUnits(v)
	b.shell("systemctl reset-failed")

	v = b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.Degraded, c.Out, c.Out, c.Out)
	wantUnits(v)
	if !v.Failed() {
		t.Error("a degraded node passes by default")
	}

	// It had failed before: no degradation, and not unchanged either.
	v = b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if !strings.Contains(v.Sentence, "bad.service") {
		t.Errorf("sentence = %q, want the unit that had failed before", v.Sentence)
	}

	b.shell("systemctl reset-failed")
	again := b.closure(fleettest.ClosureSpec{Name: "units", Version: "2", Units: map[string]string{"worse.service": fleettest.FailingUnit()}})
	v = b.deploy(runner.Request{Built: again.Out, Settings: tfhosts.NodeSettings{OnDegraded: "warn"}})
	b.want(v, tfhosts.Degraded, again.Out, again.Out, again.Out)
	if v.Failed() {
		t.Error("on_degraded = warn fails the node")
	}

	// It fails a moment after the switch has ended with 0.
	late := b.closure(fleettest.ClosureSpec{Name: "units", Version: "3", Behaviour: map[string]fleettest.Behaviour{
		"activate": {Shell: "systemd-run --quiet --unit=late /bin/sh -c 'exit 1'; until systemctl -q is-failed late; do sleep 0.1; done"},
	}})
	v = b.deploy(runner.Request{Built: late.Out})
	b.want(v, tfhosts.Degraded, late.Out, late.Out, late.Out)
	if !slices.Contains(v.FailedUnits, "late.service") {
		t.Errorf("FailedUnits = %v, want late.service", v.FailedUnits)
	}
}

func TestConnectionCutDuringTheActivation(t *testing.T) {
	for _, tt := range []struct {
		name string
		exit int
		want tfhosts.Status
	}{
		{"it succeeds", 0, tfhosts.Deployed},
		{"it fails", 2, tfhosts.RolledBack},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBed(t, fleettest.HostConfig{})
			old := b.system().Running
			c := b.closure(fleettest.ClosureSpec{Name: "cut", Behaviour: map[string]fleettest.Behaviour{"activate": {SleepSeconds: 6, Exit: tt.exit}}})
			cut := make(chan error, 1)
			b.cfg.Fault = func(op string) error {
				if op != "activate.wait" {
					return nil
				}
				if err := b.host.Cut(t.Context()); err != nil {
					t.Error(err)
				}
				go func() {
					// Longer than the connection's patience.
					time.Sleep(7 * time.Second)
					cut <- b.host.Restore(context.WithoutCancel(t.Context()))
				}()
				return nil
			}
			v := b.deploy(runner.Request{Built: c.Out})
			if err := <-cut; err != nil {
				t.Fatal(err)
			}
			want := c.Out
			if tt.exit != 0 {
				want = old
			}
			b.want(v, tt.want, want, want, want)
			logins := 3
			if tt.exit != 0 {
				logins = 2 // nothing to confirm
			}
			if n := b.accepted(); n != logins {
				t.Errorf("sshd accepted %d logins, want %d: the link was cut", n, logins)
			}
		})
	}
}

func TestSecondActivationWaitsForTheFirst(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	slow := b.closure(fleettest.ClosureSpec{Name: "slow", Behaviour: map[string]fleettest.Behaviour{"activate": {SleepSeconds: 3}}})
	quick := b.closure(fleettest.ClosureSpec{Name: "quick"})
	began := make(chan struct{})
	first := b.cfg
	first.Fault = func(op string) error {
		if op == "activate.wait" {
			b.shell("until [ -e /run/tf-hosts/holder ]; do sleep 0.1; done")
			close(began)
		}
		return nil
	}
	done := make(chan tfhosts.Verdict, 1)
	go func() {
		done <- runner.New(first).Deploy(t.Context(), runner.Request{Name: "prod.h1", Node: b.node(""), Built: slow.Out})
	}()
	<-began
	v := b.deploy(runner.Request{Built: quick.Out})
	if v1 := <-done; v1.Status != tfhosts.Degraded && v1.Status != tfhosts.Deployed {
		t.Errorf("first = %s, want an end that is true", v1)
	}
	b.want(v, tfhosts.Deployed, quick.Out, quick.Out, quick.Out)
}

// TestSecondActivationOfTheSameSystem: what a killed deployer left running is
// waited for and not done again.
func TestSecondActivationOfTheSameSystem(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c := b.closure(fleettest.ClosureSpec{Name: "slow", Behaviour: map[string]fleettest.Behaviour{
		"activate": {SleepSeconds: 3, Shell: "echo switched >>/var/lib/switches"},
	}})
	began := make(chan struct{})
	first := b.cfg
	first.Fault = func(op string) error {
		if op == "activate.wait" {
			b.shell("until [ -e /run/tf-hosts/holder ]; do sleep 0.1; done")
			close(began)
		}
		return nil
	}
	done := make(chan tfhosts.Verdict, 1)
	go func() {
		done <- runner.New(first).Deploy(t.Context(), runner.Request{Name: "prod.h1", Node: b.node(""), Built: c.Out})
	}()
	<-began
	v := b.deploy(runner.Request{Built: c.Out})
	if v1 := <-done; v1.Status != tfhosts.Deployed {
		t.Errorf("first = %s, want deployed", v1)
	}
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if got := b.shell("cat /var/lib/switches"); strings.Count(got, "switched") != 1 {
		t.Errorf("switches of the host: %q, want one", got)
	}
}

func TestGoalBoot(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "boot"})
	boot := runner.Request{Built: c.Out, Settings: tfhosts.NodeSettings{Goal: "boot"}}
	b.want(b.deploy(boot), tfhosts.RebootPending, old, c.Out, c.Out)
	b.want(b.deploy(boot), tfhosts.RebootPending, old, c.Out, c.Out)
	if err := b.host.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.want(b.deploy(boot), tfhosts.Unchanged, c.Out, c.Out, c.Out)
}

func TestHostRebootsDuringTheSwitch(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c := b.closure(fleettest.ClosureSpec{Name: "reboots", Behaviour: map[string]fleettest.Behaviour{"activate": {SleepSeconds: 60}}})
	rebooted := make(chan error, 1)
	b.cfg.Fault = func(op string) error {
		if op == "activate.wait" {
			b.shell("until grep -q test /var/lib/tf-hosts/runs/*/phase 2>/dev/null; do sleep 0.1; done")
			go func() { rebooted <- b.host.Reboot(t.Context()) }()
		}
		return nil
	}
	old := b.system().Running
	v := b.deploy(runner.Request{Built: c.Out})
	if err := <-rebooted; err != nil {
		t.Fatal(err)
	}
	b.want(v, tfhosts.RolledBack, old, old, old)
}

func unguarded() tfhosts.NodeSettings {
	no := false
	return tfhosts.NodeSettings{Guard: &no}
}
