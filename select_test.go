package tfhosts

import (
	"errors"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func fleet() map[string]SetupNode {
	return map[string]SetupNode{
		"prod.app1": {Tags: []string{"web", "canary"}}, "prod.app2": {Tags: []string{"web"}},
		"prod.db": {Tags: []string{"data"}}, "test.app1": {Tags: []string{"web-test"}}, "builder": {},
	}
}

func TestSelect(t *testing.T) {
	tests := []struct {
		patterns string // blanks part repeated ones
		want     string
	}{
		{"prod.db", "prod.db"},
		{"test.app1 builder", "builder test.app1"},
		{"prod.db,prod.db", "prod.db"},
		{"prod.*", "prod.app1 prod.app2 prod.db"},
		{"*", "builder prod.app1 prod.app2 prod.db test.app1"},
		{"*.app[12]", "prod.app1 prod.app2 test.app1"},
		{"?rod.app?", "prod.app1 prod.app2"},
		{"@web", "prod.app1 prod.app2"},
		{"@web*", "prod.app1 prod.app2 test.app1"},
		{"@*", "prod.app1 prod.app2 prod.db test.app1"},
		{"prod.*,!@canary", "prod.app2 prod.db"},
		{"!@canary prod.*", "prod.app2 prod.db"},
		{"!prod.*", "builder test.app1"},
		{"!prod.*,!builder", "test.app1"},
		{"@web,builder,!prod.app2", "builder prod.app1"},
	}
	for _, tt := range tests {
		got, err := Select(fleet(), strings.Fields(tt.patterns))
		if err != nil {
			t.Errorf("Select(%q): %v", tt.patterns, err)
		}
		if d := cmp.Diff(strings.Fields(tt.want), got); d != "" {
			t.Errorf("Select(%q) (-want +got):\n%s", tt.patterns, d)
		}
	}
}

func TestSelectRefuses(t *testing.T) {
	tests := []struct{ patterns, text, hint string }{
		{"prod.app3", `selecting "prod.app3": no node matches`, `did you mean "prod.app1"?`},
		{"builder,stage.*", `selecting "stage.*": no node matches`, "nodes are: builder, prod.app1, prod.app2, prod.db, test.app1"},
		{"@wep", `selecting "@wep": no tag matches`, `did you mean "@web"?`},
		{"!@nothing", `selecting "!@nothing": no tag matches`, "tags are: canary, data, web, web-test"},
		{"web", `selecting "web": no node matches`, "nodes are: builder, prod.app1, prod.app2, prod.db, test.app1"},
		{"!*", `selecting "!*": no node is left`, "name a node, a glob, or @tag"},
		{"builder,!b*", `selecting "builder,!b*": no node is left`, "name a node, a glob, or @tag"},
		{"prod.[", `selecting "prod.[": "prod.[" is no pattern`, "name a node, a glob, or @tag"},
		{"builder,", `selecting "": "" is no pattern`, "name a node, a glob, or @tag"},
		{"@", `selecting "@": "@" is no pattern`, "name a node, a glob, or @tag"},
		{"!", `selecting "!": "" is no pattern`, "name a node, a glob, or @tag"},
		{"!!builder", `selecting "!!builder": no node matches`, `did you mean "builder"?`},
		{"", `selecting "": no node is left`, "name a node, a glob, or @tag"},
	}
	for _, tt := range tests {
		got, err := Select(fleet(), strings.Fields(tt.patterns))
		var exit *ExitError
		if !errors.As(err, &exit) {
			t.Errorf("Select(%q) = %q, %v; want an exit code", tt.patterns, got, err)
			continue
		}
		if err.Error() != tt.text || exit.Hint != tt.hint || exit.Code != ExitUsage {
			t.Errorf("Select(%q): %q, hint %q, code %d; want %q, hint %q", tt.patterns, err, exit.Hint, exit.Code, tt.text, tt.hint)
		}
	}
}

// FuzzSelect: a selection is sorted and of the setup, does not depend on order,
// and is parted from that of the same patterns turned round.
func FuzzSelect(f *testing.F) {
	for _, seed := range []string{"prod.*", "@web,!prod.app2", "!*", "[", "\\", ",", "*.app[^1]", "!@*"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		nodes := fleet()
		got, err := Select(nodes, []string{text})
		if err != nil {
			if ExitCodeOf(err) != ExitUsage || got != nil {
				t.Fatalf("Select(%q) = %q, exit %d", text, got, ExitCodeOf(err))
			}
			return
		}
		if len(got) == 0 || !slices.IsSorted(got) {
			t.Fatalf("Select(%q) = %q", text, got)
		}
		words := strings.Split(text, ",")
		slices.Reverse(words)
		again, err := Select(nodes, words)
		if err != nil || !slices.Equal(again, got) {
			t.Fatalf("Select(%q) = %q, %v; the other way round it was %q", words, again, err, got)
		}
		// By the definition, node by node.
		hit := func(pattern, name string) bool {
			glob, tag := strings.CutPrefix(pattern, "@")
			return slices.ContainsFunc(nodes[name].Tags, func(w string) bool { ok, _ := path.Match(glob, w); return ok && tag }) ||
				func() bool { ok, _ := path.Match(glob, name); return ok && !tag }()
		}
		for _, name := range SortedNames(nodes) {
			in, only := false, true
			out := false
			for _, w := range words {
				w = strings.TrimSpace(w)
				if p, exclude := strings.CutPrefix(w, "!"); exclude {
					out = out || hit(p, name)
				} else {
					only, in = false, in || hit(w, name)
				}
			}
			if want := (in || only) && !out; want != slices.Contains(got, name) {
				t.Fatalf("Select(%q) = %q; %q: want %v", text, got, name, want)
			}
		}
	})
}
