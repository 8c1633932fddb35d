package daemon

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestOptionalInt(t *testing.T) {
	type element struct {
		N OptionalInt `toml:"n"`
	}
	for text, c := range map[string]struct {
		want OptionalInt
		err  string
	}{
		"[[e]]":             {want: OptionalInt{}},
		"[[e]]\nn = 0":      {want: OptionalInt{Set: true}},
		"[[e]]\nn = -1":     {want: OptionalInt{Value: -1, Set: true}},
		"[[e]]\nn = \"7\"":  {want: OptionalInt{Value: 7, Set: true}},
		"[[e]]\nn = true":   {err: "want a whole number, have true"},
		"[[e]]\nn = 1.5":    {err: "want a whole number, have the number 1.5"},
		"[[e]]\nn = \"x\"":  {err: `want a whole number, have "x"`},
		"[[e]]\nn = \"1e\"": {err: `want a whole number, have "1e"`},
	} {
		var cfg struct {
			E []element `toml:"e"`
		}
		name := filepath.Join(t.TempDir(), "c.toml")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Load(&cfg, LoadOptions{File: name})
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: %v, want %q", text, err, c.err)
			}
			continue
		}
		if err != nil || len(cfg.E) != 1 || cfg.E[0].N != c.want {
			t.Errorf("%q: %+v %v, want %+v", text, cfg.E, err, c.want)
		}
	}
}
