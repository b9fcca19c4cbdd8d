package relay

import (
	"crypto/md5"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

// serve answers tofu. tofu repeats what fails with 429 or 5xx: the relay has
// done all the waiting there is, so its failures carry other statuses.
func (r *Relay) serve(w http.ResponseWriter, req *http.Request) {
	if !r.authorized(req) {
		w.Header().Set("WWW-Authenticate", `Basic realm="tf-hosts relay"`)
		answer(w, http.StatusUnauthorized, nil)
		return
	}
	if req.URL.Path != "/state" {
		answer(w, http.StatusBadRequest, nil) // 404 would mean "no state"
		return
	}
	switch req.Method {
	case http.MethodGet:
		r.get(w, req)
	case http.MethodPost:
		r.exclusive(w, req, r.post)
	case "LOCK":
		r.exclusive(w, req, r.lock)
	case "UNLOCK":
		r.exclusive(w, req, r.unlock)
	default:
		answer(w, http.StatusMethodNotAllowed, nil)
	}
}

func (r *Relay) authorized(req *http.Request) bool {
	name, pass, _ := req.BasicAuth()
	got, want := sha256.Sum256([]byte(name+"\x00"+pass)), sha256.Sum256([]byte(r.ep.Username+"\x00"+r.ep.Password))
	return subtle.ConstantTimeCompare(got[:], want[:]) == 1
}

func (r *Relay) exclusive(w http.ResponseWriter, req *http.Request, fn func(http.ResponseWriter, *http.Request, []byte)) {
	body, err := io.ReadAll(io.LimitReader(req.Body, r.cfg.MaxBytes+1))
	switch {
	case err != nil:
		r.refuse(w, req, fmt.Errorf("%w: reading from tofu: %w", api.ErrBadRequest, err))
		return
	case int64(len(body)) > r.cfg.MaxBytes:
		r.refuse(w, req, fmt.Errorf("%w: over %d bytes", api.ErrTooLarge, r.cfg.MaxBytes))
		return
	}
	if want := req.Header.Get("Content-MD5"); want != "" && want != contentMD5(body) {
		r.refuse(w, req, fmt.Errorf("%w: tofu's body does not have the announced Content-MD5", api.ErrBadRequest))
		return
	}
	r.writes <- struct{}{}
	defer func() { <-r.writes }()
	fn(w, req, body)
}

// refuse passes a failure on to tofu and remembers it.
func (r *Relay) refuse(w http.ResponseWriter, req *http.Request, err error) {
	r.record(err)
	var locked *api.LockedError
	if req.Method == "LOCK" && errors.As(err, &locked) {
		// tofu polls on -lock-timeout only if the body has an ID.
		var body []byte
		if locked.Holder.ID != "" {
			body, _ = json.Marshal(locked.Holder) // a plain struct
		}
		answer(w, http.StatusLocked, body)
		return
	}
	status := api.Status(err)
	if away(err) || status >= 500 || status == http.StatusUnauthorized || status == http.StatusForbidden || status == http.StatusNotFound {
		// Not 401 and 403 either: tofu would blame the credentials of the relay.
		status = http.StatusFailedDependency
	}
	if !errors.Is(err, api.ErrLocked) {
		r.event(tfhosts.EventWarning, opOf(req.Method), "%v", err)
	}
	answer(w, status, nil)
}

func opOf(method string) string {
	switch method {
	case http.MethodGet:
		return opGet
	case http.MethodPost:
		return opPost
	case "LOCK":
		return opLock
	}
	return opUnlock
}

func answer(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

func contentMD5(b []byte) string {
	sum := md5.Sum(b)
	return base64.StdEncoding.EncodeToString(sum[:])
}
