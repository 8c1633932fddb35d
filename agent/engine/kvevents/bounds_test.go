package kvevents

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// A batch of the largest kind must not be kept for ever.
func TestMemoryIsGivenBack(t *testing.T) {
	payload := msgp.AppendArrayHeader(msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 2), 1), 100_000)
	for range 100_000 {
		payload = msgp.AppendArrayHeader(msgp.AppendString(msgp.AppendArrayHeader(payload, 2), "BlockRemoved"), 0)
	}
	d := NewDecoder()
	if b, err := d.Decode(payload); err != nil || len(b.Events) != 100_000 {
		t.Fatal(err, len(b.Events))
	}
	if _, err := d.Decode([]byte{0x92, 0x01, 0x90}); err != nil || cap(d.events) > 0 {
		t.Errorf("%v; %d events kept", err, cap(d.events))
	}
	// One store of as many blocks and tokens, with marks.
	payload = msgp.AppendArrayHeader(msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 2), 1), 1)
	payload = msgp.AppendString(msgp.AppendArrayHeader(payload, 6), "BlockStored")
	payload = append(msgp.AppendArrayHeader(payload, keepItems+1), make([]byte, keepItems+1)...)
	payload = append(msgp.AppendArrayHeader(msgp.AppendNil(payload), 4*keepItems+1), make([]byte, 4*keepItems+1)...)
	payload = msgp.AppendInt(msgp.AppendInt(payload, 4), 7) // of an adapter that is told by number
	if b, err := d.Decode(payload); err != nil || len(b.Events) != 1 || len(b.Events[0].Marks) != keepItems+1 {
		t.Fatal(err, len(b.Events), b.Damaged)
	}
	if _, err := d.Decode([]byte{0x92, 0x01, 0x90}); err != nil || cap(d.hashes)+cap(d.tokens)+cap(d.marks) > 0 {
		t.Errorf("%v; %d hashes, %d tokens, %d marks kept", err, cap(d.hashes), cap(d.tokens), cap(d.marks))
	}
}

// What is no text is told by lists of items; where they are fewer or more than the
// blocks, which are whose cannot be said.
func TestItems(t *testing.T) {
	type list = []any
	item := list{map[string]any{"type": "mm_key", "hash": "00ff", "start_offset": 1}}
	for _, test := range []struct {
		name  string
		items any
		want  string
	}{
		{"none", nil, ""},
		{"empty lists", list{list{}, nil}, ""},
		{"of the second block", list{list{}, item}, "-x"},
		{"of both", list{item, item}, "xx"},
		{"one list for two blocks", list{item}, "xx"},
		{"three lists for two blocks", list{nil, nil, item}, "xx"},
	} {
		e := decodedEvent(t, test.name, map[string]any{
			"type": "BlockStored", "block_hashes": list{1, 2}, "token_ids": list{1, 2}, "block_size": 1, "mm_keys": test.items,
		})
		marks := ""
		for _, m := range e.Marks {
			marks += map[bool]string{true: "x", false: "-"}[m != 0]
		}
		if marks != test.want {
			t.Errorf("%s: %q, want %q", test.name, marks, test.want)
		}
	}
}

// Salts are the callers' own texts: neither many nor long ones stay in memory,
// and the blocks of one too long to keep are nobody's.
func TestNamesAreBounded(t *testing.T) {
	d := NewDecoder()
	kept := func() (bytes int) {
		for name := range d.names {
			bytes += len(name)
		}
		return bytes
	}
	for i := range 2 * maxNames {
		salt := fmt.Sprint(i)
		if i%100 == 0 {
			salt += strings.Repeat("x", 1<<16)
		}
		payload, err := msgp.AppendIntf(nil, []any{1.0, []any{map[string]any{
			"type": "BlockStored", "block_hashes": []any{1}, "token_ids": []any{1}, "block_size": 1, "cache_salt": salt,
		}}})
		if err != nil {
			t.Fatal(err)
		}
		b, err := d.Decode(payload)
		if err != nil || len(b.Events) != 1 {
			t.Fatal(err, b)
		}
		e := b.Events[0]
		opaque := len(e.Marks) == 1 && e.Marks[0] != 0
		if long := len(salt) > maxNameBytes; opaque != long || (e.Salt == salt) == long {
			t.Fatalf("a salt of %d bytes: %d bytes are told, opaque: %v", len(salt), len(e.Salt), opaque)
		}
	}
	if len(d.names) > maxNames || kept() > maxNames*maxNameBytes {
		t.Errorf("%d names of %d bytes are kept", len(d.names), kept())
	}
}

// Texts among many tokens of many blocks cost no more than the tokens.
func TestTextsAmongManyTokens(t *testing.T) {
	const n = 300_000
	var hashes, tokens []any
	for i := range n {
		hashes, tokens = append(hashes, i), append(tokens, i&127)
	}
	tokens[n/2] = "00ff"
	payload, err := msgp.AppendIntf(nil, []any{1.0, []any{map[string]any{"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "block_size": 1}}})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan Batch)
	go func() {
		b, _ := NewDecoder().Decode(payload)
		done <- b
	}()
	select {
	case b := <-done:
		if len(b.Events) != 1 || len(b.Events[0].Marks) != n || slices.Contains(b.Events[0].Marks, 0) {
			t.Errorf("%d events, %d marks", len(b.Events), len(b.Events[0].Marks))
		}
	case <-time.After(time.Minute): // each token at each block would take hours
		t.Fatal("the batch is still being read")
	}
}
