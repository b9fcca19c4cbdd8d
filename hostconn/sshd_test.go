package hostconn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// sshdHost is a real sshd on loopback with keys of its own.
type sshdHost struct {
	dir      string
	port     string
	user     string
	key      string // a private key that it accepts
	hostKeys map[string]string
	log      *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startSSHD starts sshd in the foreground and stops it with the test. extra are
// lines of its configuration.
func startSSHD(t *testing.T, extra ...string) *sshdHost {
	t.Helper()
	bin := "/usr/sbin/sshd"
	if _, err := os.Stat(bin); err != nil {
		missing(t, "sshd")
	}
	me, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll("/run/sshd", 0o755); err != nil && os.Geteuid() == 0 {
		t.Fatal(err)
	}
	h := &sshdHost{dir: t.TempDir(), user: me.Username, hostKeys: make(map[string]string), log: &lockedBuffer{}}
	for _, kind := range []string{"rsa", "ecdsa", "ed25519"} {
		file := filepath.Join(h.dir, "host_"+kind)
		h.hostKeys[kind] = genKey(t, file, kind)
	}
	h.key = filepath.Join(h.dir, "user_key")
	public := genKey(t, h.key, "ed25519")
	authorized := filepath.Join(h.dir, "authorized_keys")
	writeFile(t, authorized, public)
	h.port = freePort(t)
	conf := []string{
		"ListenAddress 127.0.0.1", "Port " + h.port, "PidFile none", "StrictModes no", "UsePAM no",
		"AuthorizedKeysFile " + authorized, "PasswordAuthentication no", "KbdInteractiveAuthentication no",
		"PermitRootLogin prohibit-password", "LogLevel VERBOSE", "AllowTcpForwarding yes", "PermitUserEnvironment yes",
	}
	for kind := range h.hostKeys {
		conf = append(conf, "HostKey "+filepath.Join(h.dir, "host_"+kind))
	}
	conf = append(conf, extra...)
	config := filepath.Join(h.dir, "sshd_config")
	writeFile(t, config, strings.Join(conf, "\n")+"\n")
	cmd := exec.Command(bin, "-D", "-e", "-f", config)
	cmd.Stderr = h.log
	cmd.WaitDelay = 2 * time.Second // its children hold the pipe as long as a connection lives
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("sshd said:\n%s", h.log.String())
		}
	})
	await(t, "sshd to listen", func() bool { return strings.Contains(h.log.String(), "Server listening") })
	return h
}

// missing fails a test in CI, where nothing may be skipped, and skips it elsewhere.
func missing(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("%s is missing on this machine", what)
	}
	t.Skipf("%s is missing on this machine", what)
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(15 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func genKey(t *testing.T, file, kind string, more ...string) string {
	t.Helper()
	args := append([]string{"-q", "-t", kind, "-N", "", "-f", file}, more...)
	if kind == "rsa" {
		args = append(args, "-b", "2048")
	}
	if out, err := exec.Command("ssh-keygen", args...).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen: %v\n%s", err, out)
	}
	return readFile(t, file+".pub")
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (h *sshdHost) target() Target {
	return Target{Name: "prod.app1", Host: "127.0.0.1", User: h.user, KeyFile: h.key, HostKey: h.hostKeys["ed25519"], Options: []string{"Port=" + h.port}}
}

// logins counts connections that authenticated.
func (h *sshdHost) logins() int { return strings.Count(h.log.String(), "Accepted publickey") }

func testConfig(t *testing.T) Config {
	t.Helper()
	home := t.TempDir()
	t.Setenv("SSH_AUTH_SOCK", "")
	return Config{
		Home: home, KnownHosts: filepath.Join(home, "work", "known_hosts"), SystemConfig: "none",
		DialInterval: time.Millisecond, CommandTimeout: 20 * time.Second,
	}
}

func newTestPool(t *testing.T, cfg Config) *Pool {
	t.Helper()
	p := NewPool(cfg)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func dial(t *testing.T, p *Pool, target Target) *Conn {
	t.Helper()
	c, err := p.Dial(t.Context(), target)
	if err != nil {
		t.Fatalf("Dial(%s) = %v", target.Host, err)
	}
	return c
}

func mustRun(t *testing.T, c *Conn, cmd Command) Result {
	t.Helper()
	res, err := c.Run(t.Context(), cmd)
	if err != nil {
		t.Fatalf("Run(%q) = %v", cmd.Script, err)
	}
	return res
}

func TestRunOnRealSSHD(t *testing.T) {
	h := startSSHD(t)
	c := dial(t, newTestPool(t, testConfig(t)), h.target())
	for _, tc := range []struct {
		name   string
		cmd    Command
		stdout string
		stderr string
		code   int
	}{
		{"streams apart", Command{Script: "echo out; echo err >&2"}, "out\n", "err\n", 0},
		{"exit code", Command{Script: "exit 7"}, "", "", 7},
		{"last status is the code", Command{Script: "false"}, "", "", 1},
		{"killed by a signal", Command{Script: "kill -9 $$"}, "", "", 137},
		{"awkward arguments", Command{Script: `printf '<%s>' "$@"`, Args: []string{"", "a b", "it's", `\\`, "$HOME", "a\nb", "-n"}}, `<><a b><it's><\\><$HOME><a` + "\nb><-n>", "", 0},
		{"stdin is not swallowed", Command{Script: "cat", Stdin: bytes.Repeat([]byte("0123456789abcdef"), 8192)}, strings.Repeat("0123456789abcdef", 8192), "", 0},
		{"no stdin ends at once", Command{Script: "cat; echo end"}, "end\n", "", 0},
		{"stdin is not read", Command{Script: "echo done", Stdin: make([]byte, 1<<20)}, "done\n", "", 0},
		{"script of several lines with a here-document", Command{Script: "cat <<'EOF'\n$x 'y'\nEOF\nif true; then\n echo z\nfi"}, "$x 'y'\nz\n", "", 0},
		{"syntax error", Command{Script: "if"}, "", "", 2},
		{"script larger than one argument may be", Command{Script: ": '" + strings.Repeat("x", 200<<10) + "'; echo big"}, "big\n", "", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			res := mustRun(t, c, tc.cmd)
			if string(res.Stdout) != tc.stdout || res.Code != tc.code {
				t.Errorf("Run = code %d, stdout %.200q, stderr %q; want code %d, stdout %.200q", res.Code, res.Stdout, res.Stderr, tc.code, tc.stdout)
			}
			if tc.name != "syntax error" && string(res.Stderr) != tc.stderr {
				t.Errorf("Run: stderr = %q, want %q", res.Stderr, tc.stderr)
			}
		})
	}
	if n := h.logins(); n != 1 {
		t.Errorf("%d authentications for one Dial, want 1", n)
	}
}

func TestPinnedKeyOfEachType(t *testing.T) {
	h := startSSHD(t)
	for kind, pin := range h.hostKeys {
		t.Run(kind, func(t *testing.T) {
			target := h.target()
			target.HostKey = pin
			c := dial(t, newTestPool(t, testConfig(t)), target)
			if got := string(mustRun(t, c, Command{Script: "echo ok"}).Stdout); got != "ok\n" {
				t.Errorf("Run = %q, want ok", got)
			}
		})
	}
}

func TestChangedHostKeyIsRefusedAndNotDialledAgain(t *testing.T) {
	h := startSSHD(t)
	other := genKey(t, filepath.Join(t.TempDir(), "other"), "ed25519")
	target := h.target()
	target.HostKey = other
	p := newTestPool(t, testConfig(t))
	for range 2 {
		_, err := p.Dial(t.Context(), target)
		var changed *HostKeyError
		if !errors.As(err, &changed) {
			t.Fatalf("Dial = %v, want a *HostKeyError", err)
		}
		if changed.Got == "" || len(changed.Want) != 1 || !strings.HasPrefix(changed.Got, "ed25519 SHA256:") {
			t.Errorf("HostKeyError = %+v, want both fingerprints", changed)
		}
	}
	if n := strings.Count(h.log.String(), "Connection from"); n != 1 {
		t.Errorf("%d connections, want 1: a changed key is not retried", n)
	}
}

func TestPinOfATypeThatTheHostLostIsAChangedKey(t *testing.T) {
	h := startSSHD(t, "HostKeyAlgorithms ssh-ed25519")
	target := h.target()
	target.HostKey = h.hostKeys["ecdsa"]
	_, err := newTestPool(t, testConfig(t)).Dial(t.Context(), target)
	var changed *HostKeyError
	if !errors.As(err, &changed) || changed.Got != "" {
		t.Fatalf("Dial = %v, want a *HostKeyError without a key", err)
	}
}

func TestFirstKeyIsRememberedAndThenStrict(t *testing.T) {
	h := startSSHD(t)
	cfg := testConfig(t)
	var mu sync.Mutex
	var notices []string
	cfg.Events = func(e tfhosts.Event) {
		mu.Lock()
		defer mu.Unlock()
		notices = append(notices, e.Message)
	}
	target := h.target()
	target.HostKey = ""
	p := newTestPool(t, cfg)
	dial(t, p, target)
	dial(t, p, target)
	if len(notices) != 1 || !strings.Contains(notices[0], "SHA256:") {
		t.Errorf("notices = %q, want one with the fingerprint", notices)
	}
	known := readFile(t, cfg.KnownHosts)
	if !strings.HasPrefix(known, "[127.0.0.1]:"+h.port+" ") || strings.Count(known, "\n") != 1 {
		t.Fatalf("known_hosts = %q", known)
	}
	other := genKey(t, filepath.Join(t.TempDir(), "other"), "ecdsa")
	writeFile(t, cfg.KnownHosts, "[127.0.0.1]:"+h.port+" "+other)
	_, err := newTestPool(t, cfg).Dial(t.Context(), target)
	var changed *HostKeyError
	if !errors.As(err, &changed) {
		t.Fatalf("Dial = %v, want a *HostKeyError", err)
	}
}

func TestKnownHostsOfTheUser(t *testing.T) {
	h := startSSHD(t)
	key := strings.TrimSpace(h.hostKeys["ed25519"])
	address := "[127.0.0.1]:" + h.port
	hashed := filepath.Join(t.TempDir(), "hashed")
	writeFile(t, hashed, address+" "+key+"\n")
	if out, err := exec.Command("ssh-keygen", "-H", "-f", hashed).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen -H: %v\n%s", err, out)
	}
	wrong := strings.TrimSpace(genKey(t, filepath.Join(t.TempDir(), "wrong"), "ed25519"))
	for _, tc := range []struct {
		name, known string
		options     []string
		changed     bool
	}{
		{"by address and port", address + " " + key, nil, false},
		{"hashed", readFile(t, hashed), nil, false},
		{"by alias", "box " + key, []string{"HostKeyAlias=box"}, false},
		{"pattern", "127.0.0.* " + key, nil, false},
		{"beside lines that are malformed", "x ssh-dss AAAAB3NzaC1kc3MAAACB\nhalf\n" + address + " " + key, nil, false},
		{"another key", address + " " + wrong, nil, true},
		{"revoked", "@revoked * " + key + "\n" + address + " " + key, nil, true},
		{"unknown, strict", "", []string{"StrictHostKeyChecking=yes"}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig(t)
			if err := os.Mkdir(filepath.Join(cfg.Home, ".ssh"), 0o700); err != nil {
				t.Fatal(err)
			}
			writeFile(t, filepath.Join(cfg.Home, ".ssh", "known_hosts"), tc.known+"\n")
			target := h.target()
			target.HostKey = ""
			target.Options = append(target.Options, tc.options...)
			_, err := newTestPool(t, cfg).Dial(t.Context(), target)
			var changed *HostKeyError
			if errors.As(err, &changed) != tc.changed || (err != nil) != tc.changed {
				t.Errorf("Dial = %v, want a *HostKeyError: %v", err, tc.changed)
			}
			if _, err := os.Stat(cfg.KnownHosts); err == nil {
				t.Error("the key was remembered although it was known")
			}
		})
	}
}

func TestWrongKeyIsRefusedOnceAndForAll(t *testing.T) {
	h := startSSHD(t)
	target := h.target()
	target.KeyFile = filepath.Join(t.TempDir(), "other key")
	genKey(t, target.KeyFile, "ed25519")
	p := newTestPool(t, testConfig(t))
	for range 2 {
		_, err := p.Dial(t.Context(), target)
		if !errors.Is(err, ErrAuth) || !strings.Contains(err.Error(), target.KeyFile) {
			t.Fatalf("Dial = %v, want ErrAuth with the key file", err)
		}
	}
	if n := strings.Count(h.log.String(), "Connection from"); n != 1 {
		t.Errorf("%d connections, want 1: a wrong key is not retried", n)
	}
}

func TestUnusableKeyFiles(t *testing.T) {
	dir := t.TempDir()
	encrypted := filepath.Join(dir, "encrypted")
	genKey(t, encrypted, "ed25519", "-N", "secret words")
	writeFile(t, filepath.Join(dir, "junk"), "not a key\n")
	for _, tc := range []struct{ file, want string }{
		{"missing", "no such file"},
		{"encrypted", "ssh-add"},
		{"junk", "no private key"},
	} {
		t.Run(tc.file, func(t *testing.T) {
			path := filepath.Join(dir, tc.file)
			_, err := newTestPool(t, testConfig(t)).Dial(t.Context(), Target{Host: "127.0.0.1", User: "x", KeyFile: path})
			if !errors.Is(err, ErrAuth) || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("Dial = %v, want ErrAuth with %q and the path", err, tc.want)
			}
		})
	}
}

func TestForward(t *testing.T) {
	h := startSSHD(t)
	c := dial(t, newTestPool(t, testConfig(t)), h.target())
	for network, addr := range map[string]string{"tcp": "127.0.0.1:0", "unix": filepath.Join(t.TempDir(), "s")} {
		l, err := net.Listen(network, addr)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			nc, err := l.Accept()
			if err == nil {
				_, _ = fmt.Fprint(nc, "hello")
				_ = nc.Close()
			}
		}()
		nc, err := c.DialContext(t.Context(), network, l.Addr().String())
		if err != nil {
			t.Fatalf("DialContext(%s) = %v", network, err)
		}
		var b bytes.Buffer
		_, _ = b.ReadFrom(nc)
		_ = nc.Close()
		<-done
		_ = l.Close()
		if b.String() != "hello" {
			t.Errorf("%s: read %q, want hello", network, b.String())
		}
	}
	if _, err := c.DialContext(t.Context(), "tcp", "127.0.0.1:1"); err == nil || errors.Is(err, ErrLost) {
		t.Errorf("DialContext to a closed port = %v, want an error that is not ErrLost", err)
	}
}

func TestJumpHostIsSharedAndChecked(t *testing.T) {
	bastion, h := startSSHD(t), startSSHD(t)
	cfg := testConfig(t)
	target := h.target()
	target.Options = append(target.Options, "ProxyJump="+bastion.user+"@127.0.0.1:"+bastion.port)
	target.KeyFile = h.key
	writeFile(t, filepath.Join(bastion.dir, "authorized_keys"), readFile(t, h.key+".pub"))
	p := newTestPool(t, cfg)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c, err := p.Dial(context.WithoutCancel(t.Context()), target)
			if err != nil {
				t.Errorf("Dial = %v", err)
				return
			}
			if res, err := c.Run(t.Context(), Command{Script: "echo ok"}); err != nil || string(res.Stdout) != "ok\n" {
				t.Errorf("Run = %q, %v", res.Stdout, err)
			}
		})
	}
	wg.Wait()
	if b, n := bastion.logins(), h.logins(); b != 1 || n != 4 {
		t.Errorf("authentications = %d on the bastion, %d on the host; want 1, 4", b, n)
	}
	if !strings.Contains(readFile(t, cfg.KnownHosts), "[127.0.0.1]:"+bastion.port+" ") {
		t.Error("the bastion's key was not remembered")
	}

	writeFile(t, cfg.KnownHosts, "[127.0.0.1]:"+bastion.port+" "+h.hostKeys["ed25519"])
	_, err := newTestPool(t, cfg).Dial(t.Context(), target)
	var changed *HostKeyError
	if !errors.As(err, &changed) || !strings.HasSuffix(changed.Host, bastion.port) {
		t.Errorf("Dial through a bastion with a changed key = %v, want its *HostKeyError", err)
	}
}

func TestStreamIsCleanFromTheFirstByte(t *testing.T) {
	h := startSSHD(t)
	c := dial(t, newTestPool(t, testConfig(t)), h.target())
	s, err := c.Stream(t.Context(), Command{Script: "echo tail >&2; exec cat"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := s.Read(b); err != nil || string(b) != "ping" {
		t.Fatalf("Read = %q, %v", b, err)
	}
	if err := s.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Read(b); n != 0 || err == nil {
		t.Errorf("Read after the end = %d, %v", n, err)
	}
	if code, err := s.Wait(); code != 0 || err != nil {
		t.Errorf("Wait = %d, %v", code, err)
	}
	if got := string(s.Stderr()); got != "tail\n" {
		t.Errorf("Stderr = %q, want tail", got)
	}
	_ = s.Close()
}
