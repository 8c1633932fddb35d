package summary

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"testing"
)

// script writes bodies of frames by hand, as FORMAT.md says, for one cluster key.
type script struct {
	b    []byte
	last uint64 // run of the operation before
}

func ops() *script { return &script{} }

// tag begins an operation on a run.
func (s *script) tag(n, op uint64) *script {
	d := zigzag(int64(n) - int64(s.last))
	s.last = n
	return s.uv(d<<2 | op)
}

func (s *script) uv(v ...uint64) *script {
	for _, x := range v {
		s.b = binary.AppendUvarint(s.b, x)
	}
	return s
}

func (s *script) raw(b ...byte) *script { s.b = append(s.b, b...); return s }

func (s *script) ext(n, tokens uint64, fingerprints ...byte) *script {
	return s.tag(n, opExtend).uv(tokens<<1 | 1).raw(fingerprints...)
}

func (s *script) root(tokens uint64, fingerprints ...byte) *script {
	return s.tag(0, opFork).uv(tokens<<1 | 1).raw(fingerprints...)
}

func (s *script) fork(n, back uint64) *script { return s.tag(n, opFork).uv(back<<1 | 1) }

func (s *script) trim(n, tokens uint64, fingerprint ...byte) *script {
	return s.tag(n, opTrim).uv(tokens<<1 | 1).raw(fingerprint...)
}

func (s *script) del(n uint64) *script { return s.tag(n, opDelete) }

func (s *script) usable(n uint64) *script { return s.tag(n, opTrim).uv(0, opUsable) }
func (s *script) tier(n uint64) *script   { return s.tag(n, opTrim).uv(0, opTier) }

func deltaFrame(seq uint64, flags uint8, digest uint32, s *script) []byte {
	return append(appendHeader(nil, header{kind: kindDelta, flags: flags, keys: 1, keyIDs: [2]uint32{testKey.IDUint32()}, epoch: 9, seq: seq, digests: [2]uint32{digest}}), s.b...)
}

func snapshotFrame(seq, part uint64, last bool, digest uint32, s *script) []byte {
	h := header{kind: kindSnapshot, keys: 1, keyIDs: [2]uint32{testKey.IDUint32()}, epoch: 9, seq: seq, digests: [2]uint32{digest}, part: part}
	if last {
		h.flags = flagLast
	}
	return append(appendHeader(nil, h), s.b...)
}

// record is a run of a snapshot that hangs on the root and ends at a point.
func (s *script) record(up, number, tokens uint64, fingerprint ...byte) *script {
	return s.uv(up, number, tokens<<1|1, 1<<1, (tokens<<1|1)<<1).raw(fingerprint...)
}

// expect applies a frame and checks the result and what Have says after it.
func expect(t *testing.T, d *Decoder, name string, b []byte, want Result, wantSeq uint64, wantOK bool) {
	t.Helper()
	got, err := d.Apply(b)
	if got != want || err != nil {
		t.Errorf("%s: %v, %v, want %v", name, got, err, want)
	}
	if _, seq, ok := d.Have(); seq != wantSeq || ok != wantOK {
		t.Errorf("%s: have seq %d, %v, want %d, %v", name, seq, ok, wantSeq, wantOK)
	}
}

func point24(depth, fingerprint uint32) IndexKey { return chain(0, depth, fingerprint) }

// good is a tree with all that operations can refer to: run 1 from the root
// with a checkpoint, a branch and an end, run 2 on its branch.
func good() *script {
	return ops().root(600, 1, 2, 3, 4, 9, 9).fork(1, 50).raw(8, 8).uv(30<<1|1).raw(7, 7).root(100, 1, 2, 3)
}

func goodDecoder(t testing.TB) (*Decoder, *keySink) {
	t.Helper()
	sink := newKeySink()
	d := NewDecoder(sink)
	tr := tree{}
	e := newEditor(&tr, place{0, 1}, false)
	if err := e.apply(&reader{b: good().b}); err != nil {
		t.Fatal(err)
	}
	e.release()
	for _, b := range [][]byte{snapshotFrame(0, 0, true, 0, ops()), deltaFrame(1, 0, tr.digest, good())} {
		if got, err := d.Apply(b); got != Applied || err != nil {
			t.Fatal(got, err)
		}
	}
	return d, sink
}

// consistent checks a tree against itself and against a sink that was told all
// of it.
func consistent(t *tree, sink *keySink) error {
	held, digest, live := map[HeldKey]int{}, uint32(0), 0
	children := map[uint32]uint32{}
	words, limits := 0, 0
	for i := range t.runs {
		r := &t.runs[i]
		if r.end() == 0 {
			continue
		}
		live++
		if t.used[i/64]>>(i%64)&1 == 0 {
			return fmt.Errorf("run %d in use is marked free", i)
		}
		if p := uint32(r.parent); p != 0 {
			children[p]++
			if !t.has(p) || r.start() > t.runs[p].end() || r.start() <= t.runs[p].start() {
				return fmt.Errorf("run %d hangs on nothing", i)
			}
			if want := t.keyAt(&t.runs[p], r.start()); r.base() != want {
				return fmt.Errorf("run %d has another base than its parent says", i)
			}
		} else if r.start() != 0 || r.base() != 0 {
			return fmt.Errorf("run %d begins at %d on the root", i, r.start())
		}
		words += int(r.words())
		if l := t.limits[uint32(i)]; l != nil {
			digest += l.mix(uint32(i))
			limits++
		}
	}
	for i := range t.runs {
		if i > 0 && t.runs[i].end() != 0 && uint32(t.runs[i].children) != children[uint32(i)] {
			return fmt.Errorf("run %d counts %d children, has %d", i, t.runs[i].children, children[uint32(i)])
		}
	}
	extents := map[HeldKey]Extent{}
	t.eachKey(func(k HeldKey, x Extent, branch bool) {
		held[k]++
		digest += k.Key.mix()
		extents[k] = x
	})
	switch {
	case limits != len(t.limits):
		return fmt.Errorf("%d limits, %d of them on runs", len(t.limits), limits)
	case live != t.live:
		return fmt.Errorf("%d runs, counted %d", live, t.live)
	case words != len(t.words)-t.dead:
		return fmt.Errorf("%d words, %d of them dead, want %d", len(t.words), t.dead, words)
	case digest != t.digest:
		return errors.New("digest is wrong")
	case !maps.Equal(held, sink.held):
		return fmt.Errorf("sink holds %d keys, tree %d", len(sink.held), len(held))
	}
	for k, x := range extents {
		got, ok := sink.extents[k]
		if !ok {
			got = WholeExtent(k.DepthTokens)
		}
		if held[k] == 1 && got != x {
			return fmt.Errorf("key at %d: sink has extent %v, tree %v", k.DepthTokens, got, x)
		}
	}
	return nil
}
