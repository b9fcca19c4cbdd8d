// Command demo shows the main job on real parts: it boots two systemd hosts and
// a state server, deploys a system to each through tf-hosts, changes one of the
// systems and deploys that one alone. It fails when a step does not end as it
// says. "make demo" runs it from the root of the repository.
package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

func main() {
	binary := flag.String("tf-hosts", "./tf-hosts", "the program to show")
	dir := flag.String("dir", ".demo", "folder of the demo; removed at its start")
	keep := flag.Bool("keep", false, "leave hosts and state server running until Ctrl-C")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx, *binary, *dir, *keep); err != nil {
		fmt.Fprintf(os.Stderr, "demo: error: %v\n", err)
		os.Exit(1)
	}
}

// demo is the fleet and what the program under show works with.
type demo struct {
	binary, dir string
	fleet       *fleettest.Fleet
	environ     []string
	confs       map[string]string // nixos_conf by host, relative to dir
}

func run(ctx context.Context, binary, dir string, keep bool) (err error) {
	d := &demo{confs: map[string]string{}}
	if d.binary, err = filepath.Abs(binary); err != nil {
		return err
	}
	if d.dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if err := os.RemoveAll(d.dir); err != nil {
		return fmt.Errorf("removing an earlier demo: %w", err)
	}
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return fmt.Errorf("making the demo's folder: %w", err)
	}

	say("booting two real systemd hosts (network namespaces on this machine)")
	tell := func(e tfhosts.Event) { fmt.Printf("    %s\n", e.Message) }
	if _, err := fleettest.Sweep(ctx, fleettest.Config{}); err != nil {
		return err
	}
	hosts := []fleettest.HostConfig{{Name: "app1"}, {Name: "app2"}}
	d.fleet, err = fleettest.Start(ctx, fleettest.Config{Hosts: hosts, Events: tell})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.fleet.Close()) }()

	address, stopServer, err := d.serve(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopServer()) }()

	for _, name := range []string{"app1", "app2"} {
		if err := d.system(name, "1"); err != nil {
			return err
		}
	}
	if err := d.setup(address); err != nil {
		return err
	}

	say("first apply: both hosts get their system, the state goes to the backend")
	if err := d.show(ctx, "apply"); err != nil {
		return err
	}
	if err := d.expect(ctx, map[string]string{"app1": "1", "app2": "1"}, "app1", "app2"); err != nil {
		return err
	}
	say("nothing changed: the plan is empty (exit 0)")
	if err := d.show(ctx, "plan", "-detailed-exitcode"); err != nil {
		return err
	}
	if err := d.show(ctx, "state-list"); err != nil {
		return err
	}

	say("app1 gets another system; only app1 is deployed")
	if err := d.system("app1", "2"); err != nil {
		return err
	}
	if err := d.show(ctx, "apply"); err != nil {
		return err
	}
	if err := d.expect(ctx, map[string]string{"app1": "2", "app2": "1"}, "app1"); err != nil {
		return err
	}
	say("done: both applies ended as they should")
	fmt.Printf("    setup, states and logs are in %s; \"make clean\" removes them and any host that is left\n", dir)
	if keep {
		say("hosts and state server run until Ctrl-C (--keep); in another shell:")
		fmt.Printf("    export TF_HOSTS_SETUP=%s BOOTSTRAP_STATE_DIR=%s %s\n", filepath.Join(d.dir, tfhostsJSON), filepath.Join(d.dir, "work"), fleettest.NixEnv()[0])
		<-ctx.Done()
	}
	return nil
}

// serve starts the state server on loopback, with credentials.
func (d *demo) serve(ctx context.Context) (address string, stop func() error, err error) {
	password := rand.Text()
	users := fmt.Sprintf(`[{"name": "demo", "password": %q}]`, password)
	for name, text := range map[string]string{"users.json": users, "password": password + "\n"} {
		if err := os.WriteFile(filepath.Join(d.dir, name), []byte(text), 0o600); err != nil {
			return "", nil, fmt.Errorf("writing the credentials: %w", err)
		}
	}
	port, err := freePort()
	if err != nil {
		return "", nil, err
	}
	listen := net.JoinHostPort("127.0.0.1", port)
	args := []string{"backend", "serve", "--dir", filepath.Join(d.dir, "states"), "--listen", listen, "--users", filepath.Join(d.dir, "users.json")}
	say("starting the state server")
	fmt.Printf("$ tf-hosts %s\n", strings.Join(args, " "))
	log, err := os.Create(filepath.Join(d.dir, "backend.log"))
	if err != nil {
		return "", nil, fmt.Errorf("starting the state server: %w", err)
	}
	cmd := exec.Command(d.binary, args...)
	cmd.Stdout, cmd.Stderr = log, log
	// A Ctrl-C is the demo's: the server ends after the last verb.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return "", nil, errors.Join(fmt.Errorf("starting the state server: %w", err), log.Close())
	}
	stop = func() error {
		return errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait(), log.Close())
	}
	limit, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		var dialer net.Dialer
		conn, derr := dialer.DialContext(limit, "tcp", listen)
		if derr == nil {
			return "http://" + listen + "/state/demo/fleet", stop, conn.Close()
		}
		select {
		case <-limit.Done():
			return "", nil, errors.Join(fmt.Errorf("starting the state server: %w", derr), stop())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// system writes the Nix files of a host's system.
func (d *demo) system(name, version string) error {
	c, err := fleettest.NewClosure(filepath.Join(d.dir, "systems", name), fleettest.ClosureSpec{Name: name, Version: version})
	if err != nil {
		return err
	}
	file, err := filepath.Rel(d.dir, c.File)
	d.confs[name] = "./" + file
	return err
}

// setup writes tf-hosts.json, as a person would.
func (d *demo) setup(address string) error {
	nodes := map[string]any{}
	for _, h := range d.fleet.Hosts {
		nodes["demo."+h.Name] = map[string]any{
			"nixos_conf": d.confs[h.Name], "host": h.Addr(), "host_key": h.HostKey(), "key_file": d.fleet.KeyFile(),
		}
	}
	b, err := json.MarshalIndent(map[string]any{
		"version": 1, "nodes": nodes,
		"http_backend": map[string]any{"address": address, "username": "demo", "password_file": "password"},
	}, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(d.dir, tfhostsJSON)
	d.environ = append(fleettest.NixEnv(), "BOOTSTRAP_STATE_DIR="+filepath.Join(d.dir, "work"), "TF_HOSTS_SETUP="+path)
	say("the setup file")
	fmt.Println(string(b))
	return os.WriteFile(path, append(b, '\n'), 0o600)
}

const tfhostsJSON = "tf-hosts.json"

// show runs a verb as a user would, on this terminal.
func (d *demo) show(ctx context.Context, args ...string) error {
	fmt.Printf("$ tf-hosts %s\n", strings.Join(args, " "))
	cmd := exec.CommandContext(ctx, d.binary, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.Dir = d.dir
	cmd.Env = append(os.Environ(), d.environ...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("running tf-hosts %s: %w", args[0], err)
	}
	return nil
}

// expect checks what the hosts run, and that the last run deployed exactly the
// named ones.
func (d *demo) expect(ctx context.Context, versions map[string]string, deployed ...string) error {
	matches, err := filepath.Glob(filepath.Join(d.dir, "work", "*", "verdict.json"))
	if err != nil || len(matches) != 1 {
		return fmt.Errorf("looking for verdict.json: %d found: %w", len(matches), err)
	}
	f, err := os.Open(matches[0])
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(f)
	if err != nil {
		return err
	}
	var record struct {
		Run   string
		Nodes map[string]struct{ Run, Status string }
	}
	if err := json.Unmarshal(b, &record); err != nil {
		return err
	}
	want := map[string]bool{}
	for _, name := range deployed {
		want["demo."+name] = true
	}
	for name, n := range record.Nodes {
		if (n.Run == record.Run) != want[name] {
			return fmt.Errorf("the last run deployed %q: %v, expected %v", name, n.Run == record.Run, want[name])
		}
		if n.Run == record.Run && n.Status != string(tfhosts.Deployed) {
			return fmt.Errorf("%q ended as %q, expected %q", name, n.Status, tfhosts.Deployed)
		}
	}
	for _, h := range d.fleet.Hosts {
		got, err := h.System(ctx)
		if err != nil {
			return err
		}
		if got.Demo != versions[h.Name] || got.Running != got.Profile {
			return fmt.Errorf("host %q runs version %q (%s, profile %s), expected version %q", h.Name, got.Demo, got.Running, got.Profile, versions[h.Name])
		}
		fmt.Printf("    %s runs %s, its service says version %s\n", h.Name, filepath.Base(got.Running), got.Demo)
	}
	return nil
}

func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("finding a free port: %w", err)
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

func say(text string) { fmt.Printf("\n==> %s\n", text) }
