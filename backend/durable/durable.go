// Package durable changes files so that an interruption leaves the old content
// or the new one and never a torn file: temp, fsync, rename, fsync of the folder.
//
// Every step has an op name made of the caller's prefix and "write", "sync",
// "rename" or "dirsync", for tests that fail or stop exactly there. It never
// decides where a file belongs and never reads one.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/renameio/v2"
)

// Fault is called with an op name before the op; an error from it is the op's
// error. A nil Fault does nothing.
type Fault func(op string) error

// At calls f if it is not nil.
func (f Fault) At(op string) error {
	if f == nil {
		return nil
	}
	if err := f(op); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// Replace makes data the content of path with the permissions perm. After an
// error the file has its old content, except after one of op.dirsync: then the
// new content is in place and may be gone after a power failure.
func Replace(path string, data []byte, perm os.FileMode, op string, fault Fault) error {
	if err := fault.At(op + ".write"); err != nil {
		return err
	}
	dir := filepath.Dir(path)
	f, err := renameio.NewPendingFile(path, renameio.WithTempDir(dir), renameio.WithPermissions(perm), renameio.IgnoreUmask())
	if err != nil {
		return fmt.Errorf("writing %q: %w", path, err)
	}
	defer f.Cleanup()
	if _, err := f.Write(data); err != nil {
		return fmt.Errorf("writing %q: %w", path, err)
	}
	if err := fault.At(op + ".sync"); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("syncing %q: %w", path, err)
	}
	if err := fault.At(op + ".rename"); err != nil {
		return err
	}
	if err := f.CloseAtomicallyReplace(); err != nil {
		return fmt.Errorf("renaming to %q: %w", path, err)
	}
	if err := fault.At(op + ".dirsync"); err != nil {
		return err
	}
	return SyncDir(dir)
}

// SyncDir makes the names in a folder durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("syncing folder: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("syncing folder %q: %w", dir, err)
	}
	return nil
}

// SyncTree makes a whole folder durable, files and names, before it is renamed
// into its place. Symbolic links are names alone.
func SyncTree(dir string) error {
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() && !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		return errors.Join(f.Sync(), f.Close())
	})
	if err != nil {
		return fmt.Errorf("syncing folder %q: %w", dir, err)
	}
	return nil
}

// MkdirAll makes dir and its missing parents with the permissions perm and
// syncs the folder of each one made.
func MkdirAll(dir string, perm os.FileMode) error {
	if fi, err := os.Stat(dir); err == nil && fi.IsDir() {
		return nil
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := MkdirAll(parent, perm); err != nil {
			return err
		}
	}
	if err := os.Mkdir(dir, perm); err != nil && !os.IsExist(err) {
		return fmt.Errorf("making folder: %w", err)
	}
	return SyncDir(parent)
}

// Sweep removes the temporary files that a process which died within Replace
// left in dir. The caller knows that no Replace runs there. A missing dir is
// swept.
func Sweep(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("sweeping folder: %w", err)
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !temporary(e.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("sweeping folder: %w", err)
		}
	}
	return nil
}

// temporary: renameio's names, a dot, the file's name and digits.
func temporary(name string) bool {
	rest := strings.TrimRight(name, "0123456789")
	return strings.HasPrefix(name, ".") && rest != name && len(name)-len(rest) >= 6 && strings.Contains(rest[1:], ".")
}
