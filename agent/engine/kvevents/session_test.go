package kvevents

import (
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

// A store says whose it is where the request named itself. What is no name of
// ours is none, and costs the event nothing.
func TestSessionsOfStores(t *testing.T) {
	text := func(s string) func([]byte) []byte { return func(b []byte) []byte { return msgp.AppendString(b, s) } }
	for _, c := range []struct {
		name  string
		value func([]byte) []byte // nil: no such field
		want  string
	}{
		{"none", nil, ""},
		{"null", msgp.AppendNil, ""},
		{"a name", text("sess-1"), "sess-1"},
		{"the longest", text(strings.Repeat("x", maxSession)), strings.Repeat("x", maxSession)},
		{"too long", text(strings.Repeat("x", maxSession+1)), ""},
		{"a number", func(b []byte) []byte { return msgp.AppendInt(b, 7) }, ""},
		{"a list", func(b []byte) []byte { return msgp.AppendString(msgp.AppendArrayHeader(b, 1), "x") }, ""},
	} {
		fields := uint32(5)
		if c.value != nil {
			fields++
		}
		b := msgp.AppendArrayHeader(nil, 3)
		b = msgp.AppendArrayHeader(msgp.AppendFloat64(b, 1), 1)
		b = msgp.AppendMapHeader(b, fields)
		b = msgp.AppendString(msgp.AppendString(b, "type"), "BlockStored")
		b = msgp.AppendUint64(msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), 1), 7)
		b = msgp.AppendNil(msgp.AppendString(b, "parent_block_hash"))
		b = msgp.AppendInt(msgp.AppendInt(msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), 2), 1), 2)
		b = msgp.AppendInt(msgp.AppendString(b, "block_size"), 2)
		if c.value != nil {
			b = c.value(msgp.AppendString(b, "session_id"))
		}
		b = msgp.AppendInt(b, 0)
		d := NewDecoder()
		got, err := d.Decode(b)
		if err != nil || len(got.Events) != 1 || got.Damaged != 0 {
			t.Errorf("%s: %+v, %v", c.name, got, err)
			continue
		}
		if e := got.Events[0]; e.Session != c.want || len(e.Tokens) != 2 {
			t.Errorf("%s: session %q, want %q; %d tokens", c.name, e.Session, c.want, len(e.Tokens))
		}
	}
}
