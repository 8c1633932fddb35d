package testbed

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"waypost/systemd/daemon"
)

// What the programs call an event is one of the words that operators know.
func TestEventsAreOfOneVocabulary(t *testing.T) {
	word := regexp.MustCompile(`(?:"event", |event :?= )"([^"]*)"`)
	seen := map[string]bool{}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range word.FindAllStringSubmatch(string(text), -1) {
			seen[m[1]] = true
			if !slices.Contains(daemon.Events, m[1]) {
				t.Errorf("%s: event %q is none of daemon.Events", path, m[1])
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(seen) < 10 {
		t.Errorf("only %d events were found: the pattern does not fit the sources", len(seen))
	}
}
