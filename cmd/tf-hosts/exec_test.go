package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestExecCodeIsTheWorst(t *testing.T) {
	code := func(n int) execResult { return execResult{Code: &n} }
	unasked := execResult{}
	for name, row := range map[string]struct {
		results []execResult
		want    int
	}{
		"all are good":                       {[]execResult{code(0), code(0)}, 0},
		"the highest code counts":            {[]execResult{code(3), code(127), code(0)}, 127},
		"a node could not be asked":          {[]execResult{code(0), unasked}, 6},
		"no node could be asked":             {[]execResult{unasked, unasked}, 6},
		"one failed, one could not be asked": {[]execResult{unasked, code(1)}, 1},
	} {
		if got := execCode(row.results); got != row.want {
			t.Errorf("%s: execCode = %d, want %d", name, got, row.want)
		}
	}
}

// writes collects each write of its own.
type writes []string

func (w *writes) Write(b []byte) (int, error) {
	*w = append(*w, string(b))
	return len(b), nil
}

func TestLinesOfANodeAreWhole(t *testing.T) {
	for name, row := range map[string]struct {
		in        []string
		printable bool
		want      writes
	}{
		"a line in pieces":         {in: []string{"a", "b\nc", "\n"}, want: writes{"n: ab\n", "n: c\n"}},
		"many lines in one piece":  {in: []string{"a\n\nb\n"}, want: writes{"n: a\n", "n: \n", "n: b\n"}},
		"no end of the last line":  {in: []string{"a\nb"}, want: writes{"n: a\n", "n: b\n"}},
		"a pipe gets what is said": {in: []string{"\x1b[31mred\r\n"}, want: writes{"n: \x1b[31mred\r\n"}},
		"a terminal gets no escape sequence": {
			in: []string{"\x1b[31mred\r\n"}, printable: true, want: writes{"n: \ufffd[31mred\n"},
		},
	} {
		var got writes
		l := &lineWriter{w: &got, prefix: "n: ", printable: row.printable}
		for _, piece := range row.in {
			if _, err := l.Write([]byte(piece)); err != nil {
				t.Fatal(err)
			}
		}
		l.flush()
		if diff := cmp.Diff(row.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestLineWithoutAnEndIsBroken(t *testing.T) {
	var out bytes.Buffer
	l := &lineWriter{w: &out, prefix: "n: "}
	piece := []byte(strings.Repeat("x", 100<<10))
	for range 25 {
		l.Write(piece) //nolint:errcheck // it never fails
	}
	if len(l.partial) > longestLine || strings.Count(out.String(), "\n") != 2 {
		t.Errorf("%d bytes are held back after %d lines, want at most %d after 2", len(l.partial), strings.Count(out.String(), "\n"), longestLine)
	}
}
