package client_test

import (
	"net/http"
	"testing"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/foreigntest"
)

// A server that gives no lock twice refuses the repetition of a request whose
// answer was lost. A client that repeats knows its own lock; one that does not,
// and one that lost no answer, believes no such refusal.
func TestOwnLockAfterALostAnswer(t *testing.T) {
	lost := foreigntest.Fault{DropAfter: true}
	for name, h := range map[string]http.Handler{"gitlab": foreigntest.NewGitLab("ann"), "nimbolus": foreigntest.NewNimbolus()} {
		t.Run(name, func(t *testing.T) {
			host := foreigntest.NewHost(t, foreigntest.Keep(h))
			host.Start()
			cfg := client.Config{Address: host.URL() + "/state", RetryMax: 2}
			if name == "gitlab" {
				cfg.LockAddress, cfg.LockMethod = cfg.Address+"/lock", http.MethodPost
				cfg.UnlockAddress, cfg.UnlockMethod = cfg.Address+"/lock", http.MethodDelete
			}
			c := newClient(t, cfg)
			info := client.NewLockInfo("test", "")
			host.Fault(foreigntest.Lock, lost)
			if err := c.Lock(t.Context(), info); err != nil {
				t.Errorf("Lock() after a lost answer = %v, want nil", err)
			}
			host.Fault(foreigntest.Unlock, lost)
			if err := c.Unlock(t.Context(), info); err != nil {
				t.Errorf("Unlock() after a lost answer = %v, want nil", err)
			}
			if err := c.Unlock(t.Context(), info); err == nil {
				t.Error("Unlock() of a lock that is not held = nil")
			}
			host.Fault(foreigntest.Lock, lost)
			if err := c.Once().Lock(t.Context(), info); err == nil {
				t.Error("Once().Lock() with a lost answer = nil, want an error that says so")
			}
			echo := foreigntest.Fault{Answer: func(body []byte) (int, string) { return http.StatusConflict, string(body) }}
			host.Fault(foreigntest.Lock, echo)
			if err := c.Lock(t.Context(), info); api.ExitCode(err) != 4 {
				t.Errorf("Lock() at a server that echoes = %v, want a refusal", err)
			}
		})
	}
}
