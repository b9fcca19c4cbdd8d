package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

const (
	testPassword = "pw-that-must-not-show"
	testState    = `{"version":4,"serial":3,"lineage":"l","resources":[{}]}`
)

// backendRun runs the checks with the wrapper's own search for the backend.
func backendRun(t *testing.T, address, password, stateDir string) map[string]Result {
	t.Helper()
	s := &tfhosts.Setup{Backend: tfhosts.HTTPBackend{Address: address, Pinned: true, Username: "ops", Password: password}}
	results := Run(context.Background(), Config{
		Setup: s, Limit: 2 * time.Second, Foreign: bootstrap.WhyForeign,
		Engine: tofu.FindConfig{Explicit: "/nonexistent"}, Nix: nix.New(nix.Config{BinDir: "/nonexistent"}),
		Backend: func(ctx context.Context, _ Forward) (Backend, error) {
			e, err := bootstrap.Examine(ctx, bootstrap.Config{Setup: s, StateDir: stateDir, SelfBackend: true})
			b := Backend{Client: e.Client, Lost: e.Lost, LostHint: e.LostHint, Close: e.Close}
			for _, p := range e.Tried {
				b.Tried = append(b.Tried, Place{p.Address, p.Through, p.Err})
			}
			return b, err
		},
	})
	return byCheck(t, results)
}

func byCheck(t *testing.T, results []Result) map[string]Result {
	t.Helper()
	got := map[string]Result{}
	for _, r := range results {
		if strings.Contains(r.Message+r.Hint, testPassword) {
			t.Errorf("the password shows in %+v", r)
		}
		if (r.Level == OK) != (r.Hint == "") {
			t.Errorf("%s is %s with the hint %q", r.Check, r.Level, r.Hint)
		}
		got[r.Check] = r
	}
	return got
}

// want is part of a Result; an empty level: there must be none.
type want struct {
	level      Level
	says, hint string
}

func (w want) check(t *testing.T, got map[string]Result, check string) {
	t.Helper()
	r, ok := got[check]
	if w.level == "" {
		if ok {
			t.Errorf("%s = %+v, want none", check, r)
		}
		return
	}
	if r.Level != w.level || !strings.Contains(r.Message, w.says) || !strings.Contains(r.Hint, w.hint) {
		t.Errorf("%s = %+v, want %+v", check, r, w)
	}
}

// ourServer is the real state server, with one state and the lock as given.
func ourServer(t *testing.T, state string, lock *api.LockInfo) http.Handler {
	t.Helper()
	files, err := store.OpenFiles(t.TempDir(), store.FilesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { files.Close() })
	srv, err := server.New(server.Config{Store: files, Users: []server.User{{Name: "ops", Password: testPassword}}})
	if err != nil {
		t.Fatal(err)
	}
	hs := httptest.NewServer(srv)
	defer hs.Close()
	c, err := client.New(client.Config{Address: hs.URL + "/state/p/n", Username: "ops", Password: testPassword})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := context.Background()
	if state != "" {
		info := client.NewLockInfo("test", "")
		if err := c.Lock(ctx, info); err != nil {
			t.Fatal(err)
		}
		if err := c.Post(ctx, info.ID, []byte(state)); err != nil {
			t.Fatal(err)
		}
		if err := c.Unlock(ctx, info); err != nil {
			t.Fatal(err)
		}
	}
	if lock != nil {
		if err := c.Lock(ctx, *lock); err != nil {
			t.Fatal(err)
		}
	}
	return srv
}

// scripted answers by method; a method without an answer gets 404.
func scripted(answers map[string]http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := answers[r.Method]; h != nil {
			h(w, r)
			return
		}
		w.WriteHeader(http.StatusNotFound)
	})
}

func say(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, body) //nolint:errcheck // the client sees it
	}
}

// lenient is a server with a lock of its own rules.
func lenient(second int, holder bool, unlock int) http.Handler {
	var mu sync.Mutex
	var held []byte
	return scripted(map[string]http.HandlerFunc{
		"GET": say(http.StatusOK, testState),
		"LOCK": func(w http.ResponseWriter, r *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			body, _ := io.ReadAll(r.Body)
			if held == nil {
				held = body
				return
			}
			w.WriteHeader(second)
			if holder {
				w.Write(held) //nolint:errcheck // the client sees it
			}
		},
		"UNLOCK": say(unlock, ""),
	})
}

func at(d time.Duration) http.Handler {
	next := lenient(423, true, 200)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", time.Now().Add(d).UTC().Format(http.TimeFormat))
		next.ServeHTTP(w, r)
	})
}

func TestBackend(t *testing.T) {
	foreign := client.NewLockInfo("apply", "")
	foreign.Who = "ann@elsewhere"
	own := client.NewLockInfo("apply", "")
	const lock, state, clock, place = "backend lock", "backend state", "backend clock", "backend place 1"
	good := map[string]want{
		place: {OK, "serves", ""}, state: {level: OK}, clock: {OK, "agrees", ""}, lock: {OK, "released", ""},
	}
	lost := t.TempDir()
	for _, tt := range []struct {
		name     string
		handler  http.Handler
		password string
		ledger   bool
		local    bool
		want     map[string]want
	}{
		{name: "no state yet", handler: ourServer(t, "", nil), want: good},
		{name: "a state", handler: ourServer(t, testState, nil), want: good},
		{name: "state is gone since", handler: ourServer(t, "", nil), ledger: true, want: map[string]want{
			place: {level: OK}, state: {Fail, "last saw serial 7", "tf-hosts state-restore"},
		}},
		{name: "bootstrap stopped before the migration", handler: ourServer(t, "", nil), local: true, want: map[string]want{
			place: {level: OK}, state: {Fail, "never moved there", "BOOTSTRAP=1 tf-hosts apply"},
		}},
		{name: "locked by somebody", handler: ourServer(t, testState, &foreign), want: map[string]want{
			lock: {Warn, "ann@elsewhere", "tf-hosts force-unlock " + foreign.ID},
		}},
		{name: "locked by a dead run of ours", handler: ourServer(t, testState, &own), want: map[string]want{
			lock: {Warn, own.ID, "TF_RECLAIM_OWN_LOCK=1"},
		}},
		{name: "wrong password", handler: ourServer(t, testState, nil), password: "wrong", want: map[string]want{
			place: {Fail, "credentials", "password_file"}, lock: {}, state: {}, clock: {},
		}},
		{name: "redirect", handler: http.RedirectHandler("https://real.example/state/p/n?token="+testPassword, http.StatusMovedPermanently), want: map[string]want{
			place: {Fail, "redirects (status 301, to https://real.example/state/p/n)", "into the setup"}, lock: {},
		}},
		{name: "a web page", handler: scripted(map[string]http.HandlerFunc{"GET": say(200, "<html>welcome</html>")}), want: map[string]want{
			place: {Fail, "no state", "http_backend.address"}, lock: {},
		}},
		{name: "404 to everything", handler: scripted(nil), want: map[string]want{
			place: {Fail, "no lock can be taken", "http_backend.address"}, lock: {},
		}},
		{name: "502", handler: scripted(map[string]http.HandlerFunc{"GET": say(502, "")}), want: map[string]want{
			place: {Fail, "status 502", "TF_HTTP_ADDRESS"},
		}},
		{name: "410", handler: scripted(map[string]http.HandlerFunc{"GET": say(410, "")}), want: map[string]want{
			place: {level: OK}, state: {Fail, "410", "state-restore"},
		}},
		{name: "no answer", handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }), want: map[string]want{
			place: {Fail, "no answer within 2s", "curl -i"}, lock: {},
		}},
		{name: "clock ahead", handler: at(2 * time.Minute), want: map[string]want{clock: {Warn, "ahead", "timedatectl"}, lock: {level: OK}}},
		{name: "clock far behind", handler: at(-time.Hour), want: map[string]want{clock: {Fail, "behind", "timedatectl"}}},
		{name: "GitLab's lock", handler: lenient(409, true, 200), want: map[string]want{lock: {level: OK}}},
		{name: "holder is not told", handler: lenient(423, false, 200), want: map[string]want{lock: {Warn, "does not say who", "tf-hosts backend serve"}}},
		{name: "two get the lock", handler: lenient(200, false, 200), want: map[string]want{lock: {Fail, "two holders", "tf-hosts backend serve"}}},
		{name: "the lock stays", handler: lenient(423, true, 500), want: map[string]want{lock: {Fail, "not released", "tf-hosts force-unlock "}}},
		{name: "no lock at all", handler: scripted(map[string]http.HandlerFunc{"GET": say(200, testState), "LOCK": say(405, "")}), want: map[string]want{
			lock: {Fail, "405", "lock_address"},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			hs := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method != "GET" && r.Method != "LOCK" && r.Method != "UNLOCK" {
					t.Errorf("%s of the state: a look writes nothing", r.Method)
				}
				tt.handler.ServeHTTP(w, r)
			}))
			defer hs.Close()
			address := hs.URL + "/state/p/n"
			if tt.ledger {
				writeLedger(t, lost, address, bootstrap.Ledger{Mode: bootstrap.ModeRemote, State: bootstrap.StateRef{Lineage: "l", Serial: 7}})
			}
			if tt.local {
				write(t, filepath.Join(bootstrap.WorkDir(lost, address), "terraform.tfstate"), testState, 0o600)
			}
			password := testPassword
			if tt.password != "" {
				password = tt.password
			}
			got := backendRun(t, address, password, lost)
			for check, w := range tt.want {
				w.check(t, got, check)
			}
		})
	}
}

func writeLedger(t *testing.T, stateDir, address string, l bootstrap.Ledger) string {
	t.Helper()
	l.Version, l.Address = 1, address
	dir := bootstrap.WorkDir(stateDir, address)
	b, err := json.Marshal(l)
	if err == nil {
		err = os.MkdirAll(dir, 0o700)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "ledger.json"), b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPlaces(t *testing.T) {
	away := fmt.Errorf(`reading state from "http://a": %w`, api.ErrUnreachable)
	for _, tt := range []struct {
		name    string
		backend Backend
		err     error
		want    map[string]want
	}{
		{"detached", Backend{}, nil, map[string]want{"backend": {OK, "detached", ""}}},
		{"no way to try", Backend{}, tfhosts.WithExit(64, "correct it", away), map[string]want{"backend": {Fail, "unreachable", "correct it"}}},
		{
			"the node serves",
			Backend{Tried: []Place{{"http://a", "", away}, {"http://b", "prod.state", nil}}},
			nil,
			map[string]want{"backend place 1": {OK, "passed over", ""}, "backend place 2": {OK, "http://b through node prod.state serves", ""}},
		},
		{
			"nobody serves",
			Backend{Tried: []Place{{"http://a", "", away}, {"http://a", "prod.state", away}}},
			tfhosts.WithExit(5, "BOOTSTRAP=1 tf-hosts apply", away),
			map[string]want{"backend place 1": {Fail, "unreachable", "BOOTSTRAP=1"}, "backend place 2": {Fail, "through node prod.state: reading", "BOOTSTRAP=1"}},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &run{}
			r.addPlaces(context.Background(), tt.backend, tt.err)
			got := byCheck(t, r.results)
			for check, w := range tt.want {
				w.check(t, got, check)
			}
			if len(got) != len(tt.want) {
				t.Errorf("results = %+v, want %d", got, len(tt.want))
			}
		})
	}
}
