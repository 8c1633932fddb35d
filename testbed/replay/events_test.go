package replay

import (
	"fmt"
	"slices"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// names are the prefixes that a rank's agent has named by now.
func (r *rank) names() map[summary.HeldKey]bool {
	out := map[summary.HeldKey]bool{}
	r.encoder.EachKey(func(k summary.HeldKey, _ summary.Extent, _ bool) { out[k] = true })
	return out
}

// named says whether the first n tokens of a prompt are among some names.
func named(names map[summary.HeldKey]bool, tokens []uint32, n int, k *prefix.Keyer) bool {
	var p prefix.Probe
	p.ResetTokens(tokens, k)
	var key summary.IndexKey
	for j := 1; j <= n/prefix.ChunkTokens; j++ {
		c, _ := p.Checkpoint(j)
		key = summary.CheckpointKey(key, uint32(j*prefix.ChunkTokens), c)
	}
	if n%prefix.ChunkTokens != 0 {
		c, _ := p.At(n)
		key = summary.PointKey(key, uint32(n), c)
	}
	return names[summary.HeldKey{Key: key, DepthTokens: uint32(n)}]
}

// held are the prefixes that a rank's table holds unbroken, wherever a match may
// end, by how far they reach.
type held struct {
	*summary.Encoder
	rank   *rank
	blocks map[uint32]heldPrefix
	count  map[heldPrefix]int
}

type heldPrefix struct {
	depth  uint32
	chain  prefix.Chain
	domain prefix.Domain
}

func newHeld(r *rank) *held {
	h := &held{Encoder: r.encoder, rank: r}
	h.forget()
	return h
}

func (h *held) forget() { h.blocks, h.count = map[uint32]heldPrefix{}, map[heldPrefix]int{} }

func (h *held) Attached(b summary.Block) {
	p := heldPrefix{b.EndTokens, h.rank.table.PointOf(b.ID), h.rank.table.DomainOf(b.Domain)}
	h.blocks[b.ID] = p
	h.count[p]++
	h.Encoder.Attached(b)
}

func (h *held) Detached(id uint32) {
	p := h.blocks[id]
	if h.count[p]--; h.count[p] == 0 {
		delete(h.count, p)
	}
	delete(h.blocks, id)
	h.Encoder.Detached(id)
}

func (h *held) Cleared() {
	h.forget()
	h.Encoder.Cleared()
}

// longest is how much of a prompt is held but for its last token.
func (h *held) longest(tokens []uint32, of prefix.Domain) (n int) {
	var c prefix.Chain
	for d := 1; d < len(tokens); d++ {
		from := (d - 1) / prefix.ChunkTokens * prefix.ChunkTokens
		at := prefix.Point(c, tokens[from:d])
		if h.count[heldPrefix{uint32(d), at, of}] > 0 {
			n = d
		}
		if d%prefix.ChunkTokens == 0 {
			c = at
		}
	}
	return n
}

// watched is what a recording is held to between its requests.
type watched struct {
	asked, equal, short int
	windowed            int // asked of ranks of which a match cannot end everywhere, and equal
	held                []*held
}

// promptsPerMoment bounds the prompts that are asked for after each event; all
// get their turn.
const promptsPerMoment = 12

// compare asks table and index for prompts of the recording and holds them to
// each other: the index never says more; it says as much where the agent named
// the end of what is held of the prompt, and only elsewhere may it say less. Where
// a match may not end there, both go back to where it may.
func (w *watched) compare(p *player, turn int) error {
	n := len(p.in.requests)
	for rank, k := range p.ranks {
		names := k.names()
		for i := range min(n, promptsPerMoment) {
			r := &p.in.requests[(turn*promptsPerMoment+i)%n]
			adapter := p.adapterOf(r)
			table, index := k.table.Match(r.tokens, adapter, r.salt), p.indexTokens(rank, r, adapter)
			w.asked++
			switch {
			case index > table:
				return fmt.Errorf("request %d: the index says %d, the table %d", r.number, index, table)
			case index == table:
				w.equal++
				if k.table.Windowed() && table > 0 {
					w.windowed++
				}
				continue
			}
			w.short++
			domain, end := prefix.Domain{Model: p.model, Adapter: adapter, Salt: r.salt}, table
			if k.table.Windowed() {
				end = w.held[rank].longest(r.tokens, domain)
			}
			if named(names, r.tokens, end, prefix.NewKeyer(clusterKey, domain)) {
				return fmt.Errorf("request %d: the index says %d, the table %d, and the end at %d has a name", r.number, index, table, end)
			}
		}
	}
	return nil
}

// hearsAll lets a listener hear everything.
func hearsAll(l summary.Listener) summary.Listener { return l }

// watch plays a recording moment by moment. What the tables tell goes through a
// listener that passes it on.
func watch(p *player, through func(summary.Listener) summary.Listener) (w watched, err error) {
	var moments []float64
	for _, k := range p.ranks {
		h := newHeld(k)
		w.held = append(w.held, h)
		k.table.Listen(through(h))
		for _, f := range k.frames {
			moments = append(moments, f.t)
		}
	}
	for i := range p.in.requests {
		moments = append(moments, p.in.requests[i].sent)
	}
	slices.Sort(moments)
	for turn, t := range slices.Compact(moments) {
		if err := p.advance(t); err != nil {
			return w, err
		}
		if err := w.compare(p, turn); err != nil {
			return w, fmt.Errorf("after %.3f s: %w", t, err)
		}
	}
	return w, nil
}

func (s stream) player(t *testing.T) *player {
	t.Helper()
	opened := s.input(t)
	in, err := readRequests(s.requests, opened.Requests.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var frames [][]frame
	for _, f := range opened.Frames {
		one, err := readFrames(f.Name, f.Reader)
		if err != nil {
			t.Fatal(err)
		}
		frames = append(frames, one)
	}
	return newPlayer(byRank(frames), in, (*prefix.Probe).ResetTokens)
}

// After every event of every recording the index never says more of a prompt
// than the block table, and as much wherever what is held of it ends at a
// checkpoint, at the end of a run or at another known point.
func TestIndexAfterEveryEvent(t *testing.T) {
	var all watched
	each := func(streams []stream) {
		for _, s := range streams {
			t.Run(s.name, func(t *testing.T) {
				w, err := watch(s.player(t), hearsAll)
				if err != nil {
					t.Error(err)
				}
				w.held = nil
				t.Logf("%+v", w)
				all.asked, all.equal, all.short, all.windowed = all.asked+w.asked, all.equal+w.equal, all.short+w.short, all.windowed+w.windowed
			})
		}
	}
	each(streamsIn(t, "testdata"))
	if all.equal < 1000 || all.short < 10 || all.windowed < 10 {
		t.Errorf("%+v: too few to tell anything", all)
	}
	for _, engine := range []string{vllmFull, sglangFull} {
		t.Run("full "+engine, func(t *testing.T) { each(streamsIn(t, fixtures(t, engine))) })
	}
}

// An index that misses an eviction, a name or where a match may end is noticed.
func TestComparisonWouldNotice(t *testing.T) {
	s := stream{name: "dup-one", frames: []string{"testdata/dup-one.frames.jsonl"}, requests: "testdata/dup-one.requests.jsonl"}
	otherKey := func(probe *prefix.Probe, tokens []uint32, _ *prefix.Keyer) {
		probe.ResetTokens(tokens, prefix.NewKeyer(prefix.ClusterKey{9}, prefix.Domain{}))
	}
	hybrid := stream{name: "hybrid-two-turns", frames: []string{"testdata/hybrid-two-turns.frames.jsonl"}, requests: "testdata/hybrid-two-turns.requests.jsonl"}
	for name, c := range map[string]struct {
		of      stream
		through func(summary.Listener) summary.Listener
		naming  naming
	}{
		"eviction":         {s, func(l summary.Listener) summary.Listener { return deaf{l} }, nil},
		"name":             {s, hearsAll, otherKey},
		"name of a hybrid": {hybrid, hearsAll, otherKey},
		"usable ends":      {hybrid, func(l summary.Listener) summary.Listener { return useless{l} }, nil},
	} {
		p := c.of.player(t)
		if c.naming != nil {
			p.name = c.naming
		}
		if w, err := watch(p, c.through); err == nil {
			t.Errorf("%s: nothing noticed (%+v)", name, w)
		}
	}
}

// useless hears that a match may end nowhere.
type useless struct{ summary.Listener }

func (u useless) Attached(b summary.Block) {
	b.Usable = false
	u.Listener.Attached(b)
}

func (useless) UsableChanged(uint32, bool) {}

// deaf hears of no eviction.
type deaf struct{ summary.Listener }

func (deaf) Detached(uint32) {}
