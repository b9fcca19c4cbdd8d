package relay

import (
	"context"
	"errors"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

// outcome is the end of a series of tries.
type outcome struct {
	err error
	// doubtful: an earlier try may have reached the upstream, its answer was lost.
	doubtful bool
}

// try runs fn until the upstream answers or patience ends: FirstTries within
// FirstWait before its first answer in this run, Patience after it, and
// InterruptedPatience after Interrupted.
func (r *Relay) try(ctx context.Context, op string, fn func(context.Context) error) outcome {
	start := time.Now()
	pause := r.cfg.RetryWaitMin
	var out outcome
	for n := 1; ; n++ {
		out.err = r.once(ctx, op, fn)
		if !away(out.err) {
			r.answered(out.err)
			if n > 1 && out.err == nil {
				r.event(tfhosts.EventNotice, op, "the state backend is back after %s", time.Since(start).Round(time.Second))
			}
			return out
		}
		if !errors.Is(out.err, api.ErrUnreachable) {
			out.doubtful = true
		}
		left, contacted := r.patience(start)
		if left <= 0 || !contacted && n >= r.cfg.FirstTries || ctx.Err() != nil {
			return out
		}
		if n == 1 {
			r.event(tfhosts.EventWarning, op, "the state backend does not answer, waiting up to %s: %v", left.Round(time.Second), out.err)
		}
		wait := pause
		var st *client.StatusError
		if errors.As(out.err, &st) && st.RetryAfter > wait {
			wait = st.RetryAfter
		}
		r.sleep(ctx, min(wait, left))
		pause = min(pause*2, r.cfg.RetryWaitMax)
	}
}

func (r *Relay) once(ctx context.Context, op string, fn func(context.Context) error) error {
	if r.cfg.Fault != nil {
		if err := r.cfg.Fault(op); err != nil {
			return err
		}
	}
	return fn(ctx)
}

func away(err error) bool {
	return errors.Is(err, api.ErrUnavailable) || errors.Is(err, api.ErrUnreachable)
}

// answered notes that a state server spoke: an answer of something else (a TLS
// error, a redirect, a page) is no contact.
func (r *Relay) answered(err error) {
	for _, no := range []error{api.ErrTLS, api.ErrRedirect, api.ErrNoState, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, no) {
			return
		}
	}
	r.mu.Lock()
	r.contacted = true
	r.mu.Unlock()
}

// patience is what is left of it for tries that began at start.
func (r *Relay) patience(start time.Time) (left time.Duration, contacted bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	limit := r.cfg.FirstWait
	if r.contacted {
		limit = r.cfg.Patience
	}
	left = limit - time.Since(start)
	if !r.interruptedAt.IsZero() {
		since := start
		if r.interruptedAt.After(since) {
			since = r.interruptedAt
		}
		left = min(left, r.cfg.InterruptedPatience-time.Since(since))
	}
	return left, r.contacted
}

// sleep waits for d; an interrupt ends it early, once, so that the shorter
// patience counts from then.
func (r *Relay) sleep(ctx context.Context, d time.Duration) {
	begin := time.Now()
	timer := time.NewTimer(d)
	defer timer.Stop()
	interrupted := r.interrupted
	select {
	case <-interrupted:
		interrupted = nil // it was interrupted before: no reason to hurry on
	default:
	}
	select {
	case <-timer.C:
	case <-interrupted:
	case <-ctx.Done():
	}
	r.mu.Lock()
	r.stats.Retries++
	r.stats.Waited += time.Since(begin)
	r.mu.Unlock()
}
