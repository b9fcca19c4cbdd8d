package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// awaySeconds is how long the state server stays away when its node is
// redeployed in the middle of an apply.
const awaySeconds = 60

// TestBackendNodeIsRedeployedMidApply: the graph redeploys the node that serves
// its own state, with ten nodes more, and the server is away for a minute.
func TestBackendNodeIsRedeployedMidApply(t *testing.T) {
	t.Parallel()
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(11)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.version("1")
	s.with("BOOTSTRAP=1").want(0, "apply")
	lineage, first := s.served().Get("lineage").Str, s.serials()

	s.before = awaySeconds
	s.version("2")
	for i := range 3 { // tofu stores the state while the server is away, too
		s.system(fmt.Sprintf("prod.app%d", i+1), fleettest.ClosureSpec{
			Version: "2", Behaviour: map[string]fleettest.Behaviour{"activate": {SleepSeconds: 25}},
		})
	}
	res := s.want(0, "apply")
	names := []string{stateNode}
	for i := range s.apps {
		names = append(names, fmt.Sprintf("prod.app%d", i+1))
	}
	s.wantVerdicts(deployed(names...))
	wantInOrder(t, res.stderr, "the state backend does not answer", "the state backend is back after")
	s.wantNodes(s.served(), names...)
	s.wantNoGap()
	if got := s.served().Get("lineage").Str; got != lineage || len(s.serials()) <= len(first) {
		t.Errorf("state after the apply: lineage %q, serials %v, want lineage %q, serials beyond %v", got, s.serials(), lineage, first)
	}
	s.want(0, "plan", "--", "-detailed-exitcode")
	if salvaged := s.want(0, "apply"); strings.Contains(salvaged.stderr, "could not store") {
		t.Errorf("a state waited to be stored:\n%s", salvaged.stderr)
	}
}

// TestKilledWhileTofuLivesOn: SIGKILL of the program alone. The next run serves
// the living tofu until it ends, then goes on.
func TestKilledWhileTofuLivesOn(t *testing.T) {
	t.Parallel()
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	r := newRig(t, fleet)
	r.onHost("prod.app1", fleet.Hosts[0])
	r.onHost("prod.app2", fleet.Hosts[1])
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	two := r.system("prod.app2", fleettest.ClosureSpec{Version: "1", Behaviour: slowSwitch()})
	cmd, stderr := r.start("apply")
	eventually(t, time.Minute, "the activation", func() bool {
		return strings.Contains(stderr.String(), "prod.app2: activate.wait") && strings.Contains(stderr.String(), "prod.app1: deployed")
	})
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wantExit(t, -1, cmd, stderr)
	if len(tofusIn(r.folder())) == 0 {
		t.Fatal("tofu ended with the program")
	}

	res := r.want(0, "apply", "-lock-timeout=0s")
	wantInOrder(t, res.stderr, "lives on (pid", "planning", "[verdict]")
	if left := tofusIn(r.folder()); len(left) > 0 {
		t.Errorf("tofu still runs: %d", left)
	}
	r.wantRuns(fleet.Hosts[0], one, "1")
	r.wantRuns(fleet.Hosts[1], two, "1")
	r.wantNodes(r.backendState(), "prod.app1", "prod.app2")
	if n := r.activations(fleet.Hosts[1]); n != 1 {
		t.Errorf("activations of the host that was in the middle = %d, want 1", n)
	}
	if _, ok := r.record().Nodes["prod.app1"]; ok && r.record().Nodes["prod.app1"].Run == r.record().Run {
		t.Error("the node that was done before the kill was deployed again")
	}
	r.want(0, "plan", "-detailed-exitcode", "-lock-timeout=0s")
}

// slowSwitch is a switch of four seconds that leaves a line for activations.
func slowSwitch() map[string]fleettest.Behaviour {
	return map[string]fleettest.Behaviour{"activate": {SleepSeconds: 4, Shell: "echo switched >>/var/lib/switches"}}
}

// activations counts the switches of a host, to systems with slowSwitch.
func (r *rig) activations(h *fleettest.Host) int {
	r.t.Helper()
	text, err := h.Shell(r.t.Context(), "cat /var/lib/switches 2>/dev/null || true")
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.Count(text, "switched")
}

// TestSecondMachine: an empty working dir goes on after the bootstrap of another
// machine, and after its crash in cycle 2.
func TestSecondMachine(t *testing.T) {
	t.Parallel()
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.version("1")
	slow := s.system("prod.app1", fleettest.ClosureSpec{Version: "1", Behaviour: slowSwitch()})

	// The first machine dies in cycle 2.
	first := s.with("BOOTSTRAP=1")
	cmd, stderr := first.start("apply")
	eventually(t, time.Minute, "cycle 2 to activate", func() bool { return strings.Contains(stderr.String(), "prod.app1: activate.wait") })
	first.killAll(cmd.Process.Pid)
	wantExit(t, -1, cmd, stderr)
	wantInOrder(t, stderr.String(), "[cycle 2/2]")
	lineage := s.served().Get("lineage").Str

	second := s.elsewhere("second").with("BOOTSTRAP=1")
	res := second.want(tfhosts.ExitLocked, "apply", "-lock-timeout=0s")
	_, id, ok := strings.Cut(res.stderr, "tf-hosts force-unlock ")
	if !ok || !strings.Contains(res.stderr, client.Who()) {
		t.Fatalf("exit 4 does not say who holds the lock and what to do:\n%s", res.stderr)
	}
	s.elsewhere("second").want(0, "force-unlock", strings.Fields(id)[0])
	// What the first machine had begun waits on the host to be confirmed.
	res = second.want(0, "apply")
	if strings.Contains(res.stderr, "[cycle 1/2]") {
		t.Errorf("the second machine began anew:\n%s", res.stderr)
	}
	s.wantNodes(s.served(), stateNode, "prod.app1")
	s.wantRuns(s.apps[0], slow, "1")
	if got := s.served().Get("lineage").Str; got != lineage {
		t.Errorf("lineage = %q, want %q", got, lineage)
	}
	if n := s.activations(s.apps[0]); n != 1 {
		t.Errorf("activations of the app's host = %d, want 1", n)
	}

	// A third one, after the bootstrap, with and without BOOTSTRAP=1; and the
	// first one again.
	count := s.sshCount(s.apps[0])
	for _, r := range []*rig{s.elsewhere("third").with("BOOTSTRAP=1"), s.elsewhere("fourth"), s.rig, first} {
		r.want(0, "apply")
	}
	if got := s.sshCount(s.apps[0]); got != count {
		t.Errorf("SSH to the app's host: %+v, want %+v", got, count)
	}
	s.wantNoGap()
	if got := s.served().Get("lineage").Str; got != lineage {
		t.Errorf("lineage = %q, want %q", got, lineage)
	}
}

// TestTwoDeployers: two machines start an apply of the same state at once. There
// are never two writers, and readers disturb nobody.
func TestTwoDeployers(t *testing.T) {
	t.Parallel()
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	whole := newRig(t, fleet)
	apply := func(r *rig, version string) {
		r.onHost("prod.app1", fleet.Hosts[0])
		r.onHost("prod.app2", fleet.Hosts[1])
		r.system("prod.app1", fleettest.ClosureSpec{Version: version, Behaviour: slowSwitch()})
		r.system("prod.app2", fleettest.ClosureSpec{Version: version, Behaviour: slowSwitch()})
	}
	for _, row := range []struct {
		name  string
		flags []string
		codes []int // of the one that comes second
		list  int   // exit code of state-list: tofu's own before the first state
	}{
		{"both wait", []string{"apply"}, []int{0}, 1},
		{"none waits", []string{"apply", "-lock-timeout=0s"}, []int{tfhosts.ExitLocked}, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			own := *whole
			r := &own
			r.t = t
			apply(r, strings.ReplaceAll(row.name, " ", "-"))
			a, b := r.elsewhere("a"), r.elsewhere("b")
			before := r.activations(fleet.Hosts[0])
			results := make([]result, 2)
			var wg sync.WaitGroup
			for i, m := range []*rig{a, b} {
				wg.Add(1)
				cmd, stdout, _ := m.command(row.flags...)
				stderr := &watched{}
				cmd.Stderr = stderr
				go func() {
					defer wg.Done()
					cmd.Run() //nolint:errcheck // the exit code says it
					results[i] = result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
				}()
			}
			// Readers beside them, which are done before the activations are.
			eventually(t, time.Minute, "the activation", func() bool { return len(tofusIn(r.dir)) > 0 && r.activates(fleet.Hosts[0]) })
			reader := r.elsewhere("reader")
			reader.want(row.list, "state", "list")
			reader.want(0, "plan", "-lock-timeout=0s")
			if !r.activates(fleet.Hosts[0]) {
				t.Error("the readers waited for the writers")
			}
			wg.Wait()
			codes := []int{results[0].code, results[1].code}
			slices.Sort(codes)
			if codes[0] != 0 || !slices.Contains(row.codes, codes[1]) {
				t.Fatalf("exit codes %v\n%s\n%s", codes, results[0].stderr, results[1].stderr)
			}
			for _, res := range results {
				if res.code == tfhosts.ExitLocked && !strings.Contains(res.stderr, client.Who()) {
					t.Errorf("exit 4 does not name the holder:\n%s", res.stderr)
				}
			}
			if n := r.activations(fleet.Hosts[0]) - before; n != 1 {
				t.Errorf("activations of a host = %d, want 1\n%s\n%s", n, results[0].stderr, results[1].stderr)
			}
			r.wantNodes(r.backendState(), "prod.app1", "prod.app2")
			a.want(0, "plan", "-detailed-exitcode")
			b.want(0, "plan", "-detailed-exitcode")
		})
	}
}

// activates says whether a switch runs on a host.
func (r *rig) activates(h *fleettest.Host) bool {
	r.t.Helper()
	out, err := h.Shell(r.t.Context(), `grep -alz switch-to-configuration /proc/[0-9]*/cmdline 2>/dev/null | grep -v "/$$/" || true`)
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.TrimSpace(out) != ""
}

// TestKilledInCycleOne: SIGKILL of the program while it brings its backend up on
// local state; tofu lives on without anybody to store the state at.
func TestKilledInCycleOne(t *testing.T) {
	t.Parallel()
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.switching = slowSwitch()
	s.version("1")
	boot := s.with("BOOTSTRAP=1")
	cmd, stderr := boot.start("apply")
	eventually(t, time.Minute, "cycle 1 to activate", func() bool { return strings.Contains(stderr.String(), stateNode+": activate.wait") })
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	wantExit(t, -1, cmd, stderr)

	res := boot.want(0, "apply")
	wantInOrder(t, res.stderr, "lives on (pid", "[cycle 1/2]", "[migrate]", "[cycle 2/2]", "[verdict]")
	s.wantNodes(s.served(), stateNode, "prod.app1")
	if got, want := s.served().Get("lineage").Str, s.stateFile("terraform.tfstate.migrated").Get("lineage").Str; got != want {
		t.Errorf("lineage on the backend = %q, that of cycle 1 = %q", got, want)
	}
	if n := s.activations(s.state); n != 1 {
		t.Errorf("activations of the backend's host = %d, want 1", n)
	}
	s.want(0, "plan", "--", "-detailed-exitcode")
}

// TestBackendMachineIsLostForGood: the node gets another machine, and the state
// comes back from what the deployer last saw.
func TestBackendMachineIsLostForGood(t *testing.T) {
	t.Parallel()
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(3)})
	s := newSelfRig(t, st, fleet, fleet.Hosts[:2])
	s.nodes[stateNode]["ssh_opts"] = []string{"ConnectTimeout=2"}
	s.address = fmt.Sprintf("http://localhost:%d%s", unusedPort(t), statePath)
	s.pin(false)
	s.version("1")
	s.with("BOOTSTRAP=1").want(0, "apply")
	lineage, serial := s.served().Get("lineage").Str, s.served().Get("serial").Int()
	app := s.sshCount(s.apps[0])

	if err := s.state.Crash(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.with("BOOTSTRAP=1").want(tfhosts.ExitUnreachable, "apply")
	s.state = fleet.Hosts[2]
	withUsers(t, s.state)
	s.onHost(stateNode, s.state)
	s.want(0, "state-restore", "--local")
	res := s.with("BOOTSTRAP=1").want(0, "apply")
	wantInOrder(t, res.stderr, "[cycle 1/2]", "[migrate]", "[cycle 2/2]", "[verdict]")
	s.wantVerdicts(deployed(stateNode))
	if got := s.served(); got.Get("lineage").Str != lineage || got.Get("serial").Int() <= serial {
		t.Errorf("state on the new machine: lineage %q, serial %d, want lineage %q, a serial over %d",
			got.Get("lineage").Str, got.Get("serial").Int(), lineage, serial)
	}
	s.wantNodes(s.served(), stateNode, "prod.app1")
	if got := s.sshCount(s.apps[0]); got != app {
		t.Errorf("SSH to the app's host: %+v, want %+v", got, app)
	}
	s.want(0, "plan", "--", "-detailed-exitcode")
}
