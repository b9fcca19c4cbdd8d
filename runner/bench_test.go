package runner_test

import (
	"fmt"
	"os"
	"os/exec"
	"sort"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// BenchmarkCopy compares dial and copy of a deploy with "nix copy --to ssh-ng://"
// over OpenSSH: 300 MB in 500 paths, over a link with a round trip of 50 ms, in
// turn. The metric is the ratio of the medians; under 1 is faster than nix.
func BenchmarkCopy(b *testing.B) {
	const pairs = 3
	bed := newBed(b, fleettest.HostConfig{Delay: 25 * time.Millisecond})
	old := bed.system().Running
	c := bed.closure(fleettest.ClosureSpec{Name: "copy", PayloadPaths: 500, PayloadBytes: 600_000})
	known := b.TempDir() + "/known_hosts"
	if err := os.WriteFile(known, []byte(bed.host.Addr()+" "+bed.host.HostKey()+"\n"), 0o600); err != nil {
		b.Fatal(err)
	}
	theirs := func() float64 {
		cmd := exec.CommandContext(b.Context(), "nix", "--extra-experimental-features", "nix-command", "copy", "--no-check-sigs", "--to", "ssh-ng://root@"+bed.host.Addr(), c.Out)
		cmd.Env = append(os.Environ(), fmt.Sprintf("NIX_SSHOPTS=-F none -i %s -o IdentitiesOnly=yes -o BatchMode=yes -o UserKnownHostsFile=%s", bed.fleet.KeyFile(), known))
		begin := time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("nix copy: %v\n%s", err, out)
		}
		return time.Since(begin).Seconds()
	}
	ours := func() float64 {
		v := bed.deploy(runner.Request{Built: c.Out})
		if v.Status != tfhosts.Deployed {
			b.Fatalf("verdict: %s", v)
		}
		return v.Seconds["connect"] + v.Seconds["copy"]
	}
	for b.Loop() {
		var nix, tf []float64
		for range pairs {
			nix = append(nix, theirs())
			bed.forget(old, c.Out)
			tf = append(tf, ours())
			bed.forget(old, c.Out)
		}
		b.Logf("nix copy %.1f s, tf-hosts %.1f s", nix, tf)
		b.ReportMetric(median(tf)/median(nix), "ratio")
	}
}

func median(x []float64) float64 {
	sort.Float64s(x)
	return x[len(x)/2]
}
