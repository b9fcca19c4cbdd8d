package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

// newWaveRig has five nodes: app3 is the canary, app1 and app2 follow, app0 and
// app4 are in no wave.
func newWaveRig(tb testing.TB) *rig {
	tb.Helper()
	r := newRig(tb, 5)
	inWaves(r)
	return r
}

func inWaves(r *rig) {
	r.changeNode("prod.app3", func(n *tfhosts.SetupNode) { n.Tags = []string{"canary"} })
	r.setup.Runner.Waves = [][]string{{"@canary"}, {"prod.app[123]"}}
}

func (r *rig) changeAll(to string) {
	for name := range r.setup.Nodes {
		r.changeNode(name, func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/" + to + "-" + name + ".drv" })
	}
}

// failing makes a node's deploys fail.
func (r *rig) failing(node string) (mend func()) {
	deploy := r.deploy
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		v := deploy(req)
		if req.Name == node {
			v.Status = tfhosts.RolledBack
		}
		return v
	}
	return func() { r.deploy = deploy }
}

// waveEvents are the phases of the waves, with their nodes.
func waveEvents(o outcome) []string {
	var all []string
	for _, e := range o.eventsOfTheRun {
		if e.Kind == tfhosts.EventPhase && strings.Contains(e.Op, "wave") {
			all = append(all, e.Op+": "+e.Message)
		}
	}
	return all
}

func plans(o outcome) int {
	n := 0
	for _, e := range o.eventsOfTheRun {
		if e.Kind == tfhosts.EventStep && e.Op == "plan" {
			n++
		}
	}
	return n
}

func (r *rig) record() *Record {
	r.tb.Helper()
	record, err := ReadRecord(WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address))
	if err != nil {
		r.tb.Fatal(err)
	}
	return record
}

// TestWavesGoOneAfterTheOther: with one build before the first, one answer and
// one record at the end.
func TestWavesGoOneAfterTheOther(t *testing.T) {
	r := newWaveRig(t)
	build, builds := r.build, 0
	r.build = func(ids []string) (map[string]Built, error) { builds++; return build(ids) }
	asked := 0
	r.configure = func(c *Config) {
		c.Ask = func(string) (bool, error) { asked++; return true, nil }
	}
	out := r.want(0, "apply")
	want := []string{"wave 1: prod.app3", "wave 2: prod.app1, prod.app2", "last wave: prod.app0, prod.app4"}
	if d := cmp.Diff(want, waveEvents(out)); d != "" {
		t.Errorf("waves (-want +got):\n%s", d)
	}
	if len(out.deployed) != 5 || out.deployed[0] != "prod.app3" ||
		!cmp.Equal(sorted(out.deployed[1:3]), []string{"prod.app1", "prod.app2"}) {
		t.Errorf("deployed in the order %q", out.deployed)
	}
	if builds != 1 || asked != 1 || plans(out) != 4 {
		t.Errorf("%d builds, %d questions, %d plans; want 1, 1 and 4", builds, asked, plans(out))
	}
	if !json.Valid([]byte(out.answer)) || strings.Contains(out.story, "targeting is in effect") {
		t.Errorf("answer:\n%s\nstory:\n%s", out.answer, out.story)
	}
	record := r.record()
	for name, n := range record.Nodes {
		if n.Run != record.Run || n.Status != tfhosts.Deployed {
			t.Errorf("%s: %+v", name, n)
		}
	}
	if len(record.Nodes) != 5 || !strings.Contains(out.story, "prod.app3  deployed") {
		t.Errorf("%d verdicts\n%s", len(record.Nodes), out.story)
	}
	if out := r.want(0, "apply"); plans(out) != 1 || len(waveEvents(out)) != 0 {
		t.Errorf("without changes: %d plans, %q", plans(out), waveEvents(out))
	}
	// Where only nodes of one wave change, the plan of everything is applied.
	for _, name := range []string{"prod.app1", "prod.app2"} {
		r.changeNode(name, func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/new-" + name + ".drv" })
	}
	if out := r.want(0, "apply"); plans(out) != 1 || len(out.deployed) != 2 {
		t.Errorf("one wave: %d plans, deployed %q", plans(out), out.deployed)
	}
}

// TestWaveThatFailsIsTheLast: the others are named and left as they were.
func TestWaveThatFailsIsTheLast(t *testing.T) {
	r := newWaveRig(t)
	r.want(0, "apply")
	r.changeAll("second")
	mend := r.failing("prod.app1")
	out := r.want(6, "apply")
	if d := cmp.Diff([]string{"prod.app1", "prod.app2", "prod.app3"}, sorted(out.deployed)); d != "" {
		t.Errorf("deployed (-want +got):\n%s", d)
	}
	if out.err == nil || out.err.Error() == "" || !strings.Contains(out.err.Error(), "1 of 3 nodes failed; 2 nodes of later waves not begun") {
		t.Errorf("error %v", out.err)
	}
	if !out.says("wave 2 failed; not begun: last wave (prod.app0, prod.app4)") || !json.Valid([]byte(out.answer)) {
		t.Errorf("answer %q, %+v", out.answer, out.eventsOfTheRun)
	}
	record := r.record()
	if d := cmp.Diff([]string{"prod.app0", "prod.app4"}, record.NotBegun); d != "" {
		t.Errorf("not begun (-want +got):\n%s", d)
	}
	if n := record.Nodes["prod.app0"]; n.Run == record.Run || n.Status != tfhosts.Deployed {
		t.Errorf("a node that did not begin: %+v", n)
	}
	mend()
	out = r.want(0, "apply")
	if d := cmp.Diff([]string{"wave 2: prod.app1", "last wave: prod.app0, prod.app4"}, waveEvents(out)); d != "" {
		t.Errorf("waves after the mending (-want +got):\n%s", d)
	}
	if record := r.record(); len(record.NotBegun) != 0 {
		t.Errorf("not begun: %q", record.NotBegun)
	}
}

// TestWavesAreForAppliesAlone: and not with --no-waves.
func TestWavesAreForAppliesAlone(t *testing.T) {
	r := newWaveRig(t)
	r.configure = func(c *Config) { c.NoWaves = true }
	if out := r.want(0, "apply"); len(waveEvents(out)) != 0 || plans(out) != 1 {
		t.Errorf("--no-waves: %q, %d plans", waveEvents(out), plans(out))
	}
	r.configure = nil
	r.changeAll("second")
	r.want(0, "plan", "-out=saved")
	if out := r.want(0, "apply", "saved"); len(waveEvents(out)) != 0 || len(out.deployed) != 5 {
		t.Errorf("saved plan: %q, deployed %q", waveEvents(out), out.deployed)
	}
	if out := r.want(0, "destroy"); len(waveEvents(out)) != 0 {
		t.Errorf("destroy: %q", waveEvents(out))
	}
}

// TestWavesKeepTheUsersFlags: a limit holds for all waves, a -replace is done
// once, and what leaves the graph goes last.
func TestWavesKeepTheUsersFlags(t *testing.T) {
	r := newWaveRig(t)
	r.want(0, "apply")
	out := r.want(0, "apply", "-replace=prod.app3", "-replace=prod.app0", "-replace=prod.app1")
	if d := cmp.Diff([]string{"prod.app3", "prod.app1", "prod.app0"}, out.deployed); d != "" {
		t.Errorf("-replace (-want +got):\n%s", d)
	}
	r.changeAll("second")
	delete(r.setup.Nodes, "prod.app4")
	out = r.want(0, "apply", "-exclude=prod.app0", "-exclude=prod.app2")
	want := []string{"wave 1: prod.app3", "wave 2: prod.app1", "last wave: prod.app4"}
	if d := cmp.Diff(want, waveEvents(out)); d != "" {
		t.Errorf("-exclude (-want +got):\n%s", d)
	}
	if _, ok := r.record().Nodes["prod.app4"]; ok {
		t.Error("a node that left has a verdict")
	}
	r.changeAll("third")
	r.on("prod.app[03]")
	out = r.want(0, "apply")
	if d := cmp.Diff([]string{"prod.app3", "prod.app0"}, out.deployed); d != "" {
		t.Errorf("--on (-want +got):\n%s", d)
	}
	r.configure = nil
	if out := r.want(0, "apply", "-target=prod.app2", "-target=prod.app1"); len(out.deployed) != 2 {
		t.Errorf("-target: deployed %q", out.deployed)
	}
}

// TestInterruptBetweenWaves: nothing new begins, and what did not has a verdict.
func TestInterruptBetweenWaves(t *testing.T) {
	r := newWaveRig(t)
	interrupt := make(chan struct{})
	waves := 0
	r.onEvent = func(e tfhosts.Event) {
		if e.Kind == tfhosts.EventStep && e.Op == "apply" {
			waves++
		}
	}
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	r.fault = func(op string) error {
		if op == "apply.done" && waves == 1 {
			close(interrupt)
		}
		return nil
	}
	out := r.run("apply", interrupt)
	if out.code != tfhosts.ExitInterrupted || !strings.Contains(fmt.Sprint(out.err), "interrupted before the wave 2") {
		t.Errorf("code %d, %v", out.code, out.err)
	}
	if d := cmp.Diff([]string{"prod.app3"}, out.deployed); d != "" {
		t.Errorf("deployed (-want +got):\n%s", d)
	}
	record := r.record()
	if record.Nodes["prod.app3"].Status != tfhosts.Deployed || record.Nodes["prod.app0"].Status != tfhosts.Dropped || len(record.Nodes) != 5 {
		t.Errorf("record: %+v", record.Nodes)
	}
	r.fault, r.onEvent = nil, nil
	if out := r.want(0, "apply"); len(out.deployed) != 4 {
		t.Errorf("the next apply deployed %q", out.deployed)
	}
}

// TestWaveSeesAStateThatMovedOn: what comes up only between the waves is asked
// for again, and a plan that went stale is made again.
func TestWaveSeesAStateThatMovedOn(t *testing.T) {
	r := newWaveRig(t)
	r.want(0, "apply")
	r.changeAll("second")
	taint := func(node string) {
		other := &rig{tb: t, dir: r.dir, find: r.find, setup: r.setup, work: "elsewhere", deploy: r.deploy, build: r.build}
		other.want(0, "taint", node)
	}
	waves, applies := 0, 0
	r.fault = func(op string) error {
		switch op {
		case "apply":
			if applies++; applies == 2 {
				taint("prod.app0")
			}
		case "wave.begin":
			if waves++; waves == 3 {
				taint("prod.app3")
			}
		}
		return nil
	}
	var questions []string
	r.configure = func(c *Config) {
		c.Ask = func(q string) (bool, error) { questions = append(questions, q); return len(questions) == 1, nil }
	}
	out := r.want(1, "apply")
	if !out.says("the state moved on since the plan") {
		t.Error("a stale plan of a wave was not made again")
	}
	if d := cmp.Diff([]string{"apply as planned above?", "prod.app3 also, in the last wave?"}, questions); d != "" {
		t.Errorf("questions (-want +got):\n%s", d)
	}
	if !strings.Contains(fmt.Sprint(out.err), "the last wave was not confirmed; what came before it stays") || len(out.deployed) != 3 {
		t.Errorf("deployed %q, %v", out.deployed, out.err)
	}
}

func TestWavesAreChecked(t *testing.T) {
	r := newWaveRig(t)
	r.setup.Runner.Waves = append(r.setup.Runner.Waves, []string{"@cannary"})
	for _, run := range []func() outcome{
		func() outcome { return r.run("apply", nil) },
		func() outcome { return r.all("apply", AllOptions{}, nil) },
	} {
		out := run()
		var exit *tfhosts.ExitError
		if out.code != tfhosts.ExitUsage || !errors.As(out.err, &exit) || exit.Hint != `did you mean "@canary"?` ||
			!strings.Contains(out.err.Error(), `runner.waves[2]: selecting "@cannary": no tag matches`) {
			t.Errorf("code %d, %v, hint %+v", out.code, out.err, exit)
		}
	}
	r.want(0, "validate")
	// A wave that a submission empties is none.
	inWaves(r)
	r.setup.PublishedNamesExpr = "x"
	out := r.submitted("apply", `{"keep": ["prod.app0", "prod.app2"]}`, nil)
	if d := cmp.Diff([]string{"wave 2: prod.app2", "last wave: prod.app0"}, waveEvents(out)); out.code != 0 || d != "" {
		t.Errorf("code %d, waves (-want +got):\n%s", out.code, d)
	}
}

// TestCycleTwoGoesInWaves: cycle 1 deploys the backend's node as ever.
func TestCycleTwoGoesInWaves(t *testing.T) {
	s := newSelfRig(t, 5)
	inWaves(s.rig)
	mend := s.failing("prod.app3")
	s.bootstrap(6)
	mend()
	out := s.bootstrap(0)
	if slices.Contains(out.deployed, "prod.state") || len(out.deployed) != 5 || out.deployed[0] != "prod.app3" {
		t.Errorf("deployed %q", out.deployed)
	}
}
