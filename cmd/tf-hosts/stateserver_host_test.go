package main

import (
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestBackendNodeWithoutItsServer: a system that no longer serves the state does
// not stay on the node that is to serve it, and what became of the node is in the
// state all the same.
func TestBackendNodeWithoutItsServer(t *testing.T) {
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.stateVersion("1")
	s.with("BOOTSTRAP=1").want(0, "apply")
	s.wantVerdicts(deployed(stateNode))
	before, err := s.state.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	s.runner["limits"] = map[string]any{"guard": 25}
	s.system(stateNode, fleettest.ClosureSpec{Version: "2"})
	res := s.want(tfhosts.ExitNodesFailed, "apply")
	s.wantVerdicts(map[string]tfhosts.Status{stateNode: tfhosts.RolledBack})
	if after, err := s.state.System(t.Context()); err != nil || after != before {
		t.Errorf("the node has %+v (%v), want %+v as before", after, err, before)
	}
	if !strings.Contains(res.stderr, `health check "state server" failed`) {
		t.Errorf("the story lacks the check:\n%s", res.stderr)
	}
	s.wantNodes(s.served(), stateNode+" (tainted)")
	if n := s.record().Nodes[stateNode]; len(n.Health) != 1 || n.Health[0].OK || n.Hint == "" {
		t.Errorf("verdict.json has %+v, want the check that failed and a hint", n)
	}

	s.stateVersion("3")
	s.want(0, "apply")
	s.wantVerdicts(deployed(stateNode))
	s.wantNodes(s.served(), stateNode)
	s.want(0, "plan", "--", "-detailed-exitcode")
}
