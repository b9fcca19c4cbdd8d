package tfhosts

import (
	"slices"
	"strings"
)

// Near is the known word that was probably meant by word, or "".
func Near(word string, known []string) string {
	fold := func(s string) string { return strings.ReplaceAll(strings.ToLower(s), "-", "_") }
	best, bestDistance := "", max(2, len(word)/3)+1
	for _, k := range slices.Sorted(slices.Values(known)) {
		d := distance(fold(word), fold(k))
		if len(word) >= 3 && (strings.HasPrefix(k, fold(word)) || strings.HasPrefix(fold(word), k)) {
			d = min(d, 1)
		}
		if d < bestDistance && d < len(k) {
			best, bestDistance = k, d
		}
	}
	return best
}

// distance counts the single-byte edits between a and b (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			substitute := diagonal
			if a[i] != b[j] {
				substitute++
			}
			diagonal = row[j+1]
			row[j+1] = min(substitute, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
