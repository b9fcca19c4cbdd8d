package runner

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// tool is a program of this machine that a test of the script needs.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		if os.Getenv("TF_HOSTS_REQUIRE_HOSTS") != "" {
			t.Fatalf("looking for %q: %v; tools/deps tests installs it", name, err)
		}
		t.Skipf("no %s here; tools/deps tests installs it", name)
	}
	return path
}

// stand is a folder that the script takes for a host: three systems, one of which
// runs, one of which is the profile and one the boot default.
type stand struct {
	t     *testing.T
	root  string
	shell []string
}

const standSTC = `#!/bin/sh
self=$(dirname "$(dirname "$0")") ROOT=@root@
. "$self/behaviour"
before "$1"
case $1 in
test | switch) ln -sfn "$self" "$ROOT/run/current-system" ;;
esac
case $1 in
boot | switch) echo "options init=$self/init" >"$ROOT/boot/loader/entries/x.conf" ;;
esac
after "$1"
exit 0
`

const standNixEnv = `#!/bin/sh
P=$2
[ ! -e @root@/set-fails ] || [ "$3" != --set ] || exit 1
case $3 in
--set)
	n=7
	ln -s "$4" "${P%/*}/system-7-link"
	;;
--switch-generation) n=$4 ;;
esac
ln -sfn "system-$n-link" "$P"
`

func newStand(t *testing.T, shell ...string) *stand {
	t.Helper()
	s := &stand{t: t, root: t.TempDir(), shell: shell}
	for _, dir := range []string{"run/nixos", "boot/loader/entries", "nix/var/nix/profiles", "nix/var/nix/gcroots/tf-hosts", "var/lib/tf-hosts/runs/r"} {
		s.must(os.MkdirAll(filepath.Join(s.root, dir), 0o755))
	}
	for _, name := range []string{"ran", "profile", "default", "new"} {
		s.must(os.MkdirAll(s.store(name)+"/bin", 0o755))
		s.must(os.MkdirAll(s.store(name)+"/sw/bin", 0o755))
		s.must(os.MkdirAll(s.store(name)+"/etc/systemd/system", 0o755))
		s.write("nix/store/"+name+"/bin/switch-to-configuration", standSTC)
		s.write("nix/store/"+name+"/sw/bin/nix-env", standNixEnv)
		s.behaviour(name, "", "")
		if shell[0] != "dash" {
			s.must(exec.Command(tool(t, "busybox"), "--install", "-s", s.store(name)+"/sw/bin").Run())
		}
	}
	s.must(os.Symlink(s.store("ran"), s.root+"/run/current-system"))
	s.must(os.Symlink(s.store("profile"), s.root+"/nix/var/nix/profiles/system-5-link"))
	s.must(os.Symlink(s.store("default"), s.root+"/nix/var/nix/profiles/system-6-link"))
	s.must(os.Symlink("system-5-link", s.root+"/nix/var/nix/profiles/system"))
	s.write("boot/loader/loader.conf", "default x.conf\n")
	s.write("boot/loader/entries/x.conf", "options init="+s.store("default")+"/init\n")
	s.write("script", string(activateScript))
	s.write("decide", decideScript)
	for file, text := range map[string]string{
		"new": s.store("new"), "action": "switch", "limit": "20", "guard": "1", "policy": "fail",
		"inhibitor": "", "wait": "20", "who": "test",
	} {
		s.record(file, text)
	}
	return s
}

func (s *stand) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *stand) store(name string) string { return s.root + "/nix/store/" + name }

// write puts a file there, with the host's paths below the stand's folder.
func (s *stand) write(path, text string) {
	s.t.Helper()
	text = strings.ReplaceAll(text, "@root@", s.root)
	if !strings.Contains(text, s.root) {
		for _, dir := range []string{"/nix/var/nix/", "/nix/store/", "/run/", "/boot/", "/var/lib/tf-hosts"} {
			text = strings.ReplaceAll(text, dir, s.root+dir)
		}
	}
	s.must(os.WriteFile(filepath.Join(s.root, path), []byte(text), 0o755))
}

func (s *stand) record(file, text string) {
	s.t.Helper()
	s.must(os.WriteFile(s.root+"/var/lib/tf-hosts/runs/r/"+file, []byte(text+"\n"), 0o644))
}

// behaviour is shell that a system's switch runs before and after its work; $1 is
// the action.
func (s *stand) behaviour(name, before, after string) {
	s.write("nix/store/"+name+"/behaviour", "before() { :; "+before+"\n}\nafter() { :; "+after+"\n}\n")
}

func (s *stand) command(verb ...string) *exec.Cmd {
	argv := append(append([]string{}, s.shell...), s.root+"/script", verb[0], s.root+"/var/lib/tf-hosts/runs/r")
	cmd := exec.Command(argv[0], append(argv[1:], verb[1:]...)...)
	log, err := os.OpenFile(s.root+"/var/lib/tf-hosts/runs/r/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	s.must(err)
	s.t.Cleanup(func() { _ = log.Close() })
	cmd.Stdout, cmd.Stderr = log, log
	return cmd
}

func (s *stand) get(file string) string {
	b, _ := os.ReadFile(s.root + "/var/lib/tf-hosts/runs/r/" + file) // absent is empty
	return strings.TrimSpace(string(b))
}

// until waits for a phase of the record.
func (s *stand) until(phase string) {
	s.t.Helper()
	for end := time.Now().Add(time.Minute); s.get("phase") != phase; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("the record came to phase %q, not to %q\n%s", s.get("phase"), phase, s.get("log"))
		}
	}
}

func (s *stand) decide(word string) string {
	s.t.Helper()
	out, err := exec.Command(s.shell[0], append(append([]string{}, s.shell[1:]...), s.root+"/decide", "r", word, "")...).Output()
	s.must(err)
	return strings.TrimSpace(string(out))
}

// has are what runs, the profile's link, and the boot default.
func (s *stand) has() string {
	running, _ := os.Readlink(s.root + "/run/current-system")
	profile, _ := os.Readlink(s.root + "/nix/var/nix/profiles/system")
	entry, _ := os.ReadFile(s.root + "/boot/loader/entries/x.conf")
	fallback := filepath.Base(filepath.Dir(strings.TrimSpace(strings.TrimPrefix(string(entry), "options init="))))
	return filepath.Base(running) + " " + profile + " " + fallback
}

const (
	asBefore = "ran system-5-link default"
	asWanted = "new system-7-link new"
)

func shells() map[string][]string {
	return map[string][]string{"dash": {"dash"}, "busybox": {"busybox", "sh"}}
}

// TestActivateScript runs the script of the host under both shells, from a host
// whose running system, profile and boot default are three.
func TestActivateScript(t *testing.T) {
	tool(t, "dash")
	tool(t, "flock")
	for _, row := range []struct {
		name          string
		before, after string // of the new system
		record        map[string]string
		prepare       func(*stand)
		word          string // what the deployer decides, when asked
		verdict, has  string
	}{
		{name: "confirmed", word: "confirmed", verdict: "deployed", has: asWanted},
		{name: "nobody answers", verdict: "rolled_back no confirmation came within 1 s", has: asBefore},
		{name: "sent back", word: "expired", record: map[string]string{"guard": "60", "why": "a check failed"}, verdict: "rolled_back a check failed", has: asBefore},
		{name: "the switch fails", before: "[ $1 != test ] || exit 3", verdict: "rolled_back the switch exited 3", has: asBefore},
		{name: "the switch fails after its work", after: "[ $1 != test ] || exit 2", verdict: "rolled_back the switch exited 2", has: asBefore},
		{name: "the switch hangs", after: "[ $1 != test ] || sleep 60", record: map[string]string{"limit": "1"}, verdict: "rolled_back the switch did not end within 1 s", has: asBefore},
		{name: "boot fails", word: "confirmed", after: "[ $1 != boot ] || exit 1", verdict: "rolled_back making it the boot default exited 1", has: asBefore},
		{name: "the profile cannot be set", word: "confirmed", prepare: func(s *stand) { s.write("set-fails", "") }, verdict: "rolled_back the profile could not be set", has: asBefore},
		{name: "an inhibitor stops it", before: "[ $1 != test ] || exit 100", verdict: "init_changed", has: asBefore},
		{name: "an inhibitor, then boot", before: "[ $1 != test ] || exit 100", record: map[string]string{"inhibitor": "boot"}, verdict: "reboot_pending the init interface changed (exit 100)", has: "ran system-7-link new"},
		{name: "the old system does not come back", prepare: func(s *stand) { s.behaviour("ran", "[ $1 != test ] || exit 5", "") }, verdict: "rollback_failed no confirmation came within 1 s", has: "new system-5-link default"},
		{name: "plain", record: map[string]string{"guard": "0"}, verdict: "deployed", has: asWanted},
		{name: "plain, and it fails", record: map[string]string{"guard": "0"}, after: "[ $1 != switch ] || exit 2", verdict: "rolled_back the switch exited 2", has: asBefore},
	} {
		for name, shell := range shells() {
			t.Run(row.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				tool(t, shell[0])
				s := newStand(t, shell...)
				s.behaviour("new", row.before, row.after)
				for file, text := range row.record {
					s.record(file, text)
				}
				if row.prepare != nil {
					row.prepare(s)
				}
				if row.word != "" {
					s.record("guard", "60")
				}
				cmd := s.command("run")
				s.must(cmd.Start())
				if row.word != "" {
					s.until("confirm")
					if got := s.has(); got != "new system-5-link default" {
						t.Errorf("while it waits the host has %q, want only the running system changed", got)
					}
					if got := s.decide(row.word); got != row.word {
						t.Errorf("decision = %q, want %q", got, row.word)
					}
				}
				s.must(cmd.Wait())
				if diff := cmp.Diff([]string{row.verdict, row.has}, []string{s.get("verdict"), s.has()}); diff != "" {
					t.Errorf("verdict and host (-want +got):\n%s\n%s", diff, s.get("log"))
				}
				// A record is used once.
				s.must(s.command("run").Run())
				if got := s.has(); got != row.has {
					t.Errorf("a second start changed the host to %q", got)
				}
			})
		}
	}
}

// TestActivateScriptKilled: the process ends in the middle; who settles the record
// finds the host as a whole, whether it has booted since or not.
func TestActivateScriptKilled(t *testing.T) {
	for _, row := range []struct {
		name, phase  string
		word         string
		reboot       bool
		verdict, has string
	}{
		{"in the switch", "test", "", false, "rolled_back killed", asBefore},
		{"while it waits", "confirm", "", false, "rolled_back killed", asBefore},
		{"after the confirmation", "boot", "confirmed", false, "deployed", asWanted},
		{"in the switch, and it booted", "test", "", true, "rolled_back killed", asBefore},
		{"after the confirmation, and it booted the old one", "boot", "confirmed", true, "rolled_back killed", asBefore},
	} {
		for name, shell := range shells() {
			t.Run(row.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				tool(t, shell[0])
				s := newStand(t, shell...)
				s.record("guard", "60")
				s.behaviour("new", "", `[ -e @root@/settling ] || case $1 in `+map[string]string{"test": "test", "boot": "boot", "confirm": "none"}[row.phase]+`) touch @root@/stuck; sleep 60 ;; esac`)
				cmd := s.command("run")
				s.must(cmd.Start())
				if row.word != "" {
					s.until("confirm")
					s.decide(row.word)
				}
				s.until(row.phase)
				if row.phase != "confirm" {
					for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
						if _, err := os.Stat(s.root + "/stuck"); err == nil {
							break
						}
					}
				}
				s.must(cmd.Process.Kill())
				_ = cmd.Wait() // it was killed
				s.write("settling", "")
				if row.reboot {
					s.record("oldboot", "another boot")
					s.must(exec.Command("ln", "-sfn", s.store("ran"), s.root+"/run/current-system").Run())
				}
				s.must(s.command("settle", "killed").Run())
				if diff := cmp.Diff([]string{row.verdict, row.has}, []string{s.get("verdict"), s.has()}); diff != "" {
					t.Errorf("verdict and host (-want +got):\n%s\n%s", diff, s.get("log"))
				}
			})
		}
	}
}

// TestUnitsOfAKilledSwitchAreDropped: what it had still to start is not started by
// the way back, unless the old system has it.
func TestUnitsOfAKilledSwitchAreDropped(t *testing.T) {
	for name, shell := range shells() {
		t.Run(name, func(t *testing.T) {
			tool(t, shell[0])
			s := newStand(t, shell...)
			s.record("limit", "1")
			s.behaviour("new", "", `printf 'old.service\nnew.service\nlogin@tty1.service\n' >@root@/run/nixos/start-list; sleep 60`)
			s.behaviour("ran", "[ $1 != test ] || mv @root@/run/nixos/start-list @root@/seen", "")
			s.write("nix/store/ran/etc/systemd/system/old.service", "")
			s.write("nix/store/ran/etc/systemd/system/login@.service", "")
			s.must(s.command("run").Run())
			got, err := os.ReadFile(s.root + "/seen")
			if err != nil || string(got) != "old.service\nlogin@tty1.service\n" {
				t.Errorf("the old system was told to start %q, %v", got, err)
			}
		})
	}
}

// TestConfirmRace: confirmations come around the deadline. What the confirmer is
// told is what the host did.
func TestConfirmRace(t *testing.T) {
	tool(t, "dash")
	const n = 40
	seen := map[string]int{}
	var mu sync.Mutex
	for i := range n {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			s := newStand(t, "dash")
			cmd := s.command("run")
			s.must(cmd.Start())
			s.until("confirm")
			time.Sleep(time.Duration(i) * 1400 * time.Millisecond / n) // its place around the deadline
			told := s.decide("confirmed")
			s.must(cmd.Wait())
			want, has := "deployed", asWanted
			if told != "confirmed" {
				want, has = "rolled_back no confirmation came within 1 s", asBefore
			}
			if got := s.get("verdict"); got != want || s.has() != has {
				t.Errorf("the confirmer was told %q, the verdict is %q, the host has %s", told, got, s.has())
			}
			mu.Lock()
			defer mu.Unlock()
			seen[told]++
		})
	}
	t.Cleanup(func() {
		if seen["confirmed"] == 0 || seen["expired"] == 0 {
			t.Errorf("confirmations were told %v, want some of each", seen)
		}
	})
}

func TestActivateScriptIsClean(t *testing.T) {
	out, err := exec.Command(tool(t, "shellcheck"), "--severity=style", "activate.sh").CombinedOutput()
	if err != nil {
		t.Errorf("shellcheck: %v\n%s", err, out)
	}
}
