package runner_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/runner"
)

// bed is a runner with one host of a fleet.
type bed struct {
	t     testing.TB
	fleet *fleettest.Fleet
	host  *fleettest.Host
	cfg   runner.Config

	mu     sync.Mutex
	events []tfhosts.Event
}

func newBed(t testing.TB, host fleettest.HostConfig) *bed {
	t.Helper()
	setNixEnv(t)
	return bootBed(t, host)
}

// setNixEnv is for a test whose parallel subtests boot their own beds.
func setNixEnv(t testing.TB) {
	t.Helper()
	for _, kv := range fleettest.NixEnv() {
		k, v, _ := strings.Cut(kv, "=")
		t.Setenv(k, v)
	}
}

func bootBed(t testing.TB, host fleettest.HostConfig) *bed {
	t.Helper()
	fleettest.Require(t)
	f := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{host}})
	b := &bed{t: t, fleet: f, host: f.Hosts[0]}
	pool := hostconn.NewPool(hostconn.Config{KnownHosts: filepath.Join(t.TempDir(), "known_hosts"), DeadAfter: 4 * time.Second})
	t.Cleanup(func() { pool.Close() })
	b.cfg = runner.Config{
		Dial:  pool.Dial,
		Nix:   nix.New(nix.Config{RootsDir: filepath.Join(t.TempDir(), "roots")}),
		RunID: "test",
		Events: func(e tfhosts.Event) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events = append(b.events, e)
		},
	}
	return b
}

// closure writes and builds a system.
func (b *bed) closure(spec fleettest.ClosureSpec) *fleettest.Closure {
	b.t.Helper()
	c, err := fleettest.NewClosure(filepath.Join(b.t.TempDir(), "c"), spec)
	if err == nil {
		err = c.Build(b.t.Context())
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return c
}

func (b *bed) node(conf string) tfhosts.Node {
	return tfhosts.Node{
		NixosConf: conf, Username: "root", Host: b.host.Addr(),
		KeyFile: b.fleet.KeyFile(), HostKey: b.host.HostKey(), SSHOpts: "[]",
	}
}

func (b *bed) deploy(req runner.Request) tfhosts.Verdict {
	b.t.Helper()
	if req.Name == "" {
		req.Name = "prod.h1"
	}
	if req.Node.Host == "" {
		req.Node = b.node("")
	}
	v := runner.New(b.cfg).Deploy(b.t.Context(), req)
	b.t.Logf("%s\n  hint: %s\n  units %v, seconds %v, bytes %d\n  log: %s", v, v.Hint, v.FailedUnits, v.Seconds, v.BytesCopied, strings.Join(v.Log, "\n       "))
	return v
}

// want compares the verdict's status and what the host runs.
func (b *bed) want(v tfhosts.Verdict, status tfhosts.Status, running, profile, bootDefault string) {
	b.t.Helper()
	if v.Status != status {
		b.t.Errorf("status = %s, want %s", v.Status, status)
	}
	if v.Status.ExitCode() != 0 && (v.Sentence == "" || v.Hint == "") {
		b.t.Errorf("a failed verdict needs a sentence and a hint: %+v", v)
	}
	s := b.system()
	got := fmt.Sprintf("running %s, profile %s, default %s", s.Running, s.Profile, s.Default)
	if want := fmt.Sprintf("running %s, profile %s, default %s", running, profile, bootDefault); got != want {
		b.t.Errorf("the host has\n %s, want\n %s", got, want)
	}
	if out, err := b.host.Shell(b.t.Context(), "ls /var/lib/tf-hosts/runs 2>/dev/null || true; systemctl list-units --plain --no-legend 'tf-hosts-prod*'"); err != nil || out != "" {
		b.t.Errorf("the deploy left behind: %s, %v", out, err)
	}
}

func (b *bed) system() fleettest.System {
	b.t.Helper()
	s, err := b.host.System(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b *bed) accepted() int {
	b.t.Helper()
	n, err := b.host.SSHCount(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return n.Accepted
}

func (b *bed) shell(script string) string {
	b.t.Helper()
	out, err := b.host.Shell(b.t.Context(), script)
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// forget takes the host back to the system old, and the closure of out from it.
func (b *bed) forget(old, out string) {
	b.t.Helper()
	b.shell(`nix-env -p /nix/var/nix/profiles/system --set ` + old + `
		[ "$(readlink -f /run/current-system)" = ` + old + ` ] || ` + old + `/bin/switch-to-configuration switch
		nix-env -p /nix/var/nix/profiles/system --delete-generations old
		rm -rf /nix/var/nix/gcroots/tf-hosts
		nix-store --delete $(nix-store --query --requisites ` + out + `) 2>/dev/null || true
		! nix-store --check-validity ` + out + ` 2>/dev/null`)
}

// ops are the operations of the events so far, each once in a row.
func (b *bed) ops() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ops []string
	for _, e := range b.events {
		if e.Kind == tfhosts.EventStep {
			ops = append(ops, e.Op)
		}
	}
	b.events = nil
	return ops
}
