package summary

import (
	"math/bits"
	"slices"
	"sync"
	"unsafe"

	"waypost/gossip/prefix"
)

// tree is what the stream has told of one rank: runs, each with the
// fingerprints of its checkpoints and known points under one cluster key. Both
// ends keep it by the same rules. A coordinator has one for each of a thousand
// workers, so it is packed: a run is 24 bytes, a checkpoint 2, a point 6.
type tree struct {
	runs   []run    // by number; number 0 stands for the root
	used   []uint64 // bitmap of numbers
	free   int      // no word of used before this one has a free number
	live   int      // runs, the root not counted
	keys   int      // checkpoints and points
	words  []uint16 // fingerprints of all runs
	dead   int      // words that belong to no run
	digest uint32
	limits map[uint32]*limit // runs that are not wholly usable in GPU memory
}

// run is a stretch of one prefix that nothing forks off, but for children that
// hang on points of it.
type run struct {
	baseLow, baseHigh uint32 // halves of an index key, see base
	at                uint32 // of its first word: checkpoints, then points
	startPoints       uint32 // start << depthShift | points
	endAt             uint32 // end
	parent            uint16 // number of the run it hangs on, 0: the root
	children          uint16
}

// depthShift leaves room for a small number beside a depth.
const (
	depthShift = 8
	countMask  = 1<<depthShift - 1
)

// maxPoints is the number of known points of a run; the shallowest makes room.
const maxPoints = countMask

// newRun is an empty run.
func newRun(base IndexKey, parent, start uint32) run {
	return run{
		baseLow: uint32(base), baseHigh: uint32(base >> 32), parent: uint16(parent),
		startPoints: start << depthShift, endAt: start,
	}
}

// base is the key of the last checkpoint at or before start; 0: none.
func (r *run) base() IndexKey { return IndexKey(r.baseLow) | IndexKey(r.baseHigh)<<32 }

// start is the depth in tokens at which the run leaves its parent.
func (r *run) start() uint32 { return r.startPoints >> depthShift }

// end is the depth in tokens at which it ends; 0: the number is free.
func (r *run) end() uint32 { return r.endAt }

// points is the number of its points.
func (r *run) points() uint32 { return r.startPoints & countMask }

func (r *run) setEnd(depth uint32) { r.endAt = depth }

// point is a known end between checkpoints.
type point struct {
	depth       uint32
	fingerprint uint32
	branch      bool // a run hangs or hung on it
}

// Layout of the three words of a point: 23 bits depth, 1 bit branch, 24 bits
// fingerprint, of which those after the first checkpoint use 16.
const (
	pointWords      = 3
	pointDepthShift = 9
	pointBranchBit  = 1 << 8
)

func appendPoint(w []uint16, p point) []uint16 {
	v := p.depth<<pointDepthShift | p.fingerprint>>16
	if p.branch {
		v |= pointBranchBit
	}
	return append(w, uint16(v), uint16(v>>16), uint16(p.fingerprint))
}

// readPoint reads the point at the start of w.
func readPoint(w []uint16) point {
	v := uint32(w[0]) | uint32(w[1])<<16
	return point{depth: v >> pointDepthShift, fingerprint: v&0xff<<16 | uint32(w[2]), branch: v&pointBranchBit != 0}
}

// checkpoints is the number of checkpoints of a run.
func (r *run) checkpoints() uint32 {
	return r.end()/prefix.ChunkTokens - r.start()/prefix.ChunkTokens
}

// hasFirst says whether the first checkpoint of the prefix lies in the run; its
// fingerprint takes two words.
func (r *run) hasFirst() bool {
	return r.start() < prefix.ChunkTokens && r.end() >= prefix.ChunkTokens
}

func (r *run) checkpointWords() uint32 {
	if r.hasFirst() {
		return r.checkpoints() + 1
	}
	return r.checkpoints()
}

func (r *run) words() uint32 {
	return r.checkpointWords() + pointWords*r.points()
}

// nextCheckpoint is the depth of the first checkpoint after a depth.
func nextCheckpoint(depth uint32) uint32 {
	return (depth/prefix.ChunkTokens + 1) * prefix.ChunkTokens
}

// has says whether a number names a run.
func (t *tree) has(n uint32) bool { return n != 0 && int(n) < len(t.runs) && t.runs[n].end() != 0 }

// limitOn returns what limits a run; nil: nothing.
func (t *tree) limitOn(n uint32) *limit {
	if len(t.limits) == 0 {
		return nil
	}
	return t.limits[n]
}

// wordsOf returns the words of a run.
func (t *tree) wordsOf(r *run) []uint16 { return t.words[r.at : r.at+r.words()] }

// take gives out the smallest free number.
func (t *tree) take() uint32 {
	if len(t.runs) == 0 {
		t.runs = growRuns(t.runs, 1)
		t.used = append(t.used, 1)
	}
	for ; t.free < len(t.used); t.free++ {
		if w := t.used[t.free]; w != ^uint64(0) {
			break
		}
	}
	if t.free == len(t.used) {
		t.used = append(t.used, 0)
	}
	n := uint32(t.free*64 + bits.TrailingZeros64(^t.used[t.free]))
	t.mark(n)
	return n
}

// mark takes a certain number, which is free.
func (t *tree) mark(n uint32) {
	for int(n/64) >= len(t.used) {
		t.used = append(t.used, 0)
	}
	if len(t.runs) <= int(n) {
		t.runs = growRuns(t.runs, int(n)+1)
	}
	t.used[0] |= 1
	t.used[n/64] |= 1 << (n % 64)
	t.live++
}

// give takes a number back.
func (t *tree) give(n uint32) {
	r := &t.runs[n]
	t.dead += int(r.words())
	if r.parent != 0 {
		t.runs[r.parent].children--
	}
	if l := t.limitOn(n); l != nil {
		t.digest -= l.mix(n)
		delete(t.limits, n)
	}
	*r = run{}
	t.used[n/64] &^= 1 << (n % 64)
	t.free = min(t.free, int(n/64))
	t.live--
	for last := len(t.runs) - 1; last > 0 && t.runs[last].end() == 0; last-- {
		t.runs = t.runs[:last]
	}
	if cap(t.runs) > len(t.runs)+len(t.runs)/8+16 {
		t.runs = growRuns(t.runs[:len(t.runs):len(t.runs)], len(t.runs)+1)[:len(t.runs)]
	}
	t.pack()
}

// growRuns makes room for n runs with little slack.
func growRuns(s []run, n int) []run {
	if n <= cap(s) {
		return s[:n]
	}
	out := append(slices.Grow([]run(nil), n+n/64), s...) // the allocator rounds up
	return out[:n]
}

// slots is one more than the highest number in use.
func (t *tree) slots() int { return len(t.runs) }

// store replaces the words of a run whose fields already say what w holds; old
// is the number of words it had.
func (t *tree) store(r *run, w []uint16, old uint32) {
	n := uint32(len(w))
	switch {
	case n <= old:
		copy(t.words[r.at:], w)
		t.dead += int(old - n)
	case old > 0 && int(r.at+old) == len(t.words):
		t.words = append(growWords(t.words, int(n-old)), w[old:]...)
		copy(t.words[r.at:], w[:old])
	default:
		t.dead += int(old)
		if len(t.words)+int(n) > cap(t.words) && t.dead > 32+len(t.words)/8 {
			t.repack(r)
		}
		t.words = growWords(t.words, int(n))
		r.at = uint32(len(t.words))
		t.words = append(t.words, w...)
	}
	t.pack()
}

func growWords(w []uint16, more int) []uint16 {
	need := len(w) + more
	if need <= cap(w) {
		return w
	}
	return append(slices.Grow([]uint16(nil), need+need/8), w...) // the allocator rounds up
}

// packRoom lends room to copy words to while they are packed.
var packRoom = sync.Pool{New: func() any { return new([]uint16) }}

// pack drops dead words when they are a quarter of all.
func (t *tree) pack() {
	if t.dead > 32+len(t.words)/4 {
		t.repack(nil)
	}
}

// repack drops dead words, and those of a run that are about to be replaced. It
// keeps the memory unless a third of it would be free: with less room a tree in
// steady use is moved with nearly each frame, a twelfth of what applying it takes.
func (t *tree) repack(without *run) {
	room := packRoom.Get().(*[]uint16)
	defer packRoom.Put(room)
	*room = append((*room)[:0], t.words...)
	live := len(t.words) - t.dead
	packed := t.words[:0]
	if cap(t.words) > live+live/2+64 {
		packed = slices.Grow([]uint16(nil), live+live/8+16)
	}
	for i := range t.runs {
		if r := &t.runs[i]; r.end() != 0 && r != without {
			w := (*room)[r.at : r.at+r.words()]
			r.at = uint32(len(packed))
			packed = append(packed, w...)
		}
	}
	t.words, t.dead = packed, 0
}

// reset forgets all runs.
func (t *tree) reset() { *t = tree{} }

// ask brings the tree into the caches in one go, for a frame that is about to
// change it here and there. With a thousand trees in turn nothing of one is left
// there from its frame before, and each operation would wait a few times.
func (t *tree) ask() (sum uint32) {
	const line = 64 // bytes
	for i := 0; i < len(t.runs); i += line / int(unsafe.Sizeof(run{})) {
		sum += t.runs[i].at
	}
	for i := 0; i < len(t.words); i += line / 2 {
		sum += uint32(t.words[i])
	}
	return sum
}

// copyTo makes dst equal to t, reusing its memory.
func (t *tree) copyTo(dst *tree) {
	runs, used, words := dst.runs, dst.used, dst.words
	*dst = *t
	dst.runs = append(runs[:0], t.runs...)
	dst.used = append(used[:0], t.used...)
	dst.words = append(words[:0], t.words...)
	dst.limits = nil
	if len(t.limits) > 0 {
		dst.limits = make(map[uint32]*limit, len(t.limits))
		for n, l := range t.limits {
			dst.limits[n] = l // limits are replaced, never changed
		}
	}
}

// memoryBytes is what the tree occupies, free room included.
func (t *tree) memoryBytes() int {
	n := cap(t.runs)*int(unsafe.Sizeof(run{})) + cap(t.used)*8 + cap(t.words)*2
	for _, l := range t.limits {
		n += limitBytes + cap(l.spans)*int(unsafe.Sizeof(span{}))
	}
	return n
}

// mark is one key of a run.
type mark struct {
	key, before IndexKey // before: of the checkpoint that precedes it
	depth       uint32
	branch      bool
}

// marks appends the keys of a run deeper than from, shallow first.
func (t *tree) marks(r *run, from uint32, dst []mark) []mark {
	w := t.wordsOf(r)
	pts := w[r.checkpointWords():]
	before, next := r.base(), nextCheckpoint(r.start())
	for left := r.points(); left > 0; {
		p := readPoint(pts)
		for ; next < p.depth; next += prefix.ChunkTokens {
			before, w, dst = t.checkpoint(before, next, from, w, dst)
		}
		if p.depth > from {
			dst = append(dst, mark{key: chain(before, p.depth, p.fingerprint), before: before, depth: p.depth, branch: p.branch})
		}
		pts = pts[pointWords:]
		left--
	}
	for ; next <= r.end(); next += prefix.ChunkTokens {
		before, w, dst = t.checkpoint(before, next, from, w, dst)
	}
	return dst
}

// checkpoint reads the checkpoint at the start of w.
func (t *tree) checkpoint(before IndexKey, depth, from uint32, w []uint16, dst []mark) (IndexKey, []uint16, []mark) {
	fp, w := readCheckpoint(w, depth)
	k := chain(before, depth, fp)
	if depth > from {
		dst = append(dst, mark{key: k, before: before, depth: depth})
	}
	return k, w, dst
}

func readCheckpoint(w []uint16, depth uint32) (fingerprint uint32, rest []uint16) {
	if depth == prefix.ChunkTokens {
		return uint32(w[0]) | uint32(w[1])<<16, w[2:]
	}
	return uint32(w[0]), w[1:]
}

func appendCheckpoint(w []uint16, depth, fingerprint uint32) []uint16 {
	w = append(w, uint16(fingerprint))
	if depth == prefix.ChunkTokens {
		w = append(w, uint16(fingerprint>>16))
	}
	return w
}

// keyAt is the index key of the last checkpoint of a run at or before a depth.
func (t *tree) keyAt(r *run, depth uint32) IndexKey {
	w := t.wordsOf(r)
	k := r.base()
	for d := nextCheckpoint(r.start()); d <= depth; d += prefix.ChunkTokens {
		var fp uint32
		fp, w = readCheckpoint(w, d)
		k = chain(k, d, fp)
	}
	return k
}

// points appends the points of a run, shallow first.
func (t *tree) points(r *run, dst []point) []point {
	w := t.wordsOf(r)[r.checkpointWords():]
	for range r.points() {
		dst = append(dst, readPoint(w))
		w = w[pointWords:]
	}
	return dst
}

// knows says whether an end within a run has a name: it is a checkpoint or a
// known point.
func (t *tree) knows(r *run, depth uint32) bool {
	if isCheckpoint(depth) {
		return true
	}
	w := t.wordsOf(r)[r.checkpointWords():]
	for range r.points() {
		p := readPoint(w)
		if p.depth >= depth {
			return p.depth == depth
		}
		w = w[pointWords:]
	}
	return false
}

// mix is what a key adds to the digest.
func (k IndexKey) mix() uint32 { return mix32(uint64(k)) }

// mix32 is half of the 64-bit finaliser of MurmurHash3.
func mix32(x uint64) uint32 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return uint32(x)
}
