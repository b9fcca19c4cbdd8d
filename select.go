package tfhosts

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// Select gives the names of the nodes that patterns select, sorted. A pattern
// is a node's name, a glob over names, or @ and a glob over tags; behind ! it
// leaves its nodes out. Globs are those of path.Match, so that * matches dots,
// too. Several patterns may stand in one string, parted by commas; their order
// does not matter: what any of them leaves out is out. With exclusions alone,
// all other nodes are selected.
//
// A pattern that matches nothing is an error that names it, with ExitUsage, and
// so is a selection of nothing.
func Select(nodes map[string]SetupNode, patterns []string) ([]string, error) {
	var words []string
	for _, p := range patterns {
		for word := range strings.SplitSeq(p, ",") {
			words = append(words, strings.TrimSpace(word))
		}
	}
	in, out := map[string]bool{}, map[string]bool{}
	includes := false
	for _, word := range words {
		pattern, exclude := strings.CutPrefix(word, "!")
		matched, err := matching(nodes, pattern)
		if err != nil {
			return nil, fmt.Errorf("selecting %q: %w", word, err)
		}
		to := in
		if exclude {
			to = out
		} else {
			includes = true
		}
		for _, name := range matched {
			to[name] = true
		}
	}
	var selected []string
	for _, name := range SortedNames(nodes) {
		if (in[name] || !includes) && !out[name] {
			selected = append(selected, name)
		}
	}
	if len(selected) == 0 || len(words) == 0 {
		return nil, WithExit(ExitUsage, "name a node, a glob, or @tag",
			fmt.Errorf("selecting %q: no node is left", strings.Join(words, ",")))
	}
	return selected, nil
}

// matching lists the nodes of one pattern without its "!"; none is an error.
func matching(nodes map[string]SetupNode, pattern string) ([]string, error) {
	glob, byTag := strings.CutPrefix(pattern, "@")
	if _, err := path.Match(glob, ""); err != nil || glob == "" {
		return nil, WithExit(ExitUsage, "name a node, a glob, or @tag", fmt.Errorf("%q is no pattern", pattern))
	}
	tags := map[string]bool{}
	var names []string
	for _, name := range SortedNames(nodes) {
		words := []string{name}
		if byTag {
			words = nodes[name].Tags
		}
		for _, tag := range nodes[name].Tags {
			tags[tag] = true
		}
		if slices.ContainsFunc(words, func(w string) bool {
			ok, err := path.Match(glob, w)
			return ok && err == nil // the pattern was checked above
		}) {
			names = append(names, name)
		}
	}
	if len(names) > 0 {
		return names, nil
	}
	known, what, mark := SortedNames(nodes), "node", ""
	if byTag {
		known, what, mark = SortedNames(tags), "tag", "@"
	}
	hint := "the setup has no " + what + "s"
	if near := Near(glob, known); near != "" {
		hint = fmt.Sprintf("did you mean %q?", mark+near)
	} else if len(known) > 0 {
		shown := known[:min(len(known), 10)]
		hint = what + "s are: " + strings.Join(shown, ", ")
		if len(shown) < len(known) {
			hint += ", …"
		}
	}
	return nil, WithExit(ExitUsage, hint, fmt.Errorf("no %s matches", what))
}
