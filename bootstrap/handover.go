package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// maxSocketPath is under the limit of sun_path on every Unix.
const maxSocketPath = 100

// acceptPause is the pause after an accept that failed: nothing tells when
// descriptors are free again.
const acceptPause = 100 * time.Millisecond

// handover is the wrapper's end of TF_HOSTS_SOCK: each "tf-hosts run" that a
// provisioner starts sends its node and waits for the verdict. So all deploys
// run in the wrapper's process, and the SIGKILL with which tofu ends its
// provisioners never shoots one in the middle.
type handover struct {
	path     string
	listener *net.UnixListener
	deploy   func(ctx context.Context, node tfhosts.Node, drop <-chan struct{}) tfhosts.Verdict
	drop     <-chan struct{}
	wg       sync.WaitGroup

	mu     sync.Mutex
	closed bool
}

// listenHandover opens the socket, 0600, in a 0700 folder of its own.
func listenHandover(drop <-chan struct{}, deploy func(context.Context, tfhosts.Node, <-chan struct{}) tfhosts.Verdict) (*handover, error) {
	var errs []error
	for _, base := range []string{os.Getenv("XDG_RUNTIME_DIR"), os.TempDir(), "/tmp"} {
		if base == "" {
			continue
		}
		dir, err := os.MkdirTemp(base, "tf-hosts-")
		if err != nil {
			errs = append(errs, err)
			continue
		}
		path := filepath.Join(dir, "run.sock")
		if len(path) > maxSocketPath {
			errs = append(errs, fmt.Errorf("the path %q is too long for a socket", path), os.Remove(dir))
			continue
		}
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			errs = append(errs, err, os.Remove(dir))
			continue
		}
		if err := os.Chmod(path, 0o600); err != nil {
			return nil, errors.Join(fmt.Errorf("opening the socket %q: %w", path, err), listener.Close(), os.RemoveAll(dir))
		}
		h := &handover{path: path, listener: listener, deploy: deploy, drop: drop}
		h.wg.Add(1)
		go h.accept()
		return h, nil
	}
	return nil, fmt.Errorf("opening a socket for the deploys: %w", errors.Join(errs...))
}

func (h *handover) accept() {
	defer h.wg.Done()
	for {
		conn, err := h.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // too many open files: the client waits in the backlog
			time.Sleep(acceptPause)
			continue
		}
		h.mu.Lock()
		if h.closed {
			h.mu.Unlock()
			conn.Close() //nolint:errcheck // nothing was sent
			return
		}
		h.wg.Add(1)
		h.mu.Unlock()
		go func() {
			defer h.wg.Done()
			h.serve(conn)
		}()
	}
}

// serve answers one request. A client that goes away drops its deploy as an
// interrupt does: before the activation begins, and never later.
func (h *handover) serve(conn net.Conn) {
	defer conn.Close()
	var node tfhosts.Node
	if err := json.NewDecoder(conn).Decode(&node); err != nil {
		return // not a client of ours, or one that was killed at once
	}
	drop := make(chan struct{})
	gone := make(chan struct{})
	finished := make(chan struct{})
	watched := make(chan struct{})
	go func() { // the client sends nothing more: a read ends when it is gone
		defer close(gone)
		conn.Read(make([]byte, 1)) //nolint:errcheck // any end is the end
	}()
	go func() {
		defer close(watched)
		select {
		case <-gone:
			close(drop)
		case <-h.drop:
			close(drop)
		case <-finished:
		}
	}()
	verdict := h.deploy(context.Background(), node, drop)
	close(finished)
	<-watched
	json.NewEncoder(conn).Encode(verdict) //nolint:errcheck // a client that is gone has no use for it; the wrapper has recorded it
	conn.Close()                          //nolint:errcheck // closes for the reader above, too
	<-gone
}

// Close refuses new deploys, waits for the running ones and removes the socket.
func (h *handover) Close() error {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	err := h.listener.Close()
	h.wg.Wait()
	if rerr := os.RemoveAll(filepath.Dir(h.path)); rerr != nil {
		err = errors.Join(err, rerr)
	}
	if err != nil {
		return fmt.Errorf("closing the socket of the deploys: %w", err)
	}
	return nil
}

// HandOver sends a node to the wrapper that listens on socket, waits and gives
// the wrapper's verdict. It is the client's half of "tf-hosts run".
func HandOver(ctx context.Context, socket string, node tfhosts.Node) (tfhosts.Verdict, error) {
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", socket)
	if err != nil {
		return tfhosts.Verdict{}, fmt.Errorf("handing the deploy of %q over: %w", node.Host, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() }) //nolint:errcheck // ends the read below
	defer stop()
	if err := json.NewEncoder(conn).Encode(node); err != nil {
		return tfhosts.Verdict{}, fmt.Errorf("handing the deploy of %q over: %w", node.Host, err)
	}
	var verdict tfhosts.Verdict
	if err := json.NewDecoder(conn).Decode(&verdict); err != nil {
		return tfhosts.Verdict{}, fmt.Errorf("waiting for the verdict of %q: tf-hosts went away: %w", node.Host, err)
	}
	return verdict, nil
}
