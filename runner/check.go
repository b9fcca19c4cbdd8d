package runner

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// usage is the answer of a switch-to-configuration to an action it does not know.
var usage = regexp.MustCompile(`(?m)^Usage: .*switch-to-configuration.* \[([a-z|-]+)\]`)

// check runs the new system's own pre-switch checks, where it has any. Nothing
// is changed on the host by them. Where the node's policy is to boot what refuses to
// be switched to, a refusal only changes the goal.
func (d *deploy) check(ctx context.Context) error {
	return d.step(ctx, "check", "check", d.limits.command, func(ctx context.Context) error {
		limit := strconv.Itoa(max(1, int(d.limits.command.Seconds())-5))
		res, err := d.script(ctx, checkScript, nil, d.system, limit)
		if err != nil {
			return err
		}
		if res.Code == 0 || checkUnknown(res.Code, string(res.Stdout)) {
			return nil
		}
		if res.Code == 124 || res.Code == 137 {
			return &timeoutError{"check", d.limits.command, errors.New("the host ended it")}
		}
		if d.goal() == "switch" && d.req.Settings.OnInhibitor == "boot" {
			d.bootOnly = true
			d.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "check", Message: "the new system refuses to be switched to, and is made the one that boots next: " + tail(res.Stdout, 3)})
			return nil
		}
		return &failure{
			status: tfhosts.CheckRefused,
			err:    fmt.Errorf("the new system's pre-switch checks refused (exit %d); nothing was changed", res.Code),
			log:    lastLines(string(res.Stdout), 20),
			hint:   "see why: " + d.sshRoot(d.system+"/bin/switch-to-configuration check"),
		}
	})
}

// checkUnknown says whether the answer is that of an older
// switch-to-configuration, which knows no "check": its usage without the word,
// and exit 1. A refused check may print a usage too, but not that one.
func checkUnknown(code int, output string) bool {
	m := usage.FindStringSubmatch(output)
	if code != 1 || m == nil {
		return false
	}
	for action := range strings.SplitSeq(m[1], "|") {
		if action == "check" {
			return false
		}
	}
	return true
}
