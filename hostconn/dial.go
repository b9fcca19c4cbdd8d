package hostconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/crypto/ssh"
)

// clientVersion is how this client presents itself.
const clientVersion = "SSH-2.0-tf-hosts"

var errClosedAgain = fmt.Errorf("%w: the host took the connection and closed it again; sshd may be refusing this address for a while", ErrUnreachable)

// dialHost opens the transport to r and makes the SSH connection on it.
func (p *Pool) dialHost(ctx context.Context, r route, through *Conn) (*Conn, error) {
	cred, err := loadCredentials(ctx, r)
	if err != nil {
		return nil, err
	}
	defer cred.close()
	host, err := p.hostKeys(r)
	if err != nil {
		return nil, err
	}
	nc, err := p.openTransport(ctx, r, through)
	if err != nil {
		return nil, err
	}
	wire := newWire(nc)
	client, err := p.handshake(ctx, r, wire, cred, host)
	if err != nil {
		_ = wire.Close()
		return nil, err
	}
	return newConn(p, r, client, wire), nil
}

// openTransport is transport in its turn, tried as often as is configured.
func (p *Pool) openTransport(ctx context.Context, r route, through *Conn) (net.Conn, error) {
	for attempt := 1; ; attempt++ {
		if err := p.pace(ctx, r.settings.address()); err != nil {
			return nil, err
		}
		nc, err := p.transport(ctx, r, through)
		if err == nil || attempt >= r.settings.ConnectionAttempts || ctx.Err() != nil {
			return nc, err
		}
	}
}

// transport is the byte stream to the host's sshd.
func (p *Pool) transport(ctx context.Context, r route, through *Conn) (net.Conn, error) {
	s := r.settings
	limit := p.cfg.DialTimeout
	if s.ConnectTimeout > 0 {
		limit = s.ConnectTimeout
	}
	dctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var (
		nc  net.Conn
		err error
	)
	switch {
	case s.ProxyCommand != "":
		nc, err = startProxy(s.ProxyCommand)
	case through != nil:
		nc, err = through.client.DialContext(dctx, "tcp", s.address())
	default:
		nc, err = s.dialTCP(dctx)
	}
	switch {
	case err == nil:
		return nc, nil
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(err, context.DeadlineExceeded), os.IsTimeout(err):
		return nil, fmt.Errorf("%w: no connection within %v", ErrUnreachable, limit)
	}
	return nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
}

func (s Settings) dialTCP(ctx context.Context) (net.Conn, error) {
	network := map[string]string{"inet": "tcp4", "inet6": "tcp6"}[s.AddressFamily]
	if network == "" {
		network = "tcp"
	}
	var d net.Dialer
	if s.BindAddress != "" {
		local, err := net.ResolveTCPAddr(network, net.JoinHostPort(s.BindAddress, "0"))
		if err != nil {
			return nil, err
		}
		d.LocalAddr = local
	}
	return d.DialContext(ctx, network, s.address())
}

// handshake makes the SSH connection. ssh.ClientConfig has no limit on it: a
// mute peer would hold it for good, so the connection gets a deadline, and,
// since a jump host's channel knows no deadlines, a timer that closes it.
func (p *Pool) handshake(ctx context.Context, r route, wire *wire, cred *credentials, host *hostVerifier) (*ssh.Client, error) {
	limit := p.cfg.HandshakeTimeout
	hctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	stop := context.AfterFunc(hctx, func() {
		_ = wire.Close()
		cred.close() // an agent may be waiting for a person
	})
	_ = wire.SetDeadline(time.Now().Add(limit)) // a channel refuses it; the timer above holds

	s := r.settings
	conf := &ssh.ClientConfig{
		User: s.User,
		Auth: cred.methods(),
		Config: ssh.Config{
			KeyExchanges: s.KexAlgorithms,
			Ciphers:      s.Ciphers,
			MACs:         s.MACs,
		},
		HostKeyCallback:   host.check,
		HostKeyAlgorithms: host.algorithms,
		ClientVersion:     clientVersion,
	}
	cc, chans, reqs, err := ssh.NewClientConn(wire, s.address(), conf)
	intime := stop()
	switch {
	case err == nil && intime:
		_ = wire.SetDeadline(time.Time{})
		return ssh.NewClient(cc, chans, reqs), nil
	case err == nil:
		_ = cc.Close()
	}
	return nil, classify(ctx, hctx, err, limit, cred, host)
}

// classify says what a failed handshake means.
func classify(ctx, hctx context.Context, err error, limit time.Duration, cred *credentials, host *hostVerifier) error {
	if host.err != nil {
		return host.err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if hctx.Err() != nil || os.IsTimeout(err) {
		return fmt.Errorf("%w: it took the connection, but the SSH handshake did not end within %v", ErrUnreachable, limit)
	}
	var mismatch *ssh.AlgorithmNegotiationError
	if errors.As(err, &mismatch) {
		if mismatch.What == "host key" && len(host.want) > 0 {
			return host.changed(nil)
		}
		return fmt.Errorf("agreeing on algorithms: %w", err)
	}
	// x/crypto has no type for these two.
	text := err.Error()
	if strings.Contains(text, "unable to authenticate") || strings.Contains(text, "Too many authentication failures") {
		return fmt.Errorf("%w: %s", ErrAuth, cred.describe())
	}
	if cred.asked {
		return fmt.Errorf("%w: the host closed the connection during authentication (%s): %w", ErrUnreachable, cred.describe(), err)
	}
	return fmt.Errorf("%w: %w", errClosedAgain, err)
}
