package tfhosts

// Verb is one verb that runs OpenTofu on the graph. The table feeds the command
// line, TF_VERB, the documentation, completions and the flake's apps.
type Verb struct {
	// Name is the word on the command line and in TF_VERB.
	Name string
	// Tofu is the argv of the OpenTofu command.
	Tofu []string
	// Writes: the verb may write state; it takes the working dir's lock.
	Writes bool
	// NeedsNodes: OpenTofu evaluates the variable "nodes" for this verb, so
	// every node's identity must be known.
	NeedsNodes bool
	// Addresses is how many leading arguments are resource addresses, for which
	// a node's name may stand; -1 means all of them.
	Addresses int
	// Selects: --on limits it to some nodes.
	Selects bool
	// Short is the help line.
	Short string
}

// Verbs is the table, in the order of the documentation. apply is first.
func Verbs() []Verb {
	return []Verb{
		{Name: "apply", Tofu: []string{"apply"}, NeedsNodes: true, Writes: true, Selects: true, Short: "deploy the nodes whose triggers changed"},
		{Name: "plan", Tofu: []string{"plan"}, NeedsNodes: true, Selects: true, Short: "show what an apply would deploy; changes nothing"},
		{Name: "destroy", Tofu: []string{"destroy"}, NeedsNodes: true, Writes: true, Selects: true, Short: "remove the graph's resources; hosts keep their configuration"},
		{Name: "refresh", Tofu: []string{"refresh"}, NeedsNodes: true, Writes: true, Selects: true, Short: "update the state from real resources"},
		{Name: "output", Tofu: []string{"output"}, Short: "print the outputs"},
		{Name: "show", Tofu: []string{"show"}, Short: "print the state or a saved plan"},
		{Name: "validate", Tofu: []string{"validate"}, Short: "check the graph"},
		{Name: "graph", Tofu: []string{"graph"}, Short: "print the graph in DOT form"},
		{Name: "import", Tofu: []string{"import"}, NeedsNodes: true, Writes: true, Addresses: 1, Short: "adopt an existing object into the state"},
		{Name: "taint", Tofu: []string{"taint"}, Writes: true, Addresses: 1, Short: "mark a node to be deployed again"},
		{Name: "untaint", Tofu: []string{"untaint"}, Writes: true, Addresses: 1, Short: "take a taint back"},
		{Name: "force-unlock", Tofu: []string{"force-unlock"}, Writes: true, Short: "release a lock by its ID"},
		{Name: "state-list", Tofu: []string{"state", "list"}, Addresses: -1, Short: "list the resources in the state"},
		{Name: "state-show", Tofu: []string{"state", "show"}, Addresses: 1, Short: "print one resource of the state"},
		{Name: "state-rm", Tofu: []string{"state", "rm"}, Writes: true, Addresses: -1, Short: "forget resources; hosts keep their configuration"},
		{Name: "state-mv", Tofu: []string{"state", "mv"}, Writes: true, Addresses: 2, Short: "rename a resource in the state"},
		{Name: "state-pull", Tofu: []string{"state", "pull"}, Short: "print the state"},
		{Name: "state-push", Tofu: []string{"state", "push"}, Writes: true, Short: "replace the state by a file"},
		{Name: "drift", Tofu: []string{"plan", "-refresh-only"}, NeedsNodes: true, Short: "look at all hosts and resources: exit 2 when one is not as it was left"},
	}
}

// LookupVerb finds a verb by its name.
func LookupVerb(name string) (Verb, bool) {
	for _, v := range Verbs() {
		if v.Name == name {
			return v, true
		}
	}
	return Verb{}, false
}

// NodeAddress is the OpenTofu address of a node's resource.
func NodeAddress(name string) string {
	return `terraform_data.nixos["` + name + `"]`
}
