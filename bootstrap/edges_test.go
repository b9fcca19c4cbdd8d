package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestAStaleSavedPlanIsPlannedAgain(t *testing.T) {
	r := newRig(t, 2)
	r.want(0, "plan", "-out=reviewed")
	r.want(0, "apply", "-target=prod.app0")
	if out := r.want(0, "apply", "reviewed"); !cmp.Equal(out.deployed, []string{"prod.app1"}) {
		t.Errorf("deployed %q, want what is left of the plan", out.deployed)
	}
}

func TestAStaleSavedPlanNeverDoesMoreThanWasReviewed(t *testing.T) {
	t.Run("it was targeted", func(t *testing.T) {
		r := newRig(t, 3)
		r.want(0, "plan", "-out=reviewed", "-target=prod.app0")
		r.want(0, "apply", "-target=prod.app1")
		out := r.want(tfhosts.ExitFailed, "apply", "reviewed")
		if len(out.deployed) != 0 || !strings.Contains(out.err.Error(), "prod.app2") {
			t.Errorf("deployed %q, %v; want the further node named", out.deployed, out.err)
		}
	})
	t.Run("it was a destroy", func(t *testing.T) {
		r := newRig(t, 2)
		r.want(0, "apply")
		r.want(0, "plan", "-out=reviewed", "-destroy")
		r.want(0, "taint", "prod.app0")
		if out := r.want(tfhosts.ExitFailed, "apply", "reviewed"); len(out.deployed) != 0 {
			t.Errorf("a stale destroy plan deployed %q", out.deployed)
		}
	})
}

func TestAnApplyWhoseProvisionersDoNotStartHasFailed(t *testing.T) {
	r := newRig(t, 1)
	r.setup.Bash = "/nonexistent/sh"
	out := r.want(tfhosts.ExitFailed, "apply")
	if slices.ContainsFunc(out.eventsOfTheRun, func(e tfhosts.Event) bool { return strings.Contains(e.Message, "planning again") }) {
		t.Error("it was taken for a stale plan")
	}
}

func TestPlanningFlagsBesideASavedPlanAreRefused(t *testing.T) {
	r := newRig(t, 2)
	r.want(0, "plan", "-out=reviewed")
	if out := r.want(tfhosts.ExitUsage, "apply", "-target=prod.app0", "reviewed"); len(out.deployed) != 0 {
		t.Errorf("deployed %q", out.deployed)
	}
}

func TestTheBackendsNodeIsRemovedByDestroyAlone(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	s.want(tfhosts.ExitUsage, "apply", "-destroy")
	s.want(0, "plan", "-destroy", "-out=reviewed")
	s.want(tfhosts.ExitUsage, "apply", "reviewed")
	if s.state().Get("resources.#").Int() == 0 {
		t.Error("the backend's state was emptied in place")
	}
}

func TestADeclinedDestroyStaysOnTheBackend(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	v, _ := tfhosts.LookupVerb("destroy")
	cfg := s.config("/bin/false", v, nil, nil, nil, nil)
	cfg.Ask = func(string) (bool, error) { return false, nil }
	if code, err := Run(context.Background(), cfg); code != tfhosts.ExitFailed || !errors.Is(err, ErrDeclined) {
		t.Fatalf("declined destroy: %d, %v", code, err)
	}
	if s.has("terraform.tfstate") || !s.has("terraform.tfstate.migrated") {
		t.Error("the local copy stayed the state")
	}
	if out := s.want(0, "apply"); len(out.deployed) != 0 {
		t.Errorf("apply after it deployed %q", out.deployed)
	}
}

func TestTheLedgerKnowsThatTheMigrationIsOver(t *testing.T) {
	s := newSelfRig(t, 0)
	s.bootstrap(0)
	b, err := os.ReadFile(ledgerPath(s.workDir()))
	if err != nil {
		t.Fatal(err)
	}
	var l Ledger
	if err := json.Unmarshal(b, &l); err != nil {
		t.Fatal(err)
	}
	if l.Mode != ModeRemote || l.Sent != nil {
		t.Errorf("ledger: mode %q, sent %v; want remote and nothing", l.Mode, l.Sent)
	}
}

func TestALostDetachedStateCanBeGivenUp(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	s.want(0, "destroy")
	s.stop()
	for _, path := range []string{localPath(s.workDir()), s.states} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
	s.bootstrap(tfhosts.ExitLostState)
	s.allowLost = true
	if out := s.bootstrap(0); len(out.deployed) != 2 {
		t.Errorf("deployed %q, want all", out.deployed)
	}
}

func TestAnInterruptEndsTheWaitForTheWorkingDir(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	work := WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
	lock, err := takeLock(context.Background(), work, holder{PID: 1}, 0, func(string) {})
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	interrupt := make(chan struct{})
	close(interrupt)
	begin := time.Now()
	out := r.run("apply", interrupt, "-lock-timeout=1m")
	if out.code != tfhosts.ExitLocked || time.Since(begin) > 30*time.Second {
		t.Errorf("code %d after %s, %v; want 4 at once", out.code, time.Since(begin), out.err)
	}
}

func TestSalvageNeverWritesOverAnotherRunOfTheSameSerial(t *testing.T) {
	r := newRig(t, 2)
	r.want(0, "apply")
	work := WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
	last, err := os.ReadFile(lastPath(work))
	if err != nil {
		t.Fatal(err)
	}
	ours, err := sjson.SetBytes(last, "serial", gjson.GetBytes(last, "serial").Int()+1)
	if err != nil {
		t.Fatal(err)
	}
	if err := MakePrivate(filepath.Join(work, "salvage")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(work, "salvage", "run.tfstate"), ours, 0o600); err != nil {
		t.Fatal(err)
	}
	r.work = "other-machine"
	r.want(0, "state-rm", "prod.app1")
	r.work = ""
	r.want(tfhosts.ExitSalvage, "taint", "prod.app0")
	if got := r.want(0, "state-list").answer; strings.Contains(got, "app1") {
		t.Errorf("what the other run stored is gone: %s", got)
	}
}

func TestValidateNeedsNoBackend(t *testing.T) {
	r := newRig(t, 1)
	r.setup.Backend.Address = "http://127.0.0.1:1/state/test/graph"
	r.want(0, "validate")
}

func TestVariablesThatTerraformExecRefuses(t *testing.T) {
	r := newRig(t, 1)
	t.Setenv("TF_WORKSPACE", "") // exported, and empty
	t.Setenv("TF_SKIP_PROVIDER_VERIFY", "1")
	r.want(0, "apply")
}
