package doctor

import (
	"context"
	"errors"
	"testing"
	"time"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
	"fediversity.eu/tf-hosts/internal/nix"
	"fediversity.eu/tf-hosts/internal/tofu"
)

// TestGroupsHaveBackendsOfTheirOwn: what is not in use is not red.
func TestGroupsHaveBackendsOfTheirOwn(t *testing.T) {
	backend := func(address string, err error) func(context.Context, Forward) (Backend, error) {
		return func(context.Context, Forward) (Backend, error) {
			return Backend{Tried: []Place{{Address: address, Err: err}}}, err
		}
	}
	away := errors.Join(api.ErrUnreachable)
	for name, tt := range map[string]struct {
		inUse InUse
		want  map[string]want
	}{
		"the groups' are in use": {InUse{Groups: true}, map[string]want{
			"backend": {OK, "the states are those of the groups", ""}, "backend place 1": {},
			"group core backend place 1": {OK, "http://h/s-core serves", ""}, "group web backend place 1": {Fail, "unreachable", "curl"},
		}},
		"the plain one is in use": {InUse{Plain: true}, map[string]want{
			"backend groups": {OK, `without "all"`, ""}, "backend place 1": {Fail, "unreachable", "curl"},
			"group core backend place 1": {}, "group web backend place 1": {},
		}},
		"none is known": {InUse{}, map[string]want{
			"backend place 1":            {Fail, "unreachable", "curl"},
			"group core backend place 1": {OK, "serves", ""}, "group web backend place 1": {Warn, "unreachable", "curl"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := byCheck(t, Run(t.Context(), Config{
				Setup: &tfhosts.Setup{}, Limit: 2 * time.Second, InUse: tt.inUse,
				Engine: tofu.FindConfig{Explicit: "/nonexistent"}, Nix: nix.New(nix.Config{BinDir: "/nonexistent"}),
				Backend: backend("http://h/s", away),
				Groups:  []GroupBackend{{"core", backend("http://h/s-core", nil)}, {"web", backend("http://h/s-web", away)}},
			}))
			for check, w := range tt.want {
				w.check(t, got, check)
			}
		})
	}
}
