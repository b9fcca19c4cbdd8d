package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

const (
	statesDir   = "/var/lib/tf-hosts-states"
	usersFile   = "/etc/tf-hosts-users.json"
	backendUnit = "tf-hosts-backend.service"
	stateNode   = "prod.state"
	statePort   = 8080
	statePath   = "/state/test/fleet"
)

// stage is what every scenario needs: the program as it runs on a host.
type stage struct{ binary string }

// buildStage builds the program for the hosts, which have no C library of ours.
func buildStage(t *testing.T) stage {
	t.Helper()
	fleettest.Require(t)
	out := filepath.Join(t.TempDir(), "tf-hosts")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the program: %v\n%s", err, text)
	}
	return stage{out}
}

// serveUnit runs "tf-hosts backend serve" of the system that holds the unit.
func serveUnit(before, args string) string {
	return "[Service]\nType=exec\nStateDirectory=tf-hosts-states\nStateDirectoryMode=0700\nRestart=on-failure\n" +
		"ExecStart=/bin/sh -c '" + before + "exec @toplevel@/bin/tf-hosts backend serve --users " + usersFile + " " + args + "'\n"
}

// withUsers gives a host the credentials of its state server, as secrets come
// to a NixOS host: beside the system, never in it.
func withUsers(t *testing.T, h *fleettest.Host) {
	t.Helper()
	b, err := json.Marshal([]map[string]string{{"name": testUser, "password": testPassword}})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.WriteFile(t.Context(), usersFile, string(b), 0o600); err != nil {
		t.Fatal(err)
	}
}

// selfRig is a fleet whose node prod.state serves the state of the graph.
type selfRig struct {
	*rig
	stage stage
	state *fleettest.Host
	apps  []*fleettest.Host
	// listen is where the node's server listens, before the time in seconds that
	// it stays away after a start, switching what its switch does besides.
	listen    string
	before    int
	switching map[string]fleettest.Behaviour
}

// newSelfRig takes the first of the hosts for the backend; the others are
// prod.app1 and so on.
func newSelfRig(t *testing.T, st stage, fleet *fleettest.Fleet, hosts []*fleettest.Host) *selfRig {
	t.Helper()
	s := &selfRig{rig: newRig(t, fleet), stage: st, state: hosts[0], apps: hosts[1:], listen: fmt.Sprintf("0.0.0.0:%d", statePort)}
	withUsers(t, s.state)
	s.onHost(stateNode, s.state)
	for i, h := range s.apps {
		s.onHost(fmt.Sprintf("prod.app%d", i+1), h)
	}
	s.address = fmt.Sprintf("http://%s:%d%s", s.state.Addr(), statePort, statePath)
	s.pin(true)
	return s
}

func (s *selfRig) pin(pinned bool) {
	s.more = map[string]any{
		"self_backend": map[string]any{"node": stateNode, "port": statePort, "path": statePath},
		"http_backend": map[string]any{
			"address": s.address, "pinned": pinned, "username": testUser, "password_file": "password",
			"retry_max": 0,
		}, // a refused connection stays refused: the tests need no second try
	}
}

// version makes every node's system the given version.
func (s *selfRig) version(version string) {
	s.t.Helper()
	s.stateVersion(version)
	for i := range s.apps {
		s.system(fmt.Sprintf("prod.app%d", i+1), fleettest.ClosureSpec{Version: version})
	}
}

func (s *selfRig) stateVersion(version string) {
	s.t.Helper()
	before := ""
	if s.before > 0 {
		before = fmt.Sprintf("sleep %d; ", s.before)
	}
	s.system(stateNode, fleettest.ClosureSpec{
		Version: version, Files: map[string]string{"bin/tf-hosts": s.stage.binary}, Behaviour: s.switching,
		Units: map[string]string{backendUnit: serveUnit(before, "--dir "+statesDir+" --listen "+s.listen)},
	})
}

// served is the current state on the backend's disk, without asking its server.
func (s *selfRig) served() gjson.Result {
	s.t.Helper()
	text, err := s.state.Shell(s.t.Context(), `cd `+statesDir+`/test/fleet; cat "versions/$(sed 's/.*"file":"\([^"]*\)".*/\1/' head)"`)
	if err != nil {
		s.t.Fatal(err)
	}
	return gjson.Parse(text)
}

// serials are those of the versions that the backend was given, in order.
func (s *selfRig) serials() []int {
	s.t.Helper()
	text, err := s.state.Exec(s.t.Context(), "ls", statesDir+"/test/fleet/versions")
	if err != nil {
		s.t.Fatal(err)
	}
	var all []int
	for _, name := range strings.Fields(text) {
		n, err := strconv.Atoi(strings.TrimLeft(strings.SplitN(name, "-", 2)[0], "0"))
		if err != nil {
			s.t.Fatal(err)
		}
		all = append(all, n)
	}
	slices.Sort(all)
	return all
}

// wantNoGap demands that each serial follows the one before it.
func (s *selfRig) wantNoGap() {
	s.t.Helper()
	all := s.serials()
	for i := 1; i < len(all); i++ {
		if all[i] != all[i-1]+1 {
			s.t.Errorf("serials on the backend = %v, want no gap and none twice", all)
			return
		}
	}
}

// with is the rig with more variables in its environment.
func (r *rig) with(environ ...string) *rig {
	c := *r
	c.environ = append(slices.Clone(r.environ), environ...)
	return &c
}

// elsewhere is the rig of a second machine: the same setup, an empty working dir.
func (r *rig) elsewhere(name string) *rig {
	return r.with("BOOTSTRAP_STATE_DIR=" + filepath.Join(r.dir, name))
}

// folder is the working dir of the rig, wherever its environment has it.
func (r *rig) folder() string {
	r.t.Helper()
	dir := ""
	for _, kv := range r.environ {
		if v, ok := strings.CutPrefix(kv, "BOOTSTRAP_STATE_DIR="); ok {
			dir = v
		}
	}
	return bootstrap.WorkDir(dir, r.address)
}

func (r *rig) has(name string) bool {
	_, err := os.Stat(filepath.Join(r.folder(), name))
	return err == nil
}

// stateFile is a state in the working dir.
func (r *rig) stateFile(name string) gjson.Result {
	r.t.Helper()
	b, err := os.ReadFile(filepath.Join(r.folder(), name))
	if err != nil {
		r.t.Fatal(err)
	}
	return gjson.ParseBytes(b)
}

// start starts the program; its stderr grows while it runs.
func (r *rig) start(args ...string) (*exec.Cmd, *watched) {
	r.t.Helper()
	cmd, _, _ := r.command(args...)
	stderr := &watched{}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	return cmd, stderr
}

// wantExit waits for the end of a program and demands its exit code.
func wantExit(t *testing.T, code int, cmd *exec.Cmd, stderr *watched) {
	t.Helper()
	err := cmd.Wait()
	if got := cmd.ProcessState.ExitCode(); got != code {
		t.Fatalf("%q: exit %d (%v), want %d\n%s", cmd.Args, got, err, code, stderr)
	}
}

// client talks to the backend as an operator's curl would.
func (r *rig) client() *client.Client {
	r.t.Helper()
	c, err := client.New(client.Config{Address: r.address, Username: testUser, Password: testPassword})
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// backendState is what the backend answers; not existing is an empty result.
func (r *rig) backendState() gjson.Result {
	r.t.Helper()
	c := r.client()
	defer c.Close()
	body, err := c.Get(r.t.Context())
	if err != nil && !errors.Is(err, api.ErrNotFound) {
		r.t.Fatal(err)
	}
	return gjson.ParseBytes(body)
}

// stateNodes are the nodes that a state holds, in order, tainted ones marked.
func stateNodes(state gjson.Result) []string {
	var names []string
	for _, i := range state.Get(`resources.#(name=="nixos").instances`).Array() {
		name := i.Get("index_key").Str
		if i.Get("status").Str == "tainted" {
			name += " (tainted)"
		}
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (r *rig) wantNodes(state gjson.Result, want ...string) {
	r.t.Helper()
	slices.Sort(want)
	if got := stateNodes(state); !slices.Equal(got, want) {
		r.t.Errorf("nodes in the state = %q, want %q", got, want)
	}
}

// wantInOrder demands that texts appear one after the other.
func wantInOrder(t *testing.T, text string, want ...string) {
	t.Helper()
	rest := text
	for _, w := range want {
		_, after, ok := strings.Cut(rest, w)
		if !ok {
			t.Fatalf("no %q at its place among %q in:\n%s", w, want, text)
		}
		rest = after
	}
}

// certificate writes a certificate for an address and its key into dir.
func certificate(t *testing.T, dir, addr string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: addr},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.ParseIP(addr)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, addr+"-cert.pem"), filepath.Join(dir, addr+"-key.pem")
	for path, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: cert}, keyFile: {Type: "PRIVATE KEY", Bytes: der}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// children are the processes that work in a folder below dir and whose program
// is OpenTofu.
func tofusIn(dir string) []int {
	var pids []int
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil
	}
	for _, p := range procs {
		cwd, err := os.Readlink(filepath.Join(p, "cwd"))
		exe, eerr := os.Readlink(filepath.Join(p, "exe"))
		if err != nil || eerr != nil || !strings.HasPrefix(cwd, dir) || !strings.HasPrefix(filepath.Base(exe), "tofu") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(p)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func deployed(names ...string) map[string]tfhosts.Status {
	all := map[string]tfhosts.Status{}
	for _, n := range names {
		all[n] = tfhosts.Deployed
	}
	return all
}
