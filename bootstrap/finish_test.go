package bootstrap

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/foreigntest"
	"fediversity.eu/tf-hosts/internal/tofu"
)

func TestFinishKeepsEveryFailure(t *testing.T) {
	ended := tfhosts.WithExit(tfhosts.ExitFailed, "", &endError{"apply", 1})
	rows := []struct {
		name    string
		failure error
		code    int
		says    []string
	}{
		{"a provisioner failed", ended, tfhosts.ExitNodesFailed, []string{"tofu apply ended with code 1", "1 of 1 nodes failed"}},
		{"the socket of the deploys did not close, too", errors.Join(errors.New("closing the socket"), ended), tfhosts.ExitFailed, []string{"closing the socket", "tofu apply", "1 of 1"}},
		{"the output could not be followed", errors.New("following the output"), tfhosts.ExitFailed, []string{"following the output", "1 of 1"}},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			verb, _ := tfhosts.LookupVerb("apply")
			s := &session{
				Config:  &Config{Setup: &tfhosts.Setup{}, Verb: verb, Answer: io.Discard, Story: io.Discard},
				args:    &arguments{},
				workDir: t.TempDir(), results: &verdicts{byNode: map[string]tfhosts.Verdict{}}, ledger: &Ledger{},
			}
			s.results.add(tfhosts.Verdict{Node: "prod.app0", Status: tfhosts.CopyFailed})
			code, err := s.finish(t.Context(), []tofu.NodeChange{{Name: "prod.app0", Deploys: true}}, row.failure)
			if code != row.code {
				t.Errorf("code %d, want %d", code, row.code)
			}
			for _, word := range row.says {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("%q does not say %q", err, word)
				}
			}
		})
	}
}

// The backend's lock is held by another, and the operator does not want to wait.
func TestAnInterruptWhileAnotherHoldsTheLock(t *testing.T) {
	r := newFaultRig(t, ours, 1, false)
	r.wantCode(t, 0, "apply")
	c := r.client()
	info := client.NewLockInfo("apply", "")
	if err := c.Lock(t.Context(), info); err != nil {
		t.Fatal(err)
	}
	r.change()
	interrupt := make(chan struct{})
	// It comes when tofu, which was told who holds it, asks again.
	r.host.Fault(foreigntest.Lock, foreigntest.Fault{}, foreigntest.Fault{After: func() { close(interrupt) }})
	begin := time.Now()
	out := r.run("apply", interrupt, "-lock-timeout=5m")
	if out.code != tfhosts.ExitLocked || !strings.Contains(out.err.Error(), info.ID) || !strings.Contains(out.err.Error(), "interrupted") {
		t.Errorf("code %d (%v), want 4 with the holder and the interrupt", out.code, out.err)
	}
	if time.Since(begin) > 2*time.Minute {
		t.Errorf("the interrupt did not end the wait: %s", time.Since(begin))
	}
}
