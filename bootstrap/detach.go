package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/durable"
)

// detach moves the state from the backend to the local file before a destroy of
// the graph that serves it. The backend's lock is held until the destroy has
// ended; the returned func gives it back. Each step can be run again.
func (s *session) detach(ctx context.Context) (unlock func() error, err error) {
	s.phase("detach", "moving the state from the backend to "+localPath(s.workDir))
	if s.found == nil || s.found.body == nil {
		return nil, lostError("the backend has no state to detach")
	}
	info := client.NewLockInfo("detach", s.lockInfo())
	if err := s.fault("detach.lock"); err != nil {
		return nil, err
	}
	backend := s.noting(s.found.client)
	if err := backend.Lock(ctx, info); err != nil {
		return nil, lockedError(err)
	}
	unlock = func() error {
		if err := s.fault("detach.unlock"); err != nil {
			return err
		}
		return unlockFor(ctx, backend, info)
	}
	if err := s.detachUnderLock(ctx); err != nil {
		return nil, errors.Join(err, unlock())
	}
	return unlock, nil
}

func (s *session) detachUnderLock(ctx context.Context) error {
	if err := s.fault("detach.get"); err != nil {
		return err
	}
	body, err := s.found.client.Get(ctx)
	if err != nil {
		return err
	}
	ref, err := refOf(body)
	if err != nil {
		return err
	}
	if s.ledger.known() && ref.Lineage != s.ledger.State.Lineage {
		return lostError(fmt.Sprintf("the backend holds a state of lineage %s, this machine last saw lineage %s there", ref.Lineage, s.ledger.State.Lineage))
	}
	s.found.body = body
	if err := s.remember(body); err != nil {
		return err
	}
	// From here on the local copy is the state. It is written first, so that
	// the ledger never names one that is not there.
	if err := durable.Replace(localPath(s.workDir), body, 0o600, "detach", s.Fault); err != nil {
		return err
	}
	if err := s.fault("detach.ledger"); err != nil {
		return err
	}
	s.ledger.Mode, s.ledger.Sent = ModeDetached, nil
	if err := s.writeLedger(); err != nil {
		return err
	}
	if err := s.fault("detach.marker"); err != nil {
		return err
	}
	err = os.Rename(markerPath(s.workDir), markerPath(s.workDir)+".detached")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("putting the migrated marker aside: %w", err)
	}
	return durable.SyncDir(s.workDir)
}

// reattach takes detach back when nothing was done since: the backend, whose
// lock is still held, has the same state. The ledger goes first: an interruption
// leaves a local copy of what the backend has, which is no more than a migration
// that had happened.
func (s *session) reattach() error {
	if s.relay != nil && s.relay.Stats().Posts > 0 {
		return nil
	}
	s.ledger.Mode = ModeRemote
	if err := s.writeLedger(); err != nil {
		return err
	}
	return s.finishMigration()
}

// destroyDetached destroys on the local copy.
func (s *session) destroyDetached(ctx context.Context, unlock func() error) (int, error) {
	file, err := s.localFile()
	if err == nil {
		err = s.connect(ctx, file, upstreamFile)
	}
	if err != nil {
		return tfhosts.ExitCodeOf(err), errors.Join(err, unlock())
	}
	code, err := s.apply(ctx)
	if errors.Is(err, ErrDeclined) && s.found != nil {
		err = errors.Join(err, s.reattach())
	}
	if uerr := unlock(); uerr != nil {
		s.notice("the backend's lock was not released, as is to be expected of a backend that is gone: " + uerr.Error())
	}
	if code != tfhosts.ExitOK {
		return code, err
	}
	f, rerr := s.reach(ctx)
	switch {
	case rerr == nil:
		if s.ReclaimOwnLock && !f.gone { // an interrupted destroy left it
			err = errors.Join(err, s.reclaim(ctx, s.noting(f.client)))
		}
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "detach", Message: fmt.Sprintf(
			"the backend at %s still answers and holds a superseded copy of the state", f.served.Address)})
		err = errors.Join(err, f.close())
		return tfhosts.WorstExit(code, tfhosts.ExitCodeOf(err)), err
	case errors.Is(rerr, api.ErrUnreachable):
		return code, err
	}
	return code, err
}
