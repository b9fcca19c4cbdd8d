package bootstrap

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/foreigntest"
)

// Whoever can print into an apply must not be able to put a state into the
// backend.
func TestOnlyADumpOfOpenTofuIsSalvaged(t *testing.T) {
	const state = `{"version":4,"serial":9,"lineage":"a"}`
	const why = "\n\nError: Failed to create local state file\n\nError: Failed to persist state to backend\n"
	const line = `{"@level":"info","@message":"Emergency state dump","type":"log","state":` + state + "}\n"
	const whyLines = `{"type":"diagnostic","diagnostic":{"summary":"Failed to create local state file"}}` + "\n" +
		`{"type":"diagnostic","diagnostic":{"summary":"Failed to persist state to backend"}}` + "\n"
	rows := []struct {
		name, text string
		lines      bool
		want       string
	}{
		{"on stderr", "a warning\n" + state + why, false, state},
		{"indented, as terraform's", "{\n  \"serial\": 9,\n  \"lineage\": \"a\"\n}" + why, false, "{\n  \"serial\": 9,\n  \"lineage\": \"a\"\n}"},
		{"encrypted", `{"encrypted_data":"x","serial":9,"lineage":"a"}` + why, false, `{"encrypted_data":"x","serial":9,"lineage":"a"}`},
		{"a line of -json", "{\"type\":\"version\"}\n" + line + whyLines, true, state},
		{"a state that nothing explains", state + "\n", false, ""},
		{"half of the explanation", state + "\nError: Failed to persist state to backend\n", false, ""},
		{"the explanation before it", why + state + "\n", false, ""},
		{"a provisioner's line", `terraform_data.nixos["x"] (local-exec): ` + state + why, false, ""},
		{"another line of -json with a state", `{"@message":"x","type":"log","state":` + state + "}\n" + whyLines, true, ""},
		{"a provisioner's line of -json", `{"@message":"Emergency state dump","type":"provision_progress","state":` + state + "}\n" + whyLines, true, ""},
		{"a bare state on stdout", state + why, true, ""},
		{"no line end", "{", false, ""},
		{"nothing", "", false, ""},
	}
	for _, row := range rows {
		if got := string(dumpedState([]byte(row.text), row.lines)); got != row.want {
			t.Errorf("%s: dumpedState = %q, want %q", row.name, got, row.want)
		}
	}
}

// tofu can write neither to the backend nor into its folder, and prints the
// state; the next run stores it.
func TestADumpOfOpenTofuIsStored(t *testing.T) {
	for name, args := range map[string][]string{"text": nil, "json": {"-json"}} {
		t.Run(name, func(t *testing.T) {
			r := newFaultRig(t, ours, 1, false)
			r.wantCode(t, 0, "apply")
			r.change()
			deploy := r.deploy
			r.deploy = func(req DeployRequest) tfhosts.Verdict {
				runs, err := filepath.Glob(filepath.Join(r.workDir(), "runs", "*"))
				runs = slices.DeleteFunc(runs, wasSearched)
				if err != nil || len(runs) != 1 {
					t.Errorf("living runs: %q, %v", runs, err)
				} else if err := os.Mkdir(filepath.Join(runs[0], erroredState), 0o700); err != nil {
					t.Error(err)
				}
				return deploy(req)
			}
			r.host.Fault(foreigntest.Post, foreigntest.Times(5, foreigntest.Fault{Status: 400})...)
			r.wantCode(t, tfhosts.ExitSalvage, "apply", args...)
			r.host.Calm()
			r.deploy = deploy
			// The journal has it, too; this is about the dump alone.
			if err := os.RemoveAll(filepath.Join(r.workDir(), "journal")); err != nil {
				t.Fatal(err)
			}
			if out := r.wantCode(t, 0, "apply"); !cmp.Equal(out.deployed, []string{}) {
				t.Errorf("the next apply deployed %q", out.deployed)
			}
		})
	}
}
