package fleettest

import (
	"context"
	"os"
	"testing"
	"time"
)

// SkipText is what a test says that needs hosts on a machine that cannot have
// them. The CI script looks for it.
const SkipText = "real hosts need root, systemd-nspawn and the base image (make deps)"

// Require skips the test on a machine that cannot boot hosts: no root, tools or
// base image. With TF_HOSTS_REQUIRE_HOSTS=1 it fails the test instead.
func Require(t testing.TB) {
	t.Helper()
	cache, err := CacheDir()
	if err == nil && os.Geteuid() == 0 && len(missingTools()) == 0 && haveBase(cache) {
		return
	}
	if os.Getenv("TF_HOSTS_REQUIRE_HOSTS") == "1" {
		t.Fatal(SkipText)
	}
	t.Skip(SkipText)
}

// New boots the hosts of cfg for a test and ends them with it. It calls Require.
// The consoles of a failed test are in its output.
func New(t testing.TB, cfg Config) *Fleet {
	t.Helper()
	Require(t)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	f, err := Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, h := range f.Hosts {
				console, _ := h.Console()
				t.Logf("console of %q, last lines:\n%s", h.Name, lastLines(console, 20))
			}
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}
