package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
)

// VerbRestore is the verb "state-restore": it writes state and takes the lock,
// and runs no OpenTofu.
func VerbRestore() tfhosts.Verb { return tfhosts.Verb{Name: "state-restore", Writes: true} }

// RestoreOptions choose where the last known state goes.
type RestoreOptions struct {
	// Local makes it the local state, for a backend whose machine is gone for
	// good; BOOTSTRAP=1 then brings the backend up on it again.
	Local bool
}

// Restore puts the last state that this machine knows back: on an empty
// backend, under the lock, or as the local state. It never writes over another
// state.
func Restore(ctx context.Context, cfg Config, opts RestoreOptions) (code int, err error) {
	s, stop := newSession(&cfg)
	defer func() { err = errors.Join(err, stop()) }()
	if err := s.open(ctx); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	body, err := s.lastKnown()
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	if opts.Local {
		err = s.restoreLocal(body)
	} else {
		err = s.restoreBackend(ctx, body)
	}
	return tfhosts.ExitCodeOf(err), err
}

// lastKnown is last.tfstate, or what the journal holds beyond it.
func (s *session) lastKnown() ([]byte, error) {
	best, err := os.ReadFile(lastPath(s.workDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("reading the last known state: %w", err)
	}
	var have StateRef
	if best != nil {
		if have, err = refOf(best); err != nil {
			s.notice("last.tfstate can not be read; looking into the journal")
			best = nil
		}
	}
	entries, err := relay.ReadJournal(s.journalDir())
	if err != nil {
		return nil, err
	}
	known := have
	for _, e := range entries {
		body, err := os.ReadFile(e.Path)
		if err != nil {
			return nil, fmt.Errorf("reading the journal: %w", err)
		}
		ref, err := refOf(body)
		if err != nil {
			continue // torn by a crash
		}
		if ref == known { // what is older is superseded, by a forced state-push also with a lower serial
			best, have = body, ref
			continue
		}
		if best == nil || ref.Lineage == have.Lineage && ref.Serial > have.Serial {
			best, have = body, ref
		}
	}
	if best == nil {
		return nil, tfhosts.WithExit(tfhosts.ExitFailed, "restore it from the state server's own versions",
			fmt.Errorf("this machine knows no state for %s", s.Setup.Backend.Address))
	}
	return best, nil
}

func (s *session) restoreLocal(body []byte) error {
	ref, err := refOf(body)
	if err != nil {
		return err
	}
	if _, err := os.Stat(localPath(s.workDir)); err == nil {
		b, err := os.ReadFile(localPath(s.workDir))
		if err != nil {
			return fmt.Errorf("reading the local state: %w", err)
		}
		if old, err := refOf(b); err == nil && old.SHA256 != ref.SHA256 {
			return tfhosts.WithExit(tfhosts.ExitLostState, "move "+localPath(s.workDir)+" away if it is not wanted",
				fmt.Errorf("there is a local state already, of serial %d", old.Serial))
		}
	}
	s.step("restore", fmt.Sprintf("making the state of serial %d the local one", ref.Serial))
	if err := s.remember(body); err != nil {
		return err
	}
	if err := durable.Replace(localPath(s.workDir), body, 0o600, "restore", s.Fault); err != nil {
		return err
	}
	if err := s.fault("restore.ledger"); err != nil {
		return err
	}
	s.ledger.Mode, s.ledger.Sent, s.ledger.Served = ModeBootstrapping, nil, nil
	if err := s.writeLedger(); err != nil {
		return err
	}
	if err := s.fault("restore.marker"); err != nil {
		return err
	}
	if err := os.Remove(markerPath(s.workDir)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the migrated marker: %w", err)
	}
	s.notice("now bring the backend up again: BOOTSTRAP=1 tf-hosts apply")
	return durable.SyncDir(s.workDir)
}

func (s *session) restoreBackend(ctx context.Context, body []byte) error {
	ref, err := refOf(body)
	if err != nil {
		return err
	}
	if s.found, err = s.reach(ctx); err != nil {
		return tfhosts.WithExit(api.ExitCode(err), s.backendHint(err)+"; if its machine is gone for good: tf-hosts state-restore --local", err)
	}
	if s.ReclaimOwnLock {
		if err := s.reclaim(ctx, s.noting(s.found.client)); err != nil {
			return err
		}
	}
	switch base := s.found.body; {
	case sameState(base, body):
		s.notice("the backend holds it already")
	case base != nil:
		have, err := refOf(base)
		if err != nil {
			return err
		}
		return tfhosts.WithExit(tfhosts.ExitLostState, "look at both: tf-hosts state-pull, and "+lastPath(s.workDir),
			fmt.Errorf("the backend is not empty: it holds lineage %s, serial %d; the last known is lineage %s, serial %d", have.Lineage, have.Serial, ref.Lineage, ref.Serial))
	default:
		s.step("restore", fmt.Sprintf("putting the state of serial %d back on the backend", ref.Serial))
		if err := s.put(ctx, s.noting(s.found.client), "restore", body, nil); err != nil {
			return tfhosts.WithExit(api.ExitCode(err), s.backendHint(err), err)
		}
	}
	s.ledger.Mode, s.ledger.Served = ModeRemote, &s.found.served
	return s.remember(body)
}
