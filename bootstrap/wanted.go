package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

// deployed is what a node was deployed with last, by the state or the verdicts.
type deployed struct {
	// identity is the config identity, system its store path; empty: not known.
	identity, system string
	// tainted: the deploy failed, so what the host should run is not known.
	tainted bool
}

var errEncrypted = errors.New("the state is encrypted")

// deployedIn reads from a state what each of its nodes was deployed with. The
// systems are not resolved yet. No state has no nodes.
func deployedIn(state []byte) (map[string]deployed, error) {
	nodes := map[string]deployed{}
	if len(state) == 0 {
		return nodes, nil
	}
	if !gjson.ValidBytes(state) {
		return nil, errors.New("the state is no JSON")
	}
	root := gjson.ParseBytes(state)
	if root.Get("encrypted_data").Exists() {
		return nil, errEncrypted
	}
	for _, r := range root.Get(`resources.#(type=="terraform_data")#`).Array() {
		if r.Get("name").Str != "nixos" || r.Get("module").Exists() {
			continue
		}
		for _, i := range r.Get("instances").Array() {
			if i.Get("deposed").Exists() {
				continue
			}
			nodes[i.Get("index_key").Str] = deployed{
				// The third of [nixos_conf, host, config_identity, host_key, ssh_opts] (FR-002).
				identity: i.Get("attributes.triggers_replace.value.2").Str,
				tainted:  i.Get("status").Str == "tainted",
			}
		}
	}
	return nodes, nil
}

// wanted is what each of the nodes was deployed with last. A state that can not
// be read (err) is told as a warning, and the verdicts of this machine stand in.
func (s *session) wanted(ctx context.Context, names []string, state []byte, err error) (map[string]deployed, error) {
	record, rerr := ReadRecord(s.workDir)
	if rerr != nil {
		return nil, rerr
	}
	var nodes map[string]deployed
	if err == nil {
		nodes, err = deployedIn(state)
	}
	if err != nil {
		s.event(tfhosts.Event{Kind: tfhosts.EventWarning, Op: "state", Message: fmt.Sprintf(
			"%v; taking what this machine deployed last as wanted", err)})
		nodes = map[string]deployed{}
		for _, name := range names {
			if n, ok := record.Nodes[name]; ok {
				nodes[name] = deployed{identity: n.Identity, tainted: n.Failed()}
			}
		}
	}
	for _, name := range names {
		n, ok := nodes[name]
		if !ok || n.tainted {
			continue
		}
		n.system = s.systemOf(ctx, record.Nodes[name], n.identity)
		nodes[name] = n
	}
	return nodes, nil
}

// systemOf is the store path of an identity's system: a store path is itself, a
// derivation asks the last verdict and then Nix. Empty: this machine does not
// know it.
func (s *session) systemOf(ctx context.Context, last NodeRecord, identity string) string {
	switch {
	case identity != "" && last.Identity == identity && last.Built != "":
		return last.Built
	case !strings.HasSuffix(identity, ".drv"):
		return identity
	case s.Worker.Outputs == nil:
		return ""
	}
	outs, err := s.Worker.Outputs(ctx, []string{identity})
	if err != nil {
		return "" // without Nix, a derivation's output is not known here
	}
	return outs[identity]
}

// stateNow reads the state where it is now: on the backend, or the local copy.
func (s *session) stateNow(ctx context.Context) ([]byte, error) {
	if s.found != nil {
		body, err := s.found.client.Get(ctx)
		if errors.Is(err, api.ErrNotFound) {
			return nil, nil
		}
		return body, err
	}
	body, err := os.ReadFile(localPath(s.workDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the local state: %w", err)
	}
	return body, nil
}

// readState reads the state as a reading verb finds it, without the working
// dir's lock and without a change. An error is why it can not be had.
func (s *session) readState(ctx context.Context) (body []byte, err error) {
	if s.ledger, err = readLedger(s.workDir, s.Setup.Backend.Address); err != nil {
		return nil, err
	}
	sit, away, err := s.look(ctx)
	if s.found != nil {
		defer func() { err = errors.Join(err, s.found.close()) }()
	}
	if err != nil {
		return nil, err
	}
	if away != nil && sit.local == nil {
		return nil, s.awayError(away)
	}
	if d := decide(sit); d.lost != "" {
		return nil, errors.New(d.lost)
	}
	if s.found != nil {
		return s.found.body, nil
	}
	return s.stateNow(ctx)
}
