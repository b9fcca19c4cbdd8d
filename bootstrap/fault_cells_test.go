package bootstrap

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/sjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/foreigntest"
)

// codes is the exit code of each server, 0 for those that are not named.
type codes map[string]int

func always(code int) codes { return codes{ours: code, gitlab: code, nimbolus: code} }

// during changes a node and applies under faults of one request; the apply must
// end with the server's code, the next one with 0 and no deploy: nothing of what
// was deployed is forgotten.
func during(op foreigntest.Op, want codes, faults ...foreigntest.Fault) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		stored := len(r.host.Stored())
		r.host.Fault(op, faults...)
		first := r.run("apply", nil)
		left := r.host.Left()
		r.host.Calm()
		if first.code != want[r.kind] || len(first.deployed) != 1 {
			t.Fatalf("apply: code %d (%v), deployed %q, want %d and the changed node\n%s", first.code, first.err, first.deployed, want[r.kind], tail(first.story))
		}
		if left == len(faults) {
			t.Error("no fault was reached")
		}
		next := r.wantCode(t, 0, "apply")
		if len(next.deployed) != 0 {
			t.Errorf("the next apply deployed %q", next.deployed)
		}
		all := r.host.Stored()
		if n := len(distinct(all[stored:])); n != 1 {
			t.Errorf("%d states were stored, want one", n)
		}
		// A save that failed costs a serial: tofu counts on for errored.tfstate.
		if was, is := all[stored-1].Meta.Serial, all[len(all)-1].Meta.Serial; first.code == 0 && is != was+1 {
			t.Errorf("serial %d was stored after %d", is, was)
		}
		return fmt.Sprintf("%d -> 0", first.code)
	}
}

func distinct(all []foreigntest.Stored) map[string]bool {
	seen := map[string]bool{}
	for _, s := range all {
		seen[string(s.Body)] = true
	}
	return seen
}

// refused applies while the server answers wrongly: code, nothing deployed or
// stored, and with the server well again the change is applied.
func refused(code int, says string, answer func(state []byte) foreigntest.Fault, times int) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		stored := len(r.host.Stored())
		r.host.Fault(foreigntest.Get, foreigntest.Times(times, answer(r.state(t)))...)
		first := r.run("apply", nil)
		r.host.Calm()
		if first.code != code || len(first.deployed) != 0 || len(r.host.Stored()) != stored {
			t.Fatalf("apply: code %d (%v), deployed %q, %d states stored; want %d and none", first.code, first.err, first.deployed, len(r.host.Stored())-stored, code)
		}
		if !strings.Contains(first.err.Error(), says) {
			t.Errorf("apply says %q, want something about %q", first.err, says)
		}
		if next := r.wantCode(t, 0, "apply"); len(next.deployed) != 1 {
			t.Errorf("the next apply deployed %q", next.deployed)
		}
		return fmt.Sprintf("%d -> 0", first.code)
	}
}

func status(code int) func([]byte) foreigntest.Fault {
	return func([]byte) foreigntest.Fault {
		if code == http.StatusOK { // with no body
			return foreigntest.Fault{Answer: func([]byte) (int, string) { return code, "" }}
		}
		return foreigntest.Fault{Status: code}
	}
}

// changed answers with the state in which some fields are others.
func changed(fields map[string]any) func([]byte) foreigntest.Fault {
	return func(state []byte) foreigntest.Fault {
		for path, v := range fields {
			if n, ok := v.(int); ok && path == "serial" {
				ref, err := refOf(state)
				if err != nil {
					return foreigntest.Fault{}
				}
				v = int(ref.Serial) + n
			}
			if b, err := sjson.SetBytes(state, path, v); err == nil {
				state = b
			}
		}
		return foreigntest.Fault{Status: http.StatusOK, Body: string(state)}
	}
}

func page([]byte) foreigntest.Fault { return foreigntest.Page() }

func truncated([]byte) foreigntest.Fault { return foreigntest.Fault{Truncate: true} }

// killed sends signals to tofu while it is in the middle of something; the run
// ends with code 1 and without a lock. again is how many nodes the next one
// deploys.
func killed(where string, again int, signals ...syscall.Signal) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		kill := func() { r.signalTofu(signals...) }
		stored := len(r.host.Stored())
		deploy := r.deploy
		switch where {
		case "create":
			r.deploy = func(req DeployRequest) tfhosts.Verdict { kill(); return deploy(req) }
		case "lock":
			r.host.Fault(foreigntest.Lock, foreigntest.Fault{}, foreigntest.Fault{After: func() {
				kill()
				time.Sleep(300 * time.Millisecond)
			}})
		case "post": // it arrives when tofu is long dead
			r.host.Fault(foreigntest.Post, foreigntest.Fault{Before: kill, Delay: 500 * time.Millisecond})
		case "unlock":
			r.host.Fault(foreigntest.Unlock, foreigntest.Fault{}, foreigntest.Fault{Before: kill})
		}
		first := r.run("apply", nil)
		r.host.Calm()
		r.deploy = deploy
		if arrived := len(r.host.Stored()) - stored; len(signals) == 1 && arrived != 1-again { // at an interrupt tofu saves what it has
			t.Errorf("%d states arrived, want %d", arrived, 1-again)
		}
		if first.code != tfhosts.ExitFailed {
			t.Fatalf("apply: code %d (%v), want 1\n%s", first.code, first.err, tail(first.story))
		}
		if id := r.lockHolder(t); id != "" {
			t.Errorf("the lock is held by %q", id)
		}
		next := r.wantCode(t, 0, "apply")
		if len(next.deployed) != again {
			t.Errorf("the next apply deployed %q, want %d", next.deployed, again)
		}
		return "1 -> 0"
	}
}

// wrapperKilled kills tf-hosts at an operation, and with both its tofu, too. The
// next run adopts the tofu that lives, or reclaims the lock of the dead run.
func wrapperKilled(op string, both bool) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		code, out := r.process(t, op, func(o *walkOrder) { o.Verb = "apply" })
		if code != -1 {
			t.Fatalf("apply: code %d, want to be killed at %s\n%s", code, op, tail(out))
		}
		if both {
			r.signalTofu(syscall.SIGKILL)
		}
		// The state was in the journal before it was sent.
		return "killed -> " + r.reclaimed(t, "apply", 0)
	}
}

// reclaimed runs the verb again with TF_RECLAIM_OWN_LOCK=1; it must deploy no
// more than the given nodes. Where the server shows a login instead of user@host
// the lock must be in the ledger; of another one it must be refused, and
// force-unlock helps.
func (r *faultRig) reclaimed(t *testing.T, verb string, deploys int) string {
	t.Helper()
	r.reclaim = true
	defer func() { r.reclaim = false }()
	held := r.lockHolder(t)
	ledger, err := readLedger(r.workDir(), r.setup.Backend.Address)
	if err != nil {
		t.Fatal(err)
	}
	next := r.run(verb, nil)
	how := ""
	if r.kind == gitlab && held != "" && ledger.lock(held) == nil && next.code == tfhosts.ExitLocked {
		if r.lockHolder(t) != held {
			t.Error("a lock of somebody else was released")
		}
		boot := r.boot
		r.boot = false
		r.wantCode(t, 0, "force-unlock", held)
		r.boot = boot
		next = r.run(verb, nil)
		how = "4 -> force-unlock 0 -> "
	}
	if next.code != 0 || len(next.deployed) > deploys {
		t.Fatalf("the next %s: code %d (%v), deployed %q\n%s", verb, next.code, next.err, next.deployed, tail(next.story))
	}
	return how + "0"
}

// killedHolder kills tf-hosts and its tofu when they hold the lock and nothing is
// done. The lock, which the server may show as anybody's, is given back.
func killedHolder(t *testing.T, r *faultRig) string {
	r.change()
	code, out := r.process(t, "relay.get", func(o *walkOrder) { o.Verb = "apply" })
	if code != -1 {
		t.Fatalf("apply: code %d, want to be killed with the lock\n%s", code, tail(out))
	}
	r.signalTofu(syscall.SIGKILL)
	held := r.lockHolder(t)
	if held == "" {
		t.Fatal("no lock is held")
	}
	r.wantCode(t, tfhosts.ExitLocked, "taint", "-lock-timeout=0s", "prod.app0") // not asked to reclaim
	if r.lockHolder(t) != held {
		t.Error("the lock was released without being asked to")
	}
	how := r.reclaimed(t, "apply", 1)
	if how != "0" {
		t.Errorf("a lock of the ledger was not reclaimed: %s", how)
	}
	return "killed -> 4 -> " + how
}

// storeFails makes our server die at an operation of its store and start again.
func storeFails(op string) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		var once sync.Once
		f := func(at string) (err error) {
			if at == op {
				once.Do(func() {
					r.host.Bounce(100*time.Millisecond, nil)
					err = fmt.Errorf("power cut at %s", op)
				})
			}
			return err
		}
		r.storeFault.Store(&f)
		defer r.storeFault.Store(nil)
		r.change()
		if out := r.wantCode(t, 0, "apply"); len(out.deployed) != 1 {
			t.Errorf("deployed %q", out.deployed)
		}
		if out := r.wantCode(t, 0, "apply"); len(out.deployed) != 0 {
			t.Errorf("the next apply deployed %q", out.deployed)
		}
		return "0 -> 0"
	}
}

// restarted takes the server away in the middle of an apply, when the state
// comes; its locks are lost or not.
func restarted(away time.Duration, forget bool) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		between := func() {}
		if forget {
			between = r.forget
		}
		return during(foreigntest.Post, codes{}, foreigntest.Fault{DropBefore: true, Before: func() { r.host.Bounce(away, between) }})(t, r)
	}
}

// migrationKilled kills a bootstrap in its migration; the same command again
// ends it, with the lineage of cycle 1.
func migrationKilled(op string) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		code, out := r.process(t, op, func(o *walkOrder) { o.Verb, o.Bootstrap = "apply", true })
		if code != -1 {
			t.Fatalf("bootstrap: code %d, want to be killed at %s\n%s", code, op, tail(out))
		}
		local, err := os.ReadFile(localPath(r.workDir()))
		if err != nil {
			t.Fatal(err)
		}
		r.boot = true
		defer func() { r.boot = false }()
		how := r.reclaimed(t, "apply", 1)
		if _, err := os.Stat(localPath(r.workDir())); err == nil {
			t.Error("a local state is left over")
		}
		if first := r.host.Stored()[0].Body; string(first) != string(local) {
			t.Error("what was stored first is not the state of cycle 1")
		}
		return "killed -> " + how
	}
}

// migrationFault bootstraps under faults of one request.
func migrationFault(op foreigntest.Op, faults ...foreigntest.Fault) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.host.Fault(op, faults...)
		r.boot = true
		defer func() { r.boot = false }()
		out := r.run("apply", nil)
		r.host.Calm()
		if id := r.lockHolder(t); id != "" {
			t.Errorf("the lock is held by %q after the bootstrap", id)
		}
		if out.code != 0 {
			t.Fatalf("bootstrap: code %d (%v)\n%s", out.code, out.err, tail(out.story))
		}
		return "0"
	}
}

// detachFault destroys a graph that serves its own state while the server
// vanishes before the lock is given back, or tf-hosts is killed at op.
func detachFault(op string) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.boot = true
		r.wantCode(t, 0, "apply")
		r.boot = false
		lineage := r.host.Stored()[0].Meta.Lineage
		how := "0"
		switch op {
		case "":
			r.fault = func(at string) error {
				if at == "detach.unlock" {
					r.host.Stop()
				}
				return nil
			}
			r.wantCode(t, 0, "destroy")
			r.fault = nil
		default:
			code, out := r.process(t, op, func(o *walkOrder) { o.Verb = "destroy" })
			if code != -1 {
				t.Fatalf("destroy: code %d, want to be killed at %s\n%s", code, op, tail(out))
			}
			how = "killed -> " + r.reclaimed(t, "destroy", 0)
		}
		local, err := os.ReadFile(localPath(r.workDir()))
		if err != nil {
			t.Fatal(err)
		}
		ref, err := refOf(local)
		if err != nil || ref.Lineage != lineage || ref.Resources != 0 {
			t.Errorf("the local state: %+v, %v; want lineage %s without resources", ref, err, lineage)
		}
		return how
	}
}

// hung lets one request hang while the operator interrupts.
func hung(op foreigntest.Op, skip, deployed int) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		interrupt := make(chan struct{})
		faults := append(foreigntest.Times(skip, foreigntest.Fault{}),
			foreigntest.Fault{Delay: 1500 * time.Millisecond, Before: func() { close(interrupt) }})
		r.host.Fault(op, faults...)
		out := r.run("apply", interrupt)
		r.host.Calm()
		if len(out.deployed) != deployed || out.code != tfhosts.ExitInterrupted && (out.code != 0 || deployed != 1) {
			t.Errorf("apply: code %d (%v), deployed %q", out.code, out.err, out.deployed)
		}
		if id := r.lockHolder(t); id != "" {
			t.Errorf("the lock is held by %q", id)
		}
		if next := r.wantCode(t, 0, "apply"); len(next.deployed) != 1-deployed {
			t.Errorf("the next apply deployed %q", next.deployed)
		}
		return fmt.Sprintf("%d -> 0", out.code)
	}
}

// notReclaimed: a LOCK is refused with an answer that proves nothing.
func notReclaimed(answer func(body []byte) (int, string)) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		r.reclaim = true
		defer func() { r.reclaim = false }()
		unlocks := r.host.Served(foreigntest.Unlock)
		r.host.Fault(foreigntest.Lock, foreigntest.Times(100, foreigntest.Fault{Answer: answer})...)
		out := r.run("apply", nil)
		r.host.Calm()
		if out.code != tfhosts.ExitLocked || len(out.deployed) != 0 || r.host.Served(foreigntest.Unlock) != unlocks {
			t.Errorf("apply: code %d (%v), deployed %q, %d unlocks; want 4 and none", out.code, out.err, out.deployed, r.host.Served(foreigntest.Unlock)-unlocks)
		}
		r.wantCode(t, 0, "apply")
		return "4 -> 0"
	}
}

// foreignHolder: another person holds the lock, of the same name or not.
func foreignHolder(t *testing.T, r *faultRig) string {
	c := r.client()
	info := client.NewLockInfo("apply", `{"run_id":"x","machine_id":"another","pid":7}`)
	if err := c.Lock(t.Context(), info); err != nil {
		t.Fatal(err)
	}
	r.reclaim = true
	defer func() { r.reclaim = false }()
	out := r.wantCode(t, tfhosts.ExitLocked, "apply", "-lock-timeout=0s")
	if !strings.Contains(out.err.Error(), info.ID) || r.lockHolder(t) != info.ID {
		t.Errorf("apply says %v and leaves the lock to %q, want %q", out.err, r.lockHolder(t), info.ID)
	}
	if r.kind == gitlab && !strings.Contains(out.err.Error(), "ann") {
		t.Errorf("apply does not name the holder: %v", out.err)
	}
	r.reclaim = false
	r.wantCode(t, 0, "force-unlock", info.ID)
	r.wantCode(t, 0, "apply")
	return "4 -> force-unlock 0 -> 0"
}

// deadHolder: a run of this machine that is dead holds the lock.
func deadHolder(t *testing.T, r *faultRig) string {
	info, err := thisRun("dead")
	if err != nil {
		t.Fatal(err)
	}
	info.StartTime++ // the process of this PID is another one
	dead := &session{info: info}
	if err := r.client().Lock(t.Context(), client.NewLockInfo("OperationTypeApply", dead.lockInfo())); err != nil {
		t.Fatal(err)
	}
	r.wantCode(t, tfhosts.ExitLocked, "taint", "-lock-timeout=0s", "prod.app0")
	return "4 -> " + r.reclaimed(t, "apply", 0)
}

// unlockedInTheMiddle: an operator on another machine releases the lock of a
// living apply.
func unlockedInTheMiddle(want codes) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		operator := &rig{tb: r.tb, dir: r.dir, setup: r.setup, find: r.find, build: r.build, work: "other-machine"}
		deploy := r.deploy
		defer func() { r.deploy = deploy }()
		r.deploy = func(req DeployRequest) tfhosts.Verdict {
			if out := operator.run("force-unlock", nil, r.lockHolder(t)); out.code != 0 {
				t.Errorf("force-unlock: code %d, %v", out.code, out.err)
			}
			return deploy(req)
		}
		first := r.run("apply", nil)
		if first.code != want[r.kind] || len(first.deployed) != 1 {
			t.Fatalf("apply: code %d (%v), want %d\n%s", first.code, first.err, want[r.kind], tail(first.story))
		}
		if next := r.wantCode(t, 0, "apply"); len(next.deployed) != 0 {
			t.Errorf("the next apply deployed %q", next.deployed)
		}
		return fmt.Sprintf("%d -> 0", first.code)
	}
}

// lostBehindTheLook lets the GETs of the run through, and the state is another
// for tofu's.
func lostBehindTheLook(answer func([]byte) foreigntest.Fault) func(*testing.T, *faultRig) string {
	return func(t *testing.T, r *faultRig) string {
		r.change()
		stored := len(r.host.Stored())
		r.host.Fault(foreigntest.Get, append(foreigntest.Times(2, foreigntest.Fault{}), foreigntest.Times(20, answer(r.state(t)))...)...)
		first := r.run("apply", nil)
		r.host.Calm()
		if first.code != tfhosts.ExitLostState || len(first.deployed) != 0 || len(r.host.Stored()) != stored {
			t.Fatalf("apply: code %d (%v), deployed %q; want 3 and none", first.code, first.err, first.deployed)
		}
		r.wantCode(t, 0, "apply")
		return "3 -> 0"
	}
}

// wrongPassword is another, empty state at a server that takes the password for
// a part of the name.
func wrongPassword(t *testing.T, r *faultRig) string {
	r.change()
	stored := len(r.host.Stored())
	r.setup.Backend.Username, r.setup.Backend.Password = "ops", "wrong"
	out := r.run("apply", nil)
	r.setup.Backend.Username, r.setup.Backend.Password = "", ""
	if out.code != tfhosts.ExitLostState || len(out.deployed) != 0 || len(r.host.Stored()) != stored {
		t.Fatalf("apply: code %d (%v), deployed %q; want 3 and none", out.code, out.err, out.deployed)
	}
	r.wantCode(t, 0, "apply")
	return "3 -> 0"
}
