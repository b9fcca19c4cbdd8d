package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

const stateOfNodes = `{"version":4,"serial":3,"lineage":"l","resources":[
 {"mode":"managed","type":"terraform_data","name":"other","instances":[{"index_key":"x","attributes":{"triggers_replace":{"value":["a","b","c","d","e"]}}}]},
 {"module":"module.m","mode":"managed","type":"terraform_data","name":"nixos","instances":[{"index_key":"m","attributes":{}}]},
 {"mode":"managed","type":"terraform_data","name":"nixos","instances":[
  {"index_key":"a","attributes":{"triggers_replace":{"value":["conf","h","/nix/store/one.drv","",""],"type":["tuple",[]]}}},
  {"index_key":"b","status":"tainted","attributes":{"triggers_replace":{"value":["conf","h","/nix/store/two.drv","",""]}}},
  {"index_key":"b","deposed":"00000000","attributes":{"triggers_replace":{"value":["conf","h","/nix/store/three.drv","",""]}}}
 ]}]}`

func TestDeployedIn(t *testing.T) {
	got, err := deployedIn([]byte(stateOfNodes))
	want := map[string]deployed{"a": {identity: "/nix/store/one.drv"}, "b": {identity: "/nix/store/two.drv", tainted: true}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(deployed{})); diff != "" || err != nil {
		t.Errorf("deployedIn: %v (-want +got):\n%s", err, diff)
	}
	if got, err := deployedIn(nil); err != nil || len(got) > 0 {
		t.Errorf("no state: %v, %v", got, err)
	}
	if _, err := deployedIn([]byte(`{"encrypted_data":"x"}`)); !errors.Is(err, errEncrypted) {
		t.Errorf("an encrypted state: %v", err)
	}
}

// TestWantedSystems: the system of an identity comes from the last verdict, else
// from Nix; what nobody knows, and what a failed deploy left, is not known.
func TestWantedSystems(t *testing.T) {
	dir := t.TempDir()
	record := &Record{Version: 1, Nodes: map[string]NodeRecord{
		"a": {Identity: "/nix/store/one.drv", Built: "/nix/store/one", Verdict: tfhosts.Verdict{Status: tfhosts.Deployed}},
		"b": {Identity: "/nix/store/old.drv", Built: "/nix/store/old", Verdict: tfhosts.Verdict{Status: tfhosts.Degraded}},
	}}
	if err := record.write(dir, nil); err != nil {
		t.Fatal(err)
	}
	var warned []string
	s := &session{workDir: dir, Config: &Config{
		Events: func(e tfhosts.Event) { warned = append(warned, e.Message) },
		Worker: Worker{Outputs: func(_ context.Context, ids []string) (map[string]string, error) {
			if ids[0] == "/nix/store/known.drv" {
				return map[string]string{ids[0]: "/nix/store/known"}, nil
			}
			return nil, nil
		}},
	}}
	state := strings.ReplaceAll(stateOfNodes, `"index_key":"b","status":"tainted"`, `"index_key":"c"`)
	state = strings.ReplaceAll(state, "two.drv", "known.drv")
	for _, c := range []struct {
		name  string
		state string
		err   error
		warns bool
		want  map[string]string // system by node
	}{
		{"verdict, then Nix", state, nil, false, map[string]string{"a": "/nix/store/one", "c": "/nix/store/known"}},
		{"a store path", strings.ReplaceAll(state, "one.drv", "path"), nil, false, map[string]string{"a": "/nix/store/path", "c": "/nix/store/known"}},
		{"a tainted node", stateOfNodes, nil, false, map[string]string{"a": "/nix/store/one", "b": ""}},
		{"a derivation that is not here", strings.ReplaceAll(state, "one.drv", "away.drv"), nil, false, map[string]string{"a": "", "c": "/nix/store/known"}},
		{"no backend: the verdicts, of which one failed", "", errors.New("away"), true, map[string]string{"a": "/nix/store/one", "b": ""}},
		{"an encrypted state", `{"encrypted_data":"x"}`, nil, true, map[string]string{"a": "/nix/store/one", "b": ""}},
	} {
		warned = nil
		nodes, err := s.wanted(t.Context(), []string{"a", "b", "c"}, []byte(c.state), c.err)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		got := map[string]string{}
		for name, n := range nodes {
			got[name] = n.system
		}
		if diff := cmp.Diff(c.want, got); diff != "" || len(warned) > 0 != c.warns {
			t.Errorf("%s: warned %q (-want +got):\n%s", c.name, warned, diff)
		}
	}
}

func TestObservedTable(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 0, 0, time.Local)
	const one, two = "/nix/store/0123456789abcdefghijklmnopqrstuv-one", "/nix/store/zyxwvutsrqponmlkjihgfedcba987654-two"
	seen := []tfhosts.Observed{
		{Node: "a", Wanted: one, Running: one, Default: one, Booted: two, NeedsReboot: true, Since: at},
		{Node: "b", Wanted: one, Running: two, Booted: two, Drift: []string{"running", "units"}, FailedUnits: []string{"x.service", "y\x1b.service"}, Pending: two},
		{Node: "c", Status: tfhosts.AuthFailed, Error: "refused", Hint: "do this"},
		{Node: "d", Tainted: true, Pending: one},
		{Node: "e", Pending: one},
		{Node: "f", Wanted: one, Running: one, Pending: two},
		{Node: "g"},
	}
	var b bytes.Buffer
	if err := WriteObserved(&b, seen); err != nil {
		t.Fatal(err)
	}
	want := `NODE  STATE                           RUNNING        DEFAULT  BOOTED                       SINCE             FAILED UNITS
a     ok                              01234567…-one  same     zyxwvuts…-two, needs reboot  2026-01-02 03:04  -
b     drifted: running,units; pending  zyxwvuts…-two  -        same                         -                 x.service y�.service
c     auth_failed                     -              -        -                            -                 -
d     tainted                         -              -        -                            -                 -
e     wanted unknown; pending         -              -        -                            -                 -
f     pending                         01234567…-one  -        -                            -                 -
g     wanted unknown                  -              -        -                            -                 -
`
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(b.String())); diff != "" {
		t.Errorf("(-want +got):\n%s\n%s", diff, b.String())
	}
	if lines := strings.Split(b.String(), "\n"); strings.Index(lines[0], "RUNNING") != len("b     drifted: running,units; pending  ") {
		t.Errorf("the columns are not aligned:\n%s", b.String())
	}
	for _, c := range []struct {
		of   []tfhosts.Observed
		want int
	}{
		{seen, tfhosts.ExitNodesFailed}, {seen[:2], tfhosts.ExitChanges}, {seen[3:], tfhosts.ExitOK}, {nil, tfhosts.ExitOK},
	} {
		if got := ObservedCode(c.of); got != c.want {
			t.Errorf("ObservedCode of %d nodes = %d, want %d", len(c.of), got, c.want)
		}
	}
	b.Reset()
	if err := WriteObservedJSON(&b, seen, ""); err != nil || !json.Valid(b.Bytes()) || strings.Count(b.String(), "\n") != 1 {
		t.Errorf("as JSON: %v\n%s", err, b.String())
	}
}
