package bootstrap

import (
	"context"
	"errors"

	tfhosts "fediversity.eu/tf-hosts"
)

// GroupsOf are the groups of a setup's nodes, sorted. It is empty where a node
// has none: "all" refuses such a setup.
func GroupsOf(s *tfhosts.Setup) []string {
	groups, err := (&Config{Setup: s}).groups(nil)
	if err != nil {
		return nil
	}
	return groups
}

// ExamineGroup is Examine for the graph that "all" makes of one group.
func ExamineGroup(ctx context.Context, cfg Config, group string) (*Examination, error) {
	own, err := groupSetup(cfg.Setup, group)
	if err != nil {
		return &Examination{}, tfhosts.WithExit(tfhosts.ExitUsage, "correct the addresses in the setup file", err)
	}
	cfg.Setup, cfg.group = own, group
	cfg.SelfBackend = own.Self != nil && own.Nodes[own.Self.Node].Group == group
	return Examine(ctx, cfg)
}

// AddressesInUse says which addresses hold states that this machine knows of:
// the setup's own (plain), or those of its groups.
func AddressesInUse(s *tfhosts.Setup, stateDir string) (plain, groups bool, err error) {
	dir := WorkDir(stateDir, s.Backend.Address)
	plain, perr := inUse(dir)
	have, gerr := readGrouped(dir)
	if err := errors.Join(perr, gerr); err != nil {
		return false, false, err
	}
	for _, name := range tfhosts.SortedNames(have.Groups) {
		used, err := inUse(WorkDir(stateDir, have.Groups[name]))
		if err != nil {
			return false, false, err
		}
		groups = groups || used
	}
	return plain, groups, nil
}
