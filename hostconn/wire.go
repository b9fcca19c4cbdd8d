package hostconn

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// wire is the transport of a connection. It notes when the last byte came in:
// that alone tells a dead link from a busy one, since an answer may wait behind
// megabytes of an upload while window adjustments keep coming.
type wire struct {
	net.Conn
	start time.Time
	heard atomic.Int64 // since start, in ns
	once  sync.Once
	err   error
}

func newWire(nc net.Conn) *wire { return &wire{Conn: nc, start: time.Now()} }

func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if n > 0 {
		w.heard.Store(int64(time.Since(w.start)))
	}
	return n, err
}

// silence is how long nothing has come in.
func (w *wire) silence() time.Duration {
	return time.Since(w.start) - time.Duration(w.heard.Load())
}

func (w *wire) Close() error {
	w.once.Do(func() { w.err = w.Conn.Close() })
	return w.err
}

// tail keeps the last bytes written to it.
type tail struct {
	mu  sync.Mutex
	max int
	buf []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - t.max; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
	}
	return len(b), nil
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]byte(nil), t.buf...)
}

// last is the last line that is not empty.
func (t *tail) last() string { return lastLine(t.bytes()) }

func lastLine(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}
