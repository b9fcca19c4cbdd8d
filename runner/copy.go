package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/lifecycle"
)

// Apply brings the system onto the host and activates it.
func (d *deploy) Apply(ctx context.Context, _ lifecycle.Plan) error {
	if d.changing != nil {
		return d.goBack(ctx)
	}
	before := func(ctx context.Context) error { return d.checkHealth(ctx, tfhosts.HealthBefore) }
	for _, op := range []func(context.Context) error{before, d.transfer, d.check, d.activate} {
		if err := op(ctx); err != nil {
			return err
		}
	}
	return nil
}

// transfer makes the closure present on the host, rooted before it is there.
func (d *deploy) transfer(ctx context.Context) error {
	sent := d.system
	if d.drv != "" {
		sent = d.drv
	}
	var missing []nix.Path
	err := d.step(ctx, "root.link", "copy", d.limits.command, func(ctx context.Context) error {
		var err error
		missing, err = d.rootAndAsk(ctx, sent)
		return err
	})
	if err != nil {
		return err
	}
	if len(missing) > 0 && d.req.Settings.Substitute != nil && *d.req.Settings.Substitute {
		if missing, err = d.substitute(ctx, sent, missing); err != nil {
			return err
		}
	}
	if len(missing) > 0 && !d.first.valid {
		if err := d.step(ctx, "space.check", "copy", d.limits.command, func(context.Context) error {
			return d.checkSpace(missing)
		}); err != nil {
			return err
		}
		if err := d.step(ctx, "copy", "copy", d.limits.copy, func(ctx context.Context) error {
			return d.copy(ctx, sent, missing)
		}); err != nil {
			return err
		}
	}
	if d.drv != "" && !d.first.valid {
		if err := d.step(ctx, "build", "build", d.limits.build, d.buildOnTarget); err != nil {
			return err
		}
	}
	return d.step(ctx, "copy.check", "copy", d.limits.command, d.checkPresent)
}

// rootAndAsk roots the system on the host and returns what the host lacks of
// the closure of sent. A closure that this machine does not have is not asked
// about: the host may have it all the same.
func (d *deploy) rootAndAsk(ctx context.Context, sent string) ([]nix.Path, error) {
	var closure []nix.Path
	if !d.first.valid {
		var err error
		if closure, err = d.r.cfg.Nix.Closure(ctx, sent); err != nil {
			return nil, &failure{status: tfhosts.CopyFailed, err: err}
		}
	}
	var list strings.Builder
	bySize := make(map[string]nix.Path, len(closure))
	for _, p := range closure {
		list.WriteString(p.Path + "\n")
		bySize[p.Path] = p
	}
	res, err := d.script(ctx, rootScript, []byte(list.String()), d.system)
	if err != nil {
		return nil, err
	}
	if res.Code != 0 {
		return nil, &failure{status: tfhosts.CopyFailed, err: fmt.Errorf("linking the system as a root on the host: %s", tail(res.Stderr, 3))}
	}
	var missing []nix.Path
	for _, path := range strings.Fields(string(res.Stdout)) {
		missing = append(missing, bySize[path])
	}
	return missing, nil
}

// substitute lets the host fetch what its own substituters have, and returns
// what is still missing. It is the host's nix that asks, with the host's
// settings: over a copy, those of the deployer's nix would hold for it. What it
// can not fetch is sent, so no failure of it ends the deploy.
func (d *deploy) substitute(ctx context.Context, sent string, missing []nix.Path) ([]nix.Path, error) {
	var list strings.Builder
	for _, p := range missing {
		list.WriteString(p.Path + "\n")
	}
	err := d.step(ctx, "substitute", "copy", d.limits.copy, func(ctx context.Context) error {
		res, err := d.script(ctx, substituteScript, []byte(list.String()))
		if err != nil {
			return err
		}
		if res.Code != 0 {
			d.event(tfhosts.Event{
				Kind: tfhosts.EventWarning, Op: "substitute",
				Message: "the host could not fetch everything from its substituters; the rest is sent: " + tail(res.Stderr, 1),
			})
		}
		missing, err = d.rootAndAsk(ctx, sent)
		return err
	})
	return missing, err
}

func sum(paths []nix.Path) int64 {
	var n int64
	for _, p := range paths {
		n += p.NarSize
	}
	return n
}

// checkSpace compares with what was free at the observation. A file system needs
// a little more than the bytes: 2 % and 4 KiB a path are taken.
func (d *deploy) checkSpace(missing []nix.Path) error {
	need := sum(missing)
	need += need/50 + 4096*int64(len(missing))
	free := d.first.freeKiB * 1024
	if d.first.freeKiB < 0 || need <= free {
		return nil
	}
	return &failure{
		status: tfhosts.CopyFailed,
		err:    fmt.Errorf("the closure needs %s more in /nix/store and %s are free", mib(need), mib(free)),
		hint:   "free some space: " + d.sshRoot("nix-collect-garbage --delete-older-than 14d"),
	}
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// copy sends the closure. The host's answer to checkPresent decides afterwards;
// here only a lost connection of ours is a reason to try again.
func (d *deploy) copy(ctx context.Context, sent string, missing []nix.Path) error {
	total := sum(missing)
	for {
		base := d.verdict.BytesCopied
		name := d.newRecord()
		watch := d.watchCopy(ctx, d.conn, name)
		n, err := d.r.cfg.Nix.Copy(ctx, nix.CopyRequest{
			Path: sent,
			Dial: func(ctx context.Context) (io.ReadWriteCloser, error) {
				return d.conn.Stream(ctx, hostconn.Command{Script: receiveScript, Args: []string{name}, Become: true})
			},
			Progress: func(done int64) {
				watch.moved()
				d.event(tfhosts.Event{Kind: tfhosts.EventBytes, Op: "copy", Done: min(base+done, total), Total: total})
			},
		})
		watch.stop()
		d.verdict.BytesCopied += n
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return err
		case d.lost(err):
			d.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "copy", Message: "the connection was lost; the copy goes on when the host is back"})
			if err := d.reconnect(ctx); err != nil {
				return err
			}
			continue
		}
		return d.copyFailure(ctx, err, missing)
	}
}

// stalled is how long no byte moves before a vanished deployer's daemon is looked for.
const stalled = 15 * time.Second

// copyWatch ends stale daemons once, when a copy does not move.
type copyWatch struct {
	moves  chan struct{}
	cancel context.CancelFunc
	done   chan struct{}
}

func (d *deploy) watchCopy(ctx context.Context, conn *hostconn.Conn, name string) *copyWatch {
	ctx, cancel := context.WithCancel(ctx)
	w := &copyWatch{moves: make(chan struct{}, 1), cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		timer := time.NewTimer(stalled)
		defer timer.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-w.moves:
				timer.Reset(stalled)
				continue
			case <-timer.C:
			}
			res, err := conn.Run(ctx, hostconn.Command{Script: staleScript, Args: []string{name}, Become: true, Timeout: 2 * time.Minute})
			if err == nil && len(res.Stdout) > 0 {
				d.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "copy", Message: "ended what an earlier deploy had left in the way of the copy"})
			}
			return
		}
	}()
	return w
}

func (w *copyWatch) moved() {
	select {
	case w.moves <- struct{}{}:
	default:
	}
}

func (w *copyWatch) stop() {
	w.cancel()
	<-w.done
}

func (d *deploy) copyFailure(ctx context.Context, err error, missing []nix.Path) error {
	f := &failure{status: tfhosts.CopyFailed, err: err}
	if errors.Is(err, hostconn.ErrBecome) {
		f.status = tfhosts.AuthFailed
	}
	if !strings.Contains(err.Error(), "No space left on device") {
		return f
	}
	f.err = fmt.Errorf("the host's disk became full: %w", err)
	f.hint = "free some space: " + d.sshRoot("nix-collect-garbage --delete-older-than 14d")
	// The partial path would keep the disk full.
	var list strings.Builder
	for _, p := range missing {
		list.WriteString(p.Path + "\n")
	}
	if res, err := d.script(ctx, deletePartialScript, []byte(list.String())); err != nil || res.Code != 0 {
		f.err = fmt.Errorf("%w; what was copied in part could not be removed: %s", f.err, errorOr(err, res.Stderr))
	}
	return f
}

func errorOr(err error, stderr []byte) string {
	if err != nil {
		return err.Error()
	}
	return tail(stderr, 3)
}

func (d *deploy) buildOnTarget(ctx context.Context) error {
	res, err := d.script(ctx, realiseScript, nil, d.drv)
	if err != nil {
		return err
	}
	if res.Code != 0 {
		return &failure{
			status: tfhosts.BuildFailed, err: fmt.Errorf("building %q on the host: %s", d.drv, tail(res.Stderr, 1)),
			log: lastLines(string(res.Stderr), 20),
		}
	}
	return nil
}

func (d *deploy) checkPresent(ctx context.Context) error {
	res, err := d.script(ctx, presentScript, nil, d.system)
	if err != nil {
		return err
	}
	switch res.Code {
	case 0:
		return nil
	case 4:
		return &failure{status: tfhosts.CheckRefused, err: fmt.Errorf("%s is not a NixOS system: %s", d.system, tail(res.Stdout, 1))}
	}
	return &failure{
		status: tfhosts.CopyFailed, err: fmt.Errorf("the host does not have %s after the copy", d.system),
		hint: "run the same command again; what arrived is not sent twice",
	}
}
