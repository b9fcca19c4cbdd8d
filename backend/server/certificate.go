package server

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// LoadTLS reads a certificate chain and its key from PEM files for Config.TLS.
// They are read again when a file changed since: a new handshake gets the new
// pair, and connections that are up stay. A pair that can not be read, as one of
// which only half is written yet, is logged, and the old one serves on; log may
// be nil.
func LoadTLS(certFile, keyFile string, log *slog.Logger) (*tls.Config, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	p := &pair{certFile: certFile, keyFile: keyFile, log: log}
	var err error
	if p.seen, err = p.stat(); err == nil {
		err = p.read()
	}
	if err != nil {
		return nil, fmt.Errorf("reading TLS certificate: %w", err)
	}
	return &tls.Config{GetCertificate: p.get, MinVersion: tls.VersionTLS12}, nil
}

// pair is a certificate and its key, as the files hold them.
type pair struct {
	certFile, keyFile string
	log               *slog.Logger

	mu   sync.Mutex
	cert *tls.Certificate
	// seen is what the files looked like when they were last read.
	seen [2]fileMark
}

// fileMark changes when a file is written or replaced.
type fileMark struct {
	modified time.Time
	size     int64
}

func (p *pair) stat() (marks [2]fileMark, err error) {
	for i, path := range []string{p.certFile, p.keyFile} {
		fi, serr := os.Stat(path)
		if serr != nil {
			err = errors.Join(err, serr)
			continue
		}
		marks[i] = fileMark{fi.ModTime(), fi.Size()}
	}
	return marks, err
}

func (p *pair) read() error {
	cert, err := tls.LoadX509KeyPair(p.certFile, p.keyFile)
	if err != nil {
		return err
	}
	p.cert = &cert
	return nil
}

// get is tls.Config.GetCertificate.
func (p *pair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now, err := p.stat()
	if now == p.seen {
		return p.cert, nil
	}
	p.seen = now // a broken pair is told once, not at each handshake
	if err == nil {
		err = p.read()
	}
	if err != nil {
		p.log.Warn("the new TLS certificate can not be read; the old one is kept", "error", err)
	} else {
		p.log.Info("TLS certificate read again", "cert", p.certFile)
	}
	return p.cert, nil
}
