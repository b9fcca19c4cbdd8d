package fleettest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Exec runs argv as root inside the host and returns its stdout; it uses no
// network and no sshd. A command that fails is a *CommandError.
func (h *Host) Exec(ctx context.Context, argv ...string) (string, error) {
	return h.ExecInput(ctx, "", argv...)
}

// Shell runs a piece of POSIX sh as root inside the host.
func (h *Host) Shell(ctx context.Context, script string) (string, error) {
	return h.ExecInput(ctx, script, "sh", "-eu")
}

// ExecInput is Exec with a text for the command's stdin.
func (h *Host) ExecInput(ctx context.Context, stdin string, argv ...string) (string, error) {
	init := h.initPID()
	if init == 0 {
		return "", fmt.Errorf("running %q on host %q: the host is down", argv, h.Name)
	}
	args := append([]string{
		"--target", strconv.Itoa(init), "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd", "--",
		"env", "-i", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8",
	}, argv...)
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := runCommand(cmd)
	if err != nil {
		return out, fmt.Errorf("host %q: %w", h.Name, err)
	}
	return out, nil
}

// ReadFile reads a file of the host. A link to an absolute path is followed
// inside the host. Errors are those of the command cat.
func (h *Host) ReadFile(ctx context.Context, path string) (string, error) {
	return h.Exec(ctx, "cat", path)
}

// WriteFile writes a file of the host.
func (h *Host) WriteFile(ctx context.Context, path, text string, mode os.FileMode) error {
	_, err := h.ExecInput(ctx, text, "sh", "-euc", `mkdir -p "$(dirname "$1")"; cat >"$1"; chmod "$2" "$1"`, "sh", path, fmt.Sprintf("%o", mode.Perm()))
	return err
}

// System is what the host runs and would boot.
type System struct {
	Running string // what /run/current-system names
	Profile string // what /nix/var/nix/profiles/system names
	Default string // what the next boot starts
	Booted  string // what this boot started
	Demo    string // what the demo service shows; empty when it does not run
}

// System reads what the host runs. Nothing has an empty path.
func (h *Host) System(ctx context.Context) (System, error) {
	out, err := h.Shell(ctx, `
		for link in /run/current-system /nix/var/nix/profiles/system /boot/default /run/booted-system; do
			readlink -f "$link" || echo
		done
		cat `+DemoFile+` 2>/dev/null || echo`)
	if err != nil {
		return System{}, err
	}
	lines := append(strings.Split(out, "\n"), "", "", "", "", "")
	return System{Running: lines[0], Profile: lines[1], Default: lines[2], Booted: lines[3], Demo: lines[4]}, nil
}

// BootID is the identity of the boot that runs.
func (h *Host) BootID(ctx context.Context) (string, error) {
	out, err := h.Exec(ctx, "cat", "/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(out), err
}

// Cut takes the network between this machine and the host down, as a pulled
// cable does: nobody is told.
func (h *Host) Cut(ctx context.Context) error {
	_, err := command(ctx, "ip", "link", "set", h.net.Link, "down")
	return err
}

// Restore brings the network back.
func (h *Host) Restore(ctx context.Context) error {
	_, err := command(ctx, "ip", "link", "set", h.net.Link, "up")
	return err
}

// SetRate limits what flows to the host, in bits per second; 0 lifts the limit.
func (h *Host) SetRate(ctx context.Context, bitsPerSecond int) error {
	if bitsPerSecond == 0 {
		_, err := command(ctx, "tc", "qdisc", "del", "dev", h.net.Link, "root")
		return err
	}
	_, err := command(ctx, "tc", "qdisc", "replace", "dev", h.net.Link, "root", "tbf",
		"rate", fmt.Sprintf("%dbit", bitsPerSecond), "burst", "32kb", "latency", "400ms")
	return err
}

// Reboot restarts the host in an orderly way and returns when it is up again. A
// host that restarts by itself is started again too; see WaitBoot.
func (h *Host) Reboot(ctx context.Context) error {
	n := h.Boots()
	if _, err := h.Exec(ctx, "systemctl", "reboot", "--no-block"); err != nil {
		return err
	}
	return h.WaitBoot(ctx, n+1)
}

// Boots counts the boots of the host so far.
func (h *Host) Boots() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.boots
}

// WaitBoot returns when boot number n of the host is up.
func (h *Host) WaitBoot(ctx context.Context, n int) error {
	err := poll(ctx, 2*bootLimit, pollEvery, fmt.Sprintf("boot %d of host %q", n, h.Name), func() (bool, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.boots >= n && h.init != 0 && !isClosed(h.gone), nil
	})
	if err != nil {
		return h.bootError(err)
	}
	h.mu.Lock()
	gone := h.gone
	h.mu.Unlock()
	return h.waitUp(ctx, gone)
}

// Crash ends the host at once, as a power cut does, and leaves it down. What
// the host wrote stays, synced or not.
func (h *Host) Crash(ctx context.Context) error {
	h.mu.Lock()
	init, gone := h.init, h.gone
	h.mu.Unlock()
	if init == 0 || isClosed(gone) {
		return fmt.Errorf("crashing host %q: it is down", h.Name)
	}
	if err := syscall.Kill(init, syscall.SIGKILL); err != nil {
		return fmt.Errorf("crashing host %q: %w", h.Name, err)
	}
	select {
	case <-gone:
		h.mu.Lock()
		h.init = 0
		h.mu.Unlock()
		return nil
	case <-ctx.Done():
		return fmt.Errorf("crashing host %q: %w", h.Name, ctx.Err())
	}
}

// Start boots a host that is down.
func (h *Host) Start(ctx context.Context) error {
	h.mu.Lock()
	up := !isClosed(h.gone)
	h.mu.Unlock()
	if up {
		return fmt.Errorf("starting host %q: it runs", h.Name)
	}
	return h.start(ctx)
}

// Console is what the host wrote to its console since it was made.
func (h *Host) Console() (string, error) {
	b, err := os.ReadFile(h.consoleFile())
	return string(b), err
}

// Journal is the text of the host's journal, oldest first, filtered by the
// arguments of journalctl in args.
func (h *Host) Journal(ctx context.Context, args ...string) (string, error) {
	if _, err := h.Exec(ctx, "journalctl", "--sync"); err != nil {
		return "", err
	}
	return h.Exec(ctx, append([]string{"journalctl", "--no-pager", "--quiet", "--output=cat"}, args...)...)
}

// SSHDLog is what sshd logged since the host was made, at level VERBOSE.
func (h *Host) SSHDLog(ctx context.Context) (string, error) {
	return h.Journal(ctx, "-t", "sshd", "-t", "sshd-session", "-t", "sshd-auth")
}

// SSHCount is what sshd's log says about connections.
type SSHCount struct {
	Connections int // TCP connections
	Accepted    int // authentications by key that succeeded
}

// SSHCount counts the SSH connections to the host since it was made.
func (h *Host) SSHCount(ctx context.Context) (SSHCount, error) {
	log, err := h.SSHDLog(ctx)
	if err != nil {
		return SSHCount{}, err
	}
	var n SSHCount
	for _, line := range strings.Split(log, "\n") {
		if strings.HasPrefix(line, "Connection from ") {
			n.Connections++
		}
		if strings.HasPrefix(line, "Accepted publickey for ") {
			n.Accepted++
		}
	}
	return n, nil
}

// addUsers makes the users of the host's config.
func (h *Host) addUsers(ctx context.Context) error {
	if len(h.cfg.Users) == 0 {
		return nil
	}
	pub, err := os.ReadFile(h.fleet.KeyFile() + ".pub")
	if err != nil {
		return err
	}
	var errs []error
	for _, u := range h.cfg.Users {
		shell := u.Shell
		if shell == "" {
			shell = "/bin/bash"
		}
		if _, err := h.Exec(ctx, "useradd", "--create-home", "--shell", shell, u.Name); err != nil {
			errs = append(errs, err)
			continue
		}
		// Without a password the account counts as locked, and sshd would refuse the key too.
		password := u.Password
		if password == "" {
			_, err = h.Exec(ctx, "usermod", "--password", "*", u.Name)
		} else {
			_, err = h.ExecInput(ctx, u.Name+":"+password+"\n", "chpasswd")
		}
		errs = append(errs, err)
		home := filepath.Join("/home", u.Name)
		errs = append(errs, h.WriteFile(ctx, home+"/.ssh/authorized_keys", string(pub), 0o600))
		_, err = h.Exec(ctx, "chown", "-R", u.Name+":", home+"/.ssh")
		errs = append(errs, err)
		rule := ""
		switch u.Sudo {
		case SudoNone:
			continue
		case SudoNoPassword:
			rule = u.Name + " ALL=(ALL:ALL) NOPASSWD: ALL\n"
		case SudoPassword:
			rule = u.Name + " ALL=(ALL:ALL) ALL\n"
		}
		errs = append(errs, h.WriteFile(ctx, "/etc/sudoers.d/"+u.Name, rule, 0o440))
	}
	return errors.Join(errs...)
}

// CopyClosure puts a path of this machine's store and all it needs into the
// host's store, without the network.
func (h *Host) CopyClosure(ctx context.Context, path string) error {
	paths, err := nix(ctx, "nix-store", "--query", "--requisites", path)
	if err != nil {
		return fmt.Errorf("copying %q: %w", path, err)
	}
	out, err := nix(ctx, append([]string{"nix-store", "--export"}, strings.Fields(paths)...)...)
	if err != nil {
		return fmt.Errorf("copying %q: %w", path, err)
	}
	_, err = h.ExecInput(ctx, out, "env", "NIX_REMOTE=local", "nix-store", "--import")
	return err
}
