package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"github.com/tidwall/gjson"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/api"
)

func isNotEmpty(err error) bool { return errors.Is(err, syscall.ENOTEMPTY) }

// tofuError explains why an OpenTofu command failed, from what the relay saw
// and never from tofu's text.
func (s *session) tofuError(name string, code int) error {
	seen := s.backendError()
	if s.interrupted() {
		err := tfhosts.WithExit(tfhosts.ExitInterrupted, "run the same command again; it goes on from here",
			fmt.Errorf("interrupted during tofu %s", name))
		if tfhosts.WorstExit(tfhosts.ExitCodeOf(seen), tfhosts.ExitInterrupted) != tfhosts.ExitInterrupted {
			return errors.Join(seen, err) // what was waited for when the interrupt came
		}
		return err
	}
	if seen != nil {
		return seen
	}
	return tfhosts.WithExit(tfhosts.ExitFailed, s.decryptHint(), &endError{name, code})
}

// endError: tofu failed, and only its own text, which was shown, says why.
type endError struct {
	name string
	code int
}

func (e *endError) Error() string { return fmt.Sprintf("tofu %s ended with code %d", e.name, e.code) }

// merelyEnded: err says no more than that tofu failed, which a provisioner that
// failed explains.
func merelyEnded(err error) bool {
	var end *endError
	return errors.As(err, &end) && err.Error() == end.Error()
}

// decryptHint is for a state that is encrypted, which nobody but tofu can tell
// to be so with another key.
func (s *session) decryptHint() string {
	if s.relay == nil {
		return ""
	}
	body, ok := s.relay.LastState()
	if !ok || s.relay.Stats().Posts > 0 { // it was decrypted
		return ""
	}
	if meta, err := api.ParseMeta(body); err != nil || !meta.Encrypted {
		return ""
	}
	return "the state is encrypted: if OpenTofu could not decrypt it, set TF_ENCRYPTION as the run that wrote it had it; nothing is lost"
}

// backendError is what kept the backend from serving this run, or nil.
func (s *session) backendError() error {
	if s.relay == nil {
		return nil
	}
	if h, ok := s.relay.LockHolder(); ok {
		hint := "wait for it to end, then run the same command again"
		if h.ID != "" {
			hint += "; if it died, release it: tf-hosts force-unlock " + h.ID
		}
		return tfhosts.WithExit(tfhosts.ExitLocked, hint,
			fmt.Errorf("%w by %q since %s (ID %s)", api.ErrLocked, h.Who, h.Created.Local().Format("2006-01-02 15:04:05"), h.ID))
	}
	err := s.relay.LastError()
	if err == nil {
		return nil
	}
	return tfhosts.WithExit(api.ExitCode(err), s.backendHint(err), err)
}

func (s *session) backendHint(err error) string {
	switch {
	case errors.Is(err, api.ErrUnreachable), errors.Is(err, api.ErrUnavailable):
		return fmt.Sprintf("see that a state server answers at %s, or set TF_HTTP_ADDRESS", s.Setup.Backend.Address)
	case errors.Is(err, api.ErrUnauthorized), errors.Is(err, api.ErrForbidden):
		return "set http_backend.username and http_backend.password_file, or TF_HTTP_USERNAME and TF_HTTP_PASSWORD"
	case errors.Is(err, api.ErrRedirect):
		return "put the address that the server redirects to into the setup: a redirect would lose states"
	case errors.Is(err, api.ErrNoState):
		return "the address is not a state server's; correct http_backend.address or TF_HTTP_ADDRESS"
	case errors.Is(err, api.ErrTLS):
		return "name the server's CA in http_backend.ca_file"
	case errors.Is(err, api.ErrGone):
		return "the state server lost this state; restore it from the server's versions or from the working dir's journal"
	}
	return ""
}

// outputs is the one JSON document that an apply prints: the outputs in the
// form of "tofu output -json". ok is false when the state does not show them,
// as an encrypted one.
func outputs(state []byte) (doc []byte, ok bool, err error) {
	values := make(map[string]map[string]json.RawMessage)
	if len(state) > 0 {
		if !gjson.ValidBytes(state) {
			return nil, false, errors.New("reading the outputs: the state is no JSON")
		}
		root := gjson.ParseBytes(state)
		if root.Get("encrypted_data").Exists() {
			return nil, false, nil
		}
		root.Get("outputs").ForEach(func(name, out gjson.Result) bool {
			sensitive := "false"
			if out.Get("sensitive").Bool() {
				sensitive = "true"
			}
			values[name.String()] = map[string]json.RawMessage{
				"sensitive": json.RawMessage(sensitive),
				"type":      json.RawMessage(out.Get("type").Raw),
				"value":     json.RawMessage(out.Get("value").Raw),
			}
			return true
		})
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(values); err != nil {
		return nil, false, fmt.Errorf("writing the outputs: %w", err)
	}
	return b.Bytes(), true, nil
}

// saveErrored moves the state that tofu could not store out of the run's folder
// at once: a later failure would write over it. It gives its new path, empty
// without one.
func (s *session) saveErrored() (string, error) {
	if err := s.keepErrored(s.runDir, s.id); err != nil {
		return "", err
	}
	to := filepath.Join(s.salvageDir(), s.id+".tfstate")
	if _, err := os.Stat(to); err != nil {
		return "", nil
	}
	return to, nil
}
