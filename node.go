package tfhosts

import (
	"encoding/json"
	"fmt"
	"sort"
)

// Node is one host as the OpenTofu graph sees it: the entry of the variable
// "nodes" under the host's dotted deployment name (spec 004, "Node entry").
type Node struct {
	// NixosConf says what the host runs: a built system in the Nix store, a
	// .drv, a .nix file that evaluates to a NixOS system, or
	// FLAKE#nixosConfigurations.NAME. It enters the graph as it was written.
	NixosConf string `json:"nixos_conf"`
	// ConfigIdentity changes exactly when the system changes: a store path or
	// .drv is itself, anything else is its toplevel's derivation path.
	ConfigIdentity string `json:"config_identity"`
	Username       string `json:"username"`
	Host           string `json:"host"`
	// KeyFile is an absolute path of a private key, or empty for the user's
	// own keys and agent. It is no trigger.
	KeyFile string `json:"key_file"`
	// HostKey is the pinned public host key ("ssh-ed25519 AAAA…"), or empty to
	// accept the key of the first connection.
	HostKey string `json:"host_key"`
	// SSHOpts is a JSON list of bare OpenSSH Key=Value options, as a string:
	// it travels through the environment of a provisioner (spec ssh FR-018).
	SSHOpts string `json:"ssh_opts"`
}

// Options decodes SSHOpts. An empty string is no options.
func (n Node) Options() ([]string, error) {
	if n.SSHOpts == "" {
		return nil, nil
	}
	var opts []string
	if err := json.Unmarshal([]byte(n.SSHOpts), &opts); err != nil {
		return nil, fmt.Errorf("reading ssh_opts %q: a JSON list of Key=Value strings is expected: %w", n.SSHOpts, err)
	}
	return opts, nil
}

// EncodeOptions writes options in the form of Node.SSHOpts.
func EncodeOptions(opts []string) string {
	if len(opts) == 0 {
		return "[]"
	}
	b, err := json.Marshal(opts)
	if err != nil { // a []string always marshals
		panic(err)
	}
	return string(b)
}

// Env is the six variables, sorted by name, that the provisioner of a node sets
// for "tf-hosts run" (FR-003). config_identity is not one of them.
func (n Node) Env() []string {
	return []string{
		"host=" + n.Host,
		"host_key=" + n.HostKey,
		"key_file=" + n.KeyFile,
		"nixos_conf=" + n.NixosConf,
		"ssh_opts=" + n.SSHOpts,
		"username=" + n.Username,
	}
}

// SortedNames lists the keys of nodes in order.
func SortedNames[V any](nodes map[string]V) []string {
	names := make([]string, 0, len(nodes))
	for name := range nodes {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}
