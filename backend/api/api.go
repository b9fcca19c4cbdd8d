// Package api holds what a state server and its clients agree on: lock
// information, the errors of the protocol with their HTTP status and exit code,
// and the key of a state's working dir. It is pure.
//
// The protocol is that of OpenTofu's http backend: GET, POST (or the configured
// update method), LOCK, UNLOCK and DELETE on one address.
package api

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"strings"
	"time"
)

// ForceHeader set to "1" asks our own state server to take a POST that does not
// follow the stored state; it does so for an admin. Other servers ignore it.
const ForceHeader = "Tf-Hosts-Force"

// LockInfo is OpenTofu's lock information, field by field as it is on the wire.
type LockInfo struct {
	ID        string    `json:"ID"`
	Operation string    `json:"Operation"`
	Info      string    `json:"Info"`
	Who       string    `json:"Who"`
	Version   string    `json:"Version"`
	Created   time.Time `json:"Created"`
	Path      string    `json:"Path"`
}

// The errors of the protocol. Adapters wrap them; callers use errors.Is.
var (
	// ErrNotFound: no state was ever written under this name.
	ErrNotFound = errors.New("no state")
	// ErrGone: a state existed and is missing, damaged or deleted.
	ErrGone = errors.New("state is lost")
	// ErrLocked: another lock is held. Servers send the holder along.
	ErrLocked = errors.New("state is locked")
	// ErrNotLocked: an unlock or a write names a lock that is not held.
	ErrNotLocked = errors.New("lock is not held")
	// ErrStale: other lineage, or a serial that does not move forward.
	ErrStale = errors.New("state does not follow the stored one")
	// ErrBadRequest: a body that is no state or lock, or a wrong Content-MD5.
	ErrBadRequest = errors.New("bad request")
	// ErrTooLarge: the state is over the server's limit.
	ErrTooLarge = errors.New("state is too large")
	// ErrUnauthorized: no credentials, or wrong ones.
	ErrUnauthorized = errors.New("credentials are required")
	// ErrForbidden: the credentials do not allow this name.
	ErrForbidden = errors.New("access is denied")
	// ErrUnavailable: the server is there and can not answer now.
	ErrUnavailable = errors.New("state server is unavailable")
	// ErrUnreachable: no server answered at all.
	ErrUnreachable = errors.New("state server is unreachable")
	// ErrRedirect: the server answered with a 3xx, which is never followed: a
	// redirected POST becomes a GET and the state is lost without a word.
	ErrRedirect = errors.New("state server redirects")
	// ErrNoState: the answer is neither a state nor its absence, as an HTML page.
	ErrNoState = errors.New("answer is no state")
	// ErrTLS: the server's certificate is not trusted or does not match.
	ErrTLS = errors.New("TLS error")
)

type row struct {
	err    error
	status int
	exit   int
}

// table maps sentinel ↔ status ↔ exit code. The first row of a status is the
// sentinel that a client reads from it.
func table() []row {
	return []row{
		{ErrNotFound, http.StatusNotFound, 3},
		{ErrGone, http.StatusGone, 3},
		{ErrLocked, http.StatusLocked, 4},
		{ErrNotLocked, http.StatusConflict, 4},
		{ErrStale, http.StatusPreconditionFailed, 7},
		{ErrBadRequest, http.StatusBadRequest, 1},
		{ErrTooLarge, http.StatusRequestEntityTooLarge, 7},
		{ErrUnauthorized, http.StatusUnauthorized, 1},
		{ErrForbidden, http.StatusForbidden, 1},
		{ErrUnavailable, http.StatusServiceUnavailable, 5},
		{ErrUnreachable, 0, 5},
		{ErrRedirect, 0, 1},
		{ErrNoState, 0, 1},
		{ErrTLS, 0, 1},
	}
}

// Status is the HTTP status for err: that of the sentinel it wraps, else 500.
func Status(err error) int {
	for _, r := range table() {
		if r.status != 0 && errors.Is(err, r.err) {
			return r.status
		}
	}
	return http.StatusInternalServerError
}

// FromStatus is the sentinel for a status, or nil for 200, 201 and 204. 3xx is
// ErrRedirect; 429 and 5xx are ErrUnavailable, but 501, which no repetition
// changes, and any other status are ErrBadRequest.
func FromStatus(status int) error {
	switch {
	case status == http.StatusOK || status == http.StatusCreated || status == http.StatusNoContent:
		return nil
	case status >= 300 && status < 400:
		return ErrRedirect
	case status == http.StatusTooManyRequests || status >= 500 && status != http.StatusNotImplemented:
		return ErrUnavailable
	}
	for _, r := range table() {
		if r.status == status {
			return r.err
		}
	}
	return ErrBadRequest
}

// ExitCode is the program's exit code for err, or 1 where no sentinel fits.
func ExitCode(err error) int {
	for _, r := range table() {
		if errors.Is(err, r.err) {
			return r.exit
		}
	}
	return 1
}

// StateKey is the name of the working dir for a configured backend address
// (FR-012): each of / : ? & = # @ and blank is replaced by _. A key over 200
// bytes is cut and ends in a hash of the whole address.
func StateKey(address string) string {
	key := strings.Map(func(r rune) rune {
		if strings.ContainsRune("/:?&=#@ ", r) {
			return '_'
		}
		return r
	}, address)
	if len(key) <= 200 {
		return key
	}
	sum := sha256.Sum256([]byte(address))
	return key[:200-33] + "_" + hex.EncodeToString(sum[:16])
}
