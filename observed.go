package tfhosts

import "time"

// Observed is what a look at one node saw: one row of "tf-hosts status". It says
// what is there; what is wanted comes from the state of the graph.
type Observed struct {
	Node string `json:"node"`
	// Wanted is the system that the state says was deployed last; empty where
	// nothing says so. Pending is the system of the setup, where it is another one:
	// a store path, or its derivation where only that is known.
	Wanted  string `json:"wanted,omitempty"`
	Pending string `json:"pending,omitempty"`
	// Tainted: its last deploy failed, so that Wanted is not known and the next
	// apply deploys the node again.
	Tainted bool `json:"tainted,omitempty"`
	// Running, Profile, Default and Booted are store paths. Default is empty
	// where no boot loader says it.
	Running    string `json:"running,omitempty"`
	Profile    string `json:"profile,omitempty"`
	Default    string `json:"default,omitempty"`
	Booted     string `json:"booted,omitempty"`
	Generation int    `json:"generation,omitempty"`
	// Since is when the running system was switched to, BootedAt when the host
	// started; both by the host's clock.
	Since    time.Time `json:"since,omitzero"`
	BootedAt time.Time `json:"booted_at,omitzero"`
	// NeedsReboot: kernel, initrd or init of the running system are not the
	// booted ones.
	NeedsReboot bool     `json:"needs_reboot,omitempty"`
	FailedUnits []string `json:"failed_units,omitempty"`
	// Drift are the fields that are not as wanted, sorted: running, profile,
	// default, units.
	Drift []string `json:"drift,omitempty"`
	// Status is empty for a host that answered, else why it did not:
	// Unreachable, AuthFailed, HostKeyChanged, Timeout.
	Status Status `json:"status,omitempty"`
	// Error and Hint belong to Status.
	Error string `json:"error,omitempty"`
	Hint  string `json:"hint,omitempty"`
}
