// Package fleettest boots real systemd hosts for tests and for the demo, and
// builds system closures for them with the real nix.
//
// A host is Debian with systemd, sshd and nix in a systemd-nspawn container of
// its own network namespace, made to look like a NixOS system to a deployer:
// /etc/NIXOS, a system profile, /run/current-system, and a boot that obeys the
// boot default. The root of each host is an overlay over a base image that is
// built once (see [EnsureImage]). Hosts are reached over a bridge with a free
// subnet 10.77.N.0/24.
//
//	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
//	h := fleet.Hosts[0]
//	ssh(h.Addr(), fleet.KeyFile(), h.HostKey())
//
// The package never opens an SSH connection, so that a test can count them, and
// ends only processes that it started. What it set up is recorded on disk
// first; [Sweep] removes the leftovers of owners that died.
package fleettest
