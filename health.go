package tfhosts

import (
	"net"
	"net/url"
	"slices"
	"strconv"
)

// When a health check is made.
const (
	HealthAfter  = "after"  // after the activation; the default
	HealthBefore = "before" // before anything is changed on the host
	HealthBoth   = "both"
)

// HealthCheck is one question whose answer says whether a host serves. Exactly
// one of Command, HTTP, TCP and Unit is set.
//
// One that fails before the deploy refuses it; one that fails after the
// activation, while the guard holds, has the host go back.
type HealthCheck struct {
	// Name is how events and verdicts call it. A node's check replaces the
	// fleet's of the same name.
	Name string `json:"name"`
	// Command is an argv that runs on the host as root and must exit 0.
	Command []string   `json:"command,omitempty"`
	HTTP    *HTTPCheck `json:"http,omitempty"`
	// TCP is a HOST:PORT that must accept a connection.
	TCP string `json:"tcp,omitempty"`
	// Unit is a systemd unit of the host that must be active.
	Unit string `json:"unit,omitempty"`
	// From says who asks HTTP and TCP: "node" (default), through the node's SSH
	// connection, or "deployer".
	From string `json:"from,omitempty"`
	// When is after (default), before or both.
	When string `json:"when,omitempty"`
	// Timeout bounds one try, default 10 s; Retries counts the tries after the
	// first, default 10; Interval lies between two tries, default 2 s; Total
	// bounds all of them, default 60 s. All are seconds but Retries.
	Timeout  int  `json:"timeout,omitempty"`
	Retries  *int `json:"retries,omitempty"`
	Interval int  `json:"interval,omitempty"`
	Total    int  `json:"total,omitempty"`
}

// HTTPCheck is one GET. Redirects are not followed.
type HTTPCheck struct {
	URL string `json:"url"`
	// OrURL is asked when nothing answers at URL. No setup names it.
	OrURL string `json:"-"`
	// Status are the good codes; empty: 200 to 399.
	Status []int `json:"status,omitempty"`
	// Contains must be in the first MiB of the body; empty: any body.
	Contains string `json:"contains,omitempty"`
	// Insecure takes any certificate; CAFile is a PEM file of more authorities.
	Insecure bool   `json:"insecure,omitempty"`
	CAFile   string `json:"ca_file,omitempty"`
}

// HealthResult is what became of one check.
type HealthResult struct {
	Name string `json:"name"`
	// When is HealthBefore or HealthAfter.
	When string `json:"when"`
	OK   bool   `json:"ok"`
	// Message says why not, or what was seen: one line.
	Message string  `json:"message,omitempty"`
	Tries   int     `json:"tries"`
	Seconds float64 `json:"seconds"`
}

// StateServerCheck is the name of the check that asks whether the self_backend
// node serves the state after its own deploy. A check of this name in the setup
// takes its place.
const StateServerCheck = "state server"

// DeploySettings are the settings of a node's deploy: its own, and for the node
// that serves the state of this graph the question whether it still does.
func (s *Setup) DeploySettings(name string) NodeSettings {
	settings := s.Nodes[name].Runner
	if s.Self == nil || s.Self.Node != name ||
		slices.ContainsFunc(settings.Health, func(c HealthCheck) bool { return c.Name == StateServerCheck }) {
		return settings
	}
	settings.Health = append(slices.Clone(settings.Health), s.stateServerCheck())
	return settings
}

// stateServerCheck asks on the node: on its loopback, or where nothing listens
// there at the node's own address. It shows no credentials and looks at no
// certificate, so that any answer of a state server is good: the state, none
// (404, or 204 as some servers have it), and the demand for credentials.
func (s *Setup) stateServerCheck() HealthCheck {
	at := func(host string) string {
		u := url.URL{Scheme: s.Self.Scheme, Host: net.JoinHostPort(host, strconv.Itoa(s.Self.Port))}
		if u.Scheme == "" {
			u.Scheme = "http"
		}
		return u.String() + s.Self.Path // the path is escaped and may have a query
	}
	// A server that moves its data on a start takes its time: it has nearly all of
	// what the host waits for the confirmation.
	limits := s.Nodes[s.Self.Node].Runner.Limits
	total := 80
	if limits.Guard > 0 {
		total = max(1, limits.Guard-10, limits.Guard/2)
	}
	return HealthCheck{Name: StateServerCheck, When: HealthAfter, Retries: &total, Interval: 1, Total: total, HTTP: &HTTPCheck{
		URL: at("127.0.0.1"), OrURL: at(s.Nodes[s.Self.Node].Host), Status: []int{200, 204, 401, 404}, Insecure: true,
	}}
}
