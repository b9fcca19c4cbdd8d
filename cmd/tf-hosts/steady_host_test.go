package main

import (
	"encoding/json"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestSteadyApply is user story 1 of spec 004 on two real hosts.
func TestSteadyApply(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	r := newRig(t, fleet)
	h1, h2 := fleet.Hosts[0], fleet.Hosts[1]
	r.onHost("prod.app1", h1)
	r.onHost("prod.app2", h2)
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	two := r.system("prod.app2", fleettest.ClosureSpec{Version: "1"})

	// Before the first apply there is something to do.
	r.want(2, "plan", "--", "-detailed-exitcode")

	first := r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Deployed, "prod.app2": tfhosts.Deployed})
	r.wantRuns(h1, one, "1")
	r.wantRuns(h2, two, "1")
	var outputs map[string]struct{ Value map[string]any }
	if err := json.Unmarshal([]byte(first.stdout), &outputs); err != nil || len(outputs["nodes"].Value) != 2 {
		t.Fatalf("stdout of apply is not the outputs as one JSON document: %v\n%s", err, first.stdout)
	}
	for _, h := range fleet.Hosts {
		if n := r.sshCount(h); n.Connections != 2 || n.Accepted != 2 {
			t.Errorf("host %q after its deploy: %+v, want one connection, and one to confirm", h.Name, n)
		}
	}

	// Nothing changed: nothing is deployed and no host is contacted.
	r.want(0, "plan", "--", "-detailed-exitcode")
	again := r.want(0, "apply")
	if again.stdout != first.stdout {
		t.Errorf("outputs of a second apply:\n%s\nwant as at first:\n%s", again.stdout, first.stdout)
	}
	r.wantVerdicts(map[string]tfhosts.Status{})
	for _, h := range fleet.Hosts {
		if n := r.sshCount(h); n.Connections != 2 {
			t.Errorf("host %q after an apply without changes: %+v, want no new connection", h.Name, n)
		}
	}

	// A changed closure deploys its node alone.
	one = r.system("prod.app1", fleettest.ClosureSpec{Version: "2"})
	r.want(2, "plan", "--", "-detailed-exitcode")
	r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Deployed})
	r.wantRuns(h1, one, "2")
	r.wantRuns(h2, two, "1")
	r.want(0, "plan", "--", "-detailed-exitcode")
	if n := r.sshCount(h2); n.Connections != 2 {
		t.Errorf("host %q, unchanged: %+v, want no new connection", h2.Name, n)
	}

	// The pinned key and the SSH options are triggers of their own (FR-002);
	// the host already runs its system.
	r.nodes["prod.app2"]["host_key"] = h2.HostKeys()["ecdsa"]
	r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app2": tfhosts.Unchanged})
	r.nodes["prod.app2"]["ssh_opts"] = []string{"ConnectTimeout=7"}
	r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app2": tfhosts.Unchanged})

	// What changes nothing on a host is no trigger.
	r.nodes["prod.app2"]["group"] = "web"
	r.want(0, "plan", "--", "-detailed-exitcode")

	list := r.want(0, "state", "list")
	if want := "terraform_data.nixos[\"prod.app1\"]\nterraform_data.nixos[\"prod.app2\"]\n"; list.stdout != want {
		t.Errorf("state list = %q, want %q", list.stdout, want)
	}
	taint := r.want(0, "taint", "prod.app1")
	if !strings.Contains(taint.stdout, "prod.app1") {
		t.Errorf("taint prod.app1 = %q", taint.stdout)
	}
	r.want(2, "plan", "--", "-detailed-exitcode")
	r.want(0, "untaint", "prod.app1")
	r.want(0, "plan", "--", "-detailed-exitcode")

	// A node that leaves the graph keeps its configuration.
	delete(r.nodes, "prod.app2")
	gone := r.want(0, "apply")
	if !strings.Contains(gone.stderr, "prod.app2: leaves the graph; its host keeps its configuration") {
		t.Errorf("the node that left is not named:\n%s", gone.stderr)
	}
	r.wantRuns(h2, two, "1")
	if n := r.sshCount(h1); n.Connections != n.Accepted {
		t.Errorf("host %q: %+v, want one authentication a connection", h1.Name, n)
	}
}

// TestKindsOfNixosConf deploys one host from each form of nixos_conf.
func TestKindsOfNixosConf(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	r := newRig(t, fleet)
	r.onHost("prod.app1", fleet.Hosts[0])
	for _, row := range []struct {
		name string
		conf func(*fleettest.Closure) string
	}{
		{"a .nix file with a derivation", func(c *fleettest.Closure) string { return c.PlainFile }},
		{"a .nix file with a system", func(c *fleettest.Closure) string { return c.File }},
		{"a flake", func(c *fleettest.Closure) string { return c.FlakeRef }},
		{"a derivation", func(c *fleettest.Closure) string { return c.Drv }},
		{"a built system", func(c *fleettest.Closure) string {
			if err := c.Build(t.Context()); err != nil {
				t.Fatal(err)
			}
			return c.Out
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			version := strings.Map(func(c rune) rune {
				if c < 'a' || c > 'z' {
					return '-'
				}
				return c
			}, row.name)
			c := r.system("prod.app1", fleettest.ClosureSpec{Version: version})
			r.nodes["prod.app1"]["nixos_conf"] = row.conf(c)
			r.want(0, "apply")
			r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Deployed})
			r.wantRuns(fleet.Hosts[0], c, version)
			r.want(0, "plan", "--", "-detailed-exitcode")
		})
	}
}

// TestSudoerWithoutTrust: a user with sudo rights, whom nix does not trust.
func TestSudoerWithoutTrust(t *testing.T) {
	const password = "sudo-secret-that-must-not-show"
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Users: []fleettest.User{
		{Name: "deploy", Sudo: fleettest.SudoNoPassword}, {Name: "careful", Sudo: fleettest.SudoPassword, Password: password},
	}}}})
	r := newRig(t, fleet)
	r.onHost("prod.app1", fleet.Hosts[0])
	r.nodes["prod.app1"]["username"] = "deploy"
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Deployed})
	r.wantRuns(fleet.Hosts[0], one, "1")
	if n := r.sshCount(fleet.Hosts[0]); n.Connections != 2 || n.Accepted != 2 {
		t.Errorf("deploy through sudo: %+v, want one connection, and one to confirm", n)
	}

	r.nodes["prod.app1"]["username"] = "careful"
	r.writeFile("sudo-password", password+"\n")
	r.nodes["prod.app1"]["runner"] = map[string]any{"become_password_file": "sudo-password"}
	two := r.system("prod.app1", fleettest.ClosureSpec{Version: "2"})
	res := r.want(0, "apply")
	r.wantRuns(fleet.Hosts[0], two, "2")
	if strings.Contains(res.stderr+res.stdout, password) {
		t.Error("the sudo password shows in the output")
	}
}
