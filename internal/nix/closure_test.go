package nix

import (
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

const hash = "/nix/store/00000000000000000000000000000000-"

func TestPackage(t *testing.T) {
	for base, want := range map[string][2]string{
		"openssl-3.0.14":              {"openssl", "3.0.14"},
		"openssl-3.0.14-bin":          {"openssl", "3.0.14"},
		"glibc-2.39-52-getent":        {"glibc", "2.39-52"},
		"gcc-13.2.0-lib64":            {"gcc", "13.2.0"},
		"linux-6.6.1-modules-shrunk":  {"linux", "6.6.1-modules"},
		"foo-unstable-2024-01-02":     {"foo-unstable", "2024-01-02"},
		"nixos-system-app-26.05.1":    {"nixos-system-app", "26.05.1"},
		"etc-hostname":                {"etc-hostname", ""},
		"unit-sshd.service":           {"unit-sshd.service", ""},
		"system-path":                 {"system-path", ""},
		"source":                      {"source", ""},
		"python3.12-requests-2.31.0":  {"python3.12-requests", "2.31.0"},
		"x-":                          {"x-", ""},
		"perl5.38.2-Foo-Bar-1.0-man":  {"perl5.38.2-Foo-Bar", "1.0"},
		"ends-in-digits-1-2-3":        {"ends-in-digits", "1-2-3"},
		"under-_score":                {"under", "_score"},
		"nixos-system-a-24.05pre-git": {"nixos-system-a", "24.05pre"},
	} {
		name, version := Path{Path: hash + base}.Package()
		if got := [2]string{name, version}; got != want {
			t.Errorf("Package(%q) = %q, want %q", base, got, want)
		}
	}
}

func TestParseReferences(t *testing.T) {
	want := map[string]referrer{
		"/nix/store/a": {Path: "/nix/store/a", NarSize: 1, References: []string{"/nix/store/a", "/nix/store/b"}},
		"/nix/store/b": {Path: "/nix/store/b", NarSize: 2},
	}
	for name, text := range map[string]string{
		"2.8 list":    `[{"path":"/nix/store/b","narSize":2},{"path":"/nix/store/a","narSize":1,"references":["/nix/store/a","/nix/store/b"]}]`,
		"2.26 object": `{"/nix/store/b":{"narSize":2,"ca":null},"/nix/store/a":{"narSize":1,"references":["/nix/store/a","/nix/store/b"]}}`,
	} {
		got, err := parseReferences([]byte(text))
		if err != nil {
			t.Errorf("parseReferences(%s): %v", name, err)
			continue
		}
		for path, r := range got {
			r.Path = path
			got[path] = r
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("parseReferences(%s) (-want +got):\n%s", name, diff)
		}
		closure, err := reach(got, "/nix/store/a")
		if diff := cmp.Diff([]Path{{"/nix/store/a", 1}, {"/nix/store/b", 2}}, closure); diff != "" || err != nil {
			t.Errorf("reach() = %v, %v (-want +got):\n%s", closure, err, diff)
		}
	}
	for _, text := range []string{`{"/nix/store/a":null}`, `7`, ``} {
		if got, err := parseReferences([]byte(text)); err == nil {
			t.Errorf("parseReferences(%s) = %v, want an error", text, got)
		}
	}
	if got, err := reach(map[string]referrer{}, "/nix/store/a"); err == nil {
		t.Errorf("reach of an unknown path = %v, want an error", got)
	}
}

func TestDiff(t *testing.T) {
	p := func(n int, base string, size int64) Path {
		return Path{Path: fmt.Sprintf("/nix/store/%032d-%s", n, base), NarSize: size}
	}
	type change = tfhosts.PackageChange
	for name, row := range map[string]struct {
		before, after []Path
		want          tfhosts.Diff
	}{
		"the same": {
			before: []Path{p(1, "a-1.0", 5)},
			after:  []Path{p(1, "a-1.0", 5)},
			want:   tfhosts.Diff{OldSize: 5, NewSize: 5},
		},
		"a new version": {
			before: []Path{p(1, "b-1.0", 5), p(2, "a-1.0", 5)},
			after:  []Path{p(3, "b-2.0", 4), p(4, "a-1.1", 8)},
			want: tfhosts.Diff{OldSize: 10, NewSize: 12, SizeDelta: 2, Changed: []change{
				{Name: "a", Old: []string{"1.0"}, New: []string{"1.1"}, SizeDelta: 3},
				{Name: "b", Old: []string{"1.0"}, New: []string{"2.0"}, SizeDelta: -1},
			}},
		},
		"one of two versions goes": {
			before: []Path{p(1, "a-2.0", 5), p(2, "a-1.0", 5)},
			after:  []Path{p(1, "a-2.0", 5)},
			want: tfhosts.Diff{OldSize: 10, NewSize: 5, SizeDelta: -5, Changed: []change{
				{Name: "a", Old: []string{"1.0", "2.0"}, New: []string{"2.0"}, SizeDelta: -5},
			}},
		},
		"added and removed": {
			before: []Path{p(1, "a-1.0", 5)},
			after:  []Path{p(2, "b-1.0", 7), p(3, "etc", 1)},
			want: tfhosts.Diff{
				OldSize: 5, NewSize: 8, SizeDelta: 3,
				Added:   []change{{Name: "b", New: []string{"1.0"}, SizeDelta: 7}, {Name: "etc", SizeDelta: 1}},
				Removed: []change{{Name: "a", Old: []string{"1.0"}, SizeDelta: -5}},
			},
		},
		"rebuilt, and grown": {
			before: []Path{p(1, "a-1.0", 5), p(2, "b", 5), p(3, "c", 9000)},
			after:  []Path{p(4, "a-1.0", 6), p(5, "b", 8197), p(3, "c", 9000)},
			want:   tfhosts.Diff{OldSize: 9010, NewSize: 17203, SizeDelta: 8193, Rebuilt: 1, Changed: []change{{Name: "b", SizeDelta: 8192}}},
		},
		"an output more of the same version": {
			before: []Path{p(1, "a-1.0", 5)},
			after:  []Path{p(1, "a-1.0", 5), p(2, "a-1.0-doc", 7)},
			want:   tfhosts.Diff{OldSize: 5, NewSize: 12, SizeDelta: 7, Rebuilt: 1},
		},
		"from nothing": {
			before: nil,
			after:  []Path{p(1, "a-1.0", 5)},
			want:   tfhosts.Diff{NewSize: 5, SizeDelta: 5, Added: []change{{Name: "a", New: []string{"1.0"}, SizeDelta: 5}}},
		},
	} {
		if diff := cmp.Diff(row.want, Diff(row.before, row.after)); diff != "" {
			t.Errorf("Diff(%s) (-want +got):\n%s", name, diff)
		}
	}
}

const packagesNix = `{ version, more ? "old" }:
let
  sh = n: script: derivation { name = n; system = builtins.currentSystem; builder = "/bin/sh"; PATH = "/bin:/usr/bin"; args = [ "-c" script ]; };
  same = sh "same-1.0" "echo NONCE > $out";
  lib = sh "lib-${version}-bin" "echo NONCE ${version} > $out";
  other = sh "${more}-3" "echo NONCE > $out";
  grown = sh "grown" "yes ${version} | head -c ${version}0000 > $out";
in sh "nixos-system-x-${version}" "mkdir -p $out/bin; echo ${same} ${lib} ${other} ${grown} > $out/bin/switch-to-configuration"
`

// TestClosuresAndTheirDiff compares real closures, and the diff with nix's own.
func TestClosuresAndTheirDiff(t *testing.T) {
	c := client(t)
	ctx := context.Background()
	dir := t.TempDir()
	writeFile(t, dir, "packages.nix", packagesNix)
	writeFile(t, dir, "1.nix", `import ./packages.nix { version = "1"; }`)
	writeFile(t, dir, "4.nix", `import ./packages.nix { version = "4"; more = "new"; }`)
	drvs := make([]string, 2)
	for i, conf := range []string{"1.nix", "4.nix"} {
		var err error
		if drvs[i], err = c.Identity(ctx, dir, conf, ""); err != nil {
			t.Fatal(err)
		}
	}
	outs, err := c.Outputs(ctx, append([]string{hash + "absent.drv", hash + "system"}, drvs...))
	if err != nil || len(outs) != 2 {
		t.Fatalf("Outputs() = %v, %v, want those of the two derivations", outs, err)
	}
	before, after := outs[drvs[0]], outs[drvs[1]]
	none, err := c.Closures(ctx, []string{before, after, hash + "absent", "relative"})
	if err != nil || len(none) != 0 {
		t.Fatalf("Closures() before the build = %v, %v, want none", none, err)
	}
	if _, err := c.Build(ctx, drvs); err != nil {
		t.Fatal(err)
	}
	closures, err := c.Closures(ctx, []string{after, before, hash + "absent", before})
	if err != nil || len(closures) != 2 {
		t.Fatalf("Closures() = %v, %v, want two", closures, err)
	}
	for _, out := range []string{before, after} {
		alone, err := c.Closure(ctx, out)
		if diff := cmp.Diff(alone, closures[out]); diff != "" || err != nil {
			t.Errorf("closure of %q (-alone +together): %v\n%s", out, err, diff)
		}
		for _, p := range closures[out] {
			wantNixSplit(t, c, p)
		}
	}

	d := Diff(closures[before], closures[after])
	var got []string
	for _, list := range [][]tfhosts.PackageChange{d.Added, d.Changed, d.Removed} {
		for _, p := range list {
			got = append(got, p.Name+" "+strings.Join(p.Old, ",")+" "+strings.Join(p.New, ","))
		}
	}
	if diff := cmp.Diff([]string{"new  3", "grown  ", "lib 1 4", "nixos-system-x 1 4", "old 3 "}, got); diff != "" {
		t.Errorf("Diff (-want +got):\n%s", diff)
	}
	printed, err := c.run(ctx, c.argv("nix", "store", "diff-closures", before, after), nil)
	if err != nil {
		t.Fatal(err)
	}
	printed = regexp.MustCompile("\x1b\\[[0-9;]*m").ReplaceAllString(printed, "")
	var theirs []string
	for line := range strings.Lines(printed) {
		name, _, _ := strings.Cut(line, ":")
		theirs = append(theirs, name)
	}
	slices.Sort(theirs)
	if diff := cmp.Diff([]string{"grown", "lib", "new", "nixos-system-x", "old"}, theirs); diff != "" {
		t.Errorf("packages that nix's own diff lists (-ours +theirs):\n%s\n%s", diff, printed)
	}
	if !strings.Contains(printed, "lib: 1 → 4") {
		t.Errorf("nix's own diff does not say what ours says of lib:\n%s", printed)
	}
}

// wantNixSplit demands nix's own split of a name; the output's name at the end
// is still there.
func wantNixSplit(t *testing.T, c *Client, p Path) {
	t.Helper()
	base := strings.TrimPrefix(p.Path, p.Path[:len(hash)])
	out, err := c.run(context.Background(), c.argv("nix-instantiate", "--eval", "--strict", "--json", "-E",
		"{ name }: builtins.parseDrvName name", "--argstr", "name", base), nil)
	var split struct{ Name, Version string }
	if err == nil {
		err = json.Unmarshal([]byte(out), &split)
	}
	name, version := p.Package()
	if err != nil || split.Name != name || split.Version != version && !strings.HasPrefix(split.Version, version+"-") {
		t.Errorf("Package(%q) = %q, %q; nix says %+v, %v", base, name, version, split, err)
	}
}
