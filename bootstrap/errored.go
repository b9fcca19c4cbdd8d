package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
)

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

// unmark takes back the mark that a run got which waited for the lock: the run
// before it took it for one that is over.
func (s *session) unmark() error {
	if err := os.Remove(filepath.Join(s.runDir, searched)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("taking the mark of a searched run back: %w", err)
	}
	return nil
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
// errored.tfstate. One that was kept already is not kept again. Of this run it is
// known whether any tofu failed; of a dead one its output tells.
func (s *session) keepDump(runDir, to string) error {
	if runDir == s.runDir && !s.tofuFailed {
		return nil
	}
	for _, kept := range []string{to, to + storedSuffix} {
		if _, err := os.Stat(kept); err == nil {
			return nil
		}
	}
	var outputs []string
	for _, v := range tfhosts.Verbs() {
		if v.Writes { // the others print states that are stored
			outputs = append(outputs, v.Name+stdoutSuffix, v.Name+stderrSuffix)
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
		if state := dumpedState(text, strings.HasSuffix(name, stdoutSuffix)); state != nil {
			if err := MakePrivate(s.salvageDir()); err != nil {
				return err
			}
			return durable.Replace(to, state, 0o600, "salvage.dump", s.Fault)
		}
	}
	return nil
}

// dumpMessage marks the dump in "-json" output, dumpSummaries are what OpenTofu
// says after it in either form (reproduced with 1.12.6): it could neither store
// the state nor write errored.tfstate.
const dumpMessage = "Emergency state dump"

func dumpSummaries() []string {
	return []string{"Failed to create local state file", "Failed to persist state to backend"}
}

// dumpedState finds the state that OpenTofu printed as its last resort: on stderr
// a JSON value at the beginning of a line, with "-json" the field "state" of a
// line of stdout. A provisioner's output has the address of its resource before
// it, so that none can pass for it.
func dumpedState(text []byte, lines bool) []byte {
	for line := text; len(line) > 0; {
		next := bytes.IndexByte(line, '\n') + 1
		if next == 0 {
			next = len(line)
		}
		if line[0] == '{' {
			var value json.RawMessage
			dec := json.NewDecoder(bytes.NewReader(line))
			if dec.Decode(&value) == nil {
				next = int(dec.InputOffset())
				state := value
				if lines {
					state = stateOfLine(value)
				}
				if _, err := api.ParseMeta(state); err == nil && saysWhy(line[next:]) {
					return state
				}
			}
		}
		line = line[next:]
	}
	return nil
}

func stateOfLine(line []byte) json.RawMessage {
	var log struct {
		Message string `json:"@message"`
		Type    string `json:"type"`
		State   json.RawMessage
	}
	if json.Unmarshal(line, &log) != nil || log.Type != "log" || log.Message != dumpMessage {
		return nil
	}
	return log.State
}

func saysWhy(after []byte) bool {
	for _, summary := range dumpSummaries() {
		if !bytes.Contains(after, []byte(summary)) {
			return false
		}
	}
	return true
}
