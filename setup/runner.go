package setup

import (
	"net"
	"net/url"
	"slices"

	tfhosts "fediversity.eu/tf-hosts"
)

// nodeSettings takes over the runner's settings at where, fleet-wide or of one
// node.
func (l *loader) nodeSettings(where string, entry runnerEntry) tfhosts.NodeSettings {
	settings := entry.NodeSettings
	settings.BecomePasswordFile = l.path(where+".become_password_file", settings.BecomePasswordFile)
	l.health(where+".health", settings.Health)
	if len(settings.Become) > 0 && settings.Become[0] == "" {
		l.found.add(where+".become[0]", "the command is empty", "")
	}
	return settings
}

// health checks what the schema can not say: how many questions a check asks,
// and that names tell checks apart.
func (l *loader) health(where string, checks []tfhosts.HealthCheck) {
	seen := make(map[string]bool)
	for i := range checks {
		c := &checks[i]
		at := element(where, i)
		asks := 0
		for _, set := range []bool{len(c.Command) > 0, c.HTTP != nil, c.TCP != "", c.Unit != ""} {
			if set {
				asks++
			}
		}
		if asks != 1 {
			l.found.add(at, "exactly one of command, http, tcp and unit is expected", "")
		}
		if c.Name != "" && seen[c.Name] {
			l.found.addf(at+".name", "%q is the name of another check", c.Name)
		}
		seen[c.Name] = true
		if c.From != "" && c.HTTP == nil && c.TCP == "" {
			l.found.add(at+".from", "only http and tcp can be asked from elsewhere", "leave it out")
		}
		if c.TCP != "" {
			if host, port, err := net.SplitHostPort(c.TCP); err != nil || host == "" || port == "" {
				l.found.addf(at+".tcp", "HOST:PORT is expected, not %q", c.TCP)
			}
		}
		if c.HTTP != nil {
			u, err := url.Parse(c.HTTP.URL)
			if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
				l.found.add(at+".http.url", "an http or https address is expected", "")
			} else if u.User != nil {
				l.found.add(at+".http.url", "user info has no place in an address", "")
			}
			c.HTTP.CAFile = l.path(at+".http.ca_file", c.HTTP.CAFile)
		}
	}
}

// overHealth lays a node's checks over the fleet's: a name that is there is
// replaced in its place, others are added.
func overHealth(fleet, node []tfhosts.HealthCheck) []tfhosts.HealthCheck {
	all := slices.Clone(fleet)
	for _, c := range node {
		i := slices.IndexFunc(all, func(other tfhosts.HealthCheck) bool { return other.Name == c.Name })
		if i < 0 {
			all = append(all, c)
			continue
		}
		all[i] = c
	}
	return all
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
	if node.OnInhibitor != "" {
		s.OnInhibitor = node.OnInhibitor
	}
	if node.RebootIfNeeded != nil {
		s.RebootIfNeeded = node.RebootIfNeeded
	}
	s.Health = overHealth(fleet.Health, node.Health)
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
		Guard:    pick(fleet.Guard, node.Guard),
		Reboot:   pick(fleet.Reboot, node.Reboot),
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
