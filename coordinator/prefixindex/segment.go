package prefixindex

import (
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
// A slot is stride words long. Its first word is 0 if it is free; its upper
// tagBits say where the slot belongs.
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

// A segment is resized when more than maxLoad of its slots are in use, to
// growLoad, or fewer than minLoad. Growing in small steps keeps it full.
const (
	maxLoad  = 0.88
	growLoad = 0.86
	minLoad  = 0.72
	minSlots = 4
)

// view is what a segment's words are at some moment.
type view struct {
	words  []uint64
	stride int
	slots  int
}

// view returns the words; it is the writer's.
func (s *segment) view() view {
	slots, stride := int(s.slots.Load()), int(s.stride)
	return view{unsafe.Slice(s.first.Load(), slots*stride), stride, slots}
}

// steady returns the state of a segment and its words, which stay readable even
// if the segment is resized meanwhile; false: not now.
func (s *segment) steady() (seq uint32, v view, ok bool) {
	seq = s.seq.Load()
	if seq&1 != 0 {
		return 0, v, false
	}
	slots, first := int(s.slots.Load()), s.first.Load()
	if s.seq.Load() != seq { // the two may not belong together
		return 0, v, false
	}
	return seq, view{unsafe.Slice(first, slots*int(s.stride)), int(s.stride), slots}, true
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

// home is the index of the slot at which the search for a first word starts.
func (v *view) home(word uint64) int {
	return int(word>>tagShift*uint64(v.slots)>>tagBits) * v.stride
}

// next is the slot after the one at i.
func (v *view) next(i int) int {
	if i += v.stride; i < len(v.words) {
		return i
	}
	return 0
}

func (v *view) load(i int) uint64        { return atomic.LoadUint64(&v.words[i]) }
func (v *view) store(i int, word uint64) { atomic.StoreUint64(&v.words[i], word) }

// find returns the index of the slot whose first word equals want in the bits
// of mask, and that word; -1 if there is none. mask has at least the tag's bits.
func (v *view) find(want, mask uint64) (i int, word uint64) {
	i = v.home(want)
	for steps := 0; steps < len(v.words); steps += v.stride {
		word = v.load(i)
		if word == 0 {
			return -1, 0
		}
		if (word^want)&mask == 0 {
			return i, word
		}
		if v.steps(i, word) < steps {
			return -1, 0 // it would be here
		}
		i = v.next(i)
	}
	return -1, 0
}

// steps is how many words the slot at i is behind where its first word belongs.
func (v *view) steps(i int, word uint64) int {
	n := i - v.home(word)
	if n < 0 {
		n += len(v.words)
	}
	return n
}

// put stores a new slot, for which there must be room; it is overwritten. Slots
// stand in the order in which they belong, which bounds what is looked at for one
// that is not there, and what closing a gap moves.
func (v *view) put(slot []uint64) {
	i := v.home(slot[0])
	for steps := 0; ; steps += v.stride {
		word := v.words[i]
		if word == 0 {
			break
		}
		if n := v.steps(i, word); n < steps {
			steps = n
			v.swap(i, slot)
		}
		i = v.next(i)
	}
	v.swap(i, slot)
}

func (v *view) swap(i int, slot []uint64) {
	for n, word := range slot {
		slot[n] = v.words[i+n]
		v.store(i+n, word)
	}
}

// put stores a new slot between begin and end; there must be room.
func (s *segment) put(slot ...uint64) {
	v := s.view()
	v.put(slot)
	s.used++
}

// remove empties the slot at i between begin and end, and closes the gap behind
// it.
func (s *segment) remove(i int) {
	v := s.view()
	for j := v.next(i); v.words[j] != 0 && v.steps(j, v.words[j]) > 0; j = v.next(j) {
		for n := range v.stride {
			v.store(i+n, v.words[j+n])
		}
		i = j
	}
	for n := range v.stride {
		v.store(i+n, 0)
	}
	s.used--
}

// isFull reports whether the segment must be resized before a put.
func (s *segment) isFull() bool {
	return float32(s.used) >= maxLoad*float32(s.slots.Load())-1 || s.first.Load() == nil
}

// The allocator rounds large pieces up to whole pages.
const (
	largeWords = 4096
	largeStep  = 1024
)

// isSparse reports whether resizing would free memory worth the work.
func (s *segment) isSparse() bool {
	slots := s.slots.Load()
	if slots <= 4*minSlots || float32(s.used) >= minLoad*float32(slots) {
		return false
	}
	words := int(slots) * int(s.stride)
	return words <= largeWords || s.fitting()*int(s.stride) <= words-largeStep
}

// fitting is how many slots the segment should have, with one more in use.
func (s *segment) fitting() int { return max(minSlots, int(float64(s.used+1)/growLoad)+1) }

// resize makes room for one more, or gives back what is too much.
func (s *segment) resize() {
	old := s.view()
	slots := s.fitting()
	words := slices.Grow([]uint64(nil), slots*old.stride) // the allocator rounds up
	slots = cap(words) / old.stride
	v := view{words[:slots*old.stride], old.stride, slots}
	var slot [detailStride]uint64 // readers still look at the old one
	for i := 0; i < len(old.words); i += old.stride {
		if old.words[i] != 0 {
			v.put(append(slot[:0], old.words[i:i+old.stride]...))
		}
	}
	s.begin()
	s.slots.Store(uint32(slots))
	s.first.Store(unsafe.SliceData(v.words))
	s.end()
}
