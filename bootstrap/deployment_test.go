package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
)

// submitted runs a verb with a DEPLOYMENT. In place of an evaluated expression
// the names are the submission's "keep".
func (r *rig) submitted(verb, submission string, change func(*Config), args ...string) outcome {
	r.tb.Helper()
	v, ok := tfhosts.LookupVerb(verb)
	if !ok {
		r.tb.Fatalf("no verb %q", verb)
	}
	self, err := os.Executable()
	if err != nil {
		r.tb.Fatal(err)
	}
	r.mu.Lock()
	r.deployed, r.events = nil, nil
	r.mu.Unlock()
	var answer, story bytes.Buffer
	cfg := r.config(self, v, nil, &answer, &story, args)
	cfg.Deployment = submission
	cfg.Worker.Names = func(_ context.Context, expr, path string) ([]string, error) {
		text, err := os.ReadFile(path)
		if err != nil || expr != r.setup.PublishedNamesExpr {
			r.tb.Errorf("names of %q by %q: %v", path, expr, err)
		}
		var s struct{ Keep []string }
		return s.Keep, json.Unmarshal(text, &s)
	}
	if change != nil {
		change(&cfg)
	}
	code, err := Run(context.Background(), cfg)
	r.mu.Lock()
	defer r.mu.Unlock()
	return outcome{code, err, answer.String(), story.String(), append([]string{}, r.deployed...), r.events}
}

func (o outcome) says(text string) bool {
	for _, e := range o.eventsOfTheRun {
		if strings.Contains(e.Message, text) {
			return true
		}
	}
	return false
}

func TestDeploymentTurnsNodesOff(t *testing.T) {
	r := newRig(t, 3)
	r.setup.PublishedNamesExpr = "s: s.keep"
	r.want(0, "apply")

	const submission = `{"keep": ["prod.app0", "prod.app2"]}`
	if out := r.submitted("plan", submission, nil, "-detailed-exitcode"); out.code != 2 || !strings.Contains(out.answer, "1 to destroy") {
		t.Errorf("plan: code %d (%v), want 2 and one to destroy\n%s", out.code, out.err, out.answer)
	}
	// A node that was turned off is not even evaluated.
	r.changeNode("prod.app1", func(n *tfhosts.SetupNode) { n.ConfigIdentity = "" })
	out := r.submitted("apply", submission, nil)
	if out.code != 0 || len(out.deployed) != 0 {
		t.Fatalf("apply: code %d (%v), deployed %q, want 0 and none", out.code, out.err, out.deployed)
	}
	if !out.says("DEPLOYMENT turns off prod.app1") || !out.says("leaves the graph; its host keeps its configuration") {
		t.Error("the removed node is not named")
	}
	if got := gjson.Get(out.answer, "nodes.value.@keys").Raw; got != `["prod.app0","prod.app2"]` {
		t.Errorf("nodes in the outputs = %s, want those that stay", got)
	}
	// From a file, relative to the caller; its name still stands for its address.
	if err := os.WriteFile(filepath.Join(r.dir, "submission.json"), []byte(submission), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := r.submitted("plan", "submission.json", nil, "-detailed-exitcode"); out.code != 0 {
		t.Errorf("plan from the file: code %d (%v), want 0", out.code, out.err)
	}
	// All of them off, when that is said; the state is not a stranger's then.
	if out := r.submitted("apply", `{}`, func(c *Config) { c.AllowEmpty = true }); out.code != 0 {
		t.Errorf("apply of none: code %d (%v), want 0", out.code, out.err)
	}
	if out := r.want(0, "state-list"); out.answer != "" {
		t.Errorf("state after all were turned off:\n%s", out.answer)
	}
}

func TestDeploymentRefuses(t *testing.T) {
	r := newRig(t, 2)
	r.setup.PublishedNamesExpr = "s: s.keep"
	r.setup.Self = &tfhosts.SelfBackend{Node: "prod.app0"}
	for name, tt := range map[string]struct {
		submission string
		change     func(*Config)
		code       int
		want       string
	}{
		"cut off":             {submission: `{"keep": `, want: "a JSON object is expected"},
		"file is not there":   {submission: "absent.json", want: "no such file"},
		"unknown nodes":       {submission: `{"keep": ["prod.app0", "x", "y"]}`, want: `not in the setup: "x", "y"`},
		"empty":               {submission: `{"keep": []}`, want: "turns off every node"},
		"without the backend": {submission: `{"keep": ["prod.app1"]}`, want: `turns off "prod.app0", which serves the state`},
		"without the backend, though empty is allowed": {
			submission: `{"keep": ["prod.app1"]}`, change: func(c *Config) { c.AllowEmpty = true }, want: `turns off "prod.app0"`,
		},
		"empty in a bootstrap": {
			submission: `{}`, change: func(c *Config) { c.AllowEmpty, c.Bootstrap = true, true }, want: `turns off "prod.app0"`,
		},
		"no expression": {
			submission: `{}`, want: "does not say which nodes",
			change: func(c *Config) {
				s := *c.Setup
				s.PublishedNamesExpr = ""
				c.Setup = &s
			},
		},
		"expression fails": {
			submission: `{}`, want: "not a list",
			change: func(c *Config) {
				c.Worker.Names = func(context.Context, string, string) ([]string, error) { return nil, errors.New("not a list") }
			},
		},
		"no nix": {
			submission: `{}`, want: "not installed", code: tfhosts.ExitFailed,
			change: func(c *Config) {
				c.Worker.Names = func(context.Context, string, string) ([]string, error) {
					return nil, tfhosts.WithExit(tfhosts.ExitFailed, "", errors.New("nix is not installed"))
				}
			},
		},
	} {
		if tt.code == 0 {
			tt.code = tfhosts.ExitUsage
		}
		for _, verb := range []string{"apply", "state-list"} {
			out := r.submitted(verb, tt.submission, tt.change)
			if out.code != tt.code || out.err == nil || !strings.Contains(out.err.Error(), tt.want) {
				t.Errorf("%s: %s: code %d, %v, want %d and %q", name, verb, out.code, out.err, tt.code, tt.want)
			}
		}
	}
	if diff := cmp.Diff([]string(nil), entries(t, filepath.Join(r.dir, "work"))); diff != "" {
		t.Errorf("working dirs after refusals (-want +got):\n%s", diff)
	}
}

// entries lists a folder; one that is not there has none.
func entries(t *testing.T, dir string) []string {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names
}
