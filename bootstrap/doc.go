// Package bootstrap is the wrapper around OpenTofu: from a setup and an
// environment to one exit code and one verdict a node. It keeps the working
// dir, runs tofu behind the relay, hands the nodes that tofu's provisioners
// name to the node worker, and collects what became of them.
//
// It never connects to a host and never runs nix: the caller hands both in as
// funcs (Worker). It never prints of its own: what OpenTofu says goes to the
// writers of Config, everything else is an Event.
package bootstrap
