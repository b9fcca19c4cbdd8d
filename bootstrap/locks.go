package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/relay"
)

// locksKept bounds the ledger: of the locks that a run did not give back, the
// last one alone can still be held.
const locksKept = 16

// LockRef is a lock that a run of this working dir asked the backend for and is
// not known to have given back. Some servers show neither the Info nor the Who
// of a lock, as GitLab: its ID alone says whose it is.
type LockRef struct {
	ID string `json:"id"`
	relay.RunInfo
}

// lock finds a lock by its ID; nil is none of ours.
func (l *Ledger) lock(id string) *LockRef {
	if l == nil || id == "" {
		return nil
	}
	for i := range l.Locks {
		if l.Locks[i].ID == id {
			return &l.Locks[i]
		}
	}
	return nil
}

// noted is a backend whose locks the ledger knows before they are asked for: a
// run that is killed when the server has the lock leaves its ID.
type noted struct {
	relay.Upstream
	s *session
}

// noting is upstream with noted locks. A reading run has no ledger to write.
func (s *session) noting(upstream relay.Upstream) relay.Upstream {
	if s.lock == nil {
		return upstream
	}
	return noted{upstream, s}
}

func (n noted) Lock(ctx context.Context, info api.LockInfo) error {
	if err := n.s.noteLock(info.ID); err != nil {
		return err
	}
	err := n.Upstream.Lock(ctx, info)
	var locked *api.LockedError
	if errors.As(err, &locked) && locked.Holder.ID != "" && locked.Holder.ID != info.ID {
		n.s.forgetLock(info.ID)
	}
	return err
}

func (n noted) Unlock(ctx context.Context, info api.LockInfo) error {
	err := n.Upstream.Unlock(ctx, info)
	if err == nil {
		n.s.forgetLock(info.ID)
	}
	return err
}

func (s *session) noteLock(id string) error {
	s.ledgerMu.Lock()
	if s.ledger.lock(id) == nil {
		s.ledger.Locks = append(s.ledger.Locks, LockRef{id, s.info})
	}
	if n := len(s.ledger.Locks) - locksKept; n > 0 {
		s.ledger.Locks = slices.Delete(s.ledger.Locks, 0, n)
	}
	s.ledgerMu.Unlock()
	if err := s.writeLedger(); err != nil {
		return fmt.Errorf("noting the lock %q: %w", id, err)
	}
	return nil
}

// forgetLock is written with the next change: an ID too many does no harm, since
// no other lock has it.
func (s *session) forgetLock(id string) {
	s.ledgerMu.Lock()
	defer s.ledgerMu.Unlock()
	s.ledger.Locks = slices.DeleteFunc(s.ledger.Locks, func(l LockRef) bool { return l.ID == id })
}

// livesStill says why a lock of the ledger may be in use, or "". This run holds
// the flock of the working dir, so that a run of this machine has ended; a ledger
// that was copied from another machine proves nothing.
func (s *session) livesStill(l *LockRef) string {
	switch {
	case l.MachineID == "" || l.MachineID != s.info.MachineID:
		return "its run is not known to be one of this machine"
	case l.BootID == s.info.BootID && l.PID != os.Getpid() && processLives(l.PID, l.StartTime):
		return fmt.Sprintf("its run lives (pid %d)", l.PID)
	}
	return ""
}
