package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/setup"
)

func newRootCommand(p *program) *cobra.Command {
	root := &cobra.Command{
		Use:   "tf-hosts",
		Short: "keep hosts as an OpenTofu graph says",
		Long: `tf-hosts keeps hosts as an OpenTofu graph says: NixOS nodes get their system over
SSH, and deploy again only when their trigger values change. The state lives on
an HTTP backend.

OpenTofu's own flags may stand as they are, with one dash or two, or after "--".
VERB --help tells the flags of tf-hosts, VERB -help those of OpenTofu.`,
		Version:       version,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE:          p.runBare,
	}
	root.SuggestionsMinimumDistance = 2
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return tfhosts.WithExit(tfhosts.ExitUsage, flagHint(c, err), err)
	})
	for _, v := range setup.Variables() {
		switch {
		case v.Bool:
			root.PersistentFlags().Bool(v.Flag, false, flagDoc(v))
		case v.Secret:
			root.PersistentFlags().String(v.Flag, "", "file that holds the "+flagDoc(v))
		case v.List:
			root.PersistentFlags().Var(&listFlag{}, v.Flag, flagDoc(v))
		default:
			root.PersistentFlags().String(v.Flag, "", flagDoc(v))
		}
	}
	root.PersistentFlags().BoolVar(&p.jsonLog, "json", false, "tell the story as JSON, one event a line")
	root.PersistentPreRun = func(*cobra.Command, []string) { p.teller.setJSON(p.jsonLog) }
	root.AddGroup(&cobra.Group{ID: "tofu", Title: "OpenTofu verbs:"}, &cobra.Group{ID: "own", Title: "Verbs of tf-hosts:"})
	for _, v := range tfhosts.Verbs() {
		root.AddCommand(newVerbCommand(p, v))
	}
	for _, c := range []*cobra.Command{newRunCommand(p), newBackendCommand(p), newEnvCommand(p), newSchemaCommand(p), newRestoreCommand(p), newAllCommand(p), newDoctorCommand(p), newExecCommand(p), newStatusCommand(p), newHostKeysCommand(p), newSSHCommand(p), newRollbackCommand(p), newDiffCommand(p)} {
		c.GroupID = "own"
		root.AddCommand(c)
	}
	return root
}

func flagDoc(v setup.Variable) string {
	doc := v.Doc + " (" + v.Name
	if v.Default != "" && !v.Secret {
		doc += "; default " + v.Default
	}
	return doc + ")"
}

// runBare is the program without a verb: TF_VERB names it, else there is help.
func (p *program) runBare(c *cobra.Command, args []string) error {
	verb, err := p.bareVerb(c, args)
	if err != nil || verb == nil {
		return err
	}
	return p.runVerb(c.Context(), &verbOptions{}, *verb, nil)
}

func noVerbError(c *cobra.Command, word string) error {
	hint := c.CommandPath() + " --help"
	if near := c.SuggestionsFor(word); len(near) > 0 {
		hint = "did you mean: " + c.CommandPath() + " " + strings.Join(near, ", "+c.CommandPath()+" ")
	}
	return tfhosts.WithExit(tfhosts.ExitUsage, hint, fmt.Errorf("there is no verb %q", word))
}

// checkBootstrap is made before the setup is read: BOOTSTRAP=1 goes with apply
// alone (FR-011), and TF_VERB may not contradict the verb.
func (p *program) checkBootstrap(verb string) error {
	bootstrap, err := p.environment().Bool("BOOTSTRAP")
	if err != nil {
		return tfhosts.WithExit(tfhosts.ExitUsage, "unset BOOTSTRAP, or set it to 1", err)
	}
	fromEnv := p.environment().Value("TF_VERB")
	if bootstrap && (fromEnv != "" || verb != "" && verb != "apply") {
		other := fromEnv
		if other == "" {
			other = verb
		}
		return tfhosts.WithExit(tfhosts.ExitChanges, "leave BOOTSTRAP out, or the verb",
			fmt.Errorf("BOOTSTRAP=1 only goes with an apply, not with %q", other))
	}
	if verb != "" && fromEnv != "" && fromEnv != verb {
		return tfhosts.WithExit(tfhosts.ExitChanges, "unset TF_VERB",
			fmt.Errorf("TF_VERB=%s contradicts the verb %q", fromEnv, verb))
	}
	return nil
}
