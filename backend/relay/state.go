package relay

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

// Op names of the relay.
const (
	opGet    = "relay.get"
	opPost   = "relay.post"
	opLock   = "relay.lock"
	opUnlock = "relay.unlock"
)

func (r *Relay) get(w http.ResponseWriter, req *http.Request) {
	body, err := r.fetch(req.Context())
	if errors.Is(err, api.ErrNotFound) {
		answer(w, http.StatusNotFound, nil)
		return
	}
	if err != nil {
		r.refuse(w, req, err)
		return
	}
	w.Header().Set("Content-MD5", contentMD5(body))
	answer(w, http.StatusOK, body)
}

// fetch gets the state and remembers it. A state that was there in this run and
// is not any more is api.ErrGone, never "no state".
func (r *Relay) fetch(ctx context.Context) ([]byte, error) {
	var body []byte
	out := r.try(ctx, opGet, func(ctx context.Context) (err error) {
		body, err = r.cfg.Upstream.Get(ctx)
		return err
	})
	if errors.Is(out.err, api.ErrNotFound) {
		if _, seen := r.LastState(); seen && !r.cfg.AllowRewind {
			return nil, fmt.Errorf("%w: the backend had a state in this run and says now that there is none", api.ErrGone)
		}
	}
	if out.err != nil {
		return nil, out.err
	}
	meta, err := api.ParseMeta(body)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", api.ErrNoState, err)
	}
	if err := r.checkGet(meta); err != nil {
		return nil, err
	}
	r.saw(body, meta)
	r.mu.Lock()
	r.stats.Gets++
	r.stats.BytesDown += int64(len(body))
	r.mu.Unlock()
	return body, nil
}

// post journals, forwards and acknowledges. It goes on when tofu has died: the
// state is true all the same.
func (r *Relay) post(w http.ResponseWriter, req *http.Request, body []byte) {
	meta, err := api.ParseMeta(body)
	if err != nil {
		r.refuse(w, req, fmt.Errorf("%w: %w", api.ErrBadRequest, err))
		return
	}
	begin := time.Now()
	err = r.journal.Write(meta.Serial, body)
	r.mu.Lock()
	r.stats.Journal += time.Since(begin)
	r.mu.Unlock()
	if err != nil {
		r.refuse(w, req, err)
		return
	}
	if err := r.checkPost(meta, body); err != nil {
		r.refuse(w, req, err)
		return
	}
	if err := r.forward(r.base, req.URL.Query().Get("ID"), body); err != nil {
		r.refuse(w, req, err)
		return
	}
	r.saw(body, meta)
	r.mu.Lock()
	r.stats.Posts++
	r.stats.BytesUp += int64(len(body))
	r.mu.Unlock()
	answer(w, http.StatusOK, nil)
}

// forward posts until the upstream has body, or says for good that it will not
// take it.
func (r *Relay) forward(ctx context.Context, id string, body []byte) error {
	send := func() outcome {
		return r.try(ctx, opPost, func(ctx context.Context) error { return r.cfg.Upstream.Post(ctx, id, body) })
	}
	fives := 0
	out := r.try(ctx, opPost, func(ctx context.Context) error {
		err := r.cfg.Upstream.Post(ctx, id, body)
		var st *client.StatusError
		if errors.As(err, &st) && st.Status == http.StatusInternalServerError {
			if fives++; fives == fivesOfLostLock {
				return r.checkLock(ctx, id, err)
			}
		}
		return err
	})
	if out.err == nil || away(out.err) {
		return out.err
	}
	if errors.Is(out.err, errTakenAgain) {
		if done, err := r.unchanged(ctx, body); done || err != nil {
			return err
		}
		return send().err
	}
	// An answer was lost and the repetition refused, as by a server that takes
	// each serial once: it may be there.
	if out.doubtful && r.stored(ctx, body) {
		return nil
	}
	if !lostLock(out.err) {
		return out.err
	}
	held, ok := r.Held()
	if !ok || held.ID != id {
		return out.err
	}
	done, err := r.relock(ctx, held, body)
	var locked *api.LockedError
	switch {
	case errors.As(err, &locked) && locked.Holder.ID == "":
		// The lock was never lost, or an operator released it: the refusal stands.
		return out.err
	case err != nil:
		return fmt.Errorf("%w (after: %s)", err, out.err.Error())
	case done:
		return nil
	}
	return send().err
}

// fivesOfLostLock: GitLab answers 500 to a write under a lock that it does not
// know, as to everything that goes wrong in it. After so many the lock is looked
// at.
const fivesOfLostLock = 3

var errTakenAgain = errors.New("the lock was gone and is taken again")

// checkLock asks a server that is not idempotent for the lock id: it refuses
// while that is held, and then why, its failure of a write, stands.
func (r *Relay) checkLock(ctx context.Context, id string, why error) error {
	held, ok := r.Held()
	if !ok || held.ID != id {
		return why
	}
	if err := r.cfg.Upstream.Lock(ctx, held); err != nil {
		return why
	}
	return errTakenAgain
}

// lostLock: the answers of servers to a write under a lock that they do not
// know (nimbolus: 400).
func lostLock(err error) bool {
	return errors.Is(err, api.ErrNotLocked) || errors.Is(err, api.ErrBadRequest) || errors.Is(err, api.ErrLocked)
}

// stored says whether the upstream holds body now.
func (r *Relay) stored(ctx context.Context, body []byte) bool {
	var got []byte
	out := r.try(ctx, opGet, func(ctx context.Context) (err error) {
		got, err = r.cfg.Upstream.Get(ctx)
		return err
	})
	return out.err == nil && sameState(got, body)
}

// relock takes the lock again that the upstream lost, as one that keeps locks
// in memory does when it restarts. It is safe only if nobody wrote meanwhile:
// the state must be the one that was last acknowledged, or (done) body itself.
func (r *Relay) relock(ctx context.Context, held api.LockInfo, body []byte) (done bool, err error) {
	out := r.take(ctx, held)
	if out.err != nil {
		return false, fmt.Errorf("taking the lock again: %w", out.err)
	}
	return r.unchanged(ctx, body)
}

// unchanged is what makes a lock that was taken again as good as the first one.
func (r *Relay) unchanged(ctx context.Context, body []byte) (done bool, err error) {
	var got []byte
	out := r.try(ctx, opGet, func(ctx context.Context) (err error) {
		got, err = r.cfg.Upstream.Get(ctx)
		return err
	})
	last, seen := r.LastState()
	switch {
	case errors.Is(out.err, api.ErrNotFound) && !seen:
	case errors.Is(out.err, api.ErrNotFound):
		return false, fmt.Errorf("%w: the backend came back without its state", api.ErrGone)
	case out.err != nil:
		return false, out.err
	case sameState(got, body):
		done = true
	case !seen || !sameState(got, last):
		return false, fmt.Errorf("%w: the backend lost the lock and another wrote the state", api.ErrStale)
	}
	r.mu.Lock()
	r.stats.Recovered++
	r.mu.Unlock()
	r.event(tfhosts.EventWarning, opLock, "the state backend lost the lock; it is taken again, the state is unchanged")
	return done, nil
}
