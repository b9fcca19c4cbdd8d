package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/doctor"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// TestDoctorOnRealHosts: one good node and others with something wrong each. Each
// of those is told with a hint; the good one is green, and nothing changes.
func TestDoctorOnRealHosts(t *testing.T) {
	const password = "sudo-secret-that-must-not-show"
	fleet := fleettest.New(t, fleettest.Config{Hosts: []fleettest.HostConfig{
		{Name: "good"},
		{Name: "small", StoreMiB: 24},
		{Name: "broken"},
		{Name: "changed"},
		{Name: "powerless", Users: []fleettest.User{{Name: "nobody-special"}}},
		{Name: "unknown", Users: []fleettest.User{{Name: "deploy", Sudo: fleettest.SudoNoPassword}}},
		{Name: "careful", Users: []fleettest.User{{Name: "careful", Sudo: fleettest.SudoPassword, Password: password}}},
	}})
	good, broken := fleet.Host("good"), fleet.Host("broken")
	ctx := context.Background()
	if _, err := broken.Shell(ctx, "systemd-run --quiet --unit=bad.service false; while ! systemctl is-failed --quiet bad.service; do sleep 0.1; done; rm /etc/NIXOS"); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, fleet)
	for _, h := range fleet.Hosts {
		r.onHost("prod."+h.Name, h)
	}
	r.writeFile("sudo-password", password+"\n")
	for node, fields := range map[string]map[string]any{
		"prod.powerless": {"username": "nobody-special"},
		"prod.careful":   {"username": "careful", "runner": map[string]any{"become_password_file": "sudo-password"}},
		"prod.unknown":   {"username": "deploy", "host_key": ""},
		"prod.changed":   {"host_key": good.HostKey()},
		"prod.away":      {"host": "127.0.0.1", "ssh_opts": []string{fmt.Sprintf("Port=%d", unusedPort(t))}, "key_file": fleet.KeyFile()},
		"prod.keyless":   {"host": "keyless.invalid", "key_file": "no-such-key"},
	} {
		if r.nodes[node] == nil {
			r.nodes[node] = map[string]any{}
		}
		maps.Copy(r.nodes[node], fields)
	}
	for _, n := range r.nodes {
		n["nixos_conf"] = "/nix/store/00000000000000000000000000000000-x"
	}

	// Only the good one: all is green, over one connection, and nothing is left.
	all := r.nodes
	r.nodes = map[string]map[string]any{"prod.good": all["prod.good"]}
	before, err := good.System(ctx)
	if err != nil {
		t.Fatal(err)
	}
	res := r.want(0, "doctor")
	for line := range strings.Lines(res.stdout) {
		if !strings.HasPrefix(line, "ok ") {
			t.Errorf("a line of a good setup is %q", line)
		}
	}
	if n := r.sshCount(good); n.Connections != 1 || n.Accepted != 1 {
		t.Errorf("host %q: %+v, want one connection and one authentication", good.Name, n)
	}
	if after, err := good.System(ctx); err != nil || after != before {
		t.Errorf("the host changed: %+v, was %+v (%v)", after, before, err)
	}
	if _, err := os.Stat(filepath.Join(r.dir, "work")); err == nil {
		t.Error("a working dir was made")
	}

	// All of them, with what is wrong with each.
	r.nodes = all
	res = r.want(tfhosts.ExitFailed, "doctor", "--format", "json")
	if strings.Contains(res.stdout+res.stderr, password) {
		t.Error("the sudo password shows in the output")
	}
	var doc struct {
		OK     bool
		Checks []doctor.Result
	}
	if err := json.Unmarshal([]byte(res.stdout), &doc); err != nil || doc.OK {
		t.Fatalf("stdout of --format json: ok is %v, %v\n%s", doc.OK, err, res.stdout)
	}
	if strings.Contains(res.stdout, `"check": "setup",
      "level": "fail"`) {
		t.Fatalf("the setup does not load:\n%s", res.stdout)
	}
	got := map[string]doctor.Result{}
	for _, c := range doc.Checks {
		got[c.Check] = c
		if (c.Level == doctor.OK) != (c.Hint == "") {
			t.Errorf("%s is %s with the hint %q", c.Check, c.Level, c.Hint)
		}
	}
	for check, want := range map[string]struct {
		level doctor.Level
		says  string
		hint  string
	}{
		"node prod.good units":       {level: doctor.OK, says: "running"},
		"node prod.good nix":         {level: doctor.OK, says: "nix-daemon"},
		"node prod.careful become":   {level: doctor.OK, says: "careful becomes root"},
		"node prod.unknown become":   {level: doctor.OK},
		"node prod.unknown pin":      {doctor.Warn, "no host key is pinned", "ssh-keyscan -t ed25519 " + fleet.Host("unknown").Addr()},
		"node prod.small store":      {doctor.Warn, "less than 1.0 GiB", "nix-collect-garbage"},
		"node prod.powerless become": {doctor.Fail, "become refused", "/etc/sudoers.d/nobody-special"},
		"node prod.powerless units":  {level: doctor.OK}, // what needs no rights is looked at all the same
		"node prod.away ssh":         {doctor.Fail, "connection refused", "ssh -i"},
		"node prod.changed ssh":      {doctor.Fail, "has changed", fleet.Host("changed").HostKey()},
		"node prod.keyless key":      {doctor.Fail, "no-such-key", "ssh-keygen -t ed25519 -f"},
		"node prod.broken system":    {doctor.Fail, "not NixOS", "install NixOS"},
		"node prod.broken units":     {doctor.Warn, "bad.service", "systemctl status --failed"},
		"backend lock":               {level: doctor.OK, says: "released"},
	} {
		c, ok := got[check]
		hint := strings.ReplaceAll(c.Hint, `\"`, `"`)
		if !ok || c.Level != want.level || !strings.Contains(c.Message, want.says) || !strings.Contains(hint, want.hint) {
			t.Errorf("%s = %+v, want %+v", check, c, want)
		}
	}
	for _, check := range []string{"node prod.away system", "node prod.changed system", "node prod.keyless ssh"} {
		if c, ok := got[check]; ok {
			t.Errorf("%s = %+v without a connection", check, c)
		}
	}
	r.nodes = map[string]map[string]any{"prod.good": all["prod.good"]}
	r.system("prod.good", fleettest.ClosureSpec{Version: "1"})
	r.lockFree()
}

// TestDoctorFindsTheGraphsOwnBackend: it listens on its node's loopback, so that
// only the node's SSH connection leads to it, which the checks of the node share.
func TestDoctorFindsTheGraphsOwnBackend(t *testing.T) {
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(1)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.nodes[stateNode]["nixos_conf"] = "/nix/store/00000000000000000000000000000000-x"
	s.address = fmt.Sprintf("http://127.0.0.1:%d%s", unusedPort(t), statePath)
	s.pin(false)

	// Nobody serves: each place says why, and the way out is told.
	res := s.want(tfhosts.ExitFailed, "doctor")
	for _, text := range []string{"fail  backend place 1 ", "fail  backend place 3 ", "through node prod.state: ", "BOOTSTRAP=1 tf-hosts apply"} {
		if !strings.Contains(res.stdout, text) {
			t.Errorf("stdout does not say %q:\n%s", text, res.stdout)
		}
	}

	binary, err := os.ReadFile(st.binary)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.state.WriteFile(t.Context(), "/usr/local/bin/tf-hosts", string(binary), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := s.state.Exec(t.Context(), "bash", "-euc", fmt.Sprintf(
		"systemd-run --quiet --unit=states tf-hosts backend serve --users %s --dir %s --listen 127.0.0.1:%d; until (exec 3<>/dev/tcp/127.0.0.1/%d) 2>/dev/null; do sleep 0.1; done",
		usersFile, statesDir, statePort, statePort)); err != nil {
		t.Fatal(err)
	}
	before := s.sshCount(s.state)
	res = s.want(0, "doctor")
	for _, text := range []string{"ok  backend place 1 ", "ok  backend place 2 ", "through node prod.state serves", "ok  backend lock "} {
		if !strings.Contains(strings.ReplaceAll(res.stdout, "ok    ", "ok  "), text) {
			t.Errorf("stdout does not say %q:\n%s", text, res.stdout)
		}
	}
	if n := s.sshCount(s.state); n.Connections != before.Connections+1 {
		t.Errorf("%d SSH connections, want one", n.Connections-before.Connections)
	}
}
