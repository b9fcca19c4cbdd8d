package setup

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	tfhosts "fediversity.eu/tf-hosts"
)

// nameForm is the schema's pattern of a name.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)

// sshEntry is the SSH fields of one layer. A field that is absent or empty
// leaves the layer below as it is.
type sshEntry struct {
	Username string      `json:"username"`
	Host     string      `json:"host"`
	KeyFile  string      `json:"key_file"`
	HostKey  string      `json:"host_key"`
	SSHOpts  optionsList `json:"ssh_opts"`
}

// optionsList is ssh_opts as it is written: a list, or a string that holds one.
type optionsList struct {
	given   bool
	options []string
	problem string
}

// UnmarshalJSON never fails: the loader reports problem with its path.
func (o *optionsList) UnmarshalJSON(data []byte) error {
	*o = optionsList{given: true}
	var text string
	if json.Unmarshal(data, &text) == nil {
		data = []byte(text)
		if text == "" {
			o.given = false
			return nil
		}
		if err := json.Unmarshal(data, &o.options); err != nil {
			o.problem = fmt.Sprintf("%q holds no JSON list of strings", text)
			o.options = nil
		}
		return nil
	}
	// The schema has reported an item that is no string; the others are checked.
	_ = json.Unmarshal(data, &o.options)
	return nil
}

// field is a value and the place that it came from, for a problem's path.
type field[T any] struct {
	value T
	where string
}

func (f *field[T]) set(value T, given bool, where string) {
	if given {
		*f = field[T]{value: value, where: where}
	}
}

// identity is the merged SSH layers of one node.
type identity struct {
	username, host, keyFile, hostKey field[string]
	options                          field[optionsList]
}

func (id *identity) lay(e sshEntry, where string) {
	id.username.set(e.Username, e.Username != "", where+".username")
	id.host.set(e.Host, e.Host != "", where+".host")
	id.keyFile.set(e.KeyFile, e.KeyFile != "", where+".key_file")
	id.hostKey.set(e.HostKey, e.HostKey != "", where+".host_key")
	id.options.set(e.SSHOpts, e.SSHOpts.given, where+".ssh_opts")
}

// nodes merges the layers of spec 004, FR-013, lowest first: built in, the
// setup's default, SSH_USER, the node's entry, SSH_NODES.
func (l *loader) nodes(doc document) error {
	var byEnv map[string]sshEntry
	where := l.env.source("SSH_NODES")
	if text := l.env.Value("SSH_NODES"); text != "" {
		if err := l.embedded(where, "/$defs/ssh_nodes", text, &byEnv); err != nil {
			return err
		}
	}
	for _, name := range tfhosts.SortedNames(byEnv) {
		if _, ok := doc.Nodes[name]; !ok {
			l.found.add(member(where, name), "no such node in the setup", suggest(name, tfhosts.SortedNames(doc.Nodes)))
		}
	}

	l.setup.Nodes = make(map[string]tfhosts.SetupNode, len(doc.Nodes))
	taken := make(map[string]string)
	for _, name := range tfhosts.SortedNames(doc.Nodes) {
		entry := doc.Nodes[name]
		at := member("$.nodes", name)
		if !nameForm.MatchString(name) {
			l.found.add(at, "bad name", "letters, digits, - and _, in parts joined by single dots")
		}
		id := identity{username: field[string]{value: "root"}}
		id.lay(doc.SSH, "$.ssh")
		user := l.env.Value("SSH_USER")
		id.username.set(user, user != "", l.env.source("SSH_USER"))
		id.lay(entry.sshEntry, at)
		id.lay(byEnv[name], member(where, name))

		options := l.checkIdentity(at, id)
		l.checkPlace(at, id, options, taken)
		l.setup.Nodes[name] = tfhosts.SetupNode{
			Node: tfhosts.Node{
				NixosConf:      entry.NixosConf,
				ConfigIdentity: entry.ConfigIdentity,
				Username:       id.username.value,
				Host:           id.host.value,
				KeyFile:        l.path(id.keyFile.where, id.keyFile.value),
				HostKey:        id.hostKey.value,
				SSHOpts:        tfhosts.EncodeOptions(options),
			},
			Group:  entry.Group,
			Tags:   entry.Tags,
			Runner: l.nodeSettings(at+".runner", entry.Runner),
		}
	}
	return nil
}

// checkPlace refuses a second node on the host, port and jump of another: the
// two would deploy over each other.
func (l *loader) checkPlace(at string, id identity, options []string, taken map[string]string) {
	if id.host.value == "" {
		return
	}
	host := id.host.value
	if name, ok := option(options, "HostName"); ok {
		host = name
	}
	port, ok := option(options, "Port")
	if !ok {
		port = "22"
	}
	jump, _ := option(options, "ProxyJump")
	command, _ := option(options, "ProxyCommand")
	place := strings.ToLower(strings.Trim(host, "[]"))
	key := strings.Join([]string{place, port, jump, command}, "\x00")
	if other, ok := taken[key]; ok {
		l.found.addf(at+".host", "is the host and port of %s too: %s port %s", other, place, port)
		return
	}
	taken[key] = at
}
