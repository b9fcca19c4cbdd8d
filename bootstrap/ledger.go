package bootstrap

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/durable"
	"fediversity.eu/tf-hosts/backend/relay"
)

// Mode says where the state of a working dir is.
type Mode string

// The modes. The zero Mode is that of a working dir that never saw a state.
const (
	ModeRemote        Mode = "remote"
	ModeBootstrapping Mode = "bootstrapping" // terraform.tfstate is the state
	ModeDetached      Mode = "detached"      // it is, and the backend's is superseded
)

// Ledger is ledger.json: what this machine knows of the state. It is checked by
// a raw GET before anything is written and brought up to date after it, so that
// a backend that lost its state is told from one that never had any.
type Ledger struct {
	Version int `json:"version"`
	// Address is the configured address. STATE_KEY is not injective, so another
	// address in the same working dir is refused.
	Address string `json:"address"`
	// Served is where the backend answered; later runs use it and no other.
	Served *Served  `json:"served,omitempty"`
	Mode   Mode     `json:"mode,omitempty"`
	State  StateRef `json:"state,omitzero"`
	// Sent is the state whose migration was sent off: from then on the backend
	// may hold it, and cycle 1 never starts again.
	Sent *StateRef `json:"sent,omitempty"`
	// Run is the run that writes, or wrote last.
	Run *RunRef `json:"run,omitempty"`
	// Locks are those that may still be held on the backend, oldest first.
	Locks []LockRef `json:"locks,omitempty"`
}

// Served is how the backend was reached.
type Served struct {
	Address string `json:"address"`
	// Through is the node whose SSH connection forwards to it; empty: directly.
	Through string `json:"through,omitempty"`
}

// StateRef names one version of a state.
type StateRef struct {
	Lineage   string `json:"lineage"`
	Serial    uint64 `json:"serial"`
	SHA256    string `json:"sha256"`
	Resources int    `json:"resources"`
	Encrypted bool   `json:"encrypted,omitempty"`
}

// RunRef is a run and the tofu that it started: after a SIGKILL of the wrapper
// the next run finds the living tofu and serves it on the same port.
type RunRef struct {
	relay.RunInfo
	Verb string `json:"verb,omitempty"`
	// Engine is the executable of its tofu, without symbolic links.
	Engine string `json:"engine,omitempty"`
	// Port, Username and Password are those of the relay on loopback.
	Port     int    `json:"port,omitempty"`
	Username string `json:"username,omitempty"`
	Password string `json:"password,omitempty"`
	// Upstream is what the relay stood before: upstreamBackend or upstreamFile.
	Upstream string `json:"upstream,omitempty"`
}

// Kinds of RunRef.Upstream.
const (
	upstreamBackend = "backend"
	upstreamFile    = "file"
)

func refOf(body []byte) (StateRef, error) {
	meta, err := api.ParseMeta(body)
	if err != nil {
		return StateRef{}, err
	}
	sum := sha256.Sum256(body)
	return StateRef{
		Lineage: meta.Lineage, Serial: meta.Serial, SHA256: hex.EncodeToString(sum[:]),
		Resources: meta.Resources, Encrypted: meta.Encrypted,
	}, nil
}

func ledgerPath(workDir string) string { return filepath.Join(workDir, "ledger.json") }

// readLedger reads ledger.json; without one it is empty, with the address. One
// of another address is refused.
func readLedger(workDir, address string) (*Ledger, error) {
	path := ledgerPath(workDir)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &Ledger{Version: 1, Address: address}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the ledger: %w", err)
	}
	var l Ledger
	if err := json.Unmarshal(b, &l); err != nil {
		return nil, tfhosts.WithExit(tfhosts.ExitSalvage,
			"move it away if the backend's state is known to be good",
			fmt.Errorf("reading the ledger %q: %w", path, err))
	}
	if l.Address != address {
		return nil, tfhosts.WithExit(tfhosts.ExitUsage, "give one of the two another --state-dir",
			fmt.Errorf("the working dir %q belongs to the state at %s, not to the one at %s", workDir, l.Address, address))
	}
	return &l, nil
}

// writeLedger makes the ledger durable. One that is so already is not written
// again.
func (s *session) writeLedger() error {
	s.ledgerMu.Lock() // the relay notes a lock while tofu runs
	defer s.ledgerMu.Unlock()
	text, err := s.ledger.encode()
	if err != nil {
		return err
	}
	if bytes.Equal(text, s.ledgerText) {
		return nil
	}
	if err := durable.Replace(ledgerPath(s.workDir), text, 0o600, "ledger", s.Fault); err != nil {
		return err
	}
	s.ledgerText = text
	return nil
}

// remember makes a state the last one that this machine knows: its bytes in
// last.tfstate, then the ledger.
func (s *session) remember(body []byte) error {
	ref, err := refOf(body)
	if err != nil {
		return fmt.Errorf("remembering the state: %w", err)
	}
	_, missing := os.Stat(lastPath(s.workDir))
	if ref != s.ledger.State || missing != nil {
		if err := durable.Replace(lastPath(s.workDir), body, 0o600, "last", s.Fault); err != nil {
			return err
		}
	}
	s.ledger.State = ref
	return s.writeLedger()
}

func lastPath(workDir string) string { return filepath.Join(workDir, "last.tfstate") }

// known says whether this working dir ever saw a state.
func (l *Ledger) known() bool { return l.State.Lineage != "" }

func (l *Ledger) encode() ([]byte, error) {
	b, err := json.MarshalIndent(l, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encoding the ledger: %w", err)
	}
	return append(b, '\n'), nil
}
