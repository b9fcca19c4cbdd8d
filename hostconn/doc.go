// Package hostconn keeps one SSH connection to a host and runs programs over it.
//
// A Pool dials; a Conn runs scripts under /bin/sh (Run), keeps a remote program
// as a byte stream (Stream), forwards connections (DialContext) and says when
// the link is gone (Done, Err). Who may connect where is decided as OpenSSH
// would: host keys are pinned or remembered, and what a target leaves unset is
// read from the user's OpenSSH configuration.
//
//	pool := hostconn.NewPool(hostconn.Config{KnownHosts: "work/known_hosts"})
//	defer pool.Close()
//	conn, err := pool.Dial(ctx, hostconn.Target{Name: "prod.app1", Host: "10.0.0.7", User: "root"})
//	…
//	res, err := conn.Run(ctx, hostconn.Command{Script: `test -e "$1"`, Args: []string{path}})
//
// It never starts ssh, never asks a question, never retries what was refused
// (a wrong key, a changed host key), never accepts a changed host key and never
// reconnects by itself: whoever holds a Conn knows what may be repeated.
package hostconn
