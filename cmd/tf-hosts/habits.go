package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// tofuHabits rewrites what a hand used to OpenTofu types: "state list" is the
// verb state-list, and every flag behind a verb that is none of ours moves
// behind "--". OpenTofu's flags are Go flags: one dash or two. Only what looks
// like one of ours misspelt stays, for cobra to refuse.
func tofuHabits(root *cobra.Command, args []string) []string {
	c, verbAt := root, -1
	for i := 0; i < len(args) && verbAt < 0; i++ {
		a := args[i]
		if a == "--" {
			return args
		}
		if strings.HasPrefix(a, "--") {
			if takesValue(c, a[2:]) {
				i++ // a group, or a setup file, may be named as a verb
			}
			continue
		}
		if a == "state" && i+1 < len(args) {
			if _, ok := tfhosts.LookupVerb("state-" + args[i+1]); ok {
				a = "state-" + args[i+1]
				args = slices.Concat(args[:i], []string{a}, args[i+2:])
			}
		}
		c = command(c, a)
		if c == nil {
			return args
		}
		if _, ok := tfhosts.LookupVerb(a); ok {
			verbAt = i
		}
	}
	if verbAt < 0 {
		return args
	}
	head := slices.Clone(args[:verbAt+1])
	var tail []string
	rest := args[verbAt+1:]
	for i := 0; i < len(rest); i++ {
		a := rest[i]
		switch {
		case a == "--":
			tail = append(tail, rest[i+1:]...)
			i = len(rest)
		case a == "-h" || strings.HasPrefix(a, "--") && (ours(c, a[2:]) || refused(c, a[2:]) != ""):
			head = append(head, a)
			// A flag of ours with its value as a word of its own.
			if i+1 < len(rest) && takesValue(c, strings.TrimPrefix(a, "--")) {
				i++
				head = append(head, rest[i])
			}
		default:
			tail = append(tail, a)
		}
	}
	if len(tail) == 0 {
		return head
	}
	return append(append(head, "--"), tail...)
}

func command(c *cobra.Command, name string) *cobra.Command {
	for _, sub := range c.Commands() {
		if sub.Name() == name {
			return sub
		}
	}
	return nil
}

// ours says whether a flag, perhaps with "=VALUE", is one of tf-hosts on c.
func ours(c *cobra.Command, flag string) bool {
	name, _, _ := strings.Cut(flag, "=")
	return name == "help" || c.Flag(name) != nil
}

// takesValue says whether the next word is the value of a flag of ours.
func takesValue(c *cobra.Command, flag string) bool {
	f := c.Flag(flag)
	return f != nil && f.NoOptDefVal == ""
}

// refused is what to do instead of a flag that neither c nor OpenTofu has: it
// looks like one of ours misspelt, or is one of another command. Empty: it may
// be OpenTofu's.
func refused(c *cobra.Command, flag string) string {
	name, _, _ := strings.Cut(flag, "=")
	if slices.Contains(tofuFlags(), name) || len(name) < 3 {
		return ""
	}
	if other := owner(c.Root(), name); other != nil {
		return fmt.Sprintf("--%s is a flag of %q", name, other.CommandPath())
	}
	near := &cobra.Command{SuggestionsMinimumDistance: 2}
	add := func(f *pflag.Flag) {
		near.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
	}
	c.LocalFlags().VisitAll(add)
	c.InheritedFlags().VisitAll(add)
	if all := near.SuggestionsFor(name); len(all) > 0 {
		return "did you mean: --" + strings.Join(all, ", --") + `; a flag of OpenTofu's goes behind "--"`
	}
	return ""
}

// owner is the first command that has a flag.
func owner(c *cobra.Command, flag string) *cobra.Command {
	if c.LocalFlags().Lookup(flag) != nil {
		return c
	}
	for _, sub := range c.Commands() {
		if found := owner(sub, flag); found != nil {
			return found
		}
	}
	return nil
}

// tofuFlags are the flags of OpenTofu 1.12 on the verbs that there are. One
// that is missing here is passed on all the same, unless it looks like one of
// ours misspelt; behind "--" it always is.
func tofuFlags() []string {
	return []string{
		"allow-missing", "allow-missing-config", "auto-approve", "backup", "backup-out", "chdir", "compact-warnings",
		"concise", "config", "consolidate-errors", "consolidate-warnings", "deprecation", "destroy", "detailed-exitcode",
		"draw-cycles", "dry-run", "exclude", "exclude-file", "force", "generate-config-out", "id", "ignore-remote-version",
		"input", "json", "json-into", "lock", "lock-timeout", "module", "module-depth", "no-color", "no-tests", "out",
		"parallelism", "plan", "raw", "refresh", "refresh-only", "replace", "show-sensitive", "state", "state-out",
		"suppress-forget-errors", "target", "target-file", "test-directory", "type", "var", "var-file", "verbose",
	}
}

// flagHint is the way out of a flag that cobra refused.
func flagHint(c *cobra.Command, err error) string {
	hint := c.CommandPath() + " --help"
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) {
		return hint
	}
	if instead := refused(c, unknown.GetSpecifiedName()); instead != "" {
		return instead
	}
	return hint
}

// asksHelp: OpenTofu's own help is asked for.
func asksHelp(args []string) bool {
	return slices.ContainsFunc(args, func(a string) bool { return a == "-help" || a == "--help" || a == "-h" })
}

// tofuHelp prints OpenTofu's help of a verb. Neither setup nor backend is
// needed for it.
func (p *program) tofuHelp(ctx context.Context, verb tfhosts.Verb) error {
	cacheDir, err := p.cacheDir()
	if err != nil {
		return err
	}
	engine, err := tofu.Find(ctx, tofu.FindConfig{Explicit: p.environment().Value("TF_HOSTS_TOFU"), CacheDir: cacheDir})
	if err != nil {
		return err
	}
	cmd := engine.Build(tofu.Command{Args: slices.Concat(verb.Tofu, []string{"-help"}), Dir: p.dir, Env: p.environ})
	cmd.Stdout, cmd.Stderr = p.stdout, p.teller
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("asking OpenTofu for the help of %q: %w", verb.Name, err)
	}
	return nil
}
