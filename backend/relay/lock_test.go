package relay_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/relay"
)

// slowLocks is an upstream that takes its time over a lock.
type slowLocks struct {
	upstream
	begun, answer chan struct{}
	unlocked      chan string
}

func (s slowLocks) Lock(ctx context.Context, _ api.LockInfo) error {
	close(s.begun)
	select {
	case <-s.answer:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s slowLocks) Unlock(_ context.Context, info api.LockInfo) error {
	s.unlocked <- info.ID
	return nil
}

func TestALockOfATofuThatWentAwayIsReleased(t *testing.T) {
	up := slowLocks{begun: make(chan struct{}), answer: make(chan struct{}), unlocked: make(chan string, 1)}
	r, ep := startRelay(t, relay.Config{Upstream: up, JournalDir: t.TempDir()})
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, "LOCK", ep.Address, strings.NewReader(lockJSON("one")))
	if err != nil {
		t.Fatal(err)
	}
	req.SetBasicAuth(ep.Username, ep.Password)
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		if resp, err := http.DefaultTransport.RoundTrip(req); err == nil {
			resp.Body.Close() //nolint:errcheck // only its end counts
		}
	}()
	<-up.begun
	cancel() // tofu is killed
	<-gone
	time.AfterFunc(100*time.Millisecond, func() { close(up.answer) })
	// What the end of a run does: it waits for the answer, and gives the lock back.
	if err := r.Release(context.Background()); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-up.unlocked:
		if id != "one" {
			t.Errorf("unlocked %q", id)
		}
	default:
		t.Error("the lock that the backend gave is held by nobody")
	}
}
