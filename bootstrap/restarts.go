package bootstrap

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// goalDry is the goal that copies a system to its host, and has it say what its
// activation would do.
const goalDry = "dry-activate"

// showRestarts has each host that is to be deployed say what its new system's
// activation would stop, start and restart. The closures are copied for that,
// which changes nothing that runs. A host that can not say it is a warning: its
// deploy will tell more.
func (s *session) showRestarts(ctx context.Context, changes []tofu.NodeChange) error {
	if !s.WhatRestarts {
		return nil
	}
	changes = slices.DeleteFunc(slices.Clone(changes), func(c tofu.NodeChange) bool {
		return !c.Deploys || s.built[c.After.ConfigIdentity].Err != nil
	})
	if err := s.fault("plan.restarts"); err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(max(1, s.Setup.Runner.Parallelism))
	for _, c := range changes {
		group.Go(func() error {
			settings := s.Setup.DeploySettings(c.Name)
			settings.Goal = goalDry
			v := s.Worker.Deploy(ctx, DeployRequest{
				Name: c.Name, Node: s.nodes[c.Name], Settings: settings,
				Built: s.built[c.After.ConfigIdentity], Drop: s.drop,
			})
			if v.Status != tfhosts.DryRun {
				s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Node: c.Name, Op: "plan.restarts", Message: "what its activation would do is not known: " + v.Sentence})
				return nil
			}
			for _, line := range v.Log {
				s.event(tfhosts.Event{Kind: tfhosts.EventNotice, Node: c.Name, Op: "plan.restarts", Message: line})
			}
			return nil
		})
	}
	return group.Wait()
}
