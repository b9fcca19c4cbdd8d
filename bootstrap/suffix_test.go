package bootstrap

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestGroupBackend(t *testing.T) {
	type addresses struct{ state, lock, unlock string }
	for name, tt := range map[string]struct {
		in, want addresses
		fails    string
	}{
		"plain":                         {in: addresses{"http://h:8080/state/p/x", "", ""}, want: addresses{"http://h:8080/state/p/x-prod", "", ""}},
		"locks at the address":          {in: addresses{"http://h/s", "http://h/s", "http://h/s"}, want: addresses{"http://h/s-prod", "http://h/s-prod", "http://h/s-prod"}},
		"before a query":                {in: addresses{"http://h/s?a=/b", "", ""}, want: addresses{"http://h/s-prod?a=/b", "", ""}},
		"before a fragment":             {in: addresses{"http://h/s#f", "", ""}, want: addresses{"http://h/s-prod#f", "", ""}},
		"final slash":                   {in: addresses{"http://h/s/", "http://h/s/lock", "http://h/s//lock"}, want: addresses{"http://h/s-prod/", "http://h/s-prod/lock", "http://h/s-prod//lock"}},
		"GitLab":                        {in: addresses{"https://g/api/v4/projects/1/terraform/state/x", "https://g/api/v4/projects/1/terraform/state/x/lock", "https://g/api/v4/projects/1/terraform/state/x/lock"}, want: addresses{"https://g/api/v4/projects/1/terraform/state/x-prod", "https://g/api/v4/projects/1/terraform/state/x-prod/lock", "https://g/api/v4/projects/1/terraform/state/x-prod/lock"}},
		"lock by a query":               {in: addresses{"http://h/s?k=1", "http://h/s?k=1&lock", "http://h/s?unlock"}, want: addresses{"http://h/s-prod?k=1", "http://h/s-prod?k=1&lock", "http://h/s-prod?unlock"}},
		"escaped path":                  {in: addresses{"http://h/a%2Fb%20c", "", ""}, want: addresses{"http://h/a%2Fb%20c-prod", "", ""}},
		"name of the host in the path":  {in: addresses{"http://s/s", "", ""}, want: addresses{"http://s/s-prod", "", ""}},
		"no path":                       {in: addresses{"http://h", "", ""}, fails: "address: it has no path"},
		"root":                          {in: addresses{"http://h/", "", ""}, fails: "address: it has no path"},
		"no path but a query":           {in: addresses{"http://h?s=/x", "", ""}, fails: "address: it has no path"},
		"locks elsewhere":               {in: addresses{"http://h/s", "http://h/locks/s", "http://l/s"}, fails: "unlock_address: it does not lie below"},
		"lock at a name that is longer": {in: addresses{"http://h/s", "http://h/s2", "http://h/s"}, fails: "lock_address: it does not lie below"},
		"lock on another port":          {in: addresses{"http://h:1/s", "http://h:2/s", "http://h:2/s"}, fails: "lock_address: it does not lie below"},
	} {
		got, err := groupBackend(tfhosts.HTTPBackend{Address: tt.in.state, LockAddress: tt.in.lock, UnlockAddress: tt.in.unlock}, "prod")
		if tt.fails != "" {
			if err == nil || !strings.Contains(err.Error(), tt.fails) {
				t.Errorf("%s: groupBackend(%v) = %v, want an error that says %q", name, tt.in, err, tt.fails)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: groupBackend(%v): %v", name, tt.in, err)
			continue
		}
		if diff := cmp.Diff(tt.want, addresses{got.Address, got.LockAddress, got.UnlockAddress}, cmp.AllowUnexported(addresses{})); diff != "" {
			t.Errorf("%s: groupBackend(%v) (-want +got):\n%s", name, tt.in, diff)
		}
	}
}

func TestGroupSetupSuffixesTheDerivedAddress(t *testing.T) {
	for path, want := range map[string]string{
		"/state/p/x":     "http://state.test:8080/state/p/x-prod",
		"/state/p/x?a=b": "http://state.test:8080/state/p/x-prod?a=b",
		"/a%20b/":        "http://state.test:8080/a%20b-prod/",
	} {
		s := &tfhosts.Setup{Backend: tfhosts.HTTPBackend{Address: "http://h/s"}, Self: &tfhosts.SelfBackend{Node: "a", Port: 8080, Path: path}}
		own, err := groupSetup(s, "prod")
		if err != nil {
			t.Errorf("groupSetup(%q): %v", path, err)
			continue
		}
		if got, err := derivedAddress(own.Self, "state.test"); got != want || err != nil {
			t.Errorf("derived address of %q = %q, %v, want %q", path, got, err, want)
		}
		if s.Self.Path != path || s.Backend.Address != "http://h/s" {
			t.Errorf("groupSetup(%q) changed the setup that it was given", path)
		}
	}
	if _, err := groupSetup(&tfhosts.Setup{Backend: tfhosts.HTTPBackend{Address: "http://h/s"}, Self: &tfhosts.SelfBackend{Path: "/"}}, "prod"); err == nil {
		t.Error("groupSetup with a self_backend at / gave no error")
	}
}
