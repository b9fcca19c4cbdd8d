package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"fediversity.eu/tf-hosts/backend/api"
)

// dialError marks that no connection came about: DNS, refused, no route or
// timeout, also through a dialer of the caller.
type dialError struct{ err error }

func (e *dialError) Error() string { return e.err.Error() }

func (e *dialError) Unwrap() error { return e.err }

// classify sorts an error of the transport under a sentinel. The *url.Error
// around it is dropped: it quotes the whole address, query included.
func classify(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var ue *url.Error
	for errors.As(err, &ue) {
		err = ue.Err
	}
	var dial *dialError
	switch {
	case errors.As(err, &dial):
		return fmt.Errorf("%w: %w", api.ErrUnreachable, dial.err)
	case isTLS(err):
		return fmt.Errorf("%w: %w", api.ErrTLS, err)
	}
	return fmt.Errorf("%w: the connection broke: %w", api.ErrUnavailable, err)
}

func isTLS(err error) bool {
	var (
		verify    *tls.CertificateVerificationError
		record    tls.RecordHeaderError
		alert     tls.AlertError
		authority x509.UnknownAuthorityError
		hostname  x509.HostnameError
		invalid   x509.CertificateInvalidError
	)
	return errors.As(err, &verify) || errors.As(err, &record) || errors.As(err, &alert) ||
		errors.As(err, &authority) || errors.As(err, &hostname) || errors.As(err, &invalid) ||
		// net/http makes these two from a tls.RecordHeaderError and from an alert
		// of the peer, and keeps only their text.
		strings.Contains(err.Error(), "server gave HTTP response to HTTPS client") ||
		strings.Contains(err.Error(), "remote error: tls:")
}

// doubtKey is where retry notes, in a request's context, that a try may have
// been served though its answer does not say so.
type doubtKey struct{}

// retry decides on another try: as tofu does, except that nothing is tried
// again that another try can not change (TLS, redirects).
func retry(ctx context.Context, resp *http.Response, err error) (bool, error) {
	if ctx.Err() != nil {
		return false, ctx.Err()
	}
	again, doubt := false, false
	if err != nil {
		err = classify(ctx, err)
		again, doubt = !errors.Is(err, api.ErrTLS), errors.Is(err, api.ErrUnavailable)
	} else {
		again = errors.Is(api.FromStatus(resp.StatusCode), api.ErrUnavailable)
		doubt = again
	}
	if doubtful, ok := ctx.Value(doubtKey{}).(*bool); ok && doubt {
		*doubtful = true
	}
	return again, nil
}
