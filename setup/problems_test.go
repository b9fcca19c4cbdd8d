package setup_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"fediversity.eu/tf-hosts/setup"
	"github.com/google/go-cmp/cmp"
)

// node is a setup of one node with more keys for it.
func node(keys string) string {
	return `{"version": 1, "nodes": {"a": {"nixos_conf": "c", "host": "h"` + keys + `}}}`
}

// top is a setup of one node with more keys beside it.
func top(keys string) string {
	return `{"version": 1, "nodes": {"a": {"nixos_conf": "c", "host": "h"}}` + keys + `}`
}

func TestLoadProblems(t *testing.T) {
	const (
		unsupported = "is not supported by this version"
		keyForm     = ` (a line such as "ssh-ed25519 AAAA…" is expected, as tf-hosts host-keys prints it)`
	)
	for name, c := range map[string]struct {
		text string
		env  []string
		want []string
	}{
		// the text
		"empty file":               {"", nil, []string{"$: line 1, column 1: malformed JSON: unexpected end of JSON input"}},
		"cut off":                  {"{\"version\": 1,\n  \"no", nil, []string{"$: line 2, column 6: malformed JSON: unexpected end of JSON input"}},
		"a comma too many":         {"{\n  \"a\": 1,\n}", nil, []string{"$: line 3, column 1: malformed JSON: invalid character '}' looking for beginning of object key string"}},
		"something after the end":  {minimal + "\n x", nil, []string{"$: line 2, column 2: malformed JSON: invalid character 'x' after top-level value"}},
		"columns count characters": {`{"é": x}`, nil, []string{"$: line 1, column 7: malformed JSON: invalid character 'x' looking for beginning of value"}},
		"not UTF-8":                {"{\"a\": \"\xff\"}", nil, []string{"$: line 1, column 8: not UTF-8"}},
		"a key twice": {"{\"version\": 1, \"nodes\": {\n\"a\": {\"nixos_conf\": \"c\", \"host\": \"h\", \"host\": \"i\"},\n\"a\": {\"nixos_conf\": \"c\", \"host\": \"h\"}}}", nil, []string{
			"$.nodes.a: line 3, column 1: the key is there twice",
			"$.nodes.a.host: line 2, column 39: the key is there twice",
		}},
		"NUL byte":        {node(`, "config_identity": "a\u0000b"`), nil, []string{"$.nodes.a.config_identity: holds a NUL byte"}},
		"not an object":   {`[]`, nil, []string{"$: a value of type object is expected, not array"}},
		"nothing in it":   {`{}`, nil, []string{"$.nodes: missing", "$.version: missing"}},
		"another version": {strings.Replace(minimal, "1", "2", 1), nil, []string{"$.version: 1 is expected, not 2"}},
		"no node":         {`{"version": 1, "nodes": {}}`, nil, []string{"$.nodes: at least 1 entry is expected"}},
		"wrong type, the rest goes on": {top(`, "bootstrap": "yes", "bash": "sh", "runner": {"parallelism": 0, "become": []}`), nil, []string{
			`$.bash: an absolute path is expected, not "sh"`,
			"$.bootstrap: a value of type boolean is expected, not string",
			"$.runner.become: at least 1 item is expected",
			"$.runner.parallelism: minimum: got 0, want 1",
		}},
		"null": {node(`, "group": null`), nil, []string{
			"$.nodes.a.group: a value of type string is expected, not null (leave the key out where nothing is meant)",
		}},

		// keys and names
		"unknown keys": {top(`, "http_backends": {}, "zzz": 1, "http_backend": {"adress": "x", "password": "p"}`), nil, []string{
			`$.http_backend.adress: unknown key (did you mean "address"?)`,
			`$.http_backend.password: unknown key (did you mean "password_file"?)`,
			`$.http_backends: unknown key (did you mean "http_backend"?)`,
			`$.zzz: unknown key`,
		}},
		"unknown keys of a node": {node(`, "Host": "x", "ssh-opts": [], "runner": {"limits": {"conect": 1}}`), nil, []string{
			`$.nodes.a.Host: unknown key (did you mean "host"?)`,
			`$.nodes.a.runner.limits.conect: unknown key (did you mean "connect"?)`,
			`$.nodes.a["ssh-opts"]: unknown key (did you mean "ssh_opts"?)`,
		}},
		"bad names": {`{"version": 1, "nodes": {"a..b": {"nixos_conf": "c", "host": "h", "group": "x/y", "tags": ["ok", "a b"]}}}`, nil, []string{
			`$.nodes["a..b"]: bad name (letters, digits, - and _, in parts joined by single dots)`,
			`$.nodes["a..b"].group: "x/y" does not match ^[A-Za-z0-9_-]+$`,
			`$.nodes["a..b"].tags[1]: "a b" does not match ^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`,
		}},
		"no nixos_conf": {`{"version": 1, "nodes": {"a": {"host": "h"}}}`, nil, []string{"$.nodes.a.nixos_conf: missing"}},
		"no host":       {`{"version": 1, "nodes": {"a": {"nixos_conf": "c"}}}`, nil, []string{"$.nodes.a.host: missing"}},

		// hosts
		"leading dashes": {`{"version": 1, "nodes": {"prod.app1": {"nixos_conf": "c", "host": "-oProxyCommand=x", "username": "-u", "ssh_opts": ["ProxyJump=-x", "-o", "ProxyJump=u@-y"]}}}`, nil, []string{
			`$.nodes["prod.app1"].host: begins with "-"`,
			`$.nodes["prod.app1"].ssh_opts[0]: jump host "-x" begins with "-"`,
			`$.nodes["prod.app1"].ssh_opts[1]: begins with "-" (options are bare: Key=Value, without -o)`,
			`$.nodes["prod.app1"].ssh_opts[2]: jump host "u@-y" begins with "-"`,
			`$.nodes["prod.app1"].username: begins with "-"`,
		}},
		"a blank in the host": {strings.Replace(minimal, `"h"`, `"h h"`, 1), nil, []string{"$.nodes.a.host: holds a blank or a control character"}},
		"a user in the host":  {strings.Replace(minimal, `"h"`, `"u@h"`, 1), nil, []string{"$.nodes.a.host: holds a user: that is the key username"}},
		"a port in the host":  {strings.Replace(minimal, `"h"`, `"h:22"`, 1), nil, []string{`$.nodes.a.host: holds a port: that is the option "Port" in ssh_opts`}},
		"a URL for a host":    {strings.Replace(minimal, `"h"`, `"ssh://h"`, 1), nil, []string{"$.nodes.a.host: is no host name or address"}},
		"two nodes on one host and port": {`{"version": 1, "ssh": {"ssh_opts": ["port=2222"]}, "nodes": {
			"a": {"nixos_conf": "c", "host": "H"},
			"b": {"nixos_conf": "c", "host": "h", "ssh_opts": ["Port 2222", "Port=1"]},
			"c": {"nixos_conf": "c", "host": "h", "ssh_opts": []},
			"d": {"nixos_conf": "c", "host": "x", "ssh_opts": ["HostName=h", "Port=22"]},
			"e": {"nixos_conf": "c", "host": "h", "ssh_opts": ["ProxyJump=j"]}}}`, nil, []string{
			"$.nodes.b.host: is the host and port of $.nodes.a too: h port 2222",
			"$.nodes.d.host: is the host and port of $.nodes.c too: h port 22",
		}},
		"a default's problem is listed once": {`{"version": 1, "ssh": {"username": "-x", "ssh_opts": ["Port=0"]}, "nodes": {
			"a": {"nixos_conf": "c", "host": "h"}, "b": {"nixos_conf": "c", "host": "i"}}}`, nil, []string{
			`$.ssh.ssh_opts[0]: "0" is no port`,
			`$.ssh.username: begins with "-"`,
		}},
		"ssh_opts": {node(`, "ssh_opts": ["Port=x", "nothing", "Port=", 1]`), nil, []string{
			`$.nodes.a.ssh_opts[0]: "x" is no port`,
			`$.nodes.a.ssh_opts[1]: "nothing" is no Key=Value`,
			`$.nodes.a.ssh_opts[2]: "Port=" is no Key=Value`,
			`$.nodes.a.ssh_opts[3]: "" is no Key=Value`,
			`$.nodes.a.ssh_opts[3]: a value of type string is expected, not number`,
		}},
		"ssh_opts as a string that holds no list": {node(`, "ssh_opts": "Port=1"`), nil, []string{
			`$.nodes.a.ssh_opts: "Port=1" holds no JSON list of strings`,
		}},
		"host keys": {`{"version": 1, "nodes": {
			"a": {"nixos_conf": "c", "host": "h", "host_key": "SHA256:xyz"},
			"b": {"nixos_conf": "c", "host": "i", "host_key": "h ssh-ed25519 AAAA"},
			"c": {"nixos_conf": "c", "host": "j", "host_key": "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"}}}`, nil, []string{
			"$.nodes.a.host_key: is no public host key" + keyForm,
			"$.nodes.b.host_key: is no public host key" + keyForm,
			"$.nodes.c.host_key: is no public host key: its type and its text do not fit" + keyForm,
		}},
		"~ without HOME":    {node(`, "key_file": "~/k"`), nil, []string{`$.nodes.a.key_file: "~/k": the home folder is not known`}},
		"~ of another user": {node(`, "key_file": "~u/k"`), []string{"HOME=/root"}, []string{`$.nodes.a.key_file: "~u/k": the home folder of another user is not looked up`}},

		// the environment
		"SSH_USER": {minimal, []string{"SSH_USER=-l"}, []string{`SSH_USER: begins with "-"`}},
		"SSH_NODES names an unknown node": {minimal, []string{`SSH_NODES={"b": {}, "prod.x": {"user": "x"}}`}, []string{
			"SSH_NODES.b: no such node in the setup",
			`SSH_NODES["prod.x"]: no such node in the setup`,
			`SSH_NODES["prod.x"].user: unknown key (did you mean "username"?)`,
		}},
		"SSH_NODES with a bad host": {minimal, []string{`SSH_NODES={"a": {"host": "-x"}}`}, []string{`SSH_NODES.a.host: begins with "-"`}},
		"SSH_NODES is no JSON":      {minimal, []string{`SSH_NODES={"a": `}, []string{"SSH_NODES: line 1, column 7: malformed JSON: unexpected end of JSON input"}},
		"SSH_NODES is no object":    {minimal, []string{`SSH_NODES=[]`}, []string{"SSH_NODES: a value of type object is expected, not array"}},
		"BOOTSTRAP=true":            {minimal, []string{"BOOTSTRAP=true"}, []string{`BOOTSTRAP: only 1 means set, not "true"`}},
		"numbers and methods in TF_HTTP_*": {minimal, []string{"TF_HTTP_RETRY_MAX=-1", "TF_HTTP_RETRY_WAIT_MIN=1s", "TF_HTTP_LOCK_METHOD=lock"}, []string{
			`TF_HTTP_LOCK_METHOD: "lock" is no HTTP method`,
			`TF_HTTP_RETRY_MAX: "-1" is no whole number from 0`,
			`TF_HTTP_RETRY_WAIT_MIN: "1s" is no whole number from 0`,
		}},

		// the backend
		"user information in an address": {top(`, "http_backend": {"address": "http://u:hunter2@h/s"}`), nil, []string{
			"$.http_backend.address: holds user information (use username and password_file, or TF_HTTP_USERNAME and TF_HTTP_PASSWORD)",
		}},
		"addresses": {minimal, []string{"TF_HTTP_ADDRESS=u:hunter2@h:x", "TF_HTTP_LOCK_ADDRESS=ftp://h/", "TF_HTTP_UNLOCK_ADDRESS=http://h/#f"}, []string{
			"TF_HTTP_ADDRESS: an http or https URL is expected",
			"TF_HTTP_LOCK_ADDRESS: an http or https URL is expected",
			"TF_HTTP_UNLOCK_ADDRESS: holds a fragment, which no request would carry",
		}},
		"lock address without unlock address": {top(`, "http_backend": {"lock_address": "http://h/l"}`), nil, []string{
			"$.http_backend.lock_address: the unlock address is missing: both or none",
		}},
		"the file's lock addresses under another address": {
			top(`, "http_backend": {"address": "http://h/s", "lock_address": "http://h/l", "unlock_address": "http://h/u"}`),
			[]string{"TF_HTTP_ADDRESS=http://i/s"},
			[]string{"TF_HTTP_ADDRESS: the setup file's lock addresses belong to another address (set TF_HTTP_LOCK_ADDRESS and TF_HTTP_UNLOCK_ADDRESS too)"},
		},
		"user without password": {top(`, "http_backend": {"username": "u"}`), nil, []string{
			"$.http_backend.username: the backend has a user and no password (set password_file or TF_HTTP_PASSWORD)",
		}},
		"password without user": {minimal, []string{"TF_HTTP_PASSWORD=p"}, []string{
			"$.http_backend.username: the backend has a password and no user (set username or TF_HTTP_USERNAME)",
		}},
		"headers": {top(`, "http_backend": {"headers": {"Content-MD5": "x", "a b": "x", "X": "a\nb", "Authorization": "t"}, "username": "u"}`), []string{"TF_HTTP_PASSWORD=p"}, []string{
			"$.http_backend.headers.Authorization: contradicts username (keep one of the two)",
			"$.http_backend.headers.X: holds a line break",
			`$.http_backend.headers["Content-MD5"]: is a header that the protocol sets`,
			`$.http_backend.headers["a b"]: is no header name`,
		}},
		"client certificate without its key": {minimal, []string{"TF_HTTP_CLIENT_CERTIFICATE_PEM=x"}, []string{
			"$.http_backend.key_file: missing: a client certificate and its key belong together",
		}},
		"waits": {top(`, "http_backend": {"retry_wait_min": 31}`), nil, []string{"$.http_backend.retry_wait_min: 31 s is longer than the longest wait, 30 s"}},
		"self_backend without a node": {top(`, "self_backend": {"port": 70000}`), nil, []string{
			"$.self_backend.node: missing", "$.self_backend.port: maximum: got 70,000, want 65,535",
		}},
		"self_backend names an unknown node": {top(`, "self_backend": {"node": "aa", "path": "x", "scheme": "htps"}`), nil, []string{
			`$.self_backend.node: no node "aa" in the setup`,
			`$.self_backend.path: "x" does not match ^/`,
			`$.self_backend.scheme: one of "http", "https" is expected, not "htps" (did you mean "https"?)`,
		}},

		// later versions
		"what this version does not do": {top(`, "circuits": ["c"]`), nil, []string{
			"$.circuits: " + unsupported + " (leave it out)",
		}},
		"settings of a node": {node(`, "runner": {"become": [""], "parallelism": 1, "limits": {"guard": 4}}`), nil, []string{
			"$.nodes.a.runner.become[0]: the command is empty",
			"$.nodes.a.runner.limits.guard: minimum: got 4, want 5",
			"$.nodes.a.runner.parallelism: unknown key",
		}},
		"health checks": {top(`, "runner": {"health": [
			{"name": "none"}, {"name": "two", "tcp": "h:1", "unit": "u.service"}, {"name": "two", "tcp": "h", "from": "moon"},
			{"name": "w", "http": {"url": "https://u:p@h/"}, "when": "never"}, {"name": "c", "command": ["x"], "from": "node"},
			{"name": "u", "unit": "-x"}, {"name": "s", "http": {"url": "gopher://h"}}]}`), nil, []string{
			"$.runner.health[0]: exactly one of command, http, tcp and unit is expected",
			"$.runner.health[1]: exactly one of command, http, tcp and unit is expected",
			`$.runner.health[2].from: one of "node", "deployer" is expected, not "moon"`,
			`$.runner.health[2].name: "two" is the name of another check`,
			`$.runner.health[2].tcp: HOST:PORT is expected, not "h"`,
			"$.runner.health[3].http.url: user info has no place in an address",
			`$.runner.health[3].when: one of "after", "before", "both" is expected, not "never"`,
			"$.runner.health[4].from: only http and tcp can be asked from elsewhere (leave it out)",
			`$.runner.health[5].unit: "-x" does not match ^[A-Za-z0-9_.@:][A-Za-z0-9_.@:\\-]*$`,
			"$.runner.health[6].http.url: an http or https address is expected",
		}},
		"waves": {top(`, "runner": {"waves": [[], [""], "x"]}`), nil, []string{
			"$.runner.waves[0]: at least 1 item is expected",
			`$.runner.waves[1][0]: minLength: got 0, want 1`,
			"$.runner.waves[2]: a value of type array is expected, not string",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := problemsOf(t, write(t, c.text, c.env...))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("Load(%s) (-want +got):\n%s", name, diff)
			}
			if all := strings.Join(got, "\n"); strings.Contains(all, "hunter2") {
				t.Errorf("a password is in the problems: %s", all)
			}
		})
	}
}

func TestProblemsErrorText(t *testing.T) {
	o := write(t, `{"version": 1, "nodes": {"a": {"nixos_conf": "c", "host": "h", "x": 1, "username": "-u"}}}`)
	_, err := setup.Load(o)
	want := fmt.Sprintf("checking setup %q: 2 problems\n  $.nodes.a.username: begins with \"-\"\n  $.nodes.a.x: unknown key", o.Path)
	if err == nil || err.Error() != want {
		t.Errorf("Load = %v, want %s", err, want)
	}
}

func TestLoadUnknownOption(t *testing.T) {
	o := write(t, node(`, "ssh_opts": ["Port=22", "Bogus=1"]`))
	o.CheckOptions = func(options []string) error {
		for _, o := range options {
			if strings.HasPrefix(o, "Bogus=") {
				return fmt.Errorf("unknown option %q", "Bogus")
			}
		}
		return nil
	}
	if diff := cmp.Diff([]string{`$.nodes.a.ssh_opts[1]: unknown option "Bogus"`}, problemsOf(t, o)); diff != "" {
		t.Errorf("Load (-want +got):\n%s", diff)
	}
	o.CheckOptions = func(options []string) error {
		if len(options) == 2 {
			return errors.New("the two contradict each other")
		}
		return nil
	}
	if diff := cmp.Diff([]string{"$.nodes.a.ssh_opts: the two contradict each other"}, problemsOf(t, o)); diff != "" {
		t.Errorf("Load (-want +got):\n%s", diff)
	}
}

func TestMissingKeyFileIsNoProblem(t *testing.T) {
	o := write(t, node(`, "key_file": "none"`))
	s := load(t, o)
	if got, want := s.Nodes["a"].KeyFile, filepath.Join(s.Dir, "none"); got != want {
		t.Errorf("KeyFile = %q, want %q", got, want)
	}
	if _, err := os.Stat(s.Nodes["a"].KeyFile); err == nil {
		t.Error("the key file is there")
	}
}
