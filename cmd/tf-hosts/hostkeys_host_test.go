package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestHostKeys: what is printed can be pinned as it is, each key is judged, and
// nobody logs in, however often the hosts are asked.
func TestHostKeys(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Name: "pinned"}, {Name: "fresh"}, {Name: "changed"}, {Name: "rsa", RSAHostKey: true}}})
	r := newRig(t, fleet)
	for _, h := range fleet.Hosts {
		r.onHost("prod."+h.Name, h)
		r.nodes["prod."+h.Name]["nixos_conf"] = "/nix/store/00000000000000000000000000000000-x"
	}
	r.nodes["prod.fresh"]["host_key"] = ""
	key := func(h string) string { return strings.Join(strings.Fields(fleet.Host(h).HostKey())[:2], " ") }

	res := r.want(0, "host-keys", "prod.pinned", "prod.fresh")
	want := fmt.Sprintf("{\n  \"prod.fresh\": {\n    \"host_key\": %q\n  },\n  \"prod.pinned\": {\n    \"host_key\": %q\n  }\n}\n", key("fresh"), key("pinned"))
	if res.stdout != want {
		t.Errorf("stdout = %s, want %s", res.stdout, want)
	}
	for _, text := range []string{"prod.pinned: ed25519 SHA256:", " is the pinned key\n", "prod.fresh: ed25519 SHA256:", " is new: nothing is pinned or known\n"} {
		if !strings.Contains(res.stderr, text) {
			t.Errorf("stderr does not say %q:\n%s", text, res.stderr)
		}
	}
	pins := res.stdout

	r.nodes["prod.changed"]["host_key"] = fleet.Host("pinned").HostKey()
	r.nodes["prod.away"] = map[string]any{"host": "127.0.0.1", "ssh_opts": []string{fmt.Sprintf("Port=%d", unusedPort(t))}, "nixos_conf": "/nix/store/00000000000000000000000000000000-x"}
	res = r.want(tfhosts.ExitNodesFailed, "host-keys", "*,!prod.changed")
	if !strings.Contains(res.stderr, "prod.away: asking") || strings.Contains(res.stdout, "prod.away") {
		t.Errorf("the node that does not answer: stdout %s, stderr %s", res.stdout, res.stderr)
	}
	res = r.want(tfhosts.ExitFailed, "host-keys")
	for _, text := range []string{"warning: prod.changed: ed25519 SHA256:", " is not the expected key: want ed25519 SHA256:", "1 host key has changed", "hint: pin a new key only when"} {
		if !strings.Contains(res.stderr, text) {
			t.Errorf("stderr does not say %q:\n%s", text, res.stderr)
		}
	}
	var got map[string]struct {
		HostKey string `json:"host_key"`
	}
	if err := json.Unmarshal([]byte(res.stdout), &got); err != nil || len(got) != 4 {
		t.Fatalf("stdout holds %d keys, %v:\n%s", len(got), err, res.stdout)
	}
	for _, h := range fleet.Hosts {
		if got["prod."+h.Name].HostKey != key(h.Name) {
			t.Errorf("%s: %q, want %q", h.Name, got["prod."+h.Name].HostKey, key(h.Name))
		}
		if n := r.sshCount(h); n.Accepted != 0 {
			t.Errorf("%s: %d logins, want none", h.Name, n.Accepted)
		}
	}

	// The pins are those of the next run, and no host shuts this address out.
	r.environ = append(r.environ, "SSH_NODES="+pins)
	res = r.want(0, "exec", "--on", "prod.fresh,prod.pinned", "--", "true")
	if strings.Contains(res.stderr, "accepted on first use") {
		t.Errorf("the printed pin is not used:\n%s", res.stderr)
	}
}
