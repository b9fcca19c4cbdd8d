package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestDiffNode: what the host runs is read from the host, so a system that this
// machine never had is compared all the same.
func TestDiffNode(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	h := fleet.Hosts[0]
	r := newRig(t, fleet)
	r.onHost("prod.app1", h)
	before := r.sshCount(h)
	running, err := h.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	marker := fmt.Sprint(time.Now().UnixNano()) // no earlier test has built it
	c := r.system("prod.app1", fleettest.ClosureSpec{Version: "2", Marker: marker, PayloadPaths: 1, PayloadBytes: 100_000})

	res := r.want(tfhosts.ExitFailed, "diff", "prod.app1")
	if !strings.Contains(res.stderr, "tf-hosts diff --build prod.app1") {
		t.Errorf("stderr has no way out:\n%s", res.stderr)
	}
	res = r.want(0, "diff", "--build", "prod.app1")
	if !strings.HasPrefix(res.stdout, running.Running+" -> "+c.Out+"\n") || !strings.Contains(res.stdout, " added, ") {
		t.Errorf("stdout:\n%s", res.stdout)
	}
	res = r.want(0, "--json", "diff", "prod.app1")
	var d tfhosts.Diff
	if err := json.Unmarshal([]byte(res.stdout), &d); err != nil {
		t.Fatalf("%v:\n%s", err, res.stdout)
	}
	if d.Old != running.Running || d.New != c.Out || d.SizeDelta < 100_000 || d.OldSize <= 0 || len(d.Added) == 0 {
		t.Errorf("diff = %+v, want the payload of 100,000 bytes to be added", d)
	}
	if now := r.sshCount(h); now.Accepted-before.Accepted != 2 {
		t.Errorf("%d logins for two comparisons, want one each", now.Accepted-before.Accepted)
	}
	if after, err := h.System(t.Context()); err != nil || after != running {
		t.Errorf("the host has %+v, %v, want it as it was: %+v", after, err, running)
	}

	r.want(0, "apply")
	if res = r.want(0, "diff", "prod.app1"); !strings.Contains(res.stdout, "the same system") {
		t.Errorf("stdout after the apply:\n%s", res.stdout)
	}
	if err := h.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.runner["limits"] = map[string]int{"connect": 2}
	r.want(tfhosts.ExitNodesFailed, "diff", "prod.app1")
	r.want(tfhosts.ExitUsage, "diff", "prod.nobody")
	r.want(tfhosts.ExitUsage, "diff")
}
