package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

// Tried is one place where the backend was looked for.
type Tried struct {
	Served
	// Err is why it does not serve; nil for the place that does.
	Err error
}

// Examination is the backend as every verb would find it.
type Examination struct {
	// Tried are the places in the order in which they were tried. It is empty
	// when the state is detached: the backend is not read then.
	Tried []Tried
	// Client talks to the place that serves; nil when none does.
	Client *client.Client
	Served Served
	// State is what the backend holds; nil when it has none. Gone: it says that
	// it lost it.
	State *StateRef
	Gone  bool
	// Lost is why a writing verb would stop with exit 3, LostHint the way out;
	// empty when it would not.
	Lost, LostHint string

	close func() error
}

// Close ends the connections.
func (e *Examination) Close() error {
	if e.close == nil {
		return nil
	}
	return e.close()
}

// Examine looks for the backend as every verb does and changes nothing: where
// there is no state, the lock is taken and released (client.Probe). The error
// is that of the verbs, with its exit code and hint; the Examination then still
// says what was tried. It must be closed. Of cfg it takes Setup, StateDir,
// SelfBackend, Events and Worker.Forward.
func Examine(ctx context.Context, cfg Config) (*Examination, error) {
	e := &Examination{}
	workDir := WorkDir(cfg.StateDir, cfg.Setup.Backend.Address)
	s := &session{Config: &cfg, workDir: workDir, tried: func(t Tried) { e.Tried = append(e.Tried, t) }}
	var err error
	if s.ledger, err = readLedger(workDir, cfg.Setup.Backend.Address); err != nil {
		return e, err
	}
	sit, away, err := s.look(ctx)
	if err != nil {
		return e, err
	}
	e.Gone, e.State = sit.gone, sit.backend
	if s.found != nil {
		e.Client, e.Served, e.close = s.found.client, s.found.served, s.found.close
	}
	sit.writes = true
	if e.Lost = decide(sit).lost; e.Lost != "" {
		e.LostHint = s.lostHint(sit)
	}
	if away != nil {
		return e, s.awayError(away)
	}
	return e, nil
}

// lostHint is the way out of a lost state. What only a bootstrap that was
// stopped left is none: the next one goes on from there.
func (s *session) lostHint(sit situation) string {
	sit.bootstrap = true
	if s.selfServed() && decide(sit).lost == "" {
		return "go on where the bootstrap stopped: BOOTSTRAP=1 tf-hosts apply"
	}
	var exit *tfhosts.ExitError
	if errors.As(lostError(""), &exit) {
		return exit.Hint
	}
	return ""
}

// WhyForeign says why the holder of a lock is no dead run of this machine, or ""
// when it is, so that TF_RECLAIM_OWN_LOCK=1 would release its lock.
func WhyForeign(holder api.LockInfo) (string, error) {
	info, err := thisRun("")
	if err != nil {
		return "", err
	}
	return (&session{info: info}).foreign(holder), nil
}

// CheckEnviron refuses the variables of OpenTofu that would change what a verb
// does behind its back. It is what every verb checks first.
func CheckEnviron(environ []string) error { return checkEnviron(environ) }

// WorkDirReport is what a working dir holds for the next run.
type WorkDirReport struct {
	Mode Mode
	// Salvage are the files of states that could not be stored.
	Salvage []string
	// Journaled: the journal holds a state of the last run that the ledger does
	// not know as stored.
	Journaled bool
	// Holder names the run that holds the working dir's lock now; empty: none.
	Holder string
}

// ExamineWorkDir reads a working dir and changes nothing in it. One that does
// not exist is empty. An error is one of the ledger, or of files that can not be
// read.
func ExamineWorkDir(workDir, address string) (WorkDirReport, error) {
	var r WorkDirReport
	var err error
	if r.Holder, err = livingHolder(filepath.Join(workDir, "lock")); err != nil {
		return r, err
	}
	ledger, err := readLedger(workDir, address)
	if err != nil {
		return r, err
	}
	r.Mode = ledger.Mode
	s := &session{workDir: workDir, ledger: ledger}
	for _, pattern := range []string{filepath.Join(s.salvageDir(), "*.tfstate"), filepath.Join(workDir, "runs", "*", erroredState)} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			return r, fmt.Errorf("looking for states to salvage: %w", err)
		}
		r.Salvage = append(r.Salvage, paths...)
	}
	last, err := s.lastJournaled()
	r.Journaled = last != nil
	return r, err
}

// livingHolder names who holds a lock file. The lock is tried shared and given
// back at once, so that a run that begins meanwhile waits for a moment at most.
func livingHolder(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("looking at the lock of the working dir: %w", err)
	}
	defer f.Close() // ends the lock, too
	err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return readHolder(path), nil
	}
	if err != nil {
		return "", fmt.Errorf("looking at the lock of the working dir: %w", err)
	}
	return "", nil
}
