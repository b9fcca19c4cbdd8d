package hostconn

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
)

func isYes(s string) bool { return strings.EqualFold(s, "yes") || strings.EqualFold(s, "true") }

func isNo(s string) bool { return strings.EqualFold(s, "no") || strings.EqualFold(s, "false") }

func checkPort(d directive) error {
	if _, err := parsePort(d.args[0]); err != nil {
		return d.fail(err.Error())
	}
	return nil
}

func parsePort(s string) (int, error) {
	port, err := net.LookupPort("tcp", s)
	if err != nil || port == 0 {
		return 0, fmt.Errorf("%q is no port", s)
	}
	return port, nil
}

func checkTime(d directive) error {
	if _, err := parseTime(d.args[0]); err != nil {
		return d.fail(err.Error())
	}
	return nil
}

// parseTime reads OpenSSH's time format: "90", "1m30s", "none"; none is 0.
func parseTime(s string) (time.Duration, error) {
	if strings.EqualFold(s, "none") {
		return 0, nil
	}
	bad := fmt.Errorf("%q is no time", s)
	units := map[byte]time.Duration{'s': time.Second, 'm': time.Minute, 'h': time.Hour, 'd': 24 * time.Hour, 'w': 7 * 24 * time.Hour}
	var total time.Duration
	if s == "" {
		return 0, bad
	}
	for s != "" {
		i := 0
		for i < len(s) && s[i] >= '0' && s[i] <= '9' {
			i++
		}
		n, err := strconv.Atoi(s[:i])
		if err != nil || n > 1<<24 {
			return 0, bad
		}
		unit := time.Second
		if i < len(s) {
			var ok bool
			if unit, ok = units[s[i]|0x20]; !ok {
				return 0, bad
			}
			i++
		}
		total += time.Duration(n) * unit
		s = s[i:]
	}
	return total, nil
}

func checkCount(d directive) error {
	if n, err := strconv.Atoi(d.args[0]); err != nil || n < 1 {
		return d.fail(fmt.Sprintf("%q is no count", d.args[0]))
	}
	return nil
}

func checkFlag(d directive) error {
	if !isYes(d.args[0]) && !isNo(d.args[0]) {
		return d.fail(fmt.Sprintf("yes or no is expected, not %q", d.args[0]))
	}
	return nil
}

func checkWord(words ...string) func(directive) error {
	return func(d directive) error {
		if !contains(words, d.args[:1]) {
			return d.fail(fmt.Sprintf("%s is expected, not %q", strings.Join(words, " or "), d.args[0]))
		}
		return nil
	}
}

func checkStrict(d directive) error {
	switch strings.ToLower(d.args[0]) {
	case "yes", "true", "ask", "accept-new":
		return nil
	case "no", "off", "false":
		if d.where == whereOptions {
			return d.fail("a changed host key is never accepted; leave the option out, and pin host_key")
		}
		return nil
	}
	return d.fail(fmt.Sprintf("yes, ask or accept-new is expected, not %q", d.args[0]))
}

func checkTokens(allowed string) func(directive) error {
	return func(d directive) error {
		values := make(map[byte]string, len(allowed))
		for i := range len(allowed) {
			values[allowed[i]] = ""
		}
		if _, err := expandTokens(d.raw, values); err != nil {
			return d.fail(err.Error())
		}
		return nil
	}
}

func checkHostName(d directive) error {
	host, err := expandTokens(d.args[0], map[byte]string{'h': "h"})
	if err == nil {
		err = checkHost(unbracket(host))
	}
	if err != nil {
		return d.fail(reason(err))
	}
	return nil
}

func checkJump(d directive) error {
	if _, err := parseJump(d.raw); err != nil {
		return d.fail(err.Error())
	}
	return nil
}

func checkAlgorithms(d directive) error {
	list, err := algorithms(d.key, d.args[0])
	if err != nil {
		return d.fail(err.Error())
	}
	if len(list) == 0 {
		return d.fail(fmt.Sprintf("none of %q is supported", d.args[0]))
	}
	return nil
}

// algorithms is the list that an OpenSSH algorithm value stands for, as far as
// x/crypto has them; "+", "-" and "^" change the default list.
func algorithms(key, value string) ([]string, error) {
	good, weak := ssh.SupportedAlgorithms(), ssh.InsecureAlgorithms()
	var def, all []string
	switch key {
	case "kexalgorithms":
		def, all = good.KeyExchanges, slices.Concat(good.KeyExchanges, weak.KeyExchanges)
	case "ciphers":
		def, all = good.Ciphers, slices.Concat(good.Ciphers, weak.Ciphers)
	case "macs":
		def, all = good.MACs, slices.Concat(good.MACs, weak.MACs)
	case "hostkeyalgorithms":
		def, all = good.HostKeys, slices.Concat(good.HostKeys, weak.HostKeys)
	case "pubkeyacceptedalgorithms":
		def, all = good.PublicKeyAuths, slices.Concat(good.PublicKeyAuths, weak.PublicKeyAuths)
	default:
		return nil, fmt.Errorf("no list of algorithms is known for %q", key)
	}
	mode := byte(0)
	if value != "" && strings.IndexByte("+-^", value[0]) >= 0 {
		mode, value = value[0], value[1:]
	}
	var named []string
	for _, p := range strings.Split(value, ",") {
		for _, a := range all {
			if matchPattern(a, p) && !slices.Contains(named, a) {
				named = append(named, a)
			}
		}
	}
	isNamed := func(a string) bool { return slices.Contains(named, a) }
	rest := slices.DeleteFunc(slices.Clone(def), isNamed)
	switch mode {
	case '+':
		return slices.Concat(rest, named), nil
	case '^':
		return slices.Concat(named, rest), nil
	case '-':
		return rest, nil
	}
	return named, nil
}

// expandTokens replaces %-tokens; one that is not in values is an error.
func expandTokens(s string, values map[byte]string) (string, error) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		i++
		if i == len(s) {
			return "", errors.New("it ends in a single %")
		}
		if s[i] == '%' {
			b.WriteByte('%')
			continue
		}
		v, ok := values[s[i]]
		if !ok {
			return "", fmt.Errorf("%%%c cannot stand here", s[i])
		}
		b.WriteString(v)
	}
	return b.String(), nil
}

func escapeTokens(s string) string { return strings.ReplaceAll(s, "%", "%%") }

// expandEnv replaces ${NAME}; a variable that is not set is an error, as in ssh.
func expandEnv(s string) (string, error) {
	var b strings.Builder
	for {
		before, after, ok := strings.Cut(s, "${")
		b.WriteString(before)
		if !ok {
			return b.String(), nil
		}
		name, rest, ok := strings.Cut(after, "}")
		if !ok {
			return "", errors.New("a ${ is not closed")
		}
		v, set := os.LookupEnv(name)
		if !set {
			return "", fmt.Errorf("the environment variable %s is not set", name)
		}
		b.WriteString(v)
		s = rest
	}
}

// expandTilde replaces a leading ~ or ~user.
func expandTilde(path, home string) (string, error) {
	if !strings.HasPrefix(path, "~") {
		return path, nil
	}
	name, rest, _ := strings.Cut(path[1:], "/")
	if name != "" {
		u, err := user.Lookup(name)
		if err != nil {
			return "", fmt.Errorf("the home of %q is not known", name)
		}
		home = u.HomeDir
	}
	return filepath.Join(home, rest), nil
}
