package setup_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
	"fediversity.eu/tf-hosts/setup"
	"github.com/google/go-cmp/cmp"
)

func manyNodes(n int) map[string]tfhosts.Node {
	nodes := make(map[string]tfhosts.Node, n)
	for i := range n {
		nodes[fmt.Sprintf("prod.app%d", i)] = tfhosts.Node{
			NixosConf:      fmt.Sprintf("/nix/store/%032d-nixos-system-app-26.05", i),
			ConfigIdentity: fmt.Sprintf("/nix/store/%032d-nixos-system-app-26.05", i),
			Username:       "root", Host: fmt.Sprintf("10.0.%d.%d", i/250, i%250),
			KeyFile: "/keys/fleet", HostKey: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl",
			SSHOpts: `["Port=22"]`,
		}
	}
	return nodes
}

// hostileNodes holds what JSON, HCL and templates treat in ways of their own.
func hostileNodes() map[string]tfhosts.Node {
	return map[string]tfhosts.Node{
		"prod.a-b_c.9": {
			NixosConf: "${path.cwd} $${x} $$${y} %{ if true } %%{z} \\${w} \\\\${v}", ConfigIdentity: "a\nb\tc\rd\be\ff\x01\x7f", Username: `"quoted" 'q' \`,
			Host: "<&>\u2028é🙂", KeyFile: `C:\nix\u0024`, HostKey: "", SSHOpts: `["A=\"${b}\"","C=\\b%{d}"]`,
		},
		"9": {SSHOpts: "[]"},
	}
}

func TestEncodeNodesIsDeterministic(t *testing.T) {
	want := `{"a":{"nixos_conf":"<c>","config_identity":"","username":"","host":"","key_file":"","host_key":"","ssh_opts":""},` +
		`"b.c":{"nixos_conf":"","config_identity":"","username":"","host":"","key_file":"","host_key":"","ssh_opts":""}}`
	if got := setup.EncodeNodes(map[string]tfhosts.Node{"b.c": {}, "a": {NixosConf: "<c>"}}); string(got) != want {
		t.Errorf("EncodeNodes = %s, want %s", got, want)
	}
	if got := setup.EncodeNodes(nil); string(got) != "{}" {
		t.Errorf("EncodeNodes(nil) = %s, want {}", got)
	}
	nodes := manyNodes(1000)
	if !bytes.Equal(setup.EncodeNodes(nodes), setup.EncodeNodes(nodes)) {
		t.Error("EncodeNodes of 1000 nodes gave different bytes")
	}
}

func TestNodesVariableForm(t *testing.T) {
	dir := t.TempDir()
	env, file, err := setup.NodesVariable(dir, manyNodes(1000))
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(dir, "nodes.auto.tfvars.json"); file != want || len(env) != 0 {
		t.Errorf("NodesVariable(1000) = %d variables, %q, want none, %q", len(env), file, want)
	}
	info, err := os.Stat(file)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != 0o600 {
		t.Errorf("mode of the nodes file = %v, want 0600", info.Mode())
	}

	env, file, err = setup.NodesVariable(dir, manyNodes(100))
	if err != nil {
		t.Fatal(err)
	}
	if len(env) != 1 || !strings.HasPrefix(env[0], "TF_VAR_nodes={") || file != "" {
		t.Errorf("NodesVariable(100) = %d variables, %q, want TF_VAR_nodes and no file", len(env), file)
	}
	if _, err := os.Stat(filepath.Join(dir, setup.NodesFile)); err == nil {
		t.Error("the nodes file of the earlier run is still there and would win")
	}
	for n := 300; n < 500; n++ {
		env, _, err := setup.NodesVariable(dir, manyNodes(n))
		if err != nil {
			t.Fatal(err)
		}
		if len(env) == 0 {
			return
		}
		if len(env[0]) > 100<<10 {
			t.Fatalf("NodesVariable(%d) = a variable of %d bytes, want at most 100 KiB", n, len(env[0]))
		}
	}
	t.Error("500 nodes still fit the environment")
}

// engine is the OpenTofu of this machine.
func engine(t *testing.T) *tofu.Engine {
	t.Helper()
	cache := os.Getenv("TF_HOSTS_CACHE")
	if base, err := os.UserCacheDir(); cache == "" && err == nil {
		cache = filepath.Join(base, "tf-hosts")
	}
	e, err := tofu.Find(t.Context(), tofu.FindConfig{Explicit: os.Getenv("TF_HOSTS_TOFU"), CacheDir: cache})
	if err != nil {
		t.Skip(err)
	}
	return e
}

func TestNodesVariableReachesTofu(t *testing.T) {
	e := engine(t)
	many := manyNodes(1000)
	for name, node := range hostileNodes() {
		many[name] = node
	}
	for name, nodes := range map[string]map[string]tfhosts.Node{"environment": hostileNodes(), "file": many} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			graph := `{"variable": {"nodes": {"type": "map(map(string))"}}, "output": {"nodes": {"value": "${var.nodes}"}}}`
			if err := os.WriteFile(filepath.Join(dir, "main.tf.json"), []byte(graph), 0o600); err != nil {
				t.Fatal(err)
			}
			env, file, err := setup.NodesVariable(dir, nodes)
			if err != nil {
				t.Fatal(err)
			}
			if (file != "") != (name == "file") {
				t.Fatalf("NodesVariable = %q, want the form %q", file, name)
			}
			run(t, e, dir, env, "apply", "-auto-approve", "-no-color")
			var got map[string]tfhosts.Node
			if err := json.Unmarshal(run(t, e, dir, env, "output", "-json", "nodes"), &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(nodes, got); diff != "" {
				t.Errorf("nodes that tofu saw (-want +got):\n%s", diff)
			}
		})
	}
}

func run(t *testing.T, e *tofu.Engine, dir string, env []string, args ...string) []byte {
	t.Helper()
	cmd := e.Build(tofu.Command{Args: args, Dir: dir, Env: append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "TF_CLI_CONFIG_FILE=/dev/null"}, env...)})
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("tofu %s: %v\n%s%s", args[0], err, stdout.Bytes(), stderr.Bytes())
	}
	return stdout.Bytes()
}
