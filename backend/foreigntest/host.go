package foreigntest

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
)

// Op is a request of the protocol, whatever its method is.
type Op string

// The requests.
const (
	Get    Op = "get"
	Post   Op = "post"
	Lock   Op = "lock"
	Unlock Op = "unlock"
)

func opOf(r *http.Request) Op {
	lock := strings.HasSuffix(r.URL.Path, "/lock")
	switch {
	case r.Method == "LOCK", r.Method == http.MethodPost && lock:
		return Lock
	case r.Method == "UNLOCK", r.Method == http.MethodDelete:
		return Unlock
	case r.Method == http.MethodPost:
		return Post
	}
	return Get
}

// Fault is what happens to one request. The zero Fault is none.
type Fault struct {
	// Before runs before the server sees the request, After when it has served
	// it and the client does not know yet.
	Before, After func()
	// DropBefore breaks the connection instead, DropAfter when it is served.
	DropBefore, DropAfter bool
	// Delay is waited before the server sees the request.
	Delay time.Duration
	// Status is answered instead of asking the server, with Body and, for a
	// redirect, Location.
	Status   int
	Body     string
	Location string
	// Answer makes status and body from the request's body instead.
	Answer func(body []byte) (int, string)
	// Truncate sends half of the answer.
	Truncate bool
}

// Times is n times the same fault.
func Times(n int, f Fault) []Fault {
	all := make([]Fault, n)
	for i := range all {
		all[i] = f
	}
	return all
}

// Page is the answer of a web server that is no state server.
func Page() Fault {
	return Fault{Status: http.StatusOK, Body: "<!doctype html><title>Welcome</title>"}
}

// Stored is a state that the server acknowledged or, where the answer was lost,
// would have.
type Stored struct {
	Meta api.Meta
	Body []byte
}

// Host is a state server on a port of its own, with a script of faults.
type Host struct {
	tb   testing.TB
	addr string
	open Open

	mu     sync.Mutex
	faults map[Op][]Fault
	stored []Stored
	served map[Op]int

	run    sync.Mutex // guards the server
	server *http.Server
	ended  chan struct{}
	close  func() error
	// current is the handler of the running server.
	current http.Handler
	later   sync.WaitGroup
}

// Open makes the handler of a server that starts, and what ends it.
type Open func() (http.Handler, func() error, error)

// Keep is a server whose handler outlives restarts.
func Keep(h http.Handler) Open {
	return func() (http.Handler, func() error, error) { return h, func() error { return nil }, nil }
}

// NewHost reserves a port. The server does not run yet; it ends with the test.
func NewHost(tb testing.TB, open Open) *Host {
	tb.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	h := &Host{tb: tb, addr: l.Addr().String(), open: open, faults: map[Op][]Fault{}, served: map[Op]int{}}
	if err := l.Close(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		h.later.Wait()
		h.Stop()
	})
	return h
}

// URL is the server's root.
func (h *Host) URL() string { return "http://" + h.addr }

// Start starts the server, unless it runs.
func (h *Host) Start() {
	h.run.Lock()
	defer h.run.Unlock()
	if h.server != nil {
		return
	}
	handler, end, err := h.open()
	if err != nil {
		h.tb.Errorf("starting the state server: %v", err)
		return
	}
	l, err := net.Listen("tcp", h.addr)
	if err != nil {
		h.tb.Errorf("starting the state server: %v", errors.Join(err, end()))
		return
	}
	front := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { h.serve(handler, w, r) })
	server := &http.Server{Handler: front, ReadHeaderTimeout: time.Minute}
	ended := make(chan struct{})
	h.server, h.ended, h.close, h.current = server, ended, end, handler
	go func() {
		defer close(ended)
		server.Serve(l) //nolint:errcheck // ends with Stop
	}()
}

// Stop cuts the server off, as a power cut does. Requests in flight that have
// reached it go on.
func (h *Host) Stop() {
	h.run.Lock()
	defer h.run.Unlock()
	if h.server == nil {
		return
	}
	h.server.Close() //nolint:errcheck // a power cut asks nobody
	<-h.ended
	if err := h.close(); err != nil {
		h.tb.Errorf("stopping the state server: %v", err)
	}
	h.server = nil
}

// Bounce stops the server and starts it again after d, with between run while it
// is down (nil: nothing). It does not wait.
func (h *Host) Bounce(d time.Duration, between func()) {
	h.later.Add(1)
	go func() {
		defer h.later.Done()
		h.Stop()
		if between != nil {
			between()
		}
		time.Sleep(d)
		h.Start()
	}()
}

// Fault scripts the next requests of one kind; what was scripted before is
// dropped. Without faults all go through.
func (h *Host) Fault(op Op, faults ...Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults[op] = faults
}

// Left counts the faults that were not reached.
func (h *Host) Left() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, f := range h.faults {
		n += len(f)
	}
	return n
}

// Calm drops all faults.
func (h *Host) Calm() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = map[Op][]Fault{}
}

// Stored are the states that the server took, oldest first.
func (h *Host) Stored() []Stored {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]Stored{}, h.stored...)
}

// Served counts the requests of one kind that the server answered with success.
func (h *Host) Served(op Op) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.served[op]
}

// Direct asks the server past the script.
func (h *Host) Direct(method, path, body string) (int, []byte) {
	h.run.Lock()
	handler := h.current
	h.run.Unlock()
	rec := httptest.NewRecorder()
	handler.ServeHTTP(rec, httptest.NewRequest(method, path, strings.NewReader(body)))
	return rec.Code, rec.Body.Bytes()
}

func (h *Host) next(op Op) Fault {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.faults[op]) == 0 {
		return Fault{}
	}
	f := h.faults[op][0]
	h.faults[op] = h.faults[op][1:]
	return f
}

func (h *Host) serve(server http.Handler, w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	op := opOf(r)
	f := h.next(op)
	if f.Before != nil {
		f.Before()
	}
	if f.DropBefore {
		panic(http.ErrAbortHandler)
	}
	if f.Delay > 0 {
		timer := time.NewTimer(f.Delay)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-r.Context().Done():
			panic(http.ErrAbortHandler)
		}
	}
	if f.Answer != nil {
		f.Status, f.Body = f.Answer(body)
	}
	if f.Status != 0 {
		if f.Location != "" {
			w.Header().Set("Location", f.Location)
		}
		w.WriteHeader(f.Status)
		io.WriteString(w, f.Body) //nolint:errcheck // the client may be gone
		return
	}
	rec := httptest.NewRecorder()
	server.ServeHTTP(rec, r)
	h.note(op, rec.Code, body)
	if f.After != nil {
		f.After()
	}
	if f.DropAfter {
		panic(http.ErrAbortHandler)
	}
	for name, values := range rec.Header() {
		w.Header()[name] = values
	}
	answer := rec.Body.Bytes()
	if f.Truncate {
		w.Header().Set("Content-Length", strconv.Itoa(len(answer)))
		w.WriteHeader(rec.Code)
		w.Write(answer[:len(answer)/2])       //nolint:errcheck // cut off next
		http.NewResponseController(w).Flush() //nolint:errcheck // cut off next
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(rec.Code)
	w.Write(answer) //nolint:errcheck // the client may be gone
}

func (h *Host) note(op Op, status int, body []byte) {
	if status != http.StatusOK {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.served[op]++
	if op != Post {
		return
	}
	meta, err := api.ParseMeta(body)
	if err != nil {
		h.tb.Errorf("the state server took what is no state: %v", err)
	}
	h.stored = append(h.stored, Stored{meta, body})
}
