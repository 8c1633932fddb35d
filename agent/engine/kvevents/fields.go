package kvevents

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"slices"

	"waypost/agent/blocktable"

	"github.com/zeebo/xxh3"
)

// raw passes over one value of an event and gives its bytes, nil for null.
func (c *cursor) raw() ([]byte, bool) {
	start := c.i
	if c.null() {
		return nil, true
	}
	ok := c.skip()
	return c.b[start:c.i], ok
}

// name reads null as "", or a string, which is kept for the next time unless it
// is too long: then it is in f.nameless.
func (d *Decoder) name(c *cursor, f *fields) (string, bool) {
	if c.null() {
		return "", true
	}
	v, ok := c.text()
	if !ok {
		return "", false
	}
	if len(v) > maxNameBytes {
		f.nameless = markOf(v, f.nameless)
		return "", true
	}
	return d.intern(v), true
}

// maxSession bounds the name of a session: one of ours is shorter.
const maxSession = 64

// readSession reads the name that a request gave itself. Each request has
// another one, so they are not kept; what is no name of ours is none.
func readSession(c *cursor) (string, bool) {
	start := c.i
	if v, ok := c.text(); ok && len(v) <= maxSession {
		return string(v), true
	}
	c.i = start
	return "", c.skip()
}

func (d *Decoder) intern(v []byte) string {
	if s, ok := d.names[string(v)]; ok {
		return s
	}
	if len(d.names) >= maxNames {
		clear(d.names)
	}
	s := string(v)
	d.names[s] = s
	return s
}

// readExtra tells salt and marks from the extra keys: null, or one entry per
// hash, each null or [adapter?, items..., salt?, digests...] with the salt at
// the first block of a prompt only. Names are bare strings, so the adapter is
// known by the event's own field and the salt by its place; an old release's
// bare item at the first block passes for a salt, which matches no other
// prompt either. Keys that say what they are count as what they say.
func (d *Decoder) readExtra(raw []byte, e *blocktable.Event) bool {
	c := cursor{b: raw}
	n, ok := c.array()
	if !ok {
		return false
	}
	var all uint64
	for i := range n {
		if c.null() {
			continue
		}
		m, ok := c.array()
		if !ok {
			return false
		}
		var mark uint64
		var salt []byte
		adapter := e.Adapter != ""
		for range m {
			start := c.i
			if !c.skip() {
				return false
			}
			item := cursor{b: raw[start:c.i]}
			text, isText := item.text()
			if h := raw[start]; h >= 0xc4 && h <= 0xc6 {
				isText = false // bytes
			}
			switch kind, named := taggedKey(raw[start:c.i]); {
			case kind == "cache_salt":
				if i == 0 && !e.HasParent {
					salt = named
				}
			case kind == "lora" && adapter && string(named) == e.Adapter:
				adapter = false
			case isText && adapter && string(text) == e.Adapter:
				adapter = false
			case isText && i == 0 && !e.HasParent:
				if salt != nil {
					mark = markOf(salt, mark)
				}
				salt = text
			default:
				mark = markOf(raw[start:c.i], mark)
			}
		}
		switch {
		case len(salt) > maxNameBytes:
			mark = markOf(salt, mark)
		case salt != nil:
			e.Salt = d.intern(salt)
		}
		if mark != 0 {
			d.mark(e, i, mark)
			all = mark
		}
	}
	if all != 0 && n != len(e.Hashes) {
		d.markAll(e, all) // which entry is whose cannot be said
	}
	return true
}

// taggedKey reads an extra key that says what it is, as the hashes have it and
// events may: the name of its kind and the text behind it. An item of a picture
// has a number there.
func taggedKey(item []byte) (kind string, named []byte) {
	c := cursor{b: item}
	if n, ok := c.array(); !ok || n < 2 {
		return "", nil
	}
	tag, ok := c.text()
	if !ok {
		return "", nil
	}
	if named, ok = c.text(); !ok {
		return "", nil
	}
	switch string(tag) {
	case "cache_salt":
		return "cache_salt", named
	case "lora":
		return "lora", named
	}
	return "", nil
}

func markOf(item []byte, seed uint64) uint64 {
	return xxh3.HashSeed(item, seed) | 1
}

// mark sets the mark of one hash of the event.
func (d *Decoder) mark(e *blocktable.Event, i int, mark uint64) {
	if len(e.Marks) == 0 {
		start := len(d.marks)
		d.marks = slices.Grow(d.marks, len(e.Hashes))[:start+len(e.Hashes)]
		e.Marks = d.marks[start:]
		clear(e.Marks)
	}
	if i < len(e.Marks) {
		e.Marks[i] = mark
	}
}

func (d *Decoder) markAll(e *blocktable.Event, mark uint64) {
	for i := range e.Hashes {
		d.mark(e, i, mark|1)
	}
}

// readHash reads a hash: an integer's 64 bits, or the last 8 bytes of a digest,
// which are the integer form of the same digest.
func readHash(c *cursor) (uint64, bool) {
	if v, _, ok := c.integer(); ok {
		return v, true
	}
	isText := c.peek()&0xe0 == 0xa0 || c.peek() >= 0xd9 && c.peek() <= 0xdb
	v, ok := c.text()
	if !ok || len(v) < 8 {
		return 0, false
	}
	if isText {
		return TextHash(v), true
	}
	return binary.BigEndian.Uint64(v[len(v)-8:]), true
}

// TextHash is the handle of a hash that is told as text: the first 8 bytes of
// hexadecimal digits, as the engines that write them shorten them, or a
// checksum of any other text.
func TextHash(v []byte) uint64 {
	var out [8]byte
	if len(v) >= 16 {
		if n, err := hex.Decode(out[:], v[:16]); err == nil && n == 8 {
			return binary.BigEndian.Uint64(out[:])
		}
	}
	return xxh3.Hash(v)
}

func (d *Decoder) readHashes(c *cursor) ([]uint64, bool) {
	n, ok := c.array()
	if !ok || len(d.hashes)+n > maxBatchHashes {
		return nil, false
	}
	start := len(d.hashes)
	d.hashes = slices.Grow(d.hashes, n)[:start+n]
	out := d.hashes[start:]
	b, at := c.b, c.i
	for k := range out {
		if at+9 <= len(b) && b[at] == 0xcf {
			out[k] = binary.BigEndian.Uint64(b[at+1:])
			at += 9
			continue
		}
		c.i = at
		if out[k], ok = readHash(c); !ok {
			return nil, false
		}
		at = c.i
	}
	c.i = at
	return out, true
}

// readTokens is the hot loop: most of a batch's bytes are tokens. A pair is a
// token with the one behind it, of which the first counts; a text stands for an
// item that is no text, and texts says that there were some.
func (d *Decoder) readTokens(c *cursor) (tokens []uint32, texts, ok bool) {
	n, ok := c.array()
	if !ok || len(d.tokens)+n > maxBatchTokens {
		return nil, false, false
	}
	start := len(d.tokens)
	d.tokens = slices.Grow(d.tokens, n)[:start+n]
	out := d.tokens[start:]
	b, at := c.b, c.i
	for k := range out {
		if at+5 <= len(b) {
			p := b[at : at+5 : at+5]
			switch h := p[0]; {
			case h == 0xcd:
				out[k] = uint32(p[1])<<8 | uint32(p[2])
				at += 3
				continue
			case h == 0xce:
				out[k] = binary.BigEndian.Uint32(p[1:])
				at += 5
				continue
			case h < 0x80:
				out[k] = uint32(h)
				at++
				continue
			}
		}
		c.i = at
		text := false
		if out[k], text, ok = oddToken(c); !ok {
			return nil, false, false
		}
		texts = texts || text
		at = c.i
	}
	c.i = at
	return out, texts, true
}

// oddToken reads a token of any form.
func oddToken(c *cursor) (token uint32, text, ok bool) {
	start := c.i
	if n, pair := c.array(); pair && n == 2 {
		if token, text, ok = plainToken(c); !ok {
			return 0, false, false
		}
		return token, text, c.skip()
	}
	c.i = start
	return plainToken(c)
}

func plainToken(c *cursor) (token uint32, text, ok bool) {
	if v, negative, ok := c.integer(); ok {
		return uint32(v), false, !negative && v <= 1<<32-1
	}
	v, ok := c.text()
	return uint32(xxh3.Hash(v)), true, ok
}

// readItems marks the blocks that hold items other than text: a list with, for
// each hash, null or a list of them.
func (d *Decoder) readItems(raw []byte, e *blocktable.Event) bool {
	c := cursor{b: raw}
	n, ok := c.array()
	if !ok {
		return false
	}
	var all uint64
	for i := range n {
		start := c.i
		if !c.skip() {
			return false
		}
		of := cursor{b: raw[start:c.i]}
		if m, list := of.array(); of.null() || list && m == 0 {
			continue
		}
		all = markOf(raw[start:c.i], all)
		d.mark(e, i, all)
	}
	if all != 0 && n != len(e.Hashes) {
		d.markAll(e, all)
	}
	return true
}

// readMedium reads where a copy is held. Devices by their own names, "cuda:0", are
// those of a cache beside the engine's; other names that nobody knows tell nothing.
func readMedium(c *cursor) (blocktable.Medium, bool) {
	v, ok := c.text()
	if !ok {
		return 0, false
	}
	var upper [10]byte
	if len(v) > len(upper) {
		return blocktable.MediumUnknown, true
	}
	for i, x := range v {
		if x >= 'a' && x <= 'z' {
			x -= 'a' - 'A'
		}
		upper[i] = x
	}
	switch string(upper[:len(v)]) {
	case "GPU":
		return blocktable.MediumGPU, true
	case "CPU", "CPU_PINNED":
		return blocktable.MediumCPU, true
	case "STORAGE", "FS", "OBJ", "DISK":
		return blocktable.MediumDisk, true
	case "EXTERNAL":
		return blocktable.MediumExternal, true
	}
	if bytes.IndexByte(v, ':') > 0 {
		return blocktable.MediumExternal, true
	}
	return blocktable.MediumUnknown, true
}

func readSpec(c *cursor) (blocktable.Spec, bool) {
	if c.null() {
		return blocktable.SpecUnknown, true
	}
	v, ok := c.text()
	if !ok {
		return 0, false
	}
	switch string(v) {
	case "full_attention":
		return blocktable.SpecFull, true
	case "mla_attention":
		return blocktable.SpecMLA, true
	case "sink_full_attention":
		return blocktable.SpecSinkFull, true
	case "sliding_window":
		return blocktable.SpecSlidingWindow, true
	case "sliding_window_mla":
		return blocktable.SpecSlidingWindowMLA, true
	case "mamba":
		return blocktable.SpecMamba, true
	case "chunked_local_attention":
		return blocktable.SpecChunkedLocal, true
	case "encoder_only_attention":
		return blocktable.SpecEncoderOnly, true
	case "cross_attention":
		return blocktable.SpecCrossAttention, true
	}
	return blocktable.SpecUnknown, true
}
