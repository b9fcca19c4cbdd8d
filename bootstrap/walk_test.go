package bootstrap

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/nix"
)

// asWalker makes the test binary a wrapper that stops at one operation.
const asWalker = "TF_HOSTS_TEST_WALK"

// walkOrder is what a walker does.
type walkOrder struct {
	Setup              *tfhosts.Setup
	Find               string
	StateDir, Dir      string
	Verb               string
	Bootstrap, Reclaim bool
	RestoreLocal       bool
	// Control is the test's server: it deploys, and hears of each operation.
	Control string
	// Op is where to stop: by SIGKILL, or with Fail by an error each time.
	Op   string
	Fail bool
}

var errWalk = errors.New("the walk fails this operation")

// walk is the walker's main.
func walk() int {
	var o walkOrder
	if err := json.Unmarshal([]byte(os.Getenv(asWalker)), &o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 99
	}
	post := func(path string, v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			return nil
		}
		resp, err := http.Post(o.Control+path, "application/json", bytes.NewReader(b))
		if err != nil {
			return nil
		}
		defer resp.Body.Close()
		b, err = io.ReadAll(resp.Body)
		if err != nil {
			return nil
		}
		return b
	}
	environ := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, asWalker+"=") })
	cfg := Config{
		Setup: o.Setup, StateDir: o.StateDir, CallerDir: o.Dir, Executable: []string{self},
		Environ: append(environ, asRun+"=1"), Bootstrap: o.Bootstrap, ReclaimOwnLock: o.Reclaim, Wait: 20 * time.Second,
		Answer: os.Stdout, Story: os.Stderr,
		Events: func(e tfhosts.Event) { fmt.Fprintln(os.Stderr, "event:", e.Kind, e.Node, e.Op, e.Message) },
		Fault: func(op string) error {
			post("/op", op)
			switch {
			case op != o.Op:
				return nil
			case o.Fail:
				return errWalk
			}
			syscall.Kill(os.Getpid(), syscall.SIGKILL) //nolint:errcheck // never comes back
			select {}
		},
		Worker: Worker{
			Identity: func(_ context.Context, _, _, given string) (string, error) { return given, nil },
			Build: func(_ context.Context, ids []string) (map[string]Built, error) {
				built := map[string]Built{}
				for _, id := range ids {
					sum := sha256.Sum256([]byte(id))
					built[id] = Built{Out: fmt.Sprintf("/nix/store/%x-system", sum[:16])}
				}
				return built, nil
			},
			Closures: func(_ context.Context, systems []string) (map[string][]nix.Path, error) {
				closures := map[string][]nix.Path{}
				for _, system := range systems {
					closures[system] = []nix.Path{{Path: system, NarSize: 1}}
				}
				return closures, nil
			},
			Deploy: func(_ context.Context, req DeployRequest) tfhosts.Verdict {
				v := tfhosts.Verdict{Node: req.Name, Status: tfhosts.Unreachable}
				json.Unmarshal(post("/deploy", []string{req.Name, req.Node.ConfigIdentity}), &v.Status) //nolint:errcheck // then unreachable
				return v
			},
		},
	}
	cfg.Engine.Explicit = o.Find
	var code int
	if o.Verb == "state-restore" {
		cfg.Verb = VerbRestore()
		code, err = Restore(context.Background(), cfg, RestoreOptions{Local: o.RestoreLocal})
	} else {
		cfg.Verb, _ = tfhosts.LookupVerb(o.Verb)
		code, err = Run(context.Background(), cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
	}
	return code
}

// walker is a fleet of model hosts, their state server, and the runs on them.
type walker struct {
	*selfRig
	control *httptest.Server
	order   walkOrder

	mu          sync.Mutex
	ops         []string
	running     map[string]string // node → what it runs
	activations map[string]int    // node and system → how often it was activated
}

func newWalker(t *testing.T) *walker {
	w := &walker{selfRig: newSelfRig(t, 2), running: map[string]string{}, activations: map[string]int{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /op", func(_ http.ResponseWriter, r *http.Request) {
		var op string
		if json.NewDecoder(r.Body).Decode(&op) == nil {
			w.mu.Lock()
			w.ops = append(w.ops, op)
			w.mu.Unlock()
		}
	})
	mux.HandleFunc("POST /deploy", func(rw http.ResponseWriter, r *http.Request) {
		var what [2]string
		if json.NewDecoder(r.Body).Decode(&what) != nil {
			return
		}
		status := tfhosts.Unchanged
		w.mu.Lock()
		if w.running[what[0]] != what[1] {
			status = tfhosts.Deployed
			w.running[what[0]] = what[1]
			w.activations[what[0]+" "+what[1]]++
		}
		w.mu.Unlock()
		if what[0] == "prod.state" {
			w.start()
		}
		json.NewEncoder(rw).Encode(status) //nolint:errcheck // the walker may be dead
	})
	w.control = httptest.NewServer(mux)
	t.Cleanup(w.control.Close)
	engine, err := tofuPath(w.rig)
	if err != nil {
		t.Fatal(err)
	}
	w.order = walkOrder{Setup: w.setup, Find: engine, StateDir: filepath.Join(w.dir, "work"), Dir: w.dir, Control: w.control.URL}
	return w
}

// run runs one walker to its end and gives its code, -1 after a SIGKILL.
func (w *walker) walk(t *testing.T, change func(*walkOrder)) (int, string) {
	t.Helper()
	o := w.order
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
	cmd.Env = append(os.Environ(), asWalker+"="+string(b))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Run() //nolint:errcheck // the code says it
	return cmd.ProcessState.ExitCode(), out.String()
}

// scenario is one command and what stands before it.
type scenario struct {
	name    string
	prepare func(*testing.T, *walker)
	run     func(*walkOrder)
	// nodes is how many nodes the state holds in the end.
	nodes int
	// detached: the state ends on the local file.
	detached bool
	// local: a restore ends with a local state.
	local bool
}

func scenarios() []scenario {
	bootstrapped := func(t *testing.T, w *walker) {
		t.Helper()
		if code, out := w.walk(t, func(o *walkOrder) { o.Verb, o.Bootstrap = "apply", true }); code != 0 {
			t.Fatalf("bootstrap: %d\n%s", code, out)
		}
	}
	return []scenario{
		{
			name: "bootstrap", nodes: 3, prepare: func(*testing.T, *walker) {},
			run: func(o *walkOrder) { o.Verb, o.Bootstrap = "apply", true },
		},
		{
			name: "apply", nodes: 3,
			prepare: func(t *testing.T, w *walker) {
				bootstrapped(t, w)
				w.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/new-app0.drv" })
			},
			run: func(o *walkOrder) { o.Verb = "apply" },
		},
		{
			name: "waves", nodes: 3,
			prepare: func(t *testing.T, w *walker) {
				bootstrapped(t, w)
				w.setup.Runner.Waves = [][]string{{"prod.app1"}}
				w.changeAll("new")
			},
			run: func(o *walkOrder) { o.Verb = "apply" },
		},
		{
			name: "migrate over a superseded copy", nodes: 3,
			prepare: func(t *testing.T, w *walker) {
				bootstrapped(t, w)
				if code, out := w.walk(t, func(o *walkOrder) { o.Verb = "destroy" }); code != 0 {
					t.Fatalf("destroy: %d\n%s", code, out)
				}
				w.mu.Lock()
				defer w.mu.Unlock()
				w.running, w.activations = map[string]string{}, map[string]int{}
			},
			run: func(o *walkOrder) { o.Verb, o.Bootstrap = "apply", true },
		},
		{
			name: "salvage", nodes: 3,
			prepare: func(t *testing.T, w *walker) {
				bootstrapped(t, w)
				// A run whose last state never arrived.
				state := []byte(w.state().Raw)
				serial := gjson.GetBytes(state, "serial").Int()
				state = bytes.Replace(state, fmt.Appendf(nil, `"serial":%d`, serial), fmt.Appendf(nil, `"serial":%d`, serial+1), 1)
				dir := filepath.Join(w.workDir(), "runs", "20260101T000000Z-dead")
				if err := os.MkdirAll(dir, 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, erroredState), state, 0o600); err != nil {
					t.Fatal(err)
				}
			},
			run: func(o *walkOrder) { o.Verb = "apply" },
		},
		{
			name: "restore", nodes: 3,
			prepare: func(t *testing.T, w *walker) {
				bootstrapped(t, w)
				w.stop()
				if err := os.RemoveAll(w.states); err != nil {
					t.Fatal(err)
				}
				w.start()
			},
			run: func(o *walkOrder) { o.Verb = "state-restore" },
		},
		{
			name: "restore to the local state", nodes: 3, local: true,
			prepare: func(t *testing.T, w *walker) { bootstrapped(t, w); w.stop() },
			run:     func(o *walkOrder) { o.Verb, o.RestoreLocal = "state-restore", true },
		},
		{
			name: "destroy", nodes: 0, detached: true, prepare: bootstrapped,
			run: func(o *walkOrder) { o.Verb = "destroy" },
		},
	}
}

// TestFaultWalk stops the wrapper at every named operation of bootstrap, apply,
// migration, salvage, restore and destroy: by SIGKILL, and by an error. The same
// command again must end with the same lineage, no lock, no resource lost or
// doubled, no system activated twice and nothing left over. "make faults" prints
// the table.
func TestFaultWalk(t *testing.T) {
	if testing.Short() {
		t.Skip("takes minutes")
	}
	type point struct {
		scenario scenario
		op       string
	}
	seen := map[string]bool{}
	var points []point
	for _, sc := range scenarios() {
		w := newWalker(t)
		sc.prepare(t, w)
		w.mu.Lock()
		w.ops = nil
		w.mu.Unlock()
		if code, out := w.walk(t, sc.run); code != 0 {
			t.Fatalf("%s without a fault: %d\n%s", sc.name, code, out)
		}
		w.check(t, sc)
		for _, op := range w.ops {
			if !seen[op] {
				seen[op] = true
				points = append(points, point{sc, op})
			}
		}
	}
	if len(points) < 40 {
		t.Errorf("%d named operations, want at least 40", len(points))
	}
	var mu sync.Mutex
	var table []string
	t.Run("points", func(t *testing.T) {
		for _, p := range points {
			for _, fail := range []bool{false, true} {
				how := "SIGKILL"
				if fail {
					how = "error"
				}
				t.Run(fmt.Sprintf("%s/%s/%s", p.scenario.name, p.op, how), func(t *testing.T) {
					t.Parallel()
					w := newWalker(t)
					p.scenario.prepare(t, w)
					code, first := w.walk(t, func(o *walkOrder) { p.scenario.run(o); o.Op, o.Fail = p.op, fail })
					if !fail && code != -1 {
						t.Fatalf("not killed: code %d\n%s", code, first)
					}
					again, out := w.walk(t, func(o *walkOrder) { p.scenario.run(o); o.Reclaim = true })
					if again != 0 {
						t.Fatalf("the same command again: %d\n%s\nthe first run, code %d:\n%s", again, out, code, first)
					}
					w.check(t, p.scenario)
					if t.Failed() {
						t.Logf("first run, code %d:\n%s\nsecond run:\n%s", code, first, out)
					}
					mu.Lock()
					defer mu.Unlock()
					table = append(table, fmt.Sprintf("%-32s %-20s %-8s %4d -> %d", p.scenario.name, p.op, how, code, again))
				})
			}
		}
	})
	sort.Strings(table)
	t.Logf("%d operations, each killed and failed:\n%s", len(points), strings.Join(table, "\n"))
}

// check demands a fleet without a trace of what happened to it.
func (w *walker) check(t *testing.T, sc scenario) {
	t.Helper()
	var state gjson.Result
	if sc.detached || sc.local {
		b, err := os.ReadFile(filepath.Join(w.workDir(), "terraform.tfstate"))
		if err != nil {
			t.Fatal(err)
		}
		state = gjson.ParseBytes(b)
	} else {
		state = w.state()
		if w.has("terraform.tfstate") {
			t.Error("a local state is left over")
		}
	}
	instances := state.Get(`resources.#(name=="nixos").instances`).Array()
	names := map[string]bool{}
	for _, i := range instances {
		names[i.Get("index_key").Str] = true
		if i.Get("status").Str == "tainted" {
			t.Errorf("%s is tainted", i.Get("index_key").Str)
		}
	}
	if len(instances) != sc.nodes || len(names) != sc.nodes {
		t.Errorf("the state holds %d instances of %d nodes, want %d", len(instances), len(names), sc.nodes)
	}
	for what, n := range w.activations {
		if n != 1 {
			t.Errorf("%s was activated %d times", what, n)
		}
	}
	lineages := map[string]bool{state.Get("lineage").Str: true}
	for _, name := range []string{"ledger.json", "last.tfstate", "terraform.tfstate.migrated"} {
		b, err := os.ReadFile(filepath.Join(w.workDir(), name))
		if err != nil {
			continue
		}
		lineage := gjson.GetBytes(b, "lineage").Str + gjson.GetBytes(b, "state.lineage").Str
		if lineage != "" {
			lineages[lineage] = true
		}
	}
	if len(lineages) != 1 {
		t.Errorf("%d lineages: %v", len(lineages), lineages)
	}
	if !sc.local {
		w.checkLockFree(t)
	}
	err := filepath.WalkDir(w.workDir(), func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() && name == "runs" {
			return filepath.SkipDir
		}
		if strings.HasSuffix(name, ".lock.json") || strings.HasPrefix(name, ".tmp-") || strings.HasPrefix(name, ".") && strings.Contains(name, "tfstate") ||
			filepath.Base(filepath.Dir(path)) == "salvage" && strings.HasSuffix(name, ".tfstate") {
			t.Errorf("left over: %s", path)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func (w *walker) checkLockFree(t *testing.T) {
	t.Helper()
	resp, err := http.Get(w.setup.Backend.Address + "/lock")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); len(b) > 0 {
		t.Errorf("the lock is held: %s", b)
	}
}
