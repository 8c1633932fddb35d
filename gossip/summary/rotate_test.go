package summary

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

// TestManyRuns splits deltas and snapshots that exceed a frame, and tells no
// more runs than a decoder takes.
func TestManyRuns(t *testing.T) {
	const more, tokens = 100, 4112
	f := follow(t, Options{Blocks: starTable{tokens}, BudgetBytesPerSec: -1})
	for id := uint32(1); id <= MaxRuns+more; id++ {
		f.Attached(Block{ID: id, EndTokens: tokens, Usable: true})
	}
	deltas := 0
	for b := f.Delta(begin); b != nil; b = f.Delta(begin) {
		if deltas++; len(b) > MaxFrameBytes {
			t.Fatalf("a frame of %d bytes", len(b))
		}
		f.take(b)
	}
	if deltas < 2 || f.d.Runs() != MaxRuns || f.Stats().Runs != MaxRuns {
		t.Errorf("%d deltas, %d runs told, %d taken, want %d", deltas, f.Stats().Runs, f.d.Runs(), MaxRuns)
	}
	parts := f.Snapshot()
	fresh := NewDecoder(newKeySink())
	for i, b := range parts {
		want := Snapshotting
		if i == len(parts)-1 {
			want = Applied
		}
		if got, err := fresh.Apply(b); got != want || len(b) > MaxFrameBytes {
			t.Fatalf("part %d of %d: %d bytes, %v, %v", i, len(parts), len(b), got, err)
		}
	}
	if len(parts) < 2 || fresh.Keys() != f.Keys() || fresh.tree.digest != f.d.tree.digest {
		t.Errorf("%d parts with %d keys, want %d", len(parts), fresh.Keys(), f.Keys())
	}
	for id := uint32(1); id <= more; id++ {
		f.Detached(id)
	}
	f.now = begin
	f.tick()
	if n := f.runs[f.nodes[MaxRuns+more].run()].number; f.d.Runs() != MaxRuns || n == 0 {
		t.Errorf("the last block has number %d, %d runs told: room is not used again", n, f.d.Runs())
	}
}

// TestBudget: above the budget the stream tells less and later, keeps all runs,
// and tells everything once the pressure has gone.
func TestBudget(t *testing.T) {
	f := follow(t, Options{Blocks: manyTable{}, BudgetBytesPerSec: 60})
	rng := rand.New(rand.NewPCG(5, 6))
	frames := map[int]int{}
	worst := 0
	for range 200 {
		churn(f, rng, 10)
		f.tick()
		frames[f.Stats().Pressure]++
		worst = max(worst, f.Stats().Pressure)
	}
	if worst != maxPressure {
		t.Fatalf("pressure %d, want %d", worst, maxPressure)
	}
	if s := f.Stats(); s.Frames > 150 {
		t.Errorf("%d frames in 200 s: the interval did not grow", s.Frames)
	}
	live, short := 0, 0
	for range 6 {
		f.tick()
	}
	for i := range f.runs {
		r := &f.runs[i]
		if r.end == r.start {
			continue
		}
		live++
		if r.number == 0 {
			t.Errorf("a run was never told")
		} else if f.toldEnd(r) < r.end {
			short++
		}
	}
	if live != f.Stats().Runs || short < live/2 {
		t.Errorf("%d runs, %d told, %d of them in part", live, f.Stats().Runs, short)
	}
	matched := uint32(0)
	for i := range f.runs {
		if r := &f.runs[i]; r.end > r.start && f.toldEnd(r) < r.end {
			matched = uint32(i)
		}
	}
	r := &f.runs[matched]
	f.Attached(Block{ID: 60_001, Parent: r.tip - 1, StartTokens: r.end - 16, EndTokens: r.end, Usable: true})
	for range 6 {
		f.tick()
	}
	if f.toldEnd(r) != r.end {
		t.Error("a run that something forks off was not told whole")
	}
	for range 120 {
		f.tick()
	}
	if f.Stats().Pressure != 0 {
		t.Fatalf("pressure %d remains", f.Stats().Pressure)
	}
	for i := range f.runs {
		if r := &f.runs[i]; r.end > r.start && f.toldEnd(r) != r.end {
			t.Fatalf("a run of %d tokens stays told up to %d", r.end, f.toldEnd(r))
		}
	}
}

// TestClearDoesNotWait: pressure delays a frame, but not one that says that
// everything is gone.
func TestClearDoesNotWait(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 40)
	f.tick()
	f.budget.level = maxPressure
	f.store(41, 60)
	f.expect("under pressure")
	f.Cleared()
	if _, removed := f.tick(); len(removed) != 2 || f.d.Keys() != 0 {
		t.Errorf("removed %v, %d keys left", removed, f.d.Keys())
	}
}

// TestWorkOfAFrame: a frame that costs much leaves the rest to the next, and the
// next begins anew.
func TestWorkOfAFrame(t *testing.T) {
	f := follow(t, Options{Blocks: lineTable{512}, BudgetBytesPerSec: -1})
	const long = 12_000
	f.store(1, long)
	f.tick()
	for id := uint32(long + 1); id < long+maxWork/2/long+50; id++ {
		f.store(id, id)
		f.expect("one more", id*512)
	}
}

// TestCompaction: when few runs of many are left, they are numbered anew in a
// new epoch, and nothing else begins one.
func TestCompaction(t *testing.T) {
	f := follow(t, Options{Blocks: starTable{1040}})
	attach := func(from, to uint32) {
		for id := from; id <= to; id++ {
			f.Attached(Block{ID: id, EndTokens: 1040, Usable: true})
		}
	}
	attach(1, 300)
	f.tick()
	for id := uint32(1); id <= 280; id++ {
		if id != 3 {
			f.Detached(id)
		}
	}
	before := f.Epoch()
	f.tick()
	if f.Epoch() != before+1 || f.Stats().Compactions != 1 || f.Stats().Slots != 22 {
		t.Fatalf("epoch %d after %d, %+v", f.Epoch(), before, f.Stats())
	}
	if _, ok := f.Replay(f.Seq() - 1); ok {
		t.Error("replayed frames of the old numbering")
	}
	f.Detached(3)
	attach(500, 510)
	f.now = f.now.Add(time.Second)
	b := f.Delta(f.now)
	if got, err := f.d.Apply(b); got != Gap || err != nil {
		t.Errorf("a frame of the new epoch: %v, %v", got, err)
	}
	f.sink.news()
	for _, s := range f.Snapshot() {
		f.take(s)
	}
	added, removed := f.sink.news()
	if len(added) != 33 || len(removed) != 3 {
		t.Errorf("the snapshot of the new epoch told %d additions and %d removals, want 33 and 3: the rest stays", len(added), len(removed))
	}
	attach(511, 520)
	f.tick()
	if f.Stats().Compactions != 1 {
		t.Error("renumbered again")
	}
}

// TestRotation: two cluster keys at once, each follower undisturbed, and the
// price paid only meanwhile.
func TestRotation(t *testing.T) {
	f := followLine(t, Options{})
	other := newKeySink()
	d := NewDecoder(other)
	d.RequireKeys(otherKey, testKey)
	for _, b := range f.Snapshot() {
		if _, err := d.Apply(b); err != nil {
			t.Fatal(err)
		}
	}
	next := uint32(1)
	size := func() int {
		f.store(next, next+99)
		next += 100
		f.store(next, next)
		next++
		f.now = f.now.Add(time.Second)
		b := f.Delta(f.now)
		f.take(b)
		if _, err := d.Apply(b); err != nil {
			t.Fatal(err)
		}
		return len(b)
	}
	size()
	alone := size()
	if err := f.SetKeys(testKey, otherKey); err != nil {
		t.Fatal(err)
	}
	size()
	both := size()
	if both < alone+8+8 || both > 2*alone {
		t.Errorf("%d bytes with two keys, %d with one", both, alone)
	}
	if d.KeyID() != testKey.IDUint32() {
		t.Error("a follower changed its key without a snapshot")
	}
	for _, b := range f.Snapshot() {
		fresh := NewDecoder(newKeySink())
		fresh.RequireKeys(otherKey, testKey)
		if got, err := fresh.Apply(b); got != Applied || err != nil || fresh.KeyID() != otherKey.IDUint32() || fresh.Keys() != f.Keys() {
			t.Errorf("a new follower: %v, %v, key %08x, %d keys", got, err, fresh.KeyID(), fresh.Keys())
		}
	}
	if err := f.SetKeys(otherKey); err != nil {
		t.Fatal(err)
	}
	f.now = f.now.Add(time.Second)
	for _, b := range [][]byte{f.Delta(f.now), f.Delta(f.now.Add(time.Second))} {
		got, err := d.Apply(b)
		if err != nil {
			t.Fatal(err)
		}
		if got != Gap {
			continue
		}
		if _, _, ok := d.Have(); ok {
			t.Error("the key followed is gone, but the position is thought good for a replay")
		}
		for _, s := range f.Snapshot() {
			if got, err := d.Apply(s); got != Applied || err != nil {
				t.Errorf("%v, %v", got, err)
			}
		}
	}
	if d.KeyID() != otherKey.IDUint32() || d.Keys() != f.Keys() || len(other.held) != f.Keys() {
		t.Errorf("after the rotation: key %08x, %d keys, sink %d, want %d", d.KeyID(), d.Keys(), len(other.held), f.Keys())
	}
	for _, keys := range [][]prefix.ClusterKey{{}, {testKey, testKey}, {testKey, otherKey, {9}}} {
		if err := f.SetKeys(keys...); err == nil {
			t.Errorf("%d keys accepted", len(keys))
		}
	}
}

// domainTable gives domain 0 a new name when told.
type domainTable struct {
	starTable
	name *string
}

func (d domainTable) DomainOf(uint16) prefix.Domain { return prefix.Domain{Model: *d.name} }

// TestDomainIndexIsUsedAgain: the table may give the index of a domain without
// blocks to another one.
func TestDomainIndexIsUsedAgain(t *testing.T) {
	name := "a"
	f := follow(t, Options{Blocks: domainTable{starTable{512}, &name}})
	keyNow := func() (k IndexKey) {
		f.EachKey(func(h HeldKey, _ Extent, _ bool) { k = h.Key })
		return k
	}
	f.Attached(Block{ID: 1, EndTokens: 512, Usable: true})
	f.tick()
	first := keyNow()
	f.Detached(1)
	name = "b"
	f.Attached(Block{ID: 1, EndTokens: 512, Usable: true})
	f.tick()
	if keyNow() == first {
		t.Error("the key of another domain is the same")
	}
	f.Cleared()
	name = "a"
	f.Attached(Block{ID: 1, EndTokens: 512, Usable: true})
	f.tick()
	if keyNow() != first {
		t.Error("the key of the first domain has changed")
	}
}

// TestSnapshotIsHotFirst: what was used last comes first, with all that it hangs
// on.
func TestSnapshotIsHotFirst(t *testing.T) {
	f := follow(t, Options{Blocks: starTable{16}})
	for id := uint32(1); id <= 4; id++ {
		f.Attached(Block{ID: id, EndTokens: 16, Usable: true})
	}
	f.Attached(Block{ID: 5, Parent: 2, StartTokens: 16, EndTokens: 32, Usable: true}) // extends 2
	f.Attached(Block{ID: 6, Parent: 2, StartTokens: 16, EndTokens: 32, Usable: true}) // forks off 2
	f.tick()
	_, body, err := parseHeader(f.Snapshot()[0])
	if err != nil {
		t.Fatal(err)
	}
	g := builder{bytes: len(body)}
	e := newEditor(&g.tree, place{0, 1}, false)
	defer e.release()
	var order []uint32
	for r := (&reader{b: body}); len(r.b) > 0; {
		g.record(r, e)
		if r.err != nil {
			t.Fatal(r.err)
		}
		order = append(order, g.path[len(g.path)-1])
	}
	if want := []uint32{2, 5, 4, 3, 1}; !slices.Equal(order, want) {
		t.Errorf("order of runs %v, want %v", order, want)
	}
}

// TestCollisions: two copies of one prefix have one name.
func TestCollisions(t *testing.T) {
	f := follow(t, Options{Blocks: lineTable{16}})
	f.Attached(Block{ID: 1, EndTokens: 16, Usable: true})
	f.tick()
	if f.Collisions() != 0 {
		t.Error("a collision of one key")
	}
	f.Encoder.blocks = constantTable{}
	f.Attached(Block{ID: 2, EndTokens: 16, Usable: true})
	f.tick()
	if f.Collisions() != 1 || f.d.Collisions() != 1 {
		t.Errorf("%d and %d collisions of two equal keys", f.Collisions(), f.d.Collisions())
	}
	f.Detached(2)
	f.tick()
	if len(f.sink.held) != 1 || f.Collisions() != 0 {
		t.Errorf("one copy left: %d keys held", len(f.sink.held))
	}
}

func TestHotRoots(t *testing.T) {
	f := followLine(t, Options{})
	f.store(1, 100)
	f.Attached(Block{ID: 200, Parent: 70, StartTokens: 1120, EndTokens: 1136, Usable: true})
	k := prefix.NewKeyer(testKey, prefix.Domain{Model: "m"})
	if got, want := f.HotRoots(3), []Root{{k.Key(1024, 1024), 1024}}; !slices.Equal(got, want) {
		t.Errorf("roots %v, want the checkpoint before the fork %v", got, want)
	}
	g := follow(t, Options{Blocks: starTable{16}})
	for id := uint32(1); id <= 3; id++ {
		g.Attached(Block{ID: id, EndTokens: 16, Usable: true})
	}
	g.Attached(Block{ID: 4, Parent: 2, StartTokens: 16, EndTokens: 32, Usable: true})
	roots := g.HotRoots(2)
	want := []Root{{k.Key(prefix.Chain(4)<<32, 32), 32}, {k.Key(prefix.Chain(3)<<32, 16), 16}}
	if !slices.Equal(roots, want) {
		t.Errorf("roots %v, want %v", roots, want)
	}
	if again := g.HotRoots(2); !slices.Equal(again, want) {
		t.Errorf("the second time %v, want %v", again, want)
	}
	if n := testing.AllocsPerRun(100, func() { g.HotRoots(2) }); n > 1 { // what is returned
		t.Errorf("%.0f allocations", n)
	}
}
