package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/relay"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// adoptPoll is the pause between two looks at a tofu that is no child of ours:
// nothing else tells its end.
const adoptPoll = 200 * time.Millisecond

// lockInfo is what this run writes into a lock's Info.
func (s *session) lockInfo() string {
	b, err := json.Marshal(s.info)
	if err != nil { // a struct of strings and numbers always marshals
		return ""
	}
	return string(b)
}

// reclaim releases a lock that a dead run of ours left (TF_RECLAIM_OWN_LOCK=1).
// The holder is what the server says over HTTP, never tofu's text, which shows
// the requester where the server does not say. This run holds the working dir's
// flock.
func (s *session) reclaim(ctx context.Context, upstream relay.Upstream) error {
	probe := client.NewLockInfo("reclaim", s.lockInfo())
	if err := s.fault("reclaim.probe"); err != nil {
		return err
	}
	err := upstream.Lock(ctx, probe)
	if err == nil {
		if err := s.fault("reclaim.unlock"); err != nil {
			return err
		}
		return unlockFor(ctx, upstream, probe)
	}
	var locked *api.LockedError
	if !errors.As(err, &locked) {
		return err
	}
	holder := locked.Holder
	if why := s.foreign(holder); why != "" {
		return tfhosts.WithExit(tfhosts.ExitLocked, forceUnlockHint(holder),
			fmt.Errorf("not reclaiming the lock: %s: %w", why, err))
	}
	s.step("reclaim", fmt.Sprintf("releasing the lock %s that a dead run of %s left", holder.ID, holder.Who))
	if err := s.fault("reclaim.release"); err != nil {
		return err
	}
	return unlockFor(ctx, upstream, holder)
}

func forceUnlockHint(holder api.LockInfo) string {
	if holder.ID == "" {
		return "release it on the server"
	}
	return "if its holder is dead: tf-hosts force-unlock " + holder.ID
}

// unlockFor releases a lock even after an interrupt.
func unlockFor(ctx context.Context, upstream relay.Upstream, info api.LockInfo) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTime)
	defer cancel()
	if err := upstream.Unlock(ctx, info); err != nil {
		return fmt.Errorf("releasing the lock %q: %w", info.ID, err)
	}
	return nil
}

// foreign says why a lock is not ours to reclaim, or "".
func (s *session) foreign(holder api.LockInfo) string {
	// A server that echoes shows the request of this very run.
	if ref := s.ledger.lock(holder.ID); ref != nil && ref.RunID != s.info.RunID {
		return s.livesStill(ref)
	}
	switch {
	case holder.ID == "":
		return "the server does not say who holds it"
	case holder.Who != client.Who():
		return fmt.Sprintf("it is held by %q, not by %q", holder.Who, client.Who())
	case holder.Info == "":
		// A tofu without relay. Nothing on this machine holds the key: we
		// have its flock.
		return ""
	}
	var run relay.RunInfo
	if err := json.Unmarshal([]byte(holder.Info), &run); err != nil || run.PID == 0 {
		return "its Info is not that of a run of tf-hosts"
	}
	if run.MachineID == "" || run.MachineID != s.info.MachineID { // many containers have no ID
		return "its run is not known to be one of this machine"
	}
	if run.BootID == s.info.BootID && processLives(run.PID, run.StartTime) {
		return fmt.Sprintf("its run lives (pid %d)", run.PID)
	}
	return ""
}

// processLives says whether a process of this boot still runs.
func processLives(pid int, start uint64) bool {
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	got, err := startTime(string(stat))
	return err == nil && got == start && !isZombie(string(stat))
}

// tofuOf finds the living tofu of an earlier run by its working folder and its
// executable: the engine that the run named, or one with the name of an engine,
// since the named one may be a wrapper that executes another. 0 is none.
func tofuOf(runDir, engine string) (int, error) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return 0, fmt.Errorf("looking for a living tofu: %w", err)
	}
	want, err := filepath.EvalSymlinks(runDir)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return 0, nil
		}
		return 0, fmt.Errorf("looking for a living tofu: %w", err)
	}
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		cwd, err := os.Readlink(filepath.Join("/proc", p.Name(), "cwd"))
		if err != nil || cwd != want {
			continue // gone, or another user's
		}
		exe, err := os.Readlink(filepath.Join("/proc", p.Name(), "exe"))
		exe = strings.TrimSuffix(exe, " (deleted)") // upgraded meanwhile
		if err != nil || (engine == "" || exe != engine) && !tofu.IsEngine(exe) {
			continue // a provisioner, or a plugin
		}
		return pid, nil
	}
	return 0, nil
}

// adopt serves the tofu that outlived its wrapper, on the port and with the
// credentials that it knows, until it ends. Its deploys ended with the wrapper.
func (s *session) adopt(ctx context.Context) (adopted bool, err error) {
	run := s.ledger.Run
	if run == nil || run.Port == 0 || run.BootID != s.info.BootID {
		return false, nil
	}
	dir := filepath.Join(s.workDir, "runs", run.RunID)
	if wasSearched(dir) { // it ended in order
		return false, nil
	}
	pid, err := tofuOf(dir, run.Engine)
	if err != nil || pid == 0 {
		return false, err
	}
	var upstream relay.Upstream
	switch {
	case run.Upstream == upstreamFile:
		if upstream, err = s.localFile(); err != nil {
			return false, err
		}
	case s.found != nil:
		upstream = s.noting(s.found.client.Once())
	default:
		return false, tfhosts.WithExit(tfhosts.ExitUnreachable, "see that the backend answers, then run the same command again",
			fmt.Errorf("tofu of the run %s lives on (pid %d) and can not be served: %w", run.RunID, pid, api.ErrUnreachable))
	}
	return true, s.serveUntilEnd(ctx, upstream, run, dir, pid)
}

// serveUntilEnd is the relay of a tofu that is no child of ours.
func (s *session) serveUntilEnd(ctx context.Context, upstream relay.Upstream, run *RunRef, dir string, pid int) error {
	s.step("adopt", fmt.Sprintf("tofu of the run %s lives on (pid %d); serving it until it ends", run.RunID, pid))
	held, err := s.heldBy(ctx, upstream, run.RunID)
	if err != nil {
		return err
	}
	r, err := relay.New(relay.Config{
		Upstream: upstream, JournalDir: s.journalDir(), RunInfo: run.RunInfo,
		Events: s.Events, Fault: s.Fault, Port: run.Port, Username: run.Username, Password: run.Password, Held: held,
	})
	if err != nil {
		return err
	}
	if _, err := r.Start(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(adoptPoll)
	defer tick.Stop()
	interrupted := false
	for pid != 0 {
		if s.interrupted() && !interrupted {
			interrupted = true
			r.Interrupted()
			if err := interruptProcess(pid); err != nil {
				return err
			}
		}
		<-tick.C
		if pid, err = tofuOf(dir, run.Engine); err != nil {
			return err
		}
	}
	err = s.release(r)
	if body, ok := r.LastState(); ok {
		err = errors.Join(err, s.remember(body))
	}
	closeCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), relayClose)
	defer cancel()
	return errors.Join(err, r.Close(closeCtx))
}

// release gives back a lock that tofu left behind.
func (s *session) release(r *relay.Relay) error {
	ctx, cancel := context.WithTimeout(context.Background(), unlockTime)
	defer cancel()
	if err := r.Settle(ctx); err != nil {
		return err
	}
	if _, ok := r.Held(); !ok {
		return nil
	}
	if err := s.fault("lock.release"); err != nil {
		return err
	}
	return r.Release(ctx)
}

// heldBy is the lock that a run holds on the backend, as the server says.
func (s *session) heldBy(ctx context.Context, upstream relay.Upstream, runID string) (*api.LockInfo, error) {
	probe := client.NewLockInfo("adopt", "")
	err := upstream.Lock(ctx, probe)
	if err == nil {
		return nil, unlockFor(ctx, upstream, probe)
	}
	var locked *api.LockedError
	if !errors.As(err, &locked) {
		return nil, err
	}
	var run relay.RunInfo
	ref := s.ledger.lock(locked.Holder.ID)
	if ref != nil && ref.RunID == runID || json.Unmarshal([]byte(locked.Holder.Info), &run) == nil && run.RunID == runID {
		return &locked.Holder, nil
	}
	return nil, nil
}
