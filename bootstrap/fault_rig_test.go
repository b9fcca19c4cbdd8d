package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/foreigntest"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// The state servers of the fault tests.
const (
	ours     = "ours"
	gitlab   = "gitlab"
	nimbolus = "nimbolus"
)

const faultPath = "/state/test/graph"

// faultRig is a rig whose state server obeys the test.
type faultRig struct {
	*rig
	kind string
	host *foreigntest.Host
	// forget drops the server's lock; only while it is down or idle.
	forget func()
	// storeFault fails operations of our server's store.
	storeFault atomic.Pointer[func(op string) error]
	changes    int
	// environ is added to the caller's environment.
	environ []string
}

// run is that of rig, with environ.
func (r *faultRig) run(verb string, interrupt chan struct{}, args ...string) outcome {
	r.tb.Helper()
	v, ok := tfhosts.LookupVerb(verb)
	if !ok {
		r.tb.Fatalf("no verb %q", verb)
	}
	self, err := os.Executable()
	if err != nil {
		r.tb.Fatal(err)
	}
	r.mu.Lock()
	r.deployed, r.events = nil, nil
	r.mu.Unlock()
	var answer, story bytes.Buffer
	cfg := r.config(self, v, interrupt, &answer, &story, args)
	cfg.Environ = append(cfg.Environ, r.environ...)
	code, err := Run(context.Background(), cfg)
	r.mu.Lock()
	defer r.mu.Unlock()
	return outcome{code, err, answer.String(), story.String(), append([]string{}, r.deployed...), r.events}
}

// hintOf is the way out that an error names.
func hintOf(err error) string {
	var exit *tfhosts.ExitError
	if errors.As(err, &exit) {
		return exit.Hint
	}
	return ""
}

// newFaultRig makes one with apps nodes. With self the node prod.state is one
// more; its deploy starts the server, which runs from the start without it.
func newFaultRig(t testing.TB, kind string, apps int, self bool) *faultRig {
	t.Helper()
	r := &faultRig{rig: newRig(t, apps), kind: kind, forget: func() {}}
	r.setup.Backend = tfhosts.HTTPBackend{Pinned: true, RetryMax: 2, RetryWaitMin: 20 * time.Millisecond, RetryWaitMax: 200 * time.Millisecond}
	var open foreigntest.Open
	var foreign foreigntest.Forgetful
	switch kind {
	case gitlab:
		foreign = foreigntest.NewGitLab("ann")
	case nimbolus:
		foreign = foreigntest.NewNimbolus()
	default:
		open = r.openOurs
		r.forget = func() { r.forgetOurs() }
	}
	if foreign != nil {
		open, r.forget = foreigntest.Keep(foreign), foreign.Forget
	}
	r.host = foreigntest.NewHost(t, open)
	b := &r.setup.Backend
	b.Address = r.host.URL() + faultPath
	if kind == gitlab {
		b.LockAddress, b.LockMethod = b.Address+"/lock", http.MethodPost
		b.UnlockAddress, b.UnlockMethod = b.Address+"/lock", http.MethodDelete
	}
	if self {
		r.setup.Self = &tfhosts.SelfBackend{Node: "prod.state"}
		r.setup.Bootstrap = true
		r.setup.Nodes["prod.state"] = tfhosts.SetupNode{Node: tfhosts.Node{
			NixosConf: "./state.nix", ConfigIdentity: "/nix/store/idstate-1.drv", Username: "root", Host: "state.test", SSHOpts: "[]",
		}}
		r.deploy = func(req DeployRequest) tfhosts.Verdict {
			if req.Name == "prod.state" {
				r.host.Start()
			}
			return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
		}
	} else {
		r.host.Start()
	}
	return r
}

func (r *faultRig) storeConfig() store.FilesConfig {
	return store.FilesConfig{Fault: func(op string) error {
		if f := r.storeFault.Load(); f != nil {
			return (*f)(op)
		}
		return nil
	}}
}

func (r *faultRig) openOurs() (http.Handler, func() error, error) {
	files, err := openStates(filepath.Join(r.dir, "node-states"), r.storeConfig())
	if err != nil {
		return nil, nil, err
	}
	h, err := server.New(server.Config{Store: files, Insecure: true})
	return h, files.Close, err
}

// forgetOurs is a server that was restored from a backup without its locks.
func (r *faultRig) forgetOurs() {
	files, err := openStates(filepath.Join(r.dir, "node-states"), store.FilesConfig{})
	if err != nil {
		r.tb.Error(err)
		return
	}
	err = files.Update(context.Background(), "test/graph", func(tx store.Tx) error { return tx.PutLock(store.Lock{}) })
	if err != nil {
		r.tb.Error(err)
	}
	if err := files.Close(); err != nil {
		r.tb.Error(err)
	}
}

func (r *faultRig) workDir() string {
	return WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
}

// change gives app0 another system.
func (r *faultRig) change() {
	r.changes++
	r.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.ConfigIdentity = fmt.Sprintf("/nix/store/change%d-app0.drv", r.changes) })
}

func (r *faultRig) client() *client.Client {
	r.tb.Helper()
	cfg, err := client.FromBackend(r.setup.Backend)
	if err != nil {
		r.tb.Fatal(err)
	}
	c, err := client.New(cfg)
	if err != nil {
		r.tb.Fatal(err)
	}
	r.tb.Cleanup(c.Close)
	return c
}

// state is what the server holds, past all faults.
func (r *faultRig) state(t *testing.T) []byte {
	t.Helper()
	code, body := r.host.Direct(http.MethodGet, faultPath, "")
	if code != http.StatusOK {
		t.Fatalf("the server's state: status %d", code)
	}
	return body
}

// lockHolder is the ID of the lock that is held, or empty.
func (r *faultRig) lockHolder(t *testing.T) string {
	t.Helper()
	info := client.NewLockInfo("look", "")
	raw, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	lock, unlock, path := "LOCK", "UNLOCK", faultPath
	if r.kind == gitlab {
		lock, unlock, path = http.MethodPost, http.MethodDelete, faultPath+"/lock"
	}
	code, body := r.host.Direct(lock, path, string(raw))
	if code == http.StatusOK {
		if code, _ := r.host.Direct(unlock, path, string(raw)); code != http.StatusOK {
			t.Fatalf("unlocking again: status %d", code)
		}
		return ""
	}
	holder, ok := api.ParseHolder(body)
	if !ok {
		t.Fatalf("a LOCK is answered with status %d and no holder: %s", code, body)
	}
	return holder.ID
}

// whole demands that nothing was lost: no lock, no state that waits, one
// lineage, no serial twice, each node once and none tainted.
func (r *faultRig) whole(t *testing.T) {
	t.Helper()
	if id := r.lockHolder(t); id != "" {
		t.Errorf("the lock is held by %q", id)
	}
	for _, pattern := range []string{"salvage/*.tfstate", "runs/*/" + erroredState} {
		if left, err := filepath.Glob(filepath.Join(r.workDir(), pattern)); err != nil || len(left) > 0 {
			t.Errorf("not stored: %q, %v", left, err)
		}
	}
	var last foreigntest.Stored
	for _, s := range r.host.Stored() {
		switch {
		case last.Body == nil, bytes.Equal(s.Body, last.Body):
		case s.Meta.Lineage != last.Meta.Lineage:
			t.Errorf("lineage %q was stored after %q", s.Meta.Lineage, last.Meta.Lineage)
		case s.Meta.Serial <= last.Meta.Serial:
			t.Errorf("serial %d was stored after %d", s.Meta.Serial, last.Meta.Serial)
		}
		last = s
	}
	state := r.state(t)
	if !bytes.Equal(state, last.Body) {
		t.Errorf("the server does not hold the state that was stored last")
	}
	if gjson.GetBytes(state, "encrypted_data").Exists() {
		return
	}
	names := map[string]int{}
	for _, i := range gjson.GetBytes(state, `resources.#(name=="nixos").instances`).Array() {
		names[i.Get("index_key").Str]++
		if i.Get("status").Str == "tainted" {
			t.Errorf("%s is tainted", i.Get("index_key").Str)
		}
	}
	for name := range r.setup.Nodes {
		if names[name] != 1 {
			t.Errorf("%s is %d times in the state", name, names[name])
		}
	}
}

// wantCode runs a verb and fails the test on another code.
func (r *faultRig) wantCode(t *testing.T, code int, verb string, args ...string) outcome {
	t.Helper()
	out := r.run(verb, nil, args...)
	if out.code != code {
		t.Fatalf("%s %q: code %d (%v), want %d\n%s", verb, args, out.code, out.err, code, tail(out.story))
	}
	return out
}

func tail(s string) string {
	if len(s) > 3000 {
		s = "…" + s[len(s)-3000:]
	}
	return s
}

// signalTofu sends signals to the tofu that runs in this rig's folders, with a
// pause in which the first one is taken.
func (r *faultRig) signalTofu(signals ...syscall.Signal) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		r.tb.Error(err)
	}
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		cwd, err := os.Readlink(filepath.Join("/proc", p.Name(), "cwd"))
		if err != nil || !strings.HasPrefix(cwd, r.dir) {
			continue
		}
		exe, err := os.Readlink(filepath.Join("/proc", p.Name(), "exe"))
		if err != nil || !tofu.IsEngine(exe) {
			continue
		}
		for i, s := range signals {
			if i > 0 {
				time.Sleep(300 * time.Millisecond)
			}
			syscall.Kill(pid, s) //nolint:errcheck // it may have ended
		}
		return
	}
	r.tb.Error("no tofu runs")
}

// process runs a verb in a process of its own, which is killed at the operation
// op (none: never). It gives the code, -1 after the kill.
func (r *faultRig) process(t *testing.T, op string, change func(*walkOrder)) (int, string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /op", func(http.ResponseWriter, *http.Request) {})
	var mu sync.Mutex
	mux.HandleFunc("POST /deploy", func(w http.ResponseWriter, q *http.Request) {
		var what [2]string
		if json.NewDecoder(q.Body).Decode(&what) != nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if what[0] == "prod.state" {
			r.host.Start()
		}
		json.NewEncoder(w).Encode(tfhosts.Deployed) //nolint:errcheck // the process may be dead
	})
	control := httptest.NewServer(mux)
	defer control.Close()
	engine, err := tofuPath(r.rig)
	if err != nil {
		t.Fatal(err)
	}
	o := walkOrder{Setup: r.setup, Find: engine, StateDir: filepath.Join(r.dir, "work"), Dir: r.dir, Control: control.URL, Op: op}
	change(&o)
	b, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(append(os.Environ(), r.environ...), asWalker+"="+string(b))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Run() //nolint:errcheck // the code says it
	return cmd.ProcessState.ExitCode(), out.String()
}
