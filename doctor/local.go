package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"al.essio.dev/pkg/shellescape"
	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"golang.org/x/sys/unix"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
	"fediversity.eu/tf-hosts/setup"
)

// hintOf is the hint that an error carries, else fallback.
func hintOf(err error, fallback string) string {
	var exit *tfhosts.ExitError
	if errors.As(err, &exit) && exit.Hint != "" {
		return exit.Hint
	}
	return fallback
}

func (r *run) checkTofu(ctx context.Context) {
	const hint = "install OpenTofu 1.12 or newer, or name it: export TF_HOSTS_TOFU=/path/to/tofu"
	if r.CheckEnviron != nil {
		if err := r.CheckEnviron(r.Environ); err != nil {
			r.add("environment", Fail, err.Error(), hintOf(err, "unset these variables"))
		} else {
			r.add("environment", OK, "no variable that changes OpenTofu behind the back of a run", "")
		}
	}
	engine, err := tofu.Find(ctx, r.Engine)
	if err != nil {
		r.add("tofu", Fail, err.Error(), hint)
		return
	}
	version, err := engine.CheckVersion(ctx, os.TempDir(), append(r.Environ[:len(r.Environ):len(r.Environ)], "TF_CLI_CONFIG_FILE="+os.DevNull))
	if err != nil {
		r.add("tofu", Fail, err.Error(), hint)
		return
	}
	r.add("tofu", OK, fmt.Sprintf("version %s at %s", version, engine.Path), "")
}

// The oldest client whose behaviour the copy is tested with.
const minNixMajor, minNixMinor = 2, 8

func (r *run) checkNix(ctx context.Context) {
	const install = "install nix 2.8 or newer (apt-get install nix-bin), or put it on PATH"
	version, err := r.Nix.Version(ctx)
	if err != nil {
		hint := install
		if !errors.Is(err, nix.ErrNotInstalled) {
			hint = "see what it says: nix --version"
		}
		r.add("nix", Fail, err.Error(), hint)
		return
	}
	if tooOld(version) {
		r.add("nix", Fail, fmt.Sprintf("version %s, at least %d.%d is needed", version, minNixMajor, minNixMinor), install)
		return
	}
	if err := r.Nix.CanEvaluate(ctx); err != nil {
		r.add("nix", Fail, fmt.Sprintf("version %s: %v", version, err), "see what it says: nix-instantiate --eval -E '1 + 1'")
		return
	}
	r.add("nix", OK, fmt.Sprintf("version %s, and it evaluates", version), "")
}

// tooOld judges "2.8.0", "2.31pre2025…". What can not be read is not too old.
func tooOld(version string) bool {
	var major, minor int
	if n, err := fmt.Sscanf(version, "%d.%d", &major, &minor); n < 2 || err != nil {
		return false
	}
	return major < minNixMajor || major == minNixMajor && minor < minNixMinor
}

func (r *run) checkSetup(context.Context) {
	if r.SetupErr == nil {
		if r.Setup != nil {
			r.add("setup", OK, fmt.Sprintf("%s: %s", r.Setup.Path, english.Plural(len(r.Setup.Nodes), "node", "")), "")
		}
		return
	}
	var problems *setup.ProblemsError
	if !errors.As(r.SetupErr, &problems) {
		r.add("setup", Fail, r.SetupErr.Error(), hintOf(r.SetupErr, "tf-hosts schema"))
		return
	}
	for _, p := range problems.Problems {
		hint := p.Hint
		if hint == "" {
			hint = "correct it in " + problems.Path + "; the schema: tf-hosts schema"
		}
		r.add("setup", Fail, p.Path+": "+p.Text, hint)
	}
}

// Least free space of the working dir: states, plans and journal.
const (
	dirWarn = 100 << 20
	dirFail = 10 << 20
)

func (r *run) checkWorkDir(context.Context) {
	if r.Setup == nil || r.WorkDir == "" {
		return
	}
	dir := r.WorkDir
	info, err := os.Stat(dir)
	there := err == nil
	for errors.Is(err, fs.ErrNotExist) && dir != filepath.Dir(dir) {
		dir = filepath.Dir(dir)
		info, err = os.Stat(dir)
	}
	quoted := shellescape.Quote(dir)
	elsewhere := "make it writable for this user, or name another place: export BOOTSTRAP_STATE_DIR=/path"
	switch {
	case err != nil:
		r.add("workdir", Fail, fmt.Sprintf("looking at %q: %v", dir, err), elsewhere)
		return
	case !info.IsDir():
		r.add("workdir", Fail, fmt.Sprintf("%s is no folder", dir), elsewhere)
		return
	case unix.Access(dir, unix.W_OK|unix.X_OK) != nil:
		r.add("workdir", Fail, fmt.Sprintf("%s can not be written: %v", dir, unix.Access(dir, unix.W_OK|unix.X_OK)), elsewhere)
		return
	case !there:
		r.add("workdir", OK, fmt.Sprintf("%s is made by the first run, below %s", r.WorkDir, dir), "")
	case info.Mode().Perm()&0o077 != 0:
		r.add("workdir", Warn, fmt.Sprintf("%s has the mode %04o; others can enter it, and it holds states", dir, info.Mode().Perm()), "chmod 700 "+quoted)
	default:
		r.add("workdir", OK, dir, "")
	}
	r.checkFree("workdir space", dir)
	if there {
		r.checkLedger()
	}
}

func (r *run) checkFree(check, dir string) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		r.add(check, Fail, fmt.Sprintf("asking for the free space of %q: %v", dir, err), "df -h "+shellescape.Quote(dir))
		return
	}
	free := st.Bavail * uint64(st.Bsize)
	level := OK
	switch {
	case free < dirFail:
		level = Fail
	case free < dirWarn:
		level = Warn
	}
	r.add(check, level, humanize.IBytes(free)+" are free", "see what fills it: df -h "+shellescape.Quote(dir))
}

func (r *run) checkLedger() {
	if r.ReadWorkDir == nil {
		return
	}
	w, err := r.ReadWorkDir()
	if err != nil {
		r.add("workdir ledger", Fail, err.Error(), hintOf(err, "see who may read it: ls -l "+shellescape.Quote(r.WorkDir)))
		return
	}
	switch w.Mode {
	case "bootstrapping":
		r.add("workdir ledger", Warn, "a bootstrap has not ended: the local state is not on the backend yet", "BOOTSTRAP=1 tf-hosts apply")
	case "detached":
		r.add("workdir ledger", Warn, "the state is detached from the backend, since a destroy of the backend's own graph", "bring the backend up again: BOOTSTRAP=1 tf-hosts apply; or end the destroy: tf-hosts destroy")
	case "":
		r.add("workdir ledger", OK, "no state was seen from here yet", "")
	default:
		r.add("workdir ledger", OK, "the state is on the backend", "")
	}
	if w.Holder != "" {
		r.add("workdir lock", Warn, "held by "+w.Holder, "wait for it to end")
	} else {
		r.add("workdir lock", OK, "free", "")
	}
	switch {
	case w.Holder != "": // what runs has its newest state in the journal
	case len(w.Salvage) > 0:
		r.add("workdir salvage", Warn, fmt.Sprintf("%s could not be stored: %s", english.Plural(len(w.Salvage), "state", ""), strings.Join(w.Salvage, ", ")),
			"the next verb that writes stores it first: tf-hosts apply")
	case w.Journaled:
		r.add("workdir salvage", Warn, "the journal holds a state that the last run did not see stored", "the next verb that writes stores it first: tf-hosts apply")
	default:
		r.add("workdir salvage", OK, "nothing waits to be stored", "")
	}
}
