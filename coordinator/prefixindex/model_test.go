package prefixindex

import (
	"maps"
	"math/bits"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"
)

// A tree of text stands for all prompts: an edge is a stretch of tokens that
// nothing leaves but at its end or, for its children, at any multiple of step.
type edge struct {
	id         int // 1 to 255
	parent     *edge
	start, end uint32
}

const step = 16

// text is a prefix of some prompt: what ends at a depth on an edge.
type text struct {
	on    *edge
	depth uint32
}

// at is the prefix of t that is depth tokens long.
func (t text) at(depth uint32) text {
	e := t.on
	for depth <= e.start && e.parent != nil {
		e = e.parent
	}
	return text{e, depth}
}

// isPrefixOf compares texts, not keys.
func (t text) isPrefixOf(other text) bool {
	return t.depth <= other.depth && other.at(t.depth) == t
}

// key names a text. Those of different texts of the same length differ in the
// bits that fingerprints are made of.
func (t text) key() prefix.Key {
	return prefix.Key(uint64(t.on.id)<<56 | uint64(t.on.id)<<48 | uint64(t.on.id)<<40 | uint64(t.depth))
}

// known lists what is listed of a text: all checkpoints and its end.
func (t text) known() []text {
	var out []text
	for d := uint32(prefix.ChunkTokens); d <= t.depth; d += prefix.ChunkTokens {
		out = append(out, t.at(d))
	}
	if t.depth%prefix.ChunkTokens != 0 {
		out = append(out, t)
	}
	return out
}

func (t text) keys() (keys []prefix.Key, depths []uint32) {
	for _, k := range t.known() {
		keys, depths = append(keys, k.key()), append(depths, k.depth)
	}
	return keys, depths
}

// name is a text as the index is told of it.
func (t text) name() name {
	var up summary.IndexKey
	d := uint32(prefix.ChunkTokens)
	for ; d < t.depth; d += prefix.ChunkTokens {
		up = summary.CheckpointKey(up, d, t.at(d).key())
	}
	if t.depth%prefix.ChunkTokens == 0 {
		return name{summary.CheckpointKey(up, t.depth, t.key()), up, t.depth}
	}
	return name{summary.PointKey(up, t.depth, t.key()), up, t.depth}
}

// probe asks for a text followed by more tokens that nobody holds.
func (t text) probe(p *prefix.Probe, more uint32) *prefix.Probe {
	var checkpoints []prefix.Key
	points := map[uint32]prefix.Key{}
	tail := &edge{id: 255, parent: t.on, start: t.depth, end: t.depth + more}
	whole := text{tail, tail.end}
	for d := uint32(step); d <= whole.depth; d += step {
		at := whole.at(d)
		if d <= t.depth {
			at = t.at(d)
		}
		if d%prefix.ChunkTokens == 0 {
			checkpoints = append(checkpoints, at.key())
		} else {
			points[d] = at.key()
		}
	}
	p.ResetKeys(int(whole.depth), checkpoints, points)
	return p
}

// forest draws a tree.
func forest(intn func(int) int, edges int) []*edge {
	all := []*edge{{id: 1, end: step * uint32(1+intn(100))}}
	for id := 2; id <= edges; id++ {
		var up *edge
		at := uint32(0)
		if k := intn(len(all) + 1); k < len(all) {
			up = all[k]
			at = up.start + step*uint32(1+intn(int(up.end-up.start)/step))
		}
		all = append(all, &edge{id: id, parent: up, start: at, end: at + step*uint32(1+intn(100))})
	}
	return all
}

// anyText draws a text that ends on an edge.
func anyText(intn func(int) int, all []*edge) text {
	e := all[intn(len(all))]
	return text{e, e.start + step*uint32(1+intn(int(e.end-e.start)/step))}
}

// model is what the index should know: plain sets, built from the operations.
type model struct {
	workers map[WorkerID]*modelWorker
	search  *Searcher // of the index that is compared
}

type modelWorker struct {
	listed     map[text]int
	extents    map[text]summary.Extent
	claims     map[uint64]text
	unverified bool
}

func newModel() *model { return &model{workers: map[WorkerID]*modelWorker{}} }

func (m *model) worker(id WorkerID) *modelWorker {
	w := m.workers[id]
	if w == nil {
		w = &modelWorker{listed: map[text]int{}, extents: map[text]summary.Extent{}, claims: map[uint64]text{}}
		m.workers[id] = w
	}
	return w
}

func (w *modelWorker) isPredicted(t text) bool {
	for _, c := range w.claims {
		if t.isPrefixOf(c) && (t == c || t.depth%prefix.ChunkTokens == 0) {
			return true
		}
	}
	return false
}

// match is what the worker holds of a prompt.
func (w *modelWorker) match(prompt text) (Reuse, bool) {
	for d := prompt.depth; d > 0; d -= step {
		t := prompt.at(d)
		listed, predicted := w.listed[t] > 0, w.isPredicted(t)
		if !listed && !predicted {
			continue
		}
		r := Reuse{Tokens: d, GPUTokens: d, HostTokens: d, Predicted: !listed, Unverified: listed && w.unverified}
		if e, ok := w.extents[t]; ok && listed {
			r.Tokens, r.GPUTokens, r.HostTokens = e.UsableTokens, min(e.GPUTokens, e.UsableTokens), min(e.HostTokens, e.UsableTokens)
		}
		return r, r.Tokens > 0
	}
	return Reuse{}, false
}

// ask searches and returns the matches by worker. It fails if a worker comes
// twice, the order is not deepest first, or a guess is below what is held.
func ask(t interface{ Fatalf(string, ...any) }, s *Searcher, p *prefix.Probe) map[WorkerID]Reuse {
	out := map[WorkerID]Reuse{}
	groups := s.Search(p)
	for i, g := range groups {
		if i > 0 && g.Tokens > groups[i-1].Tokens {
			t.Fatalf("group %d of %d tokens after one of %d", i, g.Tokens, groups[i-1].Tokens)
		}
		if g.Workers.Len() == 0 || g.Tokens == 0 {
			t.Fatalf("group %+v is empty", g)
		}
		if g.LikelyTokens < g.Tokens || g.HostTokens > g.Tokens || g.GPUTokens > g.HostTokens || int(g.LikelyTokens) > p.PromptTokens() {
			t.Fatalf("%+v", g.Reuse)
		}
		r := g.Reuse
		r.LikelyTokens = 0
		for w := range g.Workers.All {
			if _, dup := out[w]; dup || !g.Workers.Has(w) {
				t.Fatalf("worker %d twice", w)
			}
			out[w] = r
		}
	}
	return out
}

// compare checks every worker's match of a prompt, and both ways of searching.
func (m *model) compare(t interface{ Fatalf(string, ...any) }, x *Index, p *prefix.Probe, prompt text, more uint32) {
	want := map[WorkerID]Reuse{}
	for id, w := range m.workers {
		if r, ok := w.match(prompt); ok {
			want[id] = r
		}
	}
	prompt.probe(p, more)
	if m.search == nil {
		m.search = x.NewSearcher()
	}
	s := m.search
	s.Exact = true
	got := ask(t, s, p)
	if !maps.Equal(got, want) {
		t.Fatalf("prompt of %d tokens on edge %d:\n got %v\nwant %v", prompt.depth, prompt.on.id, got, want)
	}
	s.Exact = false
	fast := ask(t, s, p)
	// Extents drawn at random do not rise with depth, as real ones do.
	for id, r := range want {
		if f := fast[id]; !m.workers[id].hasExtents() && (f.Tokens > r.Tokens || f.Tokens < r.Tokens/prefix.ChunkTokens*prefix.ChunkTokens) {
			t.Fatalf("prompt of %d tokens on edge %d, worker %d: %d tokens found fast, %d exactly", prompt.depth, prompt.on.id, id, f.Tokens, r.Tokens)
		}
	}
	for id := range fast {
		if _, ok := want[id]; !ok && !m.workers[id].hasExtents() {
			t.Fatalf("worker %d was found by the fast search only", id)
		}
	}
}

func (w *modelWorker) hasExtents() bool { return len(w.extents) > 0 }

// audit checks everything that the index keeps against the model and itself.
func (m *model) audit(t interface{ Fatalf(string, ...any) }, x *Index) {
	m.auditListings(t, x) // before the sweep, which it must not need
	x.sweepAll()
	m.auditListings(t, x)
	type counts map[uint32]int // by offset
	wantPoints := map[summary.IndexKey]counts{}
	keys, predictedKeys, partialKeys := map[summary.IndexKey]bool{}, map[summary.IndexKey]bool{}, map[summary.IndexKey]bool{}
	details := 0
	for id, w := range m.workers {
		all := map[text]bool{}
		for k, n := range w.listed {
			if n > 0 {
				all[k] = true
			}
		}
		predictions := map[text]int{}
		for _, c := range w.claims {
			for _, k := range c.known() {
				all[k] = true
				predictions[k]++
			}
		}
		for k := range all {
			n := k.name()
			listed, predicted := x.Holds(id, n.key, n.parent, n.depth)
			if listed != (w.listed[k] > 0) || predicted != (w.listed[k] == 0) {
				t.Fatalf("worker %d, %+v: listed %v, predicted %v", id, k, listed, predicted)
			}
			keys[n.key] = true
			if predicted {
				predictedKeys[n.key] = true
			}
			_, partial := w.extents[k]
			if partial {
				partialKeys[n.key] = true
			}
			if w.listed[k] != 1 || predictions[k] > 0 || partial {
				details++
			}
			if n.isPoint() {
				if wantPoints[n.parent] == nil {
					wantPoints[n.parent] = counts{}
				}
				wantPoints[n.parent][n.offset()]++
			}
		}
		if got := x.WorkerKeys(id); got != len(all) {
			t.Fatalf("worker %d has %d keys, want %d", id, got, len(all))
		}
	}
	if st := x.Stats(); st.Keys != len(keys) || st.Predicted != len(predictedKeys) || st.Workers != len(m.workers) || st.Unswept != 0 {
		t.Fatalf("%+v, want %d keys, %d predicted, %d workers", st, len(keys), len(predictedKeys), len(m.workers))
	}
	blocks := 0
	auditTable := func(tab *table, want int, each func(info uint32, at spot)) {
		n := 0
		if tab.dir == nil {
			if want > 0 {
				t.Fatalf("a table without segments, want %d entries", want)
			}
			return
		}
		for number := range tab.dir {
			s, v := &tab.dir[number], tab.dir[number].view()
			used := uint32(0)
			for i, word := range v.words() {
				if word == 0 {
					continue
				}
				used++
				e := x.full.entryOf(word)
				if _, short := e.short(); short == (word&kindOf == kindBlock) {
					t.Fatalf("entry %+v is in the word %x", e, word)
				}
				if word&kindOf == kindBlock {
					blocks++
				}
				if e.members.hasBlock() {
					blocks++
				}
				if e.info&(infoPoint|infoList) == infoList {
					blocks++
				}
				each(e.info, spot{segment: uint32(number), tag: word & tagMask})
				if at, _ := v.find(word, tagMask); at != i {
					t.Fatalf("slot %d is found at %d", i, at)
				}
			}
			if used != s.used || used > 0 && 100*int(used) > maxLoad*v.slots {
				t.Fatalf("segment with %d of %d slots in use says %d", used, v.slots, s.used)
			}
			n += int(used)
		}
		if n != want || tab.entries != want {
			t.Fatalf("table of %d entries says %d, want %d", n, tab.entries, want)
		}
	}
	auditTable(&x.predicted, len(predictedKeys), func(uint32, spot) {})
	auditTable(&x.partial, len(partialKeys), func(uint32, spot) {})
	auditTable(&x.held, len(keys), func(info uint32, at spot) {
		if p, _ := x.predicted.at(at); (p.i >= 0) != (info&infoPredicted != 0) {
			t.Fatalf("flag of predictions is wrong")
		}
		if p, _ := x.partial.at(at); (p.i >= 0) != (info&infoPartial != 0) {
			t.Fatalf("flag of extents is wrong")
		}
	})
	auditPoints := func(info uint32, want counts) {
		got := counts{}
		if info&infoList == 0 {
			for i := range inWord {
				if o := info >> (offsetBits * i) & offsetMask; o != 0 {
					got[o]++
				}
			}
		} else {
			l := x.points.list(info)
			for i := range l.len() {
				got[itemOffset(l.item(i))] = int(itemCount(l.item(i)))
			}
			for i := range hints {
				if h := l.hint(i); h != 0 && got[h] == 0 {
					t.Fatalf("hint at an offset that is not listed")
				}
			}
		}
		if !maps.Equal(got, want) {
			t.Fatalf("points %v, want %v", got, want)
		}
	}
	blocks++
	_, root := x.rootPlace()
	if root.info&infoList != 0 {
		blocks++
	}
	auditPoints(root.info, wantPoints[0])
	for k := range keys {
		if at, e := x.held.at(x.checkpointSpot(k)); at.i >= 0 && e.info&infoPoint == 0 {
			auditPoints(e.info, wantPoints[k])
		}
	}
	lent := 0
	for i := range x.slab.classes {
		lent += x.slab.classes[i].taken - len(x.slab.classes[i].unused)
		lent += x.full.slab.classes[i].taken - len(x.full.slab.classes[i].unused)
	}
	if lent != blocks {
		t.Fatalf("%d blocks lent, %d in use", lent, blocks)
	}
	gotDetails, used := 0, 0
	for i, w := range x.slots.used {
		used += bits.OnesCount64(w)
		if p := x.slots.pages[i].Load(); p != nil {
			for j := range p.details {
				if d := p.details[j].Load(); d != nil {
					gotDetails += int(d.used)
				}
			}
		}
	}
	if gotDetails != details || used != len(m.workers) {
		t.Fatalf("%d details, want %d; %d slots, want %d", gotDetails, details, used, len(m.workers))
	}
}

func TestModelTellsPrefixes(t *testing.T) {
	a := &edge{id: 1, end: 160}
	b := &edge{id: 2, parent: a, start: 80, end: 400}
	for _, c := range []struct {
		t, other text
		want     bool
	}{
		{text{a, 80}, text{b, 96}, true},
		{text{a, 96}, text{b, 400}, false},
		{text{b, 96}, text{b, 96}, true},
		{text{b, 112}, text{b, 96}, false},
		{text{b, 96}, text{a, 160}, false},
	} {
		if got := c.t.isPrefixOf(c.other); got != c.want {
			t.Errorf("%+v of %+v: %v", c.t, c.other, got)
		}
	}
}
