package server

import (
	"fmt"
	"net/http"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/store"
)

// maxLockBytes is far over any LockInfo, whose Info may be a JSON document.
const maxLockBytes = 64 << 10

// lock is SRV1 and SRV2. An ID that was just released is refused: it is a
// request that came late, and its owner believes it has no lock any more.
func (s *Server) lock(c *call) {
	body, err := s.read(c, maxLockBytes)
	if err != nil {
		s.error(c, err)
		return
	}
	info, ok := api.ParseHolder(body)
	if !ok || len(info.ID) > 256 {
		s.error(c, fmt.Errorf("%w: lock information with an ID is expected", api.ErrBadRequest))
		return
	}
	err = s.cfg.Store.Update(c.r.Context(), c.name, func(tx store.Tx) error {
		l, err := tx.Lock()
		switch {
		case err != nil:
			return err
		case l.Holder != nil && l.Holder.ID == info.ID:
			return nil
		case l.Holder != nil:
			return &api.LockedError{Holder: *l.Holder}
		case l.Released == info.ID:
			return fmt.Errorf("%w: the lock %q was released", api.ErrNotLocked, info.ID)
		}
		return tx.PutLock(store.Lock{Holder: &info, Released: l.Released})
	})
	if err != nil {
		s.error(c, err)
		return
	}
	c.body(http.StatusOK, nil)
}

// unlock is SRV3: the ID decides alone, so that "force-unlock ID", which knows
// nothing else, works. Terraform's force-unlock sends no ID at all and is
// refused; an admin may release any lock with ?force=1.
func (s *Server) unlock(c *call) {
	body, err := s.read(c, maxLockBytes)
	if err != nil {
		s.error(c, err)
		return
	}
	query := c.r.URL.Query()
	id := query.Get("ID")
	if info, ok := api.ParseHolder(body); ok {
		id = info.ID
	} else if len(body) > 0 {
		s.error(c, fmt.Errorf("%w: lock information with an ID is expected", api.ErrBadRequest))
		return
	}
	force := c.user.admin && query.Get("force") == "1"
	err = s.cfg.Store.Update(c.r.Context(), c.name, func(tx store.Tx) error {
		l, err := tx.Lock()
		switch {
		case err != nil:
			return err
		case l.Holder == nil && id != "" && id == l.Released:
			return nil
		case l.Holder == nil:
			return fmt.Errorf("%w: the state is not locked", api.ErrNotLocked)
		case l.Holder.ID == id:
		case force:
			s.cfg.Logger.Warn("lock released by force", "name", c.name, "user", c.user.name, "remote", c.r.RemoteAddr,
				"id", l.Holder.ID, "who", l.Holder.Who)
		case id == "":
			return fmt.Errorf("%w: an unlock needs the lock's ID", api.ErrNotLocked)
		default:
			return &wrongLockError{holder: *l.Holder}
		}
		return tx.PutLock(store.Lock{Released: l.Holder.ID})
	})
	if wrong, ok := err.(*wrongLockError); ok { //nolint:errorlint // made ten lines above, never wrapped
		c.json(http.StatusConflict, wrong.holder)
		return
	}
	if err != nil {
		s.error(c, err)
		return
	}
	c.body(http.StatusOK, nil)
}

// wrongLockError: an unlock names another lock than the one held; 409 with the
// holder.
type wrongLockError struct{ holder api.LockInfo }

func (e *wrongLockError) Error() string { return "another lock is held" }

func (s *Server) holder(c *call) {
	l, err := s.cfg.Store.Lock(c.r.Context(), c.name)
	if err != nil {
		s.error(c, err)
		return
	}
	if l.Holder == nil {
		c.WriteHeader(http.StatusNoContent)
		return
	}
	c.json(http.StatusOK, l.Holder)
}
