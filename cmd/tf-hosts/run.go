package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/setup"
)

// runGoals are those of "run --goal". An apply knows the first two: it records
// what stays.
var runGoals = [...]string{"switch", "boot", "test", "dry-activate"}

type runOptions struct {
	goal string
}

func newRunCommand(p *program) *cobra.Command {
	opts := &runOptions{}
	c := &cobra.Command{
		Use:   "run",
		Short: "deploy the one node that the environment names (the provisioner's command)",
		Long: `run deploys one node. It takes nixos_conf, username, host, key_file, host_key and
ssh_opts from the environment. Under an apply it hands them to the running
tf-hosts through TF_HOSTS_SOCK and ends with the node's exit code: 0, or 10 to 21.

Alone it knows two more goals: "test" runs the system until the next boot, and
"dry-activate" prints what the host says an activation would do.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return p.runNode(c.Context(), opts) },
	}
	c.Flags().StringVar(&opts.goal, "goal", "", "switch, boot, test or dry-activate; wins over the settings")
	return c
}

func (p *program) runNode(ctx context.Context, opts *runOptions) error {
	if opts.goal != "" && !slices.Contains(runGoals[:], opts.goal) {
		return tfhosts.WithExit(tfhosts.ExitUsage, "one of "+strings.Join(runGoals[:], ", "), fmt.Errorf("unknown goal %q", opts.goal))
	}
	node := tfhosts.Node{
		NixosConf: p.getenv("nixos_conf"), Username: p.getenv("username"), Host: p.getenv("host"),
		KeyFile: p.getenv("key_file"), HostKey: p.getenv("host_key"), SSHOpts: p.getenv("ssh_opts"),
	}
	if node.NixosConf == "" || node.Host == "" {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts run --help",
			fmt.Errorf("the environment names no node: nixos_conf and host are needed"))
	}
	var verdict tfhosts.Verdict
	var err error
	if socket := p.environment().Value("TF_HOSTS_SOCK"); socket != "" {
		if opts.goal != "" {
			return tfhosts.WithExit(tfhosts.ExitUsage, `set "goal" in the setup, or run it without TF_HOSTS_SOCK`,
				errors.New("--goal has no place under an apply, which records what it deploys"))
		}
		verdict, err = bootstrap.HandOver(ctx, socket, node)
	} else {
		verdict, err = p.runAlone(ctx, node, opts.goal)
	}
	if err != nil {
		return err
	}
	p.code = verdict.ExitCode()
	if verdict.Status == tfhosts.DryRun {
		for _, line := range verdict.Log {
			fmt.Fprintln(p.stdout, tfhosts.Printable(line)) //nolint:errcheck // a reader that went away is no failure of the node
		}
	}
	p.teller.say(verdict.String())
	if verdict.Failed() && verdict.Hint != "" {
		p.teller.say("hint: " + verdict.Hint)
	}
	return nil
}

// rebootIfNeeded is --reboot-if-needed, which goes for all nodes.
func (p *program) rebootIfNeeded() (bool, error) {
	set, err := p.environment().Bool("TF_HOSTS_REBOOT_IF_NEEDED")
	if err != nil {
		return false, tfhosts.WithExit(tfhosts.ExitUsage, "unset it, or set it to 1", err)
	}
	return set, nil
}

// withReboot is the settings with the flag over them.
func withReboot(settings tfhosts.NodeSettings, reboot bool) tfhosts.NodeSettings {
	if reboot {
		settings.RebootIfNeeded = &reboot
	}
	return settings
}

// runAlone deploys without a wrapper: it does the work itself.
func (p *program) runAlone(ctx context.Context, node tfhosts.Node, goal string) (tfhosts.Verdict, error) {
	settings, err := setup.NodeSettings(p.environment().Value("TF_HOSTS_NODE_SETTINGS"), p.dir)
	if err != nil {
		return tfhosts.Verdict{}, tfhosts.WithExit(tfhosts.ExitUsage, "correct TF_HOSTS_NODE_SETTINGS", err)
	}
	reboot, err := p.rebootIfNeeded()
	if err != nil {
		return tfhosts.Verdict{}, err
	}
	settings = withReboot(settings, reboot)
	if goal != "" {
		settings.Goal = goal
	}
	options, err := node.Options()
	if err == nil {
		err = checkOptions(options)
	}
	if err != nil {
		return tfhosts.Verdict{}, tfhosts.WithExit(tfhosts.ExitUsage, "correct ssh_opts", err)
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return tfhosts.Verdict{}, err
	}
	workDir := bootstrap.WorkDir(stateDir, "run")
	if err := bootstrap.MakePrivate(workDir); err != nil {
		return tfhosts.Verdict{}, err
	}
	w := newWorker(&tfhosts.Setup{Dir: p.dir}, workDir, p.teller.event)
	verdict, err := p.runWith(ctx, w, node, settings)
	return verdict, errors.Join(err, w.close())
}

// runWith builds and deploys. An interrupt ends the evaluation and the build;
// the deploy decides for itself.
func (p *program) runWith(ctx context.Context, w *worker, node tfhosts.Node, settings tfhosts.NodeSettings) (tfhosts.Verdict, error) {
	buildCtx, cancel := context.WithCancel(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-p.interrupt:
			cancel()
		case <-buildCtx.Done():
		}
	}()
	identity, err := w.identity(buildCtx, node.Host, node.NixosConf, "")
	var built map[string]bootstrap.Built
	if err == nil && settings.BuildOn != "target" {
		built, err = w.build(buildCtx, []string{identity})
	}
	interrupted := buildCtx.Err() != nil
	cancel()
	<-watched
	if interrupted {
		return tfhosts.Verdict{}, tfhosts.WithExit(tfhosts.ExitInterrupted, "", errors.New("interrupted during the build; nothing was changed"))
	}
	if err != nil {
		return tfhosts.Verdict{}, err
	}
	node.ConfigIdentity = identity
	return w.deploy(ctx, bootstrap.DeployRequest{
		Name: node.Host, Node: node, Settings: settings, Built: built[identity], Drop: p.interrupt,
	}), nil
}
