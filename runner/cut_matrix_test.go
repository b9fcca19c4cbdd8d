package runner_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// cutKind is what happens at an operation.
type cutKind string

const (
	cutShort cutKind = "link down for 5 s"
	cutLong  cutKind = "link down for good"
	dies     cutKind = "deployer killed"
)

// cutCell is one operation and what happened there.
type cutCell struct {
	op    string
	kind  cutKind
	first tfhosts.Status // of the deploy that was cut
	whole string         // old or new: what the host was as a whole before anybody came back
	next  tfhosts.Status // of the next run
}

// TestCutMatrix cuts the network at each operation of a deploy, for 5 s and for
// good, and kills the deployer there. Without anybody coming back the host is
// the old or the new system as a whole, and the next run brings it to the new one
// and says so truly. A deployer is killed by never being heard of again: its
// connections are closed and none of its operations goes on.
func TestCutMatrix(t *testing.T) {
	setNixEnv(t)
	const hosts = 10
	f := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(hosts)})
	// What there is to cut, from a deploy that nothing happens to.
	ops := cutOps(t, f, f.Hosts[0])
	if len(ops) < 12 {
		t.Fatalf("only these operations were seen: %v", ops)
	}
	var cells []cutCell
	for _, op := range ops {
		for _, kind := range []cutKind{cutShort, cutLong, dies} {
			cells = append(cells, cutCell{op: op, kind: kind})
		}
	}
	// The hosts mostly wait: t.Parallel would take but one a core at a time.
	var wg sync.WaitGroup
	for i, h := range f.Hosts {
		wg.Go(func() {
			b := &bed{t: t, fleet: f, host: h}
			for n := i; n < len(cells); n += hosts {
				cells[n].run(b, n)
			}
		})
	}
	wg.Wait()
	t.Logf("%-18s %-20s %-14s %-6s %s", "operation", "what happens", "verdict", "host", "next run")
	for _, c := range cells {
		t.Logf("%-18s %-20s %-14s %-6s %s", c.op, c.kind, c.first, c.whole, c.next)
	}
}

// newDeployer is a deployer of its own: connections, and what may happen to it.
func newDeployer(t testing.TB, events func(tfhosts.Event), fault func(string) error) (*runner.Runner, *hostconn.Pool) {
	t.Helper()
	pool := hostconn.NewPool(hostconn.Config{KnownHosts: t.TempDir() + "/known_hosts", DeadAfter: 3 * time.Second})
	return runner.New(runner.Config{Dial: pool.Dial, Events: events, Fault: fault, RunID: "cut"}), pool
}

func cutSettings() tfhosts.NodeSettings {
	return tfhosts.NodeSettings{Limits: tfhosts.Limits{Connect: 4, Command: 12, Copy: 15, Activate: 20, Guard: 8}}
}

// cutOps are the operations of a deploy on the host, each once.
func cutOps(t *testing.T, f *fleettest.Fleet, h *fleettest.Host) []string {
	t.Helper()
	var ops []string
	var mu sync.Mutex
	r, pool := newDeployer(t, nil, func(op string) error {
		mu.Lock()
		defer mu.Unlock()
		if op != "build" && !slices.Contains(ops, op) {
			ops = append(ops, op)
		}
		return nil
	})
	defer pool.Close()
	b := &bed{t: t, fleet: f, host: h}
	c := b.closure(fleettest.ClosureSpec{Name: "seen", PayloadPaths: 1, PayloadBytes: 1000})
	if v := r.Deploy(t.Context(), runner.Request{Name: "prod.h1", Node: b.node(""), Built: c.Out, Settings: cutSettings()}); v.Status != tfhosts.Deployed {
		t.Fatalf("verdict = %s", v)
	}
	return ops
}

var errKilled = errors.New("the deployer was killed")

// run fills the cell in on a host of its own.
func (cell *cutCell) run(b *bed, n int) {
	t := b.t
	t.Helper()
	where := fmt.Sprintf("%s at %q", cell.kind, cell.op)
	old := b.system()
	c := b.closure(fleettest.ClosureSpec{Name: fmt.Sprintf("cut%d", n), PayloadPaths: 1, PayloadBytes: 1000})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()

	var once sync.Once
	var pool *hostconn.Pool
	var r *runner.Runner
	restored := make(chan error, 1)
	var killed atomic.Bool
	fault := func(at string) error {
		if killed.Load() {
			return errKilled
		}
		if at != cell.op {
			return nil
		}
		var err error
		once.Do(func() {
			switch cell.kind {
			case dies:
				killed.Store(true)
				_ = pool.Close()
				err = errKilled
			default:
				if cerr := b.host.Cut(ctx); cerr != nil {
					t.Errorf("%s: %v", where, cerr)
				}
				if cell.kind == cutShort {
					time.AfterFunc(5*time.Second, func() { restored <- b.host.Restore(ctx) })
				}
			}
		})
		return err
	}
	r, pool = newDeployer(t, nil, fault)
	req := runner.Request{Name: "prod.h1", Node: b.node(""), Built: c.Out, Settings: cutSettings()}
	cell.first = r.Deploy(ctx, req).Status
	_ = pool.Close()
	if cell.kind == cutShort {
		if err := <-restored; err != nil {
			t.Errorf("%s: %v", where, err)
		}
	}

	// Nobody comes back: the host alone ends whole. Its own commands need no network.
	if _, err := b.host.Shell(ctx, "while systemctl list-units --plain --no-legend 'tf-hosts-prod*' | grep -q .; do sleep 0.2; done"); err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	now := b.system()
	switch {
	case now.Running == c.Out && now.Profile == c.Out && now.Default == c.Out:
		cell.whole = "new"
	case now.Running == old.Running && now.Profile == old.Profile && now.Default == old.Default:
		cell.whole = "old"
	default:
		cell.whole = "BROKEN"
		t.Errorf("%s: the host is no system as a whole: %+v, was %+v, wanted %s", where, now, old, c.Out)
	}
	if (cell.first == tfhosts.Deployed) != (cell.whole == "new") && (cell.first == tfhosts.Deployed || cell.first == tfhosts.RolledBack) {
		t.Errorf("%s: verdict %s, and the host is the %s system", where, cell.first, cell.whole)
	}

	if err := b.host.Restore(ctx); err != nil {
		t.Errorf("%s: %v", where, err)
	}
	again, againPool := newDeployer(t, nil, nil)
	defer againPool.Close()
	v := again.Deploy(ctx, req)
	for v.Status == tfhosts.Unreachable && ctx.Err() == nil { // the kernel has not seen yet that the link is back
		v = again.Deploy(ctx, req)
	}
	cell.next = v.Status
	want := tfhosts.Deployed
	if cell.whole == "new" {
		want = tfhosts.Unchanged
	}
	now = b.system()
	t.Logf("%s: %s, host %s, then %s", where, cell.first, cell.whole, cell.next)
	if v.Status != want || now.Running != c.Out || now.Profile != c.Out || now.Default != c.Out {
		t.Errorf("%s: the next run ends %s with %+v, want %s with %s", where, v, now, want, c.Out)
	}
}
