package fleettest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// Config says which hosts to boot. The zero Config boots one host.
type Config struct {
	// Hosts are the hosts; see [Hosts] for n of the plain kind.
	Hosts []HostConfig
	// CacheDir holds the base image and the files of running hosts; default
	// [CacheDir]. It must not lie on an overlay file system.
	CacheDir string
	// Events is told what takes long: the building of the image, the boot. Nil
	// is silent.
	Events func(tfhosts.Event)
}

// HostConfig says what one host is like. The zero value is a NixOS-like host
// that root logs into by key.
type HostConfig struct {
	// Name is the host's name, default "h1", "h2", … by position: at most 20
	// letters, digits and dashes.
	Name string
	// Users are made besides root; the fleet's key logs into each of them.
	Users []User
	// StoreMiB, when not 0, puts /nix/store on a file system of that size, for
	// tests of a full disk. The base system takes less than 1 MiB of it.
	StoreMiB int
	// Delay is how long a frame takes to the host, and again from it: half of a
	// round trip.
	Delay time.Duration
	// NetAdmin lets the host change its own network (CAP_NET_ADMIN).
	NetAdmin bool
	// RSAHostKey adds an RSA host key to the ed25519 and ECDSA ones.
	RSAHostKey bool
	// NoPenalties turns sshd's PerSourcePenalties off. By default they are on, as on any host of
	// today, and shut out a deployer that dials too often.
	NoPenalties bool
	// SSHDConfig is added to the host's sshd_config.
	SSHDConfig string
}

// Sudo says what a user may do as root.
type Sudo int

// Kinds of Sudo.
const (
	SudoNone       Sudo = iota
	SudoNoPassword      // NOPASSWD: ALL
	SudoPassword        // ALL, with the user's password
)

// User is a user of a host. None is a trusted user of nix.
type User struct {
	Name string
	Sudo Sudo
	// Password is the user's password; empty locks password use.
	Password string
	// Shell is the login shell, default /bin/bash.
	Shell string
}

// Hosts is n plain hosts.
func Hosts(n int) []HostConfig { return make([]HostConfig, n) }

// CacheDir is the folder for images and running hosts: $TF_HOSTS_CACHE, or
// tf-hosts in the user's cache folder.
func CacheDir() (string, error) {
	if dir := os.Getenv("TF_HOSTS_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("finding the cache folder: %w", err)
	}
	return filepath.Join(dir, "tf-hosts"), nil
}

// complete checks cfg and fills its defaults in.
func (cfg Config) complete() (Config, error) {
	if cfg.CacheDir == "" {
		dir, err := CacheDir()
		if err != nil {
			return cfg, err
		}
		cfg.CacheDir = dir
	}
	if len(cfg.Hosts) == 0 {
		cfg.Hosts = Hosts(1)
	}
	if len(cfg.Hosts) > 200 {
		return cfg, fmt.Errorf("reading fleet config: %d hosts do not fit into one subnet (at most 200)", len(cfg.Hosts))
	}
	hosts := make([]HostConfig, len(cfg.Hosts))
	copy(hosts, cfg.Hosts)
	cfg.Hosts = hosts
	goodName := regexp.MustCompile(`^[a-z][a-z0-9-]{0,19}$`)
	seen := make(map[string]bool)
	var errs []error
	for i := range hosts {
		h := &hosts[i]
		if h.Name == "" {
			h.Name = "h" + strconv.Itoa(i+1)
		}
		if !goodName.MatchString(h.Name) {
			errs = append(errs, fmt.Errorf("reading fleet config: bad host name %q", h.Name))
		}
		if seen[h.Name] {
			errs = append(errs, fmt.Errorf("reading fleet config: two hosts named %q", h.Name))
		}
		seen[h.Name] = true
		for _, u := range h.Users {
			if !goodName.MatchString(u.Name) {
				errs = append(errs, fmt.Errorf("reading fleet config: host %q: bad user name %q", h.Name, u.Name))
			}
			if u.Sudo == SudoPassword && u.Password == "" {
				errs = append(errs, fmt.Errorf("reading fleet config: host %q: user %q needs a password for sudo", h.Name, u.Name))
			}
		}
	}
	return cfg, errors.Join(errs...)
}

func (cfg Config) event(op, message string) {
	if cfg.Events != nil {
		cfg.Events(tfhosts.Event{Kind: tfhosts.EventStep, Op: op, Message: message})
	}
}
