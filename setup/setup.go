// Package setup reads tf-hosts.json, lays the environment and the flags over
// it, and checks the result: every problem at once, each with its JSON path. It
// also owns the table of the variables that the program reads, and the encoding
// of the OpenTofu variable "nodes".
//
// It is a folder of its own because it owns the JSON Schema validator, while the
// module's root is standard library only.
//
// It reads the setup file and the files that hold the backend's secrets, and
// writes the nodes variable where it is too long for the environment. It never
// connects, runs nothing and reads no private key of a node: a missing key file
// fails only the verbs that connect.
//
//	s, err := setup.Load(setup.Options{Getenv: os.Getenv})
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
)

// DefaultPath is the setup file where neither --setup nor TF_HOSTS_SETUP is given.
const DefaultPath = "tf-hosts.json"

// Options says what to load.
type Options struct {
	// Path is the setup file; empty: the flag "setup", TF_HOSTS_SETUP, then DefaultPath.
	Path string
	// Getenv and Flag are those of Environment.
	Getenv func(name string) string
	Flag   func(flag string) (value string, given bool)
	// CheckOptions refuses a node's OpenSSH options that the connection does not
	// know. It is a func because this package knows no connection; nil checks none.
	CheckOptions func(options []string) error
	// WithoutSecrets leaves the backend's password and PEM files unread, for
	// verbs that do not talk to the backend.
	WithoutSecrets bool
}

// Environment is the layer above the file.
func (o Options) Environment() Environment {
	return Environment{Getenv: o.Getenv, Flag: o.Flag}
}

// Load reads and checks a setup. An error carries exit code 64; where the file
// could be read it holds a *ProblemsError with all problems.
func Load(o Options) (*tfhosts.Setup, error) {
	path, data, err := read(o)
	if err != nil {
		return nil, err
	}
	checker, err := newChecker()
	if err != nil {
		return nil, err
	}
	l := loader{
		options: o,
		env:     o.Environment(),
		checker: checker,
		setup:   &tfhosts.Setup{Path: path, Dir: filepath.Dir(path)},
	}
	if err := l.load(data); err != nil {
		return nil, err
	}
	if err := l.found.err(path); err != nil {
		return nil, err
	}
	return l.setup, nil
}

// read finds the file and reads it.
func read(o Options) (path string, data []byte, err error) {
	name := o.Path
	if name == "" {
		name = o.Environment().Value("TF_HOSTS_SETUP")
	}
	hint := ""
	if name == "" {
		name, hint = DefaultPath, "name the setup file: tf-hosts --setup FILE, or TF_HOSTS_SETUP=FILE"
	}
	path, err = filepath.Abs(name)
	if err != nil {
		return "", nil, tfhosts.WithExit(tfhosts.ExitUsage, "", fmt.Errorf("finding setup %q: %w", name, err))
	}
	data, err = os.ReadFile(path)
	if err != nil {
		return "", nil, tfhosts.WithExit(tfhosts.ExitUsage, hint, fmt.Errorf("reading setup %q: %w", name, bare(err)))
	}
	return path, data, nil
}

// bare drops the operation and the path of a file error, which the caller names.
func bare(err error) error {
	var e *fs.PathError
	if errors.As(err, &e) {
		return e.Err
	}
	return err
}

// document is the setup file. What has the wrong type stays zero: the schema
// has reported it, and the checks go on with the rest.
type document struct {
	Nodes              map[string]nodeEntry `json:"nodes"`
	SSH                sshEntry             `json:"ssh"`
	HTTPBackend        backendEntry         `json:"http_backend"`
	SelfBackend        *selfEntry           `json:"self_backend"`
	Bootstrap          *bool                `json:"bootstrap"`
	PublishedNamesExpr string               `json:"published_names_expr"`
	DeployRunner       []string             `json:"deploy_runner"`
	Bash               *string              `json:"bash"`
	Circuits           []string             `json:"circuits"`
	Runner             runnerEntry          `json:"runner"`
}

type nodeEntry struct {
	sshEntry
	NixosConf      string      `json:"nixos_conf"`
	ConfigIdentity string      `json:"config_identity"`
	Group          string      `json:"group"`
	Tags           []string    `json:"tags"`
	Runner         runnerEntry `json:"runner"`
}

type runnerEntry struct {
	tfhosts.NodeSettings
	Parallelism *int       `json:"parallelism"`
	NixOptions  []string   `json:"nix_options"`
	Waves       [][]string `json:"waves"`
}

type loader struct {
	options Options
	env     Environment
	checker *checker
	found   problems
	setup   *tfhosts.Setup
}

func (l *loader) load(data []byte) error {
	value, ok := parse("$", data, &l.found)
	if !ok {
		return nil
	}
	if err := l.checker.check("", "$", value, &l.found); err != nil {
		return err
	}
	var doc document
	if err := decode(data, &doc); err != nil {
		return fmt.Errorf("decoding setup %q: %w", l.setup.Path, err)
	}
	l.noNUL("$", value)
	l.variables()
	if err := l.nodes(doc); err != nil {
		return err
	}
	l.backend(doc.HTTPBackend)
	l.selfBackend(doc.SelfBackend)
	l.rest(doc)
	return nil
}

// embedded reads the JSON value of the variable at where, by the part of the
// schema at fragment.
func (l *loader) embedded(where, fragment, text string, v any) error {
	value, ok := parse(where, []byte(text), &l.found)
	if !ok {
		return nil
	}
	if err := l.checker.check(fragment, where, value, &l.found); err != nil {
		return err
	}
	l.noNUL(where, value)
	if err := decode([]byte(text), v); err != nil {
		return fmt.Errorf("decoding %s: %w", where, err)
	}
	return nil
}

// decode fills v from checked JSON; a value of the wrong type is left out.
func decode(data []byte, v any) error {
	err := json.NewDecoder(bytes.NewReader(data)).Decode(v)
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		return nil
	}
	return err
}

// noNUL refuses NUL bytes everywhere: no argv, environment or path can hold one.
func (l *loader) noNUL(path string, value any) {
	switch v := value.(type) {
	case string:
		if strings.ContainsRune(v, 0) {
			l.found.add(path, "holds a NUL byte", "")
		}
	case []any:
		for i, item := range v {
			l.noNUL(element(path, i), item)
		}
	case map[string]any:
		for key, item := range v {
			l.noNUL(member(path, key), item)
		}
	}
}

// variables checks those that Load itself does not read.
func (l *loader) variables() {
	for _, v := range Variables() {
		if !v.Bool {
			continue
		}
		if _, err := l.env.Bool(v.Name); err != nil {
			l.found.add(l.env.source(v.Name), fmt.Sprintf("only 1 means set, not %q", l.env.Value(v.Name)), "")
		}
	}
}

func (l *loader) rest(doc document) {
	s := l.setup
	s.Bootstrap = doc.SelfBackend != nil
	if doc.Bootstrap != nil {
		s.Bootstrap = *doc.Bootstrap
	}
	s.PublishedNamesExpr = doc.PublishedNamesExpr
	s.DeployRunner = doc.DeployRunner
	if len(doc.DeployRunner) > 0 && doc.DeployRunner[0] == "" {
		l.found.add("$.deploy_runner[0]", "the command is empty", "")
	}
	s.Bash = "/bin/sh"
	if doc.Bash != nil {
		s.Bash = *doc.Bash
		if !strings.HasPrefix(s.Bash, "/") {
			l.found.addf("$.bash", "an absolute path is expected, not %q", s.Bash)
		}
	}
	if len(doc.Circuits) > 0 {
		l.found.add("$.circuits", "is not supported by this version", "leave it out")
	}
	s.Runner = tfhosts.RunnerSettings{
		NodeSettings: l.nodeSettings("$.runner", doc.Runner),
		Parallelism:  10,
		NixOptions:   doc.Runner.NixOptions,
		Waves:        doc.Runner.Waves,
	}
	if doc.Runner.Parallelism != nil {
		s.Runner.Parallelism = *doc.Runner.Parallelism
	}
	for name, n := range s.Nodes {
		n.Runner = overSettings(s.Runner.NodeSettings, n.Runner)
		s.Nodes[name] = n
	}
}

// path makes a path of the setup absolute: below the home folder for "~", else
// relative to the setup file's folder. An empty one stays empty.
func (l *loader) path(where, name string) string {
	switch {
	case name == "" || filepath.IsAbs(name):
		return name
	case name == "~" || strings.HasPrefix(name, "~/"):
		home := l.env.getenv("HOME")
		if !filepath.IsAbs(home) {
			l.found.addf(where, "%q: the home folder is not known", name)
			return name
		}
		return filepath.Join(home, name[1:])
	case strings.HasPrefix(name, "~"):
		l.found.addf(where, "%q: the home folder of another user is not looked up", name)
		return name
	}
	return filepath.Join(l.setup.Dir, name)
}
