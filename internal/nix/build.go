package nix

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// BuildResult is the outcome for one identity.
type BuildResult struct {
	// Out is the store path of the system.
	Out string
	// Err holds the failed derivation and the last lines of its log.
	Err error
}

// failedDrv finds the derivations that nix names in an error; the wording
// changed in 2.31 from "builder for" to "Cannot build".
var failedDrv = regexp.MustCompile(`(?:builder for|[Cc]annot build) '(/nix/store/[^']+\.drv)'`)

func (c *Client) realiseArgv(paths []string) []string {
	return c.argv("nix-store", append([]string{"--realise", "--keep-going"}, paths...)...)
}

// Build builds all closures in one call; one that fails does not stop the
// others, and has its own Err. Outputs are rooted in Config.RootsDir. The error
// is for what concerns all: Nix is missing, ctx ended.
func (c *Client) Build(ctx context.Context, identities []string) (map[string]BuildResult, error) {
	identities = slices.Clone(identities)
	slices.Sort(identities)
	identities = slices.Compact(identities)
	results := make(map[string]BuildResult, len(identities))
	var wanted []string
	for _, id := range identities {
		if !IsStorePath(id) {
			results[id] = BuildResult{Err: fmt.Errorf("building %q: neither a store path nor a derivation", id)}
			continue
		}
		wanted = append(wanted, id)
	}
	if len(wanted) == 0 {
		return results, nil
	}

	var failed []string
	var buildErr error
	outs, missing, err := c.outputs(ctx, wanted)
	if err != nil {
		return nil, err
	}
	if len(missing) > 0 {
		c.event(tfhosts.Event{Kind: tfhosts.EventStep, Op: "build", Message: fmt.Sprintf("building %d closures", len(missing))})
		_, buildErr = c.run(ctx, c.realiseArgv(missing), func(line string) {
			if strings.HasPrefix(line, "building '") || strings.HasPrefix(line, "copying path '") {
				c.event(tfhosts.Event{Kind: tfhosts.EventNotice, Op: "build", Message: strings.TrimRight(line, ".")})
			}
			for _, m := range failedDrv.FindAllStringSubmatch(line, -1) {
				failed = append(failed, m[1])
			}
		})
		var ended *commandError
		if buildErr != nil && !errors.As(buildErr, &ended) {
			return nil, fmt.Errorf("building %d closures: %w", len(missing), buildErr)
		}
		if outs, missing, err = c.outputs(ctx, wanted); err != nil {
			return nil, err
		}
	}

	for _, id := range wanted {
		out := outs[id]
		switch {
		case slices.Contains(missing, id):
			results[id] = BuildResult{Err: c.buildFailure(ctx, id, failed, buildErr)}
		default:
			err := checkSystem(out)
			if err == nil {
				err = c.root(ctx, out)
			}
			if err != nil {
				results[id] = BuildResult{Err: fmt.Errorf("building %q: %w", id, err)}
				continue
			}
			results[id] = BuildResult{Out: out}
		}
	}
	return results, nil
}

// outputs maps each identity to its system's store path; missing are those that
// are not in the store yet.
func (c *Client) outputs(ctx context.Context, identities []string) (outs map[string]string, missing []string, err error) {
	outs = make(map[string]string, len(identities))
	invalid, err := c.invalid(ctx, identities)
	if err != nil {
		return nil, nil, err
	}
	for _, id := range identities {
		if slices.Contains(invalid, id) {
			missing = append(missing, id)
			continue
		}
		if !IsDerivation(id) {
			outs[id] = id
			continue
		}
		if outs[id], err = c.Output(ctx, id); err != nil {
			return nil, nil, err
		}
	}
	paths := make([]string, 0, len(outs))
	for _, out := range outs {
		paths = append(paths, out)
	}
	if invalid, err = c.invalid(ctx, paths); err != nil {
		return nil, nil, err
	}
	for _, id := range identities {
		if out, ok := outs[id]; ok && slices.Contains(invalid, out) {
			missing = append(missing, id)
		}
	}
	return outs, missing, nil
}

// Output is the store path that the derivation drv makes; it need not be there.
func (c *Client) Output(ctx context.Context, drv string) (string, error) {
	printed, err := c.run(ctx, c.argv("nix-store", "--query", "--outputs", drv), nil)
	if err != nil {
		return "", fmt.Errorf("asking for the outputs of %q: %w", drv, err)
	}
	return mainOutput(strings.Fields(printed)), nil
}

// mainOutput is the output "out": its name has no suffix, so it is the shortest.
func mainOutput(outs []string) string {
	return slices.MinFunc(append(outs, strings.Repeat("x", 4096)), func(a, b string) int { return len(a) - len(b) })
}

func (c *Client) invalid(ctx context.Context, paths []string) ([]string, error) {
	if len(paths) == 0 {
		return nil, nil
	}
	out, err := c.run(ctx, c.argv("nix-store", append([]string{"--check-validity", "--print-invalid"}, paths...)...), nil)
	if err != nil {
		return nil, fmt.Errorf("asking which paths the store has: %w", err)
	}
	return strings.Fields(out), nil
}

func (c *Client) buildFailure(ctx context.Context, id string, failed []string, buildErr error) error {
	if !IsDerivation(id) {
		return fmt.Errorf("building %q: the path is not in this machine's store and nothing here can make it", id)
	}
	closure, err := c.run(ctx, c.argv("nix-store", "--query", "--requisites", id), nil)
	if err != nil {
		return fmt.Errorf("building %q: the derivation is not in this machine's store; evaluate it here first: %w", id, err)
	}
	needs := strings.Fields(closure)
	for _, drv := range failed {
		if !slices.Contains(needs, drv) {
			continue
		}
		text := fmt.Sprintf("builder for %q failed", drv)
		if log, err := c.run(ctx, c.argv("nix-store", "--read-log", drv), nil); err == nil && log != "" {
			text += "; its last lines:\n" + strings.Join(lastLines(log, 20), "\n")
		}
		return fmt.Errorf("building %q: %s", id, text)
	}
	if buildErr == nil {
		buildErr = errors.New("its output is missing after the build")
	}
	return fmt.Errorf("building %q: %w", id, buildErr)
}

func (c *Client) rootArgv(storePath string) []string {
	if IsDerivation(storePath) {
		// --realise would build it; importing a .drv gives the derivation as it is.
		return c.argv("nix-instantiate", "-E", "{ path }: import (/. + path)", "--argstr", "path", storePath,
			"--indirect", "--add-root", c.rootLink(storePath))
	}
	return c.argv("nix-store", "--realise", storePath, "--indirect", "--add-root", c.rootLink(storePath))
}

func (c *Client) root(ctx context.Context, storePath string) error {
	if c.cfg.RootsDir == "" {
		return nil
	}
	link := c.rootLink(storePath)
	if target, err := os.Readlink(link); err == nil && target == storePath {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return fmt.Errorf("rooting %q: %w", storePath, err)
	}
	if _, err := c.run(ctx, c.rootArgv(storePath), nil); err != nil {
		return fmt.Errorf("rooting %q: %w", storePath, err)
	}
	return nil
}
