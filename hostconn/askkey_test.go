package hostconn

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestHostKeyIsAskedForWithoutALogin(t *testing.T) {
	h, other := startSSHD(t), startSSHD(t)
	pin := func(kind string) string { return strings.Join(strings.Fields(h.hostKeys[kind])[:2], " ") }
	for _, row := range []struct {
		name     string
		hostKey  string
		known    string // a line of the user's known_hosts behind the address
		standing string
		key      string
		want     int
	}{
		{name: "nothing is known", standing: KeyNew, key: pin("ed25519")},
		{name: "pinned", hostKey: h.hostKeys["ed25519"], standing: KeyPinned, key: pin("ed25519"), want: 1},
		{name: "pinned by its rsa key", hostKey: h.hostKeys["rsa"], standing: KeyPinned, key: pin("rsa"), want: 1},
		{name: "pinned by two", hostKey: h.hostKeys["rsa"] + "\n" + h.hostKeys["ed25519"], standing: KeyPinned, key: pin("ed25519"), want: 2},
		{name: "another one is pinned", hostKey: other.hostKeys["ed25519"], standing: KeyChanged, key: pin("ed25519"), want: 1},
		{name: "in known_hosts", known: h.hostKeys["ecdsa"], standing: KeyKnown, key: pin("ecdsa"), want: 1},
		{name: "another one is in known_hosts", known: other.hostKeys["ecdsa"], standing: KeyChanged, key: pin("ecdsa"), want: 1},
		{name: "pinned, and another one in known_hosts", hostKey: h.hostKeys["ed25519"], known: other.hostKeys["ecdsa"], standing: KeyPinned, key: pin("ed25519"), want: 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			cfg := testConfig(t)
			if row.known != "" {
				if err := os.MkdirAll(filepath.Join(cfg.Home, ".ssh"), 0o700); err != nil {
					t.Fatal(err)
				}
				writeFile(t, filepath.Join(cfg.Home, ".ssh/known_hosts"), "[127.0.0.1]:"+h.port+" "+row.known)
			}
			target := h.target()
			target.HostKey, target.KeyFile = row.hostKey, "/no/such/key"
			got, err := newTestPool(t, cfg).HostKey(t.Context(), target)
			if err != nil {
				t.Fatal(err)
			}
			if got.Standing != row.standing || got.Pin != row.key || len(got.Want) != row.want || !strings.Contains(got.Fingerprint, " SHA256:") {
				t.Errorf("HostKey = %+v, want %s %s with %d known", got, row.standing, row.key, row.want)
			}
			if _, err := os.Stat(cfg.KnownHosts); err == nil {
				t.Error("a key was remembered")
			}
		})
	}
	if n := h.logins(); n != 0 {
		t.Errorf("%d logins, want none", n)
	}
}

func TestHostKeyOfAHostThatLostThePinnedType(t *testing.T) {
	h := startSSHD(t, "HostKeyAlgorithms rsa-sha2-512")
	got, err := newTestPool(t, testConfig(t)).HostKey(t.Context(), h.target())
	if err != nil {
		t.Fatal(err)
	}
	if got.Standing != KeyChanged || !strings.HasPrefix(got.Pin, "ssh-rsa ") {
		t.Errorf("HostKey = %+v, want the rsa key as a changed one", got)
	}
}

func TestHostKeyBehindAJumpHost(t *testing.T) {
	bastion, h := startSSHD(t), startSSHD(t)
	target := h.target()
	target.Options = append(target.Options, "ProxyJump="+bastion.user+"@127.0.0.1:"+bastion.port)
	writeFile(t, filepath.Join(bastion.dir, "authorized_keys"), readFile(t, h.key+".pub"))
	cfg := testConfig(t)
	got, err := newTestPool(t, cfg).HostKey(t.Context(), target)
	if err != nil || got.Standing != KeyPinned {
		t.Errorf("HostKey = %+v, %v, want the pinned one", got, err)
	}
	if b, n := bastion.logins(), h.logins(); b != 1 || n != 0 {
		t.Errorf("%d logins on the jump host and %d on the host, want 1 and 0", b, n)
	}

	writeFile(t, cfg.KnownHosts, "[127.0.0.1]:"+bastion.port+" "+h.hostKeys["ed25519"])
	_, err = newTestPool(t, cfg).HostKey(t.Context(), target)
	var changed *HostKeyError
	if !errors.As(err, &changed) {
		t.Errorf("HostKey behind a jump host with a changed key = %v, want its *HostKeyError", err)
	}
}

func TestHostKeyOfAHostThatDoesNotSpeak(t *testing.T) {
	for name, f := range map[string]*fakeHost{"mute": {mute: true}, "hangs up": {hangUp: true}} {
		cfg := testConfig(t)
		cfg.HandshakeTimeout = 300 * time.Millisecond
		target := f.start(t)
		if _, err := newTestPool(t, cfg).HostKey(t.Context(), target); !errors.Is(err, ErrUnreachable) {
			t.Errorf("HostKey of a host that is %s = %v, want ErrUnreachable", name, err)
		}
	}
}
