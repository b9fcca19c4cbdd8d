package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"fediversity.eu/tf-hosts/setup"
)

func newSchemaCommand(p *program) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "print the JSON Schema of the setup file",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if _, err := p.stdout.Write(setup.Schema()); err != nil {
				return fmt.Errorf("printing the schema: %w", err)
			}
			return nil
		},
	}
}
