package bootstrap

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"

	tfhosts "fediversity.eu/tf-hosts"
)

// AllOptions are what "tf-hosts all" knows beyond a plain verb.
type AllOptions struct {
	// Groups are those to run; empty: all. With exactly one named, its answer
	// is printed as the plain verb's, and what belongs to one state (a plan
	// file, a lock's ID, state-push) is allowed.
	Groups []string
	// Restore makes the run a state-restore of each group.
	Restore *RestoreOptions
	// Worker gives the worker of a group, whose events are to go to events; nil:
	// that of Config.
	Worker func(group string, events func(tfhosts.Event)) Worker
}

// graph is one group's run.
type graph struct {
	group string
	cfg   Config
	self  bool // it holds the node that serves the states
	ran   bool
	code  int
	err   error
	// answer is what the verb printed, unless it went straight to Config.Answer.
	answer   bytes.Buffer
	verdicts map[string]tfhosts.Verdict
}

// RunAll runs a verb on every group as a graph of its own, in parallel, and
// gives the worst exit code. Running deploys share one limit, the parallelism
// of a single graph. With BOOTSTRAP=1 the group of the self_backend node runs
// first and alone, and a destroy runs it last: the other states live on it.
//
// The answers go to cfg.Answer when all have ended. Those of apply and
// state-pull, and those of output, show and validate with -json, are one JSON
// document keyed by group; other answers with -json are objects, one a line,
// each with a member "group"; all else is text, each line behind "[GROUP] ".
func RunAll(ctx context.Context, cfg Config, opts AllOptions) (int, error) {
	if cfg.Answer == nil {
		cfg.Answer = io.Discard
	}
	if cfg.Story == nil {
		cfg.Story = io.Discard
	}
	cfg.Story = &serial{w: cfg.Story}
	all, err := cfg.prepareAll(ctx, opts)
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	if err := cfg.askOnce(all, opts); err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	for _, stage := range stages(all, &cfg) {
		cfg.runStage(ctx, stage, opts)
		if cause := stopping(stage); cause != nil {
			for _, g := range all {
				if !g.ran {
					g.skip(cause, cfg.interrupted())
				}
			}
			break
		}
	}
	var codes []int
	var errs []error
	for _, g := range all {
		codes = append(codes, g.code)
		if g.err != nil {
			errs = append(errs, groupError(g.group, g.err))
		}
	}
	code := tfhosts.WorstExit(codes...)
	for _, print := range []func([]*graph, AllOptions) error{cfg.printAnswers, cfg.printVerdicts} {
		if err := print(all, opts); err != nil {
			errs = append(errs, err)
			code = tfhosts.WorstExit(code, tfhosts.ExitFailed)
		}
	}
	return code, errors.Join(errs...)
}

// prepareAll finds the groups to run and checks all that can be checked before
// the first of them begins.
func (c *Config) prepareAll(ctx context.Context, opts AllOptions) ([]*graph, error) {
	if err := checkEnviron(c.Environ); err != nil {
		return nil, err
	}
	args, err := parseArguments(c.Verb, c.Args, c.CallerDir, c.Setup.Runner.Parallelism)
	if err != nil {
		return nil, err
	}
	if _, err := c.readWaves(args); err != nil {
		return nil, err
	}
	limit, err := args.limit()
	if err != nil {
		return nil, err
	}
	names, err := c.groups(opts.Groups)
	if err != nil {
		return nil, err
	}
	if names, err = c.selectedGroups(args, names); err != nil {
		return nil, err
	}
	if err := c.checkRedeploy(args); err != nil {
		return nil, err
	}
	if err := c.checkSelf(names); err != nil {
		return nil, err
	}
	operands, err := c.route(args, names, len(opts.Groups) == 1)
	if err != nil {
		return nil, err
	}
	if err := c.narrow(ctx); err != nil {
		return nil, err
	}
	c.Deployment = "" // read
	shared := newSlots(limit, c.Interrupt)
	c.Ask = oneAtATime(c.Ask)
	var all []*graph
	var errs []error
	for _, name := range names {
		ops, ok := operands[name]
		if !ok {
			continue
		}
		g, err := c.newGraph(name, opts, shared)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		g.cfg.Args = ops
		all = append(all, g)
	}
	if len(errs) > 0 {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "correct the addresses in the setup file", errors.Join(errs...))
	}
	return all, c.claim(ctx, all, args.wait)
}

// groups lists the groups to run, sorted. Every node must be in one: a node
// without would silently be in no graph.
func (c *Config) groups(wanted []string) ([]string, error) {
	known := map[string]bool{}
	var without []string
	for _, name := range tfhosts.SortedNames(c.Setup.Nodes) {
		if group := c.Setup.Nodes[name].Group; group != "" {
			known[group] = true
		} else {
			without = append(without, name)
		}
	}
	switch {
	case len(without) > 0:
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, `give each a "group" in the setup file, or run the verb without "all"`,
			fmt.Errorf("nodes without a group: %s", strings.Join(without, ", ")))
	case len(known) == 0:
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "", errors.New("the setup has no nodes, so there are no groups"))
	case len(wanted) == 0:
		return tfhosts.SortedNames(known), nil
	}
	for _, group := range wanted {
		if !known[group] {
			return nil, tfhosts.WithExit(tfhosts.ExitUsage, "the groups are: "+strings.Join(tfhosts.SortedNames(known), ", "),
				fmt.Errorf("there is no group %q in the setup", group))
		}
	}
	wanted = slices.Clone(wanted)
	slices.Sort(wanted)
	return slices.Compact(wanted), nil
}

// checkSelf refuses what needs to know which group serves the states.
func (c *Config) checkSelf(names []string) error {
	self := c.Setup.Self
	switch {
	case self == nil && (c.Bootstrap || c.SelfBackend && c.Verb.Name == "destroy"):
		return tfhosts.WithExit(tfhosts.ExitUsage, "name its node in self_backend",
			errors.New("the setup does not say in which group the backend is that holds the states"))
	case c.Bootstrap && !slices.Contains(names, c.Setup.Nodes[self.Node].Group):
		return tfhosts.WithExit(tfhosts.ExitUsage, "run it first: BOOTSTRAP=1 tf-hosts all --group "+c.Setup.Nodes[self.Node].Group,
			fmt.Errorf("BOOTSTRAP=1 without the group of %q, which serves the states", self.Node))
	}
	return nil
}

// newGraph is the run of one group.
func (c *Config) newGraph(group string, opts AllOptions, shared *slots) (*graph, error) {
	own, err := groupSetup(c.Setup, group)
	if err != nil {
		return nil, fmt.Errorf("suffixing the state's address for the group %q: %w", group, err)
	}
	g := &graph{group: group, cfg: *c}
	g.self = own.Self != nil && own.Nodes[own.Self.Node].Group == group
	cfg := &g.cfg
	cfg.Setup, cfg.group = own, group
	cfg.Environ = slices.Clip(c.Environ) // each appends to its own
	cfg.SelfBackend, cfg.Bootstrap = g.self, c.Bootstrap && g.self
	cfg.report = func(all map[string]tfhosts.Verdict) { g.verdicts = all }
	cfg.Events = func(e tfhosts.Event) {
		if e.Group == "" {
			e.Group = group
		}
		c.event(e)
	}
	if len(opts.Groups) != 1 {
		cfg.Answer = &g.answer
	}
	if c.Ask != nil {
		cfg.Ask = func(question string) (bool, error) { return c.Ask("[" + group + "] " + question) }
	}
	if opts.Worker != nil {
		cfg.Worker = opts.Worker(group, cfg.Events)
	}
	cfg.Worker = shared.limit(cfg.Worker)
	return g, nil
}

// askOnce asks once for a destroy of several groups, before the first of them
// plans: one that is destroyed last must not be declined when the others are
// gone. With one group named its plan is shown and asked about, as without "all".
func (c *Config) askOnce(all []*graph, opts AllOptions) error {
	if c.Ask == nil || c.Verb.Name != "destroy" || len(opts.Groups) == 1 || len(all) == 0 {
		return nil
	}
	args, err := parseArguments(c.Verb, c.Args, c.CallerDir, 0)
	if err != nil || args.autoApprove {
		return err
	}
	var names []string
	for _, g := range all {
		g.cfg.Ask = nil
		names = append(names, g.group)
	}
	ok, err := c.Ask(fmt.Sprintf(`destroy what "all plan -destroy" shows, in the groups %s?`, strings.Join(names, ", ")))
	if err != nil {
		return err
	}
	if !ok {
		return ErrDeclined
	}
	return nil
}

// stages says which groups run at the same time.
func stages(all []*graph, c *Config) [][]*graph {
	var self, others []*graph
	for _, g := range all {
		if g.self {
			self = append(self, g)
		} else {
			others = append(others, g)
		}
	}
	switch {
	case c.Bootstrap:
		return [][]*graph{self, others}
	case c.Verb.Name == "destroy":
		return [][]*graph{others, self}
	}
	return [][]*graph{all}
}

// runStage runs groups to their ends.
func (c *Config) runStage(ctx context.Context, stage []*graph, opts AllOptions) {
	var wg sync.WaitGroup
	for _, g := range stage {
		wg.Go(func() {
			story := newLines(c.Story, "["+g.group+"] ")
			g.cfg.Story = story
			if opts.Restore != nil {
				g.code, g.err = Restore(ctx, g.cfg, *opts.Restore)
			} else {
				g.code, g.err = Run(ctx, g.cfg)
			}
			g.ran = true
			if err := story.flush(); err != nil {
				g.err = errors.Join(g.err, err)
			}
		})
	}
	wg.Wait()
}

// stopping is the group whose failure keeps the later stages from running.
func stopping(stage []*graph) *graph {
	for _, g := range stage {
		if g.code != tfhosts.ExitOK && g.code != tfhosts.ExitChanges || g.cfg.interrupted() {
			return g
		}
	}
	return nil
}

// skip says why a group was not run.
func (g *graph) skip(cause *graph, interrupted bool) {
	if interrupted {
		g.code = tfhosts.ExitInterrupted
		g.err = tfhosts.WithExit(g.code, "", errors.New("interrupted before it began"))
		return
	}
	g.code = cause.code
	g.err = tfhosts.WithExit(g.code, "", fmt.Errorf("not run, because the group %q failed", cause.group))
}

// groupError says of which group an error is, line by line, and makes its hints
// commands on that group.
func groupError(group string, err error) error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		if parts := joined.Unwrap(); err.Error() == errors.Join(parts...).Error() {
			var all []error
			for _, part := range parts {
				all = append(all, groupError(group, part))
			}
			return errors.Join(all...)
		}
	}
	var exit *tfhosts.ExitError
	if errors.As(err, &exit) {
		exit.Hint = groupHint(group, exit.Hint)
	}
	return fmt.Errorf("group %q: %w", group, err)
}

// groupHint makes the commands of a hint commands on one group.
func groupHint(group, hint string) string {
	words := strings.Split(hint, " ")
	for i := 0; i+1 < len(words); i++ {
		verb := strings.TrimRight(words[i+1], ";,.:")
		_, ok := tfhosts.LookupVerb(verb)
		if words[i] == "tf-hosts" && (ok || verb == VerbRestore().Name) {
			words[i] += " all --group " + group
		}
	}
	return strings.Join(words, " ")
}

// oneAtATime keeps the questions of parallel groups apart.
func oneAtATime(ask func(string) (bool, error)) func(string) (bool, error) {
	if ask == nil {
		return nil
	}
	var mu sync.Mutex
	return func(question string) (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		return ask(question)
	}
}

// verdictsOf merges the verdicts of all groups: a node is in one of them.
func verdictsOf(all []*graph) map[string]tfhosts.Verdict {
	merged := map[string]tfhosts.Verdict{}
	for _, g := range all {
		maps.Copy(merged, g.verdicts)
	}
	return merged
}
