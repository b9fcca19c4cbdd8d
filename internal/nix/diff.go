package nix

import (
	"maps"
	"slices"

	tfhosts "fediversity.eu/tf-hosts"
)

// sizeShown is the change of size in bytes from which on a package whose
// versions stay is listed; "nix store diff-closures" has the same.
const sizeShown = 8 << 10

// Diff compares two closures package by package. Its lists are sorted by name.
func Diff(before, after []Path) tfhosts.Diff {
	var d tfhosts.Diff
	was, is := group(before), group(after)
	names := slices.AppendSeq(slices.Collect(maps.Keys(was)), maps.Keys(is))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		a, b := was[name], is[name]
		d.OldSize += a.size
		d.NewSize += b.size
		change := tfhosts.PackageChange{
			Name: name, Old: a.versionList(), New: b.versionList(), SizeDelta: b.size - a.size,
		}
		switch {
		case a.paths == nil:
			d.Added = append(d.Added, change)
		case b.paths == nil:
			d.Removed = append(d.Removed, change)
		case !slices.Equal(change.Old, change.New), change.SizeDelta >= sizeShown, change.SizeDelta <= -sizeShown:
			d.Changed = append(d.Changed, change)
		case !maps.Equal(a.paths, b.paths):
			d.Rebuilt++
		}
	}
	d.SizeDelta = d.NewSize - d.OldSize
	return d
}

// packages are the paths of a closure that have one name.
type packages struct {
	versions map[string]bool
	paths    map[string]bool
	size     int64
}

func group(closure []Path) map[string]packages {
	byName := map[string]packages{}
	for _, p := range closure {
		name, version := p.Package()
		g := byName[name]
		if g.paths == nil {
			g.versions, g.paths = map[string]bool{}, map[string]bool{}
		}
		g.paths[p.Path] = true
		g.size += p.NarSize
		if version != "" {
			g.versions[version] = true
		}
		byName[name] = g
	}
	return byName
}

// versionList is sorted as text: it is for reading and comparing, and does not
// say which version is newer.
func (g packages) versionList() []string { return slices.Sorted(maps.Keys(g.versions)) }
