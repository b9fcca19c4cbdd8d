package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A page that names tests tells the truth only while they exist.
func TestDocsNameTestsThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*", "*.md"))
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	named := regexp.MustCompile(`([a-z][a-z/-]*) ((?:Test|Benchmark)[A-Z]\w*)|(Benchmark[A-Z]\w*) in ([a-z][a-z/-]*)`)
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range named.FindAllStringSubmatch(string(text), -1) {
			folder, name := m[1], m[2]
			if name == "" {
				folder, name = m[4], m[3]
			}
			if !declares(t, filepath.Join(root, folder), name) {
				t.Errorf("%s names %s %s, which does not exist", page, folder, name)
			}
		}
	}
}

// declares says whether a test file of folder has the function.
func declares(t *testing.T, folder, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(text), "\nfunc "+name+"(") {
			return true
		}
	}
	return false
}
