package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
)

// on limits the runs of a rig.
func (r *rig) on(patterns ...string) { r.configure = func(c *Config) { c.On = patterns } }

func sorted(names []string) []string {
	names = slices.Clone(names)
	slices.Sort(names)
	return names
}

// TestOnLimitsAVerbToNodes: what is not selected is neither deployed nor
// destroyed, and its drift stays.
func TestOnLimitsAVerbToNodes(t *testing.T) {
	r := newRig(t, 4)
	r.changeNode("prod.app1", func(n *tfhosts.SetupNode) { n.Tags = []string{"canary"} })
	r.on("@canary", "prod.app0")
	if d := cmp.Diff([]string{"prod.app0", "prod.app1"}, sorted(r.want(0, "apply").deployed)); d != "" {
		t.Errorf("apply --on (-want +got):\n%s", d)
	}
	r.want(0, "plan", "-detailed-exitcode")
	r.want(0, "refresh")
	r.on("!@canary")
	if out := r.want(2, "plan", "-detailed-exitcode"); strings.Contains(out.answer, "app1") || !strings.Contains(out.answer, "app2") {
		t.Errorf("plan --on:\n%s", out.answer)
	}
	r.on("*")
	if out := r.want(0, "apply"); strings.Contains(out.story, "targeting") || len(out.deployed) != 2 {
		t.Errorf("with all nodes: deployed %q\n%s", out.deployed, out.story)
	}
	r.on("prod.app3")
	r.want(0, "destroy")
	r.configure = nil
	if got := r.want(0, "state-list").answer; strings.Contains(got, "app3") || !strings.Contains(got, "app2") {
		t.Errorf("after destroy --on:\n%s", got)
	}
}

// TestOnTakesANodeThatIsTurnedOff: it leaves the graph, and the other one that
// is turned off stays in the state.
func TestOnTakesANodeThatIsTurnedOff(t *testing.T) {
	r := newRig(t, 3)
	r.want(0, "apply")
	r.setup.PublishedNamesExpr = "x"
	r.configure = func(c *Config) {
		c.On, c.Deployment = []string{"prod.app0", "prod.app2"}, "{}"
		c.Worker.Names = func(context.Context, string, string) ([]string, error) { return []string{"prod.app2"}, nil }
	}
	if out := r.want(0, "apply"); len(out.deployed) != 0 {
		t.Errorf("deployed %q", out.deployed)
	}
	r.configure = nil
	if got := r.want(0, "state-list").answer; strings.Contains(got, "app0") || !strings.Contains(got, "app1") {
		t.Errorf("state:\n%s", got)
	}
}

func TestOnIsRefused(t *testing.T) {
	r := newRig(t, 2)
	tests := []struct {
		name, verb string
		on         []string
		onFailed   bool
		args       []string
		text       string
	}{
		{"no such node", "apply", []string{"prod.app7"}, false, nil, `selecting "prod.app7": no node matches`},
		{"with -target", "apply", []string{"prod.app0"}, false, []string{"-target", "prod.app1"}, "--on together with -target=terraform_data.nixos"},
		{"with -exclude", "plan", []string{"prod.app0"}, false, []string{"-exclude=prod.app1"}, "--on together with -exclude"},
		{"with -target-file", "destroy", []string{"prod.app0"}, false, []string{"-target-file=x"}, "--on together with -target-file"},
		{"a saved plan", "apply", []string{"prod.app0"}, false, []string{"plan.bin"}, "a saved plan is applied as it is"},
		{"a verb on all", "output", []string{"prod.app0"}, false, nil, "--on: output is not limited to nodes"},
		{"failed, with -target", "apply", nil, true, []string{"-target=prod.app1"}, "--on-failed together with -target"},
		{"failed, a saved plan", "apply", nil, true, []string{"plan.bin"}, "--on-failed: a saved plan"},
		{"failed, destroy", "destroy", nil, true, nil, "--on-failed: destroy does not deploy"},
	}
	for _, tt := range tests {
		r.configure = func(c *Config) { c.On, c.OnFailed = tt.on, tt.onFailed }
		out := r.run(tt.verb, nil, tt.args...)
		if out.code != tfhosts.ExitUsage || out.err == nil || !strings.Contains(out.err.Error(), tt.text) {
			t.Errorf("%s: code %d, %v; want 64, %q", tt.name, out.code, out.err, tt.text)
		}
		var exit *tfhosts.ExitError
		if errors.As(out.err, &exit) && exit.Hint == "" {
			t.Errorf("%s: no hint", tt.name)
		}
	}
	r.on("prod.app0")
	if code, err := r.restore(RestoreOptions{}); code != tfhosts.ExitUsage {
		t.Errorf("state-restore: code %d, %v; want 64", code, err)
	}
}

// TestOnFailedRetriesTheFailedNodes: and does nothing where none failed.
func TestOnFailedRetriesTheFailedNodes(t *testing.T) {
	r := newRig(t, 4)
	deploy := r.deploy
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		v := deploy(req)
		if req.Name == "prod.app1" || req.Name == "prod.app2" {
			v.Status = tfhosts.RolledBack
		}
		return v
	}
	r.want(6, "apply")
	r.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/new-app0.drv" })
	r.configure = func(c *Config) { c.OnFailed = true }
	if d := cmp.Diff([]string{"prod.app1", "prod.app2"}, sorted(r.want(6, "apply").deployed)); d != "" {
		t.Errorf("apply --on-failed (-want +got):\n%s", d)
	}
	r.deploy = deploy
	r.configure = func(c *Config) { c.OnFailed, c.On = true, []string{"prod.app2", "prod.app3"} }
	if d := cmp.Diff([]string{"prod.app2"}, r.want(0, "apply").deployed); d != "" {
		t.Errorf("with --on (-want +got):\n%s", d)
	}
	r.configure = func(c *Config) { c.OnFailed = true }
	if out := r.want(2, "plan", "-detailed-exitcode"); strings.Contains(out.answer, "app0") || !strings.Contains(out.answer, "app1") {
		t.Errorf("plan --on-failed:\n%s", out.answer)
	}
	r.want(0, "apply")
	out := r.want(0, "apply")
	if len(out.deployed) != 0 || out.answer != "" || !slices.ContainsFunc(out.eventsOfTheRun, func(e tfhosts.Event) bool {
		return strings.Contains(e.Message, "no node failed")
	}) {
		t.Errorf("none failed: deployed %q, answer %q, %+v", out.deployed, out.answer, out.eventsOfTheRun)
	}
	r.configure = nil
	if d := cmp.Diff([]string{"prod.app0"}, r.want(0, "apply").deployed); d != "" {
		t.Errorf("the changed one was to be left (-want +got):\n%s", d)
	}
}

// TestOnKeepsToCycleTwo: cycle 1 of a bootstrap deploys the backend's node as
// ever, and what --on selects comes in cycle 2.
func TestOnKeepsToCycleTwo(t *testing.T) {
	s := newSelfRig(t, 3)
	s.on("prod.app1")
	out := s.bootstrap(0)
	if d := cmp.Diff([]string{"prod.state", "prod.app1"}, out.deployed); d != "" {
		t.Errorf("deployed (-want +got):\n%s", d)
	}
	s.on("prod.app*")
	if out := s.want(0, "destroy"); slices.Contains(phases(out), "detach") {
		t.Errorf("a destroy of other nodes detached the state")
	}
	if n := len(s.state().Get("resources.#.instances|@flatten").Array()); n != 1 {
		t.Errorf("the state holds %d nodes, want the backend's alone", n)
	}
}

// TestAllOnSelectsWithinGroups: a group without a selected node is left out.
func TestAllOnSelectsWithinGroups(t *testing.T) {
	r := newGroupRig(t) // g0: app0 and app3, g1: app1 and app4
	r.on("prod.app[034]")
	out := r.wantAll(0, "apply")
	if d := cmp.Diff([]string{"prod.app0", "prod.app3", "prod.app4"}, sorted(out.deployed)); d != "" {
		t.Errorf("all apply --on (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"g0", "g1"}, slices.Sorted(maps.Keys(gjson.Parse(out.answer).Map()))); d != "" {
		t.Errorf("groups that answered (-want +got):\n%s", d)
	}
	if out := r.all("apply", AllOptions{Groups: []string{"g2"}}, nil); out.code != 64 || !strings.Contains(fmt.Sprint(out.err), "no node of the group g2") {
		t.Errorf("a group without a match: %d, %v", out.code, out.err)
	}
	r.setup.Self = &tfhosts.SelfBackend{Node: "prod.app2"}
	r.boot = true
	if out := r.all("apply", AllOptions{}, nil); out.code != 64 || !strings.Contains(fmt.Sprint(out.err), `without the group of "prod.app2"`) {
		t.Errorf("BOOTSTRAP=1 without the backend's group: %d, %v", out.code, out.err)
	}
}
