package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize/english"

	tfhosts "fediversity.eu/tf-hosts"
)

// newSession prepares a session; stop ends it, after an error too.
func newSession(cfg *Config) (s *session, stop func() error) {
	if cfg.Answer == nil {
		cfg.Answer = io.Discard
	}
	if cfg.Story == nil {
		cfg.Story = io.Discard
	}
	cfg.Story = &serial{w: cfg.Story}
	now := time.Now()
	s = &session{
		Config:  cfg,
		id:      newRunID(now),
		started: now,
		workDir: WorkDir(cfg.StateDir, cfg.Setup.Backend.Address),
		drop:    make(chan struct{}),
		results: &verdicts{byNode: map[string]tfhosts.Verdict{}},
	}
	s.runDir = filepath.Join(s.workDir, "runs", s.id)
	stopWatching := s.watchInterrupt()
	return s, func() error {
		stopWatching()
		return s.close()
	}
}

// Run runs one verb and gives the program's exit code. The error, when there is
// one, says why; it may carry a hint as a tfhosts.ExitError. A code without an
// error is an answer (-detailed-exitcode).
func Run(ctx context.Context, cfg Config) (code int, err error) {
	if err := cfg.narrow(ctx); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	s, stop := newSession(&cfg)
	defer func() {
		if serr := stop(); serr != nil {
			err = errors.Join(err, serr)
			code = tfhosts.WorstExit(code, tfhosts.ExitCodeOf(serr))
		}
	}()
	if err := s.open(ctx); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	if err := s.choose(); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	if s.nothing {
		s.notice("no node failed in its last deploy: nothing to do")
		return tfhosts.ExitOK, nil
	}
	if s.Verb.Name == "validate" { // looks at the graph alone, so it works without a backend
		return s.onLocal(ctx)
	}
	d, err := s.settle(ctx)
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	return s.follow(ctx, d.course)
}

// follow runs the verb where the state is.
func (s *session) follow(ctx context.Context, c course) (int, error) {
	var err error
	switch c {
	case onLocal:
		return s.onLocal(ctx)
	case cycleOne, migrateFirst, migrateOver:
		return s.bootstrap(ctx, c)
	case alreadyMoved:
		if s.Verb.Writes {
			err = s.finishMigration()
		}
	}
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	if s.Verb.Name == "destroy" && s.destroysBackend() && s.found.body != nil {
		unlock, err := s.detach(ctx)
		if err != nil {
			return tfhosts.ExitCodeOf(err), err
		}
		return s.destroyDetached(ctx, unlock)
	}
	if err := s.connectBackend(ctx); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	return s.verb(ctx)
}

// connectBackend puts the relay before the backend that was found.
func (s *session) connectBackend(ctx context.Context) error {
	if s.Verb.Writes && s.Verb.Name != "force-unlock" { // a state that was sent has arrived, or its migration would go on
		s.ledger.Mode, s.ledger.Sent = ModeRemote, nil
	}
	if s.ledger.Served == nil {
		s.ledger.Served = &s.found.served
	}
	upstream := s.found.client.Once()
	if s.forcedPush() {
		upstream = upstream.Forced()
	}
	return s.connect(ctx, s.noting(upstream), upstreamBackend)
}

// destroysBackend: the destroy takes the state's own backend out of the graph,
// so the state must leave it first. One that is targeted at other nodes alone
// is an ordinary change on the backend.
func (s *session) destroysBackend() bool {
	if !s.selfServed() {
		return false
	}
	targeted := false
	for _, flag := range slices.Concat(s.limits, s.args.flags) {
		address, ok := strings.CutPrefix(flag, "-target=")
		if !ok {
			if strings.HasPrefix(flag, "-target-file=") {
				return true
			}
			continue
		}
		targeted = true
		if s.Setup.Self == nil || address == tfhosts.NodeAddress(s.Setup.Self.Node) || !strings.Contains(address, `["`) {
			return true
		}
	}
	return !targeted
}

// bootstrap is a BOOTSTRAP=1 run from wherever an earlier one stopped: cycle 1,
// migration, cycle 2.
func (s *session) bootstrap(ctx context.Context, c course) (int, error) {
	var err error
	if c == cycleOne {
		_, serr := os.Stat(localPath(s.workDir))
		if err = s.cycleOne(ctx, serr == nil); err == nil {
			s.checkMigrated = true
		}
	}
	if err == nil {
		err = s.migrate(ctx)
	}
	if err != nil {
		return s.finish(ctx, s.changes, err)
	}
	s.phase("cycle 2/2", "applying on "+s.found.served.Address)
	return s.apply(ctx)
}

// onLocal runs a verb on the detached, or not yet migrated, local state.
func (s *session) onLocal(ctx context.Context) (int, error) {
	if s.Verb.Name == "apply" {
		err := tfhosts.WithExit(tfhosts.ExitLostState, "bring the backend up again: BOOTSTRAP=1 tf-hosts apply",
			errors.New("the state is detached from the backend, since a destroy of the backend's own graph"))
		return tfhosts.ExitLostState, err
	}
	if s.Verb.Name == "destroy" {
		return s.destroyDetached(ctx, func() error { return nil })
	}
	file, err := s.localFile()
	if err == nil {
		if s.forcedPush() {
			file.AllowRewind()
		}
		err = s.connect(ctx, file, upstreamFile)
	}
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	return s.verb(ctx)
}

func (s *session) verb(ctx context.Context) (int, error) {
	switch s.Verb.Name {
	case "apply", "destroy":
		return s.apply(ctx)
	case "plan":
		return s.plan(ctx)
	case "drift":
		return s.drift(ctx)
	}
	return s.other(ctx)
}

// watchInterrupt passes an interrupt on to the deploys and the relay; tofu gets
// its one SIGINT from whoever waits for it.
func (s *session) watchInterrupt() (stop func()) {
	ended := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-s.Interrupt:
			close(s.drop)
			if r := s.interruptible.Load(); r != nil {
				r.Interrupted()
			}
		case <-ended:
		}
	}()
	return func() {
		close(ended)
		<-watched
	}
}

// other runs a verb that is one command of tofu's.
func (s *session) other(ctx context.Context) (int, error) {
	args := append([]string{}, s.Verb.Tofu...)
	switch s.Verb.Name {
	case "refresh":
		args = append(append(args, "-input=false", s.args.lockTimeout, s.args.parallelism), s.limits...)
	case "import":
		args = append(args, "-input=false", s.args.lockTimeout)
	case "taint", "untaint", "rollback", "state-rm", "state-mv", verbPush:
		args = append(args, s.args.lockTimeout)
	case "force-unlock":
		args = append(args, "-force")
	}
	args = append(args, s.args.flags...)
	operands := s.args.operands
	if s.Verb.Name == "show" || s.Verb.Name == verbPush {
		operands = make([]string, len(s.args.operands))
		for i, op := range s.args.operands {
			operands[i] = absolute(s.CallerDir, op)
		}
	}
	var stdin io.Reader
	for _, op := range operands {
		if op == "-" {
			stdin = s.Stdin
		}
	}
	if err := s.fault("verb." + s.Verb.Name); err != nil {
		return tfhosts.ExitFailed, err
	}
	code, err := s.runTofu(ctx, s.Verb.Name, append(args, operands...), s.Answer, stdin)
	if err != nil {
		return tfhosts.ExitFailed, err
	}
	if path, err := s.saveErrored(); err != nil || path != "" {
		if err == nil {
			err = salvageError(path, errors.New("the backend did not take it"))
		}
		return tfhosts.ExitSalvage, err
	}
	if code != 0 {
		err := s.tofuError(s.Verb.Name, code)
		if s.Verb.Name == verbPush {
			err = s.pushError(err)
		}
		return tfhosts.ExitCodeOf(err), err
	}
	if s.Verb.Name == verbPush && len(operands) == 1 && filepath.Dir(operands[0]) == s.salvageDir() {
		if err := s.markStored(operands[0]); err != nil {
			return tfhosts.ExitFailed, err
		}
	}
	return 0, nil
}

func nodesFailedError(failed, planned, unbegun int) error {
	rest, hint := "", "mend what the verdicts say, then run the same command again: only the failed nodes are planned"
	if unbegun > 0 {
		rest = fmt.Sprintf("; %s of later waves not begun", english.Plural(unbegun, "node", ""))
		hint = "mend what the verdicts say, then run the same command again: it begins with the failed nodes"
	}
	return tfhosts.WithExit(tfhosts.ExitNodesFailed,
		hint,
		fmt.Errorf("%d of %d nodes failed%s", failed, planned, rest))
}
