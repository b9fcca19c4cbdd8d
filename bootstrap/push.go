package bootstrap

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

const verbPush = "state-push"

// forcedPush: a state-push that may go back or change lineage. OpenTofu's flags
// are Go's, so that -force has more than one form.
func (s *session) forcedPush() bool {
	if s.Verb.Name != verbPush {
		return false
	}
	forced := false
	for _, flag := range s.args.flags {
		name, value, hasValue := strings.Cut(strings.TrimLeft(flag, "-"), "=")
		if name != "force" {
			continue
		}
		on, err := strconv.ParseBool(value)
		forced = !hasValue || err == nil && on // what is no bool, OpenTofu refuses
	}
	return forced
}

// pushError: a refused state-push leaves nothing that waits: the user has the
// file.
func (s *session) pushError(err error) error {
	hint := ""
	switch {
	case errors.Is(err, api.ErrStale) && s.forcedPush() && s.ledger.Run.Upstream == upstreamFile:
		hint = "the state is on this machine alone now, and its lineage can not be changed"
	case errors.Is(err, api.ErrStale) && s.forcedPush():
		hint = "the state server goes back, or changes lineage, for a user with \"admin\": true alone: give its name in http_backend.username or TF_HTTP_USERNAME"
	case errors.Is(err, api.ErrStale):
		hint = "if the file is to replace a newer state, or another one: tf-hosts state-push -- -force FILE"
	case errors.Is(err, api.ErrTooLarge):
		hint = "raise the limit of the state server, or of a proxy in front of it"
	default:
		return err
	}
	return tfhosts.WithExit(tfhosts.ExitFailed, hint, fmt.Errorf("the state was not pushed, and nothing was changed: %w", err))
}
