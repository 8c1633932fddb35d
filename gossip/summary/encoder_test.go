package summary

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

var (
	testKey = prefix.ClusterKey{1, 2, 3}
	begin   = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
)

// chainTable is the Blocks of one long prefix, of which nobody compares tokens:
// chain values are the depths.
type chainTable struct{ blockTokens uint32 }

func (c chainTable) PointOf(id uint32) prefix.Chain { return prefix.Chain(id * c.blockTokens) }

func (c chainTable) CheckpointsIn(id uint32, dst []Checkpoint) []Checkpoint {
	for d := (id-1)*c.blockTokens + 1; d <= id*c.blockTokens; d++ {
		if d%prefix.ChunkTokens == 0 {
			dst = append(dst, Checkpoint{DepthTokens: d, Chain: prefix.Chain(d)})
		}
	}
	return dst
}

func (c chainTable) DomainOf(uint16) prefix.Domain { return prefix.Domain{Model: "m"} }

func newChainEncoder(blockTokens uint32, o Options) *Encoder {
	o.Key, o.Blocks, o.Epoch = testKey, chainTable{blockTokens}, 9
	return NewEncoder(o)
}

// store attaches blocks from..to of the chain as one store event.
func store(e *Encoder, from, to uint32) {
	t := e.blocks.(chainTable).blockTokens
	for id := from; id <= to; id++ {
		e.Attached(Block{ID: id, Parent: id - 1, StartTokens: (id - 1) * t, EndTokens: id * t, Usable: true})
	}
	e.StoreEnded(to)
}

// told are the depths that the stream tells.
func told(e *Encoder) []uint32 {
	var depths []uint32
	for _, x := range e.set.told() {
		depths = append(depths, x.depth)
	}
	return depths
}

// changes are the depths that a delta adds and the number of its removals.
func changes(t *testing.T, b []byte) (adds []uint32, removes int) {
	t.Helper()
	f, err := parse(b)
	if err != nil {
		t.Fatal(err)
	}
	f.eachAdd(func(e entry) { adds = append(adds, e.depth) })
	return adds, len(f.removes) / keyBytes
}

func TestGrowthIsHeldBack(t *testing.T) {
	e := newChainEncoder(16, Options{})
	at := func(s float64) time.Time { return begin.Add(time.Duration(s * float64(time.Second))) }
	expect := func(s float64, want ...uint32) {
		t.Helper()
		var adds []uint32
		removes := 0
		if b := e.Delta(at(s)); b != nil {
			adds, removes = changes(t, b)
		}
		if !slices.Equal(adds, want) || removes != 0 {
			t.Errorf("at %v s: adds %v, removes %d, want adds %v", s, adds, removes, want)
		}
	}
	store(e, 1, 10)
	expect(0, 160) // the prompt's end at once
	next := uint32(11)
	grow := func() { store(e, next, next); next++ }
	for s := 1.0; s <= 5; s++ {
		grow()
		expect(s) // held
	}
	grow()
	expect(6, 256)      // five seconds after growth was first seen
	for next*16 < 528 { // on to block 32, which ends at the checkpoint
		grow()
	}
	expect(7, 512)
	grow()
	expect(8)
	expect(9)
	expect(10, 528) // quiet for two seconds
	if want := []uint32{160, 256, 512, 528}; !slices.Equal(told(e), want) {
		t.Errorf("in the end %v are told, want %v: old ends stay known", told(e), want)
	}
	if len(e.held) != 0 {
		t.Errorf("%d ends still held", len(e.held))
	}
}

func TestHeldEndsFollowEvictionAndForks(t *testing.T) {
	e := newChainEncoder(16, Options{})
	store(e, 1, 4)
	e.Delta(begin)
	store(e, 5, 5)
	store(e, 6, 6)
	e.Detached(6)
	e.Delta(begin.Add(time.Second))
	if want := []uint32{64, 80}; !slices.Equal(told(e), want) {
		t.Errorf("after the held end went, %v are told, want %v", told(e), want)
	}
	store(e, 6, 6)
	e.Attached(Block{ID: 100, Parent: 6, StartTokens: 96, EndTokens: 112, Usable: true})
	e.Attached(Block{ID: 101, Parent: 6, StartTokens: 96, EndTokens: 112, Usable: true})
	e.Delta(begin.Add(2 * time.Second))
	if !slices.Contains(told(e), 96) || len(e.held) != 0 {
		t.Errorf("a held end that forked is not told: %v, %d held", told(e), len(e.held))
	}
}

func TestTrimAndRefill(t *testing.T) {
	e := newChainEncoder(16, Options{})
	store(e, 1, 70)
	e.Delta(begin)
	for id := uint32(70); id > 50; id-- {
		e.Detached(id)
	}
	adds, removes := changes(t, e.Delta(begin.Add(time.Second)))
	if !slices.Equal(adds, []uint32{800}) || removes != 2 {
		t.Errorf("trim: adds %v, removes %d, want the new end and the loss of checkpoint 1024 and end 1120", adds, removes)
	}
	store(e, 51, 70)
	e.Detached(70)
	store(e, 70, 70)
	adds, removes = changes(t, e.Delta(begin.Add(2*time.Second)))
	if !slices.Contains(adds, 1024) || removes != 0 {
		t.Errorf("refill: adds %v, removes %d", adds, removes)
	}
}

func TestHeartbeat(t *testing.T) {
	e := newChainEncoder(16, Options{Heartbeat: 3 * time.Second})
	if e.Delta(begin) == nil {
		t.Error("no first frame")
	}
	if e.Delta(begin.Add(2999*time.Millisecond)) != nil {
		t.Error("a frame before the heartbeat")
	}
	b := e.Delta(begin.Add(3 * time.Second))
	if b == nil || e.Seq() != 2 {
		t.Error("no heartbeat")
	}
	if adds, removes := changes(t, b); len(adds)+removes != 0 {
		t.Error("a heartbeat with changes")
	}
}

func TestAgeCoversTheOldestChange(t *testing.T) {
	e := newChainEncoder(16, Options{})
	age := func(b []byte) time.Duration {
		f, err := parse(b)
		if err != nil {
			t.Fatal(err)
		}
		return f.age()
	}
	e.Delta(begin)
	store(e, 1, 3)
	if got := age(e.Delta(begin.Add(700 * time.Millisecond))); got != 700*time.Millisecond {
		t.Errorf("age %v, want 700 ms: the change came at any time since the last frame", got)
	}
	if got := age(e.Delta(begin.Add(5 * time.Second))); got != 0 {
		t.Errorf("age %v of a heartbeat", got)
	}
	store(e, 4, 4)
	for s := 6; s < 20; s++ {
		b := e.Delta(begin.Add(time.Duration(s) * time.Second))
		if adds, _ := changes(t, b); len(adds) > 0 {
			if got := age(b); got != 2*time.Second {
				t.Errorf("age %v of an end held two seconds", got)
			}
			return
		}
	}
	t.Error("the held end never came")
}

func TestReplayRingIsBounded(t *testing.T) {
	e := newChainEncoder(16, Options{ReplayBytes: 400})
	now := begin
	var all [][]byte
	for i := range uint32(60) {
		now = now.Add(time.Second)
		store(e, 1+2*i, 2+2*i)
		all = append(all, e.Delta(now))
		if e.replay.bytes > 400 {
			t.Fatalf("%d bytes kept", e.replay.bytes)
		}
	}
	if _, ok := e.Replay(0); ok {
		t.Error("replayed what is gone")
	}
	got, ok := e.Replay(55)
	if !ok || !slices.EqualFunc(got, all[55:], slices.Equal[[]byte]) {
		t.Errorf("replay of the last five: %d frames, %v", len(got), ok)
	}
	if got, ok := e.Replay(60); !ok || len(got) != 0 {
		t.Errorf("replay of nothing: %d frames, %v", len(got), ok)
	}
	if _, ok := e.Replay(61); ok {
		t.Error("replayed from the future")
	}
	store(e, 121, 122)
	e.Delta(now.Add(time.Second))
	if _, ok := e.Replay(60); !ok {
		t.Error("a frame within the limit is not replayed")
	}
}

func TestReplayOfAFrameBeyondTheLimit(t *testing.T) {
	e := newChainEncoder(512, Options{ReplayBytes: 100})
	e.Delta(begin)
	store(e, 1, 50)
	e.Delta(begin.Add(time.Second))
	if _, ok := e.Replay(1); ok {
		t.Error("replayed a frame that was not kept")
	}
	store(e, 51, 51)
	e.Delta(begin.Add(2 * time.Second))
	if got, ok := e.Replay(2); !ok || len(got) != 1 {
		t.Errorf("%d frames, %v", len(got), ok)
	}
}

// TestLargeSets splits deltas and snapshots of more keys than a frame holds.
func TestLargeSets(t *testing.T) {
	e := newChainEncoder(16, Options{})
	e.Delta(begin)
	empty := e.Snapshot()[0]
	rng := rand.New(rand.NewPCG(1, 1))
	const keys = 3*maxDeltaEntries + 17
	for range keys {
		e.set.change(prefix.Key(rng.Uint64()|1), 1+rng.Uint32N(MaxDepthTokens), 1, 1)
	}
	d := NewDecoder(&countSink{})
	d.Apply(empty)
	frames := 0
	for b := e.Delta(begin); b != nil; b = e.Delta(begin) {
		frames++
		if got, err := d.Apply(b); got != Applied || len(b) > MaxFrameBytes {
			t.Fatalf("a delta of %d bytes: %v, %v", len(b), got, err)
		}
	}
	if frames != 4 || d.Keys() != keys {
		t.Errorf("%d deltas with %d keys, want 4 with %d", frames, d.Keys(), keys)
	}
	fresh := NewDecoder(&countSink{})
	parts := e.Snapshot()
	for i, b := range parts {
		want := Snapshotting
		if i == len(parts)-1 {
			want = Applied
		}
		if got, err := fresh.Apply(b); got != want || len(b) > MaxFrameBytes {
			t.Fatalf("part %d of %d: %d bytes, %v, %v", i, len(parts), len(b), got, err)
		}
	}
	if len(parts) != 4 || fresh.Keys() != keys || fresh.set.digest != e.set.digest {
		t.Errorf("%d parts with %d keys", len(parts), fresh.Keys())
	}
}

func TestKeysAreBounded(t *testing.T) {
	e := newChainEncoder(16, Options{})
	if e.set.most != MaxKeys {
		t.Errorf("at most %d keys, want %d", e.set.most, MaxKeys)
	}
	e.set.most = 1000
	for k := prefix.Key(1); k <= 1100; k++ {
		e.set.change(k, 512, 1, 1)
	}
	if e.Delta(begin); e.Keys() != 1000 || len(e.set.dirty) != 100 {
		t.Errorf("%d keys told, %d wait", e.Keys(), len(e.set.dirty))
	}
	if e.Delta(begin) != nil {
		t.Error("a frame about nothing")
	}
}

// TestUnaskedChangesStayBounded: without anybody to tell, changes that take
// each other back leave nothing behind.
func TestUnaskedChangesStayBounded(t *testing.T) {
	e := newChainEncoder(16, Options{})
	for k := prefix.Key(1); k <= 100_000; k++ {
		e.set.change(k, 512, 1, 1)
		e.set.change(k, 512, -1, -1)
	}
	store(e, 1, 2)
	for range 100_000 {
		e.Detached(2)
		store(e, 2, 2)
	}
	if n := len(e.set.keys) + len(e.set.dirty); n > 4*minSieve {
		t.Errorf("%d keys remembered", n)
	}
	if len(e.suspects) > 4 || len(e.held) > 1 {
		t.Errorf("%d suspects, %d held", len(e.suspects), len(e.held))
	}
}

func TestBlocksBeyondMaxDepthAreNotFollowed(t *testing.T) {
	e := newChainEncoder(16, Options{})
	e.Attached(Block{ID: 3, StartTokens: 0, EndTokens: MaxDepthTokens + 1, Usable: true})
	e.StoreEnded(3)
	e.UsableChanged(3, false)
	e.Detached(3)
	e.Detached(4000)
	if b := e.Delta(begin); e.Keys() != 0 || b == nil {
		t.Errorf("%d keys", e.Keys())
	}
}

// BenchmarkEncoder is the encoder's part of a block event: prompts of 300
// blocks come and go, and a delta is built every 1,000 blocks.
func BenchmarkEncoder(b *testing.B) {
	e := newChainEncoder(16, Options{})
	b.ReportAllocs()
	now := begin
	n := 0
	for b.Loop() {
		store(e, 1, 300)
		for id := uint32(300); id > 0; id-- {
			e.Detached(id)
			if id%100 == 0 {
				now = now.Add(time.Second)
				e.Delta(now)
			}
		}
		n += 600
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(n), "ns/block-event")
}
