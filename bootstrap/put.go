package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/relay"
)

// unlockTime bounds an unlock after an interrupt or an error.
const unlockTime = 30 * time.Second

// put stores body under the lock, where upstream must still hold base (nil:
// nothing), and reads it back. The ops are op.lock, op.get, op.post, op.verify
// and op.unlock.
func (s *session) put(ctx context.Context, upstream relay.Upstream, op string, body, base []byte) (err error) {
	info := client.NewLockInfo(op, s.lockInfo())
	if err := s.fault(op + ".lock"); err != nil {
		return err
	}
	if err := upstream.Lock(ctx, info); err != nil {
		return lockedError(err)
	}
	defer func() {
		if ferr := s.fault(op + ".unlock"); ferr != nil {
			err = errors.Join(err, ferr)
			return
		}
		unlock, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockTime)
		defer cancel()
		if uerr := upstream.Unlock(unlock, info); uerr != nil {
			err = errors.Join(err, fmt.Errorf("releasing the lock: %w", uerr))
		}
	}()
	if err := s.fault(op + ".get"); err != nil {
		return err
	}
	have, err := upstream.Get(ctx)
	if err != nil && !errors.Is(err, api.ErrNotFound) && (base != nil || !errors.Is(err, api.ErrGone)) {
		return err
	}
	if sameState(have, body) {
		return nil
	}
	if !sameState(have, base) {
		return fmt.Errorf("%w: somebody changed it meanwhile", api.ErrStale)
	}
	if err := s.fault(op + ".post"); err != nil {
		return err
	}
	if err := upstream.Post(ctx, info.ID, body); err != nil {
		// The answer to a first try may have been lost, and the server takes
		// each serial once.
		if have, gerr := upstream.Get(ctx); gerr != nil || !sameState(have, body) {
			return err
		}
	}
	if err := s.fault(op + ".verify"); err != nil {
		return err
	}
	if have, err = upstream.Get(ctx); err != nil {
		return fmt.Errorf("reading it back: %w", err)
	}
	if !sameState(have, body) {
		return errors.New("what the backend holds is not what was sent")
	}
	return nil
}

// sameState compares states as bytes, and, for servers that write JSON anew, as
// JSON.
func sameState(a, b []byte) bool {
	if len(a) == 0 || len(b) == 0 {
		return len(a) == len(b)
	}
	if bytes.Equal(a, b) {
		return true
	}
	var x, y bytes.Buffer
	return json.Compact(&x, a) == nil && json.Compact(&y, b) == nil && bytes.Equal(x.Bytes(), y.Bytes())
}
