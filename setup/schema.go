package setup

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"
)

//go:embed schema.json
var schemaText string

const schemaURL = "https://fediversity.eu/tf-hosts/setup-1.json"

// Schema is the JSON Schema (2020-12) of the setup file, version 1.
func Schema() []byte { return []byte(schemaText) }

// checker checks values against the parts of the schema.
type checker struct {
	compiler *jsonschema.Compiler
	document any
}

func newChecker() (*checker, error) {
	document, err := jsonschema.UnmarshalJSON(strings.NewReader(schemaText))
	if err != nil {
		return nil, fmt.Errorf("reading the setup schema: %w", err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource(schemaURL, document); err != nil {
		return nil, fmt.Errorf("reading the setup schema: %w", err)
	}
	return &checker{compiler: c, document: document}, nil
}

// check reports every way in which value breaks the part of the schema at
// fragment ("" for the whole, "/$defs/ssh_nodes").
func (c *checker) check(fragment, root string, value any, found *problems) error {
	schema, err := c.compiler.Compile(schemaURL + "#" + fragment)
	if err != nil {
		return fmt.Errorf("compiling the setup schema: %w", err)
	}
	err = schema.Validate(value)
	if err == nil {
		return nil
	}
	var failure *jsonschema.ValidationError
	if !errors.As(err, &failure) {
		return fmt.Errorf("checking against the setup schema: %w", err)
	}
	c.report(failure, root, value, found)
	return nil
}

func (c *checker) report(e *jsonschema.ValidationError, root string, value any, found *problems) {
	path := location(root, value, e.InstanceLocation)
	switch k := e.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		for _, name := range k.Properties {
			found.add(member(path, name), "unknown key", suggest(name, c.properties(e.SchemaURL)))
		}
	case *kind.PropertyNames:
		// The loader checks the names: the validator's location of this kind
		// shares its memory with later ones and names another place.
	case *kind.Required:
		for _, name := range k.Missing {
			found.add(member(path, name), "missing", "")
		}
	case *kind.Type:
		hint := ""
		if k.Got == "null" {
			hint = "leave the key out where nothing is meant"
		}
		found.add(path, fmt.Sprintf("a value of type %s is expected, not %s", strings.Join(k.Want, " or "), k.Got), hint)
	case *kind.Const:
		found.addf(path, "%v is expected, not %s", k.Want, show(k.Got))
	case *kind.Enum:
		var want []string
		for _, w := range k.Want {
			want = append(want, show(w))
		}
		hint := ""
		if s, ok := k.Got.(string); ok {
			var words []string
			for _, w := range k.Want {
				if word, ok := w.(string); ok {
					words = append(words, word)
				}
			}
			hint = suggest(s, words)
		}
		found.add(path, fmt.Sprintf("one of %s is expected, not %s", strings.Join(want, ", "), show(k.Got)), hint)
	case *kind.Pattern:
		found.addf(path, "%q does not match %s", k.Got, k.Want)
	case *kind.MinProperties:
		found.addf(path, "at least %d entry is expected", k.Want)
	case *kind.MinItems:
		found.addf(path, "at least %d item is expected", k.Want)
	default:
		if len(e.Causes) == 0 {
			found.add(path, e.ErrorKind.LocalizedString(message.NewPrinter(language.English)), "")
		}
		for _, cause := range e.Causes {
			c.report(cause, root, value, found)
		}
	}
}

// show is a value as it is written in the file.
func show(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(v)
	}
	return string(b)
}

// properties are the keys that the schema at url knows.
func (c *checker) properties(url string) []string {
	_, fragment, _ := strings.Cut(url, "#")
	at := c.document
	for token := range strings.SplitSeq(strings.TrimPrefix(fragment, "/"), "/") {
		if token == "" {
			continue
		}
		object, ok := at.(map[string]any)
		if !ok {
			return nil
		}
		at = object[strings.NewReplacer("~1", "/", "~0", "~").Replace(token)]
	}
	object, ok := at.(map[string]any)
	if !ok {
		return nil
	}
	known, ok := object["properties"].(map[string]any)
	if !ok {
		return nil
	}
	names := make([]string, 0, len(known))
	for name := range known {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
