package hostconn

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// resolver reads OpenSSH configurations for one host, as ssh does: options
// first, then the user's file, then the system's; the first value of a keyword
// wins, and a "Match final" asks for a second reading.
//
// It is our own because the module that was tried for it, kevinburke/ssh_config
// 1.6.0, refuses a whole file that holds a "Match final" and silently skips a
// "Match exec" (both reproduced), and tells nothing of where a value stands.
// Here a block that cannot apply to the host causes no error, and one that may
// apply but cannot be evaluated is refused by name.
type resolver struct {
	home      string
	localUser string
	original  string // the host as it was named
	userFile  string // "" when there is none
	sysFile   string

	single     map[string]directive // first value wins
	identities []directive
	certs      []directive
	ignored    []string // patterns of IgnoreUnknown
	notes      []string

	final     bool // the second reading
	wantFinal bool
}

func (r *resolver) read(options []directive) error {
	for _, d := range options {
		if err := r.apply(d); err != nil {
			return err
		}
	}
	if err := r.files(); err != nil {
		return err
	}
	if !r.wantFinal {
		return nil
	}
	host, err := r.host()
	if err != nil {
		return err
	}
	r.final = true
	r.single["hostname"] = directive{name: "HostName", key: "hostname", raw: escapeTokens(host), args: []string{escapeTokens(host)}}
	return r.files()
}

func (r *resolver) files() error {
	for _, f := range []struct {
		path string
		user bool
	}{{r.userFile, true}, {r.sysFile, false}} {
		if f.path == "" {
			continue
		}
		active := true
		err := r.file(f.path, f.user, &active, false, 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// host is the name to connect to, as far as it is known.
func (r *resolver) host() (string, error) {
	d, ok := r.single["hostname"]
	if !ok {
		return r.original, nil
	}
	host, err := expandTokens(d.args[0], map[byte]string{'h': r.original})
	if err != nil {
		return "", d.fail(err.Error())
	}
	return host, nil
}

// file reads one file. active says whether lines apply and is shared with the
// including file, as in OpenSSH; never: the file is included by a block that
// does not apply, and is read only for the sake of a "Match final".
func (r *resolver) file(path string, user bool, active *bool, never bool, depth int) error {
	const maxDepth = 16
	if depth > maxDepth {
		return fmt.Errorf("reading %s: more than %d levels of Include", path, maxDepth)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("reading the OpenSSH configuration: %w", err)
	}
	for i, line := range strings.Split(string(text), "\n") {
		d, ok := parseDirective(line, fmt.Sprintf("%s:%d", path, i+1))
		if !ok {
			continue
		}
		if err := r.line(d, user, active, never, depth); err != nil {
			return err
		}
	}
	return nil
}

func (r *resolver) line(d directive, user bool, active *bool, never bool, depth int) error {
	switch d.key {
	case "host":
		*active = !never && d.err == nil && matchHosts(r.original, d.args)
	case "match":
		applies, err := r.match(d)
		*active = !never && applies
		if err != nil && !never {
			return err
		}
	case "include":
		was := *active
		err := r.include(d, user, active, never || !was, depth)
		*active = was
		if err != nil && was && !never {
			return err
		}
	default:
		if *active && !never {
			return r.apply(d)
		}
	}
	return nil
}

func (r *resolver) include(d directive, user bool, active *bool, never bool, depth int) error {
	if d.err != nil {
		return d.err
	}
	was := *active
	for _, arg := range d.args {
		path := arg
		switch {
		case strings.HasPrefix(path, "~"):
			if !user {
				return d.fail("a system configuration cannot include a path with ~")
			}
			full, err := expandTilde(path, r.home)
			if err != nil {
				return d.fail(err.Error())
			}
			path = full
		case filepath.IsAbs(path):
		case user:
			path = filepath.Join(r.home, ".ssh", path)
		default:
			path = filepath.Join("/etc/ssh", path)
		}
		matches, err := filepath.Glob(path)
		if err != nil {
			return d.fail(err.Error())
		}
		for _, m := range matches {
			err := r.file(m, user, active, never, depth+1)
			*active = was
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// match evaluates a Match line. A criterion that cannot be evaluated here is an
// error only when every other criterion holds.
func (r *resolver) match(d directive) (bool, error) {
	result := true
	var refuse error
	rest := d.raw
	for n := 0; ; n++ {
		var word string
		word, rest = cutWord(rest)
		if word == "" || word[0] == '#' {
			if n == 0 {
				return false, d.fail("Match needs a criterion")
			}
			break
		}
		name, negated := strings.CutPrefix(word, "!")
		name = strings.ToLower(name)
		var holds bool
		switch name {
		case "all":
			holds = true
		case "final", "canonical":
			if name == "final" {
				r.wantFinal = true
			}
			holds = r.final
		default:
			var arg string
			arg, rest = cutWord(rest)
			if arg == "" {
				return false, d.fail(fmt.Sprintf("the criterion %q has no argument", name))
			}
			known, h, err := r.criterion(d, name, arg)
			if err != nil {
				return false, err
			}
			if !known {
				if refuse == nil {
					refuse = d.fail(fmt.Sprintf("%q cannot be evaluated here and may apply to %q; put the options of this host into a Host block above it, or into ssh_opts", "Match "+name, r.original))
				}
				continue
			}
			holds = h
		}
		if holds == negated {
			result = false
		}
	}
	if !result {
		return false, nil
	}
	return refuse == nil, refuse
}

// criterion evaluates one criterion with an argument; known is false for those
// that need a command or the machine's network.
func (r *resolver) criterion(d directive, name, arg string) (known, holds bool, err error) {
	switch name {
	case "host":
		host, err := r.host()
		return true, err == nil && matchList(strings.ToLower(host), strings.ToLower(arg)), err
	case "originalhost":
		return true, matchList(strings.ToLower(r.original), strings.ToLower(arg)), nil
	case "user":
		return true, matchList(r.user(), arg), nil
	case "localuser":
		return true, matchList(r.localUser, arg), nil
	case "tagged":
		tag := ""
		if t, ok := r.single["tag"]; ok {
			tag = t.args[0]
		}
		return true, matchList(tag, arg), nil
	case "exec", "localnetwork", "version", "sessiontype", "command":
		return false, false, nil
	}
	return false, false, d.fail(fmt.Sprintf("%q is no criterion of Match", name))
}

func (r *resolver) user() string {
	if d, ok := r.single["user"]; ok {
		return d.args[0]
	}
	return r.localUser
}

// apply takes the value of a line that applies.
func (r *resolver) apply(d directive) error {
	if d.err != nil {
		if !r.isIgnored(d) {
			return d.err
		}
		return nil
	}
	switch d.key {
	case "ignoreunknown":
		if len(r.ignored) == 0 {
			r.ignored = strings.Split(d.args[0], ",")
		}
	case "identityfile":
		r.identities = appendNew(r.identities, d)
	case "certificatefile":
		r.certs = appendNew(r.certs, d)
	case "proxyjump", "proxycommand":
		jump, hasJump := r.single["proxyjump"]
		_, hasCommand := r.single["proxycommand"]
		// Whichever comes first counts, but "ProxyJump none" leaves a later
		// ProxyCommand in force (OpenSSH 9.2, by trial).
		free := !hasJump || (d.key == "proxycommand" && strings.EqualFold(jump.raw, "none"))
		if free && !hasCommand {
			r.single[d.key] = d
		}
	default:
		use := keywords()[d.key]
		switch {
		case use.refuse != nil:
			if reason := use.refuse(d.args); reason != "" && d.where != whereOptions {
				if _, earlier := r.single[d.key]; !earlier {
					return d.fail(reason)
				}
			}
		case use.kind == unknownKeyword && !r.isIgnored(d) && !r.final:
			r.notes = append(r.notes, fmt.Sprintf("%s: %q is no option that is known here; it is ignored", d.where, d.name))
		}
		if _, earlier := r.single[d.key]; !earlier {
			r.single[d.key] = d
		}
	}
	return nil
}

func (r *resolver) isIgnored(d directive) bool {
	return slices.ContainsFunc(r.ignored, func(p string) bool { return matchPattern(d.key, strings.ToLower(p)) })
}

func appendNew(list []directive, d directive) []directive {
	same := func(e directive) bool { return e.args[0] == d.args[0] }
	if slices.ContainsFunc(list, same) {
		return list
	}
	return append(list, d)
}
