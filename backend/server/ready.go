package server

import (
	"context"
	"net/http"
	"sync"
	"time"
)

// readyFor is how long an answer of the store is good for: everybody may ask,
// and each question writes to the disk.
const readyFor = time.Second

// readiness is the store's last answer to whether it can be written.
type readiness struct {
	mu  sync.Mutex
	at  time.Time
	err error
}

// ready answers /readyz: 200 when the store can be written, else 503. Why is in
// the log alone, since nobody has to log in.
func (s *Server) ready(c *call) {
	c.Header().Set("Content-Type", "text/plain")
	if s.draining.Load() || s.storeError(c.r.Context()) != nil {
		c.Header().Set("Retry-After", "1")
		c.WriteHeader(http.StatusServiceUnavailable)
		_, _ = c.Write([]byte("not ready\n"))
		return
	}
	c.WriteHeader(http.StatusOK)
	_, _ = c.Write([]byte("ok\n"))
}

func (s *Server) storeError(ctx context.Context) error {
	r := &s.readiness
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.at.IsZero() && time.Since(r.at) < readyFor {
		return r.err
	}
	err := s.cfg.Store.Ready(context.WithoutCancel(ctx))
	if err != nil {
		s.cfg.Logger.Error("the store can not be written", "error", err)
	}
	r.at, r.err = time.Now(), err
	return err
}
