package setup

import (
	tfhosts "fediversity.eu/tf-hosts"
)

// nodeSettings takes over the runner's settings at where, fleet-wide or of one
// node. What this version does not do is refused by name: an option that is
// read and not followed would be believed.
func (l *loader) nodeSettings(where string, entry runnerEntry) tfhosts.NodeSettings {
	l.unsupported(where, entry)
	settings := entry.NodeSettings
	settings.BecomePasswordFile = l.path(where+".become_password_file", settings.BecomePasswordFile)
	if len(settings.Become) > 0 && settings.Become[0] == "" {
		l.found.add(where+".become[0]", "the command is empty", "")
	}
	return settings
}

func (l *loader) unsupported(where string, entry runnerEntry) {
	const text = "is not supported by this version"
	if entry.Guard != nil && *entry.Guard {
		l.found.add(where+".guard", "true "+text, "leave it out, or say false")
	}
	if entry.Substitute != nil && *entry.Substitute {
		l.found.add(where+".substitute", "true "+text, "leave it out, or say false")
	}
	if len(entry.Health) > 0 {
		l.found.add(where+".health", text, "leave it out")
	}
}

// overSettings lays a node's settings over the fleet's, field by field.
func overSettings(fleet, node tfhosts.NodeSettings) tfhosts.NodeSettings {
	s := fleet
	if node.Guard != nil {
		s.Guard = node.Guard
	}
	if node.OnDegraded != "" {
		s.OnDegraded = node.OnDegraded
	}
	if node.BuildOn != "" {
		s.BuildOn = node.BuildOn
	}
	if len(node.Become) > 0 {
		s.Become = node.Become
	}
	if node.BecomePasswordFile != "" {
		s.BecomePasswordFile = node.BecomePasswordFile
	}
	if node.Substitute != nil {
		s.Substitute = node.Substitute
	}
	if node.Goal != "" {
		s.Goal = node.Goal
	}
	s.Limits = overLimits(fleet.Limits, node.Limits)
	return s
}

func overLimits(fleet, node tfhosts.Limits) tfhosts.Limits {
	pick := func(fleet, node int) int {
		if node != 0 {
			return node
		}
		return fleet
	}
	return tfhosts.Limits{
		Connect:  pick(fleet.Connect, node.Connect),
		Copy:     pick(fleet.Copy, node.Copy),
		Activate: pick(fleet.Activate, node.Activate),
		Command:  pick(fleet.Command, node.Command),
		Build:    pick(fleet.Build, node.Build),
	}
}

// NodeSettings reads text, the value of TF_HOSTS_NODE_SETTINGS, by the rules of a
// node's "runner" in the setup file. Relative paths are relative to dir, and ~ is
// refused. An error carries exit code 64.
func NodeSettings(text, dir string) (tfhosts.NodeSettings, error) {
	const where = "TF_HOSTS_NODE_SETTINGS"
	if text == "" {
		return tfhosts.NodeSettings{}, nil
	}
	checker, err := newChecker()
	if err != nil {
		return tfhosts.NodeSettings{}, err
	}
	l := loader{checker: checker, setup: &tfhosts.Setup{Dir: dir}}
	var entry runnerEntry
	if err := l.embedded(where, "/$defs/node_settings", text, &entry); err != nil {
		return tfhosts.NodeSettings{}, err
	}
	settings := l.nodeSettings(where, entry)
	if err := l.found.err(where); err != nil {
		return tfhosts.NodeSettings{}, err
	}
	return settings, nil
}
