package main

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestExecOnHosts runs commands on three hosts at once, one of them with a login
// that is no POSIX shell and another user, and on a node that does not answer.
func TestExecOnHosts(t *testing.T) {
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{
		{Name: "one"},
		{Name: "two"},
		{Name: "odd", Users: []fleettest.User{{Name: "deploy", Sudo: fleettest.SudoNoPassword, Shell: "/usr/local/bin/odd-shell"}}},
	}})
	// It knows one word, as a shell of another language might, and is noisy.
	odd := "#!/bin/sh\necho welcome; echo welcome >&2\n[ \"$#\" = 2 ] && [ \"$2\" = /bin/sh ] || { echo parse error; exit 99; }\nexec /bin/sh\n"
	if err := fleet.Host("odd").WriteFile(t.Context(), "/usr/local/bin/odd-shell", odd, 0o755); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, fleet)
	for _, h := range fleet.Hosts {
		r.onHost("prod."+h.Name, h)
		r.nodes["prod."+h.Name]["tags"] = []string{"up"}
	}
	r.nodes["prod.odd"]["username"] = "deploy"
	r.nodes["prod.away"] = map[string]any{"host": "127.0.0.1", "ssh_opts": []string{fmt.Sprintf("Port=%d", unusedPort(t))}, "key_file": fleet.KeyFile()}
	for _, n := range r.nodes {
		n["nixos_conf"] = "/nix/store/00000000000000000000000000000000-x"
	}

	t.Run("the words arrive as they are", func(t *testing.T) {
		words := []string{"a b", "", "it's", "$HOME", "*", `back\slash`, "-n", "ü", "two\nlines"}
		res := r.want(0, append([]string{"exec", "--on", "@up", "--", "printf", `<%s>\n`}, words...)...)
		for _, h := range fleet.Hosts {
			want := ""
			for line := range strings.SplitSeq("<"+strings.Join(words, ">\n<")+">", "\n") {
				want += "prod." + h.Name + ": " + line + "\n"
			}
			if got := linesOf(res.stdout, "prod."+h.Name+": "); got != want {
				t.Errorf("%s says\n%s, want\n%s", h.Name, got, want)
			}
		}
		if res.stderr != "" {
			t.Errorf("stderr is not silent: %q", res.stderr)
		}
	})
	t.Run("lines stay whole, and streams apart", func(t *testing.T) {
		script := `i=0; while [ $i -lt 400 ]; do printf out; printf "=%s=\n" $i; printf "err=%s=\n" $i >&2; i=$((i+1)); done`
		res := r.want(0, "exec", "--on", "@up", "--", "sh", "-c", script)
		for stream, text := range map[string]string{"out": res.stdout, "err": res.stderr} {
			whole := regexp.MustCompile(`^prod\.(one|two|odd): ` + stream + `=[0-9]+=$`)
			lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
			if len(lines) != 3*400 {
				t.Errorf("std%s has %d lines, want %d", stream, len(lines), 3*400)
			}
			for _, line := range lines {
				if !whole.MatchString(line) {
					t.Fatalf("std%s has the line %q", stream, line)
				}
			}
		}
	})
	t.Run("the worst code counts", func(t *testing.T) {
		res := r.want(7, "exec", "--on", "*", "--", "sh", "-c", `case $(hostname) in *one) exit 7 ;; *two) exit 3 ;; esac`)
		for _, text := range []string{"prod.away: connecting to", "the command failed on 3 of 4 nodes"} {
			if !strings.Contains(res.stderr, text) {
				t.Errorf("stderr does not say %q:\n%s", text, res.stderr)
			}
		}
	})
	t.Run("a node that does not answer alone is 6", func(t *testing.T) {
		r.want(tfhosts.ExitNodesFailed, "exec", "--on", "*", "--", "true")
	})
	t.Run("a command that is not there", func(t *testing.T) {
		r.want(127, "exec", "--on", "prod.one", "--", "no-such-command")
	})
	t.Run("the flags behind the command are its own", func(t *testing.T) {
		if res := r.want(0, "exec", "--on", "prod.one", "echo", "--json", "-n", "plan"); res.stdout != "prod.one: --json -n plan\n" {
			t.Errorf("stdout = %q", res.stdout)
		}
	})
	t.Run("a limit", func(t *testing.T) {
		res := r.want(tfhosts.ExitNodesFailed, "exec", "--on", "prod.one", "--timeout", "2s", "--", "sh", "-c", "echo begun; exec sleep 600")
		if !strings.Contains(res.stderr, "did not end within 2s") || res.stdout != "prod.one: begun\n" {
			t.Errorf("stdout %q, stderr %q", res.stdout, res.stderr)
		}
	})
	t.Run("as root by sudo", func(t *testing.T) {
		for args, want := range map[string]string{"": "prod.odd: deploy\n", "--sudo": "prod.odd: root\n"} {
			all := append(append([]string{"exec", "--on", "prod.odd"}, strings.Fields(args)...), "--", "id", "-un")
			if res := r.want(0, all...); res.stdout != want {
				t.Errorf("id -un with %q = %q, want %q", args, res.stdout, want)
			}
		}
	})
	t.Run("one object a node", func(t *testing.T) {
		res := r.want(2, "exec", "--on", "*", "--json", "--", "sh", "-c", `printf "o\n\tü"; echo e >&2; exit 2`)
		got := map[string]execResult{}
		for line := range strings.Lines(res.stdout) {
			var one execResult
			if err := json.Unmarshal([]byte(line), &one); err != nil {
				t.Fatalf("stdout has the line %q: %v", line, err)
			}
			got[one.Node] = one
		}
		for _, h := range fleet.Hosts {
			if one := got["prod."+h.Name]; one.Code == nil || *one.Code != 2 || one.Stdout != "o\n\tü" || one.Stderr != "e\n" || one.Error != "" {
				t.Errorf("%s: %+v", h.Name, one)
			}
		}
		if one := got["prod.away"]; len(got) != 4 || one.Code != nil || one.Error == "" {
			t.Errorf("%d objects, and the one of prod.away is %+v", len(got), one)
		}
		for line := range strings.Lines(res.stderr) {
			if !json.Valid([]byte(line)) {
				t.Errorf("stderr has the line %q", line)
			}
		}
	})
}

// linesOf are the lines with a prefix.
func linesOf(text, prefix string) string {
	var of strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, prefix) {
			of.WriteString(line)
		}
	}
	return of.String()
}
