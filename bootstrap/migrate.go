package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
)

func (s *session) phase(word, message string) {
	s.event(tfhosts.Event{Kind: tfhosts.EventPhase, Op: word, Message: message})
}

// cycleOne applies on the local file: the backend's node alone, where the setup
// names it, so that the state is on a real backend within minutes. Then it waits
// for the backend and moves the state there.
func (s *session) cycleOne(ctx context.Context, resumed bool) error {
	s.phase("cycle 1/2", "applying on local state")
	if err := s.fault("cycle1.ledger"); err != nil {
		return err
	}
	s.ledger.Mode = ModeBootstrapping
	if err := s.writeLedger(); err != nil {
		return err
	}
	file, err := s.localFile()
	if err != nil {
		return err
	}
	if err := s.connect(ctx, file, upstreamFile); err != nil {
		return err
	}
	s.targets = s.limits // cycle 2 honours them; here they do where no node is known to be the backend's
	if s.Setup.Self != nil {
		s.targets = []string{"-target=" + tfhosts.NodeAddress(s.Setup.Self.Node)}
	}
	changed, err := s.planAndApply(ctx, s.targets)
	if err != nil {
		return err
	}
	if !changed && resumed && s.Setup.Self != nil {
		// The state says that the backend's node is there, and nothing answers.
		f, err := s.reach(ctx)
		switch {
		case err == nil:
			if err := f.close(); err != nil {
				return err
			}
		case errors.Is(err, api.ErrUnreachable):
			s.notice("the backend's node is in the state, and the backend does not answer: deploying the node again")
			replace := append(append([]string{}, s.targets...), "-replace="+tfhosts.NodeAddress(s.Setup.Self.Node))
			if _, err := s.planAndApply(ctx, replace); err != nil {
				return err
			}
		default:
			return err
		}
	}
	if err := s.disconnect(); err != nil {
		return err
	}
	return s.awaitBackend(ctx)
}

// planAndApply is one apply within a cycle.
func (s *session) planAndApply(ctx context.Context, flags []string) (changed bool, err error) {
	plan := filepath.Join(s.runDir, fmt.Sprintf("%s-%d", planFile, time.Now().UnixNano()))
	changed, err = s.planToFile(ctx, plan, flags)
	if err != nil || !changed {
		return false, err
	}
	changes, _, err := s.applyPlan(ctx, plan, flags)
	s.changes = append(s.changes, changes...)
	return true, err
}

// awaitBackend waits for the backend that cycle 1 deployed.
func (s *session) awaitBackend(ctx context.Context) error {
	s.phase("wait", "for the backend to answer")
	if err := s.fault("wait.begin"); err != nil {
		return err
	}
	if err := s.waitReachable(ctx, awayWait); err != nil {
		if errors.Is(err, api.ErrUnreachable) || errors.Is(err, api.ErrUnavailable) {
			return tfhosts.WithExit(tfhosts.ExitUnreachable,
				"see why the state server does not answer there, then run the same command again; the state is safe in "+localPath(s.workDir),
				fmt.Errorf("waiting for the backend: %w", err))
		}
		return tfhosts.WithExit(api.ExitCode(err), s.backendHint(err), err)
	}
	if s.found != nil {
		if err := s.found.close(); err != nil {
			return err
		}
		s.found = nil
	}
	f, err := s.reach(ctx)
	if err != nil {
		return tfhosts.WithExit(api.ExitCode(err), s.backendHint(err), err)
	}
	s.found = f
	return nil
}

// migrate moves the local state to the backend by its raw bytes: lineage and
// serial stay. "init -migrate-state" and "state push" drop both on an empty
// backend and overwrite a stranger's state.
func (s *session) migrate(ctx context.Context) error {
	s.phase("migrate", "moving the state to "+s.found.served.Address)
	body, err := os.ReadFile(localPath(s.workDir))
	if err != nil {
		return fmt.Errorf("reading the local state: %w", err)
	}
	ref, err := refOf(body)
	if err != nil {
		return err
	}
	base := s.found.body
	if base != nil && !sameState(base, body) {
		have, err := refOf(base)
		if err != nil {
			return err
		}
		if have.Lineage != ref.Lineage {
			return lostError(fmt.Sprintf("the backend holds a state of lineage %s, this machine a local one of lineage %s", have.Lineage, ref.Lineage))
		}
		if have.Serial >= ref.Serial {
			return s.moved(ctx)
		}
	}
	if err := s.fault("migrate.sent"); err != nil {
		return err
	}
	s.ledger.Sent, s.ledger.Served = &ref, &s.found.served
	if err := s.writeLedger(); err != nil {
		return err
	}
	if err := s.put(ctx, s.noting(s.found.client), "migrate", body, base); err != nil {
		code := api.ExitCode(err)
		var exit *tfhosts.ExitError
		if errors.As(err, &exit) {
			code = exit.Code
		}
		return tfhosts.WithExit(code, "run the same command again; the state is safe in "+localPath(s.workDir),
			fmt.Errorf("moving the state to the backend: %w", err))
	}
	s.found.body = body
	return s.moved(ctx)
}

// moved checks that the plan on the backend is as empty as it was on the local
// state, and makes the local state the marker.
func (s *session) moved(ctx context.Context) error {
	if err := s.connect(ctx, s.noting(s.found.client.Once()), upstreamBackend); err != nil {
		return err
	}
	if s.checkMigrated {
		if err := s.fault("migrate.plan"); err != nil {
			return err
		}
		changed, err := s.planToFile(ctx, filepath.Join(s.runDir, planFile+"-migrated"), s.targets)
		if err != nil {
			return err
		}
		if changed {
			return tfhosts.WithExit(tfhosts.ExitFailed, "the local state is kept; compare the plan above",
				errors.New("the plan on the backend differs from the one on the local state"))
		}
	}
	return s.finishMigration()
}

// finishMigration renames terraform.tfstate to its marker and makes the backend
// the state's place. Run again after a crash it does what is left.
func (s *session) finishMigration() error {
	if err := s.fault("migrate.rename"); err != nil {
		return err
	}
	if err := os.Rename(localPath(s.workDir), markerPath(s.workDir)); err != nil {
		return fmt.Errorf("marking the local state as migrated: %w", err)
	}
	if err := durable.SyncDir(s.workDir); err != nil {
		return err
	}
	if err := s.fault("migrate.done"); err != nil {
		return err
	}
	s.ledger.Mode, s.ledger.Sent, s.ledger.Served = ModeRemote, nil, &s.found.served
	if s.found.body != nil {
		return s.remember(s.found.body)
	}
	return s.writeLedger()
}
