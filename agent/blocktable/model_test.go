package blocktable

import (
	"fmt"
	"hash/fnv"
	"testing"

	"waypost/gossip/prefix"
	"waypost/gossip/summary"

	"pgregory.net/rapid"
)

// path is a prefix as the naive model names it: a domain and whole blocks.
type path struct {
	salt   string
	tokens string // one byte per token
	marked bool   // an opaque block lies in it
}

func (p path) hash() uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s|%v|%s", p.salt, p.marked, p.tokens)
	return h.Sum64()
}

func (p path) ids(from int) []uint32 {
	var out []uint32
	for i := from; i < len(p.tokens); i++ {
		out = append(out, uint32(p.tokens[i]))
	}
	return out
}

type copyKey struct {
	medium Medium
	group  int32
	hash   uint64
}

// model is an obvious implementation: counts per hash, prefixes checked block
// by block. It never forgets what a hash means.
type model struct {
	block  int
	window int  // blocks that group 0 must hold; 0: no window group
	follow bool // host memory counts too
	count  map[copyKey]int
	means  map[uint64]path
}

func (m *model) whole() int32 {
	if m.window > 0 {
		return 1
	}
	return 0
}

func (m *model) holds(p path) bool {
	return m.inGPU(p) || m.follow && m.window == 0 && m.count[copyKey{MediumCPU, m.whole(), p.hash()}] > 0
}

func (m *model) inGPU(p path) bool { return m.count[copyKey{MediumGPU, m.whole(), p.hash()}] > 0 }

func (m *model) cut(p path, blocks int) path {
	p.tokens = p.tokens[:blocks*m.block]
	return p
}

func (m *model) attached(p path) bool {
	if p.marked {
		return false
	}
	for k := 1; k <= len(p.tokens)/m.block; k++ {
		if !m.holds(m.cut(p, k)) {
			return false
		}
	}
	return true
}

func (m *model) usable(p path) bool {
	blocks := len(p.tokens) / m.block
	for k := max(1, blocks-m.window+1); m.window > 0 && k <= blocks; k++ {
		if m.count[copyKey{MediumGPU, 0, m.cut(p, k).hash()}] == 0 {
			return false
		}
	}
	return true
}

func (m *model) match(p path) int {
	for k := (len(p.tokens) - 1) / m.block; k > 0; k-- {
		if q := m.cut(p, k); m.attached(q) && m.usable(q) {
			return k * m.block
		}
	}
	return 0
}

// watcher keeps what a listener was told and checks the order it was told in.
type watcher struct {
	t      rapid.TB
	table  *Table
	blocks map[uint32]summary.Block
	below  map[uint32]int
}

func (w *watcher) Attached(b summary.Block) {
	if _, ok := w.blocks[b.ID]; ok || b.ID == 0 {
		w.t.Fatalf("block %d attached twice", b.ID)
	}
	start := uint32(0)
	if b.Parent != 0 {
		p, ok := w.blocks[b.Parent]
		if !ok {
			w.t.Fatalf("block %d attached below %d, which is not", b.ID, b.Parent)
		}
		start = p.EndTokens
	}
	if b.StartTokens != start || b.EndTokens <= start {
		w.t.Fatalf("block %d covers (%d,%d] below a parent that ends at %d", b.ID, b.StartTokens, b.EndTokens, start)
	}
	w.blocks[b.ID] = b
	w.below[b.Parent]++
}

func (w *watcher) Detached(id uint32) {
	b, ok := w.blocks[id]
	if !ok || w.below[id] != 0 {
		w.t.Fatalf("block %d detached: attached %v, children %d", id, ok, w.below[id])
	}
	w.table.PointOf(id) // must still be answerable
	w.below[b.Parent]--
	delete(w.blocks, id)
}

func (w *watcher) UsableChanged(id uint32, usable bool) {
	b, ok := w.blocks[id]
	if !ok || b.Usable == usable {
		w.t.Fatalf("block %d usable %v: attached %v", id, usable, ok)
	}
	b.Usable = usable
	w.blocks[id] = b
}

func (w *watcher) TierChanged(id uint32, tier summary.Tier) {
	b, ok := w.blocks[id]
	if !ok || b.Tier == tier {
		w.t.Fatalf("block %d on tier %s: attached %v", id, tier, ok)
	}
	b.Tier = tier
	w.blocks[id] = b
}

func (w *watcher) StoreEnded(id uint32) {
	if _, ok := w.blocks[id]; !ok {
		w.t.Fatalf("store ended at %d, which is not attached", id)
	}
}

func (w *watcher) Cleared() {
	clear(w.blocks)
	clear(w.below)
}

func (w *watcher) listen(t *Table) {
	w.table, w.blocks, w.below = t, map[uint32]summary.Block{}, map[uint32]int{}
	t.Listen(w)
}

func TestAgainstNaiveModel(t *testing.T) {
	for _, window := range []int{0, 1, 2} {
		for _, follow := range []bool{false, true} {
			if follow && window > 1 {
				continue // no more than with one block
			}
			t.Run(fmt.Sprintf("window blocks %d, host followed %v", window, follow), func(t *testing.T) {
				rapid.Check(t, func(t *rapid.T) { checkModel(t, window, follow) })
			})
		}
	}
}

func checkModel(t *rapid.T, window int, follow bool) {
	const block = 2
	m := &model{block: block, window: window, follow: follow, count: map[copyKey]int{}, means: map[uint64]path{}}
	table := New(Options{Model: "m", FollowHost: follow})
	if rapid.Bool().Draw(t, "remembered") {
		NewHistory(table)
	}
	w := &watcher{t: t}
	w.listen(table)
	if window > 0 || follow {
		// Both groups are known before anything is stored, as after a clear.
		for _, e := range m.stores(path{tokens: "ab"}, 0, 1) {
			table.Apply(&e)
		}
		table.Apply(&Event{Op: OpClear})
		clear(m.count)
	}
	for range rapid.IntRange(1, 60).Draw(t, "steps") {
		m.step(t, table)
		m.compare(t, table, w)
	}
	again := &watcher{t: t}
	again.listen(table)
	m.compare(t, table, again)
}

func drawPath(t *rapid.T, m *model) path {
	blocks := rapid.IntRange(1, 6).Draw(t, "blocks")
	p := path{salt: rapid.SampledFrom([]string{"", "s"}).Draw(t, "salt"), marked: rapid.IntRange(0, 9).Draw(t, "mark") == 0}
	for range blocks * m.block {
		p.tokens += rapid.SampledFrom([]string{"a", "b"}).Draw(t, "token")
	}
	return p
}

// stores gives the events of storing blocks (from, to] of a path in every group.
func (m *model) stores(p path, from, to int) []Event {
	e := m.storeOf(p, from, to)
	for _, h := range e.Hashes {
		m.count[copyKey{MediumGPU, e.Group, h}]++
	}
	events := []Event{e}
	if m.window > 0 {
		swa := e
		swa.Group, swa.Spec, swa.WindowTokens = 0, SpecSlidingWindow, int32(m.window*m.block)
		// The engine leaves masked blocks out of a window group's list.
		swa.Hashes = e.Hashes[len(e.Hashes)-min(m.window, len(e.Hashes)):]
		for _, h := range swa.Hashes {
			m.count[copyKey{MediumGPU, 0, h}]++
		}
		events = []Event{swa, e}
	}
	return events
}

// storeOf is the event of storing blocks (from, to] of a path in the group that
// holds whole prefixes.
func (m *model) storeOf(p path, from, to int) Event {
	e := Event{Op: OpStore, Spec: SpecFull, Group: m.whole(), BlockTokens: int32(m.block), Tokens: m.cut(p, to).ids(from * m.block)}
	if from > 0 {
		e.HasParent, e.Parent = true, m.cut(p, from).hash()
	} else {
		e.Salt = p.salt
	}
	for k := from + 1; k <= to; k++ {
		e.Hashes = append(e.Hashes, m.cut(p, k).hash())
		mark := uint64(0)
		if p.marked && k == 1 {
			mark = 7
		}
		e.Marks = append(e.Marks, mark)
	}
	return e
}

func (m *model) step(t *rapid.T, table *Table) {
	switch rapid.IntRange(0, 11).Draw(t, "op") {
	case 0:
		medium := rapid.SampledFrom([]Medium{MediumGPU, MediumGPU, MediumCPU}).Draw(t, "cleared")
		table.Apply(&Event{Op: OpClear, Medium: medium})
		for k := range m.count {
			if k.medium == medium {
				delete(m.count, k)
			}
		}
	case 1: // another tier, told by hash only, or in full where it is followed
		p := drawPath(t, m)
		if m.follow {
			to := len(p.tokens) / m.block
			from := rapid.IntRange(0, to-1).Draw(t, "from")
			e := m.storeOf(p, from, to)
			e.Medium = MediumCPU
			for _, h := range e.Hashes {
				m.count[copyKey{MediumCPU, e.Group, h}]++
			}
			table.Apply(&e)
			break
		}
		table.Apply(&Event{Op: OpStore, Medium: MediumCPU, Hashes: []uint64{p.hash()}})
		m.count[copyKey{MediumCPU, 0, p.hash()}]++
	case 2, 3, 4, 5, 6: // removal, mostly of something held
		medium, group := MediumGPU, m.whole()
		switch rapid.IntRange(0, 5).Draw(t, "where") {
		case 0:
			if medium = MediumCPU; !m.follow {
				group = 0
			}
		case 1:
			group = 0
		}
		p := drawPath(t, m)
		k := copyKey{medium, group, p.hash()}
		table.Apply(&Event{Op: OpRemove, Medium: medium, Group: group, Hashes: []uint64{k.hash, 12345}})
		if m.count[k] > 0 {
			m.count[k]--
		}
	default:
		p := drawPath(t, m)
		to := len(p.tokens) / m.block
		from := rapid.IntRange(0, to-1).Draw(t, "from")
		for _, e := range m.stores(p, from, to) {
			table.Apply(&e)
		}
	}
}

func (m *model) compare(t *rapid.T, table *Table, w *watcher) {
	var copies, attached int
	type seen struct {
		usable bool
		tier   summary.Tier
	}
	want := map[string]seen{}
	for _, salt := range []string{"", "s"} {
		var visit func(p path)
		visit = func(p path) {
			if len(p.tokens) > 6*m.block {
				return
			}
			if len(p.tokens) > 0 {
				if !m.attached(p) {
					return
				}
				attached++
				s := seen{usable: m.usable(p)}
				if !m.inGPU(p) {
					s.tier = summary.TierHost
				}
				want[salt+"|"+p.tokens] = s
			}
			for _, x := range []string{"aa", "ab", "ba", "bb"} {
				visit(path{salt: salt, tokens: p.tokens + x})
			}
		}
		visit(path{salt: salt})
	}
	for k, n := range m.count {
		if k.medium == MediumGPU {
			copies += n
		}
	}
	if table.Attached() != attached || len(w.blocks) != attached || table.Copies() != copies {
		t.Fatalf("attached %d, told %d, want %d; copies %d, want %d", table.Attached(), len(w.blocks), attached, table.Copies(), copies)
	}
	for id, b := range w.blocks {
		tokens, _ := table.gather(nil, id, 0)
		text := table.DomainOf(b.Domain).Salt + "|"
		for _, x := range tokens {
			text += string(rune(x))
		}
		s, ok := want[text]
		if !ok || s.usable != b.Usable || s.tier != b.Tier {
			t.Fatalf("told %q usable %v tier %s, want attached %v usable %v tier %s", text, b.Usable, b.Tier, ok, s.usable, s.tier)
		}
		if got, want := table.PointOf(id), prefix.Point(0, tokens); got != want {
			t.Fatalf("point of %q is %x, want %x", text, got, want)
		}
	}
	for range 3 {
		p := drawPath(t, m)
		p.marked = false
		if got, want := table.Match(p.ids(0), "", p.salt), m.match(p); got != want {
			t.Fatalf("match of %q is %d, want %d", p.salt+"|"+p.tokens, got, want)
		}
	}
}
