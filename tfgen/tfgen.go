// Package tfgen turns a setup into the OpenTofu graph, as JSON: one
// terraform_data resource whose instances are the nodes, keyed by their dotted
// names (spec 004, FR-002 and FR-003).
//
// The graph holds no node: the nodes are the value of its variable "nodes", so
// the text depends on the provisioner's command alone. Package setup encodes
// that value.
//
// It is pure: it never reads a file, runs a program or looks at the environment.
//
//	graph, err := tfgen.Graph(tfgen.Options{
//		DeployRunner: []string{"/usr/bin/tf-hosts", "run"},
//		Bash:         "/bin/sh",
//	})
package tfgen

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"al.essio.dev/pkg/shellescape"
)

// Options says what the graph runs for a node.
type Options struct {
	// DeployRunner is the whole argv of the provisioner's command, the prefix of
	// the setup's deploy_runner and "tf-hosts run" included. Its words arrive
	// unchanged, whatever they hold.
	DeployRunner []string
	// Bash is the absolute path of the shell that starts DeployRunner.
	Bash string
}

// NodeFields are the fields of an entry of the variable "nodes".
func NodeFields() []string {
	return []string{"nixos_conf", "config_identity", "username", "host", "key_file", "host_key", "ssh_opts"}
}

// Triggers are the fields of a node whose change deploys it again, in the order
// of triggers_replace (FR-002). key_file and username are none of them: they say
// how this machine logs in, and a plan must not depend on the machine.
func Triggers() []string {
	return []string{"nixos_conf", "host", "config_identity", "host_key", "ssh_opts"}
}

// RunEnv are the fields that the provisioner puts in the environment of
// "tf-hosts run" (FR-003).
func RunEnv() []string {
	return []string{"nixos_conf", "username", "host", "key_file", "host_key", "ssh_opts"}
}

// Graph is the content of main.tf.json: sorted, indented and ending in a
// newline. Equal options give equal bytes.
func Graph(o Options) ([]byte, error) {
	if len(o.DeployRunner) == 0 || o.DeployRunner[0] == "" {
		return nil, errors.New("writing the graph: the deploy runner has no command")
	}
	if !strings.HasPrefix(o.Bash, "/") {
		return nil, fmt.Errorf("writing the graph: shell %q: an absolute path is expected", o.Bash)
	}
	for _, word := range append([]string{o.Bash}, o.DeployRunner...) {
		if strings.ContainsRune(word, 0) {
			return nil, fmt.Errorf("writing the graph: word %q holds a NUL byte", word)
		}
	}
	return encode(graph(o))
}

func graph(o Options) map[string]any {
	var types, triggers []string
	for _, f := range NodeFields() {
		types = append(types, f+" = string")
	}
	for _, f := range Triggers() {
		triggers = append(triggers, eachValue(f))
	}
	environment := make(map[string]string)
	for _, f := range RunEnv() {
		environment[f] = eachValue(f)
	}
	return map[string]any{
		"terraform": map[string]any{
			"backend": map[string]any{"http": map[string]any{}},
		},
		"variable": map[string]any{
			"nodes": map[string]any{
				"type":     "map(object({" + strings.Join(types, ", ") + "}))",
				"nullable": false,
			},
		},
		"resource": map[string]any{
			"terraform_data": map[string]any{
				"nixos": map[string]any{
					"for_each":         "${var.nodes}",
					"triggers_replace": triggers,
					"provisioner": map[string]any{
						"local-exec": map[string]any{
							// exec: a signal to the shell reaches the runner, and no shell stays behind.
							"command":     Literal("exec " + shellescape.QuoteCommand(o.DeployRunner)),
							"interpreter": []string{Literal(o.Bash), "-c"},
							"environment": environment,
							// The command is the same for every node; its output says what happens.
							"quiet": true,
						},
					},
				},
			},
		},
		"output": map[string]any{
			// Over the resource and not over var.nodes: a targeted run knows only
			// the instances that it planned.
			"nodes": map[string]any{"value": outputNodes()},
		},
	}
}

func eachValue(field string) string { return "${each.value." + field + "}" }

func outputNodes() string {
	var fields []string
	for _, f := range []string{"nixos_conf", "host", "config_identity"} {
		for i, trigger := range Triggers() {
			if trigger == f {
				fields = append(fields, fmt.Sprintf("%s = node.triggers_replace[%d]", f, i))
			}
		}
	}
	return "${{ for name, node in terraform_data.nixos : name => { " + strings.Join(fields, ", ") + " } }}"
}

// Literal writes s so that an HCL template, which every string of a .tf.json
// file is, evaluates to s.
func Literal(s string) string {
	return strings.NewReplacer("${", "$${", "%{", "%%{").Replace(s)
}

func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(v); err != nil {
		return nil, fmt.Errorf("writing the graph: %w", err)
	}
	return b.Bytes(), nil
}
