package bootstrap

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
	"github.com/tidwall/sjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/foreigntest"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
)

// pulled writes the state of a rig, changed in some fields, to a file.
func pulled(r *rig, name string, fields map[string]any) string {
	r.tb.Helper()
	state := []byte(r.want(0, "state-pull").answer)
	for path, v := range fields {
		var err error
		if state, err = sjson.SetBytes(state, path, v); err != nil {
			r.tb.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(r.dir, name), state, 0o600); err != nil {
		r.tb.Fatal(err)
	}
	return name
}

func stateOf(r *rig) gjson.Result {
	r.tb.Helper()
	return gjson.Parse(r.want(0, "state-pull").answer)
}

func TestStatePushForce(t *testing.T) {
	for _, flag := range []string{"-force", "--force", "-force=true", "-force=1"} {
		t.Run(flag, func(t *testing.T) {
			r := newRig(t, 1)
			r.want(0, "apply")
			old := pulled(r, "old", nil)
			was := stateOf(r)
			r.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "/nix/store/other.drv" })
			r.want(0, "apply")
			r.want(0, "taint", "prod.app0")
			r.want(0, "untaint", "prod.app0")
			newest := stateOf(r).Get("serial").Int()
			if out := r.want(tfhosts.ExitFailed, "state-push", old); stateOf(r).Get("serial").Int() != newest {
				t.Fatalf("a push of an older state was taken without force: %v", out.err)
			}
			r.want(tfhosts.ExitFailed, "state-push", "-force=false", old)
			r.want(0, "state-push", flag, old)
			// OpenTofu raises the serial of a pushed file by one.
			if is := stateOf(r); is.Get("serial").Int() != was.Get("serial").Int()+1 || is.Get("resources").Raw != was.Get("resources").Raw {
				t.Errorf("the backend holds serial %s, want one over %s, as pushed", is.Get("serial").Raw, was.Get("serial").Raw)
			}
			// The ledger follows, and what was rewound is not taken for lost.
			if out := r.want(0, "apply"); len(out.deployed) != 1 {
				t.Errorf("the next apply deployed %q, want what was rewound", out.deployed)
			}
		})
	}
}

func TestAForcedPushIsWhatARestorePutsBack(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	old := pulled(s.rig, "old", nil)
	for _, verb := range []string{"taint", "untaint", "taint"} {
		s.want(0, verb, "prod.app0")
	}
	s.want(0, "state-push", "-force", old)
	s.stop()
	if err := os.RemoveAll(s.states); err != nil {
		t.Fatal(err)
	}
	s.start()
	if code, err := s.restore(RestoreOptions{}); code != 0 {
		t.Fatalf("restore: %d, %v", code, err)
	}
	want, err := os.ReadFile(filepath.Join(s.dir, old))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.state().Get("serial").Int(), gjson.GetBytes(want, "serial").Int()+1; got != want {
		t.Errorf("restored serial %d, want the pushed one, %d", got, want)
	}
}

func TestAPushOfAnotherLineageNeedsForce(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	other := pulled(r, "other", map[string]any{"lineage": "another"})
	r.want(tfhosts.ExitFailed, "state-push", other)
	if got := stateOf(r).Get("lineage").Str; got == "another" {
		t.Fatal("the lineage was changed without force")
	}
	r.want(0, "state-push", "-force", other) // without credentials everybody is admin
	if got := stateOf(r).Get("lineage").Str; got != "another" {
		t.Errorf("lineage %q, want the pushed one", got)
	}
	r.want(0, "apply")
}

// A refused push leaves nothing that waits.
func TestARefusedPush(t *testing.T) {
	r := newRig(t, 1)
	files, err := store.OpenFiles(filepath.Join(r.dir, "states-of-users"), store.FilesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := files.Close(); err != nil {
			t.Error(err)
		}
	})
	handler, err := server.New(server.Config{Store: files, Users: []server.User{{Name: "ci", Password: "pw"}}})
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(handler)
	t.Cleanup(srv.Close)
	r.setup.Backend = tfhosts.HTTPBackend{Address: srv.URL + "/state/test/graph", Username: "ci", Password: "pw"}
	r.want(0, "apply")
	old := pulled(r, "old", nil)
	r.want(0, "taint", "prod.app0")
	tainted := stateOf(r).Get("serial").Int()
	for _, file := range []string{old, pulled(r, "other", map[string]any{"lineage": "another"})} {
		out := r.want(tfhosts.ExitFailed, "state-push", "-force", file)
		if !strings.Contains(out.err.Error(), "not pushed") || !strings.Contains(hintOf(out.err), "admin") {
			t.Errorf("%s: %v (hint %q), want that it was not pushed and who may", file, out.err, hintOf(out.err))
		}
	}
	if got := stateOf(r).Get("serial").Int(); got != tainted {
		t.Errorf("serial %d, want %d", got, tainted)
	}
	if out := r.want(0, "apply"); len(out.deployed) != 1 {
		t.Errorf("the next apply deployed %q, want the tainted node", out.deployed)
	}
}

func TestARefusedPushIsNotStoredLater(t *testing.T) {
	r := newFaultRig(t, ours, 1, false)
	r.wantCode(t, 0, "apply")
	serial := stateOf(r.rig).Get("serial").Int()
	file := pulled(r.rig, "newer", map[string]any{"serial": serial + 5})
	r.host.Fault(foreigntest.Post, foreigntest.Times(5, foreigntest.Fault{Status: 413})...)
	r.wantCode(t, tfhosts.ExitFailed, "state-push", file)
	r.host.Calm()
	r.wantCode(t, 0, "apply")
	if got := stateOf(r.rig).Get("serial").Int(); got != serial {
		t.Errorf("serial %d, want %d: a refused file was stored by the next run", got, serial)
	}
}

func TestAForcedPushToTheDetachedState(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	old := pulled(s.rig, "old", nil)
	other := pulled(s.rig, "other", map[string]any{"lineage": "another"})
	s.want(0, "destroy")
	s.want(tfhosts.ExitFailed, "state-push", old)
	s.want(0, "state-push", "-force", old)
	if got := len(strings.Fields(s.want(0, "state-list").answer)); got != 2 {
		t.Errorf("the local state holds %d resources, want those of the pushed one", got)
	}
	s.want(tfhosts.ExitFailed, "state-push", "-force", other)
}
