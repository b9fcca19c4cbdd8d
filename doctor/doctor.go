// Package doctor looks at everything a run needs and says what stands in its
// way: the tools, the setup, the working dir, the backend and each node.
//
// It is a flow of its own, since it joins the adapters of the other two flows
// and none of them may import it: what it needs of the wrapper comes in as funcs.
//
// It changes nothing on a host, a backend or this machine. Of the backend it
// takes and releases the lock; a state is never written. A host gets one
// connection, and only scripts that read.
//
//	results := doctor.Run(ctx, doctor.Config{Setup: s, Pool: pool, Nix: client, …})
package doctor

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// Level is how bad a result is.
type Level string

// The levels. A Warn stops no run by itself; a Fail stops one, or will.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Fail Level = "fail"
)

// Result is one line of the answer.
type Result struct {
	// Check says what was looked at: "tofu", "backend lock", "node prod.app1 ssh".
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Message is one line: lower case, no full stop, no secret.
	Message string `json:"message"`
	// Hint says what to do, with a command that can be pasted; empty for OK.
	Hint string `json:"hint,omitempty"`
}

// Config says what to look at. Setup and SetupErr exclude each other; without a
// Setup nodes, backend and working dir are left out.
type Config struct {
	Setup    *tfhosts.Setup
	SetupErr error
	Engine   tofu.FindConfig
	// Environ is the caller's environment, CheckEnviron what every verb refuses
	// in it; nil refuses nothing.
	Environ      []string
	CheckEnviron func(environ []string) error
	Nix          *nix.Client
	// Pool connects to the nodes. Its owner closes it.
	Pool *hostconn.Pool
	// WorkDir is the working dir of the state; ReadWorkDir reads it.
	WorkDir     string
	ReadWorkDir func() (WorkDir, error)
	// Backend finds the backend as every verb does.
	Backend func(ctx context.Context, forward Forward) (Backend, error)
	// Groups are the backends of "tf-hosts all", where the setup has groups. Only
	// they or Backend are in use; InUse says which, as far as this machine knows.
	Groups []GroupBackend
	InUse  InUse
	// Foreign says why the holder of a lock is no dead run of this machine, or
	// "" when it is.
	Foreign func(holder api.LockInfo) (string, error)
	// Limit bounds each check; zero is one minute.
	Limit time.Duration
}

// Forward gives a way to dial through a node's one connection, which stays
// open until Run ends.
type Forward func(ctx context.Context, node string) (func(ctx context.Context, network, addr string) (net.Conn, error), error)

// Backend is the backend as every verb finds it.
type Backend struct {
	// Tried are the places in the order in which they were tried; the last one
	// serves, unless its Err says otherwise. Without any the state is detached.
	Tried []Place
	// Client talks to the place that serves; nil when none does.
	Client *client.Client
	// Holds says in words which state it has.
	Holds string
	// Lost is why a writing verb would refuse, LostHint the way out.
	Lost, LostHint string
	Close          func() error
}

// GroupBackend is the backend of one group's graph.
type GroupBackend struct {
	Group   string
	Backend func(ctx context.Context, forward Forward) (Backend, error)
}

// InUse says which addresses hold the fleet's states: the setup's own, or those
// of its groups. Neither: this machine saw none yet.
type InUse struct{ Plain, Groups bool }

// Place is where the backend was looked for.
type Place struct {
	Address, Through string
	Err              error
}

// WorkDir is what a working dir holds for the next run.
type WorkDir struct {
	// Mode is that of the ledger: "", remote, bootstrapping, detached.
	Mode string
	// Salvage are the files of states that could not be stored; Journaled: the
	// journal holds one.
	Salvage   []string
	Journaled bool
	// Holder names the run that holds the working dir's lock now.
	Holder string
}

// nodesAtOnce bounds the connections that are made at a time: sshd of a shared
// bastion refuses more than MaxStartups (10) that have not logged in yet.
const nodesAtOnce = 10

// defaultLimit bounds one check.
const defaultLimit = time.Minute

// Run makes all checks, side by side, and gives their results sorted by Check.
// It returns early when ctx ends, with what stood in the way as Fail.
func Run(ctx context.Context, cfg Config) []Result {
	r := &run{Config: cfg, links: make(map[string]*link)}
	if r.Limit <= 0 {
		r.Limit = defaultLimit
	}
	if cfg.Setup != nil {
		for name := range cfg.Setup.Nodes {
			r.links[name] = &link{}
		}
	}
	var wg sync.WaitGroup
	for _, check := range []func(context.Context){r.checkTofu, r.checkNix, r.checkSetup, r.checkWorkDir, r.checkBackend} {
		wg.Go(func() {
			ctx, cancel := r.limited(ctx)
			defer cancel()
			check(ctx)
		})
	}
	if cfg.Setup != nil {
		turns := make(chan struct{}, nodesAtOnce)
		for _, name := range tfhosts.SortedNames(cfg.Setup.Nodes) {
			wg.Go(func() {
				turns <- struct{}{}
				defer func() { <-turns }()
				r.checkNode(ctx, name, cfg.Setup.Nodes[name])
			})
		}
	}
	wg.Wait()
	r.hangUp()
	slices.SortFunc(r.results, func(a, b Result) int {
		return strings.Compare(a.Check+"\x00"+a.Message, b.Check+"\x00"+b.Message)
	})
	return r.results
}

// Failed counts the results that are Fail.
func Failed(results []Result) int {
	n := 0
	for _, r := range results {
		if r.Level == Fail {
			n++
		}
	}
	return n
}

type run struct {
	Config
	mu      sync.Mutex
	results []Result
	links   map[string]*link // by node; the map itself never changes
}

func (r *run) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, r.Limit, fmt.Errorf("no answer within %v", r.Limit))
}

func (r *run) add(check string, level Level, message, hint string) {
	if level == OK {
		hint = ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.results = append(r.results, Result{Check: check, Level: level, Message: oneLine(message), Hint: oneLine(hint)})
}

func oneLine(text string) string {
	lines := strings.FieldsFunc(text, func(c rune) bool { return c == '\n' || c == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "; ")
}

// Limits of a clock's difference to this machine's.
const (
	skewWarn = 30 * time.Second
	skewFail = 5 * time.Minute
)

// addSkew judges a clock that showed at when this machine's showed here.
func (r *run) addSkew(check string, at, here time.Time, hint string) {
	skew := at.Sub(here).Round(time.Second)
	level := OK
	switch {
	case skew.Abs() > skewFail:
		level = Fail
	case skew.Abs() > skewWarn:
		level = Warn
	}
	message := "agrees with this machine's"
	switch {
	case skew > time.Second:
		message = fmt.Sprintf("is %v ahead of this machine's", skew)
	case skew < -time.Second:
		message = fmt.Sprintf("is %v behind this machine's", -skew)
	}
	r.add(check, level, message, hint)
}
