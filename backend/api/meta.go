package api

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/tidwall/gjson"
)

// Meta is what a state says about itself without being decoded. Serial and
// Lineage are in clear in an encrypted state too.
type Meta struct {
	Serial  uint64
	Lineage string
	// Encrypted: the resources are not readable.
	Encrypted bool
	// Resources counts the entries of "resources"; 0 when Encrypted.
	Resources int
}

// ParseMeta reads the Meta of a state, plain or encrypted. A body that is no
// JSON object with serial and lineage is an error, which never quotes the body.
func ParseMeta(body []byte) (Meta, error) {
	if !gjson.ValidBytes(body) {
		return Meta{}, errors.New("reading state: no valid JSON")
	}
	root := gjson.ParseBytes(body)
	if !root.IsObject() {
		return Meta{}, errors.New("reading state: no JSON object")
	}
	lineage := root.Get("lineage")
	if lineage.Type != gjson.String || lineage.Str == "" {
		return Meta{}, errors.New("reading state: no lineage")
	}
	serial := root.Get("serial")
	if serial.Type != gjson.Number {
		return Meta{}, errors.New("reading state: no serial")
	}
	n, err := strconv.ParseUint(serial.Raw, 10, 64)
	if err != nil {
		return Meta{}, fmt.Errorf("reading state: serial: %w", errors.Unwrap(err))
	}
	m := Meta{Serial: n, Lineage: lineage.Str}
	if root.Get("encrypted_data").Exists() {
		m.Encrypted = true
		return m, nil
	}
	if r := root.Get("resources"); r.IsArray() {
		m.Resources = len(r.Array())
	}
	return m, nil
}
