package bootstrap

import (
	"archive/zip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// apply plans to a file, builds what the plan deploys, applies that file and
// collects the verdicts. Without changes it stops after the plan: nothing is
// built, shown or applied, and no host is contacted.
func (s *session) apply(ctx context.Context) (int, error) {
	saved, err := s.savedPlan()
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	plan := saved
	if plan == "" {
		if err := s.redeploy(ctx); err != nil {
			return s.finish(ctx, s.changes, err)
		}
		plan = filepath.Join(s.runDir, planFile)
		changed, err := s.planToFile(ctx, plan, s.limits)
		if err != nil || !changed {
			return s.finish(ctx, s.changes, err)
		}
	}
	changes, stale, err := s.applyPlan(ctx, plan, s.limits)
	if stale {
		s.notice("the state moved on since the plan; planning again")
		plan = filepath.Join(s.runDir, planFile+"-again")
		changed, perr := s.planToFile(ctx, plan, s.limits)
		if perr != nil || !changed {
			return s.finish(ctx, s.changes, perr)
		}
		if perr := s.withinReviewed(ctx, saved, plan, changes); perr != nil {
			return s.finish(ctx, s.changes, perr)
		}
		if changes, stale, err = s.applyPlan(ctx, plan, s.limits); stale && err == nil {
			err = movedOnAgain()
		}
	}
	return s.finish(ctx, append(s.changes, changes...), err)
}

func movedOnAgain() error {
	return tfhosts.WithExit(tfhosts.ExitFailed, "see who else writes this state, then run the same command again",
		errors.New("the state moved on once more while the plan was applied"))
}

// withinReviewed refuses a new plan that does more than the saved one that went
// stale: nobody has seen it, and what limited the saved one (-target, -destroy)
// is not known.
func (s *session) withinReviewed(ctx context.Context, saved, plan string, reviewed []tofu.NodeChange) error {
	if saved == "" {
		return nil
	}
	changes, err := s.engine.NodeChanges(ctx, s.runDir, plan, s.env)
	if err != nil {
		return err
	}
	more := beyond(reviewed, changes)
	if len(more) == 0 {
		return nil
	}
	return tfhosts.WithExit(tfhosts.ExitFailed, "make and review a new one: tf-hosts plan -- -out="+saved,
		fmt.Errorf("the saved plan is stale, and a new plan would do more than it: %s", strings.Join(more, ", ")))
}

// beyond names the changes that are not among the reviewed ones.
func beyond(reviewed, changes []tofu.NodeChange) []string {
	var more []string
	for _, c := range changes {
		same := func(r tofu.NodeChange) bool {
			return r.Name == c.Name && r.Deploys == c.Deploys && r.Leaves == c.Leaves
		}
		if !slices.ContainsFunc(reviewed, same) {
			more = append(more, c.Name)
		}
	}
	return more
}

// savedPlan is the plan file that the user named, absolute, or empty.
func (s *session) savedPlan() (string, error) {
	ops := s.args.operands
	switch {
	case len(ops) == 0:
		return "", nil
	case len(ops) == 1 && s.Verb.Name == "apply":
		for _, flag := range s.args.flags {
			if plansOnly(flag) {
				return "", tfhosts.WithExit(tfhosts.ExitUsage, "give it to the plan: tf-hosts plan -- -out="+ops[0]+" "+flag,
					fmt.Errorf("%s: a saved plan is applied as it is", flag))
			}
		}
		return absolute(s.CallerDir, ops[0]), nil
	}
	return "", tfhosts.WithExit(tfhosts.ExitUsage, "name nodes with -- -target=NAME",
		fmt.Errorf("%s takes no operand %q", s.Verb.Name, ops[len(ops)-1]))
}

// planToFile says whether the plan changes anything. Its flags are those of the
// user and extra.
func (s *session) planToFile(ctx context.Context, out string, extra []string) (changed bool, err error) {
	return s.planWith(ctx, out, slices.Concat(extra, s.args.flags), s.Story)
}

// planWith is planToFile with all its flags; story gets what tofu tells.
func (s *session) planWith(ctx context.Context, out string, flags []string, story io.Writer) (changed bool, err error) {
	if err := s.fault("plan"); err != nil {
		return false, err
	}
	s.step("plan", "planning")
	args := append(s.planArgs(out, flags), "-detailed-exitcode")
	code, err := s.runTofu(ctx, "plan", args, story, nil)
	if err != nil {
		return false, err
	}
	switch code {
	case 0:
		return false, nil
	case 2:
		return true, nil
	}
	if story != s.Story {
		s.showFailure("plan")
	}
	return false, s.tofuError("plan", code)
}

// applyPlan builds and applies a plan that was made with the extra flags, wave by
// wave where it changes nodes of several. stale: tofu refused it because the
// state is no longer the one that was planned from; nothing was done then.
func (s *session) applyPlan(ctx context.Context, plan string, extra []string) (changes []tofu.NodeChange, stale bool, err error) {
	if changes, err = s.review(ctx, plan); err != nil {
		return nil, false, err
	}
	if parts := s.stages(changes); len(parts) > 1 {
		changes, err = s.applyStages(ctx, parts, changes, extra)
		return changes, false, err
	}
	stale, err = s.execute(ctx, plan)
	return changes, stale, err
}

// review tells what a plan does, asks where that was wanted, and builds it.
func (s *session) review(ctx context.Context, plan string) (changes []tofu.NodeChange, err error) {
	if changes, err = s.engine.NodeChanges(ctx, s.runDir, plan, s.env); err != nil {
		return nil, err
	}
	for _, c := range changes {
		if c.Leaves && s.Verb.Name == "apply" && s.Setup.Self != nil && c.Name == s.Setup.Self.Node {
			return nil, tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts destroy moves the state off it first",
				fmt.Errorf("the plan removes %q, which serves the state of this graph", c.Name))
		}
	}
	s.showLeaving(changes)
	if err := s.build(ctx, changes); err != nil {
		return nil, err
	}
	s.showDiffs(ctx, changes)
	if err := s.showRestarts(ctx, changes); err != nil {
		return nil, err
	}
	if err := s.confirm(fmt.Sprintf("%s as planned above?", s.Verb.Name)); err != nil {
		return nil, err
	}
	s.rememberChanges(changes)
	return changes, nil
}

// confirm asks where that was wanted; ErrDeclined is a no.
func (s *session) confirm(question string) error {
	if s.Ask == nil || s.args.autoApprove {
		return nil
	}
	ok, err := s.Ask(question)
	if err == nil && !ok {
		err = ErrDeclined
	}
	return err
}

// execute applies a plan file whose systems are built; stale is that of applyPlan.
func (s *session) execute(ctx context.Context, plan string) (stale bool, err error) {
	if err := s.reopenSocket(); err != nil {
		return false, err
	}
	if err := s.fault("apply"); err != nil {
		return false, err
	}
	s.step("apply", "applying")
	posts, verdicts := s.relay.Stats().Posts, len(s.results.all())
	args := []string{"apply", "-input=false", s.args.lockTimeout, s.args.parallelism}
	if s.args.json {
		args = append(args, "-json")
	}
	code, err := s.runTofu(ctx, "apply", append(args, plan), s.Story, nil)
	if s.hand != nil {
		// tofu is gone; deploys that it left running are finished here.
		err = errors.Join(err, s.hand.Close())
		s.hand = nil
	}
	if ferr := s.fault("apply.done"); ferr != nil {
		return false, errors.Join(err, ferr)
	}
	path, serr := s.saveErrored()
	if serr != nil {
		return false, errors.Join(err, tfhosts.WithExit(tfhosts.ExitSalvage, "", serr))
	}
	if path != "" {
		return false, errors.Join(err, salvageError(path, errors.New("the backend did not take it")))
	}
	if code == 0 {
		return false, err
	}
	// An apply that stored anything was not refused.
	if err == nil && len(s.results.all()) == verdicts && s.relay.Stats().Posts == posts && !s.interrupted() && s.isStale(plan) {
		return true, nil
	}
	return false, errors.Join(err, s.tofuError("apply", code))
}

// isStale compares the state that a plan file holds with the one that the
// relay saw last. An unreadable plan is not stale: tofu's own error stands.
func (s *session) isStale(plan string) bool {
	r, err := zip.OpenReader(plan)
	if err != nil {
		return false
	}
	defer r.Close()
	f, err := r.Open("tfstate")
	if err != nil {
		return false
	}
	defer f.Close()
	planned, err := io.ReadAll(f)
	if err != nil {
		return false
	}
	now, ok := s.relay.LastState()
	if !ok {
		return false
	}
	was, is := gjson.GetManyBytes(planned, "lineage", "serial"), gjson.GetManyBytes(now, "lineage", "serial")
	return was[0].Str != is[0].Str || was[1].Int() != is[1].Int()
}

// build builds all systems of a plan in one go, before the apply, but for those
// that this run built before. A system that does not build fails its own node and
// no other. Memory stays bounded: identify evaluates one node after the other, and
// one nix builds all derivations.
func (s *session) build(ctx context.Context, changes []tofu.NodeChange) error {
	var identities []string
	seen := map[string]bool{}
	for _, c := range changes {
		id := c.After.ConfigIdentity
		if _, built := s.built[id]; built || !c.Deploys || seen[id] || s.Setup.Nodes[c.Name].Runner.BuildOn == "target" {
			continue
		}
		seen[id] = true
		identities = append(identities, id)
	}
	if len(identities) == 0 {
		return nil
	}
	buildCtx, stop := s.untilInterrupt(ctx)
	built, err := s.Worker.Build(buildCtx, identities)
	stop()
	if s.interrupted() {
		return tfhosts.WithExit(tfhosts.ExitInterrupted, "run the same command again; nothing was changed", errors.New("interrupted during the build"))
	}
	if err != nil {
		return fmt.Errorf("building the systems: %w", err)
	}
	s.byNode.Lock()
	defer s.byNode.Unlock()
	if s.built == nil {
		s.built = map[string]Built{}
	}
	maps.Copy(s.built, built)
	return nil
}

// rememberChanges lets deployNode name a node of a saved plan whose entry in
// the setup has changed since.
func (s *session) rememberChanges(changes []tofu.NodeChange) {
	s.byNode.Lock()
	defer s.byNode.Unlock()
	for _, c := range changes {
		if !c.Deploys {
			continue
		}
		n := s.nodes[c.Name]
		n.NixosConf, n.Host, n.ConfigIdentity = c.After.NixosConf, c.After.Host, c.After.ConfigIdentity
		n.HostKey, n.SSHOpts = c.After.HostKey, c.After.SSHOpts
		s.nodes[c.Name] = n
	}
}

// deployNode is what a handed-over node comes to. The six variables name it:
// no two nodes share a host and port.
func (s *session) deployNode(ctx context.Context, node tfhosts.Node, drop <-chan struct{}) tfhosts.Verdict {
	name, identity, built := s.nameOf(node)
	node.ConfigIdentity = identity
	verdict := s.Worker.Deploy(ctx, DeployRequest{
		Name: name, Node: node, Settings: s.Setup.DeploySettings(name), Built: built, Drop: drop,
	})
	s.results.add(verdict)
	return verdict
}

// nameOf finds the node of a provisioner's variables, and what was built for it.
// One that is not known goes by its host.
func (s *session) nameOf(node tfhosts.Node) (name, identity string, built Built) {
	s.byNode.Lock()
	defer s.byNode.Unlock()
	for candidate, n := range s.nodes {
		if n.Host == node.Host && n.SSHOpts == node.SSHOpts && n.NixosConf == node.NixosConf && n.HostKey == node.HostKey {
			return candidate, n.ConfigIdentity, s.built[n.ConfigIdentity]
		}
	}
	return node.Host, "", s.built[""]
}
