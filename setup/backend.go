package setup

import (
	"errors"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// defaultAddress is the spec's (004, edge cases); it is never pinned.
const defaultAddress = "http://localhost:8080/state/project1/example"

type backendEntry struct {
	Address       string            `json:"address"`
	Pinned        bool              `json:"pinned"`
	LockAddress   string            `json:"lock_address"`
	LockMethod    string            `json:"lock_method"`
	UnlockAddress string            `json:"unlock_address"`
	UnlockMethod  string            `json:"unlock_method"`
	UpdateMethod  string            `json:"update_method"`
	Username      string            `json:"username"`
	PasswordFile  string            `json:"password_file"`
	Headers       map[string]string `json:"headers"`
	RetryMax      *int              `json:"retry_max"`
	RetryWaitMin  *int              `json:"retry_wait_min"`
	RetryWaitMax  *int              `json:"retry_wait_max"`
	CAFile        string            `json:"ca_file"`
	CertFile      string            `json:"cert_file"`
	KeyFile       string            `json:"key_file"`
}

const atBackend = "$.http_backend"

// backend lays TF_HTTP_* over the file over the defaults of OpenTofu's http
// backend (facts/tofu-http.md §1.4).
func (l *loader) backend(e backendEntry) {
	b := &l.setup.Backend
	b.Headers = e.Headers

	address := l.pick("TF_HTTP_ADDRESS", e.Address, atBackend+".address", defaultAddress)
	b.Address = address.value
	b.Pinned = e.Pinned || l.env.Value("TF_HTTP_ADDRESS") != ""
	l.checkAddress(address)

	lock := l.pick("TF_HTTP_LOCK_ADDRESS", e.LockAddress, atBackend+".lock_address", "")
	unlock := l.pick("TF_HTTP_UNLOCK_ADDRESS", e.UnlockAddress, atBackend+".unlock_address", "")
	l.lockAddresses(e, address, lock, unlock)

	b.UpdateMethod = l.method("TF_HTTP_UPDATE_METHOD", e.UpdateMethod, "update_method", "POST")
	b.LockMethod = l.method("TF_HTTP_LOCK_METHOD", e.LockMethod, "lock_method", "LOCK")
	b.UnlockMethod = l.method("TF_HTTP_UNLOCK_METHOD", e.UnlockMethod, "unlock_method", "UNLOCK")

	b.RetryMax = l.number("TF_HTTP_RETRY_MAX", e.RetryMax, 2)
	shortest := l.number("TF_HTTP_RETRY_WAIT_MIN", e.RetryWaitMin, 1)
	longest := l.number("TF_HTTP_RETRY_WAIT_MAX", e.RetryWaitMax, 30)
	b.RetryWaitMin = time.Duration(shortest) * time.Second
	b.RetryWaitMax = time.Duration(longest) * time.Second
	if shortest > longest {
		l.found.addf(atBackend+".retry_wait_min", "%d s is longer than the longest wait, %d s", shortest, longest)
	}

	l.credentials(e)
	l.certificates(e)
}

// pick is a variable's value, else the file's, else the default.
func (l *loader) pick(variable, inFile, where, otherwise string) field[string] {
	f := field[string]{value: otherwise, where: where}
	f.set(inFile, inFile != "", where)
	v := l.env.Value(variable)
	f.set(v, v != "", l.env.source(variable))
	return f
}

// lockAddresses: one of the two alone would lock and never unlock, and those of
// the file belong to the file's address.
func (l *loader) lockAddresses(e backendEntry, address, lock, unlock field[string]) {
	b := &l.setup.Backend
	b.LockAddress, b.UnlockAddress = b.Address, b.Address
	switch {
	case lock.value == "" && unlock.value == "":
		return
	case lock.value == "":
		l.found.add(unlock.where, "the lock address is missing: both or none", "")
		return
	case unlock.value == "":
		l.found.add(lock.where, "the unlock address is missing: both or none", "")
		return
	}
	file := e.Address
	if file == "" {
		file = defaultAddress
	}
	if address.value != file && (lock.where == atBackend+".lock_address" || unlock.where == atBackend+".unlock_address") {
		l.found.add(address.where, "the setup file's lock addresses belong to another address",
			"set TF_HTTP_LOCK_ADDRESS and TF_HTTP_UNLOCK_ADDRESS too")
	}
	l.checkAddress(lock)
	l.checkAddress(unlock)
	b.LockAddress, b.UnlockAddress = lock.value, unlock.value
}

// checkAddress never repeats the address: what is wrong with it may be the
// password in it.
func (l *loader) checkAddress(f field[string]) {
	u, err := url.Parse(f.value)
	switch {
	case err != nil:
		l.found.add(f.where, "is no URL", "")
	case u.User != nil:
		l.found.add(f.where, "holds user information", "use username and password_file, or TF_HTTP_USERNAME and TF_HTTP_PASSWORD")
	case u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		l.found.add(f.where, "an http or https URL is expected", "")
	case u.Fragment != "":
		l.found.add(f.where, "holds a fragment, which no request would carry", "")
	case u.Port() != "" && !isPort(u.Port()):
		l.found.add(f.where, "has no usable port", "")
	}
}

var methodForm = regexp.MustCompile(`^[A-Z]+$`)

func (l *loader) method(variable, inFile, key, otherwise string) string {
	f := l.pick(variable, inFile, atBackend+"."+key, otherwise)
	if f.where == l.env.source(variable) && !methodForm.MatchString(f.value) { // the schema checks the file's
		l.found.addf(f.where, "%q is no HTTP method", f.value)
	}
	return f.value
}

func (l *loader) number(variable string, inFile *int, otherwise int) int {
	n := otherwise
	if inFile != nil {
		n = *inFile
	}
	text := l.env.Value(variable)
	if text == "" {
		return n
	}
	v, err := strconv.Atoi(text)
	if err != nil || v < 0 {
		l.found.addf(l.env.source(variable), "%q is no whole number from 0", text)
		return n
	}
	return v
}

func (l *loader) credentials(e backendEntry) {
	b := &l.setup.Backend
	username := l.pick("TF_HTTP_USERNAME", e.Username, atBackend+".username", "")
	b.Username = username.value
	if strings.Contains(b.Username, ":") {
		l.found.add(username.where, "holds a colon, which basic authentication cannot carry", "")
	}
	b.Password, b.PasswordFile = l.secret("TF_HTTP_PASSWORD", e.PasswordFile, "password_file", func(text string) string {
		return strings.TrimSuffix(strings.TrimSuffix(text, "\n"), "\r")
	})
	switch {
	case l.options.WithoutSecrets:
	case b.Username != "" && b.Password == "" && b.PasswordFile == "":
		// Some servers answer a wrong password with "no such state".
		l.found.add(username.where, "the backend has a user and no password", "set password_file or TF_HTTP_PASSWORD")
	case b.Username == "" && b.Password != "":
		l.found.add(atBackend+".username", "the backend has a password and no user", "set username or TF_HTTP_USERNAME")
	}
	for _, name := range tfhosts.SortedNames(b.Headers) {
		where := member(atBackend+".headers", name)
		switch lower := strings.ToLower(name); {
		case !headerForm.MatchString(name):
			l.found.add(where, "is no header name", "")
		case strings.ContainsAny(b.Headers[name], "\r\n"):
			l.found.add(where, "holds a line break", "")
		case lower == "content-type", lower == "content-md5":
			l.found.add(where, "is a header that the protocol sets", "")
		case lower == "authorization" && b.Username != "":
			l.found.add(where, "contradicts username", "keep one of the two")
		}
	}
}

var headerForm = regexp.MustCompile("^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")

func (l *loader) certificates(e backendEntry) {
	b := &l.setup.Backend
	same := func(text string) string { return text }
	b.CAPEM, b.CAFile = l.secret("TF_HTTP_CLIENT_CA_CERTIFICATE_PEM", e.CAFile, "ca_file", same)
	b.CertPEM, b.CertFile = l.secret("TF_HTTP_CLIENT_CERTIFICATE_PEM", e.CertFile, "cert_file", same)
	b.KeyPEM, b.KeyFile = l.secret("TF_HTTP_CLIENT_PRIVATE_KEY_PEM", e.KeyFile, "key_file", same)
	cert, key := b.CertPEM != "" || b.CertFile != "", b.KeyPEM != "" || b.KeyFile != ""
	if cert != key {
		missing := "key_file"
		if key {
			missing = "cert_file"
		}
		l.found.add(atBackend+"."+missing, "missing: a client certificate and its key belong together", "")
	}
}

// secret is the value of a Secret variable: that of the file its flag names,
// its own, or that of the file that the setup names. file is empty where the
// value came from the environment.
func (l *loader) secret(variable, inFile, key string, trim func(string) string) (value, file string) {
	where := atBackend + "." + key
	if name, given := l.env.secretFile(variable); given {
		file, where = name, l.env.source(variable)
	} else if value := l.env.getenv(variable); value != "" {
		return value, ""
	} else {
		file = l.path(where, inFile)
	}
	if file == "" || l.options.WithoutSecrets {
		return "", file
	}
	data, err := os.ReadFile(file)
	if err != nil {
		l.found.addf(where, "reading %q: %v", file, bare(err))
		return "", file
	}
	value = trim(string(data))
	if value == "" {
		l.found.addf(where, "%q is empty", file)
	}
	return value, file
}

type selfEntry struct {
	Node   string `json:"node"`
	Port   int    `json:"port"`
	Path   string `json:"path"`
	Scheme string `json:"scheme"`
}

// selfBackend takes what the entry leaves open from the backend's address.
func (l *loader) selfBackend(e *selfEntry) {
	if e == nil {
		return
	}
	self := &tfhosts.SelfBackend{Node: e.Node, Port: e.Port, Path: e.Path, Scheme: e.Scheme}
	if _, ok := l.setup.Nodes[e.Node]; !ok && e.Node != "" {
		l.found.add("$.self_backend.node", "no node "+strconv.Quote(e.Node)+" in the setup",
			suggest(e.Node, tfhosts.SortedNames(l.setup.Nodes)))
	}
	u, err := url.Parse(l.setup.Backend.Address)
	if err != nil { // reported as the address's problem
		u = &url.URL{Scheme: "http"}
	}
	if self.Scheme == "" {
		self.Scheme = u.Scheme
	}
	if self.Path == "" {
		self.Path = u.RequestURI()
	}
	if self.Port == 0 {
		port, err := strconv.Atoi(u.Port())
		switch {
		case err == nil:
			self.Port = port
		case errors.Is(err, strconv.ErrSyntax) && self.Scheme == "https":
			self.Port = 443
		default:
			self.Port = 80
		}
	}
	l.setup.Self = self
}
