package setup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
	"github.com/google/renameio/v2"
)

const (
	// NodesFile is the name under which OpenTofu reads the nodes by itself.
	NodesFile = "nodes.auto.tfvars.json"
	// nodesVariable is the environment's form.
	nodesVariable = "TF_VAR_nodes="
	// maxEnvironment bounds the environment's form: Linux takes no string over
	// 128 KiB (MAX_ARG_STRLEN), and fails the start of the program.
	maxEnvironment = 100 << 10
)

// EncodeNodes is the value of the variable "nodes" as JSON. Equal nodes give
// equal bytes.
func EncodeNodes(nodes map[string]tfhosts.Node) []byte {
	if nodes == nil {
		nodes = map[string]tfhosts.Node{}
	}
	return encode(nodes)
}

// encode is JSON without the escapes that serve HTML alone.
func encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil { // maps of strings always marshal
		panic(err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// NodesVariable gives OpenTofu the variable "nodes" for a run in dir: as env, to
// be added to its environment, up to 100 KiB, above that as a file of mode 0600
// in dir, whose path is returned. A file of an earlier run in dir is removed, as
// it would win over the environment. An error leaves the earlier file or none.
func NodesVariable(dir string, nodes map[string]tfhosts.Node) (env []string, file string, err error) {
	file = filepath.Join(dir, NodesFile)
	if value := nodesVariable + hclExpression(EncodeNodes(nodes)); len(value) <= maxEnvironment {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, "", fmt.Errorf("removing the nodes file of an earlier run: %w", err)
		}
		return []string{value}, "", nil
	}
	data := append(encode(map[string]json.RawMessage{"nodes": EncodeNodes(nodes)}), '\n')
	if err := renameio.WriteFile(file, data, 0o600); err != nil {
		return nil, "", fmt.Errorf("writing the nodes file: %w", err)
	}
	if err := syncFolder(dir); err != nil {
		return nil, "", fmt.Errorf("writing the nodes file: %w", err)
	}
	return nil, file, nil
}

// hclExpression makes JSON an HCL expression, as which OpenTofu reads a
// variable of a complex type from the environment. Of JSON's escapes HCL knows
// no \b and \f, and in its strings ${ and %{ begin a template, unless the first
// character is an escape. A .tfvars.json file is plain JSON and needs none of it.
func hclExpression(text []byte) string {
	return strings.NewReplacer(
		`\\`, `\\`, // a pair that later pairs must not split
		`\b`, `\u0008`,
		`\f`, `\u000c`,
		`${`, `\u0024{`,
		`%{`, `\u0025{`,
	).Replace(string(text))
}

func syncFolder(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	return errors.Join(err, d.Close())
}
