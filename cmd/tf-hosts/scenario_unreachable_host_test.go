package main

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

// front is a proxy before the fleet's backend, which can be made to fail.
type front struct {
	*httptest.Server
	fault atomic.Pointer[http.HandlerFunc]
}

func newFront(t *testing.T, backend string) *front {
	t.Helper()
	u, err := url.Parse(backend)
	if err != nil {
		t.Fatal(err)
	}
	f := &front{}
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: u.Scheme, Host: u.Host})
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fault := f.fault.Load(); fault != nil {
			(*fault)(w, r)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(f.Close)
	return f
}

// answers makes the front answer everything with one status.
func (f *front) answers(status int, header, value, body string) {
	h := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(header, value)
		w.WriteHeader(status)
		fmt.Fprint(w, body) //nolint:errcheck // a client that is gone needs no answer
	})
	f.fault.Store(&h)
}

// TestUnreachableIsNoReasonToForkAFleet: whatever is between a deployer and the
// backend of a living fleet, BOOTSTRAP=1 never starts cycle 1: neither on the
// machine that brought the fleet up nor on one with an empty working dir.
func TestUnreachableIsNoReasonToForkAFleet(t *testing.T) {
	t.Parallel()
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.version("1")
	s.with("BOOTSTRAP=1").want(0, "apply")
	lineage, serials := s.served().Get("lineage").Str, len(s.serials())
	direct := s.address
	app := s.sshCount(s.apps[0])

	check := func(t *testing.T, r *rig, code int) {
		t.Helper()
		r.t = t
		cmd, stderr := r.start("apply")
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			cmd.Wait() //nolint:errcheck // the exit code says it
		}()
		eventually(t, 2*time.Minute, "the program to give up", func() bool {
			select {
			case <-ended:
				return true
			default:
			}
			if strings.Contains(stderr.String(), "[cycle 1/2]") { // it would wait for its backend
				cmd.Process.Kill() //nolint:errcheck // it may have ended
				<-ended
				return true
			}
			return false
		})
		text := stderr.String()
		if strings.Contains(text, "[cycle 1/2]") || r.has("terraform.tfstate") {
			t.Fatalf("cycle 1 started:\n%s", text)
		}
		if got := cmd.ProcessState.ExitCode(); got != code || !strings.Contains(text, "hint:") {
			t.Errorf("exit %d, want %d and a way out:\n%s", got, code, text)
		}
		if got := s.sshCount(s.apps[0]); got != app {
			t.Errorf("SSH to the app's host: %+v, want %+v", got, app)
		}
	}
	front := newFront(t, direct)
	for _, row := range []struct {
		name  string
		code  int
		spoil func() (address string)
	}{
		{"502", tfhosts.ExitUnreachable, func() string {
			front.answers(http.StatusBadGateway, "Content-Type", "text/html", "<html>bad gateway</html>")
			return ""
		}},
		{"401", tfhosts.ExitFailed, func() string {
			front.answers(http.StatusUnauthorized, "WWW-Authenticate", "Basic", "")
			return ""
		}},
		{"403", tfhosts.ExitFailed, func() string {
			front.answers(http.StatusForbidden, "X-None", "", "")
			return ""
		}},
		{"301", tfhosts.ExitFailed, func() string {
			front.answers(http.StatusMovedPermanently, "Location", direct, "")
			return ""
		}},
		{"an HTML page", tfhosts.ExitFailed, func() string {
			front.answers(http.StatusOK, "Content-Type", "text/html", "<html>welcome</html>")
			return ""
		}},
		{"410", tfhosts.ExitLostState, func() string {
			front.answers(http.StatusGone, "X-None", "", "")
			return ""
		}},
		{"404 of a web server that takes no lock", tfhosts.ExitFailed, func() string {
			front.answers(http.StatusNotFound, "Content-Type", "text/html", "<html>not found</html>")
			return ""
		}},
		{"TLS at a plain port", tfhosts.ExitFailed, func() string { return strings.Replace(direct, "http:", "https:", 1) }},
		{"a certificate of an unknown authority", tfhosts.ExitFailed, func() string {
			tls := httptest.NewTLSServer(http.NotFoundHandler())
			t.Cleanup(tls.Close)
			return tls.URL + statePath
		}},
		{"a name that does not resolve", tfhosts.ExitUnreachable, func() string { return "http://no-such-host.invalid:8080" + statePath }},
		{"refused", tfhosts.ExitUnreachable, func() string {
			return "http://" + net.JoinHostPort("127.0.0.1", fmt.Sprint(unusedPort(t))) + statePath
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			plain := *s.rig
			known := &selfRig{rig: &plain}
			known.t, known.address = t, front.URL+statePath
			known.pin(true)
			known.want(0, "apply") // this machine knows the state at this address
			address := row.spoil()
			defer front.fault.Store(nil)
			if address == "" {
				check(t, known.with("BOOTSTRAP=1"), row.code)
			} else {
				known.address = address
				known.pin(true)
			}
			empty := known.elsewhere(strings.ReplaceAll(row.name, " ", "-"))
			check(t, empty.with("BOOTSTRAP=1"), row.code)
			if address == "" {
				front.fault.Store(nil)
				res := empty.with("BOOTSTRAP=1").want(0, "apply")
				if !strings.Contains(res.stderr, "another run") {
					t.Errorf("it is not told that another run brought the backend up:\n%s", res.stderr)
				}
				known.want(0, "apply")
			}
		})
	}
	t.Run("timeout", func(t *testing.T) {
		s.address = direct
		s.pin(true)
		s.nodes[stateNode]["ssh_opts"] = []string{"ConnectTimeout=2"}
		if err := s.state.Cut(t.Context()); err != nil {
			t.Fatal(err)
		}
		check(t, s.with("BOOTSTRAP=1"), tfhosts.ExitUnreachable)
		check(t, s.elsewhere("timeout").with("BOOTSTRAP=1"), tfhosts.ExitUnreachable)
		if err := s.state.Restore(t.Context()); err != nil {
			t.Fatal(err)
		}
		delete(s.nodes[stateNode], "ssh_opts")
	})
	s.with("BOOTSTRAP=1").want(0, "apply")
	s.wantVerdicts(map[string]tfhosts.Status{})
	if got := s.served().Get("lineage").Str; got != lineage || len(s.serials()) != serials {
		t.Errorf("the fleet's state: lineage %q with %d versions, want %q with %d", got, len(s.serials()), lineage, serials)
	}
}
