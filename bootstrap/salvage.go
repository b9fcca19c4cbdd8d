package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/tidwall/sjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
)

// unlockTime bounds an unlock after an interrupt or an error.
const unlockTime = 30 * time.Second

func (s *session) salvageDir() string { return filepath.Join(s.workDir, "salvage") }

// collectSalvage moves what earlier runs could not store into salvage/: the
// errored.tfstate that tofu left, and the dump in tofu's output where it could
// not even write that. The caller holds the working dir's lock, so those runs
// are over.
func (s *session) collectSalvage() error {
	runs, err := os.ReadDir(filepath.Join(s.workDir, "runs"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("looking for states to salvage: %w", err)
	}
	for _, run := range runs {
		if run.Name() == s.id {
			continue
		}
		dir := filepath.Join(s.workDir, "runs", run.Name())
		if wasSearched(dir) {
			continue
		}
		if err := s.search(dir, run.Name()); err != nil {
			return err
		}
	}
	return nil
}

// searched marks the folder of a run whose tofu is gone and which was searched
// for a state: nothing is added to it any more, so that old runs do not slow
// down new ones. A mark that a crash loses costs another search and no state.
const searched = "searched"

func wasSearched(runDir string) bool {
	_, err := os.Stat(filepath.Join(runDir, searched))
	return err == nil
}

// search keeps what a run that is over could not store, and marks the run.
func (s *session) search(runDir, run string) error {
	if err := s.keepErrored(runDir, run); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(runDir, searched), nil, 0o600); err != nil {
		return fmt.Errorf("marking the run %s as searched: %w", run, err)
	}
	return nil
}

// keepErrored moves the state that a run could not store to salvage/RUN.tfstate.
func (s *session) keepErrored(runDir, run string) error {
	from := filepath.Join(runDir, erroredState)
	to := filepath.Join(s.salvageDir(), run+".tfstate")
	info, err := os.Stat(from)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return s.keepDump(runDir, to)
	case err != nil:
		return fmt.Errorf("looking for states to salvage: %w", err)
	case info.IsDir():
		return s.keepDump(runDir, to)
	}
	if err := MakePrivate(s.salvageDir()); err != nil {
		return err
	}
	if err := s.fault("salvage.save"); err != nil {
		return err
	}
	if err := os.Rename(from, to); err != nil {
		return fmt.Errorf("keeping the state that could not be stored: %w", err)
	}
	return errors.Join(durable.SyncDir(s.salvageDir()), durable.SyncDir(runDir))
}

// keepDump looks for the state that tofu prints when it can not write
// errored.tfstate. One that was kept already is not kept again.
func (s *session) keepDump(runDir, to string) error {
	for _, kept := range []string{to, to + storedSuffix} {
		if _, err := os.Stat(kept); err == nil {
			return nil
		}
	}
	var outputs []string
	for _, v := range tfhosts.Verbs() {
		if v.Writes { // the others print states that are stored
			outputs = append(outputs, v.Name+".stdout", v.Name+".stderr")
		}
	}
	for _, name := range outputs {
		text, err := os.ReadFile(filepath.Join(runDir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("looking for states to salvage: %w", err)
		}
		if state := dumpedState(text); state != nil {
			if err := MakePrivate(s.salvageDir()); err != nil {
				return err
			}
			return durable.Replace(to, state, 0o600, "salvage.dump", s.Fault)
		}
	}
	return nil
}

// dumpedState finds a state in tofu's output: a JSON value with lineage and
// serial after the words of its error, or in the field "state" of a JSON line.
func dumpedState(text []byte) []byte {
	if !bytes.Contains(text, []byte(`"lineage"`)) || !bytes.Contains(text, []byte(`"serial"`)) {
		return nil
	}
	for at := 0; at < len(text); {
		i := bytes.Index(text[at:], []byte("{"))
		if i < 0 {
			return nil
		}
		at += i
		var value json.RawMessage
		if err := json.NewDecoder(bytes.NewReader(text[at:])).Decode(&value); err != nil {
			at++
			continue
		}
		if _, err := api.ParseMeta(value); err == nil {
			return value
		}
		var line struct{ State json.RawMessage }
		if json.Unmarshal(value, &line) == nil && len(line.State) > 0 {
			if _, err := api.ParseMeta(line.State); err == nil {
				return line.State
			}
		}
		at += len(value)
	}
	return nil
}

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
	if s.ledger.Run == nil {
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

// put stores body under the lock, where upstream must still hold base (nil:
// nothing), and reads it back. The ops are op.lock, op.get, op.post, op.verify
// and op.unlock.
func (s *session) put(ctx context.Context, upstream relay.Upstream, op string, body, base []byte) (err error) {
	info := client.NewLockInfo(op, s.lockInfo())
	if err := s.fault(op + ".lock"); err != nil {
		return err
	}
	if err := upstream.Lock(ctx, info); err != nil {
		return lockedError(err)
	}
	defer func() {
		if ferr := s.fault(op + ".unlock"); ferr != nil {
			err = errors.Join(err, ferr)
			return
		}
		unlock, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTime)
		defer cancel()
		if uerr := upstream.Unlock(unlock, info); uerr != nil {
			err = errors.Join(err, fmt.Errorf("releasing the lock: %w", uerr))
		}
	}()
	if err := s.fault(op + ".get"); err != nil {
		return err
	}
	have, err := upstream.Get(ctx)
	if err != nil && !errors.Is(err, api.ErrNotFound) && (base != nil || !errors.Is(err, api.ErrGone)) {
		return err
	}
	if sameState(have, body) {
		return nil
	}
	if !sameState(have, base) {
		return fmt.Errorf("%w: somebody changed it meanwhile", api.ErrStale)
	}
	if err := s.fault(op + ".post"); err != nil {
		return err
	}
	if err := upstream.Post(ctx, info.ID, body); err != nil {
		// The answer to a first try may have been lost, and the server takes
		// each serial once.
		if have, gerr := upstream.Get(ctx); gerr != nil || !sameState(have, body) {
			return err
		}
	}
	if err := s.fault(op + ".verify"); err != nil {
		return err
	}
	if have, err = upstream.Get(ctx); err != nil {
		return fmt.Errorf("reading it back: %w", err)
	}
	if !sameState(have, body) {
		return errors.New("what the backend holds is not what was sent")
	}
	return nil
}

// sameState compares states as bytes, and, for servers that write JSON anew, as
// JSON.
func sameState(a, b []byte) bool {
	if len(a) == 0 || len(b) == 0 {
		return len(a) == len(b)
	}
	if bytes.Equal(a, b) {
		return true
	}
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
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
