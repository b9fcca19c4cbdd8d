package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestOneBadNode: one node of two can not be deployed. Its verdict and exit
// code say why, nothing changed on its host, it is planned again, and the other
// node is deployed all the same.
func TestOneBadNode(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Name: "good"}, {Name: "bad"}, {Name: "small", StoreMiB: 24}}})
	good, bad, small := fleet.Hosts[0], fleet.Hosts[1], fleet.Hosts[2]
	for i, row := range []struct {
		name   string
		host   *fleettest.Host
		spec   fleettest.ClosureSpec
		spoil  func(*rig)
		mend   func(*rig)
		status tfhosts.Status
		says   string
	}{
		{
			name: "unreachable host", host: bad, status: tfhosts.Unreachable, says: "connection refused",
			spoil: func(r *rig) {
				r.nodes["prod.bad"]["ssh_opts"] = []string{fmt.Sprintf("Port=%d", unusedPort(t))}
			},
			mend: func(r *rig) { delete(r.nodes["prod.bad"], "ssh_opts") },
		},
		{
			name: "wrong host key", host: bad, status: tfhosts.HostKeyChanged, says: "host key",
			spoil: func(r *rig) { r.nodes["prod.bad"]["host_key"] = good.HostKey() },
			mend:  func(r *rig) { r.nodes["prod.bad"]["host_key"] = bad.HostKey() },
		},
		{
			name: "missing key file", host: bad, status: tfhosts.AuthFailed, says: "no-such-key",
			spoil: func(r *rig) { r.nodes["prod.bad"]["key_file"] = "no-such-key" },
			mend:  func(r *rig) { r.nodes["prod.bad"]["key_file"] = fleet.KeyFile() },
		},
		{
			name: "a system that does not build", host: bad, status: tfhosts.BuildFailed, says: "build",
			spec:  fleettest.ClosureSpec{BuildFails: true},
			spoil: func(*rig) {},
			mend:  func(r *rig) { r.system("prod.bad", fleettest.ClosureSpec{Version: "mended"}) },
		},
		{
			name: "disk full on the target", host: small, status: tfhosts.CopyFailed, says: "are free",
			spec:  fleettest.ClosureSpec{PayloadPaths: 4, PayloadBytes: 10 << 20},
			spoil: func(*rig) {},
			mend:  func(r *rig) { r.system("prod.bad", fleettest.ClosureSpec{Version: "mended"}) },
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, fleet)
			r.onHost("prod.good", good)
			r.onHost("prod.bad", row.host)
			version := fmt.Sprint(i + 1)
			fine := r.system("prod.good", fleettest.ClosureSpec{Version: version})
			row.spec.Version = version
			r.system("prod.bad", row.spec)
			row.spoil(r)
			before, err := row.host.System(context.Background())
			if err != nil {
				t.Fatal(err)
			}

			res := r.want(tfhosts.ExitNodesFailed, "apply")
			r.wantVerdicts(map[string]tfhosts.Status{"prod.good": tfhosts.Deployed, "prod.bad": row.status})
			r.wantRuns(good, fine, version)
			sentence := r.record().Nodes["prod.bad"].Sentence
			if !strings.Contains(sentence, row.says) || !strings.Contains(res.stderr, sentence) {
				t.Errorf("verdict %q does not say %q, or stderr does not tell it", sentence, row.says)
			}
			if hint := r.record().Nodes["prod.bad"].Hint; hint == "" {
				t.Error("the verdict has no way out")
			}
			after, err := row.host.System(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if before != after {
				t.Errorf("the host changed: %+v, was %+v", after, before)
			}

			// Tainted: planned again although nothing changed, and alone.
			if res := r.want(2, "plan", "-detailed-exitcode"); !strings.Contains(res.stdout, "tainted") || !strings.Contains(res.stdout, "1 to add") {
				t.Errorf("the failed node is not planned again, or not alone:\n%s", res.stdout)
			}
			row.mend(r)
			r.want(0, "apply")
			r.wantVerdicts(map[string]tfhosts.Status{"prod.bad": tfhosts.Deployed})
			r.want(0, "plan", "-detailed-exitcode")
		})
	}
}

// TestBadSetup: what is wrong with the setup is said at once, with exit 64,
// before anything is written.
func TestBadSetup(t *testing.T) {
	for _, row := range []struct {
		name  string
		setup string
		says  []string
	}{
		{
			"unknown ssh option",
			`{"version":1,"nodes":{"a":{"nixos_conf":"/nix/store/x","host":"h","ssh_opts":["FrobnicateHost=yes"]}}}`,
			[]string{`$.nodes.a.ssh_opts[0]`, "FrobnicateHost"},
		},
		{
			"host beginning with a dash",
			`{"version":1,"nodes":{"a":{"nixos_conf":"/nix/store/x","host":"-oProxyCommand=touch /tmp/owned"}}}`,
			[]string{`$.nodes.a.host`, `"-"`},
		},
		{
			"five errors",
			`{"version":1,"nod":{},"nodes":{"a b":{"nixos_conf":"x","host":"h"},"c":{"nixos_conf":1,"host":"h1"},"d":{"nixos_conf":"x","host":"h2"},"e":{"nixos_conf":"x","host":"h2"}},"self_backend":{"node":"nobody"}}`,
			[]string{`$.nod`, `"a b"`, `$.nodes.c.nixos_conf`, `$.nodes.e.host`, "nobody"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			r := newRig(t, nil)
			cmd, stdout, stderr := r.command("apply")
			if err := os.WriteFile(filepath.Join(r.dir, "tf-hosts.json"), []byte(row.setup), 0o600); err != nil {
				t.Fatal(err)
			}
			err := cmd.Run()
			if code := cmd.ProcessState.ExitCode(); code != tfhosts.ExitUsage {
				t.Fatalf("exit %d (%v), want 64\n%s", code, err, stderr)
			}
			for _, text := range row.says {
				if !strings.Contains(stderr.String(), text) {
					t.Errorf("stderr does not name %s:\n%s", text, stderr)
				}
			}
			if stdout.Len() > 0 {
				t.Errorf("stdout = %q, want silence", stdout)
			}
			if _, err := os.Stat(filepath.Join(r.dir, "work")); err == nil {
				t.Error("a working dir was made")
			}
		})
	}
}
