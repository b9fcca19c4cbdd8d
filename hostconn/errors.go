package hostconn

import (
	"errors"
	"fmt"
	"strings"
)

// What can go wrong with a connection; every error of this package that is about
// one of these wraps it.
var (
	// ErrUnreachable: no name, no route, refused, or no answer in time. Worth
	// another try later.
	ErrUnreachable = errors.New("host is unreachable")
	// ErrAuth: the host refused every key, or there was none to offer. Never
	// retried: OpenSSH's PerSourcePenalties would lock this address out.
	ErrAuth = errors.New("authentication failed")
	// ErrLost: the connection broke after it had been made. A remote command
	// that was under way may go on.
	ErrLost = errors.New("connection lost")
	// ErrTimeout: a command did not end within its limit.
	ErrTimeout = errors.New("time limit exceeded")
	// ErrBecome: the host refused the become command (sudo).
	ErrBecome = errors.New("become refused")
	// ErrForward: sshd forbids connections from the host (AllowTcpForwarding,
	// PermitOpen).
	ErrForward = errors.New("the host's sshd forbids forwarding")
	// ErrShell: the login does not lead to a POSIX shell (nologin, a forced command).
	ErrShell = errors.New("no shell on the host")
)

// HostKeyError says that a host did not show the key that was expected of it, or
// that it is not known where only known hosts are allowed. It is never retried.
type HostKeyError struct {
	// Name is the node, Host the "host:port" whose key it is: the target or a hop.
	Name, Host string
	// Want are the SHA256 fingerprints of the expected keys, with their type and
	// where they come from; empty when the host is unknown.
	Want []string
	// Got is the fingerprint of the shown key; empty when the host has no key of
	// the expected type.
	Got string
	// GotKey is the shown key as a pin for host_key ("ssh-ed25519 AAAA…").
	GotKey string
	// Revoked: the shown key is marked @revoked.
	Revoked bool
	// Reason says why a host certificate does not count; else empty.
	Reason string
}

func (e *HostKeyError) Error() string {
	switch {
	case e.Revoked:
		return fmt.Sprintf("host key of %s is revoked: %s", e.Host, e.Got)
	case e.Reason != "":
		return fmt.Sprintf("host certificate of %s does not count: %s", e.Host, e.Reason)
	case len(e.Want) == 0:
		return fmt.Sprintf("host key of %s is not known and StrictHostKeyChecking is yes: got %s", e.Host, e.Got)
	case e.Got == "":
		return fmt.Sprintf("host key of %s has changed: want %s, and it has no key of that type", e.Host, strings.Join(e.Want, " or "))
	}
	return fmt.Sprintf("host key of %s has changed: want %s, got %s", e.Host, strings.Join(e.Want, " or "), e.Got)
}

// OptionError is one SSH option that cannot be used: an entry of ssh_opts, or a
// line of an OpenSSH configuration that applies to the host.
type OptionError struct {
	// Name is the option as it was written, Value what it was set to.
	Name, Value string
	// Where is "ssh_opts", or "FILE:LINE".
	Where string
	// Reason says what is wrong and, where there is one, the way out.
	Reason string
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("%s: option %q: %s", e.Where, e.Name, e.Reason)
}
