package nix

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// ErrNotSystem says that what nixos_conf names is no NixOS system.
var ErrNotSystem = errors.New("not a NixOS system")

// toplevelExpr takes what a .nix file holds to the derivation of its system:
// a function with all arguments defaulted, an attribute set of a NixOS
// evaluation, or the derivation itself.
const toplevelExpr = `{ path }:
let
  v = import (/. + path);
  w = if builtins.isFunction v then v { } else v;
in
if w ? config.system.build.toplevel then w.config.system.build.toplevel
else if builtins.isAttrs w && (w.type or null) == "derivation" then w
else throw "tf-hosts: has neither config.system.build.toplevel nor is it a derivation"`

// Identity is what changes exactly when the system that conf names changes: a
// store path and a .drv are themselves; a .nix file, relative to dir, and
// FLAKE#nixosConfigurations.NAME are evaluated to the derivation path of their
// toplevel, and the .drv is then in the store and rooted. An identity that was
// given (config_identity) is taken as it is, and nothing is evaluated.
//
// A store path is checked for bin/switch-to-configuration only where it is
// present on this machine, so that the answer does not depend on the machine.
// The error is ErrNotSystem for anything else, ErrNotInstalled without Nix.
func (c *Client) Identity(ctx context.Context, dir, conf, given string) (string, error) {
	fail := func(err error) (string, error) {
		return "", fmt.Errorf("evaluating nixos_conf %q: %w", conf, err)
	}
	switch {
	case IsStorePath(given):
		return given, nil
	case given != "":
		return "", fmt.Errorf("reading config_identity %q: a store path is expected", given)
	case strings.HasPrefix(conf, "-"):
		return fail(errors.New("it begins with a dash"))
	case IsDerivation(conf):
		return conf, nil
	case IsStorePath(conf):
		if err := checkSystem(conf); err != nil {
			return fail(err)
		}
		return conf, nil
	case strings.Contains(conf, "#"):
		return c.flakeIdentity(ctx, dir, conf)
	case strings.HasSuffix(conf, ".nix"):
		path := conf
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		path, err := filepath.Abs(path)
		if err != nil {
			return fail(err)
		}
		if _, err := os.Stat(path); err != nil {
			return fail(err)
		}
		drv, err := c.instantiate(ctx, path)
		if err != nil {
			return fail(err)
		}
		return drv, nil
	}
	return fail(fmt.Errorf("%w: a store path, a .drv, a .nix file or FLAKE#nixosConfigurations.NAME is expected", ErrNotSystem))
}

func checkSystem(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil // not on this machine: Build tells
	}
	if _, err := os.Stat(filepath.Join(path, "bin/switch-to-configuration")); err != nil {
		return fmt.Errorf("%w: it has no bin/switch-to-configuration", ErrNotSystem)
	}
	return nil
}

func (c *Client) instantiateArgv(path string) []string {
	return c.argv("nix-instantiate", "-E", toplevelExpr, "--argstr", "path", path)
}

func (c *Client) instantiate(ctx context.Context, path string) (string, error) {
	out, err := c.run(ctx, c.instantiateArgv(path), nil)
	if err != nil {
		return "", err
	}
	return c.rootedDerivation(ctx, out)
}

func (c *Client) flakeArgv(ref, attr string) []string {
	return c.argv("nix", "eval", "--raw", "--no-write-lock-file",
		ref+"#"+attr+".config.system.build.toplevel.drvPath")
}

func (c *Client) flakeIdentity(ctx context.Context, dir, conf string) (string, error) {
	ref, attr, _ := strings.Cut(conf, "#")
	if name, ok := strings.CutPrefix(attr, "nixosConfigurations."); !ok || name == "" || ref == "" {
		return "", fmt.Errorf("evaluating nixos_conf %q: %w: FLAKE#nixosConfigurations.NAME is expected", conf, ErrNotSystem)
	}
	out, err := c.runIn(ctx, dir, c.flakeArgv(ref, attr), nil)
	if err == nil {
		out, err = c.rootedDerivation(ctx, out)
	}
	if err != nil {
		return "", fmt.Errorf("evaluating nixos_conf %q: %w", conf, err)
	}
	return out, nil
}

// rootedDerivation reads the one derivation that a tool printed and roots it.
func (c *Client) rootedDerivation(ctx context.Context, printed string) (string, error) {
	drv := strings.TrimSpace(printed)
	// nix-instantiate names another output than "out" behind a "!".
	drv, _, _ = strings.Cut(drv, "!")
	if !IsDerivation(drv) {
		return "", fmt.Errorf("%w: it evaluates to %q instead of one derivation", ErrNotSystem, drv)
	}
	return drv, c.root(ctx, drv)
}
