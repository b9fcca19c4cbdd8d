package bootstrap

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/backend/relay"
)

// minPersist: OpenTofu panics when TF_STATE_PERSIST_INTERVAL is below it.
const minPersist = 20

// checkEnviron refuses, all at once and by name, what would lead tofu past the
// wrapper: another data dir, workspace, plugin cache or extra arguments.
func checkEnviron(environ []string) error {
	var errs []error
	for _, kv := range environ {
		k, v, _ := strings.Cut(kv, "=")
		if v == "" {
			continue
		}
		switch {
		case strings.HasPrefix(k, "TF_CLI_ARGS"):
			errs = append(errs, fmt.Errorf("%s is set: give the arguments after -- instead", k))
		case k == "TF_WORKSPACE", k == "TF_DATA_DIR":
			errs = append(errs, fmt.Errorf("%s is set: tf-hosts keeps its own", k))
		case strings.HasPrefix(k, "TF_PLUGIN"):
			errs = append(errs, fmt.Errorf("%s is set: tf-hosts serves the plugins itself", k))
		case k == "TF_STATE_PERSIST_INTERVAL":
			if n, err := strconv.Atoi(v); err != nil || n < minPersist {
				errs = append(errs, fmt.Errorf("%s=%s: a number of seconds from %d on is needed", k, v, minPersist))
			}
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return tfhosts.WithExit(tfhosts.ExitUsage, "unset these variables", errors.Join(errs...))
}

// tofuEnviron is the environment of every tofu of a run.
func tofuEnviron(environ []string, endpoint relay.Endpoint, dataDir, cliConfig, socket string, nodes []string) []string {
	var env []string
	for _, kv := range environ {
		k, v, _ := strings.Cut(kv, "=")
		switch {
		case strings.HasPrefix(k, "TF_HTTP_"), strings.HasPrefix(k, "TF_CLI_ARGS"), strings.HasPrefix(k, "TF_PLUGIN"),
			k == "TF_WORKSPACE", k == "TF_DATA_DIR", k == "TF_VAR_nodes", k == "TF_HOSTS_SOCK", k == "TF_VERB",
			k == "TF_INPUT", k == "TF_IN_AUTOMATION":
			continue
		case k == "TF_CLI_CONFIG_FILE":
			// tofu warns on every call about one that does not exist.
			if _, err := os.Stat(v); err == nil {
				cliConfig = v
			}
			continue
		}
		env = append(env, kv)
	}
	env = append(env, endpoint.Env()...)
	env = append(env,
		"TF_DATA_DIR="+dataDir,
		"TF_CLI_CONFIG_FILE="+cliConfig,
		"TF_IN_AUTOMATION=1",
		"TF_INPUT=0",
	)
	if socket != "" {
		env = append(env, "TF_HOSTS_SOCK="+socket)
	}
	return append(env, nodes...)
}
