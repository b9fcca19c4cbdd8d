package fleettest_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestOwnerThatDies is not a test of its own: TestSweepRemovesDeadFleets runs
// it in a process that it kills.
func TestOwnerThatDies(t *testing.T) {
	if os.Getenv("FLEETTEST_OWNER") != "1" {
		return
	}
	f, err := fleettest.Start(t.Context(), fleettest.Config{Hosts: []fleettest.HostConfig{{}, {StoreMiB: 4}}})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = os.Stdout.WriteString("UP " + f.Hosts[0].Addr() + "\n")
	time.Sleep(time.Minute) // killed long before
}

func TestSweepRemovesDeadFleets(t *testing.T) {
	fleettest.Require(t)
	living := fleettest.New(t, fleettest.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestOwnerThatDies$")
	cmd.Env = append(os.Environ(), "FLEETTEST_OWNER=1")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	addr := ""
	for lines := bufio.NewScanner(stdout); addr == "" && lines.Scan(); {
		addr, _ = strings.CutPrefix(lines.Text(), "UP ")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if !strings.HasPrefix(addr, "10.77.") {
		t.Fatalf("the owner said %q, want an address", addr)
	}
	bridge := "tfh" + strings.Split(addr, ".")[2]
	if !exists("/sys/class/net/" + bridge) {
		t.Fatalf("bridge %q is gone before the sweep", bridge)
	}
	swept, err := fleettest.Sweep(ctx, fleettest.Config{})
	if err != nil || len(swept) != 1 || filepath.Base(swept[0]) != bridge {
		t.Fatalf("Sweep = %q, %v; want the folder of %q", swept, err, bridge)
	}
	for _, path := range []string{"/sys/class/net/" + bridge, "/run/netns/" + bridge + "-1", swept[0]} {
		if exists(path) {
			t.Errorf("%q is still there after the sweep", path)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), swept[0]) {
		t.Errorf("mounts after the sweep name %q (%v)", swept[0], err)
	}
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range processes {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), "--machine="+bridge+"-") {
			t.Errorf("a host of the dead fleet runs still: %s", p)
		}
	}
	if out, err := living.Hosts[0].Exec(ctx, "echo", "alive"); err != nil || out != "alive\n" {
		t.Errorf("the living fleet after the sweep = %q, %v", out, err)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
