package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/internal/fleettest"
)

// peers is a fleet with one new system at a time, for every tool that is timed.
type peers struct {
	*rig
	names   []string
	version int
	systems map[string]*fleettest.Closure
}

// next builds a new system for all hosts, so that no tool finds its work done.
func (p *peers) next() {
	p.t.Helper()
	p.version++
	slow := fleettest.Behaviour{SleepSeconds: 5}
	for i, name := range p.names {
		c := p.system(name, fleettest.ClosureSpec{
			Version: fmt.Sprint(p.version), PayloadPaths: 2, PayloadBytes: 100_000,
			// What a switch does is a test and a boot.
			Behaviour: map[string]fleettest.Behaviour{"switch": slow, "test": slow},
		})
		if err := c.Build(p.t.Context()); err != nil {
			p.t.Fatal(err)
		}
		p.onHost(name, p.fleet.Hosts[i])
		p.systems[name] = c
	}
}

func (p *peers) timed(cmd *exec.Cmd) float64 {
	p.t.Helper()
	begin := time.Now()
	if out, err := cmd.CombinedOutput(); err != nil {
		p.t.Fatalf("%q: %v\n%s", cmd.Args, err, out)
	}
	spent := time.Since(begin).Seconds()
	return spent
}

// done demands that every host runs the newest system.
func (p *peers) done(names []string) {
	p.t.Helper()
	for i, name := range names {
		p.wantRuns(p.fleet.Hosts[i], p.systems[name], fmt.Sprint(p.version))
	}
}

// own is one apply of tf-hosts on the first n hosts.
func (p *peers) own(n int) float64 {
	p.t.Helper()
	p.next()
	args := []string{"apply"}
	if n < len(p.names) {
		args = append(args, "--on", strings.Join(p.names[:n], ","))
	}
	cmd, _, _ := p.command(args...)
	cmd.Stdout, cmd.Stderr = nil, nil
	spent := p.timed(cmd)
	p.done(p.names[:n])
	return spent
}

// ansible does the same with a playbook: copy, set, switch.
func (p *peers) ansible(playbook string) float64 {
	p.t.Helper()
	p.next()
	inventory := "[all]\n"
	for i, name := range p.names {
		inventory += fmt.Sprintf("h%d ansible_host=%s system=%s\n", i, p.fleet.Hosts[i].Addr(), p.systems[name].Out)
	}
	inventory += "[all:vars]\nansible_user=root\nansible_ssh_common_args=-F " + p.sshConfig() + "\n"
	p.writeFile("inventory", inventory)
	p.writeFile("playbook.yml", `- hosts: all
  gather_facts: false
  tasks:
    - command: nix --extra-experimental-features nix-command copy --no-check-sigs --to ssh-ng://root@{{ ansible_host }} {{ system }}
      delegate_to: localhost
      connection: local
    - raw: nix-env -p /nix/var/nix/profiles/system --set {{ system }}
    - raw: "{{ system }}/bin/switch-to-configuration switch"
`)
	cmd := exec.Command(playbook, "-i", "inventory", "--forks", fmt.Sprint(len(p.names)), "playbook.yml")
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), append(fleettest.NixEnv(), "NIX_SSHOPTS=-F "+p.sshConfig(), "ANSIBLE_PIPELINING=True", "HOME="+p.dir)...)
	spent := p.timed(cmd)
	p.done(p.names)
	return spent
}

// morph deploys what stand-ins for its evaluation and its build say.
func (p *peers) morph(binary string) float64 {
	p.t.Helper()
	p.next()
	type host struct{ Name, TargetHost, TargetUser string }
	var hosts []host
	build := "#!/bin/sh\nfor a; do [ \"$last\" = --out-link ] && link=$a; last=$a; done\nmkdir -p \"$0.d\" && cd \"$0.d\" && rm -f ./*\n"
	for i, name := range p.names {
		hosts = append(hosts, host{name, p.fleet.Hosts[i].Addr(), "root"})
		build += fmt.Sprintf("ln -s %s %s\n", p.systems[name].Out, name)
	}
	text, err := json.Marshal(map[string]any{"hosts": hosts, "meta": map[string]any{}})
	if err != nil {
		p.t.Fatal(err)
	}
	p.writeFile("eval", "#!/bin/sh\ncase $* in *buildShell*) echo null; exit ;; esac\ncat <<'END'\n"+string(text)+"\nEND\n")
	p.writeFile("build", build+"ln -sfn \"$0.d\" \"$link\"\n")
	for _, name := range []string{"eval", "build"} {
		if err := os.Chmod(filepath.Join(p.dir, name), 0o700); err != nil {
			p.t.Fatal(err)
		}
	}
	p.writeFile("deployment.nix", "{}\n")
	cmd := exec.Command(binary, "deploy", "deployment.nix", "switch")
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), append(fleettest.NixEnv(), "SSH_CONFIG_FILE="+p.sshConfig(),
		"MORPH_NIX_EVAL_CMD="+filepath.Join(p.dir, "eval"), "MORPH_NIX_BUILD_CMD="+filepath.Join(p.dir, "build"))...)
	spent := p.timed(cmd)
	p.done(p.names)
	return spent
}

// sshConfig is an OpenSSH configuration for the fleet, strict about host keys.
func (p *peers) sshConfig() string {
	p.t.Helper()
	known := ""
	for _, h := range p.fleet.Hosts {
		known += h.Addr() + " " + h.HostKey() + "\n"
	}
	p.writeFile("known", known)
	p.writeFile("ssh_config", fmt.Sprintf("Host *\n IdentityFile %s\n IdentitiesOnly yes\n BatchMode yes\n UserKnownHostsFile %s\n",
		p.fleet.KeyFile(), filepath.Join(p.dir, "known")))
	return filepath.Join(p.dir, "ssh_config")
}

// BenchmarkTwentyHosts changes 20 hosts at once; the activation of each sleeps
// for 5 s. The metrics are ratios: of the fleet to one host, and of other tools
// to tf-hosts, where they are there: an ansible-playbook on PATH, and a morph
// that TF_HOSTS_BENCH_MORPH names.
func BenchmarkTwentyHosts(b *testing.B) {
	const hosts = 20
	fleettest.Require(b)
	for _, kv := range fleettest.NixEnv() {
		k, v, _ := strings.Cut(kv, "=")
		b.Setenv(k, v)
	}
	fleet := fleettest.New(b, fleettest.Config{Hosts: fleettest.Hosts(hosts)})
	p := &peers{rig: newRig(b, fleet), systems: map[string]*fleettest.Closure{}}
	p.runner["parallelism"] = hosts
	for i := range hosts {
		p.names = append(p.names, fmt.Sprintf("bench.h%02d", i+1))
	}
	p.own(hosts) // the first apply creates the resources, and learns what ssh needs
	for b.Loop() {
		one := p.own(1)
		before := p.sshCount(fleet.Hosts[hosts-1])
		all := p.own(hosts)
		after := p.sshCount(fleet.Hosts[hosts-1])
		b.Logf("%d cores: one host %.1f s, %d hosts %.1f s, %d authentications a host", runtime.NumCPU(), one, hosts, all, after.Accepted-before.Accepted)
		b.ReportMetric(all/one, "fleet/one")
		b.ReportMetric(float64(after.Accepted-before.Accepted), "auth/host")
		if playbook, err := exec.LookPath("ansible-playbook"); err == nil {
			spent := p.ansible(playbook)
			b.Logf("ansible %.1f s", spent)
			b.ReportMetric(spent/all, "ansible/tf-hosts")
		}
		if binary := os.Getenv("TF_HOSTS_BENCH_MORPH"); binary != "" {
			spent := p.morph(binary)
			b.Logf("morph %.1f s", spent)
			b.ReportMetric(spent/all, "morph/tf-hosts")
		}
	}
}
