package main

import (
	"encoding/json"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// appsTF: the program for all groups deploys the nodes of each as a graph of its
// own, and the plan of all is empty after it.
func appsTF(t *testing.T, _ stage) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(3)})
	r := newRig(t, fleet)
	closures := map[string]*fleettest.Closure{}
	for i, name := range []string{"web.app1", "web.app2", "mail.app1"} {
		r.onHost(name, fleet.Hosts[i])
		closures[name] = r.system(name, fleettest.ClosureSpec{Version: "1"})
		group, _, _ := strings.Cut(name, ".")
		r.nodes[name]["group"] = group
	}
	r.want(2, "all", "plan", "--", "-detailed-exitcode")
	res := r.want(0, "all", "apply")
	var outputs map[string]struct {
		Nodes struct{ Value map[string]any } `json:"nodes"`
	}
	if err := json.Unmarshal([]byte(res.stdout), &outputs); err != nil ||
		len(outputs["web"].Nodes.Value) != 2 || len(outputs["mail"].Nodes.Value) != 1 {
		t.Fatalf("outputs keyed by group: %v\n%s", err, res.stdout)
	}
	for i, name := range []string{"web.app1", "web.app2", "mail.app1"} {
		r.wantRuns(fleet.Hosts[i], closures[name], "1")
	}
	address := r.address
	for group, want := range map[string]int{"web": 2, "mail": 1} {
		rec, err := bootstrap.ReadRecord(bootstrap.WorkDir(r.dir+"/work", address+"-"+group))
		if err != nil {
			t.Fatal(err)
		}
		if len(rec.Nodes) != want {
			t.Errorf("group %q recorded %d verdicts, want %d", group, len(rec.Nodes), want)
		}
		for name, n := range rec.Nodes {
			if n.Status != tfhosts.Deployed {
				t.Errorf("%s: %s", name, n.Verdict)
			}
		}
	}
	r.want(0, "all", "plan", "--", "-detailed-exitcode")

	// One group's change leaves the other alone.
	closures["mail.app1"] = r.system("mail.app1", fleettest.ClosureSpec{Version: "2"})
	r.want(2, "all", "plan", "--", "-detailed-exitcode")
	r.want(0, "all", "apply")
	r.wantRuns(fleet.Hosts[2], closures["mail.app1"], "2")
	if n := r.sshCount(fleet.Hosts[0]); n.Connections != 2 {
		t.Errorf("host of the unchanged group: %+v, want those of its deploy alone", n)
	}
	// The address is used by "all" now, and not plain.
	if res := r.want(tfhosts.ExitUsage, "apply"); !strings.Contains(res.stderr, "all") {
		t.Errorf("a plain apply beside the groups:\n%s", res.stderr)
	}
}
