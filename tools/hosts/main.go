// Command hosts prepares and cleans up what package fleettest needs: "image"
// builds the base image unless it is cached, "sweep" removes hosts whose owner
// died, "up N" boots N hosts, says how to log in, and ends them on Ctrl-C. It is
// for the Makefile and for a developer who wants a look; tests call the package.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/internal/fleettest"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "hosts: error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	cfg := fleettest.Config{Events: func(e tfhosts.Event) { fmt.Fprintln(os.Stderr, "hosts:", e.Message) }}
	switch {
	case len(args) == 1 && args[0] == "image":
		return fleettest.EnsureImage(ctx, cfg)
	case len(args) == 1 && args[0] == "sweep":
		swept, err := fleettest.Sweep(ctx, cfg)
		for _, dir := range swept {
			fmt.Fprintln(os.Stderr, "hosts: removed", dir)
		}
		return err
	case len(args) == 2 && args[0] == "up":
		n, err := strconv.Atoi(args[1])
		if err != nil {
			return fmt.Errorf("reading the number of hosts: %w", err)
		}
		cfg.Hosts = fleettest.Hosts(n)
		return up(ctx, cfg)
	}
	return errors.New("usage: hosts image | sweep | up N")
}

func up(ctx context.Context, cfg fleettest.Config) error {
	f, err := fleettest.Start(ctx, cfg)
	if err != nil {
		return err
	}
	for _, h := range f.Hosts {
		fmt.Printf("%s\t%s\tssh -i %s root@%s\n", h.Name, h.HostKey(), f.KeyFile(), h.Addr())
	}
	<-ctx.Done()
	return f.Close()
}
