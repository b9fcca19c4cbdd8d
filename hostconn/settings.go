package hostconn

import (
	"crypto/sha1" // OpenSSH defines %C with it; nothing rests on it
	"encoding/hex"
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
)

// Target names a host and how to log in there: the SSH half of a node entry.
type Target struct {
	// Name is the node's dotted name; it stands in errors and events.
	Name string
	// Host is a name, an alias of the user's OpenSSH configuration, or an
	// address; IPv6 with or without brackets and zone.
	Host string
	// User is the login; empty leaves it to the configuration.
	User string
	// KeyFile is the only key to offer; empty leaves it to the configuration
	// and the agent.
	KeyFile string
	// HostKey pins the host's public key: one or more lines "TYPE BASE64".
	HostKey string
	// Options are OpenSSH Key=Value options (ssh_opts).
	Options []string
	Become  Become
}

// Hop is one jump host, as named by ProxyJump.
type Hop struct {
	User, Host string
	Port       int // 0: as its own configuration says
}

// Settings are what OpenSSH would use for a target, as far as it matters here.
type Settings struct {
	HostName string
	Port     int
	User     string

	IdentityFiles    []string // expanded; the defaults when none is configured
	IdentitiesOnly   bool
	CertificateFiles []string
	IdentityAgent    string // a socket; "none" for no agent

	Jumps        []Hop
	ProxyCommand string // expanded; run by /bin/sh

	UserKnownHostsFiles   []string
	GlobalKnownHostsFiles []string
	HostKeyAlias          string
	// StrictHostKeyChecking: only known hosts. Without it an unknown host's
	// first key is accepted; a changed key never is.
	StrictHostKeyChecking bool

	HostKeyAlgorithms        []string // empty: the default
	KexAlgorithms            []string
	Ciphers                  []string
	MACs                     []string
	PubkeyAcceptedAlgorithms []string

	ConnectTimeout      time.Duration // 0: not configured
	ConnectionAttempts  int
	ServerAliveInterval time.Duration
	ServerAliveCountMax int
	AddressFamily       string // "any", "inet", "inet6"
	BindAddress         string

	// Notes are lines of the configuration that were not understood.
	Notes []string

	configuredKeys bool // IdentityFiles are not the defaults
	noPublicKey    bool
	raw            map[string][]string // unexpanded, for comparison with ssh -G
}

// Resolve gives the settings for t as ssh would find them: ssh_opts and the
// target's own fields first, then the user's OpenSSH configuration, then the
// system's. It makes no connection and looks up no name. What cannot be used is
// an *OptionError, or several joined.
func Resolve(t Target, cfg Config) (Settings, error) {
	s, err := resolve(t, cfg)
	if err != nil {
		return Settings{}, fmt.Errorf("resolving the SSH settings of %q: %w", t.label(), err)
	}
	return s, nil
}

func (t Target) label() string {
	if t.Name != "" {
		return t.Name
	}
	return t.Host
}

func resolve(t Target, cfg Config) (Settings, error) {
	host := unbracket(t.Host)
	if err := checkHost(host); err != nil {
		return Settings{}, err
	}
	if err := checkUser(t.User); err != nil {
		return Settings{}, err
	}
	opts, err := ParseOptions(t.Options)
	if err != nil {
		return Settings{}, err
	}
	me, err := user.Current()
	if err != nil {
		return Settings{}, fmt.Errorf("finding the local user: %w", err)
	}
	home := cfg.Home
	if home == "" {
		home = me.HomeDir
	}
	r := &resolver{
		home: home, localUser: me.Username, original: host,
		userFile: configFile(cfg.UserConfig, filepath.Join(home, ".ssh", "config")),
		sysFile:  configFile(cfg.SystemConfig, "/etc/ssh/ssh_config"),
		single:   make(map[string]directive),
	}
	if t.User != "" {
		r.single["user"] = directive{name: "User", key: "user", args: []string{t.User}, where: "username"}
	}
	if err := r.read(opts.lines); err != nil {
		return Settings{}, err
	}
	return r.settings(t)
}

func configFile(set, def string) string {
	switch set {
	case "":
		return def
	case "none":
		return ""
	}
	return set
}

func unbracket(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); ok {
			return inner
		}
	}
	return host
}

// checkHost refuses what OpenSSH refuses: names that a shell or an option
// parser could take for something else (CVE-2023-51385).
func checkHost(host string) error {
	switch {
	case host == "":
		return &OptionError{Name: "host", Where: "target", Reason: "it is empty"}
	case host[0] == '-':
		return &OptionError{Name: "host", Value: host, Where: "target", Reason: fmt.Sprintf("%q begins with a dash", host)}
	case strings.ContainsAny(host, "'`\"$\\;&<>|(){}/ \t\r\n\x00@,[]"):
		return &OptionError{Name: "host", Value: host, Where: "target", Reason: fmt.Sprintf("%q is no host name or address", host)}
	case strings.Count(host, ":") == 1:
		return &OptionError{Name: "host", Value: host, Where: "target", Reason: fmt.Sprintf(`%q holds a port; put "Port=…" into ssh_opts`, host)}
	}
	return nil
}

func checkUser(name string) error {
	switch {
	case strings.HasPrefix(name, "-"):
		return &OptionError{Name: "user", Value: name, Where: "target", Reason: fmt.Sprintf("%q begins with a dash", name)}
	case strings.ContainsAny(name, "'`\";&<>|(){}\r\n\x00"), strings.HasSuffix(name, `\`), strings.Contains(name, " -"):
		return &OptionError{Name: "user", Value: name, Where: "target", Reason: fmt.Sprintf("%q is no user name", name)}
	}
	return nil
}

// reason is an option error without its origin.
func reason(err error) string {
	var bad *OptionError
	if errors.As(err, &bad) {
		return bad.Reason
	}
	return err.Error()
}

// parseJump reads the value of ProxyJump; "none" is no hop.
func parseJump(value string) ([]Hop, error) {
	value = strings.TrimSpace(value)
	if strings.EqualFold(value, "none") {
		return nil, nil
	}
	var hops []Hop
	for _, part := range strings.Split(value, ",") {
		rest, isURI := strings.CutPrefix(strings.TrimSpace(part), "ssh://")
		if isURI {
			rest = strings.TrimSuffix(rest, "/")
		}
		var h Hop
		if i := strings.LastIndexByte(rest, '@'); i >= 0 {
			h.User, rest = rest[:i], rest[i+1:]
			if h.User == "" {
				return nil, fmt.Errorf("the jump %q has an empty user", part)
			}
		}
		h.Host = rest
		if host, port, err := net.SplitHostPort(rest); err == nil {
			n, err := parsePort(port)
			if err != nil {
				return nil, fmt.Errorf("the jump %q: %w", part, err)
			}
			h.Host, h.Port = host, n
		}
		h.Host = unbracket(h.Host)
		if err := checkUser(h.User); err != nil {
			return nil, fmt.Errorf("the jump %q: %s", part, reason(err))
		}
		// Tokens are filled in later; the result is checked again when it is resolved.
		if err := checkHost(strings.ReplaceAll(h.Host, "%h", "h")); err != nil {
			return nil, fmt.Errorf("the jump %q: %s", part, reason(err))
		}
		hops = append(hops, h)
	}
	return hops, nil
}

func (r *resolver) settings(t Target) (Settings, error) {
	s := Settings{Port: 22, User: r.user(), ConnectionAttempts: 1, ServerAliveCountMax: 3, AddressFamily: "any", Notes: r.notes, raw: make(map[string][]string)}
	for key, k := range keywords() {
		if d, ok := r.single[key]; ok && k.check != nil {
			if err := k.check(d); err != nil {
				return Settings{}, err
			}
		}
	}
	host, err := r.host()
	if err != nil {
		return Settings{}, err
	}
	s.HostName = unbracket(host)
	if net.ParseIP(s.HostName) == nil && !strings.Contains(s.HostName, ":") {
		s.HostName = strings.ToLower(s.HostName)
	}
	if err := checkHost(s.HostName); err != nil {
		return Settings{}, err
	}
	if err := checkUser(s.User); err != nil {
		return Settings{}, err
	}
	word := func(key string) (string, bool) {
		d, ok := r.single[key]
		if !ok {
			return "", false
		}
		return d.args[0], true
	}
	if v, ok := word("port"); ok {
		s.Port, _ = parsePort(v)
	}
	for key, to := range map[string]*time.Duration{"connecttimeout": &s.ConnectTimeout, "serveraliveinterval": &s.ServerAliveInterval} {
		if v, ok := word(key); ok {
			*to, _ = parseTime(v)
		}
	}
	for key, to := range map[string]*int{"connectionattempts": &s.ConnectionAttempts, "serveralivecountmax": &s.ServerAliveCountMax} {
		if v, ok := word(key); ok {
			*to, _ = strconv.Atoi(v)
		}
	}
	for key, to := range map[string]*[]string{
		"hostkeyalgorithms": &s.HostKeyAlgorithms, "kexalgorithms": &s.KexAlgorithms, "ciphers": &s.Ciphers,
		"macs": &s.MACs, "pubkeyacceptedalgorithms": &s.PubkeyAcceptedAlgorithms,
	} {
		if v, ok := word(key); ok {
			*to, _ = algorithms(key, v)
		}
	}
	if v, ok := word("addressfamily"); ok {
		s.AddressFamily = strings.ToLower(v)
	}
	s.BindAddress, _ = word("bindaddress")
	s.HostKeyAlias, _ = word("hostkeyalias")
	if v, ok := word("stricthostkeychecking"); ok {
		s.StrictHostKeyChecking = isYes(v)
	}
	if v, ok := word("identitiesonly"); ok {
		s.IdentitiesOnly = isYes(v)
	}
	if v, ok := word("pubkeyauthentication"); ok {
		s.noPublicKey = isNo(v)
	}
	if err := r.proxy(&s); err != nil {
		return Settings{}, err
	}
	if err := r.paths(&s, t); err != nil {
		return Settings{}, err
	}
	return s, nil
}

func (r *resolver) proxy(s *Settings) error {
	tokens := map[byte]string{'h': s.HostName, 'n': r.original, 'p': strconv.Itoa(s.Port), 'r': s.User}
	if d, ok := r.single["proxyjump"]; ok {
		hops, err := parseJump(d.raw)
		if err != nil {
			return d.fail(err.Error())
		}
		for i := range hops {
			if hops[i].Host, err = expandTokens(hops[i].Host, tokens); err != nil {
				return d.fail(err.Error())
			}
		}
		s.Jumps = hops
	}
	if d, ok := r.single["proxycommand"]; ok && !strings.EqualFold(d.raw, "none") {
		s.raw[d.key] = []string{d.raw}
		command, err := expandTokens(d.raw, tokens)
		if err != nil {
			return d.fail(err.Error())
		}
		s.ProxyCommand = command
	}
	return nil
}

// paths fills in the files: tokens, ${NAME} and ~ are expanded.
func (r *resolver) paths(s *Settings, t Target) error {
	local, _ := os.Hostname()
	short, _, _ := strings.Cut(local, ".")
	alias := s.HostKeyAlias
	if alias == "" {
		alias = r.original
	}
	port := strconv.Itoa(s.Port)
	sum := sha1.Sum([]byte(local + s.HostName + port + s.User))
	tokens := map[byte]string{
		'C': hex.EncodeToString(sum[:]), 'd': r.home, 'h': s.HostName, 'i': strconv.Itoa(os.Getuid()), 'k': alias,
		'L': short, 'l': local, 'n': r.original, 'p': port, 'r': s.User, 'u': r.localUser, 'j': "",
	}
	expand := func(d directive, v string) (string, error) {
		v, err := expandTilde(v, r.home)
		if err == nil {
			v, err = expandTokens(v, tokens)
		}
		if err == nil {
			v, err = expandEnv(v)
		}
		if err != nil {
			return "", d.fail(err.Error())
		}
		return v, nil
	}
	add := func(to *[]string, d directive, values []string) error {
		for _, v := range values {
			s.raw[d.key] = append(s.raw[d.key], v)
			if strings.EqualFold(v, "none") {
				continue
			}
			full, err := expand(d, v)
			if err != nil {
				return err
			}
			if !slices.Contains(*to, full) {
				*to = append(*to, full)
			}
		}
		return nil
	}
	for _, d := range r.identities {
		if err := add(&s.IdentityFiles, d, d.args[:1]); err != nil {
			return err
		}
	}
	s.configuredKeys = len(r.identities) > 0
	if !s.configuredKeys {
		s.IdentityFiles = defaultKeys(r.home)
	}
	if t.KeyFile != "" {
		full, err := expandTilde(t.KeyFile, r.home)
		if err != nil {
			return &OptionError{Name: "key_file", Value: t.KeyFile, Where: "target", Reason: err.Error()}
		}
		s.IdentityFiles, s.IdentitiesOnly, s.configuredKeys = []string{full}, true, true
	}
	for _, d := range r.certs {
		if err := add(&s.CertificateFiles, d, d.args[:1]); err != nil {
			return err
		}
	}
	s.UserKnownHostsFiles = []string{filepath.Join(r.home, ".ssh/known_hosts"), filepath.Join(r.home, ".ssh/known_hosts2")}
	s.GlobalKnownHostsFiles = []string{"/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"}
	for key, to := range map[string]*[]string{"userknownhostsfile": &s.UserKnownHostsFiles, "globalknownhostsfile": &s.GlobalKnownHostsFiles} {
		if d, ok := r.single[key]; ok {
			*to = nil
			if err := add(to, d, d.args); err != nil {
				return err
			}
		}
	}
	return r.agent(s, expand)
}

func (r *resolver) agent(s *Settings, expand func(directive, string) (string, error)) error {
	s.IdentityAgent = os.Getenv("SSH_AUTH_SOCK")
	d, ok := r.single["identityagent"]
	if !ok || d.args[0] == "SSH_AUTH_SOCK" {
		return nil
	}
	v := d.args[0]
	if strings.EqualFold(v, "none") {
		s.IdentityAgent = "none"
		return nil
	}
	if name, isVar := strings.CutPrefix(v, "$"); isVar && !strings.HasPrefix(v, "${") {
		s.IdentityAgent = os.Getenv(name)
		return nil
	}
	full, err := expand(d, v)
	s.IdentityAgent = full
	return err
}

func defaultKeys(home string) []string {
	var files []string
	for _, name := range []string{"id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk"} {
		files = append(files, filepath.Join(home, ".ssh", name))
	}
	return files
}
