package hostconn

import "strings"

// matchPattern is OpenSSH's match_pattern: * and ?, case counts.
func matchPattern(s, pattern string) bool {
	for pattern != "" {
		if pattern[0] == '*' {
			pattern = strings.TrimLeft(pattern, "*")
			if pattern == "" {
				return true
			}
			for i := range len(s) {
				if matchPattern(s[i:], pattern) {
					return true
				}
			}
			return false
		}
		if s == "" || (pattern[0] != '?' && pattern[0] != s[0]) {
			return false
		}
		s, pattern = s[1:], pattern[1:]
	}
	return s == ""
}

// matchList is OpenSSH's match_pattern_list for a comma-separated list: one
// negated match refuses, whatever else matches.
func matchList(s, list string) bool {
	found := false
	for _, p := range strings.Split(list, ",") {
		rest, negated := strings.CutPrefix(p, "!")
		if !matchPattern(s, rest) {
			continue
		}
		if negated {
			return false
		}
		found = true
	}
	return found
}

// matchHosts is the argument list of a Host line.
func matchHosts(host string, patterns []string) bool {
	found := false
	for _, p := range patterns {
		rest, negated := strings.CutPrefix(p, "!")
		if !matchPattern(host, rest) {
			continue
		}
		if negated {
			return false
		}
		found = true
	}
	return found
}
