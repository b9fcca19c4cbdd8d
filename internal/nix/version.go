package nix

import (
	"context"
	"fmt"
	"strings"
)

// Version asks the client for its version: "2.8.0". The error is
// ErrNotInstalled without Nix.
func (c *Client) Version(ctx context.Context) (string, error) {
	out, err := c.run(ctx, c.argv("nix", "--version"), nil)
	if err != nil {
		return "", fmt.Errorf("asking nix for its version: %w", err)
	}
	fields := strings.Fields(out)
	if len(fields) == 0 {
		return "", fmt.Errorf("asking nix for its version: it says %q", out)
	}
	return fields[len(fields)-1], nil
}

// CanEvaluate evaluates a trivial expression with both of the tools that
// Identity uses; the store must open for that, too. It adds nothing to it.
func (c *Client) CanEvaluate(ctx context.Context) error {
	for _, argv := range [][]string{
		c.argv("nix-instantiate", "--eval", "-E", "1 + 1"),
		c.argv("nix", "eval", "--expr", "1 + 1"),
	} {
		out, err := c.run(ctx, argv, nil)
		if err != nil {
			return fmt.Errorf("evaluating 1 + 1: %w", err)
		}
		if strings.TrimSpace(out) != "2" {
			return fmt.Errorf("evaluating 1 + 1: %s says %q", argv[0], out)
		}
	}
	return nil
}
