package runner

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/lifecycle"
)

// Config of a Runner. Only Dial is needed.
type Config struct {
	// Dial opens the connection of a deploy, another one to confirm the activation,
	// and one more each time that it was lost. hostconn.Pool.Dial is meant.
	Dial func(ctx context.Context, target hostconn.Target) (*hostconn.Conn, error)
	// Nix builds and copies; nil runs the tools on PATH.
	Nix *nix.Client
	// Dir is what a relative nixos_conf is relative to.
	Dir string
	// Events may be nil. It is called from several goroutines.
	Events func(tfhosts.Event)
	// Fault, when set, is asked before each operation; an error fails it. For tests.
	Fault func(op string) error
	// RunID names the run in units and records on the hosts; default the time.
	RunID string
}

// Runner deploys nodes. It is safe for concurrent use.
type Runner struct{ cfg Config }

// New makes a Runner.
func New(cfg Config) *Runner {
	if cfg.RunID == "" {
		cfg.RunID = time.Now().UTC().Format("20060102T150405")
	}
	if cfg.Nix == nil {
		cfg.Nix = nix.New(nix.Config{})
	}
	return &Runner{cfg: cfg}
}

// Request is one node to deploy.
type Request struct {
	// Name is the node's dotted name.
	Name     string
	Node     tfhosts.Node
	Settings tfhosts.NodeSettings
	// Built is the system's store path; empty builds it here.
	Built string
	// BuildErr: the caller's build failed; no connection is opened.
	BuildErr error
	// Drop, when closed, ends the deploy as dropped if its activation has not
	// begun; one that has begun is finished. Ending ctx does the same.
	Drop <-chan struct{}
}

var errDropped = errors.New("interrupted before the activation")

// deploy is one Deploy under way; it is the lifecycle provider of its node.
type deploy struct {
	r       *Runner
	req     Request
	limits  limits
	verdict tfhosts.Verdict
	conn    *hostconn.Conn
	target  hostconn.Target
	// id names the deploy on the host: its record, and who reads one.
	id string
	// system is the store path to deploy; drv its derivation, for a build on the
	// host.
	system, drv string
	// first is the state before the deploy, last the newest one seen.
	first, last *state
	// begun: the activation was started; from here on nothing is dropped.
	begun bool
	// bootOnly: an inhibitor keeps the new system from being activated, and by
	// the node's policy it is what boots next.
	bootOnly bool
	// unhealthy are the checks that kept the activation from being confirmed.
	unhealthy *failure
	outcome   outcome
	// changing makes it a rollback; see Rollback.
	changing func(context.Context) error
}

// Deploy takes one node from connection to verdict. It never panics on what a
// host answers, and always returns a verdict with a status.
func (r *Runner) Deploy(ctx context.Context, req Request) tfhosts.Verdict {
	return r.bring(ctx, &deploy{req: req})
}

// bring is Deploy and Rollback.
func (r *Runner) bring(ctx context.Context, d *deploy) tfhosts.Verdict {
	req := d.req
	d.r, d.limits = r, limitsOf(req.Settings.Limits)
	d.id = d.newRecord()
	d.verdict = tfhosts.Verdict{Node: req.Name, Started: time.Now(), Seconds: map[string]float64{}}

	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-req.Drop: // nil blocks
			cancel(errDropped)
		case <-ctx.Done():
		}
	}()
	err := d.run(ctx)
	if d.conn != nil {
		_ = d.conn.Close()
	}
	cancel(nil)
	<-watched

	d.conclude(err)
	d.verdict.Ended = time.Now()
	d.event(tfhosts.Event{Kind: tfhosts.EventVerdict, Verdict: &d.verdict, Message: d.verdict.Sentence})
	return d.verdict
}

// run returns nil when the system is as wanted, or a *failure, or what a step
// ran into.
func (d *deploy) run(ctx context.Context) error {
	if err := d.build(ctx); err != nil {
		return err
	}
	if err := d.connect(ctx); err != nil {
		return err
	}
	if d.goal() == goalDry {
		return d.dryRun(ctx)
	}
	res := lifecycle.Run(ctx, d.resource(), d)
	if res.Err != nil {
		return res.Err
	}
	if err := d.judge(ctx, res); err != nil {
		return err
	}
	return d.rebootIfNeeded(ctx)
}

func (d *deploy) build(ctx context.Context) error {
	if d.req.BuildErr != nil {
		return &failure{status: tfhosts.BuildFailed, err: d.req.BuildErr}
	}
	if d.req.Built != "" {
		d.system = d.req.Built
		return nil
	}
	return d.step(ctx, "build", "build", d.limits.build, func(ctx context.Context) error {
		nixClient := d.r.cfg.Nix
		id, err := nixClient.Identity(ctx, d.r.cfg.Dir, d.req.Node.NixosConf, d.req.Node.ConfigIdentity)
		if err != nil {
			return d.buildFailure(ctx, err)
		}
		if d.req.Settings.BuildOn == "target" && nix.IsDerivation(id) {
			d.drv = id
			d.system, err = nixClient.Output(ctx, id)
			return d.buildFailure(ctx, err)
		}
		results, err := nixClient.Build(ctx, []string{id})
		if err == nil {
			err = results[id].Err
		}
		d.system = results[id].Out
		return d.buildFailure(ctx, err)
	})
}

func (d *deploy) buildFailure(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil {
		return err
	}
	return &failure{status: tfhosts.BuildFailed, err: err}
}

func (d *deploy) connect(ctx context.Context) error {
	var err error
	if d.target, err = hostconn.TargetOf(d.req.Name, d.req.Node, d.req.Settings); err != nil {
		return &failure{status: tfhosts.Unreachable, err: err}
	}
	return d.step(ctx, "connect", "connect", d.limits.connect, func(ctx context.Context) error {
		d.conn, err = d.r.cfg.Dial(ctx, d.target)
		return err
	})
}

// reconnect replaces a lost connection, until ctx ends. Only an unreachable host
// is dialled again: a refused key would lock the deployer out.
func (d *deploy) reconnect(ctx context.Context) error {
	_ = d.conn.Close()
	conn, err := d.dialAnew(ctx)
	if err == nil {
		d.conn = conn
	}
	return err
}

// script runs a privileged script that may be repeated: when the connection was
// lost it is run again over a new one.
func (d *deploy) script(ctx context.Context, script string, stdin []byte, args ...string) (hostconn.Result, error) {
	for {
		res, err := d.conn.Run(ctx, hostconn.Command{
			Script: script, Args: args, Stdin: stdin,
			Become: true, Timeout: untilDeadline(ctx),
		})
		if err == nil || !d.lost(err) || ctx.Err() != nil {
			return res, err
		}
		if err := d.reconnect(ctx); err != nil {
			return res, err
		}
	}
}

func (d *deploy) lost(err error) bool {
	if errors.Is(err, hostconn.ErrLost) {
		return true
	}
	select {
	case <-d.conn.Done():
		return true
	default:
		return false
	}
}

func untilDeadline(ctx context.Context) time.Duration {
	if end, ok := ctx.Deadline(); ok {
		return time.Until(end)
	}
	return 0
}

// step runs one named operation within its limit, and books its time under the
// key of Verdict.Seconds. Once the activation has begun, an end of ctx no longer
// counts.
func (d *deploy) step(ctx context.Context, op, key string, limit time.Duration, do func(context.Context) error) error {
	if d.begun {
		ctx = context.WithoutCancel(ctx)
	} else if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	d.event(tfhosts.Event{Kind: tfhosts.EventStep, Op: op})
	if d.r.cfg.Fault != nil {
		if err := d.r.cfg.Fault(op); err != nil {
			return &stepError{op, err}
		}
	}
	stepCtx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	start := time.Now()
	err := do(stepCtx)
	d.verdict.Seconds[key] += time.Since(start).Seconds()
	switch {
	case err == nil:
		return nil
	case !d.begun && ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(stepCtx.Err(), context.DeadlineExceeded):
		return &timeoutError{op, limit, err}
	}
	return &stepError{op, err}
}

func (d *deploy) event(e tfhosts.Event) {
	if d.r.cfg.Events == nil {
		return
	}
	e.Time = time.Now()
	e.Node = d.req.Name
	d.r.cfg.Events(e)
}

// limits are those of the setup with the built-in ones filled in.
type limits struct{ connect, copy, activate, command, build, guard, reboot time.Duration }

func limitsOf(l tfhosts.Limits) limits {
	limit := func(set, builtin int) time.Duration {
		if set > 0 {
			return time.Duration(set) * time.Second
		}
		return time.Duration(builtin) * time.Second
	}
	return limits{
		connect:  limit(l.Connect, 30),
		copy:     limit(l.Copy, 3600),
		activate: limit(l.Activate, 900),
		command:  limit(l.Command, 60),
		build:    limit(l.Build, 7200),
		guard:    limit(l.Guard, 90),
		reboot:   limit(l.Reboot, 600),
	}
}

var unitUnsafe = regexp.MustCompile(`[^A-Za-z0-9_.-]`)

// newRecord names a record and its unit, once: a taken name would be an error.
func (d *deploy) newRecord() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return unitUnsafe.ReplaceAllString(fmt.Sprintf("%s-%s-%s", d.req.Name, d.r.cfg.RunID, hex.EncodeToString(b[:])), "_")
}
