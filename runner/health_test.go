package runner

import (
	"encoding/pem"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
)

// makeChecks makes the checks from here, without a host.
func makeChecks(t *testing.T, when string, checks ...tfhosts.HealthCheck) (*deploy, error) {
	t.Helper()
	for i := range checks {
		checks[i].From = "deployer"
	}
	d := &deploy{r: New(Config{}), limits: limitsOf(tfhosts.Limits{}), req: Request{Settings: tfhosts.NodeSettings{Health: checks}}}
	d.verdict.Seconds = make(map[string]float64)
	err := d.checkHealth(t.Context(), when)
	return d, err
}

func TestHealthHTTP(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/ok", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("all is well")) })
	mux.HandleFunc("/moved", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/gone", http.StatusFound) })
	mux.HandleFunc("/teapot", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	mux.HandleFunc("/huge", func(w http.ResponseWriter, _ *http.Request) {
		for range 64 {
			if _, err := w.Write([]byte(strings.Repeat("x", maxBody))); err != nil {
				return
			}
		}
		_, _ = w.Write([]byte("at the end"))
	})
	mux.HandleFunc("/hangs", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	plain, secure := httptest.NewServer(mux), httptest.NewTLSServer(mux)
	t.Cleanup(plain.Close)
	t.Cleanup(secure.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	none := 0
	for _, tt := range []struct {
		name string
		http tfhosts.HTTPCheck
		says string // "" is good
	}{
		{"ok", tfhosts.HTTPCheck{URL: plain.URL + "/ok"}, ""},
		{"its body", tfhosts.HTTPCheck{URL: plain.URL + "/ok", Contains: "well"}, ""},
		{"another body", tfhosts.HTTPCheck{URL: plain.URL + "/ok", Contains: "ill"}, `200 OK, and its body lacks "ill"`},
		{"a body without end", tfhosts.HTTPCheck{URL: plain.URL + "/huge", Contains: "at the end"}, `lacks "at the end"`},
		{"a redirect is not followed", tfhosts.HTTPCheck{URL: plain.URL + "/moved"}, ""},
		{"a redirect where 200 is wanted", tfhosts.HTTPCheck{URL: plain.URL + "/moved", Status: []int{200}}, "the answer is 302 Found, expected is 200"},
		{"404", tfhosts.HTTPCheck{URL: plain.URL + "/gone"}, "404 Not Found, expected is 200 to 399"},
		{"404 is wanted", tfhosts.HTTPCheck{URL: plain.URL + "/gone", Status: []int{401, 404}}, ""},
		{"418", tfhosts.HTTPCheck{URL: plain.URL + "/teapot", Status: []int{200, 401}}, "418 I'm a teapot, expected is 200 401"},
		{"no answer", tfhosts.HTTPCheck{URL: plain.URL + "/hangs"}, "no answer within 1s"},
		{"an unknown certificate", tfhosts.HTTPCheck{URL: secure.URL + "/ok"}, "certificate"},
		{"any certificate", tfhosts.HTTPCheck{URL: secure.URL + "/ok", Insecure: true}, ""},
		{"its certificate", tfhosts.HTTPCheck{URL: secure.URL + "/ok", CAFile: ca}, ""},
		{"no certificate file", tfhosts.HTTPCheck{URL: secure.URL + "/ok", CAFile: ca + ".absent"}, "ca.pem.absent"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, err := makeChecks(t, tfhosts.HealthAfter, tfhosts.HealthCheck{Name: "web", HTTP: &tt.http, Timeout: 1, Retries: &none})
			if len(d.verdict.Health) != 1 {
				t.Fatalf("results = %+v, want one", d.verdict.Health)
			}
			r := d.verdict.Health[0]
			if tt.says == "" && (err != nil || !r.OK) || tt.says != "" && (err == nil || r.OK || !strings.Contains(r.Message, tt.says)) {
				t.Errorf("result = %+v, error %v; want %q", r, err, tt.says)
			}
			if err != nil && (!strings.Contains(err.Error(), `health check "web" failed: `) || !strings.Contains(err.Error(), tt.says)) {
				t.Errorf("error = %v, want the check's name and its message", err)
			}
		})
	}
}

func TestHealthIsTriedUntilItIsGood(t *testing.T) {
	var asked atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) < 3 {
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	t.Cleanup(srv.Close)
	web := tfhosts.HealthCheck{Name: "web", HTTP: &tfhosts.HTTPCheck{URL: srv.URL}, Interval: 1}
	d, err := makeChecks(t, tfhosts.HealthAfter, web)
	if r := d.verdict.Health[0]; err != nil || !r.OK || r.Tries != 3 || r.Message != "200 OK" || r.When != tfhosts.HealthAfter || r.Seconds < 2 {
		t.Errorf("result = %+v, error %v; want good at the third try, 2 s later", r, err)
	}

	two := 1
	asked.Store(-100)
	web.Retries = &two
	d, err = makeChecks(t, tfhosts.HealthAfter, web)
	if r := d.verdict.Health[0]; err == nil || r.Tries != 2 || asked.Load() != -98 {
		t.Errorf("result = %+v, error %v; want two tries", r, err)
	}

	web.Retries, web.Total = nil, 2
	d, err = makeChecks(t, tfhosts.HealthAfter, web)
	if r := d.verdict.Health[0]; err == nil || r.Tries > 2 || r.Seconds > 3 {
		t.Errorf("result = %+v, error %v; want an end within the total of 2 s", r, err)
	}
}

func TestHealthSideBySideAndByMoment(t *testing.T) {
	// Each answers once the other was asked too.
	meet := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case meet <- struct{}{}:
		case <-meet:
		case <-r.Context().Done():
		}
	}))
	t.Cleanup(srv.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := l.Addr().String()
	_ = l.Close()
	none := 0
	one := tfhosts.HealthCheck{Name: "one", HTTP: &tfhosts.HTTPCheck{URL: srv.URL}, Timeout: 5, Retries: &none}
	two := one
	two.Name, two.When = "two", tfhosts.HealthBoth
	dead := tfhosts.HealthCheck{Name: "dead", TCP: refused, Retries: &none, When: tfhosts.HealthBefore}
	last := tfhosts.HealthCheck{Name: "last", TCP: srv.Listener.Addr().String()}

	d, err := makeChecks(t, tfhosts.HealthAfter, one, two, dead, last)
	if err != nil {
		t.Error(err)
	}
	var names []string
	for _, r := range d.verdict.Health {
		names = append(names, r.Name)
	}
	if got := strings.Join(names, " "); got != "one two last" {
		t.Errorf("made after: %s, want one two last, in their order", got)
	}

	_, err = makeChecks(t, tfhosts.HealthBefore, last, dead)
	f, ok := errors.AsType[*stepError](err)
	if !ok || !strings.Contains(err.Error(), `health check "dead" failed`) || !strings.HasSuffix(err.Error(), "nothing was changed") || f.op != "health.before" {
		t.Errorf("error = %v, want the refusal of health.before", err)
	}
	if d := (&deploy{}); d.statusOf(err) != tfhosts.CheckRefused {
		t.Errorf("statusOf(%v) = %s, want check_refused", err, d.statusOf(err))
	}
}

func TestHealthBounds(t *testing.T) {
	zero := 0
	for name, tt := range map[string]struct {
		check tfhosts.HealthCheck
		want  bounds
	}{
		"built in": {tfhosts.HealthCheck{}, bounds{10 * time.Second, 2 * time.Second, time.Minute, 10}},
		"set":      {tfhosts.HealthCheck{Timeout: 1, Interval: 3, Total: 4, Retries: &zero}, bounds{time.Second, 3 * time.Second, 4 * time.Second, 0}},
	} {
		if got := boundsOf(tt.check); got != tt.want {
			t.Errorf("%s: boundsOf() = %+v, want %+v", name, got, tt.want)
		}
	}
}
