// Package foreigntest is state servers that are not ours, for tests: one with
// the rules of GitLab and one with those of nimbolus/terraform-backend, and in
// front of any server a script of faults and a listener that can be cut off.
//
// It exists because neither server can be made to lose an answer, to forget its
// locks or to redirect on command. The rules are those of their sources, as read
// in gitlabhq/gitlabhq lib/api/terraform/state.rb (18.x) and
// nimbolus/terraform-backend af06f2c; what a server of that name does beyond
// them is not here. It keeps everything in memory and is never part of the
// program.
//
//	host := foreigntest.NewHost(tb, foreigntest.Keep(foreigntest.NewGitLab("ann")))
//	host.Fault(foreigntest.Post, foreigntest.Fault{DropAfter: true})
package foreigntest

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
)

// Forgetful is a server that can lose its locks, as one that keeps them in
// memory does when it restarts.
type Forgetful interface {
	http.Handler
	Forget()
}

// GitLab serves one state at any address, its lock at ADDRESS/lock: POST locks,
// DELETE unlocks.
//   - A lock is refused while one is held, also to its own ID. The 409 has the
//     holder's ID, login and time, and the requester's Operation, Info, Version
//     and Path.
//   - An unlock with another ID is 409, without an ID it always succeeds.
//   - A write under another lock than the one held, or under one while none is,
//     is 500: the error of its service has no handler in the API.
//   - A state needs a serial (422), each serial is taken once (422), a GET gives
//     the highest one. There is no look at the lineage.
type GitLab struct {
	login string

	mu     sync.Mutex
	exists bool
	states map[uint64][]byte
	holder *api.LockInfo
}

// NewGitLab makes one with whose locks the login is shown.
func NewGitLab(login string) *GitLab {
	return &GitLab{login: login, states: map[uint64][]byte{}}
}

// Forget drops the lock; a GitLab keeps it in its database, but people release
// it in the web interface.
func (g *GitLab) Forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.holder = nil
}

func (g *GitLab) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	lock := strings.HasSuffix(r.URL.Path, "/lock")
	switch {
	case lock && r.Method == http.MethodPost:
		g.lock(w, body)
	case lock && r.Method == http.MethodDelete:
		g.unlock(w, body)
	case r.Method == http.MethodGet && !lock:
		g.get(w)
	case r.Method == http.MethodPost:
		g.post(w, r.URL.Query().Get("ID"), body)
	default:
		w.WriteHeader(http.StatusMethodNotAllowed)
	}
}

func (g *GitLab) lock(w http.ResponseWriter, body []byte) {
	info, ok := api.ParseHolder(body)
	if !ok {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	g.exists = true
	status := http.StatusConflict
	if g.holder == nil {
		g.holder = &api.LockInfo{ID: info.ID, Who: g.login, Created: time.Now().UTC()}
		status = http.StatusOK
	}
	info.ID, info.Who, info.Created = g.holder.ID, g.holder.Who, g.holder.Created
	writeJSON(w, status, info)
}

func (g *GitLab) unlock(w http.ResponseWriter, body []byte) {
	info, ok := api.ParseHolder(body)
	if ok && (g.holder == nil || g.holder.ID != info.ID) {
		w.WriteHeader(http.StatusConflict)
		return
	}
	g.holder = nil
	w.WriteHeader(http.StatusOK)
}

func (g *GitLab) get(w http.ResponseWriter) {
	var last []byte
	var highest uint64
	for serial, state := range g.states {
		if last == nil || serial > highest {
			last, highest = state, serial
		}
	}
	switch {
	case last != nil:
		w.Write(last) //nolint:errcheck // the client may be gone
	case g.exists: // by a lock
		w.WriteHeader(http.StatusNoContent)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

func (g *GitLab) post(w http.ResponseWriter, id string, body []byte) {
	held := ""
	if g.holder != nil {
		held = g.holder.ID
	}
	var state struct{ Serial *uint64 }
	switch err := json.Unmarshal(body, &state); {
	case len(body) == 0:
		w.WriteHeader(http.StatusNoContent)
	case err != nil || state.Serial == nil:
		w.WriteHeader(http.StatusUnprocessableEntity)
	case id != held:
		w.WriteHeader(http.StatusInternalServerError)
	case g.states[*state.Serial] != nil:
		w.WriteHeader(http.StatusUnprocessableEntity)
	default:
		g.exists, g.states[*state.Serial] = true, body
		w.WriteHeader(http.StatusOK)
	}
}

// Nimbolus serves a state for each pair of user and password: a wrong password
// is another, empty state. LOCK and UNLOCK go to the state's address.
//   - A lock is given again to the same lock information, 423 with the holder's
//     to any other.
//   - An unlock compares all fields and is 400 otherwise, also for one of
//     which the client knows the ID alone, and where nothing is locked.
//   - A write without a lock or under another one is 400. There is no look at
//     serial, lineage or form.
//   - The locks are in memory.
type Nimbolus struct {
	mu     sync.Mutex
	states map[string][]byte
	locks  map[string]api.LockInfo
}

// NewNimbolus makes one.
func NewNimbolus() *Nimbolus {
	return &Nimbolus{states: map[string][]byte{}, locks: map[string]api.LockInfo{}}
}

// Forget drops all locks, as a restart does.
func (n *Nimbolus) Forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.locks = map[string]api.LockInfo{}
}

func (n *Nimbolus) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		return
	}
	user, password, _ := r.BasicAuth()
	key := r.URL.Path + "\x00" + user + "\x00" + password
	n.mu.Lock()
	defer n.mu.Unlock()
	holder, held := n.locks[key]
	info, ok := api.ParseHolder(body)
	same := held && holder.Created.Equal(info.Created)
	if same {
		info.Created = holder.Created
		same = info == holder
	}
	switch r.Method {
	case http.MethodGet:
		state, ok := n.states[key]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Write(state) //nolint:errcheck // the client may be gone
	case http.MethodPost:
		if !held || holder.ID != r.URL.Query().Get("ID") {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		n.states[key] = body
	case "LOCK":
		switch {
		case !ok:
			w.WriteHeader(http.StatusBadRequest)
		case held && !same:
			writeJSON(w, http.StatusLocked, holder)
		default:
			n.locks[key] = info
		}
	case "UNLOCK":
		if !same {
			if held {
				info = holder
			}
			writeJSON(w, http.StatusBadRequest, info)
			return
		}
		delete(n.locks, key)
	default:
		w.WriteHeader(http.StatusNotImplemented)
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) //nolint:errcheck // the client may be gone
}
