package main

import (
	"bytes"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// watched is a stderr that a test reads while the program writes it.
type watched struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(b)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

// TestInterruptedDeploy: a Ctrl-C while two nodes activate. What runs is ended
// and recorded, the lock is released, and the next apply goes on.
func TestInterruptedDeploy(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	r := newRig(t, fleet)
	slow := map[string]fleettest.Behaviour{"activate": {SleepSeconds: 4}}
	r.onHost("prod.app1", fleet.Hosts[0])
	r.onHost("prod.app2", fleet.Hosts[1])
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1", Behaviour: slow})
	two := r.system("prod.app2", fleettest.ClosureSpec{Version: "1", Behaviour: slow})

	version := "1"
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			cmd, stdout, _ := r.command("apply")
			stderr := &watched{}
			cmd.Stderr = stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			eventually(t, time.Minute, "both activations", func() bool {
				return strings.Contains(stderr.String(), "prod.app1: activate.wait") && strings.Contains(stderr.String(), "prod.app2: activate.wait")
			})
			for range 2 { // the second one changes nothing
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				eventually(t, 10*time.Second, "the program to answer the signal", func() bool {
					return strings.Contains(stderr.String(), "running activations are finished")
				})
			}
			err := cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != tfhosts.ExitInterrupted {
				t.Fatalf("exit %d (%v), want 130\n%s\n%s", code, err, stdout, stderr)
			}
			r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Deployed, "prod.app2": tfhosts.Deployed})
			r.wantRuns(fleet.Hosts[0], one, version)
			r.wantRuns(fleet.Hosts[1], two, version)

			// Nobody holds the lock, and the tainted nodes are planned again.
			r.want(2, "plan", "-detailed-exitcode", "-lock-timeout=0s")
			r.want(0, "apply", "-lock-timeout=0s")
			r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Unchanged, "prod.app2": tfhosts.Unchanged})
			r.want(0, "plan", "-detailed-exitcode")

			version = "after-" + sigName(sig)
			one = r.system("prod.app1", fleettest.ClosureSpec{Version: version, Behaviour: slow})
			two = r.system("prod.app2", fleettest.ClosureSpec{Version: version, Behaviour: slow})
		})
	}
}

// TestInterruptBeforeTheActivation: a deploy that has not begun to activate is
// dropped, and its host is as it was.
func TestInterruptBeforeTheActivation(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	h := fleet.Hosts[0]
	r := newRig(t, fleet)
	r.onHost("prod.app1", h)
	c := r.system("prod.app1", fleettest.ClosureSpec{Version: "1", PayloadPaths: 1, PayloadBytes: 64 << 20})
	if err := c.Build(t.Context()); err != nil {
		t.Fatal(err)
	}
	before, err := h.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := h.SetRate(t.Context(), 20_000_000); err != nil { // the copy takes half a minute
		t.Fatal(err)
	}
	cmd, stdout, _ := r.command("apply")
	stderr := &watched{}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	interruptAfter(t, cmd, stderr.String, "prod.app1: copy", syscall.SIGINT)
	werr := cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != tfhosts.ExitInterrupted {
		t.Fatalf("exit %d (%v), want 130\n%s\n%s", code, werr, stdout, stderr)
	}
	r.wantVerdicts(map[string]tfhosts.Status{"prod.app1": tfhosts.Dropped})
	after, err := h.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if before != after {
		t.Errorf("the host changed: %+v, was %+v", after, before)
	}
	if err := h.SetRate(t.Context(), 1_000_000_000); err != nil {
		t.Fatal(err)
	}
	r.want(0, "apply")
	r.wantRuns(h, c, "1")
}

func sigName(sig syscall.Signal) string {
	return map[syscall.Signal]string{syscall.SIGINT: "int", syscall.SIGTERM: "term", syscall.SIGHUP: "hup"}[sig]
}
