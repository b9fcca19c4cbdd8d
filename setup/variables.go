package setup

import (
	"fmt"
	"slices"
)

// Variable is one environment variable that the program reads. The table feeds
// the flags, "tf-hosts env" and the reference page.
type Variable struct {
	Name string
	// Flag is the flag of the command line that means the same and wins, without
	// dashes.
	Flag string
	// Default is what holds without it, for a person.
	Default string
	// Key is the place in the setup file that the variable wins over; empty
	// where the file does not say it.
	Key string
	// Bool: only 1 means set, and the flag takes no value.
	Bool bool
	// List: patterns of Select, parted by commas; the flag may be repeated.
	List bool
	// Secret: the value is never shown, and the flag takes the name of a file
	// that holds it, since a command line can be read by every local user.
	Secret bool
	Doc    string
}

// Variables lists every variable of the program, in the order of the
// documentation. Those of the system (HOME, PATH, SSH_AUTH_SOCK, XDG_*) are none
// of it.
func Variables() []Variable {
	return []Variable{
		{Name: "TF_HOSTS_SETUP", Flag: "setup", Default: "./tf-hosts.json", Doc: "the setup file"},
		{Name: "TF_HOSTS_TOFU", Flag: "tofu", Default: "tofu on PATH, then the cached build", Doc: "the OpenTofu binary, 1.12.0 or newer"},
		{Name: "TF_HOSTS_CACHE", Flag: "cache", Default: "$XDG_CACHE_HOME/tf-hosts", Doc: "folder of what can be made again"},
		{Name: "TF_HOSTS_SOCK", Flag: "sock", Doc: "socket of the wrapper that \"run\" hands its node to; set by the wrapper"},
		{Name: "TF_HOSTS_NODE_SETTINGS", Flag: "node-settings", Doc: "settings of \"run\" for its node, as JSON, where no wrapper runs"},
		{Name: "SSH_USER", Flag: "ssh-user", Default: "root", Key: "$.ssh.username", Doc: "user for the nodes that name none"},
		{Name: "SSH_NODES", Flag: "ssh-nodes", Doc: "JSON object: node name to username, host, key_file, host_key, ssh_opts; wins over the node entry"},
		{Name: "TF_HTTP_ADDRESS", Flag: "http-address", Default: defaultAddress, Key: "$.http_backend.address", Doc: "address of the state; pins it"},
		{Name: "TF_HTTP_UPDATE_METHOD", Flag: "http-update-method", Default: "POST", Key: "$.http_backend.update_method", Doc: "HTTP method that stores a state"},
		{Name: "TF_HTTP_LOCK_ADDRESS", Flag: "http-lock-address", Default: "the address", Key: "$.http_backend.lock_address", Doc: "address that locks"},
		{Name: "TF_HTTP_LOCK_METHOD", Flag: "http-lock-method", Default: "LOCK", Key: "$.http_backend.lock_method", Doc: "HTTP method that locks"},
		{Name: "TF_HTTP_UNLOCK_ADDRESS", Flag: "http-unlock-address", Default: "the address", Key: "$.http_backend.unlock_address", Doc: "address that unlocks"},
		{Name: "TF_HTTP_UNLOCK_METHOD", Flag: "http-unlock-method", Default: "UNLOCK", Key: "$.http_backend.unlock_method", Doc: "HTTP method that unlocks"},
		{Name: "TF_HTTP_USERNAME", Flag: "http-username", Key: "$.http_backend.username", Doc: "user of the backend"},
		{Name: "TF_HTTP_PASSWORD", Flag: "http-password-file", Key: "$.http_backend.password_file", Secret: true, Doc: "password of the backend"},
		{Name: "TF_HTTP_RETRY_MAX", Flag: "http-retry-max", Default: "2", Key: "$.http_backend.retry_max", Doc: "tries after the first one"},
		{Name: "TF_HTTP_RETRY_WAIT_MIN", Flag: "http-retry-wait-min", Default: "1", Key: "$.http_backend.retry_wait_min", Doc: "shortest wait between tries, in seconds"},
		{Name: "TF_HTTP_RETRY_WAIT_MAX", Flag: "http-retry-wait-max", Default: "30", Key: "$.http_backend.retry_wait_max", Doc: "longest wait between tries, in seconds"},
		{Name: "TF_HTTP_CLIENT_CA_CERTIFICATE_PEM", Flag: "http-ca-file", Default: "the system's authorities", Key: "$.http_backend.ca_file", Secret: true, Doc: "authorities that may sign the backend's certificate, PEM text"},
		{Name: "TF_HTTP_CLIENT_CERTIFICATE_PEM", Flag: "http-cert-file", Key: "$.http_backend.cert_file", Secret: true, Doc: "client certificate, PEM text"},
		{Name: "TF_HTTP_CLIENT_PRIVATE_KEY_PEM", Flag: "http-key-file", Key: "$.http_backend.key_file", Secret: true, Doc: "key of the client certificate, PEM text"},
		{Name: "TF_VERB", Flag: "verb", Doc: "the verb to run, where none is on the command line"},
		{Name: "BOOTSTRAP", Flag: "bootstrap", Bool: true, Doc: "bring up the backend that the graph itself deploys"},
		{Name: "BOOTSTRAP_SELF_BACKEND", Flag: "self-backend", Bool: true, Doc: "the graph deploys the backend of its own state"},
		{Name: "BOOTSTRAP_ALLOW_LOST_STATE", Flag: "allow-lost-state", Bool: true, Doc: "give a lost state up and go on; what is known of it is archived"},
		{Name: "TF_RECLAIM_OWN_LOCK", Flag: "reclaim-own-lock", Bool: true, Doc: "release the lock that a dead run of this user on this machine left"},
		{Name: "BOOTSTRAP_STATE_DIR", Flag: "state-dir", Default: "$XDG_STATE_HOME/tf-hosts", Doc: "parent of the working dirs"},
		{Name: "TF_HOSTS_ON", Flag: "on", List: true, Doc: "nodes to limit the verb to: names, globs, @tags, each after ! to leave out, parted by commas"},
		{Name: "TF_HOSTS_NO_WAVES", Flag: "no-waves", Bool: true, Doc: "apply to all nodes at once, whatever runner.waves says"},
		{Name: "DEPLOYMENT", Flag: "deployment", Doc: "submission that turns nodes off: the path of a JSON file, or a JSON object itself; see published_names_expr"},
		{Name: "TF_HOSTS_ALLOW_EMPTY", Flag: "allow-empty", Bool: true, Doc: "let a submission turn off every node"},
		{Name: "TF_HOSTS_REBOOT_IF_NEEDED", Flag: "reboot-if-needed", Bool: true, Doc: "apply, run: restart a node whose kernel or initrd is not the one of its new system, and wait for it"},
		{Name: "NO_COLOR", Flag: "no-color", Bool: true, Doc: "no colours; as everywhere, any value counts"},
	}
}

// Origins of a value.
const (
	FromFlag        = "flag"
	FromEnvironment = "environment"
	FromFile        = "file"
	FromDefault     = "default"
)

// Environment answers variables: a flag wins over the environment. An empty
// value is no value, in both.
type Environment struct {
	// Getenv is os.Getenv, or a test's map; nil is an empty environment.
	Getenv func(name string) string
	// Flag is the value of a flag of the table by its name without dashes, "1"
	// for a Bool one; false where the user did not give it. nil is no flags.
	Flag func(flag string) (value string, given bool)
}

// Lookup is a variable's value and its origin: FromFlag, FromEnvironment, or
// FromDefault with no value. The flag of a Secret one is a file's name and is
// not looked at here. A name outside the table is asked of the environment.
func (e Environment) Lookup(name string) (value, origin string) {
	if v, ok := lookupVariable(name); ok && !v.Secret {
		if value, ok := e.flag(v.Flag); ok {
			return value, FromFlag
		}
	}
	if value := e.getenv(name); value != "" {
		return value, FromEnvironment
	}
	return "", FromDefault
}

// Value is a variable's value, "" where it is not set.
func (e Environment) Value(name string) string {
	value, _ := e.Lookup(name)
	return value
}

// Bool says whether a Bool variable is set. Any value but 1 is an error: 0, no
// and false would else mean their contrary to somebody. NO_COLOR takes all, as
// its convention has it.
func (e Environment) Bool(name string) (bool, error) {
	value, _ := e.Lookup(name)
	switch {
	case value == "":
		return false, nil
	case value == "1" || name == "NO_COLOR":
		return true, nil
	}
	return false, fmt.Errorf("reading %s: only 1 means set, not %q", e.source(name), value)
}

func (e Environment) getenv(name string) string {
	if e.Getenv == nil {
		return ""
	}
	return e.Getenv(name)
}

func (e Environment) flag(flag string) (string, bool) {
	if e.Flag == nil {
		return "", false
	}
	value, given := e.Flag(flag)
	return value, given && value != ""
}

// secretFile is the file that the flag of a Secret variable names.
func (e Environment) secretFile(name string) (string, bool) {
	v, ok := lookupVariable(name)
	if !ok || !v.Secret {
		return "", false
	}
	return e.flag(v.Flag)
}

// source is the path of a problem with a variable's value: the flag or the name.
func (e Environment) source(name string) string {
	v, ok := lookupVariable(name)
	if !ok {
		return name
	}
	if _, given := e.flag(v.Flag); given {
		return "--" + v.Flag
	}
	return name
}

func lookupVariable(name string) (Variable, bool) {
	all := Variables()
	i := slices.IndexFunc(all, func(v Variable) bool { return v.Name == name })
	if i < 0 {
		return Variable{}, false
	}
	return all[i], true
}
