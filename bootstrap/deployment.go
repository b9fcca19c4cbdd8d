package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// scope is the part of a setup that is in the graph; the zero scope is all of it.
type scope struct {
	// group limits the graph to the nodes of one group; empty: all groups.
	group string
	// kept are the names that the submission keeps; nil: all.
	kept map[string]bool
	// report takes the verdicts in place of the run's own table.
	report func(map[string]tfhosts.Verdict)
}

// narrow reads the submission and turns the nodes off that it does not name.
// Every error is exit 64, except where Nix itself is missing.
func (c *Config) narrow(ctx context.Context) error {
	if c.Deployment == "" {
		return nil
	}
	if c.Setup.PublishedNamesExpr == "" {
		return tfhosts.WithExit(tfhosts.ExitUsage, "set published_names_expr in the setup file, or unset DEPLOYMENT",
			errors.New("DEPLOYMENT is set, and the setup does not say which nodes a submission keeps"))
	}
	names, err := c.publishedNames(ctx)
	if err != nil {
		return err
	}
	if c.kept, err = c.checkNames(names); err != nil {
		return err
	}
	var off []string
	for _, name := range tfhosts.SortedNames(c.Setup.Nodes) {
		if !c.kept[name] {
			off = append(off, name)
		}
	}
	if len(off) > 0 {
		c.notice("DEPLOYMENT turns off " + strings.Join(off, ", ") + ": out of the graph; the hosts keep their configuration")
	}
	return nil
}

// publishedNames evaluates published_names_expr for the submission.
func (c *Config) publishedNames(ctx context.Context) ([]string, error) {
	text, err := c.submission()
	if err != nil {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "DEPLOYMENT is the path of a JSON file, or a JSON object itself", err)
	}
	// A copy of what was checked: a pipe can be read once, and a file may change.
	dir, err := os.MkdirTemp("", "tf-hosts-")
	if err != nil {
		return nil, fmt.Errorf("keeping the submission for its evaluation: %w", err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "submission.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return nil, fmt.Errorf("keeping the submission for its evaluation: %w", err)
	}
	c.step("deployment", "reading which nodes the submission keeps")
	ctx, stop := c.untilInterrupt(ctx)
	defer stop()
	names, err := c.Worker.Names(ctx, c.Setup.PublishedNamesExpr, path)
	var exit *tfhosts.ExitError
	switch {
	case err == nil:
		return names, nil
	case c.interrupted():
		return nil, tfhosts.WithExit(tfhosts.ExitInterrupted, "", errors.New("interrupted before the plan"))
	case errors.As(err, &exit):
		return nil, err
	}
	return nil, tfhosts.WithExit(tfhosts.ExitUsage, "correct published_names_expr in the setup file, or the submission", err)
}

// submission is the JSON text of DEPLOYMENT, checked to be one object. Errors do
// not quote it: a submission may hold secrets.
func (c *Config) submission() ([]byte, error) {
	text, where := []byte(c.Deployment), "DEPLOYMENT"
	if !strings.HasPrefix(strings.TrimSpace(c.Deployment), "{") {
		where = fmt.Sprintf("DEPLOYMENT, the file %q", c.Deployment)
		var err error
		if text, err = os.ReadFile(absolute(c.CallerDir, c.Deployment)); err != nil {
			return nil, fmt.Errorf("reading DEPLOYMENT: %w", err)
		}
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(text, &object); err != nil {
		return nil, fmt.Errorf("reading %s: a JSON object is expected: %w", where, err)
	}
	if object == nil {
		return nil, fmt.Errorf("reading %s: a JSON object is expected, not null", where)
	}
	return text, nil
}

// checkNames refuses a list that can not be meant: a wrong submission would else
// take a fleet out of its state.
func (c *Config) checkNames(names []string) (map[string]bool, error) {
	kept := map[string]bool{}
	var unknown []string
	for _, name := range names {
		if _, ok := c.Setup.Nodes[name]; !ok {
			unknown = append(unknown, fmt.Sprintf("%q", name))
		}
		kept[name] = true
	}
	self := c.Setup.Self
	switch {
	case len(unknown) > 0:
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "correct published_names_expr, or add these nodes to the setup",
			fmt.Errorf("the submission keeps nodes that are not in the setup: %s", strings.Join(unknown, ", ")))
	case len(names) == 0 && !c.AllowEmpty:
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "if no node is meant to stay: --allow-empty",
			errors.New("the submission turns off every node"))
	case self != nil && !kept[self.Node] && (len(names) > 0 || c.Bootstrap):
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "keep it in the submission",
			fmt.Errorf("the submission turns off %q, which serves the state of this graph", self.Node))
	}
	return kept, nil
}

// graphNodes are the nodes of the setup that are in the graph.
func (c *Config) graphNodes() map[string]tfhosts.Node {
	nodes := c.Setup.GraphNodes()
	for name := range nodes {
		if !c.member(name) || c.kept != nil && !c.kept[name] {
			delete(nodes, name)
		}
	}
	return nodes
}

// member says whether a node belongs to this graph, turned off or not.
func (c *Config) member(name string) bool {
	return c.group == "" || c.Setup.Nodes[name].Group == c.group
}

// untilInterrupt is a context that ends with the first interrupt, for work that
// leaves nothing half done.
func (c *Config) untilInterrupt(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	stopping, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-c.Interrupt:
			cancel()
		case <-stopping:
		}
	}()
	return ctx, func() {
		close(stopping)
		<-stopped
		cancel()
	}
}
