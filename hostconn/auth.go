package hostconn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
)

// maxKeys is how many keys are offered: sshd ends a connection at the sixth
// failure (MaxAuthTries 6).
const maxKeys = 5

// credentials are the keys for one handshake.
type credentials struct {
	signers []ssh.Signer
	names   []string // of the signers, for a person
	more    int      // keys that were left out
	notes   []string // keys that could not be used, and why
	asked   bool     // the host got as far as asking for a key
	agent   net.Conn
}

func (c *credentials) close() {
	if c.agent != nil {
		_ = c.agent.Close()
	}
}

func (c *credentials) methods() []ssh.AuthMethod {
	return []ssh.AuthMethod{ssh.PublicKeysCallback(func() ([]ssh.Signer, error) {
		c.asked = true
		return c.signers, nil
	})}
}

// describe says what was offered, without any secret.
func (c *credentials) describe() string {
	var b strings.Builder
	switch len(c.names) {
	case 0:
		b.WriteString("there was no key to offer")
	case 1:
		fmt.Fprintf(&b, "the host refused the key %s", c.names[0])
	default:
		fmt.Fprintf(&b, "the host refused the keys %s", strings.Join(c.names, ", "))
	}
	if c.more > 0 {
		fmt.Fprintf(&b, "; %d more were not offered (at most %d are)", c.more, maxKeys)
	}
	for _, n := range c.notes {
		b.WriteString("; " + n)
	}
	return b.String()
}

func (c *credentials) add(s ssh.Signer, name string) {
	for _, have := range c.signers {
		if bytes.Equal(have.PublicKey().Marshal(), s.PublicKey().Marshal()) {
			return
		}
	}
	if len(c.signers) == maxKeys {
		c.more++
		return
	}
	c.signers = append(c.signers, s)
	c.names = append(c.names, fmt.Sprintf("%s (%s)", ssh.FingerprintSHA256(plainKey(s.PublicKey())), name))
}

func plainKey(k ssh.PublicKey) ssh.PublicKey {
	if cert, ok := k.(*ssh.Certificate); ok {
		return cert.Key
	}
	return k
}

// loadCredentials gathers the keys in the order in which they are offered: the
// configured ones, the agent's, the defaults. Only a key_file that cannot be
// used is an error here.
func loadCredentials(ctx context.Context, r route) (*credentials, error) {
	s := r.settings
	c := &credentials{}
	if s.noPublicKey {
		c.notes = append(c.notes, "PubkeyAuthentication is no in the OpenSSH configuration")
		return c, nil
	}
	agentKeys := c.openAgent(ctx, s.IdentityAgent)
	load := func(path, label string) error {
		signers, err := keyFile(path, s.CertificateFiles, agentKeys)
		if err != nil {
			return err
		}
		for _, signer := range signers {
			c.add(signer, label)
		}
		return nil
	}
	if r.target.KeyFile != "" {
		if err := load(s.IdentityFiles[0], s.IdentityFiles[0]); err != nil {
			c.close()
			return nil, fmt.Errorf("%w: using the key file %q: %w", ErrAuth, s.IdentityFiles[0], err)
		}
		return c, nil
	}
	files := func(list []string, quiet bool) {
		for _, path := range list {
			err := load(path, path)
			if err != nil && (!quiet || !errors.Is(err, fs.ErrNotExist)) {
				c.notes = append(c.notes, fmt.Sprintf("%s: %v", path, err))
			}
		}
	}
	if s.configuredKeys {
		files(s.IdentityFiles, false)
	}
	if r.spare != "" {
		files([]string{r.spare}, false)
	}
	if !s.IdentitiesOnly {
		for _, k := range agentKeys {
			c.add(k, "agent")
		}
	}
	if !s.configuredKeys {
		files(s.IdentityFiles, true)
	}
	return c, nil
}

func (c *credentials) openAgent(ctx context.Context, socket string) []ssh.Signer {
	if socket == "" || socket == "none" {
		return nil
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		c.notes = append(c.notes, fmt.Sprintf("the agent does not answer: %v", err))
		return nil
	}
	_ = nc.SetDeadline(time.Now().Add(10 * time.Second)) // signing, later, may wait for a touch
	signers, err := agent.NewClient(nc).Signers()
	if err != nil {
		c.notes = append(c.notes, fmt.Sprintf("the agent does not list its keys: %v", err))
		_ = nc.Close()
		return nil
	}
	_ = nc.SetDeadline(time.Time{})
	c.agent = nc
	return signers
}

// keyFile reads one private key, with its certificates before it. A key that is
// encrypted, or of which only the public half is there, is taken from the agent.
func keyFile(path string, certFiles []string, agentKeys []ssh.Signer) ([]ssh.Signer, error) {
	signer, err := readKey(path, agentKeys)
	if err != nil {
		return nil, err
	}
	signers := []ssh.Signer{signer}
	for _, file := range slices.Concat(certFiles, []string{path + "-cert.pub"}) {
		cert, err := readCertificate(file)
		if err != nil || !bytes.Equal(cert.Key.Marshal(), signer.PublicKey().Marshal()) {
			continue // another key's, or none: the plain key is offered all the same
		}
		if s, err := ssh.NewCertSigner(cert, signer); err == nil {
			signers = append([]ssh.Signer{s}, signers...)
		}
	}
	return signers, nil
}

func readKey(path string, agentKeys []ssh.Signer) (ssh.Signer, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			if s := agentKey(publicHalf(path+".pub"), agentKeys); s != nil {
				return s, nil
			}
		}
		return nil, withoutPath(err)
	}
	signer, err := ssh.ParsePrivateKey(text)
	var locked *ssh.PassphraseMissingError
	switch {
	case err == nil:
		return signer, nil
	case errors.As(err, &locked):
		public := locked.PublicKey
		if public == nil {
			public = publicHalf(path + ".pub")
		}
		if s := agentKey(public, agentKeys); s != nil {
			return s, nil
		}
		return nil, errors.New("it is encrypted, and the agent does not hold it; load it with ssh-add")
	}
	if public, _, _, _, perr := ssh.ParseAuthorizedKey(text); perr == nil {
		if s := agentKey(public, agentKeys); s != nil {
			return s, nil
		}
		return nil, errors.New("it is a public key, and the agent does not hold its private half")
	}
	// The parser's text is not passed on: it may quote the file.
	return nil, errors.New("it is no private key that can be read")
}

func withoutPath(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

func publicHalf(path string) ssh.PublicKey {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey(text)
	if err != nil {
		return nil
	}
	return key
}

func agentKey(public ssh.PublicKey, agentKeys []ssh.Signer) ssh.Signer {
	if public == nil {
		return nil
	}
	for _, k := range agentKeys {
		if bytes.Equal(k.PublicKey().Marshal(), public.Marshal()) {
			return k
		}
	}
	return nil
}

func readCertificate(path string) (*ssh.Certificate, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(f)
	if err != nil {
		return nil, err
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey(text)
	if err != nil {
		return nil, err
	}
	cert, ok := key.(*ssh.Certificate)
	if !ok {
		return nil, fmt.Errorf("%s is no certificate", path)
	}
	return cert, nil
}
