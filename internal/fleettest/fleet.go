package fleettest

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"
)

//go:embed boot.sh
var bootScript string

// Fleet is a set of running hosts on one bridge. Close ends them.
type Fleet struct {
	Hosts []*Host

	cfg    Config
	image  image
	dir    string
	subnet int
	bridge string

	mu     sync.Mutex // guards record
	record record

	wg sync.WaitGroup // the watchers of the hosts
}

// Start boots the hosts of cfg and returns when each of them has finished
// booting and its sshd listens. The image is built if it is missing. Leftovers
// of dead owners are swept first. After an error nothing is left behind.
func Start(ctx context.Context, cfg Config) (*Fleet, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("booting hosts: root is needed")
	}
	if missing := missingTools(); len(missing) > 0 {
		return nil, fmt.Errorf("booting hosts: not installed: %q (apt-get install systemd-container iproute2 openssh-client)", missing)
	}
	img, err := ensureImage(ctx, cfg)
	if err != nil {
		return nil, err
	}
	f := &Fleet{cfg: cfg, image: img}
	if err := f.claim(ctx); err != nil {
		return nil, err
	}
	if err := f.boot(ctx); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// claim takes a free subnet and the fleet's folder.
func (f *Fleet) claim(ctx context.Context) error {
	root := filepath.Join(f.cfg.CacheDir, "fleets")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("making the fleets folder: %w", err)
	}
	unlock, err := lockFile(filepath.Join(root, ".lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := sweepLocked(ctx, root); err != nil {
		return err
	}
	owner, err := processOf(os.Getpid())
	if err != nil {
		return fmt.Errorf("reading own process: %w", err)
	}
	for n := range 256 {
		bridge := fmt.Sprintf("tfh%d", n)
		dir := filepath.Join(root, bridge)
		if exists(dir) || exists(filepath.Join("/sys/class/net", bridge)) {
			continue
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("making the fleet's folder: %w", err)
		}
		// Another cache folder may race for the name; making the link decides.
		if _, err := command(ctx, "ip", "link", "add", bridge, "address", fmt.Sprintf("02:77:00:00:%02x:01", n), "type", "bridge"); err != nil {
			if errRemove := os.RemoveAll(dir); errRemove != nil {
				return errRemove
			}
			if exists(filepath.Join("/sys/class/net", bridge)) {
				continue
			}
			return fmt.Errorf("making bridge %q: %w", bridge, err)
		}
		f.subnet, f.bridge, f.dir = n, bridge, dir
		f.record = record{Owner: owner, Bridge: bridge, Hosts: make(map[string]hostRecord)}
		return f.record.save(dir)
	}
	return errors.New("taking a subnet: 10.77.0.0/24 to 10.77.255.0/24 are all in use")
}

// update changes the fleet's record on disk.
func (f *Fleet) update(change func(*record)) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.record)
	return f.record.save(f.dir)
}

func (f *Fleet) boot(ctx context.Context) error {
	started := time.Now()
	f.cfg.event("hosts.boot", fmt.Sprintf("booting %d hosts", len(f.cfg.Hosts)))
	if _, err := command(ctx, "ip", "address", "add", f.Gateway()+"/24", "dev", f.bridge); err != nil {
		return err
	}
	if _, err := command(ctx, "ip", "link", "set", f.bridge, "up"); err != nil {
		return err
	}
	if err := sshKey(ctx, f.KeyFile(), "ed25519", "deployer"); err != nil {
		return fmt.Errorf("making the deployer's key: %w", err)
	}
	for i, hc := range f.cfg.Hosts {
		f.Hosts = append(f.Hosts, newHost(f, i, hc))
	}
	errs := make([]error, len(f.Hosts))
	var wg sync.WaitGroup
	for i, h := range f.Hosts {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := h.create(ctx); err != nil {
				errs[i] = fmt.Errorf("booting host %q: %w", h.Name, err)
			}
		}()
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	f.cfg.event("hosts.ready", fmt.Sprintf("%d hosts are up after %.1f s", len(f.Hosts), time.Since(started).Seconds()))
	return nil
}

// Host is the host of that name, nil without one.
func (f *Fleet) Host(name string) *Host {
	for _, h := range f.Hosts {
		if h.Name == name {
			return h
		}
	}
	return nil
}

// Gateway is this machine's address on the fleet's network.
func (f *Fleet) Gateway() string { return fmt.Sprintf("10.77.%d.1", f.subnet) }

// KeyFile is the private key that every user of every host accepts.
func (f *Fleet) KeyFile() string { return filepath.Join(f.dir, "deployer") }

// Close ends every host at once, as a power cut does, and removes all that the
// fleet set up.
func (f *Fleet) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, h := range f.Hosts {
		h.end()
	}
	f.wg.Wait()
	for _, h := range f.Hosts {
		if h.delay != nil {
			_ = h.delay.close() // its links go away with it
		}
	}
	f.mu.Lock()
	r := f.record
	f.mu.Unlock()
	if err := r.teardown(ctx); err != nil {
		return fmt.Errorf("closing fleet %q: %w", f.bridge, err)
	}
	// Half removed, the folder would look to a sweep like one that was just
	// made, and both would remove it at once.
	unlock, err := lockFile(filepath.Join(filepath.Dir(f.dir), ".lock"))
	if err != nil {
		return fmt.Errorf("closing fleet %q: %w", f.bridge, err)
	}
	defer unlock()
	if err := os.RemoveAll(f.dir); err != nil {
		return fmt.Errorf("closing fleet %q: %w", f.bridge, err)
	}
	return nil
}
