package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
)

// Files is a Store in one folder, which one process has at a time:
//
//	DIR/                          0700
//	├── .lock                     flock of the process that serves DIR
//	├── .ready                    empty; written to see that DIR can be
//	└── PROJECT/NAME/
//	    ├── head                  which version is the current state:
//	    │     {"format":1,"file":"00000000000000000007-3f0a…tfstate","serial":7,
//	    │      "lineage":"…","sha256":"…","written":"2026-…Z"}
//	    │     or, deleted: {"format":1,"deleted":true,"written":"…"}
//	    ├── written               empty; there since the first state: a missing
//	    │                         head means a lost state from then on
//	    ├── lock                  {"format":1,"holder":{LockInfo}|null,"released":"ID"}
//	    └── versions/
//	        └── SERIAL-SHA.tfstate    the bytes as they were received
//
// A write makes the version file durable, then head, then (once) written. The
// rename of head is the commit: before it the old state is current.
//
// Op names, each with .write, .sync, .rename and .dirsync: store.version,
// store.state (head), store.written, store.lock, store.tombstone,
// store.ready; and store.prune.
type Files struct {
	dir  string
	cfg  FilesConfig
	flk  *os.File
	mu   sync.Mutex // guards keys
	keys map[string]*sync.RWMutex
}

// FilesConfig configures a Files store; the zero value works.
type FilesConfig struct {
	// KeepVersions newest versions are kept (default 50), and all that are
	// younger than KeepAge (default 30 days).
	KeepVersions int
	KeepAge      time.Duration
	// Fault is for tests; see package durable.
	Fault durable.Fault
	// Logger hears of old versions that could not be removed; nil is silent.
	Logger *slog.Logger
	// Now is time.Now unless set.
	Now func() time.Time
}

const format = 1

type head struct {
	Format  int       `json:"format"`
	File    string    `json:"file,omitempty"`
	Serial  uint64    `json:"serial"`
	Lineage string    `json:"lineage,omitempty"`
	SHA256  string    `json:"sha256,omitempty"`
	Written time.Time `json:"written"`
	Deleted bool      `json:"deleted,omitempty"`
}

type lockFile struct {
	Format int `json:"format"`
	Lock
}

// OpenFiles opens the store in dir and makes dir if it is missing. It fails
// when another process has the store open.
func OpenFiles(dir string, cfg FilesConfig) (*Files, error) {
	if cfg.KeepVersions == 0 {
		cfg.KeepVersions = 50
	}
	if cfg.KeepAge == 0 {
		cfg.KeepAge = 30 * 24 * time.Hour
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := durable.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("opening state store: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening state store: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("opening state store %q: another process has it open: %w", dir, err), f.Close())
	}
	return &Files{dir: dir, cfg: cfg, flk: f, keys: make(map[string]*sync.RWMutex)}, nil
}

// Close gives the folder back.
func (s *Files) Close() error { return s.flk.Close() }

// Ready implements Store: it makes a small file durable, as a state would be.
func (s *Files) Ready(context.Context) error {
	return durable.Replace(filepath.Join(s.dir, ".ready"), nil, 0o600, "store.ready", s.cfg.Fault)
}

func (s *Files) key(name string) *sync.RWMutex {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.keys[name]
	if k == nil {
		k = &sync.RWMutex{}
		s.keys[name] = k
	}
	return k
}

func (s *Files) path(name string) string { return filepath.Join(s.dir, filepath.FromSlash(name)) }

// Get implements Store.
func (s *Files) Get(_ context.Context, name string) (State, error) {
	if err := CheckName(name); err != nil {
		return State{}, err
	}
	k := s.key(name)
	k.RLock()
	defer k.RUnlock()
	return s.read(name)
}

func (s *Files) read(name string) (State, error) {
	dir := s.path(name)
	raw, err := os.ReadFile(filepath.Join(dir, "head"))
	if errors.Is(err, fs.ErrNotExist) {
		_, err := os.Stat(filepath.Join(dir, "written"))
		if errors.Is(err, fs.ErrNotExist) {
			return State{}, fmt.Errorf("reading state %q: %w", name, api.ErrNotFound)
		}
		return State{}, fmt.Errorf("reading state %q: %w: file head is missing", name, api.ErrGone)
	}
	if err != nil {
		return State{}, fmt.Errorf("reading state %q: %w", name, err)
	}
	var h head
	if err := json.Unmarshal(raw, &h); err != nil {
		return State{}, fmt.Errorf("reading state %q: %w: file head is damaged", name, api.ErrGone)
	}
	if h.Format != format {
		return State{}, fmt.Errorf("reading state %q: file head has format %d, this program knows %d", name, h.Format, format)
	}
	if h.Deleted {
		return State{}, fmt.Errorf("reading state %q: %w: deleted %s", name, api.ErrGone, h.Written.UTC().Format(time.RFC3339))
	}
	body, err := os.ReadFile(filepath.Join(dir, "versions", filepath.Base(h.File)))
	if errors.Is(err, fs.ErrNotExist) {
		return State{}, fmt.Errorf("reading state %q: %w: version file %q is missing", name, api.ErrGone, h.File)
	}
	if err != nil {
		return State{}, fmt.Errorf("reading state %q: %w", name, err)
	}
	if sum(body) != h.SHA256 {
		return State{}, fmt.Errorf("reading state %q: %w: version file %q is damaged", name, api.ErrGone, h.File)
	}
	return State{Body: body, Serial: h.Serial, Lineage: h.Lineage, Written: h.Written}, nil
}

// Lock implements Store.
func (s *Files) Lock(_ context.Context, name string) (Lock, error) {
	if err := CheckName(name); err != nil {
		return Lock{}, err
	}
	k := s.key(name)
	k.RLock()
	defer k.RUnlock()
	return s.readLock(name)
}

// readLock fails on a damaged file: a lock that can not be read is not "no lock".
func (s *Files) readLock(name string) (Lock, error) {
	raw, err := os.ReadFile(filepath.Join(s.path(name), "lock"))
	if errors.Is(err, fs.ErrNotExist) {
		return Lock{}, nil
	}
	if err != nil {
		return Lock{}, fmt.Errorf("reading lock of %q: %w", name, err)
	}
	var l lockFile
	if err := json.Unmarshal(raw, &l); err != nil {
		return Lock{}, fmt.Errorf("reading lock of %q: %w", name, err)
	}
	if l.Format != format {
		return Lock{}, fmt.Errorf("reading lock of %q: file has format %d, this program knows %d", name, l.Format, format)
	}
	return l.Lock, nil
}

// Update implements Store.
func (s *Files) Update(_ context.Context, name string, fn func(Tx) error) error {
	if err := CheckName(name); err != nil {
		return err
	}
	k := s.key(name)
	k.Lock()
	defer k.Unlock()
	return fn(&filesTx{s: s, name: name})
}

type filesTx struct {
	s    *Files
	name string
}

func (t *filesTx) State() (State, error) { return t.s.read(t.name) }

func (t *filesTx) Lock() (Lock, error) { return t.s.readLock(t.name) }

func (t *filesTx) PutState(meta api.Meta, body []byte) error {
	dir := t.s.path(t.name)
	if err := durable.MkdirAll(filepath.Join(dir, "versions"), 0o700); err != nil {
		return err
	}
	digest := sum(body)
	h := head{
		Format: format, File: versionFile(meta.Serial, digest), Serial: meta.Serial,
		Lineage: meta.Lineage, SHA256: digest, Written: t.s.cfg.Now().UTC(),
	}
	if err := durable.Replace(filepath.Join(dir, "versions", h.File), body, 0o600, "store.version", t.s.cfg.Fault); err != nil {
		return err
	}
	if err := t.putHead(h, "store.state"); err != nil {
		return err
	}
	written := filepath.Join(dir, "written")
	if _, err := os.Stat(written); errors.Is(err, fs.ErrNotExist) {
		if err := durable.Replace(written, nil, 0o600, "store.written", t.s.cfg.Fault); err != nil {
			return err
		}
	}
	// The state is durable: that an old version stays is no reason to refuse it.
	if err := t.s.prune(t.name, h.File); err != nil {
		t.s.cfg.Logger.Warn("old versions are kept", "name", t.name, "error", err)
	}
	return nil
}

func (t *filesTx) Delete() error {
	return t.putHead(head{Format: format, Deleted: true, Written: t.s.cfg.Now().UTC()}, "store.tombstone")
}

func (t *filesTx) putHead(h head, op string) error {
	raw, err := json.Marshal(h)
	if err != nil {
		return err
	}
	return durable.Replace(filepath.Join(t.s.path(t.name), "head"), append(raw, '\n'), 0o600, op, t.s.cfg.Fault)
}

func (t *filesTx) PutLock(l Lock) error {
	dir := t.s.path(t.name)
	if err := durable.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	raw, err := json.Marshal(lockFile{Format: format, Lock: l})
	if err != nil {
		return err
	}
	return durable.Replace(filepath.Join(dir, "lock"), append(raw, '\n'), 0o600, "store.lock", t.s.cfg.Fault)
}

func sum(b []byte) string {
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:])
}
