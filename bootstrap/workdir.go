package bootstrap

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
)

// runsKept is how long the folder of a run is kept.
const runsKept = 14 * 24 * time.Hour

// lockRetry is the pause between two tries for the working dir's lock; flock
// has no wait with a limit.
const lockRetry = 250 * time.Millisecond

// WorkDir is the working dir of a state: STATE_DIR/STATE_KEY (FR-012), from the
// configured address, never a tunnel's.
//
//	lock           flock of writing verbs; holds who has it
//	runs/ID/       graph, TF_DATA_DIR, plan and output of one run
//	init/HASH/     what init made for one graph shape and engine
//	journal/       every state that the relay was given
//	salvage/       states that could not be stored
//	roots/         GC roots of what was built here
//	packages/      what the systems on the hosts consist of
//	known_hosts    keys accepted on first contact
//	pins/NODE      the node's pinned host key, for the system's ssh
//	verdict.json   the last verdict of each node
func WorkDir(stateDir, address string) string {
	return filepath.Join(stateDir, api.StateKey(address))
}

// KnownHosts is the known_hosts file of a working dir.
func KnownHosts(workDir string) string { return filepath.Join(workDir, "known_hosts") }

// Roots is the folder of GC roots of a working dir.
func Roots(workDir string) string { return filepath.Join(workDir, "roots") }

// MakePrivate makes a folder that only this user can enter, with its parents: it
// holds states.
func MakePrivate(dir string) error {
	if err := durable.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("making the working dir %q: %w", dir, err)
	}
	return nil
}

const runStamp = "20060102T150405Z"

// newRunID is sortable by time and unique.
func newRunID(now time.Time) string {
	var b [4]byte
	rand.Read(b[:])
	return now.UTC().Format(runStamp) + "-" + hex.EncodeToString(b[:])
}

// holder is what the lock file says about the run that holds it.
type holder struct {
	Run     string    `json:"run"`
	Who     string    `json:"who"`
	Verb    string    `json:"verb"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
}

// takeLock takes the working dir's flock, waiting up to wait. The lock ends
// with the process. The error carries exit code 4 and names the holder.
func takeLock(ctx context.Context, dir string, h holder, wait time.Duration, notice func(string)) (*flock.Flock, error) {
	path := filepath.Join(dir, "lock")
	lock := flock.New(path, flock.SetPermissions(0o600))
	ok, err := lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("locking %q: %w", path, err)
	}
	if !ok {
		notice(fmt.Sprintf("waiting up to %s for %s", wait, readHolder(path)))
		waitCtx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		if _, err := lock.TryLockContext(waitCtx, lockRetry); err != nil {
			waited := ""
			if ctx.Err() != nil {
				waited = "; interrupted while waiting for it"
			}
			return nil, tfhosts.WithExit(tfhosts.ExitLocked,
				"wait for it to end, then run the same command again",
				fmt.Errorf("locking %q: held by %s%s", path, readHolder(path), waited))
		}
	}
	b, err := json.Marshal(h)
	if err == nil {
		err = os.WriteFile(path, append(b, '\n'), 0o600)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("writing the holder into %q: %w", path, err), lock.Unlock())
	}
	return lock, nil
}

func readHolder(path string) string {
	var h holder
	b, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(b, &h) != nil || h.PID == 0 {
		return "another run of tf-hosts"
	}
	return fmt.Sprintf("%s of %s (pid %d, since %s)", h.Verb, h.Who, h.PID, h.Started.Local().Format(time.DateTime))
}
