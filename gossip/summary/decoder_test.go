package summary

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"waypost/gossip/prefix"
)

var (
	keyOf100 = point24(100, 0x030201)
	keyOf200 = point24(200, 0x060504)
)

func TestOrder(t *testing.T) {
	sink := newKeySink()
	d := NewDecoder(sink)
	expect(t, d, "delta before any snapshot", deltaFrame(1, 0, 0, ops()), Gap, 0, false)
	expect(t, d, "snapshot", snapshotFrame(4, 0, true, keyOf100.mix(), ops().record(0, 1, 100, 1, 2, 3)), Applied, 4, true)
	expect(t, d, "old delta", deltaFrame(4, 0, 0, ops().del(1)), Duplicate, 4, true)
	expect(t, d, "delta from the future", deltaFrame(6, 0, 0, ops().del(1)), Gap, 4, true)
	if d.Anew() {
		t.Error("lost frames are taken for a new stream")
	}
	both := keyOf100.mix() + keyOf200.mix()
	expect(t, d, "next delta", deltaFrame(5, 0, both, ops().ext(1, 100, 4, 5, 6)), Applied, 5, true)
	expect(t, d, "again", deltaFrame(5, 0, both, ops().ext(1, 100, 4, 5, 6)), Duplicate, 5, true)
	if !maps.Equal(sink.held, map[HeldKey]int{{keyOf100, 100}: 1, {keyOf200, 200}: 1}) {
		t.Errorf("sink holds %v", sink.held)
	}
	expect(t, d, "clear with a new run", deltaFrame(6, flagClear, keyOf200.mix(), ops().root(200, 4, 5, 6)), Applied, 6, true)
	if !maps.Equal(sink.held, map[HeldKey]int{{keyOf200, 200}: 1}) || d.Runs() != 1 {
		t.Errorf("sink holds %v", sink.held)
	}
	expect(t, d, "old snapshot", snapshotFrame(5, 0, true, 0, ops()), Duplicate, 6, true)
	if d.Ops() != 2 {
		t.Errorf("%d operations: want those of the two deltas applied", d.Ops())
	}
}

func TestDigestMismatchKeepsWhatIsKnown(t *testing.T) {
	sink := newKeySink()
	d := NewDecoder(sink)
	expect(t, d, "snapshot", snapshotFrame(4, 0, true, keyOf100.mix(), ops().record(0, 1, 100, 1, 2, 3)), Applied, 4, true)
	expect(t, d, "wrong digest", deltaFrame(5, 0, 77, ops().ext(1, 100, 4, 5, 6)), DigestMismatch, 5, false)
	expect(t, d, "delta after it", deltaFrame(6, 0, 77, ops()), Gap, 5, false)
	expect(t, d, "wrong snapshot", snapshotFrame(6, 0, true, 1, ops()), DigestMismatch, 5, false)
	if len(sink.held) != 2 {
		t.Errorf("sink holds %v: a mismatch must not blind", sink.held)
	}
	expect(t, d, "snapshot of an earlier seq", snapshotFrame(3, 0, true, keyOf200.mix(), ops().record(0, 7, 200, 4, 5, 6)), Applied, 3, true)
	if !maps.Equal(sink.held, map[HeldKey]int{{keyOf200, 200}: 1}) {
		t.Errorf("sink holds %v", sink.held)
	}
}

// TestSkippedTrimIsNoticed: a stream from which one TRIM is missing differs in
// its digest.
func TestSkippedTrimIsNoticed(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 70)
	f.tick()
	f.tick()
	f.detach(70, 60)
	f.now = f.now.Add(time.Second)
	b := f.Delta(f.now)
	h, body, err := parseHeader(b)
	if err != nil || len(body) == 0 || f.Stats().Trims != 1 {
		t.Fatal(err, len(body), f.Stats())
	}
	if got, err := f.d.Apply(appendHeader(nil, h)); got != DigestMismatch || err != nil {
		t.Errorf("%v, %v", got, err)
	}
}

func TestSnapshotParts(t *testing.T) {
	sum := keyOf100.mix() + keyOf200.mix()
	sink := newKeySink()
	d := NewDecoder(sink)
	first := snapshotFrame(4, 0, false, sum, ops().record(0, 1, 100, 1, 2, 3))
	last := snapshotFrame(4, 1, true, sum, ops().record(1, 2, 200, 4, 5, 6))
	expect(t, d, "last part alone", last, Gap, 0, false)
	expect(t, d, "first part", first, Snapshotting, 0, false)
	expect(t, d, "first part again starts over", first, Snapshotting, 0, false)
	expect(t, d, "part of another snapshot", snapshotFrame(5, 1, true, sum, ops()), Gap, 0, false)
	expect(t, d, "the other half is gone", last, Gap, 0, false)
	expect(t, d, "first part", first, Snapshotting, 0, false)
	expect(t, d, "a part too far", snapshotFrame(4, 2, true, sum, ops()), Gap, 0, false)
	expect(t, d, "first part", first, Snapshotting, 0, false)
	if len(sink.held) != 0 {
		t.Errorf("a half snapshot reached the sink: %v", sink.held)
	}
	expect(t, d, "last part", last, Applied, 4, true)
	expect(t, d, "first part of a known snapshot", first, Duplicate, 4, true)
	if len(sink.held) != 2 || d.Runs() != 2 {
		t.Errorf("sink holds %v", sink.held)
	}
}

// TestDeltasDuringASnapshot: the stream goes on while a snapshot is pulled.
func TestDeltasDuringASnapshot(t *testing.T) {
	d := NewDecoder(newKeySink())
	expect(t, d, "empty snapshot", snapshotFrame(1, 0, true, 0, ops()), Applied, 1, true)
	expect(t, d, "first part", snapshotFrame(2, 0, false, keyOf100.mix(), ops().record(0, 1, 100, 1, 2, 3)), Snapshotting, 1, true)
	expect(t, d, "delta between", deltaFrame(2, 0, keyOf100.mix(), ops().root(100, 1, 2, 3)), Applied, 2, true)
	expect(t, d, "last part", snapshotFrame(2, 1, true, keyOf100.mix(), ops()), Duplicate, 2, true)
}

// TestEpochs: frames of another numbering are never applied as deltas, and a
// straggler from an earlier one cannot capture the decoder for good.
func TestEpochs(t *testing.T) {
	old := NewEncoder(Options{Key: testKey, Blocks: lineTable{16}, Epoch: 1})
	next := NewEncoder(Options{Key: testKey, Blocks: lineTable{16}, Epoch: 2})
	d := NewDecoder(newKeySink())
	expect(t, d, "old stream", old.Snapshot()[0], Applied, 0, true)
	expect(t, d, "old delta", old.Delta(begin), Applied, 1, true)
	expect(t, d, "delta of the new stream", next.Delta(begin), Gap, 1, true)
	if !d.Anew() {
		t.Error("a new stream is taken for lost frames")
	}
	expect(t, d, "new stream", next.Snapshot()[0], Applied, 1, true)
	expect(t, d, "straggler of the old stream", old.Delta(begin.Add(time.Minute)), Gap, 1, true)
	expect(t, d, "snapshot of the old stream", old.Snapshot()[0], Applied, 2, true)
	expect(t, d, "delta of the new stream", next.Delta(begin.Add(time.Minute)), Gap, 2, true)
	expect(t, d, "new stream again", next.Snapshot()[0], Applied, 2, true)
}

func TestRequireKey(t *testing.T) {
	other := NewEncoder(Options{Key: otherKey, Blocks: lineTable{16}, Epoch: 1})
	d := NewDecoder(newKeySink())
	d.RequireKey(testKey)
	for _, b := range [][]byte{other.Snapshot()[0], other.Delta(begin)} {
		_, err := d.Apply(b)
		if !errors.Is(err, ErrKeyID) || !strings.Contains(err.Error(), testKey.ID()) || !strings.Contains(err.Error(), otherKey.ID()) {
			t.Errorf("error %v, want one that names %s and %s", err, otherKey.ID(), testKey.ID())
		}
	}
	d.RequireKeys(testKey, otherKey)
	expect(t, d, "the second key will do", other.Snapshot()[0], Applied, 1, true)
	d.RequireKeys(otherKey, testKey)
	expect(t, d, "the order changes nothing", other.Delta(begin.Add(time.Minute)), Applied, 2, true)
	d.RequireKey(testKey)
	if _, _, ok := d.Have(); ok {
		t.Error("the key followed is not accepted any more, but the position counts")
	}
}

// TestPointsOfARunAreBounded: the shallowest point makes room, at both ends.
func TestPointsOfARunAreBounded(t *testing.T) {
	d, sink := goodDecoder(t)
	s := ops()
	for range 300 {
		s.ext(1, 1, 1, 1)
	}
	if got, err := d.Apply(deltaFrame(2, 0, 0, s)); got != DigestMismatch || err != nil {
		t.Fatal(got, err)
	}
	if r := &d.tree.runs[1]; r.points() != maxPoints || r.end() != 900 || !d.tree.knows(r, 900) || d.tree.knows(r, 550) {
		t.Errorf("%d points up to %d, want %d, the deepest ones", r.points(), r.end(), maxPoints)
	}
	if err := consistent(&d.tree, sink); err != nil {
		t.Error(err)
	}
	d.have = true
	if got, err := d.Apply(deltaFrame(3, 0, 0, ops().fork(1, 255).raw(5, 5).uv(3).raw(6, 6))); got != DigestMismatch || err != nil {
		t.Fatal(got, err)
	}
	if r := &d.tree.runs[1]; r.points() != maxPoints || !d.tree.knows(r, 645) || d.tree.knows(r, 646) {
		t.Errorf("a branch point found no room among %d", r.points())
	}
	if err := consistent(&d.tree, sink); err != nil {
		t.Error(err)
	}
}

// TestWorkIsBounded: small operations on a huge run must not stall a coordinator.
func TestWorkIsBounded(t *testing.T) {
	d, sink := goodDecoder(t)
	const tokens = 15_000 * prefix.ChunkTokens
	long := ops().root(tokens, make([]byte, 4+2*(tokens/prefix.ChunkTokens-1))...).trim(4, 1, 1, 1)
	few, many := *long, *long
	few.b, many.b = slices.Clone(long.b), slices.Clone(long.b)
	for i := range 1000 { // the end is a checkpoint, and a known point, in turn
		many.ext(4, 1, 9, 9).trim(4, 1)
		if i < 100 {
			few.ext(4, 1, 9, 9).trim(4, 1)
		}
	}
	_, err := d.Apply(deltaFrame(2, 0, 0, &many))
	if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), "too much") {
		t.Errorf("error %v", err)
	}
	if err := consistent(&d.tree, sink); err != nil {
		t.Error(err)
	}
	if got, err := d.Apply(deltaFrame(2, 0, 0, &few)); got != DigestMismatch || err != nil {
		t.Errorf("a frame of a tenth: %v, %v", got, err)
	}
}

func TestRunsArePacked(t *testing.T) {
	if n := unsafe.Sizeof(run{}); n != 24 {
		t.Errorf("a run takes %d bytes; a thousand decoders pay for each", n)
	}
	r := newRun(0x1122334455667788, MaxRuns, MaxDepthTokens-5)
	r.setEnd(MaxDepthTokens)
	r.startPoints += maxPoints
	if r.base() != 0x1122334455667788 || r.parent != MaxRuns || r.start() != MaxDepthTokens-5 || r.end() != MaxDepthTokens || r.points() != maxPoints {
		t.Errorf("%+v", r)
	}
}

func TestTooManyRuns(t *testing.T) {
	d, _ := goodDecoder(t)
	seq := uint64(2)
	for {
		s := ops()
		for len(s.b) < MaxFrameBytes-100 {
			s.root(5, 1, 2, 3)
		}
		d.have, d.seq = true, seq-1
		_, err := d.Apply(deltaFrame(seq, 0, 0, s))
		if err != nil {
			if !errors.Is(err, ErrFrame) || d.Runs() > MaxRuns || d.Runs() < 3 {
				t.Errorf("%v at %d runs", err, d.Runs())
			}
			return
		}
		if d.Runs() > MaxRuns {
			t.Fatalf("%d runs", d.Runs())
		}
		seq++
	}
}

// TestGoldenFrames pins the bytes of FORMAT.md.
func TestGoldenFrames(t *testing.T) {
	f := followLine(t, Options{})
	var out strings.Builder
	show := func(name string, b []byte) { fmt.Fprintf(&out, "%s\n%x\n", name, b) }
	tick := func(name string) {
		f.now = f.now.Add(time.Second)
		b := f.Delta(f.now)
		f.take(b)
		show(name, b)
	}
	show("snapshot before the first delta", f.Snapshot()[0])
	f.store(1, 40)
	f.store(41, 41)
	tick("prompt of 640 tokens")
	f.store(42, 80)
	f.store(81, 81)
	tick("continued to 1280 tokens")
	for i, parent := range []uint32{32, 50, 81} { // at a checkpoint, at an unknown and at a known point
		f.Attached(Block{ID: 100 + uint32(i), Parent: parent, StartTokens: parent * 16, EndTokens: parent*16 + 16, Usable: true})
	}
	f.Attached(Block{ID: 103, Parent: 81, StartTokens: 1296, EndTokens: 1312, Usable: true})
	tick("three forks")
	f.UsableChanged(60, false)
	f.TierChanged(80, TierHost)
	f.TierChanged(81, TierDisk)
	tick("a block unusable, the last ones in host memory and on disk")
	for _, b := range [][]byte{f.Snapshot()[0]} {
		show("snapshot", b)
	}
	f.Detached(103)
	f.Detached(102)
	f.detach(81, 70)
	tick("run deleted, another trimmed")
	if err := f.SetKeys(testKey, otherKey); err != nil {
		t.Fatal(err)
	}
	tick("nothing new")
	f.store(70, 71)
	f.store(72, 72)
	tick("two cluster keys")
	f.Cleared()
	f.store(1, 2)
	f.store(3, 3)
	tick("cleared, 32 tokens stored")
	checkGolden(t, "testdata/frames.golden", out.String())
	if err := consistent(&f.d.tree, f.sink); err != nil {
		t.Error(err)
	}
}

func checkGolden(t *testing.T, name, got string) {
	t.Helper()
	want, err := os.ReadFile(name)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		want, err = []byte(got), os.WriteFile(name, []byte(got), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s: run with UPDATE_GOLDEN=1 if that is meant\ngot:\n%s\nwant:\n%s", name, got, want)
	}
}

func TestExtentsOfSpans(t *testing.T) {
	u := usable{stride: 48, floor: 96, spans: []span{{192, 288}, {480, 480}}}
	open := usable{stride: 48, floor: 96, open: true, spans: []span{{192, 192}}}
	for depth, want := range map[uint32][2]uint32{
		100: {96, 96}, 191: {96, 96}, 192: {192, 192}, 250: {240, 240}, 288: {288, 288}, 300: {288, 288}, 479: {288, 432}, 480: {480, 480}, 512: {480, 480}, 530: {480, 528},
	} {
		if got := u.at(depth); got != want[0] {
			t.Errorf("at %d: %d, want %d", depth, got, want[0])
		}
		if got := open.at(depth); got != want[1] {
			t.Errorf("open, at %d: %d, want %d", depth, got, want[1])
		}
	}
	l := limit{tier: tier{gpu: 100, host: 200}}
	if got, want := l.extent(300), (Extent{300, 100, 200}); got != want {
		t.Errorf("extent %v, want %v", got, want)
	}
	if got, want := l.extent(150), (Extent{150, 100, 150}); got != want {
		t.Errorf("extent %v, want %v", got, want)
	}
}

func TestDefinitionOfIndexKeys(t *testing.T) {
	k := prefix.Key(0x1122334455667788)
	if CheckpointKey(0, 512, k) != chain(0, 512, 0x11223344) || CheckpointKey(5, 1024, k) != chain(5, 1024, 0x1122) ||
		PointKey(0, 100, k) != chain(0, 100, 0x112233) || PointKey(5, 600, k) != chain(5, 600, 0x1122) {
		t.Error("an index key uses other bits than it says")
	}
	if fingerprintOf(k, 512) != 0x11223344 || fingerprintOf(k, 1024) != 0x1122 || fingerprintOf(k, 100) != 0x112233 || fingerprintOf(k, 600) != 0x1122 {
		t.Error("a fingerprint has other bits than index keys use")
	}
}
