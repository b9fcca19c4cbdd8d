package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// ListenAndServe listens on addr ("127.0.0.1:8080", ":8080") and serves until
// ctx ends. See Serve.
func (s *Server) ListenAndServe(ctx context.Context, addr string) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("starting state server: %w", err)
	}
	return s.Serve(ctx, ln)
}

// Serve serves on ln, which it closes, until ctx ends; then it refuses new
// requests with 503 and Retry-After, finishes those in flight within
// Config.ShutdownGrace and returns nil. It returns ErrNoCredentials when
// everybody could reach ln without credentials.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	loopback := isLoopback(ln.Addr())
	if len(s.creds) == 0 && !loopback {
		return errors.Join(fmt.Errorf("starting state server on %s: %w off loopback", ln.Addr(), ErrNoCredentials), ln.Close())
	}
	if s.cfg.TLS == nil && !loopback {
		s.cfg.Logger.Warn("credentials and states travel in clear: no TLS certificate is set", "addr", ln.Addr().String())
	}
	hs := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       s.cfg.RequestTimeout,
		WriteTimeout:      2 * s.cfg.RequestTimeout, // counts from the end of the headers
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    32 << 10,
		ErrorLog:          slog.NewLogLogger(s.cfg.Logger.Handler(), slog.LevelWarn),
		BaseContext:       func(net.Listener) context.Context { return context.WithoutCancel(ctx) },
	}
	if s.cfg.TLS != nil {
		ln = tls.NewListener(ln, s.cfg.TLS)
	}
	s.cfg.Logger.Info("serving states", "addr", ln.Addr().String(), "tls", s.cfg.TLS != nil, "users", len(s.creds))
	done := make(chan error, 1)
	go func() { done <- hs.Serve(ln) }()
	select {
	case err := <-done:
		return fmt.Errorf("serving states: %w", err)
	case <-ctx.Done():
	}
	s.draining.Store(true)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.ShutdownGrace)
	defer cancel()
	err := hs.Shutdown(grace)
	if err != nil {
		err = errors.Join(fmt.Errorf("stopping state server: %w", err), hs.Close())
	}
	if served := <-done; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}

func isLoopback(addr net.Addr) bool {
	tcp, ok := addr.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback() || addr.Network() == "unix"
}
