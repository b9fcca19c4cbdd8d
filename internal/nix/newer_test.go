package nix_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"fediversity.eu/tf-hosts/internal/fleettest"
)

// The tests of this package run once more on a host, whose Nix is newer than
// that of Debian 12.
func TestNewerClient(t *testing.T) {
	fleettest.Require(t)
	file := filepath.Join(t.TempDir(), "nix.test")
	cmd := exec.Command("go", "test", "-c", "-o", file, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the tests: %v\n%s", err, out)
	}
	program, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	h := fleettest.New(t, fleettest.Config{}).Hosts[0]
	if err := h.WriteFile(t.Context(), "/root/nix.test", string(program), 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := h.Shell(t.Context(), "nix --version; cd /root && ./nix.test -test.v -test.skip TestNewerClient 2>&1")
	if err != nil || strings.Contains(out, "SKIP") || !strings.Contains(out, "PASS: TestCopyToAnotherStore") {
		t.Errorf("on the host: %v\n%s", err, out)
	}
	if strings.Contains(out, "(Nix) 2.8.") {
		t.Error("the host's Nix is no newer one")
	}
}
