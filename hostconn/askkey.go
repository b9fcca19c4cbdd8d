package hostconn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/crypto/ssh"
)

// How a shown host key stands to what is known of its host.
const (
	KeyPinned  = "pinned"  // it equals a pin of the target
	KeyKnown   = "known"   // nothing is pinned, and a known_hosts file vouches for it
	KeyNew     = "new"     // nothing is known of the host
	KeyChanged = "changed" // another key is pinned or known; Dial would refuse it
)

// HostKey is the key that a host shows.
type HostKey struct {
	// Pin is the key as Target.HostKey takes it: "TYPE BASE64".
	Pin string
	// Fingerprint is its type and SHA256 fingerprint, as in HostKeyError.
	Fingerprint string
	// Standing is KeyPinned, KeyKnown, KeyNew or KeyChanged.
	Standing string
	// Want are the fingerprints of what is pinned or known, as in HostKeyError.
	Want []string
}

// HostKey asks t for its host key and logs in nowhere but on its jump hosts,
// which are checked as by Dial. A host with several keys is asked for a pinned or
// known one, else for its ed25519 key. Nothing is remembered. The error wraps
// ErrUnreachable, an *OptionError, what a jump host refused, or is ctx's.
func (p *Pool) HostKey(ctx context.Context, t Target) (HostKey, error) {
	s, err := resolve(t, p.cfg)
	if err != nil {
		return HostKey{}, fmt.Errorf("asking %q for its host key: %w", t.label(), err)
	}
	p.note(t, s)
	key, err := p.askKey(ctx, route{target: t, settings: s})
	if err != nil {
		return HostKey{}, fmt.Errorf("asking %q (%s) for its host key: %w", t.label(), s.address(), err)
	}
	return key, nil
}

func (p *Pool) askKey(ctx context.Context, r route) (HostKey, error) {
	known, err := p.hostKeys(r)
	if err != nil {
		return HostKey{}, err
	}
	through, err := p.through(ctx, r)
	if err != nil {
		return HostKey{}, err
	}
	algorithms := preferredKeys()
	if len(known.want) > 0 {
		algorithms = slices.DeleteFunc(algorithms, func(a string) bool { return !slices.Contains(known.algorithms, a) })
		for _, a := range known.algorithms { // those of certificates
			if !slices.Contains(algorithms, a) {
				algorithms = append(algorithms, a)
			}
		}
	}
	key, err := p.showKey(ctx, r, through, algorithms)
	standing := KeyNew
	switch {
	case errors.Is(err, errNoSuchKey) && len(known.want) > 0:
		standing = KeyChanged // the host has no key of that type any more
		key, err = p.showKey(ctx, r, through, preferredKeys())
	case err != nil:
	case len(known.pins) > 0:
		standing = KeyChanged
		if slices.ContainsFunc(known.pins, func(pin ssh.PublicKey) bool { return bytes.Equal(pin.Marshal(), key.Marshal()) }) {
			standing = KeyPinned
		}
	case known.db != nil:
		standing = KeyKnown
		var changed *HostKeyError
		if err = known.ask(known.db, key); errors.As(err, &changed) {
			standing, err = KeyChanged, nil
		}
	}
	if err != nil {
		return HostKey{}, err
	}
	plain := plainKey(key)
	return HostKey{Pin: pinText(plain), Fingerprint: fingerprint(plain), Standing: standing, Want: known.want}, nil
}

// preferredKeys are the host key algorithms in the order in which a pin is wanted.
func preferredKeys() []string {
	return []string{
		ssh.KeyAlgoED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521,
		ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256,
	}
}

var (
	errNoSuchKey = errors.New("it has no host key of the types that it was asked for")
	errShown     = errors.New("the host key was shown")
)

// showKey makes a handshake up to the host's proof that it has the key.
func (p *Pool) showKey(ctx context.Context, r route, through *Conn, algorithms []string) (ssh.PublicKey, error) {
	nc, err := p.openTransport(ctx, r, through)
	if err != nil {
		return nil, err
	}
	wire := newWire(nc)
	defer wire.Close()
	limit := p.cfg.HandshakeTimeout
	hctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stop := context.AfterFunc(hctx, func() { _ = wire.Close() })
	defer stop()
	_ = wire.SetDeadline(time.Now().Add(limit)) // a channel refuses it; the timer above holds
	s := r.settings
	var shown ssh.PublicKey
	cc, _, _, err := ssh.NewClientConn(wire, s.address(), &ssh.ClientConfig{
		User:   s.User,
		Config: ssh.Config{KeyExchanges: s.KexAlgorithms, Ciphers: s.Ciphers, MACs: s.MACs},
		HostKeyCallback: func(_ string, _ net.Addr, key ssh.PublicKey) error {
			shown = key
			return errShown
		},
		HostKeyAlgorithms: algorithms,
		ClientVersion:     clientVersion,
	})
	var mismatch *ssh.AlgorithmNegotiationError
	switch {
	case shown != nil:
		return shown, nil
	case err == nil: // the callback refuses every key
		_ = cc.Close()
		return nil, errNoSuchKey
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case hctx.Err() != nil, os.IsTimeout(err):
		return nil, fmt.Errorf("%w: it took the connection, but showed no key within %v", ErrUnreachable, limit)
	case errors.As(err, &mismatch) && mismatch.What == "host key":
		return nil, errNoSuchKey
	case mismatch != nil:
		return nil, fmt.Errorf("agreeing on algorithms: %w", err)
	}
	return nil, fmt.Errorf("%w: %w", errClosedAgain, err)
}
