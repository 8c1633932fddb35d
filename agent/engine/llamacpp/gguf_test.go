package llamacpp

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// head makes the head of a GGUF file: names with values that are text, numbers
// of 32 bits or lists of them.
func head(fields ...any) []byte {
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	text := func(s string) { put(uint64(len(s))); b.WriteString(s) }
	b.WriteString("GGUF")
	put(uint32(3))
	put(uint64(0))
	put(uint64(len(fields) / 2))
	for i := 0; i < len(fields); i += 2 {
		text(fields[i].(string))
		switch v := fields[i+1].(type) {
		case string:
			put(uint32(ggufText))
			text(v)
		case int:
			put(uint32(4))
			put(uint32(v))
		case []int:
			put(uint32(ggufList))
			put(uint32(5))
			put(uint64(len(v)))
			for _, n := range v {
				put(int32(n))
			}
		case []string:
			put(uint32(ggufList))
			put(uint32(ggufText))
			put(uint64(len(v)))
			for _, s := range v {
				text(s)
			}
		}
	}
	return b.Bytes()
}

// tiny is what the model of the real test has: 2 layers of 2 heads of 16.
var tiny = []any{
	"general.architecture", "llama", "general.name", "tiny", "llama.block_count", 2, "llama.embedding_length", 64,
	"llama.attention.head_count", 4, "llama.attention.head_count_kv", 2, "tokenizer.ggml.tokens",
	[]string{"a", "b"},
}

func TestShape(t *testing.T) {
	with := func(more ...any) []byte { return head(append(append([]any(nil), tiny...), more...)...) }
	for name, c := range map[string]struct {
		file []byte
		want shape
		err  string
	}{
		"as many heads as the model says": {with(), shape{64, 64}, ""},
		"keys and values of another size": {with("llama.attention.key_length", 32, "llama.attention.value_length", 8), shape{128, 32}, ""},
		"heads that differ by layer":      {with("llama.attention.head_count_kv", []int{1, 3}), shape{64, 64}, ""},
		"no heads of its own for KV":      {head("general.architecture", "x", "x.block_count", 3, "x.embedding_length", 64, "x.attention.head_count", 4), shape{192, 192}, ""},
		"a long list":                     {with("tokenizer.ggml.scores", make([]int, maxLayers+1)), shape{64, 64}, ""},
		"a window":                        {with("llama.attention.sliding_window", 1024), shape{}, "llama.attention.sliding_window"},
		"latent KV":                       {with("llama.attention.kv_lora_rank", 512), shape{}, "kv_lora_rank"},
		"a recurrent part":                {with("llama.ssm.state_size", 16), shape{}, "ssm"},
		"layers without heads":            {with("llama.attention.head_count_kv", []int{0, 2}), shape{}, "missing"},
		"heads of other layers":           {with("llama.attention.head_count_kv", []int{1, 2, 3}), shape{}, "missing"},
		"no layers":                       {head("general.architecture", "llama"), shape{}, "missing"},
		"another file":                    {[]byte("PK\x03\x04 and more"), shape{}, "not a GGUF file"},
		"another version":                 {append([]byte("GGUF"), make([]byte, 64)...), shape{}, "version 0"},
		"an end":                          {with()[:60], shape{}, "EOF"},
		"a long name":                     {append(append([]byte("GGUF\x03\x00\x00\x00"), make([]byte, 8)...), 1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255), shape{}, "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseShape(bytes.NewReader(c.file))
			if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%+v, %v; want %+v, %q", got, err, c.want, c.err)
			}
		})
	}
}

func TestModelFileIsNoPipe(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skipf("needs a file system with named pipes: %v", err)
	}
	for _, name := range []string{pipe, dir, filepath.Join(dir, "none")} {
		if _, err := readShape(name); err == nil {
			t.Errorf("%s: read", name)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "model"), head(tiny...), 0o600); err != nil {
		t.Fatal(err)
	}
	if s, err := readShape(filepath.Join(dir, "model")); err != nil || s != (shape{64, 64}) {
		t.Errorf("%+v %v", s, err)
	}
}

func FuzzShape(f *testing.F) {
	f.Add(head(tiny...))
	f.Add(head("general.architecture", "x", "x.attention.head_count", []int{1, 2}))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseShape(bytes.NewReader(b))
		if err == nil && (s.keys < 1 || s.values < 1) {
			t.Errorf("%+v", s)
		}
	})
}
