package summary

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"

	"waypost/gossip/prefix"
)

// Result is what became of a frame.
type Result uint8

// The results of Decoder.Apply.
const (
	// Applied: the sink now equals the stream at the frame's seq.
	Applied Result = iota + 1
	// Duplicate: the frame was known already; nothing changed.
	Duplicate
	// Gap: frames are missing before this one, or its stream is a new one.
	// Nothing changed; ask for a replay from Have, or for a snapshot.
	Gap
	// Snapshotting: a part of a snapshot was taken; the sink changes when the
	// last one comes.
	Snapshotting
	// DigestMismatch: both sides disagree about the set. A delta was applied
	// nevertheless, a snapshot was not; ask for a snapshot.
	DigestMismatch
)

// String names the result.
func (r Result) String() string {
	switch r {
	case Applied:
		return "applied"
	case Duplicate:
		return "duplicate"
	case Gap:
		return "gap"
	case Snapshotting:
		return "snapshotting"
	case DigestMismatch:
		return "digest mismatch"
	}
	return "no result"
}

// FrameMemoryFactor bounds the memory of a decoder: what it keeps is at most
// this many times the bytes of the frames that built it, and 8 KiB. MaxRuns and
// MaxKeys bound it besides.
const FrameMemoryFactor = 32

// Decoder applies the stream of one rank to a sink: each frame once and in
// order. It is not safe for concurrent use.
type Decoder struct {
	sink   IndexSink
	accept []uint32 // ids of the cluster keys followed, the preferred one first; none: any
	keyID  uint32   // of the tree's keys

	tree  tree
	have  bool // tree equals the stream at (epoch, seq)
	epoch uint32
	seq   uint64
	age   time.Duration
	anew  bool   // the latest gap was of a stream that had begun anew
	ops   uint64 // applied from deltas

	building *builder
}

// NewDecoder returns a decoder that has seen nothing.
func NewDecoder(s IndexSink) *Decoder { return &Decoder{sink: s} }

// RequireKey makes the decoder refuse frames without fingerprints made with k.
func (d *Decoder) RequireKey(k prefix.ClusterKey) { d.RequireKeys(k) }

// RequireKeys makes the decoder follow one of some cluster keys: on a snapshot
// the first of them that it offers, and then the same until the stream drops
// it, or this list does. Either asks for a snapshot; what is held stays
// meanwhile.
func (d *Decoder) RequireKeys(keys ...prefix.ClusterKey) {
	d.accept = d.accept[:0]
	for _, k := range keys {
		d.accept = append(d.accept, k.IDUint32())
	}
	if !slices.Contains(d.accept, d.keyID) {
		d.have = false
	}
}

// KeyID is the id of the cluster key followed, as [prefix.ClusterKey.IDUint32]
// tells it; it means nothing before the first snapshot.
func (d *Decoder) KeyID() uint32 { return d.keyID }

// Have tells which frame of which stream the sink equals. It reports false
// before the first snapshot, after a digest mismatch and when the stream ceased
// to serve the cluster key followed: then only a snapshot helps, and what the
// sink holds is the best known meanwhile.
func (d *Decoder) Have() (epoch uint32, seq uint64, ok bool) {
	return d.epoch, d.seq, d.have
}

// Keys is the number of keys held, those of the sink; Runs that of the runs.
func (d *Decoder) Keys() int { return d.tree.keys }

// Runs is the number of runs held.
func (d *Decoder) Runs() int { return d.tree.live }

// Ops is the number of operations of deltas applied so far: runs begun,
// extended, trimmed, deleted or limited.
func (d *Decoder) Ops() uint64 { return d.ops }

// MemoryBytes is what the decoder keeps on the heap, itself not counted.
func (d *Decoder) MemoryBytes() int {
	n := d.tree.memoryBytes() + cap(d.accept)*4
	if d.building != nil {
		n += d.building.tree.memoryBytes() + cap(d.building.path)*4
	}
	return n
}

// Age is how old the oldest fact in the latest applied frame was when the frame
// was built.
func (d *Decoder) Age() time.Duration { return d.age }

// Anew says that the latest Gap was of a stream that had begun anew, not of
// frames that were lost on their way.
func (d *Decoder) Anew() bool { return d.anew }

// Apply takes the next frame. An error wraps [ErrFrame] or [ErrKeyID]; then
// nothing changed.
func (d *Decoder) Apply(b []byte) (Result, error) {
	h, body, err := parseHeader(b)
	if err != nil {
		return 0, err
	}
	at, err := d.choose(&h)
	if err != nil {
		return 0, err
	}
	if h.kind == kindSnapshot {
		return d.applySnapshot(&h, body, at)
	}
	return d.applyDelta(&h, body, at)
}

// choose finds the fingerprints to follow. A delta without those followed so
// far, but with others that would do, gives index -1.
func (d *Decoder) choose(h *header) (place, error) {
	at := place{index: -1, keys: h.keys}
	if d.have {
		at.index = h.keyIndex(d.keyID)
	}
	if h.kind == kindDelta && at.index >= 0 {
		return at, nil
	}
	if len(d.accept) == 0 {
		if h.kind == kindSnapshot && at.index < 0 {
			at.index = 0
		}
		return at, nil
	}
	for _, id := range d.accept {
		if i := h.keyIndex(id); i >= 0 {
			if h.kind == kindSnapshot {
				at.index = i
			}
			return at, nil
		}
	}
	return at, fmt.Errorf("%w: frame has key id %s, this side follows %s", ErrKeyID, idText(h.keyIDs[:h.keys]), idText(d.accept))
}

// idText shows key ids as people see them.
func idText(ids []uint32) string {
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = hex.EncodeToString(binary.LittleEndian.AppendUint32(nil, id))
	}
	return strings.Join(words, " and ")
}

func (d *Decoder) applyDelta(h *header, body []byte, at place) (Result, error) {
	continues := uint16(h.epoch) == uint16(d.epoch)
	switch {
	case d.have && continues && h.seq <= d.seq:
		return Duplicate, nil
	case at.index < 0: // the cluster key followed is not served any more
		d.have, d.anew = false, true
		return Gap, nil
	case !continues || h.seq > d.seq+1:
		d.anew = !continues
		return Gap, nil
	}
	e := newEditor(&d.tree, at, true)
	defer e.release()
	reset := h.flags&flagClear != 0
	if len(body) > 0 || reset {
		whole := d.tree
		if reset {
			d.tree.reset()
		}
		e.asked += d.tree.ask()
		e.canUndo()
		if err := e.apply(&reader{b: body}); err != nil {
			if e.undo(); reset {
				d.tree = whole
			}
			return 0, err
		}
		e.tell(d.sink, reset)
		d.ops += e.ops
	}
	d.seq, d.age = h.seq, h.age()
	if uint16(d.tree.digest) != uint16(h.digests[at.index]) {
		d.have = false
		return DigestMismatch, nil
	}
	return Applied, nil
}

func (d *Decoder) applySnapshot(h *header, body []byte, at place) (Result, error) {
	if d.have && h.epoch == d.epoch && h.seq <= d.seq && h.keyIDs[at.index] == d.keyID {
		d.building = nil
		return Duplicate, nil
	}
	if h.part == 0 {
		d.building = &builder{head: *h}
	}
	g := d.building
	if g == nil || !g.continues(h) {
		d.building, d.anew = nil, false
		return Gap, nil
	}
	if err := g.take(body, at); err != nil {
		d.building = nil
		return 0, err
	}
	if h.flags&flagLast == 0 {
		return Snapshotting, nil
	}
	d.building = nil
	if g.tree.digest != h.digests[at.index] {
		return DigestMismatch, nil
	}
	d.swap(&g.tree)
	d.keyID = h.keyIDs[at.index]
	d.have, d.epoch, d.seq, d.age = true, h.epoch, h.seq, h.age()
	return Applied, nil
}

// continues says whether a part is the next one of the same snapshot.
func (g *builder) continues(h *header) bool {
	same := g.head
	same.flags, same.ageMs, same.part = h.flags, h.ageMs, h.part
	return same == *h && h.part == g.parts
}

// swap turns the old tree into the new one at the sink by the difference only.
func (d *Decoder) swap(to *tree) {
	e := newEditor(to, place{}, true)
	defer e.release()
	e.difference(&d.tree, to)
	e.tell(d.sink, false)
	d.tree = *to
}

// Snapshot returns frames that rebuild what the decoder holds, for a coordinator
// that starts: they carry the stream's epoch and seq. It reports false when it
// does not know its position.
func (d *Decoder) Snapshot() ([][]byte, bool) {
	if !d.have {
		return nil, false
	}
	h := header{
		kind: kindSnapshot, keys: 1, keyIDs: [maxClusterKeys]uint32{d.keyID}, digests: [maxClusterKeys]uint32{d.tree.digest},
		epoch: d.epoch, seq: d.seq, ageMs: wholeMs(d.age),
	}
	return snapshotFrames(h, []*tree{&d.tree}, nil), true
}

// snapshotFrames writes a snapshot. Trees differ in their cluster key only.
func snapshotFrames(h header, trees []*tree, heat []uint64) [][]byte {
	frames := snapshotBodies(trees, heat)
	for i, body := range frames {
		h.part, h.flags = uint64(i), 0
		if i == len(frames)-1 {
			h.flags = flagLast
		}
		frames[i] = append(appendHeader(make([]byte, 0, headerMax+len(body)), h), body...)
	}
	return frames
}

// HeldKey is one key as a decoder holds it.
type HeldKey struct {
	Key         IndexKey
	DepthTokens uint32
}

// EachKey calls do for every key held, a key held twice twice. branch marks
// points at which runs fork.
func (d *Decoder) EachKey(do func(k HeldKey, x Extent, branch bool)) { d.tree.eachKey(do) }

func (t *tree) eachKey(do func(k HeldKey, x Extent, branch bool)) {
	var ms []mark
	for i := range t.runs {
		r := &t.runs[i]
		if r.end() == 0 {
			continue
		}
		ms = t.marks(r, r.start(), ms[:0])
		for _, m := range ms {
			do(HeldKey{m.key, m.depth}, t.extent(uint32(i), m.depth), m.branch)
		}
	}
}
