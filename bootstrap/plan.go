package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// plan shows what an apply would do. tofu's output is the answer.
func (s *session) plan(ctx context.Context) (int, error) {
	args := s.planArgs(s.args.out, slices.Concat(s.limits, s.args.flags))
	if s.args.detailedExitcode {
		args = append(args, "-detailed-exitcode")
	}
	planned, args := s.plannedFile(args)
	s.step("plan", "planning")
	code, err := s.runTofu(ctx, "plan", append(args, s.args.operands...), s.Answer, nil)
	if err != nil {
		return tfhosts.ExitFailed, err
	}
	if code == 0 || code == 2 && s.args.detailedExitcode {
		if err := s.afterPlan(ctx, planned); err != nil {
			return tfhosts.ExitCodeOf(err), err
		}
		return code, nil
	}
	err = s.tofuError("plan", code)
	return tfhosts.ExitCodeOf(err), err
}

// plannedFile is where a plan tells its changes to machines. OpenTofu's text
// stays what it is without -out and -json.
func (s *session) plannedFile(args []string) (file string, _ []string) {
	if s.args.json {
		return filepath.Join(s.runDir, "plan.stdout"), args
	}
	for _, flag := range s.args.flags {
		if into, ok := strings.CutPrefix(flag, "-json-into="); ok {
			return into, args
		}
	}
	file = filepath.Join(s.runDir, "plan.jsonl")
	return file, append(args, "-json-into="+file)
}

// afterPlan shows what the plan changes on its nodes.
func (s *session) afterPlan(ctx context.Context, planned string) error {
	if fi, err := os.Stat(planned); err == nil && !fi.Mode().IsRegular() {
		return nil // the caller's -json-into is a pipe: what went there is gone
	}
	changes, err := tofu.PlannedNodes(planned)
	if err != nil {
		return err
	}
	for i, c := range changes {
		changes[i].After.ConfigIdentity = s.nodes[c.Name].ConfigIdentity
	}
	s.showLeaving(changes)
	if s.BuildPlan || s.WhatRestarts {
		err = s.build(ctx, changes)
	}
	if err != nil {
		return err
	}
	s.showDiffs(ctx, changes)
	if err := s.showRestarts(ctx, changes); err != nil {
		return err
	}
	failed := 0
	var errs []error
	for _, id := range tfhosts.SortedNames(s.built) {
		if err := s.built[id].Err; err != nil {
			failed++
			errs = append(errs, err)
		}
	}
	if failed == 0 {
		return nil
	}
	return fmt.Errorf("%d of %d systems do not build: %w", failed, len(s.built), errors.Join(errs...))
}

func (s *session) planArgs(out string, flags []string) []string {
	args := []string{"plan", "-input=false", s.args.parallelism}
	if s.Verb.Writes || s.args.lock {
		args = append(args, s.args.lockTimeout)
	} else {
		// A plan that nobody applies disturbs no apply beside it: a state is
		// read as a whole, and a saved plan is checked for staleness.
		args = append(args, "-lock=false")
	}
	if s.Verb.Name == "destroy" {
		args = append(args, "-destroy")
	}
	if out != "" {
		args = append(args, "-out="+out)
	}
	return append(args, flags...)
}
