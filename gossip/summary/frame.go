package summary

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"waypost/gossip/prefix"
)

const (
	// Version is the first byte of every frame; other versions are refused.
	Version = 1
	// MaxFrameBytes bounds a frame in both directions.
	MaxFrameBytes = 1 << 20
	// MaxDepthTokens bounds the depth of a named prefix. Engines serve contexts
	// well below; deeper prefixes are not announced and refused when read.
	MaxDepthTokens = 1 << 24
	// MaxKeys bounds the keys of one rank: a cache of a million blocks of 16
	// tokens names about fifty thousand.
	MaxKeys = 1 << 20
)

// ErrFrame reports a frame that is not of this format. Nothing of such a frame
// is applied.
var ErrFrame = errors.New("malformed prefix frame")

// ErrKeyID reports a frame whose keys were made with another cluster key.
var ErrKeyID = errors.New("prefix frame of another cluster key")

type frameKind uint8

const (
	kindDelta    frameKind = 1
	kindSnapshot frameKind = 2
)

// Flags of a frame, by kind.
const (
	flagClear uint8 = 1 << 0 // delta: forget everything before applying
	flagLast  uint8 = 1 << 1 // snapshot: no further part follows
)

// headerMin is the length of the shortest header: version, kind and flags,
// key id, epoch, seq, age, digest.
const headerMin = 1 + 1 + 4 + 4 + 1 + 1 + 4

const (
	keyBytes = 8
	// entryMax is the longest entry: depth step, key.
	entryMax = binary.MaxVarintLen32 + keyBytes
)

// entry is one named prefix.
type entry struct {
	key   prefix.Key
	depth uint32
	// end says that a match may end here; otherwise the prefix is resident,
	// but the engine cannot reuse exactly this much.
	end bool
}

// mix is what an entry adds to the digest of a set.
func (e entry) mix() uint32 {
	x := uint64(e.key)
	if e.end {
		x += 0x9e3779b97f4a7c15
	}
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return uint32(x)
}

// header is what stands before the body of a frame.
type header struct {
	kind   frameKind
	flags  uint8
	keyID  uint32
	epoch  uint32
	seq    uint64
	ageMs  uint64
	digest uint32 // of the whole set after the frame; of the whole snapshot
	part   uint64 // snapshot only
}

// frame is a validated frame; removes and adds alias its bytes.
type frame struct {
	header
	removes  []byte // keys
	adds     []byte // entries
	addCount int
}

func appendHeader(b []byte, h header) []byte {
	b = append(b, Version, byte(h.kind)|h.flags<<4)
	b = binary.LittleEndian.AppendUint32(b, h.keyID)
	b = binary.LittleEndian.AppendUint32(b, h.epoch)
	b = binary.AppendUvarint(b, h.seq)
	b = binary.AppendUvarint(b, h.ageMs)
	b = binary.LittleEndian.AppendUint32(b, h.digest)
	if h.kind == kindSnapshot {
		b = binary.AppendUvarint(b, h.part)
	}
	return b
}

// appendEntries appends entries, which ascend by depth.
func appendEntries(b []byte, entries []entry) []byte {
	b = binary.AppendUvarint(b, uint64(len(entries)))
	var depth uint32
	for _, e := range entries {
		step := uint64(e.depth-depth) << 1
		if !e.end {
			step |= 1
		}
		b = binary.AppendUvarint(b, step)
		b = binary.LittleEndian.AppendUint64(b, uint64(e.key))
		depth = e.depth
	}
	return b
}

func appendKeys(b []byte, keys []entry) []byte {
	b = binary.AppendUvarint(b, uint64(len(keys)))
	for _, e := range keys {
		b = binary.LittleEndian.AppendUint64(b, uint64(e.key))
	}
	return b
}

// reader reads a frame's fields; after the first failure it yields zeros.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(field, fix string) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s: %s", ErrFrame, field, fix)
	}
	r.b = nil
}

func (r *reader) uint8(field string) uint8 {
	if len(r.b) < 1 {
		r.fail(field, "cut short")
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) uint32(field string) uint32 {
	if len(r.b) < 4 {
		r.fail(field, "cut short")
		return 0
	}
	v := binary.LittleEndian.Uint32(r.b)
	r.b = r.b[4:]
	return v
}

func (r *reader) uvarint(field string) uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail(field, "no unsigned varint of at most 64 bits")
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) take(n int) []byte {
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

// parse validates a whole frame without allocating.
func parse(b []byte) (frame, error) {
	var f frame
	if len(b) > MaxFrameBytes {
		return f, fmt.Errorf("%w: %d bytes, at most %d allowed", ErrFrame, len(b), MaxFrameBytes)
	}
	r := &reader{b: b}
	if v := r.uint8("version"); r.err == nil && v != Version {
		return f, fmt.Errorf("%w: version %d, this side reads version %d", ErrFrame, v, Version)
	}
	kind := r.uint8("kind")
	f.kind, f.flags = frameKind(kind&15), kind>>4
	f.keyID = r.uint32("key id")
	f.epoch = r.uint32("epoch")
	f.seq = r.uvarint("seq")
	f.ageMs = r.uvarint("age")
	f.digest = r.uint32("digest")
	switch f.kind {
	case kindDelta:
		f.checkFlags(r, flagClear)
		f.removes = r.keys()
	case kindSnapshot:
		f.checkFlags(r, flagLast)
		f.part = r.uvarint("part")
	default:
		r.fail("kind", fmt.Sprintf("%d is none of delta (1) and snapshot (2)", f.kind))
	}
	f.adds, f.addCount = r.entries()
	if len(r.b) > 0 {
		r.fail("body", fmt.Sprintf("%d bytes too many", len(r.b)))
	}
	return f, r.err
}

func (f *frame) checkFlags(r *reader, known uint8) {
	if f.flags&^known != 0 {
		r.fail("flags", fmt.Sprintf("%#x has unknown bits", f.flags))
	}
}

// keys checks a list of keys and returns its bytes.
func (r *reader) keys() []byte {
	n := r.uvarint("removes")
	if n > uint64(len(r.b)/keyBytes) {
		r.fail("removes", "more declared than the frame holds")
		return nil
	}
	return r.take(int(n) * keyBytes)
}

// entries checks a list of entries and returns its bytes and its length.
func (r *reader) entries() ([]byte, int) {
	n := r.uvarint("adds")
	if n > uint64(len(r.b)/(1+keyBytes)) {
		r.fail("adds", "more declared than the frame holds")
		return nil, 0
	}
	start := r.b
	var depth uint64
	for range n {
		depth += r.uvarint("depth") >> 1
		if depth == 0 || depth > MaxDepthTokens {
			r.fail("depth", fmt.Sprintf("outside 1 to %d", MaxDepthTokens))
		}
		if len(r.b) < keyBytes {
			r.fail("key", "cut short")
			return nil, 0
		}
		if binary.LittleEndian.Uint64(r.take(keyBytes)) == 0 {
			r.fail("key", "0 is not a key")
		}
	}
	return start[:len(start)-len(r.b)], int(n)
}

// eachRemove calls f with the keys to remove, deep ones first as sent.
func (f *frame) eachRemove(do func(k prefix.Key)) {
	for b := f.removes; len(b) > 0; b = b[keyBytes:] {
		do(prefix.Key(binary.LittleEndian.Uint64(b)))
	}
}

// eachAdd calls f with the entries to add, shallow ones first.
func (f *frame) eachAdd(do func(e entry)) {
	var depth uint32
	for b := f.adds; len(b) > 0; {
		step, n := binary.Uvarint(b)
		depth += uint32(step >> 1)
		do(entry{
			key:   prefix.Key(binary.LittleEndian.Uint64(b[n:])),
			depth: depth,
			end:   step&1 == 0,
		})
		b = b[n+keyBytes:]
	}
}

// maxAge bounds the age read from a frame; what is older is as worthless.
const maxAge = 1000 * time.Hour

// age is how old the oldest fact in the frame was when it was built.
func (h *header) age() time.Duration {
	return time.Duration(min(h.ageMs, uint64(maxAge/time.Millisecond))) * time.Millisecond
}

// wholeMs rounds an age up to whole milliseconds; a negative one counts as 0.
func wholeMs(d time.Duration) uint64 {
	return uint64(max(d+time.Millisecond-1, 0) / time.Millisecond)
}
