package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"al.essio.dev/pkg/shellescape"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

// checkBackend looks at the addresses that are in use: the setup's own, or those
// of the groups. Where that is not known it looks at both, and a group's can not
// fail.
func (r *run) checkBackend(ctx context.Context) {
	if r.Setup == nil || r.Backend == nil {
		return
	}
	if len(r.Groups) > 0 && r.InUse.Groups {
		r.add("backend", OK, `not looked at: the states are those of the groups ("tf-hosts all")`, "")
	} else {
		r.lookAtBackend(ctx)
	}
	if len(r.Groups) == 0 {
		return
	}
	if r.InUse.Plain && !r.InUse.Groups {
		r.add("backend groups", OK, `not looked at: the state is used without "all"`, "")
		return
	}
	var wg sync.WaitGroup
	for _, g := range r.Groups {
		wg.Go(func() {
			own := &run{Config: r.Config, links: r.links}
			own.Backend = g.Backend
			own.lookAtBackend(ctx)
			for _, result := range own.results {
				if result.Level == Fail && !r.InUse.Groups {
					result.Level = Warn
				}
				r.add("group "+g.Group+" "+result.Check, result.Level, result.Message, result.Hint)
			}
		})
	}
	wg.Wait()
}

func (r *run) lookAtBackend(ctx context.Context) {
	b, err := r.Backend(ctx, r.forward)
	if b.Close != nil {
		defer func() {
			if err := b.Close(); err != nil {
				r.add("backend close", Warn, err.Error(), "run the same command again")
			}
		}()
	}
	r.addPlaces(ctx, b, err)
	switch {
	case b.Lost != "":
		r.add("backend state", Fail, b.Lost, b.LostHint)
	case b.Client != nil:
		r.add("backend state", OK, b.Holds, "")
	}
	if b.Client == nil {
		return
	}
	r.checkBackendClock(ctx, b.Client)
	r.checkLock(ctx, b.Client)
}

// addPlaces tells where the backend was looked for. A place that was passed
// over for one that serves is as it should be: the default address, before the
// graph's own backend.
func (r *run) addPlaces(ctx context.Context, b Backend, err error) {
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if len(b.Tried) == 0 {
		if err != nil {
			r.add("backend", Fail, err.Error(), hintOf(err, "correct http_backend in the setup file"))
		} else {
			r.add("backend", OK, "not read while the state is detached", "")
		}
		return
	}
	for i, p := range b.Tried {
		check := fmt.Sprintf("backend place %d", i+1)
		through := ""
		if p.Through != "" {
			through = " through node " + p.Through
		}
		switch {
		case p.Err == nil:
			r.add(check, OK, p.Address+through+" serves", "")
		case err == nil:
			r.add(check, OK, "passed over"+through+": "+p.Err.Error(), "")
		case ctx.Err() != nil:
			r.add(check, Fail, fmt.Sprintf("%s%s: %v", p.Address, through, err), "see what answers: curl -i "+shellescape.Quote(p.Address))
		default: // the client names the address
			r.add(check, Fail, strings.TrimLeft(through+": "+p.Err.Error(), " :"), hintOf(err, "see what answers: curl -i "+shellescape.Quote(p.Address)))
		}
	}
}

func (r *run) checkBackendClock(ctx context.Context, c *client.Client) {
	start := time.Now()
	look, err := c.Look(ctx)
	if err != nil {
		r.add("backend clock", Fail, err.Error(), "run the same command again")
		return
	}
	if look.Date.IsZero() {
		r.add("backend clock", OK, "the server does not say the time", "")
		return
	}
	took := time.Since(start)
	// The header has no fractions of a second: half of one is expected.
	r.addSkew("backend clock", look.Date.Add(time.Second/2), start.Add(took/2),
		"set both clocks: timedatectl set-ntp true")
}

// unlockLimit bounds the release of a lock after an interrupt.
const unlockLimit = 30 * time.Second

// checkLock takes the lock under an ID of its own, sees that nobody else gets
// it, and releases it. Nothing is written.
func (r *run) checkLock(ctx context.Context, c *client.Client) {
	const check = "backend lock"
	fail := func(message, hint string) { r.add(check, Fail, message, hint) }
	const serverHint = "use a server that speaks OpenTofu's http protocol, as tf-hosts backend serve, or set http_backend.lock_address and lock_method as its manual says"
	mine := client.NewLockInfo("doctor", "")
	if err := c.Lock(ctx, mine); err != nil {
		var locked *api.LockedError
		if errors.As(err, &locked) {
			r.add(check, Warn, locked.Error(), r.holderHint(locked.Holder))
			return
		}
		fail(err.Error(), serverHint)
		return
	}
	other := client.NewLockInfo("doctor", "")
	otherErr := c.Lock(ctx, other)
	release := func(info api.LockInfo) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), unlockLimit)
		defer cancel()
		return c.Unlock(ctx, info)
	}
	if otherErr == nil {
		_ = release(other) // it may be the same lock as mine; whether that is gone is told below
	}
	err := release(mine)
	var locked *api.LockedError
	switch {
	case otherErr == nil:
		fail("the server gave the same lock to two holders: two runs would overwrite each other", serverHint)
	case err != nil:
		fail("the lock was taken and is not released: "+err.Error(), "tf-hosts force-unlock "+mine.ID)
	case !errors.As(otherErr, &locked):
		fail("a second lock was not refused as it should be: "+otherErr.Error(), serverHint)
	case locked.Holder.ID != mine.ID:
		r.add(check, Warn, "taken and released; but the server does not say who holds a lock, so that none can be reclaimed", serverHint)
	default:
		r.add(check, OK, "taken, refused to a second holder, released", "")
	}
}

func (r *run) holderHint(holder api.LockInfo) string {
	if holder.ID == "" {
		return "wait for its holder, or release it on the server"
	}
	if r.Foreign != nil {
		if why, err := r.Foreign(holder); err == nil && why == "" {
			return "no run of this machine that lives says that it holds it; if none does: TF_RECLAIM_OWN_LOCK=1 tf-hosts apply"
		}
	}
	return "wait for its holder; if it is dead: tf-hosts force-unlock " + holder.ID
}
