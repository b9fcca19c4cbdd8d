package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestPlanShowsTheClosureDiff: what a deploy changes is known before it, also
// when the deployer's store has dropped the old system.
func TestPlanShowsTheClosureDiff(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	r := newRig(t, fleet)
	h := fleet.Hosts[0]
	r.onHost("prod.app1", h)
	marker := fmt.Sprint(time.Now().UnixNano()) // no earlier test has built it
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1.0", Marker: marker})

	first := r.want(0, "plan")
	wantInOrder(t, first.stderr, "prod.app1: unknown -> ", "-nixos-system-prod-app1-1.0\n",
		"prod.app1:   no closure diff: it is not built here; plan --build builds it\n")
	if !strings.Contains(first.stdout, "\nPlan: 1 to add") || strings.Contains(first.stdout, "planned_change") {
		t.Errorf("OpenTofu's text is not for a person:\n%s", first.stdout)
	}
	r.want(0, "apply")
	r.wantRuns(h, one, marker)
	deploy := r.sshCount(h)
	lists := filepath.Join(r.workDir(), "packages")
	wantFiles(t, lists, one)
	if res := r.want(0, "plan"); strings.Contains(res.stderr, "prod.app1") {
		t.Errorf("a plan without changes tells:\n%s", res.stderr)
	}

	two := r.system("prod.app1", fleettest.ClosureSpec{Version: "2.0", Marker: marker, PayloadPaths: 3, PayloadBytes: 100 << 10})
	collect := exec.Command("nix-store", "--delete", one.Out)
	collect.Env = append(os.Environ(), fleettest.NixEnv()...)
	if out, err := collect.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	arrow := "-nixos-system-prod-app1-1.0 -> "
	wantInOrder(t, r.want(2, "plan", "-detailed-exitcode").stderr, arrow, "prod.app1:   no closure diff: it is not built here")
	if _, err := os.Stat(two.Out); err == nil {
		t.Fatal("a plan built")
	}

	planned := diffText(r.want(0, "plan", "--build").stderr)
	wantInOrder(t, planned, arrow, "-nixos-system-prod-app1-2.0\n",
		"2 changed, 1 added, 0 removed, 0 rebuilt; +301 KiB to ",
		"  ~ nixos-system-prod-app1: 1.0 → 2.0, +", "  ~ tf-hosts-demo: 1.0 → 2.0, +0 B\n",
		"  + payload-prod-app1: 0, 1, 2, +301 KiB\n")
	if n := r.sshCount(h); n != deploy {
		t.Errorf("connections after plans = %+v, want those of the deploy, %+v", n, deploy)
	}
	wantFiles(t, lists, one)

	asJSON := r.want(0, "plan", "--build", "--json", "-json")
	if got := gjson.Get(asJSON.stdout, `..#(type=="planned_change").change.action`).Str; got != "replace" {
		t.Errorf("stdout of plan -json has action %q:\n%s", got, asJSON.stdout)
	}
	var found []tfhosts.Diff
	for line := range strings.Lines(asJSON.stderr) {
		var e tfhosts.Event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if e.Kind == tfhosts.EventDiff {
			found = append(found, *e.Diff)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d diffs, want one:\n%s", len(found), asJSON.stderr)
	}
	d := found[0]
	if d.Old != one.Out || d.New != two.Out || d.SizeDelta < 300<<10 || d.NewSize-d.OldSize != d.SizeDelta {
		t.Errorf("diff = %+v, want from %s to %s and 300 KiB more", d, one.Out, two.Out)
	}
	demo := tfhosts.PackageChange{Name: "tf-hosts-demo", Old: []string{"1.0"}, New: []string{"2.0"}}
	if len(d.Changed) != 2 || !cmp.Equal(d.Changed[1], demo) {
		t.Errorf("changed = %+v, want %+v as the second", d.Changed, demo)
	}

	if diff := cmp.Diff(planned, diffText(r.want(0, "apply").stderr)); diff != "" {
		t.Errorf("diff of the apply (-plan +apply):\n%s", diff)
	}
	r.wantRuns(h, two, marker)
	wantFiles(t, lists, one, two)
	delete(r.nodes, "prod.app1")
	r.onHost("prod.app2", h)
	r.system("prod.app2", fleettest.ClosureSpec{})
	if res := r.want(0, "plan"); !strings.Contains(res.stderr, "prod.app1: leaves the graph; its host keeps its configuration") {
		t.Errorf("the node that leaves is not named:\n%s", res.stderr)
	}
}

// wantFiles demands the package lists of these systems, and no others.
func wantFiles(t *testing.T, dir string, systems ...*fleettest.Closure) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got, want []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	for _, c := range systems {
		want = append(want, strings.SplitN(filepath.Base(c.Out), "-", 2)[0]+".json")
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("package lists = %q, want %q", got, want)
	}
}

// diffText is what stderr tells of the diff of the one node.
func diffText(stderr string) string {
	var lines []string
	for line := range strings.Lines(stderr) {
		if strings.HasPrefix(line, "tf-hosts: prod.app1: ") && (strings.Contains(line, " -> ") || strings.HasPrefix(line, "tf-hosts: prod.app1:   ")) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

// TestWhatRestarts: the host says before the deploy what the activation would do,
// and is as it was after that.
func TestWhatRestarts(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	r := newRig(t, fleet)
	h := fleet.Hosts[0]
	r.onHost("prod.app1", h)
	r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	r.want(0, "apply")
	before, err := h.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	said := "would restart the following units: tf-hosts-demo.service"
	two := r.system("prod.app1", fleettest.ClosureSpec{Version: "2", Behaviour: map[string]fleettest.Behaviour{
		"dry-activate": {Shell: "echo " + said},
	}})
	wantInOrder(t, r.want(0, "plan", "--what-restarts").stderr, "1 -> ", "prod.app1: "+said)
	if after, err := h.System(t.Context()); err != nil || after != before {
		t.Errorf("the host has %+v, %v, want it as it was: %+v", after, err, before)
	}
	wantInOrder(t, r.want(0, "apply", "--what-restarts").stderr, "prod.app1: "+said, "prod.app1: deployed")
	r.wantRuns(h, two, "2")
	if err := h.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.runner["limits"] = map[string]int{"connect": 2}
	r.system("prod.app1", fleettest.ClosureSpec{Version: "3"})
	if res := r.want(0, "plan", "--what-restarts"); !strings.Contains(res.stderr, "what its activation would do is not known") {
		t.Errorf("stderr of a plan for a host that does not answer:\n%s", res.stderr)
	}
}
