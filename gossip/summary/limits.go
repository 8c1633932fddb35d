package summary

import (
	"encoding/binary"
	"math"
	"slices"
)

// limit says what of a run cannot be used, or is not in GPU memory. It is
// replaced as a whole, never changed, so that copies may share it.
type limit struct {
	usable
	tier
}

// usable says at which ends of a run the engine can end a match. With a stride
// of 0 it can everywhere; otherwise at the ends that spans list, and before the
// first of them at floor, which lies on an ancestor.
type usable struct {
	stride uint32 // block size in tokens
	floor  uint32 // deepest usable end at or before the run's start
	open   bool   // the last span reaches as far as the run does
	spans  []span
}

// span lists usable block ends: from, from + stride, … to. Depths in tokens.
type span struct{ from, to uint32 }

// maxSpans bounds the spans of a run; deeper ones matter more.
const maxSpans = 64

// tier says how far from the start of the prefix memory reaches, in tokens;
// inGPU stands for no bound.
type tier struct{ gpu, host uint32 }

const inGPU = math.MaxUint32

// limitBytes is what a limit occupies in a map, spans not counted.
const limitBytes = 120

var noTier = tier{inGPU, inGPU}

// ordinary says that the limit limits nothing.
func (l *limit) ordinary() bool { return l.stride == 0 && l.tier == noTier }

func (u *usable) equal(v *usable) bool {
	return u.stride == v.stride && u.floor == v.floor && u.open == v.open && slices.Equal(u.spans, v.spans)
}

// at is the deepest usable end at or before a depth of the run.
func (u *usable) at(depth uint32) uint32 {
	if u.stride == 0 {
		return depth
	}
	for i := len(u.spans) - 1; i >= 0; i-- {
		s := u.spans[i]
		if s.from > depth {
			continue
		}
		if u.open && i == len(u.spans)-1 {
			s.to = depth
		}
		return s.from + (min(depth, s.to)-s.from)/u.stride*u.stride
	}
	return u.floor
}

// extent is what a key of the run is worth.
func (l *limit) extent(depth uint32) Extent {
	return Extent{UsableTokens: l.usable.at(depth), GPUTokens: min(depth, l.gpu), HostTokens: min(depth, l.host)}
}

// extent is what a key of a run is worth.
func (t *tree) extent(n uint32, depth uint32) Extent {
	if l := t.limitOn(n); l != nil {
		return l.extent(depth)
	}
	return WholeExtent(depth)
}

// mix is what the limit of a run adds to the digest.
func (l *limit) mix(n uint32) uint32 {
	x := uint64(n)<<32 | uint64(l.stride)
	next := func(a, b uint32) { x = (x ^ uint64(a)<<32 ^ uint64(b)) * 0x9e3779b97f4a7c15; x ^= x >> 29 }
	next(l.floor, 0)
	next(l.gpu, l.host)
	for _, s := range l.spans {
		next(s.from, s.to)
	}
	if l.open {
		x++
	}
	return mix32(x)
}

// limitOf returns a copy of the limit of a run.
func (t *tree) limitOf(n uint32) limit {
	if l := t.limitOn(n); l != nil {
		return *l
	}
	return limit{tier: noTier}
}

// setLimit replaces the limit of a run.
func (t *tree) setLimit(n uint32, l limit) {
	if old := t.limitOn(n); old != nil {
		t.digest -= old.mix(n)
		delete(t.limits, n)
	}
	if !l.ordinary() {
		if t.limits == nil {
			t.limits = map[uint32]*limit{}
		}
		t.limits[n] = &l
		t.digest += l.mix(n)
	}
}

// appendUsable writes the body of a USABLE operation.
func appendUsable(b []byte, u *usable, start uint32) []byte {
	b = binary.AppendUvarint(b, uint64(u.stride))
	if u.stride == 0 {
		return b
	}
	b = appendLength(b, start-u.floor)
	n := uint64(len(u.spans)) << 1
	if u.open {
		n |= 1
	}
	b = binary.AppendUvarint(b, n)
	at := start
	for i, s := range u.spans {
		b = appendLength(b, s.from-at)
		if u.open && i == len(u.spans)-1 {
			break
		}
		b = binary.AppendUvarint(b, uint64((s.to-s.from)/u.stride))
		at = s.to
	}
	return b
}

// readUsable reads the body of a USABLE operation about a run.
func (r *reader) usable(in *run) (u usable) {
	if u.stride = r.bounded("stride", MaxDepthTokens); u.stride == 0 {
		return u
	}
	back := r.length("floor")
	if back > in.start() {
		r.fail("floor", "before the start")
		return u
	}
	u.floor = in.start() - back
	n := r.bounded("spans", maxSpans<<1|1)
	u.open = n&1 != 0
	if n >>= 1; n == 0 && u.open {
		r.fail("spans", "none to leave open")
	}
	at := in.start()
	for i := range n {
		s := span{from: at + r.length("span")}
		s.to = s.from
		if !u.open || i < n-1 {
			to := uint64(s.from) + uint64(r.bounded("span", MaxDepthTokens))*uint64(u.stride)
			s.to = uint32(min(to, math.MaxUint32))
		}
		if s.from <= at || s.to > MaxDepthTokens {
			r.fail("span", "out of order or too deep")
		}
		if r.err != nil {
			return u
		}
		u.spans = append(u.spans, s)
		at = s.to
	}
	return u
}

// appendTier writes the body of a TIER operation.
func appendTier(b []byte, t tier) []byte {
	if t == noTier {
		return append(b, 0)
	}
	b = binary.AppendUvarint(b, uint64(t.gpu)+1)
	if t.host == inGPU {
		return append(b, 0)
	}
	return binary.AppendUvarint(b, uint64(t.host-t.gpu)+1)
}

// tier reads the body of a TIER operation.
func (r *reader) tier() tier {
	gpu := r.bounded("gpu tokens", MaxDepthTokens+1)
	if gpu == 0 {
		return noTier
	}
	t := tier{gpu: gpu - 1, host: inGPU}
	if more := r.bounded("host tokens", MaxDepthTokens+1); more != 0 {
		t.host = t.gpu + more - 1
	}
	return t
}
