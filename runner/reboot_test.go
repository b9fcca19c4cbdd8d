package runner_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// kernel is a system with the given text for its kernel.
func (b *bed) kernel(name, text string, more fleettest.ClosureSpec) *fleettest.Closure {
	b.t.Helper()
	file := filepath.Join(b.t.TempDir(), "kernel")
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		b.t.Fatal(err)
	}
	more.Name = name
	more.Files = map[string]string{"kernel": file}
	return b.closure(more)
}

func TestRebootIfNeeded(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{Users: []fleettest.User{{Name: "deploy", Sudo: fleettest.SudoNoPassword}}})
	node := b.node("")
	node.Username = "deploy"
	yes := true
	settings := tfhosts.NodeSettings{RebootIfNeeded: &yes, Health: []tfhosts.HealthCheck{{Name: "demo", Unit: fleettest.DemoUnit}}}
	boots := b.host.Boots()
	deploy := func(c *fleettest.Closure, s tfhosts.NodeSettings) tfhosts.Verdict {
		b.t.Helper()
		b.ops()
		return b.deploy(runner.Request{Node: node, Built: c.Out, Settings: s})
	}
	wantBoots := func(n int) {
		b.t.Helper()
		if got := b.host.Boots() - boots; got != n {
			t.Errorf("the host was restarted %d times, want %d", got, n)
		}
	}

	one := b.kernel("one", "linux 1", fleettest.ClosureSpec{})
	without := settings
	without.RebootIfNeeded = nil
	v := deploy(one, without)
	b.want(v, tfhosts.Deployed, one.Out, one.Out, one.Out)
	if !strings.Contains(v.Sentence, "what the next boot starts: kernel") || !strings.Contains(v.Hint, "systemctl reboot") {
		t.Errorf("verdict = %+v, want it to say that the kernel waits for a boot", v)
	}
	wantBoots(0)

	v = deploy(one, settings)
	b.want(v, tfhosts.Deployed, one.Out, one.Out, one.Out)
	wantBoots(1)
	if !strings.Contains(v.Sentence, "restarted for: kernel") || v.Hint != "" {
		t.Errorf("verdict = %+v, want it to say why it was restarted", v)
	}
	if ops := b.ops(); slices.Index(ops, "reboot.start") < 0 || slices.Index(ops, "reboot.wait") < slices.Index(ops, "reboot.start") || ops[len(ops)-1] != "health.after" {
		t.Errorf("operations = %v, want the restart and the checks after it", ops)
	}
	if v.Seconds["reboot"] == 0 {
		t.Error("the verdict has no seconds of the restart")
	}

	same := b.kernel("same", "linux 1", fleettest.ClosureSpec{})
	b.want(deploy(same, settings), tfhosts.Deployed, same.Out, same.Out, same.Out)
	wantBoots(1)

	boot := settings
	boot.Goal = "boot"
	two := b.kernel("two", "linux 2", fleettest.ClosureSpec{})
	v = deploy(two, boot)
	b.want(v, tfhosts.Deployed, two.Out, two.Out, two.Out)
	wantBoots(2)
	if got := results(v); got != "demo after true" {
		t.Errorf("checks:\n%s\nwant one, of the new system", got)
	}
}

// What a restarted host does wrong is no success.
func TestRebootThatGoesWrong(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	yes := true
	boot := tfhosts.NodeSettings{Goal: "boot", RebootIfNeeded: &yes}

	failing := b.closure(fleettest.ClosureSpec{Name: "failing", Units: map[string]string{"broken.service": fleettest.FailingUnit()}})
	v := b.deploy(runner.Request{Built: failing.Out, Settings: boot})
	b.want(v, tfhosts.Degraded, failing.Out, failing.Out, failing.Out)
	if fmt.Sprint(v.FailedUnits) != "[broken.service]" || !strings.Contains(strings.Join(v.Log, "\n"), "fails on purpose") {
		t.Errorf("verdict = %+v, want the unit and its journal", v)
	}

	other := b.closure(fleettest.ClosureSpec{Name: "other"})
	b.cfg.Fault = func(op string) error {
		if op == "reboot.start" {
			b.shell("ln -sfn " + old + " /boot/default")
		}
		return nil
	}
	v = b.deploy(runner.Request{Built: other.Out, Settings: boot})
	b.want(v, tfhosts.Degraded, old, other.Out, old)
	if !strings.Contains(v.Sentence, "running: want "+other.Out+", got "+old) {
		t.Errorf("sentence = %q, want what runs instead", v.Sentence)
	}

	gone := b.closure(fleettest.ClosureSpec{Name: "gone"})
	b.cfg.Fault = func(op string) error {
		if op == "reboot.wait" {
			return b.host.Cut(t.Context())
		}
		return nil
	}
	boot.Limits.Reboot = 8
	v = b.deploy(runner.Request{Built: gone.Out, Settings: boot})
	if err := b.host.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v.Status != tfhosts.Timeout || !strings.Contains(v.Sentence, "is not back") || !strings.Contains(v.Hint, "console") {
		t.Errorf("verdict = %+v, want timeout with a hint", v)
	}
}
