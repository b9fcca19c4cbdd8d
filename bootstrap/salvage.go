package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	"github.com/tidwall/sjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
)

func (s *session) salvageDir() string { return filepath.Join(s.workDir, "salvage") }

const storedSuffix = ".stored"

// pending is one state that waits to be stored.
type pending struct {
	path string // its file, empty for an entry of the journal
	body []byte
	ref  StateRef
}

// pendingStates lists what waits, lowest serial first: the files of salvage/,
// and what the journal holds of the last run beyond base, which is what the
// backend, or the local file, has.
func (s *session) pendingStates(base []byte) ([]pending, error) {
	paths, err := filepath.Glob(filepath.Join(s.salvageDir(), "*.tfstate"))
	if err != nil {
		return nil, fmt.Errorf("looking for states to salvage: %w", err)
	}
	var all []pending
	for _, path := range paths {
		body, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("reading a state to salvage: %w", err)
		}
		ref, err := refOf(body)
		if err != nil {
			return nil, salvageError(path, fmt.Errorf("it can not be read: %w", err))
		}
		all = append(all, pending{path, body, ref})
	}
	last, err := s.lastJournaled()
	if err != nil {
		return nil, err
	}
	if last != nil && slices.ContainsFunc(all, func(p pending) bool {
		return filepath.Base(p.path) == s.ledger.Run.RunID+".tfstate" && p.ref.Serial >= last.ref.Serial
	}) {
		last = nil // what tofu wrote at its end is what it had posted, or later
	}
	if last != nil && !bytes.Equal(last.body, base) {
		if meta, err := api.ParseMeta(base); base == nil || err != nil || last.ref.Lineage == meta.Lineage && last.ref.Serial > meta.Serial {
			all = append(all, *last)
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return all[i].ref.Serial < all[j].ref.Serial })
	return all, nil
}

// lastJournaled is the last state that the last writing run posted, or nil. One
// that was acknowledged is in the ledger and waits for nothing.
func (s *session) lastJournaled() (*pending, error) {
	if s.ledger.Run == nil || s.ledger.Run.Verb == verbPush { // a refused file is the user's to push again
		return nil, nil
	}
	entries, err := relay.ReadJournal(s.journalDir())
	if err != nil {
		return nil, err
	}
	for i := len(entries) - 1; i >= 0; i-- {
		if entries[i].RunID != s.ledger.Run.RunID {
			continue
		}
		body, err := os.ReadFile(entries[i].Path)
		if err != nil {
			return nil, fmt.Errorf("reading the journal: %w", err)
		}
		ref, err := refOf(body)
		if err != nil {
			// Torn by the crash: tofu was never told that it is stored, and
			// has it in errored.tfstate or lives on.
			continue
		}
		if ref == s.ledger.State {
			return nil, nil
		}
		return &pending{body: body, ref: ref}, nil
	}
	return nil, nil
}

// journaled says whether a run of this working dir posted this state.
func (s *session) journaled(state []byte) (bool, error) {
	entries, err := relay.ReadJournal(s.journalDir())
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		body, err := os.ReadFile(e.Path)
		if err != nil {
			return false, fmt.Errorf("reading the journal: %w", err)
		}
		if sameState(body, state) {
			return true, nil
		}
	}
	return false, nil
}

// salvage stores what earlier runs could not, before anything is planned: a
// plan from the older state would deploy again what was deployed. base is what
// upstream holds; the new one is returned.
func (s *session) salvage(ctx context.Context, upstream relay.Upstream, base []byte) ([]byte, error) {
	all, err := s.pendingStates(base)
	if err != nil {
		return nil, err
	}
	for _, p := range all {
		if base, err = s.storePending(ctx, upstream, p, base); err != nil {
			return nil, err
		}
	}
	return base, nil
}

// storePending puts one state where it belongs, or finds that it is there.
func (s *session) storePending(ctx context.Context, upstream relay.Upstream, p pending, base []byte) ([]byte, error) {
	what := p.path
	if what == "" {
		what = "the journal"
	}
	body := p.body
	if base != nil {
		have, err := refOf(base)
		if err != nil {
			return nil, salvageError(what, err)
		}
		ours := false
		if have.Serial == p.ref.Serial && have.SHA256 != p.ref.SHA256 {
			if ours, err = s.journaled(base); err != nil {
				return nil, err
			}
		}
		switch {
		case have.SHA256 == p.ref.SHA256, sameState(base, p.body):
			return base, s.markStored(p.path)
		case have.Lineage != p.ref.Lineage:
			return nil, salvageError(what, fmt.Errorf("its lineage is %s, the backend's %s", p.ref.Lineage, have.Lineage))
		case have.Serial > p.ref.Serial:
			s.notice(fmt.Sprintf("the state in %s (serial %d) is superseded by serial %d on the backend", what, p.ref.Serial, have.Serial))
			return base, s.markStored(p.path)
		case have.Serial == p.ref.Serial && !ours:
			return nil, salvageError(what, fmt.Errorf("another run has stored a state of the same serial, %d; compare both", p.ref.Serial))
		case have.Serial == p.ref.Serial && p.ref.Encrypted:
			return nil, salvageError(what, fmt.Errorf("it has the serial of the backend's, %d, and is encrypted, so that it can not be raised", p.ref.Serial))
		case have.Serial == p.ref.Serial:
			if body, err = sjson.SetBytes(p.body, "serial", p.ref.Serial+1); err != nil {
				return nil, salvageError(what, fmt.Errorf("raising its serial: %w", err))
			}
		}
	} else if s.ledger.known() && s.ledger.State.Lineage != p.ref.Lineage {
		if p.ref.Encrypted {
			return nil, salvageError(what, fmt.Errorf("its lineage is %s, the ledger's %s", p.ref.Lineage, s.ledger.State.Lineage))
		}
		// With an empty backend every failed save invents a lineage.
		var err error
		if body, err = sjson.SetBytes(p.body, "lineage", s.ledger.State.Lineage); err != nil {
			return nil, salvageError(what, fmt.Errorf("setting its lineage: %w", err))
		}
	}
	s.step("salvage", fmt.Sprintf("storing the state of serial %d that an earlier run could not store", p.ref.Serial))
	if err := s.put(ctx, upstream, "salvage", body, base); err != nil {
		return nil, salvageError(what, err)
	}
	if err := s.remember(body); err != nil {
		return nil, err
	}
	return body, s.markStored(p.path)
}

func (s *session) markStored(path string) error {
	if path == "" {
		return nil
	}
	if err := s.fault("salvage.mark"); err != nil {
		return err
	}
	if err := os.Rename(path, path+storedSuffix); err != nil {
		return fmt.Errorf("marking %q as stored: %w", path, err)
	}
	return durable.SyncDir(filepath.Dir(path))
}

func salvageError(where string, why error) error {
	hint := "see what holds it up, then run the same command again"
	if strings.HasPrefix(where, "/") {
		hint += "; or store it by hand: tf-hosts state-push -- " + where
	}
	code := tfhosts.ExitSalvage
	var e *tfhosts.ExitError
	if errors.As(why, &e) && e.Code == tfhosts.ExitLocked {
		hint = e.Hint
	}
	return tfhosts.WithExit(code, hint, fmt.Errorf("storing the state that waits in %s: %w", where, why))
}

// lockedError names the holder of a lock, with exit 4.
func lockedError(err error) error {
	if !errors.Is(err, api.ErrLocked) {
		return err
	}
	hint := "wait for it to end, then run the same command again"
	var locked *api.LockedError
	if errors.As(err, &locked) && locked.Holder.ID != "" {
		hint += "; if it died, release it: tf-hosts force-unlock " + locked.Holder.ID
	}
	return tfhosts.WithExit(tfhosts.ExitLocked, hint, err)
}
