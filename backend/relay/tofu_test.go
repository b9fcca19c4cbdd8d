package relay_test

import (
	"bytes"
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/relay"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
)

// findTofu finds a real tofu; without one the test is skipped, except in CI.
func findTofu(t testing.TB) string {
	t.Helper()
	if p := os.Getenv("TF_HOSTS_TOFU"); p != "" {
		return p
	}
	if p, err := exec.LookPath("tofu"); err == nil {
		return p
	}
	if cache, err := os.UserCacheDir(); err == nil {
		found, err := filepath.Glob(filepath.Join(cache, "tf-hosts", "tofu", "tofu-*"))
		if err == nil && len(found) > 0 {
			return found[len(found)-1]
		}
	}
	if os.Getenv("CI") != "" {
		t.Fatal("no tofu: set TF_HOSTS_TOFU")
	}
	t.Skip("no tofu: set TF_HOSTS_TOFU")
	return ""
}

type tofu struct {
	t   testing.TB
	bin string
	dir string
	env []string
}

func newTofu(t testing.TB, env []string, main string) *tofu {
	t.Helper()
	tf := &tofu{t: t, bin: findTofu(t), dir: t.TempDir()}
	tf.env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + tf.dir, "TF_CLI_CONFIG_FILE=/dev/null", "CHECKPOINT_DISABLE=1", "TF_IN_AUTOMATION=1",
	}, env...)
	tf.write(main)
	return tf
}

func (tf *tofu) write(main string) {
	tf.t.Helper()
	if err := os.WriteFile(filepath.Join(tf.dir, "main.tf"), []byte(main), 0o600); err != nil {
		tf.t.Fatal(err)
	}
}

func (tf *tofu) run(want int, args ...string) string {
	tf.t.Helper()
	cmd := exec.Command(tf.bin, args...)
	cmd.Dir, cmd.Env = tf.dir, tf.env
	out, _ := cmd.CombinedOutput()
	if got := cmd.ProcessState.ExitCode(); got != want {
		tf.t.Fatalf("tofu %s = %d, want %d\n%s", strings.Join(args, " "), got, want, out)
	}
	return string(out)
}

const graph = `
terraform {
  backend "http" {
  }
}
resource "terraform_data" "one" {
  input = "VALUE"
}
`

func newServer(t testing.TB) (*httptest.Server, *bytes.Buffer) {
	t.Helper()
	st, err := store.OpenFiles(t.TempDir(), store.FilesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	var log bytes.Buffer
	h, err := server.New(server.Config{
		Store: st, Users: []server.User{{Name: "ops", Password: "pw-of-backend"}},
		Logger: slog.New(slog.NewTextHandler(&syncWriter{w: &log}, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv, &log
}

func newClient(t testing.TB, address string) *client.Client {
	t.Helper()
	c, err := client.New(client.Config{Address: address, Username: "ops", Password: "pw-of-backend", Timeout: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func startRelay(t testing.TB, cfg relay.Config) (*relay.Relay, relay.Endpoint) {
	t.Helper()
	if cfg.JournalDir == "" {
		cfg.JournalDir = t.TempDir()
	}
	r, err := relay.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ep, err := r.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := r.Close(ctx); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	return r, ep
}

func TestTofuThroughRelay(t *testing.T) {
	srv, log := newServer(t)
	up := newClient(t, srv.URL+"/state/project1/example")
	journal := t.TempDir()
	r, ep := startRelay(t, relay.Config{
		Upstream: up, JournalDir: journal,
		RunInfo: relay.RunInfo{RunID: "run1", MachineID: "m", BootID: "b", PID: 7, StartTime: 9},
	})
	tf := newTofu(t, ep.Env(), strings.ReplaceAll(graph, "VALUE", "secret-of-state-1"))
	tf.run(0, "init", "-input=false", "-no-color")
	tf.run(2, "plan", "-input=false", "-detailed-exitcode")
	tf.run(0, "apply", "-input=false", "-auto-approve")
	tf.run(0, "plan", "-input=false", "-detailed-exitcode")
	tf.write(strings.ReplaceAll(graph, "VALUE", "secret-of-state-2"))
	tf.run(0, "apply", "-input=false", "-auto-approve")
	if got := strings.TrimSpace(tf.run(0, "state", "list")); got != "terraform_data.one" {
		t.Errorf("tofu state list = %q, want terraform_data.one", got)
	}
	stored, err := up.Get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if last, ok := r.LastState(); !ok || !bytes.Equal(last, stored) {
		t.Errorf("LastState() differs from what the server has")
	}
	if _, held := r.Held(); held {
		t.Error("Held() after the applies = true, want false")
	}
	if err := r.FirstError(); err != nil {
		t.Errorf("FirstError() = %v, want nil", err)
	}
	entries, err := relay.ReadJournal(journal)
	if err != nil || len(entries) != r.Stats().Posts || len(entries) < 2 {
		t.Fatalf("journal has %d entries, %v; want %d, one for each POST", len(entries), err, r.Stats().Posts)
	}
	if b, err := os.ReadFile(entries[len(entries)-1].Path); err != nil || !bytes.Equal(b, stored) {
		t.Errorf("the last journal entry differs from what the server has (%v)", err)
	}

	// A foreign lock: tofu fails, and the relay knows the holder.
	foreign := api.LockInfo{ID: "11111111-2222-3333-4444-555555555555", Who: "eve@far", Operation: "apply", Created: time.Now().UTC()}
	if err := up.Lock(t.Context(), foreign); err != nil {
		t.Fatal(err)
	}
	tf.run(1, "plan", "-input=false")
	if holder, ok := r.LockHolder(); !ok || holder.Who != "eve@far" {
		t.Errorf("LockHolder() = %q, %v, want eve@far", holder.Who, ok)
	}
	if got := api.ExitCode(r.FirstError()); got != 4 {
		t.Errorf("ExitCode(FirstError()) = %d, want 4", got)
	}
	tf.run(1, "force-unlock", "-force", "00000000-0000-0000-0000-000000000000")
	tf.run(0, "force-unlock", "-force", foreign.ID)
	tf.run(0, "plan", "-input=false")

	if text := log.String(); strings.Contains(text, "secret-of-state") || strings.Contains(text, "pw-of-backend") {
		t.Error("the server's log holds a state or a password")
	}
}

func TestTofuWithWrongToken(t *testing.T) {
	srv, _ := newServer(t)
	_, ep := startRelay(t, relay.Config{Upstream: newClient(t, srv.URL+"/state/project1/example")})
	ep.Password = "guessed"
	tf := newTofu(t, ep.Env(), graph)
	if out := tf.run(1, "init", "-input=false", "-no-color"); !strings.Contains(out, "auth") {
		t.Errorf("tofu init with a wrong token says %q, want something about auth", out)
	}
}

// The server answers 502 for a while and the connection of a POST breaks after
// it was stored: tofu sees none of it.
func TestTofuWithBrokenBackend(t *testing.T) {
	srv, _ := newServer(t)
	var faults faultPlan
	front := httptest.NewServer(faults.wrap(srv.Config.Handler))
	t.Cleanup(front.Close)
	up := newClient(t, front.URL+"/state/project1/example")
	r, ep := startRelay(t, relay.Config{Upstream: up, RetryWaitMin: 10 * time.Millisecond, RetryWaitMax: 50 * time.Millisecond})
	tf := newTofu(t, ep.Env(), graph)
	tf.run(0, "init", "-input=false", "-no-color")
	faults.set(http.MethodPost, dropAfter, 502, 502)
	faults.set("LOCK", dropAfter)
	faults.set("UNLOCK", dropAfter, 502)
	tf.run(0, "apply", "-input=false", "-auto-approve")
	if n := faults.left(); n != 0 {
		t.Fatalf("%d faults were not reached", n)
	}
	if s := r.Stats(); s.Retries < 6 || s.Posts < 1 {
		t.Errorf("Stats() = %+v, want 6 retries at least", s)
	}
	tf.run(0, "plan", "-input=false", "-detailed-exitcode")
}
