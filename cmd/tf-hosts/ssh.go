package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/hostconn"
)

func newSSHCommand(p *program) *cobra.Command {
	c := &cobra.Command{
		Use:   "ssh NODE [-- COMMAND...]",
		Short: "log in to a node with the system's ssh",
		Long: `ssh becomes the system's ssh, with the node's settings: username, key_file (and no
other key), ssh_opts, and host_key. A pinned host key is the only one that is
believed. Without one, the known_hosts files of the user and of the working dir
decide, and the key of a first connection is remembered in the working dir, as a
deploy does it; a changed key is never accepted.

COMMAND is handed on as ssh does it: the login shell of the host reads it. "tf-hosts
exec" hands the words over as they are. Jump hosts log in as the user's OpenSSH
configuration says. The exit code is ssh's.`,
		Example: "  tf-hosts ssh prod.app1\n  tf-hosts ssh prod.app1 -- 'journalctl --follow --unit nginx | grep error'",
		Args:    cobra.ArbitraryArgs, ValidArgsFunction: p.completeNodes,
		RunE: func(_ *cobra.Command, args []string) error { return p.runSSH(args) },
	}
	c.Flags().SetInterspersed(false) // what follows the node is the command's
	return c
}

func (p *program) runSSH(args []string) error {
	if len(args) == 0 {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts ssh NODE", errors.New("which node?"))
	}
	name, command := args[0], args[1:]
	if len(command) > 0 && command[0] == "--" { // behind the node, pflag leaves it
		command = command[1:]
	}
	s, err := p.loadSetup(true)
	if err != nil {
		return err
	}
	node, err := nodeNamed(s, name)
	if err != nil {
		return err
	}
	target, err := hostconn.TargetOf(name, node.Node, node.Runner)
	if err != nil {
		return err
	}
	settings, err := hostconn.Resolve(target, hostconn.Config{})
	if err != nil {
		return tfhosts.WithExit(tfhosts.ExitUsage, "correct ssh_opts in the setup file, or the OpenSSH configuration", err)
	}
	ssh, err := exec.LookPath("ssh")
	if err != nil {
		return tfhosts.WithExit(tfhosts.ExitFailed, "install OpenSSH's client; tf-hosts exec needs none",
			fmt.Errorf("logging in to %q: there is no ssh on PATH", name))
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return err
	}
	workDir := bootstrap.WorkDir(stateDir, s.Backend.Address)
	believed := []string{bootstrap.KnownHosts(workDir)}
	pins := filepath.Join(workDir, "pins")
	if target.HostKey == "" {
		believed = append(believed, settings.UserKnownHostsFiles...)
	} else {
		believed = []string{filepath.Join(pins, name)}
	}
	if err := bootstrap.MakePrivate(pins); err != nil {
		return err
	}
	if target.HostKey != "" {
		lines, err := hostconn.KnownHostsLines(name, target.HostKey)
		if err != nil {
			return err
		}
		// A file that stays, since ssh takes this process's place.
		if err := durable.Replace(believed[0], []byte(lines), 0o600, "pins", nil); err != nil {
			return err
		}
	}
	argv := sshArgv(target, settings.StrictHostKeyChecking, believed, command)
	if err := syscall.Exec(ssh, argv, os.Environ()); err != nil {
		return fmt.Errorf("starting %q: %w", ssh, err)
	}
	return nil
}

// sshArgv is the command line of the system's ssh. believed are the known_hosts
// files: of a pinned target the one that knows its name alone. What comes first
// wins with ssh, over ssh_opts and the configuration.
func sshArgv(t hostconn.Target, strict bool, believed, command []string) []string {
	argv := []string{"ssh"}
	option := func(name, value string) { argv = append(argv, "-o", name+"="+value) }
	files := make([]string, len(believed))
	for i, file := range believed {
		files[i] = sshPath(file)
	}
	option("UserKnownHostsFile", strings.Join(files, " "))
	switch {
	case t.HostKey != "":
		option("GlobalKnownHostsFile", "none")
		option("HostKeyAlias", t.Name)
		option("StrictHostKeyChecking", "yes")
		option("UpdateHostKeys", "no")
		option("VerifyHostKeyDNS", "no")
	case strict:
		option("StrictHostKeyChecking", "yes")
	default:
		option("StrictHostKeyChecking", "accept-new")
	}
	if t.KeyFile != "" {
		option("IdentityFile", sshPath(t.KeyFile))
		option("IdentitiesOnly", "yes")
	}
	for _, opt := range t.Options {
		argv = append(argv, "-o", opt)
	}
	if t.User != "" {
		argv = append(argv, "-l", t.User)
	}
	host := strings.TrimSuffix(strings.TrimPrefix(t.Host, "["), "]")
	return append(append(argv, "--", host), command...)
}

// sshPath is a path as an option of ssh takes it, with nothing expanded.
func sshPath(path string) string {
	return `"` + strings.NewReplacer(`%`, `%%`, `\`, `\\`, `"`, `\"`).Replace(path) + `"`
}

// nodeNamed is a node of the setup by its name.
func nodeNamed(s *tfhosts.Setup, name string) (tfhosts.SetupNode, error) {
	node, ok := s.Nodes[name]
	if ok {
		return node, nil
	}
	hint := "nodes are: " + strings.Join(tfhosts.SortedNames(s.Nodes), ", ")
	if near := tfhosts.Near(name, tfhosts.SortedNames(s.Nodes)); near != "" {
		hint = fmt.Sprintf("did you mean %q?", near)
	}
	return node, tfhosts.WithExit(tfhosts.ExitUsage, hint, fmt.Errorf("there is no node %q", name))
}
