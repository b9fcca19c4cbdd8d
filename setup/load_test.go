package setup_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/setup"
	"github.com/google/go-cmp/cmp"
)

// write puts a setup file in a folder of its own and gives options that see no
// environment but env.
func write(t *testing.T, text string, env ...string) setup.Options {
	t.Helper()
	return writeTo(t, t.TempDir(), text, env...)
}

func writeTo(t testing.TB, dir, text string, env ...string) setup.Options {
	t.Helper()
	path := filepath.Join(dir, "tf-hosts.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return setup.Options{Path: path, Getenv: getenv(env...)}
}

func getenv(env ...string) func(string) string {
	values := make(map[string]string)
	for _, v := range env {
		name, value, _ := strings.Cut(v, "=")
		values[name] = value
	}
	return func(name string) string { return values[name] }
}

func load(t *testing.T, o setup.Options) *tfhosts.Setup {
	t.Helper()
	s, err := setup.Load(o)
	if err != nil {
		t.Fatalf("Load: %v", err)
	}
	return s
}

// problemsOf loads what must fail and lists the problems as text.
func problemsOf(t *testing.T, o setup.Options) []string {
	t.Helper()
	_, err := setup.Load(o)
	if code := tfhosts.ExitCodeOf(err); code != tfhosts.ExitUsage {
		t.Fatalf("Load: exit code %d (%v), want %d", code, err, tfhosts.ExitUsage)
	}
	var e *setup.ProblemsError
	if !errors.As(err, &e) {
		t.Fatalf("Load: %v, want a ProblemsError", err)
	}
	var got []string
	for _, p := range e.Problems {
		got = append(got, p.String())
	}
	return got
}

const minimal = `{"version": 1, "nodes": {"a": {"nixos_conf": "/nix/store/x", "host": "h"}}}`

func TestLoadMinimal(t *testing.T) {
	o := write(t, minimal)
	got := load(t, o)
	want := &tfhosts.Setup{
		Path: o.Path, Dir: filepath.Dir(o.Path),
		Nodes: map[string]tfhosts.SetupNode{"a": {Node: tfhosts.Node{
			NixosConf: "/nix/store/x", Username: "root", Host: "h", SSHOpts: "[]",
		}}},
		Backend: tfhosts.HTTPBackend{
			Address:     "http://localhost:8080/state/project1/example",
			LockAddress: "http://localhost:8080/state/project1/example", LockMethod: "LOCK",
			UnlockAddress: "http://localhost:8080/state/project1/example", UnlockMethod: "UNLOCK",
			UpdateMethod: "POST", RetryMax: 2, RetryWaitMin: time.Second, RetryWaitMax: 30 * time.Second,
		},
		Bootstrap: false, Bash: "/bin/sh",
		Runner: tfhosts.RunnerSettings{Parallelism: 10},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Load (-want +got):\n%s", diff)
	}
}

func TestLoadEverything(t *testing.T) {
	text, err := os.ReadFile("testdata/full.json")
	if err != nil {
		t.Fatal(err)
	}
	o := write(t, string(text), "HOME=/home/me")
	dir := filepath.Dir(o.Path)
	if err := os.WriteFile(filepath.Join(dir, "password"), []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"ca.pem", "cert.pem", "key.pem"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name+" text"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got := load(t, o)
	no, yes, none := false, true, 0
	up := tfhosts.HealthCheck{
		Name: "up", Command: []string{"true"}, When: tfhosts.HealthBoth, Timeout: 3, Retries: &none, Interval: 1, Total: 5,
	}
	want := &tfhosts.Setup{
		Path: o.Path, Dir: dir,
		Nodes: map[string]tfhosts.SetupNode{
			"prod.app1": {
				Node: tfhosts.Node{
					NixosConf: "./app1.nix", ConfigIdentity: "/nix/store/y.drv", Username: "deploy", Host: "10.0.0.1",
					KeyFile: filepath.Join(dir, "keys/app1"),
					HostKey: "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl",
					SSHOpts: `["Port=2222","ProxyJump=bastion"]`,
				},
				Group: "prod", Tags: []string{"web", "eu.north"},
				Runner: tfhosts.NodeSettings{
					Guard: &no, OnDegraded: "warn", BuildOn: "target", Become: []string{"doas"},
					BecomePasswordFile: "/home/me/become", Substitute: &no, Goal: "boot",
					OnInhibitor: "boot", RebootIfNeeded: &yes,
					Health: []tfhosts.HealthCheck{ // the fleet's "up" is replaced
						{Name: "up", Unit: "app.service"},
						{Name: "page", HTTP: &tfhosts.HTTPCheck{URL: "https://localhost/", Status: []int{200}, CAFile: filepath.Join(dir, "ca.pem")}},
					},
					Limits: tfhosts.Limits{Connect: 5, Copy: 60, Guard: 30, Reboot: 90},
				},
			},
			"prod.state": {
				Node: tfhosts.Node{
					NixosConf: "/nix/store/z", Username: "ops", Host: "::1", KeyFile: "/home/me/.ssh/id", SSHOpts: `["Port=22"]`,
				},
				Runner: tfhosts.NodeSettings{
					Guard: &no, Become: []string{"sudo", "-n"}, BecomePasswordFile: "/home/me/become",
					Substitute: &no, Health: []tfhosts.HealthCheck{up}, Limits: tfhosts.Limits{Connect: 5, Copy: 600},
				},
			},
		},
		Backend: tfhosts.HTTPBackend{
			Address: "https://state.example/s/p", Pinned: true,
			LockAddress: "https://state.example/s/p/lock", LockMethod: "POST",
			UnlockAddress: "https://state.example/s/p/unlock", UnlockMethod: "DELETE",
			UpdateMethod: "PUT", Username: "u", Password: "s3cret", PasswordFile: filepath.Join(dir, "password"),
			Headers: map[string]string{"X-Team": "ops"}, RetryMax: 0,
			RetryWaitMin: 2 * time.Second, RetryWaitMax: 3 * time.Second,
			CAFile: filepath.Join(dir, "ca.pem"), CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem"),
			CAPEM: "ca.pem text", CertPEM: "cert.pem text", KeyPEM: "key.pem text",
		},
		Self:      &tfhosts.SelfBackend{Node: "prod.state", Port: 443, Path: "/s/p", Scheme: "https"},
		Bootstrap: false, PublishedNamesExpr: "s: s.names", DeployRunner: []string{"nice", "-n5"},
		Bash: "/nix/store/b/bin/bash", Circuits: nil,
		Runner: tfhosts.RunnerSettings{
			NodeSettings: tfhosts.NodeSettings{
				Guard: &no, Become: []string{"sudo", "-n"}, BecomePasswordFile: "/home/me/become",
				Substitute: &no, Health: []tfhosts.HealthCheck{up}, Limits: tfhosts.Limits{Connect: 5, Copy: 600},
			},
			Parallelism: 4, NixOptions: []string{"--option", "cores", "2"},
			Waves: [][]string{{"@canary"}, {"prod.*", "!prod.state"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Load (-want +got):\n%s", diff)
	}
}

func TestLoadLayers(t *testing.T) {
	const text = `{"version": 1,
	  "ssh": {"username": "default", "key_file": "default", "ssh_opts": ["Port=1"]},
	  "nodes": {
	    "plain": {"nixos_conf": "c", "host": "h1"},
	    "own": {"nixos_conf": "c", "host": "h2", "username": "own", "key_file": "own", "ssh_opts": "[\"Port=2\"]"}}}`
	type seen struct{ User, Host, Key, Options string }
	for name, c := range map[string]struct {
		text string
		env  []string
		want map[string]seen
	}{
		"built in": {minimal, nil, map[string]seen{"a": {"root", "h", "", "[]"}}},
		"the setup's default, below the node's entry": {text, nil, map[string]seen{
			"plain": {"default", "h1", "DIR/default", `["Port=1"]`}, "own": {"own", "h2", "DIR/own", `["Port=2"]`},
		}},
		"SSH_USER is above the default and below the entry": {text, []string{"SSH_USER=env"}, map[string]seen{
			"plain": {"env", "h1", "DIR/default", `["Port=1"]`}, "own": {"own", "h2", "DIR/own", `["Port=2"]`},
		}},
		"SSH_NODES is above all, field by field": {
			text,
			[]string{"SSH_USER=env", `SSH_NODES={"own": {"username": "top", "host": "h9", "ssh_opts": []}, "plain": {"key_file": "/k"}}`},
			map[string]seen{"plain": {"env", "h1", "/k", `["Port=1"]`}, "own": {"top", "h9", "DIR/own", `[]`}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := load(t, write(t, c.text, c.env...))
			got := make(map[string]seen)
			for name, n := range s.Nodes {
				got[name] = seen{n.Username, n.Host, strings.Replace(n.KeyFile, s.Dir, "DIR", 1), n.SSHOpts}
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("Load(%s) (-want +got):\n%s", name, diff)
			}
		})
	}
}

func TestLoadBackendEnvironmentWins(t *testing.T) {
	const text = `{"version": 1, "nodes": {"a": {"nixos_conf": "c", "host": "h"}}, "self_backend": {"node": "a"},
	  "http_backend": {"address": "http://file/s", "username": "file", "password_file": "missing", "update_method": "PUT", "retry_max": 9}}`
	s := load(t, write(t, text,
		"TF_HTTP_ADDRESS=http://env:99/e?x=1", "TF_HTTP_USERNAME=env", "TF_HTTP_PASSWORD=pw", "TF_HTTP_UPDATE_METHOD=PATCH",
		"TF_HTTP_LOCK_ADDRESS=http://env:99/l", "TF_HTTP_UNLOCK_ADDRESS=http://env:99/u", "TF_HTTP_LOCK_METHOD=POST", "TF_HTTP_UNLOCK_METHOD=DELETE",
		"TF_HTTP_RETRY_MAX=0", "TF_HTTP_RETRY_WAIT_MIN=3", "TF_HTTP_RETRY_WAIT_MAX=4",
		"TF_HTTP_CLIENT_CA_CERTIFICATE_PEM=ca", "TF_HTTP_CLIENT_CERTIFICATE_PEM=cert", "TF_HTTP_CLIENT_PRIVATE_KEY_PEM=key"))
	want := tfhosts.HTTPBackend{
		Address: "http://env:99/e?x=1", Pinned: true, LockAddress: "http://env:99/l", UnlockAddress: "http://env:99/u",
		LockMethod: "POST", UnlockMethod: "DELETE", UpdateMethod: "PATCH", Username: "env", Password: "pw",
		RetryMax: 0, RetryWaitMin: 3 * time.Second, RetryWaitMax: 4 * time.Second, CAPEM: "ca", CertPEM: "cert", KeyPEM: "key",
	}
	if diff := cmp.Diff(want, s.Backend); diff != "" {
		t.Errorf("Backend (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(&tfhosts.SelfBackend{Node: "a", Port: 99, Path: "/e?x=1", Scheme: "http"}, s.Self); diff != "" {
		t.Errorf("Self (-want +got):\n%s", diff)
	}
}

func TestLoadFlagWinsOverEnvironment(t *testing.T) {
	o := write(t, minimal, "TF_HTTP_ADDRESS=http://env/s", "SSH_USER=env", "TF_HTTP_USERNAME=u", "TF_HTTP_PASSWORD=env")
	file := filepath.Join(t.TempDir(), "pw")
	if err := os.WriteFile(file, []byte("flag\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := map[string]string{"http-address": "http://flag/s", "ssh-user": "flag", "http-password-file": file, "setup": o.Path}
	o.Path = ""
	o.Flag = func(name string) (string, bool) { v, ok := flags[name]; return v, ok }
	s := load(t, o)
	got := []string{s.Backend.Address, s.Nodes["a"].Username, s.Backend.Password}
	if diff := cmp.Diff([]string{"http://flag/s", "flag", "flag"}, got); diff != "" {
		t.Errorf("Load with flags (-want +got):\n%s", diff)
	}
}

func TestLoadWithoutSecretsReadsNone(t *testing.T) {
	o := write(t, `{"version": 1, "nodes": {"a": {"nixos_conf": "c", "host": "h"}}, "http_backend": {"username": "u", "password_file": "missing"}}`)
	if got, want := problemsOf(t, o), fmt.Sprintf("$.http_backend.password_file: reading %q: no such file or directory", filepath.Join(filepath.Dir(o.Path), "missing")); got[0] != want {
		t.Errorf("Load = %q, want %q", got, want)
	}
	o.WithoutSecrets = true
	load(t, o)
}

func TestLoadFindsTheFile(t *testing.T) {
	_, err := setup.Load(setup.Options{Path: filepath.Join(t.TempDir(), "none.json")})
	if tfhosts.ExitCodeOf(err) != tfhosts.ExitUsage || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Load(none.json) = %v, want exit 64 and ErrNotExist", err)
	}
	dir := t.TempDir()
	t.Chdir(dir)
	var exit *tfhosts.ExitError
	if _, err = setup.Load(setup.Options{}); !errors.As(err, &exit) || !strings.Contains(exit.Hint, "--setup FILE") {
		t.Errorf("Load in an empty folder = %v, want a hint to --setup", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tf-hosts.json"), []byte(minimal), 0o600); err != nil {
		t.Fatal(err)
	}
	load(t, setup.Options{})
	o := write(t, minimal)
	if s := load(t, setup.Options{Getenv: getenv("TF_HOSTS_SETUP=" + o.Path)}); s.Path != o.Path {
		t.Errorf("Load with TF_HOSTS_SETUP read %q, want %q", s.Path, o.Path)
	}
}
