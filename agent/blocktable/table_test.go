package blocktable

import (
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"

	"github.com/google/go-cmp/cmp"
)

// tokens gives n token ids from first on.
func tokens(first, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(first + i)
	}
	return out
}

// store is a store of blocks of 16 tokens, the first hash being that of tokens
// 100·hash on: block h of a chain holds tokens 100h..100h+15.
func store(parent uint64, hashes ...uint64) *Event {
	e := &Event{Op: OpStore, Spec: SpecFull, BlockTokens: 16, Hashes: hashes, Parent: parent, HasParent: parent != 0}
	for _, h := range hashes {
		e.Tokens = append(e.Tokens, tokens(int(100*h), 16)...)
	}
	return e
}

func remove(hashes ...uint64) *Event { return &Event{Op: OpRemove, Hashes: hashes} }

// prompt is the prompt of the named blocks and one more token.
func prompt(blocks ...int) []uint32 {
	var out []uint32
	for _, b := range blocks {
		out = append(out, tokens(100*b, 16)...)
	}
	return append(out, 1)
}

func apply(t *Table, events ...*Event) {
	for _, e := range events {
		t.Apply(e)
	}
}

func TestMatch(t *testing.T) {
	with := func(e *Event, change func(*Event)) *Event { change(e); return e }
	tests := []struct {
		name   string
		events []*Event
		prompt []uint32
		salt   string
		lora   string
		want   int
	}{
		{name: "nothing stored", prompt: prompt(1, 2), want: 0},
		{name: "whole prefix", events: []*Event{store(0, 1, 2, 3)}, prompt: prompt(1, 2, 3), want: 48},
		{name: "last token is always computed", events: []*Event{store(0, 1, 2, 3)}, prompt: prompt(1, 2, 3)[:48], want: 32},
		{name: "one token", events: []*Event{store(0, 1)}, prompt: []uint32{100}, want: 0},
		{name: "no tokens", events: []*Event{store(0, 1)}, want: 0},
		{name: "divergence inside a block", events: []*Event{store(0, 1, 2)}, prompt: append(prompt(1)[:16], tokens(200, 15)...), want: 16},
		{name: "growth under a parent", events: []*Event{store(0, 1), store(1, 2)}, prompt: prompt(1, 2), want: 32},
		{
			name:   "a hole ends the prefix though later blocks are held",
			events: []*Event{store(0, 1, 2, 3, 4), remove(2)}, prompt: prompt(1, 2, 3, 4), want: 16,
		},
		{
			name:   "a stored hole joins what was behind it",
			events: []*Event{store(0, 1, 2, 3, 4), remove(2), store(1, 2)}, prompt: prompt(1, 2, 3, 4), want: 64,
		},
		{
			name:   "an orphan is never a start",
			events: []*Event{store(9, 1, 2)}, prompt: prompt(1, 2), want: 0,
		},
		{
			name:   "an orphan joins its parent",
			events: []*Event{store(1, 2, 3), store(0, 1)}, prompt: prompt(1, 2, 3), want: 48,
		},
		{
			name:   "two copies need two removals",
			events: []*Event{store(0, 1, 2), store(1, 2), remove(2)}, prompt: prompt(1, 2), want: 32,
		},
		{
			name:   "and not three",
			events: []*Event{store(0, 1, 2), store(1, 2), remove(2), remove(2)}, prompt: prompt(1, 2), want: 16,
		},
		{
			name:   "one unknown hash does not stop a removal",
			events: []*Event{store(0, 1, 2), remove(77, 2, 78, 2)}, prompt: prompt(1, 2), want: 16,
		},
		{
			name:   "a removal before the store is not owed",
			events: []*Event{remove(1), store(0, 1)}, prompt: prompt(1), want: 16,
		},
		{
			name:   "clear and store in one batch, in this order",
			events: []*Event{store(0, 1), {Op: OpClear}, store(0, 2)}, prompt: prompt(1), want: 0,
		},
		{
			name:   "a salted prompt is another namespace",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Salt = "a" })}, prompt: prompt(1), want: 0,
		},
		{
			name:   "and matches its own",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Salt = "a" }), store(1, 2)}, prompt: prompt(1, 2), salt: "a", want: 32,
		},
		{
			name:   "an adapter is another namespace",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Adapter = "sql" })}, prompt: prompt(1), want: 0,
		},
		{
			name:   "adapter and salt together",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Adapter, e.Salt = "sql", "a" })}, prompt: prompt(1), lora: "sql", salt: "a", want: 16,
		},
		{
			name:   "a block with an image is not its placeholder tokens",
			events: []*Event{with(store(0, 1, 2, 3), func(e *Event) { e.Marks = []uint64{0, 5, 0} })}, prompt: prompt(1, 2, 3), want: 16,
		},
		{
			name:   "tokens that do not cover the hashes are no prefix",
			events: []*Event{with(store(0, 1, 2, 3), func(e *Event) { e.Tokens = e.Tokens[:32] }), store(0, 4)}, prompt: prompt(1), want: 0,
		},
		{
			name:   "and the next good event is applied",
			events: []*Event{with(store(0, 1, 2, 3), func(e *Event) { e.Tokens = e.Tokens[:32] }), store(0, 4)}, prompt: prompt(4), want: 16,
		},
		{
			name:   "another tier makes no residency",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Medium = MediumCPU })}, prompt: prompt(1), want: 0,
		},
		{
			name: "removal from another tier leaves the GPU copy",
			events: []*Event{
				store(0, 1),
				{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{1}},
				{Op: OpRemove, Medium: MediumCPU, Hashes: []uint64{1, 1}},
			}, prompt: prompt(1), want: 16,
		},
		{
			name: "a shorter partial tail",
			events: []*Event{store(0, 1), {
				Op: OpStore, Spec: SpecFull, BlockTokens: 4, Parent: 1, HasParent: true,
				Hashes: []uint64{50}, Tokens: tokens(200, 4),
			}},
			prompt: prompt(1, 2), want: 20,
		},
		{
			name: "the tail grew into a whole block",
			events: []*Event{store(0, 1), {
				Op: OpStore, Spec: SpecFull, BlockTokens: 4, Parent: 1, HasParent: true,
				Hashes: []uint64{50}, Tokens: tokens(200, 4),
			}, remove(50), store(1, 2)},
			prompt: prompt(1, 2), want: 32,
		},
		{
			name:   "a block named its own parent",
			events: []*Event{store(1, 1), store(0, 2)}, prompt: prompt(2), want: 16,
		},
		{
			name:   "blocks named each other's parent",
			events: []*Event{store(2, 1), store(1, 2), store(1, 2), remove(1), remove(2), store(0, 3)}, prompt: prompt(3), want: 16,
		},
		{
			name:   "out of range is ignored",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Group = 16 }), with(store(0, 1), func(e *Event) { e.Group = -1 })}, prompt: prompt(1), want: 0,
		},
		{
			name:   "a group without a kind counts as whole",
			events: []*Event{with(store(0, 1), func(e *Event) { e.Spec = SpecUnknown })}, prompt: prompt(1), want: 16,
		},
		{
			name:   "sliding window alone: the whole prefix is required",
			events: []*Event{with(store(0, 1, 2), func(e *Event) { e.Spec, e.WindowTokens = SpecSlidingWindow, 16 }), {Op: OpRemove, Hashes: []uint64{1}}}, prompt: prompt(1, 2), want: 0,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			table := New(Options{Model: "m"})
			w := &watcher{t: t}
			w.listen(table)
			apply(table, test.events...)
			if got := table.Match(test.prompt, test.lora, test.salt); got != test.want {
				t.Errorf("match = %d, want %d (%+v)", got, test.want, table.Stats())
			}
			if len(w.blocks) != table.Attached() {
				t.Errorf("told %d blocks, attached %d", len(w.blocks), table.Attached())
			}
		})
	}
}

// A recurrent state is in the last block only; other blocks of its group do
// not matter.
func TestMambaGroupNeedsTheEndOnly(t *testing.T) {
	table := New(Options{})
	mamba := &Event{Op: OpStore, Spec: SpecMamba, Group: 1, BlockTokens: 16, Hashes: []uint64{2}}
	apply(table, mamba, store(0, 1, 2, 3))
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 32 {
		t.Errorf("match = %d, want 32: the state after block 2 is the last one held", got)
	}
	apply(table, &Event{Op: OpRemove, Group: 1, Hashes: []uint64{2}})
	if got := table.Match(prompt(1, 2, 3), "", ""); got != 0 {
		t.Errorf("match = %d, want 0 without any state", got)
	}
}

// Groups become known with the first batch; what was attached before must be
// judged anew, in either order.
func TestGroupsLearntLate(t *testing.T) {
	window := &Event{Op: OpStore, Spec: SpecSlidingWindow, WindowTokens: 17, BlockTokens: 16, Hashes: []uint64{2}, Tokens: tokens(0, 16)}
	full := store(0, 1, 2, 3)
	full.Group = 1
	for _, order := range [][]*Event{{window, full}, {full, window}} {
		table := New(Options{})
		w := &watcher{t: t}
		w.listen(table)
		apply(table, order...)
		if got := table.Match(prompt(1, 2, 3), "", ""); got != 32 || !table.Windowed() {
			t.Errorf("match = %d, want 32; windowed %v", got, table.Windowed())
		}
		usable := map[uint32]bool{}
		for _, b := range w.blocks {
			usable[b.EndTokens] = b.Usable
		}
		if diff := cmp.Diff(map[uint32]bool{16: false, 32: true, 48: false}, usable); diff != "" {
			t.Errorf("usable ends: %s", diff)
		}
	}
}

func TestStats(t *testing.T) {
	table := New(Options{PoolBlocks: 3})
	apply(table, store(0, 1, 2), store(1, 2), remove(9), store(5, 6))
	want := Stats{Stores: 3, Removes: 1, BlocksStored: 4, BlocksRemoved: 1, Duplicates: 1, UnknownRemovals: 1, ParkedOrphans: 1, Rebuilds: 0}
	if diff := cmp.Diff(want, table.Stats()); diff != "" {
		t.Error(diff)
	}
	if table.Len() != 3 || table.Attached() != 2 || table.Copies() != 4 {
		t.Errorf("len %d attached %d copies %d", table.Len(), table.Attached(), table.Copies())
	}
	if !table.OverPool() {
		t.Error("4 copies in a pool of 3 are not seen as damage")
	}
	table.Clear()
	if s := table.Stats(); s != (Stats{}) {
		t.Errorf("the next life of the engine begins with %+v", s)
	}
	table.CountCopies(false)
	apply(table, store(0, 1, 2), store(1, 2))
	if table.OverPool() || table.Copies() != 2 {
		t.Errorf("copies %d after a rebuild without counting copies", table.Copies())
	}
	apply(table, remove(2))
	if got := table.Match(prompt(1, 2), "", ""); got != 16 {
		t.Errorf("match = %d, want 16: one removal ends a block when copies are not trusted", got)
	}
}

func TestBounds(t *testing.T) {
	table := New(Options{MaxBlocks: 100})
	w := &watcher{t: t}
	w.listen(table)
	for h := uint64(1); h <= 1000; h++ {
		table.Apply(store(0, h))
		table.Apply(store(1_000_000+h, 2_000_000+h))
		table.Apply(&Event{Op: OpStore, Medium: MediumDisk, Hashes: []uint64{3_000_000 + h}})
	}
	if table.Held() > 150 || table.Stats().Refused == 0 {
		t.Errorf("held %d nodes, refused %d", table.Held(), table.Stats().Refused)
	}
	for h := uint64(1); h <= 1000; h++ {
		table.Apply(remove(h, 2_000_000+h))
		table.Apply(&Event{Op: OpRemove, Medium: MediumDisk, Hashes: []uint64{3_000_000 + h}})
	}
	if table.Held() != 0 || len(w.blocks) != 0 || table.Copies() != 0 {
		t.Errorf("held %d, told %d, copies %d after everything was removed", table.Held(), len(w.blocks), table.Copies())
	}
	table.Apply(store(0, 1))
	if got := table.Match(prompt(1), "", ""); got != 16 {
		t.Errorf("match = %d after the table emptied", got)
	}
}

// A bound that changes counts from then on: nothing that is held is lost by it.
func TestBoundChanges(t *testing.T) {
	table := New(Options{MaxBlocks: 100})
	fill := func(from, to uint64) {
		for h := from; h <= to; h++ {
			table.Apply(store(0, h))
		}
	}
	fill(1, 60)
	table.SetMaxBlocks(40)
	fill(61, 70)
	if table.Len() != 60 || table.Stats().Refused != 10 {
		t.Errorf("%d blocks held, %d refused; want the 60 from before and 10", table.Len(), table.Stats().Refused)
	}
	for h := uint64(1); h <= 30; h++ {
		table.Apply(remove(h))
	}
	fill(71, 90)
	if table.Len() != 40 {
		t.Errorf("%d blocks held under the bound of 40", table.Len())
	}
	table.SetMaxBlocks(50)
	fill(91, 120)
	if table.Len() != 50 {
		t.Errorf("%d blocks held under the bound of 50", table.Len())
	}
	for most, want := range map[int]int{0: DefaultMaxBlocks, -1: DefaultMaxBlocks, mostBlocks: mostBlocks, mostBlocks + 1: mostBlocks} {
		if table.SetMaxBlocks(most); table.maxBlocks != want {
			t.Errorf("a bound of %d blocks is taken as %d, want %d", most, table.maxBlocks, want)
		}
	}
}

// An engine that names blocks each other's ancestors must not tie a knot, whose
// nodes would never be freed.
func TestNoKnots(t *testing.T) {
	for name, events := range map[string][]*Event{
		"itself":     {store(1, 1)},
		"each other": {store(2, 1), store(1, 2)},
		"in a ring":  {store(3, 1, 2), store(2, 3), store(4, 3)},
	} {
		table := New(Options{})
		apply(table, events...)
		conflicts := table.Stats().Conflicts
		for h := uint64(1); h <= 4; h++ {
			apply(table, remove(h, h))
		}
		if table.Held() != 0 || conflicts == 0 {
			t.Errorf("%s: %d nodes held after all removals, %d conflicts", name, table.Held(), conflicts)
		}
	}
}

func TestManySalts(t *testing.T) {
	table := New(Options{})
	e := store(0, 1)
	for i := range 100_000 {
		e.Salt = string(rune('a'+i%7)) + string(rune(0x4e00+i%20000))
		e.Hashes[0] = uint64(i + 1)
		table.Apply(e)
		table.Apply(remove(uint64(i + 1)))
	}
	if table.Held() != 0 || len(table.domains) > 1 {
		t.Errorf("held %d nodes, %d domains", table.Held(), len(table.domains))
	}
}

// A clear drops GPU memory only; a removed block that another tier still holds
// keeps its place.
func TestClearKeepsTiers(t *testing.T) {
	table := New(Options{})
	w := &watcher{t: t}
	w.listen(table)
	apply(table, store(0, 1, 2),
		&Event{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{2}},
		&Event{Op: OpClear})
	if table.Len() != 0 || len(w.blocks) != 0 || table.Match(prompt(1, 2), "", "") != 0 {
		t.Errorf("len %d, told %d after a clear", table.Len(), len(w.blocks))
	}
	// Hashes alone bring the blocks back, since their places are known.
	apply(table, &Event{Op: OpStore, Hashes: []uint64{1, 2}})
	if got := table.Match(prompt(1, 2), "", ""); got != 32 {
		t.Errorf("match = %d, want 32", got)
	}
	apply(table, &Event{Op: OpRemove, Medium: MediumCPU, Hashes: []uint64{2}}, remove(1, 2))
	if table.Held() != 0 || table.DomainOf(0) != (prefix.Domain{}) {
		t.Errorf("held %d nodes, of domain %+v", table.Held(), table.DomainOf(0))
	}
}

// A clear that names a tier drops that one only.
func TestClearOfATier(t *testing.T) {
	table := New(Options{})
	apply(table, store(0, 1, 2), &Event{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{1, 2, 3}}, remove(2))
	apply(table, &Event{Op: OpClear, Medium: MediumCPU})
	if got := table.Match(prompt(1, 2), "", ""); got != 16 {
		t.Errorf("match = %d after a clear of host memory, want 16", got)
	}
	// The root, and the block in GPU memory.
	if table.Held() != 2 || table.Copies() != 1 {
		t.Errorf("%d nodes, %d copies", table.Held(), table.Copies())
	}
	apply(table, &Event{Op: OpClear, Medium: MediumDisk}, &Event{Op: OpClear}, &Event{Op: OpClear})
	if table.Held() != 0 || table.Stats().Clears != 4 {
		t.Errorf("%d nodes, %+v", table.Held(), table.Stats())
	}
}

// A flood of clears costs next to nothing where nothing is held.
func TestFloodOfClears(t *testing.T) {
	table := New(Options{ExpectBlocks: 1 << 20})
	apply(table, store(0, 1), &Event{Op: OpClear})
	// One clear of the index of a million blocks takes about a millisecond.
	for range 1_000_000 {
		table.Apply(&Event{Op: OpClear})
	}
	apply(table, store(0, 2))
	if table.Len() != 1 {
		t.Errorf("%d blocks", table.Len())
	}
}

func TestChains(t *testing.T) {
	for _, size := range []int{16, 48, 512, 528, 1300} {
		table := New(Options{})
		var all []uint32
		var ids []uint32
		var next collector
		table.Listen(&next)
		for h := uint64(1); h <= uint64(4000/size+2); h++ {
			block := make([]uint32, size)
			for i := range block {
				block[i] = uint32(len(all)+i) * 2654435761
			}
			all = append(all, block...)
			table.Apply(&Event{
				Op: OpStore, Spec: SpecFull, BlockTokens: int32(size), Hashes: []uint64{h},
				Parent: h - 1, HasParent: h > 1, Tokens: block,
			})
		}
		ids = next.ids
		var got, want []summary.Checkpoint
		chain := prefix.Chain(0)
		for d := prefix.ChunkTokens; d <= len(all); d += prefix.ChunkTokens {
			chain = prefix.Next(chain, all[d-prefix.ChunkTokens:d])
			want = append(want, summary.Checkpoint{DepthTokens: uint32(d), Chain: chain})
		}
		for i, id := range ids {
			got = table.CheckpointsIn(id, got)
			end := (i + 1) * size
			seed := prefix.Chain(0)
			if k := end / prefix.ChunkTokens; k > 0 {
				seed = want[k-1].Chain
			}
			point := seed
			if end%prefix.ChunkTokens != 0 {
				point = prefix.Point(seed, all[end/prefix.ChunkTokens*prefix.ChunkTokens:end])
			}
			if table.PointOf(id) != point {
				t.Errorf("block size %d: point at %d differs", size, end)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("block size %d: %s", size, diff)
		}
	}
}

type collector struct {
	silent
	ids, ends []uint32
}

func (c *collector) Attached(b summary.Block) { c.ids = append(c.ids, b.ID) }
func (c *collector) StoreEnded(id uint32)     { c.ends = append(c.ends, id) }

func TestStoreEnds(t *testing.T) {
	table := New(Options{})
	var c collector
	table.Listen(&c)
	apply(table, store(0, 1, 2, 3), store(3, 4), store(8, 9))
	depths := []uint32{}
	for _, id := range c.ends {
		depths = append(depths, table.nodes.at(id).end)
	}
	if diff := cmp.Diff([]uint32{48, 64}, depths); diff != "" {
		t.Errorf("store ends (an orphan's is none): %s", diff)
	}
}

// Long chains must not be walked by recursion, nor wide roots by scanning.
func TestDeepAndWide(t *testing.T) {
	table := New(Options{})
	var hashes []uint64
	for h := uint64(2); h <= 100_000; h++ {
		hashes = append(hashes, h)
	}
	apply(table, store(1, hashes...), store(0, 1))
	if table.Attached() != 100_000 {
		t.Fatalf("attached %d", table.Attached())
	}
	apply(table, remove(1), store(0, 1), &Event{Op: OpClear})
	for h := uint64(1); h <= 100_000; h++ {
		table.Apply(store(0, h))
	}
	for h := uint64(1); h <= 100_000; h++ {
		table.Apply(remove(h))
	}
	if table.Held() != 0 {
		t.Errorf("held %d nodes", table.Held())
	}
}

// An engine that names equal blocks anew each time must not make the table
// slow, nor hide the block.
func TestEqualBlocksUnderManyNames(t *testing.T) {
	table := New(Options{})
	const n = 200_000
	e := store(0, 1)
	for h := uint64(1); h <= n; h++ {
		e.Hashes[0] = h
		table.Apply(e)
	}
	if got := table.Match(prompt(1), "", ""); got != 16 || table.byContent.count != maxTwins {
		t.Errorf("match = %d, indexed %d", got, table.byContent.count)
	}
	for h := uint64(1); h <= n; h++ {
		table.Apply(remove(h))
	}
	if table.Held() != 0 || table.byContent.count != 0 {
		t.Errorf("held %d, indexed %d", table.Held(), table.byContent.count)
	}
}

// twinOf stores under another hash what store calls by one.
func twinOf(like, parent, hash uint64) *Event {
	e := store(parent, like)
	e.Hashes[0] = hash
	return e
}

// Of equal blocks under two names, the one that leads further counts, whichever
// was stored first.
func TestMatchFollowsTwins(t *testing.T) {
	twin := store(0, 1)
	twin.Hashes[0] = 7
	for name, events := range map[string][]*Event{
		"below the first":  {store(0, 1), twin, store(1, 2, 3)},
		"below the second": {store(0, 1), twin, store(7, 2, 3)},
		// The first block after another is found from there, the others by content.
		"one after another, the first":   {store(0, 1), store(1, 2), twinOf(2, 1, 8), store(2, 3)},
		"one after another, the second":  {store(0, 1), store(1, 2), twinOf(2, 1, 8), store(8, 3)},
		"the second when the first left": {store(0, 1), store(1, 2), twinOf(2, 1, 8), store(8, 3), remove(2)},
		"the first, stored anew":         {store(0, 1), store(1, 2), twinOf(2, 1, 8), remove(2), store(1, 2), store(2, 3)},
	} {
		table := New(Options{})
		apply(table, events...)
		if got := table.Match(prompt(1, 2, 3), "", ""); got != 48 {
			t.Errorf("%s: match = %d, want 48", name, got)
		}
	}
}
