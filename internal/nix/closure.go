package nix

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// Package splits the name of a store path as nix does for "nix store
// diff-closures": the version begins behind the first dash that no letter
// follows, and an output's name at its end ("-bin", "-lib64") is no part of it.
// A name without a version is kept whole, and version is empty.
func (p Path) Package() (name, version string) {
	name = filepath.Base(p.Path)
	if _, rest, ok := strings.Cut(name, "-"); ok {
		name = rest
	}
	for i := range len(name) - 1 {
		if name[i] != '-' || isLetter(name[i+1]) {
			continue
		}
		name, version = name[:i], name[i+1:]
		if end := strings.LastIndexByte(version, '-'); end > 0 && isOutput(version[end+1:]) {
			version = version[:end]
		}
		return name, version
	}
	return name, ""
}

func isLetter(c byte) bool { return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' }

// isOutput: nix can not tell an output from a word of the version either.
func isOutput(word string) bool {
	return word == "lib32" || word == "lib64" ||
		word != "" && strings.Trim(word, "abcdefghijklmnopqrstuvwxyz") == ""
}

// Outputs maps each derivation to the store path of its system, which need not
// be there: it builds nothing. A derivation that this store lacks is left out.
func (c *Client) Outputs(ctx context.Context, drvs []string) (map[string]string, error) {
	outs, _, err := c.outputs(ctx, slices.DeleteFunc(slices.Clone(drvs), func(p string) bool { return !IsDerivation(p) }))
	return outs, err
}

func (c *Client) closuresArgv(paths []string) []string {
	return c.argv("nix", append([]string{"path-info", "--recursive", "--json"}, paths...)...)
}

// Closures lists the closure of each store path, sorted, with one call of nix.
// A path that this store lacks is left out.
func (c *Client) Closures(ctx context.Context, paths []string) (map[string][]Path, error) {
	paths = slices.DeleteFunc(slices.Clone(paths), func(p string) bool { return !IsStorePath(p) })
	slices.Sort(paths)
	paths = slices.Compact(paths)
	invalid, err := c.invalid(ctx, paths)
	if err != nil {
		return nil, err
	}
	paths = slices.DeleteFunc(paths, func(p string) bool { return slices.Contains(invalid, p) })
	if len(paths) == 0 {
		return nil, nil
	}
	out, err := c.run(ctx, c.closuresArgv(paths), nil)
	if err != nil {
		return nil, fmt.Errorf("reading %d closures: %w", len(paths), err)
	}
	all, err := parseReferences([]byte(out))
	if err != nil {
		return nil, fmt.Errorf("reading %d closures: %w", len(paths), err)
	}
	closures := make(map[string][]Path, len(paths))
	for _, p := range paths {
		if closures[p], err = reach(all, p); err != nil {
			return nil, err
		}
	}
	return closures, nil
}

// referrer is one path of nix path-info's answer.
type referrer struct {
	Path       string   `json:"path"`
	NarSize    int64    `json:"narSize"`
	References []string `json:"references"`
}

// parseReferences reads the list of Nix up to 2.18 and the object of later ones.
func parseReferences(text []byte) (map[string]referrer, error) {
	var list []referrer
	byPath := map[string]*referrer{}
	if json.Unmarshal(text, &list) == nil {
		for i, r := range list {
			byPath[r.Path] = &list[i]
		}
	} else if err := json.Unmarshal(text, &byPath); err != nil {
		return nil, fmt.Errorf("reading the answer of nix path-info: %w", err)
	}
	all := make(map[string]referrer, len(byPath))
	for path, r := range byPath {
		if r == nil { // an invalid path
			return nil, fmt.Errorf("path %q is not in the store", path)
		}
		all[path] = *r
	}
	return all, nil
}

// reach is the closure of one path among many.
func reach(all map[string]referrer, from string) ([]Path, error) {
	seen := map[string]bool{from: true}
	var closure []Path
	for todo := []string{from}; len(todo) > 0; {
		next := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		r, ok := all[next]
		if !ok {
			return nil, fmt.Errorf("reading the closure of %q: nix says nothing of %q", from, next)
		}
		closure = append(closure, Path{Path: next, NarSize: r.NarSize})
		for _, ref := range r.References {
			if !seen[ref] {
				seen[ref] = true
				todo = append(todo, ref)
			}
		}
	}
	slices.SortFunc(closure, func(a, b Path) int { return strings.Compare(a.Path, b.Path) })
	return closure, nil
}
