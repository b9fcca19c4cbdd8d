package runner_test

import (
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// What the host's own substituter has is not sent, unless the setup says so.
func TestSubstitute(t *testing.T) {
	b := newBed(t, fleettest.HostConfig{})
	old := b.system().Running
	c := b.closure(fleettest.ClosureSpec{Name: "substitute", PayloadPaths: 3, PayloadBytes: 200_000})
	if err := b.host.CopyClosure(t.Context(), c.Out); err != nil {
		t.Fatal(err)
	}
	b.shell("nix --extra-experimental-features nix-command copy --to file:///cache " + c.Out + `
		nix-store --delete $(nix-store --query --requisites ` + c.Out + `) 2>/dev/null || true
		! nix-store --check-validity ` + c.Out + ` 2>/dev/null
		printf "substitute = true\nsubstituters = file:///cache?trusted=true\n" >>/etc/nix/nix.conf
		systemctl stop nix-daemon.service`)

	yes, no := true, false
	sent := b.deploy(runner.Request{Built: c.Out, Settings: tfhosts.NodeSettings{Substitute: &yes}})
	b.want(sent, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if sent.BytesCopied > 100_000 {
		t.Errorf("with the host's own cache %d bytes were sent, want hardly any", sent.BytesCopied)
	}

	// Back, so that everything is missing again.
	b.forget(old, c.Out)
	sent = b.deploy(runner.Request{Built: c.Out, Settings: tfhosts.NodeSettings{Substitute: &no}})
	b.want(sent, tfhosts.Deployed, c.Out, c.Out, c.Out)
	if sent.BytesCopied < 600_000 {
		t.Errorf("without substitution %d bytes were sent, want the whole closure of 600,000", sent.BytesCopied)
	}
}
