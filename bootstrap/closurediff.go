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
	"slices"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// packageList is packages/HASH.json: what a system consists of, kept because
// the store of this machine drops the system itself.
type packageList struct {
	Version  int        `json:"version"`
	System   string     `json:"system"`
	Packages []nix.Path `json:"packages"`
}

func (s *session) packagesDir() string { return filepath.Join(s.workDir, "packages") }

// listName is the hash of a store path with ".json"; empty for what is none.
func listName(system string) string {
	if !nix.IsStorePath(system) {
		return ""
	}
	hash, _, _ := strings.Cut(filepath.Base(system), "-")
	return hash + ".json"
}

// keepLists saves the packages of systems. An error leaves those that are saved.
func (s *session) keepLists(systems map[string][]nix.Path) error {
	if len(systems) == 0 {
		return nil
	}
	if err := MakePrivate(s.packagesDir()); err != nil {
		return err
	}
	for _, system := range tfhosts.SortedNames(systems) {
		b, err := json.Marshal(packageList{Version: 1, System: system, Packages: systems[system]})
		if err != nil {
			return fmt.Errorf("encoding the package list of %q: %w", system, err)
		}
		path := filepath.Join(s.packagesDir(), listName(system))
		if err := durable.Replace(path, append(b, '\n'), 0o600, "packages", s.Fault); err != nil {
			return fmt.Errorf("keeping the package list of %q: %w", system, err)
		}
	}
	return nil
}

// readList is what keepLists saved of a system; nothing is no error.
func (s *session) readList(system string) ([]nix.Path, error) {
	name := listName(system)
	if name == "" {
		return nil, nil
	}
	b, err := os.ReadFile(filepath.Join(s.packagesDir(), name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the package list of %q: %w", system, err)
	}
	var list packageList
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("reading the package list of %q: %w", system, err)
	}
	return list.Packages, nil
}

// sweepLists removes the lists of systems that no node's record refers to.
func (s *session) sweepLists(r *Record) error {
	wanted := map[string]bool{}
	for _, n := range r.Nodes {
		for _, system := range []string{n.system(), n.OldPath, n.NewPath, n.Built} {
			wanted[listName(system)] = true
		}
	}
	entries, err := os.ReadDir(s.packagesDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("sweeping package lists: %w", err)
	}
	for _, e := range entries {
		if wanted[e.Name()] {
			continue
		}
		if err := os.Remove(filepath.Join(s.packagesDir(), e.Name())); err != nil {
			return fmt.Errorf("sweeping package lists: %w", err)
		}
	}
	return nil
}

// showLeaving names the nodes that leave the graph.
func (s *session) showLeaving(changes []tofu.NodeChange) {
	for _, c := range changes {
		if c.Leaves {
			s.event(tfhosts.Event{Kind: tfhosts.EventNotice, Node: c.Name, Op: "plan", Message: "leaves the graph; its host keeps its configuration"})
		}
	}
}

// showDiffs tells for each node that is deployed the system that the last
// verdict saw on the host, the one that is to come, and what that changes. A
// run that deploys keeps the package lists. Nothing that is missing or goes
// wrong here is an error: the diff is unavailable then, and says why.
func (s *session) showDiffs(ctx context.Context, changes []tofu.NodeChange) {
	changes = slices.DeleteFunc(slices.Clone(changes), func(c tofu.NodeChange) bool { return !c.Deploys })
	if len(changes) == 0 {
		return
	}
	record, err := ReadRecord(s.workDir)
	if err != nil {
		s.warn("plan", err)
		record = &Record{}
	}
	ctx, stop := s.untilInterrupt(ctx)
	defer stop()
	running := map[string]string{}
	for _, c := range changes {
		running[c.Name] = record.Nodes[c.Name].system()
	}
	systems := s.systems(ctx, changes)
	closures := s.closures(ctx, running, systems)
	for _, c := range changes {
		d := s.diff(c, running[c.Name], systems, closures)
		d.Reason = c.Reason
		message := fmt.Sprintf("%s -> %s", orUnknown(d.Old), orUnknown(d.New))
		if c.Reason != "" {
			message += " (" + c.Reason + ")"
		}
		s.event(tfhosts.Event{Kind: tfhosts.EventDiff, Node: c.Name, Op: "plan", Message: message, Diff: &d})
	}
}

func orUnknown(path string) string {
	if path == "" {
		return "unknown"
	}
	return shortPath(path)
}

// systems maps the identities that are deployed to their systems, as far as
// they are known.
func (s *session) systems(ctx context.Context, changes []tofu.NodeChange) map[string]string {
	systems := map[string]string{}
	var ask []string
	for _, c := range changes {
		id := c.After.ConfigIdentity
		if _, seen := systems[id]; seen {
			continue
		}
		systems[id] = s.built[id].Out
		switch {
		case systems[id] != "":
		case nix.IsStorePath(id) && !nix.IsDerivation(id):
			systems[id] = id
		default:
			ask = append(ask, id)
		}
	}
	if len(ask) == 0 || s.Worker.Outputs == nil {
		return systems
	}
	outs, err := s.Worker.Outputs(ctx, ask)
	s.warn("plan", err)
	for id, out := range outs {
		systems[id] = out
	}
	return systems
}

// closures are the package lists that this machine knows of the systems that run
// and of those that are to come, keyed by store path.
func (s *session) closures(ctx context.Context, running, systems map[string]string) map[string][]nix.Path {
	if s.Worker.Closures == nil {
		return nil
	}
	known := map[string][]nix.Path{}
	var ask []string
	for _, system := range running {
		list, err := s.readList(system)
		s.warn("plan", err)
		if list == nil {
			ask = append(ask, system)
			continue
		}
		known[system] = list
	}
	for _, system := range systems {
		ask = append(ask, system)
	}
	have, err := s.Worker.Closures(ctx, slices.DeleteFunc(ask, func(p string) bool { return p == "" }))
	s.warn("plan", err)
	maps.Copy(known, have)
	if s.Verb.Writes {
		keep := map[string][]nix.Path{}
		for _, system := range systems {
			if list := have[system]; list != nil {
				keep[system] = list
			}
		}
		s.warn("packages", s.keepLists(keep))
	}
	return known
}

// diff compares what runs on a node's host with what is to come.
func (s *session) diff(c tofu.NodeChange, old string, systems map[string]string, closures map[string][]nix.Path) tfhosts.Diff {
	id := c.After.ConfigIdentity
	out := systems[id]
	d := tfhosts.Diff{Old: old, New: out}
	if out == "" {
		d.New = id
	}
	switch {
	case old == out && out != "":
		return d
	case s.built[id].Err != nil:
		d.Unavailable = "it does not build"
	case closures[out] == nil && s.Setup.Nodes[c.Name].Runner.BuildOn == "target":
		d.Unavailable = "it is built on its host"
	case closures[out] == nil && s.Verb.Name == "plan" && !s.BuildPlan:
		d.Unavailable = "it is not built here; plan --build builds it"
	case closures[out] == nil:
		d.Unavailable = "it is not built here"
	case old == "":
		d.Unavailable = "what runs on the host is not known here"
	case closures[old] == nil:
		d.Unavailable = "the packages of the old system are not known here"
	default:
		packages := nix.Diff(closures[old], closures[out])
		packages.Old, packages.New = d.Old, d.New
		return packages
	}
	return d
}

// warn tells an error, if there is one, that stops nothing. Some need no word:
// after an interrupt it is known why, and a machine without Nix has nothing to
// compare.
func (s *session) warn(op string, err error) {
	if err != nil && !s.interrupted() && !errors.Is(err, nix.ErrNotInstalled) {
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: op, Message: err.Error()})
	}
}
