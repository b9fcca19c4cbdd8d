package nix

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// client is a real Nix without daemon and sandbox; as root it uses the
// machine's store.
func client(t *testing.T) *Client {
	t.Helper()
	if _, err := exec.LookPath("nix-store"); err != nil || os.Getuid() != 0 {
		t.Skip("needs nix and root")
	}
	return New(Config{
		Options:  []string{"--option", "sandbox", "false", "--option", "build-users-group", "", "--option", "substitute", "false"},
		RootsDir: filepath.Join(t.TempDir(), "roots"),
	})
}

const systemNix = `{ name ? "system", broken ? false }:
let
  sh = n: script: derivation { name = n; system = builtins.currentSystem; builder = "/bin/sh"; PATH = "/bin:/usr/bin"; args = [ "-c" script ]; };
  dep = sh "${name}-dep" (if broken then "echo MARK; exit 3" else "echo NONCE > $out");
in sh name "mkdir -p $out/bin; echo ${dep} > $out/bin/switch-to-configuration; echo 1 > $out/nixos-version"
`

func writeFile(t *testing.T, dir, name, text string) {
	t.Helper()
	// The nonce makes each test's derivations its own.
	text = strings.ReplaceAll(text, "NONCE", filepath.Base(filepath.Dir(dir))+t.Name())
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestIdentityKinds(t *testing.T) {
	c := client(t)
	ctx := context.Background()
	dir := t.TempDir()
	writeFile(t, dir, "fn.nix", systemNix)
	writeFile(t, dir, "value.nix", `import ./fn.nix {}`)
	writeFile(t, dir, "nixos.nix", `{ config.system.build.toplevel = import ./fn.nix {}; }`)
	writeFile(t, dir, "number.nix", `4`)
	writeFile(t, dir, "syntax.nix", `{`)
	writeFile(t, dir, "flake.nix", `{ outputs = _: { nixosConfigurations."a-b".config.system.build.toplevel = let
		system = "x86_64-linux"; in derivation { inherit system; name = "flake"; builder = "/bin/sh"; }; }; }`)

	fn, err := c.Identity(ctx, dir, "fn.nix", "")
	if err != nil || !IsDerivation(fn) {
		t.Fatalf("Identity(fn.nix) = %q, %v, want a derivation", fn, err)
	}
	if _, err := os.Stat(fn); err != nil {
		t.Errorf("the derivation is not in the store: %v", err)
	}
	if target, err := os.Readlink(c.rootLink(fn)); err != nil || target != fn {
		t.Errorf("root of the derivation = %q, %v, want %q", target, err, fn)
	}
	for _, conf := range []string{"value.nix", "./nixos.nix", filepath.Join(dir, "value.nix"), fn} {
		if got, err := c.Identity(ctx, dir, conf, ""); err != nil || got != fn {
			t.Errorf("Identity(%q) = %q, %v, want %q", conf, got, err, fn)
		}
	}
	if got, err := c.Identity(ctx, dir, "absent.nix", fn); err != nil || got != fn {
		t.Errorf("Identity with a given identity = %q, %v, want it back without evaluation", got, err)
	}
	if got, err := c.Identity(ctx, dir, "path:"+dir+"#nixosConfigurations.a-b", ""); err != nil || !strings.HasSuffix(got, "-flake.drv") {
		t.Errorf("Identity(flake) = %q, %v, want a derivation", got, err)
	}
	if got, err := c.Identity(ctx, dir, ".#nixosConfigurations.a-b", ""); err != nil || !strings.HasSuffix(got, "-flake.drv") {
		t.Errorf("Identity(relative flake) = %q, %v, want a derivation", got, err)
	}

	for conf, want := range map[string]string{
		"number.nix":                             "config.system.build.toplevel",
		"syntax.nix":                             "syntax error",
		"absent.nix":                             "no such file",
		"path:" + dir + "#packages.x":            "nixosConfigurations.NAME",
		"path:" + dir + "#nixosConfigurations.c": "'nixosConfigurations.c",
		"-fn.nix":                                "dash",
		"fn":                                     "a .nix file",
	} {
		got, err := c.Identity(ctx, dir, conf, "")
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), conf) {
			t.Errorf("Identity(%q) = %q, %v, want an error that names it and says %q", conf, got, err, want)
		}
	}
}

func TestBuildOneBrokenDoesNotStopTheOthers(t *testing.T) {
	c := client(t)
	ctx := context.Background()
	dir := t.TempDir()
	writeFile(t, dir, "system.nix", systemNix)
	writeFile(t, dir, "good.nix", `import ./system.nix { name = "good"; }`)
	writeFile(t, dir, "bad.nix", `import ./system.nix { name = "bad"; broken = true; }`)
	writeFile(t, dir, "plain.nix", `derivation { name = "plain"; system = builtins.currentSystem; builder = "/bin/sh"; args = [ "-c" "echo NONCE > $out" ]; }`)
	ids := map[string]string{}
	for _, name := range []string{"good", "bad", "plain"} {
		id, err := c.Identity(ctx, dir, name+".nix", "")
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = id
	}
	const nowhere = "/nix/store/00000000000000000000000000000000-nowhere"
	got, err := c.Build(ctx, []string{ids["bad"], nowhere, ids["good"], ids["plain"], ids["good"]})
	if err != nil {
		t.Fatal(err)
	}
	good := got[ids["good"]]
	if good.Err != nil || !strings.HasSuffix(good.Out, "-good") {
		t.Fatalf("good = %+v, want its path", good)
	}
	if target, err := os.Readlink(c.rootLink(good.Out)); err != nil || target != good.Out {
		t.Errorf("root = %q, %v, want %q", target, err, good.Out)
	}
	if err := got[ids["bad"]].Err; err == nil || !strings.Contains(err.Error(), "MARK") || !strings.Contains(err.Error(), "bad-dep") {
		t.Errorf("bad = %v, want the failed derivation with its log", err)
	}
	if err := got[nowhere].Err; err == nil || !strings.Contains(err.Error(), "not in this machine's store") {
		t.Errorf("nowhere = %v, want that it is not here", err)
	}
	if err := got[ids["plain"]].Err; !errors.Is(err, ErrNotSystem) {
		t.Errorf("plain = %v, want ErrNotSystem", err)
	}
	if err := c.Release(good.Out, ids["good"]); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(c.rootLink(good.Out)); !os.IsNotExist(err) {
		t.Errorf("the root is still there after Release: %v", err)
	}
}

// daemon is a nix-daemon --stdio on another store, as a host would run it.
func daemon(ctx context.Context, store string) (io.ReadWriteCloser, error) {
	cmd := exec.CommandContext(ctx, "nix-daemon", "--stdio")
	cmd.Env = append(os.Environ(), "NIX_REMOTE=local?root="+store)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	return &process{in, out, cmd}, cmd.Start()
}

type process struct {
	io.WriteCloser
	io.Reader
	cmd *exec.Cmd
}

func (p *process) Close() error {
	_ = p.WriteCloser.Close()
	return p.cmd.Wait()
}

func TestCopyToAnotherStore(t *testing.T) {
	c := client(t)
	ctx := context.Background()
	dir := t.TempDir()
	writeFile(t, dir, "system.nix", systemNix)
	id, err := c.Identity(ctx, dir, "system.nix", "")
	if err != nil {
		t.Fatal(err)
	}
	built, err := c.Build(ctx, []string{id})
	if err != nil || built[id].Err != nil {
		t.Fatal(err, built[id].Err)
	}
	out := built[id].Out
	closure, err := c.Closure(ctx, out)
	if err != nil || len(closure) != 2 {
		t.Fatalf("Closure() = %v, %v, want two paths", closure, err)
	}
	store := t.TempDir()
	var last int64
	for _, path := range []string{out, id} {
		n, err := c.Copy(ctx, CopyRequest{
			Path:     path,
			Dial:     func(ctx context.Context) (io.ReadWriteCloser, error) { return daemon(ctx, store) },
			Progress: func(done int64) { last = done },
		})
		if err != nil || n == 0 || last != n {
			t.Fatalf("Copy() = %d, %v, progress %d", n, err, last)
		}
	}
	for _, p := range append(closure, Path{Path: id}) {
		if _, err := os.Stat(filepath.Join(store, p.Path)); err != nil {
			t.Errorf("closure is incomplete: %v", err)
		}
	}
}

func TestCopySaysWhyTheHostDidNotAnswer(t *testing.T) {
	c := client(t)
	ctx := context.Background()
	dir := t.TempDir()
	writeFile(t, dir, "system.nix", systemNix)
	id, err := c.Identity(ctx, dir, "system.nix", "")
	if err != nil {
		t.Fatal(err)
	}
	refused := errors.New("sudo: a password is required")
	_, err = c.Copy(ctx, CopyRequest{Path: id, Dial: func(context.Context) (io.ReadWriteCloser, error) { return nil, refused }})
	if !errors.Is(err, refused) {
		t.Errorf("Copy() = %v, want the reason of the dial", err)
	}
}

func TestParsePathInfo(t *testing.T) {
	want := []Path{{"/nix/store/a", 1}, {"/nix/store/b", 2}}
	for name, text := range map[string]string{
		"2.8 list":    `[{"path":"/nix/store/b","narSize":2},{"path":"/nix/store/a","narSize":1}]`,
		"2.26 object": `{"/nix/store/b":{"narSize":2},"/nix/store/a":{"narSize":1}}`,
	} {
		got, err := parsePathInfo([]byte(text))
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("parsePathInfo(%s) = %v, %v (-want +got):\n%s", name, got, err, diff)
		}
	}
	if _, err := parsePathInfo([]byte(`{"/nix/store/a":null}`)); err == nil {
		t.Error("an invalid path is no error")
	}
}

func TestCommandLines(t *testing.T) {
	c := New(Config{BinDir: "/b", Options: []string{"--option", "sandbox", "false"}})
	got := c.copyArgv("/run/s", "/nix/store/x")
	want := []string{
		"/b/nix", "--extra-experimental-features", "nix-command flakes", "--option", "sandbox", "false",
		"copy", "--to", "unix:///run/s", "--no-check-sigs", "/nix/store/x",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("copyArgv (-want +got):\n%s", diff)
	}
	_, err := New(Config{BinDir: t.TempDir()}).Build(context.Background(), []string{"/nix/store/00000000000000000000000000000000-x"})
	if !errors.Is(err, ErrNotInstalled) {
		t.Errorf("Build without nix = %v, want ErrNotInstalled", err)
	}
}

func TestErrorTextKeepsTheReason(t *testing.T) {
	got := errorText("warning: x\nerror: no such thing\n\n       at /a.nix:1\n")
	if want := "no such thing\n\n       at /a.nix:1"; got != want {
		t.Errorf("errorText = %q, want %q", got, want)
	}
}
