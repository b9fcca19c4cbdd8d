package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"al.essio.dev/pkg/shellescape"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
)

// link is the one connection to a node. Whoever needs it first dials; the
// others wait for that and share its result.
type link struct {
	once sync.Once
	conn *hostconn.Conn
	err  error
}

func (r *run) connect(ctx context.Context, name string) (*hostconn.Conn, error) {
	l, ok := r.links[name]
	if !ok {
		return nil, fmt.Errorf("connecting to %q: it is not in the setup", name)
	}
	l.once.Do(func() {
		target, err := hostconn.TargetOf(name, r.Setup.Nodes[name].Node, r.Setup.Nodes[name].Runner)
		if err != nil {
			l.err = err
			return
		}
		l.conn, l.err = r.Pool.Dial(ctx, target)
	})
	return l.conn, l.err
}

// forward is the Forward of Config.Backend.
func (r *run) forward(ctx context.Context, node string) (func(context.Context, string, string) (net.Conn, error), error) {
	conn, err := r.connect(ctx, node)
	if err != nil {
		return nil, err
	}
	return conn.DialContext, nil
}

// hangUp closes what is still open; nothing uses it any more.
func (r *run) hangUp() {
	for _, l := range r.links {
		if l.conn != nil {
			_ = l.conn.Close() // everything that was asked of it has its own error
		}
	}
}

// sshRoot is sshCommand for a command that needs root.
func sshRoot(t hostconn.Target, command string) string {
	if t.User != "" && t.User != "root" {
		command = "sudo " + command
	}
	return sshCommand(t, command)
}

// sshCommand is a command that the operator can paste.
func sshCommand(t hostconn.Target, command string) string {
	argv := []string{"ssh"}
	if t.KeyFile != "" {
		argv = append(argv, "-i", t.KeyFile)
	}
	for _, opt := range t.Options {
		argv = append(argv, "-o", opt)
	}
	host := t.Host
	if t.User != "" {
		host = t.User + "@" + host
	}
	return shellescape.QuoteCommand(append(argv, host, command))
}

func (r *run) checkNode(ctx context.Context, name string, n tfhosts.SetupNode) {
	prefix := "node " + name + " "
	target, err := hostconn.TargetOf(name, n.Node, n.Runner)
	if err != nil {
		r.add(prefix+"ssh", Fail, err.Error(), "correct ssh_opts in the setup file")
		return
	}
	settings, err := hostconn.Resolve(target, hostconn.Config{})
	if err != nil {
		r.add(prefix+"ssh", Fail, err.Error(), "correct ssh_opts in the setup file, or the OpenSSH configuration")
		return
	}
	r.checkPin(prefix, target, settings)
	if !r.checkKey(ctx, prefix, target, settings) {
		return // a dial could only be refused
	}
	dialing, cancel := r.limited(ctx)
	defer cancel()
	start := time.Now()
	conn, err := r.connect(dialing, name)
	if err != nil {
		r.add(prefix+"ssh", Fail, err.Error(), connectHint(err, target))
		return
	}
	if self := r.Setup.Self; self == nil || self.Node != name {
		defer conn.Close()
	}
	r.add(prefix+"ssh", OK, fmt.Sprintf("%s logs in, after %v", settings.User, time.Since(start).Round(10*time.Millisecond)), "")
	r.checkHost(ctx, prefix, conn, target, settings.User)
}

func (r *run) checkPin(prefix string, t hostconn.Target, s hostconn.Settings) {
	if t.HostKey != "" {
		r.add(prefix+"pin", OK, "the host key is pinned", "")
		return
	}
	argv := []string{"ssh-keyscan", "-t", "ed25519"}
	if s.Port != 22 {
		argv = append(argv, "-p", strconv.Itoa(s.Port))
	}
	r.add(prefix+"pin", Warn, "no host key is pinned: the key of the first connection is believed",
		fmt.Sprintf("set its host_key in the setup file (\"ssh-ed25519 AAAA…\") to what the host itself has in /etc/ssh/ssh_host_ed25519_key.pub; to compare: %s",
			shellescape.QuoteCommand(append(argv, s.HostName))))
}

// checkKey says whether there is a key to offer.
func (r *run) checkKey(ctx context.Context, prefix string, t hostconn.Target, s hostconn.Settings) bool {
	check := prefix + "key"
	path := ""
	if t.KeyFile != "" && len(s.IdentityFiles) > 0 {
		path = s.IdentityFiles[0]
	}
	quoted := shellescape.Quote(path)
	keys, err := r.Pool.CheckKeys(ctx, t)
	switch {
	case err == nil:
	case path == "":
		r.add(check, Fail, err.Error(), "name a key_file in the setup file, or load one: eval $(ssh-agent) && ssh-add")
		return false
	case errors.Is(err, fs.ErrNotExist):
		r.add(check, Fail, err.Error(), fmt.Sprintf("name another key_file, or make this one: ssh-keygen -t ed25519 -f %s && ssh-copy-id -i %s %s", quoted, quoted, shellescape.Quote(s.User+"@"+s.HostName)))
		return false
	case errors.Is(err, fs.ErrPermission):
		r.add(check, Fail, err.Error(), "let this user read it: ls -l "+quoted)
		return false
	default:
		r.add(check, Fail, err.Error(), "load it into an agent: eval $(ssh-agent) && ssh-add "+quoted)
		return false
	}
	if path == "" {
		r.add(check, OK, fmt.Sprintf("%d to offer, the first is %s", len(keys), keys[0]), "")
		return true
	}
	info, err := os.Stat(path)
	switch mode := fs.FileMode(0); {
	case err != nil: // an agent's, by its public half
	default:
		mode = info.Mode().Perm()
		if mode&0o077 == 0 {
			break
		}
		level := Warn
		if mode&0o007 != 0 {
			level = Fail
		}
		r.add(check, level, fmt.Sprintf("%s has the mode %04o: others can read the private key", path, mode), "chmod 600 "+quoted)
		return true
	}
	r.add(check, OK, keys[0], "")
	return true
}

func connectHint(err error, t hostconn.Target) string {
	var key *hostconn.HostKeyError
	var option *hostconn.OptionError
	switch {
	case errors.As(err, &key) && key.GotKey != "":
		return fmt.Sprintf("if the host was installed anew, pin its new key: \"host_key\": %q; if not, somebody is between you and it", key.GotKey)
	case errors.As(err, &key):
		return "if the host was installed anew, pin a key that it has; to see them: ssh-keyscan " + shellescape.Quote(t.Host)
	case errors.As(err, &option):
		return "correct ssh_opts in the setup file, or the OpenSSH configuration"
	case errors.Is(err, hostconn.ErrAuth):
		return "let the host accept the key: ssh-copy-id -i " + shellescape.Quote(t.KeyFile+".pub") + " " + shellescape.Quote(t.User+"@"+t.Host) + "; to see which is refused: " + sshCommand(t, "true")
	}
	return "see whether it answers: " + sshCommand(t, "true")
}
