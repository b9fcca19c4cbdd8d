package hostconn

import (
	tfhosts "fediversity.eu/tf-hosts"
)

// TargetOf is the target of a node: its entry in the graph, with the become
// settings of its runner. The error is one of ssh_opts that are no JSON list.
func TargetOf(name string, n tfhosts.Node, settings tfhosts.NodeSettings) (Target, error) {
	options, err := n.Options()
	if err != nil {
		return Target{}, err
	}
	return Target{
		Name: name, Host: n.Host, User: n.Username, KeyFile: n.KeyFile, HostKey: n.HostKey, Options: options,
		Become: Become{Argv: settings.Become, PasswordFile: settings.BecomePasswordFile},
	}, nil
}
