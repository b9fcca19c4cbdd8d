package fleettest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a process that cannot be mistaken for a later one of the same pid.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after boot, field 22 of /proc/PID/stat
}

func processOf(pid int) (process, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, err
	}
	// The name, in parentheses, may hold spaces.
	s := string(b)
	fields := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(fields) < 20 {
		return process{}, fmt.Errorf("reading /proc/%d/stat: %d fields", pid, len(fields))
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	return process{PID: pid, Start: start}, err
}

func (p process) alive() bool {
	now, err := processOf(p.PID)
	return err == nil && now == p
}

func (p process) kill() {
	if p.PID > 1 && p.alive() {
		_ = syscall.Kill(p.PID, syscall.SIGKILL)
	}
}

// record is what a fleet set up, written before it is set up: fleet.json in the
// fleet's folder.
type record struct {
	Owner  process               `json:"owner"`
	Bridge string                `json:"bridge"`
	Hosts  map[string]hostRecord `json:"hosts"`
}

type hostRecord struct {
	Netns string `json:"netns"`
	Link  string `json:"link"`
	// Bridge is the host's own, behind a delay; empty without one.
	Bridge string `json:"bridge,omitempty"`
	Cgroup string `json:"cgroup"`
	// Processes are nspawn and the host's first process, of the boot that runs.
	Processes []process `json:"processes,omitempty"`
	// Mount is a file system mounted outside the host, empty without one.
	Mount string `json:"mount,omitempty"`
}

func (r record) save(dir string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	tmp := filepath.Join(dir, ".fleet.json")
	if err := os.WriteFile(tmp, b, 0o644); err != nil {
		return fmt.Errorf("recording fleet: %w", err)
	}
	return os.Rename(tmp, filepath.Join(dir, "fleet.json"))
}

// Sweep removes what fleets of dead owners left behind in the cache folder of
// cfg: hosts, links, network namespaces, mounts, files. Fleets whose owner lives
// are left alone. It returns the folders it removed.
func Sweep(ctx context.Context, cfg Config) ([]string, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	root := filepath.Join(cfg.CacheDir, "fleets")
	if err := os.MkdirAll(root, 0o755); err != nil {
		return nil, fmt.Errorf("sweeping fleets: %w", err)
	}
	unlock, err := lockFile(filepath.Join(root, ".lock"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	return sweepLocked(ctx, root)
}

func sweepLocked(ctx context.Context, root string) ([]string, error) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("sweeping fleets: %w", err)
	}
	var swept []string
	var errs []error
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(root, e.Name())
		var r record
		b, err := os.ReadFile(filepath.Join(dir, "fleet.json"))
		if err == nil {
			err = json.Unmarshal(b, &r)
		}
		switch {
		case isNotExist(err): // nothing was set up yet
		case err != nil:
			errs = append(errs, fmt.Errorf("sweeping %q: %w", dir, err))
			continue
		case r.Owner.alive():
			continue
		}
		err = r.teardown(ctx)
		if err == nil {
			err = os.RemoveAll(dir)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("sweeping %q: %w", dir, err))
			continue
		}
		swept = append(swept, dir)
	}
	return swept, errors.Join(errs...)
}

// teardown ends and removes everything in r. The folder is for the caller to
// remove, under the lock of the fleets.
func (r record) teardown(ctx context.Context) error {
	cgroups := cgroupMount()
	names := make([]string, 0, len(r.Hosts))
	for name := range r.Hosts {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		h := r.Hosts[name]
		for _, p := range h.Processes {
			p.kill()
		}
		if cgroups != "" && h.Cgroup != "" {
			// A host that was started and not yet recorded; the cgroup is ours alone.
			_ = os.WriteFile(filepath.Join(cgroups, h.Cgroup, "cgroup.kill"), []byte("1"), 0o200)
		}
	}
	var errs []error
	for _, name := range names {
		h := r.Hosts[name]
		for _, p := range h.Processes {
			if err := waitGone(ctx, p); err != nil {
				errs = append(errs, err)
			}
		}
		if cgroups != "" && h.Cgroup != "" {
			removeCgroup(ctx, filepath.Join(cgroups, h.Cgroup))
		}
		if exists(filepath.Join("/run/netns", h.Netns)) {
			if _, err := command(ctx, "ip", "netns", "delete", h.Netns); err != nil {
				errs = append(errs, err)
			}
		}
		for _, link := range []string{h.Link, h.Bridge} {
			if link == "" || !exists(filepath.Join("/sys/class/net", link)) {
				continue
			}
			if _, err := command(ctx, "ip", "link", "delete", link); err != nil && exists(filepath.Join("/sys/class/net", link)) {
				errs = append(errs, err)
			}
		}
		if h.Mount != "" && mounted(h.Mount) {
			if err := syscall.Unmount(h.Mount, syscall.MNT_DETACH); err != nil {
				errs = append(errs, fmt.Errorf("unmounting %q: %w", h.Mount, err))
			}
		}
	}
	if r.Bridge != "" && exists(filepath.Join("/sys/class/net", r.Bridge)) {
		if _, err := command(ctx, "ip", "link", "delete", r.Bridge); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func waitGone(ctx context.Context, p process) error {
	return poll(ctx, 10*time.Second, 5*time.Millisecond, fmt.Sprintf("the end of process %d", p.PID), func() (bool, error) {
		return !p.alive() || zombie(p.PID), nil
	})
}

func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	s := string(b)
	return err != nil || strings.HasPrefix(s[strings.LastIndexByte(s, ')')+1:], " Z")
}

// poll calls done until it says true or fails, at most limit long.
func poll(ctx context.Context, limit, every time.Duration, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
}

// cgroupMount is where cgroup version 2 is mounted, "" where it is not.
func cgroupMount() string {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return ""
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			return f[1]
		}
	}
	return ""
}

// removeCgroup removes an empty tree of cgroups, leaves first; the kernel takes
// a moment to see that the last process is gone.
func removeCgroup(ctx context.Context, dir string) {
	_ = poll(ctx, 2*time.Second, 10*time.Millisecond, "an empty cgroup", func() (bool, error) {
		var dirs []string
		_ = filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for i := len(dirs) - 1; i >= 0; i-- {
			_ = syscall.Rmdir(dirs[i])
		}
		return !exists(dir), nil
	})
}

func mounted(path string) bool {
	b, err := os.ReadFile("/proc/self/mounts")
	return err == nil && strings.Contains(string(b), " "+path+" ")
}
