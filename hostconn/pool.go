package hostconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// Config is how a Pool connects. The zero value works.
type Config struct {
	// KnownHosts is the working dir's known_hosts file, where the key of a host
	// that nothing else knows is remembered (appended under a lock, synced).
	// Empty: remembered by the Pool only.
	KnownHosts string
	// UserConfig and SystemConfig are OpenSSH configurations; "" is
	// ~/.ssh/config and /etc/ssh/ssh_config, "none" is none.
	UserConfig, SystemConfig string
	// Home replaces the user's home folder for ~ and the default files.
	Home string
	// Events takes notices; nil is silent. It may be called from several
	// goroutines at once.
	Events func(tfhosts.Event)

	// DialTimeout bounds the TCP dial (15 s; ConnectTimeout of ssh_opts and of
	// the configuration comes first), HandshakeTimeout key exchange and
	// authentication (30 s), CommandTimeout a command that sets none (60 s).
	DialTimeout, HandshakeTimeout, CommandTimeout time.Duration
	// DeadAfter: a connection without a single inbound byte for so long is lost
	// (45 s). A slow answer alone never ends a connection: it may wait behind an
	// upload.
	DeadAfter time.Duration
	// KeepAlive is the pause between probes of a silent peer (15 s, at most a
	// third of DeadAfter).
	KeepAlive time.Duration
	// DialInterval is the least time between two dials to one address (1 s;
	// OpenSSH's PerSourcePenalties).
	DialInterval time.Duration
	// MaxSessions bounds the commands at once on one connection (10, sshd's
	// default); more wait.
	MaxSessions int
	// MaxOutput bounds stdout and stderr of a Run, each, in bytes (64 MiB).
	MaxOutput int
}

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, def time.Duration) {
		if *d <= 0 {
			*d = def
		}
	}
	set(&c.DialTimeout, 15*time.Second)
	set(&c.HandshakeTimeout, 30*time.Second)
	set(&c.CommandTimeout, 60*time.Second)
	set(&c.DeadAfter, 45*time.Second)
	set(&c.KeepAlive, 15*time.Second)
	set(&c.DialInterval, time.Second)
	if c.MaxSessions <= 0 {
		c.MaxSessions = 10
	}
	if c.MaxOutput <= 0 {
		c.MaxOutput = 64 << 20
	}
	return c
}

// Pool makes connections. It paces the dials to each address, shares the
// connection of a bastion between the hosts behind it, and remembers what was
// refused. It is safe for concurrent use.
type Pool struct {
	cfg    Config
	ctx    context.Context // of the pool's own dials, ended by Close
	cancel context.CancelFunc
	keys   *keyMemory
	wg     sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	nextDial map[string]time.Time
	bastions map[string]*bastion
	refused  map[string]error
	conns    map[*Conn]struct{}
	noted    map[string]bool
}

// NewPool makes a Pool; it opens nothing.
func NewPool(cfg Config) *Pool {
	cfg = cfg.withDefaults()
	ctx, cancel := context.WithCancel(context.Background())
	return &Pool{
		cfg: cfg, ctx: ctx, cancel: cancel,
		keys:     &keyMemory{path: cfg.KnownHosts},
		nextDial: make(map[string]time.Time),
		bastions: make(map[string]*bastion),
		refused:  make(map[string]error),
		conns:    make(map[*Conn]struct{}),
		noted:    make(map[string]bool),
	}
}

// Close closes every connection of the pool, bastions last, and waits for what
// they had under way.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed = true
	var direct, shared []*Conn
	for c := range p.conns {
		if c.shared {
			shared = append(shared, c)
		} else {
			direct = append(direct, c)
		}
	}
	p.mu.Unlock()
	p.cancel()
	for _, c := range slices.Concat(direct, shared) {
		_ = c.Close() // it is going away; its error was the user's of the connection
	}
	p.wg.Wait()
	return nil
}

// Dial connects to t: a connection of its own, over the shared one of its
// bastion where it has any. The error wraps ErrUnreachable, ErrAuth, a
// *HostKeyError or an *OptionError, or is ctx's. What was refused for a wrong
// key or a changed host key is refused again without another dial.
func (p *Pool) Dial(ctx context.Context, t Target) (*Conn, error) {
	s, err := resolve(t, p.cfg)
	if err != nil {
		return nil, fmt.Errorf("connecting to %q: %w", t.label(), err)
	}
	p.note(t, s)
	c, err := p.connect(ctx, route{target: t, settings: s})
	if err != nil {
		return nil, fmt.Errorf("connecting to %q (%s): %w", t.label(), s.login(), err)
	}
	return c, nil
}

// route is one hop of a way to a host.
type route struct {
	target   Target
	settings Settings
	spare    string // for a bastion: the key file of the host behind it
	shared   bool
	trail    []string // the hops that are being dialled for, to see a loop
}

func (s Settings) address() string { return net.JoinHostPort(s.HostName, strconv.Itoa(s.Port)) }

func (s Settings) login() string { return s.User + "@" + s.address() }

// key tells connections apart that authenticate differently or go another way.
func (r route) key() string {
	s := r.settings
	return fmt.Sprintf("%q %q %q %v %q %q %q", s.login(), s.HostKeyAlias, s.ProxyCommand, s.Jumps, s.IdentityFiles, r.spare, r.target.HostKey)
}

func (p *Pool) connect(ctx context.Context, r route) (*Conn, error) {
	if err := p.wasRefused(r.key()); err != nil {
		return nil, err
	}
	through, err := p.through(ctx, r)
	if err != nil {
		return nil, err
	}
	c, err := p.dialHost(ctx, r, through)
	if err != nil {
		var changed *HostKeyError
		if errors.Is(err, ErrAuth) || errors.As(err, &changed) {
			p.mu.Lock()
			p.refused[r.key()] = err
			p.mu.Unlock()
		}
		return nil, err
	}
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		_ = c.Close()
		return nil, net.ErrClosed
	}
	p.conns[c] = struct{}{}
	p.mu.Unlock()
	return c, nil
}

func (p *Pool) wasRefused(key string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.refused[key]
}

// through is the bastion's connection that r goes through; nil when it goes direct.
func (p *Pool) through(ctx context.Context, r route) (*Conn, error) {
	hops := r.settings.Jumps
	if len(hops) == 0 {
		return nil, nil
	}
	last := hops[len(hops)-1]
	t := Target{Name: r.target.label() + " via " + last.Host, Host: last.Host, User: last.User}
	if last.Port != 0 {
		t.Options = append(t.Options, "Port="+strconv.Itoa(last.Port))
	}
	if len(hops) > 1 {
		t.Options = append(t.Options, "ProxyJump="+joinHops(hops[:len(hops)-1]))
	}
	s, err := resolve(t, p.cfg)
	if err != nil {
		return nil, fmt.Errorf("through the jump host %q: %w", last.Host, err)
	}
	trail := append(slices.Clone(r.trail), r.settings.login())
	if slices.Contains(trail, s.login()) {
		return nil, &OptionError{Name: "ProxyJump", Value: joinHops(hops), Where: "jump", Reason: fmt.Sprintf("the jumps go in a circle through %q; exclude the jump host from its own Host block", last.Host)}
	}
	next := route{target: t, settings: s, shared: true, trail: trail}
	if !s.configuredKeys {
		next.spare = r.target.KeyFile
		if next.spare == "" {
			next.spare = r.spare
		}
	}
	c, err := p.bastion(ctx, next)
	if err != nil {
		return nil, fmt.Errorf("through the jump host %q (%s): %w", last.Host, s.login(), err)
	}
	return c, nil
}

func joinHops(hops []Hop) string {
	parts := make([]string, len(hops))
	for i, h := range hops {
		host := h.Host
		if strings.Contains(host, ":") {
			host = "[" + host + "]"
		}
		if h.User != "" {
			host = h.User + "@" + host
		}
		if h.Port != 0 {
			host += ":" + strconv.Itoa(h.Port)
		}
		parts[i] = host
	}
	return strings.Join(parts, ",")
}

// bastion is a shared connection, or the dial for it.
type bastion struct {
	ready chan struct{}
	conn  *Conn // set before ready is closed
	err   error
}

// bastion gives the shared connection for r. Whoever asks while it is being
// dialled shares the result, good or bad; the dial belongs to the pool, so that
// one caller's cancellation does not fail the others.
func (p *Pool) bastion(ctx context.Context, r route) (*Conn, error) {
	key := r.key()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, net.ErrClosed
	}
	b := p.bastions[key]
	if b == nil || b.gone() {
		b = &bastion{ready: make(chan struct{})}
		p.bastions[key] = b
		p.wg.Go(func() {
			b.conn, b.err = p.connect(p.ctx, r)
			close(b.ready)
		})
	}
	p.mu.Unlock()
	select {
	case <-b.ready:
		return b.conn, b.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// gone: the dial failed or the connection has ended since.
func (b *bastion) gone() bool {
	select {
	case <-b.ready:
	default:
		return false
	}
	if b.err != nil {
		return true
	}
	select {
	case <-b.conn.Done():
		return true
	default:
		return false
	}
}

// pace waits until address may be dialled again and takes the turn.
func (p *Pool) pace(ctx context.Context, address string) error {
	p.mu.Lock()
	now := time.Now()
	turn := p.nextDial[address]
	if turn.Before(now) {
		turn = now
	}
	p.nextDial[address] = turn.Add(p.cfg.DialInterval)
	p.mu.Unlock()
	wait := time.NewTimer(turn.Sub(now))
	defer wait.Stop()
	select {
	case <-wait.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *Pool) emit(kind, node, op, message string) {
	if p.cfg.Events != nil {
		p.cfg.Events(tfhosts.Event{Time: time.Now(), Kind: kind, Node: node, Op: op, Message: message})
	}
}

// note tells once what the configuration holds that is not understood.
func (p *Pool) note(t Target, s Settings) {
	for _, n := range s.Notes {
		p.mu.Lock()
		told := p.noted[n]
		p.noted[n] = true
		p.mu.Unlock()
		if !told {
			p.emit(tfhosts.EventWarning, t.Name, "connect.config", n)
		}
	}
}
