package setup_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"fediversity.eu/tf-hosts/setup"
)

// The schema is the reference of the file: every key says what it is.
func TestSchemaDescribesEveryKey(t *testing.T) {
	var schema map[string]any
	if err := json.Unmarshal(setup.Schema(), &schema); err != nil {
		t.Fatal(err)
	}
	walkSchema(t, "#", schema)
}

func walkSchema(t *testing.T, at string, schema map[string]any) {
	for key, value := range schema {
		object, ok := value.(map[string]any)
		if !ok {
			continue
		}
		walkSchema(t, at+"/"+key, object)
		if key != "properties" && key != "$defs" {
			continue
		}
		for name, p := range object {
			property, ok := p.(map[string]any)
			if !ok {
				t.Errorf("%s/%s/%s is no object", at, key, name)
				continue
			}
			if property["description"] == nil && property["$ref"] == nil {
				t.Errorf("%s/%s/%s has no description", at, key, name)
			}
		}
	}
	if schema["type"] == "object" && schema["additionalProperties"] == nil {
		t.Errorf("%s takes unknown keys", at)
	}
}

func BenchmarkLoad(b *testing.B) {
	var nodes []string
	for i := range 1000 {
		nodes = append(nodes, fmt.Sprintf(`"prod.app%d": {"nixos_conf": "./a.nix", "host": "h%d", "ssh_opts": ["Port=22"], "tags": ["x"]}`, i, i))
	}
	text := `{"version": 1, "nodes": {` + strings.Join(nodes, ",") + `}}`
	dir := b.TempDir()
	o := writeTo(b, dir, text)
	for b.Loop() {
		if _, err := setup.Load(o); err != nil {
			b.Fatal(err)
		}
	}
}
