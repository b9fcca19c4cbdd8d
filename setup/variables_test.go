package setup_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/setup"
	"github.com/google/go-cmp/cmp"
)

func TestVariablesAreComplete(t *testing.T) {
	names, flags := map[string]bool{}, map[string]bool{}
	for _, v := range setup.Variables() {
		if v.Name == "" || v.Flag == "" || v.Doc == "" {
			t.Errorf("%+v: name, flag and doc are expected", v)
		}
		if names[v.Name] || flags[v.Flag] {
			t.Errorf("%s: name or flag --%s is there twice", v.Name, v.Flag)
		}
		names[v.Name], flags[v.Flag] = true, true
	}
}

func TestEnvironmentBool(t *testing.T) {
	for value, c := range map[string]struct{ set, fails bool }{
		"": {false, false}, "1": {true, false}, "0": {false, true}, "true": {false, true}, "yes": {false, true}, "01": {false, true},
	} {
		e := setup.Environment{Getenv: getenv("BOOTSTRAP=" + value)}
		got, err := e.Bool("BOOTSTRAP")
		if got != c.set || (err != nil) != c.fails {
			t.Errorf("Bool(BOOTSTRAP=%s) = %v, %v, want %v and an error: %v", value, got, err, c.set, c.fails)
		}
	}
	if got, err := (setup.Environment{Getenv: getenv("NO_COLOR=yes")}).Bool("NO_COLOR"); !got || err != nil {
		t.Errorf("Bool(NO_COLOR=yes) = %v, %v, want true", got, err)
	}
	e := setup.Environment{Flag: func(name string) (string, bool) { return "1", name == "bootstrap" }}
	if got, err := e.Bool("BOOTSTRAP"); !got || err != nil {
		t.Errorf("Bool(--bootstrap) = %v, %v, want true", got, err)
	}
}

func TestOrigins(t *testing.T) {
	o := write(t, `{"version": 1, "nodes": {}, "ssh": {"username": "ops"},
	  "http_backend": {"address": "http://u:hunter2@h/s", "password_file": "pw", "retry_max": 0}}`,
		"TF_HTTP_PASSWORD=hunter2", "TF_HTTP_CLIENT_PRIVATE_KEY_PEM=hunter2", "TF_HTTP_LOCK_METHOD=POST", "TF_HTTP_USERNAME=env",
		`DEPLOYMENT= {"x": "hunter2"}`)
	o.Flag = func(name string) (string, bool) {
		v, ok := map[string]string{"http-username": "flag", "http-key-file": "/k.pem"}[name]
		return v, ok
	}
	origins, err := setup.Origins(o)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string][2]string)
	for _, origin := range origins {
		got[origin.Name] = [2]string{origin.Value, origin.From}
	}
	for name, want := range map[string][2]string{
		"SSH_USER":                       {"ops", "file"},
		"TF_HTTP_ADDRESS":                {"http://%2A%2A%2A%2A%2A%2A%2A%2A@h/s", "file"},
		"TF_HTTP_PASSWORD":               {"********", "environment"},
		"TF_HTTP_CLIENT_PRIVATE_KEY_PEM": {"/k.pem", "flag"},
		"TF_HTTP_LOCK_METHOD":            {"POST", "environment"},
		"TF_HTTP_UNLOCK_METHOD":          {"UNLOCK", "default"},
		"TF_HTTP_USERNAME":               {"flag", "flag"},
		"TF_HTTP_RETRY_MAX":              {"0", "file"},
		"BOOTSTRAP":                      {"", "default"},
		"DEPLOYMENT":                     {"********", "environment"},
	} {
		if got[name] != want {
			t.Errorf("Origins: %s = %q, want %q", name, got[name], want)
		}
	}
	o.Path = filepath.Join(t.TempDir(), "none")
	origins, err = setup.Origins(o)
	if err == nil || len(origins) != len(setup.Variables()) {
		t.Errorf("Origins without a file = %d variables, %v, want all and an error", len(origins), err)
	}
}

func TestNodeSettings(t *testing.T) {
	got, err := setup.NodeSettings(`{"goal": "boot", "become_password_file": "p", "limits": {"copy": 7}}`, "/d")
	if err != nil {
		t.Fatal(err)
	}
	want := tfhosts.NodeSettings{Goal: "boot", BecomePasswordFile: "/d/p", Limits: tfhosts.Limits{Copy: 7}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("NodeSettings (-want +got):\n%s", diff)
	}
	for _, text := range []string{"{", "[]", `{"gaol": "boot"}`, `{"guard": 1}`, `{"become_password_file": "~/p"}`} {
		_, err := setup.NodeSettings(text, "/d")
		if tfhosts.ExitCodeOf(err) != tfhosts.ExitUsage {
			t.Errorf("NodeSettings(%s) = %v, want exit 64", text, err)
		}
	}
}

// Every key of the file that the table names is one that the schema knows.
func TestVariableKeysAreRead(t *testing.T) {
	text, err := os.ReadFile("testdata/full.json")
	if err != nil {
		t.Fatal(err)
	}
	o := write(t, string(text))
	origins, err := setup.Origins(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, origin := range origins {
		if origin.Key != "" && origin.From != setup.FromFile {
			t.Errorf("%s: nothing at %s in a file that holds every key", origin.Name, origin.Key)
		}
	}
	if !slices.ContainsFunc(origins, func(o setup.Origin) bool { return o.From == setup.FromFile }) {
		t.Error("no value comes from the file")
	}
}
