package server_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store"
)

func TestReadyWhenTheStoreCanBeWritten(t *testing.T) {
	var full atomic.Bool
	dir := t.TempDir()
	files, err := store.OpenFiles(dir, store.FilesConfig{Fault: func(op string) error {
		if full.Load() && strings.HasPrefix(op, "store.ready") {
			return errors.New("no space left on the disk of project1/secret")
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	var log bytes.Buffer
	for _, bad := range []bool{false, true} {
		full.Store(bad)
		h, err := server.New(server.Config{
			Store: files, Users: []server.User{{Name: "ops", Password: "pw"}}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		want := map[bool]int{false: 200, true: 503}[bad]
		for range 2 { // the second answer is the kept one
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
			if w.Code != want || strings.Contains(w.Body.String(), "project1") {
				t.Errorf("full disk %v: /readyz = %d %q, want %d and no names", bad, w.Code, w.Body, want)
			}
		}
	}
	if n := strings.Count(log.String(), "no space left"); n != 1 {
		t.Errorf("the reason is logged %d times, want once:\n%s", n, log.String())
	}
}

// writePair writes a new certificate and key.
func writePair(t *testing.T, certFile, keyFile string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	// A clock that ticks coarsely must not hide the change.
	later := time.Now().Add(time.Duration(serial) * time.Hour)
	for path, block := range map[string]*pem.Block{
		certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		if path == "" {
			continue
		}
		if err := errors.Join(os.WriteFile(path, pem.EncodeToMemory(block), 0o600), os.Chtimes(path, later, later)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestCertificateIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	certFile, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writePair(t, certFile, keyFile, 1)
	log := &syncBuffer{}
	logger := slog.New(slog.NewTextHandler(log, nil))
	conf, err := server.LoadTLS(certFile, keyFile, logger)
	if err != nil {
		t.Fatal(err)
	}
	files, err := store.OpenFiles(filepath.Join(dir, "states"), store.FilesConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer files.Close()
	srv, err := server.New(server.Config{Store: files, Insecure: true, TLS: conf})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx, ln) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	ask := func(c *http.Client) (serial int64) {
		t.Helper()
		resp, err := c.Get("https://" + ln.Addr().String() + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.StatusCode != 200 {
			t.Fatalf("/readyz: %d, %v", resp.StatusCode, err)
		}
		return resp.TLS.PeerCertificates[0].SerialNumber.Int64()
	}
	client := func() *http.Client {
		tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
		t.Cleanup(tr.CloseIdleConnections)
		return &http.Client{Transport: tr}
	}
	old := client()
	if got := ask(old); got != 1 {
		t.Fatalf("serial %d, want 1", got)
	}
	writePair(t, certFile, keyFile, 2)
	if got := ask(client()); got != 2 {
		t.Errorf("a new connection got the certificate %d, want 2", got)
	}
	if got := ask(old); got != 1 {
		t.Errorf("the old connection was dropped: certificate %d, want 1", got)
	}
	// Half of a pair is written: the old one serves, and it is told once.
	writePair(t, certFile, "", 3)
	for range 2 {
		if got := ask(client()); got != 2 {
			t.Errorf("with a broken pair a connection got the certificate %d, want 2", got)
		}
	}
	if n := strings.Count(log.String(), "the old one is kept"); n != 1 {
		t.Errorf("the broken pair is logged %d times, want once:\n%s", n, log.String())
	}
	writePair(t, certFile, keyFile, 4)
	if got := ask(client()); got != 4 {
		t.Errorf("a new connection got the certificate %d, want 4", got)
	}
}
