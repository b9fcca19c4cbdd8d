package nix

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNames(t *testing.T) {
	c := client(t)
	dir := filepath.Join(t.TempDir(), "with blank")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	writeFile(t, dir, "names.nix", `{ keep, ... }: keep`)
	writeFile(t, dir, "s.json", `{"keep": ["a", "prod.b"], "x": "${throw \"spliced\"}'' \"", "n": [1, null], "none": []}`)
	submission := filepath.Join(dir, "s.json")
	for expr, want := range map[string][]string{
		`s: s.keep`:                     {"a", "prod.b"},
		`{ keep, ... }: keep # the end`: {"a", "prod.b"},
		`./names.nix`:                   {"a", "prod.b"},
		`import ./names.nix`:            {"a", "prod.b"},
		`s: [ s.x ]`:                    {`${throw "spliced"}'' "`},
		`s: s.none`:                     {},
		`let f = s: builtins.filter (n: n != "a") s.keep; in f`: {"prod.b"},
	} {
		got, err := c.Names(context.Background(), dir, expr, submission)
		if err != nil {
			t.Errorf("Names(%q): %v", expr, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("Names(%q) (-want +got):\n%s", expr, diff)
		}
	}
	for expr, want := range map[string]string{
		`s: s.nmaes`:        "nmaes",
		`s: s.n`:            "it gives [1,null]",
		`s: [ null ]`:       "it gives [null]",
		`s: null`:           "it gives null",
		`s: s`:              "it gives {",
		`s: "a"`:            `it gives "a"`,
		`s: x: []`:          "function",
		`[ "a" ]`:           "function",
		`s: s.keep) (x`:     "syntax error",
		`s: throw "is off"`: "is off",
		`./absent.nix`:      "absent.nix",
		``:                  "syntax error",
	} {
		got, err := c.Names(context.Background(), dir, expr, submission)
		if !errors.Is(err, ErrNames) || !strings.Contains(err.Error(), want) {
			t.Errorf("Names(%q) = %q, %v, want ErrNames that says %q", expr, got, err, want)
		}
	}
	none := New(Config{BinDir: dir})
	if _, err := none.Names(context.Background(), dir, `s: []`, submission); !errors.Is(err, ErrNotInstalled) {
		t.Errorf("Names without Nix = %v, want ErrNotInstalled", err)
	}
}
