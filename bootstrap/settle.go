package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
)

func localPath(workDir string) string  { return filepath.Join(workDir, "terraform.tfstate") }
func markerPath(workDir string) string { return filepath.Join(workDir, "terraform.tfstate.migrated") }

// awayWait is how long a backend that may hold a migrated state is waited for,
// and how long a node's backend may take to come up in a bootstrap.
const awayWait = 10 * time.Minute

// settle finds out where the state is, mends what earlier runs left and decides
// how the verb goes on.
func (s *session) settle(ctx context.Context) (decision, error) {
	sit, awayErr, err := s.look(ctx)
	if err != nil {
		return decision{}, err
	}
	if s.ledger.Sent != nil && !sit.reachable && s.ledger.Mode != ModeDetached {
		if sit, awayErr, err = s.waitForSent(ctx); err != nil {
			return decision{}, err
		}
	}
	if s.Verb.Writes {
		adopted, err := s.adopt(ctx)
		if err != nil {
			return decision{}, err
		}
		if adopted { // the state moved on
			if err := s.leave(); err != nil {
				return decision{}, err
			}
			if sit, awayErr, err = s.look(ctx); err != nil {
				return decision{}, err
			}
		}
		if sit, err = s.mend(ctx, sit); err != nil {
			return decision{}, err
		}
	}
	d := decide(sit)
	if d.notice != "" {
		s.notice(d.notice)
	}
	switch {
	case d.lost != "" && (!s.Verb.Writes || s.Verb.Name == "force-unlock"): // which writes no state
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "state", Message: d.lost})
		if sit.gone || sit.backend == nil && !sit.reachable {
			return d, lostError(d.lost)
		}
		d.course = steady
	case d.lost != "" && s.AllowLost:
		if err := s.archiveLost(); err != nil {
			return d, err
		}
		s.notice("giving the lost state up: " + d.lost)
		switch {
		case s.found != nil:
			return decision{course: steady}, nil
		case s.Bootstrap:
			return decision{course: cycleOne}, nil
		}
		return d, s.awayError(awayErr)
	case d.lost != "":
		return d, lostError(d.lost)
	case d.away && !s.Verb.Writes && sit.local != nil:
		s.notice("the backend can not be reached; reading the local state")
		d.course = onLocal
	case d.away:
		return d, s.awayError(awayErr)
	}
	return d, nil
}

// look gathers the situation. awayErr says why no backend answered.
func (s *session) look(ctx context.Context) (sit situation, awayErr, err error) {
	sit = situation{bootstrap: s.Bootstrap, writes: s.Verb.Writes, ledger: s.ledger}
	local, err := os.ReadFile(localPath(s.workDir))
	switch {
	case err == nil:
		ref, rerr := refOf(local)
		if rerr != nil {
			return sit, nil, tfhosts.WithExit(tfhosts.ExitSalvage,
				"restore it from the journal: tf-hosts state-restore --local",
				fmt.Errorf("reading the local state %q (%d bytes): %w", localPath(s.workDir), len(local), rerr))
		}
		sit.local = &ref
	case !errors.Is(err, fs.ErrNotExist):
		return sit, nil, fmt.Errorf("reading the local state: %w", err)
	}
	marker, err := os.ReadFile(markerPath(s.workDir))
	switch {
	case err == nil:
		sit.marker = true
		if ref, rerr := refOf(marker); rerr == nil {
			sit.migrated = &ref
		}
	case !errors.Is(err, fs.ErrNotExist):
		return sit, nil, fmt.Errorf("reading the migrated marker: %w", err)
	}
	if s.ledger.Mode == ModeDetached && !s.Bootstrap && sit.local != nil {
		return sit, nil, nil // the backend is not read
	}
	f, err := s.reach(ctx)
	if errors.Is(err, api.ErrUnreachable) && !errors.Is(err, api.ErrUnauthorized) {
		if s.Bootstrap && sit.local == nil && !sit.marker && !s.ledger.known() {
			if why := s.mayExist(ctx); why != nil {
				sit.unsure, err = true, fmt.Errorf("not bootstrapping, since a state may exist: %w: %w", why, err)
			}
		}
		return sit, err, nil
	}
	if err != nil {
		return sit, nil, tfhosts.WithExit(api.ExitCode(err), s.backendHint(err), err)
	}
	s.found = f
	return s.fill(sit), nil, nil
}

// fill enters what the backend answered.
func (s *session) fill(sit situation) situation {
	sit.reachable, sit.gone, sit.backend, sit.strangers = true, s.found.gone, nil, false
	if s.found.body == nil {
		return sit
	}
	ref, err := refOf(s.found.body)
	if err != nil { // Probe has read it before
		return sit
	}
	sit.backend = &ref
	sit.strangers = s.strangers(s.found.body)
	return sit
}

// strangers says whether a state holds nodes, none of which is in the setup.
func (s *session) strangers(body []byte) bool {
	nodes, ours := 0, 0
	for _, r := range gjson.GetBytes(body, `resources.#(type=="terraform_data")#`).Array() {
		if r.Get("name").Str != "nixos" || r.Get("module").Exists() {
			continue
		}
		for _, i := range r.Get("instances").Array() {
			nodes++
			if _, ok := s.Setup.Nodes[i.Get("index_key").Str]; ok {
				ours++
			}
		}
	}
	return nodes > 0 && ours == 0
}

// waitForSent waits for the backend to which a state was sent off.
func (s *session) waitForSent(ctx context.Context) (situation, error, error) {
	s.notice("the state was sent to the backend, which can not be reached; waiting for it")
	if err := s.waitReachable(ctx, awayWait); err != nil && !errors.Is(err, api.ErrUnreachable) {
		return situation{}, nil, err
	}
	return s.look(ctx)
}

// waitReachable waits until the backend answers, with a live counter.
func (s *session) waitReachable(ctx context.Context, limit time.Duration) error {
	if s.Wait > 0 {
		limit = s.Wait
	}
	start := time.Now()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	told := time.Duration(-1)
	for {
		f, err := s.reach(ctx)
		if err == nil {
			return f.close()
		}
		var exit *tfhosts.ExitError
		if !errors.Is(err, api.ErrUnreachable) && !errors.Is(err, api.ErrUnavailable) || errors.As(err, &exit) {
			return err
		}
		waited := time.Since(start).Round(time.Second)
		if waited >= limit {
			return err
		}
		if told < 0 || waited-told >= 5*time.Second {
			told = waited
			s.event(tfhosts.Event{Kind: tfhosts.EventPhase, Op: "wait", Message: fmt.Sprintf("%s of %s for the backend to answer", waited, limit)})
		}
		select {
		case <-tick.C:
		case <-s.Interrupt:
			return tfhosts.WithExit(tfhosts.ExitInterrupted, "run the same command again; it goes on from here", errors.New("interrupted while waiting for the backend"))
		}
	}
}

// mend reclaims our own stale locks and stores what could not be stored, on the
// backend or on the local file.
func (s *session) mend(ctx context.Context, sit situation) (situation, error) {
	if err := s.collectSalvage(); err != nil {
		return sit, err
	}
	if err := s.tidy(); err != nil {
		return sit, err
	}
	onFile := s.worksOnFile(sit)
	file, err := s.localFile()
	if err != nil {
		return sit, err
	}
	if held, err := file.Holder(); err != nil {
		return sit, err
	} else if held != nil { // nobody else can hold the lock of a file in our own working dir
		if err := s.reclaim(ctx, file); err != nil {
			return sit, err
		}
	}
	// force-unlock names the lock itself, also one that can not be reclaimed.
	if s.ReclaimOwnLock && s.Verb.Name != "force-unlock" && s.found != nil && !s.found.gone {
		if err := s.reclaim(ctx, s.noting(s.found.client)); err != nil {
			return sit, err
		}
	}
	var upstream relay.Upstream
	var base []byte
	switch {
	case onFile:
		upstream = file
		if base, err = file.Get(ctx); err != nil && !errors.Is(err, api.ErrNotFound) {
			return sit, err
		}
	case sit.reachable && !sit.gone:
		upstream, base = s.noting(s.found.client), s.found.body
	default:
		return sit, nil
	}
	if s.Verb.Name == "force-unlock" || s.Verb.Name == verbPush || s.lostAlready(sit, onFile) {
		return sit, nil
	}
	now, err := s.salvage(ctx, upstream, base)
	if err != nil || bytes.Equal(now, base) {
		return sit, err
	}
	if !onFile {
		s.found.body = now
		return s.fill(sit), nil
	}
	ref, err := refOf(now)
	sit.local = &ref
	return sit, err
}

// worksOnFile says whether terraform.tfstate is the state, and not the backend's.
func (s *session) worksOnFile(sit situation) bool {
	if sit.local == nil {
		// Cycle 1 was killed before it stored anything.
		run := s.ledger.Run
		return !sit.marker && !sit.reachable && run != nil && run.Upstream == upstreamFile
	}
	if s.ledger.Mode == ModeDetached {
		return true
	}
	moved := sit.backend != nil && sit.backend.Lineage == sit.local.Lineage && sit.backend.Serial >= sit.local.Serial
	return !sit.marker && !moved
}

// leave gives the backend that answered back.
func (s *session) leave() error {
	if s.found == nil {
		return nil
	}
	f := s.found
	s.found = nil
	return f.close()
}

// lostAlready: a salvage must not fill a key that lost its state.
func (s *session) lostAlready(sit situation, onFile bool) bool {
	return !onFile && decide(sit).lost != ""
}

func (s *session) localFile() (*relay.File, error) {
	return relay.OpenFile(localPath(s.workDir), s.Fault)
}

// archiveLost puts everything that speaks of the lost state aside.
func (s *session) archiveLost() error {
	dir := filepath.Join(s.salvageDir(), "lost-"+s.id)
	if err := MakePrivate(dir); err != nil {
		return err
	}
	// What waits to be stored belongs to the lost state, too.
	paths, err := filepath.Glob(filepath.Join(s.salvageDir(), "*.tfstate"))
	if err != nil {
		return fmt.Errorf("archiving the lost state: %w", err)
	}
	paths = append(paths, localPath(s.workDir), markerPath(s.workDir), lastPath(s.workDir), ledgerPath(s.workDir))
	for _, path := range paths {
		if err := s.fault("lost.archive"); err != nil {
			return err
		}
		err := os.Rename(path, filepath.Join(dir, filepath.Base(path)))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("archiving the lost state: %w", err)
		}
	}
	run, locks := s.ledger.Run, s.ledger.Locks
	s.ledgerText = nil
	*s.ledger = Ledger{Version: 1, Address: s.Setup.Backend.Address, Run: run, Locks: locks}
	return errors.Join(durable.SyncDir(dir), durable.SyncDir(s.workDir))
}

// awayError is exit 5.
func (s *session) awayError(err error) error {
	hint := fmt.Sprintf("see that a state server answers at %s, or set TF_HTTP_ADDRESS", s.Setup.Backend.Address)
	if s.selfServed() && !s.ledger.known() && !s.Bootstrap {
		hint += "; to bring up the graph's own backend: BOOTSTRAP=1 tf-hosts apply"
	}
	if s.Bootstrap && s.Setup.Self == nil {
		hint += "; name the backend's node in self_backend, so that it alone is asked for the state"
	}
	if err == nil {
		err = api.ErrUnreachable
	}
	return tfhosts.WithExit(tfhosts.ExitUnreachable, hint, err)
}

// selfServed: the graph deploys the node that serves its state.
func (s *session) selfServed() bool {
	return s.SelfBackend || s.Setup.Self != nil && s.member(s.Setup.Self.Node)
}
