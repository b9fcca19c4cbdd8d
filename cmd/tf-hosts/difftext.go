package main

import (
	"fmt"
	"strings"

	"github.com/dustin/go-humanize"

	tfhosts "fediversity.eu/tf-hosts"
)

// diffShown is how many packages of a node's closure diff are listed.
const diffShown = 16

// diffLines is a closure diff for a person: what changes in all, then the
// packages, changed ones first. --json has all of them.
func diffLines(d *tfhosts.Diff) []string {
	switch {
	case d.Unavailable != "":
		return []string{"  no closure diff: " + d.Unavailable}
	case d.Old == d.New:
		return []string{"  the same system"}
	}
	lines := []string{fmt.Sprintf("  %d changed, %d added, %d removed, %d rebuilt; %s to %s",
		len(d.Changed), len(d.Added), len(d.Removed), d.Rebuilt, delta(d.SizeDelta), humanize.IBytes(uint64(max(d.NewSize, 0))))}
	for _, c := range d.Changed {
		lines = append(lines, packageLine("~", c, versions(c.Old)+" → "+versions(c.New)))
	}
	for _, c := range d.Added {
		lines = append(lines, packageLine("+", c, versions(c.New)))
	}
	for _, c := range d.Removed {
		lines = append(lines, packageLine("-", c, versions(c.Old)))
	}
	if more := len(lines) - 1 - diffShown; more > 0 {
		lines = append(lines[:1+diffShown], fmt.Sprintf("  and %d more", more))
	}
	return lines
}

func packageLine(sign string, c tfhosts.PackageChange, version string) string {
	line := "  " + sign + " " + c.Name
	if len(c.Old)+len(c.New) > 0 {
		line += ": " + version
	}
	return line + ", " + delta(c.SizeDelta)
}

func versions(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

// delta is a change of size with its sign.
func delta(n int64) string {
	if n < 0 {
		return "-" + humanize.IBytes(uint64(-n))
	}
	return "+" + humanize.IBytes(uint64(n))
}
