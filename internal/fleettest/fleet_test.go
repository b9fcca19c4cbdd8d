package fleettest_test

import (
	"context"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/internal/fleettest"
)

func ssh(t *testing.T, f *fleettest.Fleet, h *fleettest.Host, user, script string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ssh", "-F", "none", "-i", f.KeyFile(), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes",
		"-o", "StrictHostKeyChecking=yes", "-o", "HostKeyAlgorithms=ssh-ed25519", "-o", "ConnectTimeout=2", "-o", "GlobalKnownHostsFile=none",
		"-o", "KnownHostsCommand=/bin/echo %H "+h.HostKey(), user+"@"+h.Addr(), script)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func TestBootTwoHosts(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	for _, h := range f.Hosts {
		out, err := ssh(t, f, h, "root", "hostname; command -v nix nix-store nix-env nix-daemon; test -e /etc/NIXOS; nix-store --check-validity /run/current-system && cat /run/current-system/nixos-version")
		want := h.Name + "\n/usr/bin/nix\n/usr/bin/nix-store\n/usr/bin/nix-env\n/usr/bin/nix-daemon\n26.05.base.0"
		if err != nil || out != want {
			t.Errorf("ssh to %q = %q, %v; want %q", h.Name, out, err, want)
		}
		n, err := h.SSHCount(t.Context())
		if want := (fleettest.SSHCount{Connections: 1, Accepted: 1}); err != nil || n != want {
			t.Errorf("SSHCount of %q = %+v, %v; want %+v", h.Name, n, err, want)
		}
		s, err := h.System(t.Context())
		if err != nil || s.Running == "" || s.Running != s.Profile || s.Running != s.Default || s.Running != s.Booted {
			t.Errorf("System of %q = %+v, %v; want one path four times", h.Name, s, err)
		}
	}
}

func TestCutAndRestore(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{})
	h := f.Hosts[0]
	if err := h.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out, err := ssh(t, f, h, "root", "true"); err == nil {
		t.Errorf("ssh over a cut link = %q, want an error", out)
	}
	if err := h.Restore(t.Context()); err != nil {
		t.Fatal(err)
	}
	if out, err := ssh(t, f, h, "root", "echo back"); err != nil || out != "back" {
		t.Errorf("ssh after the link came back = %q, %v", out, err)
	}
}

func TestRebootObeysTheBootDefault(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{})
	h := f.Hosts[0]
	first, err := h.BootID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := closure(t, fleettest.ClosureSpec{Name: "next"})
	copyTo(t, f, h, c.Out)
	if out, err := h.Exec(t.Context(), c.Out+"/bin/switch-to-configuration", "boot"); err != nil {
		t.Fatal(out, err)
	}
	for _, reboot := range []func(context.Context) error{
		h.Reboot,
		func(ctx context.Context) error {
			if err := h.Crash(ctx); err != nil {
				return err
			}
			return h.Start(ctx)
		},
	} {
		if err := reboot(t.Context()); err != nil {
			t.Fatal(err)
		}
		second, err := h.BootID(t.Context())
		if err != nil || second == first {
			t.Errorf("BootID after a reboot = %q, %v; want another than %q", second, err, first)
		}
		first = second
		s, err := h.System(t.Context())
		if err != nil || s.Running != c.Out || s.Booted != c.Out || s.Demo != "1" {
			t.Errorf("System after a reboot = %+v, %v; want %q with marker 1", s, err, c.Out)
		}
	}
}

func TestUsers(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{NoPenalties: true, Users: []fleettest.User{
		{Name: "plain"},
		{Name: "deploy", Sudo: fleettest.SudoNoPassword},
		{Name: "asked", Sudo: fleettest.SudoPassword, Password: "secret"},
	}}}})
	h := f.Hosts[0]
	for _, tt := range []struct {
		user, script, want string
		ok                 bool
	}{
		{"plain", "id -un", "plain", true},
		{"plain", "sudo -n id -un", "", false},
		{"deploy", "sudo -n id -un", "root", true},
		{"asked", "sudo -n true", "", false},
		{"asked", "echo secret | sudo -S -p '' id -un", "root", true},
	} {
		out, err := ssh(t, f, h, tt.user, tt.script)
		if (err == nil) != tt.ok || (tt.ok && out != tt.want) {
			t.Errorf("ssh %s %q = %q, %v; want %q, ok %v", tt.user, tt.script, out, err, tt.want, tt.ok)
		}
	}
}

func TestSmallStoreFillsUp(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{StoreMiB: 4}}})
	h := f.Hosts[0]
	if out, err := h.Shell(t.Context(), "nix-store --check-validity /run/current-system; df -Pk /nix/store | tail -1 | awk '{print $2}'"); err != nil || strings.TrimSpace(out) != "4096" {
		t.Errorf("size of the store = %q, %v; want 4096", out, err)
	}
	if _, err := h.Exec(t.Context(), "head", "-c", "5000000", "/dev/zero"); err != nil {
		t.Fatal(err)
	}
	_, err := h.Shell(t.Context(), "head -c 5000000 /dev/zero >/nix/store/.fill")
	if err == nil || !strings.Contains(err.Error(), "No space left") {
		t.Errorf("writing 5 MB = %v, want no space left", err)
	}
}

// copyTo puts a store path onto a host without sshd.
func copyTo(t *testing.T, f *fleettest.Fleet, h *fleettest.Host, path string) {
	t.Helper()
	if err := h.CopyClosure(t.Context(), path); err != nil {
		t.Fatal(err)
	}
}

func closure(t *testing.T, spec fleettest.ClosureSpec) *fleettest.Closure {
	t.Helper()
	c, err := fleettest.NewClosure(t.TempDir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Build(t.Context()); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTwentyHosts(t *testing.T) {
	if testing.Short() {
		t.Skip("twenty hosts")
	}
	f := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(20)})
	for _, h := range f.Hosts {
		if out, err := h.Exec(t.Context(), "hostname"); err != nil || strings.TrimSpace(out) != h.Name {
			t.Errorf("hostname of %q = %q, %v", h.Name, out, err)
		}
	}
}

// The delay is on the way there and back, and costs no throughput.
func TestDelay(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{{Delay: 25 * time.Millisecond}}})
	roundTrip := time.Hour
	for range 5 {
		begin := time.Now()
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(f.Hosts[0].Addr(), "22"), 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		roundTrip = min(roundTrip, time.Since(begin))
		_ = conn.Close()
	}
	if roundTrip < 50*time.Millisecond {
		t.Errorf("a handshake took %v, want at least the 50 ms of the round trip", roundTrip)
	}
	t.Logf("a handshake took %v", roundTrip)
}
