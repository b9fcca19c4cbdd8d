package runner_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// listing is every file of the host but those of the store and of the system's own
// doings, which change without us.
func (b *bed) listing() []string {
	b.t.Helper()
	return strings.Fields(b.shell(`find / \( -path /proc -o -path /sys -o -path /dev -o -path /nix/store -o -path /run/systemd \
		-o -path /run/log -o -path /var/log/journal -o -path /run/user -o -path /run/demo -o -path /nix/var/nix/db \
		-o -path /nix/var/nix/temproots -o -path /nix/var/nix/gcroots/auto -o -path /run/motd.dynamic -o -path /tmp -o -path /var/tmp -o -path /run/udev -o -path /run/dbus \
		-o -path /var/lib/systemd -o -path /root \) -prune -o -print | sort`))
}

func added(before, after []string) []string {
	return slices.DeleteFunc(after, func(f string) bool { return slices.Contains(before, f) })
}

// TestNothingIsLeftBehind: the profile, roots, the log and what is under /run. A
// killed deployer leaves its record too, until the next run has read it.
func TestNothingIsLeftBehind(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	before := b.listing()
	want := []string{
		"/nix/var/nix/gcroots/tf-hosts", "/nix/var/nix/gcroots/tf-hosts/old",
		"/nix/var/nix/profiles/system-2-link",
		"/run/tf-hosts", "/run/tf-hosts/copy", "/run/tf-hosts/holder", "/run/tf-hosts/lock",
		"/var/log/tf-hosts", "/var/log/tf-hosts/activation.log",
	}
	check := func() {
		t.Helper()
		got := slices.DeleteFunc(added(before, b.listing()), func(f string) bool {
			return strings.HasPrefix(f, "/run/tf-hosts/copy/") // pids of sessions that may still end
		})
		if !slices.Equal(got, want) {
			t.Errorf("on the host besides what was there:\n %s\nwant\n %s", strings.Join(got, "\n "), strings.Join(want, "\n "))
		}
	}
	one := b.closure(fleettest.ClosureSpec{Name: "one"})
	b.want(b.deploy(runner.Request{Built: one.Out}), tfhosts.Deployed, one.Out, one.Out, one.Out)
	check()

	// The deployer dies while the host waits for it.
	two := b.closure(fleettest.ClosureSpec{Name: "two", Behaviour: map[string]fleettest.Behaviour{"activate": {Shell: "echo switched >>/root/switches"}}})
	settings := tfhosts.NodeSettings{Limits: tfhosts.Limits{Guard: 5}}
	die := errors.New("the deployer is dead")
	b.cfg.Fault = func(op string) error {
		if op == "activate.wait" {
			return die
		}
		return nil
	}
	if v := b.deploy(runner.Request{Built: two.Out, Settings: settings}); !v.Failed() {
		t.Fatalf("a deploy that ended in the middle = %s", v)
	}
	b.cfg.Fault = nil
	record := b.shell("until ls /var/lib/tf-hosts/runs/*/verdict; do sleep 0.1; done 2>/dev/null")
	if text := b.shell("cat " + record); !strings.Contains(text, "rolled_back no confirmation came within 5 s") {
		t.Errorf("verdict on the host = %q, want it to have gone back by itself", text)
	}
	if s := b.system(); s.Running != one.Out || s.Profile != one.Out || s.Default != one.Out {
		t.Errorf("the host has %+v, want %s as a whole", s, one.Out)
	}
	b.shell(`seen=$(cat /var/lib/tf-hosts/runs/*/readers/* 2>/dev/null || echo 0); until read -r now _ </proc/uptime; [ $((${now%.*} - seen)) -ge 10 ]; do sleep 0.2; done`)
	b.ops()
	v := b.deploy(runner.Request{Built: one.Out})
	b.want(v, tfhosts.Unchanged, one.Out, one.Out, one.Out)
	b.mu.Lock()
	told := slices.ContainsFunc(b.events, func(e tfhosts.Event) bool {
		return e.Op == "record.read" && strings.Contains(e.Message, "rolled_back no confirmation came")
	})
	b.mu.Unlock()
	if !told {
		t.Errorf("the next run does not say how the unseen activation ended: %+v", b.events)
	}
	want = append(want, "/nix/var/nix/gcroots/tf-hosts/new")
	slices.Sort(want)
	check()
}

// TestKilledDeployerIsSucceeded: the next run confirms what the killed one left
// waiting, and does not switch again.
func TestKilledDeployerIsSucceeded(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "left", Behaviour: map[string]fleettest.Behaviour{"activate": {Shell: "echo switched >>/var/lib/switches"}}})
	b.cfg.Fault = func(op string) error {
		if op == "activate.reconnect" || op == "activate.confirm" || op == "activate.result" {
			return errors.New("the deployer is dead")
		}
		return nil
	}
	v := runner.New(b.cfg).Deploy(t.Context(), runner.Request{Name: "prod.h1", Node: b.node(""), Built: c.Out})
	if !v.Failed() {
		t.Fatalf("a deploy that ended in the middle = %s", v)
	}
	b.cfg.Fault = nil
	if s := b.system(); s.Running != c.Out || s.Profile != old {
		t.Fatalf("the host has %+v, want the trial of %s", s, c.Out)
	}
	// Until then it might be alive, and keep its record.
	b.shell(`seen=$(cat /var/lib/tf-hosts/runs/*/readers/*); until read -r now _ </proc/uptime; [ $((${now%.*} - seen)) -ge 10 ]; do sleep 0.2; done`)
	v = b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if v.OldPath != old {
		t.Errorf("OldPath = %q, want what ran before the killed deployer, %q", v.OldPath, old)
	}
	if got := b.shell("cat /var/lib/switches"); strings.Count(got, "switched") != 1 {
		t.Errorf("switches of the host: %q, want one", got)
	}
}
