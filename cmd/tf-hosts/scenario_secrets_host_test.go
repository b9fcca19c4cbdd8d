package main

import (
	"archive/zip"
	"bytes"
	"encoding/base64"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"fediversity.eu/tf-hosts/internal/fleettest"
)

// argvs collects the command lines of every process of this machine until stop
// is closed.
func argvs(stop <-chan struct{}) map[string]bool {
	seen := map[string]bool{}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		files, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			return seen
		}
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && len(b) > 0 {
				seen[strings.ReplaceAll(string(b), "\x00", " ")] = true
			}
		}
		select {
		case <-stop:
			return seen
		case <-tick.C:
		}
	}
}

// TestSecretsStayWhereTheyBelong: neither the backend's password nor a private
// key shows in a command line, a log, the working dir or a plan file; the relay
// lets nobody else in.
func TestSecretsStayWhereTheyBelong(t *testing.T) {
	t.Parallel()
	st := buildStage(t)
	fleet := fleettest.New(t, fleettest.Config{Hosts: fleettest.Hosts(2)})
	s := newSelfRig(t, st, fleet, fleet.Hosts)
	s.version("1")
	s.system("prod.app1", fleettest.ClosureSpec{Version: "1", Behaviour: map[string]fleettest.Behaviour{"activate": {SleepSeconds: 3}}})

	stop := make(chan struct{})
	var seen map[string]bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		seen = argvs(stop)
	}()
	noisy := s.with("BOOTSTRAP=1", "TF_LOG=TRACE")
	cmd, stdout, _ := noisy.command("apply")
	stderr := &watched{}
	cmd.Stderr = stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "the activation", func() bool { return strings.Contains(stderr.String(), "prod.app1: activate.wait") })
	run := s.stateFile("ledger.json").Get("run")
	token := run.Get("password").Str
	if token == "" {
		t.Fatal("the ledger does not name the relay's token")
	}
	relayLetsNobodyIn(t, int(run.Get("port").Int()), run.Get("username").Str)
	for _, path := range []string{s.folder(), filepath.Join(s.folder(), "ledger.json")} {
		nobody := exec.Command("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cat", path)
		if out, err := nobody.CombinedOutput(); err == nil || !strings.Contains(string(out), "Permission denied") {
			t.Errorf("another user reads %q: %s, %v", path, out, err)
		}
	}
	wantExit(t, 0, cmd, stderr)
	story := s.with("TF_LOG=").want(0, "plan", "--json", "-out=saved.plan")
	s.want(0, "state", "pull")
	close(stop)
	wg.Wait()

	key, err := os.ReadFile(fleet.KeyFile())
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{
		"the backend's password":                testPassword,
		"the backend's password, as basic auth": base64.StdEncoding.EncodeToString([]byte(testUser + ":" + testPassword)),
		"a private key":                         strings.Split(string(key), "\n")[2],
		"the header of a private key":           "PRIVATE KEY-----",
		"the relay's token":                     token,
		"the relay's token, as basic auth":      base64.StdEncoding.EncodeToString([]byte(run.Get("username").Str + ":" + token)),
	}
	places := map[string]string{"stdout": stdout.String(), "stderr": stderr.String(), "plan --json": story.stdout + story.stderr}
	for argv := range seen {
		places["argv "+argv] = argv
	}
	for _, root := range []string{filepath.Join(s.dir, "work"), filepath.Join(s.dir, "saved.plan")} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			places[path] = string(b) + unzipped(b)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(seen) < 10 || len(places) < len(seen)+10 {
		t.Fatalf("only %d command lines and %d places were seen", len(seen), len(places))
	}
	plans := 0
	for place, text := range places {
		if strings.Contains(text, `"planned_values"`) || strings.HasPrefix(text, "PK\x03\x04") {
			plans++
		}
		for what, secret := range secrets {
			if strings.HasPrefix(what, "the relay's token") && filepath.Base(place) == "ledger.json" {
				continue
			}
			if strings.Contains(text, secret) {
				t.Errorf("%s shows in %s", what, place)
			}
		}
	}
	if plans == 0 {
		t.Error("no plan file was looked into")
	}
}

// unzipped is the content of a plan file.
func unzipped(b []byte) string {
	r, err := zip.NewReader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return ""
	}
	var all strings.Builder
	for _, f := range r.File {
		if rc, err := f.Open(); err == nil {
			io.Copy(&all, rc) //nolint:errcheck // what can be read is looked into
			rc.Close()        //nolint:errcheck // only read
		}
	}
	return all.String()
}

// relayLetsNobodyIn: neither without credentials nor with those of the backend.
func relayLetsNobodyIn(t *testing.T, port int, user string) {
	t.Helper()
	for _, c := range [][2]string{{}, {testUser, testPassword}, {user, testPassword}, {user, ""}} {
		for _, method := range []string{http.MethodGet, http.MethodPost, "LOCK", "UNLOCK"} {
			req, err := http.NewRequestWithContext(t.Context(), method, fmt.Sprintf("http://127.0.0.1:%d/state", port), http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			if c[0] != "" {
				req.SetBasicAuth(c[0], c[1])
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close() //nolint:errcheck // nothing was read
			if resp.StatusCode != http.StatusUnauthorized {
				t.Errorf("%s at the relay as %q: %s, want 401", method, c[0], resp.Status)
			}
		}
	}
}
