package bootstrap

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// limit is how many deploys may run at once.
func (a *arguments) limit() (int, error) {
	text := strings.TrimPrefix(a.parallelism, "-parallelism=")
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, tfhosts.WithExit(tfhosts.ExitUsage, "", fmt.Errorf("-parallelism=%s: a whole number from 1 on is needed", text))
	}
	return n, nil
}

// route gives each group that the verb concerns its arguments. A node's name
// sends the verb to the group of the node alone. What belongs to one state
// needs one named group.
func (c *Config) route(args *arguments, groups []string, one bool) (map[string][]string, error) {
	to := make(map[string][]string, len(groups))
	if one {
		to[groups[0]] = c.Args
		return to, nil
	}
	flags, operands := splitOperands(c.Args)
	if err := c.checkShared(args, operands); err != nil {
		return nil, err
	}
	if c.Verb.Addresses == 0 || len(operands) == 0 {
		for _, g := range groups {
			to[g] = c.Args
		}
		return to, nil
	}
	addresses := len(operands)
	if c.Verb.Addresses > 0 {
		addresses = min(addresses, c.Verb.Addresses)
	}
	own := map[string][]string{}
	var unknown []string
	for _, op := range operands[:addresses] {
		group := c.Setup.Nodes[nodeOf(op)].Group
		if group == "" {
			unknown = append(unknown, fmt.Sprintf("%q", op))
			continue
		}
		own[group] = append(own[group], op)
	}
	renames := c.Verb.Name == "state-mv" && len(own) == 1
	if len(unknown) > 0 && !renames {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "name the group: tf-hosts all --group GROUP "+c.Verb.Name,
			fmt.Errorf("%s: no node of the setup, so its group is not known", strings.Join(unknown, ", ")))
	}
	if c.Verb.Addresses > 0 && len(own) > 1 {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "", fmt.Errorf("%s between two groups: each has a state of its own", c.Verb.Name))
	}
	for group, ops := range own {
		if !slices.Contains(groups, group) {
			return nil, tfhosts.WithExit(tfhosts.ExitUsage, "", fmt.Errorf("%s: in the group %q, which was not named", strings.Join(ops, ", "), group))
		}
		if c.Verb.Addresses > 0 {
			ops = operands // with the ID of an import, and the new name of a state-mv
		}
		to[group] = append(slices.Clone(flags), ops...)
	}
	return to, nil
}

// checkShared refuses what several groups can not share.
func (c *Config) checkShared(args *arguments, operands []string) error {
	var errs []error
	switch c.Verb.Name {
	case "apply", "show":
		if len(operands) > 0 {
			errs = append(errs, fmt.Errorf("a saved plan (%q) is one group's", operands[0]))
		}
	case "force-unlock", "state-push":
		errs = append(errs, fmt.Errorf("%s concerns one group's state", c.Verb.Name))
	}
	if args.out != "" {
		errs = append(errs, errors.New("-out: one file can not hold the plans of several groups"))
	}
	for _, flag := range args.flags {
		switch name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "="); name {
		case "plan", "json-into", "generate-config-out":
			errs = append(errs, fmt.Errorf("-%s: several groups can not share one file", name))
		}
	}
	return tfhosts.WithExit(tfhosts.ExitUsage, "name one group: tf-hosts all --group GROUP "+c.Verb.Name, errors.Join(errs...))
}

// splitOperands parts the words after a verb as parseArguments does, and leaves
// each as it was written.
func splitOperands(args []string) (flags, operands []string) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if !strings.HasPrefix(arg, "-") || arg == "-" {
			operands = append(operands, arg)
			continue
		}
		flags = append(flags, arg)
		name := strings.TrimLeft(arg, "-")
		if !strings.Contains(name, "=") && takesWord(name) && i+1 < len(args) {
			i++
			flags = append(flags, args[i])
		}
	}
	return flags, operands
}

// nodeOf is the node that a name or an address names.
func nodeOf(operand string) string {
	if name, ok := strings.CutPrefix(operand, `terraform_data.nixos["`); ok {
		return strings.TrimSuffix(name, `"]`)
	}
	return operand
}
