package setup

import (
	"encoding/base64"
	"encoding/binary"
	"strconv"
	"strings"
	"unicode"
)

// checkIdentity checks a node's merged SSH fields, each at the place that it
// came from, and gives its options.
func (l *loader) checkIdentity(at string, id identity) []string {
	if id.host.value == "" {
		l.found.add(at+".host", "missing", "")
	} else if text := wordProblem(id.host.value); text != "" {
		l.found.add(id.host.where, text, "")
	} else if text := hostProblem(id.host.value); text != "" {
		l.found.add(id.host.where, text, "")
	}
	if text := wordProblem(id.username.value); text != "" {
		l.found.add(id.username.where, text, "")
	} else if strings.ContainsAny(id.username.value, "@/:") {
		l.found.addf(id.username.where, "%q is no user name", id.username.value)
	}
	if text, hint := hostKeyProblem(id.hostKey.value); text != "" {
		l.found.add(id.hostKey.where, text, hint)
	}
	l.checkOptions(id.options)
	return id.options.value.options
}

// wordProblem says why a host or user cannot be one: ssh would take it for an
// option, or a shell or a log for more than a word.
func wordProblem(s string) string {
	if strings.HasPrefix(s, "-") {
		return `begins with "-"`
	}
	if strings.ContainsFunc(s, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
		return "holds a blank or a control character"
	}
	return ""
}

func hostProblem(s string) string {
	switch {
	case strings.Contains(s, "@"):
		return "holds a user: that is the key username"
	case strings.ContainsAny(s, "/?#\\'\"`$;|&<>(){}*!"):
		return "is no host name or address"
	case strings.Count(s, ":") == 1:
		return `holds a port: that is the option "Port" in ssh_opts`
	case strings.HasPrefix(s, "[") != strings.HasSuffix(s, "]"):
		return "is no host name or address"
	}
	return ""
}

// hostKeyProblem checks the form of a public key, not its worth.
func hostKeyProblem(s string) (text, hint string) {
	const form = `a line such as "ssh-ed25519 AAAA…" is expected, as tf-hosts host-keys prints it`
	if s == "" {
		return "", ""
	}
	words := strings.Fields(s)
	if len(words) < 2 || strings.ContainsAny(s, "\n\r") {
		return "is no public host key", form
	}
	blob, err := base64.StdEncoding.DecodeString(words[1])
	if err != nil || len(blob) < 4 {
		return "is no public host key", form
	}
	n := binary.BigEndian.Uint32(blob)
	if uint64(n) > uint64(len(blob)-4) || string(blob[4:4+n]) != words[0] {
		return "is no public host key: its type and its text do not fit", form
	}
	return "", ""
}

func (l *loader) checkOptions(f field[optionsList]) {
	if f.value.problem != "" {
		l.found.add(f.where, f.value.problem, "")
	}
	for i, o := range f.value.options {
		where := element(f.where, i)
		key, value, ok := cutOption(o)
		switch {
		case strings.HasPrefix(o, "-"):
			l.found.add(where, `begins with "-"`, "options are bare: Key=Value, without -o")
		case !ok:
			l.found.addf(where, "%q is no Key=Value", o)
		case strings.ContainsAny(o, "\n\r"):
			l.found.add(where, "holds a line break", "")
		case strings.EqualFold(key, "Port") && !isPort(value):
			l.found.addf(where, "%q is no port", value)
		case strings.EqualFold(key, "HostName") && wordProblem(value) != "":
			l.found.add(where, "host name "+wordProblem(value), "")
		case strings.EqualFold(key, "User") && wordProblem(value) != "":
			l.found.add(where, "user "+wordProblem(value), "")
		case strings.EqualFold(key, "ProxyJump"):
			if text := jumpProblem(value); text != "" {
				l.found.add(where, text, "")
			}
		}
	}
	l.checkKnown(f)
}

// checkKnown asks the connection's own check. The list is asked as a whole, and
// the items one by one only to say which it was.
func (l *loader) checkKnown(f field[optionsList]) {
	check := l.options.CheckOptions
	if check == nil || len(f.value.options) == 0 {
		return
	}
	whole := check(f.value.options)
	if whole == nil {
		return
	}
	located := false
	for i, o := range f.value.options {
		if err := check([]string{o}); err != nil {
			l.found.add(element(f.where, i), err.Error(), "")
			located = true
		}
	}
	if !located {
		l.found.add(f.where, whole.Error(), "")
	}
}

// jumpProblem checks each [user@]host[:port] of a ProxyJump.
func jumpProblem(value string) string {
	if strings.EqualFold(value, "none") {
		return ""
	}
	for hop := range strings.SplitSeq(value, ",") {
		hop = strings.TrimPrefix(hop, "ssh://")
		user, host, ok := cutLast(hop, "@")
		if !ok {
			user, host = "", hop
		}
		for _, word := range []string{user, host} {
			if text := wordProblem(word); text != "" {
				return "jump host " + strconv.Quote(hop) + " " + text
			}
		}
		if host == "" {
			return "jump host " + strconv.Quote(hop) + " has no host"
		}
	}
	return ""
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

// cutOption splits "Key=Value" or "Key Value", as OpenSSH's -o takes both.
func cutOption(o string) (key, value string, ok bool) {
	o = strings.TrimSpace(o)
	i := strings.IndexAny(o, "= \t")
	if i <= 0 {
		return "", "", false
	}
	value = strings.TrimLeft(o[i:], " \t")
	value = strings.TrimLeft(strings.TrimPrefix(value, "="), " \t")
	if n := len(value); n >= 2 && value[0] == '"' && value[n-1] == '"' {
		value = value[1 : n-1]
	}
	return o[:i], value, value != ""
}

// option is the value of the first option of that name: OpenSSH keeps the first.
func option(options []string, name string) (string, bool) {
	for _, o := range options {
		if key, value, ok := cutOption(o); ok && strings.EqualFold(key, name) {
			return value, true
		}
	}
	return "", false
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}
