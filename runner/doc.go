// Package runner deploys one NixOS node: it builds what the caller did not, copies
// the closure over one SSH connection, activates it on the host and reports what
// the host then runs, as a Verdict.
//
// The system of a node is a resource of package lifecycle with the fields running,
// profile, default and booted: a node that is as wanted is "unchanged", and nothing
// is called on it. It never prints, never waits for another node, never deletes a
// generation, and never reports what it did not see on the host.
//
//	r := runner.New(runner.Config{Dial: pool.Dial, Nix: nixClient})
//	verdict := r.Deploy(ctx, runner.Request{Name: "prod.app1", Node: node})
//
// The operations have stable names, used by events, fault tests and docs: build,
// connect, observe, record.settle, record.read, health.before, root.link,
// space.check, copy, copy.check, check, activate.start, activate.wait,
// activate.reconnect, health.after, activate.confirm, activate.result, verify,
// root.release, reboot.start, reboot.wait; activate.dry for the goal dry-activate.
package runner
