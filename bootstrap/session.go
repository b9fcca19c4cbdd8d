package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize/english"
	"github.com/gofrs/flock"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
	"fediversity.eu/tf-hosts/internal/tofu"
	"fediversity.eu/tf-hosts/setup"
	"fediversity.eu/tf-hosts/tfgen"
)

// Names inside the folder of a run.
const (
	graphFile    = "main.tf.json"
	planFile     = "plan"
	dataFolder   = "data"
	erroredState = "errored.tfstate"
	lockFile     = ".terraform.lock.hcl"
	stdoutSuffix = ".stdout"
	stderrSuffix = ".stderr"
)

// relayClose bounds the wait for what tofu, which is gone, had still asked of
// the relay.
const relayClose = 30 * time.Second

// session is one run: the working dir, its lock, the relay and the folder in
// which tofu runs.
type session struct {
	*Config
	args       *arguments
	id         string
	started    time.Time
	workDir    string
	runDir     string
	lock       *flock.Flock
	ledger     *Ledger
	ledgerText []byte // what of it is durable
	ledgerMu   sync.Mutex
	info       relay.RunInfo
	found      *found // the backend, when it answered
	engine     *tofu.Engine
	relay      *relay.Relay
	// interruptible is relay, for the goroutine that watches for interrupts.
	interruptible atomic.Pointer[relay.Relay]
	env           []string
	// byNode guards nodes and built: a deploy, which another process asks for,
	// reads what was set before tofu began.
	byNode  sync.Mutex
	nodes   map[string]tfhosts.Node
	hand    *handover
	drop    chan struct{}
	results *verdicts
	built   map[string]Built // by identity, set before the apply
	// changes are those of cycle 1, for the one table at the end.
	changes []tofu.NodeChange
	selection
	// waves are those of the setup, for an apply that is made in waves.
	waves []wave
	// unbegun are the nodes of the waves that did not begin, since one failed.
	unbegun []string
	// targets are the -target flags of cycle 1.
	targets []string
	// checkMigrated: cycle 1 ended with an empty plan, so the plan on the
	// backend must be empty, too.
	checkMigrated           bool
	identified, initialized bool
	tofuFailed              bool // some command of this run
	// tried is told of each place where the backend was looked for; may be nil.
	tried func(Tried)
}

// open prepares a run up to the point where the state is looked at: arguments,
// working dir, lock, ledger, engine. close must be called for a session even
// when open fails.
func (s *session) open(ctx context.Context) error {
	if err := checkEnviron(s.Environ); err != nil {
		return err
	}
	var err error
	s.args, err = parseArguments(s.Verb, s.Args, s.CallerDir, s.Setup.Runner.Parallelism)
	if err != nil {
		return err
	}
	s.args.addresses(s.Verb, s.Setup.Nodes)
	if _, err := s.checkSelection(s.args); err != nil {
		return err
	}
	if err := s.checkRedeploy(s.args); err != nil {
		return err
	}
	if s.waves, err = s.readWaves(s.args); err != nil {
		return err
	}
	if s.info, err = thisRun(s.id); err != nil {
		return err
	}
	for _, dir := range []string{s.workDir, filepath.Join(s.workDir, "init"), s.runDir} {
		if err := MakePrivate(dir); err != nil {
			return err
		}
	}
	if err := s.writeRunNote(); err != nil {
		return err
	}
	if s.Verb.Writes {
		h := holder{Run: s.id, Who: client.Who(), Verb: s.Verb.Name, PID: os.Getpid(), Started: s.started}
		waiting, stop := s.untilInterrupt(ctx)
		s.lock, err = takeLock(waiting, s.workDir, h, s.args.wait, s.notice)
		stop()
		if err != nil {
			return err
		}
		if err := s.unmark(); err != nil {
			return err
		}
		for _, dir := range []string{s.workDir, s.journalDir(), s.salvageDir(), s.packagesDir()} {
			if err := durable.Sweep(dir); err != nil {
				return err
			}
		}
	}
	if s.lock == nil { // the others do it when they have looked for states to salvage
		if err := s.tidy(); err != nil {
			return err
		}
	}
	if err := s.checkPlain(); err != nil {
		return err
	}
	if s.ledger, err = readLedger(s.workDir, s.Setup.Backend.Address); err != nil {
		return err
	}
	if s.engine, err = tofu.Find(ctx, s.Engine); err != nil {
		return tfhosts.WithExit(tfhosts.ExitFailed, engineHint, err)
	}
	return s.checkEngine(ctx)
}

// connect puts the relay before an upstream and makes the run's folder ready
// for tofu: graph, environment, init. It is called once for each phase.
func (s *session) connect(ctx context.Context, upstream relay.Upstream, kind string) error {
	if err := s.identify(ctx); err != nil {
		return err
	}
	graph, err := s.writeGraph()
	if err != nil {
		return err
	}
	endpoint, err := s.startRelay(ctx, upstream, kind)
	if err != nil {
		return err
	}
	if err := s.openSocket(); err != nil {
		return err
	}
	if err := s.setEnviron(endpoint); err != nil {
		return err
	}
	return s.initialize(ctx, graph)
}

// disconnect ends a phase: no deploy runs any more, a lock that tofu left is
// released, the ledger knows the state that was seen last.
func (s *session) disconnect() error {
	var errs []error
	if s.hand != nil {
		errs = append(errs, s.hand.Close())
		s.hand = nil
	}
	if s.relay == nil {
		return errors.Join(errs...)
	}
	r := s.relay
	s.relay = nil
	errs = append(errs, s.release(r))
	if body, ok := r.LastState(); ok && s.Verb.Writes {
		errs = append(errs, s.remember(body))
	}
	ctx, cancel := context.WithTimeout(context.Background(), relayClose)
	defer cancel()
	errs = append(errs, r.Close(ctx))
	s.interruptible.Store(nil)
	return errors.Join(errs...)
}

func (s *session) journalDir() string { return filepath.Join(s.workDir, "journal") }

func (s *session) openSocket() error {
	if !s.Verb.Writes || !s.Verb.NeedsNodes {
		return nil
	}
	var err error
	s.hand, err = listenHandover(s.drop, s.deployNode)
	return err
}

// reopenSocket gives the next apply of a phase a socket: the one before closed
// its own.
func (s *session) reopenSocket() error {
	if s.hand != nil {
		return nil
	}
	if err := s.openSocket(); err != nil || s.hand == nil {
		return err
	}
	s.env = append(s.env, "TF_HOSTS_SOCK="+s.hand.path) // the last of a name counts
	return nil
}

func (s *session) setEnviron(endpoint relay.Endpoint) error {
	cliConfig := filepath.Join(s.runDir, "cli.tofurc")
	if err := os.WriteFile(cliConfig, nil, 0o600); err != nil {
		return fmt.Errorf("writing the CLI configuration of tofu: %w", err)
	}
	variable, _, err := setup.NodesVariable(s.runDir, s.nodes)
	if err != nil {
		return err
	}
	socket := ""
	if s.hand != nil {
		socket = s.hand.path
	}
	s.env = tofuEnviron(s.Environ, endpoint, filepath.Join(s.runDir, dataFolder), cliConfig, socket, variable)
	return nil
}

// identify fills in the config identity of every node, where the verb's plan
// depends on it. All nodes that can not be evaluated are named at once.
func (s *session) identify(ctx context.Context) error {
	if s.identified {
		return nil
	}
	s.identified = true
	s.nodes = s.graphNodes()
	if !s.Verb.NeedsNodes {
		return nil
	}
	s.step("identify", "reading the identity of "+english.Plural(len(s.nodes), "node", ""))
	ctx, stop := s.untilInterrupt(ctx)
	defer stop()
	var errs []error
	for _, name := range tfhosts.SortedNames(s.nodes) {
		n := s.nodes[name]
		identity, err := s.Worker.Identity(ctx, name, n.NixosConf, n.ConfigIdentity)
		if s.interrupted() {
			return tfhosts.WithExit(tfhosts.ExitInterrupted, "run the same command again; nothing was changed", errors.New("interrupted before the plan"))
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("evaluating %q: %w", name, err))
			continue
		}
		n.ConfigIdentity = identity
		s.nodes[name] = n
	}
	if len(errs) > 0 {
		return tfhosts.WithExit(tfhosts.ExitFailed, "nothing was planned or changed; correct nixos_conf and run the same command again", errors.Join(errs...))
	}
	return nil
}

func (s *session) writeGraph() ([]byte, error) {
	runner := append(append([]string{}, s.Setup.DeployRunner...), s.Executable...)
	graph, err := tfgen.Graph(tfgen.Options{DeployRunner: runner, Bash: s.Setup.Bash})
	if err != nil {
		return nil, fmt.Errorf("writing the graph: %w", err)
	}
	if err := os.WriteFile(filepath.Join(s.runDir, graphFile), graph, 0o600); err != nil {
		return nil, fmt.Errorf("writing the graph: %w", err)
	}
	return graph, nil
}

// startRelay puts the relay between tofu and the upstream. The retry settings of
// the setup are the relay's: a client makes one try, so that the relay knows of
// every lost answer. A writing run enters the ledger before its tofu exists.
func (s *session) startRelay(ctx context.Context, upstream relay.Upstream, kind string) (relay.Endpoint, error) {
	b := s.Setup.Backend
	var seen []byte
	if kind == upstreamBackend {
		seen = s.found.body
	}
	r, err := relay.New(relay.Config{
		Upstream: upstream, JournalDir: s.journalDir(), RunInfo: s.info, Seen: seen, Contacted: kind == upstreamBackend,
		Events: s.Events, Fault: s.Fault, FirstTries: b.RetryMax + 1,
		RetryWaitMin: b.RetryWaitMin, RetryWaitMax: b.RetryWaitMax,
		AllowRewind: s.forcedPush(),
	})
	if err != nil {
		return relay.Endpoint{}, err
	}
	endpoint, err := r.Start(ctx)
	if err != nil {
		return relay.Endpoint{}, err
	}
	s.relay = r
	s.interruptible.Store(r)
	if s.interrupted() {
		r.Interrupted()
	}
	if !s.Verb.Writes || s.Verb.Name == "force-unlock" {
		// force-unlock posts nothing, and the run before it may have a state to
		// salvage.
		return endpoint, nil
	}
	s.ledger.Run = &RunRef{
		RunInfo: s.info, Verb: s.Verb.Name, Engine: s.engine.Resolved, Port: endpoint.Port, Username: endpoint.Username, Password: endpoint.Password, Upstream: kind,
	}
	return endpoint, s.writeLedger()
}

// runTofu runs one command of the engine in the run's folder.
func (s *session) runTofu(ctx context.Context, name string, args []string, stdout io.Writer, stdin io.Reader) (int, error) {
	if !s.Color {
		args = insertFlag(args, "-no-color")
	}
	code, err := s.engine.Run(ctx, tofu.Command{
		Args: args, Dir: s.runDir, Env: s.env,
		StdoutFile: filepath.Join(s.runDir, name+stdoutSuffix), StderrFile: filepath.Join(s.runDir, name+stderrSuffix),
		Stdout: stdout, Stderr: s.Story, Stdin: stdin,
	}, s.Interrupt)
	s.tofuFailed = s.tofuFailed || code != 0 || err != nil
	return code, err
}

// insertFlag puts a flag behind the command's own words and before operands.
func insertFlag(args []string, flag string) []string {
	n := 1
	if args[0] == "state" {
		n = 2
	}
	return append(append(append([]string{}, args[:n]...), flag), args[n:]...)
}

// close ends the run's parts in the order in which they depend on each other.
func (s *session) close() error {
	errs := []error{s.disconnect()}
	if s.lock != nil && s.ledger != nil { // every tofu of this run was waited for
		errs = append(errs, s.search(s.runDir, s.id))
	}
	if s.found != nil {
		errs = append(errs, s.found.close())
	}
	if s.lock != nil {
		errs = append(errs, s.lock.Unlock())
	}
	return errors.Join(errs...)
}
