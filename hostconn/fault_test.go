package hostconn

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// fakeHost is an SSH server in this process, for what a real sshd does not do on
// command. It lets anyone in and runs shell for whatever command is asked.
type fakeHost struct {
	addr  string
	shell []string // how a command is run; "$cmd" is appended
	env   []string

	mute   bool // take connections and say nothing
	hangUp bool // take connections and close them
	frozen atomic.Bool
	conns  atomic.Int32
	wg     sync.WaitGroup
}

func (f *fakeHost) start(t *testing.T) Target {
	t.Helper()
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(private)
	if err != nil {
		t.Fatal(err)
	}
	conf := &ssh.ServerConfig{PublicKeyCallback: func(ssh.ConnMetadata, ssh.PublicKey) (*ssh.Permissions, error) { return nil, nil }}
	conf.AddHostKey(signer)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var open []net.Conn
	f.wg.Go(func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			f.conns.Add(1)
			mu.Lock()
			open = append(open, nc)
			mu.Unlock()
			switch {
			case f.mute:
			case f.hangUp:
				_ = nc.Close()
			default:
				f.wg.Go(func() { f.serve(nc, conf) })
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		f.frozen.Store(false)
		mu.Lock()
		for _, nc := range open {
			_ = nc.Close()
		}
		mu.Unlock()
		f.wg.Wait()
	})
	key := filepath.Join(t.TempDir(), "key")
	genKey(t, key, "ed25519")
	f.addr = l.Addr().String()
	_, port, _ := net.SplitHostPort(f.addr)
	return Target{
		Name: "fake", Host: "127.0.0.1", User: "deploy", KeyFile: key, Options: []string{"Port=" + port},
		HostKey: string(ssh.MarshalAuthorizedKey(signer.PublicKey())),
	}
}

// freezable stops taking and giving bytes when its host is frozen, as a cut link does.
type freezable struct {
	net.Conn
	frozen *atomic.Bool
}

func (z freezable) Read(b []byte) (int, error) {
	n, err := z.Conn.Read(b)
	for z.frozen.Load() && err == nil {
		n, err = z.Conn.Read(b)
	}
	return n, err
}

func (z freezable) Write(b []byte) (int, error) {
	if z.frozen.Load() {
		return len(b), nil
	}
	return z.Conn.Write(b)
}

func (f *fakeHost) serve(nc net.Conn, conf *ssh.ServerConfig) {
	sc, chans, reqs, err := ssh.NewServerConn(freezable{nc, &f.frozen}, conf)
	if err != nil {
		return
	}
	defer sc.Close()
	f.wg.Go(func() { ssh.DiscardRequests(reqs) })
	for nch := range chans {
		ch, reqs, err := nch.Accept()
		if err != nil {
			return
		}
		f.wg.Go(func() { f.session(ch, reqs) })
	}
}

func (f *fakeHost) session(ch ssh.Channel, reqs <-chan *ssh.Request) {
	defer ch.Close()
	for req := range reqs {
		if req.Type != "exec" {
			_ = req.Reply(req.Type != "keepalive@openssh.com", nil)
			continue
		}
		_ = req.Reply(true, nil)
		var msg struct{ Command string }
		_ = ssh.Unmarshal(req.Payload, &msg)
		argv := append(append([]string{}, f.shell...), msg.Command)
		if len(f.shell) == 0 {
			argv = []string{"/bin/sh", "-c", msg.Command}
		}
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), f.env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		stdin, _ := cmd.StdinPipe()
		cmd.Stdout, cmd.Stderr = ch, ch.Stderr()
		code := 127
		if cmd.Start() == nil {
			f.wg.Go(func() {
				_, _ = io.Copy(stdin, ch)
				_ = stdin.Close()
			})
			gone := make(chan struct{})
			f.wg.Go(func() { // the channel's end kills what is left, so that tests end
				for range reqs {
				}
				select {
				case <-gone:
				default:
					_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
				}
			})
			_ = cmd.Wait()
			close(gone)
			code = cmd.ProcessState.ExitCode()
		}
		_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Code uint32 }{uint32(code)}))
		return
	}
}

func TestMutePeerIsUnreachable(t *testing.T) {
	target := (&fakeHost{mute: true}).start(t)
	cfg := testConfig(t)
	cfg.HandshakeTimeout = 200 * time.Millisecond
	_, err := newTestPool(t, cfg).Dial(t.Context(), target)
	if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "handshake") {
		t.Errorf("Dial = %v, want ErrUnreachable that names the handshake", err)
	}
}

func TestMutePeerBehindAJumpHostIsUnreachable(t *testing.T) {
	h := startSSHD(t)
	target := (&fakeHost{mute: true}).start(t)
	target.KeyFile = h.key
	target.Options = append(target.Options, "ProxyJump="+h.user+"@127.0.0.1:"+h.port)
	cfg := testConfig(t)
	cfg.HandshakeTimeout = 2 * time.Second
	_, err := newTestPool(t, cfg).Dial(t.Context(), target)
	if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "handshake") {
		t.Errorf("Dial = %v, want ErrUnreachable that names the handshake", err)
	}
}

func TestUnreachable(t *testing.T) {
	hangUp := (&fakeHost{hangUp: true}).start(t)
	key := hangUp.KeyFile
	for name, target := range map[string]Target{
		"refused":           {Host: "127.0.0.1", User: "x", KeyFile: key, Options: []string{"Port=" + freePort(t)}},
		"no such name":      {Host: "host.invalid", User: "x", KeyFile: key},
		"closed at once":    hangUp,
		"proxy that fails":  {Host: "x", User: "x", KeyFile: key, Options: []string{"ProxyCommand=echo no way to %h >&2; exit 1"}},
		"jump that refuses": {Host: "x", User: "x", KeyFile: key, Options: []string{"ProxyJump=127.0.0.1:" + freePort(t)}},
	} {
		t.Run(name, func(t *testing.T) {
			target.Name = "prod.app1"
			_, err := newTestPool(t, testConfig(t)).Dial(t.Context(), target)
			if !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), `"prod.app1"`) {
				t.Errorf("Dial = %v, want ErrUnreachable with the node", err)
			}
		})
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	target := (&fakeHost{mute: true}).start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := newTestPool(t, testConfig(t)).Dial(ctx, target); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrUnreachable) {
		t.Errorf("Dial = %v, want the context's error", err)
	}
}

func TestDialsToOneAddressAreApart(t *testing.T) {
	target := (&fakeHost{}).start(t)
	cfg := testConfig(t)
	cfg.DialInterval = 150 * time.Millisecond
	p := newTestPool(t, cfg)
	start := time.Now()
	for range 3 {
		dial(t, p, target)
	}
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("three dials took %v, want at least 300ms", took)
	}
}

func TestCutLinkIsNoticedAndEveryCallReturns(t *testing.T) {
	f := &fakeHost{}
	target := f.start(t)
	cfg := testConfig(t)
	cfg.DeadAfter, cfg.KeepAlive = 600*time.Millisecond, 100*time.Millisecond
	p := newTestPool(t, cfg)
	c := dial(t, p, target)
	s, err := c.Stream(t.Context(), Command{Script: "exec cat"})
	if err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	go func() {
		_, err := c.Run(context.Background(), Command{Script: "sleep 60"})
		ran <- err
	}()
	await(t, "the command to start", func() bool { return len(c.sessions) == 2 })
	f.frozen.Store(true)
	select {
	case <-c.Done():
	case <-time.After(10 * time.Second):
		t.Fatal("the cut was not noticed")
	}
	if err := c.Err(); !errors.Is(err, ErrLost) {
		t.Errorf("Err = %v, want ErrLost", err)
	}
	if err := <-ran; !errors.Is(err, ErrLost) {
		t.Errorf("Run = %v, want ErrLost", err)
	}
	if _, err := s.Wait(); !errors.Is(err, ErrLost) {
		t.Errorf("Wait = %v, want ErrLost", err)
	}
	if _, err := s.Read(make([]byte, 1)); err == nil {
		t.Error("Read of a lost stream gave no error")
	}
	if _, err := c.Run(t.Context(), Command{Script: "true"}); !errors.Is(err, ErrLost) {
		t.Errorf("Run after the loss = %v, want ErrLost", err)
	}
}

func TestSilentCommandKeepsAHealthyLink(t *testing.T) {
	target := (&fakeHost{}).start(t)
	cfg := testConfig(t)
	cfg.DeadAfter, cfg.KeepAlive = 400*time.Millisecond, 50*time.Millisecond
	c := dial(t, newTestPool(t, cfg), target)
	if res := mustRun(t, c, Command{Script: "sleep 1; echo ok"}); string(res.Stdout) != "ok\n" {
		t.Errorf("Run = %q, want ok", res.Stdout)
	}
}

func TestCommandTimeout(t *testing.T) {
	c := dial(t, newTestPool(t, testConfig(t)), (&fakeHost{}).start(t))
	res, err := c.Run(t.Context(), Command{Script: "echo begun; sleep 60", Timeout: 500 * time.Millisecond})
	if !errors.Is(err, ErrTimeout) || errors.Is(err, ErrLost) {
		t.Errorf("Run = %v, want ErrTimeout alone", err)
	}
	if string(res.Stdout) != "begun\n" {
		t.Errorf("Run: stdout = %q, want what was said before", res.Stdout)
	}
	if res := mustRun(t, c, Command{Script: "echo still here"}); string(res.Stdout) != "still here\n" {
		t.Errorf("Run after a timeout = %q", res.Stdout)
	}
}

func TestStartupFilesCannotSpeakFirst(t *testing.T) {
	for name, script := range map[string]string{
		"noisy on both streams": `echo hello; printf 'no line end'; echo trouble >&2; exec /bin/sh -c "$1"`,
		"very noisy":            `head -c 300000 /dev/zero | tr '\0' x; exec /bin/sh -c "$1"`,
		"not a POSIX shell":     `case $1 in /bin/sh) exec /bin/sh;; *) echo "fish: $1: unknown" >&2; exit 127;; esac`,
		"repeats its input":     `exec /bin/sh -v`,
	} {
		t.Run(name, func(t *testing.T) {
			login := filepath.Join(t.TempDir(), "login")
			writeFile(t, login, script)
			c := dial(t, newTestPool(t, testConfig(t)), (&fakeHost{shell: []string{"/bin/sh", login}}).start(t))
			res := mustRun(t, c, Command{Script: "cat; echo err >&2", Stdin: []byte("clean")})
			if string(res.Stdout) != "clean" || string(res.Stderr) != "err\n" {
				t.Errorf("Run = %.80q, stderr %.80q; want clean, err", res.Stdout, res.Stderr)
			}
			s, err := c.Stream(t.Context(), Command{Script: "exec cat"})
			if err != nil {
				t.Fatal(err)
			}
			_, _ = s.Write([]byte("x"))
			b := make([]byte, 1)
			if _, err := s.Read(b); err != nil || b[0] != 'x' {
				t.Errorf("Read = %q, %v; want x", b, err)
			}
			_ = s.Close()
		})
	}
}

func TestLoginWithoutAShellSaysWhy(t *testing.T) {
	login := filepath.Join(t.TempDir(), "login")
	writeFile(t, login, "echo 'This account is currently not available.'; exit 1")
	c := dial(t, newTestPool(t, testConfig(t)), (&fakeHost{shell: []string{"/bin/sh", login}}).start(t))
	if _, err := c.Run(t.Context(), Command{Script: "true"}); !errors.Is(err, ErrShell) || !strings.Contains(err.Error(), "not available") {
		t.Errorf("Run = %v, want ErrShell with the reason", err)
	}
}

// fakeSudo behaves as sudo does for what is used of it; passwordless says whether
// -n works. It logs its arguments.
const fakeSudo = `#!/bin/sh
echo "$*" >>"$0.log"
echo "sudo: unable to resolve host x" >&2
ask=1
while [ $# -gt 0 ]; do case $1 in
-n) shift; if [ ! -e "$0.nopasswd" ]; then echo "sudo: a password is required" >&2; exit 1; fi; ask= ;;
-k|-S|-H) shift ;;
-p) shift 2 ;;
*) break ;;
esac; done
if [ -n "$ask" ]; then for try in 1 2 3; do
	p=; while c=$(dd bs=1 count=1 2>/dev/null; echo x); c=${c%x}; [ "${c:-end}" != end ] && [ "$c" != "
" ]; do p=$p$c; done
	[ "$p" = "right one" ] && break
	[ -z "$c" ] && { echo "sudo: no password was provided" >&2; exit 1; }
	echo "Sorry, try again." >&2
	[ $try = 3 ] && exit 1
done; fi
AS_ROOT=yes exec "$@"
`

func TestBecome(t *testing.T) {
	for _, tc := range []struct {
		name         string
		user         string
		passwordless bool
		password     string // of the file; "" is no file
		argv         []string
		want         string // "" is ErrBecome
		says         string
	}{
		{name: "sudo without a password", user: "deploy", passwordless: true, want: "yes"},
		{name: "an argv of one's own", user: "deploy", passwordless: true, argv: []string{"sudo", "-n", "-H"}, want: "yes"},
		{name: "password is not used where none is asked", user: "deploy", passwordless: true, password: "wrong", want: "yes"},
		{name: "password", user: "deploy", password: "right one", want: "yes"},
		{name: "wrong password", user: "deploy", password: "wrong", says: "no password was provided"},
		{name: "no password file", user: "deploy", says: "a password is required"},
		{name: "root needs none", user: "root", want: "no"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			sudo := filepath.Join(dir, "sudo")
			writeFile(t, sudo, fakeSudo)
			if err := os.Chmod(sudo, 0o755); err != nil {
				t.Fatal(err)
			}
			if tc.passwordless {
				writeFile(t, sudo+".nopasswd", "")
			}
			f := &fakeHost{env: []string{"AS_ROOT=no", "PATH=" + dir + ":" + os.Getenv("PATH")}}
			target := f.start(t)
			target.User, target.Become.Argv = tc.user, tc.argv
			if tc.password != "" {
				target.Become.PasswordFile = filepath.Join(dir, "password")
				writeFile(t, target.Become.PasswordFile, tc.password+"\n")
			}
			c := dial(t, newTestPool(t, testConfig(t)), target)
			for range 2 {
				res, err := c.Run(t.Context(), Command{Script: `echo $AS_ROOT "$1"; cat`, Args: []string{"it's"}, Stdin: []byte("data"), Become: true})
				if tc.want == "" {
					if !errors.Is(err, ErrBecome) || !strings.Contains(err.Error(), tc.says) {
						t.Fatalf("Run = %v, want ErrBecome that says %q", err, tc.says)
					}
					continue
				}
				if err != nil || string(res.Stdout) != tc.want+" it's\ndata" || len(res.Stderr) != 0 {
					t.Fatalf("Run = %q, stderr %q, %v; want %s", res.Stdout, res.Stderr, err, tc.want)
				}
			}
			if tc.want == "yes" {
				s, err := c.Stream(t.Context(), Command{Script: `echo $AS_ROOT; exec cat`, Become: true})
				if err != nil {
					t.Fatal(err)
				}
				_, _ = s.Write([]byte("more"))
				_ = s.CloseWrite()
				var b bytes.Buffer
				_, _ = b.ReadFrom(s)
				if b.String() != "yes\nmore" {
					t.Errorf("Stream gave %q", b.String())
				}
				_ = s.Close()
			}
			log, _ := os.ReadFile(sudo + ".log")
			if strings.Contains(string(log), "right one") || strings.Contains(string(log), "it's") {
				t.Errorf("a secret stands in sudo's arguments: %s", log)
			}
			if n := strings.Count(string(log), "-k -S"); tc.name == "wrong password" && n != 1 {
				t.Errorf("the wrong password was tried %d times, want once", n)
			}
		})
	}
}

func TestMoreCommandsThanSessionsWaitForTheirTurn(t *testing.T) {
	for name, extra := range map[string]string{"sshd's default": "MaxSessions 10", "fewer than expected": "MaxSessions 2"} {
		t.Run(name, func(t *testing.T) {
			h := startSSHD(t, extra)
			c := dial(t, newTestPool(t, testConfig(t)), h.target())
			var wg sync.WaitGroup
			for range 25 {
				wg.Go(func() {
					if res, err := c.Run(t.Context(), Command{Script: "echo ok"}); err != nil || string(res.Stdout) != "ok\n" {
						t.Errorf("Run = %q, %v", res.Stdout, err)
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestProxyCommandAndItsEnd(t *testing.T) {
	h := startSSHD(t)
	target := h.target()
	pid := filepath.Join(t.TempDir(), "pid")
	target.Options = append(target.Options, "ProxyCommand=bash -c 'echo $$ >"+pid+"; exec 3<>/dev/tcp/%h/%p; cat <&3 & exec cat >&3'")
	c := dial(t, newTestPool(t, testConfig(t)), target)
	if res := mustRun(t, c, Command{Script: "echo ok"}); string(res.Stdout) != "ok\n" {
		t.Errorf("Run = %q", res.Stdout)
	}
	_ = c.Close()
	if _, err := os.Stat("/proc/" + strings.TrimSpace(readFile(t, pid))); err == nil {
		t.Error("the ProxyCommand outlived its connection")
	}
}
