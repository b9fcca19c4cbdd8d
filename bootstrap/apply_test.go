package bootstrap

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestApplyDeploysWhatChangedAndNothingElse(t *testing.T) {
	r := newRig(t, 3)
	r.want(2, "plan", "-detailed-exitcode")
	first := r.want(0, "apply")
	if len(first.deployed) != 3 {
		t.Errorf("first apply deployed %q, want all three", first.deployed)
	}
	again := r.want(0, "apply")
	if len(again.deployed) != 0 {
		t.Errorf("second apply deployed %q, want none", again.deployed)
	}
	if diff := cmp.Diff(first.answer, again.answer); diff != "" {
		t.Errorf("the outputs of an apply without changes differ:\n%s", diff)
	}
	if !strings.HasPrefix(first.answer, "{\n") || !strings.Contains(first.answer, `"prod.app2"`) {
		t.Errorf("answer = %s, want the outputs", first.answer)
	}
	r.want(0, "plan", "-detailed-exitcode")
	r.changeNode("prod.app1", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/other-app.drv" })
	if out := r.want(2, "apply", "-detailed-exitcode"); !cmp.Equal(out.deployed, []string{"prod.app1"}) {
		t.Errorf("after a change of one: deployed %q", out.deployed)
	}
}

func TestAFailedNodeIsTaintedAndTheOthersAreDeployed(t *testing.T) {
	r := newRig(t, 3)
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		status := tfhosts.Deployed
		if req.Name == "prod.app1" {
			status = tfhosts.CopyFailed
		}
		return tfhosts.Verdict{Node: req.Name, Status: status, Sentence: "as the test wants it"}
	}
	out := r.want(tfhosts.ExitNodesFailed, "apply")
	if len(out.deployed) != 3 {
		t.Errorf("deployed %q, want all three tried", out.deployed)
	}
	if out.answer == "" {
		t.Error("no outputs; the other nodes' are known")
	}
	rec, err := ReadRecord(WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address))
	if err != nil {
		t.Fatal(err)
	}
	if got := rec.Nodes["prod.app1"].Status; got != tfhosts.CopyFailed || rec.ExitCode != tfhosts.ExitNodesFailed {
		t.Errorf("verdict.json: %q, exit %d", got, rec.ExitCode)
	}
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	if out := r.want(0, "apply"); !cmp.Equal(out.deployed, []string{"prod.app1"}) {
		t.Errorf("next apply deployed %q, want the failed one", out.deployed)
	}
}

func TestABuildThatFailsFailsItsNodeAlone(t *testing.T) {
	r := newRig(t, 2)
	r.build = func(ids []string) (map[string]Built, error) {
		return map[string]Built{ids[0]: {Err: errors.New("does not build")}, ids[1]: {Out: "/nix/store/x"}}, nil
	}
	seen := map[string]error{}
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		r.mu.Lock()
		defer r.mu.Unlock()
		seen[req.Name] = req.Built.Err
		if req.Built.Err != nil {
			return tfhosts.Verdict{Node: req.Name, Status: tfhosts.BuildFailed}
		}
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	r.want(tfhosts.ExitNodesFailed, "apply")
	if seen["prod.app0"] == nil || seen["prod.app1"] != nil {
		t.Errorf("build errors that reached the deploys: %v", seen)
	}
}

func TestANodeThatDoesNotEvaluateStopsThePlan(t *testing.T) {
	r := newRig(t, 2)
	r.changeNode("prod.app1", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "" })
	out := r.want(tfhosts.ExitFailed, "apply")
	if !strings.Contains(out.err.Error(), `evaluating "prod.app1"`) || len(out.deployed) != 0 {
		t.Errorf("err = %v, deployed %q", out.err, out.deployed)
	}
	r.want(0, "validate") // needs no identity
}

func TestSavedPlan(t *testing.T) {
	r := newRig(t, 2)
	r.want(0, "plan", "-out=reviewed")
	if _, err := os.Stat(filepath.Join(r.dir, "reviewed")); err != nil {
		t.Fatalf("-out is relative to the caller: %v", err)
	}
	if out := r.want(0, "apply", "reviewed"); len(out.deployed) != 2 {
		t.Errorf("apply of the plan deployed %q", out.deployed)
	}
	// The same plan again is stale, is planned again, and changes nothing.
	if out := r.want(0, "apply", "reviewed"); len(out.deployed) != 0 {
		t.Errorf("apply of the stale plan deployed %q", out.deployed)
	}
}

func TestDestroyForgetsTheNodes(t *testing.T) {
	r := newRig(t, 2)
	r.want(0, "apply")
	if out := r.want(0, "destroy"); len(out.deployed) != 0 {
		t.Errorf("destroy deployed %q", out.deployed)
	}
	if out := r.want(0, "state-pull"); !strings.Contains(out.answer, `"resources":[]`) {
		t.Errorf("state after destroy: %s", out.answer)
	}
}

func TestInterruptDuringTheApply(t *testing.T) {
	r := newRig(t, 2)
	interrupt := make(chan struct{})
	started := make(chan struct{}, 2)
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		started <- struct{}{}
		if len(started) == 2 { // both run: now comes the Ctrl-C
			close(interrupt)
		}
		<-req.Drop
		if req.Name == "prod.app0" { // its activation had begun, it is finished
			return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
		}
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Dropped}
	}
	out := r.run("apply", interrupt)
	if out.code != tfhosts.ExitInterrupted {
		t.Fatalf("code %d (%v), want 130", out.code, out.err)
	}
	if len(out.deployed) != 2 {
		t.Errorf("finished deploys: %q, want both", out.deployed)
	}
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Unchanged}
	}
	// The lock is free. What was dropped is tainted; what was finished is, too,
	// unless its provisioner answered before tofu killed it.
	if out := r.want(0, "apply"); !slices.Contains(out.deployed, "prod.app1") {
		t.Errorf("next apply deployed %q, want the dropped one", out.deployed)
	}
}

func TestOneWriterAWorkingDir(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	r.want(0, "taint", "prod.app0")
	release, running := make(chan struct{}), make(chan struct{})
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		close(running)
		<-release
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	done := make(chan outcome)
	go func() { done <- r.run("apply", nil) }()
	<-running
	other := *r.setup
	second := &rig{tb: t, dir: r.dir, setup: &other, find: r.find, deploy: r.deploy, build: r.build}
	out := second.run("apply", nil, "-lock-timeout=0s")
	if out.code != tfhosts.ExitLocked || !strings.Contains(out.err.Error(), "apply of ") {
		t.Errorf("second writer: code %d, %v; want 4 with the holder", out.code, out.err)
	}
	// Reading disturbs nobody.
	if out := second.run("state-list", nil); out.code != 0 {
		t.Errorf("state-list beside an apply: %d, %v", out.code, out.err)
	}
	if out := second.run("plan", nil); out.code != 0 {
		t.Errorf("plan beside an apply: %d, %v", out.code, out.err)
	}
	close(release)
	if out := <-done; out.code != 0 {
		t.Errorf("first writer: code %d, %v", out.code, out.err)
	}
}

func TestBackendFailuresHaveTheirExitCodes(t *testing.T) {
	r := newRig(t, 1)
	r.setup.Backend.Address = "http://127.0.0.1:1/state/test/graph"
	r.want(tfhosts.ExitUnreachable, "apply")
	r.want(tfhosts.ExitUnreachable, "plan")
}

func TestRootsOfWhatIsAppliedOrSupersededAreReleased(t *testing.T) {
	r := newRig(t, 2)
	var released []string
	r.release = func(paths []string) error { released = append(released, paths...); return nil }
	bad := true
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		if req.Name == "prod.app1" && bad {
			return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Unreachable}
		}
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	first := r.setup.Nodes["prod.app1"].ConfigIdentity
	r.want(tfhosts.ExitNodesFailed, "apply")
	if slices.Contains(released, first) || !slices.Contains(released, r.setup.Nodes["prod.app0"].ConfigIdentity+"-out") {
		t.Errorf("after a failed node: released %q", released)
	}
	bad, released = false, nil
	r.changeNode("prod.app1", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/mended.drv" })
	r.want(0, "apply")
	for _, path := range []string{first, first + "-out", "/nix/store/mended.drv", "/nix/store/mended.drv-out"} {
		if !slices.Contains(released, path) {
			t.Errorf("%s is not released: %q", path, released)
		}
	}
}

func TestARunThatEndedInOrderIsMarked(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	runs, err := filepath.Glob(filepath.Join(WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address), "runs", "*"))
	if err != nil || len(runs) != 1 || !wasSearched(runs[0]) {
		t.Fatalf("runs %q, %v; want one, marked", runs, err)
	}
	// One that did not is searched by the next, once.
	if err := os.Remove(filepath.Join(runs[0], searched)); err != nil {
		t.Fatal(err)
	}
	r.want(0, "apply")
	if !wasSearched(runs[0]) {
		t.Error("the run without a mark was not searched")
	}
}
