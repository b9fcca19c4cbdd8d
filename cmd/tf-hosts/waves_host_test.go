package main

import (
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestWavesStopAtAFailure: the canary's system fails, so no other host is even
// connected to; mended, the canary goes first and the others follow. The same
// hosts show that --on deploys what it selects, and connects to nothing else.
func TestWavesStopAtAFailure(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Name: "one"}, {Name: "two"}, {Name: "three"}}})
	canary, two, three := fleet.Hosts[0], fleet.Hosts[1], fleet.Hosts[2]
	r := newRig(t, fleet)
	systems := map[string]*fleettest.Closure{}
	for i, node := range []string{"prod.canary", "prod.two", "prod.three"} {
		r.onHost(node, fleet.Hosts[i])
		systems[node] = r.system(node, fleettest.ClosureSpec{Version: "1"})
	}
	r.nodes["prod.canary"]["tags"] = []string{"canary"}
	r.runner["waves"] = [][]string{{"@canary"}}
	r.system("prod.canary", fleettest.ClosureSpec{Version: "1", Behaviour: map[string]fleettest.Behaviour{"test": {Exit: 2}}})
	before := []fleettest.SSHCount{r.sshCount(two), r.sshCount(three)}

	res := r.want(tfhosts.ExitNodesFailed, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.canary": tfhosts.RolledBack})
	if !strings.Contains(res.stderr, "wave 1 failed; not begun: last wave (prod.three, prod.two)") {
		t.Errorf("stderr does not name what did not begin:\n%s", res.stderr)
	}
	if after := []fleettest.SSHCount{r.sshCount(two), r.sshCount(three)}; after[0] != before[0] || after[1] != before[1] {
		t.Errorf("connections to hosts of a wave that did not begin: %+v, were %+v", after, before)
	}

	systems["prod.canary"] = r.system("prod.canary", fleettest.ClosureSpec{Version: "1"})
	r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.canary": tfhosts.Deployed, "prod.two": tfhosts.Deployed, "prod.three": tfhosts.Deployed})
	for node, h := range map[string]*fleettest.Host{"prod.canary": canary, "prod.two": two, "prod.three": three} {
		r.wantRuns(h, systems[node], "1")
	}
	nodes := r.record().Nodes
	if nodes["prod.two"].Started.Before(nodes["prod.canary"].Ended) || nodes["prod.three"].Started.Before(nodes["prod.canary"].Ended) {
		t.Error("a host was begun with before the canary had ended")
	}
	r.want(0, "plan", "-detailed-exitcode")

	t.Run("on selects nodes", func(t *testing.T) {
		for node := range systems {
			r.system(node, fleettest.ClosureSpec{Version: "2"})
		}
		before := r.sshCount(two)
		r.want(0, "apply", "--on", "@canary", "--on=prod.th*")
		r.wantVerdicts(map[string]tfhosts.Status{"prod.canary": tfhosts.Deployed, "prod.three": tfhosts.Deployed})
		r.wantRuns(two, systems["prod.two"], "1")
		if after := r.sshCount(two); after != before {
			t.Errorf("connections to a host that was not selected: %+v, were %+v", after, before)
		}
		r.want(tfhosts.ExitOK, "apply", "--on-failed")
		r.want(0, "apply")
		r.want(0, "plan", "-detailed-exitcode")
	})
}
