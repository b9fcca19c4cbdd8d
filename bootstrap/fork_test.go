package bootstrap

import (
	"context"
	"errors"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

const noSuchHost = "no-such-host.invalid"

// at is an address with another host, and the same port and path.
func (s *selfRig) at(host string) string {
	s.tb.Helper()
	u, err := url.Parse(s.setup.Backend.Address)
	if err != nil {
		s.tb.Fatal(err)
	}
	return onHost(*u, host)
}

// dials is a node's Forward: to the address given, or an error.
func dials(to string, err error) func() (Forward, error) {
	return func() (Forward, error) {
		if err != nil {
			return Forward{}, err
		}
		return Forward{Close: func() error { return nil }, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, to)
		}}, nil
	}
}

// forked runs BOOTSTRAP=1 apply where nodes are reached as named; nil: no way.
func (s *selfRig) forked(wait time.Duration, nodes map[string]func() (Forward, error)) (out outcome, asked []string) {
	s.tb.Helper()
	self, err := os.Executable()
	if err != nil {
		s.tb.Fatal(err)
	}
	s.rig.mu.Lock()
	s.deployed, s.events = nil, nil
	s.rig.mu.Unlock()
	verb, _ := tfhosts.LookupVerb("apply")
	var answer, story strings.Builder
	cfg := s.config(self, verb, nil, &answer, &story, nil)
	cfg.Bootstrap, cfg.SelfBackend, cfg.Wait = true, true, wait
	if nodes != nil {
		cfg.Worker.Forward = func(_ context.Context, name string, _ tfhosts.SetupNode) (Forward, error) {
			s.rig.mu.Lock()
			if !slices.Contains(asked, name) {
				asked = append(asked, name)
			}
			s.rig.mu.Unlock()
			return nodes[name]()
		}
	}
	code, err := Run(s.tb.Context(), cfg)
	s.rig.mu.Lock()
	defer s.rig.mu.Unlock()
	slices.Sort(asked)
	return outcome{code, err, answer.String(), story.String(), slices.Clone(s.deployed), s.events}, asked
}

func refusedAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// TestBootstrapWithoutANamedNodeAsksEach: with BOOTSTRAP_SELF_BACKEND=1 alone an
// address at which nobody answers starts cycle 1 only when no node that may
// serve the state does.
func TestBootstrapWithoutANamedNodeAsksEach(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	direct := s.setup.Backend.Address
	s.setup.Self = nil
	nobody := dials(refusedAddr(t), nil)
	unknown := dials("", errors.New("no answer from the node"))
	serves := dials(s.addr, nil)
	both := []string{"prod.app0", "prod.state"}
	for _, row := range []struct {
		name    string
		address string
		nodes   map[string]func() (Forward, error)
		want    string
		asked   []string
	}{
		{
			"a node serves it", s.at(noSuchHost),
			map[string]func() (Forward, error){"prod.state": serves, "prod.app0": nobody},
			`node "prod.state" serves the state`, both,
		},
		{
			"a node can not be asked", s.at(noSuchHost),
			map[string]func() (Forward, error){"prod.state": nobody, "prod.app0": unknown},
			`node "prod.app0" can not be asked`, both,
		},
		{
			"the address names the node", s.at("state.test"),
			map[string]func() (Forward, error){"prod.state": serves, "prod.app0": unknown},
			`node "prod.state" serves the state`,
			[]string{"prod.state"},
		},
	} {
		s.setup.Backend.Address, s.work = row.address, strings.ReplaceAll(row.name, " ", "-")
		out, asked := s.forked(time.Second, row.nodes)
		if out.code != tfhosts.ExitUnreachable || len(out.deployed) != 0 || slices.Contains(phases(out), "cycle 1/2") || !strings.Contains(out.err.Error(), row.want) {
			t.Errorf("%s: code %d, deployed %q, %v; want 5, nothing, and %q", row.name, out.code, out.deployed, out.err, row.want)
		}
		if hint := hintOf(out.err); !strings.Contains(hint, "self_backend") {
			t.Errorf("%s: hint %q does not say how to name the node", row.name, hint)
		}
		if diff := cmp.Diff(row.asked, asked); diff != "" {
			t.Errorf("%s: nodes asked (-want +got):\n%s", row.name, diff)
		}
	}

	// On a fleet that is new no node serves anything.
	s.stop()
	if err := os.RemoveAll(s.states); err != nil {
		t.Fatal(err)
	}
	s.setup.Backend.Address, s.work = direct, "new"
	out, asked := s.forked(20*time.Second, map[string]func() (Forward, error){"prod.state": nobody, "prod.app0": nobody})
	if out.code != 0 || len(out.deployed) != 2 || !cmp.Equal(asked, both) {
		t.Errorf("a new fleet: code %d (%v), deployed %q, asked %q\n%s", out.code, out.err, out.deployed, asked, out.story)
	}
}

// TestANameThatFailsIsNoReasonToForkAKnownFleet: the machine that brought the
// fleet up can not resolve the backend's name any more.
func TestANameThatFailsIsNoReasonToForkAKnownFleet(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	lineage := s.state().Get("lineage").Str
	// The working dir as it would be had the name resolved.
	old, had := s.setup.Backend.Address, s.workDir()
	s.setup.Backend.Address = s.at(noSuchHost)
	if err := os.Rename(had, s.workDir()); err != nil {
		t.Fatal(err)
	}
	ledger, err := os.ReadFile(ledgerPath(s.workDir()))
	if err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(string(ledger), old, s.setup.Backend.Address)
	if err := os.WriteFile(ledgerPath(s.workDir()), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, nodes := range map[string]map[string]func() (Forward, error){
		"no way through a node":    nil,
		"nobody listens on it":     {"prod.state": dials(refusedAddr(t), nil)},
		"the node does not answer": {"prod.state": dials("", errors.New("no answer from the node"))},
	} {
		out, _ := s.forked(time.Second, nodes)
		if out.code != tfhosts.ExitUnreachable || len(out.deployed) != 0 || slices.Contains(phases(out), "cycle 1/2") || s.has("terraform.tfstate") {
			t.Errorf("%s: code %d (%v), deployed %q, phases %q; want 5 and nothing done", name, out.code, out.err, out.deployed, phases(out))
		}
	}
	// Through the node the same state is found.
	out, _ := s.forked(time.Second, map[string]func() (Forward, error){"prod.state": dials(s.addr, nil)})
	if out.code != 0 || len(out.deployed) != 0 || slices.Contains(phases(out), "cycle 1/2") {
		t.Errorf("through the node: code %d (%v), deployed %q", out.code, out.err, out.deployed)
	}
	s.setup.Backend.Address = old
	if got := s.state().Get("lineage").Str; got != lineage {
		t.Errorf("lineage = %q, want %q", got, lineage)
	}
}

func TestForwardKeepsToTheNodesConnectLimit(t *testing.T) {
	for _, limit := range []time.Duration{0, 2 * time.Second, time.Hour} {
		var left time.Duration
		cfg := Config{Setup: &tfhosts.Setup{
			Backend: tfhosts.HTTPBackend{Address: "http://state.test:8080/state/a/b"},
			Nodes:   map[string]tfhosts.SetupNode{"prod.state": {Node: tfhosts.Node{Host: "state.test"}}},
		}}
		cfg.Worker.Forward = func(context.Context, string, tfhosts.SetupNode) (Forward, error) {
			return Forward{ConnectLimit: limit, Close: func() error { return nil }, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
				if at, ok := ctx.Deadline(); ok {
					left = time.Until(at)
				}
				return nil, errors.New("refused")
			}}, nil
		}
		s := &session{Config: &cfg, workDir: filepath.Join(t.TempDir(), "work")}
		if _, err := s.try(t.Context(), place{address: cfg.Setup.Backend.Address, through: "prod.state"}); err == nil {
			t.Fatal("a state server was found")
		}
		least, most := time.Second, 10*time.Second
		if limit > 0 {
			// The whole try has a limit of two minutes.
			least, most = min(limit, 2*time.Minute)/2, limit
		}
		if left < least || left > most {
			t.Errorf("with the limit %v a dial had %v, want %v to %v", limit, left, least, most)
		}
	}
}
