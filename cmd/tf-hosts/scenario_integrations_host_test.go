package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// integrationsPlanDoesNotApply: plan takes the way of an apply to the backend,
// here derived from self_backend and through SSH, and changes nothing.
func integrationsPlanDoesNotApply(t *testing.T, st stage) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.listen = fmt.Sprintf("127.0.0.1:%d", statePort)
	s.address = fmt.Sprintf("http://localhost:%d%s", unusedPort(t), statePath)
	s.pin(false)
	s.version("1")
	s.with("TF_VERB=plan", "BOOTSTRAP=1").want(2)
	s.want(tfhosts.ExitUnreachable, "plan") // it never begins a bootstrap
	if s.has("terraform.tfstate") {
		t.Error("plan made a local state")
	}
	s.with("BOOTSTRAP=1").want(0, "apply")
	one := s.system("prod.app1", fleettest.ClosureSpec{Version: "1"})

	s.system("prod.app1", fleettest.ClosureSpec{Version: "2"})
	serials, ledger, app := s.serials(), s.stateFile("ledger.json").Raw, s.sshCount(s.apps[0])
	res := s.with("TF_VERB=plan").want(0)
	if !strings.Contains(res.stdout, `terraform_data.nixos["prod.app1"] must be replaced`) || strings.Contains(res.stdout, `nixos["prod.state"] must`) {
		t.Errorf("plan does not show the one change:\n%s", res.stdout)
	}
	s.want(2, "plan", "-detailed-exitcode")
	s.wantRuns(s.apps[0], one, "1")
	if got := s.serials(); len(got) != len(serials) {
		t.Errorf("versions on the backend after plan = %v, were %v", got, serials)
	}
	if got := s.stateFile("ledger.json").Raw; got != ledger {
		t.Errorf("plan changed the ledger:\n%s\nwas\n%s", got, ledger)
	}
	if got := s.sshCount(s.apps[0]); got != app {
		t.Errorf("plan connected to the app's host: %+v, was %+v", got, app)
	}
	if text, err := s.state.ReadFile(t.Context(), statesDir+"/test/fleet/lock"); err != nil || strings.Contains(text, `"Who"`) {
		t.Errorf("the lock after plan: %s, %v", text, err)
	}
}

// integrationsDestroyDetachesState: the state leaves the backend that the graph
// itself deploys, the hosts keep their configuration, and a bootstrap beside the
// old backend, which still runs, goes on with the same lineage.
func integrationsDestroyDetachesState(t *testing.T, st stage) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.version("1")
	s.with("BOOTSTRAP=1").want(0, "apply")
	lineage, serials := s.served().Get("lineage").Str, len(s.serials())
	before := s.systems()

	res := s.want(0, "destroy", "-auto-approve")
	if !strings.Contains(res.stderr, "superseded copy") {
		t.Errorf("no warning of the backend that still answers:\n%s", res.stderr)
	}
	if got := s.systems(); got != before {
		t.Errorf("systems after the destroy: %s, were %s", got, before)
	}
	if got := len(s.serials()); got != serials {
		t.Errorf("the destroy wrote to the backend: %d versions, were %d", got, serials)
	}
	s.wantNodes(s.served(), stateNode, "prod.app1")
	s.wantNodes(s.stateFile("terraform.tfstate"))
	if s.has("terraform.tfstate.migrated") || s.stateFile("ledger.json").Get("mode").Str != "detached" {
		t.Error("the state is not detached")
	}
	if text, err := s.state.ReadFile(t.Context(), statesDir+"/test/fleet/lock"); err != nil || strings.Contains(text, `"Who"`) {
		t.Errorf("the lock after the destroy: %s, %v", text, err)
	}
	refused := s.want(tfhosts.ExitLostState, "apply")
	if !strings.Contains(refused.stderr, "BOOTSTRAP=1 tf-hosts apply") {
		t.Errorf("the refusal does not say the way out:\n%s", refused.stderr)
	}
	if list := s.want(0, "state", "list"); list.stdout != "" {
		t.Errorf("state list after the destroy = %q", list.stdout)
	}

	res = s.with("BOOTSTRAP=1").want(0, "apply")
	wantInOrder(t, res.stderr, "[migrate]", "[cycle 2/2]", "[verdict]")
	s.wantVerdicts(map[string]tfhosts.Status{stateNode: tfhosts.Unchanged, "prod.app1": tfhosts.Unchanged})
	s.wantNodes(s.served(), stateNode, "prod.app1")
	if got := s.served().Get("lineage").Str; got != lineage {
		t.Errorf("lineage after the new bootstrap = %q, want %q", got, lineage)
	}
	if !s.has("terraform.tfstate.migrated") {
		t.Error("no marker after the new bootstrap")
	}
	s.want(0, "plan", "--", "-detailed-exitcode")
}

// systems is what all hosts run, as one text.
func (s *selfRig) systems() string {
	s.t.Helper()
	var all []string
	for _, h := range append([]*fleettest.Host{s.state}, s.apps...) {
		sys, err := h.System(s.t.Context())
		if err != nil {
			s.t.Fatal(err)
		}
		all = append(all, fmt.Sprintf("%+v", sys))
	}
	return strings.Join(all, "\n")
}

// integrationsReclaimOwnLock: a SIGKILL of the program and its tofu in the middle
// of a deploy leaves the lock at the backend.
func integrationsReclaimOwnLock(t *testing.T, _ stage) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	r := newRig(t, fleet)
	r.onHost("prod.app1", fleet.Hosts[0])
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1", Behaviour: map[string]fleettest.Behaviour{"activate": {SleepSeconds: 3}}})
	cmd, stderr := r.start("apply")
	eventually(t, time.Minute, "the activation", func() bool { return strings.Contains(stderr.String(), "prod.app1: activate.wait") })
	r.killAll(cmd.Process.Pid)
	wantExit(t, -1, cmd, stderr)

	res := r.want(tfhosts.ExitLocked, "apply", "-lock-timeout=0s")
	if !strings.Contains(res.stderr, client.Who()) || !strings.Contains(res.stderr, "force-unlock") {
		t.Errorf("exit 4 does not name the holder %q and the way out:\n%s", client.Who(), res.stderr)
	}
	res = r.with("TF_RECLAIM_OWN_LOCK=1").want(0, "apply", "-lock-timeout=0s")
	if !strings.Contains(res.stderr, "releasing the lock") {
		t.Errorf("the reclaim is not told:\n%s", res.stderr)
	}
	r.wantRuns(fleet.Hosts[0], one, "1")
	r.wantNodes(r.backendState(), "prod.app1")
	r.want(0, "plan", "-detailed-exitcode")

	// What another machine, another user or a living run holds is refused.
	c := r.client()
	defer c.Close()
	own := thisMachine(t)
	for _, row := range []struct {
		name, who, info, says string
	}{
		{"another machine of the same name", client.Who(), `{"run_id":"x","pid":1,"machine_id":"0123456789abcdef0123456789abcdef"}`, "this machine"},
		{"a machine without an ID", client.Who(), `{"run_id":"x","pid":1}`, "this machine"},
		{"another user", "somebody@elsewhere", "", `held by "somebody@elsewhere"`},
		{"a living run", client.Who(), own, "lives"},
	} {
		info := client.NewLockInfo("apply", row.info)
		info.Who = row.who
		if err := c.Lock(t.Context(), info); err != nil {
			t.Fatal(err)
		}
		res := r.with("TF_RECLAIM_OWN_LOCK=1").want(tfhosts.ExitLocked, "apply", "-lock-timeout=0s")
		if !strings.Contains(res.stderr, row.says) || !strings.Contains(res.stderr, "force-unlock "+info.ID) {
			t.Errorf("%s: %q or the command to use is not told:\n%s", row.name, row.says, res.stderr)
		}
		r.want(0, "force-unlock", info.ID)
	}
	r.want(0, "apply", "-lock-timeout=0s")
}

// killAll ends the program and its tofu at once, as the machine's end would.
func (r *rig) killAll(pid int) {
	r.t.Helper()
	tofus := tofusIn(r.folder())
	if len(tofus) == 0 {
		r.t.Fatal("no tofu runs")
	}
	for _, p := range append([]int{pid}, tofus...) {
		if err := syscall.Kill(p, syscall.SIGKILL); err != nil {
			r.t.Fatal(err)
		}
	}
}

// integrationsSteadyRefusesLostState: the backend has no state any more, while
// this machine knows that it had one.
func integrationsSteadyRefusesLostState(t *testing.T, _ stage) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	r := newRig(t, fleet)
	r.onHost("prod.app1", fleet.Hosts[0])
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	r.want(0, "apply")
	kept := r.backendState()
	key := filepath.Join(r.dir, "states", "test", "fleet")
	ssh := r.sshCount(fleet.Hosts[0])

	// The server says by itself that a state is gone that it once had: 410.
	head, err := os.ReadFile(filepath.Join(key, "head"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(key, "head")); err != nil {
		t.Fatal(err)
	}
	r.want(tfhosts.ExitLostState, "apply")
	if err := os.WriteFile(filepath.Join(key, "head"), head, 0o600); err != nil {
		t.Fatal(err)
	}
	r.want(0, "apply")

	if err := os.RemoveAll(key); err != nil {
		t.Fatal(err)
	}
	res := r.want(tfhosts.ExitLostState, "apply")
	for _, text := range []string{"has no state", "state-restore", "BOOTSTRAP_ALLOW_LOST_STATE=1"} {
		if !strings.Contains(res.stderr, text) {
			t.Errorf("the refusal does not say %q:\n%s", text, res.stderr)
		}
	}
	if warned := r.want(0, "plan"); !strings.Contains(warned.stderr, "has no state") {
		t.Errorf("plan does not warn:\n%s", warned.stderr)
	}
	if r.backendState().Exists() {
		t.Error("a refused apply wrote to the backend")
	}
	r.want(0, "state-restore")
	if got := r.backendState(); got.Raw != kept.Raw {
		t.Errorf("the restored state is not the bytes that were:\n%s\nwant\n%s", got.Raw, kept.Raw)
	}
	r.want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{})
	if got := r.sshCount(fleet.Hosts[0]); got != ssh {
		t.Errorf("SSH while the state was lost and restored: %+v, want %+v", got, ssh)
	}

	if err := os.RemoveAll(key); err != nil {
		t.Fatal(err)
	}
	r.want(tfhosts.ExitLostState, "apply")
	r.with("BOOTSTRAP_ALLOW_LOST_STATE=1").want(0, "apply")
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Unchanged})
	r.wantRuns(fleet.Hosts[0], one, "1")
	if archived, err := filepath.Glob(filepath.Join(r.folder(), "salvage", "lost-*", "ledger.json")); err != nil || len(archived) != 1 {
		t.Errorf("what was known of the lost state is not archived: %q, %v", archived, err)
	}
	r.want(0, "apply")
}

// thisMachine is the Info of a lock whose run is this very process.
func thisMachine(t *testing.T) string {
	t.Helper()
	info := map[string]any{"run_id": "x", "pid": os.Getpid()}
	for name, path := range map[string]string{"machine_id": "/etc/machine-id", "boot_id": "/proc/sys/kernel/random/boot_id"} {
		b, err := os.ReadFile(path)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		info[name] = strings.TrimSpace(string(b))
	}
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	info["start_time"] = json.Number(fields[22-3])
	b, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
