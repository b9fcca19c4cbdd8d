package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// wave is one of the setup's waves.
type wave struct {
	title string // "wave 1"
	nodes map[string]bool
}

// readWaves gives the setup's waves for an apply, nil where it is made at once:
// for other verbs, a saved plan and with NoWaves. A pattern that matches no node
// of the setup, in whatever group, turned off or not, is exit 64.
func (c *Config) readWaves(args *arguments) ([]wave, error) {
	if c.Verb.Name != "apply" || len(args.operands) > 0 || c.NoWaves {
		return nil, nil
	}
	var waves []wave
	var errs []error
	for i, patterns := range c.Setup.Runner.Waves {
		names, err := tfhosts.Select(c.Setup.Nodes, patterns)
		if err != nil {
			errs = append(errs, fmt.Errorf("runner.waves[%d]: %w", i, err))
			continue
		}
		w := wave{title: fmt.Sprintf("wave %d", i+1), nodes: map[string]bool{}}
		for _, name := range names {
			w.nodes[name] = true
		}
		waves = append(waves, w)
	}
	return waves, errors.Join(errs...)
}

// stage is the part of a plan that is applied at once: a wave's, or the last
// part, which is everything else.
type stage struct {
	title string
	nodes []string // those that change
	last  bool
}

func (p stage) String() string { return p.title + " (" + strings.Join(p.nodes, ", ") + ")" }

// stages parts the changes of a plan. A wave without changes is none, a node of
// two waves is in the first, and what leaves the graph is in no wave. The last
// part takes everything else in the graph with it.
func (s *session) stages(changes []tofu.NodeChange) []stage {
	var parts []stage
	placed := map[string]bool{}
	for _, w := range s.waves {
		part := stage{title: w.title}
		for _, c := range changes {
			if c.Deploys && w.nodes[c.Name] && !placed[c.Name] {
				placed[c.Name] = true
				part.nodes = append(part.nodes, c.Name)
			}
		}
		if len(part.nodes) > 0 {
			parts = append(parts, part)
		}
	}
	rest := stage{title: "last wave"}
	for _, c := range changes {
		if !placed[c.Name] {
			rest.nodes = append(rest.nodes, c.Name)
		}
	}
	if len(rest.nodes) > 0 {
		parts = append(parts, rest)
	}
	if len(parts) > 0 {
		parts[len(parts)-1].last = true
	}
	return parts
}

// applyStages applies the parts of a reviewed plan, made with the extra flags,
// one after the other. A part in which a node failed is the last.
func (s *session) applyStages(ctx context.Context, parts []stage, reviewed []tofu.NodeChange, extra []string) (changes []tofu.NodeChange, err error) {
	var begun []string
	for i, part := range parts {
		var of []tofu.NodeChange
		after := parts[i:]
		if s.interrupted() {
			err = tfhosts.WithExit(tfhosts.ExitInterrupted, "run the same command again; it goes on from here",
				fmt.Errorf("interrupted before the %s", part.title))
		} else if err = s.fault("wave.begin"); err == nil {
			after = parts[i+1:]
			s.phase(part.title, strings.Join(part.nodes, ", "))
			of, err = s.applyStage(ctx, part, i, without(reviewed, changes), s.stageFlags(part, begun, extra))
			begun = append(begun, part.nodes...)
		}
		changes = append(changes, of...)
		switch {
		case err != nil && s.interrupted():
			for _, c := range without(reviewed, changes) {
				if c.Deploys { // its verdict is that of finish: dropped
					changes = append(changes, c)
				}
			}
			return changes, err
		case err != nil || s.anyFailed(of):
			s.leaveUnbegun(part, after)
			return changes, err
		}
	}
	return changes, nil
}

// leaveUnbegun names the parts that do not begin.
func (s *session) leaveUnbegun(failed stage, parts []stage) {
	if len(parts) == 0 {
		return
	}
	var names []string
	for _, part := range parts {
		names = append(names, part.String())
		s.unbegun = append(s.unbegun, part.nodes...)
	}
	slices.Sort(s.unbegun)
	s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "wave.begin", Message: fmt.Sprintf(
		"%s failed; not begun: %s", failed.title, strings.Join(names, ", "))})
}

// stageFlags are the planning flags of a part: a wave has targets of its own in
// place of the user's limits, and a -replace goes with its node, once.
func (s *session) stageFlags(part stage, begun, extra []string) []string {
	var flags []string
	if !part.last {
		flags = targets(part.nodes)
	}
	for _, flag := range slices.Concat(extra, s.args.flags) {
		address, replaces := strings.CutPrefix(flag, "-replace=")
		node := nodeOf(address)
		switch {
		case replaces && (slices.Contains(begun, node) || !part.last && !slices.Contains(part.nodes, node)):
		case narrows(flag) && !part.last:
		default:
			flags = append(flags, flag)
		}
	}
	return flags
}

// applyStage plans one part and applies it: the state moved on since the whole
// was planned. The review showed its changes; what is beyond those that are still
// to come is shown, and asked for again where that was wanted.
func (s *session) applyStage(ctx context.Context, part stage, number int, reviewed []tofu.NodeChange, flags []string) ([]tofu.NodeChange, error) {
	for try := range 2 {
		plan := filepath.Join(s.runDir, fmt.Sprintf("%s-wave-%d-%d", planFile, number+1, try))
		changed, err := s.planWith(ctx, plan, flags, io.Discard)
		if err != nil || !changed {
			return nil, err
		}
		changes, err := s.engine.NodeChanges(ctx, s.runDir, plan, s.env)
		if err != nil {
			return nil, err
		}
		if err := s.build(ctx, changes); err != nil {
			return nil, err
		}
		if more := beyond(reviewed, changes); len(more) > 0 {
			s.showLeaving(without(changes, reviewed))
			s.showDiffs(ctx, without(changes, reviewed))
			if err := s.confirm(fmt.Sprintf("%s also, in the %s?", strings.Join(more, ", "), part.title)); errors.Is(err, ErrDeclined) {
				return nil, fmt.Errorf("the %s was not confirmed; what came before it stays", part.title)
			} else if err != nil {
				return nil, err
			}
		}
		s.rememberChanges(changes)
		stale, err := s.execute(ctx, plan)
		if !stale {
			return changes, err
		}
		s.notice("the state moved on since the plan; planning again")
	}
	return nil, movedOnAgain()
}

// without are the changes of nodes that others do not name.
func without(changes, others []tofu.NodeChange) []tofu.NodeChange {
	return slices.DeleteFunc(slices.Clone(changes), func(c tofu.NodeChange) bool {
		return slices.ContainsFunc(others, func(o tofu.NodeChange) bool { return o.Name == c.Name })
	})
}

// anyFailed: one of the changes ended in a failed verdict.
func (s *session) anyFailed(changes []tofu.NodeChange) bool {
	all := s.results.all()
	return slices.ContainsFunc(changes, func(c tofu.NodeChange) bool {
		v, ok := all[c.Name]
		return ok && v.Failed()
	})
}
