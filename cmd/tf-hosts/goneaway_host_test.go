package main

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestForwardSurvivesItsConnection: the node that serves the state is restarted
// by an apply, and the way through it must be there again.
func TestForwardSurvivesItsConnection(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	h := fleet.Hosts[0]
	dir := t.TempDir()
	w := newWorker(&tfhosts.Setup{Dir: dir}, dir, func(tfhosts.Event) {})
	defer w.close()
	ctx := context.Background()
	f, err := w.forward(ctx, "prod.state", tfhosts.SetupNode{Node: tfhosts.Node{
		Host: h.Addr(), Username: "root", KeyFile: fleet.KeyFile(), HostKey: h.HostKey(), SSHOpts: "[]",
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	greets := func() error {
		conn, err := f.Dial(ctx, "tcp", "localhost:22")
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = bufio.NewReader(conn).ReadString('\n')
		return err
	}
	if err := greets(); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Shell(ctx, "pkill -KILL -f '^sshd(-session)?: root'"); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the way to be there again", func() bool { return greets() == nil })
}

// TestNobodyListens: the reader of stderr goes away in the middle, as "| head"
// does. The deploy is finished and recorded.
func TestNobodyListens(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	r := newRig(t, fleet)
	r.onHost("prod.app1", fleet.Hosts[0])
	one := r.system("prod.app1", fleettest.ClosureSpec{Version: "1"})
	cmd, stdout, _ := r.command("apply")
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = write
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	write.Close() //nolint:errcheck // the program has it
	if _, err := bufio.NewReader(read).ReadString('\n'); err != nil {
		t.Error(err)
	}
	read.Close() //nolint:errcheck // that is the test
	if err := cmd.Wait(); err != nil {
		t.Errorf("apply without a reader: %v", err)
	}
	if !strings.Contains(stdout.String(), "prod.app1") {
		t.Errorf("outputs: %q", stdout)
	}
	r.wantVerdicts(deployed("prod.app1"))
	r.wantRuns(fleet.Hosts[0], one, "1")
	if _, err := os.Stat(filepath.Join(bootstrap.WorkDir(filepath.Join(r.dir, "work"), r.address), "salvage")); err == nil {
		t.Error("a state waits to be stored")
	}
}
