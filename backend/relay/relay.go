// Package relay is the loopback server between tofu and the state backend.
//
// tofu always talks to it, by its http backend, and it talks to the Upstream: a
// state server (package client) or a file (OpenFile). It journals every state
// that tofu posts before it passes it on, acknowledges only what the upstream
// acknowledged, waits while an upstream that had answered is away, makes LOCK
// repeatable by ID and refuses what would lose a state: redirects, a state that
// vanished, a lineage or serial that does not follow.
//
// It never decodes or changes a state, never logs one, and never lets anyone in
// without the credentials of this run: an open loopback port would hand the
// state to every user of the machine.
//
//	r, err := relay.New(relay.Config{Upstream: c, JournalDir: dir, RunInfo: info})
//	ep, err := r.Start(ctx)
//	defer r.Close(ctx)
//	cmd.Env = append(cmd.Env, ep.Env()...)
package relay

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

// Upstream is what the relay passes requests on to: *client.Client or *File.
// The errors are those of package api. A client's own retries must be off, so
// that the relay knows of every lost answer.
type Upstream interface {
	Get(ctx context.Context) ([]byte, error)
	Post(ctx context.Context, lockID string, body []byte) error
	Lock(ctx context.Context, info api.LockInfo) error
	Unlock(ctx context.Context, info api.LockInfo) error
}

// Config configures a Relay. Upstream and JournalDir are required; zero is a
// default everywhere else.
type Config struct {
	Upstream Upstream
	// JournalDir gets one file for each state that was posted; see Journal.
	JournalDir string
	// RunInfo goes into the lock's Info, as JSON.
	RunInfo RunInfo
	// Events hears of waiting, recovery and refusals; it must not block.
	Events func(tfhosts.Event)
	// Fault is for tests: called with an op name (journal.write, journal.sync,
	// relay.get, relay.post, relay.lock, relay.unlock) before each try; its error
	// is the try's error.
	Fault func(op string) error

	// Patience is how long an upstream that answered in this run may be away
	// (default 10 min), InterruptedPatience the same after Interrupted (30 s).
	Patience            time.Duration
	InterruptedPatience time.Duration
	// FirstTries and FirstWait bound the tries before the first answer: 3, 15 s.
	FirstTries int
	FirstWait  time.Duration
	// RetryWaitMin and RetryWaitMax bound the pause between tries: 500 ms, 10 s.
	RetryWaitMin, RetryWaitMax time.Duration

	// Contacted: the upstream answered this run before, so that it is waited for
	// with Patience from the first try on.
	Contacted bool
	// Seen is the state as this run saw it before the relay, nil for none: one
	// that is gone for the relay is lost, and not one that never was.
	Seen []byte
	// AllowRewind lets a POST go back or change lineage, for "state push -force".
	AllowRewind bool
	// MaxBytes is the size limit of a state: default 512 MiB.
	MaxBytes int64

	// Port, Username, Password and Held are those of an earlier relay whose tofu
	// still lives; zero in a new run.
	Port               int
	Username, Password string
	Held               *api.LockInfo
}

// RunInfo names the run that holds a lock, so that a later run can tell whether
// its holder is dead.
type RunInfo struct {
	RunID     string `json:"run_id"`
	MachineID string `json:"machine_id"`
	BootID    string `json:"boot_id"`
	PID       int    `json:"pid"`
	// StartTime is the process's start in clock ticks after boot, as in
	// /proc/PID/stat: a PID alone may be that of another process.
	StartTime uint64 `json:"start_time"`
}

// Endpoint is what tofu needs to reach the relay.
type Endpoint struct {
	Address            string // http://127.0.0.1:PORT/state
	Port               int
	Username, Password string
}

// Env is tofu's environment for the relay: address, methods, credentials and
// about 10 min of tofu's own patience, for a relay that starts again.
func (e Endpoint) Env() []string {
	return []string{
		"TF_HTTP_ADDRESS=" + e.Address,
		"TF_HTTP_UPDATE_METHOD=POST",
		"TF_HTTP_LOCK_ADDRESS=" + e.Address,
		"TF_HTTP_LOCK_METHOD=LOCK",
		"TF_HTTP_UNLOCK_ADDRESS=" + e.Address,
		"TF_HTTP_UNLOCK_METHOD=UNLOCK",
		"TF_HTTP_USERNAME=" + e.Username,
		"TF_HTTP_PASSWORD=" + e.Password,
		"TF_HTTP_RETRY_MAX=25",
		"TF_HTTP_RETRY_WAIT_MIN=1",
		"TF_HTTP_RETRY_WAIT_MAX=30",
	}
}

// Stats counts what the relay did.
type Stats struct {
	Gets, Posts, Locks, Unlocks int           // requests that the upstream acknowledged
	Retries                     int           // tries after a first one
	Recovered                   int           // locks taken again after the upstream lost them
	BytesUp, BytesDown          int64         // states sent and received
	Waited                      time.Duration // pauses between tries
	Journal                     time.Duration // spent in the journal
}

// Relay is one loopback server. Its methods are safe for concurrent use.
type Relay struct {
	cfg     Config
	journal *Journal
	ep      Endpoint

	server *http.Server
	served chan error
	// base is the context of writes: it outlives tofu's requests and the run's
	// own context, and ends when Close gives up waiting.
	base     context.Context
	giveUp   context.CancelFunc
	handlers sync.WaitGroup

	// writes makes POST, LOCK and UNLOCK one after the other.
	writes chan struct{}

	interruptOnce sync.Once
	interrupted   chan struct{}

	mu            sync.Mutex // guards all below
	interruptedAt time.Time
	contacted     bool
	held          *api.LockInfo
	seen          bool // last is set
	last          []byte
	lastMeta      api.Meta
	holder        *api.LockInfo
	first, latest error
	stats         Stats
}

// New checks cfg and opens the journal.
func New(cfg Config) (*Relay, error) {
	if cfg.Upstream == nil {
		return nil, errors.New("starting relay: no upstream")
	}
	cfg.setDefaults()
	j, err := OpenJournal(cfg.JournalDir, cfg.RunInfo.RunID, cfg.Fault)
	if err != nil {
		return nil, fmt.Errorf("starting relay: %w", err)
	}
	r := &Relay{
		cfg: cfg, journal: j, held: cfg.Held, contacted: cfg.Contacted || cfg.Held != nil,
		writes: make(chan struct{}, 1), interrupted: make(chan struct{}), served: make(chan error, 1),
	}
	if meta, err := api.ParseMeta(cfg.Seen); cfg.Seen != nil && err == nil {
		r.saw(cfg.Seen, meta)
	}
	return r, nil
}

func (c *Config) setDefaults() {
	for d, v := range map[*time.Duration]time.Duration{
		&c.Patience: 10 * time.Minute, &c.InterruptedPatience: 30 * time.Second, &c.FirstWait: 15 * time.Second,
		&c.RetryWaitMin: 500 * time.Millisecond, &c.RetryWaitMax: 10 * time.Second,
	} {
		if *d == 0 {
			*d = v
		}
	}
	if c.FirstTries == 0 {
		c.FirstTries = 3
	}
	if c.MaxBytes == 0 {
		c.MaxBytes = 512 << 20
	}
	if c.Events == nil {
		c.Events = func(tfhosts.Event) {}
	}
}

// Start listens on 127.0.0.1 and serves until Close. The end of ctx does not
// end it: an interrupted tofu still has its last state to post.
func (r *Relay) Start(ctx context.Context) (Endpoint, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(r.cfg.Port)))
	if err != nil {
		return Endpoint{}, fmt.Errorf("starting relay: %w", err)
	}
	port := ln.Addr().(*net.TCPAddr).Port
	r.ep = Endpoint{
		Address: fmt.Sprintf("http://127.0.0.1:%d/state", port), Port: port,
		Username: r.cfg.Username, Password: r.cfg.Password,
	}
	if r.ep.Username == "" {
		r.ep.Username = random(8)
	}
	if r.ep.Password == "" {
		r.ep.Password = random(32)
	}
	r.base, r.giveUp = context.WithCancel(context.WithoutCancel(ctx))
	r.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r.handlers.Add(1)
			defer r.handlers.Done()
			r.serve(w, req)
		}),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		BaseContext:       func(net.Listener) context.Context { return r.base },
	}
	go func() { r.served <- r.server.Serve(ln) }()
	return r.ep, nil
}

// Close stops listening and waits for requests in flight until ctx ends; then
// it cuts them off. What tofu had posted is in the journal in any case.
func (r *Relay) Close(ctx context.Context) error {
	if r.server == nil {
		return nil
	}
	err := r.server.Shutdown(ctx)
	if err != nil {
		err = fmt.Errorf("stopping relay: %w", err)
	}
	r.giveUp()
	err = errors.Join(err, r.server.Close())
	if served := <-r.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	r.handlers.Wait()
	r.server = nil
	return err
}

// Interrupted shortens the patience with an upstream that is away.
func (r *Relay) Interrupted() {
	r.interruptOnce.Do(func() {
		r.mu.Lock()
		r.interruptedAt = time.Now()
		r.mu.Unlock()
		close(r.interrupted)
	})
}

func random(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the process instead
	return hex.EncodeToString(b)
}
