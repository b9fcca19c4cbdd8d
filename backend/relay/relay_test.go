package relay_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/relay"
	"fediversity.eu/tf-hosts/backend/store/storetest"
)

// backend is a state server whose faults and lost locks are on command. It has
// the habits of servers that the relay makes up for.
type backend struct {
	mu     sync.Mutex
	state  []byte
	holder []byte
	// wholeLock: UNLOCK compares all of the lock information, and a write
	// without lock is 400 (nimbolus).
	wholeLock bool
	// onceOnly: each serial is taken once, 412 for a repetition (GitLab: 422).
	onceOnly bool
	posts    int
}

func (b *backend) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	switch r.Method {
	case http.MethodGet:
		if b.state == nil {
			w.WriteHeader(404)
			return
		}
		_, _ = w.Write(b.state)
	case http.MethodPost:
		info, _ := api.ParseHolder(b.holder)
		if b.holder == nil || info.ID != r.URL.Query().Get("ID") {
			w.WriteHeader(map[bool]int{true: 400, false: 409}[b.wholeLock])
			return
		}
		if b.onceOnly && string(b.state) == string(body) {
			w.WriteHeader(412)
			return
		}
		b.posts++
		b.state = body
	case "LOCK":
		if b.holder != nil {
			w.WriteHeader(423)
			_, _ = w.Write(b.holder)
			return
		}
		b.holder = body
	case "UNLOCK":
		got, _ := api.ParseHolder(body)
		want, _ := api.ParseHolder(b.holder)
		if b.holder == nil || got.ID != want.ID || b.wholeLock && got != want {
			w.WriteHeader(map[bool]int{true: 400, false: 409}[b.wholeLock])
			return
		}
		b.holder = nil
	}
}

func (b *backend) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.holder = nil
}

func (b *backend) put(state []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.state = state
}

func (b *backend) has() (state, holder string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return string(b.state), string(b.holder)
}

// rig is a backend, its faults and a relay in front of it.
type rig struct {
	t       *testing.T
	backend *backend
	faults  *faultPlan
	relay   *relay.Relay
	ep      relay.Endpoint
	journal string
}

func newRig(t *testing.T, b *backend, cfg relay.Config) *rig {
	t.Helper()
	g := &rig{t: t, backend: b, faults: &faultPlan{}, journal: t.TempDir()}
	srv := httptest.NewServer(g.faults.wrap(b))
	t.Cleanup(srv.Close)
	if cfg.Upstream == nil {
		cfg.Upstream = newClient(t, srv.URL+"/state")
	}
	cfg.JournalDir = g.journal
	cfg.RetryWaitMin, cfg.RetryWaitMax = time.Millisecond, 5*time.Millisecond
	g.relay, g.ep = startRelay(t, cfg)
	return g
}

func (g *rig) do(want int, method, query, body string) string {
	g.t.Helper()
	req, err := http.NewRequest(method, g.ep.Address+query, strings.NewReader(body))
	if err != nil {
		g.t.Fatal(err)
	}
	req.Close = true // a relay on the same port may be another one
	req.SetBasicAuth(g.ep.Username, g.ep.Password)
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Fatal(err)
	}
	if resp.StatusCode != want {
		g.t.Fatalf("%s through the relay = %d, want %d; last error: %v", method, resp.StatusCode, want, g.relay.LastError())
	}
	return string(b)
}

func lockJSON(id string) string {
	return fmt.Sprintf(`{"ID":%q,"Operation":"o","Info":"","Who":"ann@box","Version":"v","Created":"2026-11-29T10:00:00Z","Path":""}`, id)
}

func state(serial uint64) string { return string(storetest.State(serial, "l", "x")) }

func TestLostAnswersAreNotSeen(t *testing.T) {
	for _, onceOnly := range []bool{false, true} {
		g := newRig(t, &backend{onceOnly: onceOnly}, relay.Config{RunInfo: relay.RunInfo{RunID: "r1", PID: 5}})
		g.faults.set("GET", 502)
		g.do(404, "GET", "", "")
		g.faults.set("LOCK", dropAfter)
		g.do(200, "LOCK", "", lockJSON("a"))
		g.do(200, "LOCK", "", lockJSON("a"))
		if _, holder := g.backend.has(); !strings.Contains(holder, `run_id\":\"r1`) {
			t.Errorf("the backend's holder is %s, want the run's information in it", holder)
		}
		g.faults.set("POST", 503, dropAfter, 502)
		g.do(200, "POST", "?ID=a", state(1))
		g.faults.set("UNLOCK", 502, dropAfter)
		g.do(200, "UNLOCK", "", lockJSON("a"))
		if s, holder := g.backend.has(); s != state(1) || holder != "" || g.faults.left() != 0 {
			t.Errorf("the backend has %q, lock %q, %d faults left", s, holder, g.faults.left())
		}
		if err := g.relay.FirstError(); err != nil {
			t.Errorf("FirstError() = %v, want nil", err)
		}
	}
}

// F12: a server that repeats the requester's ID does not tell who holds the lock.
func TestEchoedLockIsNotOurs(t *testing.T) {
	g := newRig(t, &backend{holder: []byte(lockJSON("a"))}, relay.Config{})
	g.do(423, "LOCK", "", lockJSON("a"))
	if _, ok := g.relay.LockHolder(); ok {
		t.Error("LockHolder() of an echo = true, want false")
	}
	if _, ok := g.relay.Held(); ok {
		t.Error("Held() after an echo = true, want false")
	}
}

func TestRedirectsFailWithoutRepetition(t *testing.T) {
	for _, status := range []int{301, 302, 303, 307, 308} {
		g := newRig(t, &backend{}, relay.Config{})
		for _, method := range []string{"GET", "LOCK", "POST"} {
			g.faults.set(method, status)
			g.do(424, method, "", map[string]string{"LOCK": lockJSON("a"), "POST": state(1)}[method])
			if !errors.Is(g.relay.LastError(), api.ErrRedirect) || g.faults.left() != 0 {
				t.Errorf("%s answered %d: LastError() = %v, want ErrRedirect", method, status, g.relay.LastError())
			}
		}
		if g.relay.Stats().Retries != 0 {
			t.Errorf("%d repetitions, want none", g.relay.Stats().Retries)
		}
	}
}

func TestBackendThatForgetsLocks(t *testing.T) {
	for _, wholeLock := range []bool{false, true} {
		start := func(t *testing.T) *rig {
			g := newRig(t, &backend{wholeLock: wholeLock}, relay.Config{})
			g.do(404, "GET", "", "")
			g.do(200, "LOCK", "", lockJSON("a"))
			g.do(200, "POST", "?ID=a", state(1))
			g.backend.forget()
			return g
		}
		t.Run(fmt.Sprintf("state unchanged, whole lock %v", wholeLock), func(t *testing.T) {
			g := start(t)
			g.do(200, "POST", "?ID=a", state(2))
			g.do(200, "UNLOCK", "", lockJSON("a"))
			if s, holder := g.backend.has(); s != state(2) || holder != "" || g.relay.Stats().Recovered != 1 {
				t.Errorf("the backend has %q, lock %q, %d recovered", s, holder, g.relay.Stats().Recovered)
			}
		})
		t.Run(fmt.Sprintf("another wrote, whole lock %v", wholeLock), func(t *testing.T) {
			g := start(t)
			g.backend.put(storetest.State(2, "l", "other"))
			g.do(412, "POST", "?ID=a", state(3))
			if s, _ := g.backend.has(); s != string(storetest.State(2, "l", "other")) {
				t.Errorf("the backend has %q, want the other's state", s)
			}
		})
		t.Run(fmt.Sprintf("another holds it, whole lock %v", wholeLock), func(t *testing.T) {
			g := start(t)
			g.backend.mu.Lock()
			g.backend.holder = []byte(lockJSON("b"))
			g.backend.mu.Unlock()
			g.do(423, "POST", "?ID=a", state(2))
			if !errors.Is(g.relay.LastError(), api.ErrLocked) {
				t.Errorf("LastError() = %v, want ErrLocked", g.relay.LastError())
			}
		})
		t.Run(fmt.Sprintf("state is gone too, whole lock %v", wholeLock), func(t *testing.T) {
			g := start(t)
			g.backend.put(nil)
			g.do(410, "POST", "?ID=a", state(2))
			g.do(410, "GET", "", "")
			if s, _ := g.backend.has(); s != "" {
				t.Errorf("the backend has %q, want nothing written", s)
			}
		})
	}
}

func TestForceUnlockOfWholeLockServer(t *testing.T) {
	g := newRig(t, &backend{wholeLock: true, holder: []byte(lockJSON("b"))}, relay.Config{})
	idOnly := func(id string) string { return fmt.Sprintf(`{"ID":%q,"Created":"0001-01-01T00:00:00Z"}`, id) }
	g.do(400, "UNLOCK", "", idOnly("c"))
	g.do(200, "UNLOCK", "", idOnly("b"))
	if _, holder := g.backend.has(); holder != "" {
		t.Errorf("the backend's lock is %s, want none", holder)
	}
	g.do(409, "UNLOCK", "", idOnly("b"))
	if _, holder := g.backend.has(); holder != "" {
		t.Errorf("the trial lock %s was left behind", holder)
	}
}

func TestStateThatGoesBackIsRefused(t *testing.T) {
	g := newRig(t, &backend{state: []byte(state(5))}, relay.Config{})
	g.do(200, "GET", "", "")
	g.do(200, "LOCK", "", lockJSON("a"))
	g.do(412, "POST", "?ID=a", state(4))
	g.do(412, "POST", "?ID=a", string(storetest.State(6, "other", "x")))
	g.do(200, "POST", "?ID=a", state(6))
	for _, s := range [][]byte{[]byte(state(5)), storetest.State(9, "other", "x"), nil} {
		g.backend.put(s)
		g.do(410, "GET", "", "")
	}
	if api.ExitCode(g.relay.LastError()) != 3 {
		t.Errorf("ExitCode(%v) = %d, want 3", g.relay.LastError(), api.ExitCode(g.relay.LastError()))
	}
	g.backend.put([]byte("<html>"))
	g.do(424, "GET", "", "")
	if n := len(entries(t, g.journal)); n != 3 {
		t.Errorf("the journal has %d entries, want all 3 states that tofu posted", n)
	}
}

func entries(t *testing.T, dir string) []relay.Entry {
	t.Helper()
	list, err := relay.ReadJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// What can not be journaled is not sent; what was sent is journaled before.
func TestJournalComesFirst(t *testing.T) {
	var ops []string
	failing := ""
	g := newRig(t, &backend{}, relay.Config{Fault: func(op string) error {
		ops = append(ops, op)
		if op == failing {
			return errors.New("disk full")
		}
		return nil
	}})
	g.do(200, "LOCK", "", lockJSON("a"))
	for _, failing = range []string{"journal.write", "journal.sync", "journal.rename", "journal.dirsync"} {
		g.do(424, "POST", "?ID=a", state(1))
	}
	if s, _ := g.backend.has(); s != "" {
		t.Errorf("the backend has %q, want nothing that is not journaled", s)
	}
	failing, ops = "relay.post", nil
	g.do(424, "POST", "?ID=a", state(1))
	if got := strings.Join(ops, " "); got != "journal.write journal.sync journal.rename journal.dirsync relay.post" {
		t.Errorf("ops of a POST = %q", got)
	}
	if s, _ := g.backend.has(); s != "" || len(entries(t, g.journal)) == 0 {
		t.Errorf("the backend has %q, want nothing; the journal has %d entries", s, len(entries(t, g.journal)))
	}
	failing = ""
	g.do(200, "POST", "?ID=a", state(1))
	list := entries(t, g.journal)
	b, err := os.ReadFile(list[len(list)-1].Path)
	if err != nil || string(b) != state(1) {
		t.Errorf("the last journal entry is %q, %v", b, err)
	}
	if fi, err := os.Stat(list[0].Path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode of an entry = %v, %v, want 0600", fi.Mode(), err)
	}
}

func TestJournalKeepsTheNewest(t *testing.T) {
	dir := t.TempDir()
	j, err := relay.OpenJournal(dir, "run_1/x", nil)
	if err != nil {
		t.Fatal(err)
	}
	for n := range uint64(relay.JournalEntries + 5) {
		if err := j.Write(n, []byte(state(n))); err != nil {
			t.Fatal(err)
		}
	}
	list := entries(t, dir)
	if len(list) != relay.JournalEntries || list[0].Serial != 5 || list[0].RunID != "run-1-x" {
		t.Errorf("journal = %d entries from %+v, want %d from serial 5", len(list), list[0], relay.JournalEntries)
	}
}

// upstream is an Upstream of funcs: for patience, where time matters.
type upstream struct {
	get  func() ([]byte, error)
	post func() error
}

func (u upstream) Get(context.Context) ([]byte, error)        { return u.get() }
func (u upstream) Post(context.Context, string, []byte) error { return u.post() }
func (u upstream) Lock(context.Context, api.LockInfo) error   { return nil }
func (u upstream) Unlock(context.Context, api.LockInfo) error { return nil }

func TestPatience(t *testing.T) {
	t.Run("before first contact three tries", func(t *testing.T) {
		tries := 0
		g := newRig(t, &backend{}, relay.Config{Upstream: upstream{get: func() ([]byte, error) {
			tries++
			return nil, api.ErrUnreachable
		}}})
		g.do(424, "GET", "", "")
		if tries != 3 || api.ExitCode(g.relay.LastError()) != 5 {
			t.Errorf("%d tries, LastError() = %v, want 3 and ErrUnreachable", tries, g.relay.LastError())
		}
	})
	t.Run("after it until it is back", func(t *testing.T) {
		var events []tfhosts.Event
		tries := 0
		g := newRig(t, &backend{}, relay.Config{
			Events: func(e tfhosts.Event) { events = append(events, e) },
			Upstream: upstream{get: func() ([]byte, error) {
				if tries++; tries == 1 || tries > 30 {
					return []byte(state(1)), nil
				}
				return nil, api.ErrUnreachable
			}},
		})
		g.do(200, "GET", "", "")
		g.do(200, "GET", "", "")
		if tries != 31 || len(events) != 2 {
			t.Errorf("%d tries, %d events, want 31 tries, one event for going and one for coming back", tries, len(events))
		}
	})
	t.Run("after it not for ever", func(t *testing.T) {
		answered := false
		g := newRig(t, &backend{}, relay.Config{Patience: 50 * time.Millisecond, Upstream: upstream{get: func() ([]byte, error) {
			if !answered {
				answered = true
				return []byte(state(1)), nil
			}
			return nil, api.ErrUnavailable
		}}})
		g.do(200, "GET", "", "")
		g.do(424, "GET", "", "")
	})
	t.Run("an interrupt shortens it", func(t *testing.T) {
		away := make(chan struct{})
		once := sync.Once{}
		tries := 0
		g := newRig(t, &backend{}, relay.Config{InterruptedPatience: 30 * time.Millisecond, Upstream: upstream{get: func() ([]byte, error) {
			if tries++; tries == 1 {
				return []byte(state(1)), nil
			}
			once.Do(func() { close(away) })
			return nil, api.ErrUnreachable
		}}})
		g.do(200, "GET", "", "")
		done := make(chan struct{})
		go func() {
			defer close(done)
			<-away
			g.relay.Interrupted()
			g.relay.Interrupted()
		}()
		begin := time.Now()
		g.do(424, "GET", "", "")
		<-done
		if d := time.Since(begin); d > 5*time.Second {
			t.Errorf("gave up after %s, want about 30 ms", d)
		}
	})
}

func TestStrangersAreRefused(t *testing.T) {
	g := newRig(t, &backend{state: []byte(state(1))}, relay.Config{})
	good := g.ep
	if len(good.Password) < 32 || !strings.HasPrefix(good.Address, "http://127.0.0.1:") {
		t.Errorf("endpoint %q with a password of %d characters", good.Address, len(good.Password))
	}
	for _, c := range [][2]string{{"", ""}, {good.Username, ""}, {good.Username, "x"}, {"x", good.Password}} {
		g.ep.Username, g.ep.Password = c[0], c[1]
		for _, method := range []string{"GET", "POST", "LOCK", "UNLOCK"} {
			g.do(401, method, "", lockJSON("a"))
		}
	}
	g.ep = good
	g.ep.Address = strings.TrimSuffix(good.Address, "state")
	g.do(400, "GET", "other", "")
}

// A relay that starts again for a tofu that still lives has the same address
// and unlocks with what the backend holds.
func TestRelayStartsAgain(t *testing.T) {
	b := &backend{wholeLock: true}
	g := newRig(t, b, relay.Config{RunInfo: relay.RunInfo{RunID: "r1"}})
	g.do(200, "LOCK", "", lockJSON("a"))
	held, ok := g.relay.Held()
	if !ok {
		t.Fatal("Held() = false")
	}
	if err := g.relay.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	again := newRig(t, b, relay.Config{Port: g.ep.Port, Username: g.ep.Username, Password: g.ep.Password, Held: &held})
	if again.ep != g.ep {
		t.Errorf("endpoint = %+v, want %+v", again.ep, g.ep)
	}
	again.do(200, "POST", "?ID=a", state(1))
	again.do(200, "UNLOCK", "", lockJSON("a"))
	if _, holder := b.has(); holder != "" {
		t.Errorf("the backend's lock is %s, want none", holder)
	}
	var info relay.RunInfo
	if err := json.Unmarshal([]byte(held.Info), &info); err != nil || info.RunID != "r1" {
		t.Errorf("the lock's Info = %q, want the run's", held.Info)
	}
}

// Close does not wait for ever for a write that waits for the backend.
func TestCloseGivesUp(t *testing.T) {
	away := make(chan struct{})
	var once sync.Once
	r, ep := startRelay(t, relay.Config{
		RetryWaitMin: time.Hour, RetryWaitMax: time.Hour,
		Upstream: upstream{get: func() ([]byte, error) { return []byte(state(1)), nil }, post: func() error {
			once.Do(func() { close(away) })
			return api.ErrUnreachable
		}},
	})
	g := &rig{t: t, relay: r, ep: ep}
	g.do(200, "GET", "", "")
	posted := make(chan struct{})
	go func() {
		defer close(posted)
		req, err := http.NewRequest(http.MethodPost, ep.Address, strings.NewReader(state(2)))
		if err != nil {
			t.Error(err)
			return
		}
		req.SetBasicAuth(ep.Username, ep.Password)
		if resp, err := http.DefaultTransport.RoundTrip(req); err == nil {
			defer resp.Body.Close()
			t.Errorf("a POST that was given up = %d, want a broken connection", resp.StatusCode)
		}
	}()
	<-away
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	begin := time.Now()
	if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close() = %v, want the end of its context", err)
	}
	<-posted
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("Close() took %s", d)
	}
}
