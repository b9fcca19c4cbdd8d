package tfgen_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
	"fediversity.eu/tf-hosts/setup"
	"fediversity.eu/tf-hosts/tfgen"
	"github.com/google/go-cmp/cmp"
)

// stateServer keeps one state in memory; a lock is always granted.
func stateServer(t *testing.T) string {
	t.Helper()
	var mu sync.Mutex
	var state []byte
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		switch r.Method {
		case http.MethodGet:
			if state == nil {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			if _, err := w.Write(state); err != nil {
				t.Errorf("answering a GET: %v", err)
			}
		case http.MethodPost:
			body, err := io.ReadAll(r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			state = body
		}
	}))
	t.Cleanup(server.Close)
	return server.URL
}

// checkout is a folder with the graph, as one deployer has it.
type checkout struct {
	t      *testing.T
	engine *tofu.Engine
	dir    string
	state  string
	log    string
}

func newCheckout(t *testing.T, state string, words ...string) *checkout {
	t.Helper()
	cache := os.Getenv("TF_HOSTS_CACHE")
	if base, err := os.UserCacheDir(); cache == "" && err == nil {
		cache = filepath.Join(base, "tf-hosts")
	}
	engine, err := tofu.Find(t.Context(), tofu.FindConfig{Explicit: os.Getenv("TF_HOSTS_TOFU"), CacheDir: cache})
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	c := &checkout{t: t, engine: engine, dir: dir, state: state, log: filepath.Join(dir, "log")}
	runner := filepath.Join(dir, "runner")
	if err := os.Mkdir(c.log, 0o700); err != nil {
		t.Fatal(err)
	}
	// One file a deploy; NUL ends each word, so that words may hold anything else.
	script := `#!/bin/sh
out=$(mktemp ` + c.log + `/XXXXXX)
printf '%s\0' "$nixos_conf" "$username" "$host" "$key_file" "$host_key" "$ssh_opts" "$@" > "$out"
`
	if err := os.WriteFile(runner, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	graph, err := tfgen.Graph(tfgen.Options{DeployRunner: append([]string{runner}, words...), Bash: "/bin/sh"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "main.tf.json"), graph, 0o600); err != nil {
		t.Fatal(err)
	}
	c.tofu(nil, 0, "init", "-input=false")
	c.tofu(nil, 0, "validate")
	return c
}

// tofu runs a command that must end with code and gives its stdout.
func (c *checkout) tofu(nodes map[string]tfhosts.Node, code int, args ...string) []byte {
	c.t.Helper()
	env, _, err := setup.NodesVariable(c.dir, nodes)
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := c.engine.Build(tofu.Command{Args: args, Dir: c.dir, Env: append(env,
		"PATH="+os.Getenv("PATH"), "HOME="+c.dir, "TF_CLI_CONFIG_FILE=/dev/null", "TF_IN_AUTOMATION=1",
		"TF_HTTP_ADDRESS="+c.state, "TF_HTTP_LOCK_ADDRESS="+c.state, "TF_HTTP_UNLOCK_ADDRESS="+c.state, "TF_HTTP_UPDATE_METHOD=POST")})
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		c.t.Fatal(err)
	}
	if got != code {
		c.t.Fatalf("tofu %q ended with %d, want %d\n%s%s", args, got, code, stdout.Bytes(), stderr.Bytes())
	}
	return stdout.Bytes()
}

// apply gives what the provisioners of the apply saw, sorted.
func (c *checkout) apply(nodes map[string]tfhosts.Node, args ...string) [][]string {
	c.t.Helper()
	c.tofu(nodes, 0, append([]string{"apply", "-auto-approve", "-no-color", "-input=false"}, args...)...)
	files, err := filepath.Glob(c.log + "/*")
	if err != nil {
		c.t.Fatal(err)
	}
	var deploys [][]string
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			c.t.Fatal(err)
		}
		deploys = append(deploys, strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00"))
		if err := os.Remove(file); err != nil {
			c.t.Fatal(err)
		}
	}
	slices.SortFunc(deploys, slices.Compare)
	return deploys
}

func (c *checkout) plan(nodes map[string]tfhosts.Node, code int) {
	c.t.Helper()
	c.tofu(nodes, code, "plan", "-detailed-exitcode", "-no-color", "-input=false")
}

func (c *checkout) output(nodes map[string]tfhosts.Node) map[string]map[string]string {
	c.t.Helper()
	var got map[string]map[string]string
	if err := json.Unmarshal(c.tofu(nodes, 0, "output", "-json", "nodes"), &got); err != nil {
		c.t.Fatal(err)
	}
	return got
}

func fleet() map[string]tfhosts.Node {
	return map[string]tfhosts.Node{
		"prod.app1":   {NixosConf: "./app1.nix", ConfigIdentity: "/nix/store/1.drv", Username: "root", Host: "h1", KeyFile: "/k", HostKey: "k1", SSHOpts: `["Port=1"]`},
		"prod.app2":   {NixosConf: "./app2.nix", ConfigIdentity: "/nix/store/2.drv", Username: "root", Host: "h2", KeyFile: "/k", SSHOpts: "[]"},
		"9-b_c.d.e.f": {NixosConf: "./app3.nix", ConfigIdentity: "/nix/store/3.drv", Username: "root", Host: "h3", KeyFile: "/k", SSHOpts: "[]"},
	}
}

// with is nodes with prod.app1 changed.
func with(nodes map[string]tfhosts.Node, change func(*tfhosts.Node)) map[string]tfhosts.Node {
	changed := maps.Clone(nodes)
	n := changed["prod.app1"]
	change(&n)
	changed["prod.app1"] = n
	return changed
}

func seen(n tfhosts.Node) []string {
	return []string{n.NixosConf, n.Username, n.Host, n.KeyFile, n.HostKey, n.SSHOpts}
}

func TestTofuDeploysWhatChanged(t *testing.T) {
	c := newCheckout(t, stateServer(t))
	nodes := fleet()
	want := [][]string{seen(nodes["prod.app1"]), seen(nodes["prod.app2"]), seen(nodes["9-b_c.d.e.f"])}
	if diff := cmp.Diff(want, c.apply(nodes)); diff != "" {
		t.Fatalf("deploys of the first apply (-want +got):\n%s", diff)
	}
	c.plan(nodes, 0)
	if got := c.apply(nodes); got != nil {
		t.Errorf("deploys of the second apply = %q, want none", got)
	}
	wantOutput := map[string]map[string]string{}
	for name, n := range nodes {
		wantOutput[name] = map[string]string{"nixos_conf": n.NixosConf, "host": n.Host, "config_identity": n.ConfigIdentity}
	}
	if diff := cmp.Diff(wantOutput, c.output(nodes)); diff != "" {
		t.Errorf("output nodes (-want +got):\n%s", diff)
	}

	for field, change := range map[string]func(*tfhosts.Node){
		"username": func(n *tfhosts.Node) { n.Username = "deploy" },
		"key_file": func(n *tfhosts.Node) { n.KeyFile = "/elsewhere/k" },
	} {
		t.Run(field+" is no trigger", func(t *testing.T) {
			c.t = t
			c.plan(with(nodes, change), 0)
		})
	}
	for field, change := range map[string]func(*tfhosts.Node){
		"nixos_conf":      func(n *tfhosts.Node) { n.NixosConf = "./new.nix" },
		"config_identity": func(n *tfhosts.Node) { n.ConfigIdentity = "/nix/store/new.drv" },
		"host":            func(n *tfhosts.Node) { n.Host = "new" },
		"host_key":        func(n *tfhosts.Node) { n.HostKey = "new" },
		"ssh_opts":        func(n *tfhosts.Node) { n.SSHOpts = `["Port=3"]` },
	} {
		t.Run(field+" is a trigger", func(t *testing.T) {
			c.t = t
			changed := with(nodes, change)
			c.plan(changed, 2)
			if diff := cmp.Diff([][]string{seen(changed["prod.app1"])}, c.apply(changed)); diff != "" {
				t.Errorf("deploys after a change of %s (-want +got):\n%s", field, diff)
			}
			nodes = changed
			c.plan(nodes, 0)
		})
	}
	c.t = t
	delete(nodes, "prod.app2")
	if got := c.apply(nodes); got != nil {
		t.Errorf("deploys after a node left = %q, want none: there is no destroy provisioner", got)
	}
}

func TestTofuTargetedRunHasItsOutput(t *testing.T) {
	c := newCheckout(t, stateServer(t))
	nodes := fleet()
	if diff := cmp.Diff([][]string{seen(nodes["prod.app1"])}, c.apply(nodes, "-target="+tfhosts.NodeAddress("prod.app1"))); diff != "" {
		t.Errorf("deploys of the targeted apply (-want +got):\n%s", diff)
	}
	want := map[string]map[string]string{"prod.app1": {"nixos_conf": "./app1.nix", "host": "h1", "config_identity": "/nix/store/1.drv"}}
	if diff := cmp.Diff(want, c.output(nodes)); diff != "" {
		t.Errorf("output of the targeted apply (-want +got):\n%s", diff)
	}
	if got := c.apply(nodes); len(got) != 2 {
		t.Errorf("deploys of the whole apply = %q, want the two other nodes", got)
	}
}

func TestTofuPassesHostileTextUnchanged(t *testing.T) {
	words := []string{"run", "${path.cwd}", "%{ if true }", "$${x}", "%%{y}", "it's \"quoted\" \\", "a\nb\t", "<&>$HOME`id`", "", "*"}
	c := newCheckout(t, stateServer(t), words...)
	n := tfhosts.Node{NixosConf: "${path.cwd} %{if}", Username: "u'\"\\", Host: "$HOME\n", KeyFile: "`id`", HostKey: "", SSHOpts: `["A=\"${b}\""]`}
	want := [][]string{append(seen(n), words...)}
	if diff := cmp.Diff(want, c.apply(map[string]tfhosts.Node{"a": n})); diff != "" {
		t.Errorf("what the provisioner saw (-want +got):\n%s", diff)
	}
}

func TestTofuSamePlanFromTwoCheckouts(t *testing.T) {
	state := stateServer(t)
	mine := newCheckout(t, state, "run")
	load := func(dir string) map[string]tfhosts.Node {
		text := `{"version": 1, "ssh": {"key_file": "keys/id"}, "nodes": {
		  "a": {"nixos_conf": "./a.nix", "config_identity": "/nix/store/a.drv", "host": "h1", "ssh_opts": ["Port=1", "User=x"]},
		  "b.c": {"nixos_conf": ".#nixosConfigurations.b", "config_identity": "/nix/store/b.drv", "host": "h2"}}}`
		file := filepath.Join(dir, "tf-hosts.json")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := setup.Load(setup.Options{Path: file})
		if err != nil {
			t.Fatal(err)
		}
		return s.GraphNodes()
	}
	if got := mine.apply(load(mine.dir)); len(got) != 2 {
		t.Fatalf("deploys of the first checkout = %q, want two", got)
	}
	other := newCheckout(t, state, "another", "runner")
	nodes := load(other.dir)
	if nodes["a"].KeyFile != filepath.Join(other.dir, "keys/id") {
		t.Fatalf("key_file = %q, want one in the second checkout", nodes["a"].KeyFile)
	}
	other.plan(nodes, 0)
}

func TestTofuPlansThousandNodes(t *testing.T) {
	c := newCheckout(t, stateServer(t))
	nodes := make(map[string]tfhosts.Node)
	for i := range 1000 {
		nodes[fmt.Sprintf("prod.app%d", i)] = tfhosts.Node{NixosConf: "./app.nix", ConfigIdentity: strings.Repeat("x", 100), Host: fmt.Sprint("h", i), SSHOpts: "[]"}
	}
	c.plan(nodes, 2)
}
