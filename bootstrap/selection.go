package bootstrap

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// selection is what of the graph a run is limited to.
type selection struct {
	// limits are the -target flags of --on and --on-failed; none is the whole
	// graph.
	limits []string
	// nothing: --on-failed, and no node failed.
	nothing bool
}

// checkSelection refuses what --on and --on-failed can not go with, and gives
// the names that --on selects, in all groups and turned off or not; nil without
// it. Every error is exit 64.
func (c *Config) checkSelection(args *arguments) ([]string, error) {
	option := "--on"
	switch {
	case c.OnFailed && c.Verb.Name != "apply" && c.Verb.Name != "plan":
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "leave --on-failed out", fmt.Errorf("--on-failed: %s does not deploy", c.Verb.Name))
	case len(c.On) > 0 && !c.Verb.Selects:
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "leave --on out", fmt.Errorf("--on: %s is not limited to nodes", c.Verb.Name))
	case c.OnFailed:
		option = "--on-failed"
	case len(c.On) == 0:
		return nil, nil
	}
	for _, flag := range args.flags {
		if narrows(flag) {
			return nil, tfhosts.WithExit(tfhosts.ExitUsage, "use one of the two", fmt.Errorf("%s together with %s", option, flag))
		}
	}
	if c.Verb.Name == "apply" && len(args.operands) > 0 {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "give it to the plan: tf-hosts plan "+option+" … -- -out="+args.operands[0],
			fmt.Errorf("%s: a saved plan is applied as it is", option))
	}
	if len(c.On) == 0 {
		return nil, nil
	}
	return tfhosts.Select(c.Setup.Nodes, c.On)
}

// narrows: a flag of OpenTofu's that limits a plan to some resources.
func narrows(flag string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
	switch name {
	case "target", "exclude", "target-file", "exclude-file":
		return true
	}
	return false
}

// choose turns --on and --on-failed into the limits of this graph. A node that a
// submission turns off can be selected, too: it leaves the graph then.
func (s *session) choose() error {
	names, err := s.checkSelection(s.args)
	if err != nil {
		return err
	}
	var members []string
	for _, name := range tfhosts.SortedNames(s.Setup.Nodes) {
		if s.member(name) {
			members = append(members, name)
		}
	}
	chosen := slices.Clone(members)
	if names != nil {
		chosen = slices.DeleteFunc(chosen, func(name string) bool { return !slices.Contains(names, name) })
	}
	if s.OnFailed {
		record, err := ReadRecord(s.workDir)
		if err != nil {
			return tfhosts.WithExit(tfhosts.ExitFailed, "leave --on-failed out; the next apply writes them anew", err)
		}
		chosen = slices.DeleteFunc(chosen, func(name string) bool {
			last, ok := record.Nodes[name]
			return !ok || !last.Failed()
		})
		s.nothing = len(chosen) == 0
	}
	if len(chosen) < len(members) {
		s.limits = targets(chosen)
	}
	return nil
}

// targets are the -target flags of nodes.
func targets(names []string) []string {
	flags := make([]string, 0, len(names))
	for _, name := range names {
		flags = append(flags, "-target="+tfhosts.NodeAddress(name))
	}
	return flags
}

// selectedGroups keeps the groups in which --on selects a node.
func (c *Config) selectedGroups(args *arguments, groups []string) ([]string, error) {
	names, err := c.checkSelection(args)
	if err != nil || names == nil {
		return groups, err
	}
	with := slices.DeleteFunc(slices.Clone(groups), func(group string) bool {
		return !slices.ContainsFunc(names, func(name string) bool { return c.Setup.Nodes[name].Group == group })
	})
	if len(with) == 0 {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "leave --group out, or select nodes of that group",
			errors.New("--on selects no node of the group "+strings.Join(groups, ", ")))
	}
	return with, nil
}
