package tofu

import (
	"context"
	"fmt"

	tfjson "github.com/hashicorp/terraform-json"

	tfhosts "fediversity.eu/tf-hosts"
)

// NodeChange is what a plan will do to the resource of one node.
type NodeChange struct {
	Name string
	// Deploys: the resource is created or replaced, so its provisioner runs.
	Deploys bool
	// Leaves: the resource is destroyed and not created again.
	Leaves bool
	// Before and After hold what the triggers hold: NixosConf, Host,
	// ConfigIdentity, HostKey and SSHOpts. Zero where there is none.
	Before, After tfhosts.Node
	// Reason is why OpenTofu replaces it: "tainted", "requested", or empty.
	Reason string
}

// NodeChanges reads the changes of terraform_data.nixos from a saved plan,
// sorted by name, without those that change nothing.
func (e *Engine) NodeChanges(ctx context.Context, dir, planFile string, env []string) ([]NodeChange, error) {
	tf, err := e.exec(dir, env)
	if err != nil {
		return nil, err
	}
	plan, err := tf.ShowPlanFile(ctx, planFile)
	if err != nil {
		return nil, fmt.Errorf("reading the plan %q: %w", planFile, err)
	}
	return nodeChanges(plan)
}

func nodeChanges(plan *tfjson.Plan) ([]NodeChange, error) {
	byName := make(map[string]NodeChange)
	for _, rc := range plan.ResourceChanges {
		if rc.ModuleAddress != "" || rc.Type != "terraform_data" || rc.Name != "nixos" || rc.Change == nil {
			continue
		}
		name, ok := rc.Index.(string)
		if !ok {
			return nil, fmt.Errorf("reading the plan: %s has no string key", rc.Address)
		}
		a := rc.Change.Actions
		if a.NoOp() || a.Read() {
			continue
		}
		c := NodeChange{
			Name: name, Deploys: a.Create() || a.Replace(), Leaves: a.Delete(),
			Before: triggers(rc.Change.Before), After: triggers(rc.Change.After),
		}
		switch rc.ActionReason {
		case tfjson.ActionReasonReplaceBecauseTainted:
			c.Reason = "tainted"
		case tfjson.ActionReasonReplaceByRequest:
			c.Reason = "requested"
		}
		byName[name] = c
	}
	changes := make([]NodeChange, 0, len(byName))
	for _, name := range tfhosts.SortedNames(byName) {
		changes = append(changes, byName[name])
	}
	return changes, nil
}

// triggers reads the node out of a resource value: triggers_replace is exactly
// [nixos_conf, host, config_identity, host_key, ssh_opts] (FR-002).
func triggers(value any) tfhosts.Node {
	object, ok := value.(map[string]any)
	if !ok {
		return tfhosts.Node{}
	}
	list, ok := object["triggers_replace"].([]any)
	if !ok || len(list) != 5 {
		return tfhosts.Node{}
	}
	word := func(i int) string {
		s, ok := list[i].(string)
		if !ok {
			return ""
		}
		return s
	}
	return tfhosts.Node{NixosConf: word(0), Host: word(1), ConfigIdentity: word(2), HostKey: word(3), SSHOpts: word(4)}
}
