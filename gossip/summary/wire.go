package summary

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"waypost/gossip/prefix"
)

const (
	// Version is the frame format written, and OldestVersion the oldest one
	// read. The version stands first in every frame and in the hello of a lane.
	Version       = 1
	OldestVersion = 1
	// MaxFrameBytes bounds a frame in both directions.
	MaxFrameBytes = 1 << 20
	// MaxDepthTokens bounds the depth of a named prefix. Engines serve contexts
	// below; deeper prefixes are not announced and refused when read.
	MaxDepthTokens = 1<<23 - 1
	// MaxRuns bounds the runs of one rank, MaxKeys their checkpoints and points:
	// a cache of a million blocks of 16 tokens has about five thousand runs and
	// fifty thousand keys.
	MaxRuns = 1<<16 - 1
	MaxKeys = 1 << 20
)

// ErrFrame reports a frame that is not of this format or does not fit the state
// it is meant for. Nothing of such a frame is applied.
var ErrFrame = errors.New("malformed prefix frame")

// ErrKeyID reports a frame whose fingerprints were made with other cluster keys.
var ErrKeyID = errors.New("prefix frame of another cluster key")

type frameKind uint8

// Kinds of frames. 3 is not used: what the design calls LOAD travels beside.
const (
	kindDelta    frameKind = 1
	kindSnapshot frameKind = 2
)

// Flags of a frame, by kind.
const (
	flagClear   uint8 = 1 << 0 // delta: forget everything before applying
	flagLast    uint8 = 1 << 1 // snapshot: no further part follows
	flagTwoKeys uint8 = 1 << 3 // every fingerprint stands twice, for two cluster keys
)

// maxClusterKeys is the number of cluster keys that a frame can serve at once.
const maxClusterKeys = 2

// header is what stands before the body of a frame. A delta has only the low two
// bytes of epoch and digests: it continues what its reader has in full, one
// comes each second, and the other bytes were 2 % of a stream.
type header struct {
	kind    frameKind
	flags   uint8
	keys    int // cluster keys served, 1 or 2
	keyIDs  [maxClusterKeys]uint32
	epoch   uint32
	seq     uint64
	ageMs   uint64
	digests [maxClusterKeys]uint32
	part    uint64 // of a snapshot
}

// headerMax is the length of the longest header.
const headerMax = 2 + maxClusterKeys*8 + 4 + 3*binary.MaxVarintLen64

func appendHeader(b []byte, h header) []byte {
	flags := h.flags
	if h.keys == 2 {
		flags |= flagTwoKeys
	}
	b = append(b, Version, byte(h.kind)|flags<<4)
	for _, id := range h.keyIDs[:h.keys] {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	part := binary.LittleEndian.AppendUint32
	if h.kind == kindDelta {
		part = func(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint16(b, uint16(v)) }
	}
	b = part(b, h.epoch)
	b = binary.AppendUvarint(b, h.seq)
	b = binary.AppendUvarint(b, h.ageMs)
	for _, d := range h.digests[:h.keys] {
		b = part(b, d)
	}
	if h.kind == kindSnapshot {
		b = binary.AppendUvarint(b, h.part)
	}
	return b
}

// parseHeader reads the header of a frame and returns the body.
func parseHeader(b []byte) (h header, body []byte, err error) {
	if len(b) > MaxFrameBytes {
		return h, nil, fmt.Errorf("%w: %d bytes, at most %d allowed", ErrFrame, len(b), MaxFrameBytes)
	}
	r := reader{b: b}
	if v := r.uint8("version"); r.err == nil && (v < OldestVersion || v > Version) {
		return h, nil, fmt.Errorf("%w: version %d, this side reads versions %d to %d", ErrFrame, v, OldestVersion, Version)
	}
	kind := r.uint8("kind")
	h.kind, h.flags = frameKind(kind&15), kind>>4
	if r.err == nil && h.kind != kindDelta && h.kind != kindSnapshot {
		r.fail("kind", fmt.Sprintf("%d is none of delta (1) and snapshot (2)", h.kind))
		return h, nil, r.err
	}
	h.keys = 1
	if h.flags&flagTwoKeys != 0 {
		h.keys, h.flags = 2, h.flags&^flagTwoKeys
	}
	for i := range h.keyIDs[:h.keys] {
		h.keyIDs[i] = r.uint32("key id")
	}
	part := r.uint32
	if h.kind == kindDelta {
		part = r.uint16
	}
	h.epoch = part("epoch")
	h.seq = r.uvarint("seq")
	h.ageMs = r.uvarint("age")
	for i := range h.digests[:h.keys] {
		h.digests[i] = part("digest")
	}
	allowed := flagClear
	if h.kind == kindSnapshot {
		allowed = flagLast
		h.part = r.uvarint("part")
	}
	if h.flags&^allowed != 0 {
		r.fail("flags", fmt.Sprintf("%#x has unknown bits", h.flags))
	}
	return h, r.b, r.err
}

// IsSnapshot says whether a frame is a part of a snapshot rather than a delta.
func IsSnapshot(frame []byte) bool {
	return len(frame) > 1 && frameKind(frame[1]&15) == kindSnapshot
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

// keyIndex tells which of the frame's cluster keys has an id; -1: none.
func (h *header) keyIndex(id uint32) int {
	for i, have := range h.keyIDs[:h.keys] {
		if have == id {
			return i
		}
	}
	return -1
}

// reader takes a frame apart. After the first failure it yields zeros.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(field, what string) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s: %s", ErrFrame, field, what)
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

func (r *reader) uint16(field string) uint32 {
	if len(r.b) < 2 {
		r.fail(field, "cut short")
		return 0
	}
	v := binary.LittleEndian.Uint16(r.b)
	r.b = r.b[2:]
	return uint32(v)
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
	if len(r.b) > 0 && r.b[0] < 0x80 {
		v := r.b[0]
		r.b = r.b[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(r.b)
	if n <= 0 {
		r.fail(field, "no unsigned varint of at most 64 bits")
		return 0
	}
	r.b = r.b[n:]
	return v
}

// bounded reads a number that must be at most limit.
func (r *reader) bounded(field string, limit uint64) uint32 {
	v := r.uvarint(field)
	if v > limit {
		r.fail(field, fmt.Sprintf("%d, at most %d allowed", v, limit))
		return 0
	}
	return uint32(v)
}

// length reads a number of tokens: even codes count units of 16, odd ones tokens.
func (r *reader) length(field string) uint32 {
	return lengthOf(r.bounded(field, MaxDepthTokens<<1|1), r, field)
}

// lengthOf decodes a length code.
func lengthOf(code uint32, r *reader, field string) uint32 {
	n := code >> 1
	if code&1 == 0 {
		n *= lengthUnit
	}
	if n > MaxDepthTokens {
		r.fail(field, fmt.Sprintf("%d tokens, at most %d allowed", n, MaxDepthTokens))
		return 0
	}
	return n
}

// lengthUnit is the block size, in tokens, that length codes favour.
const lengthUnit = 16

func lengthCode(tokens uint32) uint64 {
	if tokens%lengthUnit == 0 {
		return uint64(tokens / lengthUnit << 1)
	}
	return uint64(tokens)<<1 | 1
}

func appendLength(b []byte, tokens uint32) []byte {
	return binary.AppendUvarint(b, lengthCode(tokens))
}

// place says which of the cluster keys of a frame a side follows.
type place struct{ index, keys int }

// fingerprint reads a fingerprint of some bytes, which stands once per cluster
// key, and returns the one of the key that is followed.
func (r *reader) fingerprint(bytes int, at place) uint32 {
	if len(r.b) < bytes*at.keys {
		r.fail("fingerprint", "cut short")
		return 0
	}
	var v uint32
	for i, c := range r.b[at.index*bytes:][:bytes] {
		v |= uint32(c) << (8 * i)
	}
	r.b = r.b[bytes*at.keys:]
	return v
}

func appendFingerprint(b []byte, v uint32, bytes int) []byte {
	for range bytes {
		b = append(b, byte(v))
		v >>= 8
	}
	return b
}

// Bytes of the fingerprints on the wire. What precedes the first checkpoint of
// a prefix has no chain to lean on and gets more.
func checkpointBytes(depth uint32) int {
	if depth <= prefix.ChunkTokens {
		return firstCheckpointBits / 8
	}
	return checkpointBits / 8
}

func pointBytes(depth uint32) int {
	if depth < prefix.ChunkTokens {
		return firstPointBits / 8
	}
	return pointBits / 8
}

// markBytes is the length of the fingerprint of any depth.
func markBytes(depth uint32) int {
	if isCheckpoint(depth) {
		return checkpointBytes(depth)
	}
	return pointBytes(depth)
}

func isCheckpoint(depth uint32) bool { return depth%prefix.ChunkTokens == 0 }

// fingerprintOf takes the top bits of a key that stand for it at a depth.
func fingerprintOf(k prefix.Key, depth uint32) uint32 {
	return uint32(k >> (64 - 8*markBytes(depth)))
}
