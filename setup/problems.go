package setup

import (
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// Problem is one thing that is wrong with a setup.
type Problem struct {
	// Path is a JSON path into the file, $.nodes["prod.app1"].host, or the name
	// of a variable, with a path into its value where that is JSON.
	Path string
	// Text says what is wrong: lower case, no full stop, no secret.
	Text string
	// Hint says what would be right; may be empty.
	Hint string
}

func (p Problem) String() string {
	if p.Hint == "" {
		return p.Path + ": " + p.Text
	}
	return p.Path + ": " + p.Text + " (" + p.Hint + ")"
}

// ProblemsError holds everything that is wrong with a setup, so that a user
// mends it once. Load wraps it in an ExitError of code 64.
type ProblemsError struct {
	// Path is the setup file.
	Path string
	// Problems is sorted by Path and never empty.
	Problems []Problem
}

func (e *ProblemsError) Error() string {
	if len(e.Problems) == 1 {
		return fmt.Sprintf("checking setup %q: %s", e.Path, e.Problems[0])
	}
	var b strings.Builder
	fmt.Fprintf(&b, "checking setup %q: %d problems", e.Path, len(e.Problems))
	for _, p := range e.Problems {
		b.WriteString("\n  ")
		b.WriteString(p.String())
	}
	return b.String()
}

// problems collects; its zero value is ready.
type problems struct {
	list []Problem
}

func (p *problems) add(path, text, hint string) {
	p.list = append(p.list, Problem{Path: path, Text: text, Hint: hint})
}

func (p *problems) addf(path, format string, args ...any) {
	p.add(path, fmt.Sprintf(format, args...), "")
}

// err is nil without problems. A problem of a default that several nodes
// inherit is listed once.
func (p *problems) err(file string) error {
	if len(p.list) == 0 {
		return nil
	}
	list := slices.Clone(p.list)
	slices.SortStableFunc(list, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Text, b.Text))
	})
	list = slices.Compact(list)
	return tfhosts.WithExit(tfhosts.ExitUsage, "", &ProblemsError{Path: file, Problems: list})
}

var plainKey = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// member is the JSON path of a key below path.
func member(path, key string) string {
	if plainKey.MatchString(key) {
		return path + "." + key
	}
	quoted, err := json.Marshal(key)
	if err != nil { // a string always marshals
		panic(err)
	}
	return path + "[" + string(quoted) + "]"
}

// element is the JSON path of an item of the list at path.
func element(path string, i int) string {
	return path + "[" + strconv.Itoa(i) + "]"
}

// location is the JSON path of what tokens lead to in value, below root.
func location(root string, value any, tokens []string) string {
	path := root
	for _, token := range tokens {
		switch v := value.(type) {
		case []any:
			i, err := strconv.Atoi(token)
			if err != nil || i < 0 || i >= len(v) {
				return path
			}
			path, value = element(path, i), v[i]
		case map[string]any:
			path, value = member(path, token), v[token]
		default:
			return path
		}
	}
	return path
}

// suggest is a hint that names the known word that was probably meant, or "".
func suggest(word string, known []string) string {
	best := tfhosts.Near(word, known)
	if best == "" {
		return ""
	}
	return fmt.Sprintf("did you mean %q?", best)
}
