package bootstrap

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/nix"
)

// diffRig is a rig whose one node is a system of some version, and a store
// that holds what was built.
type diffRig struct {
	*rig
	store map[string]bool
}

func newDiffRig(t *testing.T) *diffRig {
	t.Helper()
	r := &diffRig{rig: newRig(t, 1), store: map[string]bool{}}
	r.build = func(ids []string) (map[string]Built, error) {
		built := map[string]Built{}
		for _, id := range ids {
			out := strings.TrimSuffix(id, ".drv")
			r.store[out] = true
			built[id] = Built{Out: out}
		}
		return built, nil
	}
	r.closures = func(systems []string) (map[string][]nix.Path, error) {
		all := map[string][]nix.Path{}
		for _, s := range systems {
			if !r.store[s] {
				continue
			}
			version := s[strings.LastIndexByte(s, '-')+1:]
			all[s] = []nix.Path{{Path: s, NarSize: 1}, {Path: storePath("9"+version, "pkg-"+version), NarSize: 10}}
		}
		return all, nil
	}
	r.version("1")
	return r
}

func storePath(n, name string) string {
	return "/nix/store/" + strings.Repeat("0", 32-len(n)) + n + "-" + name
}

func systemOf(version string) string { return storePath(version, "nixos-system-"+version) }

func (r *diffRig) version(v string) {
	r.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.ConfigIdentity = systemOf(v) + ".drv" })
}

// lists are the systems whose package lists are kept.
func (r *diffRig) lists() []string {
	r.tb.Helper()
	entries, err := os.ReadDir(filepath.Join(WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address), "packages"))
	if err != nil && !os.IsNotExist(err) {
		r.tb.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimLeft(strings.TrimSuffix(e.Name(), ".json"), "0"))
	}
	return names
}

// diffs are the diffs of a run as text: unavailable, or what became of pkg.
func diffs(out outcome) []string {
	var all []string
	for _, e := range out.eventsOfTheRun {
		if e.Kind != tfhosts.EventDiff {
			continue
		}
		text := e.Message + ": " + e.Diff.Unavailable
		for _, c := range e.Diff.Changed {
			text += fmt.Sprintf("%s %s>%s ", c.Name, strings.Join(c.Old, ","), strings.Join(c.New, ","))
		}
		all = append(all, text)
	}
	return all
}

func wantDiffs(t *testing.T, out outcome, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, diffs(out)); diff != "" {
		t.Errorf("diffs (-want +got):\n%s", diff)
	}
	for _, e := range out.eventsOfTheRun {
		if e.Kind == tfhosts.EventWarning {
			t.Errorf("warning: %s", e.Message)
		}
	}
}

func TestPackageListsOutliveTheStore(t *testing.T) {
	r := newDiffRig(t)
	short := func(v string) string { return shortPath(systemOf(v)) }
	wantDiffs(t, r.want(0, "plan"), "unknown -> "+short("1")+": it is not built here; plan --build builds it")
	wantDiffs(t, r.want(0, "apply"), "unknown -> "+short("1")+": what runs on the host is not known here")
	wantDiffs(t, r.want(0, "plan"))

	r.version("2")
	clear(r.store) // a garbage collection
	wantDiffs(t, r.want(0, "plan"), short("1")+" -> "+short("2")+": it is not built here; plan --build builds it")
	if r.store[systemOf("2")] {
		t.Error("a plan built")
	}
	r.buildPlan = true
	want := short("1") + " -> " + short("2") + ": nixos-system 1>2 pkg 1>2 "
	wantDiffs(t, r.want(2, "plan", "-detailed-exitcode"), want)
	wantDiffs(t, r.want(0, "plan", "-json"), want)
	wantDiffs(t, r.want(0, "plan", "-json-into=changes"), want)
	if got := r.lists(); !slices.Equal(got, []string{"1"}) {
		t.Errorf("lists after plans = %q, want that of the deploy alone", got)
	}
	asked := false
	r.ask = func(string) (bool, error) {
		asked = true
		if len(diffs(outcome{eventsOfTheRun: r.events})) != 1 {
			t.Error("asked before the diff was shown")
		}
		return true, nil
	}
	wantDiffs(t, r.want(0, "apply"), want)
	if !asked {
		t.Error("not asked")
	}
	r.ask = nil
	if got := r.lists(); !slices.Equal(got, []string{"1", "2"}) && !slices.Equal(got, []string{"2"}) {
		t.Errorf("lists after a deploy = %q, want the new system's", got)
	}

	// A node that is not reached leaves known what an earlier verdict saw.
	r.version("3")
	deploy := r.deploy
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Unreachable}
	}
	clear(r.store)
	r.want(tfhosts.ExitNodesFailed, "apply")
	if got := r.lists(); !slices.Equal(got, []string{"2", "3"}) {
		t.Errorf("lists after a deploy that failed = %q, want those of the running and the wanted system", got)
	}
	clear(r.store)
	wantDiffs(t, r.want(0, "plan"), short("2")+" -> "+short("3")+" (tainted): nixos-system 2>3 pkg 2>3 ")
	// One that was lost while it activated runs nobody knows what.
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Timeout, OldPath: systemOf("2")}
	}
	r.want(tfhosts.ExitNodesFailed, "apply")
	wantDiffs(t, r.want(0, "plan"), "unknown -> "+short("3")+" (tainted): what runs on the host is not known here")
	r.deploy = deploy
	r.want(0, "apply")
	wantDiffs(t, r.want(0, "plan", "-replace=prod.app0"), short("3")+" -> "+short("3")+" (requested): ")

	delete(r.setup.Nodes, "prod.app0")
	leaves := func(out outcome) bool {
		return slices.ContainsFunc(out.eventsOfTheRun, func(e tfhosts.Event) bool {
			return e.Node == "prod.app0" && e.Message == "leaves the graph; its host keeps its configuration"
		})
	}
	if out := r.want(0, "plan"); !leaves(out) {
		t.Error("a plan does not name the node that leaves")
	}
	if out := r.want(0, "apply"); !leaves(out) {
		t.Error("an apply does not name the node that leaves")
	}
	if got := r.lists(); len(got) != 0 {
		t.Errorf("lists without nodes = %q, want none", got)
	}
}

func TestNothingOfTheDiffStopsARun(t *testing.T) {
	r := newDiffRig(t)
	dir := WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
	r.want(0, "apply")
	warnings := func(out outcome) (all []string) {
		for _, e := range out.eventsOfTheRun {
			if e.Kind == tfhosts.EventWarning {
				all = append(all, e.Message)
			}
		}
		return all
	}
	for name, row := range map[string]struct {
		spoil func()
		warn  string
		diff  string
	}{
		"a broken list": {
			spoil: func() { writeList(t, dir, systemOf("1"), "{") },
			warn:  "reading the package list", diff: "the packages of the old system are not known here",
		},
		"nix fails": {
			spoil: func() {
				r.closures = func([]string) (map[string][]nix.Path, error) { return nil, errors.New("nix fails") }
			},
			warn: "nix fails", diff: "it is not built here",
		},
		"no nix": {
			spoil: func() {
				r.closures = func([]string) (map[string][]nix.Path, error) { return nil, nix.ErrNotInstalled }
			},
			diff: "it is not built here",
		},
		"the list is not kept": {
			spoil: func() {
				r.fault = func(op string) error {
					if op == "packages.sync" {
						return errors.New("disk full")
					}
					return nil
				}
			},
			warn: "disk full",
		},
	} {
		t.Run(name, func(t *testing.T) {
			closures := r.closures
			defer func() { r.closures, r.fault = closures, nil }()
			r.version("1")
			r.want(0, "apply", "-replace=prod.app0")
			clear(r.store)
			r.version("2")
			row.spoil()
			out := r.want(0, "apply")
			if got := strings.Join(warnings(out), "; "); !strings.Contains(got, row.warn) || row.warn == "" && got != "" {
				t.Errorf("warnings = %q, want %q", got, row.warn)
			}
			if got := diffs(out); len(got) != 1 || !strings.Contains(got[0], row.diff) {
				t.Errorf("diffs = %q, want %q", got, row.diff)
			}
			if len(out.deployed) != 1 {
				t.Errorf("deployed %q", out.deployed)
			}
		})
	}
}

func writeList(t *testing.T, dir, system, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "packages", listName(system)), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAPlanSaysWhatDoesNotBuild(t *testing.T) {
	r := newDiffRig(t)
	r.build = func(ids []string) (map[string]Built, error) {
		return map[string]Built{ids[0]: {Err: errors.New("the log of the build")}}, nil
	}
	r.buildPlan = true
	out := r.want(tfhosts.ExitFailed, "plan", "-detailed-exitcode")
	wantDiffs(t, out, "unknown -> "+shortPath(systemOf("1"))+": it does not build")
	if out.err == nil || !strings.Contains(out.err.Error(), "1 of 1 systems do not build: the log of the build") {
		t.Errorf("error = %v, want the build's", out.err)
	}
	r.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.Runner.BuildOn = "target" })
	wantDiffs(t, r.want(0, "plan"), "unknown -> "+shortPath(systemOf("1"))+": it is built on its host")
}
