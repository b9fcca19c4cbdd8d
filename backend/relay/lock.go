package relay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

func (r *Relay) lock(w http.ResponseWriter, req *http.Request, body []byte) {
	info, ok := api.ParseHolder(body)
	if !ok {
		r.refuse(w, req, fmt.Errorf("%w: lock information without an ID", api.ErrBadRequest))
		return
	}
	if held, ok := r.Held(); ok && held.ID == info.ID {
		answer(w, http.StatusOK, nil)
		return
	}
	if info.Info == "" {
		raw, err := json.Marshal(r.cfg.RunInfo)
		if err != nil {
			r.refuse(w, req, err)
			return
		}
		info.Info = string(raw)
	}
	out := r.take(req.Context(), info)
	if out.err != nil {
		var locked *api.LockedError
		r.mu.Lock()
		r.holder = nil
		if errors.As(out.err, &locked) && locked.Holder.ID != "" {
			holder := locked.Holder
			r.holder = &holder
		}
		r.mu.Unlock()
		r.refuse(w, req, out.err)
		return
	}
	r.locked(info)
	r.mu.Lock()
	r.stats.Locks++
	r.mu.Unlock()
	answer(w, http.StatusOK, nil)
}

// take locks the upstream. A conflict with our own ID is our lock if an answer
// was lost; else the server repeats what it was sent and does not tell who holds
// the lock. The end of ctx ends the waiting and cuts no request off: a lock that
// is taken for a tofu that died must be known, or nobody gives it back.
func (r *Relay) take(ctx context.Context, info api.LockInfo) outcome {
	out := r.try(ctx, opLock, func(context.Context) error { return r.cfg.Upstream.Lock(r.base, info) })
	var locked *api.LockedError
	if errors.As(out.err, &locked) && locked.Holder.ID == info.ID {
		out.err = &api.LockedError{}
		if out.doubtful {
			out.err = nil
		}
	}
	return out
}

func (r *Relay) unlock(w http.ResponseWriter, req *http.Request, body []byte) {
	info, ok := api.ParseHolder(body)
	if !ok {
		r.refuse(w, req, fmt.Errorf("%w: lock information without an ID", api.ErrBadRequest))
		return
	}
	ctx := r.base
	held, ours := r.Held()
	ours = ours && held.ID == info.ID
	var err error
	if ours {
		err = r.release(ctx)
	} else {
		err = r.forceUnlock(ctx, info)
	}
	if err != nil {
		r.refuse(w, req, err)
		return
	}
	r.mu.Lock()
	r.stats.Unlocks++
	r.mu.Unlock()
	answer(w, http.StatusOK, nil)
}

// Release releases the lock that tofu took through the relay and left behind,
// with the lock information that the upstream has. Without one it does nothing.
// It waits for a request in flight; see Settle.
func (r *Relay) Release(ctx context.Context) error {
	if err := r.Settle(ctx); err != nil {
		return err
	}
	return r.release(ctx)
}

// Settle waits until no POST, LOCK or UNLOCK is in flight. A tofu that was killed
// leaves a lock on its way, of which Held does not know yet, or a state, which
// must arrive under the lock.
func (r *Relay) Settle(ctx context.Context) error {
	select {
	case r.writes <- struct{}{}:
		<-r.writes
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for what tofu had asked of the state backend: %w", ctx.Err())
	}
}

func (r *Relay) release(ctx context.Context) error {
	held, ok := r.Held()
	if !ok {
		return nil
	}
	unlock := func(ctx context.Context) error { return r.cfg.Upstream.Unlock(ctx, held) }
	out := r.try(ctx, opUnlock, unlock)
	if errors.Is(out.err, api.ErrNotLocked) && !errors.Is(out.err, api.ErrLocked) && !out.doubtful {
		// Nobody has another lock, and this one was never given back: ask again
		// before it is left for good.
		out = r.try(ctx, opUnlock, unlock)
	}
	if out.doubtful && errors.Is(out.err, api.ErrBadRequest) {
		out.err = nil // nimbolus' answer to the repetition
	}
	if errors.Is(out.err, api.ErrNotLocked) {
		if !out.doubtful {
			r.event(tfhosts.EventWarning, opUnlock, "the lock %q was already gone from the state backend", held.ID)
		}
		out.err = nil
	}
	if out.err != nil {
		return out.err
	}
	r.mu.Lock()
	r.held = nil
	r.mu.Unlock()
	return nil
}

// forceUnlock releases a lock of which tofu knows only the ID. Where that is
// not enough for the server, it learns the holder from a refused LOCK.
func (r *Relay) forceUnlock(ctx context.Context, info api.LockInfo) error {
	unlock := func(info api.LockInfo) outcome {
		return r.try(ctx, opUnlock, func(ctx context.Context) error { return r.cfg.Upstream.Unlock(ctx, info) })
	}
	out := unlock(info)
	switch {
	case out.err == nil, out.doubtful && errors.Is(out.err, api.ErrNotLocked):
		return nil
	case !lostLock(out.err):
		return out.err
	}
	raw, err := json.Marshal(r.cfg.RunInfo)
	if err != nil {
		return err
	}
	trial := client.NewLockInfo("force-unlock", string(raw))
	taken := r.try(ctx, opLock, func(ctx context.Context) error { return r.cfg.Upstream.Lock(ctx, trial) })
	var locked *api.LockedError
	switch {
	case taken.err == nil:
		if err := unlock(trial).err; err != nil {
			return err
		}
		return fmt.Errorf("%w: nobody holds %q", api.ErrNotLocked, info.ID)
	case errors.As(taken.err, &locked) && locked.Holder.ID == info.ID:
		r.event(tfhosts.EventNotice, opUnlock, "releasing the lock of %q", locked.Holder.Who)
		return unlock(locked.Holder).err
	}
	return out.err
}
