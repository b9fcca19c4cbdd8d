package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
)

// all runs a verb on all groups.
func (r *rig) all(verb string, opts AllOptions, interrupt chan struct{}, args ...string) outcome {
	r.tb.Helper()
	v, ok := tfhosts.LookupVerb(verb)
	if opts.Restore != nil {
		v, ok = VerbRestore(), true
	}
	if !ok {
		r.tb.Fatalf("no verb %q", verb)
	}
	self, err := os.Executable()
	if err != nil {
		r.tb.Fatal(err)
	}
	r.mu.Lock()
	r.deployed, r.events = nil, nil
	r.mu.Unlock()
	var answer, story bytes.Buffer
	code, err := RunAll(context.Background(), r.config(self, v, interrupt, &answer, &story, args), opts)
	r.mu.Lock()
	defer r.mu.Unlock()
	return outcome{code, err, answer.String(), story.String(), append([]string{}, r.deployed...), r.events}
}

func (r *rig) wantAll(code int, verb string, args ...string) outcome {
	r.tb.Helper()
	out := r.all(verb, AllOptions{}, nil, args...)
	if out.code != code {
		r.tb.Fatalf("all %s %q: code %d (%v), want %d\n%s\n%s", verb, args, out.code, out.err, code, out.answer, out.story)
	}
	return out
}

func (r *rig) wantGroup(code int, group, verb string, args ...string) outcome {
	r.tb.Helper()
	out := r.all(verb, AllOptions{Groups: []string{group}}, nil, args...)
	if out.code != code {
		r.tb.Fatalf("all --group %s %s %q: code %d (%v), want %d\n%s\n%s", group, verb, args, out.code, out.err, code, out.answer, out.story)
	}
	return out
}

// newGroupRig has three groups of two nodes: g0 with app0 and app3, and so on.
func newGroupRig(tb testing.TB) *rig {
	tb.Helper()
	r := newRig(tb, 6)
	for i := range 6 {
		r.changeNode(fmt.Sprintf("prod.app%d", i), func(n *tfhosts.SetupNode) { n.Group = fmt.Sprintf("g%d", i%3) })
	}
	return r
}

func TestAllSharesOneLimit(t *testing.T) {
	r := newGroupRig(t)
	r.setup.Runner.Parallelism = 3
	var running, most atomic.Int32
	deploy := r.deploy
	enough := make(chan struct{})
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		now := running.Add(1)
		defer running.Add(-1)
		for {
			m := most.Load()
			if now <= m || most.CompareAndSwap(m, now) {
				break
			}
		}
		if now == 3 && most.Load() == 3 {
			select {
			case <-enough:
			default:
				// The other three have time to come, if they could.
				<-time.After(500 * time.Millisecond)
				close(enough)
			}
		}
		select {
		case <-enough:
		case <-time.After(20 * time.Second):
			t.Error("three deploys never ran at once")
		}
		return deploy(req)
	}
	out := r.wantAll(0, "apply")
	if len(out.deployed) != 6 || most.Load() != 3 {
		t.Errorf("deployed %q, at most %d at once, want six and 3", out.deployed, most.Load())
	}
	// The flag is the same limit.
	most.Store(0)
	enough = make(chan struct{})
	close(enough)
	for name := range r.setup.Nodes {
		r.changeNode(name, func(n *tfhosts.SetupNode) { n.ConfigIdentity += "-2.drv" })
	}
	if r.wantAll(0, "apply", "-parallelism=1"); most.Load() != 1 {
		t.Errorf("with -parallelism=1 %d deploys ran at once", most.Load())
	}
}

func TestAllAnswers(t *testing.T) {
	r := newGroupRig(t)
	out := r.wantAll(0, "apply")
	var doc map[string]struct {
		Nodes struct{ Value map[string]any }
	}
	if err := json.Unmarshal([]byte(out.answer), &doc); err != nil {
		t.Fatalf("the answer of apply is no one JSON document: %v\n%s", err, out.answer)
	}
	got := map[string][]string{}
	for group, d := range doc {
		got[group] = tfhosts.SortedNames(d.Nodes.Value)
	}
	want := map[string][]string{"g0": {"prod.app0", "prod.app3"}, "g1": {"prod.app1", "prod.app4"}, "g2": {"prod.app2", "prod.app5"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodes in the answer of apply (-want +got):\n%s", diff)
	}
	if strings.Count(out.story, "NODE") != 1 || !strings.Contains(out.story, "g1     prod.app4  deployed") {
		t.Errorf("want one table of all groups:\n%s", out.story)
	}
	for line := range strings.Lines(out.story[:strings.Index(out.story, "GROUP")]) {
		if !slices.ContainsFunc([]string{"g0", "g1", "g2"}, func(g string) bool { return strings.HasPrefix(line, "["+g+"] ") }) {
			t.Errorf("line %q does not say its group", line)
		}
	}
	for _, e := range out.eventsOfTheRun {
		if e.Node != "" && e.Group != r.setup.Nodes[e.Node].Group {
			t.Errorf("event %+v, want the group of its node", e)
		}
	}

	list := r.wantAll(0, "state-list").answer
	if !strings.HasPrefix(list, "[g0] terraform_data.nixos[\"prod.app0\"]\n[g0] ") || strings.Count(list, "\n") != 6 {
		t.Errorf("state-list:\n%s", list)
	}
	if got := gjson.Get(r.wantAll(0, "output", "-json").answer, "g2.nodes.value.@keys").Raw; got != `["prod.app2","prod.app5"]` {
		t.Errorf("output -json: nodes of g2 = %s", got)
	}
	states := r.wantAll(0, "state-pull").answer
	if a, b := gjson.Get(states, "g0.lineage").Str, gjson.Get(states, "g1.lineage").Str; a == "" || a == b {
		t.Errorf("lineages of g0 and g1 = %q, %q, want two", a, b)
	}
	for line := range strings.Lines(r.wantAll(0, "plan", "-json").answer) {
		if !strings.HasPrefix(gjson.Get(line, "group").Str, "g") || !gjson.Valid(line) {
			t.Errorf("plan -json: line %q", line)
		}
	}
	// One group's answer is the plain verb's.
	if got := gjson.Get(r.wantGroup(0, "g1", "state-pull").answer, "lineage").Str; got != gjson.Get(states, "g1.lineage").Str {
		t.Errorf("lineage of --group g1 = %q", got)
	}
}

func TestAllExitCodes(t *testing.T) {
	r := newGroupRig(t)
	r.wantAll(2, "plan", "-detailed-exitcode")
	r.wantAll(0, "apply")
	r.wantAll(0, "plan", "-detailed-exitcode")
	r.changeNode("prod.app4", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/other.drv" })
	r.wantAll(2, "plan", "-detailed-exitcode")

	deploy := r.deploy
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Unreachable, Sentence: "no answer"}
	}
	out := r.wantAll(tfhosts.ExitNodesFailed, "apply")
	if !cmp.Equal(out.deployed, []string{"prod.app4"}) || out.err == nil || !strings.Contains(out.err.Error(), `group "g1": 1 of 1 nodes failed`) {
		t.Errorf("deployed %q, %v", out.deployed, out.err)
	}
	if !out.says("exit 6: 1 unreachable") || !out.says("exit 0: no node deployed") {
		t.Error("the groups' ends are not told")
	}
	if got := gjson.Get(out.answer, "@keys").Raw; got != `["g0","g1","g2"]` {
		t.Errorf("groups in the answer = %s", got)
	}
	r.deploy = deploy

	// A node's name sends a verb to its group alone.
	r.wantAll(0, "untaint", "prod.app4")
	r.wantAll(0, "taint", "prod.app5")
	if out := r.wantAll(0, "apply"); !cmp.Equal(out.deployed, []string{"prod.app5"}) {
		t.Errorf("after taint prod.app5: deployed %q", out.deployed)
	}
	r.wantAll(0, "state-rm", "prod.app0", tfhosts.NodeAddress("prod.app1"))
	if out := r.wantAll(0, "apply"); len(out.deployed) != 2 {
		t.Errorf("after state-rm of two groups' nodes: deployed %q", out.deployed)
	}
	// A node that has got a new name keeps its resource.
	n := r.setup.Nodes["prod.app2"]
	delete(r.setup.Nodes, "prod.app2")
	r.setup.Nodes["prod.new"] = n
	r.wantAll(0, "state-mv", "prod.app2", "prod.new")
	if out := r.wantAll(0, "apply"); len(out.deployed) != 0 {
		t.Errorf("after the state-mv: deployed %q", out.deployed)
	}
}

func TestAllRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*rig)
		groups []string
		verb   string
		args   []string
		want   string
	}{
		"nodes without a group": {
			change: func(r *rig) {
				r.changeNode("prod.app1", func(n *tfhosts.SetupNode) { n.Group = "" })
				r.changeNode("prod.app4", func(n *tfhosts.SetupNode) { n.Group = "" })
			}, want: "nodes without a group: prod.app1, prod.app4",
		},
		"no nodes":                         {change: func(r *rig) { clear(r.setup.Nodes) }, want: "no nodes"},
		"unknown group":                    {groups: []string{"g0", "g7"}, want: `there is no group "g7"`},
		"address without a path":           {change: func(r *rig) { r.setup.Backend.Address = "http://h" }, want: `group "g0": http_backend.address: it has no path`},
		"bootstrap without its node":       {change: func(r *rig) { r.boot = true }, want: "in which group the backend is"},
		"plan file":                        {args: []string{"plan.bin"}, want: `a saved plan ("plan.bin") is one group's`},
		"plan to a file":                   {verb: "plan", args: []string{"-out", "p"}, want: "-out: one file"},
		"lock of one state":                {verb: "force-unlock", args: []string{"id"}, want: "force-unlock concerns one group"},
		"node that is in no setup":         {verb: "taint", args: []string{"prod.gone"}, want: `"prod.gone": no node of the setup`},
		"node of a group not named":        {verb: "state-rm", groups: []string{"g0", "g1"}, args: []string{"prod.app2"}, want: `in the group "g2", which was not named`},
		"rename across groups":             {verb: "state-mv", args: []string{"prod.app0", "prod.app1"}, want: "state-mv between two groups"},
		"no parallelism":                   {args: []string{"-parallelism=0"}, want: "-parallelism=0"},
		"flags that are refused once":      {args: []string{"-chdir=x"}, want: "-chdir"},
		"bootstrap of another group alone": {change: func(r *rig) { r.boot = true; r.setup.Self = &tfhosts.SelfBackend{Node: "prod.app0"} }, groups: []string{"g1"}, want: `without the group of "prod.app0"`},
	} {
		r := newGroupRig(t)
		if tt.change != nil {
			tt.change(r)
		}
		if tt.verb == "" {
			tt.verb = "apply"
		}
		out := r.all(tt.verb, AllOptions{Groups: tt.groups}, nil, tt.args...)
		if out.code != tfhosts.ExitUsage || out.err == nil || strings.Count(out.err.Error(), tt.want) != 1 || len(out.deployed) != 0 {
			t.Errorf("%s: all %s %q: code %d, %v, want 64 and %q", name, tt.verb, tt.args, out.code, out.err, tt.want)
		}
		if dirs := entries(t, filepath.Join(r.dir, "work")); len(dirs) != 0 {
			t.Errorf("%s: left %q", name, dirs)
		}
	}
}

func TestAddressIsUsedPlainOrByAll(t *testing.T) {
	r := newGroupRig(t)
	inUse := func(plain, groups bool) {
		t.Helper()
		p, g, err := AddressesInUse(r.setup, filepath.Join(r.dir, "work"))
		if p != plain || g != groups || err != nil {
			t.Errorf("AddressesInUse = %v, %v, %v, want %v, %v", p, g, err, plain, groups)
		}
	}
	r.want(0, "plan")
	r.wantAll(0, "plan")
	inUse(false, false)
	r.want(0, "apply")
	inUse(true, false)
	for _, verb := range []string{"apply", "plan", "state-list"} {
		if out := r.wantAll(tfhosts.ExitUsage, verb); len(out.deployed) != 0 || !strings.Contains(out.err.Error(), `without "all"`) {
			t.Errorf("all %s on a plain address: deployed %q, %v", verb, out.deployed, out.err)
		}
	}
	r.want(0, "destroy")
	r.wantAll(0, "apply")
	inUse(false, true)
	e, err := ExamineGroup(t.Context(), Config{Setup: r.setup, StateDir: filepath.Join(r.dir, "work")}, "g1")
	if err != nil || e.State == nil || e.State.Resources == 0 || e.Served.Address != r.setup.Backend.Address+"-g1" {
		t.Errorf("ExamineGroup of g1 = %+v, %v, want its state", e, err)
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
	for _, verb := range []string{"apply", "plan"} {
		if out := r.want(tfhosts.ExitUsage, verb); len(out.deployed) != 0 || !strings.Contains(out.err.Error(), `used by "tf-hosts all" (group "g0")`) {
			t.Errorf("%s on an address of all: deployed %q, %v", verb, out.deployed, out.err)
		}
	}
	// A group that left the setup keeps its state, and is named.
	for name, n := range r.setup.Nodes {
		if n.Group == "g2" {
			delete(r.setup.Nodes, name)
		}
	}
	if out := r.wantAll(0, "plan", "-detailed-exitcode"); !out.says(`the group "g2" is in the setup no more`) {
		t.Error("the group that left is not named")
	}
	r.wantAll(0, "destroy")
	r.want(tfhosts.ExitUsage, "apply")
}

func TestAllInterruptReachesEveryGroup(t *testing.T) {
	r := newGroupRig(t)
	interrupt := make(chan struct{})
	var begun atomic.Int32
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		if begun.Add(1) == 6 {
			close(interrupt)
		}
		<-req.Drop
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Dropped}
	}
	if out := r.all("apply", AllOptions{}, interrupt); out.code != tfhosts.ExitInterrupted {
		t.Errorf("code %d (%v), want 130", out.code, out.err)
	}
	// No lock is left, and all is done by the next run.
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	if out := r.wantAll(0, "apply"); len(out.deployed) != 6 {
		t.Errorf("the next run deployed %q", out.deployed)
	}
	// One that waits for its turn is dropped, too.
	interrupt = make(chan struct{})
	for name := range r.setup.Nodes {
		r.changeNode(name, func(n *tfhosts.SetupNode) { n.ConfigIdentity += "-2.drv" })
	}
	begun.Store(0)
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		if begun.Add(1) == 1 {
			close(interrupt)
		}
		<-req.Drop
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	if out := r.all("apply", AllOptions{}, interrupt, "-parallelism=1"); out.code != tfhosts.ExitInterrupted || len(out.deployed) != 1 {
		t.Errorf("with one slot: code %d (%v), deployed %q, want 130 and one", out.code, out.err, out.deployed)
	}
}

func TestAllDeployment(t *testing.T) {
	r := newGroupRig(t)
	r.setup.PublishedNamesExpr = "s: s.keep"
	r.wantAll(0, "apply")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	verb, _ := tfhosts.LookupVerb("plan")
	asked := 0
	var answer, story bytes.Buffer
	cfg := r.config(self, verb, nil, &answer, &story, []string{"-detailed-exitcode"})
	cfg.Deployment = `{"keep": []}`
	cfg.Worker.Names = func(context.Context, string, string) ([]string, error) {
		asked++
		return []string{"prod.app0", "prod.app1", "prod.app3", "prod.app4"}, nil
	}
	code, err := RunAll(context.Background(), cfg, AllOptions{})
	if code != 2 || err != nil || asked != 1 {
		t.Errorf("code %d (%v), evaluated %d times, want 2 and once", code, err, asked)
	}
	if got := answer.String(); !strings.Contains(got, "[g2] Plan: 0 to add, 0 to change, 2 to destroy") || strings.Contains(got, "[g0] Plan") {
		t.Errorf("want both nodes of g2 to leave, and nothing else:\n%s", got)
	}
}

func TestAllBootstrapAndDestroyOrder(t *testing.T) {
	s := newSelfRig(t, 4)
	s.changeNode("prod.state", func(n *tfhosts.SetupNode) { n.Group = "core" })
	for i := range 4 {
		s.changeNode(fmt.Sprintf("prod.app%d", i), func(n *tfhosts.SetupNode) { n.Group = []string{"core", "edge", "web"}[i%3] })
	}
	s.wantAll(tfhosts.ExitUnreachable, "apply") // without BOOTSTRAP=1
	s.boot = true
	out := s.wantAll(0, "apply")
	s.boot = false
	if len(out.deployed) != 5 || out.deployed[0] != "prod.state" {
		t.Errorf("deployed %q, want the backend's node first and each once", out.deployed)
	}
	for _, e := range out.eventsOfTheRun {
		if e.Kind == tfhosts.EventPhase && e.Op == "cycle 1/2" && e.Group != "core" {
			t.Errorf("the group %q ran cycle 1", e.Group)
		}
	}
	if core, edge, web := span(out, "core"), span(out, "edge"), span(out, "web"); core.last > min(edge.first, web.first) {
		t.Errorf("events of core %v, edge %v, web %v, want core before the others", core, edge, web)
	}
	s.wantAll(0, "plan", "-detailed-exitcode")
	if out := s.wantAll(0, "apply"); len(out.deployed) != 0 {
		t.Errorf("steady: deployed %q", out.deployed)
	}

	out = s.wantAll(0, "destroy")
	if core, edge, web := span(out, "core"), span(out, "edge"), span(out, "web"); core.first < max(edge.last, web.last) {
		t.Errorf("events of core %v, edge %v, web %v, want core after the others", core, edge, web)
	}
	dir := func(group string) string {
		return WorkDir(filepath.Join(s.dir, "work"), s.setup.Backend.Address+"-"+group)
	}
	for group, detached := range map[string]bool{"core": true, "edge": false, "web": false} {
		if _, err := os.Stat(filepath.Join(dir(group), "terraform.tfstate")); (err == nil) != detached {
			t.Errorf("local state of the group %q after the destroy: %v, want it: %v", group, err, detached)
		}
	}
}

func TestAllDestroyAsksOnce(t *testing.T) {
	r := newGroupRig(t)
	r.wantAll(0, "apply")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	verb, _ := tfhosts.LookupVerb("destroy")
	var questions []string
	run := func(yes bool, opts AllOptions, args ...string) error {
		questions = nil
		cfg := r.config(self, verb, nil, io.Discard, io.Discard, args)
		cfg.Ask = func(question string) (bool, error) {
			questions = append(questions, question)
			return yes, nil
		}
		_, err := RunAll(context.Background(), cfg, opts)
		return err
	}
	held := func() int {
		n := 0
		for line := range strings.Lines(r.wantAll(0, "state-list").answer) {
			n += strings.Count(line, "terraform_data.nixos")
		}
		return n
	}
	if err := run(false, AllOptions{}); !errors.Is(err, ErrDeclined) || held() != 6 {
		t.Errorf("declined: %v, %d nodes are left, want all six", err, held())
	}
	if len(questions) != 1 || !strings.Contains(questions[0], "in the groups g0, g1, g2?") {
		t.Errorf("questions: %q, want one that names the groups", questions)
	}
	// One group's own plan is asked about.
	if err := run(false, AllOptions{Groups: []string{"g1"}}); !errors.Is(err, ErrDeclined) || len(questions) != 1 || !strings.HasPrefix(questions[0], "[g1] destroy as planned above") {
		t.Errorf("--group g1: %v, questions %q", err, questions)
	}
	if err := run(true, AllOptions{Groups: []string{"g1", "g2"}}); err != nil || len(questions) != 1 || held() != 2 {
		t.Errorf("two groups: %v, questions %q, %d nodes are left, want the two of g0", err, questions, held())
	}
	if err := run(false, AllOptions{}, "-auto-approve"); err != nil || len(questions) != 0 || held() != 0 {
		t.Errorf("-auto-approve: %v, questions %q, %d nodes are left", err, questions, held())
	}
}

type interval struct{ first, last int }

// span is where a group's own events are in a run; the summary at its end is none.
func span(o outcome, group string) interval {
	at := interval{-1, -1}
	for i, e := range o.eventsOfTheRun {
		if e.Group != group || e.Op == "verdict" {
			continue
		}
		if at.first < 0 {
			at.first = i
		}
		at.last = i
	}
	return at
}

func TestAllLaterGroupsAreNotRun(t *testing.T) {
	s := newSelfRig(t, 1)
	s.changeNode("prod.state", func(n *tfhosts.SetupNode) { n.Group = "core" })
	s.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.Group = "web" })
	s.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Unreachable}
	}
	s.boot = true
	out := s.wantAll(tfhosts.ExitNodesFailed, "apply")
	if !cmp.Equal(out.deployed, []string{"prod.state"}) || !strings.Contains(out.err.Error(), `group "web": not run, because the group "core" failed`) || !out.says("exit 6: not run") {
		t.Errorf("deployed %q, %v", out.deployed, out.err)
	}
}

func TestGroupHint(t *testing.T) {
	for hint, want := range map[string]string{
		"":                                      "",
		"release it: tf-hosts force-unlock 1-2": "release it: tf-hosts all --group g force-unlock 1-2",
		"put it back: tf-hosts state-restore; or give it up":   "put it back: tf-hosts all --group g state-restore; or give it up",
		"bring it up: BOOTSTRAP=1 tf-hosts apply":              "bring it up: BOOTSTRAP=1 tf-hosts all --group g apply",
		"tf-hosts --help, or ask whoever runs tf-hosts there.": "tf-hosts --help, or ask whoever runs tf-hosts there.",
	} {
		if got := groupHint("g", hint); got != want {
			t.Errorf("groupHint(%q) = %q, want %q", hint, got, want)
		}
	}
}
