package setup

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"
)

// parse reads one JSON value for the schema and reports what encoding/json
// would pass over: duplicate keys and bytes that are no UTF-8. It is false
// where there is no value to check further.
func parse(root string, data []byte, found *problems) (any, bool) {
	if !utf8.Valid(data) {
		i := 0
		for i < len(data) {
			r, size := utf8.DecodeRune(data[i:])
			if r == utf8.RuneError && size == 1 {
				break
			}
			i += size
		}
		found.addf(root, "%s: not UTF-8", position(data, i))
		return nil, false
	}
	if err := json.Unmarshal(data, new(any)); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			at := max(int(syntax.Offset)-1, 0) // Offset counts the byte that is wrong
			if syntax.Error() == "unexpected end of JSON input" {
				at = len(data)
			}
			found.addf(root, "%s: malformed JSON: %s", position(data, at), syntax.Error())
		} else {
			found.addf(root, "malformed JSON: %v", err)
		}
		return nil, false
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	r := reader{decoder: d, data: data, found: found}
	value, err := r.value(root)
	if err != nil && !errors.Is(err, io.EOF) {
		found.addf(root, "malformed JSON: %v", err)
		return nil, false
	}
	return value, true
}

type reader struct {
	decoder *json.Decoder
	data    []byte
	found   *problems
}

func (r *reader) value(path string) (any, error) {
	token, err := r.decoder.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('{'):
		return r.object(path)
	case json.Delim('['):
		list := []any{}
		for r.decoder.More() {
			v, err := r.value(element(path, len(list)))
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		_, err := r.decoder.Token()
		return list, err
	}
	return token, nil
}

func (r *reader) object(path string) (any, error) {
	object := make(map[string]any)
	for r.decoder.More() {
		start := int(r.decoder.InputOffset())
		token, err := r.decoder.Token()
		if err != nil {
			return nil, err
		}
		key, ok := token.(string)
		if !ok { // json.Unmarshal has accepted the text
			return nil, fmt.Errorf("key %v is no string", token)
		}
		start += bytes.IndexByte(r.data[start:], '"')
		v, err := r.value(member(path, key))
		if err != nil {
			return nil, err
		}
		if _, twice := object[key]; twice {
			r.found.addf(member(path, key), "%s: the key is there twice", position(r.data, start))
		}
		object[key] = v
	}
	_, err := r.decoder.Token()
	return object, err
}

// position is the line and column of the byte at offset; the column counts
// characters.
func position(data []byte, offset int) string {
	before := data[:min(offset, len(data))]
	line := bytes.Count(before, []byte("\n")) + 1
	start := bytes.LastIndexByte(before, '\n') + 1
	return fmt.Sprintf("line %d, column %d", line, utf8.RuneCount(before[start:])+1)
}
