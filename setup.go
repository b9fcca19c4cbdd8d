package tfhosts

import "time"

// Setup is a loaded and checked tf-hosts.json, with the SSH layers of FR-013
// already merged into each node. Package setup makes it.
type Setup struct {
	// Path is the file it was read from, absolute.
	Path string
	// Dir is the folder that relative paths of the setup are relative to.
	Dir   string
	Nodes map[string]SetupNode
	// Backend is never nil: without http_backend in the file it is the
	// unpinned local default.
	Backend HTTPBackend
	// Self names the node that serves this graph's state; nil when none does.
	Self *SelfBackend
	// Bootstrap: the graph deploys the backend of its own state (FR-008), so
	// that BOOTSTRAP=1 is allowed and a destroy detaches the state first.
	Bootstrap          bool
	PublishedNamesExpr string
	// DeployRunner is an argv prefix of the provisioner's command.
	DeployRunner []string
	// Bash is the provisioner's interpreter, an absolute path.
	Bash     string
	Circuits []string
	Runner   RunnerSettings
}

// GraphNodes are the node entries as the OpenTofu variable "nodes" holds them.
func (s *Setup) GraphNodes() map[string]Node {
	nodes := make(map[string]Node, len(s.Nodes))
	for name, n := range s.Nodes {
		nodes[name] = n.Node
	}
	return nodes
}

// SetupNode is a node entry and what stays out of the graph.
type SetupNode struct {
	Node
	Group string
	Tags  []string
	// Runner is the node's own settings over the fleet's.
	Runner NodeSettings
}

// HTTPBackend says where the state lives and how to talk to it.
type HTTPBackend struct {
	Address string
	// Pinned: the address was set by TF_HTTP_ADDRESS, at run time or at Nix
	// evaluation, or by the file with "pinned": true (FR-006).
	Pinned        bool
	LockAddress   string // default Address
	LockMethod    string // default LOCK
	UnlockAddress string // default Address
	UnlockMethod  string // default UNLOCK
	UpdateMethod  string // default POST
	Username      string
	// Password is that of TF_HTTP_PASSWORD, else the content of PasswordFile;
	// never written.
	Password     string `json:"-"`
	PasswordFile string
	Headers      map[string]string
	// RetryMax counts the tries after the first; waits are bounds of the backoff.
	RetryMax     int
	RetryWaitMin time.Duration
	RetryWaitMax time.Duration
	// PEM files; empty when unused or when the text came from the environment.
	CAFile, CertFile, KeyFile string
	// PEM text, of TF_HTTP_CLIENT_*_PEM or of the files above; empty when unused.
	CAPEM   string `json:"-"`
	CertPEM string `json:"-"`
	KeyPEM  string `json:"-"`
}

// SelfBackend is the node of this graph that serves this graph's state.
type SelfBackend struct {
	Node   string
	Port   int
	Path   string
	Scheme string
}

// RunnerSettings are the fleet-wide settings of the runner.
type RunnerSettings struct {
	NodeSettings
	// Parallelism is tofu's -parallelism (FR: 10).
	Parallelism int
	NixOptions  []string
	// Waves are deployed one after the other, each a list of selectors (a name, a
	// glob, @tag, !exclude); nodes of no wave come last.
	Waves [][]string
}

// NodeSettings are the settings of the runner for one node. They change how a
// deploy is done and never whether: none of them is a trigger. The JSON form is
// that of TF_HOSTS_NODE_SETTINGS.
type NodeSettings struct {
	Guard      *bool    `json:"guard,omitempty"`
	OnDegraded string   `json:"on_degraded,omitempty"` // rollback, fail, warn
	BuildOn    string   `json:"build_on,omitempty"`    // deployer, target
	Become     []string `json:"become,omitempty"`      // argv; empty: sudo -n
	// BecomePasswordFile holds the sudo password; fed by stdin only.
	BecomePasswordFile string `json:"become_password_file,omitempty"`
	Substitute         *bool  `json:"substitute,omitempty"`
	Goal               string `json:"goal,omitempty"` // switch, boot; "run --goal" knows test and dry-activate too
	// OnInhibitor says what happens where the new system refuses to be switched
	// to while the old one runs: stop (default), or boot: it becomes the boot
	// default, and the verdict is reboot_pending.
	OnInhibitor string `json:"on_inhibitor,omitempty"`
	// RebootIfNeeded restarts the host when kernel, initrd or init changed, and
	// waits for it.
	RebootIfNeeded *bool         `json:"reboot_if_needed,omitempty"`
	Health         []HealthCheck `json:"health,omitempty"`
	Limits         Limits        `json:"limits,omitzero"`
}

// Guarded says whether the activation waits for a confirmation.
func (s NodeSettings) Guarded() bool { return s.Guard == nil || *s.Guard }

// Limits bound the steps of a deploy, in seconds; zero means the built-in limit.
type Limits struct {
	Connect  int `json:"connect,omitempty"`  // dial and handshake, default 30
	Copy     int `json:"copy,omitempty"`     // whole copy, default 3600
	Activate int `json:"activate,omitempty"` // the switch, default 900
	Command  int `json:"command,omitempty"`  // any other remote command, default 60
	Build    int `json:"build,omitempty"`    // the build of all closures, default 7200
	Guard    int `json:"guard,omitempty"`    // wait of the host for the confirmation, default 90
	Reboot   int `json:"reboot,omitempty"`   // until a restarted host answers, default 600
}
