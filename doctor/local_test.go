package doctor

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gofrs/flock"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/nix"
)

func write(t *testing.T, path, text string, mode os.FileMode) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil { // past the umask
		t.Fatal(err)
	}
	return path
}

func TestWorkDir(t *testing.T) {
	const address = "http://a/state"
	const dir, ledger, lock, salvage = "workdir", "workdir ledger", "workdir lock", "workdir salvage"
	for _, tt := range []struct {
		name  string
		spoil func(t *testing.T, stateDir string)
		want  map[string]want
	}{
		{"not there yet", func(*testing.T, string) {}, map[string]want{dir: {OK, "is made by the first run", ""}, ledger: {}, lock: {}}},
		{
			"all is well", func(t *testing.T, d string) { writeLedger(t, d, address, bootstrap.Ledger{Mode: bootstrap.ModeRemote}) },
			map[string]want{dir: {level: OK}, ledger: {OK, "on the backend", ""}, lock: {OK, "free", ""}, salvage: {level: OK}, "workdir space": {OK, "are free", ""}},
		},
		{
			"others can enter", func(t *testing.T, d string) {
				if err := os.Chmod(writeLedger(t, d, address, bootstrap.Ledger{}), 0o755); err != nil {
					t.Fatal(err)
				}
			}, map[string]want{dir: {Warn, "0755", "chmod 700 "}},
		},
		{
			"a file is in the way", func(t *testing.T, d string) { write(t, bootstrap.WorkDir(d, address), "", 0o600) },
			map[string]want{dir: {Fail, "no folder", "BOOTSTRAP_STATE_DIR"}, ledger: {}},
		},
		{
			"torn ledger", func(t *testing.T, d string) {
				write(t, filepath.Join(bootstrap.WorkDir(d, address), "ledger.json"), "{", 0o600)
			}, map[string]want{ledger: {Fail, "ledger.json", "move it away"}},
		},
		{
			"another state's", func(t *testing.T, d string) {
				write(t, filepath.Join(bootstrap.WorkDir(d, address), "ledger.json"), `{"version":1,"address":"http://b"}`, 0o600)
			}, map[string]want{ledger: {Fail, "http://b", "--state-dir"}},
		},
		{
			"stopped in cycle 1", func(t *testing.T, d string) {
				writeLedger(t, d, address, bootstrap.Ledger{Mode: bootstrap.ModeBootstrapping})
			},
			map[string]want{ledger: {Warn, "bootstrap", "BOOTSTRAP=1 tf-hosts apply"}},
		},
		{
			"detached", func(t *testing.T, d string) {
				writeLedger(t, d, address, bootstrap.Ledger{Mode: bootstrap.ModeDetached})
			},
			map[string]want{ledger: {Warn, "detached", "BOOTSTRAP=1 tf-hosts apply"}},
		},
		{
			"a state waits", func(t *testing.T, d string) {
				w := writeLedger(t, d, address, bootstrap.Ledger{})
				write(t, filepath.Join(w, "salvage", "one.tfstate"), testState, 0o600)
				write(t, filepath.Join(w, "salvage", "two.tfstate.stored"), testState, 0o600)
				write(t, filepath.Join(w, "runs", "r", "errored.tfstate"), testState, 0o600)
			}, map[string]want{salvage: {Warn, "2 states could not be stored", "tf-hosts apply"}},
		},
		{
			"a run is under way", func(t *testing.T, d string) {
				w := writeLedger(t, d, address, bootstrap.Ledger{})
				l := flock.New(write(t, filepath.Join(w, "lock"), `{"who":"ann@box","verb":"apply","pid":7}`, 0o600))
				if ok, err := l.TryLock(); !ok || err != nil {
					t.Fatal(ok, err)
				}
				t.Cleanup(func() { l.Close() })
			}, map[string]want{lock: {Warn, "apply of ann@box (pid 7", "wait"}, salvage: {}},
		},
		{
			"a run died", func(t *testing.T, d string) {
				write(t, filepath.Join(writeLedger(t, d, address, bootstrap.Ledger{}), "lock"), `{"who":"ann@box","verb":"apply","pid":7}`, 0o600)
			}, map[string]want{lock: {OK, "free", ""}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stateDir := filepath.Join(t.TempDir(), "work")
			tt.spoil(t, stateDir)
			workDir := bootstrap.WorkDir(stateDir, address)
			r := &run{Config: Config{Setup: &tfhosts.Setup{}, WorkDir: workDir, ReadWorkDir: func() (WorkDir, error) {
				w, err := bootstrap.ExamineWorkDir(workDir, address)
				return WorkDir{string(w.Mode), w.Salvage, w.Journaled, w.Holder}, err
			}}}
			r.checkWorkDir(context.Background())
			got := byCheck(t, r.results)
			for check, w := range tt.want {
				w.check(t, got, check)
			}
			if tt.name == "not there yet" {
				if _, err := os.Stat(stateDir); err == nil {
					t.Error("a look made the working dir")
				}
			}
		})
	}
}

func TestNix(t *testing.T) {
	for _, tt := range []struct {
		name, script string
		want         want
	}{
		{"not installed", "", want{Fail, "not installed", "nix 2.8"}},
		{"too old", "#!/bin/sh\necho 'nix (Nix) 2.3.16'\n", want{Fail, "version 2.3.16, at least 2.8", "nix 2.8"}},
		{"does not answer", "#!/bin/sh\nexit 3\n", want{Fail, "exit status 3", "nix --version"}},
		{"can not open its store", "#!/bin/sh\ncase \"$*\" in *--version*) echo 'nix (Nix) 2.31pre1' ;; *) echo 'error: no store' >&2; exit 1 ;; esac\n", want{Fail, "no store", "nix-instantiate"}},
		{"fine", "#!/bin/sh\ncase \"$*\" in *--version*) echo 'nix (Lix, like Nix) 2.91.0' ;; *) echo 2 ;; esac\n", want{OK, "2.91.0", ""}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.script != "" {
				write(t, filepath.Join(dir, "nix"), tt.script, 0o755)
				write(t, filepath.Join(dir, "nix-instantiate"), tt.script, 0o755)
			}
			r := &run{Config: Config{Nix: nix.New(nix.Config{BinDir: dir})}}
			r.checkNix(context.Background())
			tt.want.check(t, byCheck(t, r.results), "nix")
		})
	}
}

func keygen(t *testing.T, path, passphrase string) string {
	t.Helper()
	if out, err := exec.Command("ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen: %v\n%s", err, out)
	}
	return path
}

func TestKey(t *testing.T) {
	t.Setenv("SSH_AUTH_SOCK", "")
	dir := t.TempDir()
	chmod := func(path string, mode os.FileMode) string {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := closed.Addr().(*net.TCPAddr).Port
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, path string
		want       want
		dialled    bool
	}{
		{"fine", keygen(t, filepath.Join(dir, "fine"), ""), want{OK, "SHA256:", ""}, true},
		{"others can read it", chmod(keygen(t, filepath.Join(dir, "open"), ""), 0o644), want{Fail, "0644", "chmod 600 " + dir + "/open"}, true},
		{"the group can read it", chmod(keygen(t, filepath.Join(dir, "group"), ""), 0o640), want{Warn, "0640", "chmod 600 " + dir + "/group"}, true},
		{"missing", filepath.Join(dir, "none"), want{Fail, "no such file", "ssh-keygen -t ed25519 -f " + dir + "/none"}, false},
		{"encrypted, no agent", keygen(t, filepath.Join(dir, "locked"), "passphrase"), want{Fail, "encrypted", "ssh-add " + dir + "/locked"}, false},
		{"no key at all", write(t, filepath.Join(dir, "text"), "hello", 0o600), want{Fail, "no private key", "ssh-add"}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pool := hostconn.NewPool(hostconn.Config{UserConfig: "none", SystemConfig: "none", DialInterval: time.Millisecond})
			defer pool.Close()
			results := Run(context.Background(), Config{
				Pool: pool, Nix: nix.New(nix.Config{BinDir: "/nonexistent"}),
				Setup: &tfhosts.Setup{Nodes: map[string]tfhosts.SetupNode{"a": {Node: tfhosts.Node{
					Host: "127.0.0.1", Username: "root", KeyFile: tt.path, SSHOpts: fmt.Sprintf(`["Port=%d"]`, port),
				}}}},
			})
			got := byCheck(t, results)
			tt.want.check(t, got, "node a key")
			if _, ok := got["node a ssh"]; ok != tt.dialled {
				t.Errorf("node a ssh = %+v, dialled %v, want %v", got["node a ssh"], ok, tt.dialled)
			}
			want{Warn, "no host key is pinned", fmt.Sprintf("ssh-keyscan -t ed25519 -p %d 127.0.0.1", port)}.check(t, got, "node a pin")
		})
	}
}

func TestJudge(t *testing.T) {
	const whole = "now 1764460800\nnixos yes\nos NixOS 26.05\ndaemon /bin/nix-daemon\ninit systemd\nsystem running\nstore 20971520\nboot 204800\nend yes\n"
	for _, tt := range []struct {
		name, facts string
		check       string
		want        want
	}{
		{"fine", whole, "units", want{OK, "running", ""}},
		{"fine", whole, "store", want{OK, "20 GiB", ""}},
		{"fine", whole, "boot", want{OK, "200 MiB", ""}},
		{"no /boot", "now 1\nend yes\n", "boot", want{}},
		{"small /boot", whole + "boot 40960\n", "boot", want{Warn, "less than 50 MiB", "configurationLimit"}},
		{"full store", whole + "store 0\n", "store", want{Warn, "less than 1.0 GiB", "nix-collect-garbage"}},
		{"no store", "now 1\nend yes\n", "store", want{Fail, "no /nix/store", "install Nix"}},
		{"no nix", "now 1\nend yes\n", "nix", want{Fail, "no nix-daemon", "install Nix"}},
		{"debian", "now 1\nos Debian GNU/Linux 13 (trixie)\nend yes\n", "system", want{Fail, "not NixOS but Debian GNU/Linux 13", "install NixOS"}},
		{"degraded", whole + "system degraded\nfailed a.service\nfailed b.service\n", "units", want{Warn, "a.service, b.service", "systemctl status --failed"}},
		{"still booting", whole + "system starting\n", "units", want{Warn, "still starting", "list-jobs"}},
		{"rescue", whole + "system maintenance\n", "units", want{Fail, "maintenance", "list-jobs"}},
		{"no systemd", whole + "init runit\n", "units", want{Fail, `PID 1 is "runit"`, "systemd"}},
	} {
		t.Run(tt.name+" "+tt.check, func(t *testing.T) {
			f, err := parseFacts(tt.facts)
			if err != nil {
				t.Fatal(err)
			}
			r := &run{}
			r.judge("node a ", f, hostconn.Target{Host: "h", User: "root"})
			tt.want.check(t, byCheck(t, r.results), "node a "+tt.check)
		})
	}
	for _, text := range []string{"", "now 1\n", "end yes\n", "now x\nend yes\n"} {
		if f, err := parseFacts(text); err == nil {
			t.Errorf("parseFacts(%q) = %+v, want an error", text, f)
		}
	}
}

// TestFactsScript: every line that the script prints is understood, and the
// clock is this machine's.
func TestFactsScript(t *testing.T) {
	cmd := exec.Command("/bin/sh")
	cmd.Stdin = strings.NewReader(factsScript)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	f, err := parseFacts(string(out))
	if err != nil || f.os == "" || f.init == "" || time.Since(f.now).Abs() > time.Minute {
		t.Errorf("parseFacts(%q) = %+v, %v", out, f, err)
	}
}

func TestSkew(t *testing.T) {
	now := time.Now()
	for _, tt := range []struct {
		skew time.Duration
		want want
	}{
		{0, want{OK, "agrees", ""}},
		{-29 * time.Second, want{OK, "29s behind", ""}},
		{31 * time.Second, want{Warn, "31s ahead", "set it"}},
		{-5*time.Minute - time.Second, want{Fail, "5m1s behind", "set it"}},
	} {
		r := &run{}
		r.addSkew("clock", now.Add(tt.skew), now, "set it")
		tt.want.check(t, byCheck(t, r.results), "clock")
	}
}
