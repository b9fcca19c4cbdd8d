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
