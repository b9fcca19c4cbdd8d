package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestSyncTree(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "a", "b", "file"), []byte("x"), 0o400); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/nowhere", filepath.Join(dir, "a", "link")); err != nil { // as of a provider
		t.Fatal(err)
	}
	if err := SyncTree(dir); err != nil {
		t.Errorf("SyncTree = %v", err)
	}
	if err := SyncTree(filepath.Join(dir, "missing")); err == nil {
		t.Error("SyncTree of a missing folder succeeds")
	}
}
