package kvevents

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"waypost/agent/blocktable"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"
)

// layouts reads the byte fixtures. Single events are wrapped in a batch.
func layouts(t testing.TB) (names []string, payloads [][]byte) {
	t.Helper()
	text, err := os.ReadFile("testdata/layouts.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		name, digits, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || name == "#" || strings.HasPrefix(name, "#") {
			continue
		}
		b, err := hex.DecodeString(digits)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if b[1] != 0xcb {
			b = slices.Concat([]byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91}, b, []byte{0})
		}
		names, payloads = append(names, name), append(payloads, b)
	}
	return names, payloads
}

func describe(e *blocktable.Event) string {
	ops := map[blocktable.Op]string{blocktable.OpStore: "store", blocktable.OpRemove: "remove", blocktable.OpClear: "clear"}
	s := fmt.Sprintf("%s medium=%d group=%d", ops[e.Op], e.Medium, e.Group)
	if e.Op != blocktable.OpClear {
		s += fmt.Sprintf(" hashes=%x", e.Hashes)
	}
	if e.Op != blocktable.OpStore {
		return s
	}
	if e.HasParent {
		s += fmt.Sprintf(" parent=%x", e.Parent)
	}
	s += fmt.Sprintf(" tokens=%v block=%d spec=%d window=%d", e.Tokens, e.BlockTokens, e.Spec, e.WindowTokens)
	if e.Adapter != "" {
		s += " adapter=" + e.Adapter
	}
	if e.Salt != "" {
		s += " salt=" + e.Salt
	}
	marks := ""
	for _, m := range e.Marks {
		marks += map[bool]string{true: "x", false: "-"}[m != 0]
	}
	if marks != "" {
		s += " marks=" + marks
	}
	return s
}

func TestLayouts(t *testing.T) {
	const (
		two       = "store medium=0 group=0 hashes=[1122334455667788 dab7c1f200112233] tokens=[1 128000 17 65536] block=2 spec="
		removeOne = "remove medium=0 group=0 hashes=[1122334455667788]"
		clearAll  = "clear medium=0 group=0"
	)
	plain := []string{two + "0 window=0", removeOne, clearAll}
	full := []string{two + "1 window=0", removeOne, clearAll}
	want := map[string][]string{
		"F01": plain, "F02": plain, "F03": plain, "F04": plain, "F05": plain, "F06": plain,
		"F07": full, "F08": full,
		"F09": {"store medium=0 group=0 hashes=[5] parent=4 tokens=[9 10] block=2 spec=0 window=0"},
		"F10": {"store medium=0 group=0 hashes=[18191a1b1c1d1e1f] parent=38393a3b3c3d3e3f tokens=[9 10] block=2 spec=0 window=0"},
		"F11": {"store medium=0 group=0 hashes=[8090a0b0c0d0e0f] tokens=[9 10] block=2 spec=0 window=0"},
		"F12": {"store medium=0 group=0 hashes=[eeddef0b82167eeb fffffffffffffffb] parent=ffffffffffffff7f tokens=[9 10 11 12] block=2 spec=0 window=0"},
		"F13": {"store medium=0 group=0 hashes=[18191a1b1c1d1e1f] tokens=[151655 151655] block=2 spec=1 window=0 adapter=sql-lora salt=tenant-7 marks=x"},
		"F14": {"store medium=0 group=1 hashes=[7] parent=6 tokens=[1 2 3 4] block=2 spec=4 window=1024"},
		"F15": {"store medium=1 group=0 hashes=[dab7c1f200112233] tokens=[] block=0 spec=0 window=0"},
		"F16": {"remove medium=1 group=0 hashes=[dab7c1f200112233]"},
		"F17": {"store medium=2 group=0 hashes=[1] tokens=[] block=0 spec=0 window=0"},
		"F18": {"store medium=1 group=0 hashes=[7] parent=6 tokens=[] block=16 spec=0 window=0"},
		"F19": {"store medium=0 group=0 hashes=[7] tokens=[1 2] block=2 spec=1 window=0"},
		"F20": nil, // a store without hashes: damaged
		"F21": {"store medium=0 group=0 hashes=[dab89baa7b5857c0] tokens=[0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15] block=16 spec=1 window=0"},
	}
	const page = "store medium=0 group=0 hashes=[d600000000000000] tokens=[1 128000] block=2 spec=0 window=0"
	sglang := []string{page, "remove medium=0 group=0 hashes=[d600000000000000]", clearAll}
	for name, events := range map[string][]string{
		"S01": sglang, "S02": sglang, "S03": sglang,
		"S04": {"store medium=0 group=0 hashes=[7] tokens=[1 128000] block=2 spec=0 window=0 salt=tenant-7"},
		"S05": {"store medium=0 group=0 hashes=[7] tokens=[1 2] block=2 spec=0 window=0"}, // pairs
		"S06": {"store medium=0 group=0 hashes=[7 8] parent=6 tokens=[1 2 3 4] block=2 spec=0 window=0"},
		"S07": {"store medium=1 group=0 hashes=[7] tokens=[1 128000] block=2 spec=0 window=0"},
		"S08": {"store medium=0 group=0 hashes=[7] tokens=[1 128000] block=2 spec=0 window=0 salt=tenant-7"},
		"T01": {"store medium=0 group=0 hashes=[7] parent=6 tokens=[1 2] block=2 spec=0 window=0", "remove medium=0 group=0 hashes=[5]"},
		"T02": {fmt.Sprintf("store medium=0 group=0 hashes=[7] tokens=[1 %d] block=2 spec=0 window=0 marks=x", uint32(xxh3.HashString("00ff")))},
	} {
		want[name] = events
	}
	names, payloads := layouts(t)
	if len(names) != len(want) {
		t.Fatalf("%d fixtures, %d expectations", len(names), len(want))
	}
	d := NewDecoder()
	for i, name := range names {
		b, err := d.Decode(payloads[i])
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		var got []string
		for k := range b.Events {
			got = append(got, describe(&b.Events[k]))
		}
		if diff := cmp.Diff(want[name], got); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if damaged := map[bool]int{true: 1}[name == "F20"]; b.Damaged != damaged || b.Unknown != 0 {
			t.Errorf("%s: damaged %d, unknown %d", name, b.Damaged, b.Unknown)
		}
	}
}

// Arrays and maps of the batch, its rank and time, and fields in any order.
func TestBatchShapes(t *testing.T) {
	event := msgp.AppendMapHeader(nil, 2)
	event = msgp.AppendArrayHeader(msgp.AppendString(event, "block_hashes"), 1)
	event = msgp.AppendInt64(event, -1)
	event = msgp.AppendString(msgp.AppendString(event, "type"), "BlockRemoved")

	array := msgp.AppendArrayHeader(nil, 5)
	array = msgp.AppendFloat64(array, 12.5)
	array = append(msgp.AppendArrayHeader(array, 1), event...)
	array = msgp.AppendInt(array, 3)
	array = msgp.AppendString(array, "a field of the future")
	array = msgp.AppendNil(array)

	dict := msgp.AppendMapHeader(nil, 4)
	dict = msgp.AppendString(msgp.AppendString(dict, "new"), "x")
	dict = msgp.AppendInt(msgp.AppendString(dict, "data_parallel_rank"), 3)
	dict = append(msgp.AppendArrayHeader(msgp.AppendString(dict, "events"), 1), event...)
	dict = msgp.AppendFloat64(msgp.AppendString(dict, "ts"), 12.5)

	for name, payload := range map[string][]byte{"array": array, "map": dict} {
		b, err := NewDecoder().Decode(payload)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if len(b.Events) != 1 || b.Events[0].Hashes[0] != 1<<64-1 || b.Rank != 3 || b.PublishedUnixSeconds != 12.5 {
			t.Errorf("%s: %+v", name, b)
		}
	}
}

func TestExtraKeys(t *testing.T) {
	type list = []any
	long := strings.Repeat("t", maxNameBytes+1)
	tests := []struct {
		name    string
		adapter any
		id      any
		parent  bool
		extra   any
		want    string // adapter|salt|marks of two blocks
	}{
		{"none", nil, nil, false, nil, "||"},
		{"nulls", nil, nil, false, list{nil, nil}, "||"},
		{"salt", nil, nil, false, list{list{"t"}, nil}, "|t|"},
		{"adapter", "sql", 1, false, list{list{"sql"}, list{"sql"}}, "sql||"},
		{"adapter and salt", "sql", 1, false, list{list{"sql", "t"}, list{"sql"}}, "sql|t|"},
		{"salt equal to the adapter's name", "sql", 1, false, list{list{"sql", "sql"}, list{"sql"}}, "sql|sql|"},
		{"image", nil, nil, false, list{nil, list{list{"ab12", -3}}}, "||-x"},
		{"image and salt", nil, nil, false, list{list{list{"ab12", 0}, "t"}, nil}, "|t|x-"},
		{"bare image of an old release, further on", nil, nil, true, list{nil, list{"ab12"}}, "||-x"},
		{"embeddings", nil, nil, false, list{list{[]byte{1, 2}}, nil}, "||x-"},
		{"adapter told by number only", nil, 4, false, list{nil, nil}, "||xx"},
		{"a salt that says so", nil, nil, false, list{list{list{"cache_salt", "t"}}, nil}, "|t|"},
		{"an adapter that says so", "sql", 1, false, list{list{list{"lora", "sql", "/path"}, list{"cache_salt", "t"}}, list{list{"lora", "sql", "/path"}}}, "sql|t|"},
		{"an adapter that says so of another name", "sql", 1, false, list{list{list{"lora", "other", "/path"}}, nil}, "sql||x-"},
		{"a salt where none can be", nil, nil, false, list{nil, list{list{"cache_salt", "t"}}}, "||"},
		{"a picture called like a salt", nil, nil, false, list{list{list{"cache_salt", 3}}, nil}, "||x-"},
		{"a picture that says so", nil, nil, false, list{list{list{"mm", "ab12", -3}}, nil}, "||x-"},
		{"one entry for two blocks", nil, nil, true, list{list{list{"ab12", 0}}}, "||xx"},
		{"the longest salt", nil, nil, false, list{list{long[1:]}, nil}, "|" + long[1:] + "|"},
		{"a salt too long to keep", nil, nil, false, list{list{long}, nil}, "||x-"},
		{"an adapter too long to keep", long, 1, false, list{list{long}, list{long}}, "||xx"},
	}
	for _, test := range tests {
		e := decodedEvent(t, test.name, map[string]any{
			"type": "BlockStored", "block_hashes": list{1, 2}, "parent_block_hash": map[bool]any{true: 9}[test.parent],
			"token_ids": list{1, 2}, "block_size": 1, "lora_id": test.id, "lora_name": test.adapter, "extra_keys": test.extra,
		})
		marks := ""
		for _, m := range e.Marks {
			marks += map[bool]string{true: "x", false: "-"}[m != 0]
		}
		if got := e.Adapter + "|" + e.Salt + "|" + marks; got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}

// decodedEvent is the only event of a batch that holds one.
func decodedEvent(t *testing.T, name string, event map[string]any) blocktable.Event {
	t.Helper()
	payload, err := msgp.AppendIntf(nil, []any{1.0, []any{event}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := NewDecoder().Decode(payload)
	if err != nil || len(b.Events) != 1 {
		t.Fatalf("%s: %v, %+v", name, err, b)
	}
	return b.Events[0]
}

func TestMedia(t *testing.T) {
	for medium, want := range map[any]blocktable.Medium{
		nil: blocktable.MediumGPU, "GPU": blocktable.MediumGPU, "gpu": blocktable.MediumGPU,
		"cpu": blocktable.MediumCPU, "CPU": blocktable.MediumCPU,
		"STORAGE": blocktable.MediumDisk, "FS": blocktable.MediumDisk, "OBJ": blocktable.MediumDisk,
		"cuda:0": blocktable.MediumExternal, "external": blocktable.MediumExternal,
		"tape": blocktable.MediumUnknown, "a very long name": blocktable.MediumUnknown,
	} {
		payload, _ := msgp.AppendIntf(nil, []any{1.0, []any{[]any{"BlockRemoved", []any{1}, medium}}})
		b, err := NewDecoder().Decode(payload)
		if err != nil || len(b.Events) != 1 || b.Events[0].Medium != want {
			t.Errorf("%v: %v %+v", medium, err, b)
		}
	}
	payload, _ := msgp.AppendIntf(nil, []any{1.0, []any{map[string]any{
		"type": "BlockRemoved", "block_hashes": []any{1}, "medium": "GPU", "locality": "REMOTE",
	}}})
	if b, _ := NewDecoder().Decode(payload); b.Events[0].Medium != blocktable.MediumExternal {
		t.Errorf("another worker's GPU memory is medium %d", b.Events[0].Medium)
	}
}

// Damage ends with its event: the removals around it still count.
func TestDamageIsContained(t *testing.T) {
	type list = []any
	removal := list{"BlockRemoved", list{7}}
	store := func(hashes, parent, tokens, size any) any {
		return list{"BlockStored", hashes, parent, tokens, size, nil, "GPU"}
	}
	deep := any(1)
	for range 500 {
		deep = list{deep}
	}
	tests := []struct {
		name              string
		event             any
		damaged, unknown  int
		lost, understands bool
	}{
		{name: "token too large", event: store(list{1}, nil, list{1 << 32}, 1), damaged: 1},
		{name: "largest token", event: store(list{1}, nil, list{uint64(1<<32 - 1)}, 1), understands: true},
		{name: "negative token", event: store(list{1}, nil, list{-1}, 1), damaged: 1},
		{name: "token of another type", event: store(list{1}, nil, list{true}, 1), damaged: 1},
		{name: "short digest", event: store(list{[]byte{1, 2, 3}}, nil, list{1}, 1), damaged: 1},
		{name: "hash of another type", event: store(list{1.5}, nil, list{1}, 1), damaged: 1},
		{name: "parent of another type", event: store(list{1}, true, list{1}, 1), damaged: 1},
		{name: "negative block size", event: store(list{1}, nil, list{1}, -1), damaged: 1},
		{name: "null hashes", event: store(nil, nil, list{1}, 1), damaged: 1},
		{name: "null tokens", event: store(list{1}, nil, nil, 0), understands: true},
		{name: "no hashes", event: store(list{}, nil, list{1, 2}, 2), understands: true},
		{name: "too short", event: list{"BlockStored"}, damaged: 1},
		{name: "only hashes", event: list{"BlockStored", list{1}}, understands: true},
		{name: "longer than known", event: list{"BlockStored", list{1}, nil, list{1}, 1, nil, nil, nil, nil, nil, nil, nil, "new", list{1}}, understands: true},
		{name: "damaged removal", event: list{"BlockRemoved", list{"x"}}, damaged: 1, lost: true},
		{name: "unknown kind", event: list{"BlockInactive", list{"x"}, 3.5}, unknown: 1},
		{name: "unknown kind whose fields have other types", event: map[string]any{"block_hashes": 5, "type": "BlockInactive"}, unknown: 1},
		{name: "map without a kind", event: map[string]any{"block_hashes": list{1}}, damaged: 1, lost: true},
		{name: "not an event", event: 5, damaged: 1, lost: true},
		{name: "null", event: nil, damaged: 1, lost: true},
		{name: "empty array", event: list{}, damaged: 1, lost: true},
		{name: "deeply nested", event: list{"BlockStored", list{1}, nil, deep}, damaged: 1},
		{name: "deeply nested where nobody looks", event: map[string]any{"type": "BlockRemoved", "block_hashes": list{1}, "new": deep}, understands: true},
	}
	for _, test := range tests {
		payload, err := msgp.AppendIntf(nil, list{1.0, list{removal, test.event, removal}, 0})
		if err != nil {
			t.Fatal(err)
		}
		b, err := NewDecoder().Decode(payload)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		want := 2
		if test.understands {
			want = 3
		}
		if len(b.Events) != want || b.Damaged != test.damaged || b.Unknown != test.unknown || b.LostRemovals != test.lost {
			t.Errorf("%s: %d events, damaged %d, unknown %d, lost %v", test.name, len(b.Events), b.Damaged, b.Unknown, b.LostRemovals)
			continue
		}
		if first, last := b.Events[0], b.Events[want-1]; first.Op != blocktable.OpRemove || last.Op != blocktable.OpRemove || last.Hashes[0] != 7 {
			t.Errorf("%s: the removals around it are gone: %+v", test.name, b.Events)
		}
	}
}

// A batch that breaks off keeps what came before and says what is lost.
func TestTruncated(t *testing.T) {
	type list = []any
	payload, _ := msgp.AppendIntf(nil, list{1.0, list{list{"BlockRemoved", list{1}}, list{"BlockRemoved", list{2}}, list{"BlockRemoved", list{3}}}})
	b, err := NewDecoder().Decode(payload[:len(payload)-5])
	if err != nil || len(b.Events) != 2 || b.Damaged != 1 || !b.LostRemovals {
		t.Errorf("%v %+v", err, b)
	}
}

func TestRefusals(t *testing.T) {
	head := []byte{0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0}
	bomb := func(b ...byte) []byte { return append(slices.Clone(head), b...) }
	tests := []struct {
		name    string
		payload []byte
		err     error
	}{
		{"empty", nil, ErrNotBatch},
		{"not msgpack", []byte("hello"), ErrNotBatch},
		{"one element", []byte{0x91, 0x90}, ErrNotBatch},
		{"events missing", []byte{0x92, 0x01}, ErrNotBatch},
		{"events not a list", []byte{0x92, 0x01, 0x02}, ErrNotBatch},
		{"map without events", []byte{0x81, 0xa2, 't', 's', 0x01}, ErrNotBatch},
		{"four billion events", bomb(0xdd, 0xff, 0xff, 0xff, 0xff, 0x90), ErrNotBatch},
		{"a batch of four billion", []byte{0xdd, 0xff, 0xff, 0xff, 0xff, 0x90}, ErrNotBatch},
		{"a million and one", bomb(append([]byte{0xdd, 0, 0x0f, 0x42, 0x41}, make([]byte, 1_000_001)...)...), ErrBatchTooLarge},
		{"65 MiB", make([]byte, 65<<20), ErrBatchTooLarge},
	}
	d := NewDecoder()
	for _, test := range tests {
		if _, err := d.Decode(test.payload); !errors.Is(err, test.err) {
			t.Errorf("%s: %v, want %v", test.name, err, test.err)
		}
	}
	if cap(d.tokens)+cap(d.hashes)+cap(d.events) > 1000 {
		t.Errorf("bombs made the decoder keep %d tokens, %d hashes, %d events", cap(d.tokens), cap(d.hashes), cap(d.events))
	}
	// Headers inside an event that promise more than the message holds.
	for _, inside := range [][]byte{
		{0x93, 0xab, 'B', 'l', 'o', 'c', 'k', 'S', 't', 'o', 'r', 'e', 'd', 0xdd, 0xff, 0xff, 0xff, 0xff, 0x01},
		{0x94, 0xab, 'B', 'l', 'o', 'c', 'k', 'S', 't', 'o', 'r', 'e', 'd', 0x90, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff},
		{0xdf, 0xff, 0xff, 0xff, 0xff, 0xa4, 't', 'y', 'p', 'e'},
		{0x92, 0xc6, 0xff, 0xff, 0xff, 0xff},
	} {
		b, err := d.Decode(bomb(append([]byte{0x91}, inside...)...))
		if err != nil || len(b.Events) != 0 || b.Damaged != 1 {
			t.Errorf("%x: %v %+v", inside, err, b)
		}
	}
	if cap(d.tokens)+cap(d.hashes) > 1000 {
		t.Errorf("bombs made the decoder keep %d tokens, %d hashes", cap(d.tokens), cap(d.hashes))
	}
}

func TestOmits(t *testing.T) {
	names, payloads := layouts(t)
	want := map[string][2]bool{
		"F02": {true, true}, "F03": {true, true}, "F04": {false, true}, "F05": {false, false}, "F08": {false, false},
		"S03": {true, true}, "S04": {true, false}, "S08": {true, false}, "T01": {false, true},
	}
	for i, name := range names {
		w, ok := want[name]
		if !ok {
			continue
		}
		d := NewDecoder()
		if _, err := d.Decode(payloads[i]); err != nil {
			t.Fatal(err)
		}
		if adapters, salts := d.Omits(); adapters != w[0] || salts != w[1] {
			t.Errorf("%s: omits adapters %v, salts %v", name, adapters, salts)
		}
	}
	for name, test := range map[string]struct {
		event           map[string]any
		adapters, salts bool
	}{
		// SGLang's newest layout leaves out the salt that is none.
		"names without an adapter": {map[string]any{"token_ids": []any{1}, "block_hashes": []any{1}, "lora_id": nil}, true, false},
		// Stores to other tiers name hashes only, whatever the layout can say.
		"a placeholder":  {map[string]any{"token_ids": []any{}, "block_hashes": []any{1}, "lora_name": nil}, false, false},
		"masked entries": {map[string]any{"token_ids": []any{1}, "block_hashes": []any{}, "lora_name": nil}, false, false},
	} {
		test.event["type"], test.event["block_size"] = "BlockStored", 1
		payload, err := msgp.AppendIntf(nil, []any{1.0, []any{test.event}})
		if err != nil {
			t.Fatal(err)
		}
		d := NewDecoder()
		if b, err := d.Decode(payload); err != nil || len(b.Events) != 1 {
			t.Fatal(err, b)
		}
		if adapters, salts := d.Omits(); adapters != test.adapters || salts != test.salts {
			t.Errorf("%s: omits adapters %v, salts %v", name, adapters, salts)
		}
	}
}

func TestNoAllocation(t *testing.T) {
	d := NewDecoder()
	var payloads [][]byte
	for _, file := range []string{"testdata/lora.frames.jsonl", "testdata/salt.frames.jsonl", "testdata/bytes128-salt.frames.jsonl"} {
		payloads = append(payloads, livePayloads(t, file)...)
	}
	all := func() {
		for _, p := range payloads {
			if _, err := d.Decode(p); err != nil {
				t.Fatal(err)
			}
		}
	}
	all()
	if n := testing.AllocsPerRun(100, all); n != 0 {
		t.Errorf("%v allocations for %d batches", n, len(payloads))
	}
}

func FuzzDecode(f *testing.F) {
	_, payloads := layouts(f)
	for _, file := range []string{"testdata/lora.frames.jsonl", "testdata/hybrid-two-turns.frames.jsonl", "testdata/bytes128-salt.frames.jsonl", "testdata/sglang-salt.frames.jsonl"} {
		payloads = append(payloads, livePayloads(f, file)[:3]...)
	}
	// The forms that no recording has: maps, hashes and tokens as texts, extra keys
	// that name their kind, and every kind of cache.
	stored := func(more map[string]any) map[string]any {
		e := map[string]any{"type": "BlockStored", "block_hashes": []any{uint64(7), "00112233445566778899aabbccddeeff"}, "token_ids": []any{1, 2, 3, 4}, "block_size": 2}
		maps.Copy(e, more)
		return e
	}
	var kinds []any
	for _, kind := range []string{"mla_attention", "sink_full_attention", "sliding_window_mla", "mamba", "chunked_local_attention", "encoder_only_attention", "cross_attention", "another"} {
		kinds = append(kinds, stored(map[string]any{"kv_cache_spec_kind": kind, "medium": "disk", "group_idx": 1}))
	}
	named := []any{[]any{"cache_salt", "s"}, []any{"lora", "a"}, []any{"mm", 5}}
	for _, batch := range []map[string]any{
		{"ts": 1.5, "data_parallel_rank": 1, "other": nil, "events": kinds},
		{"ts": "late", "events": []any{stored(map[string]any{"lora_name": "a", "extra_keys": []any{named, nil}}), []any{"AllBlocksCleared"}, []any{"AllBlocksCleared"}, []any{"Other", 1}, 5}},
		{"events": []any{stored(map[string]any{"lora_id": 3, "extra_keys": []any{named}}), stored(map[string]any{"token_ids": []any{"ab", "cd", 3, -1}, "cache_salt": "s", "mm_keys": []any{[]any{1}, nil}})}},
		{"events": []any{map[string]any{"type": "BlockRemoved", "block_hashes": []any{"short", -1}}, map[string]any{"type": "BlockRemoved", "medium": "elsewhere far away", "locality": "REMOTE"}}},
		{"ts": 1.5},
	} {
		b, err := msgp.AppendIntf(nil, batch)
		if err != nil {
			f.Fatal(err)
		}
		payloads = append(payloads, b)
	}
	for _, p := range append(payloads, nil, []byte{0x90}, []byte{0x91, 1}) {
		f.Add(p)
	}
	d := NewDecoder()
	f.Fuzz(func(t *testing.T, payload []byte) {
		b, err := d.Decode(payload)
		if err != nil {
			return
		}
		hashes, tokens := 0, 0
		table := blocktable.New(blocktable.Options{MaxBlocks: 1000})
		for i := range b.Events {
			e := &b.Events[i]
			hashes, tokens = hashes+len(e.Hashes), tokens+len(e.Tokens)
			if len(e.Marks) > 0 && len(e.Marks) != len(e.Hashes) {
				t.Fatalf("%d marks for %d hashes", len(e.Marks), len(e.Hashes))
			}
			table.Apply(e)
		}
		// Every hash and token is at least one byte of the message.
		if hashes+tokens+len(b.Events)+b.Damaged+b.Unknown > len(payload) {
			t.Fatalf("%d hashes, %d tokens, %d events from %d bytes", hashes, tokens, len(b.Events), len(payload))
		}
		// Decoding does not depend on what was decoded before.
		var got, fresh []string
		for i := range b.Events {
			got = append(got, describe(&b.Events[i]))
		}
		c, err := NewDecoder().Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		for i := range c.Events {
			fresh = append(fresh, describe(&c.Events[i]))
		}
		if !slices.Equal(got, fresh) {
			t.Fatalf("a used decoder gives %q, a fresh one %q", got, fresh)
		}
	})
}
