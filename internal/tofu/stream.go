package tofu

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	tfhosts "fediversity.eu/tf-hosts"
)

// PlannedNodes reads the changes of terraform_data.nixos from what "plan -json"
// printed or -json-into wrote, sorted by name. Before and After are not in it.
func PlannedNodes(file string) ([]NodeChange, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("reading the planned changes: %w", err)
	}
	defer f.Close()
	byName := map[string]NodeChange{}
	lines := bufio.NewReader(f)
	for {
		line, err := lines.ReadBytes('\n')
		if c, ok := plannedNode(line); ok {
			byName[c.Name] = c
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("reading the planned changes: %w", err)
		}
	}
	changes := make([]NodeChange, 0, len(byName))
	for _, name := range tfhosts.SortedNames(byName) {
		changes = append(changes, byName[name])
	}
	return changes, nil
}

// plannedNode reads one line; what is no change of a node is left out.
func plannedNode(line []byte) (NodeChange, bool) {
	var message struct {
		Type   string `json:"type"`
		Change struct {
			Resource struct {
				Module string `json:"module"`
				Type   string `json:"resource_type"`
				Name   string `json:"resource_name"`
				Key    any    `json:"resource_key"`
			} `json:"resource"`
			Action string `json:"action"`
			Reason string `json:"reason"`
		} `json:"change"`
	}
	if json.Unmarshal(line, &message) != nil || message.Type != "planned_change" {
		return NodeChange{}, false
	}
	r := message.Change.Resource
	name, ok := r.Key.(string)
	if !ok || r.Module != "" || r.Type != "terraform_data" || r.Name != "nixos" {
		return NodeChange{}, false
	}
	c := NodeChange{Name: name}
	switch message.Change.Action {
	case "create", "replace":
		c.Deploys = true
	case "delete":
		c.Leaves = true
	default:
		return NodeChange{}, false
	}
	switch message.Change.Reason {
	case "tainted", "requested":
		c.Reason = message.Change.Reason
	}
	return c, true
}
