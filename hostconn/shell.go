package hostconn

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"al.essio.dev/pkg/shellescape"
	"golang.org/x/crypto/ssh"
)

// process is a remote /bin/sh that has reached its program: what start-up files
// said before is gone from both streams.
type process struct {
	session *ssh.Session
	stdin   io.WriteCloser
	stdout  *bufio.Reader
	stderr  *afterToken
	release func()
}

// start runs a program under /bin/sh, with root's rights when become says so.
//
// The only command that the login shell ever sees is "/bin/sh", so that it may
// be fish. The program goes over stdin as one line (it may hold line breaks
// inside quotes) that prints a token first. A shell parses a whole line before it
// runs it, and dash reads ahead: nothing may follow until the token is there.
func (c *Conn) start(ctx context.Context, program string, how becomeMode, password []byte) (*process, error) {
	session, err := c.open(ctx)
	if err != nil {
		return nil, c.lost(fmt.Errorf("opening a session: %w", err))
	}
	p := &process{session: session, stderr: &afterToken{max: c.pool.cfg.MaxOutput}}
	stop := context.AfterFunc(ctx, func() { _ = session.Close() })
	p.release = func() {
		stop()
		_ = session.Close()
	}
	if err := p.run(c, program, how, password); err != nil {
		p.release()
		return nil, err
	}
	return p, nil
}

// open opens a session. sshd counts an ended one until it has cleaned up behind
// it, and its MaxSessions may be less than ours: a refusal is tried again, for a
// while, since the connection lives on.
func (c *Conn) open(ctx context.Context) (*ssh.Session, error) {
	const pause, patience = 50 * time.Millisecond, 3 * time.Second
	for refusedAlone := time.Duration(0); ; {
		session, err := c.client.NewSession()
		var refused *ssh.OpenChannelError
		if !errors.As(err, &refused) || refused.Reason != ssh.ConnectionFailed {
			return session, err
		}
		if len(c.sessions) == 1 {
			if refusedAlone += pause; refusedAlone > patience {
				return nil, err
			}
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, context.Cause(ctx)
		}
	}
}

func (p *process) run(c *Conn, program string, how becomeMode, password []byte) error {
	var err error
	if p.stdin, err = p.session.StdinPipe(); err != nil {
		return c.lost(err)
	}
	out, err := p.session.StdoutPipe()
	if err != nil {
		return c.lost(err)
	}
	p.stdout = bufio.NewReaderSize(out, 32<<10)
	p.session.Stderr = p.stderr
	if err := p.session.Start("/bin/sh"); err != nil {
		return c.lost(fmt.Errorf("%w: starting /bin/sh: %w", ErrShell, err))
	}
	final := newToken()
	p.stderr.expect(final)
	kind := ErrShell
	if how != becomeNone {
		outer, inner := newToken(), newToken()
		line := outer.announce() + "; exec " + shellescape.QuoteCommand(c.become.command(how, inner))
		if err := p.say(c, line, outer, kind); err != nil {
			return err
		}
		kind = ErrBecome
		if how == becomePassword {
			if _, err := p.stdin.Write(append(bytes.Clone(password), '\n')); err != nil {
				return c.lost(err)
			}
			if err := p.await(c, inner, kind); err != nil {
				return err
			}
		}
	}
	return p.say(c, final.announce()+"; "+final.announceError()+"; "+program, final, kind)
}

// say writes one line and waits for its token.
func (p *process) say(c *Conn, line string, t token, kind error) error {
	if _, err := io.WriteString(p.stdin, line+"\n"); err != nil && !errors.Is(err, io.EOF) {
		return c.lost(fmt.Errorf("%w: %w", kind, err))
	}
	return p.await(c, t, kind)
}

// await drops stdout up to the line that ends in the token.
func (p *process) await(c *Conn, t token, kind error) error {
	var said tail
	said.max = 4 << 10
	for {
		line, err := p.stdout.ReadSlice('\n')
		text := strings.TrimRight(string(line), "\r\n")
		if err == nil && strings.HasSuffix(text, string(t)) {
			return nil
		}
		_, _ = said.Write(line)
		if err == nil || errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if lost := c.lost(nil); lost != nil {
			return lost
		}
		_ = p.session.Wait() // so that stderr is complete; its code adds nothing
		why := lastLine(p.stderr.bytes())
		if why == "" {
			why = said.last()
		}
		if why == "" {
			why = "it ended without a word"
		}
		return fmt.Errorf("%w: %s", kind, why)
	}
}

// code waits for the end of the program. A connection that ended, or a session
// that ended without a code, is an error.
func (p *process) code(c *Conn) (int, error) {
	err := p.session.Wait()
	var exit *ssh.ExitError
	switch {
	case err == nil:
		return 0, nil
	case errors.As(err, &exit):
		return exit.ExitStatus(), nil
	}
	if errors.Is(err, errOutput) {
		return -1, err
	}
	var missing *ssh.ExitMissingError
	if errors.As(err, &missing) {
		return -1, c.lost(fmt.Errorf("%w: the session ended without an exit code", ErrLost))
	}
	return -1, c.lost(fmt.Errorf("%w: %w", ErrLost, err))
}

// token is a word that no start-up file says.
type token string

func newToken() token {
	b := make([]byte, 12)
	_, _ = rand.Read(b) // never fails (crypto/rand)
	return token(hex.EncodeToString(b))
}

// announce prints the token. It stands in the line in two halves, so that a shell
// that repeats its input (set -v) does not say it too early.
func (t token) announce() string {
	return fmt.Sprintf(`printf '%%s%%s\n' %s %s`, t[:8], t[8:])
}

func (t token) announceError() string { return t.announce() + " >&2" }

// program is the line that runs script with args: eval keeps it out of the
// process list and free of the limit on a single argument.
func program(script string, args []string) (string, error) {
	for _, s := range append([]string{script}, args...) {
		if strings.ContainsRune(s, 0) {
			return "", errors.New("a script or an argument holds a NUL byte")
		}
	}
	var b strings.Builder
	b.WriteString("set --")
	for _, a := range args {
		b.WriteString(" " + shellescape.Quote(a))
	}
	b.WriteString("; eval " + shellescape.Quote(script+"\n") + "; exit")
	return b.String(), nil
}

// errOutput: a command said more than Config.MaxOutput.
var errOutput = errors.New("more output than is kept")

// afterToken collects what comes behind a token's line.
type afterToken struct {
	mu   sync.Mutex
	want []byte
	max  int
	keep bool // keep the tail instead of failing at max
	buf  []byte
	out  io.Writer // takes what would be kept
}

// passTo hands on what was kept so far and all that comes.
func (a *afterToken) passTo(w io.Writer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.out = w
	_ = a.handOn() // the next Write says it again
}

// handOn passes on what is there; a.mu is held.
func (a *afterToken) handOn() error {
	if a.want != nil || a.out == nil || len(a.buf) == 0 {
		return nil
	}
	_, err := a.out.Write(a.buf)
	a.buf = nil
	return err
}

func (a *afterToken) expect(t token) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.want = []byte(string(t) + "\n")
}

func (a *afterToken) Write(b []byte) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.buf = append(a.buf, b...)
	if a.want != nil {
		if i := bytes.Index(a.buf, a.want); i >= 0 {
			a.buf = append([]byte(nil), a.buf[i+len(a.want):]...)
			a.want = nil
		}
	}
	if a.want == nil && a.out != nil {
		return len(b), a.handOn()
	}
	if over := len(a.buf) - a.max; over > 0 {
		if a.want == nil && !a.keep {
			return len(b), errOutput
		}
		a.buf = append(a.buf[:0], a.buf[over:]...)
	}
	return len(b), nil
}

func (a *afterToken) bytes() []byte {
	a.mu.Lock()
	defer a.mu.Unlock()
	return bytes.Clone(a.buf)
}
