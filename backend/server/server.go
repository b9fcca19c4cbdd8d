// Package server is the state server of tf-hosts: OpenTofu's http backend
// protocol (GET, POST, LOCK, UNLOCK, DELETE on one address) on a store.
//
// It keeps to the rules SRV1 to SRV11 of its conformance tests. It never
// redirects, since a client turns a redirected POST into a GET and loses the
// state; never answers "no state" for a state that existed, since the next plan
// would create everything again; and never logs a body or a credential.
//
//	GET            /state/PROJECT/NAME                the state
//	POST, PUT      /state/PROJECT/NAME?ID=LOCK        a new state
//	LOCK, UNLOCK   /state/PROJECT/NAME                or POST, DELETE …/lock
//	DELETE         /state/PROJECT/NAME?ID=LOCK        leaves a tombstone
//	GET            /state/PROJECT/NAME/lock           the holder; 204 if none
//	GET            /state/PROJECT/NAME/versions       list, newest first
//	GET            /state/PROJECT/NAME/versions/SERIAL
//	GET            /healthz                           without credentials
//	GET            /readyz                            the same; 503 unless states can be stored
package server

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"fediversity.eu/tf-hosts/backend/store"
)

// Config configures a Server. Store is required, and one of Users and Insecure.
type Config struct {
	Store store.Store
	// Users who may log in, see ReadUsers.
	Users []User
	// Insecure serves without credentials when Users is empty. Serve then
	// refuses any listener that is not on a loopback address.
	Insecure bool
	// Logger gets one line a request, without bodies or credentials; nil is silent.
	Logger *slog.Logger
	// MaxBytes is the size limit of a state in bytes; default 64 MiB.
	MaxBytes int64
	// AllowUnlockedWrites accepts a POST without lock ID while the state is not
	// locked ("-lock=false"). Default: refused with 409.
	AllowUnlockedWrites bool
	// TLS, if set, is what Serve listens with; TLS 1.2 is the least. See LoadTLS.
	TLS *tls.Config
	// ShutdownGrace is how long Serve waits for requests in flight at the end;
	// default 30 s.
	ShutdownGrace time.Duration
	// RequestTimeout bounds reading a request and writing an answer; default 2 min.
	RequestTimeout time.Duration
}

// Server is the http.Handler of the state server.
type Server struct {
	cfg   Config
	creds []credential
	// draining: Serve is about to end; new requests get 503 with Retry-After.
	draining  atomic.Bool
	readiness readiness
}

// ErrNoCredentials says that neither Users nor Insecure is set, or that
// Insecure was asked for on an address that is not loopback.
var ErrNoCredentials = errors.New("credentials are required to serve states")

// New checks cfg and makes a Server. It does not own the store.
func New(cfg Config) (*Server, error) {
	if cfg.Store == nil {
		return nil, errors.New("starting state server: no store")
	}
	if len(cfg.Users) == 0 && !cfg.Insecure {
		return nil, ErrNoCredentials
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = 64 << 20
	}
	if cfg.ShutdownGrace == 0 {
		cfg.ShutdownGrace = 30 * time.Second
	}
	if cfg.RequestTimeout == 0 {
		cfg.RequestTimeout = 2 * time.Minute
	}
	creds, err := digest(cfg.Users)
	if err != nil {
		return nil, err
	}
	return &Server{cfg: cfg, creds: creds}, nil
}

// call is one request on its way through the handler.
type call struct {
	http.ResponseWriter
	r      *http.Request
	name   string // PROJECT/NAME
	sub    string // what follows: "", "lock", "versions", "versions/7"
	user   credential
	status int
}

func (c *call) WriteHeader(status int) {
	c.status = status
	c.ResponseWriter.WriteHeader(status)
}

func (c *call) Write(b []byte) (int, error) {
	if c.status == 0 {
		c.status = http.StatusOK
	}
	return c.ResponseWriter.Write(b)
}

// ServeHTTP routes by hand: http.ServeMux answers an unclean path with a 301.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	c := &call{ResponseWriter: w, r: r}
	s.serve(c)
	s.cfg.Logger.Info("request", "method", r.Method, "path", r.URL.Path, "status", c.status,
		"user", c.user.name, "remote", r.RemoteAddr, "bytes", r.ContentLength, "ms", time.Since(start).Milliseconds())
}

func (s *Server) serve(c *call) {
	if c.r.URL.Path == "/healthz" {
		c.Header().Set("Content-Type", "text/plain")
		c.WriteHeader(http.StatusOK)
		_, _ = c.Write([]byte("ok\n"))
		return
	}
	if c.r.URL.Path == "/readyz" {
		s.ready(c)
		return
	}
	if s.draining.Load() {
		c.Header().Set("Retry-After", "1")
		c.fail(http.StatusServiceUnavailable, "state server is shutting down")
		return
	}
	user, ok := s.authenticate(c.r)
	if !ok {
		c.Header().Set("WWW-Authenticate", `Basic realm="tf-hosts state"`)
		c.fail(http.StatusUnauthorized, "credentials are required")
		return
	}
	c.user = user
	rest, ok := strings.CutPrefix(c.r.URL.Path, "/state/")
	if !ok {
		// Not 404: to a client that has a wrong address it would mean "no state".
		c.fail(http.StatusBadRequest, "states are at /state/PROJECT/NAME")
		return
	}
	parts := strings.SplitN(rest, "/", 3)
	if len(parts) == 3 && parts[2] != "" { // a slash at the end stays and is refused
		c.sub = parts[2]
		parts = parts[:2]
	}
	c.name = strings.Join(parts, "/")
	if err := store.CheckName(c.name); err != nil {
		c.error(err)
		return
	}
	if !user.may(parts[0]) {
		c.fail(http.StatusForbidden, "this user has no access to the project")
		return
	}
	s.route(c)
}

func (s *Server) route(c *call) {
	switch method := c.r.Method; {
	case c.sub == "" && (method == http.MethodGet || method == http.MethodHead):
		s.get(c)
	case c.sub == "" && (method == http.MethodPost || method == http.MethodPut):
		s.post(c)
	case c.sub == "" && method == http.MethodDelete:
		s.remove(c)
	case (c.sub == "" || c.sub == "lock") && method == "LOCK",
		c.sub == "lock" && (method == http.MethodPost || method == http.MethodPut):
		s.lock(c)
	case (c.sub == "" || c.sub == "lock" || c.sub == "unlock") && method == "UNLOCK",
		c.sub == "lock" && method == http.MethodDelete,
		c.sub == "unlock" && method == http.MethodPost:
		s.unlock(c)
	case c.sub == "lock" && method == http.MethodGet:
		s.holder(c)
	case method == http.MethodGet && (c.sub == "versions" || strings.HasPrefix(c.sub, "versions/")):
		s.versions(c)
	default:
		c.fail(http.StatusMethodNotAllowed, "no such operation on a state")
	}
}
