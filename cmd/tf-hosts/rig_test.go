package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// asMain makes the test binary the program itself, also where the provisioner
// starts it.
const asMain = "TF_HOSTS_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asMain) == "1" {
		main()
		return
	}
	testscript.Main(m, map[string]func(){"tf-hosts": main})
}

// rig is a deployer with a state server, and hosts where the test has some.
type rig struct {
	t       testing.TB
	dir     string
	fleet   *fleettest.Fleet
	address string
	nodes   map[string]map[string]any
	runner  map[string]any
	// more is the rest of the setup file, over what writeSetup writes by itself.
	more    map[string]any
	environ []string
	server  *httptest.Server
}

const (
	testUser     = "fleet"
	testPassword = "a-password-that-must-not-show"
)

func newRig(t testing.TB, fleet *fleettest.Fleet) *rig {
	t.Helper()
	dir := t.TempDir()
	files, err := store.OpenFiles(filepath.Join(dir, "states"), store.FilesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := files.Close(); err != nil {
			t.Error(err)
		}
	})
	srv, err := server.New(server.Config{Store: files, Users: []server.User{{Name: testUser, Password: testPassword}}})
	if err != nil {
		t.Fatal(err)
	}
	hs := httptest.NewServer(srv)
	t.Cleanup(hs.Close)
	r := &rig{
		t: t, dir: dir, fleet: fleet, address: hs.URL + "/state/test/fleet",
		nodes: map[string]map[string]any{}, runner: map[string]any{}, server: hs,
	}
	if err := os.WriteFile(filepath.Join(dir, "password"), []byte(testPassword+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.environ = append(fleettest.NixEnv(), asMain+"=1", "HOME="+dir, "XDG_RUNTIME_DIR=", "SSH_AUTH_SOCK=",
		"BOOTSTRAP_STATE_DIR="+filepath.Join(dir, "work"), "TF_HOSTS_SETUP="+filepath.Join(dir, "tf-hosts.json"))
	cache, err := fleettest.CacheDir()
	if err != nil {
		t.Fatal(err)
	}
	r.environ = append(r.environ, "TF_HOSTS_CACHE="+cache)
	return r
}

// system writes the system of a node in the given version and makes it the
// node's configuration.
func (r *rig) system(node string, spec fleettest.ClosureSpec) *fleettest.Closure {
	r.t.Helper()
	spec.Name = strings.ReplaceAll(node, ".", "-")
	c, err := fleettest.NewClosure(filepath.Join(r.dir, "systems", spec.Name), spec)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.Instantiate(context.Background()); err != nil {
		r.t.Fatal(err)
	}
	if r.nodes[node] == nil {
		r.nodes[node] = map[string]any{}
	}
	r.nodes[node]["nixos_conf"] = "./systems/" + spec.Name + "/" + filepath.Base(c.File)
	return c
}

// onHost makes a node the given host.
func (r *rig) onHost(node string, h *fleettest.Host) {
	if r.nodes[node] == nil {
		r.nodes[node] = map[string]any{}
	}
	r.nodes[node]["host"] = h.Addr()
	r.nodes[node]["host_key"] = h.HostKey()
	r.nodes[node]["key_file"] = r.fleet.KeyFile()
}

func (r *rig) writeSetup() {
	r.t.Helper()
	setup := map[string]any{
		"version": 1, "nodes": r.nodes, "runner": r.runner,
		"http_backend": map[string]any{"address": r.address, "username": testUser, "password_file": "password"},
	}
	maps.Copy(setup, r.more)
	b, err := json.MarshalIndent(setup, "", "  ")
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.dir, "tf-hosts.json"), b, 0o600); err != nil {
		r.t.Fatal(err)
	}
}

// result is what a run of the program left.
type result struct {
	code           int
	stdout, stderr string
}

func (r *rig) command(args ...string) (*exec.Cmd, *bytes.Buffer, *bytes.Buffer) {
	r.t.Helper()
	r.writeSetup()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Dir = r.dir
	cmd.Env = append(os.Environ(), r.environ...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	return cmd, &stdout, &stderr
}

// tfHosts runs the program to its end.
func (r *rig) tfHosts(args ...string) result {
	r.t.Helper()
	cmd, stdout, stderr := r.command(args...)
	if err := cmd.Run(); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			r.t.Fatal(err)
		}
	}
	res := result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
	r.checkSecrets(res)
	return res
}

// want runs the program and demands an exit code.
func (r *rig) want(code int, args ...string) result {
	r.t.Helper()
	res := r.tfHosts(args...)
	if res.code != code {
		r.t.Fatalf("tf-hosts %q: exit %d, want %d\nstdout:\n%s\nstderr:\n%s", args, res.code, code, res.stdout, res.stderr)
	}
	return res
}

func (r *rig) checkSecrets(res result) {
	r.t.Helper()
	for _, text := range []string{res.stdout, res.stderr} {
		if strings.Contains(text, testPassword) {
			r.t.Error("the backend's password shows in the output")
		}
	}
}

func (r *rig) workDir() string { return bootstrap.WorkDir(filepath.Join(r.dir, "work"), r.address) }

// record is verdict.json.
func (r *rig) record() *bootstrap.Record {
	r.t.Helper()
	rec, err := bootstrap.ReadRecord(r.workDir())
	if err != nil {
		r.t.Fatal(err)
	}
	return rec
}

// wantVerdicts demands the verdicts of the last run, and no others.
func (r *rig) wantVerdicts(want map[string]tfhosts.Status) {
	r.t.Helper()
	rec := r.record()
	got := map[string]tfhosts.Status{}
	for name, n := range rec.Nodes {
		if n.Run == rec.Run {
			got[name] = n.Status
		}
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		for name, n := range rec.Nodes {
			r.t.Logf("%s: %s, log %q", name, n.Verdict, n.Log)
		}
		r.t.Fatalf("verdicts of the last run = %v, want %v", got, want)
	}
}

// wantRuns demands that a host runs, boots and serves a system.
func (r *rig) wantRuns(h *fleettest.Host, c *fleettest.Closure, demo string) {
	r.t.Helper()
	got, err := h.System(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	if got.Running != c.Out || got.Profile != c.Out || got.Default != c.Out || got.Demo != demo {
		r.t.Fatalf("host %q: %+v, want %s everywhere and the service at %q", h.Name, got, c.Out, demo)
	}
}

func (r *rig) sshCount(h *fleettest.Host) fleettest.SSHCount {
	r.t.Helper()
	n, err := h.SSHCount(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	return n
}

// lockFree demands that nobody holds the state's lock.
func (r *rig) lockFree() {
	r.t.Helper()
	if _, err := os.Stat(filepath.Join(r.dir, "states")); err != nil {
		r.t.Fatal(err)
	}
	res := r.want(0, "plan", "-lock-timeout=0s")
	if strings.Contains(res.stderr, "locked") {
		r.t.Fatalf("the state is locked:\n%s", res.stderr)
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s", limit, what)
		}
		<-time.After(50 * time.Millisecond)
	}
}

// unusedPort is a loopback port on which nothing listens.
func unusedPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// interruptAfter sends a signal when the program has said a text.
func interruptAfter(t testing.TB, cmd *exec.Cmd, said func() string, text string, sig syscall.Signal) {
	t.Helper()
	eventually(t, 2*time.Minute, fmt.Sprintf("the program to say %q", text), func() bool { return strings.Contains(said(), text) })
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) writeFile(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}
