package tfhosts_test

import (
	"testing"

	tfhosts "fediversity.eu/tf-hosts"
)

func TestPrintableLeavesNoEscapeSequence(t *testing.T) {
	for in, want := range map[string]string{
		"\x1b]0;owned\a rest": "\ufffd]0;owned\ufffd rest",
		"a\tb\nü€":            "a\tb\nü€",
		"back\rover":          "back\ufffdover",
	} {
		if got := tfhosts.Printable(in); got != want {
			t.Errorf("Printable(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestWorstExitFollowsTheOrder(t *testing.T) {
	for _, row := range []struct {
		codes []int
		want  int
	}{
		{nil, 0},
		{[]int{0, 2}, 2},
		{[]int{6, 2}, 6},
		{[]int{1, 6}, 1},
		{[]int{130, 1, 6}, 130},
		{[]int{5, 130}, 5},
		{[]int{4, 5}, 4},
		{[]int{3, 4, 5}, 3},
		{[]int{7, 3}, 7},
		{[]int{14, 2}, 14},
	} {
		if got := tfhosts.WorstExit(row.codes...); got != row.want {
			t.Errorf("WorstExit(%v) = %d, want %d", row.codes, got, row.want)
		}
	}
}
