package tfhosts

import (
	"fmt"
	"time"
)

// Status is the outcome of one node.
type Status string

// The outcomes of a node. The first four are successes.
const (
	Unchanged      Status = "unchanged"
	Deployed       Status = "deployed"
	RebootPending  Status = "reboot_pending"
	DryRun         Status = "dry_run" // the goal dry-activate: nothing was changed
	Unreachable    Status = "unreachable"
	AuthFailed     Status = "auth_failed"
	HostKeyChanged Status = "host_key_changed"
	Locked         Status = "locked"
	BuildFailed    Status = "build_failed"
	CopyFailed     Status = "copy_failed"
	CheckRefused   Status = "check_refused"
	Timeout        Status = "timeout"
	Degraded       Status = "degraded"
	RolledBack     Status = "rolled_back"
	RollbackFailed Status = "rollback_failed"
	Dropped        Status = "dropped"
)

// statusCodes is the exit code of "tf-hosts run" for each status.
func statusCodes() map[Status]int {
	return map[Status]int{
		Unchanged: 0, Deployed: 0, RebootPending: 0, DryRun: 0,
		Unreachable: 10, AuthFailed: 11, HostKeyChanged: 12, Locked: 13,
		BuildFailed: 14, CopyFailed: 15, CheckRefused: 16, Timeout: 17,
		Degraded: 18, RolledBack: 19, RollbackFailed: 20, Dropped: 21,
	}
}

// Statuses lists all statuses in the order of their exit codes.
func Statuses() []Status {
	return []Status{
		Unchanged, Deployed, RebootPending, DryRun, Unreachable, AuthFailed, HostKeyChanged, Locked,
		BuildFailed, CopyFailed, CheckRefused, Timeout, Degraded, RolledBack, RollbackFailed, Dropped,
	}
}

// ExitCode is the exit code of "tf-hosts run" that ends with s: 0, or 10 to 21.
func (s Status) ExitCode() int {
	code, ok := statusCodes()[s]
	if !ok {
		return ExitFailed
	}
	return code
}

// Verdict is what became of one node in one run. It is one entry of
// verdict.json, and says what was done and seen, never what was asked for.
type Verdict struct {
	Node   string `json:"node"`
	Status Status `json:"status"`
	// Sentence says in one line what happened; Hint what to do about it.
	Sentence string `json:"sentence,omitempty"`
	Hint     string `json:"hint,omitempty"`
	// OldPath and NewPath are the systems that ran before and after.
	OldPath    string `json:"old_path,omitempty"`
	NewPath    string `json:"new_path,omitempty"`
	Generation int    `json:"generation,omitempty"`
	// FailedUnits are units that this deploy left failed.
	FailedUnits []string `json:"failed_units,omitempty"`
	// Health are the health checks that were made, in their order.
	Health []HealthResult `json:"health,omitempty"`
	// Tolerated: the node's settings (on_degraded = "warn") let this status pass.
	Tolerated bool `json:"tolerated,omitempty"`
	// Log is the last lines of the activation, oldest first; all that the host said
	// of a dry run.
	Log []string `json:"log,omitempty"`
	// Unit is the transient unit that activated.
	Unit string `json:"unit,omitempty"`
	// Seconds per step: connect, observe, copy, check, activate, verify, health,
	// reboot.
	Seconds     map[string]float64 `json:"seconds,omitempty"`
	BytesCopied int64              `json:"bytes_copied,omitempty"`
	Started     time.Time          `json:"started,omitzero"`
	Ended       time.Time          `json:"ended,omitzero"`
}

// Failed says whether the verdict fails its node's resource.
func (v Verdict) Failed() bool { return v.ExitCode() != 0 }

// ExitCode is the exit code of "tf-hosts run" that ends with v.
func (v Verdict) ExitCode() int {
	if v.Tolerated {
		return ExitOK
	}
	return v.Status.ExitCode()
}

// String is the verdict in one line.
func (v Verdict) String() string {
	if v.Sentence == "" {
		return fmt.Sprintf("%s: %s", v.Node, v.Status)
	}
	return fmt.Sprintf("%s: %s: %s", v.Node, v.Status, v.Sentence)
}
