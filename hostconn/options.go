package hostconn

import (
	"errors"
	"fmt"
	"strings"
)

// whereOptions is the origin of an entry of ssh_opts in errors.
const whereOptions = "ssh_opts"

// Options are checked ssh_opts.
type Options struct {
	lines []directive
}

// ParseOptions checks ssh_opts: OpenSSH options of the form Key=Value. All that
// cannot be used are reported at once, each as an *OptionError. Options that
// would change nothing here (LogLevel, ForwardAgent=no) are accepted.
func ParseOptions(opts []string) (Options, error) {
	var (
		parsed Options
		errs   []error
	)
	for _, opt := range opts {
		d, err := parseOption(opt)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		parsed.lines = append(parsed.lines, d)
	}
	return parsed, errors.Join(errs...)
}

func parseOption(opt string) (directive, error) {
	bad := func(reason string) (directive, error) {
		return directive{}, &OptionError{Name: opt, Where: whereOptions, Reason: reason}
	}
	if strings.HasPrefix(strings.TrimSpace(opt), "-") {
		return bad(`an OpenSSH option of the form "Key=Value" is expected, without a leading "-o"`)
	}
	if strings.ContainsAny(opt, "\n\x00") {
		return bad("it holds a line break")
	}
	d, ok := parseDirective(opt, whereOptions)
	if !ok {
		return bad(`an OpenSSH option of the form "Key=Value" is expected`)
	}
	if d.err != nil {
		return directive{}, d.err
	}
	k := keywords()[d.key]
	switch {
	case k.kind == unknownKeyword:
		return directive{}, d.fail("it is not an OpenSSH option that is known here")
	case k.instead != "":
		return directive{}, d.fail(k.instead)
	case k.kind == noEffect && k.only == nil:
		return d, nil
	case k.kind == unsupported:
		return directive{}, d.fail("it is not supported")
	case k.only != nil && !contains(k.only, d.args):
		return directive{}, d.fail(fmt.Sprintf("only %s is supported, not %q", strings.Join(k.only, " or "), d.raw))
	case k.refuse != nil:
		if reason := k.refuse(d.args); reason != "" {
			return directive{}, d.fail(reason)
		}
	}
	if k.check != nil {
		if err := k.check(d); err != nil {
			return directive{}, err
		}
	}
	return d, nil
}

func contains(words, args []string) bool {
	for _, w := range words {
		if len(args) == 1 && strings.EqualFold(w, args[0]) {
			return true
		}
	}
	return false
}

type keywordKind int

const (
	unknownKeyword keywordKind = iota
	mapped                     // has its effect here
	noEffect                   // changes nothing about what is done here
	unsupported                // would change it, and is not built
)

// keyword is how one OpenSSH option is treated. In the user's configuration
// only refuse and check make an error; ssh_opts are also held to the rest.
type keyword struct {
	kind    keywordKind
	only    []string                   // ssh_opts: the only values
	instead string                     // ssh_opts: refused, with the way out
	refuse  func(args []string) string // anywhere: a reason not to go on, or ""
	check   func(d directive) error    // the value is malformed
}

func notYes(what string) func([]string) string {
	return func(args []string) string {
		if len(args) > 0 && isYes(args[0]) {
			return what
		}
		return ""
	}
}

func notSet(what string) func([]string) string {
	return func(args []string) string {
		if len(args) > 0 && !strings.EqualFold(args[0], "none") && !strings.EqualFold(args[0], "no") {
			return what
		}
		return ""
	}
}

// keywords is the table of OpenSSH's options by lower-case name (ssh_config(5)
// of OpenSSH 10). The reference page of ssh_opts follows it.
func keywords() map[string]keyword {
	no := []string{"no"}
	t := map[string]keyword{
		"port":                     {kind: mapped, check: checkPort},
		"hostname":                 {kind: mapped, check: checkHostName},
		"proxyjump":                {kind: mapped, check: checkJump},
		"proxycommand":             {kind: mapped, check: checkTokens("hnpr")},
		"connecttimeout":           {kind: mapped, check: checkTime},
		"connectionattempts":       {kind: mapped, check: checkCount},
		"serveraliveinterval":      {kind: mapped, check: checkTime},
		"serveralivecountmax":      {kind: mapped, check: checkCount},
		"userknownhostsfile":       {kind: mapped},
		"globalknownhostsfile":     {kind: mapped},
		"hostkeyalias":             {kind: mapped},
		"hostkeyalgorithms":        {kind: mapped, check: checkAlgorithms},
		"kexalgorithms":            {kind: mapped, check: checkAlgorithms},
		"ciphers":                  {kind: mapped, check: checkAlgorithms},
		"macs":                     {kind: mapped, check: checkAlgorithms},
		"pubkeyacceptedalgorithms": {kind: mapped, check: checkAlgorithms},
		"identityfile":             {kind: mapped},
		"identitiesonly":           {kind: mapped, check: checkFlag},
		"identityagent":            {kind: mapped},
		"certificatefile":          {kind: mapped},
		"addressfamily":            {kind: mapped, check: checkWord("any", "inet", "inet6")},
		"bindaddress":              {kind: mapped},
		"stricthostkeychecking":    {kind: mapped, check: checkStrict},
		"pubkeyauthentication":     {kind: mapped, only: []string{"yes"}},
		"user":                     {kind: mapped, instead: "the user is set by username"},

		"compression":                      {kind: noEffect, only: no},
		"batchmode":                        {kind: noEffect, only: []string{"yes"}},
		"passwordauthentication":           {kind: noEffect, only: no},
		"kbdinteractiveauthentication":     {kind: noEffect, only: no},
		"gssapiauthentication":             {kind: noEffect, only: no},
		"hostbasedauthentication":          {kind: noEffect, only: no},
		"forwardagent":                     {kind: noEffect, only: no},
		"forwardx11":                       {kind: noEffect, only: no},
		"forwardx11trusted":                {kind: noEffect, only: no},
		"updatehostkeys":                   {kind: noEffect, only: no},
		"controlmaster":                    {kind: noEffect, only: no},
		"controlpath":                      {kind: noEffect, only: []string{"none"}},
		"controlpersist":                   {kind: noEffect, only: no},
		"permitlocalcommand":               {kind: noEffect, only: no},
		"requesttty":                       {kind: noEffect, only: no},
		"verifyhostkeydns":                 {kind: noEffect, only: no},
		"addkeystoagent":                   {kind: noEffect, only: no},
		"clearallforwardings":              {kind: noEffect, only: []string{"yes"}},
		"nohostauthenticationforlocalhost": {kind: noEffect, only: no},
		"preferredauthentications":         {kind: noEffect, only: []string{"publickey"}},
		"canonicalizehostname":             {kind: noEffect, only: no, refuse: notSet("names are not canonicalized here; write the full name as host, or HostName in a Host block")},
		"proxyusefdpass":                   {kind: noEffect, only: no, refuse: notYes("a ProxyCommand that passes a descriptor is not supported")},
		"knownhostscommand":                {kind: noEffect, only: []string{"none"}, refuse: notSet("it is not supported; pin host_key instead")},
		"host":                             {kind: mapped, instead: "a block cannot stand in ssh_opts"},
		"match":                            {kind: mapped, instead: "a block cannot stand in ssh_opts"},
		"include":                          {kind: mapped, instead: "a file cannot be included by ssh_opts"},
		"ignoreunknown":                    {kind: mapped, instead: "an option that is not known is an error"},
	}
	for _, key := range strings.Fields(`loglevel logverbose checkhostip hashknownhosts visualhostkey tcpkeepalive
		exitonforwardfailure numberofpasswordprompts escapechar ipqos fingerprinthash rekeylimit enableescapecommandline
		obscurekeystroketiming syslogfacility xauthlocation streamlocalbindmask streamlocalbindunlink forwardx11timeout
		gssapidelegatecredentials gssapikeyexchange gssapiclientidentity gssapirenewalforcesrekey gssapitrustdns gssapiserveridentity gssapikexalgorithms
		requiredrsasize warnweakcrypto refuseconnection channeltimeout versionaddendum casignaturealgorithms`) {
		t[key] = keyword{kind: noEffect}
	}
	for _, key := range strings.Fields(`bindinterface canonicaldomains canonicalizefallbacklocal canonicalizemaxdots canonicalizepermittedcnames
		dynamicforward localforward remoteforward gatewayports localcommand remotecommand sendenv setenv sessiontype stdinnull forkafterauthentication
		tunnel tunneldevice pkcs11provider smartcarddevice securitykeyprovider hostbasedacceptedalgorithms hostbasedkeytypes permitremoteopen
		revokedhostkeys rhostsrsaauthentication rsaauthentication protocol useprivilegedport cipher usekeychain enablesshkeysign tag
		useroaming compressionlevel keepalive fallbacktorsh usersh dsaauthentication afstokenpassing kerberosauthentication kerberostgtpassing`) {
		t[key] = keyword{kind: unsupported}
	}
	return t
}
