package bootstrap

import (
	"errors"
	"fmt"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// groupSetup is the setup of one group's graph. It keeps all nodes: which of
// them are in the graph is the Config's scope, and a group's backend may be
// reached through a node of another one. The state's address ends in "-GROUP"
// (FR-007), and so does the path that the self_backend node serves.
func groupSetup(s *tfhosts.Setup, group string) (*tfhosts.Setup, error) {
	own := *s
	var err error
	if own.Backend, err = groupBackend(s.Backend, group); err != nil {
		return nil, err
	}
	if s.Self == nil {
		return &own, nil
	}
	self := *s.Self
	if self.Path != "" {
		if self.Path, err = suffixed(self.Path, pathStem(self.Path), group); err != nil {
			return nil, fmt.Errorf("self_backend.path: %w", err)
		}
	}
	own.Self = &self
	return &own, nil
}

// groupBackend suffixes the addresses of a backend with "-GROUP": on the path,
// before a query; on a lock address that lies below the address at the same
// place, as GitLab's ADDRESS/lock. Where that place can not be found it is an
// error: two groups would share a lock.
func groupBackend(b tfhosts.HTTPBackend, group string) (tfhosts.HTTPBackend, error) {
	stem := pathStem(b.Address)
	var errs []error
	suffix := func(key string, address *string) {
		if *address == "" {
			return
		}
		with, err := suffixed(*address, stem, group)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
			return
		}
		*address = with
	}
	suffix("http_backend.address", &b.Address)
	suffix("http_backend.lock_address", &b.LockAddress)
	suffix("http_backend.unlock_address", &b.UnlockAddress)
	return b, errors.Join(errs...)
}

var (
	errNoPath = errors.New("it has no path that could end in a group's name")
	errBeside = errors.New("it does not lie below http_backend.address, so the place of a group's name in it is not known")
)

// suffixed puts "-GROUP" behind stem, with which address must begin.
func suffixed(address, stem, group string) (string, error) {
	path := stem
	if _, rest, ok := strings.Cut(stem, "://"); ok {
		_, path, _ = strings.Cut(rest, "/")
	}
	if strings.Trim(path, "/") == "" {
		return "", errNoPath
	}
	rest, ok := strings.CutPrefix(address, stem)
	if !ok || rest != "" && !strings.ContainsRune("/?#", rune(rest[0])) {
		return "", errBeside
	}
	return stem + "-" + group + rest, nil
}

// pathStem is an address up to the end of its path, without query, fragment and
// final slashes.
func pathStem(address string) string {
	if end := strings.IndexAny(address, "?#"); end >= 0 {
		address = address[:end]
	}
	return strings.TrimRight(address, "/")
}
