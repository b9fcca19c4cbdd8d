package runner_test

import (
	"strings"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
	"fediversity.eu/tf-hosts/runner"
)

// fakeSwitch is what a switch does on a host, and how the deploy has to end.
type fakeSwitch struct {
	name      string
	behaviour map[string]fleettest.Behaviour
	units     map[string]string
	settings  tfhosts.NodeSettings
	prepare   string // on the host, before
	want      tfhosts.Status
	says      string
}

func fakeSwitches() []fakeSwitch {
	activate := func(b fleettest.Behaviour) map[string]fleettest.Behaviour {
		return map[string]fleettest.Behaviour{"activate": b}
	}
	return []fakeSwitch{
		{name: "succeeds", want: tfhosts.Deployed},
		{
			name: "exit 4", units: map[string]string{"bad.service": fleettest.FailingUnit()},
			settings: tfhosts.NodeSettings{OnDegraded: "rollback"},
			want:     tfhosts.RolledBack, says: "units failed",
		},
		{
			name: "exit 4, and it stays", units: map[string]string{"bad.service": fleettest.FailingUnit()},
			want: tfhosts.Degraded, says: "bad.service",
		},
		{
			name: "exit 2 half-way", behaviour: activate(fleettest.Behaviour{Exit: 2}),
			want: tfhosts.RolledBack, says: "the switch exited 2",
		},
		{
			name: "the network is down for 5 s", behaviour: activate(fleettest.Behaviour{Shell: "ip link set eth0 down; sleep 5; ip link set eth0 up"}),
			settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Guard: 30}},
			want:     tfhosts.Deployed,
		},
		{
			name: "the network is down for good", behaviour: activate(fleettest.Behaviour{Shell: "ip link set eth0 down"}),
			want: tfhosts.RolledBack, says: "no confirmation came within 6 s",
		},
		{
			name: "sshd restarts", behaviour: activate(fleettest.Behaviour{Shell: "systemctl restart ssh"}),
			settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Guard: 30}},
			want:     tfhosts.Deployed,
		},
		{
			name: "sshd is gone, the old session lives", behaviour: activate(fleettest.Behaviour{Shell: "systemctl stop ssh.socket ssh"}),
			want: tfhosts.RolledBack, says: "no confirmation came within 6 s",
		},
		{
			name: "hangs", behaviour: activate(fleettest.Behaviour{Hang: true}),
			settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Activate: 4}},
			want:     tfhosts.RolledBack, says: "the switch did not end within 4 s",
		},
		{
			name: "ignores TERM", behaviour: activate(fleettest.Behaviour{Shell: "trap '' TERM; while :; do sleep 1; done"}),
			settings: tfhosts.NodeSettings{Limits: tfhosts.Limits{Activate: 4}},
			want:     tfhosts.RolledBack, says: "the switch did not end within 4 s",
		},
		{
			name: "the host reboots", behaviour: activate(fleettest.Behaviour{Shell: "systemctl reboot; sleep infinity"}),
			want: tfhosts.RolledBack,
		},
		{
			name: "boot fails on a full /boot",
			// The default is already the new system when the disk is full.
			behaviour: map[string]fleettest.Behaviour{"boot": {Shell: "head -c 100000 /dev/zero >/boot/kernel || exit 1"}},
			prepare:   "default=$(readlink /boot/default); mount -t tmpfs -o size=64k none /boot; ln -s \"$default\" /boot/default",
			want:      tfhosts.RolledBack, says: "making it the boot default exited 1",
		},
		{
			name: "a health check fails", want: tfhosts.RolledBack, says: `health check "web" failed`,
			settings: tfhosts.NodeSettings{Health: []tfhosts.HealthCheck{{Name: "web", TCP: "127.0.0.1:9", Retries: new(int)}}},
		},
		{name: "without a guard: succeeds", want: tfhosts.Deployed, settings: unguarded()},
		{
			name: "without a guard: exit 2 half-way", behaviour: activate(fleettest.Behaviour{Exit: 2}),
			settings: unguarded(), want: tfhosts.RolledBack, says: "the switch exited 2",
		},
	}
}

// TestFakeSwitches: what ran, the profile and the boot default differ before each
// deploy. It ends with the new system as all three, or with each as it was.
func TestFakeSwitches(t *testing.T) {
	setNixEnv(t)
	workers := make(chan struct{}, 4) // of the machine's few cores
	for _, row := range fakeSwitches() {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			workers <- struct{}{}
			defer func() { <-workers }()
			b := bootBed(t, fleettest.HostConfig{NetAdmin: true})
			// Going back to it mends the network and sshd, as going back to a NixOS system does.
			first := b.closure(fleettest.ClosureSpec{Name: "first", Marker: "first", Behaviour: map[string]fleettest.Behaviour{
				"test": {Shell: "ip link set eth0 up; systemctl start ssh"},
			}})
			if err := b.host.CopyClosure(t.Context(), first.Out); err != nil {
				t.Fatal(err)
			}
			b.shell(first.Out + "/bin/switch-to-configuration test; " + row.prepare)
			before := b.system()
			if before.Running != first.Out || before.Profile == first.Out || before.Default == first.Out {
				t.Fatalf("the host is not prepared: %+v", before)
			}
			c := b.closure(fleettest.ClosureSpec{Name: "fake", Marker: "fake", Behaviour: row.behaviour, Units: row.units})
			settings := row.settings
			if settings.Limits.Guard == 0 {
				settings.Limits.Guard = 6
			}
			if settings.Limits.Activate == 0 {
				settings.Limits.Activate = 60
			}
			start := time.Now()
			v := b.deploy(runner.Request{Built: c.Out, Settings: settings})
			t.Logf("after %.1f s", time.Since(start).Seconds())
			if !strings.Contains(v.Sentence, row.says) {
				t.Errorf("sentence = %q, want %q in it", v.Sentence, row.says)
			}
			if row.want == tfhosts.RolledBack {
				b.want(v, row.want, before.Running, before.Profile, before.Default)
				if s := b.system(); s.Demo != "first" {
					t.Errorf("the service shows %q, want first", s.Demo)
				}
				return
			}
			b.want(v, row.want, c.Out, c.Out, c.Out)
		})
	}
}
