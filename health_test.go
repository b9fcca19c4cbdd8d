package tfhosts

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDeploySettingsAskTheStateServer(t *testing.T) {
	own := HealthCheck{Name: "own", Unit: "a.service"}
	s := &Setup{
		Nodes: map[string]SetupNode{
			"prod.state": {Node: Node{Host: "fd00::7"}, Runner: NodeSettings{Goal: "switch", Health: []HealthCheck{own}}},
			"prod.app":   {Runner: NodeSettings{Health: []HealthCheck{own}}},
		},
		Self: &SelfBackend{Node: "prod.state", Port: 8443, Path: "/state/a%20b?x=1", Scheme: "https"},
	}
	total := 80
	asks := HealthCheck{Name: "state server", When: "after", Retries: &total, Interval: 1, Total: total, HTTP: &HTTPCheck{
		URL: "https://127.0.0.1:8443/state/a%20b?x=1", OrURL: "https://[fd00::7]:8443/state/a%20b?x=1",
		Status: []int{200, 204, 401, 404}, Insecure: true,
	}}
	if diff := cmp.Diff(NodeSettings{Goal: "switch", Health: []HealthCheck{own, asks}}, s.DeploySettings("prod.state")); diff != "" {
		t.Errorf("the backend's node (-want +got):\n%s", diff)
	}
	short := s.Nodes["prod.state"]
	short.Runner.Limits.Guard = 30
	s.Nodes["prod.state"] = short
	if c := s.DeploySettings("prod.state").Health[1]; c.Total != 20 {
		t.Errorf("with a guard of 30 s the check has %d s, want 20", c.Total)
	}
	if diff := cmp.Diff([]HealthCheck{own}, s.DeploySettings("prod.app").Health); diff != "" {
		t.Errorf("another node (-want +got):\n%s", diff)
	}
	if n := len(s.Nodes["prod.state"].Runner.Health); n != 1 {
		t.Errorf("the setup itself has %d checks now, want 1", n)
	}

	replaced := HealthCheck{Name: "state server", TCP: "127.0.0.1:8443"}
	s.Nodes["prod.state"] = SetupNode{Runner: NodeSettings{Health: []HealthCheck{replaced}}}
	if diff := cmp.Diff([]HealthCheck{replaced}, s.DeploySettings("prod.state").Health); diff != "" {
		t.Errorf("a check of that name (-want +got):\n%s", diff)
	}
	s.Self = nil
	if n := len(s.DeploySettings("prod.state").Health); n != 1 {
		t.Errorf("without self_backend there are %d checks, want 1", n)
	}
}
