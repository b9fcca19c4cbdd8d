package nix

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// ErrNames says that an expression is no function from a submission to a list
// of names.
var ErrNames = errors.New("a Nix function from a submission to a list of names is expected")

// namesArgv applies expr to the submission. The submission never becomes Nix
// code: it is a file that is named by an argument and read as JSON.
func (c *Client) namesArgv(expr, submission string) []string {
	const apply = `{ submission }:
let
  f = (
%s
  );
  g = if builtins.isPath f || builtins.isString f then import f else f;
in
g (builtins.fromJSON (builtins.readFile submission))`
	return c.argv("nix-instantiate", "--eval", "--strict", "--json", "-E", fmt.Sprintf(apply, expr),
		"--argstr", "submission", submission)
}

func (c *Client) parseArgv(expr string) []string {
	return c.argv("nix-instantiate", "--parse", "-E", expr)
}

// Names evaluates expr, a Nix function or the path of a file that holds one, for
// a submission: the absolute path of a JSON file. Relative paths in expr are
// relative to dir. The error is ErrNames where expr does not parse, fails, or
// gives something else than a list of strings; ErrNotInstalled without Nix.
func (c *Client) Names(ctx context.Context, dir, expr, submission string) ([]string, error) {
	fail := func(err error) ([]string, error) {
		var ended *commandError
		if errors.As(err, &ended) {
			err = fmt.Errorf("%w: %w", ErrNames, err)
		}
		return nil, fmt.Errorf("evaluating the published names: %w", err)
	}
	// By itself first: what is no whole expression must not become one between
	// the parentheses.
	if _, err := c.runIn(ctx, dir, c.parseArgv(expr), nil); err != nil {
		return fail(err)
	}
	printed, err := c.runIn(ctx, dir, c.namesArgv(expr, submission), nil)
	if err != nil {
		return fail(err)
	}
	var items []*string // a null would become an empty name
	text := strings.TrimSpace(printed)
	if !strings.HasPrefix(text, "[") || json.Unmarshal([]byte(text), &items) != nil || slices.Contains(items, nil) {
		return fail(fmt.Errorf("%w, it gives %.200s", ErrNames, text))
	}
	names := make([]string, len(items))
	for i, item := range items {
		names[i] = *item
	}
	return names, nil
}
