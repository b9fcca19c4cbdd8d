package relay

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"fediversity.eu/tf-hosts/backend/durable"
)

// How much a journal keeps: the newest entries, and of these what is young. The
// newest entry stays whatever its age.
const (
	JournalEntries = 20
	JournalAge     = 30 * 24 * time.Hour
)

// Journal is a folder of posted states, each as the bytes that tofu sent, in a
// file 0600 whose name sorts by time:
//
//	20261129T231500.123456789Z_RUN_0000000007.tfstate
//
// An entry is there, durable, before the state goes upstream; whether it
// arrived is not in the journal: the upstream's serial tells.
type Journal struct {
	dir   string
	run   string
	fault durable.Fault
	mu    sync.Mutex
	last  time.Time
}

// Entry is one journaled state.
type Entry struct {
	Path   string
	Time   time.Time
	RunID  string
	Serial uint64
}

const journalTime = "20060102T150405.000000000Z"

// OpenJournal opens the journal in dir for one run and makes dir if needed.
func OpenJournal(dir, runID string, fault func(op string) error) (*Journal, error) {
	if dir == "" {
		return nil, errors.New("opening journal: no folder is set")
	}
	if err := durable.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("opening journal: %w", err)
	}
	run := strings.Map(func(r rune) rune {
		if r == '/' || r == '_' || r == 0 {
			return '-'
		}
		return r
	}, runID)
	if run == "" {
		run = "run"
	}
	return &Journal{dir: dir, run: run, fault: fault}, nil
}

// Write makes body durable. After an error no complete entry may be there.
func (j *Journal) Write(serial uint64, body []byte) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	now := time.Now().UTC()
	if !now.After(j.last) { // a clock that went back must not reorder this run
		now = j.last.Add(1)
	}
	j.last = now
	name := fmt.Sprintf("%s_%s_%010d.tfstate", now.Format(journalTime), j.run, serial)
	if err := durable.Replace(filepath.Join(j.dir, name), body, 0o600, "journal", j.fault); err != nil {
		return fmt.Errorf("journaling state %d: %w", serial, err)
	}
	return j.prune(now)
}

func (j *Journal) prune(now time.Time) error {
	entries, err := ReadJournal(j.dir)
	if err != nil {
		return err
	}
	slices.Reverse(entries)
	for i, e := range entries {
		if i == 0 || i < JournalEntries && now.Sub(e.Time) < JournalAge {
			continue
		}
		if err := os.Remove(e.Path); err != nil {
			return fmt.Errorf("removing an old journal entry: %w", err)
		}
	}
	return nil
}

// ReadJournal lists the entries of a journal folder, oldest first. A missing
// folder is an empty journal.
func ReadJournal(dir string) ([]Entry, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading journal: %w", err)
	}
	var list []Entry
	for _, f := range files {
		base, ok := strings.CutSuffix(f.Name(), ".tfstate")
		parts := strings.Split(base, "_")
		if !ok || len(parts) != 3 {
			continue
		}
		t, err := time.Parse(journalTime, parts[0])
		if err != nil {
			continue
		}
		serial, err := strconv.ParseUint(parts[2], 10, 64)
		if err != nil {
			continue
		}
		list = append(list, Entry{Path: filepath.Join(dir, f.Name()), Time: t, RunID: parts[1], Serial: serial})
	}
	slices.SortFunc(list, func(a, b Entry) int {
		return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(a.Path, b.Path))
	})
	return list, nil
}
