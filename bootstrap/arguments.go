package bootstrap

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

const (
	defaultLockTimeout = 60 * time.Second
	defaultParallelism = 10
)

// arguments are what the user gave after the verb, taken apart.
type arguments struct {
	// flags go to the planning command, operands keep their order.
	flags    []string
	operands []string

	parallelism      string // of plan and apply
	lockTimeout      string
	wait             time.Duration // lockTimeout, for the working dir's own lock
	lock             bool          // -lock=true was asked for
	detailedExitcode bool
	autoApprove      bool
	json             bool
	out              string // absolute path of -out, empty when not given
}

// parseArguments takes OpenTofu's arguments apart. What would lead around the
// relay or the lock is refused by name, exit 64.
func parseArguments(verb tfhosts.Verb, args []string, callerDir string, parallelism int) (*arguments, error) {
	if parallelism == 0 {
		parallelism = defaultParallelism
	}
	a := &arguments{
		parallelism: fmt.Sprintf("-parallelism=%d", parallelism),
		lockTimeout: "-lock-timeout=" + defaultLockTimeout.String(),
		wait:        defaultLockTimeout,
	}
	var errs []error
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if !strings.HasPrefix(arg, "-") || arg == "-" {
			a.operands = append(a.operands, arg)
			continue
		}
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		// A flag of tofu whose value follows as a word of its own.
		if !hasValue && takesWord(name) && i+1 < len(args) {
			i++
			value, hasValue = args[i], true
		}
		switch {
		case name == "state" || strings.HasPrefix(name, "state-") || name == "backup" || name == "backup-out":
			errs = append(errs, fmt.Errorf("-%s: the state is kept by tf-hosts, and only there", name))
		case name == "chdir":
			errs = append(errs, fmt.Errorf("-%s: the graph is generated; use --setup", name))
		case name == "destroy" && value != "false" && verb.Name == "apply":
			errs = append(errs, errors.New("-destroy: the verb is destroy"))
		case name == "lock" && value == "false":
			if verb.Writes {
				errs = append(errs, fmt.Errorf("-lock=false: %s writes state and never does so without the lock", verb.Name))
				continue
			}
		case name == "lock":
			a.lock = true
		case name == "parallelism":
			a.parallelism = "-parallelism=" + value
		case name == "lock-timeout":
			d, err := time.ParseDuration(value)
			if err != nil {
				errs = append(errs, fmt.Errorf("-lock-timeout=%s: a duration such as 60s is expected", value))
				continue
			}
			a.lockTimeout, a.wait = "-lock-timeout="+value, d
		case name == "detailed-exitcode":
			a.detailedExitcode = value != "false"
		case name == "auto-approve":
			a.autoApprove = value != "false"
		case name == "json":
			a.json = value != "false"
			a.flags = append(a.flags, arg)
		case name == "out":
			a.out = absolute(callerDir, value)
		case isFileFlag(name) && hasValue:
			a.flags = append(a.flags, "-"+name+"="+absolute(callerDir, value))
		case hasValue:
			a.flags = append(a.flags, "-"+name+"="+value)
		default:
			a.flags = append(a.flags, arg)
		}
	}
	if len(errs) > 0 {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "leave these flags out", errors.Join(errs...))
	}
	return a, nil
}

// takesWord: OpenTofu's flags are Go flags, so each of these may be written
// with a blank instead of "=".
func takesWord(name string) bool {
	switch name {
	case "target", "exclude", "replace", "var", "var-file", "target-file", "exclude-file", "out",
		"parallelism", "lock-timeout", "state", "state-out", "backup", "backup-out", "chdir",
		"generate-config-out", "json-into", "config", "type", "plan":
		return true
	}
	return false
}

// plansOnly: flags that shape a plan and mean nothing to one that is saved.
func plansOnly(flag string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
	switch name {
	case "target", "exclude", "replace", "var", "var-file", "target-file", "exclude-file", "refresh", "refresh-only":
		return true
	}
	return false
}

// isFileFlag: flags whose value is a path, relative to the caller.
func isFileFlag(name string) bool {
	switch name {
	case "var-file", "target-file", "exclude-file", "generate-config-out", "json-into", "plan":
		return true
	}
	return false
}

func absolute(dir, path string) string {
	if path == "" || path == "-" || filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(dir, path)
}

// addresses replaces node names by the addresses of their resources, in the
// operands of a verb and in -target, -replace and -exclude. A word that names
// no node is passed on as it is.
func (a *arguments) addresses(verb tfhosts.Verb, nodes map[string]tfhosts.SetupNode) {
	address := func(word string) string {
		if _, ok := nodes[word]; ok {
			return tfhosts.NodeAddress(word)
		}
		return word
	}
	// The old name of a state-mv is a node's, too, when the new one is: it has
	// left the setup.
	if verb.Name == "state-mv" && len(a.operands) == 2 && isNodeName(a.operands[0]) {
		if _, ok := nodes[a.operands[1]]; ok {
			a.operands[0] = tfhosts.NodeAddress(a.operands[0])
		}
	}
	for i, op := range a.operands {
		if verb.Addresses < 0 || i < verb.Addresses {
			// The new name of a state-mv is a node's, too, when the old one
			// is: it need not be in the setup yet.
			if verb.Name == "state-mv" && i == 1 && a.operands[0] != op && strings.HasPrefix(a.operands[0], "terraform_data.nixos[") && isNodeName(op) {
				a.operands[i] = tfhosts.NodeAddress(op)
				continue
			}
			a.operands[i] = address(op)
		}
	}
	for i, flag := range a.flags {
		name, value, ok := strings.Cut(flag, "=")
		if ok && (name == "-target" || name == "-replace" || name == "-exclude") {
			a.flags[i] = name + "=" + address(value)
		}
	}
}

// isNodeName: a plain dotted name, not a resource address of OpenTofu's.
func isNodeName(word string) bool {
	return word != "" && !strings.ContainsAny(word, `[]"`) && !strings.HasPrefix(word, "terraform_data.")
}
