package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/relay"
)

// runFile says, in the folder of a run, whose it is: what a run that holds no
// lock needs to know before it removes anything.
const runFile = "run.json"

// runNote is run.json.
type runNote struct {
	relay.RunInfo
	// Writes: the run may leave a state that could not be stored.
	Writes bool `json:"writes"`
}

func (s *session) writeRunNote() error {
	b, err := json.Marshal(runNote{s.info, s.Verb.Writes})
	if err == nil {
		err = os.WriteFile(filepath.Join(s.runDir, runFile), b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("naming this run: %w", err)
	}
	return nil
}

func readRunNote(runDir string) (note runNote, ok bool) {
	b, err := os.ReadFile(filepath.Join(runDir, runFile))
	if err != nil || json.Unmarshal(b, &note) != nil {
		return runNote{}, false
	}
	return note, true
}

// runLives says whether the wrapper of a run is seen to work, runDied whether it
// is known not to. Of one in another container or on another machine, with which
// the working dir is shared, neither is known.
func (s *session) runLives(note runNote) bool {
	return note.BootID == s.info.BootID && processLives(note.PID, note.StartTime)
}

func (s *session) runDied(note runNote) bool {
	return note.MachineID != "" && note.MachineID == s.info.MachineID && !s.runLives(note)
}

// tidy removes what old and dead runs left. Reading verbs do it, too, since in a
// CI that only plans nobody else does; what they can not remove only makes them
// warn.
func (s *session) tidy() error {
	err := errors.Join(s.sweepInit(), s.sweepRuns()) // the notes of the runs tell whose an init is
	if err != nil && !s.Verb.Writes {
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "sweep", Message: err.Error()})
		return nil
	}
	return err
}

// sweepRuns removes the folders of old runs. One that lives, or holds a state
// which was not stored, is never removed; a run without the working dir's lock
// removes no folder in which nobody looked for such a state yet.
func (s *session) sweepRuns() error {
	entries, err := os.ReadDir(filepath.Join(s.workDir, "runs"))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("sweeping old runs: %w", err)
	}
	for _, e := range entries {
		stamp, _, _ := strings.Cut(e.Name(), "-")
		started, err := time.Parse(runStamp, stamp)
		if err != nil || s.started.Sub(started) < runsKept {
			continue
		}
		path := filepath.Join(s.workDir, "runs", e.Name())
		if _, err := os.Stat(filepath.Join(path, erroredState)); err == nil {
			continue
		}
		note, known := readRunNote(path)
		switch {
		case known && s.runLives(note):
			continue
		case s.lock == nil && !wasSearched(path) && (!known || note.Writes):
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("sweeping old runs: %w", err)
		}
	}
	return nil
}

// sweepInit removes what a run that was killed had begun to put below init/. Any
// run may be writing there, so only a dead one's is removed, and what names no
// run when it is old.
func (s *session) sweepInit() error {
	dir := filepath.Join(s.workDir, "init")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("sweeping unfinished inits: %w", err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") || !s.abandoned(e) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("sweeping unfinished inits: %w", err)
		}
	}
	return nil
}

func (s *session) abandoned(e fs.DirEntry) bool {
	if id, ok := strings.CutPrefix(e.Name(), initTemp); ok {
		if end := strings.LastIndexByte(id, '-'); end > 0 {
			if note, ok := readRunNote(filepath.Join(s.workDir, "runs", id[:end])); ok && s.runDied(note) {
				return true
			}
		}
	}
	info, err := e.Info()
	return err == nil && s.started.Sub(info.ModTime()) >= runsKept
}
