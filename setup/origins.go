package setup

import (
	"encoding/json"
	"net/url"
	"strings"
)

// Origin is a variable, its value and where that comes from, for "tf-hosts env".
type Origin struct {
	Variable
	// Value is masked for a Secret variable and a submission, and without user
	// information for an address.
	Value string
	// From is FromFlag, FromEnvironment, FromFile or FromDefault.
	From string
}

const mask = "********"

// Origins is every variable of the table with its value, in the table's order.
// It works with a setup file that has problems or is not there: the layer of
// the file is then missing, and the error says why.
func Origins(o Options) ([]Origin, error) {
	env := o.Environment()
	file, err := rawFile(o)
	var origins []Origin
	for _, v := range Variables() {
		origin := Origin{Variable: v}
		origin.Value, origin.From = env.Lookup(v.Name)
		if name, given := env.secretFile(v.Name); given {
			origin.Value, origin.From = name, FromFlag
		}
		if origin.From == FromDefault {
			origin.Value = v.Default
			if value, ok := at(file, v.Key); ok {
				origin.Value, origin.From = value, FromFile
			}
		}
		origins = append(origins, shown(origin))
	}
	return origins, err
}

// shown hides what must not be seen. The name of a secret's file may be.
func shown(o Origin) Origin {
	switch {
	case o.Secret && o.From == FromEnvironment:
		o.Value = mask
	case o.Name == "DEPLOYMENT" && strings.HasPrefix(strings.TrimSpace(o.Value), "{"):
		o.Value = mask
	case strings.HasSuffix(o.Name, "_ADDRESS"):
		if u, err := url.Parse(o.Value); err != nil {
			o.Value = mask
		} else if u.User != nil {
			u.User = url.User(mask)
			o.Value = u.String()
		}
	}
	return o
}

func rawFile(o Options) (any, error) {
	path, data, err := read(o)
	if err != nil {
		return nil, err
	}
	var found problems
	value, ok := parse("$", data, &found)
	if !ok {
		return nil, found.err(path)
	}
	return value, nil
}

// at is the value of a Variable.Key in the file, as text.
func at(file any, key string) (string, bool) {
	if key == "" {
		return "", false
	}
	value := file
	for part := range strings.SplitSeq(strings.TrimPrefix(key, "$."), ".") {
		object, ok := value.(map[string]any)
		if !ok {
			return "", false
		}
		value = object[part]
	}
	switch v := value.(type) {
	case string:
		return v, v != ""
	case json.Number:
		return v.String(), true
	}
	return "", false
}
