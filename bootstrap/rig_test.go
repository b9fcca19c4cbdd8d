package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// asRun makes the test binary the provisioner's command.
const asRun = "TF_HOSTS_TEST_RUN"

func TestMain(m *testing.M) {
	if os.Getenv(asWalker) != "" {
		os.Exit(walk())
	}
	if os.Getenv(asRun) == "1" {
		v, err := HandOver(context.Background(), os.Getenv("TF_HOSTS_SOCK"), tfhosts.Node{
			NixosConf: os.Getenv("nixos_conf"), Username: os.Getenv("username"), Host: os.Getenv("host"),
			KeyFile: os.Getenv("key_file"), HostKey: os.Getenv("host_key"), SSHOpts: os.Getenv("ssh_opts"),
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(v.Status.ExitCode())
	}
	// Under nohup SIGHUP is ignored, and tofu would inherit that; a handled
	// signal has its default in a child.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	os.Exit(m.Run())
}

// engine finds the real tofu of this machine. CI has one.
func engine(tb testing.TB) tofu.FindConfig {
	tb.Helper()
	cache := os.Getenv("TF_HOSTS_CACHE")
	if cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			tb.Fatal(err)
		}
		cache = filepath.Join(base, "tf-hosts")
	}
	find := tofu.FindConfig{Explicit: os.Getenv("TF_HOSTS_TOFU"), CacheDir: cache}
	if _, err := tofu.Find(context.Background(), find); err != nil {
		if os.Getenv("TF_HOSTS_REQUIRE_HOSTS") == "1" {
			tb.Fatal(err)
		}
		tb.Skip("needs tofu (make deps)")
	}
	return find
}

func tofuPath(r *rig) (string, error) {
	e, err := tofu.Find(context.Background(), r.find)
	if err != nil {
		return "", err
	}
	return e.Path, nil
}

// openStates opens a store again right after its Close. A child that another
// parallel test forks holds the store's lock until it execs, so this waits.
func openStates(dir string, cfg store.FilesConfig) (*store.Files, error) {
	deadline := time.Now().Add(5 * time.Second)
	for {
		files, err := store.OpenFiles(dir, cfg)
		if err == nil || time.Now().After(deadline) {
			return files, err
		}
		<-time.After(20 * time.Millisecond)
	}
}

// rig runs verbs on a real tofu and a real state server; only the hosts are
// made up.
type rig struct {
	tb     testing.TB
	dir    string
	setup  *tfhosts.Setup
	find   tofu.FindConfig
	server *httptest.Server

	mu       sync.Mutex
	deployed []string
	deploy   func(DeployRequest) tfhosts.Verdict
	build    func([]string) (map[string]Built, error)
	events   []tfhosts.Event
	onEvent  func(tfhosts.Event)

	// boot, allowLost and reclaim are the variables of the same meaning; work is
	// the folder of the working dirs, fault that of Config.
	boot, allowLost, reclaim bool
	work                     string
	fault                    func(string) error
	release                  func([]string) error
	ask                      func(string) (bool, error)
	buildPlan                bool
	closures                 func(systems []string) (map[string][]nix.Path, error)
	// configure, when set, changes the Config of each run.
	configure func(*Config)
}

func newRig(tb testing.TB, nodes int) *rig {
	tb.Helper()
	r := &rig{tb: tb, dir: tb.TempDir(), find: engine(tb)}
	files, err := store.OpenFiles(filepath.Join(r.dir, "states"), store.FilesConfig{})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := files.Close(); err != nil {
			tb.Error(err)
		}
	})
	srv, err := server.New(server.Config{Store: files, Insecure: true})
	if err != nil {
		tb.Fatal(err)
	}
	r.server = httptest.NewServer(srv)
	tb.Cleanup(r.server.Close)
	r.setup = &tfhosts.Setup{
		Dir: r.dir, Bash: "/bin/sh", Nodes: map[string]tfhosts.SetupNode{},
		Backend: tfhosts.HTTPBackend{Address: r.server.URL + "/state/test/graph"},
	}
	for i := range nodes {
		r.setup.Nodes[fmt.Sprintf("prod.app%d", i)] = tfhosts.SetupNode{Node: tfhosts.Node{
			NixosConf: fmt.Sprintf("./app%d.nix", i), ConfigIdentity: fmt.Sprintf("/nix/store/id%d-app.drv", i),
			Username: "root", Host: fmt.Sprintf("app%d.test", i), SSHOpts: "[]",
		}}
	}
	r.deploy = func(req DeployRequest) tfhosts.Verdict {
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed, NewPath: req.Built.Out}
	}
	r.build = func(ids []string) (map[string]Built, error) {
		built := map[string]Built{}
		for _, id := range ids {
			built[id] = Built{Out: id + "-out"}
		}
		return built, nil
	}
	return r
}

// outcome is what a verb left.
type outcome struct {
	code           int
	err            error
	answer, story  string
	deployed       []string
	eventsOfTheRun []tfhosts.Event
}

func (r *rig) run(verb string, interrupt chan struct{}, args ...string) outcome {
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
	code, err := Run(context.Background(), r.config(self, v, interrupt, &answer, &story, args))
	r.mu.Lock()
	defer r.mu.Unlock()
	return outcome{code, err, answer.String(), story.String(), append([]string{}, r.deployed...), r.events}
}

// restore runs state-restore.
func (r *rig) restore(opts RestoreOptions) (int, error) {
	return Restore(context.Background(), r.config("", VerbRestore(), nil, nil, nil, nil), opts)
}

func (r *rig) config(self string, v tfhosts.Verb, interrupt chan struct{}, answer, story io.Writer, args []string) Config {
	work := r.work
	if work == "" {
		work = "work"
	}
	cfg := Config{
		Setup: r.setup, Verb: v, Args: args, StateDir: filepath.Join(r.dir, work), CallerDir: r.dir,
		Bootstrap: r.boot, AllowLost: r.allowLost, ReclaimOwnLock: r.reclaim, Fault: r.fault, Wait: 20 * time.Second,
		Executable: []string{self}, Engine: r.find, Environ: append(os.Environ(), asRun+"=1"),
		Answer: answer, Story: story, Interrupt: interrupt, Ask: r.ask, BuildPlan: r.buildPlan,
		Events: func(e tfhosts.Event) {
			r.mu.Lock()
			r.events = append(r.events, e)
			on := r.onEvent
			r.mu.Unlock()
			if on != nil {
				on(e)
			}
		},
		Worker: Worker{
			Identity: func(_ context.Context, node, conf, given string) (string, error) {
				if given == "" {
					return "", errors.New("does not evaluate")
				}
				return given, nil
			},
			Build:   func(_ context.Context, ids []string) (map[string]Built, error) { return r.build(ids) },
			Release: r.release,
			Outputs: func(_ context.Context, ids []string) (map[string]string, error) {
				outs := map[string]string{}
				for _, id := range ids {
					outs[id] = strings.TrimSuffix(id, ".drv")
				}
				return outs, nil
			},
			Closures: func(_ context.Context, systems []string) (map[string][]nix.Path, error) {
				if r.closures == nil {
					return nil, nil
				}
				return r.closures(systems)
			},
			Deploy: func(_ context.Context, req DeployRequest) tfhosts.Verdict {
				v := r.deploy(req)
				r.mu.Lock()
				defer r.mu.Unlock()
				r.deployed = append(r.deployed, req.Name)
				return v
			},
		},
	}
	if r.configure != nil {
		r.configure(&cfg)
	}
	return cfg
}

func (r *rig) want(code int, verb string, args ...string) outcome {
	r.tb.Helper()
	out := r.run(verb, nil, args...)
	if out.code != code {
		r.tb.Fatalf("%s %q: code %d (%v), want %d\n%s\n%s", verb, args, out.code, out.err, code, out.answer, out.story)
	}
	return out
}

func (r *rig) changeNode(name string, change func(*tfhosts.SetupNode)) {
	n := r.setup.Nodes[name]
	change(&n)
	r.setup.Nodes[name] = n
}
