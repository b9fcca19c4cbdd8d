package fleettest_test

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
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
	addr, said := "", ""
	for lines := bufio.NewScanner(stdout); addr == "" && lines.Scan(); {
		said += lines.Text() + "\n"
		if rest, ok := strings.CutPrefix(lines.Text(), "UP "); ok {
			addr = rest
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	if !strings.HasPrefix(addr, "10.77.") {
		t.Fatalf("the owner said %q, want an address", said)
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

// TestCloseAndSweepTakeTurns: a folder is removed under the lock alone. Half
// removed, it made a sweep of another process fail, and with it that process's
// fleet.
func TestCloseAndSweepTakeTurns(t *testing.T) {
	fleettest.Require(t)
	f, err := fleettest.Start(t.Context(), fleettest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(f.KeyFile())
	lock, err := os.OpenFile(filepath.Join(filepath.Dir(dir), ".lock"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- f.Close() }()
	bridge := filepath.Join("/sys/class/net", filepath.Base(dir))
	for deadline := time.Now().Add(30 * time.Second); exists(bridge); <-time.After(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the bridge is not removed")
		}
	}
	select {
	case err := <-closed:
		t.Fatalf("Close ended while another process had the lock: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if !exists(filepath.Join(dir, "fleet.json")) {
		t.Error("the record was removed while another process had the lock")
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-closed; err != nil || exists(dir) {
		t.Errorf("Close = %v, folder there: %v", err, exists(dir))
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
