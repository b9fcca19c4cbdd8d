package runner

import (
	"context"
	"fmt"

	tfhosts "fediversity.eu/tf-hosts"
)

// Rollback takes a node to req.Built, a system that is on its host already: what
// it lacks is neither built nor copied. The activation is that of a deploy, guard
// and health checks after it included. A check that is made before a deploy is
// left out: what is wrong now is why somebody goes back.
//
// changing is called once everything but the activation is done, and an error of
// it refuses the rollback; without that call nothing was changed on the host.
func (r *Runner) Rollback(ctx context.Context, req Request, changing func(context.Context) error) tfhosts.Verdict {
	return r.bring(ctx, &deploy{req: req, changing: changing})
}

// goBack is Apply of a rollback.
func (d *deploy) goBack(ctx context.Context) error {
	for _, op := range []func(context.Context) error{d.keep, d.check, d.announce, d.activate} {
		if err := op(ctx); err != nil {
			return err
		}
	}
	return nil
}

// keep roots the system, which must be there.
func (d *deploy) keep(ctx context.Context) error {
	if !d.first.valid {
		return &failure{
			status: tfhosts.CheckRefused,
			err:    fmt.Errorf("the host does not have %s any more; nothing was changed", d.system),
			hint:   "see which systems it has: " + d.ssh("ls -l /nix/var/nix/profiles") + "; or revert the setup and apply",
		}
	}
	if err := d.step(ctx, "root.link", "check", d.limits.command, func(ctx context.Context) error {
		_, err := d.rootAndAsk(ctx, d.system)
		return err
	}); err != nil {
		return err
	}
	return d.step(ctx, "copy.check", "check", d.limits.command, d.checkPresent)
}

// announce says that the host is about to change. It takes as long as it takes:
// another run may hold the state's lock for a while.
func (d *deploy) announce(ctx context.Context) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d.event(tfhosts.Event{Kind: tfhosts.EventStep, Op: "rollback.taint"})
	if d.r.cfg.Fault != nil {
		if err := d.r.cfg.Fault("rollback.taint"); err != nil {
			return &stepError{"rollback.taint", err}
		}
	}
	if err := d.changing(ctx); err != nil {
		return &failure{
			status: tfhosts.CheckRefused, err: fmt.Errorf("nothing was changed on the host: %w", err),
			hint: "mend what the error says, then roll back again",
		}
	}
	return nil
}
