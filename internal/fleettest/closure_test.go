package fleettest_test

import (
	"errors"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"fediversity.eu/tf-hosts/internal/fleettest"
)

func requireNix(t *testing.T) {
	t.Helper()
	fleettest.Require(t)
	if _, err := exec.LookPath("nix"); err != nil {
		t.Fatal("nix is missing (make deps)")
	}
}

func nixSays(t *testing.T, argv ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	cmd.Env = append(cmd.Environ(), fleettest.NixEnv()...)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%q: %v", argv, err)
	}
	return strings.TrimSpace(string(out))
}

func TestEveryFormOfAClosureIsTheSameDerivation(t *testing.T) {
	requireNix(t)
	spec := fleettest.ClosureSpec{Name: "app1", PayloadPaths: 2, PayloadBytes: 1000}
	c, other := closure(t, spec), closure(t, spec)
	got := []string{
		other.Drv,
		nixSays(t, "nix-instantiate", "-A", "config.system.build.toplevel", c.File),
		nixSays(t, "nix", "path-info", "--derivation", c.FlakeRef+".config.system.build.toplevel"),
	}
	want := []string{c.Drv, c.Drv, c.Drv}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("derivations of %q (-want +got):\n%s", c.Dir, diff)
	}
	if n := len(strings.Fields(nixSays(t, "nix-store", "--query", "--requisites", c.Out))); n != 4 {
		t.Errorf("closure of %q has %d paths, want 4", c.Out, n)
	}
}

func TestClosureThatDoesNotBuild(t *testing.T) {
	requireNix(t)
	c, err := fleettest.NewClosure(t.TempDir(), fleettest.ClosureSpec{Name: "broken", BuildFails: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Instantiate(t.Context()); err != nil {
		t.Errorf("Instantiate = %v, want none", err)
	}
	if err := c.Build(t.Context()); err == nil || !strings.Contains(err.Error(), "this system does not build") {
		t.Errorf("Build = %v, want the builder's words", err)
	}
}

func TestDemoServiceAnswersHTTP(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{})
	h := f.Hosts[0]
	c := closure(t, fleettest.ClosureSpec{Name: "web", Marker: "hello", HTTPPort: 8080})
	copyTo(t, f, h, c.Out)
	if _, err := h.Exec(t.Context(), c.Out+"/bin/switch-to-configuration", "test"); err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + h.Addr() + ":8080/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "hello\n" {
		t.Errorf("body = %q, %v; want hello", b, err)
	}
}

func TestSwitchBehaviour(t *testing.T) {
	f := fleettest.New(t, fleettest.Config{})
	h := f.Hosts[0]
	before, err := h.System(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		symptom, action string
		spec            fleettest.ClosureSpec
		code            int
		running, dflt   bool // is the new system
		demo            string
	}{
		{"test leaves the boot default", "test", fleettest.ClosureSpec{Version: "2"}, 0, true, false, "2"},
		{"switch changes both", "switch", fleettest.ClosureSpec{Version: "3", Marker: "three"}, 0, true, true, "three"},
		{"boot starts nothing", "boot", fleettest.ClosureSpec{Version: "4"}, 0, false, true, "three"},
		{"a unit fails", "test", fleettest.ClosureSpec{Version: "5", Units: map[string]string{"broken.service": fleettest.FailingUnit()}}, 4, true, false, "5"},
		{"refused before anything is done", "test", fleettest.ClosureSpec{Version: "6", Behaviour: map[string]fleettest.Behaviour{"test": {Nothing: true, Exit: 100}}}, 100, false, false, "5"},
		{"a bad code after the work", "test", fleettest.ClosureSpec{Version: "7", Behaviour: map[string]fleettest.Behaviour{"test": {Exit: 2}}}, 2, true, false, "7"},
		{"a trial activates", "test", fleettest.ClosureSpec{Version: "7", Behaviour: map[string]fleettest.Behaviour{"activate": {Exit: 2}}}, 2, true, false, "7"},
		{"another action's behaviour", "check", fleettest.ClosureSpec{Version: "8", Behaviour: map[string]fleettest.Behaviour{"test": {Exit: 2}}}, 0, false, false, "7"},
		{"an unknown action", "explode", fleettest.ClosureSpec{Version: "9"}, 1, false, false, "7"},
		{"no demo service any more", "switch", fleettest.ClosureSpec{Version: "10", Bare: true}, 0, true, true, ""},
	} {
		t.Run(tt.symptom, func(t *testing.T) {
			c := closure(t, tt.spec)
			copyTo(t, f, h, c.Out)
			code := 0
			_, err := h.Exec(t.Context(), c.Out+"/bin/switch-to-configuration", tt.action)
			if err != nil {
				var failed *fleettest.CommandError
				if !errors.As(err, &failed) {
					t.Fatal(err)
				}
				code = failed.Code
			}
			if code != tt.code {
				t.Errorf("exit code = %d, want %d (%v)", code, tt.code, err)
			}
			s, err := h.System(t.Context())
			if err != nil || (s.Running == c.Out) != tt.running || (s.Default == c.Out) != tt.dflt || s.Demo != tt.demo {
				t.Errorf("System = %+v, %v; want running %v, default %v of %q, demo %q", s, err, tt.running, tt.dflt, c.Out, tt.demo)
			}
			if s.Profile != before.Profile || s.Booted != before.Booted {
				t.Errorf("System = %+v, want profile and boot of %+v", s, before)
			}
		})
	}
}
