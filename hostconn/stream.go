package hostconn

import (
	"context"
	"fmt"
	"io"
	"sync"
)

// stderrTail is how much of a stream's stderr is kept.
const stderrTail = 64 << 10

// Stream is the stdin and stdout of a remote program. Read and Write may be
// called from two goroutines.
type Stream struct {
	conn *Conn
	p    *process

	once sync.Once
	done chan struct{}
	code int
	err  error
}

// Stream starts cmd and gives its stdin and stdout, clean from the first byte.
// cmd.Stdin is sent first; cmd.Timeout bounds the start alone; ctx bounds the
// whole stream. The errors are those of Run. The caller must Close it.
func (c *Conn) Stream(ctx context.Context, cmd Command) (*Stream, error) {
	s, err := c.stream(ctx, cmd)
	if err != nil {
		return nil, fmt.Errorf("starting a program on %q: %w", c.target.label(), err)
	}
	return s, nil
}

func (c *Conn) stream(ctx context.Context, cmd Command) (*Stream, error) {
	limit := cmd.Timeout
	if limit <= 0 {
		limit = c.pool.cfg.CommandTimeout
	}
	startCtx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("%w: it did not start within %v", ErrTimeout, limit))
	defer cancel()
	line, err := program(cmd.Script, cmd.Args)
	if err != nil {
		return nil, err
	}
	how, password, err := c.escalate(startCtx, cmd.Become)
	if err != nil {
		return nil, err
	}
	if err := c.acquire(startCtx); err != nil {
		return nil, err
	}
	type started struct {
		p   *process
		err error
	}
	result := make(chan started) // unbuffered: taken, or the process is ended
	c.wg.Go(func() {
		p, err := c.start(ctx, line, how, password)
		if err == nil {
			p.stderr.keepTail(stderrTail)
			_, err = p.stdin.Write(cmd.Stdin)
			if err != nil {
				p.release()
				err = c.lost(err)
			}
		}
		if err != nil {
			c.releaseSlot()
		}
		select {
		case result <- started{p, err}:
		case <-startCtx.Done():
			if err == nil {
				p.release()
				c.releaseSlot()
			}
		}
	})
	var got started
	select {
	case got = <-result:
	case <-startCtx.Done():
		return nil, context.Cause(startCtx)
	}
	if got.err != nil {
		return nil, got.err
	}
	s := &Stream{conn: c, p: got.p, done: make(chan struct{})}
	c.wg.Go(func() {
		s.code, s.err = s.p.code(c)
		if ctx.Err() != nil {
			s.err = context.Cause(ctx)
		}
		s.p.release()
		c.releaseSlot()
		close(s.done)
	})
	return s, nil
}

// Read reads the program's stdout.
func (s *Stream) Read(b []byte) (int, error) { return s.p.stdout.Read(b) }

// Write writes to the program's stdin.
func (s *Stream) Write(b []byte) (int, error) { return s.p.stdin.Write(b) }

// CloseWrite ends the program's stdin and leaves its stdout open.
func (s *Stream) CloseWrite() error { return s.p.stdin.Close() }

// Close ends the session. It does not wait: see Wait. The program sees the end of
// its stdin; it is not killed.
func (s *Stream) Close() error {
	s.once.Do(s.p.release)
	return nil
}

// Wait waits for the program's end and gives its exit code. The error wraps
// ErrLost, also after a Close that came before the program's end. Stdout must be
// read to its end, or the program may never come to its own.
func (s *Stream) Wait() (int, error) {
	<-s.done
	return s.code, s.err
}

// Stderr is the end of what the program has said so far.
func (s *Stream) Stderr() []byte { return s.p.stderr.bytes() }

var _ io.ReadWriteCloser = (*Stream)(nil)

// keepTail bounds the buffer by forgetting its beginning.
func (a *afterToken) keepTail(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.keep, a.max = true, n
}
