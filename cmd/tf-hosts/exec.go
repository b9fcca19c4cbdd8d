package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/bootstrap"
	"fediversity.eu/tf-hosts/hostconn"
)

type execOptions struct {
	on      []string
	sudo    bool
	timeout time.Duration
}

func (o *execOptions) addFlags(c *cobra.Command) {
	c.Flags().StringArrayVar(&o.on, "on", nil, "the nodes to run it on: names, globs, @tag, !exclude, separated by commas; '*' is all")
	c.Flags().BoolVar(&o.sudo, "sudo", false, "run it as root, by the node's become command where the login is another user")
	c.Flags().DurationVar(&o.timeout, "timeout", 10*time.Minute, "give a command up after so long; 0 is no limit")
}

func newExecCommand(p *program) *cobra.Command {
	opts := &execOptions{}
	c := &cobra.Command{
		Use:   "exec --on NODES [--json] -- COMMAND [ARG...]",
		Short: "run a command on many nodes at once",
		Long: `exec runs a command on the selected nodes, as many at once as runner.parallelism
of the setup says. The words of the command arrive on the host as they are given,
whatever the login shell is; nothing expands or splits them. A shell must be asked
for: -- sh -c 'cd /etc && ls'. Its stdin is empty.

Each line of output begins with the node's name, on stdout and on stderr, in whole
lines as they come. With --json stdout is one object a node instead:
{"node", "code", "stdout", "stderr", "seconds"}, and "error" where there is no code.
On a terminal, control characters of the hosts are replaced.

The exit code is the worst, that is the highest, of the commands' own. It is 6 when
no command failed and a node could not be asked: not reached, refused, the limit or
the connection at its end. A command that was given up may go on on its host.`,
		Example: "  tf-hosts exec --on 'prod.*' -- uptime\n  tf-hosts exec --on @web,!prod.app3 --sudo -- systemctl restart nginx",
		Args:    cobra.ArbitraryArgs,
		RunE:    func(c *cobra.Command, args []string) error { return p.runExec(c.Context(), opts, args) },
	}
	opts.addFlags(c)
	c.Flags().SetInterspersed(false) // what follows the command is its own
	return c
}

// execResult is what became of the command on one node.
type execResult struct {
	Node    string  `json:"node"`
	Code    *int    `json:"code,omitempty"` // nil: it is not known
	Stdout  string  `json:"stdout"`
	Stderr  string  `json:"stderr"`
	Seconds float64 `json:"seconds"`
	Error   string  `json:"error,omitempty"`
}

func (p *program) runExec(ctx context.Context, opts *execOptions, argv []string) error {
	usage := func(err error) error {
		return tfhosts.WithExit(tfhosts.ExitUsage, "tf-hosts exec --on '*' -- uptime", err)
	}
	switch {
	case len(opts.on) == 0:
		return usage(errors.New("which nodes? --on names them"))
	case len(argv) == 0:
		return usage(errors.New("there is no command to run"))
	case opts.timeout < 0:
		return usage(fmt.Errorf("--timeout %s is less than nothing", opts.timeout))
	}
	s, err := p.loadSetup(true)
	if err != nil {
		return err
	}
	names, err := tfhosts.Select(s.Nodes, opts.on)
	if err != nil {
		return err
	}
	stateDir, err := p.stateDir()
	if err != nil {
		return err
	}
	ctx, stop := p.untilInterrupt(ctx, "interrupted; commands that had begun may go on on their hosts")
	defer stop()
	pool := hostconn.NewPool(hostconn.Config{KnownHosts: bootstrap.KnownHosts(bootstrap.WorkDir(stateDir, s.Backend.Address)), Events: p.teller.event})
	e := &execRun{program: p, opts: opts, argv: argv, pool: pool, out: &sharedWriter{w: p.stdout}}
	var group errgroup.Group
	group.SetLimit(parallelism(s))
	results := make([]execResult, len(names))
	for i, name := range names {
		group.Go(func() error {
			results[i] = e.on(ctx, name, s.Nodes[name])
			return nil
		})
	}
	err = errors.Join(group.Wait(), pool.Close(), e.out.err)
	if ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	p.code = execCode(results)
	if n := failedOn(results); n > 0 {
		err = errors.Join(fmt.Errorf("the command failed on %d of %s", n, english.Plural(len(results), "node", "")), err)
	}
	return err
}

// parallelism is how many nodes are worked on at once.
func parallelism(s *tfhosts.Setup) int {
	if s.Runner.Parallelism > 0 {
		return s.Runner.Parallelism
	}
	return 10
}

// execCode is the worst code of the commands; where all are 0, or there is none,
// it is 6 when a node could not be asked.
func execCode(results []execResult) int {
	worst, unasked := 0, false
	for _, r := range results {
		if r.Code == nil {
			unasked = true
		} else {
			worst = max(worst, *r.Code)
		}
	}
	if worst == 0 && unasked {
		return tfhosts.ExitNodesFailed
	}
	return worst
}

func failedOn(results []execResult) int {
	n := 0
	for _, r := range results {
		if r.Code == nil || *r.Code != 0 {
			n++
		}
	}
	return n
}

// execRun is one command on many nodes.
type execRun struct {
	*program
	opts *execOptions
	argv []string
	pool *hostconn.Pool
	out  *sharedWriter
}

// execScript finds what a session without login shell may not look for; what the
// host's own PATH finds comes first.
const execScript = `PATH=$PATH:/run/current-system/sw/bin:/nix/var/nix/profiles/default/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
exec "$@"`

// on runs the command on one node and tells what became of it.
func (e *execRun) on(ctx context.Context, name string, node tfhosts.SetupNode) execResult {
	res := execResult{Node: name}
	start := time.Now()
	err := e.ask(ctx, name, node, &res)
	res.Seconds = time.Since(start).Seconds()
	if err != nil {
		res.Error = err.Error()
		if ctx.Err() == nil {
			e.teller.event(tfhosts.Event{Kind: tfhosts.EventError, Node: name, Message: tfhosts.Printable(res.Error)})
		}
	}
	if e.jsonLog {
		b, err := json.Marshal(res)
		if err != nil { // strings and numbers always marshal
			panic(err)
		}
		e.out.Write(append(b, '\n')) //nolint:errcheck // sharedWriter keeps the error
	}
	return res
}

func (e *execRun) ask(ctx context.Context, name string, node tfhosts.SetupNode, res *execResult) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	target, err := hostconn.TargetOf(name, node.Node, node.Runner)
	if err != nil {
		return err
	}
	conn, err := e.pool.Dial(ctx, target)
	if err != nil {
		return err
	}
	cmd := hostconn.Command{Script: execScript, Args: e.argv, Become: e.opts.sudo, Timeout: e.opts.timeout}
	if cmd.Timeout == 0 {
		cmd.Timeout = noLimit
	}
	var lines []*lineWriter
	if !e.jsonLog {
		stdout := &lineWriter{w: e.out, prefix: name + ": ", printable: isTerminal(e.stdout)}
		stderr := &lineWriter{w: e.teller, prefix: name + ": ", printable: isTerminal(e.stderr)}
		cmd.Stdout, cmd.Stderr, lines = stdout, stderr, append(lines, stdout, stderr)
	}
	got, err := conn.Run(ctx, cmd)
	_ = conn.Close() // what was asked of it has its own error; nothing is written after it
	for _, l := range lines {
		l.flush()
	}
	res.Stdout, res.Stderr = string(got.Stdout), string(got.Stderr)
	if err == nil {
		res.Code = &got.Code
	}
	return err
}

// noLimit is a limit that nothing reaches.
const noLimit = 10 * 365 * 24 * time.Hour

// untilInterrupt is ctx until the program is interrupted; stop ends the watch.
func (p *program) untilInterrupt(ctx context.Context, message string) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-p.interrupt:
			cancel(tfhosts.WithExit(tfhosts.ExitInterrupted, "", errors.New(message)))
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-watched
	}
}

// sharedWriter takes whole lines of several goroutines. A write that failed does
// not end the commands; the error is told at the end.
type sharedWriter struct {
	mu  sync.Mutex
	w   io.Writer
	err error
}

func (s *sharedWriter) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		if _, err := s.w.Write(b); err != nil {
			s.err = fmt.Errorf("printing the output: %w", err)
		}
	}
	return len(b), nil
}

// longestLine is where a line without an end is broken.
const longestLine = 1 << 20

// lineWriter puts a prefix in front of each line and passes on whole lines, each
// in one write. It never fails: nobody else's command ends because of it.
type lineWriter struct {
	w         io.Writer
	prefix    string
	printable bool
	partial   []byte
}

func (l *lineWriter) Write(b []byte) (int, error) {
	rest := append(l.partial, b...)
	for {
		end := bytes.IndexByte(rest, '\n')
		switch {
		case end >= 0:
			l.line(string(rest[:end]))
			rest = rest[end+1:]
		case len(rest) >= longestLine:
			l.line(string(rest))
			rest = nil
		default:
			l.partial = append([]byte(nil), rest...)
			return len(b), nil
		}
	}
}

func (l *lineWriter) line(text string) {
	if l.printable {
		text = tfhosts.Printable(strings.TrimSuffix(text, "\r"))
	}
	io.WriteString(l.w, l.prefix+text+"\n") //nolint:errcheck // see above
}

// flush passes on a last line without its end.
func (l *lineWriter) flush() {
	if len(l.partial) > 0 {
		l.line(string(l.partial))
		l.partial = nil
	}
}
