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

// watched is what a recording is held to between its requests.
type watched struct {
	asked, equal, short int
}

// promptsPerMoment bounds the prompts that are asked for after each event; all
// get their turn.
const promptsPerMoment = 12

// compare asks table and index for prompts of the recording and holds them to
// each other: the index never says more; it says as much where the agent named
// the prefix that the table knows, and only there may it say less.
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
				continue
			}
			w.short++
			keyer := prefix.NewKeyer(clusterKey, prefix.Domain{Model: p.model, Adapter: adapter, Salt: r.salt})
			if named(names, r.tokens, table, keyer) && !k.table.Windowed() {
				return fmt.Errorf("request %d: the index says %d, the table %d, which has a name", r.number, index, table)
			}
		}
	}
	return nil
}

// watch plays a recording moment by moment.
func watch(p *player) (w watched, err error) {
	var moments []float64
	for _, k := range p.ranks {
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
				w, err := watch(s.player(t))
				if err != nil {
					t.Error(err)
				}
				t.Logf("%+v", w)
				all.asked, all.equal, all.short = all.asked+w.asked, all.equal+w.equal, all.short+w.short
			})
		}
	}
	each(streamsIn(t, "testdata"))
	if all.equal < 1000 || all.short < 10 {
		t.Errorf("%+v: too few to tell anything", all)
	}
	for _, engine := range []string{vllmFull, sglangFull} {
		t.Run("full "+engine, func(t *testing.T) { each(streamsIn(t, fixtures(t, engine))) })
	}
}

// An index that misses an eviction, and one that misses a name, are noticed.
func TestComparisonWouldNotice(t *testing.T) {
	s := stream{name: "dup-one", frames: []string{"testdata/dup-one.frames.jsonl"}, requests: "testdata/dup-one.requests.jsonl"}
	for name, spoil := range map[string]func(p *player){
		"eviction": func(p *player) {
			k := p.ranks[0]
			k.table.Listen(deaf{k.encoder})
		},
		"name": func(p *player) {
			p.name = func(probe *prefix.Probe, tokens []uint32, _ *prefix.Keyer) {
				probe.ResetTokens(tokens, prefix.NewKeyer(prefix.ClusterKey{9}, prefix.Domain{}))
			}
		},
	} {
		p := s.player(t)
		spoil(p)
		if w, err := watch(p); err == nil {
			t.Errorf("%s: nothing noticed (%+v)", name, w)
		}
	}
}

// deaf hears of no eviction.
type deaf struct{ *summary.Encoder }

func (deaf) Detached(uint32) {}
