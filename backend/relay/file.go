package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
)

// File is a state in a local file as an Upstream, with the lock, lineage and
// serial rules of a state server: cycle 1 of a bootstrap and a detached destroy
// run on it. OpenTofu's own local backend truncates its file in place and is
// never used.
//
// The lock is PATH.lock.json and outlives the process, as a server's would. The
// caller holds the flock of the folder, so that no two processes use a File.
// Op names: file.write, file.sync, file.rename, file.dirsync, the same with
// filelock, and filelock.remove.
type File struct {
	path  string
	fault durable.Fault
	mu    sync.Mutex
	// rewind lets a Post go back to a lower serial of the same lineage.
	rewind bool
}

// AllowRewind lets later Posts go back to a lower serial, for "state push
// -force". Another lineage stays refused: the file is the only copy of its own.
func (f *File) AllowRewind() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rewind = true
}

// OpenFile makes a File; neither it nor its folder is touched. fault may be nil.
func OpenFile(path string, fault func(op string) error) (*File, error) {
	if path == "" {
		return nil, errors.New("opening local state: no path")
	}
	return &File{path: path, fault: fault}, nil
}

func (f *File) lockPath() string { return f.path + ".lock.json" }

// Get reads the state; api.ErrNotFound when there is none.
func (f *File) Get(context.Context) ([]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.read()
}

func (f *File) read() ([]byte, error) {
	b, err := os.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading local state: %w", api.ErrNotFound)
	}
	if err != nil {
		return nil, fmt.Errorf("reading local state: %w", err)
	}
	if _, err := api.ParseMeta(b); err != nil {
		return nil, fmt.Errorf("reading local state %q: %w: %w", f.path, api.ErrGone, err)
	}
	return b, nil
}

// Post replaces the state under the lock lockID. It must follow the stored one:
// the same lineage, and a higher serial or the same bytes.
func (f *File) Post(_ context.Context, lockID string, body []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	holder, err := f.holder()
	if err != nil {
		return err
	}
	switch {
	case holder == nil:
		return fmt.Errorf("writing local state: %w", api.ErrNotLocked)
	case holder.ID != lockID:
		return fmt.Errorf("writing local state: %w", &api.LockedError{Holder: *holder})
	}
	meta, err := api.ParseMeta(body)
	if err != nil {
		return fmt.Errorf("writing local state: %w: %w", api.ErrBadRequest, err)
	}
	have, err := f.read()
	switch {
	case errors.Is(err, api.ErrNotFound):
	case err != nil:
		return err
	case bytes.Equal(have, body):
		// A repetition: what is there may not be durable yet.
		return durable.SyncDir(filepath.Dir(f.path))
	default:
		old, err := api.ParseMeta(have)
		if err != nil {
			return fmt.Errorf("reading local state: %w", err)
		}
		if meta.Lineage != old.Lineage || meta.Serial <= old.Serial && !f.rewind {
			return fmt.Errorf("writing local state: %w: serial %d of lineage %s after serial %d of lineage %s",
				api.ErrStale, meta.Serial, meta.Lineage, old.Serial, old.Lineage)
		}
	}
	if err := durable.Replace(f.path, body, 0o600, "file", f.fault); err != nil {
		return fmt.Errorf("writing local state: %w", err)
	}
	return nil
}

// Holder is who holds the lock; nil when nobody does.
func (f *File) Holder() (*api.LockInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.holder()
}

func (f *File) holder() (*api.LockInfo, error) {
	b, err := os.ReadFile(f.lockPath())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading lock of local state: %w", err)
	}
	var info api.LockInfo
	if err := json.Unmarshal(b, &info); err != nil {
		return nil, fmt.Errorf("reading lock %q of local state: %w", f.lockPath(), err)
	}
	return &info, nil
}

// Lock takes the lock, again for the ID that holds it. Another holder is an
// *api.LockedError.
func (f *File) Lock(_ context.Context, info api.LockInfo) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	holder, err := f.holder()
	if err != nil {
		return err
	}
	if holder != nil {
		if holder.ID == info.ID {
			return nil
		}
		return fmt.Errorf("locking local state: %w", &api.LockedError{Holder: *holder})
	}
	b, err := json.Marshal(info)
	if err != nil {
		return fmt.Errorf("locking local state: %w", err)
	}
	if err := durable.Replace(f.lockPath(), b, 0o600, "filelock", f.fault); err != nil {
		return fmt.Errorf("locking local state: %w", err)
	}
	return nil
}

// Unlock releases the lock of info.ID; api.ErrNotLocked when none is held, an
// *api.LockedError when another one is.
func (f *File) Unlock(_ context.Context, info api.LockInfo) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	holder, err := f.holder()
	switch {
	case err != nil:
		return err
	case holder == nil:
		return fmt.Errorf("unlocking local state: %w", api.ErrNotLocked)
	case holder.ID != info.ID:
		return fmt.Errorf("unlocking local state: %w", &api.LockedError{Holder: *holder})
	}
	if err := f.fault.At("filelock.remove"); err != nil {
		return err
	}
	if err := os.Remove(f.lockPath()); err != nil {
		return fmt.Errorf("unlocking local state: %w", err)
	}
	if err := durable.SyncDir(filepath.Dir(f.path)); err != nil {
		return fmt.Errorf("unlocking local state: %w", err)
	}
	return nil
}
