package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
)

type versionEntry struct {
	Version
	file string
}

func versionFile(serial uint64, digest string) string {
	return fmt.Sprintf("%020d-%s.tfstate", serial, digest[:16])
}

// versions lists the version files, newest first: by time, since an operator's
// override may have taken the serial back.
func (s *Files) versions(name string) ([]versionEntry, error) {
	entries, err := os.ReadDir(filepath.Join(s.path(name), "versions"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing versions of %q: %w", name, err)
	}
	var list []versionEntry
	for _, e := range entries {
		serial, _, ok := strings.Cut(strings.TrimSuffix(e.Name(), ".tfstate"), "-")
		n, err := strconv.ParseUint(serial, 10, 64)
		if !ok || err != nil || !strings.HasSuffix(e.Name(), ".tfstate") {
			continue // a temp file that an interruption left
		}
		fi, err := e.Info()
		if err != nil {
			return nil, fmt.Errorf("listing versions of %q: %w", name, err)
		}
		list = append(list, versionEntry{Version{Serial: n, Size: fi.Size(), Written: fi.ModTime().UTC()}, e.Name()})
	}
	slices.SortStableFunc(list, func(a, b versionEntry) int {
		if c := b.Written.Compare(a.Written); c != 0 {
			return c
		}
		return strings.Compare(b.file, a.file)
	})
	return list, nil
}

// Versions implements Store.
func (s *Files) Versions(_ context.Context, name string) ([]Version, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	k := s.key(name)
	k.RLock()
	defer k.RUnlock()
	entries, err := s.versions(name)
	if err != nil {
		return nil, err
	}
	list := make([]Version, len(entries))
	for i, e := range entries {
		list[i] = e.Version
	}
	return list, nil
}

// Version implements Store.
func (s *Files) Version(_ context.Context, name string, serial uint64) ([]byte, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	k := s.key(name)
	k.RLock()
	defer k.RUnlock()
	entries, err := s.versions(name)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.Serial == serial {
			return os.ReadFile(filepath.Join(s.path(name), "versions", e.file))
		}
	}
	return nil, fmt.Errorf("reading version %d of %q: %w", serial, name, api.ErrNotFound)
}

// prune removes what is neither among the newest nor young, and temp files that
// an interruption left. It never removes the current version.
func (s *Files) prune(name, current string) error {
	if err := s.cfg.Fault.At("store.prune"); err != nil {
		return err
	}
	entries, err := s.versions(name)
	if err != nil {
		return err
	}
	cutoff := s.cfg.Now().Add(-s.cfg.KeepAge)
	dir := filepath.Join(s.path(name), "versions")
	for i, e := range entries {
		if i < s.cfg.KeepVersions || e.Written.After(cutoff) || e.file == current {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.file)); err != nil {
			return fmt.Errorf("removing an old version of %q: %w", name, err)
		}
	}
	return s.sweepTemp(name, time.Hour)
}

func (s *Files) sweepTemp(name string, age time.Duration) error {
	for _, dir := range []string{s.path(name), filepath.Join(s.path(name), "versions")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return fmt.Errorf("sweeping %q: %w", name, err)
		}
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), ".") || e.IsDir() {
				continue
			}
			fi, err := e.Info()
			if err != nil || s.cfg.Now().Sub(fi.ModTime()) < age {
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("sweeping %q: %w", name, err)
			}
		}
	}
	return nil
}
