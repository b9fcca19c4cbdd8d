package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestDiffText(t *testing.T) {
	type change = tfhosts.PackageChange
	var many []change
	for i := range 30 {
		many = append(many, change{Name: fmt.Sprintf("p%02d", i), New: []string{"1"}, SizeDelta: 1 << 10})
	}
	for name, row := range map[string]struct {
		diff tfhosts.Diff
		want []string
	}{
		"all kinds": {
			tfhosts.Diff{
				Old: "/o", New: "/n", Rebuilt: 3, OldSize: 5 << 20, NewSize: 4 << 20, SizeDelta: -1 << 20,
				Changed: []change{{Name: "lib", Old: []string{"1.0"}, New: []string{"2.0", "3.0"}, SizeDelta: -2048}, {Name: "big", SizeDelta: 9 << 10}},
				Added:   []change{{Name: "etc", SizeDelta: 5}},
				Removed: []change{{Name: "old", Old: []string{"7"}, SizeDelta: -1}},
			},
			[]string{
				"2 changed, 1 added, 1 removed, 3 rebuilt; -1.0 MiB to 4.0 MiB",
				"~ lib: 1.0 → 2.0, 3.0, -2.0 KiB",
				"~ big, +9.0 KiB",
				"+ etc, +5 B",
				"- old: 7, -1 B",
			},
		},
		"a version that comes": {
			tfhosts.Diff{Old: "/o", New: "/n", Changed: []change{{Name: "a", New: []string{"1"}}}},
			[]string{"1 changed, 0 added, 0 removed, 0 rebuilt; +0 B to 0 B", "~ a: none → 1, +0 B"},
		},
		"nothing to compare": {tfhosts.Diff{Unavailable: "it is not built here"}, []string{"no closure diff: it is not built here"}},
		"the same":           {tfhosts.Diff{Old: "/n", New: "/n"}, []string{"the same system"}},
	} {
		var b bytes.Buffer
		tell := newTeller(&b)
		tell.event(tfhosts.Event{Kind: tfhosts.EventDiff, Group: "prod", Node: "prod.a", Op: "plan", Message: "o -> n", Diff: &row.diff})
		want := "[prod] tf-hosts: prod.a: o -> n\n"
		for _, line := range row.want {
			want += "[prod] tf-hosts: prod.a:   " + line + "\n"
		}
		if diff := cmp.Diff(want, b.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	lines := diffLines(&tfhosts.Diff{Old: "/o", New: "/n", Added: many})
	if len(lines) != diffShown+2 || lines[len(lines)-1] != "  and 14 more" {
		t.Errorf("a long diff has %d lines:\n%s", len(lines), strings.Join(lines, "\n"))
	}
	if lines = diffLines(&tfhosts.Diff{Old: "/o", New: "/n", Added: many[:diffShown]}); len(lines) != diffShown+1 {
		t.Errorf("a diff that just fits has %d lines:\n%s", len(lines), strings.Join(lines, "\n"))
	}
}
