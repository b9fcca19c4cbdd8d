package hostconn

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestAgreesWithSSHG compares what is resolved from each configuration in
// testdata/sshconfig with what ssh itself says about it. A "# case:" line names a
// host, perhaps a login (user=) and options.
func TestAgreesWithSSHG(t *testing.T) {
	ssh, err := exec.LookPath("ssh")
	if err != nil {
		missing(t, "ssh")
	}
	t.Setenv("SSH_AUTH_SOCK", "/run/agent.sock")
	files, err := filepath.Glob("testdata/sshconfig/*.conf")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d configurations, want at least 20 (%v)", len(files), err)
	}
	dir := instantiate(t, "testdata/sshconfig")
	for _, file := range files {
		path := filepath.Join(dir, filepath.Base(file))
		cases := 0
		for _, line := range strings.Split(readFile(t, path), "\n") {
			text, ok := strings.CutPrefix(strings.TrimSpace(line), "# case: ")
			if !ok {
				continue
			}
			cases++
			t.Run(strings.TrimSuffix(filepath.Base(file), ".conf")+"/"+text, func(t *testing.T) {
				words := strings.Fields(text)
				target := Target{Host: words[0]}
				argv := []string{"-G", "-F", path}
				for _, w := range words[1:] {
					if name, ok := strings.CutPrefix(w, "user="); ok {
						target.User = name
						argv = append(argv, "-l", name)
						continue
					}
					target.Options = append(target.Options, w)
					argv = append(argv, "-o", w)
				}
				got, err := Resolve(target, Config{UserConfig: path, SystemConfig: "none"})
				if err != nil {
					t.Fatal(err)
				}
				cmd := exec.Command(ssh, append(argv, "--", target.Host)...)
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.Output()
				if err != nil {
					t.Fatalf("ssh -G: %v\n%s", err, stderr.String())
				}
				want := said(t, string(out))
				if diff := cmp.Diff(want, comparable(got, want)); diff != "" {
					t.Errorf("Resolve(%q) differs from ssh -G (-ssh +ours):\n%s", text, diff)
				}
			})
		}
		if cases == 0 {
			t.Errorf("%s has no case", file)
		}
	}
}

// instantiate copies the configurations; @DIR@ becomes where they are.
func instantiate(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	err := filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		rel, _ := filepath.Rel(from, path)
		if err != nil || d.IsDir() {
			return errors.Join(err, os.MkdirAll(filepath.Join(dir, rel), 0o700))
		}
		writeFile(t, filepath.Join(dir, rel), strings.ReplaceAll(readFile(t, path), "@DIR@", dir))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// said picks from ssh's answer what is compared.
func said(t *testing.T, out string) map[string][]string {
	t.Helper()
	want := make(map[string][]string)
	for _, line := range strings.Split(out, "\n") {
		key, value, _ := strings.Cut(line, " ")
		switch key {
		case "identityfile":
			// Defaults that x/crypto has no algorithm for.
			if value == "~/.ssh/id_xmss" || value == "~/.ssh/id_dsa" {
				continue
			}
			want[key] = append(want[key], value)
		case "certificatefile":
			want[key] = append(want[key], value)
		case "userknownhostsfile", "globalknownhostsfile":
			want[key] = strings.Fields(value)
		case "proxyjump":
			hops, err := parseJump(value)
			if err != nil {
				t.Fatal(err)
			}
			want[key] = hopTexts(hops)
		case "hostname", "port", "user", "proxycommand", "hostkeyalias", "connecttimeout", "connectionattempts",
			"serveraliveinterval", "serveralivecountmax", "stricthostkeychecking", "identitiesonly", "identityagent",
			"addressfamily", "bindaddress":
			want[key] = []string{value}
		case "hostkeyalgorithms", "kexalgorithms", "ciphers", "macs", "pubkeyacceptedalgorithms":
			want[key] = strings.Split(value, ",")
		}
	}
	return want
}

func hopTexts(hops []Hop) []string {
	var texts []string
	for _, h := range hops {
		if h.Port == 0 {
			h.Port = 22 // ssh says it for some
		}
		texts = append(texts, joinHops([]Hop{h}))
	}
	return texts
}

// comparable is s in ssh's words. Algorithms that are not configured are ssh's
// own and not compared.
func comparable(s Settings, want map[string][]string) map[string][]string {
	seconds := func(d time.Duration) []string { return []string{strconv.Itoa(int(d.Seconds()))} }
	got := map[string][]string{
		"hostname": {s.HostName}, "port": {strconv.Itoa(s.Port)}, "user": {s.User},
		"connecttimeout": seconds(s.ConnectTimeout), "serveraliveinterval": seconds(s.ServerAliveInterval),
		"connectionattempts": {strconv.Itoa(s.ConnectionAttempts)}, "serveralivecountmax": {strconv.Itoa(s.ServerAliveCountMax)},
		"addressfamily": {s.AddressFamily}, "identitiesonly": {"no"},
		"userknownhostsfile":    strings.Fields(strings.Join(s.UserKnownHostsFiles, " ")), // ssh quotes nothing
		"globalknownhostsfile":  s.GlobalKnownHostsFiles,
		"stricthostkeychecking": want["stricthostkeychecking"],
	}
	if s.StrictHostKeyChecking != (want["stricthostkeychecking"][0] == "true") {
		got["stricthostkeychecking"] = []string{"strict: " + strconv.FormatBool(s.StrictHostKeyChecking)}
	}
	if s.IdentitiesOnly {
		got["identitiesonly"] = []string{"yes"}
	}
	if s.ConnectTimeout == 0 {
		got["connecttimeout"] = []string{"none"}
	}
	if len(s.Jumps) > 0 {
		got["proxyjump"] = hopTexts(s.Jumps)
	}
	for key, v := range map[string]string{"bindaddress": s.BindAddress, "hostkeyalias": s.HostKeyAlias} {
		if v != "" {
			got[key] = []string{v}
		}
	}
	if v := want["identityagent"]; v != nil {
		got["identityagent"] = []string{s.IdentityAgent}
		if v[0] == "SSH_AUTH_SOCK" && s.IdentityAgent == "/run/agent.sock" {
			got["identityagent"] = v
		}
	}
	for _, key := range []string{"proxycommand", "certificatefile", "identityfile"} {
		if v := s.raw[key]; v != nil {
			got[key] = v
		}
	}
	me, _ := user.Current()
	if !s.configuredKeys {
		for _, f := range s.IdentityFiles {
			got["identityfile"] = append(got["identityfile"], strings.Replace(f, me.HomeDir, "~", 1))
		}
	}
	for key, list := range map[string][]string{
		"hostkeyalgorithms": s.HostKeyAlgorithms, "kexalgorithms": s.KexAlgorithms, "ciphers": s.Ciphers,
		"macs": s.MACs, "pubkeyacceptedalgorithms": s.PubkeyAcceptedAlgorithms,
	} {
		if list != nil {
			got[key] = list
		} else {
			got[key] = want[key]
		}
	}
	return got
}

func resolveText(t *testing.T, config string, target Target) (Settings, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	writeFile(t, path, config)
	return Resolve(target, Config{UserConfig: path, SystemConfig: "none", Home: t.TempDir()})
}

func TestBlockThatCannotApplyCausesNoError(t *testing.T) {
	for name, config := range map[string]string{
		"unknown keyword":            "Host other\n NoSuchKeyword x\n",
		"bad port":                   "Host other\n Port nope\n",
		"open quote":                 "Host other\n IdentityFile \"x\n",
		"exec for another host":      "Match host other exec \"false\"\n Port 9\n",
		"exec before the other host": "Match exec \"false\" host other\n Port 9\n",
		"exec in the second reading": "Match originalhost other final exec \"false\"\n Port 9\n",
		"unknown criterion later":    "Match host other localnetwork 10.0.0.0/8\n Port 9\n",
		"include that is not there":  "Include /does/not/exist\nHost other\n Include /does/*/exist\n",
		"broken include elsewhere":   "Host other\n Include ~nosuchuser/x\n",
		"canonicalization elsewhere": "Host other\n CanonicalizeHostname yes\n",
		"a later value is not used":  "Host web\n KnownHostsCommand none\nHost *\n KnownHostsCommand /bin/x\n",
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolveText(t, config+"Host web\n User deploy\n", Target{Host: "web"})
			if err != nil || s.User != "deploy" || s.Port != 22 {
				t.Errorf("Resolve = %+v, %v; want deploy on port 22", s, err)
			}
		})
	}
}

func TestBlockThatCannotBeEvaluatedIsRefusedByName(t *testing.T) {
	for _, tc := range []struct{ name, config, option, where, reason string }{
		{"exec", "Port 22\nMatch exec \"test -e /x\"\n Port 9\n", "Match", ":2", "Match exec"},
		{"exec that may apply", "Match host web exec true\n", "Match", ":1", "Match exec"},
		{"exec in the second reading", "Match final exec true\n", "Match", ":1", "Match exec"},
		{"negated exec", "Match !exec true\n", "Match", ":1", "Match exec"},
		{"local network", "Match localnetwork 10.0.0.0/8\n", "Match", ":1", "Match localnetwork"},
		{"unknown criterion", "Match moon full\n", "Match", ":1", "moon"},
		{"canonical names", "Host web\n CanonicalizeHostname yes\n", "CanonicalizeHostname", ":2", "full name"},
		{"known hosts command", "KnownHostsCommand /bin/x\n", "KnownHostsCommand", ":1", "pin host_key"},
		{"descriptor passing", "ProxyUseFdpass yes\n", "ProxyUseFdpass", ":1", "descriptor"},
		{"bad port", "Host w*\n Port 70000\n", "Port", ":2", "no port"},
		{"unknown token", "HostName %z\n", "HostName", ":1", "%z"},
		{"no value", "Port\n", "Port", ":1", "no value"},
		{"open quote", "IdentityFile \"x\n", "IdentityFile", ":1", "quote"},
		{"unset variable", "IdentityFile ${NO_SUCH_VARIABLE}/x\n", "IdentityFile", ":1", "NO_SUCH_VARIABLE"},
		{"jump that is an option", "ProxyJump -oProxyCommand=x\n", "ProxyJump", ":1", "dash"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := resolveText(t, tc.config, Target{Host: "web"})
			var bad *OptionError
			if !errors.As(err, &bad) {
				t.Fatalf("Resolve = %v, want an *OptionError", err)
			}
			if bad.Name != tc.option || !strings.HasSuffix(bad.Where, tc.where) || !strings.Contains(bad.Reason, tc.reason) {
				t.Errorf("OptionError = %+v, want %q at %q: %q", bad, tc.option, tc.where, tc.reason)
			}
		})
	}
}

func TestUnknownKeywordIsNoted(t *testing.T) {
	s, err := resolveText(t, "HostNmae x\nIgnoreUnknown Foo*\nFooBar yes\n", Target{Host: "web"})
	if err != nil || len(s.Notes) != 1 || !strings.Contains(s.Notes[0], "HostNmae") {
		t.Errorf("Resolve = notes %q, %v; want one about HostNmae", s.Notes, err)
	}
}

func TestParseOptions(t *testing.T) {
	_, err := ParseOptions([]string{
		"Port=22", "port = 22", "ProxyJump=a,b", "StrictHostKeyChecking=accept-new", "Compression=no", "LogLevel=ERROR", "BatchMode=yes",
		"ForwardAgent=no", "UserKnownHostsFile=/dev/null", "Ciphers=aes128-ctr", "HostKeyAlgorithms=+ssh-rsa", "ConnectTimeout=1m", "IdentitiesOnly=yes",
	})
	if err != nil {
		t.Fatalf("ParseOptions = %v", err)
	}
	bad := []struct{ option, reason string }{
		{"Port=x", "no port"},
		{"User=me", "username"},
		{"StrictHostKeyChecking=no", "host_key"},
		{"Compression=yes", "only no"},
		{"ForwardAgent=yes", "only no"},
		{"LocalForward=1 x:2", "not supported"},
		{"Prot=22", "not an OpenSSH option"},
		{"-oPort=22", `without a leading "-o"`},
		{"Host=x", "block"},
		{"ProxyJump=-x", "dash"},
		{"ProxyJump=a b", "no host name"},
		{"Ciphers=3des-nope", "none of"},
		{"ConnectTimeout=soon", "no time"},
		{"ProxyCommand=nc %x", "%x"},
		{"Port", "no value"},
		{"", "Key=Value"},
		{"Port=22\nHost x", "line break"},
		{"HostName=-x", "dash"},
	}
	var opts []string
	for _, b := range bad {
		opts = append(opts, b.option)
	}
	_, err = ParseOptions(append(opts, "Port=22"))
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		t.Fatalf("ParseOptions = %v, want all errors joined", err)
	}
	errs := joined.Unwrap()
	if len(errs) != len(bad) {
		t.Fatalf("ParseOptions gave %d errors, want %d:\n%v", len(errs), len(bad), err)
	}
	for i, b := range bad {
		var e *OptionError
		if !errors.As(errs[i], &e) || !strings.Contains(e.Reason, b.reason) || e.Where != "ssh_opts" {
			t.Errorf("ParseOptions(%q) = %v, want %q", b.option, errs[i], b.reason)
		}
	}
}

func TestTargetsThatCouldBeSomethingElseAreRefused(t *testing.T) {
	for _, target := range []Target{
		{Host: "-oProxyCommand=x"},
		{Host: ""},
		{Host: "a b"},
		{Host: "a;b"},
		{Host: "$(x)"},
		{Host: "host:22"},
		{Host: "[::1]:22"},
		{Host: "a", User: "-l"},
		{Host: "a", User: "x;y"},
		{Host: "a", Options: []string{"HostName=-x"}},
		{Host: "a", Options: []string{"ProxyJump=-x@b"}},
	} {
		var bad *OptionError
		if _, err := Resolve(target, Config{UserConfig: "none", SystemConfig: "none"}); !errors.As(err, &bad) {
			t.Errorf("Resolve(%+v) = %v, want an *OptionError", target, err)
		}
	}
}

func TestKeyFileIsTheOnlyKey(t *testing.T) {
	s, err := resolveText(t, "IdentityFile ~/a\n", Target{Host: "web", KeyFile: "/keys/b c"})
	if err != nil || !cmp.Equal(s.IdentityFiles, []string{"/keys/b c"}) || !s.IdentitiesOnly {
		t.Errorf("Resolve = %q, only %v, %v; want the key file alone", s.IdentityFiles, s.IdentitiesOnly, err)
	}
}
