package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestSSHVerb logs in with the real ssh to a real host.
func TestSSHVerb(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Name: "one", Users: []fleettest.User{{Name: "deploy"}}}, {Name: "two"}}})
	r := newRig(t, fleet)
	for _, h := range fleet.Hosts {
		r.onHost("prod."+h.Name, h)
		r.nodes["prod."+h.Name]["nixos_conf"] = "/nix/store/00000000000000000000000000000000-x"
	}
	r.nodes["prod.one"]["username"] = "deploy"

	// The login shell reads the command, and ssh's code is the program's.
	res := r.want(7, "ssh", "prod.one", "--", "echo $(id -un) $((1 + 2)); exit 7")
	if res.stdout != "deploy 3\n" {
		t.Errorf("stdout = %q, want the answer alone", res.stdout)
	}

	// Another pinned key is not believed, and the file of pins follows the setup.
	right := r.nodes["prod.one"]["host_key"]
	r.nodes["prod.one"]["host_key"] = fleet.Host("two").HostKey()
	if res = r.want(255, "ssh", "prod.one", "true"); !strings.Contains(res.stderr, "Host key verification failed") {
		t.Errorf("stderr of a wrong key = %q", res.stderr)
	}
	r.nodes["prod.one"]["host_key"] = right
	r.want(0, "ssh", "prod.one", "true")

	// Nothing is pinned: the first key is remembered where a deploy looks for it.
	r.nodes["prod.two"]["host_key"] = ""
	if res = r.want(0, "ssh", "prod.two", "--", "echo", "hi"); res.stdout != "hi\n" {
		t.Errorf("stdout = %q, want hi", res.stdout)
	}
	if res = r.want(0, "exec", "--on", "prod.two", "--", "true"); strings.Contains(res.stderr, "first use") {
		t.Errorf("the key of a first ssh was not remembered: %s", res.stderr)
	}
	known := bootstrap.KnownHosts(r.workDir())
	line := fmt.Sprintf("%s %s\n", fleet.Host("two").Addr(), strings.TrimSpace(fleet.Host("one").HostKey()))
	if err := os.WriteFile(known, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	r.want(255, "ssh", "prod.two", "true")

	// Without ssh there is one clear error.
	r.environ = append(r.environ, "PATH=/nonexistent")
	res = r.want(1, "ssh", "prod.one")
	if want := "tf-hosts: error: logging in to \"prod.one\": there is no ssh on PATH\ntf-hosts: hint: install OpenSSH's client; tf-hosts exec needs none\n"; res.stderr != want {
		t.Errorf("stderr = %q, want %q", res.stderr, want)
	}
}
