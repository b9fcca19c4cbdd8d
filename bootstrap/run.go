package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// Run runs one verb and gives the program's exit code. The error, when there is
// one, says why; it may carry a hint as a tfhosts.ExitError. A code without an
// error is an answer (-detailed-exitcode).
func Run(ctx context.Context, cfg Config) (code int, err error) {
	if cfg.Answer == nil {
		cfg.Answer = io.Discard
	}
	if cfg.Story == nil {
		cfg.Story = io.Discard
	}
	cfg.Story = &serial{w: cfg.Story}
	now := time.Now()
	s := &session{
		Config:  &cfg,
		id:      newRunID(now),
		started: now,
		workDir: WorkDir(cfg.StateDir, cfg.Setup.Backend.Address),
		drop:    make(chan struct{}),
		results: &verdicts{byNode: map[string]tfhosts.Verdict{}},
	}
	s.runDir = filepath.Join(s.workDir, "runs", s.id)
	stopWatching := s.watchInterrupt()
	defer func() {
		stopWatching()
		if cerr := s.close(); cerr != nil {
			err = errors.Join(err, cerr)
			if code == tfhosts.ExitOK {
				code = tfhosts.ExitFailed
			}
		}
	}()
	if err := s.open(ctx); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	switch s.Verb.Name {
	case "apply", "destroy":
		return s.apply(ctx)
	case "plan":
		return s.plan(ctx)
	default:
		return s.other(ctx)
	}
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

// plan shows what an apply would do. tofu's output is the answer.
func (s *session) plan(ctx context.Context) (int, error) {
	out := s.args.out
	args := s.planArgs(out, false)
	if s.args.detailedExitcode {
		args = append(args, "-detailed-exitcode")
	}
	s.step("plan", "planning")
	code, err := s.runTofu(ctx, "plan", append(args, s.args.operands...), s.Answer, nil)
	if err != nil {
		return tfhosts.ExitFailed, err
	}
	if code == 0 || code == 2 && s.args.detailedExitcode {
		return code, nil
	}
	err = s.tofuError("plan", code)
	return tfhosts.ExitCodeOf(err), err
}

func (s *session) planArgs(out string, destroy bool) []string {
	args := []string{"plan", "-input=false", s.args.lockTimeout, s.args.parallelism}
	if destroy {
		args = append(args, "-destroy")
	}
	if out != "" {
		args = append(args, "-out="+out)
	}
	return append(args, s.args.flags...)
}

// other runs a verb that is one command of tofu's.
func (s *session) other(ctx context.Context) (int, error) {
	args := append([]string{}, s.Verb.Tofu...)
	switch s.Verb.Name {
	case "refresh":
		args = append(args, "-input=false", s.args.lockTimeout, s.args.parallelism)
	case "import":
		args = append(args, "-input=false", s.args.lockTimeout)
	case "taint", "untaint", "state-rm", "state-mv", "state-push":
		args = append(args, s.args.lockTimeout)
	case "force-unlock":
		args = append(args, "-force")
	}
	args = append(args, s.args.flags...)
	operands := s.args.operands
	if s.Verb.Name == "show" || s.Verb.Name == "state-push" {
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
	code, err := s.runTofu(ctx, s.Verb.Name, append(args, operands...), s.Answer, stdin)
	if err != nil {
		return tfhosts.ExitFailed, err
	}
	if path, err := s.saveErrored(); err != nil {
		return tfhosts.ExitSalvage, err
	} else if path != "" {
		return tfhosts.ExitSalvage, salvageError(path)
	}
	if code != 0 {
		err := s.tofuError(s.Verb.Name, code)
		return tfhosts.ExitCodeOf(err), err
	}
	if s.Verb.Name == "state-push" && len(operands) == 1 {
		if err := s.settleSalvage(operands[0]); err != nil {
			return tfhosts.ExitFailed, err
		}
	}
	return 0, nil
}

func nodesFailedError(failed, planned int) error {
	return tfhosts.WithExit(tfhosts.ExitNodesFailed,
		"mend what the verdicts say, then run the same command again: only the failed nodes are planned",
		fmt.Errorf("%d of %d nodes failed", failed, planned))
}
