package runner_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// results are the verdict's checks, one a line: name, moment, ok.
func results(v tfhosts.Verdict) string {
	var lines []string
	for _, r := range v.Health {
		lines = append(lines, fmt.Sprint(r.Name, " ", r.When, " ", r.OK))
	}
	return strings.Join(lines, "\n")
}

// Each kind of check asks the real host; http and tcp go through the connection,
// to what listens on the host's loopback alone.
func TestHealthChecks(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{Users: []fleettest.User{{Name: "deploy", Sudo: fleettest.SudoNoPassword}}})
	c := b.closure(fleettest.ClosureSpec{Name: "healthy", Marker: "hello", HTTPPort: 8080})
	no, none := false, 0
	settings := tfhosts.NodeSettings{Guard: &no, Health: []tfhosts.HealthCheck{
		{Name: "ssh", TCP: "127.0.0.1:22", When: tfhosts.HealthBoth, Retries: &none},
		{Name: "root", Command: []string{"sh", "-c", `[ "$(id -u)" = 0 ] && [ "$1" = "two  words" ]`, "sh", "two  words"}, When: tfhosts.HealthBefore, Retries: &none},
		{Name: "demo", Unit: fleettest.DemoUnit},
		{Name: "web", HTTP: &tfhosts.HTTPCheck{URL: "http://localhost:8080/", Contains: "hello"}},
		{Name: "outside", From: "deployer", TCP: b.host.Addr() + ":8080"},
	}}
	node := b.node("")
	node.Username = "deploy"
	v := b.deploy(runner.Request{Node: node, Built: c.Out, Settings: settings})
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	want := "ssh before true\nroot before true\nssh after true\ndemo after true\nweb after true\noutside after true"
	if got := results(v); got != want {
		t.Errorf("checks:\n%s\nwant:\n%s", got, want)
	}
	if ops := b.ops(); slices.Index(ops, "health.before") > slices.Index(ops, "root.link") || slices.Index(ops, "health.after") < slices.Index(ops, "verify") {
		t.Errorf("operations = %v, want the checks before the copy and after the activation", ops)
	}
	if n := b.accepted(); n != 1 {
		t.Errorf("sshd accepted %d logins, want 1", n)
	}
}

func TestHealthCheckRefusesTheDeploy(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "refused"})
	none := 0
	settings := tfhosts.NodeSettings{Health: []tfhosts.HealthCheck{
		{Name: "database", Unit: "absent.service", When: tfhosts.HealthBefore, Retries: &none},
		{Name: "backup", Command: []string{"sh", "-c", "echo no backup today >&2; exit 3"}, When: tfhosts.HealthBefore, Retries: &none},
		{Name: "slow", Command: []string{"sleep", "60"}, When: tfhosts.HealthBefore, Timeout: 2, Retries: &none},
	}}
	v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
	b.want(v, tfhosts.CheckRefused, old, old, old)
	for _, says := range []string{
		`health check "database" failed: absent.service is inactive`,
		`health check "backup" failed: exit 3: no backup today`,
		`health check "slow" failed: the command did not end within 1 s`,
		"nothing was changed",
	} {
		if !strings.Contains(v.Sentence, says) {
			t.Errorf("sentence = %q, want %q in it", v.Sentence, says)
		}
	}
	if !strings.Contains(v.Hint, "systemctl status absent.service") {
		t.Errorf("hint = %q, want the first check as a command", v.Hint)
	}
	if ops := b.ops(); slices.Contains(ops, "root.link") {
		t.Errorf("operations = %v, want nothing after the refusal", ops)
	}
	if got := b.shell("pgrep -x sleep -a | grep -c 'sleep 60' || true"); got != "0" {
		t.Errorf("%s commands of the check still run on the host, want none", got)
	}
}

// Without the guard a check that fails has nothing to go back to: it is said, and
// said again by a second apply, which finds the system in place.
func TestHealthCheckFailsAfterAnUnguardedActivation(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c := b.closure(fleettest.ClosureSpec{Name: "sick"})
	no, none := false, 0
	settings := tfhosts.NodeSettings{Guard: &no, OnDegraded: "warn", Health: []tfhosts.HealthCheck{
		{Name: "web", HTTP: &tfhosts.HTTPCheck{URL: "http://127.0.0.1:8080/"}, Retries: &none},
	}}
	v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
	b.want(v, tfhosts.Degraded, c.Out, c.Out, c.Out)
	if !v.Failed() || !strings.Contains(v.Sentence, `the new system runs and stays, but health check "web" failed: `) || !strings.Contains(v.Sentence, "onnection refused") {
		t.Errorf("verdict = %+v, want a failure that says what stays", v)
	}
	v = b.deploy(runner.Request{Built: c.Out, Settings: settings})
	b.want(v, tfhosts.Degraded, c.Out, c.Out, c.Out)
	if !strings.Contains(v.Sentence, "already runs the wanted system, but") {
		t.Errorf("sentence = %q, want it to say that nothing was activated", v.Sentence)
	}

	b.shell("echo 'AllowTcpForwarding no' >/etc/ssh/sshd_config.d/05-forward.conf; systemctl reload ssh")
	v = b.deploy(runner.Request{Built: c.Out, Settings: settings})
	b.want(v, tfhosts.Degraded, c.Out, c.Out, c.Out)
	if !strings.Contains(v.Sentence, "forbids forwarding") || !strings.Contains(v.Sentence, "AllowTcpForwarding") {
		t.Errorf("sentence = %q, want the option that forbids it", v.Sentence)
	}
}

// A connection that is lost during a check is made anew, once for all checks.
func TestHealthCheckOverALostConnection(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c := b.closure(fleettest.ClosureSpec{Name: "lostcheck"})
	none := 0
	cut := []string{"sh", "-c", `[ -e /run/cut ] && exit 0; touch /run/cut
		kill -9 $(ps -eo pid,args | sed -n 's/^ *\([0-9]*\) sshd[a-z-]*: root.*/\1/p')`}
	settings := tfhosts.NodeSettings{Health: []tfhosts.HealthCheck{
		{Name: "cut", Command: cut, When: tfhosts.HealthBefore, Retries: &none},
		{Name: "wait", Command: []string{"sleep", "2"}, When: tfhosts.HealthBefore, Retries: &none},
	}}
	v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if got := results(v); got != "cut before true\nwait before true" {
		t.Errorf("checks:\n%s", got)
	}
	if n := b.accepted(); n != 3 {
		t.Errorf("sshd accepted %d logins, want one, one in its place, and one to confirm", n)
	}
}
