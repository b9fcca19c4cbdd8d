package bootstrap

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/foreigntest"
	"fediversity.eu/tf-hosts/backend/relay"
)

// encryption is a TF_ENCRYPTION that refuses what is not encrypted.
func encryption(passphrase string) string {
	return fmt.Sprintf(`TF_ENCRYPTION=
key_provider "pbkdf2" "key" {
  passphrase = %q
  iterations = 200000
}
method "aes_gcm" "aes" {
  keys = key_provider.pbkdf2.key
}
state {
  method   = method.aes_gcm.aes
  enforced = true
}
plan {
  method   = method.aes_gcm.aes
  enforced = true
}`, passphrase)
}

const rightPassphrase = "correct-horse-battery-staple"

func wantEncrypted(t *testing.T, what string, body []byte) {
	t.Helper()
	if !gjson.GetBytes(body, "encrypted_data").Exists() || bytes.Contains(body, []byte("prod.app0")) {
		t.Fatalf("%s is not encrypted: %s", what, tail(string(body)))
	}
}

func wantBytes(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) || len(want) == 0 {
		t.Errorf("%s: %d bytes that differ from the %d wanted", what, len(got), len(want))
	}
}

func (r *faultRig) last(t *testing.T) []byte {
	t.Helper()
	all := r.host.Stored()
	if len(all) == 0 {
		t.Fatal("the server stored nothing")
	}
	return all[len(all)-1].Body
}

func (r *faultRig) read(t *testing.T, path ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{r.workDir()}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestFaultEncryptedState takes an encrypted state, which nobody but tofu can
// read or write, through bootstrap, faults, salvage, restore and destroy: it
// moves as the bytes that tofu made.
func TestFaultEncryptedState(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	for _, kind := range []string{ours, gitlab, nimbolus} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newFaultRig(t, kind, 1, true)
			r.environ = []string{encryption(rightPassphrase)}

			r.host.Fault(foreigntest.Post, foreigntest.Fault{DropAfter: true})
			r.boot = true
			out := r.wantCode(t, 0, "apply")
			r.boot = false
			if !strings.Contains(out.answer, `"prod.app0"`) {
				t.Errorf("no outputs: %s", out.answer)
			}
			marker := r.read(t, "terraform.tfstate.migrated")
			wantEncrypted(t, "the state of cycle 1", marker)
			wantBytes(t, "what was stored first", r.host.Stored()[0].Body, marker)
			lineage := gjson.GetBytes(marker, "lineage").Str

			steps := []struct {
				name string
				// once: with our server alone; it is the same for all.
				once bool
				run  func(*testing.T)
			}{
				{"steady", true, func(t *testing.T) {
					if out := r.wantCode(t, 0, "apply"); len(out.deployed) != 0 || !strings.Contains(out.answer, `"prod.app0"`) {
						t.Errorf("deployed %q, answer %s", out.deployed, out.answer)
					}
					if out := r.wantCode(t, 0, "state-list"); !strings.Contains(out.answer, "prod.app0") {
						t.Errorf("state-list = %q", out.answer)
					}
				}},
				{"POST answer lost", true, func(t *testing.T) {
					during(foreigntest.Post, codes{}, foreigntest.Fault{DropAfter: true}, foreigntest.Fault{Status: 502})(t, r)
				}},
				{"errored.tfstate", false, func(t *testing.T) {
					r.change()
					r.host.Fault(foreigntest.Post, foreigntest.Times(4, foreigntest.Fault{Status: http.StatusPreconditionFailed})...)
					out := r.wantCode(t, tfhosts.ExitSalvage, "apply")
					r.host.Calm()
					kept, err := filepath.Glob(filepath.Join(r.workDir(), "salvage", "*.tfstate"))
					if err != nil || len(kept) != 1 || len(out.deployed) != 1 {
						t.Fatalf("deployed %q, kept %q, %v", out.deployed, kept, err)
					}
					errored := r.read(t, "salvage", filepath.Base(kept[0]))
					wantEncrypted(t, "errored.tfstate", errored)
					if out := r.wantCode(t, 0, "apply"); len(out.deployed) != 0 {
						t.Errorf("the next apply deployed %q", out.deployed)
					}
					wantBytes(t, "what was salvaged", r.last(t), errored)
				}},
				{"journal", false, func(t *testing.T) {
					r.change()
					if code, out := r.process(t, "relay.post", func(o *walkOrder) { o.Verb = "apply" }); code != -1 {
						t.Fatalf("not killed: code %d\n%s", code, tail(out))
					}
					r.signalTofu(syscall.SIGKILL)
					entries, err := relay.ReadJournal(filepath.Join(r.workDir(), "journal"))
					if err != nil || len(entries) == 0 {
						t.Fatal(err)
					}
					journaled, err := os.ReadFile(entries[len(entries)-1].Path)
					if err != nil {
						t.Fatal(err)
					}
					r.reclaimed(t, "apply", 0)
					wantBytes(t, "what was salvaged", r.last(t), journaled)
				}},
				{"wrong passphrase", true, func(t *testing.T) { r.notDecrypted(t, encryption("not-the-passphrase-at-all")) }},
				{"no TF_ENCRYPTION", true, func(t *testing.T) { r.notDecrypted(t) }},
				{"went back", true, func(t *testing.T) {
					refused(tfhosts.ExitLostState, "went back", changed(map[string]any{"serial": -1}), 1)(t, r)
				}},
				{"lost and restored", true, func(t *testing.T) {
					before := r.state(t)
					r.host.Stop()
					if err := os.RemoveAll(filepath.Join(r.dir, "node-states")); err != nil {
						t.Fatal(err)
					}
					r.host.Start()
					r.wantCode(t, tfhosts.ExitLostState, "apply")
					if code, err := r.restore(RestoreOptions{}); code != 0 {
						t.Fatalf("state-restore: %d, %v", code, err)
					}
					wantBytes(t, "what was restored", r.state(t), before)
					if out := r.wantCode(t, 0, "apply"); len(out.deployed) != 0 {
						t.Errorf("deployed %q", out.deployed)
					}
				}},
				{"destroy", false, func(t *testing.T) {
					before := r.state(t)
					if code, out := r.process(t, "detach.ledger", func(o *walkOrder) { o.Verb = "destroy" }); code != -1 {
						t.Fatalf("not killed: code %d\n%s", code, tail(out))
					}
					wantBytes(t, "what was detached", r.read(t, "terraform.tfstate"), before)
					r.reclaimed(t, "destroy", 0)
					local := r.read(t, "terraform.tfstate")
					wantEncrypted(t, "the detached state", local)
					if got := gjson.GetBytes(local, "lineage").Str; got != lineage {
						t.Errorf("lineage = %q, want %q", got, lineage)
					}
					wantBytes(t, "the superseded copy", r.state(t), before)
				}},
			}
			for _, s := range steps {
				if s.once && kind != ours {
					continue
				}
				if !t.Run(s.name, func(t *testing.T) {
					s.run(t)
					if !t.Failed() {
						r.whole(t)
					}
				}) {
					return
				}
			}
		})
	}
}

// notDecrypted applies with a TF_ENCRYPTION that is not the state's: an error
// that names it, nothing stored or deployed, and the state as good as before.
func (r *faultRig) notDecrypted(t *testing.T, environ ...string) {
	t.Helper()
	before, right := r.state(t), r.environ
	r.environ = environ
	out := r.run("apply", nil)
	r.environ = right
	if out.code != tfhosts.ExitFailed || len(out.deployed) != 0 {
		t.Fatalf("apply: code %d (%v), deployed %q, want 1 and none", out.code, out.err, out.deployed)
	}
	if hint := hintOf(out.err); !strings.Contains(hint, "TF_ENCRYPTION") {
		t.Errorf("the error %q with the hint %q does not name TF_ENCRYPTION\n%s", out.err, hint, tail(out.story))
	}
	wantBytes(t, "the state after it", r.state(t), before)
	if out := r.wantCode(t, 0, "apply"); len(out.deployed) != 0 {
		t.Errorf("with the right passphrase: deployed %q", out.deployed)
	}
}
