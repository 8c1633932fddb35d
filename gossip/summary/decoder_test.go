package summary

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

// countSink counts its keys.
type countSink struct{ adds, removes, resets int }

func (s *countSink) Add(prefix.Key, uint32) { s.adds++ }
func (s *countSink) Remove(prefix.Key)      { s.removes++ }
func (s *countSink) Reset()                 { s.resets++ }

// setSink is a plain set.
type setSink map[prefix.Key]uint32

func (s setSink) Add(k prefix.Key, d uint32) { s[k] = d }
func (s setSink) Remove(k prefix.Key)        { delete(s, k) }
func (s setSink) Reset()                     { clear(s) }

func delta(seq uint64, flags uint8, digest uint32, removes, adds []entry) []byte {
	h := header{kind: kindDelta, flags: flags, keyID: testKey.IDUint32(), epoch: 9, seq: seq, digest: digest}
	return appendEntries(appendKeys(appendHeader(nil, h), removes), adds)
}

func snapshotPart(seq, part uint64, last bool, digest uint32, adds []entry) []byte {
	h := header{kind: kindSnapshot, keyID: testKey.IDUint32(), epoch: 9, seq: seq, digest: digest, part: part}
	if last {
		h.flags = flagLast
	}
	return appendEntries(appendHeader(nil, h), adds)
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

func TestOrder(t *testing.T) {
	a, b := entry{key: 5, depth: 512, end: true}, entry{key: 6, depth: 600, end: true}
	sink := setSink{}
	d := NewDecoder(sink)
	expect(t, d, "delta before any snapshot", delta(1, 0, 0, nil, nil), Gap, 0, false)
	expect(t, d, "snapshot", snapshotPart(4, 0, true, a.mix(), []entry{a}), Applied, 4, true)
	expect(t, d, "old delta", delta(4, 0, 0, []entry{a}, nil), Duplicate, 4, true)
	expect(t, d, "delta from the future", delta(6, 0, 0, []entry{a}, nil), Gap, 4, true)
	expect(t, d, "next delta", delta(5, 0, a.mix()+b.mix(), nil, []entry{b}), Applied, 5, true)
	expect(t, d, "again", delta(5, 0, a.mix()+b.mix(), nil, []entry{b}), Duplicate, 5, true)
	expect(t, d, "clear with a new key", delta(6, flagClear, b.mix(), nil, []entry{b}), Applied, 6, true)
	if len(sink) != 1 || sink[6] != 600 {
		t.Errorf("sink holds %v", sink)
	}
	expect(t, d, "old snapshot", snapshotPart(5, 0, true, 0, nil), Duplicate, 6, true)
}

func TestDigestMismatchKeepsWhatIsKnown(t *testing.T) {
	a, b := entry{key: 5, depth: 512, end: true}, entry{key: 6, depth: 600, end: true}
	sink := setSink{}
	d := NewDecoder(sink)
	expect(t, d, "snapshot", snapshotPart(4, 0, true, a.mix(), []entry{a}), Applied, 4, true)
	expect(t, d, "wrong digest", delta(5, 0, 77, nil, []entry{b}), DigestMismatch, 5, false)
	if len(sink) != 2 {
		t.Errorf("sink holds %v", sink)
	}
	expect(t, d, "delta after it", delta(6, 0, 77, nil, nil), Gap, 5, false)
	expect(t, d, "wrong snapshot", snapshotPart(6, 0, true, 1, nil), DigestMismatch, 5, false)
	if len(sink) != 2 {
		t.Errorf("a wrong snapshot changed the sink: %v", sink)
	}
	expect(t, d, "snapshot of an earlier seq", snapshotPart(3, 0, true, b.mix(), []entry{b}), Applied, 3, true)
	if len(sink) != 1 || sink[6] != 600 {
		t.Errorf("sink holds %v", sink)
	}
	resident := b
	resident.end = false
	expect(t, d, "only the kind differs", delta(4, 0, resident.mix(), nil, nil), DigestMismatch, 4, false)
}

func TestSnapshotParts(t *testing.T) {
	a, b := entry{key: 5, depth: 512, end: true}, entry{key: 6, depth: 600, end: true}
	sum := a.mix() + b.mix()
	sink := setSink{9: 9}
	d := NewDecoder(sink)
	first, last := snapshotPart(4, 0, false, sum, []entry{a}), snapshotPart(4, 1, true, sum, []entry{b})
	expect(t, d, "last part alone", last, Gap, 0, false)
	expect(t, d, "first part", first, Snapshotting, 0, false)
	expect(t, d, "first part again starts over", first, Snapshotting, 0, false)
	expect(t, d, "part of another snapshot", snapshotPart(5, 1, true, sum, []entry{b}), Gap, 0, false)
	expect(t, d, "the other half is gone", last, Gap, 0, false)
	expect(t, d, "first part", first, Snapshotting, 0, false)
	expect(t, d, "a part too far", snapshotPart(4, 2, true, sum, []entry{b}), Gap, 0, false)
	expect(t, d, "first part", first, Snapshotting, 0, false)
	if len(sink) != 1 {
		t.Errorf("a half snapshot reached the sink: %v", sink)
	}
	expect(t, d, "last part", last, Applied, 4, true)
	expect(t, d, "first part of a known snapshot", first, Duplicate, 4, true)
}

// TestDeltasDuringASnapshot: the stream goes on while a snapshot is pulled.
func TestDeltasDuringASnapshot(t *testing.T) {
	a, b := entry{key: 5, depth: 512, end: true}, entry{key: 6, depth: 600, end: true}
	d := NewDecoder(setSink{})
	expect(t, d, "empty snapshot", snapshotPart(1, 0, true, 0, nil), Applied, 1, true)
	expect(t, d, "first part", snapshotPart(2, 0, false, a.mix()+b.mix(), []entry{a}), Snapshotting, 1, true)
	expect(t, d, "delta between", delta(2, 0, a.mix(), nil, []entry{a}), Applied, 2, true)
	expect(t, d, "last part", snapshotPart(2, 1, true, a.mix()+b.mix(), []entry{b}), Duplicate, 2, true)
}

func TestEpochs(t *testing.T) {
	old := NewEncoder(Options{Key: testKey, Blocks: chainTable{16}, Epoch: 1})
	next := NewEncoder(Options{Key: testKey, Blocks: chainTable{16}, Epoch: 2})
	d := NewDecoder(setSink{})
	expect(t, d, "old stream", old.Snapshot()[0], Applied, 0, true)
	expect(t, d, "old delta", old.Delta(begin), Applied, 1, true)
	expect(t, d, "delta of the new stream", next.Delta(begin), Gap, 1, true)
	expect(t, d, "new stream", next.Snapshot()[0], Applied, 1, true)
	expect(t, d, "straggler of the old stream", old.Delta(begin.Add(time.Minute)), Duplicate, 1, true)
	expect(t, d, "snapshot of the old stream", old.Snapshot()[0], Duplicate, 1, true)
	expect(t, d, "the new one goes on", next.Delta(begin.Add(time.Minute)), Applied, 2, true)
}

func TestRequireKey(t *testing.T) {
	other := NewEncoder(Options{Key: prefix.ClusterKey{7}, Blocks: chainTable{16}, Epoch: 1})
	d := NewDecoder(setSink{})
	d.RequireKey(testKey)
	_, err := d.Apply(other.Snapshot()[0])
	if !errors.Is(err, ErrKeyID) || !strings.Contains(err.Error(), testKey.ID()) || !strings.Contains(err.Error(), prefix.ClusterKey{7}.ID()) {
		t.Errorf("error %v, want one that names %s and %s", err, prefix.ClusterKey{7}.ID(), testKey.ID())
	}
}

func TestMalformedFrames(t *testing.T) {
	a := entry{key: 5, depth: 512, end: true}
	good := delta(1, 0, 0, []entry{a}, []entry{a})
	edit := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	for name, b := range map[string][]byte{
		"empty":          {},
		"version":        edit(0, 2),
		"kind":           edit(1, 3),
		"flags":          edit(1, 0x21),
		"snapshot flags": edit(1, 0x12),
		"cut header":     good[:headerMin-3],
		"cut key":        good[:len(good)-1],
		"too long":       append(bytes.Clone(good), 0),
		"huge":           make([]byte, MaxFrameBytes+1),
		"removes bomb":   append(good[:headerMin:headerMin], 0xff, 0xff, 0xff, 0xff, 0x0f),
		"removes cut":    append(good[:headerMin:headerMin], 2, 1, 2, 3, 4, 5, 6, 7, 8),
		"adds bomb":      append(good[:headerMin:headerMin], 0, 0xff, 0xff, 0xff, 0xff, 0x0f),
		"endless varint": append(good[:10:10], bytes.Repeat([]byte{0xff}, 30)...),
		"depth 0":        delta(1, 0, 0, nil, []entry{{key: 5, end: true}}),
		"depth too big":  delta(1, 0, 0, nil, []entry{{key: 5, depth: MaxDepthTokens + 1}}),
		"key 0":          delta(1, 0, 0, nil, []entry{{depth: 4}}),
	} {
		if _, err := parse(b); !errors.Is(err, ErrFrame) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	if _, err := parse(good); err != nil {
		t.Errorf("the good one: %v", err)
	}
}

func TestTooManyKeysInASnapshot(t *testing.T) {
	d := NewDecoder(setSink{})
	k := prefix.Key(1)
	for part := uint64(0); ; part++ {
		entries := make([]entry, snapshotEntries)
		for i := range entries {
			entries[i] = entry{key: k, depth: 512, end: true}
			k++
		}
		got, err := d.Apply(snapshotPart(1, part, false, 0, entries))
		if err != nil {
			if !errors.Is(err, ErrFrame) || part != MaxKeys/snapshotEntries || d.building != nil {
				t.Errorf("part %d: %v", part, err)
			}
			return
		}
		if got != Snapshotting || part > MaxKeys/snapshotEntries {
			t.Fatalf("part %d: %v", part, got)
		}
	}
}

// TestFrameRoundTrip writes random frames and reads them back.
func TestFrameRoundTrip(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 500 {
		adds := make([]entry, rng.IntN(20))
		depth := uint32(0)
		for i := range adds {
			depth += rng.Uint32N(MaxDepthTokens/20) + 1
			adds[i] = entry{key: prefix.Key(rng.Uint64() | 1), depth: depth, end: rng.IntN(2) == 0}
		}
		removes := adds[:rng.IntN(len(adds)+1)]
		h := header{kind: kindDelta, flags: uint8(rng.IntN(2)), keyID: rng.Uint32(), epoch: rng.Uint32(), seq: rng.Uint64(), ageMs: rng.Uint64(), digest: rng.Uint32()}
		b := appendEntries(appendKeys(appendHeader(nil, h), removes), adds)
		f, err := parse(b)
		if err != nil || f.header != h || f.addCount != len(adds) {
			t.Fatalf("%+v became %+v, %v", h, f.header, err)
		}
		i := 0
		f.eachAdd(func(e entry) {
			if e != adds[i] {
				t.Fatalf("entry %d: %+v, want %+v", i, e, adds[i])
			}
			i++
		})
		i = 0
		f.eachRemove(func(k prefix.Key) {
			if k != removes[i].key {
				t.Fatalf("removal %d: %x", i, k)
			}
			i++
		})
	}
}

// TestGoldenFrames pins the bytes of FORMAT.md.
func TestGoldenFrames(t *testing.T) {
	e := newChainEncoder(16, Options{})
	store(e, 1, 40)
	var out strings.Builder
	show := func(name string, b []byte) { fmt.Fprintf(&out, "%s\n%x\n", name, b) }
	show("snapshot before the first delta", e.Snapshot()[0])
	show("delta: checkpoint 512 and end 640 added", e.Delta(begin))
	e.UsableChanged(32, false)
	for id := uint32(40); id > 38; id-- {
		e.Detached(id)
	}
	show("delta: 640 gone, 512 resident only, ends 496 and 608 added", e.Delta(begin.Add(1500*time.Millisecond)))
	show("snapshot", e.Snapshot()[0])
	e.Cleared()
	store(e, 1, 2)
	show("delta: cleared, end 32 added", e.Delta(begin.Add(1700*time.Millisecond)))
	want, err := os.ReadFile("testdata/frames.golden")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		err = os.WriteFile("testdata/frames.golden", []byte(out.String()), 0o644)
		want = []byte(out.String())
	}
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("frames changed; run with UPDATE_GOLDEN=1 if that is meant\ngot:\n%s\nwant:\n%s", &out, want)
	}
}

func FuzzApply(f *testing.F) {
	e := newChainEncoder(16, Options{})
	f.Add(e.Snapshot()[0])
	store(e, 1, 40)
	f.Add(e.Delta(begin))
	f.Add(e.Snapshot()[0])
	e.Cleared()
	f.Add(e.Delta(begin.Add(time.Second)))
	a := entry{key: 5, depth: 512, end: true}
	f.Add(delta(5, 0, 0, []entry{a}, nil))
	f.Add(snapshotPart(5, 0, true, a.mix(), []entry{a}))
	f.Fuzz(func(t *testing.T, b []byte) {
		sink := setSink{}
		d := NewDecoder(sink)
		b1, b2 := entry{key: 7, depth: 512, end: true}, entry{key: 8, depth: 530, end: true}
		if got, err := d.Apply(snapshotPart(4, 0, true, b1.mix()+b2.mix(), []entry{b1, b2})); got != Applied {
			t.Fatal(got, err)
		}
		before := maps.Clone(sink)
		for range 2 {
			got, err := d.Apply(b)
			changed := !maps.Equal(before, sink)
			if (err != nil || got == Gap || got == Duplicate || got == Snapshotting) && changed {
				t.Fatalf("%v, %v changed the sink", got, err)
			}
			if held := d.Keys() - 2; held > len(b)/(1+keyBytes) {
				t.Fatalf("%d keys out of %d bytes", held, len(b))
			}
			for k, depth := range sink {
				if v, ok := d.set.keys[k]; !ok || !v.end || v.depth != depth || depth == 0 || depth > MaxDepthTokens {
					t.Fatalf("sink holds %x at %d, the decoder %v", k, depth, v)
				}
			}
			before = maps.Clone(sink)
		}
	})
}

// BenchmarkDecoder applies the deltas of a worker that takes in and evicts
// 1,100 blocks a second in prompts of 300.
func BenchmarkDecoder(b *testing.B) {
	e := newChainEncoder(16, Options{})
	d := NewDecoder(&countSink{})
	d.Apply(e.Snapshot()[0])
	now := begin
	b.ReportAllocs()
	size := 0
	for b.Loop() {
		now = now.Add(time.Second)
		store(e, 1, 300)
		f := e.Delta(now)
		d.Apply(f)
		e.Cleared()
		size += len(f)
	}
	b.ReportMetric(float64(size)/float64(b.N), "B/frame")
}
