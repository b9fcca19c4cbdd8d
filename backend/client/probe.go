package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/user"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
)

// Kind is what a probe found.
type Kind string

// The kinds of a probe that found a state server. Everything else is an error.
const (
	KindState  Kind = "state"
	KindAbsent Kind = "absent"
)

// Probe is the result of Client.Probe.
type Probe struct {
	Kind Kind
	// Meta and Body are set for KindState.
	Meta api.Meta
	Body []byte
	// Holder is who held the lock, where the probe of an absent state saw it.
	Holder *api.LockInfo
}

// Probe finds out whether a state server answers, and whether it has the state.
// An absent state alone proves nothing, since any web server answers 404: the
// lock must then be taken and released too, else api.ErrNoState. Other errors
// are those of Get.
func (c *Client) Probe(ctx context.Context) (Probe, error) {
	body, err := c.Get(ctx)
	if err == nil {
		meta, err := api.ParseMeta(body)
		return Probe{Kind: KindState, Meta: meta, Body: body}, err
	}
	if !errors.Is(err, api.ErrNotFound) {
		return Probe{}, err
	}
	info := NewLockInfo("probe", "")
	err = c.Lock(ctx, info)
	var locked *api.LockedError
	switch {
	case err == nil:
	case errors.As(err, &locked) && locked.Holder.ID != "":
		return Probe{Kind: KindAbsent, Holder: &locked.Holder}, nil
	case errors.Is(err, api.ErrBadRequest), errors.Is(err, api.ErrNotFound), errors.Is(err, api.ErrNoState):
		// The 404 is not wrapped: it is no "no state" of a state server.
		return Probe{}, c.fail("probing", fmt.Errorf("%w: there is no state and no lock can be taken: %s", api.ErrNoState, err.Error()))
	default:
		return Probe{}, err
	}
	unlock, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	if err := c.Unlock(unlock, info); err != nil {
		return Probe{}, err
	}
	return Probe{Kind: KindAbsent}, nil
}

// NewLockInfo makes lock information of this program: a random ID, user@host,
// now.
func NewLockInfo(operation, info string) api.LockInfo {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return api.LockInfo{
		ID:        fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]),
		Operation: operation, Info: info, Who: Who(), Version: "tf-hosts", Created: time.Now().UTC(),
	}
}

// Who is user@host as tofu writes it into its locks; either side is empty where
// the lookup fails.
func Who() string {
	name := ""
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	return name + "@" + host
}
