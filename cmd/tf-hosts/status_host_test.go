package main

import (
	"encoding/json"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// files lists what a look could leave on a host. Nix's database is left out: its
// readers touch it.
func (r *rig) files(h *fleettest.Host) string {
	r.t.Helper()
	out, err := h.Shell(r.t.Context(), `
		find /nix/var /etc /root /boot /var/lib/tf-hosts /run/tf-hosts -path /nix/var/nix/db -prune -o -printf '%p %l %T@\n' 2>/dev/null | sort`)
	if err != nil {
		r.t.Fatal(err)
	}
	return out
}

// ownFiles lists the deployer's working dirs.
func (r *rig) ownFiles() string {
	r.t.Helper()
	out, err := exec.Command("find", r.dir+"/work", r.dir+"/states", "-printf", `%p %l %s %T@\n`).Output()
	if err != nil {
		r.t.Fatal(err)
	}
	return string(out)
}

// observed is the document of status --json.
func (r *rig) observed(code int, args ...string) map[string]tfhosts.Observed {
	r.t.Helper()
	res := r.want(code, append([]string{"status", "--json"}, args...)...)
	var doc struct{ Nodes []tfhosts.Observed }
	if err := json.Unmarshal([]byte(res.stdout), &doc); err != nil {
		r.t.Fatalf("stdout of status --json: %v\n%s", err, res.stdout)
	}
	seen := map[string]tfhosts.Observed{}
	for _, o := range doc.Nodes {
		seen[o.Node] = o
	}
	return seen
}

// profileByHand is what an operator may do behind the graph's back; it gives the
// system that ran before the first deploy.
func profileByHand(t *testing.T, h *fleettest.Host, system string) {
	t.Helper()
	if _, err := h.Exec(t.Context(), "nix-env", "-p", "/nix/var/nix/profiles/system", "--set", system); err != nil {
		t.Fatal(err)
	}
}

// TestStatus: three hosts, of which one is as it was left, one had its profile
// changed by hand, and one is cut off. Nothing is changed, here or there.
func TestStatus(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Name: "good"}, {Name: "byhand"}, {Name: "cut"}}})
	good, byHand, cut := fleet.Host("good"), fleet.Host("byhand"), fleet.Host("cut")
	ctx := t.Context()
	r := newRig(t, fleet)
	r.runner["limits"] = map[string]any{"connect": 3}
	r.more = map[string]any{"http_backend": map[string]any{
		"address": r.address, "username": testUser, "password_file": "password", "retry_max": 0,
	}}
	old, err := byHand.System(ctx)
	if err != nil {
		t.Fatal(err)
	}
	closures := map[string]*fleettest.Closure{}
	for _, h := range fleet.Hosts {
		node := "prod." + h.Name
		r.onHost(node, h)
		closures[node] = r.system(node, fleettest.ClosureSpec{Version: "1"})
	}

	// Before the first apply nothing is known to be wanted, and nothing drifted.
	seen := r.observed(0, "--on", "prod.good")["prod.good"]
	if seen.Wanted != "" || seen.Pending != closures["prod.good"].Out && seen.Pending != closures["prod.good"].Drv || len(seen.Drift) > 0 {
		t.Errorf("before the first apply: %+v", seen)
	}
	r.want(0, "apply")
	began := time.Now()
	for node, c := range closures {
		if err := c.Build(ctx); err != nil { // sets Out
			t.Fatalf("%s: %v", node, err)
		}
	}
	profileByHand(t, byHand, old.Running)
	if err := cut.Cut(ctx); err != nil {
		t.Fatal(err)
	}
	before := map[*fleettest.Host]string{good: r.files(good), byHand: r.files(byHand)}
	own, ssh := r.ownFiles(), r.sshCount(good)

	res := r.want(tfhosts.ExitNodesFailed, "status")
	lines := strings.Split(strings.TrimSpace(res.stdout), "\n")
	if len(lines) != 4 || !strings.HasPrefix(lines[0], "NODE ") {
		t.Fatalf("stdout is no table of three nodes:\n%s", res.stdout)
	}
	for i, want := range []string{"prod.byhand  drifted: profile ", "prod.cut     unreachable ", "prod.good    ok "} {
		if !strings.HasPrefix(lines[i+1], want) {
			t.Errorf("line %d of the table is %q, want %q…", i+1, lines[i+1], want)
		}
	}
	if strings.Contains(res.stdout, "\x1b") || !strings.Contains(res.stderr, "prod.cut") || !strings.Contains(res.stderr, "see whether it answers: ssh ") {
		t.Errorf("stdout:\n%s\nstderr:\n%s", res.stdout, res.stderr)
	}
	if n := r.sshCount(good); n.Connections != ssh.Connections+1 {
		t.Errorf("%d SSH connections for one look, want one", n.Connections-ssh.Connections)
	}

	all := r.observed(tfhosts.ExitNodesFailed)
	out := closures["prod.good"].Out
	want := tfhosts.Observed{
		Node: "prod.good", Wanted: out, Running: out, Profile: out, Default: all["prod.good"].Default,
		Booted: old.Booted, Generation: all["prod.good"].Generation, NeedsReboot: false,
	}
	if diff := cmp.Diff(want, all["prod.good"], cmpopts.IgnoreFields(tfhosts.Observed{}, "Since", "BootedAt")); diff != "" {
		t.Errorf("prod.good (-want +got):\n%s", diff)
	}
	if o := all["prod.good"]; began.Sub(o.Since).Abs() > 5*time.Minute || o.BootedAt.After(o.Since) || began.Sub(o.BootedAt) > time.Hour {
		t.Errorf("prod.good runs since %s, booted at %s; the apply ended at %s", o.Since, o.BootedAt, began)
	}
	if o := all["prod.byhand"]; cmp.Diff([]string{"profile"}, o.Drift) != "" || o.Profile != old.Running || o.Running != closures["prod.byhand"].Out {
		t.Errorf("prod.byhand: %+v", o)
	}
	if o := all["prod.cut"]; o.Status != tfhosts.Unreachable || o.Error == "" || o.Hint == "" || o.Running != "" {
		t.Errorf("prod.cut: %+v", o)
	}
	r.observed(tfhosts.ExitChanges, "--on", "!prod.cut")
	r.observed(0, "--on", "prod.good")
	for h, files := range before {
		if diff := cmp.Diff(files, r.files(h)); diff != "" {
			t.Errorf("host %q changed (-before +after):\n%s", h.Name, diff)
		}
	}
	if diff := cmp.Diff(own, r.ownFiles()); diff != "" {
		t.Errorf("the working dir or the state changed (-before +after):\n%s", diff)
	}

	// Another system in the setup is pending, which is no drift; a failed unit is.
	r.system("prod.good", fleettest.ClosureSpec{Version: "2"})
	if o := r.observed(0, "--on", "prod.good")["prod.good"]; o.Pending == "" || o.Wanted != out {
		t.Errorf("a change of the setup: %+v", o)
	}
	if _, err := good.Shell(ctx, "systemd-run --quiet --unit=bad.service false; while ! systemctl is-failed --quiet bad.service; do sleep 0.1; done"); err != nil {
		t.Fatal(err)
	}
	if o := r.observed(tfhosts.ExitChanges, "--on", "prod.good")["prod.good"]; cmp.Diff([]string{"units"}, o.Drift) != "" || cmp.Diff([]string{"bad.service"}, o.FailedUnits) != "" {
		t.Errorf("a failed unit: %+v", o)
	}
	if _, err := good.Exec(ctx, "systemctl", "reset-failed"); err != nil {
		t.Fatal(err)
	}

	// A tainted node: the state does not say what its host should run.
	r.want(0, "taint", "prod.good")
	if o := r.observed(0, "--on", "prod.good")["prod.good"]; !o.Tainted || o.Wanted != "" || o.Pending == "" {
		t.Errorf("a tainted node: %+v", o)
	}

	// Without the backend the last verdicts stand in.
	r.server.Close()
	res = r.want(tfhosts.ExitChanges, "status", "--on", "prod.byhand,prod.good")
	if !strings.Contains(res.stderr, "taking what this machine deployed last as wanted") || !strings.Contains(res.stdout, "drifted: profile") {
		t.Errorf("without a backend, stdout:\n%s\nstderr:\n%s", res.stdout, res.stderr)
	}
}

// TestDriftAndRedeploy: a change by hand is drift, which no plan sees; an apply
// heals it where it is asked to.
func TestDriftAndRedeploy(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	ctx := t.Context()
	r := newRig(t, fleet)
	h := fleet.Hosts[0]
	old, err := h.System(ctx)
	if err != nil {
		t.Fatal(err)
	}
	r.onHost("prod.app1", h)
	c := r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	r.onHost("prod.app2", fleet.Hosts[1])
	r.system("prod.app2", fleettest.ClosureSpec{Version: "1"})
	r.want(0, "apply")
	if err := c.Build(ctx); err != nil {
		t.Fatal(err)
	}
	r.want(0, "drift")

	profileByHand(t, h, old.Running)
	unlock := r.lockState()
	res := r.want(tfhosts.ExitChanges, "drift") // it takes no lock
	if !strings.Contains(res.stdout, "drifted: profile") || !strings.Contains(res.stdout, "No changes") {
		t.Errorf("stdout of drift:\n%s", res.stdout)
	}
	unlock()
	run := r.record().Run
	res = r.want(0, "apply")
	if n := len(deployedBy(r, run)); n > 0 || strings.Contains(res.stderr, "drifted") {
		t.Errorf("an apply deployed %d nodes for what only the host knows:\n%s", n, res.stderr)
	}

	if res = r.want(0, "apply", "--redeploy", "drifted"); !strings.Contains(res.stderr, "prod.app1 (profile)") {
		t.Errorf("stderr does not name what drifted:\n%s", res.stderr)
	}
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Deployed})
	r.wantRuns(h, c, "1")
	r.environ = append(r.environ, "TF_VERB=drift")
	r.want(0)
	r.environ = r.environ[:len(r.environ)-1]

	if res = r.want(0, "apply", "--redeploy=drifted"); !strings.Contains(res.stderr, "no host drifted") {
		t.Errorf("stderr does not say that no host drifted:\n%s", res.stderr)
	}
	r.want(0, "apply", "--redeploy", "prod.app1,prod.app2")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Unchanged, "prod.app2": tfhosts.Unchanged})

	// A change that is pending is no drift.
	r.system("prod.app2", fleettest.ClosureSpec{Version: "2"})
	if res = r.want(0, "drift"); !strings.Contains(res.stdout, "prod.app2  pending") {
		t.Errorf("stdout of drift with a pending change:\n%s", res.stdout)
	}
}

// deployedBy lists the nodes that the last run deployed; none where it is the
// given run still.
func deployedBy(r *rig, before string) []string {
	var names []string
	rec := r.record()
	if rec.Run == before {
		return nil
	}
	for name, n := range rec.Nodes {
		if n.Run == rec.Run {
			names = append(names, name)
		}
	}
	return names
}

// lockState holds the state's lock, as another machine would.
func (r *rig) lockState() (unlock func()) {
	r.t.Helper()
	do := func(method string) {
		r.t.Helper()
		req, err := http.NewRequestWithContext(r.t.Context(), method, r.address, strings.NewReader(`{"ID":"4711","Who":"someone@elsewhere","Operation":"test"}`))
		if err != nil {
			r.t.Fatal(err)
		}
		req.SetBasicAuth(testUser, testPassword)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			r.t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			r.t.Fatalf("%s: %s", method, res.Status)
		}
	}
	do("LOCK")
	return func() { do("UNLOCK") }
}
