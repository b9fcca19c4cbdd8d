package fleettest

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sort"
	"strings"
	"text/template"
)

//go:embed closure
var closureFiles embed.FS

// DemoUnit is the service that every system of fleettest starts. It writes the
// system's marker to DemoFile.
const (
	DemoUnit = "tf-hosts-demo.service"
	DemoFile = "/run/demo/version"
)

// ClosureSpec says what a system for tests is like. Two equal specs give the
// same store path, wherever their files lie.
type ClosureSpec struct {
	Name    string // default "host"
	Version string // default "1"
	// Marker is what the demo service shows; default Version.
	Marker string
	// HTTPPort, when not 0, makes the demo service answer HTTP with the marker.
	HTTPPort int
	// Units are more services that the activation starts: file name → text.
	// @toplevel@ in it becomes the system's store path.
	Units map[string]string
	// Files are more files of the system: path in the toplevel → file to copy.
	Files map[string]string
	// Behaviour is what switch-to-configuration does besides its work, by
	// action: check, dry-activate, boot, test, switch; "activate" is both of test
	// and switch.
	Behaviour map[string]Behaviour
	// PayloadPaths and PayloadBytes add so many store paths of so many bytes each.
	PayloadPaths int
	PayloadBytes int
	// BuildFails: the derivation evaluates, and its build exits 1.
	BuildFails bool
	// Omit lists files of the toplevel to leave out, as "nixos-version".
	Omit []string
	// Bare leaves the demo service out.
	Bare bool
}

// Behaviour is what switch-to-configuration does in one action: wait, act,
// run the hook, hang or exit.
type Behaviour struct {
	// SleepSeconds passes before anything is done.
	SleepSeconds int
	// Shell is a piece of POSIX sh that runs after the action's work.
	Shell string
	// Hang: it never returns, though its work is done; it can be killed.
	Hang bool
	// Exit, when not 0, replaces the exit code after the action's work.
	Exit int
	// Nothing: exit before the work, with the code of Exit.
	Nothing bool
}

// FailingUnit is a service for ClosureSpec.Units that fails to start, so that
// switch-to-configuration exits 4.
func FailingUnit() string {
	return "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo this unit fails on purpose; exit 1'\n"
}

// Closure is the Nix files of one system, in the forms that nixos_conf knows.
type Closure struct {
	Name string
	Dir  string
	// File evaluates to { config.system.build.toplevel = …; }.
	File string
	// PlainFile evaluates to the derivation itself.
	PlainFile string
	// FlakeRef is DIR#nixosConfigurations.NAME.
	FlakeRef string
	// Drv and Out are store paths: Drv after Instantiate, Out too; Out exists
	// after Build.
	Drv, Out string
}

func baseClosure() ClosureSpec {
	return ClosureSpec{Name: "base", Version: "0", Bare: true}
}

// baseClosureText is what the base closure is made of, as one string.
func baseClosureText() (string, error) {
	files, err := baseClosure().files()
	if err != nil {
		return "", err
	}
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	sort.Strings(names)
	var b strings.Builder
	for _, name := range names {
		b.WriteString(name + "\x00" + files[name] + "\x00")
	}
	return b.String(), nil
}

// NewClosure writes the Nix files of a system into dir, which is made if it is
// missing. It does not run nix.
func NewClosure(dir string, spec ClosureSpec) (*Closure, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	spec = spec.complete()
	files, err := spec.files()
	if err != nil {
		return nil, fmt.Errorf("writing closure %q: %w", spec.Name, err)
	}
	for to, from := range spec.Files {
		b, err := os.ReadFile(from)
		if err != nil {
			return nil, fmt.Errorf("writing closure %q: %w", spec.Name, err)
		}
		files["files/system/"+to] = string(b)
	}
	// What an earlier spec left there would become part of this one.
	if err := os.RemoveAll(filepath.Join(dir, "files")); err != nil {
		return nil, fmt.Errorf("writing closure %q: %w", spec.Name, err)
	}
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return nil, fmt.Errorf("writing closure %q: %w", spec.Name, err)
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(text, "#!") || strings.HasPrefix(text, "\x7fELF") {
			mode = 0o755
		}
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			return nil, fmt.Errorf("writing closure %q: %w", spec.Name, err)
		}
	}
	return &Closure{
		Name:      spec.Name,
		Dir:       dir,
		File:      filepath.Join(dir, "default.nix"),
		PlainFile: filepath.Join(dir, "plain.nix"),
		FlakeRef:  "path:" + dir + "#nixosConfigurations." + spec.Name,
	}, nil
}

func (spec ClosureSpec) complete() ClosureSpec {
	if spec.Name == "" {
		spec.Name = "host"
	}
	if spec.Version == "" {
		spec.Version = "1"
	}
	if spec.Marker == "" {
		spec.Marker = spec.Version
	}
	return spec
}

// files is every text file of the closure, by its path in the closure's folder.
func (spec ClosureSpec) files() (map[string]string, error) {
	spec = spec.complete()
	word := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)
	if !word.MatchString(spec.Name) || !word.MatchString(spec.Version) {
		return nil, fmt.Errorf("bad name %q or version %q", spec.Name, spec.Version)
	}
	if strings.ContainsAny(spec.Marker, "'\n") {
		return nil, fmt.Errorf("bad marker %q", spec.Marker)
	}
	tmpl, err := template.ParseFS(closureFiles, "closure/plain.nix.tmpl")
	if err != nil {
		return nil, err
	}
	var plain bytes.Buffer
	err = tmpl.Execute(&plain, struct {
		ClosureSpec
		System      string
		PayloadSeed string
	}{spec, nixSystem(), "payload of " + spec.Name + " " + spec.Version})
	if err != nil {
		return nil, err
	}
	files := map[string]string{
		"plain.nix":                   plain.String(),
		"default.nix":                 "{ config.system.build.toplevel = import ./plain.nix; }\n",
		"flake.nix":                   "{\n  outputs = { self }: {\n    nixosConfigurations.\"" + spec.Name + "\" = import ./default.nix;\n  };\n}\n",
		"files/system/nixos-version":  "26.05." + spec.Name + "." + spec.Version,
		"files/system/kernel":         "stand-in for a kernel\n",
		"files/system/initrd":         "stand-in for an initrd\n",
		"files/system/kernel-params":  "",
		"files/system/system":         nixSystem(),
		"files/system/behaviour":      spec.behaviour(),
		"files/system/sw/share/empty": "",
	}
	port := ""
	if spec.HTTPPort != 0 {
		port = fmt.Sprint(spec.HTTPPort)
	}
	for name, from := range map[string]string{
		"files/demo": "demo",
		"files/system/bin/switch-to-configuration":    "switch-to-configuration",
		"files/system/init":                           "init",
		"files/system/etc/systemd/system/" + DemoUnit: "demo.service",
	} {
		if spec.Bare && from == "demo.service" {
			continue
		}
		b, err := closureFiles.ReadFile("closure/" + from)
		if err != nil {
			return nil, err
		}
		text := string(b)
		if from == "demo" {
			text = strings.NewReplacer("@marker@", spec.Marker, "@port@", port).Replace(text)
		}
		files[name] = text
	}
	for name, text := range spec.Units {
		files["files/system/etc/systemd/system/"+name] = text
	}
	return files, nil
}

// behaviour is the piece of shell that switch-to-configuration reads.
func (spec ClosureSpec) behaviour() string {
	actions := make([]string, 0, len(spec.Behaviour))
	for a := range spec.Behaviour {
		actions = append(actions, a)
	}
	sort.Strings(actions)
	var before, after strings.Builder
	for _, a := range actions {
		b := spec.Behaviour[a]
		if a == "activate" {
			a = "test | switch"
		}
		fmt.Fprintf(&before, "\t%s)\n\t\t:\n", a)
		fmt.Fprintf(&after, "\t%s)\n\t\t:\n", a)
		if b.SleepSeconds > 0 {
			fmt.Fprintf(&before, "\t\tsleep %d\n", b.SleepSeconds)
		}
		if b.Nothing {
			fmt.Fprintf(&before, "\t\texit %d\n", b.Exit)
		}
		if b.Shell != "" {
			fmt.Fprintf(&after, "%s\n", b.Shell)
		}
		if b.Hang {
			fmt.Fprintf(&after, "\t\tsleep infinity\n")
		}
		if b.Exit != 0 {
			fmt.Fprintf(&after, "\t\tstatus=%d\n", b.Exit)
		}
		fmt.Fprint(&before, "\t\t;;\n")
		fmt.Fprint(&after, "\t\t;;\n")
	}
	return fmt.Sprintf("before() {\n\tcase $action in\n%s\tesac\n}\nafter() {\n\tcase $action in\n%s\tesac\n}\n", before.String(), after.String())
}

// NixEnv is what nix needs in its environment to build closures here: the store
// itself without a daemon, no sandbox, no binary cache. Set it for the program
// under test too.
func NixEnv() []string {
	return []string{
		"NIX_REMOTE=local",
		"NIX_CONFIG=sandbox = false\nbuild-users-group =\nsubstitute = false\nsubstituters =\nexperimental-features = nix-command flakes",
	}
}

func nix(ctx context.Context, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), NixEnv()...)
	return runCommand(cmd)
}

// nixWord is nix for a command whose answer is one word.
func nixWord(ctx context.Context, argv ...string) (string, error) {
	out, err := nix(ctx, argv...)
	return strings.TrimSpace(out), err
}

// Instantiate evaluates the closure and sets Drv and Out. Nothing is built.
func (c *Closure) Instantiate(ctx context.Context) error {
	drv, err := nixWord(ctx, "nix-instantiate", c.PlainFile)
	if err != nil {
		return fmt.Errorf("evaluating closure %q: %w", c.Name, err)
	}
	out, err := nixWord(ctx, "nix-store", "--query", "--outputs", drv)
	if err != nil {
		return fmt.Errorf("evaluating closure %q: %w", c.Name, err)
	}
	c.Drv, c.Out = drv, out
	return nil
}

// Build evaluates and builds the closure into this machine's store.
func (c *Closure) Build(ctx context.Context) error {
	if err := c.Instantiate(ctx); err != nil {
		return err
	}
	if _, err := nix(ctx, "nix-store", "--realise", c.Drv); err != nil {
		return fmt.Errorf("building closure %q: %w", c.Name, err)
	}
	return nil
}

// Forget removes the built paths from this machine's store, where nothing else
// holds them, so that the next build is a real one. A path in use stays.
func (c *Closure) Forget(ctx context.Context) error {
	if c.Out == "" {
		return errors.New("forgetting closure: it was never evaluated")
	}
	_, err := nix(ctx, "nix-store", "--delete", "--ignore-liveness", c.Out)
	return err
}
