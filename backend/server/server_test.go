package server_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
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
	"sync"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/backend/store/storetest"
)

const maxBytes = 4096

// backing is one store under test: how to open it again, how to lose a state.
type backing struct {
	open func() (store.Store, error)
	lose func(name string) error
}

func stores() map[string]func(*testing.T) backing {
	return map[string]func(*testing.T) backing{
		"files": func(t *testing.T) backing {
			dir := t.TempDir()
			return backing{
				open: func() (store.Store, error) { return store.OpenFiles(dir, store.FilesConfig{}) },
				lose: func(name string) error { return os.RemoveAll(filepath.Join(dir, name, "versions")) },
			}
		},
	}
}

// fixture is a server whose store can be opened again, and a user of it.
type fixture struct {
	*shared
	name, pass string
	header     http.Header
}

type shared struct {
	t       *testing.T
	backing backing
	cfg     server.Config
	store   store.Store
	mu      sync.RWMutex
	handler http.Handler
	url     string
	client  *http.Client
	log     *syncBuffer
}

func newFixture(t *testing.T, fresh func(*testing.T) backing, cfg server.Config) *fixture {
	t.Helper()
	s := &shared{t: t, backing: fresh(t), cfg: cfg, log: &syncBuffer{}}
	sum := sha256.Sum256([]byte("pw-ci"))
	s.cfg.Users = []server.User{
		{Name: "ops", Password: "pw-ops"},
		{Name: "root", Password: "pw-root", Admin: true},
		{Name: "ci", PasswordSHA256: hex.EncodeToString(sum[:]), Projects: []string{"project1"}},
	}
	s.cfg.MaxBytes = maxBytes
	s.cfg.Logger = slog.New(slog.NewTextHandler(s.log, nil))
	f := &fixture{shared: s, name: "ops", pass: "pw-ops"}
	f.restart(t)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.RLock()
		h := s.handler
		s.mu.RUnlock()
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		srv.Close()
		if err := s.store.Close(); err != nil {
			t.Error(err)
		}
	})
	s.url = srv.URL
	s.client = &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: 100},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	t.Cleanup(s.client.CloseIdleConnections)
	return f
}

func (f *fixture) restart(t *testing.T) {
	t.Helper()
	if f.store != nil {
		if err := f.store.Close(); err != nil {
			t.Fatal(err)
		}
	}
	st, err := f.backing.open()
	if err != nil {
		t.Fatal(err)
	}
	f.store, f.cfg.Store = st, st
	h, err := server.New(f.cfg)
	if err != nil {
		t.Fatal(err)
	}
	f.mu.Lock()
	f.handler = h
	f.mu.Unlock()
}

func (f *fixture) lose(t *testing.T, name string) {
	t.Helper()
	if err := f.backing.lose(name); err != nil {
		t.Fatal(err)
	}
}

func (f *fixture) as(name, pass string) *fixture {
	return &fixture{shared: f.shared, name: name, pass: pass}
}

type answer struct {
	what   string
	status int
	header http.Header
	body   []byte
}

func (a answer) want(t *testing.T, status int) {
	t.Helper()
	if a.status != status {
		t.Errorf("%s = %d %q, want %d", a.what, a.status, a.body, status)
	}
}

func (f *fixture) do(method, path, body string) answer {
	req, err := http.NewRequest(method, f.url+path, strings.NewReader(body))
	if err != nil {
		f.t.Error(err)
		return answer{}
	}
	for k, v := range f.header {
		req.Header[k] = v
	}
	if f.name != "" {
		req.SetBasicAuth(f.name, f.pass)
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Error(err)
		return answer{}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		f.t.Error(err)
	}
	return answer{method + " " + path, resp.StatusCode, resp.Header, b}
}

func lockBody(id string) string {
	return fmt.Sprintf(`{"ID":%q,"Operation":"OperationTypeApply","Info":"{}","Who":"ann@box","Version":"1.12.6","Created":"2026-11-29T10:00:00.123456789Z","Path":""}`, id)
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(b)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func TestUnlockedWritesWhenAllowed(t *testing.T) {
	f := newFixture(t, stores()["files"], server.Config{AllowUnlockedWrites: true})
	f.do("POST", path, string(storetest.State(1, "l", "x"))).want(t, 200)
	f.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 409)
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("POST", path, string(storetest.State(2, "l", "x"))).want(t, 423)
}

// A write that fails on the disk is no 200, and its text stays in the log.
func TestInternalErrorIsNotShown(t *testing.T) {
	dir := t.TempDir()
	f := newFixture(t, func(*testing.T) backing {
		return backing{open: func() (store.Store, error) {
			return store.OpenFiles(dir, store.FilesConfig{Fault: func(op string) error {
				if op == "store.state.sync" {
					return errors.New("disk of " + dir)
				}
				return nil
			}})
		}}
	}, server.Config{})
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	a := f.do("POST", path+"?ID=a", string(storetest.State(1, "l", "x")))
	a.want(t, 500)
	if strings.Contains(string(a.body), dir) {
		t.Errorf("POST on a broken disk says %q, want nothing of the machine", a.body)
	}
	if !strings.Contains(f.log.String(), "disk of") {
		t.Error("the log does not hold the internal error")
	}
	f.do("GET", path, "").want(t, 404)
}

func TestCredentialsAreRequired(t *testing.T) {
	st, err := store.OpenFiles(t.TempDir(), store.FilesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if _, err := server.New(server.Config{Store: st}); !errors.Is(err, server.ErrNoCredentials) {
		t.Errorf("New() without users = %v, want ErrNoCredentials", err)
	}
	s, err := server.New(server.Config{Store: st, Insecure: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.ListenAndServe(t.Context(), "0.0.0.0:0"); !errors.Is(err, server.ErrNoCredentials) {
		t.Errorf("ListenAndServe(0.0.0.0) without users = %v, want ErrNoCredentials", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.ListenAndServe(ctx, "127.0.0.1:0"); errors.Is(err, server.ErrNoCredentials) {
		t.Errorf("ListenAndServe(127.0.0.1) without users = %v", err)
	}
}

// SRV10: a write in flight is finished, later ones do not hang.
func TestShutdownFinishesWrites(t *testing.T) {
	inWrite, goOn := make(chan struct{}), make(chan struct{})
	st, err := store.OpenFiles(t.TempDir(), store.FilesConfig{Fault: func(op string) error {
		if op == "store.state.write" {
			close(inWrite)
			<-goOn
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	s, err := server.New(server.Config{Store: st, Insecure: true, AllowUnlockedWrites: true})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served, posted := make(chan error, 1), make(chan int, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	go func() {
		resp, err := http.Post("http://"+ln.Addr().String()+path, "application/json", bytes.NewReader(storetest.State(1, "l", "x")))
		if err != nil {
			posted <- 0
			return
		}
		defer resp.Body.Close()
		posted <- resp.StatusCode
	}()
	<-inWrite
	stop()
	select {
	case err := <-served:
		t.Fatalf("Serve() = %v while a write was in flight", err)
	case <-time.After(50 * time.Millisecond):
	}
	close(goOn)
	if got := <-posted; got != 200 {
		t.Errorf("the write in flight = %d, want 200", got)
	}
	if err := <-served; err != nil {
		t.Errorf("Serve() = %v, want nil", err)
	}
}

func TestReadUsers(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		mode       os.FileMode
		fails      string
	}{
		{name: "good", text: `[{"name":"a","password":"p"},{"name":"b","password_sha256":"` + strings.Repeat("0a", 32) + `"}]`, mode: 0o600},
		{name: "readable by all", text: `[{"name":"a","password":"p"}]`, mode: 0o644, fails: "chmod 600"},
		{name: "no users", text: `[]`, mode: 0o600, fails: "credentials are required"},
		{name: "no JSON", text: `hunter2`, mode: 0o600, fails: "a JSON list"},
		{name: "misspelt key", text: `[{"name":"a","pasword":"hunter2"}]`, mode: 0o600, fails: "a JSON list"},
		{name: "no password", text: `[{"name":"a"}]`, mode: 0o600, fails: "exactly one"},
		{name: "two passwords", text: `[{"name":"a","password":"hunter2","password_sha256":"x"}]`, mode: 0o600, fails: "exactly one"},
		{name: "one name twice", text: `[{"name":"a","password":"p"},{"name":"a","password":"q"}]`, mode: 0o600, fails: "unique"},
		{name: "short hash", text: `[{"name":"a","password_sha256":"0a"}]`, mode: 0o600, fails: "64 hex"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "users.json")
			if err := os.WriteFile(path, []byte(tt.text), tt.mode); err != nil {
				t.Fatal(err)
			}
			users, err := server.ReadUsers(path)
			if tt.fails == "" {
				if err != nil || len(users) == 0 {
					t.Errorf("ReadUsers(%q) = %d users, %v", tt.text, len(users), err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.fails) {
				t.Errorf("ReadUsers(%q) = %v, want %q in it", tt.text, err, tt.fails)
			}
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("ReadUsers(%q) shows a password: %v", tt.text, err)
			}
		})
	}
}
