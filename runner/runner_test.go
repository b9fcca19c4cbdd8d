package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
)

func TestScriptsAreCleanPOSIX(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"activate": string(activateScript), "observe": observeScript, "status": statusScript, "root": rootScript, "receive": receiveScript,
		"stale": staleScript, "partial": deletePartialScript, "present": presentScript, "check": checkScript,
		"start": startScript, "settle": settleScript, "wait": waitScript, "release": releaseScript,
		"journal": journalScript, "command": commandScript, "dry": dryScript, "reboot": rebootScript, "booted": bootedScript,
		"realise": realiseScript,
	} {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		// SC2015: A && B || C where C may run after A. SC2153: names that only look misspelt. SC2317: launch is used by its callers.
		for _, argv := range [][]string{{"dash", "-n", file}, {"shellcheck", "--shell=dash", "--exclude=SC2015,SC2153,SC2317", file}} {
			if _, err := exec.LookPath(argv[0]); err != nil {
				t.Logf("%s is not installed", argv[0])
				continue
			}
			if out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput(); err != nil {
				t.Errorf("%s of %s: %v\n%s", argv[0], name, err, out)
			}
		}
	}
}

func TestParseState(t *testing.T) {
	got, err := parseState("arch x86_64\nrunning /nix/store/a\ngeneration system-12-link\nfree 123\nnix yes\nfailed b.service\nfailed a.service\nend yes\n")
	want := &state{
		arch: "x86_64", running: "/nix/store/a", generation: "system-12-link", freeKiB: 123, hasNix: true,
		failed: []string{"a.service", "b.service"},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(state{})); diff != "" || err != nil {
		t.Errorf("parseState() error %v (-want +got):\n%s", err, diff)
	}
	if n := got.generationNumber(); n != 12 {
		t.Errorf("generationNumber() = %d, want 12", n)
	}
	if _, err := parseState("arch x86_64\nrunning /nix/store/a\n"); !errors.Is(err, errAnswer) {
		t.Errorf("a cut answer gives %v, want errAnswer", err)
	}
}

func TestOutcomeReadsTheLogPieceByPiece(t *testing.T) {
	o := outcome{code: -1}
	for _, text := range []string{
		"state alive\nphase switch\nlog one\nend yes\n",
		"state ended\ncode 4\nverdict rolled_back units failed\nnew a.service\nlog two words\nend yes\n",
	} {
		if _, err := o.read(text); err != nil {
			t.Fatal(err)
		}
	}
	want := outcome{state: "ended", phase: "switch", word: "rolled_back", reason: "units failed", code: 4, newly: []string{"a.service"}, log: []string{"one", "two words"}}
	if diff := cmp.Diff(want, o, cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("outcome (-want +got):\n%s", diff)
	}
	if _, err := o.read("state alive\nlog three\n"); !errors.Is(err, errAnswer) || len(o.log) != 2 {
		t.Errorf("a cut answer gives %v and log %q, want it left out", err, o.log)
	}
}

func TestCheckUnknown(t *testing.T) {
	const stc = "/nix/store/x/bin/switch-to-configuration"
	for name, tt := range map[string]struct {
		code   int
		output string
		want   bool
	}{
		"an older one":              {1, "Usage: " + stc + " [switch|boot|test|dry-activate]\nswitch: …\n", true},
		"a newer one, called wrong": {1, "Usage: " + stc + " [check|switch|boot|test|dry-activate]\n", false},
		"a check that refused":      {1, "Pre-switch checks failed\n", false},
		"a check's own usage":       {1, "Usage: mycheck [a|b]\nPre-switch checks failed\n", false},
		"silence":                   {1, "", false},
		"usage with another code":   {2, "Usage: " + stc + " [switch|boot|test|dry-activate]\n", false},
	} {
		if got := checkUnknown(tt.code, tt.output); got != tt.want {
			t.Errorf("checkUnknown(%s) = %v, want %v", name, got, tt.want)
		}
	}
}

func TestStatusOf(t *testing.T) {
	before, after := &deploy{}, &deploy{begun: true}
	for _, tt := range []struct {
		d    *deploy
		err  error
		want tfhosts.Status
	}{
		{before, &stepError{"connect", hostconn.ErrUnreachable}, tfhosts.Unreachable},
		{before, &stepError{"connect", hostconn.ErrAuth}, tfhosts.AuthFailed},
		{before, &stepError{"observe", fmt.Errorf("x: %w", hostconn.ErrBecome)}, tfhosts.AuthFailed},
		{before, &stepError{"connect", &hostconn.HostKeyError{}}, tfhosts.HostKeyChanged},
		{before, &stepError{"connect", &hostconn.OptionError{}}, tfhosts.Unreachable},
		{before, &stepError{"observe", hostconn.ErrTimeout}, tfhosts.Timeout},
		{before, &stepError{"observe", hostconn.ErrLost}, tfhosts.Unreachable},
		{before, &timeoutError{"connect", time.Second, context.DeadlineExceeded}, tfhosts.Unreachable},
		{before, &timeoutError{"copy", time.Second, context.DeadlineExceeded}, tfhosts.Timeout},
		{before, &stepError{"copy", errors.New("odd")}, tfhosts.CopyFailed},
		{before, errDropped, tfhosts.Dropped},
		{before, context.Canceled, tfhosts.Dropped},
		{after, &timeoutError{"activate.wait", time.Second, hostconn.ErrUnreachable}, tfhosts.Unreachable},
		{after, &timeoutError{"activate.wait", time.Second, context.DeadlineExceeded}, tfhosts.Timeout},
	} {
		if got := tt.d.statusOf(tt.err); got != tt.want {
			t.Errorf("statusOf(%v, begun %v) = %s, want %s", tt.err, tt.d.begun, got, tt.want)
		}
	}
}

func TestHintsCanBePasted(t *testing.T) {
	d := &deploy{req: Request{Node: tfhosts.Node{Host: "10.0.0.7", Username: "root", KeyFile: "/my keys/id"}}}
	d.target.Options = []string{"Port=2222"}
	if got, want := d.ssh("true"), "ssh -i '/my keys/id' -o Port=2222 root@10.0.0.7 true"; got != want {
		t.Errorf("ssh() = %q, want %q", got, want)
	}
	for _, s := range tfhosts.Statuses() {
		own := s == tfhosts.Degraded || s == tfhosts.RolledBack || s == tfhosts.RollbackFailed || s == tfhosts.Locked
		if s.ExitCode() != 0 && !own && d.hint(s) == "" {
			t.Errorf("hint(%s) is empty", s)
		}
	}
}
