package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestScenario has the scenarios of spec 004, by their names there, on real
// hosts, with a real tofu and the program itself.
func TestScenario(t *testing.T) {
	st := buildStage(t)
	for _, row := range []struct {
		name string
		run  func(*testing.T, stage)
	}{
		{"deployment-tf-hosts", deploymentTFHosts},
		{"deployment-tf-hosts-bootstrap", deploymentTFHostsBootstrap},
		{"integrations-plan-does-not-apply", integrationsPlanDoesNotApply},
		{"integrations-destroy-detaches-state", integrationsDestroyDetachesState},
		{"integrations-reclaim-own-lock", integrationsReclaimOwnLock},
		{"integrations-steady-refuses-lost-state", integrationsSteadyRefusesLostState},
		{"apps-tf", appsTF},
	} {
		t.Run(row.name, func(t *testing.T) { row.run(t, st) })
	}
}

// deploymentTFHosts: a state server on the deployer and two targets, whose
// systems serve TLS with a certificate of their own.
func deploymentTFHosts(t *testing.T, st stage) {
	const port = 8443
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	r := newRig(t, fleet)
	closures := map[string]*fleettest.Closure{}
	certs := map[string]string{}
	for i, h := range fleet.Hosts {
		name := fmt.Sprintf("prod.app%d", i+1)
		withUsers(t, h)
		r.onHost(name, h)
		cert, key := certificate(t, r.dir, h.Addr())
		certs[name] = cert
		closures[name] = r.system(name, fleettest.ClosureSpec{
			Version: "1",
			Files:   map[string]string{"bin/tf-hosts": st.binary, "etc/tls/cert.pem": cert, "etc/tls/key.pem": key},
			Units: map[string]string{"ssl.service": serveUnit("", fmt.Sprintf(
				"--dir %s --listen 0.0.0.0:%d --tls-cert @toplevel@/etc/tls/cert.pem --tls-key @toplevel@/etc/tls/key.pem", statesDir, port))},
		})
	}
	r.want(0, "apply")
	r.wantVerdicts(deployed("prod.app1", "prod.app2"))

	state := r.backendState()
	r.wantNodes(state, "prod.app1", "prod.app2")
	if state.Get("lineage").Str == "" || state.Get("serial").Int() == 0 {
		t.Errorf("state at the backend: lineage %q, serial %d", state.Get("lineage"), state.Get("serial").Int())
	}
	for i, h := range fleet.Hosts {
		name := fmt.Sprintf("prod.app%d", i+1)
		r.wantRuns(h, closures[name], "1")
		pemText, err := os.ReadFile(certs[name])
		if err != nil {
			t.Fatal(err)
		}
		carried, err := h.ReadFile(t.Context(), closures[name].Out+"/etc/tls/cert.pem")
		if err != nil || carried != string(pemText) {
			t.Errorf("the system of %q does not carry its certificate: %v", name, err)
		}
		handshake(t, net.JoinHostPort(h.Addr(), fmt.Sprint(port)), []byte(carried))
	}
	r.want(0, "plan", "--", "-detailed-exitcode")
}

// handshake demands that the server at addr has exactly this certificate.
func handshake(t *testing.T, addr string, cert []byte) {
	t.Helper()
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(cert) {
		t.Fatalf("no certificate in %q", cert)
	}
	var conn *tls.Conn
	eventually(t, 10*time.Second, "TLS at "+addr, func() bool {
		c, err := tls.DialWithDialer(&net.Dialer{Timeout: 5 * time.Second}, "tcp", addr, &tls.Config{RootCAs: roots})
		if err != nil && !strings.Contains(err.Error(), "refused") {
			t.Fatalf("TLS handshake with %s: %v", addr, err)
		}
		conn = c
		return err == nil
	})
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
}

// deploymentTFHostsBootstrap: a backend target and an app target, from a
// deployer without a backend.
func deploymentTFHostsBootstrap(t *testing.T, st stage) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(6)})
	for i, row := range []struct {
		name    string
		prepare func(*selfRig)
		forward bool // the server is reached through SSH alone
	}{
		{"pinned address", func(*selfRig) {}, false},
		{"address derived from self_backend", func(s *selfRig) {
			s.address = fmt.Sprintf("http://localhost:%d%s", unusedPort(t), statePath)
			s.pin(false)
		}, false},
		{"server on the node's loopback", func(s *selfRig) {
			s.listen = fmt.Sprintf("127.0.0.1:%d", statePort)
		}, true},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := newSelfRig(t, st, fleet, fleet.Hosts[2*i:2*i+2])
			row.prepare(s)
			s.version("1")
			s.want(tfhosts.ExitUnreachable, "apply") // without BOOTSTRAP=1

			res := s.with("BOOTSTRAP=1").want(0, "apply")
			wantInOrder(t, res.stderr, "tf-hosts: [cycle 1/2]", "tf-hosts: [wait]", "tf-hosts: [migrate]", "tf-hosts: [cycle 2/2]", "tf-hosts: [verdict]")
			s.wantVerdicts(deployed(stateNode, "prod.app1"))
			if s.has("terraform.tfstate") || !s.has("terraform.tfstate.migrated") {
				t.Error("the local state did not become the marker")
			}
			state, cycleOne := s.served(), s.stateFile("terraform.tfstate.migrated")
			s.wantNodes(cycleOne, stateNode)
			s.wantNodes(state, stateNode, "prod.app1")
			if got, want := state.Get("lineage").Str, cycleOne.Get("lineage").Str; got != want || got == "" {
				t.Errorf("lineage on the backend = %q, that of cycle 1 = %q", got, want)
			}
			s.wantNoGap()

			node, app := s.sshCount(s.state), s.sshCount(s.apps[0])
			if app.Connections != 2 {
				t.Errorf("connections to the app's host = %d, want one and one to confirm", app.Connections)
			}
			s.want(0, "apply")
			s.wantVerdicts(map[string]tfhosts.Status{})
			s.want(0, "plan", "--", "-detailed-exitcode")
			wantNode := node
			if row.forward {
				wantNode.Connections, wantNode.Accepted = node.Connections+2, node.Accepted+2
			}
			if got := s.sshCount(s.state); got != wantNode {
				t.Errorf("SSH to the backend's host after two steady runs: %+v, want %+v", got, wantNode)
			}
			if got := s.sshCount(s.apps[0]); got != app {
				t.Errorf("SSH to the app's host after two steady runs: %+v, want %+v", got, app)
			}
		})
	}
}
