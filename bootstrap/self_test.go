package bootstrap

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
)

// selfRig is a fleet whose node "prod.state" serves the state of the graph: its
// deploy starts the state server, which keeps its states from one start to the
// next, as the node's disk does.
type selfRig struct {
	*rig
	addr   string
	states string

	mu     sync.Mutex
	files  *store.Files
	server *http.Server
	served chan struct{}
}

func newSelfRig(tb testing.TB, apps int) *selfRig {
	tb.Helper()
	s := &selfRig{rig: newRig(tb, apps)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	s.addr = l.Addr().String()
	if err := l.Close(); err != nil {
		tb.Fatal(err)
	}
	s.states = filepath.Join(s.dir, "node-states")
	s.setup.Backend = tfhosts.HTTPBackend{Address: "http://" + s.addr + "/state/prod/fleet", Pinned: true}
	s.setup.Self = &tfhosts.SelfBackend{Node: "prod.state"}
	s.setup.Bootstrap = true
	s.setup.Nodes["prod.state"] = tfhosts.SetupNode{Node: tfhosts.Node{
		NixosConf: "./state.nix", ConfigIdentity: "/nix/store/idstate-1.drv", Username: "root", Host: "state.test", SSHOpts: "[]",
	}}
	s.deploy = func(req DeployRequest) tfhosts.Verdict {
		if req.Name == "prod.state" {
			s.start()
		}
		return tfhosts.Verdict{Node: req.Name, Status: tfhosts.Deployed}
	}
	tb.Cleanup(s.stop)
	return s
}

func (s *selfRig) start() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server != nil {
		return
	}
	files, err := openStates(s.states, store.FilesConfig{})
	if err != nil {
		s.tb.Error(err)
		return
	}
	handler, err := server.New(server.Config{Store: files, Insecure: true})
	if err != nil {
		s.tb.Error(err)
		return
	}
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.tb.Error(err)
		return
	}
	s.files, s.server, s.served = files, &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}, make(chan struct{})
	go func() {
		defer close(s.served)
		s.server.Serve(l) //nolint:errcheck // ends with stop
	}()
}

func (s *selfRig) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server == nil {
		return
	}
	s.server.Close() //nolint:errcheck // as a power cut
	<-s.served
	if err := s.files.Close(); err != nil {
		s.tb.Error(err)
	}
	s.server = nil
}

func (s *selfRig) workDir() string {
	return WorkDir(filepath.Join(s.dir, "work"), s.setup.Backend.Address)
}

// has says whether a file of the working dir is there.
func (s *selfRig) has(name string) bool {
	_, err := os.Stat(filepath.Join(s.workDir(), name))
	return err == nil
}

// state is the backend's state.
func (s *selfRig) state() gjson.Result {
	s.tb.Helper()
	resp, err := http.Get(s.setup.Backend.Address)
	if err != nil {
		s.tb.Fatal(err)
	}
	defer resp.Body.Close()
	var b strings.Builder
	buf := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(buf)
		b.Write(buf[:n])
		if err != nil {
			break
		}
	}
	return gjson.Parse(b.String())
}

func (s *selfRig) bootstrap(code int, args ...string) outcome {
	s.tb.Helper()
	s.boot = true
	defer func() { s.boot = false }()
	return s.want(code, "apply", args...)
}

func phases(o outcome) []string {
	var all []string
	for _, e := range o.eventsOfTheRun {
		if e.Kind == tfhosts.EventPhase && (len(all) == 0 || all[len(all)-1] != e.Op) {
			all = append(all, e.Op)
		}
	}
	return all
}

func TestBootstrapFromNothing(t *testing.T) {
	s := newSelfRig(t, 2)
	s.want(tfhosts.ExitUnreachable, "apply") // without BOOTSTRAP=1

	out := s.bootstrap(0)
	if diff := cmp.Diff([]string{"cycle 1/2", "wait", "migrate", "cycle 2/2", "verdict"}, phases(out)); diff != "" {
		t.Errorf("phase markers (-want +got):\n%s", diff)
	}
	if out.deployed[0] != "prod.state" || len(out.deployed) != 3 {
		t.Errorf("deployed %q, want the backend's node first and each node once", out.deployed)
	}
	if s.has("terraform.tfstate") || !s.has("terraform.tfstate.migrated") {
		t.Error("the local state did not become the marker")
	}
	marker, err := os.ReadFile(filepath.Join(s.workDir(), "terraform.tfstate.migrated"))
	if err != nil {
		t.Fatal(err)
	}
	if got, want := s.state().Get("lineage").Str, gjson.GetBytes(marker, "lineage").Str; got != want || got == "" {
		t.Errorf("lineage on the backend = %q, that of cycle 1 = %q", got, want)
	}

	// Steady from here on, with BOOTSTRAP=1 too, and from another machine.
	if out := s.want(0, "apply"); len(out.deployed) != 0 {
		t.Errorf("steady apply deployed %q", out.deployed)
	}
	if out := s.bootstrap(0); len(out.deployed) != 0 || slices.Contains(phases(out), "cycle 1/2") {
		t.Errorf("BOOTSTRAP=1 again deployed %q, phases %q", out.deployed, phases(out))
	}
	s.work = "other-machine"
	if out := s.bootstrap(0); len(out.deployed) != 0 {
		t.Errorf("BOOTSTRAP=1 from another machine deployed %q", out.deployed)
	}
}

func TestBootstrapNeverForksALivingFleet(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	lineage := s.state().Get("lineage").Str
	s.stop()
	for _, work := range []string{"", "work"} {
		s.work = work
		if out := s.bootstrap(tfhosts.ExitUnreachable); len(out.deployed) != 0 {
			t.Errorf("deployed %q while the backend was away", out.deployed)
		}
	}
	s.start()
	s.bootstrap(0)
	if got := s.state().Get("lineage").Str; got != lineage {
		t.Errorf("lineage = %q, want %q", got, lineage)
	}
}

func TestLostStateIsRefused(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	s.stop()
	if err := os.RemoveAll(s.states); err != nil {
		t.Fatal(err)
	}
	s.start()
	out := s.want(tfhosts.ExitLostState, "apply")
	if len(out.deployed) != 0 || !strings.Contains(out.err.Error(), "has no state") {
		t.Errorf("deployed %q, %v", out.deployed, out.err)
	}
	// A reading verb warns and runs.
	warned := s.want(0, "plan")
	if !slices.ContainsFunc(warned.eventsOfTheRun, func(e tfhosts.Event) bool { return e.Kind == tfhosts.EventWarning }) {
		t.Error("plan did not warn of the lost state")
	}
	// Put back, nothing is deployed.
	if code, err := s.restore(RestoreOptions{}); code != 0 {
		t.Fatalf("state-restore: %d, %v", code, err)
	}
	if out := s.want(0, "apply"); len(out.deployed) != 0 {
		t.Errorf("after the restore: deployed %q", out.deployed)
	}
	// Given up, all is deployed again, and what was known is kept.
	s.stop()
	if err := os.RemoveAll(s.states); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.allowLost = true
	if out := s.want(0, "apply"); len(out.deployed) != 2 {
		t.Errorf("with the lost state given up: deployed %q", out.deployed)
	}
	s.allowLost = false
	if kept, err := filepath.Glob(filepath.Join(s.workDir(), "salvage", "lost-*", "ledger.json")); err != nil || len(kept) != 1 {
		t.Errorf("archived ledgers: %q, %v", kept, err)
	}
}

func TestBackendMachineIsGoneForGood(t *testing.T) {
	s := newSelfRig(t, 2)
	s.bootstrap(0)
	lineage, serial := s.state().Get("lineage").Str, s.state().Get("serial").Int()
	s.stop()
	if err := os.RemoveAll(s.states); err != nil {
		t.Fatal(err)
	}
	s.want(tfhosts.ExitUnreachable, "apply")
	if code, err := s.restore(RestoreOptions{Local: true}); code != 0 {
		t.Fatalf("state-restore --local: %d, %v", code, err)
	}
	out := s.bootstrap(0)
	if !cmp.Equal(out.deployed, []string{"prod.state"}) {
		t.Errorf("deployed %q, want the backend's node alone", out.deployed)
	}
	if got := s.state(); got.Get("lineage").Str != lineage || got.Get("serial").Int() <= serial {
		t.Errorf("state after the rebuild: lineage %s serial %d, want %s after %d", got.Get("lineage"), got.Get("serial").Int(), lineage, serial)
	}
}

func TestDestroyDetachesTheState(t *testing.T) {
	s := newSelfRig(t, 1)
	s.bootstrap(0)
	lineage := s.state().Get("lineage").Str
	out := s.want(0, "destroy")
	if !slices.ContainsFunc(out.eventsOfTheRun, func(e tfhosts.Event) bool {
		return e.Kind == tfhosts.EventWarning && strings.Contains(e.Message, "superseded")
	}) {
		t.Error("no warning of the superseded copy on the backend that still answers")
	}
	if s.state().Get("resources.#").Int() == 0 {
		t.Error("the destroy wrote to the backend")
	}
	local, err := os.ReadFile(filepath.Join(s.workDir(), "terraform.tfstate"))
	if err != nil || gjson.GetBytes(local, "resources.#").Int() != 0 || gjson.GetBytes(local, "lineage").Str != lineage {
		t.Errorf("local state after the destroy: %v\n%s", err, local)
	}
	s.want(tfhosts.ExitLostState, "apply") // detached
	s.want(0, "state-pull")

	// Bootstrapped again beside the old backend, which still runs.
	if out := s.bootstrap(0); len(out.deployed) != 2 {
		t.Errorf("bootstrap after the destroy deployed %q", out.deployed)
	}
	if got := s.state().Get("lineage").Str; got != lineage {
		t.Errorf("lineage = %q, want %q", got, lineage)
	}
	// And once more with the backend gone.
	s.want(0, "destroy")
	s.stop()
	if out := s.bootstrap(0); len(out.deployed) != 2 || out.deployed[0] != "prod.state" {
		t.Errorf("bootstrap without the old backend deployed %q", out.deployed)
	}
	s.want(0, "plan", "-detailed-exitcode")
}

func TestBackendNodeIsRedeployedInTheMiddle(t *testing.T) {
	s := newSelfRig(t, 6)
	s.bootstrap(0)
	deploy := s.deploy
	s.deploy = func(req DeployRequest) tfhosts.Verdict {
		if req.Name == "prod.state" { // its switch restarts the server
			s.stop()
			time.Sleep(2 * time.Second)
		}
		return deploy(req)
	}
	for name := range s.setup.Nodes {
		s.changeNode(name, func(n *tfhosts.SetupNode) { n.ConfigIdentity += "-2.drv" })
	}
	before := s.state().Get("serial").Int()
	if out := s.want(0, "apply"); len(out.deployed) != 7 {
		t.Errorf("deployed %q", out.deployed)
	}
	if s.state().Get("serial").Int() <= before {
		t.Error("the state did not move on")
	}
	s.want(0, "plan", "-detailed-exitcode")
}

func TestDestroyOfOtherNodesLeavesTheStateOnTheBackend(t *testing.T) {
	s := newSelfRig(t, 2)
	s.bootstrap(0)
	s.want(0, "destroy", "-target=prod.app0")
	if s.has("terraform.tfstate") || s.state().Get(`resources.#(name=="nixos").instances.#`).Int() != 2 {
		t.Errorf("state on the backend: %s", s.state().Get("resources"))
	}
	s.want(0, "destroy", "-target=prod.state")
	if !s.has("terraform.tfstate") {
		t.Error("the destroy of the backend's node did not detach the state")
	}
}

func TestABrokenVerdictFileDoesNotStopAnApply(t *testing.T) {
	r := newRig(t, 1)
	r.want(0, "apply")
	dir := WorkDir(filepath.Join(r.dir, "work"), r.setup.Backend.Address)
	if err := os.WriteFile(verdictPath(dir), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.changeNode("prod.app0", func(n *tfhosts.SetupNode) { n.ConfigIdentity += "-2.drv" })
	r.want(0, "apply")
	if rec, err := ReadRecord(dir); err != nil || len(rec.Nodes) != 1 {
		t.Errorf("verdicts after it: %+v, %v", rec, err)
	}
}
