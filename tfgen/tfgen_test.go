package tfgen_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fediversity.eu/tf-hosts/tfgen"
	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestGraphGolden(t *testing.T) {
	for name, o := range map[string]tfgen.Options{
		"plain":  {DeployRunner: []string{"/usr/bin/tf-hosts", "run"}, Bash: "/bin/sh"},
		"prefix": {DeployRunner: []string{"env", "A=b & c", "nice", "/opt/tf hosts/tf-hosts", "run"}, Bash: "/nix/store/00000000000000000000000000000000-bash-5.2/bin/bash"},
		"hostile": {
			DeployRunner: []string{"run", "${path.cwd}", "%{ if true }", "it's", "<&>", "a\nb", "$${x}", "%%{y}", ""},
			Bash:         "/opt/${x}/sh",
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tfgen.Graph(o)
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join("testdata", name+".tf.json")
			if *update {
				if err := os.WriteFile(file, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("Graph(%s) (-want +got):\n%s", name, diff)
			}
		})
	}
}

func TestGraphRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		o    tfgen.Options
		want string
	}{
		"no command":     {tfgen.Options{Bash: "/bin/sh"}, "has no command"},
		"empty command":  {tfgen.Options{Bash: "/bin/sh", DeployRunner: []string{""}}, "has no command"},
		"no shell":       {tfgen.Options{DeployRunner: []string{"run"}}, "absolute path"},
		"relative shell": {tfgen.Options{DeployRunner: []string{"run"}, Bash: "bash"}, "absolute path"},
		"NUL in a word":  {tfgen.Options{DeployRunner: []string{"run", "a\x00b"}, Bash: "/bin/sh"}, "NUL"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := tfgen.Graph(c.o)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Graph(%+v) = %v, want an error with %q", c.o, err, c.want)
			}
		})
	}
}
