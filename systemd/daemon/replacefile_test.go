package daemon

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// names are the files of a folder.
func names(t *testing.T, folder string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestReplaceFile(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "state.json")
	for _, data := range []string{"first", "", "a longer second one"} {
		if err := ReplaceFile(file, []byte(data)); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(file)
		if err != nil || string(got) != data {
			t.Errorf("%q was kept as %q, %v", data, got, err)
		}
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", info.Mode(), err)
		}
	}
	if got := names(t, folder); !slices.Equal(got, []string{"state.json"}) {
		t.Errorf("left behind: %v", got)
	}
}

// What cannot be replaced stays, and nothing lies beside it.
func TestReplaceFileFails(t *testing.T) {
	folder := t.TempDir()
	if err := ReplaceFile(filepath.Join(folder, "missing", "state.json"), nil); err == nil {
		t.Error("a missing folder was no error")
	}
	file := filepath.Join(folder, "state.json")
	if err := os.MkdirAll(filepath.Join(file, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := ReplaceFile(file, []byte("data")); err == nil {
		t.Error("a folder was replaced by a file")
	}
	if got := names(t, folder); !slices.Equal(got, []string{"state.json"}) {
		t.Errorf("left behind: %v", got)
	}
}
