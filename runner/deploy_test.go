package runner_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

func TestDeployRootThenUnchanged(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "root", Marker: "hello", PayloadPaths: 3, PayloadBytes: 100000})

	v := b.deploy(runner.Request{Node: b.node(c.File)})
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if v.OldPath != old || v.NewPath != c.Out || v.Generation != 2 || v.Failed() {
		t.Errorf("verdict = %+v, want from %s to %s as generation 2", v, old, c.Out)
	}
	if v.BytesCopied < 300000 {
		t.Errorf("BytesCopied = %d, want over 300000", v.BytesCopied)
	}
	if n := b.accepted(); n != 2 {
		t.Errorf("sshd accepted %d logins, want one for the deploy and one to confirm it", n)
	}
	if s := b.system(); s.Demo != "hello" {
		t.Errorf("the service shows %q, want hello", s.Demo)
	}
	want := []string{"build", "connect", "observe", "root.link", "space.check", "copy", "copy.check", "check", "activate.start", "activate.wait", "activate.reconnect", "activate.confirm", "activate.result", "verify", "root.release"}
	if diff := cmp.Diff(want, b.ops()); diff != "" {
		t.Errorf("operations (-want +got):\n%s", diff)
	}
	if got := b.shell("readlink /nix/var/nix/gcroots/tf-hosts/old; ls /nix/var/nix/gcroots/tf-hosts"); got != old+"\nold" {
		t.Errorf("roots on the host = %q, want the old system's alone", got)
	}

	v = b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.Unchanged, c.Out, c.Out, c.Out)
	if diff := cmp.Diff([]string{"connect", "observe"}, b.ops()); diff != "" {
		t.Errorf("operations of an unchanged node (-want +got):\n%s", diff)
	}
}

func TestDeploySudoer(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{Users: []fleettest.User{
		{Name: "deploy", Sudo: fleettest.SudoNoPassword},
		{Name: "plain"},
	}})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "sudoer", PayloadPaths: 2, PayloadBytes: 1000})

	node := b.node("")
	node.Username = "plain"
	b.want(b.deploy(runner.Request{Node: node, Built: c.Out}), tfhosts.AuthFailed, old, old, old)

	node.Username = "deploy"
	before := b.accepted()
	b.want(b.deploy(runner.Request{Node: node, Built: c.Out}), tfhosts.Deployed, c.Out, c.Out, c.Out)
	if n := b.accepted() - before; n != 2 {
		t.Errorf("sshd accepted %d logins, want one for the deploy and one to confirm it", n)
	}
}
