package nix

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"sync/atomic"
	"time"
)

// Path is one member of a closure.
type Path struct {
	Path string `json:"path"`
	// NarSize is in bytes, uncompressed, as it goes over the wire.
	NarSize int64 `json:"nar_size"`
}

func (c *Client) closureArgv(path string) []string {
	return c.argv("nix", "path-info", "--recursive", "--json", path)
}

// Closure lists the closure of path, sorted. With a derivation it is the
// closure of the derivation itself.
func (c *Client) Closure(ctx context.Context, path string) ([]Path, error) {
	argv := c.closureArgv(path)
	if IsDerivation(path) {
		argv = append(argv, "--derivation")
	}
	out, err := c.run(ctx, argv, nil)
	if err != nil {
		return nil, fmt.Errorf("reading the closure of %q: %w", path, err)
	}
	paths, err := parsePathInfo([]byte(out))
	if err != nil {
		return nil, fmt.Errorf("reading the closure of %q: %w", path, err)
	}
	return paths, nil
}

// parsePathInfo reads the list of Nix up to 2.18 and the object of later ones.
func parsePathInfo(text []byte) ([]Path, error) {
	type info struct {
		Path    string `json:"path"`
		NarSize int64  `json:"narSize"`
	}
	var list []info
	if err := json.Unmarshal(text, &list); err != nil {
		byPath := map[string]*info{}
		if err := json.Unmarshal(text, &byPath); err != nil {
			return nil, fmt.Errorf("reading the answer of nix path-info: %w", err)
		}
		for path, i := range byPath {
			if i == nil { // an invalid path
				return nil, fmt.Errorf("path %q is not in the store", path)
			}
			list = append(list, info{path, i.NarSize})
		}
	}
	paths := make([]Path, 0, len(list))
	for _, i := range list {
		paths = append(paths, Path(i))
	}
	sort.Slice(paths, func(i, j int) bool { return paths[i].Path < paths[j].Path })
	return paths, nil
}

// CopyRequest is one copy to a host.
type CopyRequest struct {
	// Path is the store path, or the derivation, whose closure is sent.
	Path string
	// Dial starts "nix-daemon --stdio" on the host, once per connection of nix.
	Dial func(ctx context.Context) (io.ReadWriteCloser, error)
	// Progress gets the bytes sent so far; may be nil. It is called from one
	// goroutine at a time.
	Progress func(done int64)
}

// maxSocket is the longest socket path: 107 bytes fit, some are kept in reserve.
const maxSocket = 100

func (c *Client) copyArgv(socket, path string) []string {
	// Without --no-check-sigs every byte is sent and then refused, also as root.
	argv := c.argv("nix", "copy", "--to", "unix://"+socket, "--no-check-sigs")
	if IsDerivation(path) {
		argv = append(argv, "--derivation")
	}
	return append(argv, path)
}

// Copy sends the closure of req.Path over connections that req.Dial opens, and
// returns the bytes sent, also with an error.
//
// A nil error is no proof that the closure arrived: Nix 2.8 may end with 0 and
// an incomplete copy, and may fail after a complete one. Ask the host for the
// path's validity.
func (c *Client) Copy(ctx context.Context, req CopyRequest) (int64, error) {
	fail := func(err error) error { return fmt.Errorf("copying %q: %w", req.Path, err) }
	dir, err := socketDir()
	if err != nil {
		return 0, fail(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	ln, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return 0, fail(err)
	}
	p := &pipes{ln: ln, dial: req.Dial}
	pipeCtx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { p.serve(pipeCtx) })
	if req.Progress != nil {
		wg.Go(func() { p.report(pipeCtx, req.Progress) })
	}
	_, err = c.run(ctx, c.copyArgv(socket, req.Path), nil)
	stop()
	_ = ln.Close()
	wg.Wait()
	if err != nil {
		if dialErr := p.dialError(); dialErr != nil {
			err = dialErr // nix only saw the socket close
		}
		return p.sent.Load(), fail(err)
	}
	return p.sent.Load(), nil
}

// socketDir makes a folder of our own with a short name.
func socketDir() (string, error) {
	var errs []error
	for _, base := range []string{os.Getenv("XDG_RUNTIME_DIR"), os.TempDir(), "/tmp"} {
		if base == "" || len(base)+len("/tf-hosts-0123456789/s") > maxSocket {
			continue
		}
		dir, err := os.MkdirTemp(base, "tf-hosts-") // 0700
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		errs = append(errs, errors.New("no folder with a short enough path"))
	}
	return "", fmt.Errorf("making a socket folder: %w", errors.Join(errs...))
}

// pipes joins each connection of the socket to a stream of its own.
type pipes struct {
	ln   net.Listener
	dial func(ctx context.Context) (io.ReadWriteCloser, error)
	sent atomic.Int64

	mu  sync.Mutex
	err error
}

func (p *pipes) dialError() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// serve returns when the listener is closed and every connection has ended.
func (p *pipes) serve(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		local, err := p.ln.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer local.Close()
			remote, err := p.dial(ctx)
			if err != nil {
				p.mu.Lock()
				p.err = errors.Join(p.err, err)
				p.mu.Unlock()
				return
			}
			p.join(ctx, local, remote)
		})
	}
}

// join copies both ways until one side ends, then closes both whole. Half a
// close would make nix 2.8 take a lost link for the end of its own source, and
// end with 0.
func (p *pipes) join(ctx context.Context, local net.Conn, remote io.ReadWriteCloser) {
	ended := make(chan struct{}, 2)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(&countingWriter{remote, &p.sent}, local); ended <- struct{}{} })
	wg.Go(func() { _, _ = io.Copy(local, remote); ended <- struct{}{} })
	select {
	case <-ended:
	case <-ctx.Done():
	}
	_ = local.Close()
	_ = remote.Close()
	wg.Wait()
}

func (p *pipes) report(ctx context.Context, progress func(int64)) {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	last := int64(0)
	for {
		select {
		case <-ctx.Done():
			progress(p.sent.Load())
			return
		case <-tick.C:
			if now := p.sent.Load(); now != last {
				last = now
				progress(now)
			}
		}
	}
}

type countingWriter struct {
	w io.Writer
	n *atomic.Int64
}

func (w *countingWriter) Write(b []byte) (int, error) {
	n, err := w.w.Write(b)
	w.n.Add(int64(n))
	return n, err
}
