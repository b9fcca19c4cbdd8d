package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
)

// VerbRollback is the verb "rollback": it taints one node's resource.
func VerbRollback() tfhosts.Verb {
	return tfhosts.Verb{Name: "rollback", Tofu: []string{"taint"}, Writes: true, Addresses: 1}
}

// RollbackOptions name a node and where it goes.
type RollbackOptions struct {
	// Node is the node's name. To is a system that is on its host; empty is the
	// one that ran before the last deploy that changed it.
	Node, To string
	// Back takes the node to the system of the request. It calls changing before
	// it changes anything on the host, and changes nothing when that is an error.
	Back func(ctx context.Context, req DeployRequest, changing func(context.Context) error) tfhosts.Verdict
}

var systemPath = regexp.MustCompile(`^/nix/store/[0-9a-z]{32}-[0-9A-Za-z+._?=-]+$`)

// Rollback takes one node back to another system, under the working dir's lock.
// The node's resource is tainted right before its host is changed, so that a run
// that is killed leaves a state that tells the truth; where the host refuses
// before that, nothing is tainted. The state's lock is held while the host
// changes.
func Rollback(ctx context.Context, cfg Config, opts RollbackOptions) (code int, err error) {
	cfg.Verb, cfg.Args = VerbRollback(), []string{opts.Node}
	if opts.To != "" && !systemPath.MatchString(opts.To) {
		err := tfhosts.WithExit(tfhosts.ExitUsage, "name a system, as in: tf-hosts exec --on "+opts.Node+" -- readlink -f /nix/var/nix/profiles/system-1-link",
			fmt.Errorf("%q is no store path", opts.To))
		return tfhosts.ExitUsage, err
	}
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
	if opts.To, err = s.wayBack(opts); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	d, err := s.settle(ctx)
	if err == nil {
		err = s.readyToTaint(ctx, d.course)
	}
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	return s.rollback(ctx, opts)
}

// wayBack is the system to go back to.
func (s *session) wayBack(opts RollbackOptions) (string, error) {
	if opts.To != "" {
		return opts.To, nil
	}
	record, err := ReadRecord(s.workDir)
	if err != nil {
		return "", err
	}
	if to := record.Nodes[opts.Node].Before; systemPath.MatchString(to) {
		return to, nil
	}
	return "", tfhosts.WithExit(tfhosts.ExitFailed,
		"name a system that its host has, with --to; to see them: tf-hosts exec --on "+opts.Node+" -- ls -l /nix/var/nix/profiles",
		fmt.Errorf("rolling %q back: no system that it ran before is recorded on this machine", opts.Node))
}

// readyToTaint puts the relay before the state, which must be on its backend.
func (s *session) readyToTaint(ctx context.Context, c course) error {
	switch c {
	case alreadyMoved:
		if err := s.finishMigration(); err != nil {
			return err
		}
	case steady:
	default:
		return tfhosts.WithExit(tfhosts.ExitLostState, "bring the backend up first: BOOTSTRAP=1 tf-hosts apply",
			errors.New("the state is not on the backend"))
	}
	return s.connectBackend(ctx)
}

// rollback goes back, records the verdict and decides the exit code.
func (s *session) rollback(ctx context.Context, opts RollbackOptions) (int, error) {
	settings := s.Setup.DeploySettings(opts.Node)
	settings.Goal = "switch"
	info := client.NewLockInfo("rollback", s.lockInfo())
	tainted, locked := false, false
	var refused error
	verdict := opts.Back(ctx, DeployRequest{
		Name: opts.Node, Node: s.nodes[opts.Node], Settings: settings, Built: Built{Out: opts.To}, Drop: s.drop,
	}, func(ctx context.Context) error {
		if _, refused = s.other(ctx); refused != nil {
			return refused
		}
		tainted = true
		if refused = s.fault("rollback.lock"); refused == nil {
			refused = lockedError(s.noting(s.found.client).Lock(ctx, info))
		}
		locked = refused == nil
		return refused
	})
	var errs []error
	var codes []int
	if locked {
		if err := unlockFor(ctx, s.noting(s.found.client), info); err != nil {
			errs, codes = append(errs, err), append(codes, tfhosts.ExitCodeOf(err))
		}
	}
	s.results.add(verdict)
	switch {
	case refused != nil:
		errs, codes = append(errs, refused), append(codes, tfhosts.ExitCodeOf(refused))
	case verdict.Failed():
		codes = append(codes, tfhosts.ExitNodesFailed)
		errs = append(errs, tfhosts.WithExit(tfhosts.ExitNodesFailed, "", fmt.Errorf("%q was not rolled back", opts.Node)))
		if verdict.Status == tfhosts.Dropped {
			codes = append(codes, tfhosts.ExitInterrupted)
		}
	}
	code := tfhosts.WorstExit(codes...)
	if err := s.record(code, nil); err != nil {
		errs = append(errs, err)
		code = tfhosts.WorstExit(code, tfhosts.ExitFailed)
	}
	if err := WriteTable(s.Story, s.results.all()); err != nil {
		errs = append(errs, err)
	}
	if tainted {
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Node: opts.Node, Op: "rollback", Message: "tainted: the next apply deploys the system of the setup again, unless the setup is reverted first"})
	}
	return code, errors.Join(errs...)
}
