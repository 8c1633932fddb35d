package prefixindex

import (
	"slices"
	"sync/atomic"

	"waypost/gossip/prefix"
)

// The info of a checkpoint tells at which offsets after it known points lie, of
// whatever worker: up to three offsets with one listing each stand in it, low
// ones first, else it has the handle of a block (see below). That of a point
// leads back: its offset, and some bits of its checkpoint's tag, 0 if it has none.
const (
	infoPoint     uint32 = 1 << 31 // of a point
	infoPredicted uint32 = 1 << 30 // some worker is listed by predictions only
	infoPartial   uint32 = 1 << 29 // some worker's extent is not whole
	infoList      uint32 = 1 << 28 // the rest is a handle
	infoPayload          = uint32(anyHandle)

	offsetBits = 9
	offsetMask = prefix.ChunkTokens - 1
	inWord     = 3

	upBits = payloadBits - offsetBits // of a checkpoint's tag
)

// upTag is the part of a checkpoint's tag that is in the info of its points.
func upTag(tag uint64) uint32 { return max(1, uint32(tag>>(64-upBits))) }

// lists reports whether a checkpoint has a known point at an offset.
func (p *points) lists(info, offset uint32) bool {
	if info&infoList == 0 {
		return inlineAt(info, offset) < inWord
	}
	_, found := p.list(info).find(offset)
	return found
}

// inlineAt is the place of an offset in the info itself; inWord: none. That of
// offset 0 is the first free one.
func inlineAt(info, offset uint32) int {
	for i := range inWord {
		if info>>(offsetBits*i)&offsetMask == offset {
			return i
		}
	}
	return inWord
}

// A block of known points: its first word has the number of items and the
// offsets most listed (hints), the others two items each, in order of falling
// offsets. An item is an offset, how often workers list a point there, and a bit
// for each value that the lowest bits of those points' tags have or had, which
// spares a search most points of other texts.
const (
	hints     = 2
	lenShift  = hints * offsetBits
	bitShift  = 15 // of the tag bits; the count is below
	maxListed = 1<<bitShift - 1
	itemShift = 32 - offsetBits
	anyItem   = 1<<itemShift - 1 - maxListed // all tags
)

func itemOffset(i uint32) uint32 { return i >> itemShift }
func itemCount(i uint32) uint32  { return i & maxListed }

// itemBit is the bit of a tag in an item.
func itemBit(tag uint64) uint32 { return 1 << (bitShift + tag>>tagShift%8) }

// pointList is such a block while the writer changes it.
type pointList []uint64

func (l pointList) len() int { return int(l[0] >> lenShift) }
func (l pointList) room() int {
	return 2 * (len(l) - 1)
}

func (l pointList) item(i int) uint32 { return uint32(l[1+i/2] >> (32 * (i % 2))) }

func (l pointList) setItem(i int, v uint32) {
	shift := 32 * (i % 2)
	atomic.StoreUint64(&l[1+i/2], l[1+i/2]&^(0xffffffff<<shift)|uint64(v)<<shift)
}

func (l pointList) setLen(n int) {
	atomic.StoreUint64(&l[0], l[0]&(1<<lenShift-1)|uint64(n)<<lenShift)
}

func (l pointList) hint(i int) uint32 { return uint32(l[0]>>(offsetBits*i)) & offsetMask }

func (l pointList) setHint(i int, offset uint32) {
	shift := offsetBits * i
	atomic.StoreUint64(&l[0], l[0]&^(offsetMask<<shift)|uint64(offset)<<shift)
}

// find returns where the item of an offset is, or belongs.
func (l pointList) find(offset uint32) (at int, found bool) {
	lo, hi := 0, l.len()
	for lo < hi {
		mid := (lo + hi) / 2
		switch o := itemOffset(l.item(mid)); {
		case o == offset:
			return mid, true
		case o > offset:
			lo = mid + 1
		default:
			hi = mid
		}
	}
	return lo, false
}

// count is how often an offset is listed.
func (l pointList) count(offset uint32) uint32 {
	if i, found := l.find(offset); found {
		return itemCount(l.item(i))
	}
	return 0
}

// add counts a listing; a new offset must have room.
func (l pointList) add(offset uint32, tag uint64) {
	at, found := l.find(offset)
	if found {
		i := l.item(at) | itemBit(tag)
		if itemCount(i) < maxListed {
			i++
		}
		l.setItem(at, i)
	} else {
		for i := l.len(); i > at; i-- {
			l.setItem(i, l.item(i-1))
		}
		l.setItem(at, offset<<itemShift|itemBit(tag)|1)
		l.setLen(l.len() + 1)
	}
	l.suggest(offset)
}

// suggest makes an offset a hint if it is listed more than one of them.
func (l pointList) suggest(offset uint32) {
	least, of := l.count(offset), -1
	for i := range hints {
		h := l.hint(i)
		if h == offset {
			return
		}
		if n := l.count(h); n < least {
			least, of = n, i
		}
	}
	if of >= 0 {
		l.setHint(of, offset)
	}
}

// remove takes a listing back.
func (l pointList) remove(offset uint32) {
	at, found := l.find(offset)
	if !found {
		return
	}
	switch n := itemCount(l.item(at)); {
	case n == maxListed: // or more: it stays
		return
	case n > 1:
		l.setItem(at, l.item(at)-1)
		return
	}
	n := l.len() - 1
	for i := at; i < n; i++ {
		l.setItem(i, l.item(i+1))
	}
	l.setItem(n, 0)
	l.setLen(n)
	for i := range hints {
		if l.hint(i) == offset {
			l.setHint(i, 0)
			for j := range n {
				l.suggest(itemOffset(l.item(j)))
			}
		}
	}
}

// points changes the third word of checkpoints. It is the writer's.
type points struct {
	slab *slab
}

func (p *points) list(info uint32) pointList {
	return p.slab.words(handle(info & infoPayload))
}

// add counts a listing of a point at an offset after the checkpoint.
func (p *points) add(info, offset uint32, tag uint64) uint32 {
	if info&infoList == 0 {
		if free := inlineAt(info, 0); free < inWord && inlineAt(info, offset) == inWord {
			return info | offset<<(offsetBits*free)
		}
		info = p.spill(info)
	}
	l := p.list(info)
	if _, found := l.find(offset); !found && l.len() == l.room() {
		info = p.move(info, handle(info&infoPayload).class()+1)
		l = p.list(info)
	}
	l.add(offset, tag)
	return info
}

// spill moves the offsets from the word to a block. Their points' tags are not
// known: any will do.
func (p *points) spill(info uint32) uint32 {
	class, offsets := 1, [inWord]uint32{}
	for i := range offsets {
		offsets[i] = info >> (offsetBits * i) & offsetMask
	}
	if !slices.Contains(offsets[:], 0) {
		class = 2
	}
	h := p.slab.take(class)
	l := pointList(p.slab.words(h))
	for _, o := range offsets {
		for tag := range uint64(8) {
			if o != 0 {
				l.add(o, tag<<tagShift)
			}
		}
	}
	for i := range l.len() {
		l.setItem(i, l.item(i)&^maxListed|1)
	}
	return info&^infoPayload | infoList | uint32(h)
}

// move copies a list to a block of another class.
func (p *points) move(info uint32, class int) uint32 {
	old := handle(info & infoPayload)
	h := p.slab.take(class)
	from, to := p.slab.words(old), p.slab.words(h)
	for i := range min(len(from), len(to)) {
		atomic.StoreUint64(&to[i], from[i])
	}
	p.slab.give(old)
	return info&^infoPayload | uint32(h)
}

// remove takes a listing back.
func (p *points) remove(info, offset uint32) uint32 {
	if info&infoList == 0 {
		return removeInline(info, offset)
	}
	l := p.list(info)
	l.remove(offset)
	if l.len() < inWord && l.isSingle() {
		return p.unspill(info)
	}
	if class := handle(info & infoPayload).class(); class > 1 && 4*l.len() <= l.room()-2 {
		return p.move(info, class-1)
	}
	return info
}

// removeInline takes an offset out of the info itself and closes the gap.
func removeInline(info, offset uint32) uint32 {
	i := inlineAt(info, offset)
	if i == inWord {
		return info
	}
	below := uint32(1)<<(offsetBits*i) - 1
	all := info & (1<<(offsetBits*inWord) - 1)
	return info - all | all&below | all>>offsetBits&^below
}

// isSingle reports whether every offset is listed once.
func (l pointList) isSingle() bool {
	for i := range l.len() {
		if itemCount(l.item(i)) > 1 {
			return false
		}
	}
	return true
}

// unspill moves the offsets back from a block to the word.
func (p *points) unspill(info uint32) uint32 {
	l := p.list(info)
	out := info &^ (infoPayload | infoList)
	for i := range l.len() {
		out |= itemOffset(l.item(i)) << (offsetBits * i)
	}
	p.release(info)
	return out
}

// release gives back what the word of a removed checkpoint leads to.
func (p *points) release(info uint32) {
	if info&(infoPoint|infoList) == infoList {
		p.slab.give(handle(info & infoPayload))
	}
}
