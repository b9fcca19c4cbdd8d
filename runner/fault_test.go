package runner_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

func TestHostThatCannotBeReached(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{NoPenalties: true})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "reach"})

	wrongKey := b.node("")
	wrongKey.HostKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHhGgKPiBkYcVn6MU2AnfHUlWZ4CQNjaUD7CKQGkQIYr"
	noKeyFile := b.node("")
	noKeyFile.KeyFile = filepath.Join(t.TempDir(), "absent")
	badOption := b.node("")
	badOption.SSHOpts = `["Frobnicate=yes"]`
	nobody := b.node("")
	nobody.Username = "nobody-here"
	nowhere := b.node("")
	nowhere.Host = b.fleet.Gateway() // nothing listens there on this port
	nowhere.SSHOpts = `["Port=9"]`
	for _, tt := range []struct {
		name string
		node tfhosts.Node
		want tfhosts.Status
		says string
	}{
		{"another host key", wrongKey, tfhosts.HostKeyChanged, "has changed"},
		{"a user without a key", nobody, tfhosts.AuthFailed, "nobody-here"},
		{"no key file", noKeyFile, tfhosts.AuthFailed, noKeyFile.KeyFile},
		{"an unknown ssh option", badOption, tfhosts.Unreachable, "Frobnicate"},
		{"nothing listens", nowhere, tfhosts.Unreachable, b.fleet.Gateway()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := b.deploy(runner.Request{Node: tt.node, Built: c.Out})
			b.want(v, tt.want, old, old, old)
			if !strings.Contains(v.Sentence, tt.says) {
				t.Errorf("sentence = %q, want %q in it", v.Sentence, tt.says)
			}
		})
	}

	t.Run("a build that failed", func(t *testing.T) {
		b.ops()
		v := b.deploy(runner.Request{BuildErr: errors.New("builder failed")})
		b.want(v, tfhosts.BuildFailed, old, old, old)
		if ops := b.ops(); len(ops) != 0 {
			t.Errorf("operations = %v, want no connection", ops)
		}
	})

	t.Run("a system that does not build", func(t *testing.T) {
		broken, err := fleettest.NewClosure(filepath.Join(t.TempDir(), "c"), fleettest.ClosureSpec{Name: "broken", BuildFails: true})
		if err != nil {
			t.Fatal(err)
		}
		v := b.deploy(runner.Request{Node: b.node(broken.File)})
		b.want(v, tfhosts.BuildFailed, old, old, old)
		if !strings.Contains(v.Sentence, "this system does not build") {
			t.Errorf("sentence = %q, want the builder's words", v.Sentence)
		}
	})
}

func TestDiskFull(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{StoreMiB: 16})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "big", PayloadPaths: 3, PayloadBytes: 8 << 20})

	v := b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.CopyFailed, old, old, old)
	if v.BytesCopied != 0 || !strings.Contains(v.Sentence, "24.") {
		t.Errorf("verdict = %+v, want it before the first byte, with the size", v)
	}

	// What the check promised is taken by somebody else while the copy runs.
	b.cfg.Fault = func(op string) error {
		if op == "copy" {
			b.shell("head -c 9000000 /dev/zero >/nix/store/.fill")
		}
		return nil
	}
	fits := b.closure(fleettest.ClosureSpec{Name: "fits", PayloadPaths: 1, PayloadBytes: 10 << 20})
	v = b.deploy(runner.Request{Built: fits.Out})
	b.want(v, tfhosts.CopyFailed, old, old, old)
	if !strings.Contains(v.Sentence, "disk became full") {
		t.Errorf("sentence = %q, want the full disk", v.Sentence)
	}
	if free := b.shell("rm /nix/store/.fill; df -Pk /nix/store | awk 'NR==2 {print $4}'"); len(free) < 5 || free < "13000" {
		t.Errorf("%s KiB are free after the failed copy, want the partial path gone", free)
	}
}

func TestSystemThatIsNoNixOS(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "omit", Omit: []string{"nixos-version"}})
	v := b.deploy(runner.Request{Built: c.Out})
	b.want(v, tfhosts.CheckRefused, old, old, old)
	if !strings.Contains(v.Sentence, "nixos-version") {
		t.Errorf("sentence = %q, want nixos-version", v.Sentence)
	}
}

func TestVanishedDeployerHoldsAPath(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c := b.closure(fleettest.ClosureSpec{Name: "vanished"})
	// It looks like a daemon that waits for bytes which never come.
	b.shell(`mkdir -p /run/tf-hosts/copy
		setsid perl -e 'use Fcntl ":flock"; $0 = "nix-daemon"; open F, ">>", shift; flock F, LOCK_EX; sleep 600' ` + c.Out + `.lock >/dev/null 2>&1 </dev/null &
		echo gone-deployer >/run/tf-hosts/copy/$!`)
	b.want(b.deploy(runner.Request{Built: c.Out}), tfhosts.Deployed, c.Out, c.Out, c.Out)
}

func TestConnectionCutDuringTheCopy(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c := b.closure(fleettest.ClosureSpec{Name: "cutcopy", PayloadPaths: 20, PayloadBytes: 1 << 20})
	if err := b.host.SetRate(t.Context(), 40e6); err != nil {
		t.Fatal(err)
	}
	cut := make(chan error, 1)
	b.cfg.Fault = func(op string) error {
		if op == "copy" {
			go func() {
				time.Sleep(1500 * time.Millisecond)
				err := b.host.Cut(t.Context())
				time.Sleep(6 * time.Second)
				cut <- errors.Join(err, b.host.Restore(t.Context()))
			}()
		}
		return nil
	}
	v := b.deploy(runner.Request{Built: c.Out})
	if err := <-cut; err != nil {
		t.Fatal(err)
	}
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if v.BytesCopied > 38<<20 {
		t.Errorf("BytesCopied = %d, want what had arrived not to be sent twice", v.BytesCopied)
	}
}

func TestDrop(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "drop"})
	for _, tt := range []struct {
		op   string
		want tfhosts.Status
		path string
	}{
		{"connect", tfhosts.Dropped, old},
		{"copy", tfhosts.Dropped, old},
		{"activate.wait", tfhosts.Deployed, c.Out},
	} {
		t.Run(tt.op, func(t *testing.T) {
			drop := make(chan struct{})
			b.cfg.Fault = func(op string) error {
				if op == tt.op {
					close(drop)
					time.Sleep(50 * time.Millisecond) // the watcher's turn
				}
				return nil
			}
			b.want(b.deploy(runner.Request{Built: c.Out, Drop: drop}), tt.want, tt.path, tt.path, tt.path)
		})
	}
}

// Every operation fails once; the same deploy without a fault ends well.
func TestFaultAtEachOperation(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "faults"})
	injected := errors.New("injected")
	ops := []string{"connect", "observe", "root.link", "space.check", "copy", "copy.check", "check", "activate.start", "activate.wait", "activate.reconnect", "activate.confirm", "activate.result", "verify", "root.release"}
	for _, failing := range ops {
		b.cfg.Fault = func(op string) error {
			if op == failing {
				return injected
			}
			return nil
		}
		v := b.deploy(runner.Request{Built: c.Out, Settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Guard: 3}}})
		if v.Status == "" || (failing != "root.release" && !v.Failed()) {
			t.Errorf("a fault at %s = %s, want a failure", failing, v)
		}
		if slices.Index(ops, failing) >= slices.Index(ops, "activate.wait") {
			// The activation goes on without us.
			b.shell("until ! ls /var/lib/tf-hosts/runs/*/used || ls /var/lib/tf-hosts/runs/*/verdict; do sleep 0.1; done >/dev/null 2>&1")
		}
		want := old
		switch failing {
		case "activate.result", "verify", "root.release":
			want = c.Out // it was confirmed
		}
		if s := b.system(); s.Running != want || s.Profile != want || s.Default != want {
			t.Fatalf("a fault at %s left %+v, want %s as a whole", failing, s, want)
		}
		if want == c.Out {
			b.shell("/nix/var/nix/profiles/system-1-link/bin/switch-to-configuration switch; nix-env -p /nix/var/nix/profiles/system --switch-generation 1")
		}
		b.shell("rm -rf /var/lib/tf-hosts/runs/*") // what the faults left
	}
	b.cfg.Fault = nil
	b.want(b.deploy(runner.Request{Built: c.Out}), tfhosts.Deployed, c.Out, c.Out, c.Out)
}

func TestBuildOnTarget(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	c, err := fleettest.NewClosure(filepath.Join(t.TempDir(), "c"), fleettest.ClosureSpec{Name: "ontarget", Marker: filepath.Base(t.TempDir()) + time.Now().String()})
	if err == nil {
		err = c.Instantiate(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	v := b.deploy(runner.Request{Node: b.node(c.File), Settings: tfhosts.NodeSettings{BuildOn: "target"}})
	b.want(v, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if _, err := os.Stat(c.Out); !os.IsNotExist(err) {
		t.Errorf("the system was built here too: %v", err)
	}
}
