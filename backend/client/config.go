package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// Config says where a state is and how to talk to its server. Address alone is
// enough.
type Config struct {
	Address       string
	LockAddress   string // default Address
	LockMethod    string // default LOCK
	UnlockAddress string // default Address
	UnlockMethod  string // default UNLOCK
	UpdateMethod  string // default POST
	Username      string
	Password      string
	// Headers go with every request.
	Headers map[string]string
	// PEM files: CAs to trust besides the system's, and a client certificate.
	CAFile, CertFile, KeyFile string
	// The same as PEM text; each wins over its file.
	CAPEM, CertPEM, KeyPEM string
	// RetryMax counts the tries after the first, on 429, 5xx and connection
	// errors; 0 is one try. The waits bound the backoff; default 1 s and 30 s.
	RetryMax     int
	RetryWaitMin time.Duration
	RetryWaitMax time.Duration
	// DialContext replaces the dialer, as for a forward through SSH; no proxy is
	// used then.
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
	// DialTimeout bounds connecting (default 10 s), Timeout a whole try (default 2 min).
	DialTimeout time.Duration
	Timeout     time.Duration
}

// FromBackend makes a Config from a setup's backend. Where only a password file
// is given it reads it; one trailing newline is no part of the password.
func FromBackend(b tfhosts.HTTPBackend) (Config, error) {
	cfg := Config{
		Address:     b.Address,
		LockAddress: b.LockAddress, LockMethod: b.LockMethod,
		UnlockAddress: b.UnlockAddress, UnlockMethod: b.UnlockMethod,
		UpdateMethod: b.UpdateMethod,
		Username:     b.Username, Password: b.Password,
		Headers: b.Headers,
		CAFile:  b.CAFile, CertFile: b.CertFile, KeyFile: b.KeyFile,
		CAPEM: b.CAPEM, CertPEM: b.CertPEM, KeyPEM: b.KeyPEM,
		RetryMax: b.RetryMax, RetryWaitMin: b.RetryWaitMin, RetryWaitMax: b.RetryWaitMax,
	}
	if cfg.Password == "" && b.PasswordFile != "" {
		raw, err := os.ReadFile(b.PasswordFile)
		if err != nil {
			return Config{}, fmt.Errorf("reading state backend's password: %w", err)
		}
		cfg.Password = strings.TrimSuffix(strings.TrimSuffix(string(raw), "\n"), "\r")
	}
	return cfg, nil
}

func (c *Config) setDefaults() {
	set := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	set(&c.LockAddress, c.Address)
	set(&c.UnlockAddress, c.Address)
	set(&c.LockMethod, "LOCK")
	set(&c.UnlockMethod, "UNLOCK")
	set(&c.UpdateMethod, http.MethodPost)
	for d, v := range map[*time.Duration]time.Duration{
		&c.RetryWaitMin: time.Second, &c.RetryWaitMax: 30 * time.Second,
		&c.DialTimeout: 10 * time.Second, &c.Timeout: 2 * time.Minute,
	} {
		if *d == 0 {
			*d = v
		}
	}
	if c.RetryWaitMax < c.RetryWaitMin {
		c.RetryWaitMax = c.RetryWaitMin
	}
}

// parseAddress never quotes an address that it refuses: it may hold a password.
func parseAddress(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	if err != nil {
		return nil, errors.New("it is no URL")
	}
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New("an http:// or https:// URL is expected")
	case u.Host == "":
		return nil, errors.New("it names no host")
	case u.User != nil:
		return nil, errors.New("it holds a user or password; set the username and the password file instead")
	}
	return u, nil
}

func show(u *url.URL) string { return u.Scheme + "://" + u.Host + u.EscapedPath() }

func newTransport(cfg Config) (*http.Transport, error) {
	dial := cfg.DialContext
	proxy := proxyUnlessLoopback
	if dial == nil {
		dial = (&net.Dialer{Timeout: cfg.DialTimeout, KeepAlive: 15 * time.Second}).DialContext
	} else {
		proxy = nil
	}
	tc := &tls.Config{MinVersion: tls.VersionTLS12}
	ca, err := pemText(cfg.CAPEM, cfg.CAFile)
	if err != nil {
		return nil, fmt.Errorf("reading state backend's CA: %w", err)
	}
	if ca != nil {
		if tc.RootCAs, err = x509.SystemCertPool(); err != nil {
			tc.RootCAs = x509.NewCertPool()
		}
		if !tc.RootCAs.AppendCertsFromPEM(ca) {
			return nil, fmt.Errorf("reading state backend's CA %q: no PEM certificate", cfg.CAFile)
		}
	}
	certText, err := pemText(cfg.CertPEM, cfg.CertFile)
	if err != nil {
		return nil, fmt.Errorf("reading state backend's client certificate: %w", err)
	}
	keyText, err := pemText(cfg.KeyPEM, cfg.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("reading state backend's client key: %w", err)
	}
	if certText != nil || keyText != nil {
		cert, err := tls.X509KeyPair(certText, keyText)
		if err != nil {
			return nil, fmt.Errorf("reading state backend's client certificate: %w", err)
		}
		tc.Certificates = []tls.Certificate{cert}
	}
	return &http.Transport{
		Proxy: proxy,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, cfg.DialTimeout)
			defer cancel()
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, &dialError{err}
			}
			return conn, nil
		},
		TLSClientConfig:       tc,
		TLSHandshakeTimeout:   cfg.DialTimeout,
		MaxIdleConnsPerHost:   2,
		IdleConnTimeout:       90 * time.Second,
		ExpectContinueTimeout: time.Second,
	}, nil
}

// pemText is text, else the content of file; nil when neither is given.
func pemText(text, file string) ([]byte, error) {
	if text != "" {
		return []byte(text), nil
	}
	if file == "" {
		return nil, nil
	}
	return os.ReadFile(file)
}

func proxyUnlessLoopback(r *http.Request) (*url.URL, error) {
	host := r.URL.Hostname()
	if ip := net.ParseIP(host); host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil, nil
	}
	return http.ProxyFromEnvironment(r)
}
