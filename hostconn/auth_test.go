package hostconn

import (
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// startAgent serves an agent that holds keys and gives its socket.
func startAgent(t *testing.T, keys ...any) string {
	t.Helper()
	ring := agent.NewKeyring()
	for _, k := range keys {
		if err := ring.Add(agent.AddedKey{PrivateKey: k}); err != nil {
			t.Fatal(err)
		}
	}
	socket := filepath.Join(t.TempDir(), "agent")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_ = agent.ServeAgent(ring, nc) // ends with the client
				_ = nc.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		wg.Wait()
	})
	return socket
}

func rawKey(t *testing.T, path string) any {
	t.Helper()
	k, err := ssh.ParseRawPrivateKey([]byte(readFile(t, path)))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func someKey(t *testing.T) any {
	t.Helper()
	_, k, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestKeysThatAreOffered(t *testing.T) {
	h := startSSHD(t)
	key := rawKey(t, h.key)
	encrypted := filepath.Join(t.TempDir(), "encrypted")
	writeFile(t, encrypted, readFile(t, h.key))
	if err := os.Chmod(encrypted, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("ssh-keygen", "-p", "-q", "-P", "", "-N", "secret words", "-f", encrypted).CombinedOutput(); err != nil {
		t.Fatalf("ssh-keygen -p: %v\n%s", err, out)
	}
	many := []any{someKey(t), someKey(t), someKey(t), someKey(t), someKey(t), someKey(t)}
	for _, tc := range []struct {
		name    string
		agent   []any
		keyFile string
		config  string
		refused bool
	}{
		{name: "the agent's", agent: []any{someKey(t), key}},
		{name: "encrypted key_file in the agent", agent: []any{someKey(t), key}, keyFile: encrypted},
		{name: "configured key before a full agent", agent: many, config: "IdentityFile " + h.key},
		{name: "only the configured key", agent: []any{key}, config: "IdentityFile /does/not/exist\nIdentitiesOnly yes", refused: true},
		{name: "more than five", agent: append(many[:5:5], key), refused: true},
		{name: "no agent by configuration", agent: []any{key}, config: "IdentityAgent none", refused: true},
		{name: "default key", config: "# none"},
		{name: "public half in key_file", agent: []any{key}, keyFile: h.key + ".pub"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig(t)
			if tc.agent != nil {
				t.Setenv("SSH_AUTH_SOCK", startAgent(t, tc.agent...))
			}
			if err := os.Mkdir(filepath.Join(cfg.Home, ".ssh"), 0o700); err != nil {
				t.Fatal(err)
			}
			writeFile(t, filepath.Join(cfg.Home, ".ssh", "config"), tc.config+"\n")
			if tc.name == "default key" {
				writeFile(t, filepath.Join(cfg.Home, ".ssh", "id_ed25519"), readFile(t, h.key))
			}
			target := h.target()
			target.KeyFile = tc.keyFile
			_, err := newTestPool(t, cfg).Dial(t.Context(), target)
			if errors.Is(err, ErrAuth) != tc.refused || (err != nil) != tc.refused {
				t.Errorf("Dial = %v, want ErrAuth: %v", err, tc.refused)
			}
		})
	}
	if strings.Contains(h.log.String(), "Too many authentication failures") {
		t.Error("more keys were offered than sshd takes")
	}
}

func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca")
	public := genKey(t, ca, "ed25519")
	h := startSSHD(t, "TrustedUserCAKeys "+ca+".pub")
	key := filepath.Join(dir, "user")
	genKey(t, key, "ed25519")
	sign := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ssh-keygen", append([]string{"-q", "-s", ca, "-I", "id"}, args...)...).CombinedOutput(); err != nil {
			t.Fatalf("ssh-keygen -s: %v\n%s", err, out)
		}
	}
	sign("-n", h.user, key+".pub")
	target := h.target()
	target.KeyFile = key
	dial(t, newTestPool(t, testConfig(t)), target)

	// A second host whose own key is certified, known by its authority alone.
	hostKey := filepath.Join(dir, "host")
	genKey(t, hostKey, "ed25519")
	sign("-h", "-n", "127.0.0.1", hostKey+".pub")
	certified := startSSHD(t, "HostKey "+hostKey, "HostCertificate "+hostKey+"-cert.pub")
	cfg := testConfig(t)
	if err := os.Mkdir(filepath.Join(cfg.Home, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	known := filepath.Join(cfg.Home, ".ssh", "known_hosts")
	writeFile(t, known, fmt.Sprintf("@cert-authority 127.0.0.* %s", public))
	target = certified.target()
	target.HostKey = ""
	dial(t, newTestPool(t, cfg), target)

	writeFile(t, known, fmt.Sprintf("@cert-authority 127.0.0.* %s", genKey(t, filepath.Join(dir, "other"), "ed25519")))
	_, err := newTestPool(t, cfg).Dial(t.Context(), target)
	var changed *HostKeyError
	if !errors.As(err, &changed) {
		t.Errorf("Dial with another authority = %v, want a *HostKeyError", err)
	}
}

func TestIPv6(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		missing(t, "IPv6")
	}
	_ = l.Close()
	h := startSSHD(t, "ListenAddress ::1")
	for _, host := range []string{"::1", "[::1]", "::1%lo"} {
		cfg := testConfig(t)
		target := h.target()
		target.Host, target.HostKey = host, ""
		c := dial(t, newTestPool(t, cfg), target)
		if res := mustRun(t, c, Command{Script: "echo ok"}); string(res.Stdout) != "ok\n" {
			t.Errorf("%s: Run = %q", host, res.Stdout)
		}
		dial(t, newTestPool(t, cfg), target) // known by now
		if known := readFile(t, cfg.KnownHosts); strings.Count(known, "\n") != 1 {
			t.Errorf("%s: known_hosts = %q, want one line", host, known)
		}
	}
}

func TestTwoProcessesMeetAnUnknownHostAtOnce(t *testing.T) {
	h := startSSHD(t)
	cfg := testConfig(t)
	target := h.target()
	target.HostKey = ""
	var wg sync.WaitGroup
	for range 4 {
		p := newTestPool(t, cfg)
		wg.Go(func() {
			if _, err := p.Dial(t.Context(), target); err != nil {
				t.Errorf("Dial = %v", err)
			}
		})
	}
	wg.Wait()
	if known := readFile(t, cfg.KnownHosts); strings.Count(known, "\n") != 1 {
		t.Errorf("known_hosts = %q, want one line", known)
	}
}
