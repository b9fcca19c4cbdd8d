package hostconn

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	tfhosts "fediversity.eu/tf-hosts"
	"github.com/gofrs/flock"
	"github.com/skeema/knownhosts"
	"golang.org/x/crypto/ssh"
	xknownhosts "golang.org/x/crypto/ssh/knownhosts"
)

// hostVerifier checks the key of one host during one handshake.
type hostVerifier struct {
	pool    *Pool
	node    string
	address string // host:port as known_hosts knows it: alias or name
	strict  bool

	pins       []ssh.PublicKey
	db         *knownhosts.HostKeyDB // what knows the host; nil when nothing does
	want       []string              // fingerprints, for errors
	algorithms []string
	err        error // why the handshake was refused
}

// hostKeys finds what is known of r's host key. The algorithms are narrowed to
// the types of the known keys: x/crypto asks for ecdsa first, and a host known by
// its ed25519 key would look changed.
func (p *Pool) hostKeys(r route) (*hostVerifier, error) {
	s := r.settings
	v := &hostVerifier{pool: p, node: r.target.Name, strict: s.StrictHostKeyChecking, address: s.address(), algorithms: s.HostKeyAlgorithms}
	if s.HostKeyAlias != "" {
		v.address = net.JoinHostPort(s.HostKeyAlias, "22")
	}
	if r.target.HostKey != "" {
		pins, err := parsePins(r.target.HostKey)
		if err != nil {
			return nil, err
		}
		v.pins, v.algorithms = pins, nil
		for _, k := range pins {
			v.want = append(v.want, fingerprint(k)+" (pinned)")
			for _, a := range algorithmsOf(k.Type()) {
				if !slices.Contains(v.algorithms, a) {
					v.algorithms = append(v.algorithms, a)
				}
			}
		}
		return v, nil
	}
	files := slices.Concat(s.UserKnownHostsFiles, s.GlobalKnownHostsFiles)
	db, err := openKnownHosts(files)
	if err != nil {
		return nil, err
	}
	if db == nil || len(db.HostKeys(v.address)) == 0 {
		if db, err = p.keys.open(); err != nil {
			return nil, err
		}
	}
	v.use(db)
	return v, nil
}

// use takes db as what knows the host, when it does.
func (v *hostVerifier) use(db *knownhosts.HostKeyDB) {
	if db == nil {
		return
	}
	keys := db.HostKeys(v.address)
	if len(keys) == 0 {
		return
	}
	v.db, v.want = db, nil
	for _, k := range keys {
		from := "known_hosts"
		if k.Cert {
			from = "known_hosts, authority"
		}
		v.want = append(v.want, fingerprint(k)+" ("+from+")")
	}
	known := slices.DeleteFunc(db.HostKeyAlgorithms(v.address), func(a string) bool { return a == ssh.KeyAlgoRSA || a == ssh.CertAlgoRSAv01 })
	if len(v.algorithms) > 0 {
		known = slices.DeleteFunc(known, func(a string) bool { return !slices.Contains(v.algorithms, a) })
	}
	v.algorithms = known
}

// parsePins reads host_key.
func parsePins(text string) ([]ssh.PublicKey, error) {
	var pins []ssh.PublicKey
	for _, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(line))
		if err != nil {
			return nil, &OptionError{Name: "host_key", Value: line, Where: "target", Reason: `a public key "TYPE BASE64" is expected (as in /etc/ssh/ssh_host_ed25519_key.pub)`}
		}
		pins = append(pins, key)
	}
	if len(pins) == 0 {
		return nil, &OptionError{Name: "host_key", Where: "target", Reason: "it holds no key"}
	}
	return pins, nil
}

// CheckHostKey reports whether text can stand as host_key: nil, or an *OptionError.
func CheckHostKey(text string) error {
	if text == "" {
		return nil
	}
	_, err := parsePins(text)
	return err
}

func algorithmsOf(keyType string) []string {
	if keyType == ssh.KeyAlgoRSA { // the SHA-1 form is not asked for
		return []string{ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	}
	return []string{keyType}
}

func fingerprint(k ssh.PublicKey) string {
	return strings.TrimPrefix(k.Type(), "ssh-") + " " + ssh.FingerprintSHA256(k)
}

// check is the handshake's HostKeyCallback.
func (v *hostVerifier) check(_ string, _ net.Addr, key ssh.PublicKey) error {
	v.err = v.verify(key)
	return v.err
}

func (v *hostVerifier) verify(key ssh.PublicKey) error {
	if len(v.pins) > 0 {
		for _, pin := range v.pins {
			if bytes.Equal(pin.Marshal(), key.Marshal()) {
				return nil
			}
		}
		return v.changed(key)
	}
	if v.db != nil {
		return v.ask(v.db, key)
	}
	if v.strict {
		return &HostKeyError{Name: v.node, Host: v.address, Got: fingerprint(key), GotKey: pinText(key)}
	}
	return v.remember(key)
}

// ask has db judge the key. The remote address is left out on purpose: it is the
// name that is known, and through a jump host there is no address.
func (v *hostVerifier) ask(db *knownhosts.HostKeyDB, key ssh.PublicKey) error {
	err := db.HostKeyCallback()(v.address, &net.TCPAddr{IP: net.IPv4zero}, key)
	var (
		wrong   *xknownhosts.KeyError
		revoked *xknownhosts.RevokedError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &wrong):
		return v.changed(key)
	case errors.As(err, &revoked):
		e := v.changed(key)
		e.Revoked = true
		return e
	}
	if _, ok := key.(*ssh.Certificate); ok { // expired, another authority, another name
		e := v.changed(key)
		e.Reason = err.Error()
		return e
	}
	return fmt.Errorf("checking the host key of %s: %w", v.address, err)
}

func (v *hostVerifier) changed(key ssh.PublicKey) *HostKeyError {
	e := &HostKeyError{Name: v.node, Host: v.address, Want: v.want}
	if key != nil {
		e.Got, e.GotKey = fingerprint(key), pinText(key)
	}
	return e
}

func pinText(key ssh.PublicKey) string {
	return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
}

// remember accepts the first key of an unknown host. Another process may have
// got there first; then its key counts.
func (v *hostVerifier) remember(key ssh.PublicKey) error {
	if cert, ok := key.(*ssh.Certificate); ok {
		key = cert.Key
	}
	added, db, err := v.pool.keys.add(v.address, key)
	if err != nil {
		return err
	}
	if !added {
		v.use(db)
		return v.ask(db, key)
	}
	v.pool.emit(tfhosts.EventNotice, v.node, "connect.hostkey",
		fmt.Sprintf("host key of %s accepted on first use: %s", v.address, fingerprint(key)))
	return nil
}

// keyMemory is the known_hosts file of the working dir.
type keyMemory struct {
	path string
	mu   sync.Mutex
	text []byte // what is remembered when there is no file
}

func (m *keyMemory) open() (*knownhosts.HostKeyDB, error) {
	if m.path != "" {
		return openKnownHosts([]string{m.path})
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return parseKnownHosts(m.text)
}

// add appends key for address unless a key for it is there already; then it
// returns what knows it. An error leaves at most a line that ends early, which
// is skipped by readers.
func (m *keyMemory) add(address string, key ssh.PublicKey) (added bool, db *knownhosts.HostKeyDB, err error) {
	line := []byte(knownhosts.Line([]string{address}, key) + "\n")
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.path == "" {
		if db, err = parseKnownHosts(m.text); err != nil || (db != nil && len(db.HostKeys(address)) > 0) {
			return false, db, err
		}
		m.text = append(m.text, line...)
		return true, nil, nil
	}
	if err := os.MkdirAll(filepath.Dir(m.path), 0o700); err != nil {
		return false, nil, fmt.Errorf("remembering the host key of %s: %w", address, err)
	}
	lock := flock.New(m.path + ".lock")
	if err := lock.Lock(); err != nil {
		return false, nil, fmt.Errorf("locking %s: %w", m.path, err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if db, err = openKnownHosts([]string{m.path}); err != nil || (db != nil && len(db.HostKeys(address)) > 0) {
		return false, db, err
	}
	if err := appendSynced(m.path, line); err != nil {
		return false, nil, fmt.Errorf("remembering the host key of %s: %w", address, err)
	}
	return true, nil, nil
}

func appendSynced(path string, line []byte) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if end, err := f.Stat(); err == nil && end.Size() > 0 {
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, end.Size()-1); err == nil && last[0] != '\n' {
			line = append([]byte("\n"), line...)
		}
	}
	if _, err := f.Write(line); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// openKnownHosts reads files; those that do not exist are left out, nil when
// nothing is known.
func openKnownHosts(files []string) (*knownhosts.HostKeyDB, error) {
	var text bytes.Buffer
	for _, path := range files {
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading known hosts: %w", err)
		}
		text.Write(b)
		text.WriteByte('\n')
	}
	return parseKnownHosts(text.Bytes())
}

// parseKnownHosts leaves out the lines that x/crypto cannot read (a key type it
// does not have, half a line): it would refuse the whole file, OpenSSH skips them.
func parseKnownHosts(text []byte) (*knownhosts.HostKeyDB, error) {
	var good bytes.Buffer
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := bytes.TrimSpace(lines.Bytes())
		if _, _, _, _, _, err := ssh.ParseKnownHosts(line); err != nil {
			continue
		}
		good.Write(line)
		good.WriteByte('\n')
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading known hosts: %w", err)
	}
	if good.Len() == 0 {
		return nil, nil
	}
	f, err := os.CreateTemp("", "known_hosts") // the module reads files only
	if err != nil {
		return nil, fmt.Errorf("reading known hosts: %w", err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(good.Bytes())
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("reading known hosts: %w", err)
	}
	db, err := knownhosts.NewDB(f.Name())
	if err != nil {
		return nil, fmt.Errorf("reading known hosts: %w", err)
	}
	return db, nil
}

// KnownHostsLines are the lines of a known_hosts file that knows a host by the
// name alias and has the keys of hostKey, a pin as in Target.
func KnownHostsLines(alias, hostKey string) (string, error) {
	pins, err := parsePins(hostKey)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for _, pin := range pins {
		b.WriteString(alias + " " + pinText(pin) + "\n")
	}
	return b.String(), nil
}
