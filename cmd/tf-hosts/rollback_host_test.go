package main

import (
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestRollbackNode: a node goes back to the system before its last deploy, its
// resource is tainted, and the next apply deploys again. What the host refuses
// before it changes taints nothing.
func TestRollbackNode(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Name: "app"}}})
	h := fleet.Hosts[0]
	r := newRig(t, fleet)
	r.onHost("prod.app", h)
	one := r.system("prod.app", fleettest.ClosureSpec{Version: "1", Marker: "one"})
	r.want(0, "apply")

	// The system that ran before the first deploy is not one of the setup's; it
	// is recorded all the same. Its verdict is refused here by its name.
	missing := "/nix/store/00000000000000000000000000000000-nothing"
	res := r.want(tfhosts.ExitNodesFailed, "rollback", "prod.app", "--to", missing)
	if !strings.Contains(res.stderr, "does not have "+missing+" any more; nothing was changed") {
		t.Errorf("stderr of a system that is not there:\n%s", res.stderr)
	}
	r.wantRuns(h, one, "one")
	r.wantPlan(0)

	two := r.system("prod.app", fleettest.ClosureSpec{Version: "2", Marker: "two"})
	r.want(0, "apply")
	r.wantRuns(h, two, "two")

	// A host that is away refuses, too, and its way back is not forgotten.
	if err := h.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.runner["limits"] = map[string]any{"connect": 3}
	r.want(tfhosts.ExitNodesFailed, "rollback", "prod.app")
	if err := h.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.runner = map[string]any{}
	r.wantPlan(0)

	res = r.want(0, "rollback", "prod.app")
	r.wantRuns(h, one, "one")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app": tfhosts.Deployed})
	if !strings.Contains(res.stderr, "tainted: the next apply deploys the system of the setup again") || res.stdout != "" {
		t.Errorf("stdout %q, stderr:\n%s", res.stdout, res.stderr)
	}
	r.wantPlan(2)
	r.want(0, "plan", "-lock=true", "-lock-timeout=0s") // nobody holds the lock

	// Back to where it is already: nothing to do, and a second one goes forth.
	if res = r.want(0, "rollback", "prod.app", "--to", one.Out); !strings.Contains(res.stderr, "already runs the wanted system") {
		t.Errorf("stderr of a rollback to what runs:\n%s", res.stderr)
	}
	r.want(0, "rollback", "prod.app")
	r.wantRuns(h, two, "two")
	r.want(0, "rollback", "prod.app")
	r.wantRuns(h, one, "one")

	r.want(0, "apply")
	r.wantRuns(h, two, "two")
	r.wantPlan(0)
}

// wantPlan demands the exit code of a plan: 0 no changes, 2 changes.
func (r *rig) wantPlan(code int) {
	r.t.Helper()
	r.want(code, "plan", "-detailed-exitcode")
}
