package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/client"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
)

// grouped is groups.json in the working dir of an address of which "all" made
// those of its groups. It outlives groups that left the setup.
type grouped struct {
	Version int `json:"version"`
	// Groups are the addresses by group.
	Groups map[string]string `json:"groups"`
}

func groupedPath(workDir string) string { return filepath.Join(workDir, "groups.json") }

func readGrouped(workDir string) (*grouped, error) {
	g := &grouped{Version: 1, Groups: map[string]string{}}
	b, err := os.ReadFile(groupedPath(workDir))
	if errors.Is(err, fs.ErrNotExist) {
		return g, nil
	}
	if err == nil {
		err = json.Unmarshal(b, g)
	}
	if err != nil {
		return nil, fmt.Errorf("reading which groups there are: %w", err)
	}
	return g, nil
}

// claim makes an address one of "all": it is not used plainly, and from then on
// a plain verb on it is refused. Both hold as long as there are resources.
func (c *Config) claim(ctx context.Context, all []*graph, wait time.Duration) (err error) {
	address := c.Setup.Backend.Address
	dir := WorkDir(c.StateDir, address)
	if c.Verb.Writes {
		if err := MakePrivate(dir); err != nil {
			return err
		}
		h := holder{Run: "all", Who: client.Who(), Verb: "all " + c.Verb.Name, PID: os.Getpid(), Started: time.Now()}
		lock, err := takeLock(ctx, dir, h, wait, c.notice)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, lock.Unlock()) }()
	}
	used, err := inUse(dir)
	if err != nil {
		return err
	}
	if used {
		return tfhosts.WithExit(tfhosts.ExitUsage, `go on without "all", destroy that graph first, or give "all" another address`,
			fmt.Errorf(`the state at %s holds the nodes of a run without "all"; the same node would be in two graphs`, address))
	}
	have, err := readGrouped(dir)
	if err != nil {
		return err
	}
	now := maps.Clone(have.Groups)
	for _, g := range all {
		now[g.group] = g.cfg.Setup.Backend.Address
	}
	if err := c.warnLeft(now); err != nil {
		return err
	}
	if !c.Verb.Writes || maps.Equal(now, have.Groups) {
		return nil
	}
	b, err := json.MarshalIndent(grouped{Version: 1, Groups: now}, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding which groups there are: %w", err)
	}
	return durable.Replace(groupedPath(dir), append(b, '\n'), 0o600, "groups", c.Fault)
}

// warnLeft names the groups that are in the setup no more and still have a state.
func (c *Config) warnLeft(groups map[string]string) error {
	inSetup := map[string]bool{}
	for _, n := range c.Setup.Nodes {
		inSetup[n.Group] = true
	}
	for _, name := range tfhosts.SortedNames(groups) {
		if inSetup[name] {
			continue
		}
		used, err := inUse(WorkDir(c.StateDir, groups[name]))
		if err != nil {
			return err
		}
		if used {
			c.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "groups", Message: fmt.Sprintf(
				"the group %q is in the setup no more; its state at %s keeps its nodes", name, groups[name])})
		}
	}
	return nil
}

// checkPlain refuses a plain verb on an address of "all".
func (s *session) checkPlain() error {
	if s.group != "" {
		return nil
	}
	g, err := readGrouped(s.workDir)
	if err != nil {
		return err
	}
	for _, name := range tfhosts.SortedNames(g.Groups) {
		used, err := inUse(WorkDir(s.StateDir, g.Groups[name]))
		if err != nil {
			return err
		}
		if used {
			return tfhosts.WithExit(tfhosts.ExitUsage, fmt.Sprintf("tf-hosts all %s, or for one group: tf-hosts all --group %s %[1]s", s.Verb.Name, name),
				fmt.Errorf(`the address %s is used by "tf-hosts all" (group %q); the same node would be in two graphs`, s.Setup.Backend.Address, name))
		}
	}
	return nil
}

// inUse says whether this machine knows of resources in the state of a working
// dir, or can not know that there are none.
func inUse(workDir string) (bool, error) {
	b, err := os.ReadFile(ledgerPath(workDir))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading the ledger: %w", err)
	}
	var l Ledger
	if err := json.Unmarshal(b, &l); err != nil {
		return false, fmt.Errorf("reading the ledger %q: %w", ledgerPath(workDir), err)
	}
	switch {
	case l.Mode == ModeBootstrapping:
		return true, nil
	case l.known():
		return l.State.Resources > 0 || l.State.Encrypted, nil
	}
	// Killed in its first apply: the ledger comes after the journal.
	entries, err := relay.ReadJournal(filepath.Join(workDir, "journal"))
	return len(entries) > 0, err
}
