package tofu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/hashicorp/go-version"
	"github.com/hashicorp/hc-install/fs"
	"github.com/hashicorp/hc-install/product"
	"github.com/hashicorp/terraform-exec/tfexec"
)

// The oldest engines whose behaviour the wrapper relies on. OpenTofu 1.12.0 is
// the first that releases an http lock on an interrupt at a prompt
// (opentofu#3624).
const (
	minTofu      = "1.12.0"
	minTerraform = "1.11.0"
)

// ErrNoEngine says that no OpenTofu was found, or only one that is too old.
var ErrNoEngine = errors.New("no usable OpenTofu")

// Engine is an OpenTofu executable.
type Engine struct {
	// Path is absolute.
	Path string
	// Resolved is Path without symbolic links: what /proc/PID/exe shows, unless
	// it is a wrapper.
	Resolved string
	// Fingerprint changes when the executable does: path, size and time.
	Fingerprint string
}

// FindConfig says where to look.
type FindConfig struct {
	// Explicit is the value of TF_HOSTS_TOFU; when set, nothing else is tried.
	Explicit string
	// CacheDir is the program's cache folder; its tofu/ holds built engines.
	CacheDir string
}

// Find locates the engine: Explicit, then tofu on PATH, then the newest build
// in the cache. It starts no process. The error wraps ErrNoEngine and names the
// way out.
func Find(ctx context.Context, cfg FindConfig) (*Engine, error) {
	if cfg.Explicit != "" {
		path, err := filepath.Abs(cfg.Explicit)
		if err != nil {
			return nil, fmt.Errorf("finding the engine %q of TF_HOSTS_TOFU: %w", cfg.Explicit, err)
		}
		found, err := (&fs.AnyVersion{ExactBinPath: path}).Find(ctx)
		if err != nil {
			return nil, fmt.Errorf("finding the engine %q of TF_HOSTS_TOFU: %w: not an executable file", cfg.Explicit, ErrNoEngine)
		}
		return newEngine(found)
	}
	onPath := &fs.AnyVersion{Product: &product.Product{Name: "tofu", BinaryName: func() string { return "tofu" }}}
	if found, err := onPath.Find(ctx); err == nil {
		return newEngine(found)
	}
	if found := newestBuild(cfg.CacheDir); found != "" {
		return newEngine(found)
	}
	return nil, fmt.Errorf("finding tofu: %w: not in TF_HOSTS_TOFU, on PATH or in %q", ErrNoEngine, filepath.Join(cfg.CacheDir, "tofu"))
}

func newestBuild(cacheDir string) string {
	const prefix = "tofu-"
	matches, err := filepath.Glob(filepath.Join(cacheDir, "tofu", prefix+"*"))
	if err != nil { // only a malformed pattern
		return ""
	}
	type build struct {
		path string
		v    *version.Version
	}
	var builds []build
	for _, m := range matches {
		v, err := version.NewVersion(strings.TrimPrefix(filepath.Base(m), prefix))
		if err != nil {
			continue // a temporary file of a build under way
		}
		builds = append(builds, build{m, v})
	}
	if len(builds) == 0 {
		return ""
	}
	sort.Slice(builds, func(i, j int) bool { return builds[i].v.GreaterThan(builds[j].v) })
	return builds[0].path
}

func newEngine(path string) (*Engine, error) {
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return nil, fmt.Errorf("finding the engine %q: %w", path, err)
	}
	info, err := os.Stat(resolved)
	if err != nil {
		return nil, fmt.Errorf("finding the engine %q: %w", path, err)
	}
	return &Engine{
		Path:        path,
		Resolved:    resolved,
		Fingerprint: fmt.Sprintf("%s %d %d", resolved, info.Size(), info.ModTime().UnixNano()),
	}, nil
}

// IsEngine says whether an executable is one, by its name. A plugin is none.
func IsEngine(path string) bool {
	base := strings.TrimPrefix(filepath.Base(path), ".") // Nix wraps programs as .NAME-wrapped
	if strings.HasPrefix(base, "terraform-p") {          // terraform-provider-…, terraform-provisioner-…
		return false
	}
	return strings.HasPrefix(base, "tofu") || strings.HasPrefix(base, "terraform")
}

// CheckVersion starts the engine once and refuses one that is too old. dir is
// any existing folder. "terraform" passes from 1.11 on, when it was named
// explicitly.
func (e *Engine) CheckVersion(ctx context.Context, dir string, env []string) (string, error) {
	tf, err := e.exec(dir, env)
	if err != nil {
		return "", err
	}
	got, _, err := tf.Version(ctx, true)
	if err != nil {
		return "", fmt.Errorf("asking %q for its version: %w", e.Path, err)
	}
	want := minTofu
	if strings.HasPrefix(filepath.Base(e.Path), "terraform") {
		want = minTerraform
	}
	if got.Core().LessThan(version.Must(version.NewVersion(want))) {
		return "", fmt.Errorf("checking %q: %w: version %s, at least %s is needed", e.Path, ErrNoEngine, got, want)
	}
	return got.String(), nil
}

// exec prepares terraform-exec for a reading command.
func (e *Engine) exec(dir string, env []string) (*tfexec.Terraform, error) {
	tf, err := tfexec.NewTerraform(dir, e.Path)
	if err != nil {
		return nil, fmt.Errorf("preparing %q: %w", e.Path, err)
	}
	vars := make(map[string]string, len(env))
	for _, kv := range env {
		k, v, _ := strings.Cut(kv, "=")
		vars[k] = v
	}
	// terraform-exec refuses what it sets itself; none of it matters to a command
	// that reads a file.
	if err := tf.SetEnv(tfexec.CleanEnv(vars)); err != nil {
		return nil, fmt.Errorf("preparing the environment of %q: %w", e.Path, err)
	}
	return tf, nil
}
