package runner

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"fediversity.eu/tf-hosts/hostconn"
	"fediversity.eu/tf-hosts/internal/nix"
)

// closureScript prints the running system, its closure, and the size of each
// path of it in the same order.
const closureScript = toolPath + `
S=$(readlink -f /run/current-system) && [ -n "$S" ] || { echo "no system runs" >&2; exit 1; }
paths=$(nix-store --query --requisites "$S") || exit 1
echo "system $S"
printf '%s\n' "$paths" | sed 's/^/path /'
printf '%s\n' "$paths" | xargs -n 500 nix-store --query --size | sed 's/^/size /' || exit 1
echo "end yes"
`

// Closure is the running system of a node's host and all that it consists of,
// with sizes in bytes. It changes nothing there. An error is a *ClosureError.
func (r *Runner) Closure(ctx context.Context, req ObserveRequest) (system string, paths []nix.Path, err error) {
	d := &deploy{
		r: r, req: Request{Name: req.Name, Node: req.Node, Settings: req.Settings},
		limits: limitsOf(req.Settings.Limits),
	}
	d.verdict.Seconds = map[string]float64{}
	err = d.connect(ctx)
	if err == nil {
		err = d.step(ctx, "diff.closure", "observe", d.limits.command, func(ctx context.Context) error {
			res, err := d.conn.Run(ctx, hostconn.Command{Script: closureScript, Become: true, Timeout: untilDeadline(ctx)})
			if err != nil {
				return err
			}
			if res.Code != 0 {
				return fmt.Errorf("asking the host for its closure: %s", tail(res.Stderr, 3))
			}
			system, paths, err = parseClosure(string(res.Stdout))
			return err
		})
	}
	if d.conn != nil {
		_ = d.conn.Close() // the answer was read, or is lost
	}
	if err != nil {
		d.conclude(err)
		return "", nil, &ClosureError{Status: d.verdict.Status, Hint: d.verdict.Hint, Err: errors.New(d.verdict.Sentence)}
	}
	return system, paths, nil
}

// ClosureError is a host that could not be asked for its closure.
type ClosureError struct {
	Status tfhosts.Status
	Hint   string
	Err    error
}

func (e *ClosureError) Error() string { return string(e.Status) + ": " + e.Err.Error() }

func (e *ClosureError) Unwrap() error { return e.Err }

func parseClosure(text string) (system string, paths []nix.Path, err error) {
	sizes, whole := 0, false
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimRight(line, "\n"), " ")
		switch key {
		case "system":
			system = value
		case "path":
			paths = append(paths, nix.Path{Path: value})
		case "size":
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil || sizes >= len(paths) {
				return "", nil, errAnswer
			}
			paths[sizes].NarSize = n
			sizes++
		case "end":
			whole = true
		}
	}
	if !whole || sizes != len(paths) || system == "" {
		return "", nil, errAnswer
	}
	return system, paths, nil
}
