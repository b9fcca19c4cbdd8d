package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// A reading verb sweeps, beside runs that live, and never what may hold a state.
func TestReadingVerbsSweep(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	work := WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
	living, err := thisRun("x")
	if err != nil {
		t.Fatal(err)
	}
	dead := living
	dead.StartTime++
	const old = "20260101T000000Z-"
	run := func(name string, files map[string]any) {
		dir := filepath.Join(work, "runs", name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for file, v := range files {
			b, err := json.Marshal(v)
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, file), b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	run(old+"dead-plan", map[string]any{runFile: runNote{dead, false}})
	run(old+"living-plan", map[string]any{runFile: runNote{living, false}})
	run(old+"living-apply", map[string]any{runFile: runNote{living, true}, searched: ""})
	run(old+"searched-apply", map[string]any{runFile: runNote{dead, true}, searched: ""})
	run(old+"unsearched-apply", map[string]any{runFile: runNote{dead, true}})
	run(old+"before-notes", nil)
	run(old+"errored", map[string]any{runFile: runNote{dead, false}, erroredState: ""})
	run("20991231T000000Z-young", map[string]any{runFile: runNote{dead, false}})
	inits := func(name string, age time.Duration) {
		dir := filepath.Join(work, "init", name)
		if err := os.MkdirAll(filepath.Join(dir, "data"), 0o700); err != nil {
			t.Fatal(err)
		}
		then := time.Now().Add(-age)
		if err := os.Chtimes(dir, then, then); err != nil {
			t.Fatal(err)
		}
	}
	inits(initTemp+old+"dead-plan-1", 0)
	inits(initTemp+old+"living-plan-1", 0)
	inits(initTemp+"123", 0)
	inits(initTemp+"124", 2*runsKept)

	list := func(folder string, keep func(string) bool) []string {
		entries, err := os.ReadDir(filepath.Join(work, folder))
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			if keep(e.Name()) {
				names = append(names, strings.TrimPrefix(e.Name(), old))
			}
		}
		return names
	}
	isOld := func(name string) bool { return strings.HasPrefix(name, old) }
	r.want(0, "plan")
	if diff := cmp.Diff([]string{"before-notes", "errored", "living-apply", "living-plan", "unsearched-apply"}, list("runs", isOld)); diff != "" {
		t.Errorf("old runs after a plan (-want +got):\n%s", diff)
	}
	isTemp := func(name string) bool { return strings.HasPrefix(name, initTemp) }
	if diff := cmp.Diff([]string{initTemp + "123", initTemp + old + "living-plan-1"}, list("init", isTemp)); diff != "" {
		t.Errorf("unfinished inits after a plan (-want +got):\n%s", diff)
	}
	if err := os.Remove(filepath.Join(work, "runs", old+"errored", erroredState)); err != nil {
		t.Fatal(err)
	}
	r.want(0, "apply") // looks for states first
	if diff := cmp.Diff([]string{"living-apply", "living-plan"}, list("runs", isOld)); diff != "" {
		t.Errorf("old runs after an apply (-want +got):\n%s", diff)
	}
}

func TestAnInitIsPublishedWhole(t *testing.T) {
	r := newRig(t, 1)
	for _, op := range []string{"init.keep", "init.sync", "init.rename"} {
		r.fault = func(at string) error {
			if at == op {
				return errors.New("power cut")
			}
			return nil
		}
		r.want(tfhosts.ExitFailed, "plan")
		left, err := filepath.Glob(filepath.Join(WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address), "init", "*"))
		left = slices.DeleteFunc(left, func(path string) bool { return strings.HasPrefix(filepath.Base(path), "engine-") })
		if err != nil || len(left) != 0 {
			t.Errorf("after an error at %s: %q, %v", op, left, err)
		}
	}
	r.fault = nil
	r.want(0, "plan")
}

// The run that holds the lock searches all others for states. One that waited
// for it is not over.
func TestARunThatWaitedIsNotTakenForSearched(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	r.want(0, "taint", "prod.app0")
	work := WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
	lock, err := takeLock(context.Background(), work, holder{PID: 1}, 0, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	r.onEvent = func(e tfhosts.Event) {
		if !strings.HasPrefix(e.Message, "waiting up to") {
			return
		}
		s := &session{Config: &Config{}, id: "holder", workDir: work}
		if err := errors.Join(s.collectSalvage(), lock.Unlock()); err != nil {
			t.Error(err)
		}
	}
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		runs, err := filepath.Glob(filepath.Join(work, "runs", "*"))
		if err != nil || !slices.ContainsFunc(runs, func(dir string) bool { return !wasSearched(dir) }) {
			t.Errorf("the living run is marked as searched: %q, %v", runs, err)
		}
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	if out := r.want(0, "apply"); len(out.deployed) != 1 {
		t.Errorf("deployed %q", out.deployed)
	}
}

// tf-hosts is killed, its tofu lives on and is named as no engine is.
func TestATofuOfAnotherNameIsAdopted(t *testing.T) {
	r := newFaultRig(t, ours, 1, false)
	path, err := tofuPath(r.rig)
	if err != nil {
		t.Fatal(err)
	}
	r.find = tofu.FindConfig{Explicit: filepath.Join(r.dir, "infra")}
	if err := copyFile(path, r.find.Explicit); err != nil {
		t.Fatal(err)
	}
	r.wantCode(t, 0, "apply")
	r.change()
	code, out := r.process(t, "relay.post", func(o *walkOrder) { o.Verb = "apply" })
	if code != -1 {
		t.Fatalf("apply: code %d, want to be killed\n%s", code, tail(out))
	}
	next := r.wantCode(t, 0, "apply")
	if !slices.ContainsFunc(next.eventsOfTheRun, func(e tfhosts.Event) bool { return e.Op == "adopt" }) || len(next.deployed) != 0 {
		t.Errorf("the next run deployed %q and did not serve the tofu that lives:\n%s", next.deployed, tail(next.story))
	}
	r.whole(t)
}

func copyFile(from, to string) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, 0o700)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Close())
}
