package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
)

// The built-in bounds of a health check.
const (
	healthTimeout  = 10 * time.Second
	healthRetries  = 10
	healthInterval = 2 * time.Second
	healthTotal    = time.Minute
)

// checker makes the health checks of one moment, side by side over the deploy's
// connection.
type checker struct {
	d    *deploy
	when string

	mu sync.Mutex // guards d.conn while the checks run
}

// checkResult is a result with its error, which is nil when it is good.
type checkResult struct {
	tfhosts.HealthResult
	err error
}

// givenUp is an error that another try would not mend.
type givenUp struct {
	err error
	// gone: the connection was lost and could not be made anew.
	gone bool
}

func (e *givenUp) Error() string { return e.err.Error() }

func (e *givenUp) Unwrap() error { return e.err }

// checkHealth makes the health checks that are due at when, tfhosts.HealthBefore
// or tfhosts.HealthAfter, and adds what they saw to the verdict. The error is a
// *failure that names each check that failed, or what the connection ran into.
func (d *deploy) checkHealth(ctx context.Context, when string) error {
	due := d.healthDue(when)
	if len(due) == 0 {
		return nil
	}
	limit := 10 * time.Second // for ending them
	for _, c := range due {
		limit = max(limit, boundsOf(c).total+10*time.Second)
	}
	return d.step(ctx, "health."+when, "health", limit, func(ctx context.Context) error {
		h := &checker{d: d, when: when}
		results := make([]checkResult, len(due))
		var wg sync.WaitGroup
		for i, c := range due {
			wg.Go(func() { results[i] = h.make(ctx, c) })
		}
		wg.Wait()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for _, r := range results {
			d.verdict.Health = append(d.verdict.Health, r.HealthResult)
		}
		return d.healthError(when, due, results)
	})
}

// healthDue are the checks of the settings that are made at when.
func (d *deploy) healthDue(when string) []tfhosts.HealthCheck {
	var due []tfhosts.HealthCheck
	for _, c := range d.req.Settings.Health {
		if c.When == when || c.When == tfhosts.HealthBoth || c.When == "" && when == tfhosts.HealthAfter {
			due = append(due, c)
		}
	}
	return due
}

// bounds are those of one check, with the built-in ones filled in.
type bounds struct {
	timeout, interval, total time.Duration
	retries                  int
}

func boundsOf(c tfhosts.HealthCheck) bounds {
	seconds := func(set int, builtin time.Duration) time.Duration {
		if set > 0 {
			return time.Duration(set) * time.Second
		}
		return builtin
	}
	b := bounds{
		timeout:  seconds(c.Timeout, healthTimeout),
		interval: seconds(c.Interval, healthInterval),
		total:    seconds(c.Total, healthTotal),
		retries:  healthRetries,
	}
	if c.Retries != nil {
		b.retries = *c.Retries
	}
	return b
}

// make tries one check until it is good or its bounds are reached.
func (h *checker) make(ctx context.Context, c tfhosts.HealthCheck) checkResult {
	start, b := time.Now(), boundsOf(c)
	ctx, cancel := context.WithTimeout(ctx, b.total)
	defer cancel()
	r := checkResult{HealthResult: tfhosts.HealthResult{Name: c.Name, When: h.when}}
	question, err := h.question(c)
	if err != nil {
		r.err = &givenUp{err: err}
	}
	for question != nil {
		r.Tries++
		var seen string
		seen, r.err = h.try(ctx, b.timeout, question)
		if r.err == nil {
			r.OK, r.Message = true, seen
			break
		}
		var final *givenUp
		if errors.As(r.err, &final) || r.Tries > b.retries || !pause(ctx, b.interval) {
			break
		}
		if r.Tries == 1 {
			h.d.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "health." + h.when, Message: fmt.Sprintf("health check %q is tried again: %s", c.Name, r.err)})
		}
	}
	if r.err != nil {
		r.Message = oneLine(r.err.Error())
	}
	r.Seconds = time.Since(start).Seconds()
	kind := tfhosts.EventNotice
	if !r.OK {
		kind = tfhosts.EventWarning
	}
	h.d.event(tfhosts.Event{Kind: kind, Op: "health." + h.when, Message: r.sentence()})
	return r
}

func (r checkResult) sentence() string {
	word := "failed"
	if r.OK {
		word = "passed"
	}
	return fmt.Sprintf("health check %q %s (tries: %d): %s", r.Name, word, r.Tries, r.Message)
}

// pause waits for d; it is false when ctx would end before.
func pause(ctx context.Context, d time.Duration) bool {
	if end, ok := ctx.Deadline(); ok && time.Until(end) <= d {
		return false
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// try asks once. A connection that was lost meanwhile is made anew and does not
// count as a try.
func (h *checker) try(ctx context.Context, limit time.Duration, ask question) (string, error) {
	for {
		conn := h.conn()
		tryCtx, cancel := context.WithTimeout(ctx, limit)
		seen, err := ask(tryCtx, conn)
		late := tryCtx.Err() != nil
		cancel()
		switch {
		case err == nil:
			return seen, nil
		case ctx.Err() == nil && connLost(conn, err):
			if err := h.renew(ctx, conn); err != nil {
				return "", &givenUp{err, true}
			}
		case late:
			return "", fmt.Errorf("no answer within %s", limit)
		default:
			return "", err
		}
	}
}

func (h *checker) conn() *hostconn.Conn {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.d.conn
}

// renew replaces lost, unless another check did.
func (h *checker) renew(ctx context.Context, lost *hostconn.Conn) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.d.conn != lost {
		return nil
	}
	return h.d.reconnect(ctx)
}

// connLost says whether err comes from the end of conn. One that a sibling closed
// to replace it counts as lost.
func connLost(conn *hostconn.Conn, err error) bool {
	if errors.Is(err, hostconn.ErrLost) {
		return true
	}
	if conn == nil {
		return false
	}
	select {
	case <-conn.Done():
		return true
	default:
		return false
	}
}

// healthError is nil when all checks are good.
func (d *deploy) healthError(when string, due []tfhosts.HealthCheck, results []checkResult) error {
	var said []string
	hint := ""
	for i, r := range results {
		if r.OK {
			continue
		}
		said = append(said, fmt.Sprintf("health check %q failed: %s", r.Name, r.Message))
		if hint == "" {
			hint = d.healthHint(due[i])
		}
		var final *givenUp
		if when == tfhosts.HealthBefore && errors.As(r.err, &final) && final.gone {
			return r.err
		}
	}
	if len(said) == 0 {
		return nil
	}
	f := &failure{status: tfhosts.Degraded, err: errors.New(strings.Join(said, "; ")), hint: hint}
	if when == tfhosts.HealthBefore {
		f.status = tfhosts.CheckRefused
		f.err = fmt.Errorf("%w; nothing was changed", f.err)
	}
	return f
}

// healthMade says whether checks of the given moment were made in this deploy.
func (d *deploy) healthMade(when string) bool {
	return slices.ContainsFunc(d.verdict.Health, func(r tfhosts.HealthResult) bool { return r.When == when })
}

// finalHealth makes the checks that are due after the activation, where its guard
// has not made them. It is for a host that runs the wanted system: what fails now
// stays.
func (d *deploy) finalHealth(ctx context.Context) *failure {
	if d.healthMade(tfhosts.HealthAfter) {
		return nil
	}
	err := d.checkHealth(ctx, tfhosts.HealthAfter)
	if err == nil {
		return nil
	}
	f, ok := errors.AsType[*failure](err)
	if !ok {
		f = &failure{status: tfhosts.Degraded, err: err, hint: "apply again"}
	}
	if d.begun {
		f.err = fmt.Errorf("the new system runs and stays, but %w", f.err)
	} else {
		f.err = fmt.Errorf("already runs the wanted system, but %w", f.err)
	}
	return f
}
