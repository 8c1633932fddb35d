package blocktable

import (
	"maps"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// Tokens of every width come out of their slot as they went in, and only the same
// ones are taken for them.
func TestSlabsKeepTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := New(Options{})
		type kept struct {
			class  uint8
			slot   uint32
			tokens []uint32
		}
		var all []kept
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			if len(all) > 0 && rapid.IntRange(0, 2).Draw(t, "give") == 0 {
				i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
				table.slabs[all[i].class].give(all[i].slot)
				all = slices.Delete(all, i, i+1)
				continue
			}
			length := rapid.SampledFrom([]int{1, 2, 3, 16, 33}).Draw(t, "length")
			top := rapid.SampledFrom([]uint32{1, 1<<16 - 1, 1 << 16, 1<<18 - 1, 1 << 18, 1<<32 - 1}).Draw(t, "top")
			tokens := rapid.SliceOfN(rapid.Uint32Range(0, top), length, length).Draw(t, "tokens")
			first, ok := table.lengthOf(length)
			if !ok {
				t.Fatal("no slab")
			}
			k := kept{tokens: tokens}
			k.class, k.slot = table.keep(first, tokens)
			all = append(all, k)
			if widest := bits.Len32(slices.Max(tokens)); k.class > first && widest <= tokenBits[k.class-first-1] {
				t.Fatalf("tokens of %d bits are kept in %d", widest, table.slabs[k.class].bits)
			}
		}
		for _, k := range all {
			s := &table.slabs[k.class]
			other := slices.Clone(k.tokens)
			other[rapid.IntRange(0, len(other)-1).Draw(t, "changed")] ^= 1 << rapid.IntRange(0, 31).Draw(t, "bit")
			n := &node{class: k.class, slot: k.slot}
			if got := table.tokensOf(n); !slices.Equal(got, k.tokens) {
				t.Fatalf("%d bits: %v, want %v", s.bits, got, k.tokens)
			}
			longer := append(slices.Clone(k.tokens), 0)
			if !table.holds(n, k.tokens) || table.holds(n, other) || table.holds(n, longer) || len(k.tokens) > 1 && table.holds(n, k.tokens[1:]) {
				t.Fatalf("%v is not told apart", k.tokens)
			}
		}
	})
}

// named checks each block's names against all the tokens before its end, whatever
// was asked before.
type named struct {
	silent
	t      *rapid.T
	table  *Table
	prompt map[uint64][]uint32 // by hash
	live   map[uint32]summary.Block
}

func (w *named) Attached(b summary.Block) { w.live[b.ID] = b; w.maybe(b.ID) }
func (w *named) Detached(id uint32)       { w.maybe(id); delete(w.live, id) }
func (w *named) Cleared()                 { clear(w.live) }

func (w *named) maybe(id uint32) {
	if rapid.IntRange(0, 3).Draw(w.t, "ask") > 0 {
		w.ask(id)
	}
}

func (w *named) ask(id uint32) {
	n := w.table.nodes.at(id)
	tokens := w.prompt[n.hash]
	told := w.live[id]
	if parent, end := w.table.PlaceOf(id); parent != told.Parent || end != told.EndTokens || int(end) != len(tokens) {
		w.t.Fatalf("block %d is at %d behind %d, was told at %d behind %d and has %d tokens before its end", id, end, parent, told.EndTokens, told.Parent, len(tokens))
	}
	var chain prefix.Chain
	var want []summary.Checkpoint
	from := w.table.nodes.at(n.parent).end
	rest := tokens
	for depth := uint32(prefix.ChunkTokens); len(rest) >= prefix.ChunkTokens; depth += prefix.ChunkTokens {
		chain, rest = prefix.Next(chain, rest[:prefix.ChunkTokens]), rest[prefix.ChunkTokens:]
		if depth > from {
			want = append(want, summary.Checkpoint{DepthTokens: depth, Chain: chain})
		}
	}
	point := chain
	if len(rest) > 0 {
		point = prefix.Point(chain, rest)
	}
	points := func() {
		if got := w.table.PointOf(id); got != point {
			w.t.Fatalf("block %d at %d: point %x, want %x", id, len(tokens), got, point)
		}
	}
	checkpoints := func() {
		if got := w.table.CheckpointsIn(id, nil); !slices.Equal(got, want) {
			w.t.Fatalf("block %d from %d to %d: checkpoints %v, want %v", id, from, len(tokens), got, want)
		}
	}
	if rapid.Bool().Draw(w.t, "points first") {
		points()
		checkpoints()
	} else {
		checkpoints()
		points()
	}
}

// A block's names are those of its tokens, in whatever order blocks come, fork,
// go and are asked about, and nothing of them stays when they are gone.
func TestNamesOfBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{16, 48, 200, 512, 700, 1500}).Draw(t, "block")
		table := New(Options{})
		if rapid.Bool().Draw(t, "remembered") {
			NewHistory(table)
		}
		w := &named{t: t, table: table, prompt: map[uint64][]uint32{}, live: map[uint32]summary.Block{}}
		table.Listen(w)
		var held []uint64
		next := uint64(1)
		store := func(parent uint64, blocks int) {
			e := Event{Op: OpStore, BlockTokens: int32(size), Parent: parent, HasParent: parent != 0}
			prompt := slices.Clone(w.prompt[parent])
			for range blocks {
				seed := next * 7919
				for i := range size {
					prompt = append(prompt, uint32(seed*uint64(i+1))>>(seed%3*8))
				}
				w.prompt[next] = slices.Clone(prompt)
				e.Hashes = append(e.Hashes, next)
				held = append(held, next)
				next++
			}
			e.Tokens = prompt[len(prompt)-blocks*size:]
			table.Apply(&e)
		}
		remove := func(i int) {
			table.Apply(&Event{Op: OpRemove, Hashes: held[i : i+1]})
			held = slices.Delete(held, i, i+1)
		}
		for range rapid.IntRange(1, 25).Draw(t, "steps") {
			switch op := rapid.IntRange(0, 9).Draw(t, "op"); {
			case len(held) == 0 || op < 2:
				store(0, rapid.IntRange(1, 70).Draw(t, "blocks"))
			case op < 4:
				parent := held[rapid.IntRange(0, len(held)-1).Draw(t, "parent")]
				store(parent, rapid.IntRange(1, 5).Draw(t, "blocks"))
			case op < 8:
				for range rapid.IntRange(1, 40).Draw(t, "tails") {
					if len(held) > 0 {
						remove(len(held) - 1)
					}
				}
			case op < 9:
				remove(rapid.IntRange(0, len(held)-1).Draw(t, "middle"))
			default:
				table.Apply(&Event{Op: OpClear})
				held = held[:0]
			}
			for _, id := range slices.Sorted(maps.Keys(w.live)) {
				w.maybe(id)
			}
		}
		if kept, crossing := len(table.chains), crossing(table); kept != crossing {
			t.Fatalf("%d chain values are kept for %d blocks that reach a checkpoint", kept, crossing)
		}
		alone := 0
		for id := uint32(1); id <= table.nodes.made; id++ {
			if n := table.nodes.at(id); n.flags&flagUsed != 0 && n.siblings != 0 && table.nodes.neighbours(id) == (neighbours{}) {
				alone++
			}
		}
		if alone > 0 {
			t.Fatalf("%d nodes without neighbours keep room for them", alone)
		}
		for len(held) > 0 {
			remove(len(held) - 1)
		}
		if kept := len(table.chains); kept != 0 || table.Held() != 0 || table.heads.ids != [maxHeads]uint32{} || siblingsInUse(table) != 0 {
			t.Fatalf("of nothing: %d chain values, %d nodes, heads of %d", kept, table.Held(), table.heads.ids)
		}
	})
}

// crossing counts the attached blocks that reach a checkpoint.
func crossing(t *Table) (n int) {
	for id := uint32(1); id <= t.nodes.made; id++ {
		b := t.nodes.at(id)
		if b.flags&(flagAttached|flagRoot) == flagAttached && checkpointBefore(b.end) != checkpointBefore(t.nodes.at(b.parent).end) {
			n++
		}
	}
	return n
}

// What is remembered to name blocks quickly follows the blocks when they get other
// places, or lose them.
func TestNamesFollowTheStructure(t *testing.T) {
	stored := func(spec Spec, group int32, size int, hashes ...uint64) *Event {
		return &Event{Op: OpStore, Spec: spec, Group: group, BlockTokens: int32(size), Hashes: hashes, Tokens: tokens(size, size*len(hashes))}
	}
	whole := stored(SpecFull, 0, 300, 1, 2, 3)
	for name, c := range map[string]struct {
		events []*Event
		size   int
		blocks int
	}{
		"a better group cuts otherwise":        {[]*Event{stored(SpecUnknown, 0, 300, 1, 2, 3), stored(SpecFull, 1, 200, 1, 2, 3)}, 200, 3},
		"another group holds the first only":   {[]*Event{whole, stored(SpecFull, 1, 300, 1)}, 300, 1},
		"host memory outlives GPU memory":      {[]*Event{whole, {Op: OpStore, Medium: MediumCPU, Hashes: whole.Hashes}, {Op: OpClear}}, 300, 0},
		"nothing outlives it":                  {[]*Event{whole, {Op: OpClear}}, 300, 0},
		"the same from host memory once more ": {[]*Event{whole, {Op: OpStore, Medium: MediumCPU, Hashes: whole.Hashes}, {Op: OpClear}, whole}, 300, 3},
	} {
		table := New(Options{})
		w := &watcher{t: t}
		w.listen(table)
		for i, e := range c.events {
			table.Apply(e)
			if i < len(c.events)-1 {
				table.PointOf(table.findHash(3)) // what is remembered is of the last block
			}
		}
		if len(w.blocks) != c.blocks || len(table.chains) != crossing(table) {
			t.Errorf("%s: %d blocks, want %d; %d chain values for %d that reach a checkpoint", name, len(w.blocks), c.blocks, len(table.chains), crossing(table))
		}
		for h := uint64(c.blocks); h > 0; h-- {
			all := tokens(c.size, c.size*int(h))
			var chain prefix.Chain
			for ; len(all) >= prefix.ChunkTokens; all = all[prefix.ChunkTokens:] {
				chain = prefix.Next(chain, all[:prefix.ChunkTokens])
			}
			if got, want := table.PointOf(table.findHash(h)), prefix.Point(chain, all); got != want {
				t.Errorf("%s: block %d is named %x, want %x", name, h, got, want)
			}
		}
	}
}

func siblingsInUse(t *Table) int {
	n := len(t.nodes.siblings)
	for k := t.nodes.freeSiblings; k != 0; k = t.nodes.siblings[k-1].next {
		n--
	}
	return n
}

// Moments span weeks in four bytes: what was long ago is before all that is asked.
func TestMomentsOfAHistory(t *testing.T) {
	table := New(Options{})
	h := NewHistory(table)
	h.attached(5)
	if got := h.listedAt(5); got != never {
		t.Errorf("before any moment: %v", got)
	}
	const start, week = -3600_000.0, 7 * 24 * 3600_000.0
	for i, at := range []float64{start, start + 1, start + 2*week, start + 4*week, start + 9*week} {
		h.SetNow(at)
		h.attached(uint32(5 + i))
		if got := h.listedAt(uint32(5 + i)); got != at {
			t.Errorf("%v is told as %v", at, got)
		}
		if got, long := h.listedAt(5), at-start > halfSpanMs; !long && got != start || long && (got < start || got > at-halfSpanMs) {
			t.Errorf("at %v: %v is told as %v", at, start, got)
		}
	}
	h.SetNow(start - 10*week)
	h.attached(6)
	if got := h.listedAt(6); got > start+9*week-halfSpanMs {
		t.Errorf("before the span: %v", got)
	}
}

// Answers that grow in turn are each named right, more of them than are
// remembered, beside prompts that come and go, and those that are remembered are
// not read again.
func TestHeadsOfManyAnswers(t *testing.T) {
	const answers, size, blocks = 3 * maxHeads, 16, 70
	rng := rand.New(rand.NewPCG(1, 2))
	table := New(Options{})
	type answer struct {
		tokens []uint32
		last   uint64 // hash of its last block
	}
	var next uint64
	all := make([]answer, answers)
	var gone []uint64
	grow := func(a *answer) {
		if id := table.findHash(a.last); id == 0 || table.nodes.at(id).flags&flagAttached == 0 {
			*a = answer{} // removed with another one that it went on from
		}
		e := Event{Op: OpStore, Spec: SpecFull, BlockTokens: size, Parent: a.last, HasParent: a.last != 0, Hashes: []uint64{next + 1}}
		for range size {
			e.Tokens = append(e.Tokens, rng.Uint32N(1000))
		}
		next++
		a.tokens, a.last = append(a.tokens, e.Tokens...), next
		table.Apply(&e)
	}
	check := func(a *answer) {
		t.Helper()
		var want prefix.Chain
		rest := a.tokens
		for ; len(rest) >= prefix.ChunkTokens; rest = rest[prefix.ChunkTokens:] {
			want = prefix.Next(want, rest[:prefix.ChunkTokens])
		}
		if len(rest) > 0 {
			want = prefix.Point(want, rest)
		}
		if got := table.PointOf(table.findHash(a.last)); got != want {
			t.Fatalf("the block %d tokens deep is named %x, want %x", len(a.tokens), got, want)
		}
	}
	for range blocks {
		for i := range all {
			grow(&all[i])
			if rng.IntN(4) > 0 {
				check(&all[i])
			}
			switch rng.IntN(40) {
			case 0: // begins anew; what it had goes, tail first
				for id := table.findHash(all[i].last); id != 0; id, _ = table.PlaceOf(id) {
					gone = append(gone, table.nodes.at(id).hash)
				}
				all[i] = answer{}
			case 1: // goes on from where another one is
				j := rng.IntN(i + 1)
				all[i] = answer{slices.Clone(all[j].tokens), all[j].last}
			}
			for n := min(len(gone), rng.IntN(3)); n > 0; n-- {
				table.Apply(&Event{Op: OpRemove, Hashes: gone[:1]})
				gone = gone[1:]
			}
		}
	}
	// Others are asked about in between, as removals do.
	few, others := all[:maxHeads/2], all[maxHeads/2:]
	for round := range 4 {
		for i := range few {
			grow(&few[i])
			check(&few[i])
		}
		for range maxHeads / 4 {
			a := &others[rng.IntN(len(others))]
			if id := table.findHash(a.last); id != 0 && table.nodes.at(id).flags&flagAttached != 0 {
				check(a)
			}
		}
		for i := range few {
			if table.heads.find(table.findHash(few[i].last)) < 0 {
				t.Fatalf("round %d: answer %d of %d is not remembered", round, i, len(few))
			}
		}
	}
}

// What is remembered of a prompt is a chunk at most, though its blocks be large, and
// has room for it from the start.
func TestHeadsHoldOneChunk(t *testing.T) {
	for name, size := range map[string]int{"small": 16, "a chunk": prefix.ChunkTokens, "across chunks": 700, "largest": maxBlockTokens} {
		table := New(Options{})
		const prompts, blocks = maxHeads + 8, 3
		for i := range uint64(prompts) {
			for k := range uint64(blocks) {
				hash := blocks*i + k + 1
				e := Event{Op: OpStore, Spec: SpecFull, BlockTokens: int32(size), Hashes: []uint64{hash}, Tokens: tokens(int(hash)*size, size)}
				if k > 0 {
					e.Parent, e.HasParent = hash-1, true
				}
				table.Apply(&e)
				table.PointOf(table.findHash(hash))
			}
		}
		used := 0
		for i := range table.heads.list {
			if room := cap(table.heads.list[i].tokens); room != 0 {
				used++
				if room != prefix.ChunkTokens {
					t.Fatalf("%s: a head has room for %d tokens, want %d", name, room, prefix.ChunkTokens)
				}
			}
		}
		if used != maxHeads {
			t.Errorf("%s: %d heads are used, want %d", name, used, maxHeads)
		}
	}
}

// A table that remembers is asked for names without hashing: a question takes the
// place of no prompt that grows.
func TestRememberedNamesTakeNoHead(t *testing.T) {
	table := New(Options{})
	NewHistory(table)
	const size, prompts = 16, 2 * maxHeads
	tokens := make([]uint32, prompts*size)
	for i := range tokens {
		tokens[i] = uint32(i)
	}
	prompt := func(i int) []uint32 { return tokens[i*size : (i+1)*size] }
	for i := range prompts {
		table.Apply(&Event{Op: OpStore, BlockTokens: size, Hashes: []uint64{uint64(i + 1)}, Tokens: prompt(i)})
	}
	before := table.heads.ids
	for i := range prompts - maxHeads - 1 {
		if got, want := table.PointOf(table.findHash(uint64(i+1))), prefix.Point(0, prompt(i)); got != want {
			t.Errorf("prompt %d is named %x, want %x", i, got, want)
		}
	}
	if table.heads.ids != before {
		t.Error("names were hashed once more")
	}
}
