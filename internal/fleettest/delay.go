package fleettest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// maxFrame holds a segment of TCP as the kernels hand it on, unsplit, with the
// header that says how to split it.
const maxFrame = 10 + 65536 + 64

// inFlight is how many frames may be on the way in one direction; more are
// dropped, as a full queue does. 50 ms at 10 Gbit/s fit.
const inFlight = 4096

// delayLine stands between the fleet's bridge and one of the host's own, and
// holds each frame for a while: the kernels that tests run on have no netem.
type delayLine struct {
	taps []*os.File
	wg   sync.WaitGroup
}

// startDelay joins the links' bridges; each frame takes delay in each direction.
func startDelay(ctx context.Context, delay time.Duration, bridges, taps [2]string) (*delayLine, error) {
	d := &delayLine{}
	for i := range taps {
		tap, err := openTap(taps[i])
		if err != nil {
			return nil, errors.Join(err, d.close())
		}
		d.taps = append(d.taps, tap)
		if _, err := command(ctx, "ip", "link", "set", taps[i], "master", bridges[i], "up"); err != nil {
			return nil, errors.Join(err, d.close())
		}
	}
	d.forward(d.taps[0], d.taps[1], delay)
	d.forward(d.taps[1], d.taps[0], delay)
	return d, nil
}

// openTap makes a link that goes away with the process.
func openTap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening a link for a delay: %w", err)
	}
	ifr, err := unix.NewIfreq(name)
	if err == nil {
		ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr)
	}
	if err == nil {
		err = unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making link %q: %w", name, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}

// forward moves frames until a link is closed.
func (d *delayLine) forward(from, to *os.File, delay time.Duration) {
	type frame struct {
		due  time.Time
		data []byte
	}
	queue := make(chan frame, inFlight)
	d.wg.Go(func() {
		defer close(queue)
		buffer := make([]byte, maxFrame)
		for {
			n, err := from.Read(buffer)
			if err != nil {
				return
			}
			select {
			case queue <- frame{time.Now().Add(delay), append([]byte(nil), buffer[:n]...)}:
			default:
			}
		}
	})
	d.wg.Go(func() {
		for f := range queue {
			time.Sleep(time.Until(f.due))
			to.Write(f.data) //nolint:errcheck // a link that is down loses the frame
		}
	})
}

func (d *delayLine) close() error {
	var errs []error
	for _, tap := range d.taps {
		errs = append(errs, tap.Close())
	}
	d.wg.Wait()
	return errors.Join(errs...)
}
