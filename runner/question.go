package runner

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"al.essio.dev/pkg/shellescape"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
)

// maxBody is how much of a body is read.
const maxBody = 1 << 20

// question is one try of a health check: it says in one line what it saw. ctx
// bounds it.
type question func(ctx context.Context, conn *hostconn.Conn) (string, error)

// question prepares a check; its error is one that no try would mend.
func (h *checker) question(c tfhosts.HealthCheck) (question, error) {
	switch {
	case len(c.Command) > 0:
		return askCommand(c.Command), nil
	case c.Unit != "":
		return askUnit(c.Unit), nil
	case c.TCP != "":
		return askTCP(c.From, c.TCP), nil
	case c.HTTP != nil:
		return askHTTP(c.From, *c.HTTP)
	}
	return nil, errors.New("it asks nothing: command, http, tcp or unit is needed")
}

// commandScript runs the command "$2 …" as it is, for $1 seconds. It ends on the
// host even when the connection does.
const commandScript = toolPath + `limit=$1; shift; exec timeout -k 2 "$limit" "$@" </dev/null`

func askCommand(argv []string) question {
	return func(ctx context.Context, conn *hostconn.Conn) (string, error) {
		limit := wholeSeconds(ctx)
		res, err := conn.Run(ctx, hostconn.Command{
			Script: commandScript, Args: append([]string{strconv.Itoa(limit)}, argv...),
			Become: true, Timeout: untilDeadline(ctx),
		})
		switch {
		case err != nil:
			return "", err
		case res.Code == 0:
			return "exit 0", nil
		case res.Code == 124 || res.Code == 137:
			return "", fmt.Errorf("the command did not end within %d s", limit)
		}
		said := tail(slices.Concat(res.Stdout, res.Stderr), 1)
		if said == "" {
			return "", fmt.Errorf("exit %d", res.Code)
		}
		return "", fmt.Errorf("exit %d: %s", res.Code, said)
	}
}

// wholeSeconds is what is left of ctx, less the second in which the host answers.
func wholeSeconds(ctx context.Context) int {
	return max(1, int((untilDeadline(ctx) - time.Second/2).Seconds()))
}

func askUnit(unit string) question {
	return func(ctx context.Context, conn *hostconn.Conn) (string, error) {
		res, err := conn.Run(ctx, hostconn.Command{
			Script: toolPath + `systemctl is-active -- "$1"`, Args: []string{unit}, Timeout: untilDeadline(ctx),
		})
		if err != nil {
			return "", err
		}
		state := tail(slices.Concat(res.Stderr, res.Stdout), 1)
		if res.Code == 0 {
			return unit + " is " + state, nil
		}
		return "", fmt.Errorf("%s is %s", unit, orNone(state))
	}
}

// dialer is how http and tcp are asked: from the node through its connection, so
// that the host needs no tool, or from here.
func dialer(from string, conn *hostconn.Conn) func(ctx context.Context, network, addr string) (net.Conn, error) {
	if from == "deployer" {
		var d net.Dialer
		return d.DialContext
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := conn.DialContext(ctx, network, addr)
		if errors.Is(err, hostconn.ErrForward) {
			return nil, &givenUp{err: fmt.Errorf(`%w: allow it (AllowTcpForwarding), or ask from "deployer" or with a command`, err)}
		}
		return nc, err
	}
}

func askTCP(from, addr string) question {
	return func(ctx context.Context, conn *hostconn.Conn) (string, error) {
		nc, err := dialer(from, conn)(ctx, "tcp", addr)
		if err != nil {
			return "", err
		}
		_ = nc.Close() // it was asked for nothing
		return addr + " accepts connections", nil
	}
}

func askHTTP(from string, check tfhosts.HTTPCheck) (question, error) {
	roots, err := authorities(check.CAFile)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, conn *hostconn.Conn) (string, error) {
		transport := &http.Transport{
			DialContext:       dialer(from, conn),
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{RootCAs: roots, InsecureSkipVerify: check.Insecure},
		}
		if from == "deployer" {
			transport.Proxy = http.ProxyFromEnvironment
		}
		defer transport.CloseIdleConnections()
		client := &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
		resp, err := get(ctx, client, check.URL)
		if err != nil && check.OrURL != "" && ctx.Err() == nil {
			var orErr error
			if resp, orErr = get(ctx, client, check.OrURL); orErr != nil {
				return "", fmt.Errorf("%w; %w", err, orErr)
			}
		} else if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		return resp.Status, judgeResponse(resp, check)
	}, nil
}

func get(ctx context.Context, client *http.Client, address string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, &givenUp{err: err}
	}
	return client.Do(req)
}

func judgeResponse(resp *http.Response, check tfhosts.HTTPCheck) error {
	good := slices.Contains(check.Status, resp.StatusCode)
	want := strings.Trim(fmt.Sprint(check.Status), "[]")
	if len(check.Status) == 0 {
		good, want = resp.StatusCode >= 200 && resp.StatusCode < 400, "200 to 399"
	}
	if !good {
		return fmt.Errorf("the answer is %s, expected is %s", resp.Status, want)
	}
	if check.Contains == "" {
		return nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return fmt.Errorf("reading the body: %w", err)
	}
	if !bytes.Contains(body, []byte(check.Contains)) {
		return fmt.Errorf("the answer is %s, and its body lacks %q", resp.Status, check.Contains)
	}
	return nil
}

// authorities are those of the system with those of a PEM file; nil without one.
func authorities(file string) (*x509.CertPool, error) {
	if file == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading ca_file: %w", err)
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool() // a machine without its own
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("reading ca_file: %q holds no PEM certificate", file)
	}
	return pool, nil
}

// healthHint is the check as a command that can be pasted.
func (d *deploy) healthHint(c tfhosts.HealthCheck) string {
	const intro = "ask it yourself: "
	command := ""
	switch {
	case len(c.Command) > 0:
		return intro + d.sshRoot(shellescape.QuoteCommand(c.Command))
	case c.Unit != "":
		return intro + d.ssh("systemctl status "+shellescape.Quote(c.Unit))
	case c.TCP != "":
		host, port, _ := net.SplitHostPort(c.TCP)
		command = shellescape.QuoteCommand([]string{"nc", "-zv", host, port})
	case c.HTTP != nil:
		command = shellescape.QuoteCommand([]string{"curl", "--include", c.HTTP.URL})
	}
	if c.From == "deployer" {
		return intro + command
	}
	return intro + d.ssh(command)
}

// oneLine keeps an error to a line that fits into a message.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if runes := []rune(s); len(runes) > 300 {
		return string(runes[:300]) + "…"
	}
	return s
}
