package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/backend/server"
	"fediversity.eu/tf-hosts/backend/store/storetest"
)

const path = "/state/project1/example"

// The rules of the state server, SRV1 to SRV9, on every store.
func TestConformance(t *testing.T) {
	for kind, fresh := range stores() {
		t.Run(kind, func(t *testing.T) {
			for _, rule := range []struct {
				name string
				test func(*testing.T, *fixture)
			}{
				{"SRV1 lock conflict names the holder", lockConflict},
				{"SRV2 lock is repeatable by its ID", lockRepeatable},
				{"SRV2 of 100 parallel locks one wins", lockRace},
				{"SRV3 unlock", unlock},
				{"SRV4 a write needs the lock", writeNeedsLock},
				{"SRV5 form of a write", writeForm},
				{"SRV6 lineage and serial", writeFollows},
				{"SRV7 state and lock survive a restart", restart},
				{"SRV8 a lost state is never absent", lost},
				{"SRV9 credentials", credentials},
				{"SRV9 no redirects and no 404 elsewhere", noRedirects},
				{"SRV9 fallback methods", fallback},
				{"SRV11 delete and versions", deleteAndVersions},
				{"SRV12 a late write is accepted, after an unlock refused", lateWrite},
			} {
				t.Run(rule.name, func(t *testing.T) { rule.test(t, newFixture(t, fresh, server.Config{})) })
			}
		})
	}
}

func lockConflict(t *testing.T, f *fixture) {
	a := f.do("LOCK", path, lockBody("a"))
	a.want(t, 200)
	b := f.do("LOCK", path, lockBody("b"))
	b.want(t, 423)
	var got, want api.LockInfo
	if err := json.Unmarshal(b.body, &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(lockBody("a")), &want); err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("holder in the conflict = %+v, want %+v", got, want)
	}
	if b.header.Get("Content-Length") != fmt.Sprint(len(b.body)) {
		t.Errorf("Content-Length = %q for %d bytes", b.header.Get("Content-Length"), len(b.body))
	}
	for _, body := range []string{"", "{}", `{"ID":""}`, "locked", `{"ID":5}`} {
		f.do("LOCK", "/state/project1/other", body).want(t, 400)
	}
	f.do("GET", path+"/lock", "").want(t, 200)
	f.do("GET", "/state/project1/other/lock", "").want(t, 204)
}

func lockRepeatable(t *testing.T, f *fixture) {
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("LOCK", path, `{"ID":"a","Who":"another"}`).want(t, 200)
	f.do("LOCK", path, lockBody("b")).want(t, 423)
}

func lockRace(t *testing.T, f *fixture) {
	var won, refused atomic.Int32
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			switch a := f.do("LOCK", path, lockBody(fmt.Sprint("id", i))); a.status {
			case 200:
				won.Add(1)
			case 423:
				refused.Add(1)
			default:
				t.Errorf("LOCK = %d, want 200 or 423", a.status)
			}
		})
	}
	wg.Wait()
	if won.Load() != 1 || refused.Load() != 99 {
		t.Errorf("of 100 locks %d won and %d were refused, want 1 and 99", won.Load(), refused.Load())
	}
}

func unlock(t *testing.T, f *fixture) {
	f.do("UNLOCK", path, lockBody("a")).want(t, 409) // never locked
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	other := f.do("UNLOCK", path, lockBody("b"))
	other.want(t, 409)
	if !strings.Contains(string(other.body), `"ID":"a"`) {
		t.Errorf("UNLOCK with another ID says %q, want the holder", other.body)
	}
	f.do("UNLOCK", path, "").want(t, 409) // Terraform's force-unlock
	f.do("UNLOCK", path, "garbage").want(t, 400)
	f.do("UNLOCK", path+"?force=1", "").want(t, 409) // no admin
	// OpenTofu's force-unlock knows the ID alone.
	f.do("UNLOCK", path, `{"ID":"a","Operation":"","Info":"","Who":"","Version":"","Created":"0001-01-01T00:00:00Z","Path":""}`).want(t, 200)
	f.do("UNLOCK", path, lockBody("a")).want(t, 200) // its answer was lost
	f.do("UNLOCK", path, lockBody("b")).want(t, 409)
	f.do("LOCK", path, lockBody("a")).want(t, 409) // late: its owner has let go
	f.do("LOCK", path, lockBody("c")).want(t, 200)
	f.do("UNLOCK", path, lockBody("a")).want(t, 409)
	f.as("root", "pw-root").do("UNLOCK", path+"?force=1", "").want(t, 200)
	f.do("LOCK", path, lockBody("d")).want(t, 200)
}

func writeNeedsLock(t *testing.T, f *fixture) {
	body := string(storetest.State(1, "l", "x"))
	f.do("POST", path, body).want(t, 409)
	f.do("POST", path+"?ID=a", body).want(t, 409)
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("POST", path, body).want(t, 423)
	b := f.do("POST", path+"?ID=b", body)
	b.want(t, 423)
	if !strings.Contains(string(b.body), `"ID":"a"`) {
		t.Errorf("POST with another ID says %q, want the holder", b.body)
	}
	f.do("GET", path, "").want(t, 404)
	f.do("POST", path+"?ID=a", body).want(t, 200)
	got := f.do("GET", path, "")
	got.want(t, 200)
	if string(got.body) != body {
		t.Errorf("GET = %q, want %q", got.body, body)
	}
	f.do("UNLOCK", path, lockBody("a")).want(t, 200)
	f.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 409)
}

func writeForm(t *testing.T, f *fixture) {
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	for _, body := range []string{"", "not json", "[]", `{"serial":1}`, `{"lineage":"l"}`, `{"serial":1,"lineage":"l"`} {
		f.do("POST", path+"?ID=a", body).want(t, 400)
	}
	f.header = http.Header{"Content-Md5": {"1B2M2Y8AsgTpgAmY7PhCfg=="}} // that of the empty body
	f.do("POST", path+"?ID=a", string(storetest.State(1, "l", "x"))).want(t, 400)
	f.header = nil
	f.do("POST", path+"?ID=a", string(storetest.State(1, "l", strings.Repeat("x", maxBytes)))).want(t, 413)
	f.do("GET", path, "").want(t, 404)
	f.do("POST", path+"?ID=a", `{"serial":1,"lineage":"l","meta":{},"encrypted_data":"eA==","encryption_version":"v0"}`).want(t, 200)
	f.do("PUT", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 200)
}

func writeFollows(t *testing.T, f *fixture) {
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	post := func(serial uint64, lineage, text string) answer {
		return f.do("POST", path+"?ID=a", string(storetest.State(serial, lineage, text)))
	}
	post(5, "l", "x").want(t, 200)
	post(5, "l", "x").want(t, 200) // the answer was lost
	post(5, "l", "y").want(t, 412)
	post(4, "l", "x").want(t, 412)
	post(6, "other", "x").want(t, 412)
	post(9, "l", "x").want(t, 200)
	f.header = http.Header{server.ForceHeader: {"1"}}
	post(2, "l", "x").want(t, 412) // no admin
	admin := f.as("root", "pw-root")
	admin.header = f.header
	admin.do("POST", path+"?ID=a", string(storetest.State(2, "new", "x"))).want(t, 200)
	if !strings.Contains(f.log.String(), "guard overridden") {
		t.Error("the log does not say that the guard was overridden")
	}
}

func restart(t *testing.T, f *fixture) {
	body := string(storetest.State(1, "l", "x"))
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("POST", path+"?ID=a", body).want(t, 200)
	f.restart(t)
	f.do("LOCK", path, lockBody("b")).want(t, 423)
	got := f.do("GET", path, "")
	got.want(t, 200)
	if string(got.body) != body {
		t.Errorf("GET after a restart = %q, want %q", got.body, body)
	}
	f.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 200)
	f.do("UNLOCK", path, lockBody("a")).want(t, 200)
	f.restart(t)
	f.do("UNLOCK", path, lockBody("a")).want(t, 200)
	f.do("LOCK", path, lockBody("b")).want(t, 200)
}

func lost(t *testing.T, f *fixture) {
	f.do("GET", path, "").want(t, 404)
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("GET", path, "").want(t, 404)
	f.do("POST", path+"?ID=a", string(storetest.State(1, "l", "x"))).want(t, 200)
	f.lose(t, "project1/example")
	f.do("GET", path, "").want(t, 410)
	f.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 410)
	f.restart(t)
	f.do("GET", path, "").want(t, 410)
	admin := f.as("root", "pw-root")
	admin.header = http.Header{server.ForceHeader: {"1"}}
	admin.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 200)
	f.do("GET", path, "").want(t, 200)
}

func credentials(t *testing.T, f *fixture) {
	for _, who := range [][2]string{{"", ""}, {"ops", ""}, {"ops", "wrong"}, {"nobody", "pw-ops"}, {"root", "pw-ops"}} {
		for _, method := range []string{"GET", "POST", "LOCK", "UNLOCK", "DELETE"} {
			a := f.as(who[0], who[1]).do(method, path, lockBody("a"))
			a.want(t, 401)
			if a.header.Get("WWW-Authenticate") == "" {
				t.Error("401 without WWW-Authenticate")
			}
		}
	}
	f.as("ci", "pw-ci").do("GET", path, "").want(t, 404)
	f.as("ci", "pw-ci").do("GET", "/state/project2/example", "").want(t, 403)
	f.as("", "").do("GET", "/healthz", "").want(t, 200)
	f.do("LOCK", path, lockBody("secret-of-body")).want(t, 200)
	for _, secret := range []string{"pw-ops", "wrong", "secret-of-body"} {
		if strings.Contains(f.log.String(), secret) {
			t.Errorf("the log holds %q", secret)
		}
	}
}

func noRedirects(t *testing.T, f *fixture) {
	for _, p := range []string{
		"/", "/state", "/state/", "/state/a", "/state//b", "//state/project1/example", "/state/project1/../project1/example",
		"/state/project1/example/", "/state/project1/example/x", "/state/project1/%2e%2e", "/stat/project1/example", "/state/.x/y",
	} {
		for _, method := range []string{"GET", "POST", "LOCK"} {
			if a := f.do(method, p, "{}"); a.status < 400 || a.status == 404 {
				t.Errorf("%s %s = %d, want 4xx and not 404", method, p, a.status)
			}
		}
	}
}

func fallback(t *testing.T, f *fixture) {
	f.do("POST", path+"/lock", lockBody("a")).want(t, 200)
	f.do("POST", path+"/lock", lockBody("b")).want(t, 423)
	f.do("LOCK", path, lockBody("b")).want(t, 423)
	f.do("DELETE", path+"/lock", lockBody("b")).want(t, 409)
	f.do("DELETE", path+"/lock?ID=a", "").want(t, 200)
	f.do("LOCK", path+"/lock", lockBody("c")).want(t, 200)
	f.do("DELETE", path+"/lock", lockBody("c")).want(t, 200)
}

func deleteAndVersions(t *testing.T, f *fixture) {
	f.do("DELETE", path, "").want(t, 404)
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	for n := range uint64(3) {
		f.do("POST", path+"?ID=a", string(storetest.State(n, "l", "x"))).want(t, 200)
	}
	var list []struct{ Serial int }
	if err := json.Unmarshal(f.do("GET", path+"/versions", "").body, &list); err != nil || len(list) != 3 || list[0].Serial != 2 {
		t.Errorf("versions = %+v, %v, want 2, 1, 0", list, err)
	}
	f.do("DELETE", path, "").want(t, 423)
	f.do("DELETE", path+"?ID=a", "").want(t, 200)
	f.do("GET", path, "").want(t, 410)
	if got := f.do("GET", path+"/versions/1", ""); string(got.body) != string(storetest.State(1, "l", "x")) {
		t.Errorf("version 1 of a deleted state = %d %q, want the bytes", got.status, got.body)
	}
	f.do("GET", path+"/versions/x", "").want(t, 400)
}

func lateWrite(t *testing.T, f *fixture) {
	f.do("LOCK", path, lockBody("a")).want(t, 200)
	f.do("POST", path+"?ID=a", string(storetest.State(1, "l", "x"))).want(t, 200)
	f.do("UNLOCK", path, `{"ID":"a"}`).want(t, 200)
	f.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 409)
	f.do("LOCK", path, lockBody("b")).want(t, 200)
	f.do("POST", path+"?ID=a", string(storetest.State(2, "l", "x"))).want(t, 423)
}
