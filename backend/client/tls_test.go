package client_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/client"
)

// TestClientCertificates: a server that wants a client certificate, whose own
// is signed by a private CA; each given as files and as text.
func TestClientCertificates(t *testing.T) {
	cert, key := selfSigned(t)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(cert)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte(`{"version":4,"serial":1,"lineage":"a","resources":[]}`)) //nolint:errcheck // the client tells
	}))
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12}
	srv.StartTLS()
	defer srv.Close()
	dir := t.TempDir()
	file := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	certFile, keyFile := file("cert.pem", cert), file("key.pem", key)
	for _, row := range []struct {
		name    string
		backend tfhosts.HTTPBackend
		want    error
	}{
		{"files", tfhosts.HTTPBackend{CAFile: certFile, CertFile: certFile, KeyFile: keyFile}, nil},
		{"text of the environment", tfhosts.HTTPBackend{CAPEM: string(cert), CertPEM: string(cert), KeyPEM: string(key)}, nil},
		{"text wins over a file", tfhosts.HTTPBackend{CAFile: "/none", CAPEM: string(cert), CertPEM: string(cert), KeyPEM: string(key)}, nil},
		{"unknown CA", tfhosts.HTTPBackend{CertFile: certFile, KeyFile: keyFile}, api.ErrTLS},
		{"no client certificate", tfhosts.HTTPBackend{CAFile: certFile}, api.ErrTLS},
	} {
		t.Run(row.name, func(t *testing.T) {
			row.backend.Address = srv.URL + "/state/a/b"
			cfg, err := client.FromBackend(row.backend)
			if err != nil {
				t.Fatal(err)
			}
			c, err := client.New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if _, err := c.Get(context.Background()); !errors.Is(err, row.want) {
				t.Errorf("Get = %v, want %v", err, row.want)
			}
		})
	}
}

func selfSigned(t *testing.T) (cert, key []byte) {
	t.Helper()
	priv, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "127.0.0.1"}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.ParseIP("127.0.0.1")},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &priv.PublicKey, priv)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(priv)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}
