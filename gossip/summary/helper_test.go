package summary

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"waypost/gossip/prefix"
)

var (
	testKey  = prefix.ClusterKey{1, 2, 3}
	otherKey = prefix.ClusterKey{7}
	begin    = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
)

// keySink is a plain sink: a count per key, and what happened since last asked.
type keySink struct {
	held           map[HeldKey]int
	branches       map[HeldKey]int
	extents        map[HeldKey]Extent
	added, removed []uint32 // depths
}

func newKeySink() *keySink {
	return &keySink{held: map[HeldKey]int{}, branches: map[HeldKey]int{}, extents: map[HeldKey]Extent{}}
}

func (s *keySink) Begin() {}
func (s *keySink) End()   {}
func (s *keySink) add(k IndexKey, d uint32, branch bool) {
	s.held[HeldKey{k, d}]++
	if branch {
		s.branches[HeldKey{k, d}]++
	}
	s.added = append(s.added, d)
}

func (s *keySink) remove(k IndexKey, d uint32, branch bool) {
	h := HeldKey{k, d}
	if branch {
		s.branches[h]--
	}
	if s.held[h]--; s.held[h] == 0 {
		delete(s.held, h)
		delete(s.branches, h)
		delete(s.extents, h)
	}
	s.removed = append(s.removed, d)
}
func (s *keySink) AddCheckpoint(k, _ IndexKey, d uint32)            { s.add(k, d, false) }
func (s *keySink) AddPoint(k, _ IndexKey, d uint32, branch bool)    { s.add(k, d, branch) }
func (s *keySink) RemoveCheckpoint(k, _ IndexKey, d uint32)         { s.remove(k, d, false) }
func (s *keySink) RemovePoint(k, _ IndexKey, d uint32, branch bool) { s.remove(k, d, branch) }
func (s *keySink) SetBranch(k, _ IndexKey, d uint32)                { s.branches[HeldKey{k, d}]++ }
func (s *keySink) SetExtent(k, _ IndexKey, d uint32, x Extent)      { s.extents[HeldKey{k, d}] = x }
func (s *keySink) Reset() {
	for k := range s.held {
		s.removed = append(s.removed, k.DepthTokens)
	}
	clear(s.held)
	clear(s.branches)
	clear(s.extents)
}

// news returns the depths added and removed since the last call.
func (s *keySink) news() (added, removed []uint32) {
	added, removed = s.added, s.removed
	s.added, s.removed = nil, nil
	return added, removed
}

// lineTable is a table of one long prefix. Nobody compares tokens: chain values
// are the depths.
type lineTable struct{ blockTokens uint32 }

func (c lineTable) PlaceOf(id uint32) (parent, endTokens uint32) { return id - 1, id * c.blockTokens }

func (c lineTable) PointOf(id uint32) prefix.Chain { return prefix.Chain(id * c.blockTokens) }

func (c lineTable) CheckpointsIn(id uint32, dst []Checkpoint) []Checkpoint {
	for d := nextCheckpoint((id - 1) * c.blockTokens); d <= id*c.blockTokens; d += prefix.ChunkTokens {
		dst = append(dst, Checkpoint{DepthTokens: d, Chain: prefix.Chain(d)})
	}
	return dst
}

func (c lineTable) DomainOf(uint16) prefix.Domain { return prefix.Domain{Model: "m"} }

// starTable is a table of blocks that each begin a prompt.
type starTable struct{ blockTokens uint32 }

func (c starTable) PlaceOf(uint32) (parent, endTokens uint32) { return 0, c.blockTokens }

func (c starTable) PointOf(id uint32) prefix.Chain { return prefix.Chain(uint64(id) << 32) }

func (c starTable) CheckpointsIn(id uint32, dst []Checkpoint) []Checkpoint {
	for d := uint32(prefix.ChunkTokens); d <= c.blockTokens; d += prefix.ChunkTokens {
		dst = append(dst, Checkpoint{DepthTokens: d, Chain: prefix.Chain(uint64(id)<<32 | uint64(d))})
	}
	return dst
}

func (c starTable) DomainOf(uint16) prefix.Domain { return prefix.Domain{Model: "m"} }

// placed is a table whose blocks are where an encoder was told that they are.
type placed struct {
	Blocks
	told map[uint32]Block
}

func (p placed) PlaceOf(id uint32) (parent, endTokens uint32) {
	b := p.told[id]
	return b.Parent, b.EndTokens
}

// follower is an encoder with a decoder that gets every frame.
type follower struct {
	*testing.T
	*Encoder
	table placed
	d     *Decoder
	sink  *keySink
	now   time.Time
}

func follow(t *testing.T, o Options) *follower {
	t.Helper()
	o.Key, o.Epoch = testKey, 9
	table := placed{o.Blocks, map[uint32]Block{}}
	o.Blocks = table
	f := &follower{T: t, Encoder: NewEncoder(o), table: table, sink: newKeySink(), now: begin}
	f.d = NewDecoder(f.sink)
	for _, b := range f.Snapshot() {
		f.take(b)
	}
	return f
}

func (f *follower) Attached(b Block) {
	f.table.told[b.ID] = b
	f.Encoder.Attached(b)
}

func followLine(t *testing.T, o Options) *follower {
	o.Blocks = lineTable{16}
	return follow(t, o)
}

func (f *follower) take(b []byte) {
	f.Helper()
	if got, err := f.d.Apply(b); err != nil || got != Applied && got != Snapshotting {
		f.Fatalf("%v, %v", got, err)
	}
}

// tick lets a second pass and returns what the frame, if any, added and removed.
func (f *follower) tick() (added, removed []uint32) {
	f.Helper()
	f.now = f.now.Add(time.Second)
	if b := f.Delta(f.now); b != nil {
		f.take(b)
	}
	return f.sink.news()
}

func (f *follower) want(name string, added, removed []uint32, wantAdded, wantRemoved []uint32) {
	f.Helper()
	if !slices.Equal(added, wantAdded) || !slices.Equal(removed, wantRemoved) {
		f.Errorf("%s: added %v, removed %v, want %v and %v", name, added, removed, wantAdded, wantRemoved)
	}
}

// expect lets a second pass and checks what is told then.
func (f *follower) expect(name string, added ...uint32) {
	f.Helper()
	got, removed := f.tick()
	f.want(name, got, removed, added, nil)
}

// store attaches blocks from..to of a line as one store event.
func (f *follower) store(from, to uint32) {
	t := f.table.Blocks.(lineTable).blockTokens
	for id := from; id <= to; id++ {
		f.Attached(Block{ID: id, Parent: id - 1, StartTokens: (id - 1) * t, EndTokens: id * t, Usable: true})
	}
	f.StoreEnded(to)
}

// detach detaches blocks from..to of a line, from > to.
func (f *follower) detach(from, to uint32) {
	for id := from; id >= to; id-- {
		f.Detached(id)
	}
}

// told are the depths told, ascending.
func (f *follower) told() (out []uint32) {
	f.EachKey(func(k HeldKey, _ Extent, _ bool) { out = append(out, k.DepthTokens) })
	slices.Sort(out)
	return out
}

// churn stores and drops prompts of several lengths that each begin anew.
func churn(f *follower, rng *rand.Rand, prompts int) {
	for range prompts {
		id := 1 + rng.Uint32N(50)*1000
		if int(id) < len(f.nodes) && f.nodes[id] != 0 {
			last := id
			for int(last+1) < len(f.nodes) && f.nodes[last+1] != 0 {
				last++
			}
			for ; last >= id; last-- {
				f.Detached(last)
			}
		}
		n := 32 + rng.Uint32N(600)
		for k := range n {
			b := Block{ID: id + k, Parent: id + k - 1, StartTokens: k * 16, EndTokens: (k + 1) * 16, Usable: true}
			if k == 0 {
				b.Parent = 0
			}
			f.Attached(b)
		}
		f.StoreEnded(id + n - 1)
	}
}

// manyTable is a table of 1,000 lines of up to 1,000 blocks of 16 tokens.
type manyTable struct{}

type constantTable struct{}
