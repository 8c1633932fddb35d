package summary

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

// TestPromptEndsAreTold: where prompts end becomes a known end, however the
// frame cuts what grows behind them.
func TestPromptEndsAreTold(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 20)
	f.store(21, 30)
	f.expect("a prompt in two pieces", 480)
	f.store(31, 31)
	f.store(32, 50)
	f.expect("an answer, and the next prompt at once", 496, 512, 800)
	f.store(51, 90)
	f.store(91, 91)
	f.expect("a prompt, and an answer began", 1024, 1440)
	f.store(92, 92)
	f.store(93, 100)
	f.store(101, 101)
	f.expect("the answer, another prompt and its answer began", 1472, 1536, 1600)
}

func TestAnswersAreHeldBack(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 10)
	next := uint32(11)
	grow := func() { f.store(next, next); next++ }
	grow()
	f.expect("the prompt's end at once", 160)
	for range 14 {
		grow()
		f.expect("growing")
	}
	grow()
	f.expect("after 15 s", 416)
	for next*16 <= 544 { // block 32 ends at the checkpoint
		grow()
	}
	f.expect("past a checkpoint", 512)
	f.expect("quiet for a second, but it grew on before")
	f.expect("quiet for two", 544)
	if want := []uint32{160, 416, 512, 544}; !slices.Equal(f.told(), want) {
		t.Errorf("in the end %v are told, want %v: old ends stay known", f.told(), want)
	}
	if len(f.held) != 0 {
		t.Errorf("%d ends still held", len(f.held))
	}
}

func TestHeldEndsFollowEvictionAndForks(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 4)
	f.store(5, 5)
	f.store(6, 6)
	f.expect("prompt", 64)
	f.detach(6, 6)
	f.expect("held end went, quiet for a second", 80)
	f.store(6, 6)
	f.expect("one block after a rest is a prompt", 96)
	f.store(7, 7)
	f.expect("held again")
	f.Attached(Block{ID: 8, Parent: 7, StartTokens: 112, EndTokens: 128, Usable: true})
	f.Attached(Block{ID: 101, Parent: 7, StartTokens: 112, EndTokens: 128, Usable: true})
	added, _ := f.tick()
	if !slices.Contains(added, 112) || len(f.held) != 0 || f.Stats().Runs != 2 {
		t.Errorf("a held end that forked is not told: %v, %d held, %d runs", added, len(f.held), f.Stats().Runs)
	}
	f.detach(101, 101)
	f.detach(8, 3)
	f.store(3, 3)
	f.detach(3, 2)
	added, removed := f.tick()
	f.want("what was held went", added, removed, []uint32{16}, []uint32{128, 128, 112, 96, 80, 64})
}

func TestTrimTellsTheNewEnd(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 70)
	f.expect("stored", 512, 1024, 1120)
	f.detach(70, 51)
	added, removed := f.tick()
	f.want("trimmed", added, removed, []uint32{800}, []uint32{1120, 1024})
	f.detach(50, 33)
	added, removed = f.tick()
	f.want("trimmed to a checkpoint", added, removed, nil, []uint32{800})
	f.store(33, 70)
	f.detach(70, 40)
	f.store(40, 70)
	f.expect("refilled", 1024, 1120)
	f.detach(70, 1)
	added, removed = f.tick()
	f.want("deleted", added, removed, nil, []uint32{1120, 1024, 512})
	if s := f.Stats(); s.Runs != 0 || s.Deletes != 1 || s.Trims != 2 {
		t.Errorf("%+v", s)
	}
}

// TestTrimmedAndRefilledBetweenFrames: what left and came back as something
// else must not keep its old names.
func TestTrimmedAndRefilledBetweenFrames(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 70)
	f.expect("stored", 512, 1024, 1120)
	f.detach(70, 40)
	f.store(40, 80)
	added, removed := f.tick()
	f.want("refilled", added, removed, []uint32{624, 1024, 1280}, []uint32{1120, 1024})
	if want := []uint32{512, 624, 1024, 1280}; !slices.Equal(f.told(), want) {
		t.Errorf("%v are told, want %v", f.told(), want)
	}
}

// TestRunNumbers: the smallest free number, children before parents leave, and
// a parent's trim goes before what hangs on its new end.
func TestRunNumbers(t *testing.T) {
	f := follow(t, Options{Blocks: starTable{16}})
	root := func(id uint32) {
		f.Attached(Block{ID: id, EndTokens: 16, Usable: true})
	}
	for id := uint32(1); id <= 5; id++ {
		root(id)
	}
	f.tick()
	number := func(id uint32) uint32 { return f.runs[f.nodes[id].run()].number }
	for id := uint32(1); id <= 5; id++ {
		if number(id) != id {
			t.Errorf("block %d has number %d", id, number(id))
		}
	}
	f.Detached(4)
	f.Detached(2)
	f.tick()
	for id := uint32(6); id <= 8; id++ {
		root(id)
	}
	f.tick()
	for id, want := range map[uint32]uint32{6: 2, 7: 4, 8: 6} {
		if number(id) != want {
			t.Errorf("block %d has number %d, want %d", id, number(id), want)
		}
	}
}

func TestHeartbeat(t *testing.T) {
	e := NewEncoder(Options{Key: testKey, Blocks: lineTable{16}, Heartbeat: 3 * time.Second})
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
	if _, body, err := parseHeader(b); err != nil || len(body) != 0 {
		t.Error("a heartbeat with changes")
	}
}

func TestAgeCoversTheOldestChange(t *testing.T) {
	f := followLine(t, Options{})
	f.tick()
	f.store(1, 3)
	f.store(4, 4)
	f.now = f.now.Add(-300 * time.Millisecond)
	f.tick()
	if got := f.d.Age(); got != 700*time.Millisecond {
		t.Errorf("age %v, want 700 ms: the change came at any time since the last frame", got)
	}
	f.tick()
	if got := f.d.Age(); got != time.Second || len(f.told()) != 2 {
		t.Errorf("age %v of an end held a second; told %v", got, f.told())
	}
	f.tick()
	if got := f.d.Age(); got != 0 {
		t.Errorf("age %v of a heartbeat", got)
	}
}

func TestReplayRingIsBounded(t *testing.T) {
	f := followLine(t, Options{ReplayBytes: 600})
	var all [][]byte
	for i := range uint32(60) {
		f.store(1+2*i, 2+2*i)
		f.now = f.now.Add(time.Second)
		all = append(all, f.Delta(f.now))
		if f.replay.bytes > 600 {
			t.Fatalf("%d bytes kept", f.replay.bytes)
		}
	}
	if _, ok := f.Replay(0); ok {
		t.Error("replayed what is gone")
	}
	got, ok := f.Replay(55)
	if !ok || !slices.EqualFunc(got, all[55:], bytes.Equal) {
		t.Errorf("replay of the last five: %d frames, %v", len(got), ok)
	}
	if got, ok := f.Replay(60); !ok || len(got) != 0 {
		t.Errorf("replay of nothing: %d frames, %v", len(got), ok)
	}
	if _, ok := f.Replay(61); ok {
		t.Error("replayed from the future")
	}
}

func TestReplayOfAFrameBeyondTheLimit(t *testing.T) {
	f := followLine(t, Options{ReplayBytes: 40})
	f.Delta(begin)
	f.store(1, 1500)
	f.store(1501, 1501)
	f.Delta(begin.Add(time.Second))
	if _, ok := f.Replay(1); ok {
		t.Error("replayed a frame that was not kept")
	}
	f.Delta(begin.Add(2 * time.Second))
	if got, ok := f.Replay(2); !ok || len(got) != 1 {
		t.Errorf("%d frames, %v", len(got), ok)
	}
}

// TestUnaskedChangesStayBounded: without anybody to tell, changes that take
// each other back leave nothing behind.
func TestUnaskedChangesStayBounded(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 2)
	f.tick()
	f.tick()
	for range 100_000 {
		f.detach(2, 2)
		f.store(2, 2)
		f.detach(2, 1)
		f.store(1, 1)
		f.store(2, 2)
	}
	if n := len(f.dirty) + len(f.gone) + len(f.held) + len(f.runs) + len(f.free); n > 12 {
		t.Errorf("%d things remembered", n)
	}
}

func TestBlocksBeyondMaxDepthAreNotFollowed(t *testing.T) {
	f := followLine(t, Options{})
	f.Attached(Block{ID: 3, EndTokens: MaxDepthTokens + 1, Usable: true})
	f.Attached(Block{ID: 4, Parent: 3, StartTokens: MaxDepthTokens + 1, EndTokens: MaxDepthTokens + 17, Usable: true})
	f.StoreEnded(4)
	f.UsableChanged(4, false)
	f.TierChanged(4, TierDisk)
	f.Detached(4)
	f.Detached(3)
	f.Detached(4000)
	if added, removed := f.tick(); len(added)+len(removed) != 0 || f.Seq() != 1 {
		t.Errorf("told %v, %v", added, removed)
	}
}

func TestClear(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 40)
	f.store(41, 41)
	f.tick()
	f.Cleared()
	f.store(1, 2)
	f.store(3, 3)
	added, removed := f.tick()
	slices.Sort(removed)
	f.want("cleared and stored", added, removed, []uint32{32}, []uint32{512, 640})
	f.Cleared()
	f.Cleared()
	added, removed = f.tick()
	f.want("cleared", added, removed, nil, []uint32{32})
	before := f.Stats().Clears
	f.Cleared()
	f.tick()
	if f.Stats().Clears != before {
		t.Error("a clear of nothing was told")
	}
}

func (manyTable) PlaceOf(id uint32) (parent, endTokens uint32) { return id - 1, id % 1000 * 16 }

func (manyTable) PointOf(id uint32) prefix.Chain { return prefix.Chain(id) }

func (manyTable) CheckpointsIn(id uint32, dst []Checkpoint) []Checkpoint {
	return append(dst, Checkpoint{DepthTokens: id % 1000 * 16, Chain: prefix.Chain(id) << 32})
}

func (manyTable) DomainOf(uint16) prefix.Domain { return prefix.Domain{Model: "m"} }

func (constantTable) PlaceOf(uint32) (parent, endTokens uint32)             { return 0, 16 }
func (constantTable) PointOf(uint32) prefix.Chain                           { return 16 }
func (constantTable) CheckpointsIn(_ uint32, dst []Checkpoint) []Checkpoint { return dst }
func (constantTable) DomainOf(uint16) prefix.Domain                         { return prefix.Domain{Model: "m"} }

// TestTableThatBreaksItsContract: the stream starts over and ends up right.
func TestTableThatBreaksItsContract(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 100)
	f.Attached(Block{ID: 200, Parent: 70, StartTokens: 1120, EndTokens: 1136, Usable: true})
	f.tick()
	f.tick()
	before := f.Epoch()
	f.detach(100, 50) // but block 200 hangs on block 70
	f.now = f.now.Add(time.Second)
	if got, err := f.d.Apply(f.Delta(f.now)); got != Gap || err != nil || f.Epoch() != before+1 || f.Stats().Restarts != 1 {
		t.Errorf("%v, %v, epoch %d, %+v", got, err, f.Epoch(), f.Stats())
	}
	f.Detached(200)
	for range 2 {
		f.now = f.now.Add(time.Second)
		f.Delta(f.now)
	}
	for _, b := range f.Snapshot() {
		f.take(b)
	}
	if want := []uint32{512, 784}; !slices.Equal(f.told(), want) {
		t.Errorf("%v are told, want %v", f.told(), want)
	}
	if err := consistent(&f.d.tree, f.sink); err != nil {
		t.Error(err)
	}
}
