package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOutputOfOpenTofuAsJSON(t *testing.T) {
	var b bytes.Buffer
	tell := newTeller(&b)
	tell.asJSON = true
	for _, part := range []string{"Plan: 1 to ", "add\n\n{\"@level\":\"info\"}\n", "{ a brace\n", "no end"} {
		if _, err := tell.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	tell.flush()
	var got []string
	for line := range bytes.Lines(b.Bytes()) {
		var e struct {
			Kind, Message string
			Level         string `json:"@level"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		got = append(got, e.Kind+e.Level+" "+e.Message)
	}
	want := []string{"output Plan: 1 to add", "info ", "output { a brace", "output no end"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("stderr (-want +got):\n%s", diff)
	}
}
