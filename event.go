package tfhosts

import (
	"strings"
	"time"
	"unicode"
)

// Kinds of Event.
const (
	EventStep      = "step"      // an operation on a node or on the state begins
	EventBytes     = "bytes"     // progress of a copy: Done of Total bytes
	EventVerdict   = "verdict"   // a node is finished: Verdict is set
	EventPhase     = "phase"     // a phase marker: Op is its word
	EventNotice    = "notice"    // something the operator should know
	EventWarning   = "warning"   // something the operator should act on
	EventHeartbeat = "heartbeat" // what is under way, where stderr is no terminal
	EventOutput    = "output"    // a line of OpenTofu's, with --json
	EventError     = "error"     // why the run ends as it does
	EventHint      = "hint"      // the way out of an error
	EventDiff      = "diff"      // what a deploy will change on a node: Diff is set
)

// Event is one thing that happened in a run. Libraries take a func(Event) and
// never print; the command line turns events into lines or JSON.
type Event struct {
	Time time.Time `json:"time"`
	Kind string    `json:"kind"`
	// Group is the group whose graph it concerns, under "all".
	Group string `json:"group,omitempty"`
	// Node is the dotted name, empty for what concerns the whole run.
	Node string `json:"node,omitempty"`
	// Op is the stable name of the operation: "copy", "activate.start",
	// "journal.sync". Events, fault tests and docs use the same names.
	Op string `json:"op,omitempty"`
	// Message is one line for a person: lower case, no full stop, no secret.
	Message string `json:"message,omitempty"`
	// Done and Total are bytes, for EventBytes.
	Done    int64    `json:"done,omitempty"`
	Total   int64    `json:"total,omitempty"`
	Verdict *Verdict `json:"verdict,omitempty"`
	Diff    *Diff    `json:"diff,omitempty"`
}

// Diff is what a deploy changes in the system of a node, package by package.
type Diff struct {
	// Old is the system that the last verdict saw on the host, New the one that
	// is to come: store paths. New is a derivation where its output is not known;
	// empty is unknown.
	Old string `json:"old,omitempty"`
	New string `json:"new,omitempty"`
	// Reason is why OpenTofu deploys a node whose triggers are as they were:
	// "tainted" or "requested".
	Reason string `json:"reason,omitempty"`
	// Unavailable says why nothing is known of the packages; what follows is
	// zero then.
	Unavailable string `json:"unavailable,omitempty"`
	// Added, Removed and Changed are sorted by name. Changed has other versions,
	// or a size that differs by 8 KiB or more.
	Added   []PackageChange `json:"added,omitempty"`
	Removed []PackageChange `json:"removed,omitempty"`
	Changed []PackageChange `json:"changed,omitempty"`
	// Rebuilt counts the packages that have the same versions and other paths.
	Rebuilt int `json:"rebuilt,omitempty"`
	// OldSize and NewSize are the unpacked sizes of the closures in bytes.
	OldSize   int64 `json:"old_size,omitempty"`
	NewSize   int64 `json:"new_size,omitempty"`
	SizeDelta int64 `json:"size_delta,omitempty"`
}

// PackageChange is one package of a Diff.
type PackageChange struct {
	Name string `json:"name"`
	// Old and New are the versions before and after, sorted as text; a package
	// may have several, and one without a version has none.
	Old []string `json:"old,omitempty"`
	New []string `json:"new,omitempty"`
	// SizeDelta is in bytes.
	SizeDelta int64 `json:"size_delta,omitempty"`
}

// Printable replaces control characters but tab and newline: what a host says
// must not steer the terminal that shows it.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\t' && r != '\n' {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}
