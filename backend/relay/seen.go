package relay

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

// LastState is the state as this run last saw it: the bytes of the last GET or
// of the last POST that the upstream acknowledged. ok is false when neither
// brought a state.
func (r *Relay) LastState() (body []byte, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.last, r.seen
}

// LockHolder is the foreign holder that the last refused LOCK saw; ok is false
// when the last LOCK succeeded or the upstream did not say who holds it.
func (r *Relay) LockHolder() (info api.LockInfo, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.holder == nil {
		return api.LockInfo{}, false
	}
	return *r.holder, true
}

// Held is the lock that tofu holds through the relay, as it was sent upstream.
// After tofu's end it is a lock that was left behind.
func (r *Relay) Held() (info api.LockInfo, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held == nil {
		return api.LockInfo{}, false
	}
	return *r.held, true
}

// Stats is a copy of the counters.
func (r *Relay) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stats
}

// FirstError is the first failure that was passed to tofu in this run, LastError
// the latest; nil if there was none. A lock conflict that a later LOCK overcame
// is forgotten, and so is a first GET that found no state. api.ExitCode maps it.
func (r *Relay) FirstError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.first
}

// LastError is documented at FirstError.
func (r *Relay) LastError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.latest
}

func (r *Relay) record(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.first == nil {
		r.first = err
	}
	r.latest = err
}

// locked remembers a lock that was taken.
func (r *Relay) locked(info api.LockInfo) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held, r.holder = &info, nil
	if errors.Is(r.first, api.ErrLocked) {
		r.first = nil
	}
	if errors.Is(r.latest, api.ErrLocked) {
		r.latest = r.first
	}
}

// saw remembers a state that was received or acknowledged.
func (r *Relay) saw(body []byte, meta api.Meta) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen, r.last, r.lastMeta = true, body, meta
}

// checkGet refuses a state that is older than what this run has seen (SRV8 for
// servers that do not know it).
func (r *Relay) checkGet(meta api.Meta) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.seen || r.cfg.AllowRewind:
		return nil
	case meta.Lineage != r.lastMeta.Lineage:
		return fmt.Errorf("%w: the backend had lineage %q in this run and has %q now", api.ErrGone, r.lastMeta.Lineage, meta.Lineage)
	case meta.Serial < r.lastMeta.Serial:
		return fmt.Errorf("%w: the backend had serial %d in this run and has %d now", api.ErrGone, r.lastMeta.Serial, meta.Serial)
	}
	return nil
}

// checkPost is SRV6 for servers that do not know it.
func (r *Relay) checkPost(meta api.Meta, body []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.seen || r.cfg.AllowRewind:
		return nil
	case meta.Lineage != r.lastMeta.Lineage:
		return fmt.Errorf("%w: lineage %q is stored, tofu sent %q", api.ErrStale, r.lastMeta.Lineage, meta.Lineage)
	case meta.Serial < r.lastMeta.Serial, meta.Serial == r.lastMeta.Serial && !bytes.Equal(body, r.last):
		return fmt.Errorf("%w: serial %d is stored, tofu sent %d", api.ErrStale, r.lastMeta.Serial, meta.Serial)
	}
	return nil
}

// sameState compares states as bytes, or as JSON values for servers that store
// JSON in their own layout.
func sameState(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var va, vb any
	for raw, v := range map[*[]byte]*any{&a: &va, &b: &vb} {
		dec := json.NewDecoder(bytes.NewReader(*raw))
		dec.UseNumber()
		if dec.Decode(v) != nil {
			return false
		}
	}
	return reflect.DeepEqual(va, vb)
}

func (r *Relay) event(kind, op, format string, args ...any) {
	r.cfg.Events(tfhosts.Event{Kind: kind, Op: op, Message: fmt.Sprintf(format, args...)})
}
