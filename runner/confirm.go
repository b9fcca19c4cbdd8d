package runner

import (
	"context"
	"errors"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
)

// The words of a decision. The first one asked for holds, on the host.
const (
	decisionConfirmed = "confirmed"
	decisionExpired   = "expired"
)

// confirmed answers the host that waits, and reads how the activation ended. What
// keeps us from answering is no end of its own: the host decides, and its record
// says what it did.
func (d *deploy) confirmed(ctx context.Context) error {
	if err := d.answer(ctx); err != nil {
		d.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "activate.confirm", Message: "the activation was not confirmed: " + err.Error()})
	}
	limit := d.limits.guard + 4*d.limits.activate + 2*d.limits.connect + d.limits.command
	return d.step(ctx, "activate.result", "confirm", limit, func(ctx context.Context) error {
		return d.waitFor(ctx, "")
	})
}

// answer gets in over a new connection, makes the health checks, and tells the
// host to keep the new system, or to go back at once.
func (d *deploy) answer(ctx context.Context) error {
	word, why := decisionConfirmed, ""
	err := d.step(ctx, "activate.reconnect", "confirm", d.limits.guard, d.enterAgain)
	if err == nil {
		err = d.checkHealth(ctx, tfhosts.HealthAfter)
	} else if mayHeal(err) {
		return err // the time is over, and nobody to tell
	}
	if err != nil {
		// Over the old connection, if that is what there is.
		word, why = decisionExpired, err.Error()
		var unhealthy *failure
		if errors.As(err, &unhealthy) {
			why, d.unhealthy = unhealthy.Error(), unhealthy
		}
	}
	return errors.Join(err, d.step(ctx, "activate.confirm", "confirm", d.limits.command, func(ctx context.Context) error {
		return d.decide(ctx, word, why)
	}))
}

// enterAgain replaces the connection by a new one: that the old one lives does not
// say that anybody can get in.
func (d *deploy) enterAgain(ctx context.Context) error {
	conn, err := d.dialAnew(ctx)
	if err != nil {
		return err
	}
	_ = d.conn.Close()
	d.conn = conn
	return nil
}

// dialAnew opens another connection beside the one at hand, until ctx ends.
func (d *deploy) dialAnew(ctx context.Context) (*hostconn.Conn, error) {
	for {
		dialCtx, cancel := context.WithTimeout(ctx, d.limits.connect)
		conn, err := d.r.cfg.Dial(dialCtx, d.target)
		cancel()
		if err == nil || !mayHeal(err) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(time.Second): // dials to one address are at least this far apart
		}
	}
}

// mayHeal says whether another dial may succeed. A refused key would lock the
// deployer out.
func mayHeal(err error) bool {
	return errors.Is(err, hostconn.ErrUnreachable) || errors.Is(err, hostconn.ErrLost) ||
		errors.Is(err, hostconn.ErrTimeout) || errors.Is(err, context.DeadlineExceeded)
}

// decide asks for a decision. That another one holds is no error: the verdict
// says what came of it.
func (d *deploy) decide(ctx context.Context, word, why string) error {
	why = strings.Join(strings.Fields(why), " ")
	res, err := d.script(ctx, decideScript, nil, d.outcome.record, word, why)
	if err != nil {
		return err
	}
	if got := strings.TrimSpace(string(res.Stdout)); got != word {
		d.event(tfhosts.Event{
			Kind: tfhosts.EventNotice, Op: "activate.confirm",
			Message: "the host had decided before it was asked: " + orNone(got),
		})
	}
	return nil
}
