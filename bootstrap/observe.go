package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sync/errgroup"

	tfhosts "fediversity.eu/tf-hosts"
)

// LookRequest is one node to look at.
type LookRequest struct {
	Name     string
	Node     tfhosts.Node
	Settings tfhosts.NodeSettings
	// Wanted is the store path that it should run; empty: not known.
	Wanted string
}

// Status looks at nodes of the setup and compares them with what the state says
// was deployed last. It takes no lock and writes nothing, here or on a host.
// Without a state that can be read it warns and compares with verdict.json. Of
// cfg it takes what Examine takes, and Worker.Look, Identity and Outputs.
func Status(ctx context.Context, cfg Config, names []string) ([]tfhosts.Observed, error) {
	s := &session{Config: &cfg, workDir: WorkDir(cfg.StateDir, cfg.Setup.Backend.Address)}
	state, err := s.readState(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	wanted, err := s.wanted(ctx, names, state, err)
	if err != nil {
		return nil, err
	}
	identities := make(map[string]string, len(names))
	evaluated := make(chan struct{})
	go func() {
		defer close(evaluated)
		for _, name := range names {
			n := cfg.Setup.Nodes[name]
			id, err := s.Worker.Identity(ctx, name, n.NixosConf, n.ConfigIdentity)
			if err != nil && ctx.Err() == nil {
				s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Node: name, Message: fmt.Sprintf("not known whether a deploy is pending: %v", err)})
			}
			identities[name] = id
		}
	}()
	seen := s.lookAt(ctx, names, wanted)
	<-evaluated
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	s.pending(ctx, seen, wanted, identities)
	return seen, nil
}

// lookAt looks at the nodes, as many at once as deploys run.
func (s *session) lookAt(ctx context.Context, names []string, wanted map[string]deployed) []tfhosts.Observed {
	seen := make([]tfhosts.Observed, len(names))
	var group errgroup.Group
	group.SetLimit(defaultParallelism)
	if n := s.Setup.Runner.Parallelism; n > 0 {
		group.SetLimit(n)
	}
	for i, name := range names {
		group.Go(func() error {
			n := s.Setup.Nodes[name]
			seen[i] = s.Worker.Look(ctx, LookRequest{Name: name, Node: n.Node, Settings: n.Runner, Wanted: wanted[name].system})
			seen[i].Tainted = wanted[name].tainted
			return nil
		})
	}
	_ = group.Wait() // a look has no error: what stood in its way is in its result
	return seen
}

// pending fills in what the setup would deploy. An empty identity is not known.
func (s *session) pending(ctx context.Context, seen []tfhosts.Observed, wanted map[string]deployed, identities map[string]string) {
	for i := range seen {
		id := identities[seen[i].Node]
		if id == "" || id == wanted[seen[i].Node].identity && !seen[i].Tainted {
			continue
		}
		if seen[i].Pending = s.systemOf(ctx, NodeRecord{}, id); seen[i].Pending == "" {
			seen[i].Pending = id
		}
	}
}

// ObservedCode is the exit code of a look: 2 where a node drifted, and 6, which
// wins, where one could not be looked at.
func ObservedCode(seen []tfhosts.Observed) int {
	code := tfhosts.ExitOK
	for _, o := range seen {
		switch {
		case o.Status != "":
			code = tfhosts.WorstExit(code, tfhosts.ExitNodesFailed)
		case len(o.Drift) > 0:
			code = tfhosts.WorstExit(code, tfhosts.ExitChanges)
		}
	}
	return code
}

// TellUnseen tells why nodes could not be looked at.
func TellUnseen(seen []tfhosts.Observed, tell func(tfhosts.Event)) {
	for _, o := range seen {
		if o.Status == "" {
			continue
		}
		tell(tfhosts.Event{Kind: tfhosts.EventError, Node: o.Node, Message: tfhosts.Printable(fmt.Sprintf("%s: %s", o.Status, o.Error))})
		if o.Hint != "" {
			tell(tfhosts.Event{Kind: tfhosts.EventHint, Node: o.Node, Message: tfhosts.Printable(o.Hint)})
		}
	}
}

// WriteObserved prints what was seen as a table, in the given order.
func WriteObserved(w io.Writer, seen []tfhosts.Observed) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tSTATE\tRUNNING\tDEFAULT\tBOOTED\tSINCE\tFAILED UNITS") //nolint:errcheck // tabwriter keeps the error for Flush
	for _, o := range seen {
		fmt.Fprintln(t, tfhosts.Printable(strings.Join([]string{ //nolint:errcheck // as above
			o.Node, stateWord(o), orDash(shortPath(o.Running)), besideRunning(o, o.Default), bootedWord(o), clock(o.Since), orDash(strings.Join(o.FailedUnits, " ")),
		}, "\t")))
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("printing the nodes: %w", err)
	}
	return nil
}

// stateWord says in a word or two how a node is.
func stateWord(o tfhosts.Observed) string {
	switch {
	case o.Status != "":
		return string(o.Status)
	case len(o.Drift) > 0 && o.Pending != "":
		return "drifted: " + strings.Join(o.Drift, ",") + "; pending"
	case len(o.Drift) > 0:
		return "drifted: " + strings.Join(o.Drift, ",")
	case o.Tainted:
		return "tainted"
	case o.Wanted == "" && o.Pending != "":
		return "wanted unknown; pending"
	case o.Wanted == "":
		return "wanted unknown"
	case o.Pending != "":
		return "pending"
	}
	return "ok"
}

// besideRunning shortens a path that most often is the running system's.
func besideRunning(o tfhosts.Observed, path string) string {
	if path != "" && path == o.Running {
		return "same"
	}
	return orDash(shortPath(path))
}

func bootedWord(o tfhosts.Observed) string {
	word := besideRunning(o, o.Booted)
	if o.NeedsReboot {
		word += ", needs reboot"
	}
	return word
}

func clock(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04")
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// drift looks at the hosts and has OpenTofu compare its other resources with
// what is there. Nothing is locked or written. The answer is the table, then the
// text of the plan; with -json one object a line.
func (s *session) drift(ctx context.Context) (int, error) {
	names := tfhosts.SortedNames(s.nodes)
	s.step("observe", "looking at the hosts")
	state, err := s.stateNow(ctx)
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	seen, err := s.observe(ctx, names, state)
	if err != nil {
		return tfhosts.ExitCodeOf(err), err
	}
	if s.args.json {
		err = WriteObservedJSON(s.Answer, seen, "")
	} else {
		err = WriteObserved(s.Answer, seen)
	}
	if err != nil {
		return tfhosts.ExitFailed, err
	}
	TellUnseen(seen, s.event)
	s.step("plan", "comparing the other resources")
	args := s.planArgs("", slices.Concat([]string{"-refresh-only", "-detailed-exitcode"}, s.args.flags))
	planned, err := s.runTofu(ctx, "plan", args, s.Answer, nil)
	code := ObservedCode(seen)
	switch {
	case err != nil:
		return tfhosts.ExitFailed, err
	case planned == 2:
		return tfhosts.WorstExit(code, tfhosts.ExitChanges), nil
	case planned != 0:
		err = s.tofuError("plan", planned)
		return tfhosts.WorstExit(code, tfhosts.ExitCodeOf(err)), err
	}
	return code, nil
}

// WriteObservedJSON prints what was seen as one document, {"nodes": […]}.
func WriteObservedJSON(w io.Writer, seen []tfhosts.Observed, indent string) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", indent)
	doc := struct {
		Nodes []tfhosts.Observed `json:"nodes"`
	}{seen}
	if err := enc.Encode(doc); err != nil {
		return fmt.Errorf("printing the nodes: %w", err)
	}
	return nil
}

// observe compares hosts with a state that was read, within a run. An interrupt
// ends it.
func (s *session) observe(ctx context.Context, names []string, state []byte) ([]tfhosts.Observed, error) {
	ctx, stop := s.untilInterrupt(ctx)
	defer stop()
	wanted, err := s.wanted(ctx, names, state, nil)
	if err != nil {
		return nil, err
	}
	seen := s.lookAt(ctx, names, wanted)
	if s.interrupted() {
		return nil, tfhosts.WithExit(tfhosts.ExitInterrupted, "run the same command again; nothing was changed", errors.New("interrupted while looking at the hosts"))
	}
	identities := make(map[string]string, len(names))
	for _, name := range names {
		identities[name] = s.nodes[name].ConfigIdentity
	}
	s.pending(ctx, seen, wanted, identities)
	return seen, nil
}
