package bootstrap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	tfhosts "fediversity.eu/tf-hosts"
)

// lines passes whole lines on, each behind a prefix and in one Write, so that
// the lines of several groups never mix.
type lines struct {
	mu     sync.Mutex
	w      io.Writer
	prefix string
	rest   []byte
}

func newLines(w io.Writer, prefix string) *lines { return &lines{w: w, prefix: prefix} }

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest = append(l.rest, b...)
	end := bytes.LastIndexByte(l.rest, '\n')
	if end < 0 {
		return len(b), nil
	}
	var out bytes.Buffer
	for line := range bytes.Lines(l.rest[:end+1]) {
		out.WriteString(l.prefix)
		out.Write(line)
	}
	l.rest = append(l.rest[:0], l.rest[end+1:]...)
	if _, err := l.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(b), nil
}

// flush ends a line that has no end.
func (l *lines) flush() error {
	if len(l.rest) == 0 {
		return nil
	}
	_, err := l.Write([]byte("\n"))
	return err
}

// printAnswers prints what the groups answered, in the form that RunAll names.
func (c *Config) printAnswers(all []*graph, opts AllOptions) error {
	if len(opts.Groups) == 1 {
		return nil // printed as it came
	}
	var err error
	args, perr := parseArguments(c.Verb, c.Args, c.CallerDir, 0)
	asJSON := perr == nil && args.json
	switch {
	case c.Verb.Name == "apply" || c.Verb.Name == "state-pull" || asJSON && slices.Contains([]string{"output", "show", "validate"}, c.Verb.Name):
		err = printKeyed(c.Answer, all)
	case asJSON:
		err = printObjects(c.Answer, all)
	default:
		for _, g := range all {
			out := newLines(c.Answer, "["+g.group+"] ")
			if _, err = out.Write(g.answer.Bytes()); err == nil {
				err = out.flush()
			}
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		return fmt.Errorf("printing the answers: %w", err)
	}
	return nil
}

// printKeyed prints one document, group by group. A group without an answer is
// not in it; numbers stay as they are.
func printKeyed(w io.Writer, all []*graph) error {
	answers := map[string]json.RawMessage{}
	for _, g := range all {
		if json.Valid(g.answer.Bytes()) {
			answers[g.group] = g.answer.Bytes()
		}
	}
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(answers)
}

// printObjects gives each object of a stream its group.
func printObjects(w io.Writer, all []*graph) error {
	for _, g := range all {
		name, err := json.Marshal(g.group)
		if err != nil {
			return err
		}
		for line := range strings.Lines(g.answer.String()) {
			line = strings.TrimSpace(line)
			members, ok := strings.CutPrefix(line, "{")
			switch {
			case !ok || !json.Valid([]byte(line)):
				line = "[" + g.group + "] " + line
			case strings.TrimSpace(members) == "}":
				line = `{"group":` + string(name) + `}`
			default:
				line = `{"group":` + string(name) + `,` + members
			}
			if _, err := io.WriteString(w, line+"\n"); err != nil {
				return err
			}
		}
	}
	return nil
}

// printVerdicts prints the one table of all groups, and how each of them ended.
func (c *Config) printVerdicts(all []*graph, _ AllOptions) error {
	if c.Verb.Name != "apply" && c.Verb.Name != "destroy" {
		return nil
	}
	c.event(tfhosts.Event{Kind: tfhosts.EventPhase, Op: "verdict"})
	verdicts := verdictsOf(all)
	if len(verdicts) > 0 {
		if err := writeTable(c.Story, verdicts, func(node string) string { return c.Setup.Nodes[node].Group }); err != nil {
			return err
		}
	}
	for _, g := range all {
		c.event(tfhosts.Event{Kind: tfhosts.EventNotice, Group: g.group, Op: "verdict", Message: g.summary()})
	}
	return nil
}

// summary is how a group ended: "exit 6: 2 deployed, 1 unreachable".
func (g *graph) summary() string {
	counts := map[tfhosts.Status]int{}
	for _, v := range g.verdicts {
		counts[v.Status]++
	}
	var parts []string
	for _, status := range tfhosts.Statuses() {
		if n := counts[status]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, status))
		}
	}
	switch {
	case !g.ran:
		parts = []string{"not run"}
	case len(parts) == 0:
		parts = []string{"no node deployed"}
	}
	return fmt.Sprintf("exit %d: %s", g.code, strings.Join(parts, ", "))
}
