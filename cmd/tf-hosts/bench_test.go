package main

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/internal/tofu"
	"fediversity.eu/tf-hosts/setup"
	"fediversity.eu/tf-hosts/tfgen"

	tfhosts "fediversity.eu/tf-hosts"
)

// BenchmarkUnchanged compares an apply of 100 unchanged nodes through tf-hosts
// with a bare "tofu apply" of the same graph on the same state server, in turn,
// as whole processes. The metric is the ratio of the wall times, pair by pair.
func BenchmarkUnchanged(b *testing.B) {
	const nodes, pairs = 100, 9
	dir := b.TempDir()
	files, err := store.OpenFiles(filepath.Join(dir, "states"), store.FilesConfig{})
	if err != nil {
		b.Fatal(err)
	}
	defer files.Close()
	srv, err := server.New(server.Config{Store: files, Insecure: true})
	if err != nil {
		b.Fatal(err)
	}
	hs := httptest.NewServer(srv)
	defer hs.Close()
	cache, err := fleettest.CacheDir()
	if err != nil {
		b.Fatal(err)
	}
	engine, err := tofu.Find(b.Context(), tofu.FindConfig{Explicit: os.Getenv("TF_HOSTS_TOFU"), CacheDir: cache})
	if err != nil {
		b.Fatal(err)
	}

	setupNodes, graphNodes := map[string]any{}, map[string]tfhosts.Node{}
	for i := range nodes {
		n := tfhosts.Node{
			NixosConf: fmt.Sprintf("/nix/store/%032d-system.drv", i), ConfigIdentity: fmt.Sprintf("/nix/store/%032d-system.drv", i),
			Username: "root", Host: fmt.Sprintf("10.0.0.%d", i), SSHOpts: "[]",
		}
		name := fmt.Sprintf("prod.app%d", i)
		graphNodes[name] = n
		setupNodes[name] = map[string]any{"nixos_conf": n.NixosConf, "host": n.Host}
	}
	text, err := json.Marshal(map[string]any{
		"version": 1, "nodes": setupNodes, "http_backend": map[string]any{"address": hs.URL + "/state/bench/ours"},
		// The hosts are not there: the provisioner's command does nothing.
		"deploy_runner": []string{"true"},
	})
	if err != nil {
		b.Fatal(err)
	}
	write(b, filepath.Join(dir, "tf-hosts.json"), text)
	// The program as "make build" makes it: the test binary starts slower.
	binary := filepath.Join(dir, "tf-hosts")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", binary, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		b.Fatalf("%v\n%s", err, out)
	}
	ours := func() *exec.Cmd {
		cmd := exec.Command(binary, "apply")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "TF_HOSTS_CACHE="+cache, "BOOTSTRAP_STATE_DIR="+filepath.Join(dir, "work"))
		return cmd
	}

	bareDir := filepath.Join(dir, "bare")
	if err := os.Mkdir(bareDir, 0o700); err != nil {
		b.Fatal(err)
	}
	graph, err := tfgen.Graph(tfgen.Options{DeployRunner: []string{"true"}, Bash: "/bin/sh"})
	if err != nil {
		b.Fatal(err)
	}
	write(b, filepath.Join(bareDir, "main.tf.json"), graph)
	write(b, filepath.Join(bareDir, "tofurc"), nil)
	variable, _, err := setup.NodesVariable(bareDir, graphNodes)
	if err != nil {
		b.Fatal(err)
	}
	bareRun := func(args ...string) *exec.Cmd {
		cmd := exec.Command(engine.Path, args...)
		cmd.Dir = bareDir
		address := hs.URL + "/state/bench/bare"
		cmd.Env = append(append(os.Environ(), variable...), "TF_HTTP_ADDRESS="+address, "TF_HTTP_LOCK_ADDRESS="+address,
			"TF_HTTP_UNLOCK_ADDRESS="+address, "TF_CLI_CONFIG_FILE="+filepath.Join(bareDir, "tofurc"))
		return cmd
	}
	bare := func() *exec.Cmd { return bareRun("apply", "-auto-approve", "-input=false", "-no-color") }

	timed := func(cmd *exec.Cmd) time.Duration {
		start := time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%q: %v\n%s", cmd.Args, err, out)
		}
		return time.Since(start)
	}
	timed(bareRun("init", "-input=false"))
	for _, prepare := range []func() *exec.Cmd{ours, bare, ours, bare} { // deploy, then warm up
		timed(prepare())
	}
	b.ResetTimer()
	for range b.N {
		var ratios, a, z []float64
		for range pairs {
			x, y := timed(ours()).Seconds(), timed(bare()).Seconds()
			a, z, ratios = append(a, x), append(z, y), append(ratios, x/y)
		}
		sort.Float64s(ratios)
		sort.Float64s(a)
		sort.Float64s(z)
		b.ReportMetric(ratios[pairs/2], "ratio")
		b.ReportMetric(a[pairs/2], "tf-hosts-s")
		b.ReportMetric(z[pairs/2], "tofu-s")
	}
}

func write(b *testing.B, path string, text []byte) {
	b.Helper()
	if err := os.WriteFile(path, text, 0o600); err != nil {
		b.Fatal(err)
	}
}
