package fleettest

import (
	"bufio"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
)

const (
	suite         = "trixie"
	imagePackages = "systemd,systemd-sysv,dbus,openssh-server,iproute2,ca-certificates,sudo,perl"
	defaultMirror = "http://deb.debian.org/debian"
)

//go:embed image/layer.sh
var layerScript string

// image is the pair of read-only layers under every host.
type image struct {
	base  string // Debian
	layer string // what makes it look like NixOS, with a first system closure
}

func hashOf(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:6])
}

func imageIn(cache string) (image, error) {
	c, err := baseClosureText()
	if err != nil {
		return image{}, err
	}
	return image{
		base:  filepath.Join(cache, "image", suite+"-"+hashOf(suite, imagePackages)),
		layer: filepath.Join(cache, "image", "layer-"+hashOf(suite, imagePackages, layerScript, c)),
	}, nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// haveBase says whether the part of the image that needs a package mirror is there.
func haveBase(cache string) bool {
	img, err := imageIn(cache)
	return err == nil && exists(img.base)
}

// EnsureImage builds the base image in the cache folder unless it is there:
// about a minute and 490 MB, once, from the package mirror that the machine's
// own apt sources name. It needs root, debootstrap and the mirror. Two callers
// may run at once; a broken build leaves no image behind.
func EnsureImage(ctx context.Context, cfg Config) error {
	cfg, err := cfg.complete()
	if err != nil {
		return err
	}
	_, err = ensureImage(ctx, cfg)
	return err
}

func ensureImage(ctx context.Context, cfg Config) (image, error) {
	img, err := imageIn(cfg.CacheDir)
	if err != nil {
		return img, err
	}
	if err := os.MkdirAll(filepath.Dir(img.base), 0o755); err != nil {
		return img, fmt.Errorf("making the image folder: %w", err)
	}
	unlock, err := lockFile(filepath.Join(filepath.Dir(img.base), ".lock"))
	if err != nil {
		return img, err
	}
	defer unlock()
	if !exists(img.base) {
		cfg.event("image.base", "building the base image of the hosts (Debian "+suite+"); about a minute, once")
		if err := buildAtomically(img.base, func(dir string) error { return buildBase(ctx, dir) }); err != nil {
			return img, fmt.Errorf("building base image %q: %w", img.base, err)
		}
	}
	if !exists(img.layer) {
		cfg.event("image.layer", "preparing the first system of the hosts")
		if err := buildAtomically(img.layer, func(dir string) error { return buildLayer(ctx, img.base, dir) }); err != nil {
			return img, fmt.Errorf("building image layer %q: %w", img.layer, err)
		}
	}
	return img, nil
}

// buildAtomically calls build with a temporary folder and renames it to dir
// when build succeeds, so that dir is whole whenever it exists.
func buildAtomically(dir string, build func(dir string) error) error {
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".building-")
	if err != nil {
		return err
	}
	err = os.Chmod(tmp, 0o755)
	if err == nil {
		err = build(tmp)
	}
	if err == nil {
		err = os.Rename(tmp, dir)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(tmp))
	}
	return nil
}

func buildBase(ctx context.Context, dir string) error {
	if _, err := command(ctx, "debootstrap", "--variant=minbase", "--include="+imagePackages, suite, dir, mirror()); err != nil {
		return err
	}
	// Named in debootstrap's list it fails on libdbd-sqlite3-perl.
	_, err := command(ctx, "chroot", dir, "sh", "-ec",
		`export DEBIAN_FRONTEND=noninteractive; apt-get install -y -qq --no-install-recommends nix-bin; apt-get clean`)
	return err
}

// buildLayer runs layer.sh in the base image and keeps what it changed.
func buildLayer(ctx context.Context, base, dir string) error {
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".building-work-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	for _, d := range []string{"work", "root"} {
		if err := os.Mkdir(filepath.Join(tmp, d), 0o755); err != nil {
			return err
		}
	}
	closureDir := filepath.Join(dir, "usr/share/tf-hosts/base")
	if err := os.MkdirAll(closureDir, 0o755); err != nil {
		return err
	}
	if _, err := NewClosure(closureDir, baseClosure()); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "usr/share/tf-hosts/layer.sh"), []byte(layerScript), 0o644); err != nil {
		return err
	}
	// In a mount namespace of its own: nothing stays mounted, whatever happens.
	_, err = command(ctx, "unshare", "--mount", "--propagation", "private", "sh", "-ec",
		`mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3/work" "$3/root"
		mount -t proc proc "$3/root/proc"
		mount --rbind /dev "$3/root/dev" # nix builds on a pseudo terminal
		exec chroot "$3/root" sh -e /usr/share/tf-hosts/layer.sh`, "sh", base, dir, tmp)
	return err
}

// mirror is the package mirror of the machine's own apt sources: the first that
// serves Debian proper.
func mirror() string {
	files, err := filepath.Glob("/etc/apt/sources.list.d/*")
	if err != nil {
		return defaultMirror
	}
	for _, name := range append([]string{"/etc/apt/sources.list"}, files...) {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		uri := mirrorIn(bufio.NewScanner(f))
		if err := f.Close(); err != nil {
			continue
		}
		if uri != "" {
			return uri
		}
	}
	return defaultMirror
}

// mirrorIn finds a mirror of Debian in an apt source file of either format.
func mirrorIn(lines *bufio.Scanner) string {
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || (fields[0] != "deb" && fields[0] != "URIs:") {
			continue
		}
		for _, f := range fields[1:] {
			if strings.HasPrefix(f, "http") && strings.HasSuffix(strings.TrimSuffix(f, "/"), "/debian") {
				return f
			}
		}
	}
	return ""
}

// lockFile takes an exclusive lock; the kernel frees it when the process dies.
func lockFile(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening lock: %w", err)
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("locking %q: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// missingTools lists the commands that hosts need and the machine lacks.
func missingTools() []string {
	var missing []string
	for _, tool := range []string{"systemd-nspawn", "ip", "unshare", "nsenter", "ssh-keygen"} {
		found := false
		for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/sbin", "/sbin") {
			if st, err := os.Stat(filepath.Join(dir, tool)); err == nil && st.Mode()&0o111 != 0 {
				found = true
				break
			}
		}
		if !found {
			missing = append(missing, tool)
		}
	}
	return missing
}

// nixSystem is nix's name of the platform that this program runs on.
func nixSystem() string {
	arch := runtime.GOARCH
	switch arch {
	case "amd64":
		arch = "x86_64"
	case "arm64":
		arch = "aarch64"
	}
	return arch + "-" + runtime.GOOS
}

func isNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
