package bootstrap

import (
	"context"
	"fmt"
	"slices"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// redeployDrifted stands for the nodes whose hosts drifted.
const redeployDrifted = "drifted"

// checkRedeploy refuses names that are not in the setup, and a saved plan, which
// is applied as it is. Every error is exit 64.
func (c *Config) checkRedeploy(args *arguments) error {
	if len(c.Redeploy) == 0 {
		return nil
	}
	if len(args.operands) > 0 {
		return tfhosts.WithExit(tfhosts.ExitUsage, "leave one of the two out",
			fmt.Errorf("--redeploy together with %q: a saved plan is applied as it is", args.operands[0]))
	}
	for _, name := range c.Redeploy {
		if _, ok := c.Setup.Nodes[name]; ok || name == redeployDrifted {
			continue
		}
		hint := "name a node of the setup, or drifted"
		if near := tfhosts.Near(name, append(tfhosts.SortedNames(c.Setup.Nodes), redeployDrifted)); near != "" {
			hint = fmt.Sprintf("did you mean %q?", near)
		}
		return tfhosts.WithExit(tfhosts.ExitUsage, hint, fmt.Errorf("--redeploy %q: the setup has no such node", name))
	}
	return nil
}

// redeploy turns --redeploy into -replace flags of the plan. Nodes that are not
// in this graph, or out of the selection, stay as they are.
func (s *session) redeploy(ctx context.Context) error {
	if len(s.Redeploy) == 0 {
		return nil
	}
	var members []string
	for _, name := range tfhosts.SortedNames(s.nodes) {
		if len(s.limits) == 0 || slices.Contains(s.limits, targets([]string{name})[0]) {
			members = append(members, name)
		}
	}
	again := map[string]bool{}
	for _, name := range s.Redeploy {
		again[name] = true
	}
	if again[redeployDrifted] {
		drifted, err := s.drifted(ctx, members)
		if err != nil {
			return err
		}
		for _, name := range drifted {
			again[name] = true
		}
	}
	for _, name := range members {
		if again[name] {
			s.args.flags = append(s.args.flags, "-replace="+tfhosts.NodeAddress(name))
		}
	}
	return nil
}

// drifted looks at the hosts. One that can not be looked at is told and left
// as it is.
func (s *session) drifted(ctx context.Context, names []string) ([]string, error) {
	s.step("observe", "looking for hosts that drifted")
	state, err := s.stateNow(ctx)
	if err != nil {
		return nil, err
	}
	seen, err := s.observe(ctx, names, state)
	if err != nil {
		return nil, err
	}
	var drifted, told []string
	for _, o := range seen {
		switch {
		case o.Status != "":
			s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Node: o.Node, Message: tfhosts.Printable(fmt.Sprintf("not known whether it drifted: %s: %s", o.Status, o.Error))})
		case len(o.Drift) > 0:
			drifted = append(drifted, o.Node)
			told = append(told, fmt.Sprintf("%s (%s)", o.Node, strings.Join(o.Drift, ", ")))
		}
	}
	if len(drifted) == 0 {
		s.notice("no host drifted: nothing more to deploy than what changed")
		return nil, nil
	}
	s.notice("deploying again what drifted: " + strings.Join(told, "; "))
	return drifted, nil
}
