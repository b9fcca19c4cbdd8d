package server

import (
	"bytes"
	"crypto/md5"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/store"
)

// ForceHeader set to 1 by an admin lifts the guard of a POST: other lineage,
// lower serial, or a state that is lost. It is logged.
const ForceHeader = api.ForceHeader

func (s *Server) get(c *call) {
	st, err := s.cfg.Store.Get(c.r.Context(), c.name)
	if err != nil {
		s.error(c, err)
		return
	}
	c.Header().Set("Content-MD5", contentMD5(st.Body))
	c.body(http.StatusOK, st.Body)
}

// post stores a state. The order of the checks is that of the rules: form
// (SRV5), lock (SRV4), lineage and serial (SRV6, SRV8).
func (s *Server) post(c *call) {
	body, err := s.read(c, s.cfg.MaxBytes)
	if err != nil {
		s.error(c, err)
		return
	}
	meta, err := api.ParseMeta(body)
	if err != nil {
		s.error(c, fmt.Errorf("%w: %w", api.ErrBadRequest, err))
		return
	}
	force := c.user.admin && c.r.Header.Get(ForceHeader) == "1"
	err = s.cfg.Store.Update(c.r.Context(), c.name, func(tx store.Tx) error {
		if err := s.checkLock(tx, c.r.URL.Query().Get("ID"), s.cfg.AllowUnlockedWrites); err != nil {
			return err
		}
		if err := checkFollows(tx, meta, body); err != nil {
			if !force {
				return err
			}
			s.cfg.Logger.Warn("guard overridden", "name", c.name, "user", c.user.name, "remote", c.r.RemoteAddr,
				"serial", meta.Serial, "reason", err)
		}
		return tx.PutState(meta, body)
	})
	if err != nil {
		s.error(c, err)
		return
	}
	c.body(http.StatusOK, nil)
}

// checkLock is SRV4: who may write.
func (s *Server) checkLock(tx store.Tx, id string, unlockedOK bool) error {
	l, err := tx.Lock()
	if err != nil {
		return err
	}
	switch {
	case l.Holder != nil && l.Holder.ID != id:
		return &api.LockedError{Holder: *l.Holder}
	case l.Holder == nil && id != "":
		return fmt.Errorf("%w: the lock %q was lost or released", api.ErrNotLocked, id)
	case l.Holder == nil && !unlockedOK:
		return fmt.Errorf("%w: a write needs a lock", api.ErrNotLocked)
	}
	return nil
}

// checkFollows is SRV6: same lineage and a higher serial, or the same bytes
// again, which a client sends when it lost the answer.
func checkFollows(tx store.Tx, meta api.Meta, body []byte) error {
	old, err := tx.State()
	if errors.Is(err, api.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	switch {
	case meta.Lineage != old.Lineage:
		return fmt.Errorf("%w: lineage %q is stored, %q was sent", api.ErrStale, old.Lineage, meta.Lineage)
	case meta.Serial > old.Serial, meta.Serial == old.Serial && bytes.Equal(body, old.Body):
		return nil
	case meta.Serial == old.Serial:
		return fmt.Errorf("%w: another state with serial %d is stored", api.ErrStale, old.Serial)
	}
	return fmt.Errorf("%w: serial %d is stored, %d was sent", api.ErrStale, old.Serial, meta.Serial)
}

// remove is SRV11: by the holder, or by anyone while there is no lock.
func (s *Server) remove(c *call) {
	err := s.cfg.Store.Update(c.r.Context(), c.name, func(tx store.Tx) error {
		if err := s.checkLock(tx, c.r.URL.Query().Get("ID"), true); err != nil {
			return err
		}
		if _, err := tx.State(); errors.Is(err, api.ErrNotFound) || errors.Is(err, api.ErrGone) {
			return err
		}
		return tx.Delete()
	})
	if err != nil {
		s.error(c, err)
		return
	}
	c.body(http.StatusOK, nil)
}

func (s *Server) versions(c *call) {
	if c.sub == "versions" {
		list, err := s.cfg.Store.Versions(c.r.Context(), c.name)
		if err != nil {
			s.error(c, err)
			return
		}
		if list == nil {
			list = []store.Version{}
		}
		c.json(http.StatusOK, list)
		return
	}
	serial, err := strconv.ParseUint(strings.TrimPrefix(c.sub, "versions/"), 10, 64)
	if err != nil {
		s.error(c, fmt.Errorf("%w: a version is a serial", api.ErrBadRequest))
		return
	}
	body, err := s.cfg.Store.Version(c.r.Context(), c.name, serial)
	if err != nil {
		s.error(c, err)
		return
	}
	c.Header().Set("Content-MD5", contentMD5(body))
	c.body(http.StatusOK, body)
}

// read reads a request body up to limit bytes and checks its Content-MD5.
func (s *Server) read(c *call, limit int64) ([]byte, error) {
	if c.r.ContentLength > limit {
		return nil, fmt.Errorf("%w: the limit is %d bytes", api.ErrTooLarge, limit)
	}
	body, err := io.ReadAll(io.LimitReader(c.r.Body, limit+1))
	if err != nil {
		return nil, fmt.Errorf("%w: reading body: %w", api.ErrBadRequest, err)
	}
	if int64(len(body)) > limit {
		return nil, fmt.Errorf("%w: the limit is %d bytes", api.ErrTooLarge, limit)
	}
	if want := c.r.Header.Get("Content-MD5"); want != "" && want != contentMD5(body) {
		return nil, fmt.Errorf("%w: the body does not have the announced Content-MD5", api.ErrBadRequest)
	}
	return body, nil
}

// contentMD5 guards against damage on the way, not against an attacker; the
// protocol has no other digest.
func contentMD5(b []byte) string {
	sum := md5.Sum(b)
	return base64.StdEncoding.EncodeToString(sum[:])
}

// error answers with err and logs what has no sentinel, whose text the client
// does not get: it may name files of this machine.
func (s *Server) error(c *call, err error) {
	if api.Status(err) == http.StatusInternalServerError {
		s.cfg.Logger.Error("internal error", "name", c.name, "method", c.r.Method, "error", err)
		c.fail(http.StatusInternalServerError, "internal error; see the log of the state server")
		return
	}
	c.error(err)
}
