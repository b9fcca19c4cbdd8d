package fleettest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	bootLimit = time.Minute
	pollEvery = 20 * time.Millisecond
)

// Host is one running host.
type Host struct {
	Name string

	fleet *Fleet
	cfg   HostConfig
	index int
	dir   string
	net   hostRecord

	mu      sync.Mutex
	nspawn  *exec.Cmd
	gone    chan struct{} // closed when the boot that runs has ended
	init    int           // pid of the host's first process, seen from here
	boots   int
	closing bool
	delay   *delayLine
}

func newHost(f *Fleet, i int, cfg HostConfig) *Host {
	h := &Host{
		Name: cfg.Name, fleet: f, cfg: cfg, index: i, dir: filepath.Join(f.dir, cfg.Name),
		net: hostRecord{
			Netns:  fmt.Sprintf("%s-%d", f.bridge, i+1),
			Link:   fmt.Sprintf("v%s-%d", f.bridge, i+1),
			Cgroup: fmt.Sprintf("tf-hosts-%s-%d", f.bridge, i+1),
		},
	}
	if cfg.Delay > 0 {
		h.net.Bridge = fmt.Sprintf("d%s-%d", f.bridge, i+1)
	}
	return h
}

// Addr is the host's IPv4 address; sshd listens on port 22.
func (h *Host) Addr() string { return fmt.Sprintf("10.77.%d.%d", h.fleet.subnet, h.index+11) }

// HostKey is the host's public ed25519 key as a pin: "ssh-ed25519 AAAA…".
func (h *Host) HostKey() string { return h.HostKeys()["ed25519"] }

// HostKeys are all public keys of the host, by type: ed25519, ecdsa and, where
// asked for, rsa.
func (h *Host) HostKeys() map[string]string {
	keys := make(map[string]string)
	for _, kind := range h.keyTypes() {
		b, err := os.ReadFile(filepath.Join(h.dir, "upper/etc/ssh/ssh_host_"+kind+"_key.pub"))
		if err != nil {
			continue
		}
		if f := strings.Fields(string(b)); len(f) >= 2 {
			keys[kind] = f[0] + " " + f[1]
		}
	}
	return keys
}

func (h *Host) keyTypes() []string {
	if h.cfg.RSAHostKey {
		return []string{"ed25519", "ecdsa", "rsa"}
	}
	return []string{"ed25519", "ecdsa"}
}

func sshKey(ctx context.Context, path, kind, comment string) error {
	_, err := command(ctx, "ssh-keygen", "-q", "-t", kind, "-N", "", "-C", comment, "-f", path)
	return err
}

// create makes the host's files and network and boots it.
func (h *Host) create(ctx context.Context) error {
	if h.cfg.StoreMiB > 0 {
		h.net.Mount = filepath.Join(h.dir, "store")
	}
	if err := h.fleet.update(func(r *record) { r.Hosts[h.Name] = h.net }); err != nil {
		return err
	}
	if err := h.writeFiles(ctx); err != nil {
		return err
	}
	if err := h.makeStore(ctx); err != nil {
		return err
	}
	bridge, err := h.makeDelay(ctx)
	if err != nil {
		return err
	}
	ns, link := h.net.Netns, h.net.Link
	for _, argv := range [][]string{
		{"ip", "netns", "add", ns},
		{"ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", ns},
		{"ip", "link", "set", link, "master", bridge, "up"},
		{"ip", "-n", ns, "link", "set", "lo", "up"},
		{"ip", "-n", ns, "address", "add", h.Addr() + "/24", "dev", "eth0"},
	} {
		if _, err := command(ctx, argv...); err != nil {
			return err
		}
	}
	if err := h.start(ctx); err != nil {
		return err
	}
	return h.addUsers(ctx)
}

// makeDelay gives the bridge that the host's link belongs to.
func (h *Host) makeDelay(ctx context.Context) (string, error) {
	bridge := h.net.Bridge
	if bridge == "" {
		return h.fleet.bridge, nil
	}
	// Without an address of its own a bridge takes that of its newest port, and
	// tables elsewhere go stale.
	mac := fmt.Sprintf("02:77:01:%02x:%02x:01", h.fleet.subnet, h.index+1)
	if _, err := command(ctx, "ip", "link", "add", bridge, "address", mac, "type", "bridge"); err != nil {
		return "", err
	}
	if _, err := command(ctx, "ip", "link", "set", bridge, "up"); err != nil {
		return "", err
	}
	taps := [2]string{"a" + bridge, "b" + bridge}
	line, err := startDelay(ctx, h.cfg.Delay, [2]string{h.fleet.bridge, bridge}, taps)
	h.delay = line
	return bridge, err
}

// writeFiles fills the upper layer with what is the host's own.
func (h *Host) writeFiles(ctx context.Context) error {
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{"", 0o755},
		{"work", 0o755},
		{"root", 0o755},
		{"upper", 0o755},
		{"upper/etc", 0o755},
		{"upper/etc/ssh", 0o755},
		{"upper/etc/ssh/sshd_config.d", 0o755},
		{"upper/root", 0o700},
		{"upper/root/.ssh", 0o700},
	} {
		if err := os.Mkdir(filepath.Join(h.dir, d.path), d.mode); err != nil {
			return err
		}
	}
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return err
	}
	pub, err := os.ReadFile(h.fleet.KeyFile() + ".pub")
	if err != nil {
		return err
	}
	sshd := h.cfg.SSHDConfig + "\n"
	if h.cfg.NoPenalties {
		sshd += "PerSourcePenalties no\n"
	}
	for _, f := range []struct {
		path, text string
		mode       os.FileMode
	}{
		{"etc/hostname", h.Name + "\n", 0o644},
		{"etc/hosts", "127.0.0.1 localhost\n127.0.1.1 " + h.Name + "\n::1 localhost\n", 0o644},
		{"etc/machine-id", hex.EncodeToString(id) + "\n", 0o444},
		// sshd takes the first value it reads: the host's before the image's.
		{"etc/ssh/sshd_config.d/05-host.conf", sshd, 0o644},
		{"root/.ssh/authorized_keys", string(pub), 0o600},
	} {
		if err := os.WriteFile(filepath.Join(h.dir, "upper", f.path), []byte(f.text), f.mode); err != nil {
			return err
		}
	}
	for _, kind := range h.keyTypes() {
		if err := sshKey(ctx, filepath.Join(h.dir, "upper/etc/ssh/ssh_host_"+kind+"_key"), kind, h.Name); err != nil {
			return err
		}
	}
	return nil
}

// makeStore gives the host a small store. It lies outside the host, so that its
// content outlives a reboot.
func (h *Host) makeStore(ctx context.Context) error {
	if h.net.Mount == "" {
		return nil
	}
	if err := os.Mkdir(h.net.Mount, 0o755); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", h.net.Mount, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=1775", h.cfg.StoreMiB)); err != nil {
		return fmt.Errorf("mounting the small store: %w", err)
	}
	_, err := command(ctx, "cp", "-a", filepath.Join(h.fleet.image.layer, "nix/store")+"/.", h.net.Mount)
	return err
}

// nspawnArgs is the command line of one boot.
func (h *Host) nspawnArgs() []string {
	args := []string{
		"--quiet", "--directory=" + filepath.Join(h.dir, "root"), "--machine=" + h.net.Netns, "--hostname=" + h.Name,
		"--register=no", "--keep-unit", "--network-namespace-path=/run/netns/" + h.net.Netns,
		// Not --boot, which looks for systemd itself: this program obeys the boot default first.
		"--kill-signal=SIGRTMIN+3", "--console=read-only", "--resolv-conf=off", "--timezone=off", "--link-journal=no",
	}
	if h.cfg.NetAdmin {
		args = append(args, "--capability=CAP_NET_ADMIN")
	}
	return append(args, "/sbin/tf-hosts-init")
}

// start boots the host and waits until it is up.
func (h *Host) start(ctx context.Context) error {
	// A host that took its link down before it ended gets it back, as on any boot.
	if _, err := command(ctx, "ip", "-n", h.net.Netns, "link", "set", "eth0", "up"); err != nil {
		return err
	}
	console, err := os.OpenFile(h.consoleFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	argv := append([]string{
		"--mount", "--propagation", "private", "sh", "-euc", bootScript, "sh",
		h.fleet.image.layer + ":" + h.fleet.image.base, h.dir, h.net.Cgroup,
	}, h.nspawnArgs()...)
	cmd := exec.Command("unshare", argv...) // outlives ctx, which bounds the boot alone
	cmd.Stdout, cmd.Stderr = console, console
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C at the terminal is not for the hosts
	h.mu.Lock()
	if h.closing {
		h.mu.Unlock()
		return errors.Join(errors.New("the fleet is closing"), console.Close())
	}
	if err := cmd.Start(); err != nil {
		h.mu.Unlock()
		return errors.Join(err, console.Close())
	}
	gone := make(chan struct{})
	h.nspawn, h.gone, h.init = cmd, gone, 0
	h.boots++
	h.mu.Unlock()
	h.fleet.wg.Add(1)
	go h.watch(cmd, gone, console)

	if err := h.recordProcesses(cmd.Process.Pid); err != nil {
		return err
	}
	if err := h.waitInit(ctx, cmd.Process.Pid, gone); err != nil {
		return h.bootError(err)
	}
	if err := h.waitUp(ctx, gone); err != nil {
		return h.bootError(err)
	}
	return nil
}

func (h *Host) bootError(err error) error {
	console, _ := h.Console()
	return fmt.Errorf("%w\nconsole:\n%s", err, lastLines(console, 25))
}

// rebootCode is nspawn's exit code when the host asked for a reboot and nspawn
// cannot start it again by itself, because the network namespace was given to it.
const rebootCode = 133

// watch waits for the end of one boot and boots again after a reboot.
func (h *Host) watch(cmd *exec.Cmd, gone chan struct{}, console *os.File) {
	defer h.fleet.wg.Done()
	_ = cmd.Wait() // the exit code says how it ended
	_ = console.Close()
	h.mu.Lock()
	closing := h.closing
	h.mu.Unlock()
	close(gone)
	if closing || cmd.ProcessState.ExitCode() != rebootCode {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), bootLimit)
	defer cancel()
	if err := h.start(ctx); err != nil {
		h.note("starting again after a reboot: " + err.Error())
	}
}

// note adds a line to the console log.
func (h *Host) note(line string) {
	f, err := os.OpenFile(h.consoleFile(), os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return
	}
	_, _ = fmt.Fprintf(f, "\nfleettest: %s\n", line)
	_ = f.Close()
}

func (h *Host) recordProcesses(pids ...int) error {
	var ps []process
	for _, pid := range pids {
		p, err := processOf(pid)
		if err != nil {
			if isNotExist(err) {
				continue // ended already; the watcher knows
			}
			return err
		}
		ps = append(ps, p)
	}
	return h.fleet.update(func(r *record) {
		rec := r.Hosts[h.Name]
		rec.Processes = ps
		r.Hosts[h.Name] = rec
	})
}

var errEnded = errors.New("the host ended while it booted")

// waitInit finds the host's first process: the child of nspawn that is pid 1 in
// a pid namespace.
func (h *Host) waitInit(ctx context.Context, nspawn int, gone <-chan struct{}) error {
	return poll(ctx, bootLimit, 10*time.Millisecond, "the host's first process", func() (bool, error) {
		if isClosed(gone) {
			return false, errEnded
		}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", nspawn, nspawn))
		if err != nil {
			return false, nil
		}
		for _, word := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(word)
			if err != nil || innerPID(pid) != "1" {
				continue
			}
			h.mu.Lock()
			h.init = pid
			h.mu.Unlock()
			return true, h.recordProcesses(nspawn, pid)
		}
		return false, nil
	})
}

// innerPID is the pid that a process has in its innermost pid namespace.
func innerPID(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ""
	}
	for _, line := range strings.Split(string(b), "\n") {
		if rest, ok := strings.CutPrefix(line, "NSpid:"); ok {
			if f := strings.Fields(rest); len(f) > 1 {
				return f[len(f)-1]
			}
		}
	}
	return ""
}

// waitUp waits for the end of the boot. sshd tells systemd when it listens, so
// no connection is needed to know.
func (h *Host) waitUp(ctx context.Context, gone <-chan struct{}) error {
	return poll(ctx, bootLimit, 20*time.Millisecond, "the end of the boot", func() (bool, error) {
		if isClosed(gone) {
			return false, errEnded
		}
		root := fmt.Sprintf("/proc/%d/root", h.initPID())
		if !exists(root+"/run/systemd/private") || !exists(root+"/run/dbus/system_bus_socket") {
			return false, nil
		}
		out, err := h.Exec(ctx, "systemctl", "is-system-running", "--wait")
		switch state := strings.TrimSpace(out); state {
		case "running":
			_, err := h.Exec(ctx, "systemctl", "is-active", "ssh.service")
			return err == nil, err
		case "degraded":
			failed, _ := h.Exec(ctx, "systemctl", "--failed", "--plain", "--no-legend")
			h.note("booted with failed units: " + failed)
			return true, nil // a system under test may have a failing unit
		case "initializing", "starting", "offline", "unknown", "":
			return false, nil
		default:
			return false, fmt.Errorf("system is %q: %w", state, err)
		}
	})
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (h *Host) initPID() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.init
}

// end ends the boot that runs, if any, and lets none follow.
func (h *Host) end() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closing = true
	if h.nspawn == nil || isClosed(h.gone) {
		return
	}
	if h.init != 0 {
		_ = syscall.Kill(h.init, syscall.SIGKILL) // nspawn is its parent and has not reaped it
	}
	_ = h.nspawn.Process.Kill()
}

func (h *Host) consoleFile() string { return filepath.Join(h.dir, "console.log") }
