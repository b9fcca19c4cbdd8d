package store_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/backend/store/storetest"
)

const name = "project1/example"

func TestFiles(t *testing.T) {
	storetest.Run(t, func(t *testing.T) storetest.Open {
		dir := t.TempDir()
		return func() (store.Store, error) { return store.OpenFiles(dir, store.FilesConfig{}) }
	})
}

func open(t *testing.T, dir string, cfg store.FilesConfig) *store.Files {
	t.Helper()
	s, err := store.OpenFiles(dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// SRV8: what existed is never "no state" again.
func TestLostFilesAreGone(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(dir string) error
	}{
		{"head is missing", func(dir string) error { return os.Remove(filepath.Join(dir, "head")) }},
		{"head is empty", func(dir string) error { return os.Truncate(filepath.Join(dir, "head"), 0) }},
		{"versions are missing", func(dir string) error { return os.RemoveAll(filepath.Join(dir, "versions")) }},
		{"state is cut off", func(dir string) error {
			files, err := filepath.Glob(filepath.Join(dir, "versions", "*.tfstate"))
			return errors.Join(err, os.Truncate(files[len(files)-1], 10))
		}},
		{"state is empty", func(dir string) error {
			files, err := filepath.Glob(filepath.Join(dir, "versions", "*.tfstate"))
			return errors.Join(err, os.Truncate(files[len(files)-1], 0))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir, store.FilesConfig{})
			storetest.Put(t, s, name, storetest.State(1, "l", "x"))
			if err := tt.do(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			if _, err := s.Get(t.Context(), name); !errors.Is(err, api.ErrGone) {
				t.Errorf("Get() = %v, want ErrGone", err)
			}
		})
	}
}

func TestDamagedLockIsNoFreeLock(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, store.FilesConfig{})
	put := func() error {
		return s.Update(t.Context(), name, func(tx store.Tx) error { return tx.PutLock(store.Lock{Holder: &api.LockInfo{ID: "1"}}) })
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, name, "lock"), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Lock(t.Context(), name); err == nil {
		t.Error("Lock() of an empty file = nil error, want one")
	}
}

func TestSecondProcessIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir, store.FilesConfig{})
	if _, err := store.OpenFiles(dir, store.FilesConfig{}); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("OpenFiles() of an open store = %v, want a refusal", err)
	}
}

func TestPermissions(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "states")
	s := open(t, dir, store.FilesConfig{})
	storetest.Put(t, s, name, storetest.State(1, "l", "x"))
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err == nil && fi.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has the mode %o, want nothing for group and others", path, fi.Mode().Perm())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestOldVersionsAreRemoved(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	s := open(t, dir, store.FilesConfig{KeepVersions: 2, KeepAge: time.Hour, Now: func() time.Time { return now }})
	for n := range uint64(5) {
		storetest.Put(t, s, name, storetest.State(n, "l", "x"))
	}
	if list, err := s.Versions(t.Context(), name); err != nil || len(list) != 5 {
		t.Errorf("%d young versions, %v, want 5", len(list), err)
	}
	now = now.Add(2 * time.Hour)
	storetest.Put(t, s, name, storetest.State(5, "l", "x"))
	list, err := s.Versions(t.Context(), name)
	if err != nil || len(list) != 2 || list[0].Serial != 5 {
		t.Errorf("Versions() after two hours = %+v, %v, want 5 and 4", list, err)
	}
}

// Every op of a write fails once: the state is the old or the new one, and the
// same write again succeeds.
func TestWriteFailsAtEveryOp(t *testing.T) {
	var ops []string
	s := open(t, t.TempDir(), store.FilesConfig{Fault: func(op string) error {
		ops = append(ops, op)
		return nil
	}})
	write := func(s store.Store) error {
		return s.Update(t.Context(), name, func(tx store.Tx) error {
			if err := tx.PutLock(store.Lock{Holder: &api.LockInfo{ID: "1"}}); err != nil {
				return err
			}
			return tx.PutState(api.Meta{Serial: 1, Lineage: "l"}, storetest.State(1, "l", "x"))
		})
	}
	if err := write(s); err != nil {
		t.Fatal(err)
	}
	for _, op := range []string{"store.lock.write", "store.version.sync", "store.state.rename", "store.written.dirsync", "store.prune"} {
		if !slices.Contains(ops, op) {
			t.Errorf("a write has the ops %q, want %q among them", ops, op)
		}
	}
	for _, op := range ops {
		t.Run(op, func(t *testing.T) {
			armed, hit := false, false
			s := open(t, t.TempDir(), store.FilesConfig{Fault: func(o string) error {
				if armed && o == op {
					armed, hit = false, true
					return errors.New("disk error")
				}
				return nil
			}})
			for first := range 2 { // once for the first state of all, once over an old one
				if first == 1 {
					storetest.Put(t, s, name, storetest.State(0, "l", "old"))
					if op == "store.written.write" || op == "store.written.sync" || op == "store.written.rename" || op == "store.written.dirsync" {
						return // it is written once
					}
				}
				armed, hit = true, false
				err := write(s)
				if !hit || err == nil && op != "store.prune" {
					t.Fatalf("write = %v, fault reached: %v", err, hit)
				}
				st, err := s.Get(t.Context(), name)
				if first == 0 && errors.Is(err, api.ErrNotFound) {
					st.Serial = 0
				} else if err != nil {
					t.Fatalf("Get() after a failure = %v", err)
				}
				if st.Serial > 1 {
					t.Errorf("serial = %d, want 0 or 1", st.Serial)
				}
				if err := write(s); err != nil {
					t.Fatalf("the same write again = %v", err)
				}
				if st, err := s.Get(t.Context(), name); err != nil || st.Serial != 1 {
					t.Fatalf("Get() after the second write = serial %d, %v, want 1", st.Serial, err)
				}
			}
		})
	}
}
