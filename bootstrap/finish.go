package bootstrap

import (
	"context"
	"errors"
	"fmt"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// finish prints the outputs, records the verdicts and decides the exit code.
func (s *session) finish(ctx context.Context, changes []tofu.NodeChange, failure error) (int, error) {
	planned := 0
	if failure == nil {
		failure = s.checkStored(ctx)
	}
	for _, c := range changes {
		if !c.Deploys {
			continue
		}
		planned++
		if _, ok := s.results.all()[c.Name]; !ok && s.interrupted() {
			s.results.add(droppedVerdict(c.Name))
		}
	}
	all := s.results.all()
	failed := 0
	for _, v := range all {
		if v.Failed() {
			failed++
		}
	}
	var codes []int
	var errs []error
	if failed > 0 {
		codes = append(codes, tfhosts.ExitNodesFailed)
	}
	if failure != nil {
		errs = append(errs, failure)
		// tofu fails with 1 when a provisioner did: the nodes' code says it better.
		if failed == 0 || !merelyEnded(failure) {
			codes = append(codes, tfhosts.ExitCodeOf(failure))
		}
	}
	if failed > 0 {
		errs = append(errs, nodesFailedError(failed, planned, len(s.unbegun)))
	}
	if s.args.detailedExitcode && len(changes) > 0 {
		codes = append(codes, tfhosts.ExitChanges)
	}
	code := tfhosts.WorstExit(codes...)
	if s.relay != nil && (failure == nil || failed > 0) {
		if err := s.printOutputs(ctx); err != nil {
			errs = append(errs, err)
			code = tfhosts.WorstExit(code, tfhosts.ExitFailed)
		}
	}
	if err := s.record(code, changes); err != nil {
		errs = append(errs, err)
		code = tfhosts.WorstExit(code, tfhosts.ExitFailed)
	}
	switch {
	case s.report != nil:
		s.report(all)
	case len(all) > 0:
		s.event(tfhosts.Event{Kind: tfhosts.EventPhase, Op: "verdict"})
		if err := WriteTable(s.Story, all); err != nil {
			errs = append(errs, err)
		}
	}
	return code, errors.Join(errs...)
}

// checkStored reads the state back after an apply that stored one: a proxy in
// front of the backend may acknowledge what never arrives.
func (s *session) checkStored(ctx context.Context) error {
	if s.relay == nil || s.found == nil || s.ledger.Mode != ModeRemote || s.relay.Stats().Posts == 0 {
		return nil
	}
	if err := s.fault("apply.check"); err != nil {
		return err
	}
	sent, _ := s.relay.LastState()
	have, err := s.found.client.Get(ctx)
	if err != nil {
		return tfhosts.WithExit(api.ExitCode(err), s.backendHint(err), fmt.Errorf("reading the stored state back: %w", err))
	}
	want, err := refOf(sent)
	if err != nil {
		return err
	}
	got, err := refOf(have)
	if err != nil {
		return fmt.Errorf("reading the stored state back: %w", err)
	}
	if got.Lineage != want.Lineage || got.Serial < want.Serial {
		return lostError(fmt.Sprintf("the backend acknowledged serial %d and holds serial %d of lineage %s", want.Serial, got.Serial, got.Lineage))
	}
	return nil
}

// printOutputs prints the one JSON document of an apply, from the state that
// passed through the relay; from tofu when that one is encrypted.
func (s *session) printOutputs(ctx context.Context) error {
	if s.Verb.Name == "destroy" {
		return nil
	}
	state, _ := s.relay.LastState()
	doc, ok, err := outputs(state)
	if err != nil {
		return err
	}
	if !ok {
		code, err := s.runTofu(ctx, "output", []string{"output", "-json"}, s.Answer, nil)
		if err != nil {
			return err
		}
		if code != 0 {
			return s.tofuError("output", code)
		}
		return nil
	}
	if _, err := s.Answer.Write(doc); err != nil {
		return fmt.Errorf("printing the outputs: %w", err)
	}
	return nil
}
