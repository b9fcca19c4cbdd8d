package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"fediversity.eu/tf-hosts/hostconn"
)

func TestSSHArgv(t *testing.T) {
	pinned := "GlobalKnownHostsFile=none HostKeyAlias=prod.app1 StrictHostKeyChecking=yes UpdateHostKeys=no VerifyHostKeyDNS=no"
	for _, row := range []struct {
		name     string
		target   hostconn.Target
		strict   bool
		believed []string
		command  []string
		options  string // what stands behind -o, in order
		rest     []string
	}{
		{
			name:   "pinned",
			target: hostconn.Target{Name: "prod.app1", Host: "app1.example.org", User: "root", KeyFile: "/k", HostKey: "ssh-ed25519 AAAA"}, believed: []string{"/p"},
			options: `UserKnownHostsFile="/p" ` + pinned + ` IdentityFile="/k" IdentitiesOnly=yes`,
			rest:    []string{"-l", "root", "--", "app1.example.org"},
		},
		{
			name:   "a pin comes before what ssh_opts say of host keys",
			target: hostconn.Target{Name: "prod.app1", Host: "h", HostKey: "ssh-ed25519 AAAA", Options: []string{"HostKeyAlias=x", "Port=2222"}}, believed: []string{"/p"},
			options: `UserKnownHostsFile="/p" ` + pinned + ` HostKeyAlias=x Port=2222`,
			rest:    []string{"--", "h"},
		},
		{
			name:   "not pinned",
			target: hostconn.Target{Name: "prod.app1", Host: "h", User: "deploy"}, believed: []string{"/w/known_hosts", "/home/me/.ssh/known_hosts"},
			options: `UserKnownHostsFile="/w/known_hosts" "/home/me/.ssh/known_hosts" StrictHostKeyChecking=accept-new`,
			rest:    []string{"-l", "deploy", "--", "h"},
		},
		{
			name:   "not pinned and strict",
			target: hostconn.Target{Name: "prod.app1", Host: "h"}, strict: true, believed: []string{"/w"},
			options: `UserKnownHostsFile="/w" StrictHostKeyChecking=yes`,
			rest:    []string{"--", "h"},
		},
		{
			name:   "an address in brackets, a command, and awkward paths",
			target: hostconn.Target{Name: "prod.app1", Host: "[fe80::1%eth0]", KeyFile: `/a b/%h"k`}, believed: []string{"/w"}, command: []string{"ls", "-l"},
			options: `UserKnownHostsFile="/w" StrictHostKeyChecking=accept-new IdentityFile="/a b/%%h\"k" IdentitiesOnly=yes`,
			rest:    []string{"--", "fe80::1%eth0", "ls", "-l"},
		},
	} {
		argv := sshArgv(row.target, row.strict, row.believed, row.command)
		var options []string
		rest := argv[1:]
		for len(rest) > 1 && rest[0] == "-o" {
			options, rest = append(options, rest[1]), rest[2:]
		}
		if diff := cmp.Diff(row.options, strings.Join(options, " ")); diff != "" {
			t.Errorf("%s: options (-want +got):\n%s", row.name, diff)
		}
		if diff := cmp.Diff(row.rest, rest); diff != "" {
			t.Errorf("%s: behind the options (-want +got):\n%s", row.name, diff)
		}
	}
}
