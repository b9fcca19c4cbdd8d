package bootstrap

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/durable"
)

// Record is verdict.json: the last verdict of every node of a working dir.
type Record struct {
	Version int `json:"version"`
	// Run, Verb and ExitCode are those of the last run that could deploy.
	Run      string    `json:"run"`
	Verb     string    `json:"verb"`
	ExitCode int       `json:"exit_code"`
	Started  time.Time `json:"started"`
	Ended    time.Time `json:"ended"`
	// NotBegun are nodes that the last run left as they were, since a wave before
	// theirs failed.
	NotBegun []string `json:"not_begun,omitempty"`
	// Nodes are keyed by name. A node that the last run did not deploy keeps
	// its verdict, with the Run it came from.
	Nodes map[string]NodeRecord `json:"nodes"`
}

// NodeRecord is a verdict and the run that gave it.
type NodeRecord struct {
	Run string `json:"run"`
	// Identity is the config identity that was to be deployed, Built its system.
	Identity string `json:"identity,omitempty"`
	Built    string `json:"built,omitempty"`
	// System is the one that a verdict last saw running on the host.
	System string `json:"system,omitempty"`
	// Before is the system that ran before the one that runs now: where a rollback
	// goes. Runs that changed nothing leave it as it is.
	Before string `json:"before,omitempty"`
	tfhosts.Verdict
}

// system is what runs on the host as far as verdicts know.
func (n NodeRecord) system() string {
	if n.System == "" {
		return n.NewPath
	}
	return n.System
}

// seen is the system that a verdict leaves known. One that never saw the host
// leaves what was known before, one that lost it during the activation nothing.
func seen(v tfhosts.Verdict, before NodeRecord) string {
	if v.OldPath == "" && v.NewPath == "" {
		return before.system()
	}
	return v.NewPath
}

// follows fills in Before from the record of the run before.
func (n NodeRecord) follows(last NodeRecord) NodeRecord {
	n.Before = last.Before
	changed := n.OldPath != "" && n.NewPath != "" && n.OldPath != n.NewPath
	if changed || n.Status == tfhosts.RebootPending {
		n.Before = n.OldPath
	}
	return n
}

func verdictPath(workDir string) string { return filepath.Join(workDir, "verdict.json") }

// ReadRecord reads verdict.json of a working dir. Without one it is empty.
func ReadRecord(workDir string) (*Record, error) {
	path := verdictPath(workDir)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &Record{Version: 1, Nodes: map[string]NodeRecord{}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the verdicts: %w", err)
	}
	var r Record
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("reading the verdicts in %q: %w", path, err)
	}
	if r.Nodes == nil {
		r.Nodes = map[string]NodeRecord{}
	}
	return &r, nil
}

// write replaces verdict.json. An error leaves the old one.
func (r *Record) write(workDir string, fault durable.Fault) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the verdicts: %w", err)
	}
	return durable.Replace(verdictPath(workDir), append(b, '\n'), 0o600, "verdict", fault)
}

// verdicts collects the verdicts of one run.
type verdicts struct {
	mu     sync.Mutex
	byNode map[string]tfhosts.Verdict
}

func (v *verdicts) add(verdict tfhosts.Verdict) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.byNode[verdict.Node] = verdict
}

func (v *verdicts) all() map[string]tfhosts.Verdict {
	v.mu.Lock()
	defer v.mu.Unlock()
	all := make(map[string]tfhosts.Verdict, len(v.byNode))
	for k, d := range v.byNode {
		all[k] = d
	}
	return all
}

// WriteTable prints verdicts as a table, sorted by node, with the sentence and
// the hint of each failed one below.
func WriteTable(w io.Writer, all map[string]tfhosts.Verdict) error {
	return writeTable(w, all, nil)
}

// writeTable is WriteTable with a column for the group of each node, unless
// group is nil.
func writeTable(w io.Writer, all map[string]tfhosts.Verdict, group func(node string) string) error {
	head, in := "", func(string) string { return "" }
	if group != nil {
		head, in = "GROUP\t", func(node string) string { return group(node) + "\t" }
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, head+"NODE\tVERDICT\tSECONDS\tCOPIED\tSYSTEM") //nolint:errcheck // tabwriter keeps the error for Flush
	for _, name := range tfhosts.SortedNames(all) {
		v := all[name]
		fmt.Fprintf(t, "%s%s\t%s\t%.1f\t%s\t%s\n", //nolint:errcheck // as above
			in(name), name, v.Status, v.Ended.Sub(v.Started).Seconds(), byteSize(v.BytesCopied), shortPath(v.NewPath))
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("printing the verdicts: %w", err)
	}
	for _, name := range tfhosts.SortedNames(all) {
		v := all[name]
		if !v.Failed() && v.Status != tfhosts.RebootPending {
			continue
		}
		lines := []string{v.String()}
		if len(v.FailedUnits) > 0 {
			lines = append(lines, "  failed units: "+strings.Join(v.FailedUnits, ", "))
		}
		for _, l := range v.Log {
			lines = append(lines, "  | "+l)
		}
		if v.Hint != "" {
			lines = append(lines, "  hint: "+v.Hint)
		}
		if _, err := fmt.Fprintln(w, tfhosts.Printable(strings.Join(lines, "\n"))); err != nil {
			return fmt.Errorf("printing the verdicts: %w", err)
		}
	}
	return nil
}

// droppedVerdict is that of a node whose deploy never began.
func droppedVerdict(node string) tfhosts.Verdict {
	now := time.Now()
	return tfhosts.Verdict{
		Node: node, Status: tfhosts.Dropped, Sentence: "interrupted before its deploy began",
		Hint: "run the same command again", Started: now, Ended: now,
	}
}

func byteSize(n int64) string {
	if n <= 0 {
		return "-"
	}
	return humanize.IBytes(uint64(n))
}

// shortPath cuts the store folder and most of the hash off a store path.
func shortPath(path string) string {
	base := filepath.Base(path)
	hash, name, ok := strings.Cut(base, "-")
	if path == "" || !ok || len(hash) < 8 {
		return path
	}
	return hash[:8] + "…-" + name
}
