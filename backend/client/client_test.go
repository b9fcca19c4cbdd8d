package client_test

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

const (
	good   = `{"version":4,"serial":3,"lineage":"l","resources":[]}`
	secret = "pw-of-backend"
)

func newClient(t *testing.T, cfg client.Config) *client.Client {
	t.Helper()
	cfg.Username, cfg.Password = "ops", secret
	if cfg.Timeout == 0 {
		cfg.Timeout = 5 * time.Second
	}
	cfg.RetryWaitMin, cfg.RetryWaitMax = time.Millisecond, 5*time.Millisecond
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func serve(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL + "/state/p/n?token=" + secret
}

// say answers everything with one status and body.
func say(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if status >= 300 && status < 400 {
			w.Header().Set("Location", "/other?"+secret)
		}
		w.WriteHeader(status)
		if status != http.StatusNoContent && status != http.StatusNotModified {
			_, _ = fmt.Fprint(w, body)
		}
	}
}

func TestErrorClasses(t *testing.T) {
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := "http://" + closed.Addr().String() + "/state?token=" + secret
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	tlsServer := httptest.NewUnstartedServer(say(200, good))
	tlsServer.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	tlsServer.StartTLS()
	t.Cleanup(tlsServer.Close)
	plain := serve(t, say(200, good))

	for _, tt := range []struct {
		name    string
		address string
		handler http.HandlerFunc
		cfg     client.Config
		want    error
		exit    int
	}{
		{name: "state", handler: say(200, good)},
		{name: "404", handler: say(404, "nothing"), want: api.ErrNotFound, exit: 3},
		{name: "204", handler: say(204, ""), want: api.ErrNotFound, exit: 3},
		{name: "empty body", handler: say(200, ""), want: api.ErrNotFound, exit: 3},
		{name: "410", handler: say(410, ""), want: api.ErrGone, exit: 3},
		{name: "page", handler: say(200, "<html>welcome</html>"), want: api.ErrNoState, exit: 1},
		{name: "other JSON", handler: say(200, `{"ok":true}`), want: api.ErrNoState, exit: 1},
		{name: "401", handler: say(401, ""), want: api.ErrUnauthorized, exit: 1},
		{name: "403", handler: say(403, ""), want: api.ErrForbidden, exit: 1},
		{name: "301", handler: say(301, ""), want: api.ErrRedirect, exit: 1},
		{name: "302", handler: say(302, ""), want: api.ErrRedirect, exit: 1},
		{name: "307", handler: say(307, ""), want: api.ErrRedirect, exit: 1},
		{name: "429", handler: say(429, ""), want: api.ErrUnavailable, exit: 5},
		{name: "500", handler: say(500, ""), want: api.ErrUnavailable, exit: 5},
		{name: "502", handler: say(502, "<html>"), want: api.ErrUnavailable, exit: 5},
		{name: "cut off", handler: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000")
			_, _ = fmt.Fprint(w, good)
		}, want: api.ErrUnavailable, exit: 5},
		{name: "damaged", handler: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-MD5", "1B2M2Y8AsgTpgAmY7PhCfg==")
			_, _ = fmt.Fprint(w, good)
		}, want: api.ErrUnavailable, exit: 5},
		{name: "connection drops", handler: func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, want: api.ErrUnavailable, exit: 5},
		{
			name: "no answer", handler: func(_ http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body) // the server sees the end of the client only then
				<-r.Context().Done()
			},
			cfg: client.Config{Timeout: 50 * time.Millisecond}, want: api.ErrUnavailable, exit: 5,
		},
		{name: "refused", address: refused, want: api.ErrUnreachable, exit: 5},
		{name: "DNS", address: "http://nobody.invalid/state?token=" + secret, want: api.ErrUnreachable, exit: 5},
		{name: "dial timeout", address: "http://192.0.2.1/state?token=" + secret, cfg: client.Config{
			DialTimeout: 20 * time.Millisecond,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			},
		}, want: api.ErrUnreachable, exit: 5},
		{name: "forward fails", address: "http://backend/state?token=" + secret, cfg: client.Config{
			DialContext: func(context.Context, string, string) (net.Conn, error) {
				return nil, errors.New("the channel was refused")
			},
		}, want: api.ErrUnreachable, exit: 5},
		{name: "unknown CA", address: tlsServer.URL + "/state?token=" + secret, want: api.ErrTLS, exit: 1},
		{name: "https to an http server", address: strings.Replace(plain, "http:", "https:", 1), want: api.ErrTLS, exit: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.cfg.Address = tt.address
			if tt.handler != nil {
				tt.cfg.Address = serve(t, tt.handler)
			}
			for _, retries := range []int{0, 2} {
				tt.cfg.RetryMax = retries
				c := newClient(t, tt.cfg)
				body, err := c.Get(t.Context())
				if !errors.Is(err, tt.want) || tt.want == nil && (err != nil || string(body) != good) {
					t.Fatalf("Get() = %q, %v, want %v", body, err, tt.want)
				}
				if tt.want != nil && api.ExitCode(err) != tt.exit {
					t.Errorf("ExitCode(%v) = %d, want %d", err, api.ExitCode(err), tt.exit)
				}
				if err != nil && strings.Contains(err.Error(), secret) {
					t.Errorf("the error shows a secret: %v", err)
				}
				if tt.want == nil || errors.Is(tt.want, api.ErrNotFound) || errors.Is(tt.want, api.ErrNoState) || strings.Contains(tt.name, "cut off") || tt.name == "damaged" || tt.name == "empty body" {
					continue
				}
				for what, err := range map[string]error{
					"Post":   c.Post(t.Context(), "1", []byte(good)),
					"Lock":   c.Lock(t.Context(), api.LockInfo{ID: "1"}),
					"Unlock": c.Unlock(t.Context(), api.LockInfo{ID: "1"}),
				} {
					if !errors.Is(err, tt.want) || strings.Contains(err.Error(), secret) {
						t.Errorf("%s() = %v, want %v without a secret", what, err, tt.want)
					}
				}
			}
		})
	}
}

func TestCanceledContextIsItsOwnError(t *testing.T) {
	c := newClient(t, client.Config{Address: serve(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Get(ctx); !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, api.ErrUnavailable) {
		t.Errorf("Get() with an ended context = %v, want its error alone", err)
	}
}

func TestRequestsOnTheWire(t *testing.T) {
	type seen struct{ method, uri, md5, ctype, header, body string }
	var got []seen
	address := serve(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		if u, p, ok := r.BasicAuth(); !ok || u != "ops" || p != secret {
			t.Errorf("%s without credentials", r.Method)
		}
		got = append(got, seen{r.Method, r.URL.RequestURI(), r.Header.Get("Content-MD5"), r.Header.Get("Content-Type"), r.Header.Get("X-T"), string(b)})
		if r.ContentLength != int64(len(b)) {
			t.Errorf("%s: Content-Length %d for %d bytes", r.Method, r.ContentLength, len(b))
		}
		if r.Method == http.MethodGet {
			_, _ = fmt.Fprint(w, good)
		}
	})
	c := newClient(t, client.Config{
		Address: address, LockAddress: address + "&l=1", LockMethod: "PUT", UpdateMethod: "PATCH",
		Headers: map[string]string{"X-T": "v"},
	})
	info := api.LockInfo{ID: "1", Who: "ann@box", Info: "i", Operation: "o", Version: "v", Created: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)}
	if _, err := c.Get(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{"Lock": c.Lock(t.Context(), info), "Post": c.Post(t.Context(), "a b", []byte(good)), "Unlock": c.Unlock(t.Context(), info)} {
		if err != nil {
			t.Fatalf("%s() = %v", what, err)
		}
	}
	raw, err := json.Marshal(info)
	if err != nil {
		t.Fatal(err)
	}
	sum := func(s string) string {
		m := md5.Sum([]byte(s))
		return base64.StdEncoding.EncodeToString(m[:])
	}
	want := map[string]seen{
		"GET":    {"GET", "/state/p/n?token=" + secret, "", "", "v", ""},
		"PUT":    {"PUT", "/state/p/n?token=" + secret + "&l=1", sum(string(raw)), "application/json", "v", string(raw)},
		"PATCH":  {"PATCH", "/state/p/n?ID=a+b&token=" + secret, sum(good), "application/json", "v", good},
		"UNLOCK": {"UNLOCK", "/state/p/n?token=" + secret, sum(string(raw)), "application/json", "v", string(raw)},
	}
	if len(got) != len(want) {
		t.Fatalf("%d requests, want %d", len(got), len(want))
	}
	for _, g := range got {
		if g != want[g.method] {
			t.Errorf("request = %q, want %q", g, want[g.method])
		}
	}
}

func TestLockConflicts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int
		body   string
		holder string
	}{
		{"423 with holder", 423, `{"ID":"h","Who":"eve@far"}`, "h"},
		{"GitLab", 409, `{"ID":"h","Who":"eve","Created":"2026-11-29T10:00:00.000Z"}`, "h"},
		{"Gitea", 409, `{"errors":["locked"]}`, ""},
		{"423 with empty body", 423, "", ""},
		{"423 with a page", 423, "<html>", ""},
		{"423 without ID", 423, `{"Who":"me@here"}`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newClient(t, client.Config{Address: serve(t, say(tt.status, tt.body))})
			err := c.Lock(t.Context(), api.LockInfo{ID: "mine", Who: "me@here"})
			var locked *api.LockedError
			if !errors.As(err, &locked) || !errors.Is(err, api.ErrLocked) {
				t.Fatalf("Lock() = %v, want a LockedError", err)
			}
			if locked.Holder.ID != tt.holder || tt.holder == "" && locked.Holder != (api.LockInfo{}) {
				t.Errorf("holder = %+v, want the ID %q and nothing from a body without ID", locked.Holder, tt.holder)
			}
		})
	}
	for _, status := range []int{201, 204} {
		if err := newClient(t, client.Config{Address: serve(t, say(status, ""))}).Lock(t.Context(), api.LockInfo{ID: "1"}); !errors.Is(err, api.ErrNoState) {
			t.Errorf("Lock() answered %d = %v, want ErrNoState", status, err)
		}
	}
}

func TestUnlockConflicts(t *testing.T) {
	for _, tt := range []struct {
		name   string
		status int
		body   string
		locked bool
	}{
		{"not locked", 409, "", false},
		{"another holder", 409, `{"ID":"h"}`, true},
		{"another holder, 423", 423, `{"ID":"h"}`, true},
	} {
		c := newClient(t, client.Config{Address: serve(t, say(tt.status, tt.body))})
		err := c.Unlock(t.Context(), api.LockInfo{ID: "mine"})
		if !errors.Is(err, api.ErrNotLocked) || errors.Is(err, api.ErrLocked) != tt.locked {
			t.Errorf("%s: Unlock() = %v, want ErrNotLocked, ErrLocked %v", tt.name, err, tt.locked)
		}
	}
}

func TestRetries(t *testing.T) {
	for _, tt := range []struct {
		name  string
		fails int
		with  int
		tries int32
		ok    bool
	}{
		{"503 twice", 2, 503, 3, true},
		{"503 for ever", 9, 503, 3, false},
		{"429", 1, 429, 2, true},
		{"301 is not repeated", 9, 301, 1, false},
		{"501 is not repeated", 9, 501, 1, false},
		{"412 is not repeated", 9, 412, 1, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var n atomic.Int32
			c := newClient(t, client.Config{RetryMax: 2, Address: serve(t, func(w http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body)
				if string(b) != good {
					t.Errorf("try %d sent %d bytes, want the whole state", n.Load(), len(b))
				}
				if int(n.Add(1)) <= tt.fails {
					w.WriteHeader(tt.with)
				}
			})})
			if err := c.Post(t.Context(), "1", []byte(good)); (err == nil) != tt.ok {
				t.Errorf("Post() = %v, want success %v", err, tt.ok)
			}
			if n.Load() != tt.tries {
				t.Errorf("%d tries, want %d", n.Load(), tt.tries)
			}
		})
	}
}

func TestProbe(t *testing.T) {
	absent := func(lock, unlock int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			status := map[string]int{"GET": 404, "LOCK": lock, "UNLOCK": unlock}[r.Method]
			w.WriteHeader(status)
			_, _ = fmt.Fprint(w, body)
		}
	}
	for _, tt := range []struct {
		name    string
		handler http.HandlerFunc
		kind    client.Kind
		want    error
	}{
		{"state", say(200, good), client.KindState, nil},
		{"absent", absent(200, 200, ""), client.KindAbsent, nil},
		{"absent and locked", absent(423, 409, `{"ID":"h"}`), client.KindAbsent, nil},
		{"any web server", say(404, "not found"), "", api.ErrNoState},
		{"web server without LOCK", absent(405, 405, ""), "", api.ErrNoState},
		{"python's http.server", absent(501, 501, ""), "", api.ErrNoState},
		{"lock that can not be released", absent(200, 409, ""), "", api.ErrNotLocked},
		{"page", say(200, "<html>"), "", api.ErrNoState},
		{"502", say(502, ""), "", api.ErrUnavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := newClient(t, client.Config{Address: serve(t, tt.handler)}).Probe(t.Context())
			if p.Kind != tt.kind || !errors.Is(err, tt.want) || tt.want == nil && err != nil {
				t.Errorf("Probe() = %q, %v, want %q, %v", p.Kind, err, tt.kind, tt.want)
			}
			if got, want := api.ExitCode(err), api.ExitCode(tt.want); err != nil && got != want {
				t.Errorf("exit code of Probe() = %d, want that of %v, %d", got, tt.want, want)
			}
			if p.Kind == client.KindState && (p.Meta.Serial != 3 || !bytes.Equal(p.Body, []byte(good))) {
				t.Errorf("Probe() = %+v, want serial 3 and the bytes", p)
			}
		})
	}
}

func TestOwnCAAndLoopbackWithoutProxy(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://192.0.2.1:1")
	t.Setenv("HTTPS_PROXY", "http://192.0.2.1:1")
	srv := httptest.NewTLSServer(say(200, good))
	t.Cleanup(srv.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := newClient(t, client.Config{Address: srv.URL + "/state", CAFile: ca}).Get(t.Context()); err != nil {
		t.Errorf("Get() with the server's CA = %v", err)
	}
}

func TestBadConfig(t *testing.T) {
	for name, cfg := range map[string]client.Config{
		"no address":         {},
		"no scheme":          {Address: "host/state"},
		"other scheme":       {Address: "ftp://host/state"},
		"no host":            {Address: "http:///state"},
		"password in it":     {Address: "http://ops:" + secret + "@host/state"},
		"password in lock":   {Address: "http://host/state", LockAddress: "http://ops:" + secret + "@host/state"},
		"broken":             {Address: "http://ops:" + secret + "@ho st/%zz"},
		"reserved header":    {Address: "http://host", Headers: map[string]string{"content-md5": "x"}},
		"two authorizations": {Address: "http://host", Username: "u", Headers: map[string]string{"Authorization": "Bearer " + secret}},
		"missing CA":         {Address: "http://host", CAFile: "/nonexistent"},
		"key without cert":   {Address: "http://host", KeyFile: "/nonexistent"},
	} {
		if _, err := client.New(cfg); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: New() = %v, want an error without the password", name, err)
		}
	}
}

func TestFromBackend(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pw")
	if err := os.WriteFile(file, []byte("from file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg, err := client.FromBackend(tfhosts.HTTPBackend{Address: "http://h/s", Username: "u", PasswordFile: file, RetryMax: 3})
	if err != nil || cfg.Password != "from file" || cfg.RetryMax != 3 {
		t.Errorf("FromBackend() = password %q, retries %d, %v, want those of the backend", cfg.Password, cfg.RetryMax, err)
	}
	cfg, err = client.FromBackend(tfhosts.HTTPBackend{Address: "http://h/s", Password: "given", PasswordFile: file})
	if err != nil || cfg.Password != "given" {
		t.Errorf("FromBackend() = password %q, %v, want the one given", cfg.Password, err)
	}
	if _, err := client.FromBackend(tfhosts.HTTPBackend{Address: "http://h/s", PasswordFile: file + "x"}); err == nil {
		t.Error("FromBackend() with a missing password file = nil, want an error")
	}
}
