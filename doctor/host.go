package doctor

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"al.essio.dev/pkg/shellescape"
	"github.com/dustin/go-humanize"

	"fediversity.eu/tf-hosts/hostconn"
)

// factsScript prints one "key value" a line and changes nothing. It finds Nix
// where a session without login shell may not look.
const factsScript = `PATH=/run/current-system/sw/bin:/nix/var/nix/profiles/default/bin:$PATH:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
LC_ALL=C
export LC_ALL
say() { printf '%s %s\n' "$1" "$2"; }
say now "$(date +%s)"
[ -e /etc/NIXOS ] && say nixos yes
[ -r /etc/os-release ] && say os "$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release | tr -d '"')"
[ -r /etc/os-release ] && grep -Eq '^ID=("?)nixos' /etc/os-release && say nixos yes
say daemon "$(command -v nix-daemon)"
say init "$(cat /proc/1/comm 2>/dev/null)"
say system "$(systemctl is-system-running 2>/dev/null)"
systemctl list-units --failed --plain --no-legend --no-pager 2>/dev/null | while read -r unit _; do say failed "$unit"; done
free() { [ -d "$2" ] && df -Pk "$2" 2>/dev/null | { read -r _ && read -r _ _ _ kib _ && say "$1" "$kib"; }; }
free store /nix/store
free boot /boot
say end yes
`

// facts are what factsScript printed.
type facts struct {
	now          time.Time
	nixos        bool
	os           string
	daemon       string
	init, system string
	failed       []string
	// free space in bytes; -1: there is no such folder.
	store, boot int64
}

func parseFacts(text string) (facts, error) {
	f := facts{store: -1, boot: -1}
	whole := false
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		number, err := strconv.ParseInt(value, 10, 64)
		switch key {
		case "now", "store", "boot":
			if err != nil {
				return f, fmt.Errorf("reading what the host says: %s is %q", key, value)
			}
		}
		switch key {
		case "now":
			f.now = time.Unix(number, 0)
		case "nixos":
			f.nixos = true
		case "os":
			f.os = value
		case "daemon":
			f.daemon = value
		case "init":
			f.init = value
		case "system":
			f.system = value
		case "failed":
			f.failed = append(f.failed, value)
		case "store":
			f.store = number << 10
		case "boot":
			f.boot = number << 10
		case "end":
			whole = true
		}
	}
	if !whole || f.now.IsZero() {
		return f, errors.New("reading what the host says: it ends too early")
	}
	return f, nil
}

// Least free space on a host.
const (
	storeWarn = 1 << 30
	bootWarn  = 50 << 20
)

// checkHost looks at the host behind conn.
func (r *run) checkHost(ctx context.Context, prefix string, conn *hostconn.Conn, t hostconn.Target, user string) {
	becoming, cancel := r.limited(ctx)
	root := r.checkBecome(becoming, prefix, conn, t, user)
	cancel()
	asking, cancel := r.limited(ctx)
	defer cancel()
	start := time.Now()
	res, err := conn.Run(asking, hostconn.Command{Script: factsScript, Become: root, Timeout: r.Limit})
	took := time.Since(start)
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("looking at the host: exit code %d: %s", res.Code, res.Stderr)
	}
	var f facts
	if err == nil {
		f, err = parseFacts(string(res.Stdout))
	}
	if err != nil {
		r.add(prefix+"system", Fail, err.Error(), "see whether it answers: "+sshCommand(t, "uptime"))
		return
	}
	// date +%s has no fractions of a second: half of one is expected.
	r.addSkew(prefix+"clock", f.now.Add(time.Second/2), start.Add(took/2), "let the host keep time: "+sshRoot(t, "timedatectl set-ntp true"))
	r.judge(prefix, f, t)
}

// checkBecome says whether the login has root's rights.
func (r *run) checkBecome(ctx context.Context, prefix string, conn *hostconn.Conn, t hostconn.Target, user string) bool {
	check := prefix + "become"
	if user == "root" {
		r.add(check, OK, "not needed: the login is root", "")
		return true
	}
	res, err := conn.Run(ctx, hostconn.Command{Script: `id -u`, Become: true, Timeout: r.Limit})
	if err == nil && (res.Code != 0 || strings.TrimSpace(string(res.Stdout)) != "0") {
		err = fmt.Errorf("%w: it leads to user ID %q (exit code %d)", hostconn.ErrBecome, strings.TrimSpace(string(res.Stdout)), res.Code)
	}
	if err != nil {
		r.add(check, Fail, err.Error(), fmt.Sprintf("as root on the host: echo %s >/etc/sudoers.d/%s (on NixOS: security.sudo.extraRules); or name a password: runner.become_password_file; to see what sudo says: %s",
			shellescape.Quote(user+" ALL=(ALL:ALL) NOPASSWD: ALL"), shellescape.Quote(user), sshCommand(t, "sudo -n true")))
		return false
	}
	r.add(check, OK, user+" becomes root", "")
	return true
}

// judge turns facts into results.
func (r *run) judge(prefix string, f facts, t hostconn.Target) {
	name := f.os
	if name == "" {
		name = "an unknown system"
	}
	if f.nixos {
		r.add(prefix+"system", OK, "NixOS ("+name+")", "")
	} else {
		r.add(prefix+"system", Fail, "not NixOS but "+name, "install NixOS there first; an activation would overwrite what it runs")
	}
	if f.daemon != "" {
		r.add(prefix+"nix", OK, f.daemon, "")
	} else {
		r.add(prefix+"nix", Fail, "there is no nix-daemon program", "install Nix there, or see what its PATH lacks: "+sshCommand(t, "command -v nix-daemon"))
	}
	r.addFree(prefix+"store", f.store, storeWarn, "collect garbage: "+sshRoot(t, "nix-collect-garbage --delete-older-than 30d"))
	if f.boot >= 0 {
		r.addFree(prefix+"boot", f.boot, bootWarn, "keep fewer generations (boot.loader.*.configurationLimit), and see what fills it: "+sshRoot(t, "du -sh /boot"))
	}
	if f.init != "systemd" {
		r.add(prefix+"units", Fail, fmt.Sprintf("PID 1 is %q, not systemd", f.init), "boot the host with systemd: activation needs it")
		return
	}
	switch f.system {
	case "running":
		r.add(prefix+"units", OK, "running", "")
	case "degraded":
		r.add(prefix+"units", Warn, "degraded, failed: "+strings.Join(f.failed, ", "), "see why: "+sshCommand(t, "systemctl status --failed"))
	case "initializing", "starting":
		r.add(prefix+"units", Warn, "the host is still "+f.system, "see what it waits for: "+sshCommand(t, "systemctl list-jobs"))
	default:
		r.add(prefix+"units", Fail, fmt.Sprintf("the host is in the state %q", f.system), "see why: "+sshCommand(t, "systemctl is-system-running; systemctl list-jobs"))
	}
}

func (r *run) addFree(check string, free, warn int64, hint string) {
	switch {
	case free < 0:
		r.add(check, Fail, "there is no /nix/store", "install Nix there")
	case free < warn:
		r.add(check, Warn, fmt.Sprintf("%s are free, less than %s", humanize.IBytes(uint64(free)), humanize.IBytes(uint64(warn))), hint)
	default:
		r.add(check, OK, humanize.IBytes(uint64(free))+" are free", "")
	}
}
