package main

import (
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/setup"
)

func newEnvCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: "print every variable that the program reads, its value, origin and flag",
		Args:  cobra.NoArgs,
		RunE:  func(*cobra.Command, []string) error { return p.runEnv() },
	}
}

func (p *program) runEnv() error {
	origins, err := setup.Origins(setup.Options{Getenv: p.getenv, Flag: p.flag})
	if err != nil { // the layer of the file is missing then; the rest is still asked for
		p.teller.event(tfhosts.Event{Kind: tfhosts.EventWarning, Message: "without the setup file: " + err.Error()})
	}
	t := tabwriter.NewWriter(p.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "VARIABLE\tVALUE\tORIGIN\tFLAG") //nolint:errcheck // tabwriter keeps the error for Flush
	for _, o := range origins {
		fmt.Fprintf(t, "%s\t%s\t%s\t--%s\n", o.Name, o.Value, o.From, o.Flag) //nolint:errcheck // as above
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("printing the variables: %w", err)
	}
	return nil
}
