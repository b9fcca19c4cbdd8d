package hostconn

import (
	"errors"
	"strings"
)

// directive is one line of an OpenSSH configuration, or one entry of ssh_opts.
type directive struct {
	name  string   // as written
	key   string   // lower case
	raw   string   // what follows the keyword
	args  []string // raw split into words
	where string   // "FILE:LINE" or "ssh_opts"
	err   error    // the line is malformed; counts only where the line applies
}

func (d directive) fail(reason string) error {
	return &OptionError{Name: d.name, Value: d.raw, Where: d.where, Reason: reason}
}

const blank = " \t\r\n\f"

// parseDirective reads one line as OpenSSH's process_config_line does; ok is
// false for an empty line or a comment.
func parseDirective(line, where string) (d directive, ok bool) {
	line = strings.Trim(line, blank)
	name, rest := cutWord(line)
	if name == "" || name[0] == '#' {
		return directive{}, false
	}
	d = directive{name: name, key: strings.ToLower(name), raw: rest, where: where}
	if alias, has := keywordAliases()[d.key]; has {
		d.key = alias
	}
	if rest == "" {
		d.err = d.fail("it has no value")
		return d, true
	}
	args, err := splitWords(rest)
	switch {
	case rawKeyword(d.key):
	case err != nil:
		d.err = d.fail(err.Error())
	case len(args) == 0:
		d.err = d.fail("it has no value")
	}
	d.args = args
	return d, true
}

// rawKeyword: the value is the rest of the line, quotes and all.
func rawKeyword(key string) bool {
	switch key {
	case "proxycommand", "proxyjump", "localcommand", "remotecommand", "knownhostscommand", "match":
		return true
	}
	return false
}

func keywordAliases() map[string]string {
	return map[string]string{
		"pubkeyacceptedkeytypes":          "pubkeyacceptedalgorithms",
		"identityfile2":                   "identityfile",
		"challengeresponseauthentication": "kbdinteractiveauthentication",
		"skeyauthentication":              "kbdinteractiveauthentication",
	}
}

// cutWord is OpenSSH's strdelim: it ends a word at blanks or one "=", and
// honours double quotes around it.
func cutWord(s string) (word, rest string) {
	s = strings.TrimLeft(s, blank)
	i := strings.IndexAny(s, blank+`="`)
	if i < 0 {
		return s, ""
	}
	if s[i] == '"' {
		end := strings.IndexByte(s[i+1:], '"')
		if end < 0 {
			return s[:i] + s[i+1:], ""
		}
		return s[:i] + s[i+1:i+1+end], strings.TrimLeft(s[i+2+end:], blank)
	}
	word = s[:i]
	rest = strings.TrimLeft(s[i+1:], blank)
	if s[i] != '=' && strings.HasPrefix(rest, "=") {
		rest = strings.TrimLeft(rest[1:], blank)
	}
	return word, rest
}

// splitWords is OpenSSH's argv_split with comments.
func splitWords(s string) ([]string, error) {
	var words []string
	for i := 0; i < len(s); {
		if s[i] == ' ' || s[i] == '\t' {
			i++
			continue
		}
		if s[i] == '#' {
			break
		}
		var word strings.Builder
		var quote byte
	scan:
		for ; i < len(s); i++ {
			c := s[i]
			switch {
			case c == '\\' && i+1 < len(s) && (strings.IndexByte(`'"\`, s[i+1]) >= 0 || (quote == 0 && s[i+1] == ' ')):
				i++
				word.WriteByte(s[i])
			case quote == 0 && (c == ' ' || c == '\t'):
				break scan
			case quote == 0 && (c == '"' || c == '\''):
				quote = c
			case quote != 0 && c == quote:
				quote = 0
			default:
				word.WriteByte(c)
			}
		}
		if quote != 0 {
			return nil, errors.New("a quote is not closed")
		}
		words = append(words, word.String())
	}
	return words, nil
}
