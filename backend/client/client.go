// Package client talks to any state server that speaks OpenTofu's http backend
// protocol: get, post, lock, unlock and a probe.
//
// It sorts every failure under a sentinel of package api, so that callers can
// tell "no state" from "no server" from "something else answers there". It never
// follows a redirect, never decides whether a state may be written, and never
// puts a password, a header or the query of an address into an error.
//
//	c, err := client.New(client.Config{Address: "https://state.example.org/state/p/n", Username: "ops", Password: pw})
//	body, err := c.Get(ctx) // errors.Is(err, api.ErrNotFound): no state yet
package client

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/hashicorp/go-retryablehttp"

	"fediversity.eu/tf-hosts/backend/api"
)

// maxBody bounds what is read of an answer.
const maxBody = 512 << 20

// Client talks to one state. It is safe for concurrent use.
type Client struct {
	cfg    Config
	http   *retryablehttp.Client
	shown  string // the address as errors show it
	state  *url.URL
	lock   *url.URL
	unlock *url.URL
	force  bool
}

// New checks cfg and reads its certificate files; it does not connect.
func New(cfg Config) (*Client, error) {
	cfg.setDefaults()
	c := &Client{cfg: cfg}
	for _, a := range []struct {
		dst  **url.URL
		text string
		name string
	}{{&c.state, cfg.Address, "address"}, {&c.lock, cfg.LockAddress, "lock address"}, {&c.unlock, cfg.UnlockAddress, "unlock address"}} {
		u, err := parseAddress(a.text)
		if err != nil {
			return nil, fmt.Errorf("reading state backend's %s: %w", a.name, err)
		}
		*a.dst = u
	}
	for name := range cfg.Headers {
		switch strings.ToLower(name) {
		case "content-type", "content-md5":
			return nil, fmt.Errorf("reading state backend's headers: %q is reserved", name)
		case "authorization":
			if cfg.Username != "" {
				return nil, errors.New(`reading state backend's headers: "Authorization" and a username exclude each other`)
			}
		}
	}
	c.shown = show(c.state)
	transport, err := newTransport(cfg)
	if err != nil {
		return nil, err
	}
	c.http = newRetryable(cfg, &http.Client{
		Transport: transport,
		Timeout:   cfg.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		},
	})
	return c, nil
}

func newRetryable(cfg Config, hc *http.Client) *retryablehttp.Client {
	rc := retryablehttp.NewClient()
	rc.Logger = nil
	rc.RetryMax, rc.RetryWaitMin, rc.RetryWaitMax = cfg.RetryMax, cfg.RetryWaitMin, cfg.RetryWaitMax
	rc.ErrorHandler = retryablehttp.PassthroughErrorHandler
	rc.CheckRetry = retry
	rc.HTTPClient = hc
	return rc
}

// Address is the state's address without query and user, for messages.
func (c *Client) Address() string { return c.shown }

// Once is c with one try a request, for a caller that does its own waiting and
// must know of every lost answer. It shares the connections of c.
func (c *Client) Once() *Client {
	once := *c
	once.cfg.RetryMax = 0
	once.http = newRetryable(once.cfg, c.http.HTTPClient)
	return &once
}

// Forced is c with writes that ask the server to lift its guard of lineage and
// serial (api.ForceHeader). It shares the connections of c.
func (c *Client) Forced() *Client {
	forced := *c
	forced.force = true
	return &forced
}

// Close drops idle connections.
func (c *Client) Close() { c.http.HTTPClient.CloseIdleConnections() }

// Get reads the state. api.ErrNotFound: there is none (404, 204 or an empty
// body). api.ErrNoState: the answer is no state, as an HTML page.
func (c *Client) Get(ctx context.Context) ([]byte, error) {
	a, err := c.do(ctx, http.MethodGet, c.state, nil)
	for n := 0; errors.Is(err, errCutOff) && n < c.cfg.RetryMax; n++ {
		select {
		case <-time.After(c.cfg.RetryWaitMin):
		case <-ctx.Done():
			return nil, c.fail("reading state from", ctx.Err())
		}
		a, err = c.do(ctx, http.MethodGet, c.state, nil)
	}
	if err != nil {
		return nil, c.fail("reading state from", err)
	}
	if a.status == http.StatusNoContent || a.status == http.StatusOK && len(a.body) == 0 {
		return nil, c.fail("reading state from", api.ErrNotFound)
	}
	if err := a.sentinel(); err != nil {
		return nil, c.fail("reading state from", err)
	}
	if _, err := api.ParseMeta(a.body); err != nil {
		return nil, c.fail("reading state from", fmt.Errorf("%w: %w", api.ErrNoState, err))
	}
	if want := a.header.Get("Content-MD5"); want != "" && want != contentMD5(a.body) {
		return nil, c.fail("reading state from", fmt.Errorf("%w: the answer does not have the announced Content-MD5", api.ErrUnavailable))
	}
	return a.body, nil
}

// Post writes the state under the lock lockID; empty for an unlocked write.
// api.ErrUnavailable after a lost answer does not say whether it was stored.
func (c *Client) Post(ctx context.Context, lockID string, body []byte) error {
	u := *c.state
	if lockID != "" {
		q := u.Query()
		q.Set("ID", lockID)
		u.RawQuery = q.Encode()
	}
	a, err := c.do(ctx, c.cfg.UpdateMethod, &u, body)
	if err == nil {
		err = a.sentinel()
	}
	return c.fail("writing state to", err)
}

// Lock takes the lock. A *api.LockedError is a lock that another holds.
func (c *Client) Lock(ctx context.Context, info api.LockInfo) error {
	body, err := json.Marshal(info)
	if err != nil {
		return err
	}
	a, err := c.do(ctx, c.cfg.LockMethod, c.lock, body)
	switch {
	case err != nil:
	case a.status == http.StatusOK:
		return nil
	case a.status == http.StatusConflict: // GitLab, Gitea, terraform-backend-git
		err = a.locked()
		if a.ours(info.ID) {
			return nil
		}
	case a.status == http.StatusCreated || a.status == http.StatusNoContent:
		err = fmt.Errorf("%w: status %d to a lock", api.ErrNoState, a.status)
	default:
		if err = a.sentinel(); a.status == http.StatusLocked && a.ours(info.ID) {
			return nil
		}
	}
	return c.fail("locking state at", err)
}

// Unlock releases the lock; info is the holder's whole lock information, since
// some servers compare it field by field. api.ErrNotLocked: it is not held.
func (c *Client) Unlock(ctx context.Context, info api.LockInfo) error {
	body, err := json.Marshal(info)
	if err != nil {
		return err
	}
	a, err := c.do(ctx, c.cfg.UnlockMethod, c.unlock, body)
	switch {
	case err != nil:
	case a.status == http.StatusConflict || a.status == http.StatusLocked:
		// Another lock than info's is held: the caller's is not.
		if a.again {
			return nil
		}
		err = api.ErrNotLocked
		if holder, ok := api.ParseHolder(a.body); ok && holder.ID != info.ID {
			err = errors.Join(api.ErrNotLocked, &api.LockedError{Holder: holder})
		}
	case a.again && a.status == http.StatusBadRequest: // nimbolus, of a lock that is gone
		return nil
	default:
		err = a.sentinel()
	}
	return c.fail("unlocking state at", err)
}

// errCutOff: the connection broke within a body, after the tries of the HTTP
// layer had ended with its status.
var errCutOff = errors.New("the answer is cut off")

// answer is what a server said.
type answer struct {
	status   int
	header   http.Header
	body     []byte
	location string // of a redirect, without query and user
	// again: an earlier try may have been served, its answer was lost.
	again bool
}

// ours says whether the holder of a refused lock is what an earlier try of the
// same request had locked. Without one it is a server that echoes.
func (a answer) ours(id string) bool {
	holder, ok := api.ParseHolder(a.body)
	return a.again && ok && holder.ID == id
}

func (a answer) sentinel() error {
	switch err := api.FromStatus(a.status); {
	case err == nil:
		return nil
	case errors.Is(err, api.ErrLocked):
		return a.locked()
	default:
		return &StatusError{Status: a.status, RetryAfter: retryAfter(a.header), Location: a.location, err: err}
	}
}

func (a answer) locked() error {
	holder, _ := api.ParseHolder(a.body)
	return &api.LockedError{Holder: holder}
}

func retryAfter(h http.Header) time.Duration {
	d, err := time.ParseDuration(h.Get("Retry-After") + "s")
	if err != nil || d < 0 {
		return 0
	}
	return d
}

// StatusError is an answer that is no success, with the sentinel it stands for.
type StatusError struct {
	Status int
	// RetryAfter is what the server asked for in seconds, else 0.
	RetryAfter time.Duration
	// Location is where a redirect points, without query and user, else empty.
	Location string
	err      error
}

func (e *StatusError) Error() string {
	if e.Location != "" {
		return fmt.Sprintf("%v (status %d, to %s)", e.err, e.Status, e.Location)
	}
	return fmt.Sprintf("%v (status %d)", e.err, e.Status)
}

func (e *StatusError) Unwrap() error { return e.err }

func (c *Client) do(ctx context.Context, method string, u *url.URL, body []byte) (answer, error) {
	var rd any
	if body != nil {
		rd = bytes.NewReader(body)
	}
	doubtful := false
	req, err := retryablehttp.NewRequestWithContext(context.WithValue(ctx, doubtKey{}, &doubtful), method, u.String(), rd)
	if err != nil {
		return answer{}, classify(ctx, err)
	}
	for name, value := range c.cfg.Headers {
		req.Header.Set(name, value)
	}
	if c.cfg.Username != "" {
		req.SetBasicAuth(c.cfg.Username, c.cfg.Password)
	}
	if c.force && method == c.cfg.UpdateMethod {
		req.Header.Set(api.ForceHeader, "1")
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Content-MD5", contentMD5(body))
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if resp != nil {
			err = errors.Join(err, resp.Body.Close())
		}
		return answer{}, classify(ctx, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxBody+1))
	if err != nil {
		if ctx.Err() != nil {
			return answer{}, ctx.Err()
		}
		if resp.StatusCode != http.StatusOK {
			return answer{status: resp.StatusCode, header: resp.Header, location: redirectTo(u, resp)}, nil
		}
		return answer{}, fmt.Errorf("%w: %w after %d bytes", api.ErrUnavailable, errCutOff, len(b))
	}
	if len(b) > maxBody {
		return answer{}, fmt.Errorf("%w: over %d bytes", api.ErrTooLarge, maxBody)
	}
	return answer{status: resp.StatusCode, header: resp.Header, body: b, location: redirectTo(u, resp), again: doubtful}, nil
}

func redirectTo(asked *url.URL, resp *http.Response) string {
	text := resp.Header.Get("Location")
	if text == "" || resp.StatusCode < 300 || resp.StatusCode > 399 {
		return ""
	}
	to, err := asked.Parse(text)
	if err != nil {
		return ""
	}
	return show(to)
}

func (c *Client) fail(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %q: %w", doing, c.shown, err)
}

func contentMD5(b []byte) string {
	sum := md5.Sum(b)
	return base64.StdEncoding.EncodeToString(sum[:])
}
