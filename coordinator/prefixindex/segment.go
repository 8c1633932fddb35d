package prefixindex

import (
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"
	"unsafe"
)

// segment is a small open-addressed hash table of 64-bit words. One writer
// changes it while readers look into it: a reader notes seq, reads, and starts
// again if seq is odd or has changed (a sequence lock). Nothing a reader can see
// in between leads out of bounds, and all words are read and written atomically.
//
// Slots stand in buckets, one of which is a line of the processor's caches where a
// slot is one word: most of what is looked for, added or removed then needs one
// line. A slot stands anywhere in the bucket where it belongs, or in a later one if
// those before are full. It is a head, 0 if the slot is free, whose upper tagBits
// say where the slot belongs, and stride-1 words more. Those of a bucket stand
// behind its heads.
//
// Segments lie side by side in a table and are kept small, so that those of a
// large table stay in a cache close to the core.
type segment struct {
	seq    atomic.Uint32
	slots  atomic.Uint32
	first  atomic.Pointer[uint64] // of slots*stride words; nil: no slots
	stride uint16
	held   bool   // the writer's: a change goes on until letGo
	used   uint32 // the writer's
}

const (
	tagBits  = 28
	tagShift = 64 - tagBits
)

// bucketSlots is the number of slots of a bucket. Heads lie apart as the allocator
// aligns large pieces: a bucket of them to 64 bytes.
const bucketSlots = 8

// A segment is resized when more than maxLoad of its slots are in use, to
// growLoad, or fewer than minLoad. In fuller ones more slots stand in another
// bucket than their own.
const (
	maxLoad  = 75 // percent
	growLoad = 70
	minLoad  = 50
	minSlots = bucketSlots
)

// view is what a segment's words are at some moment. Slots are named by the index
// of their head among the words.
type view struct {
	first  *uint64
	slots  int // a multiple of bucketSlots
	stride int
}

// view returns the words; it is the writer's.
func (s *segment) view() view {
	return view{s.first.Load(), int(s.slots.Load()), int(s.stride)}
}

// steady returns the state of a segment and its words, which stay readable even
// if the segment is resized meanwhile; false: not now.
func (s *segment) steady() (seq uint32, v view, ok bool) {
	seq = s.seq.Load()
	v = s.view()
	// Else the words and their number may not belong together.
	return seq, v, seq&1 == 0 && s.seq.Load() == seq
}

// stable reports whether what was read since the state was noted belongs together.
func (s *segment) stable(seq uint32) bool { return s.seq.Load() == seq }

// pause lets a writer go on that was interrupted within a change.
func pause(tries int) {
	if tries%16 == 15 {
		runtime.Gosched()
	}
}

// begin and end enclose each change of the words, or of what they lead to.
func (s *segment) begin() {
	if !s.held {
		s.seq.Store(s.seq.Load() + 1)
	}
}

func (s *segment) end() { s.begin() }

// hold and letGo make one of all changes between.
func (s *segment) hold() {
	s.begin()
	s.held = true
}

func (s *segment) letGo() {
	s.held = false
	s.end()
}

// words are all words.
func (v view) words() []uint64 { return unsafe.Slice(v.first, v.slots*v.stride) }

// homeOf is the bucket in which the search for a head starts.
func (v view) homeOf(head uint64) (bucket int) {
	slot := int(head >> tagShift * uint64(v.slots) >> tagBits)
	return (slot - slot%bucketSlots) * v.stride
}

// after is the bucket after another one.
func (v view) after(bucket int) int {
	if bucket += bucketSlots * v.stride; bucket < v.slots*v.stride {
		return bucket
	}
	return 0
}

// heads are those of a bucket.
func (v view) heads(bucket int) *[bucketSlots]uint64 {
	return (*[bucketSlots]uint64)(unsafe.Add(unsafe.Pointer(v.first), bucket*8))
}

// rest are the words of a slot behind its head.
func (v view) rest(i int) []uint64 {
	in := i % bucketSlots
	at := i - in + bucketSlots + in*(v.stride-1)
	return v.words()[at : at+v.stride-1]
}

// home returns a word of the bucket in which the search for a head starts, and one
// of the bucket after it; there must be slots.
func (v view) home(head uint64) (first, second *uint64) {
	bucket := v.homeOf(head)
	return &v.heads(bucket)[0], &v.heads(v.after(bucket))[0]
}

func (v view) load(i int) uint64 {
	return atomic.LoadUint64(&v.heads(i - i%bucketSlots)[i%bucketSlots])
}

func (v view) store(i int, head uint64) {
	atomic.StoreUint64(&v.heads(i - i%bucketSlots)[i%bucketSlots], head)
}

// find returns the slot whose head equals want in the bits of mask, and its head;
// -1 if there is none. mask has at least the tag's bits.
func (v view) find(want, mask uint64) (i int, head uint64) {
	bucket := v.homeOf(want)
	for range v.slots / bucketSlots {
		heads := v.heads(bucket)
		for same := equal(heads, want, mask); same != 0; same &= same - 1 {
			at := bits.TrailingZeros32(same)
			// Else it is a free slot, or has been taken by another key since.
			if head = atomic.LoadUint64(&heads[at]); head != 0 && (head^want)&mask == 0 {
				return bucket + at, head
			}
		}
		if equal(heads, 0, allBits) != 0 {
			break // else it would be here
		}
		bucket = v.after(bucket)
	}
	return -1, 0
}

// equal tells which heads of a bucket equal want in the bits of mask, a bit for
// each. It compares all of them: where the processor cannot foresee which one it
// is, that takes less than to stop there.
func equal(heads *[bucketSlots]uint64, want, mask uint64) (same uint32) {
	for n := range bucketSlots {
		_, zero := bits.Sub64((atomic.LoadUint64(&heads[n])^want)&mask, 1, 0)
		same |= uint32(zero) << n
	}
	return same
}

// room returns a free slot for a head; there must be one.
func (v view) room(head uint64) int {
	for bucket := v.homeOf(head); ; bucket = v.after(bucket) {
		if free := equal(v.heads(bucket), 0, allBits); free != 0 {
			return bucket + bits.TrailingZeros32(free)
		}
	}
}

// put stores the head of a new slot between begin and end, for which there must
// be room, and returns where.
func (s *segment) put(head uint64) int {
	v := s.view()
	i := v.room(head)
	v.store(i, head)
	s.used++
	return i
}

// remove empties the slot at i between begin and end. If its bucket was full,
// somebody may stand behind it who now has room there.
func (s *segment) remove(i int) {
	v := s.view()
	bucket := i - i%bucketSlots
	for full := v.isFull(bucket); full; {
		bucket = v.after(bucket)
		full = v.isFull(bucket)
		if j := v.stray(bucket, i-i%bucketSlots); j >= 0 {
			v.store(i, v.load(j))
			from := v.rest(j)
			for n := range v.rest(i) {
				atomic.StoreUint64(&v.rest(i)[n], from[n])
			}
			i = j
		}
	}
	v.store(i, 0)
	s.used--
}

func (v view) isFull(bucket int) bool { return equal(v.heads(bucket), 0, allBits) == 0 }

// stray returns a slot of a bucket that belongs into another one before it, or
// before that one; -1: there is none.
func (v view) stray(bucket, to int) int {
	for in, head := range v.heads(bucket) {
		if home := v.homeOf(head); head != 0 && v.behind(bucket, home) >= v.behind(bucket, to) {
			return bucket + in
		}
	}
	return -1
}

// behind is how far a bucket is behind another one, in words.
func (v view) behind(bucket, other int) int {
	if bucket >= other {
		return bucket - other
	}
	return bucket - other + v.slots*v.stride
}

// isFull reports whether the segment must be resized before a put.
func (s *segment) isFull() bool {
	return 100*(s.used+1) >= maxLoad*s.slots.Load()
}

// The allocator rounds large pieces up to whole pages.
const (
	largeWords = 4096
	largeStep  = 1024
)

// isSparse reports whether resizing would free memory worth the work.
func (s *segment) isSparse() bool {
	slots := s.slots.Load()
	if slots <= 4*minSlots || 100*s.used >= minLoad*slots {
		return false
	}
	words := int(slots) * int(s.stride)
	return words <= largeWords || s.fitting()*int(s.stride) <= words-largeStep
}

// fitting is how many slots the segment should have, with one more in use.
func (s *segment) fitting() int {
	n := int(100*(s.used+1)/growLoad) + 1
	return (n + bucketSlots - 1) / bucketSlots * bucketSlots
}

// resize makes room for one more, or gives back what is too much.
func (s *segment) resize() {
	old := s.view()
	words := slices.Grow([]uint64(nil), s.fitting()*old.stride) // the allocator rounds up
	slots := cap(words) / (bucketSlots * old.stride) * bucketSlots
	v := view{unsafe.SliceData(words), slots, old.stride}
	for bucket := 0; bucket < old.slots*old.stride; bucket += bucketSlots * old.stride {
		for in, head := range old.heads(bucket) { // readers still look at the old one
			if head != 0 {
				i := v.room(head)
				v.heads(i - i%bucketSlots)[i%bucketSlots] = head
				copy(v.rest(i), old.rest(bucket+in))
			}
		}
	}
	s.begin()
	s.slots.Store(uint32(slots))
	s.first.Store(v.first)
	s.end()
}
